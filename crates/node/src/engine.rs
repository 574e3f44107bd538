//! The engine's life.
//!
//! Start: limits, metrics, the volume (its lock makes the engine the only one), the socket, HTTP, accepting.
//! Stop, in this order, so that nobody is promised anything that is then not kept: no new clients (the socket
//! goes while the lock is still ours), requests under way are answered and streams end, HTTP ends, mounts go,
//! gathering ends, the volume is flushed and closed.

use std::path::PathBuf;
use std::sync::Arc;
use std::thread::JoinHandle;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Error, MIB, Result, thread};
use headrace_volume::{Volume, VolumeOptions};
use metrics_exporter_prometheus::PrometheusHandle;
use rustix::event::{PollFd, PollFlags, Timespec, poll};

use crate::listener::{Listener, SOCKET_NAME, raise_open_files};
use crate::metrics;
use crate::node::Node;
use crate::rest::Rest;
use crate::signals::Signals;

/// For all buffers of the engine together. Enough for the largest message and a few batches ahead; little enough
/// for a laptop.
pub const MEMORY_BYTES_DEFAULT: u64 = 256 * MIB;
/// Below this the largest message does not fit.
const MEMORY_BYTES_MIN: u64 = 32 * MIB;
const SEGMENT_FILES_MAX: u64 = 1024;
const TICK_MAX: Duration = Duration::from_secs(5);
const TICK_MIN: Duration = Duration::from_millis(50);
/// What requests under way get at the end, for example the making of a large manifest.
const REQUESTS_PATIENCE: Duration = Duration::from_secs(20);

#[derive(Clone, Debug)]
pub struct EngineOptions {
    pub folder: PathBuf,
    /// Serve all users, each with the own rights. Only root may.
    pub system: bool,
    pub memory_bytes_max: u64,
    /// Leave after so long without clients and mounts.
    pub idle_exit: Option<Duration>,
}

#[derive(Debug)]
pub struct Engine {
    node: Arc<Node>,
    listener: Arc<Listener>,
    accepting: JoinHandle<()>,
    rest: Rest,
    metrics: PrometheusHandle,
}

impl Engine {
    /// Takes the volume and serves it. `Conflict` names the process that serves it already.
    pub fn start(options: EngineOptions) -> Result<Engine> {
        if options.system && !rustix::process::geteuid().is_root() {
            return Err(Error::errno(
                errno::EPERM,
                "only root may serve a volume to all users (--system): without it the volume is served to you",
            ));
        }
        if options.memory_bytes_max < MEMORY_BYTES_MIN {
            return Err(Error::invalid(format!(
                "--memory-bytes {} is too little: an engine needs {MEMORY_BYTES_MIN}",
                options.memory_bytes_max
            )));
        }
        let open_files = raise_open_files();
        let metrics = metrics::install()?;
        let volume = Volume::open(
            &options.folder,
            VolumeOptions {
                memory_bytes_max: options.memory_bytes_max,
                open_files_max: (open_files / 4).min(SEGMENT_FILES_MAX) as usize,
            },
        )?;
        let listener = Arc::new(Listener::bind(&options.folder, options.system)?);
        let node = Arc::new(Node::new(volume, options)?);
        let (rest, http) = Rest::start(Arc::clone(&node), metrics.clone())?;
        let accepting = {
            let (node, listener) = (Arc::clone(&node), Arc::clone(&listener));
            thread::spawn("accept", move || listener.run(&node, &http))?
        };
        tracing::info!(
            volume = %node.volume.id(),
            folder = %node.options.folder.display(),
            pid = std::process::id(),
            system = node.options.system,
            memory_bytes_max = node.options.memory_bytes_max,
            "serving"
        );
        Ok(Engine { node, listener, accepting, rest, metrics })
    }

    pub fn volume(&self) -> &Arc<Volume> {
        &self.node.volume
    }

    pub fn socket(&self) -> PathBuf {
        self.node.options.folder.join(SOCKET_NAME)
    }

    /// From now on a signal stops the engine, and a second one ends the process.
    pub fn stop_on(&self, signals: Signals) -> Result<()> {
        signals.stop_engine(Arc::clone(&self.node))
    }

    pub fn request_stop(&self, why: &str) {
        self.node.request_stop(why);
    }

    /// Blocks until the engine is told to stop, or nobody needs it any more.
    pub fn wait(&self) {
        let idle_exit = self.node.options.idle_exit;
        let tick = idle_exit.map_or(TICK_MAX, |idle| (idle / 4).clamp(TICK_MIN, TICK_MAX));
        let tick = Timespec { tv_sec: tick.as_secs() as i64, tv_nsec: i64::from(tick.subsec_nanos()) };
        while !self.node.is_stopping() {
            let mut fds = [PollFd::new(&self.node.stop, PollFlags::IN)];
            // Whatever ends the wait, everything is looked at again.
            let _ = poll(&mut fds, Some(&tick));
            self.metrics.run_upkeep();
            if self.listener.folder_is_gone() {
                tracing::error!(folder = %self.node.options.folder.display(), "the volume's folder was deleted");
                self.node.request_stop("the volume is gone");
            }
            if idle_exit.is_some_and(|idle_exit| self.node.idle() >= idle_exit) {
                self.node.request_stop("nobody uses this engine");
            }
        }
    }

    /// Stops in order. The error is the volume's: what was written last may not be durable then.
    pub fn stop(self) -> Result<()> {
        self.node.request_stop("told to");
        if self.accepting.join().is_err() {
            tracing::error!("the accepting thread had panicked");
        }
        drop(self.listener);
        self.node.end_clients(REQUESTS_PATIENCE);
        self.rest.stop();
        self.node.mounts.unmount_all();
        self.node.pool.stop();
        self.node.forget_views();
        let closed = self.node.volume.close();
        match &closed {
            Ok(()) => tracing::info!("stopped"),
            Err(error) => tracing::error!(%error, "the volume was not closed cleanly"),
        }
        closed
    }
}
