//! Metadata values: what they are, and their bytes in the store. Which key holds which: `key`.
//!
//! Every record opens with a layout byte, so that a later release can tell old bytes from new ones; 1 is the
//! only layout yet. `n` is a varint (LEB128: 7 bits a byte, low first, at most 10 bytes), `z` a zigzag varint
//! (0, -1, 1, -2, ..); `u16`, `u32` and `i64` have fixed width, little-endian; ids are 16 bytes, big-endian.
//!
//! ```text
//! Inode        1 | u16 st_mode | u8 content | n uid | n gid | n nlink | n rdev | n size
//!                | i64 mtime | z atime - mtime | z ctime - mtime | z btime - mtime | n parent | n quota_root
//!                | content: 0 Empty nothing | 1 Target: n bytes, bytes | 2 Extents: extents | 3 Regions nothing
//! extents      n count | count times: n file_offset | n length | u8 place
//!                | 0 Pack:   segment id | n offset | n offset - check.start | n check.covered | n count | u32 crcs
//!                | 1 File:   segment id | n offset
//!                | 2 Inline: n slot | n offset
//! region row   1 | extents
//! Dentry       1 | u8 kind (as st_mode >> 12) | n ino
//! DirDelta     1 | z entries | z subdirectories | i64 changed
//! Session      1 | u8 state (0 alive, 1 ended, 2 dead) | n node | n pid | n bytes, host | i64 started | n last_op
//! Pending      1 | u8 kind (1 pack, 2 file) | session id
//! Seal         1 | n version | n root | i64 created | n samples | n bytes | n bytes, path
//! Snapshot     1 | n version | i64 created
//! Backup       1 | n version | i64 created | u32 crc of what has no versions
//! Volume       1 | volume id | n format | i64 created
//! number       1 | n number
//! ```
//! The inode of a small file with one chunk takes about 60 bytes.
//!
//! Invariant: equal values have equal bytes (commits compare them), and no bytes make `decode` panic. What
//! later readers rely on is checked here once: extents are in order and do not overlap, no sum of offset and
//! length overflows, an extent in a pack lies within what its checksums cover.

use headrace_base::ids::VolumeId;
use headrace_base::time::Timestamp;
use headrace_base::{Error, Ino, OpId, Result, SegmentId, SessionId, Version};
use smallvec::SmallVec;

use crate::{CHUNK, message};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum FileKind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

/// All that the file system knows of an inode, but for names, xattrs and (for directories) deltas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inode {
    pub kind: FileKind,
    /// Permission bits, setuid, setgid and sticky: the low 12 bits of st_mode.
    pub mode: u16,
    pub uid: u32,
    pub gid: u32,
    pub nlink: u32,
    pub rdev: u32,
    pub size: u64,
    pub atime: Timestamp,
    pub mtime: Timestamp,
    pub ctime: Timestamp,
    pub btime: Timestamp,
    /// The directory that holds a directory; for others the one it was created in (a hint for rescue).
    pub parent: Ino,
    /// The inode whose quota this one counts against; the root until quotas exist.
    pub quota_root: Ino,
    pub content: Content,
}

/// Where an inode's bytes are.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Content {
    /// Nothing: directories, devices, empty files, files that are one hole.
    Empty,
    /// The target of a symbolic link.
    Target(Vec<u8>),
    /// Up to `EXTENTS_INLINE_MAX` extents, here. In order of file offset, never overlapping.
    Extents(Vec<Extent>),
    /// More than that: in rows of their own, one for each 64 MiB of the file (`key::extents`).
    Regions,
}

pub const EXTENTS_INLINE_MAX: usize = 4;
pub const REGION: u64 = 64 << 20;

/// One run of a file's bytes. What no extent covers, below the file's size, reads as zeros.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Extent {
    pub file_offset: u64,
    pub length: u64,
    pub place: Place,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Place {
    /// In a pack segment, at `offset`, verified by the checksums that travel with the extent.
    Pack { segment: SegmentId, offset: u64, check: Check },
    /// In a file segment, at `offset`, verified by the index beside the segment (`ULID.idx`).
    File { segment: SegmentId, offset: u64 },
    /// In the metadata store itself (`key::inline(ino, slot)`), from byte `offset` of that value on.
    /// Where small fsynced data rides until it moves to a pack.
    Inline { slot: u64, offset: u64 },
}

