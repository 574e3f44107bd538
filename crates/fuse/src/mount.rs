//! One mount from its start to its end.
//!
//! Start: the place is checked, the kernel mounts, the first requests are answered, the notifier starts. Then
//! `threads` threads answer requests until the mount ends: by `unmount`, by `stop`, or because the user ran
//! umount or fusermount3 -u. At the end everything that was open in it is closed.
//!
//! The notifier rests before anything is unmounted, and goes on if the mount stays.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

use fuser::{Config, MountOption, Session, SessionACL};
use headrace_base::error::errno;
use headrace_base::{Error, Kind, Result, thread, time};
use headrace_volume::Volume;

use crate::adapter::{Adapter, REQUEST_BYTES_MAX};
use crate::notify::Notifying;
use crate::operations::Counters;
use crate::place::{self, SUBTYPE};

/// A thread is held while its request waits for the disk: with 4, eight programs that fsync file after file were
/// served a third slower than with 8; 16 gained nothing (2 cores). An idle one costs a stack.
pub const THREADS_DEFAULT: usize = 8;

/// How long an unmounted session may take to wind up, and the kernel to take a notification.
const PATIENCE: Duration = Duration::from_secs(10);
/// Between two looks whether a mount is still in use.
const RETRY: Duration = Duration::from_millis(50);

#[derive(Clone, Debug)]
pub struct MountOptions {
    pub read_only: bool,
    /// Users other than the one who mounts may use it; the kernel checks what each may do.
    pub allow_other: bool,
    /// What `mount` and `df` show as the source.
    pub fs_name: String,
    /// Threads that answer requests; 0: `THREADS_DEFAULT`.
    pub threads: usize,
}

/// A mount. Dropping it ends it.
pub struct Mount {
    mountpoint: PathBuf,
    read_only: bool,
    notes: Vec<String>,
    /// The number by which the kernel knows the connection, in /sys/fs/fuse/connections.
    connection: Option<u32>,
    counters: Arc<Counters>,
    notifying: Arc<Notifying>,
    /// Requests are answered ENOTCONN.
    refusing: Arc<AtomicBool>,
    life: Arc<Life>,
    /// Unmounting is done by one at a time.
    ending: Mutex<()>,
}

impl std::fmt::Debug for Mount {
    fn fmt(&self, out: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        out.debug_struct("Mount")
            .field("mountpoint", &self.mountpoint)
            .field("alive", &self.is_alive())
            .finish_non_exhaustive()
    }
}

#[derive(Debug, Default)]
struct Life {
    over: Mutex<bool>,
    ended: Condvar,
}

impl Life {
    fn is_over(&self) -> bool {
        *self.lock()
    }

    fn end(&self) {
        *self.lock() = true;
        self.ended.notify_all();
    }

    /// Whether it is over by then.
    fn wait(&self, patience: Duration) -> bool {
        let deadline = time::monotonic_now() + patience;
        let mut over = self.lock();
        while !*over {
            let left = deadline.saturating_duration_since(time::monotonic_now());
            if left.is_zero() {
                break;
            }
            over = self.ended.wait_timeout(over, left).unwrap_or_else(PoisonError::into_inner).0;
        }
        *over
    }

