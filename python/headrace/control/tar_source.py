"""A tar archive as the source of an import: plain, or compressed with gzip, xz, bzip2 or zstd, told by its
first bytes and not by its name.

Member headers are decoded by the standard library's `TarInfo` (ustar, GNU and PAX long names, PAX times and
sizes, the three GNU sparse formats). Its `TarFile.next`, however, takes a damaged header, a header cut short
and a missing end for the end of the archive and says nothing, so the loop over members is ours:
`_Members.next` reads the archive strictly forwards and turns each of these into `SourceDamaged`, which names
the last good member and the offset. Bytes of the archive are read once, ahead, by one thread.

Invariant: no member gets a path outside the target. A leading `/` is dropped, `..` refuses the member.
"""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import queue
import tarfile
import threading
import zlib
from collections.abc import Callable, Iterator
from decimal import Decimal, InvalidOperation
from typing import IO, Protocol, cast

from headrace.control.source import Entry, Extras, Runs, SourceDamaged

_BLOCK = tarfile.BLOCKSIZE
_CHUNK_BYTES = 1 << 20
_CHUNKS_AHEAD = 8
# No honest header (a long name, a PAX record, a sparse map) comes near this; a damaged one claims anything.
_HEADER_BYTES_MAX = 64 << 20
# (uid_t) -1 means "leave as it is" to chown.
_ID_MAX = (1 << 32) - 1

_MAGIC = (
    (b"\x1f\x8b", "gzip"),
    (b"\xfd7zXZ\x00", "xz"),
    (b"BZh", "bzip2"),
    (b"\x28\xb5\x2f\xfd", "zstd"),
)

# What a damaged compressed stream raises, by format.
_DECOMPRESSION_ERRORS = (EOFError, zlib.error, lzma.LZMAError, OSError)

_KINDS = {
    tarfile.REGTYPE: "file",
    tarfile.AREGTYPE: "file",
    tarfile.CONTTYPE: "file",
    tarfile.GNUTYPE_SPARSE: "file",
    tarfile.LNKTYPE: "file",
    tarfile.SYMTYPE: "symlink",
    tarfile.DIRTYPE: "directory",
    tarfile.FIFOTYPE: "fifo",
    tarfile.CHRTYPE: "char_device",
    tarfile.BLKTYPE: "block_device",
}


# Raised by `TarInfo.fromtarfile`; the standard library documents only their base.
_InvalidHeader: type[Exception] = tarfile.InvalidHeaderError  # type: ignore[attr-defined]
_EndBlock: type[Exception] = tarfile.EOFHeaderError  # type: ignore[attr-defined]
_NoHeader: type[Exception] = tarfile.EmptyHeaderError  # type: ignore[attr-defined]
_CutHeader: type[Exception] = tarfile.TruncatedHeaderError  # type: ignore[attr-defined]


class NotATar(ValueError):
    """The file is not a tar archive, or one in a compression that this Python cannot read."""


class _Readable(Protocol):
    def read1(self, size: int = -1, /) -> bytes: ...


def _decompressed(raw: IO[bytes], name: str) -> _Readable:
    head = raw.read(8)
    raw.seek(0)
    found = next((kind for magic, kind in _MAGIC if head.startswith(magic)), None)
    if found == "gzip":
        return gzip.GzipFile(fileobj=raw, mode="rb")
    if found == "xz":
        return lzma.LZMAFile(raw)
    if found == "bzip2":
        return bz2.BZ2File(raw)
    if found == "zstd":
        try:
            from compression import zstd  # type: ignore[import-not-found, unused-ignore]  # Python 3.14 on
        except ImportError:
            raise NotATar(
                f"{name} is compressed with zstd, which Python reads from 3.14 on: "
                f"unpack it first (zstd -d {name}) and import the result"
            ) from None
        return cast(_Readable, zstd.ZstdFile(raw))
    return cast(_Readable, raw)


