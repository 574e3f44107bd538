//! Frames over one socket (`headrace_format::message` draws them), and the end of a connection.
//!
//! Every wait is for two things: the socket, and the death of the peer's process. A forked child may keep the
//! socket open for long after its parent was killed; what the parent held must be free at once.
//!
//! Reading goes through a small buffer, so that a small request costs one recv; large payloads are received
//! where they belong. Descriptors that a client sends are not taken: the kernel closes them.

use std::io::IoSlice;
use std::mem::MaybeUninit;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::sync::Arc;

use headrace_base::{Error, Result};
use headrace_format::message::{HEADER, HELLO, Header, WIRE, decode_header, encode_header};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::io::Errno;
use rustix::net::{RecvFlags, SendAncillaryBuffer, SendAncillaryMessage, SendFlags, recv, sendmsg};

const BUFFER_BYTES: usize = 64 << 10;

/// Why a connection cannot go on.
#[derive(Debug)]
pub enum Broken {
    /// The peer closed it or died, or the engine stops. There is nobody to tell.
    Gone,
    /// What the peer sent cannot be understood, so where its next message begins is not known.
    Protocol(Error),
}

impl From<Errno> for Broken {
    fn from(error: Errno) -> Broken {
        tracing::debug!(%error, "a connection broke");
        Broken::Gone
    }
}

#[derive(Debug)]
pub struct Channel {
    socket: Arc<UnixStream>,
    process: Option<OwnedFd>,
    buffer: Vec<u8>,
    begin: usize,
    end: usize,
    head: Vec<u8>,
}

impl Channel {
    pub fn new(socket: Arc<UnixStream>, process: Option<OwnedFd>) -> Channel {
        Channel { socket, process, buffer: vec![0; BUFFER_BYTES], begin: 0, end: 0, head: Vec::new() }
    }

    /// Reads the eight bytes that open a connection.
    pub fn hello(&mut self) -> Result<(), Broken> {
        let mut bytes = [0; HELLO.len()];
        self.read(&mut bytes)?;
        if bytes == HELLO {
            return Ok(());
        }
        Err(Broken::Protocol(if bytes[..7] == HELLO[..7] {
            Error::invalid(format!(
                "the client speaks wire version {}, this engine {WIRE}: use headrace and headraced of one release",
                bytes[7]
            ))
        } else {
            Error::invalid("this is not a headrace client: the connection does not begin with its greeting")
        }))
    }

    /// Waits for the next message.
    pub fn header(&mut self) -> Result<Header, Broken> {
        let mut bytes = [0; HEADER];
        self.read(&mut bytes)?;
        let header = decode_header(&bytes).map_err(Broken::Protocol)?;
        if header.fds > 0 {
            return Err(Broken::Protocol(Error::invalid("a client's message carries no descriptors")));
        }
        Ok(header)
    }

    /// Fills `out` whole.
    pub fn read(&mut self, out: &mut [u8]) -> Result<(), Broken> {
        let mut done = 0;
        while done < out.len() {
            if self.begin < self.end {
                let count = (self.end - self.begin).min(out.len() - done);
                out[done..done + count].copy_from_slice(&self.buffer[self.begin..self.begin + count]);
                self.begin += count;
                done += count;
            } else if out.len() - done >= BUFFER_BYTES {
                done += self.receive_into(&mut out[done..])?;
            } else {
                // Between messages a connection idles: asking first whether there is something saves a recv.
                self.wait(PollFlags::IN)?;
                self.fill()?;
            }
        }
        Ok(())
    }

    /// Reads and forgets `count` bytes.
    pub fn skip(&mut self, mut count: u64) -> Result<(), Broken> {
        let mut scratch = vec![0; BUFFER_BYTES];
        while count > 0 {
            let part = count.min(BUFFER_BYTES as u64) as usize;
            self.read(&mut scratch[..part])?;
            count -= part as u64;
        }
        Ok(())
    }