/// CRC32C of each `CHUNK` of the pack record that an extent lies in. The extent may be a part of the
/// record (after overwrites and truncation); then only the chunks that it touches are kept.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Check {
    /// Where in the segment the first listed chunk begins; at or before the extent's offset.
    pub start: u64,
    /// How many bytes the listed chunks cover from `start`; all but the last chunk are `CHUNK` long.
    pub covered: u64,
    pub crcs: SmallVec<[u32; 1]>,
}

/// What a name in a directory leads to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Dentry {
    pub ino: Ino,
    pub kind: FileKind,
}

/// What one node changed of a directory: cumulative, so that a row per node is enough.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct DirDelta {
    pub entries: i64,
    /// Subdirectories: each adds a link to its parent.
    pub subdirectories: i64,
    /// The latest change of the directory by this node; mtime and ctime are the greatest of all rows
    /// and of the inode's own.
    pub changed: Timestamp,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Session {
    pub state: SessionState,
    pub node: u32,
    pub pid: u32,
    pub host: String,
    pub started: Timestamp,
    /// The greatest op-id of this session that is in the store.
    pub last_op: OpId,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SessionState {
    Alive,
    /// Ended by itself.
    Ended,
    /// Declared dead by another: nothing of it may commit any more.
    Dead,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SegmentKind {
    Pack,
    File,
}

/// A segment that its writer may still add to or has not named yet.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Pending {
    pub session: SessionId,
    pub kind: SegmentKind,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seal {
    pub version: Version,
    pub path: Vec<u8>,
    pub root: Ino,
    pub created: Timestamp,
    pub samples: u64,
    pub bytes: u64,
}

/// A version of the whole volume that has a name (`key::snapshot`).
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Snapshot {
    pub version: Version,
    pub created: Timestamp,
}

/// The last metadata backup that is complete (`key::backup`). Its version is kept by `key::held`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Backup {
    pub version: Version,
    pub created: Timestamp,
    /// CRC32C of the rows without versions that went with it: whether those have changed since.
    pub globals_crc: u32,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VolumeRecord {
    pub volume: VolumeId,
    pub format: u32,
    pub created: Timestamp,
}

impl FileKind {
    pub const ALL: [FileKind; 7] = [
        FileKind::File,
        FileKind::Directory,
        FileKind::Symlink,
        FileKind::Fifo,
        FileKind::Socket,
        FileKind::CharDevice,
        FileKind::BlockDevice,
    ];

    /// The type bits of st_mode, as Linux numbers them (linux/stat.h); shifted right by 12 they are the
    /// `d_type` of a directory entry.
    pub const fn st_type(self) -> u32 {
        match self {
            FileKind::Fifo => 0o010_000,
            FileKind::CharDevice => 0o020_000,
            FileKind::Directory => 0o040_000,
            FileKind::BlockDevice => 0o060_000,
            FileKind::File => 0o100_000,
            FileKind::Symlink => 0o120_000,
            FileKind::Socket => 0o140_000,
        }
    }

    /// The kind that st_mode's type bits name, whatever the permission bits. None: no kind of Linux's.
    pub const fn of_st_mode(st_mode: u32) -> Option<FileKind> {
        Some(match st_mode & 0o170_000 {
            0o010_000 => FileKind::Fifo,
            0o020_000 => FileKind::CharDevice,
            0o040_000 => FileKind::Directory,
            0o060_000 => FileKind::BlockDevice,
            0o100_000 => FileKind::File,
            0o120_000 => FileKind::Symlink,
            0o140_000 => FileKind::Socket,
            _ => return None,
        })
    }
}

impl From<FileKind> for message::Kind {
    fn from(kind: FileKind) -> Self {
        match kind {
            FileKind::File => message::Kind::File,
            FileKind::Directory => message::Kind::Directory,
            FileKind::Symlink => message::Kind::Symlink,
            FileKind::Fifo => message::Kind::Fifo,
            FileKind::Socket => message::Kind::Socket,
            FileKind::CharDevice => message::Kind::CharDevice,
            FileKind::BlockDevice => message::Kind::BlockDevice,
        }
    }
}

impl From<message::Kind> for FileKind {
    fn from(kind: message::Kind) -> Self {
        match kind {
            message::Kind::File => FileKind::File,
            message::Kind::Directory => FileKind::Directory,
            message::Kind::Symlink => FileKind::Symlink,
            message::Kind::Fifo => FileKind::Fifo,
            message::Kind::Socket => FileKind::Socket,
            message::Kind::CharDevice => FileKind::CharDevice,
            message::Kind::BlockDevice => FileKind::BlockDevice,
        }
    }
}

impl Extent {
    /// Where in the file the extent ends. Never overflows for an extent that was decoded.
    pub fn end(&self) -> u64 {
        self.file_offset + self.length
    }
}

const LAYOUT: u8 = 1;

/// Writes fields in the order of the layout.
struct Writer(Vec<u8>);

impl Writer {
    fn new(bytes_likely: usize) -> Writer {
        let mut out = Vec::with_capacity(bytes_likely);
        out.push(LAYOUT);
        Writer(out)
    }

    fn byte(&mut self, value: u8) {
        self.0.push(value);
    }

    fn number(&mut self, mut value: u64) {
        while value >= 0x80 {
            self.0.push(value as u8 | 0x80);
            value >>= 7;
        }
        self.0.push(value as u8);
    }

    fn signed(&mut self, value: i64) {
        self.number(((value << 1) ^ (value >> 63)) as u64);
    }

    fn time(&mut self, value: Timestamp) {
        self.0.extend_from_slice(&value.0.to_le_bytes());
    }

    fn raw(&mut self, bytes: &[u8]) {
        self.0.extend_from_slice(bytes);
    }

    fn counted(&mut self, bytes: &[u8]) {
        self.number(bytes.len() as u64);
        self.raw(bytes);
    }

    fn extents(&mut self, extents: &[Extent]) {
        self.number(extents.len() as u64);
        for extent in extents {
            self.number(extent.file_offset);
            self.number(extent.length);
            match &extent.place {
                Place::Pack { segment, offset, check } => {
                    debug_assert!(check.start <= *offset, "checksums begin after the extent: {extent:?}");
                    self.byte(0);
                    self.raw(&segment.to_bytes());
                    self.number(*offset);
                    self.number(offset.wrapping_sub(check.start));
                    self.number(check.covered);
                    self.number(check.crcs.len() as u64);
                    for crc in &check.crcs {
                        self.raw(&crc.to_le_bytes());
                    }
                }
                Place::File { segment, offset } => {
                    self.byte(1);
                    self.raw(&segment.to_bytes());
                    self.number(*offset);
                }
                Place::Inline { slot, offset } => {
                    self.byte(2);
                    self.number(*slot);
                    self.number(*offset);
                }
            }
        }
    }
}

/// Reads what `Writer` wrote. Every error names the record and the byte at which reading stopped.
struct Reader<'a> {
    what: &'static str,
    bytes: &'a [u8],
    at: usize,
}

impl<'a> Reader<'a> {
    fn new(what: &'static str, bytes: &'a [u8]) -> Result<Reader<'a>> {
        let mut reader = Reader { what, bytes, at: 0 };
        match reader.byte()? {
            LAYOUT => Ok(reader),
            other => Err(reader.corrupt(format_args!(
                "has layout {other}; this engine reads layout {LAYOUT}: a newer engine wrote it, or it is damaged"
            ))),
        }
    }

    #[cold]
    fn corrupt(&self, why: impl std::fmt::Display) -> Error {
        Error::corrupt(format!(
            "{} record of {} bytes, at byte {}: {why}",
            self.what,
            self.bytes.len(),
            self.at
        ))
    }

    #[inline]
    fn take(&mut self, count: usize) -> Result<&'a [u8]> {
        match self.bytes[self.at..].get(..count) {
            Some(taken) => {
                self.at += count;
                Ok(taken)
            }
            None => Err(self.corrupt(format_args!("it ends where {count} more bytes are due"))),
        }
    }

    #[inline]
    fn array<const N: usize>(&mut self) -> Result<[u8; N]> {
        match self.bytes[self.at..].first_chunk::<N>() {
            Some(taken) => {
                self.at += N;
                Ok(*taken)
            }
            None => Err(self.corrupt(format_args!("it ends where {N} more bytes are due"))),
        }
    }

    #[inline]
    fn byte(&mut self) -> Result<u8> {
        Ok(self.array::<1>()?[0])
    }

    #[inline]
    fn number(&mut self) -> Result<u64> {
        match self.bytes.get(self.at) {
            Some(&byte) if byte < 0x80 => {
                self.at += 1;
                Ok(u64::from(byte))
            }
            _ => self.long_number(),
        }
    }

    fn long_number(&mut self) -> Result<u64> {
        let mut value = 0;
        for shift in (0..64).step_by(7) {
            let byte = self.byte()?;
            // The tenth byte holds bit 63 alone.
            if shift == 63 && byte > 1 {
                return Err(self.corrupt("a number is larger than 64 bits"));
            }
            value |= u64::from(byte & 0x7F) << shift;
            if byte < 0x80 {
                // One value, one encoding: a zero last byte would be a second one.
                if byte == 0 {
                    return Err(self.corrupt("a number is longer than it has to be"));
                }
                return Ok(value);
            }
        }
        Err(self.corrupt("a number is larger than 64 bits"))
    }

    #[inline]
    fn number32(&mut self) -> Result<u32> {
        let value = self.number()?;
        u32::try_from(value).map_err(|_| self.corrupt(format_args!("{value} is larger than 32 bits")))
    }

    #[inline]
    fn signed(&mut self) -> Result<i64> {
        let value = self.number()?;
        Ok((value >> 1) as i64 ^ -((value & 1) as i64))
    }

    #[inline]
    fn time(&mut self) -> Result<Timestamp> {
        Ok(Timestamp(i64::from_le_bytes(self.array()?)))
    }

    fn counted(&mut self) -> Result<&'a [u8]> {
        let count = self.number()?;
        // A length beyond the address space is beyond the record too.
        self.take(usize::try_from(count).unwrap_or(usize::MAX))
    }

    fn extents(&mut self) -> Result<Vec<Extent>> {
        /// The shortest extent: four numbers of one byte, and the place.
        const EXTENT_BYTES_MIN: usize = 5;
        let count = self.number()?;
        let possible = (self.bytes.len() - self.at) / EXTENT_BYTES_MIN;
        if count > possible as u64 {
            return Err(self.corrupt(format_args!("{count} extents cannot lie in what is left")));
        }
        let mut extents = Vec::with_capacity(count as usize);
        let mut end = 0;
        for _ in 0..count {
            let file_offset = self.number()?;
            let length = self.number()?;
            if file_offset < end {
                return Err(self.corrupt(format_args!("extent at {file_offset} begins before {end}")));
            }
            end = self.sum(file_offset, length)?;
            let place = self.place(length)?;
            extents.push(Extent { file_offset, length, place });
        }
        Ok(extents)
    }

    #[inline]
    fn place(&mut self, length: u64) -> Result<Place> {
        Ok(match self.byte()? {
            0 => {
                let segment = SegmentId::from_bytes(self.array()?);
                let offset = self.number()?;
                let back = self.number()?;
                let covered = self.number()?;
                let Some(start) = offset.checked_sub(back) else {
                    return Err(
                        self.corrupt(format_args!("checksums begin {back} bytes before offset {offset}"))
                    );
                };
                if self.sum(offset, length)? > self.sum(start, covered)? {
                    return Err(self.corrupt(format_args!(
                        "extent of {length} bytes at {offset} of segment {segment} ends after its checksums \
                         ({covered} bytes from {start})"
                    )));
                }
                let count = self.number()?;
                if count != covered.div_ceil(CHUNK) {
                    return Err(self.corrupt(format_args!("{count} checksums for {covered} bytes")));
                }
                let raw = self.take(usize::try_from(count).unwrap_or(usize::MAX).saturating_mul(4))?;
                let (words, _) = raw.as_chunks::<4>();
                let crcs = words.iter().map(|word| u32::from_le_bytes(*word)).collect();
                Place::Pack { segment, offset, check: Check { start, covered, crcs } }
            }
            1 => {
                let segment = SegmentId::from_bytes(self.array()?);
                let offset = self.number()?;
                self.sum(offset, length)?;
                Place::File { segment, offset }
            }
            2 => {
                let slot = self.number()?;
                let offset = self.number()?;
                self.sum(offset, length)?;
                Place::Inline { slot, offset }
            }
            other => return Err(self.corrupt(format_args!("{other} is no place of an extent"))),
        })
    }

    #[inline]
    fn sum(&self, offset: u64, length: u64) -> Result<u64> {
        offset
            .checked_add(length)
            .ok_or_else(|| self.corrupt(format_args!("{length} bytes at {offset} end beyond 64 bits")))
    }

    fn end(&self) -> Result<()> {
        if self.at == self.bytes.len() { Ok(()) } else { Err(self.corrupt("more bytes than the record has")) }
    }
}