    fn lock(&self) -> MutexGuard<'_, bool> {
        self.over.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Mounts the volume. When it returns, the mount answers.
///
/// Errors: NotFound, Conflict or Invalid for a mountpoint that will not do, Unavailable where FUSE is missing,
/// Permission where this user may not; each says what to do.
pub fn mount(volume: Arc<Volume>, mountpoint: &Path, options: MountOptions) -> Result<Mount> {
    let place::Place { path, notes } = place::prepare(mountpoint, options.allow_other)?;
    let doing = format!("mount {} at {}", volume.folder().display(), path.display());

    let counters = Arc::new(Counters::default());
    let notifying = Arc::new(Notifying::default());
    let origin = volume.new_origin();
    // Before the first lookup: what changes from now on must reach this mount.
    let subscription = volume.subscribe(origin);
    let adapter = Adapter::new(volume, origin, Arc::clone(&counters), Arc::clone(&notifying));
    let refusing = Arc::clone(&adapter.refusing);
    let session = Session::new(adapter, &path, &config(&options)).map_err(|error| refused(&doing, error))?;
    let kernel = session.notifier();

    let life = Arc::new(Life::default());
    let (own_life, own_notifying, own_path) = (Arc::clone(&life), Arc::clone(&notifying), path.clone());
    thread::spawn("fuse-session", move || {
        // Closes everything that is still open before it returns.
        let outcome = session.run();
        own_notifying.stop();
        match outcome {
            Ok(()) => tracing::info!(mountpoint = %own_path.display(), "mount ended"),
            Err(error) => tracing::error!(mountpoint = %own_path.display(), %error, "mount ended"),
        }
        own_life.end();
    })?;
    let mut mount = Mount {
        mountpoint: path,
        read_only: options.read_only,
        notes,
        connection: None,
        counters,
        notifying,
        refusing,
        life,
        ending: Mutex::new(()),
    };
    mount.notifying.start(subscription, kernel)?;
    // The first question, asked from here: from now on the mount is known to answer.
    let stat = rustix::fs::stat(&mount.mountpoint).map_err(|error| Error::io(&doing, error.into()))?;
    let connection = rustix::fs::minor(stat.st_dev);
    mount.connection = Some(connection);
    widen_read_ahead(connection);
    tracing::info!(
        mountpoint = %mount.mountpoint.display(),
        read_only = mount.read_only,
        connection,
        "mounted"
    );
    Ok(mount)
}

fn config(options: &MountOptions) -> Config {
    // Root mounts by itself and needs no escapes; others go through fusermount3's option line.
    let name =
        if place::is_root() { options.fs_name.clone() } else { place::escape_option(&options.fs_name) };
    let mut config = Config::default();
    config.mount_options = vec![
        MountOption::FSName(name),
        // fuser passes `Subtype` to fusermount3 only.
        MountOption::CUSTOM(format!("subtype={SUBTYPE}")),
        MountOption::DefaultPermissions,
        if options.read_only { MountOption::RO } else { MountOption::RW },
    ];
    config.acl = if options.allow_other { SessionACL::All } else { SessionACL::Owner };
    config.n_threads = Some(if options.threads == 0 { THREADS_DEFAULT } else { options.threads });
    // A queue of answers per thread. The device can be opened: `place` has checked.
    config.clone_fd = true;
    config
}

fn refused(doing: &str, error: std::io::Error) -> Error {
    let text = error.to_string();
    let (kind, remedy) = if text.contains("user_allow_other") {
        (Kind::Permission, "add the line `user_allow_other` to /etc/fuse.conf, or mount without allow_other")
    } else if text.contains("Operation not permitted") || error.kind() == std::io::ErrorKind::PermissionDenied
    {
        (
            Kind::Permission,
            "mounting needs the right to: as root in a container pass `--cap-add SYS_ADMIN --device /dev/fuse` \
             to it; as another user install the package fuse3",
        )
    } else {
        (Kind::Unavailable, "`headrace doctor` checks what FUSE needs")
    };
    Error::new(kind, format!("{doing}: {}; {remedy}", text.trim())).with_cause(error)
}

/// The kernel starts at 128 KiB whatever the file system asks for, and only root may raise it: then a sequential
/// read is asked for in requests of 1 MiB. Without it everything works, a little slower.
fn widen_read_ahead(connection: u32) {
    let path = format!("/sys/class/bdi/0:{connection}/read_ahead_kb");
    if let Err(error) = fs::write(&path, (REQUEST_BYTES_MAX / 1024).to_string()) {
        tracing::debug!(path, %error, "read-ahead stays at the kernel's default");
    }
}

impl Mount {
    /// Absolute, without symbolic links.
    pub fn mountpoint(&self) -> &Path {
        &self.mountpoint
    }

    pub fn read_only(&self) -> bool {
        self.read_only
    }

    /// What was done on the way to the mount, one sentence each.
    pub fn notes(&self) -> &[String] {
        &self.notes
    }

    /// Answered so far.
    pub fn requests(&self) -> u64 {
        self.counters.all()
    }

    /// False once it has ended, also when the user ended it by umount or fusermount3 -u.
    pub fn is_alive(&self) -> bool {
        !self.life.is_over()
    }

    /// Ends the mount. Conflict (EBUSY), naming who, while files are open or a process has its working
    /// directory in it: nothing has changed then. Ok if it has ended already. Waits for what it has to close;
    /// call it from no thread that the mount's requests wait for.
    pub fn unmount(&self) -> Result<()> {
        let _one = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        if !self.is_alive() {
            return Ok(());
        }
        match self.take_away(place::unmount) {
            Ok(()) => self.wind_up(),
            Err(error) if error.raw_errno() == errno::EBUSY => {
                let users = place::users_of(&self.mountpoint);
                let users = if users.is_empty() { "something".to_owned() } else { users.join(", ") };
                Err(Error::new(
                    Kind::Conflict,
                    format!(
                        "{} is in use by {users}: close it there, and unmount again",
                        self.mountpoint.display()
                    ),
                )
                .with_cause(error))
            }
            Err(error) => Err(error),
        }
    }

