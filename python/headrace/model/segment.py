"""Reads segments with nothing but Python: whose bytes lie in one, and the bytes, verified.

No engine, no metadata and nothing outside the standard library is needed, so nobody is locked in: this file
is the format's second description, held against the engine by tests. The layouts are drawn, field by field,
in `crates/format/src/segment/pack.rs` and `index.rs`; the order of reading is:

```text
ULID.pack   header block | frame | frame | .. | footer         PackReader
            closed: the last 64 bytes name the footer, the footer names each frame
            open, or torn by a crash: frames one behind the other, up to the first that is not whole
            a frame: 56 bytes | table of directories | record, record, .. | payloads
ULID.file   the bytes of one file, nothing else                FileReader
ULID.idx    header with whose they are | (chunk, covered, crc), .. | (0xFFFFFFFF, bytes), once it is closed
```
Numbers are varints, differences zigzag varints (`_Fields`), fixed ones little-endian; checksums are CRC32C,
one for each CHUNK_BYTES of a payload. Any bytes give an answer, `Corrupt` or `Invalid`, nothing else.
Files that lie in several records are put together by `headrace.control.extraction`.
"""

from __future__ import annotations

import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

from headrace.errors import Corrupt, Invalid
from headrace.model.crc32c import crc32c

FORMAT = 1
# As in crates/format/src/lib.rs.
CHUNK_BYTES = 16 * 1024
_BLOCK_BYTES = 4096
_DENSE_BYTES_MAX = 2048
_DENSE_ALIGNMENT = 64
# One request fetches the headers of most frames whole.
_FRAME_READ_BYTES = 16 * 1024

# magic, format, segment, created
_PACK_HEADER = struct.Struct("<8sI4x16sq")
# magic, crc, bytes of header, of frame, offset, segment, directories, records
_FRAME_PREFIX = struct.Struct("<8sIIQQ16sII")
# segment, frames, records, offset of the footer, crc, magic
_FOOTER_END = struct.Struct("<16sQQQ12xI8s")
# magic, format, bytes of header, segment, bytes of the origin
_INDEX_HEADER = struct.Struct("<8sII16sI")
_CLOSING = 0xFFFFFFFF
_ULID_ALPHABET = "0123456789ABCDEFGHJKMNPQRSTVWXYZ"

ReadRange = Callable[[int, int], bytes]
OnDamage = Callable[[Corrupt], None]


@dataclass(frozen=True, slots=True)
class Record:
    """One run of a file's bytes: whose they are, as it was when they were written, and where they lie.

    They are bytes [file_offset, file_offset + length) of inode `ino`, which then had `file_bytes` bytes and
    `path` from the volume's root (empty: not known then). Of one inode a later record covers earlier ones.
    """

    segment: str
    ino: int
    path: bytes
    mode: int
    uid: int
    gid: int
    mtime_ns: int
    file_offset: int
    file_bytes: int
    # Of the payload in the segment; one checksum for each CHUNK_BYTES of it.
    offset: int
    length: int
    crcs: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Frame:
    """What one append wrote: bytes [offset, offset + frame_bytes) of a pack, and the records in them."""

    offset: int
    frame_bytes: int
    records: tuple[Record, ...]


def ranges_of(file: BinaryIO) -> tuple[ReadRange, int]:
    """How to read ranges of a seekable file, and its size. It is borrowed, and its position is moved.

    >>> import io
    >>> read_range, size = ranges_of(io.BytesIO(b"abcdef"))
    >>> read_range(2, 3), size
    (b'cde', 6)
    """

    def read_range(offset: int, length: int) -> bytes:
        file.seek(offset)
        return file.read(length)

    return read_range, file.seek(0, os.SEEK_END)


class _Malformed(Exception):
    """A field that is not there. `_Fields.at` says where."""


