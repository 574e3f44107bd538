"""What client and engine say to each other: the mirror of `crates/format/src/message.rs`.

MessagePack maps. A request is its fields plus `op`; an answer is `{"ok": ..}` or `{"error": ..}`; on a
stream both sides send maps with `event`. Paths are bytes, absolute in the volume. Unknown fields are
ignored both ways, so that a newer engine may say more. `tests/golden/wire.json` holds both mirrors together.
The framing of these messages is in `headrace.client.wire`.
"""

from __future__ import annotations

import enum
import re
import stat as stat_bits
from typing import Generic, TypeVar

import msgspec

WIRE = 1
VOLUME_FORMAT = 1
PAYLOAD_BYTES_MAX = 64 << 20
META_BYTES_MAX = 16 << 20


def _snake(name: str) -> str:
    return re.sub(r"(?<!^)(?=[A-Z])", "_", name).lower()


class Request(msgspec.Struct, tag_field="op", tag=_snake):
    """Base of all requests; `op` is the class's name in snake case."""


class Kind(enum.Enum):
    """What an inode is."""

    FILE = "file"
    DIRECTORY = "directory"
    SYMLINK = "symlink"
    FIFO = "fifo"
    SOCKET = "socket"
    CHAR_DEVICE = "char_device"
    BLOCK_DEVICE = "block_device"


_TYPE_BITS = {
    Kind.FILE: stat_bits.S_IFREG,
    Kind.DIRECTORY: stat_bits.S_IFDIR,
    Kind.SYMLINK: stat_bits.S_IFLNK,
    Kind.FIFO: stat_bits.S_IFIFO,
    Kind.SOCKET: stat_bits.S_IFSOCK,
    Kind.CHAR_DEVICE: stat_bits.S_IFCHR,
    Kind.BLOCK_DEVICE: stat_bits.S_IFBLK,
}


class ErrorBody(msgspec.Struct, frozen=True):
    kind: str
    errno: int
    message: str


Ok = TypeVar("Ok")


class Answer(msgspec.Struct, Generic[Ok], frozen=True):
    """Exactly one of the two is given; `ok` is None for requests that answer nothing but success."""

    ok: Ok | None = None
    error: ErrorBody | None = None


class Hello(Request):
    client: str


class Welcome(msgspec.Struct, frozen=True):
    wire: int
    engine: str
    pid: int
    volume: str
    format: int


class Attr(msgspec.Struct, frozen=True):
    """Attributes of an inode, times in ns since 1970. The `st_` names of `os.stat_result` work as well.

    `mode` holds the permission bits; `st_mode` adds the type's.
    """

    ino: int
    kind: Kind
    mode: int
    nlink: int
    uid: int
    gid: int
    rdev: int
    size: int
    blocks: int
    atime_ns: int
    mtime_ns: int
    ctime_ns: int

    @property
    def st_mode(self) -> int:
        return _TYPE_BITS[self.kind] | (self.mode & 0o7777)

    @property
    def st_ino(self) -> int:
        return self.ino

    @property
    def st_nlink(self) -> int:
        return self.nlink

    @property
    def st_uid(self) -> int:
        return self.uid

    @property
    def st_gid(self) -> int:
        return self.gid

    @property
    def st_rdev(self) -> int:
        return self.rdev

    @property
    def st_size(self) -> int:
        return self.size

    @property
    def st_blocks(self) -> int:
        return self.blocks

    @property
    def st_atime_ns(self) -> int:
        return self.atime_ns

    @property
    def st_mtime_ns(self) -> int:
        return self.mtime_ns

    @property
    def st_ctime_ns(self) -> int:
        return self.ctime_ns

    @property
    def st_atime(self) -> float:
        return self.atime_ns / 1e9

    @property
    def st_mtime(self) -> float:
        return self.mtime_ns / 1e9

    @property
    def st_ctime(self) -> float:
        return self.ctime_ns / 1e9


class Status(Request):
    pass


class MountStatus(msgspec.Struct, frozen=True):
    mountpoint: bytes
    read_only: bool
    requests: int


class ObjectStatus(msgspec.Struct, frozen=True):
    """The object tier and what is on its way into it."""

    location: str
    flash_bytes_max: int
    # On flash and in the object tier.
    clean_bytes: int
    # On flash alone: bytes, segments, how long the oldest has been there.
    dirty_bytes: int
    dirty_segments: int
    dirty_ms: int
    # What the last upload that failed said; None: uploads work.
    failing: str | None
    # When the last backup of the metadata that is complete was begun; None: there is none yet.
    backup_ns: int | None


