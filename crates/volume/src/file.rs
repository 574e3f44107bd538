//! Open files: read, write, truncate, fsync. Dropping one is the close.
//!
//! A read looks at dirty bytes, then at bytes on their way to a segment, then at extents; what none of them
//! covers is zeros. It copies the few extents it needs and lets go of the inode before it touches a disk:
//! segments never change, so what it copied stays true.

use std::sync::Arc;

use headrace_base::error::errno;
use headrace_base::{Error, Ino, Kind, Result, SegmentId, time};
use headrace_flash::is_missing;
use headrace_format::key;
use headrace_format::record::{Extent, FileKind};
use headrace_meta::{At, Commit, Write};

use crate::extents;
use crate::flush::Again;
use crate::live::{Pin, State, no_inode};
use crate::namespace::erase;
use crate::past::{PastFile, is_live};
use crate::placed::Placed;
use crate::segments::{Fetch, lost};
use crate::types::{Attr, Change, FILE_BYTES_MAX, OpenMode, Origin};
use crate::volume::Volume;

impl Volume {
    pub fn open_file(self: &Arc<Self>, origin: Origin, ino: Ino, mode: OpenMode) -> Result<OpenFile> {
        if !is_live(ino) {
            if mode.write {
                self.check_live(ino)?;
            }
            let body = Body::Past(Box::new(self.open_past(self.place(ino)?)?));
            return Ok(OpenFile { volume: Arc::clone(self), body, origin, mode });
        }
        let _tree = self.stripes.share();
        let pin = self.live.pin(&*self.store, ino)?;
        if mode.truncate && mode.write {
            self.truncate(&pin, 0)?;
        }
        let mut state = pin.lock();
        if state.removed {
            return Err(no_inode(ino));
        }
        match state.inode.kind {
            FileKind::File => {}
            FileKind::Directory => {
                return Err(Error::errno(errno::EISDIR, format!("inode {ino} is a directory")));
            }
            _ => return Err(Error::invalid(format!("inode {ino} is not a file"))),
        }
        let file = self.opened(origin, pin.clone(), &mut state, mode);
        drop(state);
        if mode.truncate && mode.write {
            self.changes.tell(origin, || vec![Change::Inode(ino)]);
        }
        Ok(file)
    }

    pub(crate) fn opened(
        self: &Arc<Self>,
        origin: Origin,
        pin: Pin,
        state: &mut State,
        mode: OpenMode,
    ) -> OpenFile {
        state.opens += 1;
        state.writers += u32::from(mode.write);
        OpenFile { volume: Arc::clone(self), body: Body::Live(pin), origin, mode }
    }

    /// The last close of a file without a name ends it.
    fn closed(&self, pin: &Pin, mode: OpenMode) {
        let mut state = if pin.lock().inode.nlink == 0 { pin.lock_idle() } else { pin.lock() };
        state.opens -= 1;
        state.writers -= u32::from(mode.write);
        if state.opens == 0 && state.inode.nlink == 0 && !state.removed {
            let mut writes = erase(pin.ino, &state.committed_record());
            writes.push(Write::Delete(key::orphan(pin.ino, self.store.session())));
            match self.commit(Commit { preconditions: Vec::new(), writes }) {
                Ok(()) => self.forget_bytes(&mut state),
                // The orphan record stays: the next start removes the inode.
                Err(error) => tracing::error!(ino = pin.ino.0, %error, "a deleted file could not be removed"),
            }
        } else if state.writers == 0 && state.writer.is_some() {
            // The flusher closes its file segment.
            self.flusher.enqueue(pin, &mut state);
        }
    }