class _Stream:
    """The decompressed archive, forwards only, read ahead by one thread. `tell` counts decompressed bytes."""

    def __init__(self, raw: IO[bytes], name: str) -> None:
        self.name = name
        self._raw = raw
        self._source = _decompressed(raw, name)
        self._chunks: queue.Queue[bytes | BaseException] = queue.Queue(_CHUNKS_AHEAD)
        self._stopped = threading.Event()
        self._chunk = b""
        self._at = 0
        self._offset = 0
        self._failure: BaseException | None = None
        self._ended = False
        self.raw_bytes_read = 0
        # Decompression runs beside the sender (it releases the GIL). The process that imports does not fork.
        self._thread = threading.Thread(target=self._read_ahead, daemon=True)
        self._thread.start()

    def _read_ahead(self) -> None:
        try:
            while not self._stopped.is_set():
                self._hand_over_chunk()
                if self._ended:
                    return
        except (*_DECOMPRESSION_ERRORS, ValueError, MemoryError) as error:  # raised in `read`
            self._hand_over(error)

    def _hand_over_chunk(self) -> None:
        """About _CHUNK_BYTES; with damage ahead, what could be decompressed before it."""
        parts = []
        size = 0
        try:
            while size < _CHUNK_BYTES:
                # read1, not read: read throws away what it has when damage follows.
                part = self._source.read1(_CHUNK_BYTES)
                if not part:
                    self._ended = True
                    break
                parts.append(part)
                size += len(part)
        finally:
            self.raw_bytes_read = self._raw.tell()
            if parts:
                self._hand_over(b"".join(parts))
        if self._ended:
            self._hand_over(b"")

    def _hand_over(self, item: bytes | BaseException) -> None:
        while not self._stopped.is_set():
            try:
                return self._chunks.put(item, timeout=0.2)
            except queue.Full:
                continue

    def _next_chunk(self) -> bool:
        """False at the end. Damage is raised each time it is met, never taken for the end."""
        if self._failure is not None:
            raise self._failure
        item = self._chunks.get()
        if isinstance(item, BaseException):
            self._failure = item
            raise item
        if not item:
            self._failure = _End()
            raise self._failure
        self._chunk, self._at = item, 0
        return True

    def tell(self) -> int:
        return self._offset

    def read(self, size: int) -> bytes:
        """`size` bytes, fewer only at the end of the archive."""
        if size > _HEADER_BYTES_MAX:
            raise _InvalidHeader(f"a header claims {size} bytes")
        end = self._at + size
        if end <= len(self._chunk):
            data = self._chunk[self._at : end]
            self._at = end
            self._offset += size
            return data
        parts = []
        while size > 0:
            if self._at == len(self._chunk):
                try:
                    self._next_chunk()
                except _End:
                    break
            part = self._chunk[self._at : self._at + size]
            self._at += len(part)
            self._offset += len(part)
            size -= len(part)
            parts.append(part)
        return b"".join(parts)

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Forwards only, which is all that decoding a header needs."""
        if whence != os.SEEK_SET or offset < self._offset:
            raise io.UnsupportedOperation("an archive is read forwards only")
        self.skip(offset - self._offset)
        return self._offset

    def skip(self, size: int) -> bool:
        """False if the archive ends before."""
        while size > 0:
            part = self.read(min(size, _CHUNK_BYTES))
            if not part:
                return False
            size -= len(part)
        return True

    def close(self) -> None:
        self._stopped.set()
        self._thread.join(timeout=5)
        self._raw.close()


class _End(Exception):
    """The archive's bytes are used up."""


