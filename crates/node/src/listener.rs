//! The engine's socket in the volume's folder: bound, accepted from, and removed.
//!
//! A socket's address holds 108 bytes; folders may have longer paths. So it is bound through the folder's
//! descriptor, as /proc/self/fd/N/engine.sock. We hold the volume's lock: a socket that lies there is left from
//! an engine that died, and is replaced.
//!
//! The first byte tells the protocols apart (0: ours, a letter: HTTP). Mode bits decide who may connect, and
//! the peer's credentials decide again: without `--system` only root and the engine's own user are served.

use std::io::Write;
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::net::{UnixListener, UnixStream};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

use headrace_base::error::errno;
use headrace_base::{Error, Result, thread, time};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{AtFlags, FileType, Mode, OFlags, chmodat, open, statat, unlinkat};
use rustix::net::{
    AddressFamily, RecvFlags, SocketAddrUnix, SocketFlags, SocketType, bind, listen, recv, socket_with,
};

use crate::connection;
use crate::identity::Peer;
use crate::node::Node;
use crate::rest::HttpConnections;

pub const SOCKET_NAME: &str = "engine.sock";
/// Clients that connect at the same moment, for example the ranks of one job.
const BACKLOG: i32 = 1024;
/// After an error like "too many open files" that only time can mend.
/// A client speaks first; one that does not holds a connection that others may need.
const FIRST_BYTE_PATIENCE: Duration = Duration::from_secs(30);
const PAUSE: Duration = Duration::from_millis(100);

#[derive(Debug)]
pub struct Listener {
    listener: UnixListener,
    folder: OwnedFd,
}

impl Listener {
    pub fn bind(folder: &Path, system: bool) -> Result<Listener> {
        let path = folder.join(SOCKET_NAME);
        let doing = |step: &'static str| {
            let path = path.display().to_string();
            move |cause: rustix::io::Errno| Error::io(format_args!("socket {path} ({step})"), cause.into())
        };
        let directory = open(folder, OFlags::DIRECTORY | OFlags::CLOEXEC | OFlags::RDONLY, Mode::empty())
            .map_err(doing("open the folder"))?;
        match statat(&directory, SOCKET_NAME, AtFlags::SYMLINK_NOFOLLOW) {
            Ok(stat) if FileType::from_raw_mode(stat.st_mode) != FileType::Socket => {
                return Err(Error::errno(
                    errno::EEXIST,
                    format!("{} is there and is not a socket: move it away", path.display()),
                ));
            }
            Ok(_) => {
                unlinkat(&directory, SOCKET_NAME, AtFlags::empty()).map_err(doing("remove the old one"))?
            }
            Err(rustix::io::Errno::NOENT) => {}
            Err(error) => return Err(doing("look for an old one")(error)),
        }
        let socket = socket_with(
            AddressFamily::UNIX,
            SocketType::STREAM,
            SocketFlags::CLOEXEC | SocketFlags::NONBLOCK,
            None,
        )
        .map_err(doing("make"))?;
        let through_proc = format!("/proc/self/fd/{}/{SOCKET_NAME}", directory.as_raw_fd());
        let address = if Path::new("/proc/self/fd").exists() {
            SocketAddrUnix::new(through_proc.as_str()).map_err(doing("name"))?
        } else {
            SocketAddrUnix::new(&path).map_err(|_| {
                Error::errno(
                    errno::ENAMETOOLONG,
                    format!(
                        "{} is longer than the 107 bytes of a socket's address, and /proc, which would help, is \
                         not mounted: mount it or choose a shorter path",
                        path.display()
                    ),
                )
            })?
        };
        bind(&socket, &address).map_err(doing("bind"))?;
        // Nobody can connect before `listen`.
        let mode = Mode::from_raw_mode(if system { 0o666 } else { 0o600 });
        chmodat(&directory, SOCKET_NAME, mode, AtFlags::empty()).map_err(doing("set its mode"))?;
        listen(&socket, BACKLOG).map_err(doing("listen"))?;
        Ok(Listener { listener: UnixListener::from(socket), folder: directory })
    }

    /// Whether the folder was deleted. Nobody can find the socket then.
    pub fn folder_is_gone(&self) -> bool {
        // An error is a file system that went away beneath us: the lock went with it.
        rustix::fs::fstat(&self.folder).map_or(true, |stat| stat.st_nlink == 0)
    }

    /// Accepts until the engine stops. The socket is removed then, while the lock that makes it ours is held.
    pub fn run(&self, node: &Arc<Node>, http: &HttpConnections) {
        while !node.is_stopping() {
            let mut fds =
                [PollFd::new(&self.listener, PollFlags::IN), PollFd::new(&node.stop, PollFlags::IN)];
            if let Err(error) = poll(&mut fds, None)
                && error != rustix::io::Errno::INTR
            {
                tracing::error!(%error, "waiting for connections failed");
                time::sleep(PAUSE);
            }
            if node.is_stopping() {
                break;
            }
            match self.listener.accept() {
                Ok((socket, _)) => accept(node, http, Arc::new(socket)),
                Err(error) if error.kind() == std::io::ErrorKind::WouldBlock => {}
                Err(error) if error.raw_os_error() == Some(libc::ECONNABORTED) => {}
                Err(error) => {
                    tracing::error!(%error, "a connection could not be accepted");
                    time::sleep(PAUSE);
                }
            }
        }
        if let Err(error) = unlinkat(&self.folder, SOCKET_NAME, AtFlags::empty())
            && error != rustix::io::Errno::NOENT
        {
            tracing::warn!(%error, "the socket could not be removed");
        }
    }
}

