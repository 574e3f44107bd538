"""Segments made in Python, byte for byte as the engine writes them, for tests of whoever reads segments.

It shares nothing with the reader but the checksum: its varints, layout and footer are its own.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

from headrace.model.crc32c import crc32c
from headrace.model.segment import CHUNK_BYTES

SEGMENT = "01J4HMASW904HMASW9NF6YY093"
CREATED_NS = 1_700_000_000_000_000_000
BLOCK = 4096


@dataclass(frozen=True)
class Written:
    """One record that goes into a segment."""

    path: bytes
    payload: bytes
    ino: int = 1
    mode: int = 0o644
    uid: int = 1000
    gid: int = 1000
    mtime_ns: int = CREATED_NS
    file_offset: int = 0
    # None: the file ends where the payload does.
    file_bytes: int | None = None

    @property
    def size(self) -> int:
        return self.file_offset + len(self.payload) if self.file_bytes is None else self.file_bytes


def segment_id(segment: str) -> bytes:
    number = 0
    for character in segment:
        number = number * 32 + "0123456789ABCDEFGHJKMNPQRSTVWXYZ".index(character)
    return number.to_bytes(16, "big")


def varint(value: int) -> bytes:
    out = bytearray()
    while value > 127:
        out.append(value & 127 | 128)
        value >>= 7
    return bytes(out) + bytes([value])


def zigzag(difference: int) -> bytes:
    """A difference of two numbers of 64 bits, wrapped."""
    wrapped = (difference + 2**63) % 2**64 - 2**63
    return varint(wrapped * 2 if wrapped >= 0 else -wrapped * 2 - 1)


def chunk_crcs(payload: bytes) -> list[int]:
    return [crc32c(payload[at : at + CHUNK_BYTES]) for at in range(0, len(payload), CHUNK_BYTES)]


def _up(value: int, alignment: int) -> int:
    return -(-value // alignment) * alignment


def frame(start: int, records: Sequence[Written], segment: str = SEGMENT) -> bytes:
    """The frame that begins at `start` of its segment."""
    folders = [record.path[: record.path.rfind(b"/") + 1] for record in records]
    rows = list(dict.fromkeys(folders))
    table = b"".join(varint(len(folder)) + folder for folder in rows)
    parts: list[tuple[bytes, bytes]] = []
    ino = mtime = 0
    for record, folder in zip(records, folders, strict=True):
        name = record.path[len(folder) :]
        begin = zigzag(record.ino - ino) + varint(rows.index(folder)) + varint(len(name)) + name
        begin += varint(record.mode) + varint(record.uid) + varint(record.gid)
        begin += zigzag(record.mtime_ns - mtime) + varint(record.file_offset) + varint(len(record.payload))
        begin += zigzag(record.size - record.file_offset - len(record.payload))
        crcs = chunk_crcs(record.payload)
        parts.append((begin, struct.pack(f"<{len(crcs)}I", *crcs)))
        ino, mtime = record.ino, record.mtime_ns
    header_bytes = 56 + len(table) + sum(len(begin) + 4 + len(crcs) for begin, crcs in parts)

    body = bytearray(header_bytes)
    offsets = [0] * len(records)
    for dense in (True, False):
        for row, record in enumerate(records):
            if (len(record.payload) < 2048) == dense:
                at = _up(start + len(body), 64 if dense else BLOCK) - start
                offsets[row] = at
                body += bytes(at - len(body)) + record.payload
                if not dense:
                    body += bytes(_up(start + len(body), BLOCK) - start - len(body))
    body += bytes(_up(start + len(body), 64) - start - len(body))
    covered = struct.pack("<IQQ", header_bytes, len(body), start) + segment_id(segment)
    covered += struct.pack("<II", len(rows), len(records)) + table
    for (begin, sums), offset in zip(parts, offsets, strict=True):
        covered += begin + struct.pack("<I", offset // 64) + sums
    body[:header_bytes] = b"HRFRAME\x01" + struct.pack("<I", crc32c(covered)) + covered
    return bytes(body)


def pack(frames: Sequence[Sequence[Written]], segment: str = SEGMENT, *, closed: bool = True) -> bytes:
    header = b"HRPACK\0\x01" + struct.pack("<II", 1, 0) + segment_id(segment) + struct.pack("<q", CREATED_NS)
    header += bytes(BLOCK - 4 - len(header))
    out = header + struct.pack("<I", crc32c(header))
    spans = b""
    for records in frames:
        made = frame(len(out), records, segment)
        spans += struct.pack("<QQ", len(out), len(made))
        out += made
    if not closed:
        return out
    count = sum(len(records) for records in frames)
    footer = spans + segment_id(segment) + struct.pack("<QQQ", len(frames), count, len(out)) + bytes(12)
    return out + footer + struct.pack("<I", crc32c(footer)) + b"HRPKEND\x01"


def index_header(record: Written, segment: str = SEGMENT) -> bytes:
    origin = varint(record.ino) + varint(len(record.path)) + record.path
    origin += varint(record.mode) + varint(record.uid) + varint(record.gid)
    origin += struct.pack("<q", record.mtime_ns) + varint(record.file_offset) + varint(record.size)
    header_bytes = _up(36 + len(origin) + 4, 16)
    out = b"HRINDEX\x01" + struct.pack("<II", 1, header_bytes) + segment_id(segment)
    out += struct.pack("<I", len(origin)) + origin
    out += bytes(header_bytes - 4 - len(out))
    return out + struct.pack("<I", crc32c(out))


def index_entry(chunk: int, covered: int, crc: int, segment: str = SEGMENT) -> bytes:
    fields = struct.pack("<III", chunk, covered, crc)
    return fields + struct.pack("<I", crc32c(segment_id(segment) + fields))


def closing_entry(data_bytes: int, segment: str = SEGMENT) -> bytes:
    return index_entry(0xFFFFFFFF, data_bytes & 0xFFFFFFFF, data_bytes >> 32, segment)


def index(record: Written, segment: str = SEGMENT) -> bytes:
    """The index of a closed file segment that holds the record's payload."""
    data = record.payload
    entries = b"".join(
        index_entry(row, min(CHUNK_BYTES, len(data) - row * CHUNK_BYTES), crc, segment)
        for row, crc in enumerate(chunk_crcs(data))
    )
    return index_header(record, segment) + entries + closing_entry(len(data), segment)