impl Inode {
    pub fn encode(&self) -> Vec<u8> {
        debug_assert!(self.mode <= 0o7777, "mode {:o} holds more than permission bits", self.mode);
        let (content, more) = match &self.content {
            Content::Empty => (0, 0),
            Content::Target(target) => (1, target.len()),
            Content::Extents(extents) => (2, extents.len() * 40),
            Content::Regions => (3, 0),
        };
        let mut out = Writer::new(56 + more);
        let st_mode = self.kind.st_type() as u16 | (self.mode & 0o7777);
        out.raw(&st_mode.to_le_bytes());
        out.byte(content);
        for number in [self.uid, self.gid, self.nlink, self.rdev] {
            out.number(u64::from(number));
        }
        out.number(self.size);
        out.time(self.mtime);
        for time in [self.atime, self.ctime, self.btime] {
            // Wrapping both ways: any pair of times comes back.
            out.signed(time.0.wrapping_sub(self.mtime.0));
        }
        out.number(self.parent.0);
        out.number(self.quota_root.0);
        match &self.content {
            Content::Empty | Content::Regions => {}
            Content::Target(target) => out.counted(target),
            Content::Extents(extents) => out.extents(extents),
        }
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("inode", bytes)?;
        let st_mode = u16::from_le_bytes(from.array()?);
        let Some(kind) = FileKind::of_st_mode(u32::from(st_mode)) else {
            return Err(from.corrupt(format_args!("mode {st_mode:o} is of no kind")));
        };
        let content = from.byte()?;
        let uid = from.number32()?;
        let gid = from.number32()?;
        let nlink = from.number32()?;
        let rdev = from.number32()?;
        let size = from.number()?;
        let mtime = from.time()?;
        let atime = Timestamp(mtime.0.wrapping_add(from.signed()?));
        let ctime = Timestamp(mtime.0.wrapping_add(from.signed()?));
        let btime = Timestamp(mtime.0.wrapping_add(from.signed()?));
        let parent = Ino(from.number()?);
        let quota_root = Ino(from.number()?);
        let content = match content {
            0 => Content::Empty,
            1 => Content::Target(from.counted()?.to_vec()),
            2 => Content::Extents(from.extents()?),
            3 => Content::Regions,
            other => return Err(from.corrupt(format_args!("{other} is no content"))),
        };
        from.end()?;
        Ok(Inode {
            kind,
            mode: st_mode & 0o7777,
            uid,
            gid,
            nlink,
            rdev,
            size,
            atime,
            mtime,
            ctime,
            btime,
            parent,
            quota_root,
            content,
        })
    }
}

