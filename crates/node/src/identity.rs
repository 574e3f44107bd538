//! Who is at the other end of a connection: user and groups for permissions, and a descriptor of the process,
//! so that its death is noticed even while a forked child keeps the socket open.
//!
//! Order: credentials (the kernel's, as of connect(2)), process descriptor, groups from /proc, and then a look
//! whether the process still lives: only then is it certain that the groups were its own and not those of a
//! later process with the same number.

use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::Path;

use headrace_base::error::errno;
use headrace_base::{Error, Result};
use headrace_volume::Identity;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::process::{Pid, PidfdFlags, pidfd_open};

#[derive(Debug)]
pub struct Peer {
    pub identity: Identity,
    /// 0: a process of another pid namespace, which cannot be watched or asked for its groups.
    pub pid: i32,
    /// Readable once the process is dead.
    pub process: Option<OwnedFd>,
}

impl Peer {
    pub fn of(socket: &UnixStream) -> Result<Peer> {
        let credentials = credentials(socket)?;
        let pid = credentials.pid;
        let mut identity = Identity { uid: credentials.uid, gid: credentials.gid, groups: Vec::new() };
        let process = process_of(socket, pid)?;
        if pid > 0 {
            identity.groups = groups(pid)?;
        }
        if process.as_ref().is_some_and(is_dead) {
            return Err(gone(pid));
        }
        Ok(Peer { identity, pid, process })
    }
}

fn gone(pid: i32) -> Error {
    Error::errno(errno::ENOTCONN, format!("process {pid} connected and ended"))
}

pub fn is_dead(process: &OwnedFd) -> bool {
    let mut fds = [PollFd::new(process, PollFlags::IN)];
    poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 })).is_ok_and(|ready| ready > 0)
}

/// Whose connection it is.
pub fn uid_of(socket: &UnixStream) -> Result<u32> {
    Ok(credentials(socket)?.uid)
}

/// `rustix::net::sockopt::socket_peercred` cannot say pid 0, which the kernel answers across pid namespaces.
fn credentials(socket: &UnixStream) -> Result<libc::ucred> {
    let mut credentials = libc::ucred { pid: 0, uid: u32::MAX, gid: u32::MAX };
    let mut length = size_of::<libc::ucred>() as libc::socklen_t;
    // SAFETY: the pointer and the length are those of a live `ucred`, which is plain numbers.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERCRED,
            (&raw mut credentials).cast(),
            &raw mut length,
        )
    };
    if answer != 0 || length as usize != size_of::<libc::ucred>() {
        return Err(Error::io("ask who is connected", std::io::Error::last_os_error()));
    }
    Ok(credentials)
}

fn process_of(socket: &UnixStream, pid: i32) -> Result<Option<OwnedFd>> {
    let mut fd: libc::c_int = -1;
    let mut length = size_of::<libc::c_int>() as libc::socklen_t;
    // SAFETY: the pointer and the length are those of a live `c_int`.
    let answer = unsafe {
        libc::getsockopt(
            socket.as_raw_fd(),
            libc::SOL_SOCKET,
            libc::SO_PEERPIDFD,
            (&raw mut fd).cast(),
            &raw mut length,
        )
    };
    if answer == 0 && fd >= 0 {
        // SAFETY: the kernel has just made this descriptor for us; nobody else knows it.
        return Ok(Some(unsafe { OwnedFd::from_raw_fd(fd) }));
    }
    // Linux before 6.5 has no such option. By number it is a race with the reuse of the number, so small that
    // it only ever costs a late or an early end of a connection.
    let Some(pid) = Pid::from_raw(pid) else { return Ok(None) };
    match pidfd_open(pid, PidfdFlags::empty()) {
        Ok(process) => Ok(Some(process)),
        Err(rustix::io::Errno::SRCH) => Err(gone(pid.as_raw_nonzero().get())),
        Err(error) => {
            tracing::warn!(pid = pid.as_raw_nonzero().get(), %error, "a client cannot be watched; only its socket tells its end");
            Ok(None)
        }
    }
}

fn groups(pid: i32) -> Result<Vec<u32>> {
    let path = format!("/proc/{pid}/status");
    let text = std::fs::read(&path).map_err(|cause| {
        if matches!(cause.raw_os_error(), Some(libc::ENOENT | libc::ESRCH))
            && Path::new("/proc/self/status").exists()
        {
            return gone(pid);
        }
        Error::errno(errno::EACCES, format!("the groups of process {pid} cannot be read ({path}: {cause})"))
            .with_cause(cause)
    })?;
    parse_groups(&String::from_utf8_lossy(&text))
        .ok_or_else(|| Error::errno(errno::EACCES, format!("{path} has no line of groups")))
}

fn parse_groups(status: &str) -> Option<Vec<u32>> {
    let line = status.lines().find_map(|line| line.strip_prefix("Groups:"))?;
    line.split_whitespace().map(|number| number.parse().ok()).collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_peer_is_known_by_user_groups_and_process() {
        let (ours, _theirs) = UnixStream::pair().unwrap();
        let peer = Peer::of(&ours).unwrap();
        assert_eq!(peer.pid, std::process::id() as i32);
        assert_eq!(peer.identity.uid, rustix::process::geteuid().as_raw());
        let mut groups: Vec<u32> =
            rustix::process::getgroups().unwrap().iter().map(|group| group.as_raw()).collect();
        groups.sort_unstable();
        let mut read = peer.identity.groups.clone();
        read.sort_unstable();
        assert_eq!(read, groups);
        assert!(!is_dead(peer.process.as_ref().unwrap()));
    }

    #[test]
    fn groups_are_read_from_status() {
        assert_eq!(parse_groups("Name:\tx\nGroups:\t4 24 27 \nNgid:\t0\n"), Some(vec![4, 24, 27]));
        assert_eq!(parse_groups("Groups:\t \n"), Some(vec![]));
        assert_eq!(parse_groups("Groups:\tx\n"), None);
        assert_eq!(parse_groups("Name:\tx\n"), None);
    }
}
