//! A client as plain as can be: one socket, one request, one answer.

#![allow(dead_code, reason = "each test program uses a part")]

use std::fs::File;
use std::io::{IoSliceMut, Read, Write};
use std::mem::MaybeUninit;
use std::os::fd::{AsRawFd, OwnedFd};
use std::os::unix::net::UnixStream;
use std::path::{Path, PathBuf};
use std::time::Duration;

use headrace_base::{Result, time};
use headrace_format::message::{
    Answer, BatchLayout, HEADER, HELLO, LoaderRequest, PutEntry, Request, Sealed, Status, StreamCommand,
    StreamEvent, decode_header, decode_meta, encode_header, encode_meta,
};
use headrace_node::{Engine, EngineOptions, MEMORY_BYTES_DEFAULT};
use headrace_volume::Volume;
use rustix::net::{RecvAncillaryBuffer, RecvAncillaryMessage, RecvFlags, recvmsg};
use serde::de::DeserializeOwned;
use serde_bytes::ByteBuf;

pub struct Running {
    pub engine: Option<Engine>,
    pub folder: PathBuf,
    _temporary: tempfile::TempDir,
}

impl Running {
    pub fn start() -> Running {
        Running::with(|_| {})
    }

    pub fn with(change: impl FnOnce(&mut EngineOptions)) -> Running {
        let temporary = tempfile::tempdir().unwrap();
        // Other users must be able to reach the socket where a test lets them.
        let open = std::os::unix::fs::PermissionsExt::from_mode(0o755);
        std::fs::set_permissions(temporary.path(), open).unwrap();
        let folder = temporary.path().join("volume");
        Volume::create(&folder).unwrap();
        let mut running = Running { engine: None, folder, _temporary: temporary };
        running.start_again(change);
        running
    }

    pub fn start_again(&mut self, change: impl FnOnce(&mut EngineOptions)) {
        let mut options = EngineOptions {
            folder: self.folder.clone(),
            system: false,
            memory_bytes_max: MEMORY_BYTES_DEFAULT,
            idle_exit: None,
        };
        change(&mut options);
        self.engine = Some(Engine::start(options).unwrap());
    }

    pub fn volume(&self) -> &Volume {
        self.engine.as_ref().unwrap().volume()
    }

    pub fn client(&self) -> Client {
        Client::connect(&self.folder)
    }

    pub fn stop(&mut self) {
        self.engine.take().unwrap().stop().unwrap();
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(engine) = self.engine.take() {
            let stopped = engine.stop();
            if !std::thread::panicking() {
                stopped.unwrap();
            }
        }
    }
}

pub struct Client {
    pub socket: UnixStream,
}

#[derive(Debug)]
pub struct Frame {
    pub meta: Vec<u8>,
    pub payload: Vec<u8>,
    pub fds: Vec<OwnedFd>,
}

impl Client {
    pub fn connect(folder: &Path) -> Client {
        let mut client = Client { socket: UnixStream::connect(folder.join("engine.sock")).unwrap() };
        client.socket.set_read_timeout(Some(Duration::from_secs(30))).unwrap();
        client.socket.write_all(&HELLO).unwrap();
        client
    }

    pub fn send(&mut self, request: &Request, payload: &[u8]) {
        self.send_raw(&encode_meta(request).unwrap(), payload);
    }

    pub fn send_raw(&mut self, meta: &[u8], payload: &[u8]) {
        let header = encode_header(meta.len(), 0, payload.len() as u64).unwrap();
        self.socket.write_all(&[&header[..], meta].concat()).unwrap();
        self.socket.write_all(payload).unwrap();
    }

    /// None: the engine closed the connection.
    pub fn receive(&mut self) -> Option<Frame> {
        let mut bytes = [0; HEADER];
        let mut fds = Vec::new();
        let mut space = [MaybeUninit::uninit(); rustix::cmsg_space!(ScmRights(8))];
        let mut control = RecvAncillaryBuffer::new(&mut space);
        let mut parts = [IoSliceMut::new(&mut bytes)];
        let received = match recvmsg(&self.socket, &mut parts, &mut control, RecvFlags::CMSG_CLOEXEC) {
            Ok(received) => received.bytes,
            Err(rustix::io::Errno::CONNRESET) => return None,
            Err(error) => panic!("{error}"),
        };
        for message in control.drain() {
            if let RecvAncillaryMessage::ScmRights(rights) = message {
                fds.extend(rights);
            }
        }
        if received == 0 {
            return None;
        }
        self.socket.read_exact(&mut bytes[received..]).unwrap();
        let header = decode_header(&bytes).unwrap();
        let mut meta = vec![0; header.meta_bytes as usize];
        self.socket.read_exact(&mut meta).unwrap();
        let mut payload = vec![0; header.payload_bytes as usize];
        self.socket.read_exact(&mut payload).unwrap();
        assert_eq!(fds.len(), header.fds as usize);
        Some(Frame { meta, payload, fds })
    }