fn accept(node: &Arc<Node>, http: &HttpConnections, socket: Arc<UnixStream>) {
    let entered = crate::identity::uid_of(&socket).and_then(|uid| node.enter(&socket, uid));
    let client = match entered {
        Ok(client) => client,
        Err(error) => {
            // Without a thread nothing can be answered: the client sees the connection closed.
            tracing::warn!(%error, "a connection was refused");
            return;
        }
    };
    let owner = Arc::clone(node);
    let http = http.clone();
    let spawned = thread::spawn(&format!("client-{}", client.number), move || {
        // Ends, and is counted out, when everything else of this connection is gone.
        let _client = client;
        begin(&owner, &http, socket);
    });
    if let Err(error) = spawned {
        tracing::error!(%error, "a connection was closed for want of a thread");
    }
}

fn begin(node: &Arc<Node>, http: &HttpConnections, socket: Arc<UnixStream>) {
    let Some(first) = first_byte(&socket) else { return };
    let peer = match Peer::of(&socket) {
        Ok(peer) => peer,
        Err(error) if error.raw_errno() == errno::ENOTCONN => {
            tracing::debug!(%error, "there is nobody to serve any more");
            return;
        }
        Err(error) => {
            tracing::warn!(%error, "a connection was closed: it is not known whose it is");
            return;
        }
    };
    let own = rustix::process::geteuid().as_raw();
    let uid = peer.identity.uid;
    let refusal = (!node.options.system && uid != 0 && uid != own).then(|| {
        Error::errno(
            errno::EACCES,
            format!(
                "this engine serves user {own} only, not user {uid}: root can start one for all with \
                 `headrace up --system`"
            ),
        )
    });
    match (first, refusal) {
        (0, refusal) => connection::serve(node, socket, peer, refusal),
        (_, Some(error)) => {
            let body = format!("{error}\n");
            let answer = format!(
                "HTTP/1.1 403 Forbidden\r\nContent-Type: text/plain\r\nContent-Length: {}\r\nConnection: \
                 close\r\n\r\n{body}",
                body.len()
            );
            // Who does not read it has lost nothing.
            let _ = (&*socket).write_all(answer.as_bytes());
        }
        (_, None) => http.serve(socket),
    }
}

/// Waits for it and leaves it there. None: the peer left.
fn first_byte(socket: &UnixStream) -> Option<u8> {
    let mut byte = [0];
    loop {
        let patience = Timespec { tv_sec: FIRST_BYTE_PATIENCE.as_secs() as i64, tv_nsec: 0 };
        match poll(&mut [PollFd::new(socket, PollFlags::IN)], Some(&patience)) {
            Ok(0) => return None,
            Ok(_) | Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
        match recv(socket.as_fd(), &mut byte, RecvFlags::PEEK) {
            Ok((0, _)) => return None,
            Ok(_) => return Some(byte[0]),
            Err(rustix::io::Errno::INTR) => {}
            Err(_) => return None,
        }
    }
}

/// Raises the limit of open files to what this process may have: clients, segments and batches each need some.
/// Gives the limit.
pub fn raise_open_files() -> u64 {
    use rustix::process::{Resource, Rlimit, getrlimit, setrlimit};
    let limit = getrlimit(Resource::Nofile);
    let raised = Rlimit { current: limit.maximum, maximum: limit.maximum };
    let current = match setrlimit(Resource::Nofile, raised) {
        Ok(()) => limit.maximum,
        Err(error) => {
            tracing::warn!(%error, "the limit of open files stays as it is");
            limit.current
        }
    };
    // None: no limit.
    current.unwrap_or(1 << 20)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_byte_stays_in_the_socket() {
        let (ours, mut theirs) = UnixStream::pair().unwrap();
        theirs.write_all(b"GET /").unwrap();
        assert_eq!(first_byte(&ours), Some(b'G'));
        assert_eq!(first_byte(&ours), Some(b'G'));
        drop(theirs);
        let (ours, theirs) = UnixStream::pair().unwrap();
        drop(theirs);
        assert_eq!(first_byte(&ours), None);
    }

    #[test]
    fn a_long_path_and_a_stale_socket_are_no_trouble() {
        let folder = tempfile::tempdir().unwrap();
        let long = folder.path().join("x".repeat(120)).join("y".repeat(120));
        std::fs::create_dir_all(&long).unwrap();
        let first = Listener::bind(&long, false).unwrap();
        let mode = std::fs::metadata(long.join(SOCKET_NAME)).unwrap();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o600);
        drop(first);
        let second = Listener::bind(&long, true).unwrap();
        let mode = std::fs::metadata(long.join(SOCKET_NAME)).unwrap();
        assert_eq!(std::os::unix::fs::PermissionsExt::mode(&mode.permissions()) & 0o777, 0o666);
        assert!(!second.folder_is_gone());
        std::fs::remove_dir_all(&long).unwrap();
        assert!(second.folder_is_gone());
    }

    #[test]
    fn a_file_in_the_sockets_place_is_left_alone() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join(SOCKET_NAME), "precious").unwrap();
        let error = Listener::bind(folder.path(), false).unwrap_err();
        assert!(error.message().contains("not a socket"), "{error}");
        assert_eq!(std::fs::read(folder.path().join(SOCKET_NAME)).unwrap(), b"precious");
    }
}
