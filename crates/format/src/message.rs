//! Requests and answers between a client and its engine, over one Unix stream socket.
//!
//! ```text
//! client -> engine   8 bytes HELLO                      (an HTTP request starts with a letter instead)
//! both ways          frame = header | meta | payload
//! header             u32 meta_bytes | u32 fds | u64 payload_bytes          little-endian, 16 bytes
//! meta               MessagePack map
//! payload            raw bytes: file contents, index arrays
//! ```
//! Descriptors travel by SCM_RIGHTS with the header's bytes. A client sends one request and reads one
//! answer, `{"ok": ..}` or `{"error": ..}`; after `loader` the connection becomes a stream (`Stream*`).
//! Paths are bytes, absolute within the volume. Unknown fields are ignored, unknown ops are `Invalid`.
//! Enums are maps too: the op or event is one field (`{"op": "stat", "path": ..}`). An absent optional field
//! is nil. Examples of every message: tests/golden/wire.json.
//!
//! Framing and conversions are at the end of the file.

use headrace_base::{Error, Result};
use serde::de::DeserializeOwned;
use serde::{Deserialize, Serialize};
use serde_bytes::ByteBuf;

/// Opens a wire connection. The last byte is the wire version.
pub const HELLO: [u8; 8] = *b"\0HRWIRE\x01";
pub const WIRE: u32 = 1;
pub const HEADER: usize = 16;
pub const META_BYTES_MAX: u32 = 16 << 20;
pub const PAYLOAD_BYTES_MAX: u64 = 64 << 20;
pub const FDS_MAX: usize = 8;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "op", rename_all = "snake_case")]
pub enum Request {
    /// -> Welcome. Optional; may be asked at any time.
    Hello {
        client: String,
    },
    Status {},
    /// -> Attr
    Stat {
        path: ByteBuf,
        follow: bool,
    },
    /// Entries with names greater than `after`, in byte order, at most `limit` (0: as many as fit). -> Listing
    List {
        path: ByteBuf,
        after: Option<ByteBuf>,
        limit: u32,
        attrs: bool,
    },
    /// -> Opened
    Open {
        path: ByteBuf,
        flags: OpenFlags,
        mode: u16,
    },
    /// -> payload, shorter than `length` only at the end of the file
    Pread {
        handle: u64,
        offset: u64,
        length: u64,
    },
    /// payload = bytes; offset None appends. -> Written
    Pwrite {
        handle: u64,
        offset: Option<u64>,
    },
    /// -> Attr
    Fstat {
        handle: u64,
    },
    Ftruncate {
        handle: u64,
        size: u64,
    },
    Fsync {
        handle: u64,
    },
    Close {
        handle: u64,
    },
    /// The whole file in one answer, refused (`Invalid`) above `PAYLOAD_BYTES_MAX`. -> payload
    ReadFile {
        path: ByteBuf,
    },
    /// Creates or replaces entries, each atomically; payload = the files' bytes, one after the other in the
    /// order of the entries. `parents`: missing directories are made (0755). -> PutDone
    Put {
        entries: Vec<PutEntry>,
        parents: bool,
        durable: bool,
    },
    Mkdir {
        path: ByteBuf,
        mode: u16,
        parents: bool,
        exist_ok: bool,
    },
    Unlink {
        path: ByteBuf,
    },
    Rmdir {
        path: ByteBuf,
    },
    Rename {
        from: ByteBuf,
        to: ByteBuf,
        noreplace: bool,
        exchange: bool,
    },
    Symlink {
        target: ByteBuf,
        path: ByteBuf,
    },
    Link {
        from: ByteBuf,
        to: ByteBuf,
    },
    /// -> payload
    Readlink {
        path: ByteBuf,
    },
    /// Symbolic links are not followed. -> Attr
    Setattr {
        path: ByteBuf,
        set: SetAttr,
    },
    /// -> payload
    Getxattr {
        path: ByteBuf,
        name: ByteBuf,
    },
    Setxattr {
        path: ByteBuf,
        name: ByteBuf,
        value: ByteBuf,
    },
    /// -> Names
    Listxattr {
        path: ByteBuf,
    },
    Removexattr {
        path: ByteBuf,
        name: ByteBuf,
    },
    /// Everything written before is durable when the answer comes.
    Sync {},
    /// Checks that all is whole; `deep`: reads every byte. -> FsckReport
    Fsck {
        deep: bool,
    },
    /// Looks for packs that are mostly dead or small, and writes them anew. -> Compacted
    Compact {},
    /// Backs the metadata up now, unless nothing changed. Waits for uploads. -> BackupDone
    Backup {},
    /// How much of these files is where. Directories and links have nothing. -> TierReport
    Tier {
        paths: Vec<ByteBuf>,
    },
    /// Brings all of these files to flash. Waits for it. -> TierReport, as it is then
    Warm {
        paths: Vec<ByteBuf>,
    },
    /// Removes segments that are in the object tier from flash: those that hold these files (and what else is in
    /// them); None: all. -> Evicted
    Evict {
        paths: Option<Vec<ByteBuf>>,
    },
    /// Puts files as plain objects into a bucket, each named by its path from `root` on; root and the engine's user
    /// only. Without endpoint or region those of the engine's environment hold. -> Exported
    Export {
        paths: Vec<ByteBuf>,
        root: ByteBuf,
        url: String,
        endpoint: Option<String>,
        region: Option<String>,
    },
    /// -> Statfs
    Statfs {},
    /// Freezes the tree under `path`. -> Sealed, with the manifest's descriptor
    Seal {
        path: ByteBuf,
    },
    /// -> Sealed, with the manifest's descriptor
    OpenSeal {
        seal: String,
    },
    /// -> Seals
    Seals {},
    /// No new reader gets it; who has it open reads on.
    SealDelete {
        seal: String,
    },
    /// Everything written before is in it. -> Snapshot
    SnapshotCreate {
        name: ByteBuf,
    },
    /// In the order of their names. -> Snapshots
    Snapshots {},
    /// What changed from one snapshot to a later one, or to the present (nil). `after`: the `next` of the answer
    /// before. At most `limit` names and inodes are looked at (0: as many as fit). -> Differences
    SnapshotDiff {
        from: ByteBuf,
        to: Option<ByteBuf>,
        after: Option<ByteBuf>,
        limit: u32,
    },
    /// The tree becomes what the snapshot holds; what was before becomes a snapshot. -> Restored
    SnapshotRestore {
        name: ByteBuf,
    },
    SnapshotDelete {
        name: ByteBuf,
    },
    /// payload = indices, u64 little-endian each. -> BatchLayout, with a descriptor (memfd) of that layout
    ReadBatch {
        seal: String,
    },
    /// Turns the connection into a stream of batches.
    Loader(LoaderRequest),
    /// -> Mounted
    Mount {
        mountpoint: ByteBuf,
        read_only: bool,
        allow_other: bool,
    },
    Unmount {
        mountpoint: ByteBuf,
    },
    /// Answers, then stops the engine as SIGTERM does.
    Shutdown {},
}

