"""Open files: unlinked ones, appends, truncation, O_DIRECT, and the flags of open."""

from __future__ import annotations

import errno
import fcntl
import os
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.linux import aligned, errno_of, fallocate
from support.volumes import VolumeUnderTest

MIB = 1 << 20


def test_an_unlinked_file_lives_until_it_is_closed(place: Path) -> None:
    fd = os.open(place / "file", os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o640)
    os.write(fd, b"before")
    os.unlink(place / "file")
    assert os.listdir(place) == []
    assert errno_of(os.stat, place / "file") == "ENOENT"
    assert os.fstat(fd).st_nlink == 0
    os.write(fd, b" and after")
    assert os.pread(fd, 100, 0) == b"before and after"
    os.ftruncate(fd, 3)
    os.fsync(fd)
    assert os.pread(fd, 100, 0) == b"bef"
    os.fchmod(fd, 0o600)
    assert os.fstat(fd).st_mode & 0o777 == 0o600
    # The name is free for another file.
    (place / "file").write_bytes(b"another")
    assert os.pread(fd, 100, 0) == b"bef"
    os.close(fd)
    assert (place / "file").read_bytes() == b"another"


def test_an_unlinked_file_stays_readable_when_it_was_closed_and_committed(
    mount: Path, volume: VolumeUnderTest
) -> None:
    """The bytes are in a segment by then; nothing may collect it while a reader holds the file."""
    (mount / "file").write_bytes(b"x" * 100_000)
    volume.connect().sync()
    with open(mount / "file", "rb", buffering=0) as file:
        os.unlink(mount / "file")
        volume.connect().sync()
        for number in range(50):
            (mount / f"other{number}").write_bytes(b"y" * 100_000)
        volume.connect().sync()
        assert file.read() == b"x" * 100_000