class _Members(tarfile.TarFile):
    """Decodes headers off a `_Stream`. Only `next` is used; nothing seeks back, nothing is kept."""

    def __init__(self, stream: _Stream) -> None:
        self._stream = stream
        self._name = ""
        self._ended = False
        super().__init__(
            fileobj=cast(IO[bytes], stream), mode="r", encoding="utf-8", errors="surrogateescape"
        )

    def next(self) -> tarfile.TarInfo | None:
        """The next member, or None after the blocks that end an archive."""
        first = getattr(self, "firstmember", None)  # read ahead by __init__
        if first is not None:
            self.firstmember = None
            return cast(tarfile.TarInfo, first)
        if self._ended:
            return None
        if not self._stream.skip(self.offset - self._stream.tell()):
            raise self._damaged("is cut off inside this member")
        at = self._stream.tell()
        try:
            member = tarfile.TarInfo.fromtarfile(self)
        except _EndBlock:
            self._ended = True
            return None
        except _NoHeader:
            raise self._damaged(
                "ends without its end-of-archive blocks, so it may have been cut off between two members"
            ) from None
        except _CutHeader:
            raise self._damaged("is cut off inside a header") from None
        except (tarfile.HeaderError, tarfile.ReadError, ValueError, OverflowError) as error:
            if at == 0:
                raise NotATar(str(error)) from error
            raise self._damaged(f"has a damaged header ({error})") from error
        if member.size < 0:
            raise self._damaged(f"has a damaged header (a size of {member.size})")
        self._name = member.name
        # The standard library expects members to be remembered only for lookups by name.
        self.members: list[tarfile.TarInfo] = []
        return member

    def _damaged(self, how: str) -> SourceDamaged:
        after = f" (last member: {self._name!r})" if self._name else ""
        return SourceDamaged(f"archive {self._stream.name} {how}, at byte {self._stream.tell()}{after}")