/// The value of `key::extents`.
pub fn encode_extents(extents: &[Extent]) -> Vec<u8> {
    let mut out = Writer::new(4 + extents.len() * 40);
    out.extents(extents);
    out.0
}

pub fn decode_extents(bytes: &[u8]) -> Result<Vec<Extent>> {
    let mut from = Reader::new("extents", bytes)?;
    let extents = from.extents()?;
    from.end()?;
    Ok(extents)
}

/// The value of `key::next_inode`.
pub fn encode_number(number: u64) -> Vec<u8> {
    let mut out = Writer::new(11);
    out.number(number);
    out.0
}

pub fn decode_number(bytes: &[u8]) -> Result<u64> {
    let mut from = Reader::new("number", bytes)?;
    let number = from.number()?;
    from.end()?;
    Ok(number)
}

impl Dentry {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(12);
        out.byte((self.kind.st_type() >> 12) as u8);
        out.number(self.ino.0);
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("dentry", bytes)?;
        let number = from.byte()?;
        let Some(kind) = FileKind::of_st_mode(u32::from(number) << 12).filter(|_| number < 16) else {
            return Err(from.corrupt(format_args!("{number} is no kind")));
        };
        let ino = Ino(from.number()?);
        from.end()?;
        Ok(Dentry { ino, kind })
    }
}

