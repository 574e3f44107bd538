//! What all parts of an engine share: the volume, the gathering threads, the mounts, who is connected.

use std::collections::HashMap;
use std::net::Shutdown;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::net::UnixStream;
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

use headrace_base::ids::SealId;
use headrace_base::time::{self, Timestamp};
use headrace_base::{Error, Kind, Result};
use headrace_format::{FORMAT, message};
use headrace_volume::{Identity, SealedView, Volume};
use serde_bytes::ByteBuf;

use crate::ENGINE_VERSION;
use crate::engine::EngineOptions;
use crate::metrics::{Numbers, resident_bytes};
use crate::mounts::Mounts;
use crate::pool::Pool;
use crate::wake::Wake;

/// Connections at once: each has a thread and a buffer of its own.
const CLIENTS_MAX: usize = 1024;
/// Of them, for root and the engine's own user alone, so that nobody locks out who could help; and what one
/// other user may have.
const CLIENTS_RESERVED: usize = 64;
const CLIENTS_PER_USER_MAX: usize = 256;
/// Sealed views kept open between their uses. Each is a mapped file.
const VIEWS_MAX: usize = 64;

#[derive(Debug)]
pub struct Node {
    pub volume: Arc<Volume>,
    pub options: EngineOptions,
    pub started: Timestamp,
    pub pool: Pool,
    pub mounts: Mounts,
    pub numbers: Numbers,
    streams: AtomicU32,
    clients: Mutex<HashMap<u64, Arc<UnixStream>>>,
    /// Connections of each user that has some; changed under the lock of `clients`.
    clients_of: Mutex<HashMap<u32, usize>>,
    client_left: Condvar,
    last_client: AtomicU64,
    busy_until: Mutex<Instant>,
    views: Mutex<HashMap<SealId, Arc<SealedView>>>,
    /// Rings when the engine is to stop, and stays rung.
    pub stop: Wake,
    stopping: AtomicBool,
}

impl Node {
    pub fn new(volume: Arc<Volume>, options: EngineOptions) -> Result<Node> {
        Ok(Node {
            volume,
            options,
            started: time::wall_now(),
            pool: Pool::new(),
            mounts: Mounts::default(),
            numbers: Numbers::new(),
            streams: AtomicU32::new(0),
            clients: Mutex::default(),
            clients_of: Mutex::default(),
            client_left: Condvar::new(),
            last_client: AtomicU64::new(0),
            busy_until: Mutex::new(time::monotonic_now()),
            views: Mutex::default(),
            stop: Wake::new()?,
            stopping: AtomicBool::new(false),
        })
    }

    pub fn request_stop(&self, why: &str) {
        if !self.stopping.swap(true, Ordering::AcqRel) {
            tracing::info!(why, "stopping");
        }
        self.stop.ring();
    }

    pub fn is_stopping(&self) -> bool {
        self.stopping.load(Ordering::Acquire)
    }

    /// Counts a connection until the answer is dropped. Full when there are too many.
    pub fn enter(self: &Arc<Self>, socket: &Arc<UnixStream>, uid: u32) -> Result<Client> {
        let mut clients = self.clients();
        let mut clients_of = self.clients_of.lock().unwrap_or_else(PoisonError::into_inner);
        let own = clients_of.entry(uid).or_default();
        let trusted = uid == 0 || uid == rustix::process::geteuid().as_raw();
        if !trusted && (*own >= CLIENTS_PER_USER_MAX || clients.len() >= CLIENTS_MAX - CLIENTS_RESERVED) {
            return Err(Error::new(
                Kind::Full,
                format!("user {uid} has {own} connections to this engine: close some"),
            ));
        }
        if clients.len() >= CLIENTS_MAX {
            return Err(Error::new(
                Kind::Full,
                format!("this engine serves {CLIENTS_MAX} connections already: close some"),
            ));
        }
        let number = self.last_client.fetch_add(1, Ordering::Relaxed) + 1;
        clients.insert(number, Arc::clone(socket));
        *own += 1;
        Ok(Client { node: Arc::clone(self), number, uid })
    }

    pub fn clients_count(&self) -> usize {
        self.clients().len()
    }

    pub fn streams_count(&self) -> u32 {
        self.streams.load(Ordering::Relaxed)
    }

    pub fn count_stream(self: &Arc<Self>) -> StreamCount {
        self.streams.fetch_add(1, Ordering::Relaxed);
        StreamCount(Arc::clone(self))
    }

    /// How long nobody has used this engine.
    pub fn idle(&self) -> Duration {
        let now = time::monotonic_now();
        let mut busy_until = self.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        if self.clients_count() > 0 || self.mounts.count() > 0 {
            *busy_until = now;
        }
        now.saturating_duration_since(*busy_until)
    }