def test_appends_never_overwrite_each_other(place: Path) -> None:
    """Eight writers, one descriptor each: every record is there, whole."""
    record_bytes, records_each, writers = 100, 100, 8
    barrier = threading.Barrier(writers)

    def write(writer: int) -> None:
        fd = os.open(place / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
        try:
            barrier.wait()
            for number in range(records_each):
                record = b"%d:%d:" % (writer, number)
                assert os.write(fd, record.ljust(record_bytes - 1, b".") + b"\n") == record_bytes
        finally:
            os.close(fd)

    with ThreadPoolExecutor(writers) as pool:
        for done in [pool.submit(write, writer) for writer in range(writers)]:
            done.result()
    lines = (place / "log").read_bytes().splitlines(keepends=True)
    assert {len(line) for line in lines} == {record_bytes}
    seen = {tuple(line.split(b":")[:2]) for line in lines}
    assert len(lines) == len(seen) == writers * records_each


def test_an_append_goes_to_the_end_whatever_the_position(place: Path) -> None:
    (place / "file").write_bytes(b"0123456789")
    fd = os.open(place / "file", os.O_RDWR | os.O_APPEND)
    os.lseek(fd, 2, os.SEEK_SET)
    os.write(fd, b"ab")
    assert os.lseek(fd, 0, os.SEEK_CUR) == 12
    with open(place / "file", "ab") as other:
        other.write(b"cd")
    os.write(fd, b"ef")
    os.close(fd)
    assert (place / "file").read_bytes() == b"0123456789abcdef"


@pytest.mark.parametrize("size", [1, 4095, 4096, 65536, 65537, 3 * MIB + 5])
def test_what_was_cut_off_comes_back_as_zeros(place: Path, size: int) -> None:
    path = place / "file"
    path.write_bytes(b"x" * size)
    for cut in sorted({0, 1, size // 2, max(0, size - 4096), size - 1}):
        path.write_bytes(b"x" * size)
        os.truncate(path, cut)
        assert path.stat().st_size == cut
        assert path.read_bytes() == b"x" * cut
        os.truncate(path, size + 10)
        assert path.read_bytes() == b"x" * cut + bytes(size + 10 - cut)
        with open(path, "r+b", buffering=0) as file:
            file.truncate(cut)
            file.seek(size)
            file.write(b"end")
        assert path.read_bytes() == b"x" * cut + bytes(size - cut) + b"end"


def test_a_cut_is_zeros_also_after_a_commit_between(mount: Path, volume: VolumeUnderTest) -> None:
    path = mount / "file"
    path.write_bytes(b"x" * 200_000)
    volume.connect().sync()
    os.truncate(path, 100)
    volume.connect().sync()
    os.truncate(path, 200_000)
    expected = b"x" * 100 + bytes(199_900)
    assert path.read_bytes() == expected
    volume.connect().sync()
    volume.unmount(mount)
    volume.restart()
    assert volume.connect().read_bytes("/file") == expected


def test_writes_anywhere_add_up(place: Path) -> None:
    with open(place / "file", "w+b", buffering=0) as file:
        fd = file.fileno()
        expected = bytearray()
        for number, (offset, length) in enumerate(
            [
                (0, 10),
                (5, 10),
                (100_000, 5),
                (4090, 20),
                (0, 1),
                (65530, 100),
                (99_990, 20),
                (MIB - 1, 2),
                (3, 70_000),
            ]
        ):
            data = bytes([number + 1]) * length
            assert os.pwrite(fd, data, offset) == length
            expected.extend(bytes(max(0, offset + length - len(expected))))
            expected[offset : offset + length] = data
            assert os.pread(fd, 2 * MIB, 0) == bytes(expected)
    assert (place / "file").read_bytes() == bytes(expected)


def test_large_writes_and_reads_are_whole(place: Path) -> None:
    content = os.urandom(1 << 16) * (24 * 16) + b"tail"  # 24 MiB: a file segment
    with open(place / "file", "xb", buffering=0) as file:
        view = memoryview(content)
        while view:
            view = view[file.write(view) :]
        os.fsync(file.fileno())
    assert (place / "file").read_bytes() == content
    with open(place / "file", "r+b", buffering=0) as file:
        file.seek(10 * MIB - 3)
        file.write(b"overwritten")
    expected = bytearray(content)
    expected[10 * MIB - 3 : 10 * MIB + 8] = b"overwritten"
    assert (place / "file").read_bytes() == bytes(expected)


def test_the_flags_of_open(place: Path) -> None:
    (place / "folder").mkdir()
    fd = os.open(place / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    os.write(fd, b"0123456789")
    assert errno_of(os.read, fd, 1) == "EBADF"
    os.close(fd)
    assert errno_of(os.open, place / "file", os.O_WRONLY | os.O_CREAT | os.O_EXCL) == "EEXIST"
    assert errno_of(os.open, place / "none", os.O_RDONLY) == "ENOENT"
    assert errno_of(os.open, place / "folder", os.O_WRONLY) == "EISDIR"
    assert errno_of(os.open, place / "folder", os.O_WRONLY | os.O_CREAT) == "EISDIR"
    assert errno_of(os.open, place / "file", os.O_RDONLY | os.O_DIRECTORY) == "ENOTDIR"
    assert errno_of(os.open, place / "file" / "x", os.O_RDONLY) == "ENOTDIR"
    fd = os.open(place / "file", os.O_RDONLY)
    assert errno_of(os.write, fd, b"x") == "EBADF"
    assert errno_of(os.ftruncate, fd, 1) == "EINVAL"
    os.fsync(fd)
    os.fdatasync(fd)
    os.close(fd)
    os.close(os.open(place / "file", os.O_WRONLY | os.O_TRUNC))
    assert (place / "file").stat().st_size == 0


def test_the_mode_of_a_new_file_is_what_the_umask_leaves(place: Path) -> None:
    before = os.umask(0o027)
    try:
        os.close(os.open(place / "file", os.O_WRONLY | os.O_CREAT, 0o666))
        os.mkdir(place / "folder", 0o777)
        # A file of mode 0 can be written by the descriptor that made it.
        fd = os.open(place / "none", os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o000)
        os.write(fd, b"x")
        os.close(fd)
    finally:
        os.umask(before)
    assert (place / "file").stat().st_mode & 0o7777 == 0o640
    assert (place / "folder").stat().st_mode & 0o7777 == 0o750
    assert (place / "none").stat().st_mode & 0o7777 == 0
    assert (place / "none").stat().st_size == 1


def test_direct_reads_and_writes_agree_with_buffered_ones(place: Path) -> None:
    path = place / "file"
    path.write_bytes(b"x" * 10_000)
    fd = os.open(path, os.O_RDWR | os.O_DIRECT)
    memory = aligned(1 << 16)
    assert os.preadv(fd, [memory], 0) == 10_000
    assert memory[:10_000] == b"x" * 10_000
    memory[:8192] = b"y" * 8192
    assert os.pwritev(fd, [memoryview(memory)[:8192]], 4096) == 8192
    assert path.read_bytes() == b"x" * 4096 + b"y" * 8192
    with open(path, "r+b", buffering=0) as file:
        file.write(b"z" * 4096)
    assert os.preadv(fd, [memory], 0) == 12_288
    assert memory[:12_288] == b"z" * 4096 + b"y" * 8192
    os.close(fd)


def test_descriptors_of_one_open_share_the_position(place: Path) -> None:
    (place / "file").write_bytes(b"0123456789")
    fd = os.open(place / "file", os.O_RDONLY)
    copy = os.dup(fd)
    assert os.read(fd, 4) == b"0123"
    assert os.read(copy, 4) == b"4567"
    os.close(copy)
    assert os.read(fd, 4) == b"89"
    os.close(fd)


def test_copying_inside_the_kernel_copies(place: Path) -> None:
    content = bytes(range(256)) * 1000
    (place / "from").write_bytes(content)
    source = os.open(place / "from", os.O_RDONLY)
    target = os.open(place / "to", os.O_WRONLY | os.O_CREAT)
    copied = 0
    while copied < len(content):
        count = os.copy_file_range(source, target, len(content) - copied)
        assert count > 0
        copied += count
    os.close(target)
    assert (place / "to").read_bytes() == content
    target = os.open(place / "sent", os.O_WRONLY | os.O_CREAT)
    copied = 0
    while copied < len(content):
        copied += os.sendfile(target, source, copied, len(content) - copied)
    os.close(target)
    os.close(source)
    assert (place / "sent").read_bytes() == content


@pytest.mark.parametrize("mode", [0, 1, 3])
def test_fallocate_does_it_or_says_that_it_cannot(place: Path, mode: int) -> None:
    path = place / "file"
    path.write_bytes(b"x" * 100_000)
    before = path.read_bytes()
    with open(path, "r+b", buffering=0) as file:
        try:
            fallocate(file.fileno(), mode, 4096, 200_000)
        except OSError as error:
            assert error.errno in (errno.EOPNOTSUPP, errno.ENOSYS)
            assert path.read_bytes() == before
            return
    expected = {
        0: before + bytes(104_096),
        1: before,
        3: before[:4096] + bytes(95_904),
    }[mode]
    assert path.read_bytes() == expected


def test_locks_keep_processes_apart(place: Path) -> None:
    (place / "file").write_bytes(b"x")
    one = os.open(place / "file", os.O_RDWR)
    two = os.open(place / "file", os.O_RDWR)
    fcntl.flock(one, fcntl.LOCK_EX)
    assert errno_of(fcntl.flock, two, fcntl.LOCK_EX | fcntl.LOCK_NB) == "EAGAIN"
    fcntl.flock(one, fcntl.LOCK_UN)
    fcntl.flock(two, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(two)
    fcntl.lockf(one, fcntl.LOCK_EX)
    child = os.fork()
    if child == 0:
        answer = 1
        try:
            with open(place / "file", "r+b") as file:
                answer = (
                    0
                    if errno_of(fcntl.lockf, file, fcntl.LOCK_EX | fcntl.LOCK_NB) in ("EAGAIN", "EACCES")
                    else 2
                )
        finally:
            os._exit(answer)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    os.close(one)


def test_many_files_may_be_open_at_once(place: Path) -> None:
    """Case 23's files: random reads of 500 open files."""
    for number in range(500):
        (place / f"{number}").write_bytes(b"%d " % number * 3000)
    opened = [os.open(place / f"{number}", os.O_RDONLY) for number in range(500)]
    for number, fd in enumerate(opened):
        word = b"%d " % number
        offset = len(word) * (number * 7 % 2000)
        assert os.pread(fd, 4096, offset)[: len(word)] == word
    for fd in opened:
        os.close(fd)


def test_reading_past_the_end_gives_what_there_is(place: Path) -> None:
    (place / "file").write_bytes(b"0123456789")
    fd = os.open(place / "file", os.O_RDONLY)
    assert os.pread(fd, 100, 5) == b"56789"
    assert os.pread(fd, 100, 10) == b""
    assert os.pread(fd, 100, 1 << 40) == b""
    os.close(fd)


def test_a_writer_is_seen_by_a_reader_at_once(place: Path) -> None:
    writer = os.open(place / "file", os.O_WRONLY | os.O_CREAT)
    reader = os.open(place / "file", os.O_RDONLY)
    for number in range(100):
        os.write(writer, b"%04d" % number)
        assert os.pread(reader, 4, 4 * number) == b"%04d" % number
        assert os.fstat(reader).st_size == 4 * (number + 1)
    os.close(writer)
    os.close(reader)