class TarSource:
    """The members of an archive, in its order. Raises NotATar at once if the file is none."""

    sequential = True

    def __init__(self, archive: str, *, devices: bool) -> None:
        self.extras = Extras()
        self._archive = archive
        self._devices = devices
        self._bytes = os.stat(archive).st_size
        raw = open(archive, "rb")  # noqa: SIM115  # closed by close(), with the thread that reads it
        try:
            self._stream = _Stream(raw, archive)
        except BaseException:
            raw.close()
            raise
        self._member: tarfile.TarInfo | None = None
        try:
            self._members = self._open()
        except BaseException:
            self._stream.close()
            raise

    def _open(self) -> _Members:
        try:
            return _Members(self._stream)
        except NotATar as error:
            raise NotATar(f"{self._archive} is neither a folder nor a tar archive ({error})") from error
        except SourceDamaged as error:
            if self._bytes == 0:
                raise NotATar(f"{self._archive} is empty: it holds no tar archive") from error
            raise NotATar(f"not a whole tar archive: {error}") from error
        except _DECOMPRESSION_ERRORS as error:
            raise NotATar(f"{self._archive} cannot be decompressed: {error}") from error

    def entries(self) -> Iterator[Entry]:
        name = ""
        while True:
            try:
                member = self._members.next()
                if member is None:
                    self._check_end(name)
                    return
            except _DECOMPRESSION_ERRORS as error:
                raise self._damaged(name, error) from error
            name = member.name
            self._member = member
            entry = self._entry(member)
            if entry is not None:
                yield entry

    def _check_end(self, name: str) -> None:
        """Reads to the end of the file: a compressed stream has its checksum there."""
        rest = 0
        while True:
            chunk = self._stream.read(_CHUNK_BYTES)
            if not chunk:
                break
            rest += len(chunk) - chunk.count(0)
        if rest:
            self.extras.note(
                f"{rest} bytes that follow the end of the archive (after {name!r}) were not read"
            )

    def _entry(self, member: tarfile.TarInfo) -> Entry | None:
        shown = os.fsencode(member.name)
        path = _inside(member.name)
        if path is None:
            self.extras.refuse(
                shown, "refused: its name leads out of the target with '..', or holds a zero byte"
            )
            return None
        kind = _KINDS.get(member.type)
        if kind is None:
            self.extras.refuse(shown, f"refused: a member of type {member.type!r}")
            return None
        if not all(0 <= number < _ID_MAX for number in (member.uid, member.gid)):
            self.extras.refuse(shown, f"refused: its owner {member.uid}:{member.gid} is out of range")
            return None
        mtime_ns = _mtime_ns(member)
        if not -(1 << 63) <= mtime_ns < 1 << 63:
            self.extras.refuse(shown, "refused: its time is out of range")
            return None
        if path == b"" and kind != "directory":
            self.extras.refuse(shown, "refused: its name is empty")
            return None
        if member.name.startswith("/"):
            self.extras.note("leading '/' dropped from names")
        if any(key.startswith(("SCHILY.xattr.", "LIBARCHIVE.xattr.")) for key in member.pax_headers):
            self.extras.note("extended attributes in the archive were left out")
        entry = Entry(
            path=path,
            kind=kind,
            mode=member.mode & 0o7777,
            uid=member.uid,
            gid=member.gid,
            mtime_ns=mtime_ns,
            size=member.size if kind == "file" else 0,
        )
        if kind == "symlink":
            entry.target = os.fsencode(member.linkname)
        elif member.islnk():
            target = _inside(member.linkname)
            if not target:
                self.extras.refuse(shown, f"refused: a hard link to {member.linkname!r}, outside the target")
                return None
            entry.hard_link, entry.target, entry.size = True, target, 0
        elif kind in ("char_device", "block_device"):
            if not self._devices:
                self.extras.refuse(shown, "is a device, which only root can import")
                return None
            entry.rdev = os.makedev(member.devmajor, member.devminor)
        if member.issparse() and not self._sparse_map_fits(member):
            self.extras.refuse(shown, "refused: its sparse map does not fit its bytes")
            return None
        return entry

    def _sparse_map_fits(self, member: tarfile.TarInfo) -> bool:
        runs = _sparse_runs(member)
        end = 0
        for offset, size in runs:
            if offset < end or size < 0:
                return False
            end = offset + size
        stored = sum(size for _, size in runs)
        blocks = (stored + _BLOCK - 1) // _BLOCK * _BLOCK
        return end <= member.size and member.offset_data + blocks == self._members.offset

    def load(self, entry: Entry) -> bytes:
        assert self._member is not None
        if not self._member.issparse():
            return self._read(entry.size)
        data = bytearray(entry.size)
        for offset, size in _sparse_runs(self._member):
            data[offset : offset + size] = self._read(size)
        return bytes(data)

    def stream(self, entry: Entry) -> Runs:
        assert self._member is not None
        runs = _sparse_runs(self._member) if self._member.issparse() else [(0, entry.size)]
        for offset, size in runs:
            end = offset + size
            while offset < end:
                data = self._read(min(_CHUNK_BYTES * 8, end - offset))
                yield offset, data
                offset += len(data)

    def _read(self, size: int) -> bytes:
        assert self._member is not None
        try:
            data = self._stream.read(size)
        except _DECOMPRESSION_ERRORS as error:
            raise self._damaged(self._member.name, error) from error
        if len(data) != size:
            raise SourceDamaged(
                f"archive {self._archive} is cut off inside member {self._member.name!r}, "
                f"at byte {self._stream.tell()}"
            )
        return data

    def _damaged(self, name: str, error: BaseException) -> SourceDamaged:
        where = f" (in or after member {name!r})" if name else ""
        return SourceDamaged(
            f"archive {self._archive} cannot be decompressed any further, at byte "
            f"{self._stream.tell()}{where}: {error or type(error).__name__}"
        )

    def position(self) -> tuple[int, int]:
        return self._stream.raw_bytes_read, self._bytes

    def count(self, tell: Callable[[int, int], bool]) -> None:
        """An archive is not read twice: its progress is the position in it."""

    def close(self) -> None:
        self._stream.close()


def _inside(name: str) -> bytes | None:
    """The member's path below the target, None if it would lead out of it."""
    parts = [part for part in os.fsencode(name).split(b"/") if part not in (b"", b".")]
    return None if b".." in parts or b"\0" in os.fsencode(name) else b"/".join(parts)


def _sparse_runs(member: tarfile.TarInfo) -> list[tuple[int, int]]:
    # Set by the header's decoder for every sparse member; a run of no bytes marks the file's end.
    runs = cast(list[tuple[int, int]], getattr(member, "sparse", None) or [])
    return [(offset, size) for offset, size in runs if size > 0]


def _mtime_ns(member: tarfile.TarInfo) -> int:
    # `TarInfo.mtime` is a float and loses nanoseconds; the PAX record is text and does not.
    text = member.pax_headers.get("mtime")
    if text is not None:
        try:
            return int(Decimal(text) * 1_000_000_000)
        except (InvalidOperation, ValueError, OverflowError):
            pass
    return int(member.mtime) * 1_000_000_000