    pub fn exchange<T: DeserializeOwned>(&mut self, request: &Request, payload: &[u8]) -> Result<(T, Frame)> {
        self.send(request, payload);
        let frame = self.receive().expect("an answer");
        let value = decode_meta::<Answer<T>>(&frame.meta).unwrap().into_result()?;
        Ok((value, frame))
    }

    pub fn call<T: DeserializeOwned>(&mut self, request: Request) -> Result<T> {
        self.exchange(&request, &[]).map(|(value, _)| value)
    }

    pub fn ok(&mut self, request: Request) {
        self.call::<()>(request).unwrap();
    }

    pub fn errno(&mut self, request: Request) -> i32 {
        self.send(&request, &[]);
        let frame = self.receive().expect("an answer");
        match decode_meta::<Answer<serde::de::IgnoredAny>>(&frame.meta).unwrap() {
            Answer::Ok(_) => 0,
            Answer::Error(body) => body.errno,
        }
    }

    pub fn status(&mut self) -> Status {
        self.call(Request::Status {}).unwrap()
    }

    /// `count` files of 10,000 + number bytes under `folder`, each filled with its own pattern.
    pub fn put_samples(&mut self, folder: &str, count: u64) {
        let mut payload = Vec::new();
        let mut entries = Vec::new();
        for number in 0..count {
            let bytes = sample(number);
            entries.push(PutEntry {
                path: path(&format!("{folder}/{number:06}")),
                kind: headrace_format::message::Kind::File,
                mode: 0o644,
                uid: None,
                gid: None,
                mtime_ns: None,
                size: bytes.len() as u64,
                target: None,
                hard_link: false,
                rdev: 0,
            });
            payload.extend(bytes);
            if payload.len() > 4 << 20 || number + 1 == count {
                let request =
                    Request::Put { entries: std::mem::take(&mut entries), parents: true, durable: false };
                self.exchange::<headrace_format::message::PutDone>(&request, &payload).unwrap();
                payload.clear();
            }
        }
    }

    pub fn seal(&mut self, folder: &str) -> (Sealed, OwnedFd) {
        let (sealed, mut frame) =
            self.exchange::<Sealed>(&Request::Seal { path: path(folder) }, &[]).unwrap();
        (sealed, frame.fds.pop().unwrap())
    }

    pub fn event(&mut self) -> (StreamEvent, Vec<OwnedFd>) {
        let frame = self.receive().expect("an event");
        (decode_meta(&frame.meta).unwrap(), frame.fds)
    }

    pub fn release(&mut self, slot: u32) {
        self.send_raw(&encode_meta(&StreamCommand::Release { slot }).unwrap(), &[]);
    }
}

pub fn path(text: &str) -> ByteBuf {
    ByteBuf::from(text.as_bytes().to_vec())
}

pub fn sample(number: u64) -> Vec<u8> {
    (0..10_000 + number % 50).map(|k| (k * 7 + number * 13) as u8).collect()
}

pub fn loader(seal: &str, batch_size: u32) -> LoaderRequest {
    LoaderRequest {
        seal: seal.to_owned(),
        batch_size,
        shuffle: false,
        seed: 0,
        epoch: 0,
        drop_last: false,
        first_batch: 0,
        prefetch: 4,
        rank: 0,
        world_size: 1,
    }
}

/// What a batch in shared memory holds: indices, and each sample's bytes.
pub fn read_layout(fd: &OwnedFd, layout: &BatchLayout) -> Vec<(u64, Vec<u8>)> {
    // A duplicate, since reading by File would close it. Positions are given, so nothing is shared.
    let file = File::from(fd.try_clone().unwrap());
    let read = |at: u64, bytes: u64| {
        let mut out = vec![0; bytes as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut out, at).unwrap();
        out
    };
    assert!(file.metadata().unwrap().len() == layout.slot_bytes && file.as_raw_fd() >= 0);
    let numbers = |bytes: Vec<u8>| -> Vec<u64> {
        bytes.chunks_exact(8).map(|bytes| u64::from_le_bytes(bytes.try_into().unwrap())).collect()
    };
    let indices = numbers(read(0, layout.count * 8));
    let offsets = numbers(read(layout.offsets_at, (layout.count + 1) * 8));
    assert_eq!((offsets[0], *offsets.last().unwrap()), (0, layout.data_bytes));
    indices
        .into_iter()
        .zip(offsets.windows(2))
        .map(|(index, range)| (index, read(layout.data_at + range[0], range[1] - range[0])))
        .collect()
}

/// Waits until `condition` holds, at most ten seconds.
pub fn until(what: &str, mut condition: impl FnMut() -> bool) {
    let deadline = time::monotonic_now() + Duration::from_secs(10);
    while !condition() {
        assert!(time::monotonic_now() < deadline, "{what}: not within ten seconds");
        time::sleep(Duration::from_millis(10));
    }
}