    fn receive_into(&self, out: &mut [u8]) -> Result<usize, Broken> {
        loop {
            match recv(&self.socket, &mut *out, RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Broken::Gone),
                Ok((count, _)) => return Ok(count),
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    fn fill(&mut self) -> Result<(), Broken> {
        self.make_room();
        let count = loop {
            match recv(&self.socket, &mut self.buffer[self.end..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Broken::Gone),
                Ok((count, _)) => break count,
                Err(Errno::AGAIN) => self.wait(PollFlags::IN)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        };
        self.end += count;
        Ok(())
    }

    fn make_room(&mut self) {
        if self.begin == self.end {
            (self.begin, self.end) = (0, 0);
        } else if self.end == self.buffer.len() {
            self.buffer.copy_within(self.begin..self.end, 0);
            (self.begin, self.end) = (0, self.end - self.begin);
        }
    }

    /// The meta of a small message without payload, if one has arrived; does not wait.
    pub fn try_message(&mut self) -> Result<Option<Vec<u8>>, Broken> {
        loop {
            if let Some(header) = self.buffer[self.begin..self.end].first_chunk::<HEADER>() {
                let header = decode_header(header).map_err(Broken::Protocol)?;
                let meta_bytes = header.meta_bytes as usize;
                if header.fds > 0 || header.payload_bytes > 0 || meta_bytes > BUFFER_BYTES - HEADER {
                    return Err(Broken::Protocol(Error::invalid(
                        "a command on a stream is a few bytes long",
                    )));
                }
                if self.end - self.begin >= HEADER + meta_bytes {
                    let start = self.begin + HEADER;
                    self.begin = start + meta_bytes;
                    return Ok(Some(self.buffer[start..start + meta_bytes].to_vec()));
                }
            }
            self.make_room();
            match recv(&self.socket, &mut self.buffer[self.end..], RecvFlags::DONTWAIT) {
                Ok((0, _)) => return Err(Broken::Gone),
                Ok((count, _)) => self.end += count,
                Err(Errno::AGAIN) => return Ok(None),
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
    }

    /// Sends one message. Blocks while the peer does not read.
    pub fn send(&mut self, meta: &[u8], payload: &[u8], fds: &[BorrowedFd<'_>]) -> Result<(), Broken> {
        let header = encode_header(meta.len(), fds.len(), payload.len() as u64).map_err(Broken::Protocol)?;
        let mut head = std::mem::take(&mut self.head);
        head.clear();
        head.extend_from_slice(&header);
        head.extend_from_slice(meta);
        let outcome = self.send_all(&head, payload, fds);
        if head.capacity() <= BUFFER_BYTES {
            self.head = head;
        }
        outcome
    }

    fn send_all(&self, head: &[u8], payload: &[u8], mut fds: &[BorrowedFd<'_>]) -> Result<(), Broken> {
        let total = head.len() + payload.len();
        let mut sent = 0;
        while sent < total {
            let parts = [
                IoSlice::new(&head[sent.min(head.len())..]),
                IoSlice::new(&payload[sent.saturating_sub(head.len())..]),
            ];
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = SendAncillaryBuffer::new(&mut space);
            if !fds.is_empty() && !control.push(SendAncillaryMessage::ScmRights(fds)) {
                return Err(Broken::Protocol(Error::internal("too many descriptors for one message")));
            }
            match sendmsg(&self.socket, &parts, &mut control, SendFlags::NOSIGNAL | SendFlags::DONTWAIT) {
                Ok(count) => {
                    sent += count;
                    // They went with the first byte.
                    fds = &[];
                }
                Err(Errno::AGAIN) => self.wait(PollFlags::OUT)?,
                Err(Errno::INTR) => {}
                Err(error) => return Err(error.into()),
            }
        }
        Ok(())
    }

    /// Waits until the socket is ready for `what`.
    fn wait(&self, what: PollFlags) -> Result<(), Broken> {
        loop {
            let mut fds = [PollFd::new(&*self.socket, what), PollFd::new(&*self.socket, what)];
            let count = match &self.process {
                Some(process) => {
                    fds[1] = PollFd::new(process, PollFlags::IN);
                    2
                }
                None => 1,
            };
            match poll(&mut fds[..count], None) {
                Err(Errno::INTR) | Ok(0) => {}
                Err(error) => return Err(error.into()),
                Ok(_) if count == 2 && !fds[1].revents().is_empty() => return Err(Broken::Gone),
                // A hang-up is for the next recv or send to find: what was sent before it can still be read.
                Ok(_) => return Ok(()),
            }
        }
    }

    /// Waits until a message may have come, `bell` rings, or `patience` is over (None: no limit).
    pub fn wait_with(
        &self,
        bell: BorrowedFd<'_>,
        patience: Option<std::time::Duration>,
    ) -> Result<(), Broken> {
        let mut fds =
            vec![PollFd::new(&*self.socket, PollFlags::IN), PollFd::from_borrowed_fd(bell, PollFlags::IN)];
        if let Some(process) = &self.process {
            fds.push(PollFd::new(process, PollFlags::IN));
        }
        let patience = patience.and_then(|patience| Timespec::try_from(patience).ok());
        match poll(&mut fds, patience.as_ref()) {
            Err(Errno::INTR) => Ok(()),
            Err(error) => Err(error.into()),
            Ok(_) if fds.get(2).is_some_and(|process| !process.revents().is_empty()) => Err(Broken::Gone),
            Ok(_) => Ok(()),
        }
    }

    /// Whether the peer has read everything that was sent.
    pub fn all_was_read(&self) -> Result<bool, Broken> {
        // SAFETY: TIOCOUTQ (SIOCOUTQ) writes one int: the bytes that the other end has not yet read.
        let unread: libc::c_int = unsafe {
            rustix::ioctl::ioctl(
                self.socket.as_fd(),
                rustix::ioctl::Getter::<{ libc::TIOCOUTQ as rustix::ioctl::Opcode }, libc::c_int>::new(),
            )
        }?;
        Ok(unread == 0)
    }
}

#[cfg(test)]
mod tests {
    use std::io::{Read, Write};
    use std::os::fd::AsRawFd;

    use headrace_base::thread;

    use super::*;

    fn pair() -> (Channel, UnixStream) {
        let (ours, theirs) = UnixStream::pair().unwrap();
        (Channel::new(Arc::new(ours), None), theirs)
    }

    #[test]
    fn a_message_arrives_whole_however_it_is_cut() {
        let (mut channel, mut theirs) = pair();
        let payload: Vec<u8> = (0..300_000_u32).map(|k| k as u8).collect();
        let expected = payload.clone();
        let sender = thread::spawn("sender", move || {
            theirs.write_all(&HELLO).unwrap();
            theirs.write_all(&encode_header(3, 0, payload.len() as u64).unwrap()).unwrap();
            for piece in b"abc".chunks(1).chain(payload.chunks(7001)) {
                theirs.write_all(piece).unwrap();
            }
            theirs.write_all(&encode_header(1, 0, 0).unwrap()).unwrap();
            theirs.write_all(b"x").unwrap();
            theirs
        })
        .unwrap();
        channel.hello().unwrap();
        let header = channel.header().unwrap();
        let mut meta = vec![0; header.meta_bytes as usize];
        channel.read(&mut meta).unwrap();
        let mut received = vec![0; header.payload_bytes as usize];
        channel.read(&mut received).unwrap();
        assert_eq!((&meta[..], received == expected), (&b"abc"[..], true));
        assert_eq!(channel.header().unwrap().meta_bytes, 1);
        drop(sender.join().unwrap());
        channel.read(&mut [0]).unwrap();
        assert!(matches!(channel.header(), Err(Broken::Gone)));
    }

    #[test]
    fn garbage_and_oversize_are_refused_before_anything_is_allocated() {
        let (mut channel, mut theirs) = pair();
        theirs.write_all(b"\0HRWIRE\x09").unwrap();
        let Err(Broken::Protocol(error)) = channel.hello() else { panic!("accepted") };
        assert!(error.message().contains("wire version 9"), "{error}");
        theirs.write_all(b"\0garbage").unwrap();
        assert!(matches!(channel.hello(), Err(Broken::Protocol(_))));
        theirs.write_all(&[0xFF; HEADER]).unwrap();
        assert!(matches!(channel.header(), Err(Broken::Protocol(_))));
        theirs.write_all(b"\x01\0\0\0\x01\0\0\0\0\0\0\0\0\0\0\0").unwrap();
        assert!(matches!(channel.header(), Err(Broken::Protocol(_))));
    }

    #[test]
    fn a_large_answer_reaches_a_slow_reader_with_its_descriptor() {
        let (mut channel, theirs) = pair();
        let (mut inside, outside) = UnixStream::pair().unwrap();
        let reader = thread::spawn("reader", move || {
            let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
            let mut control = rustix::net::RecvAncillaryBuffer::new(&mut space);
            let mut first = [0; 10];
            let mut parts = [std::io::IoSliceMut::new(&mut first)];
            let got =
                rustix::net::recvmsg(&theirs, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC).unwrap();
            let mut fds = Vec::new();
            for message in control.drain() {
                if let rustix::net::RecvAncillaryMessage::ScmRights(rights) = message {
                    fds.extend(rights);
                }
            }
            let mut rest = Vec::new();
            (&theirs).take((HEADER + 4 + 2_000_000 - got.bytes) as u64).read_to_end(&mut rest).unwrap();
            (first[..got.bytes].to_vec(), rest, fds)
        })
        .unwrap();
        let payload = vec![7; 2_000_000];
        channel.send(b"meta", &payload, &[outside.as_fd()]).unwrap();
        let (first, rest, fds) = reader.join().unwrap();
        let whole = [first, rest].concat();
        let header = decode_header(whole.first_chunk().unwrap()).unwrap();
        assert_eq!((header.meta_bytes, header.fds, header.payload_bytes), (4, 1, 2_000_000));
        assert_eq!(&whole[HEADER..HEADER + 4], b"meta");
        assert!(whole[HEADER + 4..] == payload);
        assert_eq!(fds.len(), 1);
        assert!(fds[0].as_raw_fd() != outside.as_raw_fd());
        rustix::io::write(&fds[0], b"!").unwrap();
        inside.read_exact(&mut [0]).unwrap();
    }

    #[test]
    fn commands_are_taken_without_waiting_and_reading_shows() {
        let (mut channel, mut theirs) = pair();
        assert!(channel.try_message().unwrap().is_none());
        let command = [&encode_header(5, 0, 0).unwrap()[..], b"hello"].concat();
        theirs.write_all(&command[..10]).unwrap();
        assert!(channel.try_message().unwrap().is_none());
        theirs.write_all(&command[10..]).unwrap();
        theirs.write_all(&command).unwrap();
        assert_eq!(channel.try_message().unwrap().unwrap(), b"hello");
        assert_eq!(channel.try_message().unwrap().unwrap(), b"hello");
        assert!(channel.try_message().unwrap().is_none());
        assert!(channel.all_was_read().unwrap());
        channel.send(b"m", b"", &[]).unwrap();
        assert!(!channel.all_was_read().unwrap());
        theirs.read_exact(&mut [0; HEADER + 1]).unwrap();
        assert!(channel.all_was_read().unwrap());
        drop(theirs);
        assert!(matches!(channel.try_message(), Err(Broken::Gone)));
    }

    #[test]
    fn a_dead_process_ends_the_wait_although_the_socket_stays_open() {
        let (ours, theirs) = UnixStream::pair().unwrap();
        let mut child = std::process::Command::new("sleep").arg("60").spawn().unwrap();
        let pid = rustix::process::Pid::from_child(&child);
        let process = rustix::process::pidfd_open(pid, rustix::process::PidfdFlags::empty()).unwrap();
        let mut channel = Channel::new(Arc::new(ours), Some(process));
        let waiter = thread::spawn("waiter", move || matches!(channel.header(), Err(Broken::Gone))).unwrap();
        child.kill().unwrap();
        child.wait().unwrap();
        assert!(waiter.join().unwrap());
        drop(theirs);
    }
}