impl DirDelta {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(16);
        out.signed(self.entries);
        out.signed(self.subdirectories);
        out.time(self.changed);
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("directory delta", bytes)?;
        let delta =
            DirDelta { entries: from.signed()?, subdirectories: from.signed()?, changed: from.time()? };
        from.end()?;
        Ok(delta)
    }
}

impl Session {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(32 + self.host.len());
        out.byte(match self.state {
            SessionState::Alive => 0,
            SessionState::Ended => 1,
            SessionState::Dead => 2,
        });
        out.number(u64::from(self.node));
        out.number(u64::from(self.pid));
        out.counted(self.host.as_bytes());
        out.time(self.started);
        out.number(self.last_op.0);
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("session", bytes)?;
        let state = match from.byte()? {
            0 => SessionState::Alive,
            1 => SessionState::Ended,
            2 => SessionState::Dead,
            other => return Err(from.corrupt(format_args!("{other} is no state of a session"))),
        };
        let node = from.number32()?;
        let pid = from.number32()?;
        let host = from.counted()?.to_vec();
        let host = String::from_utf8(host).map_err(|_| from.corrupt("the host's name is not UTF-8"))?;
        let started = from.time()?;
        let last_op = OpId(from.number()?);
        from.end()?;
        Ok(Session { state, node, pid, host, started, last_op })
    }
}