impl Request {
    /// Its `op` on the wire, also its name in metrics and logs.
    pub fn name(&self) -> &'static str {
        match self {
            Request::Hello { .. } => "hello",
            Request::Status {} => "status",
            Request::Stat { .. } => "stat",
            Request::List { .. } => "list",
            Request::Open { .. } => "open",
            Request::Pread { .. } => "pread",
            Request::Pwrite { .. } => "pwrite",
            Request::Fstat { .. } => "fstat",
            Request::Ftruncate { .. } => "ftruncate",
            Request::Fsync { .. } => "fsync",
            Request::Close { .. } => "close",
            Request::ReadFile { .. } => "read_file",
            Request::Put { .. } => "put",
            Request::Mkdir { .. } => "mkdir",
            Request::Unlink { .. } => "unlink",
            Request::Rmdir { .. } => "rmdir",
            Request::Rename { .. } => "rename",
            Request::Symlink { .. } => "symlink",
            Request::Link { .. } => "link",
            Request::Readlink { .. } => "readlink",
            Request::Setattr { .. } => "setattr",
            Request::Getxattr { .. } => "getxattr",
            Request::Setxattr { .. } => "setxattr",
            Request::Listxattr { .. } => "listxattr",
            Request::Removexattr { .. } => "removexattr",
            Request::Sync {} => "sync",
            Request::Fsck { .. } => "fsck",
            Request::Compact {} => "compact",
            Request::Backup {} => "backup",
            Request::Tier { .. } => "tier",
            Request::Warm { .. } => "warm",
            Request::Evict { .. } => "evict",
            Request::Export { .. } => "export",
            Request::Statfs {} => "statfs",
            Request::Seal { .. } => "seal",
            Request::OpenSeal { .. } => "open_seal",
            Request::Seals {} => "seals",
            Request::SealDelete { .. } => "seal_delete",
            Request::SnapshotCreate { .. } => "snapshot_create",
            Request::Snapshots {} => "snapshots",
            Request::SnapshotDiff { .. } => "snapshot_diff",
            Request::SnapshotRestore { .. } => "snapshot_restore",
            Request::SnapshotDelete { .. } => "snapshot_delete",
            Request::ReadBatch { .. } => "read_batch",
            Request::Loader(_) => "loader",
            Request::Mount { .. } => "mount",
            Request::Unmount { .. } => "unmount",
            Request::Shutdown {} => "shutdown",
        }
    }
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct OpenFlags {
    pub read: bool,
    pub write: bool,
    pub create: bool,
    pub exclusive: bool,
    pub truncate: bool,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(default)]