class _Fields:
    """Reads fields in the order of a layout."""

    def __init__(self, data: bytes, at: int = 0) -> None:
        self.data = data
        self.at = at

    def take(self, count: int) -> bytes:
        if count > len(self.data) - self.at:
            raise _Malformed
        self.at += count
        return self.data[self.at - count : self.at]

    def fixed(self, width: int, signed: bool = False) -> int:
        return int.from_bytes(self.take(width), "little", signed=signed)

    def number(self, bits: int = 64) -> int:
        """LEB128: seven bits a byte, low first, in the shortest form."""
        value = 0
        for shift in range(0, 64, 7):
            byte = self.fixed(1)
            value |= (byte & 0x7F) << shift
            if byte < 0x80:
                if value >> bits or (shift and not byte):
                    break
                return value
        raise _Malformed

    def difference(self) -> int:
        """Zigzag: 0, -1, 1, -2, .. The sum with it wraps at 64 bits."""
        value = self.number()
        return (value >> 1) ^ -(value & 1)

    def counted(self) -> bytes:
        return self.take(self.number())


class _Reader:
    """What packs and file segments have in common: bounds, and payloads."""

    # Whether it was closed; an open one may still grow.
    closed = False
    # Why an open segment's valid part ends before its bytes do; None: it does not, or was not looked at yet.
    damage: Corrupt | None = None

    def __init__(self, read_range: ReadRange, size: int, segment: str, on_damage: OnDamage | None) -> None:
        self._read_range = read_range
        self._size = size
        self.segment = segment
        self._id = _id_of(segment)
        self._on_damage = on_damage

    def read(self, record: Record, start: int = 0, length: int | None = None) -> bytes:
        """Bytes [start, start + length) of the record's payload, by default all of it; fewer where it ends.

        One range is read: the chunks that are touched, each compared with its checksum (0.1 us a byte).
        Raises Corrupt, naming segment and offset, if they are not what was written; Invalid for a record
        of another segment.
        """
        if record.segment != self.segment or start < 0 or (length is not None and length < 0):
            raise Invalid(
                f"bytes {start} (length {length}) of a record of {record.segment} in {self.segment}"
            )
        end = record.length if length is None else min(start + length, record.length)
        if start >= end:
            return b""
        first, last = start // CHUNK_BYTES, -(-end // CHUNK_BYTES)
        begin = first * CHUNK_BYTES
        data = self._bytes(record.offset + begin, min(last * CHUNK_BYTES, record.length) - begin)
        for number, expected in enumerate(record.crcs[first:last]):
            chunk = data[number * CHUNK_BYTES : (number + 1) * CHUNK_BYTES]
            self._check(record.offset + begin + number * CHUNK_BYTES, "chunk", chunk, expected)
        return data[start - begin : end - begin]

    def _bytes(self, offset: int, length: int) -> bytes:
        data = self._read_range(offset, length) if offset + length <= self._size else b""
        if len(data) != length:
            raise self._corrupt(offset, f"it ends before the {length} bytes that should be there")
        return data

    def _check(self, offset: int, what: str, data: bytes, expected: int) -> None:
        found = crc32c(data)
        if found != expected:
            raise self._corrupt(offset, f"the {what} has CRC32C {found:08x}, expected {expected:08x}")

    def _check_origin(self, format_number: int, segment: bytes) -> None:
        if segment != self._id:
            raise self._corrupt(16, f"it says that it is {_text_of(segment)}")
        if not format_number:
            raise self._corrupt(8, "it says format 0")
        if format_number > FORMAT:
            raise Invalid(
                f"segment {self.segment} holds format {format_number}; this reader knows 1-{FORMAT}: "
                "upgrade headrace"
            )

    def _tell(self, damage: Corrupt) -> None:
        if self._on_damage is None:
            raise damage
        self._on_damage(damage)

    def _corrupt(self, offset: int, what: str) -> Corrupt:
        return Corrupt(f"segment {self.segment} is damaged at byte {offset}: {what}")