impl SegmentKind {
    /// Its number on disk: here, in manifests and in segment headers.
    pub const fn number(self) -> u8 {
        match self {
            SegmentKind::Pack => 1,
            SegmentKind::File => 2,
        }
    }

    pub const fn of_number(number: u8) -> Option<SegmentKind> {
        match number {
            1 => Some(SegmentKind::Pack),
            2 => Some(SegmentKind::File),
            _ => None,
        }
    }
}

impl Pending {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(18);
        out.byte(self.kind.number());
        out.raw(&self.session.to_bytes());
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("pending segment", bytes)?;
        let number = from.byte()?;
        let Some(kind) = SegmentKind::of_number(number) else {
            return Err(from.corrupt(format_args!("{number} is no kind of segment")));
        };
        let session = SessionId::from_bytes(from.array()?);
        from.end()?;
        Ok(Pending { session, kind })
    }
}

impl Seal {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(40 + self.path.len());
        out.number(self.version.0);
        out.number(self.root.0);
        out.time(self.created);
        out.number(self.samples);
        out.number(self.bytes);
        out.counted(&self.path);
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("seal", bytes)?;
        let seal = Seal {
            version: Version(from.number()?),
            root: Ino(from.number()?),
            created: from.time()?,
            samples: from.number()?,
            bytes: from.number()?,
            path: from.counted()?.to_vec(),
        };
        from.end()?;
        Ok(seal)
    }
}

impl Snapshot {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(14);
        out.number(self.version.0);
        out.time(self.created);
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("snapshot", bytes)?;
        let snapshot = Snapshot { version: Version(from.number()?), created: from.time()? };
        from.end()?;
        Ok(snapshot)
    }
}

impl Backup {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(18);
        out.number(self.version.0);
        out.time(self.created);
        out.raw(&self.globals_crc.to_le_bytes());
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("backup", bytes)?;
        let version = Version(from.number()?);
        let created = from.time()?;
        let backup = Backup { version, created, globals_crc: u32::from_le_bytes(from.array()?) };
        from.end()?;
        Ok(backup)
    }
}

impl VolumeRecord {
    pub fn encode(&self) -> Vec<u8> {
        let mut out = Writer::new(30);
        out.raw(&self.volume.to_bytes());
        out.number(u64::from(self.format));
        out.time(self.created);
        out.0
    }

    pub fn decode(bytes: &[u8]) -> Result<Self> {
        let mut from = Reader::new("volume", bytes)?;
        let record = VolumeRecord {
            volume: VolumeId::from_bytes(from.array()?),
            format: from.number32()?,
            created: from.time()?,
        };
        from.end()?;
        Ok(record)
    }
}