pub struct SetAttr {
    pub mode: Option<u16>,
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub size: Option<u64>,
    pub atime_ns: Option<i64>,
    pub mtime_ns: Option<i64>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PutEntry {
    pub path: ByteBuf,
    pub kind: Kind,
    pub mode: u16,
    /// None: the caller's. Another's only if the caller is root.
    pub uid: Option<u32>,
    pub gid: Option<u32>,
    pub mtime_ns: Option<i64>,
    /// Bytes of the payload that are this file's.
    #[serde(default)]
    pub size: u64,
    /// Symlink target, or for `hard_link` the path of the file linked to.
    #[serde(default)]
    pub target: Option<ByteBuf>,
    #[serde(default)]
    pub hard_link: bool,
    #[serde(default)]
    pub rdev: u32,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Kind {
    File,
    Directory,
    Symlink,
    Fifo,
    Socket,
    CharDevice,
    BlockDevice,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct LoaderRequest {
    pub seal: String,
    pub batch_size: u32,
    pub shuffle: bool,
    pub seed: u64,
    pub epoch: u64,
    pub drop_last: bool,
    /// The first batch to send; earlier ones are skipped at no cost.
    pub first_batch: u64,
    /// Batches gathered ahead of what the client has taken.
    pub prefetch: u32,
    /// This rank takes positions rank, rank + world_size, .. of the epoch's order.
    pub rank: u32,
    pub world_size: u32,
}

/// What an engine sends on a stream, in the order of the batches.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum StreamEvent {
    /// Slot `slot` holds this batch until the client releases it. A slot's first use carries its memfd.
    Batch {
        batch: u64,
        slot: u32,
        layout: BatchLayout,
    },
    End {},
    Error(ErrorBody),
}

/// What a client sends on a stream.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum StreamCommand {
    Release { slot: u32 },
}

/// A batch in shared memory: `indices` u64 at 0; `offsets` u64, count + 1 of them, from the start of the
/// data on; data from `data_at`. Sample i is data[offsets[i]..offsets[i + 1]].
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BatchLayout {
    pub count: u64,
    pub offsets_at: u64,
    pub data_at: u64,
    pub data_bytes: u64,
    /// The whole mapping, a multiple of 4096.
    pub slot_bytes: u64,
    /// Nanoseconds the engine took to gather it, and how long it then waited to be sent.
    pub gather_ns: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ErrorBody {
    /// `headrace_base::Kind::name`
    pub kind: String,
    pub errno: i32,
    pub message: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Welcome {
    pub wire: u32,
    pub engine: String,
    pub pid: u32,
    pub volume: String,
    pub format: u32,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Attr {
    pub ino: u64,
    pub kind: Kind,
    pub mode: u16,
    pub nlink: u32,
    pub uid: u32,
    pub gid: u32,
    pub rdev: u32,
    pub size: u64,
    pub blocks: u64,
    pub atime_ns: i64,
    pub mtime_ns: i64,
    pub ctime_ns: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Listing {
    pub entries: Vec<ListEntry>,
    /// Pass as `after` for the rest; None at the end.
    pub next: Option<ByteBuf>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ListEntry {
    pub name: ByteBuf,
    pub ino: u64,
    pub kind: Kind,
    pub attr: Option<Attr>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Opened {
    pub handle: u64,
    pub attr: Attr,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Written {
    pub offset: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct PutDone {
    pub created: u64,
    pub replaced: u64,
    pub bytes: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Names {
    pub names: Vec<ByteBuf>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Statfs {
    pub bytes_total: u64,
    pub bytes_free: u64,
    pub bytes_available: u64,
    pub inodes_used: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Sealed {
    pub seal: String,
    pub version: u64,
    pub path: ByteBuf,
    pub samples: u64,
    pub bytes: u64,
    pub manifest_bytes: u64,
    pub created_ns: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Seals {
    pub seals: Vec<Sealed>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshot {
    pub name: ByteBuf,
    pub version: u64,
    pub created_ns: i64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Snapshots {
    pub snapshots: Vec<Snapshot>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Change {
    Added,
    Removed,
    Changed,
    Renamed,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Difference {
    pub change: Change,
    pub kind: Kind,
    pub path: ByteBuf,
    /// Where it was before, if it was renamed.
    pub from: Option<ByteBuf>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Differences {
    pub differences: Vec<Difference>,
    /// Pass as `after` for the rest, of which there may be none; None at the end.
    pub next: Option<ByteBuf>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Restored {
    /// The snapshot of what was before.
    pub before: ByteBuf,
    /// Rows of metadata that were put back.
    pub changed: u64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Mounted {
    /// As the kernel shows it in /proc/self/mounts.
    pub mountpoint: ByteBuf,
    pub notes: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Status {
    pub engine: String,
    pub pid: u32,
    pub volume: String,
    pub path: ByteBuf,
    pub format: u32,
    pub started_ns: i64,
    pub session: String,
    pub resident_bytes: u64,
    pub memory_bytes_max: u64,
    pub buffers_bytes: u64,
    pub dirty_bytes: u64,
    pub mounts: Vec<MountStatus>,
    pub clients: u32,
    pub streams: u32,
    pub seals: u64,
    pub segments: u64,
    pub segment_bytes: u64,
    pub inodes: u64,
    /// None: the volume's segments are durable on its own disk.
    pub object: Option<ObjectStatus>,
    /// What recovery did at this start, a sentence each; empty after a clean stop.
    pub recovery: Vec<String>,
    /// Conditions that a person should know of ("flash 97 % full").
    pub warnings: Vec<String>,
}

/// The object tier and what is on its way into it.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct ObjectStatus {
    /// `s3://bucket/prefix`
    pub location: String,
    pub flash_bytes_max: u64,
    /// On flash and in the object tier.
    pub clean_bytes: u64,
    /// On flash alone.
    pub dirty_bytes: u64,
    pub dirty_segments: u64,
    /// How long the oldest of them has been there.
    pub dirty_ms: u64,
    /// What the last upload that failed said; None: uploads work.
    pub failing: Option<String>,
    /// When the last backup of the metadata that is complete was begun; None: there is none yet.
    pub backup_ns: Option<i64>,
}

/// What a check looked at, and what is wrong.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct FsckReport {
    pub names: u64,
    pub inodes: u64,
    /// Segments that something names.
    pub segments: u64,
    /// Segments that nothing names: garbage that the collector has not taken yet.
    pub unnamed: u64,
    /// Of a deep check.
    pub verified_bytes: u64,
    pub problems_count: u64,
    /// The first of them, a sentence each.
    pub problems: Vec<String>,
}

/// What was written anew: packs, and bytes of all records in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Compacted {
    pub packs: u64,
    pub bytes: u64,
}

/// What a backup of the metadata is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct BackupDone {
    pub version: u64,
    pub created_ns: i64,
    /// False: nothing had changed since that backup.
    pub changed: bool,
    pub rows: u64,
    pub bytes: u64,
}

/// Bytes of some files by where they are.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierReport {
    pub files: u64,
    pub bytes: u64,
    pub flash_bytes: u64,
    /// Of those on flash: not in the object tier yet.
    pub dirty_bytes: u64,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Evicted {
    pub bytes: u64,
}

/// What an export did.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Exported {
    /// Stored now.
    pub files: u64,
    pub bytes: u64,
    /// There already, with the same size and time of change.
    pub unchanged: u64,
    pub left_out: Vec<LeftOut>,
}

/// A file that was not exported.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftOut {
    pub path: ByteBuf,
    pub why: String,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MountStatus {
    pub mountpoint: ByteBuf,
    pub read_only: bool,
    pub requests: u64,
}

/// What an engine answers to a request; `Answer<()>` is `{"ok": nil}`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Answer<T> {
    Ok(T),
    Error(ErrorBody),
}

impl<T> Answer<T> {
    pub fn into_result(self) -> Result<T> {
        match self {
            Answer::Ok(value) => Ok(value),
            Answer::Error(body) => Err(body.into()),
        }
    }
}

impl<T> From<Result<T>> for Answer<T> {
    fn from(result: Result<T>) -> Self {
        match result {
            Ok(value) => Answer::Ok(value),
            Err(error) => Answer::Error(ErrorBody::from(&error)),
        }
    }
}

/// What follows a header.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Header {
    pub meta_bytes: u32,
    pub fds: u32,
    pub payload_bytes: u64,
}

/// Refuses (`Invalid`) what the other side would refuse.
pub fn encode_header(meta_bytes: usize, fds: usize, payload_bytes: u64) -> Result<[u8; HEADER]> {
    let header = Header {
        meta_bytes: u32::try_from(meta_bytes).unwrap_or(u32::MAX),
        fds: u32::try_from(fds).unwrap_or(u32::MAX),
        payload_bytes,
    };
    header.check()?;
    let mut bytes = [0; HEADER];
    bytes[..4].copy_from_slice(&header.meta_bytes.to_le_bytes());
    bytes[4..8].copy_from_slice(&header.fds.to_le_bytes());
    bytes[8..].copy_from_slice(&payload_bytes.to_le_bytes());
    Ok(bytes)
}

/// `Invalid` above the limits: nothing may be allocated for such a frame, and the connection has to end, since
/// where the next frame begins is not known.
pub fn decode_header(bytes: &[u8; HEADER]) -> Result<Header> {
    let header = Header {
        meta_bytes: u32::from_le_bytes(std::array::from_fn(|k| bytes[k])),
        fds: u32::from_le_bytes(std::array::from_fn(|k| bytes[4 + k])),
        payload_bytes: u64::from_le_bytes(std::array::from_fn(|k| bytes[8 + k])),
    };
    header.check()?;
    Ok(header)
}

impl Header {
    fn check(&self) -> Result<()> {
        for (what, value, most) in [
            ("bytes of meta", u64::from(self.meta_bytes), u64::from(META_BYTES_MAX)),
            ("descriptors", u64::from(self.fds), FDS_MAX as u64),
            ("bytes of payload", self.payload_bytes, PAYLOAD_BYTES_MAX),
        ] {
            if value > most {
                return Err(Error::invalid(format!(
                    "a message with {value} {what}; at most {most} are allowed: send several smaller ones"
                )));
            }
        }
        Ok(())
    }
}

pub fn encode_meta<T: Serialize>(message: &T) -> Result<Vec<u8>> {
    rmp_serde::to_vec_named(message)
        .map_err(|error| Error::internal(format!("a message cannot be written: {error}")).with_cause(error))
}

/// `Invalid` for whatever is not exactly one message of this type.
pub fn decode_meta<T: DeserializeOwned>(bytes: &[u8]) -> Result<T> {
    /// Our deepest message nests five levels; the parser recurses, and its stack must hold.
    const DEPTH_MAX: usize = 32;
    let mut from = rmp_serde::Deserializer::new(std::io::Cursor::new(bytes));
    from.set_max_depth(DEPTH_MAX);
    let message = T::deserialize(&mut from).map_err(|error| {
        Error::invalid(format!("a message of {} bytes cannot be read: {error}", bytes.len()))
            .with_cause(error)
    })?;
    let read = from.position();
    if read != bytes.len() as u64 {
        return Err(Error::invalid(format!("a message ends after {read} of its {} bytes", bytes.len())));
    }
    Ok(message)
}

const ERROR_KINDS: [headrace_base::Kind; 8] = {
    use headrace_base::Kind::*;
    [Invalid, NotFound, Conflict, Unavailable, Full, Corrupt, Permission, Internal]
};

impl From<&Error> for ErrorBody {
    fn from(error: &Error) -> Self {
        ErrorBody {
            kind: error.kind().name().to_owned(),
            errno: error.raw_errno(),
            message: error.message().to_owned(),
        }
    }
}

impl From<ErrorBody> for Error {
    /// Kind, number and message come back as they were. If the two contradict each other (a newer engine may
    /// know more kinds), the number decides.
    fn from(body: ErrorBody) -> Self {
        let named = ERROR_KINDS.into_iter().find(|kind| kind.name() == body.kind);
        match named.map(|kind| Error::new(kind, body.message.clone())) {
            Some(error) if error.raw_errno() == body.errno => error,
            _ => Error::errno(body.errno, body.message),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn headers_come_back_and_limits_hold() {
        let bytes = encode_header(META_BYTES_MAX as usize, FDS_MAX, PAYLOAD_BYTES_MAX).unwrap();
        let header = decode_header(&bytes).unwrap();
        assert_eq!(
            header,
            Header { meta_bytes: META_BYTES_MAX, fds: FDS_MAX as u32, payload_bytes: PAYLOAD_BYTES_MAX }
        );
        assert_eq!(encode_header(0x0102, 3, 0x0405).unwrap(), *b"\x02\x01\0\0\x03\0\0\0\x05\x04\0\0\0\0\0\0");
        for (meta, fds, payload) in [
            (META_BYTES_MAX as usize + 1, 0, 0),
            (usize::MAX, 0, 0),
            (0, FDS_MAX + 1, 0),
            (0, 0, PAYLOAD_BYTES_MAX + 1),
            (0, 0, u64::MAX),
        ] {
            assert_eq!(encode_header(meta, fds, payload).unwrap_err().kind(), headrace_base::Kind::Invalid);
        }
        let error = decode_header(&[0xFF; HEADER]).unwrap_err();
        assert!(error.message().contains("16777216"), "{error}");
    }

    #[test]
    fn every_error_comes_back_as_it_was() {
        let mut errors: Vec<Error> =
            ERROR_KINDS.into_iter().map(|kind| Error::new(kind, "volume ./v: why")).collect();
        errors.extend((1..134).map(|code| Error::errno(code, "rename /a: why")));
        errors.push(Error::io("read x", std::io::Error::from_raw_os_error(5)));
        for error in errors {
            let again = Error::from(ErrorBody::from(&error));
            assert_eq!(format!("{again:?}"), format!("{error:?}"));
        }
        let newer = ErrorBody { kind: "overdue".into(), errno: 2, message: "m".into() };
        assert_eq!(Error::from(newer).kind(), headrace_base::Kind::NotFound);
    }

    /// A map as another client may write it: fields in any order, more of them than we know.
    fn map(fields: &[(&str, &[u8])]) -> Vec<u8> {
        let mut bytes = vec![0x80 | fields.len() as u8];
        for (name, value) in fields {
            bytes.push(0xA0 | name.len() as u8);
            bytes.extend_from_slice(name.as_bytes());
            bytes.extend_from_slice(value);
        }
        bytes
    }

    #[test]
    fn fields_come_in_any_order_and_unknown_ones_are_ignored() {
        let bytes = map(&[
            ("later", b"\x93\xC0\xC3\x81\xA1x\xCB\x40\x09\x21\xFB\x54\x44\x2D\x18"),
            ("follow", b"\xC3"),
            ("path", b"\xC4\x03/\xFF\xFE"),
            ("op", b"\xA4stat"),
        ]);
        let request: Request = decode_meta(&bytes).unwrap();
        assert_eq!(request, Request::Stat { path: ByteBuf::from(*b"/\xFF\xFE"), follow: true });

        let nothing = map(&[("more", b"\x01"), ("op", b"\xA6status")]);
        assert_eq!(decode_meta::<Request>(&nothing).unwrap(), Request::Status {});
    }

    #[test]
    fn optional_fields_may_be_left_out() {
        let bytes = map(&[("op", b"\xA6pwrite"), ("handle", b"\x07")]);
        assert_eq!(decode_meta::<Request>(&bytes).unwrap(), Request::Pwrite { handle: 7, offset: None });

        let set = map(&[("mtime_ns", b"\xFF")]);
        let bytes = map(&[("op", b"\xA7setattr"), ("path", b"\xC4\x01/"), ("set", &set)]);
        let set = SetAttr { mtime_ns: Some(-1), ..SetAttr::default() };
        assert_eq!(
            decode_meta::<Request>(&bytes).unwrap(),
            Request::Setattr { path: ByteBuf::from(*b"/"), set }
        );

        // A client that has no bytes type may send a string.
        let bytes = map(&[("op", b"\xA6unlink"), ("path", b"\xA2/a")]);
        assert_eq!(decode_meta::<Request>(&bytes).unwrap(), Request::Unlink { path: ByteBuf::from(*b"/a") });

        let entry = map(&[("path", b"\xC4\x02/a"), ("kind", b"\xA4file"), ("mode", b"\xCD\x01\xA4")]);
        let entry: PutEntry = decode_meta(&entry).unwrap();
        assert_eq!((entry.mode, entry.uid, entry.size, entry.target), (0o644, None, 0, None));
    }

    #[test]
    fn what_is_no_message_is_invalid() {
        let truncated = &map(&[("op", b"\xA4stat"), ("path", b"\xC4\x03/")])[..];
        let extra = [&map(&[("op", b"\xA4sync")])[..], b"\xC0"].concat();
        let deep = [&map(&[("op", b"\xA4sync"), ("x", b"")])[..], &[0x91; 100_000][..]].concat();
        for (bytes, why) in [
            (&map(&[("op", b"\xA4melt")])[..], "unknown variant `melt`"),
            (&map(&[("path", b"\xC4\x00")])[..], "missing field `op`"),
            (&map(&[("op", b"\xA4stat"), ("path", b"\xC4\x00")])[..], "missing field `follow`"),
            (truncated, "cannot be read"),
            (&extra[..], "ends after 9 of its 10 bytes"),
            (&deep[..], "depth limit"),
            (b"", "cannot be read"),
            (b"\xC1", "cannot be read"),
        ] {
            let error = decode_meta::<Request>(bytes).unwrap_err();
            assert_eq!(error.kind(), headrace_base::Kind::Invalid);
            assert!(error.message().contains(why), "{error}");
        }
    }

    #[test]
    fn answers_are_ok_or_error() {
        assert_eq!(encode_meta(&Answer::Ok(())).unwrap(), b"\x81\xA2ok\xC0");
        let nothing: Answer<()> = decode_meta(b"\x81\xA2ok\xC0").unwrap();
        assert_eq!(nothing, Answer::Ok(()));
        let failed: Answer<Written> = Answer::from(Err(Error::errno(28, "full")));
        let again: Answer<Written> = decode_meta(&encode_meta(&failed).unwrap()).unwrap();
        assert_eq!(again.into_result().unwrap_err().raw_errno(), 28);
    }
}