class EngineStatus(msgspec.Struct, frozen=True):
    """Answer to `Status` (`Status` in Rust)."""

    engine: str
    pid: int
    volume: str
    path: bytes
    format: int
    started_ns: int
    session: str
    resident_bytes: int
    memory_bytes_max: int
    buffers_bytes: int
    dirty_bytes: int
    mounts: list[MountStatus]
    clients: int
    streams: int
    seals: int
    segments: int
    segment_bytes: int
    inodes: int
    object: ObjectStatus | None
    recovery: list[str]
    warnings: list[str]


class Stat(Request):
    path: bytes
    follow: bool


class List(Request):
    path: bytes
    after: bytes | None
    limit: int
    attrs: bool


class ListEntry(msgspec.Struct, frozen=True):
    name: bytes
    ino: int
    kind: Kind
    attr: Attr | None = None


class Listing(msgspec.Struct, frozen=True):
    entries: list[ListEntry]
    next: bytes | None = None


class OpenFlags(msgspec.Struct, frozen=True):
    read: bool = False
    write: bool = False
    create: bool = False
    exclusive: bool = False
    truncate: bool = False


class Open(Request):
    path: bytes
    flags: OpenFlags
    mode: int


class Opened(msgspec.Struct, frozen=True):
    handle: int
    attr: Attr


class Pread(Request):
    handle: int
    offset: int
    length: int


class Pwrite(Request):
    handle: int
    offset: int | None


class Written(msgspec.Struct, frozen=True):
    offset: int
    bytes: int


class Fstat(Request):
    handle: int


class Ftruncate(Request):
    handle: int
    size: int


class Fsync(Request):
    handle: int


class Close(Request):
    handle: int


class ReadFile(Request):
    path: bytes


class PutEntry(msgspec.Struct, frozen=True):
    """One thing to create or replace. `path` is absolute in the volume.

    `uid`, `gid` None: the caller's; another's only as root. `size`: bytes of the payload that are this
    file's. `target`: of a symlink, or with `hard_link` the path of the file linked to.
    """

    path: bytes
    kind: Kind = Kind.FILE
    mode: int = 0o644
    uid: int | None = None
    gid: int | None = None
    mtime_ns: int | None = None
    size: int = 0
    target: bytes | None = None
    hard_link: bool = False
    rdev: int = 0


class Put(Request):
    entries: list[PutEntry]
    parents: bool
    durable: bool


class PutDone(msgspec.Struct, frozen=True):
    created: int
    replaced: int
    bytes: int


class Mkdir(Request):
    path: bytes
    mode: int
    parents: bool
    exist_ok: bool


class Unlink(Request):
    path: bytes


class Rmdir(Request):
    path: bytes


class Rename(Request):
    from_: bytes = msgspec.field(name="from")
    to: bytes
    noreplace: bool
    exchange: bool


class Symlink(Request):
    target: bytes
    path: bytes


class Link(Request):
    from_: bytes = msgspec.field(name="from")
    to: bytes


class Readlink(Request):
    path: bytes


class SetAttr(msgspec.Struct, frozen=True):
    """What to change; None leaves it."""

    mode: int | None = None
    uid: int | None = None
    gid: int | None = None
    size: int | None = None
    atime_ns: int | None = None
    mtime_ns: int | None = None


class Setattr(Request):
    path: bytes
    set: SetAttr


class Getxattr(Request):
    path: bytes
    name: bytes


class Setxattr(Request):
    path: bytes
    name: bytes
    value: bytes


class Listxattr(Request):
    path: bytes


class Names(msgspec.Struct, frozen=True):
    names: list[bytes]


class Removexattr(Request):
    path: bytes
    name: bytes


class Sync(Request):
    pass


class Fsck(Request):
    """Checks that all is whole; deep: reads every byte. Answer: `FsckReport`."""

    deep: bool


class FsckReport(msgspec.Struct, frozen=True):
    """What a check looked at, and what is wrong."""

    names: int
    inodes: int
    # Segments that something names, and segments that nothing names: garbage, not collected yet.
    segments: int
    unnamed: int
    verified_bytes: int
    problems_count: int
    # The first 1,000, a sentence each.
    problems: list[str]


class Compact(Request):
    """Looks for packs that are mostly dead or small, and writes them anew. Answer: `Compacted`."""


class Compacted(msgspec.Struct, frozen=True):
    """Packs that were written anew, and the bytes of all records in them."""

    packs: int
    bytes: int


class Backup(Request):
    """Backs the metadata up now, unless nothing changed. Answer: `BackupDone`."""


class BackupDone(msgspec.Struct, frozen=True):
    version: int
    created_ns: int
    # False: nothing had changed since that backup.
    changed: bool
    rows: int
    bytes: int


class Tier(Request):
    """How much of these files is where. Answer: `TierReport`."""

    paths: list[bytes]


class Warm(Request):
    """Brings all of these files to flash and waits for it. Answer: `TierReport`, as it is then."""

    paths: list[bytes]


