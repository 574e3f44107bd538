"""Gets files back from segments alone: no engine, no metadata.

1. *find*: segment files, in the order of their names, which is that of their making.
2. *gather*: the records of all of them, by inode. Inode numbers mean something within one volume only.
3. *put together*: each inode's records in the order they were written, a later one over an earlier one, the
   file cut or grown to the size that each names; a chunk that is damaged is left as zeros and told.
4. *name*: the last path that a record knows, never one that leads out of the folder.

What segments do not hold cannot come back: empty files, directories by themselves, links, extended
attributes, removals, renames and truncations since the last write, and up to 64 KiB of a file that was
fsynced in the last seconds before a crash (they ride in the metadata).
"""

from __future__ import annotations

import contextlib
import errno
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace

from headrace.errors import Conflict, Invalid, NotFound
from headrace.model.segment import CHUNK_BYTES, FileReader, OnDamage, PackReader, Record
from headrace.model.temporary import meant_path

Reader = PackReader | FileReader

# Beneath the folder, for files whose path no record knows or that may not be followed.
UNNAMED = b"headrace-unnamed"
_UNFINISHED = b".headrace-unfinished"
# PATH_MAX of Linux, with its NUL.
_PATH_BYTES_MAX = 4096
# What a name can fail with that another name may not.
_NAME_ERRORS = {errno.EEXIST, errno.ENOTDIR, errno.EISDIR, errno.ENOTEMPTY, errno.ENAMETOOLONG, errno.EILSEQ}
# What a claim of the records can fail with; a full disk is no such claim.
_CLAIM_ERRORS = {errno.EFBIG, errno.EINVAL, errno.EOVERFLOW}


@dataclass(slots=True)
class Extracted:
    """What `extract` did. `damaged_files` lack bytes; `unread_segments` could not be listed to their end."""

    files: int = 0
    file_bytes: int = 0
    damaged_files: int = 0
    unread_segments: int = 0


@dataclass(frozen=True, slots=True)
class _Damage:
    """Bytes [start, end) of a file, and why they are missing."""

    start: int
    end: int
    why: str


def find_segments(paths: Iterable[str]) -> list[str]:
    """The segment files among `paths` and in the folders among them, in the order they were made.

    NotFound: a path is not there. Invalid: a file among them is no segment by its name.
    """
    found = []
    for path in paths:
        if os.path.isdir(path):
            for folder, _, names in os.walk(path, onerror=_raise):
                found += [os.path.join(folder, name) for name in names if name.endswith((".pack", ".file"))]
        elif not os.path.exists(path):
            raise NotFound(f"{path} is not there")
        elif path.endswith((".pack", ".file")):
            found.append(path)
        else:
            raise Invalid(f"{path} is no segment: name ULID.pack, ULID.file, or a folder that holds some")
    return sorted(found, key=os.path.basename)


def open_segment(path: str, on_damage: OnDamage | None = None) -> Reader:
    """A reader of the segment in this file; a file segment's index lies beside it.

    Corrupt, Invalid: see the readers. NotFound: it, or its index, is not there. Holds no descriptor.
    """

    def read_range(offset: int, length: int) -> bytes:
        with open(path, "rb") as file:
            file.seek(offset)
            return file.read(length)

    segment, extension = os.path.splitext(os.path.basename(path))
    size = os.stat(path).st_size
    if extension == ".pack":
        return PackReader(read_range, size, segment, on_damage)
    try:
        with open(os.path.splitext(path)[0] + ".idx", "rb") as file:
            index = file.read()
    except FileNotFoundError as error:
        raise NotFound(
            f"segment {segment}: its index {error.filename} is not there; it says whose bytes {path} holds"
        ) from error
    return FileReader(read_range, size, index, segment, on_damage)


def extract(readers: Sequence[Reader], folder: str, tell: Callable[[str], None]) -> Extracted:
    """Writes the files that lie in these segments of one volume into `folder`, which is missing or empty.

    Where several inodes had one path, the one written last gets it, the others `PATH.ino-N`; a file with
    damage is named `PATH.damaged`. Modes (without setuid) and times come back, owners if root does it.
    `tell` hears of each file that is not as it was. Reads every byte once, 0.1 us each; keeps a record of
    some 300 bytes for each in memory. Conflict: `folder` is not empty. OSError: it cannot be written to.
    """
    os.makedirs(folder, exist_ok=True)
    if os.listdir(folder):
        raise Conflict(f"{folder} is not empty: name a folder that is missing or empty")
    done = Extracted()
    inodes: dict[int, list[tuple[Reader, Record]]] = {}
    for reader in sorted(readers, key=lambda reader: reader.segment):
        try:
            for record in reader.records():
                inodes.setdefault(record.ino, []).append((reader, record))
        except OSError as error:  # every error of ours is one too
            tell(str(error))
            done.unread_segments += 1
    last: dict[bytes, list[tuple[Reader, Record]]] = {}
    for ino, records in inodes.items():
        inodes[ino] = in_order(records)
        last.setdefault(_path_of(inodes[ino]), []).append(inodes[ino][-1])
    for path, rivals in last.items():
        rivals.sort(key=lambda entry: (entry[1].segment, entry[1].offset))
        for _, record in reversed(in_order(rivals)):
            _extract_inode(os.fsencode(folder), path, inodes[record.ino], tell, done)
    return done


def _path_of(records: Sequence[tuple[Reader, Record]]) -> bytes:
    return next((meant_path(record.path) for _, record in reversed(records) if record.path), b"")