    /// Ends all connections. Requests under way are answered first, if that takes no longer than `patience`.
    pub fn end_clients(&self, patience: Duration) {
        for (how, patience) in [(Shutdown::Read, patience), (Shutdown::Both, Duration::from_secs(5))] {
            let deadline = time::monotonic_now() + patience;
            let mut clients = self.clients();
            for socket in clients.values() {
                // One that was closed meanwhile is what we want.
                let _ = socket.shutdown(how);
            }
            while !clients.is_empty() {
                let left = deadline.saturating_duration_since(time::monotonic_now());
                if left.is_zero() {
                    break;
                }
                clients =
                    self.client_left.wait_timeout(clients, left).unwrap_or_else(PoisonError::into_inner).0;
            }
            if clients.is_empty() {
                return;
            }
        }
        tracing::warn!(clients = self.clients_count(), "requests are still under way at the engine's end");
    }

    fn clients(&self) -> MutexGuard<'_, HashMap<u64, Arc<UnixStream>>> {
        self.clients.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// The sealed view `seal`, if `who` may list it.
    pub fn view(&self, who: &Identity, seal: &str) -> Result<Arc<SealedView>> {
        let id: SealId = seal.parse()?;
        let view = self.volume.open_seal(who, id)?;
        self.keep_view(&view);
        Ok(view)
    }

    /// Keeps it open until others push it out: the volume itself forgets a view with its last user.
    pub fn keep_view(&self, view: &Arc<SealedView>) {
        let mut views = self.views.lock().unwrap_or_else(PoisonError::into_inner);
        if views.len() >= VIEWS_MAX && !views.contains_key(&view.id()) {
            // Those that nobody uses go; one that is used stays open by its users.
            views.retain(|_, view| Arc::strong_count(view) > 1);
        }
        if views.len() < VIEWS_MAX {
            views.insert(view.id(), Arc::clone(view));
        }
    }

    pub fn forget_view(&self, id: SealId) {
        self.views.lock().unwrap_or_else(PoisonError::into_inner).remove(&id);
    }

    pub fn forget_views(&self) {
        self.views.lock().unwrap_or_else(PoisonError::into_inner).clear();
    }

    pub fn status(&self) -> Result<message::Status> {
        let volume = &self.volume;
        let (segments, segment_bytes) = volume.segments()?;
        let backup_ns = volume.backup_status()?.map(|backup| backup.created.0);
        Ok(message::Status {
            engine: ENGINE_VERSION.to_owned(),
            pid: std::process::id(),
            volume: volume.id().to_string(),
            path: ByteBuf::from(volume.folder().as_os_str().as_bytes().to_vec()),
            format: FORMAT,
            started_ns: self.started.0,
            session: volume.session().to_string(),
            resident_bytes: resident_bytes(),
            memory_bytes_max: self.options.memory_bytes_max,
            buffers_bytes: volume.budget().used(),
            dirty_bytes: volume.dirty_bytes(),
            mounts: self.mounts.status(),
            clients: u32::try_from(self.clients_count()).unwrap_or(u32::MAX),
            streams: self.streams_count(),
            seals: volume.seals()?.len() as u64,
            segments,
            segment_bytes,
            inodes: volume.statfs()?.inodes_used,
            object: volume.tier_status().map(|tiers| message::ObjectStatus {
                location: tiers.location,
                flash_bytes_max: tiers.flash_bytes_max,
                clean_bytes: tiers.clean_bytes,
                dirty_bytes: tiers.backlog.bytes,
                dirty_segments: tiers.backlog.segments,
                dirty_ms: u64::try_from(tiers.backlog.age.as_millis()).unwrap_or(u64::MAX),
                failing: tiers.backlog.failing,
                backup_ns,
            }),
            recovery: volume.recovery().to_vec(),
            warnings: volume.warnings(),
        })
    }
}

/// One open connection, for as long as it lives.
#[derive(Debug)]
pub struct Client {
    node: Arc<Node>,
    pub number: u64,
    uid: u32,
}

impl Drop for Client {
    fn drop(&mut self) {
        let mut busy_until = self.node.busy_until.lock().unwrap_or_else(PoisonError::into_inner);
        *busy_until = time::monotonic_now();
        drop(busy_until);
        let mut clients = self.node.clients();
        clients.remove(&self.number);
        let mut clients_of = self.node.clients_of.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(own) = clients_of.get_mut(&self.uid) {
            *own -= 1;
            if *own == 0 {
                clients_of.remove(&self.uid);
            }
        }
        drop((clients, clients_of));
        self.node.client_left.notify_all();
    }
}

#[derive(Debug)]
pub struct StreamCount(Arc<Node>);

impl Drop for StreamCount {
    fn drop(&mut self) {
        self.0.streams.fetch_sub(1, Ordering::Relaxed);
    }
}