class Evict(Request):
    """Removes what is in the object tier too from flash: of these files, or (None) all. Answer: `Evicted`."""

    paths: list[bytes] | None


class Export(Request):
    """Puts files as plain objects into a bucket, named by their paths from `root` on. Answer: `Exported`."""

    paths: list[bytes]
    root: bytes
    url: str
    endpoint: str | None = None
    region: str | None = None


class LeftOut(msgspec.Struct, frozen=True):
    path: bytes
    why: str


class Exported(msgspec.Struct, frozen=True):
    # Stored now.
    files: int
    bytes: int
    # There already, with the same size and time of change.
    unchanged: int
    left_out: list[LeftOut]


class TierReport(msgspec.Struct, frozen=True):
    """Bytes of some files by where they are."""

    files: int
    bytes: int
    flash_bytes: int
    # Of those on flash: not in the object tier yet.
    dirty_bytes: int


class Evicted(msgspec.Struct, frozen=True):
    bytes: int


class Statfs(Request):
    pass


class StatfsResult(msgspec.Struct, frozen=True):
    """Answer to `Statfs` (`Statfs` in Rust)."""

    bytes_total: int
    bytes_free: int
    bytes_available: int
    inodes_used: int


class Seal(Request):
    path: bytes


class OpenSeal(Request):
    seal: str


class Sealed(msgspec.Struct, frozen=True):
    """A sealed view as the engine lists it."""

    seal: str
    version: int
    path: bytes
    samples: int
    sample_bytes: int = msgspec.field(name="bytes")
    manifest_bytes: int
    created_ns: int


class Seals(Request):
    pass


class SealList(msgspec.Struct, frozen=True):
    """Answer to `Seals` (`Seals` in Rust)."""

    seals: list[Sealed]


class SealDelete(Request):
    seal: str


class SnapshotCreate(Request):
    name: bytes


class Snapshot(msgspec.Struct, frozen=True):
    """A snapshot as the engine lists it: `.snapshots/NAME` in the volume."""

    name: bytes
    version: int
    created_ns: int


class Snapshots(Request):
    pass


class SnapshotList(msgspec.Struct, frozen=True):
    """Answer to `Snapshots` (`Snapshots` in Rust)."""

    snapshots: list[Snapshot]


class SnapshotDiff(Request):
    from_: bytes = msgspec.field(name="from")
    to: bytes | None
    after: bytes | None
    limit: int


class Change(enum.Enum):
    """What happened to a path between two states of a volume."""

    ADDED = "added"
    REMOVED = "removed"
    CHANGED = "changed"
    RENAMED = "renamed"


class Difference(msgspec.Struct, frozen=True):
    """One path that differs; `from_` is where it was before, if it was renamed."""

    change: Change
    kind: Kind
    path: bytes
    from_: bytes | None = msgspec.field(name="from", default=None)


class Differences(msgspec.Struct, frozen=True):
    differences: list[Difference]
    next: bytes | None = None


class SnapshotRestore(Request):
    name: bytes


class Restored(msgspec.Struct, frozen=True):
    """What a restore did: the snapshot of what was before, and how many rows of metadata were put back."""

    before: bytes
    changed: int


class SnapshotDelete(Request):
    name: bytes


class BatchLayout(msgspec.Struct, frozen=True):
    """A batch in shared memory: `indices` u64 at 0; `offsets` u64, count + 1 of them, counted from
    `data_at`; data from `data_at`. Sample i is data[offsets[i]:offsets[i + 1]]."""

    count: int
    offsets_at: int
    data_at: int
    data_bytes: int
    slot_bytes: int
    gather_ns: int


class ReadBatch(Request):
    seal: str


class Loader(Request):
    """Turns the connection into a stream of batches."""

    seal: str
    batch_size: int
    shuffle: bool
    seed: int
    epoch: int
    drop_last: bool
    first_batch: int
    prefetch: int
    rank: int
    world_size: int


class StreamEvent(msgspec.Struct, tag_field="event", tag=_snake):
    """What an engine sends on a stream."""


class Batch(StreamEvent):
    """Slot `slot` holds this batch until it is released. A slot's first use carries its memfd."""

    batch: int
    slot: int
    layout: BatchLayout


class End(StreamEvent):
    pass


class Error(StreamEvent):
    kind: str
    errno: int
    message: str


class StreamCommand(msgspec.Struct, tag_field="event", tag=_snake):
    """What a client sends on a stream."""


class Release(StreamCommand):
    slot: int


class Mount(Request):
    mountpoint: bytes
    read_only: bool
    allow_other: bool


class Mounted(msgspec.Struct, frozen=True):
    mountpoint: bytes
    notes: list[str]


class Unmount(Request):
    mountpoint: bytes


class Shutdown(Request):
    pass