class PackReader(_Reader):
    """The records of a pack of `size` bytes that `read_range(offset, length)` reads, from a file or a bucket.

    `segment`: the ULID in its name. Opening reads the header block and, of a closed pack, the footer; then
    listing costs one range per frame (two for a header above 16 KiB), of an open pack all its bytes.
    Raises Corrupt if header or footer are not this pack's, Invalid if a later release wrote it. With
    `on_damage` damage is told to it instead, and whatever else can be read is. What `read_range` raises
    passes through. Safe from several threads if `read_range` is.
    """

    def __init__(
        self, read_range: ReadRange, size: int, segment: str, on_damage: OnDamage | None = None
    ) -> None:
        super().__init__(read_range, size, segment, on_damage)
        self.created_ns = 0
        self._spans: list[tuple[int, int]] = []
        self._record_count = 0
        try:
            self._read_header()
        except Corrupt as damage:
            self._tell(damage)
        try:
            self.closed = self._read_footer()
        except Corrupt as damage:
            self._tell(damage)  # all that the footer says is in the frames too

    def frames(self) -> Iterator[Frame]:
        """The frames in the order they were appended.

        Of an open pack those that are whole, payloads verified, up to the first that is not: what recovery
        would keep; `damage` then says why it ends there. Of a closed one all of them, payloads not looked
        at; a frame whose header is damaged raises Corrupt.
        """
        if not self.closed:
            yield from self._open_frames()
            return
        count = 0
        for offset, frame_bytes in self._spans:
            try:
                frame = self._frame(offset)
                if frame.frame_bytes != frame_bytes:
                    raise self._corrupt(offset, f"the footer says {frame_bytes} bytes of frame")
            except Corrupt as damage:
                self._tell(damage)
                continue
            count += len(frame.records)
            yield frame
        if count != self._record_count:
            footer_at = self._size - _FOOTER_END.size
            self._tell(self._corrupt(footer_at, f"{count} records of {self._record_count} can be read"))

    def records(self) -> Iterator[Record]:
        """The records of all frames in the order they were appended. See `frames`."""
        for frame in self.frames():
            yield from frame.records

    def _read_header(self) -> None:
        header = self._bytes(0, _BLOCK_BYTES)
        magic, format_number, own, self.created_ns = _PACK_HEADER.unpack_from(header)
        if magic != b"HRPACK\0\x01":
            raise self._corrupt(0, "it does not begin as a pack does")
        self._check(0, "header", header[:-4], int.from_bytes(header[-4:], "little"))
        self._check_origin(format_number, own)

    def _open_frames(self) -> Iterator[Frame]:
        offset = _BLOCK_BYTES
        self.damage = None
        while offset < self._size:
            try:
                frame = self._frame(offset)
                for record in frame.records:
                    for start in range(0, record.length, CHUNK_BYTES):
                        self.read(record, start, CHUNK_BYTES)
            except Corrupt as damage:
                self.damage = damage
                return
            offset += frame.frame_bytes
            yield frame

    def _read_footer(self) -> bool:
        """Whether there is one, as a closed pack has."""
        end_at = self._size - _FOOTER_END.size
        end = self._bytes(end_at, _FOOTER_END.size) if end_at >= _BLOCK_BYTES else b""
        if not end.endswith(b"HRPKEND\x01"):
            return False
        own, frames, records, offset, crc, _ = _FOOTER_END.unpack(end)
        if own != self._id or offset < _BLOCK_BYTES or offset + frames * 16 != end_at:
            raise self._corrupt(end_at, "the footer does not fit this segment and its length")
        footer = self._bytes(offset, self._size - offset)
        self._check(offset, "footer", footer[:-12], crc)
        spans = list(struct.iter_unpack("<QQ", footer[: -_FOOTER_END.size]))
        following = _BLOCK_BYTES
        for begin, frame_bytes in spans:
            if begin != following:
                raise self._corrupt(offset, f"the footer lists no frame at byte {following}")
            following += frame_bytes
        if following != offset:
            raise self._corrupt(offset, f"the frames that the footer lists end at byte {following}")
        self._spans, self._record_count = spans, records
        return True

    def _frame(self, offset: int) -> Frame:
        header = self._bytes(offset, min(_FRAME_READ_BYTES, max(self._size - offset, _FRAME_PREFIX.size)))
        (magic, crc, header_bytes, frame_bytes, own_offset, own, directories, records) = (
            _FRAME_PREFIX.unpack_from(header)
        )
        if magic != b"HRFRAME\x01":
            raise self._corrupt(offset, "no frame begins here")
        if own != self._id or own_offset != offset:
            raise self._corrupt(offset, f"the frame says byte {own_offset} of segment {_text_of(own)}")
        if not _FRAME_PREFIX.size <= header_bytes <= frame_bytes or frame_bytes % _DENSE_ALIGNMENT:
            raise self._corrupt(offset, f"the frame says {header_bytes} bytes of header in {frame_bytes}")
        if offset + frame_bytes > self._size:
            raise self._corrupt(offset, f"the frame of {frame_bytes} bytes is cut off")
        if header_bytes > len(header):
            header += self._bytes(offset + len(header), header_bytes - len(header))
        header = header[:header_bytes]
        self._check(offset, "frame's header", header[12:], crc)
        fields = _Fields(header, _FRAME_PREFIX.size)
        try:
            names = [fields.counted() for _ in range(directories)]
            found = tuple(self._records(fields, offset, frame_bytes, names, records))
            if fields.at != header_bytes:
                raise _Malformed
        except _Malformed:
            raise self._corrupt(offset + fields.at, "the frame's header holds no valid field here") from None
        return Frame(offset, frame_bytes, found)

    def _records(
        self, fields: _Fields, frame: int, frame_bytes: int, directories: list[bytes], count: int
    ) -> Iterator[Record]:
        ino = mtime_ns = 0
        for _ in range(count):
            ino = (ino + fields.difference()) % 2**64
            row = fields.number()
            if row >= len(directories):
                raise _Malformed
            path = directories[row] + fields.counted()
            mode, uid, gid = fields.number(16), fields.number(32), fields.number(32)
            mtime_ns = (mtime_ns + fields.difference() + 2**63) % 2**64 - 2**63
            file_offset, length = fields.number(), fields.number()
            file_bytes = (file_offset + length + fields.difference()) % 2**64
            offset = fields.fixed(4) * _DENSE_ALIGNMENT
            chunks = fields.take(-(-length // CHUNK_BYTES) * 4)
            crcs = tuple(crc for (crc,) in struct.iter_unpack("<I", chunks))
            if not len(fields.data) <= offset <= offset + length <= frame_bytes:
                raise _Malformed
            # What is not dense lies on whole blocks.
            if length >= _DENSE_BYTES_MAX and (frame + offset) % _BLOCK_BYTES:
                raise _Malformed
            yield Record(
                self.segment, ino, path, mode, uid, gid, mtime_ns, file_offset, file_bytes,
                frame + offset, length, crcs,
            )  # fmt: skip


class FileReader(_Reader):
    """A file segment of `size` bytes that `read_range` reads, and `index`, all bytes of the `.idx` beside it.

    Raises Corrupt if the index is not this segment's or is damaged, Invalid if a later release wrote it. Of
    an open segment the entries up to the first that is not whole count; `damage` then says why they end
    there. With `on_damage` that is so of a closed one too, and the damage is told to it. Safe from several
    threads if `read_range` is.
    """

    def __init__(
        self,
        read_range: ReadRange,
        size: int,
        index: bytes,
        segment: str,
        on_damage: OnDamage | None = None,
    ) -> None:
        super().__init__(read_range, size, segment, on_damage)
        fields, header_bytes = self._read_header(index)
        entries = index[header_bytes:]
        # What ends with a closing entry was whole once: whatever is not valid in it is damage.
        whole = len(entries) % 16 == 0 and (self._entry(entries[-16:]) or (0,))[0] == _CLOSING
        crcs: list[int] = []
        covered = 0
        for at in range(0, len(entries), 16):
            entry = None if self.closed else self._entry(entries[at : at + 16])
            if entry is not None and entry[0] == _CLOSING:
                end = entry[1] | entry[2] << 32
                if end == covered or (end < covered and end % CHUNK_BYTES == 0):
                    covered, self.closed = end, True
                    del crcs[-(-end // CHUNK_BYTES) :]
                    continue
            elif entry is not None and 1 <= entry[1] <= CHUNK_BYTES:
                chunk, length, crc = entry
                begin = chunk * CHUNK_BYTES
                # The next chunk, or the last one again, grown.
                if (chunk == len(crcs) and begin == covered) or (
                    chunk + 1 == len(crcs) and begin + length > covered
                ):
                    crcs[chunk:] = [crc]
                    covered = begin + length
                    continue
            self.damage = self._corrupt(header_bytes + at, "its index holds no valid entry here")
            if whole or self.closed:
                self._tell(self.damage)
            break
        self._record = self._origin(fields, covered, tuple(crcs))

    def records(self) -> Iterator[Record]:
        """One record, the file's bytes from its start; none if no entry covers any yet."""
        if self._record.length:
            yield self._record

    def _read_header(self, index: bytes) -> tuple[_Fields, int]:
        if len(index) < _INDEX_HEADER.size or not index.startswith(b"HRINDEX\x01"):
            raise self._corrupt(0, "its index does not begin as one does")
        _, format_number, header_bytes, own, origin_bytes = _INDEX_HEADER.unpack_from(index)
        origin_end = _INDEX_HEADER.size + origin_bytes
        if header_bytes % 16 or not origin_end + 4 <= header_bytes <= len(index):
            raise self._corrupt(0, "the header of its index is cut off")
        crc = int.from_bytes(index[header_bytes - 4 : header_bytes], "little")
        self._check(0, "header of its index", index[: header_bytes - 4], crc)
        self._check_origin(format_number, own)
        return _Fields(index[:origin_end], _INDEX_HEADER.size), header_bytes

    def _entry(self, entry: bytes) -> tuple[int, int, int] | None:
        if len(entry) != 16 or crc32c(self._id + entry[:12]) != int.from_bytes(entry[12:], "little"):
            return None
        chunk, covered, crc = struct.unpack_from("<III", entry)
        return chunk, covered, crc

    def _origin(self, fields: _Fields, length: int, crcs: tuple[int, ...]) -> Record:
        try:
            record = Record(
                segment=self.segment,
                ino=fields.number(),
                path=fields.counted(),
                mode=fields.number(16),
                uid=fields.number(32),
                gid=fields.number(32),
                mtime_ns=fields.fixed(8, signed=True),
                file_offset=fields.number(),
                file_bytes=fields.number(),
                offset=0,
                length=length,
                crcs=crcs,
            )
            if fields.at != len(fields.data):
                raise _Malformed
        except _Malformed:
            raise self._corrupt(fields.at, "its index does not say whose bytes these are") from None
        return record


def _id_of(segment: str) -> bytes:
    digits = [_ULID_ALPHABET.find(character) for character in segment]
    if len(digits) != 26 or min(digits) < 0 or digits[0] > 7:
        raise Invalid(f"{segment!r} does not name a segment: its name is 26 characters (ULID)")
    return sum(digit << 5 * place for place, digit in enumerate(reversed(digits))).to_bytes(16, "big")


def _text_of(raw: bytes) -> str:
    number = int.from_bytes(raw, "big")
    return "".join(_ULID_ALPHABET[number >> shift & 31] for shift in range(125, -1, -5))