def in_order(records: Sequence[tuple[Reader, Record]]) -> list[tuple[Reader, Record]]:
    """Records, given in the order of their segments' names, in the order they were written.

    Packs are filled one behind the other, so theirs is that order. A file segment is written beside a pack
    that is open, and nothing says when: what that pack holds of the same inode is taken for later if its
    mtime is, what it holds of another if that inode was made later.
    """
    ordered = [entry for entry in records if isinstance(entry[0], PackReader)]
    for entry in records:
        if isinstance(entry[0], FileReader):
            later = (at for at, (_, record) in enumerate(ordered) if _is_later(record, entry[1]))
            ordered.insert(next(later, len(ordered)), entry)
    return ordered


def _is_later(record: Record, whole: Record) -> bool:
    if record.segment > whole.segment:
        return True
    if record.ino != whole.ino:
        return record.ino > whole.ino
    return record.mtime_ns > whole.mtime_ns


def _extract_inode(
    folder: bytes,
    path: bytes,
    records: Sequence[tuple[Reader, Record]],
    tell: Callable[[str], None],
    done: Extracted,
) -> None:
    last = records[-1][1]
    notes: list[str] = []
    unfinished = os.path.join(folder, _UNFINISHED)
    descriptor = os.open(unfinished, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
    try:
        damages: list[_Damage] = []
        for reader, record in records:
            damages = _write_record(descriptor, reader, record, damages)
        if os.geteuid() == 0:
            _claimed(lambda: os.fchown(descriptor, last.uid, last.gid), "its owner", notes)
        os.fchmod(descriptor, last.mode & 0o777)
        _claimed(lambda: os.utime(descriptor, ns=(last.mtime_ns, last.mtime_ns)), "its time", notes)
        done.file_bytes += os.fstat(descriptor).st_size
        name = _name(folder, path, last.ino, b".damaged" if damages else b"")
    except BaseException:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(unfinished)
        raise
    finally:
        os.close(descriptor)
    done.files += 1
    done.damaged_files += bool(damages)
    notes += [f"bytes {damage.start} to {damage.end} are missing: {damage.why}" for damage in damages]
    if path and name not in (path, path + b".damaged"):
        notes.append(f"its path was {os.fsdecode(path)}, which another file has or which cannot be used")
    for note in notes:
        tell(f"{os.fsdecode(name)}: {note}")


def _write_record(
    descriptor: int, reader: Reader, record: Record, damages: Sequence[_Damage]
) -> list[_Damage]:
    """Writes it over what is there. Returns what is missing then."""
    left = list(damages)
    end = record.file_offset + record.length
    # A file segment grows behind its header: it is as long as it is.
    size = max(record.file_bytes, end)
    try:
        for start in range(0, record.length, CHUNK_BYTES):
            at = record.file_offset + start
            try:
                data = reader.read(record, start, CHUNK_BYTES)
                why = ""
            except OSError as error:
                # Zeros, also where an older record has bytes: those are not what was there last.
                data, why = bytes(min(CHUNK_BYTES, record.length - start)), str(error)
            _write(descriptor, data, at)
            left = _outside(left, at, at + len(data))
            if why:
                left.append(_Damage(at, at + len(data), why))
        # What a truncate cut off before this write must not come back with it.
        os.ftruncate(descriptor, size)
    except (OSError, OverflowError) as error:
        if isinstance(error, OSError) and error.errno not in _CLAIM_ERRORS:
            raise
        left.append(_Damage(record.file_offset, end, f"of {size}, which no file here can have: {error}"))
        return left
    return _outside(left, size, sys.maxsize)


def _write(descriptor: int, data: bytes, at: int) -> None:
    done = 0
    while done < len(data):
        done += os.pwrite(descriptor, data[done:], at + done)


def _outside(damages: Sequence[_Damage], start: int, end: int) -> list[_Damage]:
    """What of them lies outside of [start, end)."""
    left = []
    for damage in damages:
        if damage.start < start:
            left.append(replace(damage, end=min(damage.end, start)))
        if damage.end > end:
            left.append(replace(damage, start=max(damage.start, end)))
    return left


def _claimed(act: Callable[[], None], what: str, notes: list[str]) -> None:
    """Does what a record asks for; if the file system cannot, that is told, and the bytes are still good."""
    try:
        act()
    except (OSError, OverflowError) as error:
        notes.append(f"{what} cannot be as it was: {error}")


def _name(folder: bytes, path: bytes, ino: int, suffix: bytes) -> bytes:
    """Moves the unfinished file to the first name that can be had, and gives that name."""
    for name in _names(path, ino, suffix):
        target = os.path.join(folder, name)
        if len(target) >= _PATH_BYTES_MAX:
            continue  # before a folder is made for it
        try:
            _make_folders(folder, name)
            if not os.path.lexists(target):
                os.rename(os.path.join(folder, _UNFINISHED), target)
                return name
        except OSError as error:
            if error.errno not in _NAME_ERRORS:
                raise
    raise Conflict(
        f"{os.fsdecode(folder)} has no name left for inode {ino}: is something else writing there?"
    )


def _make_folders(folder: bytes, name: bytes) -> None:
    # Not os.makedirs, which calls itself once for each: a path has up to 2,048 parts.
    slash = name.find(b"/")
    while slash >= 0:
        with contextlib.suppress(FileExistsError):
            os.mkdir(os.path.join(folder, name[:slash]))
        slash = name.find(b"/", slash + 1)


def _names(path: bytes, ino: int, suffix: bytes) -> Iterator[bytes]:
    # Only names of the folder's own: no "..", nothing absolute, nothing that a system call would cut.
    if path and b"\0" not in path and not {b"", b".", b".."} & set(path.split(b"/")):
        yield path + suffix
        yield path + b".ino-%d" % ino + suffix
    yield UNNAMED + b"/ino-%d" % ino + suffix


def _raise(error: OSError) -> None:
    raise error
