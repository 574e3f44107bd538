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
    Hello { client: String },
    Status {},
    /// -> Attr
    Stat { path: ByteBuf, follow: bool },
    /// Entries with names greater than `after`, in byte order, at most `limit` (0: as many as fit). -> Listing
    List { path: ByteBuf, after: Option<ByteBuf>, limit: u32, attrs: bool },
    /// -> Opened
    Open { path: ByteBuf, flags: OpenFlags, mode: u16 },
    /// -> payload, shorter than `length` only at the end of the file
    Pread { handle: u64, offset: u64, length: u64 },
    /// payload = bytes; offset None appends. -> Written
    Pwrite { handle: u64, offset: Option<u64> },
    /// -> Attr
    Fstat { handle: u64 },
    Ftruncate { handle: u64, size: u64 },
    Fsync { handle: u64 },
    Close { handle: u64 },
    /// The whole file in one answer, refused (`Invalid`) above `PAYLOAD_BYTES_MAX`. -> payload
    ReadFile { path: ByteBuf },
    /// Creates or replaces entries, each atomically; payload = the files' bytes, one after the other in the
    /// order of the entries. `parents`: missing directories are made (0755). -> PutDone
    Put { entries: Vec<PutEntry>, parents: bool, durable: bool },
    Mkdir { path: ByteBuf, mode: u16, parents: bool, exist_ok: bool },
    Unlink { path: ByteBuf },
    Rmdir { path: ByteBuf },
    Rename { from: ByteBuf, to: ByteBuf, noreplace: bool, exchange: bool },
    Symlink { target: ByteBuf, path: ByteBuf },
    Link { from: ByteBuf, to: ByteBuf },
    /// -> payload
    Readlink { path: ByteBuf },
    /// Symbolic links are not followed. -> Attr
    Setattr { path: ByteBuf, set: SetAttr },
    /// -> payload
    Getxattr { path: ByteBuf, name: ByteBuf },
    Setxattr { path: ByteBuf, name: ByteBuf, value: ByteBuf },
    /// -> Names
    Listxattr { path: ByteBuf },
    Removexattr { path: ByteBuf, name: ByteBuf },
    /// Everything written before is durable when the answer comes.
    Sync {},
    /// -> Statfs
    Statfs {},
    /// Freezes the tree under `path`. -> Sealed, with the manifest's descriptor
    Seal { path: ByteBuf },
    /// -> Sealed, with the manifest's descriptor
    OpenSeal { seal: String },
    /// -> Seals
    Seals {},
    /// payload = indices, u64 little-endian each. -> BatchLayout, with a descriptor (memfd) of that layout
    ReadBatch { seal: String },
    /// Turns the connection into a stream of batches.
    Loader(LoaderRequest),
    /// -> Mounted
    Mount { mountpoint: ByteBuf, read_only: bool, allow_other: bool },
    Unmount { mountpoint: ByteBuf },
    /// Answers, then stops the engine as SIGTERM does.
    Shutdown {},
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
    Batch { batch: u64, slot: u32, layout: BatchLayout },
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
    /// What recovery did at this start, a sentence each; empty after a clean stop.
    pub recovery: Vec<String>,
    /// Conditions that a person should know of ("flash 97 % full").
    pub warnings: Vec<String>,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct MountStatus {
    pub mountpoint: ByteBuf,
    pub read_only: bool,
    pub requests: u64,
}