    pub(crate) fn placed(&self, ino: Ino, at: At, fetch: Fetch) -> Placed<'_> {
        Placed { store: &*self.store, segments: &self.segments, ino, at, fetch }
    }

    pub(crate) fn read_pinned(&self, pin: &Pin, offset: u64, out: &mut [u8], fetch: Fetch) -> Result<usize> {
        match self.read_once(pin, offset, out, fetch) {
            // The collector may have taken a segment between the look at the extents and the read: the
            // extents say by now where the bytes are.
            Err(error) if is_missing(&error) || error.kind() == Kind::NotFound => {
                self.read_once(pin, offset, out, fetch).map_err(lost)
            }
            outcome => outcome,
        }
    }

    fn read_once(&self, pin: &Pin, offset: u64, out: &mut [u8], fetch: Fetch) -> Result<usize> {
        let (length, needed, overlay) = {
            let state = pin.lock();
            let length = state.inode.size.saturating_sub(offset).min(out.len() as u64) as usize;
            if length == 0 {
                return Ok(0);
            }
            let out = &mut out[..length];
            if state.dirty.read(offset, out) {
                return Ok(length);
            }
            let end = offset + length as u64;
            let needed: Vec<Extent> = extents::touching(&state.extents, offset, end).to_vec();
            let overlay = (!state.dirty.is_empty() || state.flushing.is_some()).then(|| {
                // Rare: a file that is read while it is written. Both layers are copied before the lock goes.
                let mut layers: Vec<(u64, Vec<u8>)> = Vec::new();
                let flushing = state.flushing.iter().flat_map(|ranges| ranges.iter());
                for (start, bytes) in flushing.chain(state.dirty.iter()) {
                    let from = start.max(offset);
                    let to = end.min(start + bytes.len() as u64);
                    if from < to {
                        layers.push((from, bytes[(from - start) as usize..(to - start) as usize].to_vec()));
                    }
                }
                layers
            });
            (length, needed, overlay)
        };
        let out = &mut out[..length];
        self.placed(pin.ino, At::Latest, fetch).read(&needed, offset, out).map_err(|error| {
            let path = self.names.path(pin.ino);
            error.context(format_args!("file {:?} (inode {})", String::from_utf8_lossy(&path), pin.ino))
        })?;
        for (start, bytes) in overlay.into_iter().flatten() {
            let at = (start - offset) as usize;
            out[at..at + bytes.len()].copy_from_slice(&bytes);
        }
        self.counters.read_bytes.increment(length as u64);
        Ok(length)
    }

    fn write_pinned(&self, pin: &Pin, offset: Option<u64>, bytes: &[u8]) -> Result<u64> {
        self.flusher.admit(bytes.len() as u64)?;
        let mut state = pin.lock();
        let offset = offset.unwrap_or(state.inode.size);
        let Some(end) = offset.checked_add(bytes.len() as u64).filter(|end| *end <= FILE_BYTES_MAX) else {
            self.flusher.gate.release(bytes.len() as u64);
            return Err(Error::errno(errno::EFBIG, format!("offset {offset} is beyond the largest file")));
        };
        if state.removed {
            self.flusher.gate.release(bytes.len() as u64);
            return Err(no_inode(pin.ino));
        }
        let before = state.dirty.bytes();
        state.dirty.write(offset, bytes);
        // What was dirty already is counted already.
        self.flusher.gate.release(bytes.len() as u64 - (state.dirty.bytes() - before));
        state.inode.size = state.inode.size.max(end);
        let now = time::wall_now();
        state.inode.mtime = now;
        state.inode.ctime = now;
        self.flusher.enqueue(pin, &mut state);
        let large = state.dirty.bytes() >= (4 << 20);
        drop(state);
        self.counters.written_bytes.increment(bytes.len() as u64);
        if large && let Err(error) = self.flusher.spill_if_streaming(pin) {
            // The bytes are still in memory; the flusher tries again, and admits no more until it succeeds.
            tracing::debug!(ino = pin.ino.0, %error, "spill failed");
        }
        Ok(offset)
    }
}

/// An open file; dropping it is the close. Safe to use from many threads.
#[derive(Debug)]
pub struct OpenFile {
    volume: Arc<Volume>,
    body: Body,
    origin: Origin,
    mode: OpenMode,
}