    /// Ends the mount, whoever uses it: waits up to `patience` for them, then what they have open fails with
    /// ENOTCONN. For an engine that stops. An error says what could not be ended; no request reaches the volume
    /// any more all the same.
    pub fn stop(&self, patience: Duration) -> Result<()> {
        let _one = self.ending.lock().unwrap_or_else(PoisonError::into_inner);
        let deadline = time::monotonic_now() + patience;
        loop {
            if !self.is_alive() {
                return Ok(());
            }
            match self.take_away(place::unmount) {
                Ok(()) => return self.wind_up(),
                Err(error) if error.kind() == Kind::Conflict && time::monotonic_now() < deadline => {
                    time::sleep(RETRY);
                }
                Err(_) => break,
            }
        }
        tracing::warn!(
            mountpoint = %self.mountpoint.display(),
            users = place::users_of(&self.mountpoint).join(", "),
            "the mount is in use and ends now: what is open in it fails"
        );
        self.write_mapped_pages();
        self.notifying.stop();
        self.refusing.store(true, Ordering::Release);
        if place::is_root() {
            place::force(&self.mountpoint)?;
        } else {
            place::detach(&self.mountpoint)?;
            self.abort()?;
        }
        self.wind_up()
    }

    fn take_away(&self, how: fn(&Path) -> Result<()>) -> Result<()> {
        if !self.notifying.rest(PATIENCE) {
            self.notifying.go_on();
            return Err(Error::new(
                Kind::Unavailable,
                format!("unmount {}: the kernel holds on to a notification", self.mountpoint.display()),
            ));
        }
        // Only our own mount: the user may have ended it and mounted something else there.
        let outcome = match self.is_there() {
            Ok(true) => how(&self.mountpoint),
            Ok(false) => Ok(()),
            Err(error) => Err(error),
        };
        outcome.inspect_err(|_| self.notifying.go_on())
    }

    fn is_there(&self) -> Result<bool> {
        let Some(connection) = self.connection else { return Ok(true) };
        place::holds(&self.mountpoint, connection)
    }

    fn wind_up(&self) -> Result<()> {
        if self.life.wait(PATIENCE) {
            Ok(())
        } else {
            Err(Error::new(
                Kind::Unavailable,
                format!(
                    "{} is unmounted, but a request in it has not ended after {} s",
                    self.mountpoint.display(),
                    PATIENCE.as_secs()
                ),
            ))
        }
    }

    /// Pages that programs changed through a mapping are the one thing the kernel still holds. On a thread of
    /// its own: if this hangs, the stop goes on.
    fn write_mapped_pages(&self) {
        let path = self.mountpoint.clone();
        let done = Arc::new(Life::default());
        let own = Arc::clone(&done);
        let started = thread::spawn("fuse-syncfs", move || {
            if let Ok(root) = File::open(&path)
                && let Err(error) = rustix::fs::syncfs(&root)
            {
                tracing::warn!(%error, "pages changed through mappings could not be written");
            }
            own.end();
        });
        if started.is_ok() {
            done.wait(PATIENCE);
        }
    }

    /// Ends the connection: every request in it and every later one fails. The way of users other than root.
    fn abort(&self) -> Result<()> {
        let Some(connection) = self.connection else { return Ok(()) };
        let path = format!("/sys/fs/fuse/connections/{connection}/abort");
        fs::write(&path, "1").map_err(|error| {
            Error::io(
                format_args!(
                    "end the mount at {}, which is in use (write {path}; is fusectl mounted?)",
                    self.mountpoint.display()
                ),
                error,
            )
        })
    }
}

impl Drop for Mount {
    fn drop(&mut self) {
        if let Err(error) = self.stop(Duration::ZERO) {
            tracing::error!(mountpoint = %self.mountpoint.display(), %error, "the mount could not be ended");
        }
        self.notifying.stop();
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_refusal_says_what_to_do() {
        let refusal = |text: &str| refused("mount /v at /m", std::io::Error::other(text.to_owned()));
        let permission = refusal("Error calling mount(): EPERM: Operation not permitted");
        assert_eq!(permission.kind(), Kind::Permission);
        assert!(permission.message().contains("SYS_ADMIN"), "{permission}");
        let other = refusal("fusermount3: option allow_other only allowed if 'user_allow_other' is set");
        assert_eq!(other.kind(), Kind::Permission);
        assert!(other.message().contains("/etc/fuse.conf"), "{other}");
        assert_eq!(refusal("something else").kind(), Kind::Unavailable);
    }

    #[test]
    fn the_options_say_what_is_promised() {
        let options = MountOptions {
            read_only: true,
            allow_other: true,
            fs_name: "headrace:/v".to_owned(),
            threads: 0,
        };
        let config = config(&options);
        assert!(config.mount_options.contains(&MountOption::DefaultPermissions));
        assert!(config.mount_options.contains(&MountOption::RO));
        assert_eq!(config.acl, SessionACL::All);
        assert_eq!(config.n_threads, Some(THREADS_DEFAULT));
        assert!(config.clone_fd);
    }

    #[test]
    fn a_life_is_waited_for_no_longer_than_asked() {
        let life = Arc::new(Life::default());
        assert!(!life.wait(Duration::from_millis(10)));
        life.end();
        assert!(life.wait(Duration::ZERO) && life.is_over());
    }
}