#[derive(Debug)]
enum Body {
    Live(Pin),
    Past(Box<PastFile>),
}

impl OpenFile {
    pub fn ino(&self) -> Ino {
        match &self.body {
            Body::Live(pin) => pin.ino,
            Body::Past(past) => past.ino(),
        }
    }

    pub fn mode(&self) -> OpenMode {
        self.mode
    }

    pub fn attr(&self) -> Result<Attr> {
        Ok(match &self.body {
            Body::Live(pin) => pin.lock().attr(pin.ino),
            Body::Past(past) => past.attr(),
        })
    }

    /// Fills `out` from `offset`; fewer bytes only at the end of the file.
    pub fn read(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.read_as(offset, out, Fetch::Wait)
    }

    /// `read` for a thread that others wait for: `is_not_here` of the error if it would have to wait for the object
    /// tier.
    pub fn read_at_hand(&self, offset: u64, out: &mut [u8]) -> Result<usize> {
        self.read_as(offset, out, Fetch::Refuse)
    }

    fn read_as(&self, offset: u64, out: &mut [u8], fetch: Fetch) -> Result<usize> {
        if !self.mode.read {
            return Err(Error::errno(errno::EBADF, "the file is not open for reading"));
        }
        match &self.body {
            Body::Live(pin) => self.volume.read_pinned(pin, offset, out, fetch),
            Body::Past(past) => self.volume.read_past(past, offset, out, fetch),
        }
    }

    pub fn write(&self, offset: u64, bytes: &[u8]) -> Result<()> {
        self.write_at(Some(offset), bytes).map(drop)
    }

    /// Writes at the end of the file, wherever that is by then. Gives the offset it wrote at.
    pub fn append(&self, bytes: &[u8]) -> Result<u64> {
        self.write_at(None, bytes)
    }

    fn write_at(&self, offset: Option<u64>, bytes: &[u8]) -> Result<u64> {
        let pin = self.writable()?;
        let at = self.volume.write_pinned(pin, offset, bytes)?;
        self.volume.changes.tell(self.origin, || vec![Change::Inode(pin.ino)]);
        Ok(at)
    }

    pub fn truncate(&self, size: u64) -> Result<Attr> {
        let pin = self.writable()?;
        let attr = self.volume.truncate(pin, size)?;
        self.volume.changes.tell(self.origin, || vec![Change::Inode(pin.ino)]);
        Ok(attr)
    }

    /// What was written before is durable when it returns, name and attributes included.
    pub fn fsync(&self) -> Result<()> {
        let waits = self.begin_fsync()?;
        self.volume.flusher.wait_clean(&waits)
    }

    /// `fsync` that does not wait for the object tier: `done` is called when it is over, on this thread or another.
    pub fn start_fsync(&self, done: impl FnOnce(Result<()>) + Send + 'static) {
        match self.begin_fsync() {
            Ok(waits) => self.volume.flusher.when_clean(&waits, done),
            Err(error) => done(Err(error)),
        }
    }

    fn begin_fsync(&self) -> Result<Vec<SegmentId>> {
        match &self.body {
            Body::Live(pin) => self.volume.flusher.fsync(pin),
            Body::Past(_) => Ok(Vec::new()),
        }
    }

    /// Bytes are in a segment and committed, not necessarily durable.
    pub fn flush(&self) -> Result<()> {
        match &self.body {
            Body::Live(pin) => self.volume.flusher.flush_inode(pin, Again::Nothing),
            Body::Past(_) => Ok(()),
        }
    }

    fn writable(&self) -> Result<&Pin> {
        match &self.body {
            Body::Live(pin) if self.mode.write => Ok(pin),
            _ => Err(Error::errno(errno::EBADF, "the file is not open for writing")),
        }
    }
}

impl Drop for OpenFile {
    fn drop(&mut self) {
        if let Body::Live(pin) = &self.body {
            self.volume.closed(pin, self.mode);
        }
    }
}
