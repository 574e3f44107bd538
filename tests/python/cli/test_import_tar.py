"""Imports of tar archives: agree with `tarfile`, are never silent about damage, never leave the target."""

from __future__ import annotations

import bz2
import gzip
import io
import lzma
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable
from pathlib import Path

import pytest
from fake_destination import FakeDestination

from headrace.control.importer import Importer, ImportReport
from headrace.control.source import STREAMED_BYTES_MIN
from headrace.control.tar_source import NotATar, TarSource

LONG = "d" * 90 + "/" + "e" * 90 + "/" + "f" * 180


def run(archive: Path, destination: FakeDestination, *, owners: bool = True) -> ImportReport:
    source = TarSource(str(archive), devices=True)
    try:
        return Importer(source, destination, b"/data", owners=owners).run()
    finally:
        source.close()


def member(name: str, data: bytes = b"", **fields: object) -> tuple[tarfile.TarInfo, bytes]:
    info = tarfile.TarInfo(name)
    info.size = len(data)
    for key, value in fields.items():
        setattr(info, key, value)
    return info, data


def write(path: Path, members: list[tuple[tarfile.TarInfo, bytes]], form: int = tarfile.GNU_FORMAT) -> Path:
    with tarfile.open(path, "w", format=form) as archive:
        for info, data in members:
            archive.addfile(info, io.BytesIO(data))
    return path


def ordinary() -> list[tuple[tarfile.TarInfo, bytes]]:
    return [
        member("./", type=tarfile.DIRTYPE, mode=0o750, mtime=1_000_000_000),
        member("a", type=tarfile.DIRTYPE, mode=0o700, mtime=1_100_000_000),
        member("a/one", b"1" * 1000, mode=0o640, uid=7, gid=8, mtime=1_200_000_000),
        member("./a/two", b"2" * 513),
        member("a/empty"),
        member("a/three", b"3" * 512),
        member("a/link", type=tarfile.SYMTYPE, linkname="../b"),
        member("a/hard", type=tarfile.LNKTYPE, linkname="./a/one"),
        member("fifo", type=tarfile.FIFOTYPE, mode=0o600),
        member("null", type=tarfile.CHRTYPE, devmajor=1, devminor=3),
        member(LONG, b"long"),
        member("x" * 120, type=tarfile.SYMTYPE, linkname="y" * 300),
        member("implicit/deep/file", b"made"),
    ]


def assert_agrees(archive: Path, destination: FakeDestination) -> None:
    """The volume holds what `tarfile` says of each member; the last of a name wins."""
    there = destination.tree(b"/data")
    last: dict[bytes, tarfile.TarInfo] = {}
    with tarfile.open(archive, errors="surrogateescape") as reference:
        for info in reference:
            last[os.fsencode(os.path.normpath(info.name.lstrip("/")))] = info
        for name, info in last.items():
            node = destination.nodes[b"/data"] if name == b"." else there[name]
            if info.islnk():
                assert node is there[os.fsencode(os.path.normpath(info.linkname))]
                continue
            assert node.mode == info.mode, name
            assert (node.uid, node.gid) == (info.uid, info.gid)
            assert abs((node.mtime_ns or 0) - info.mtime * 1e9) < 1000
            if info.isfile():
                extracted = reference.extractfile(info)
                assert extracted is not None and bytes(node.data) == extracted.read(), name
            if info.issym():
                assert node.target == os.fsencode(info.linkname)


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_every_kind_of_member_arrives(tmp_path: Path, destination: FakeDestination, form: int) -> None:
    archive = write(tmp_path / "a.tar", ordinary(), form)
    report = run(archive, destination)
    assert report.complete, (report.problems, report.damage)
    assert_agrees(archive, destination)
    assert destination.tree(b"/data")[b"null"].rdev == os.makedev(1, 3)


def test_second_run_sends_nothing(tmp_path: Path, destination: FakeDestination) -> None:
    archive = write(tmp_path / "a.tar", ordinary())
    run(archive, destination)
    destination.log.clear()
    report = run(archive, destination)
    assert report.entries == 0 and report.complete
    assert not [line for line in destination.log if line.startswith("put")]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_compression_is_told_by_content(
    tmp_path: Path, destination: FakeDestination, compress: Callable[[bytes], bytes]
) -> None:
    plain = write(tmp_path / "a.tar", ordinary())
    packed = tmp_path / "misleading.zip"
    packed.write_bytes(compress(plain.read_bytes()))
    assert run(packed, destination).complete
    assert_agrees(plain, destination)


def test_pax_times_keep_nanoseconds(tmp_path: Path, destination: FakeDestination) -> None:
    info, data = member("f", b"x", pax_headers={"mtime": "1234567890.123456789"})
    run(write(tmp_path / "a.tar", [(info, data)], tarfile.PAX_FORMAT), destination)
    assert destination.tree(b"/data")[b"f"].mtime_ns == 1_234_567_890_123_456_789


def test_names_that_are_not_utf8(tmp_path: Path, destination: FakeDestination) -> None:
    odd = os.fsdecode(b"a/\xff\xfe\n")
    for form in (tarfile.GNU_FORMAT, tarfile.PAX_FORMAT):
        with tarfile.open(tmp_path / "a.tar", "w", format=form, errors="surrogateescape") as archive:
            archive.addfile(member(odd, b"odd")[0], io.BytesIO(b"odd"))
        assert run(tmp_path / "a.tar", destination).complete
        assert bytes(destination.tree(b"/data")[b"a/\xff\xfe\n"].data) == b"odd"


def test_last_of_two_members_wins(tmp_path: Path, destination: FakeDestination) -> None:
    members = [member("f", b"old", mtime=1), member("d/x", b"1"), member("f", b"newer", mtime=2)]
    archive = write(tmp_path / "a.tar", members)
    for _ in range(2):
        assert run(archive, destination).complete
        assert bytes(destination.tree(b"/data")[b"f"].data) == b"newer"


def test_nothing_leaves_the_target(tmp_path: Path, destination: FakeDestination) -> None:
    destination.make_directories(b"/other")
    members = [
        member("../up", b"x"),
        member("a/../../up", b"x"),
        member("/absolute/file", b"inside"),
        member("escape", type=tarfile.SYMTYPE, linkname="/other"),
        member("escape/file", b"x"),
        member("hard", type=tarfile.LNKTYPE, linkname="../up"),
        member("through", type=tarfile.LNKTYPE, linkname="escape/file"),
        member("good", b"x"),
    ]
    report = run(write(tmp_path / "a.tar", members), destination)
    assert [path for path, _ in report.problems] == [
        b"escape/file", b"through", b"../up", b"a/../../up", b"hard"
    ]  # fmt: skip
    assert "leading '/'" in report.notes[0]
    assert set(destination.tree(b"/data")) == {b"absolute", b"absolute/file", b"escape", b"good"}
    assert not destination.tree(b"/other")


def test_symlink_that_was_there_before_is_not_written_through(
    tmp_path: Path, destination: FakeDestination
) -> None:
    destination.make_directories(b"/other")
    first = write(tmp_path / "1.tar", [member("escape", type=tarfile.SYMTYPE, linkname="/other")])
    second = write(tmp_path / "2.tar", [member("escape/file", b"x")])
    assert run(first, destination).complete
    report = run(second, destination)
    assert "goes through the symbolic link 'escape'" in report.problems[0][1]
    assert not destination.tree(b"/other")


def test_symlink_replaced_by_a_directory_later(tmp_path: Path, destination: FakeDestination) -> None:
    members = [
        member("a", type=tarfile.SYMTYPE, linkname="/other"),
        member("a", type=tarfile.DIRTYPE, mode=0o755),
        member("a/f", b"x"),
    ]
    destination.make_directories(b"/other")
    assert run(write(tmp_path / "a.tar", members), destination).complete
    assert set(destination.tree(b"/data")) == {b"a", b"a/f"}
    assert not destination.tree(b"/other")


def three_members(tmp_path: Path) -> bytes:
    members = [member(f"m{index}", bytes([48 + index]) * 1000) for index in range(3)]
    return write(tmp_path / "three.tar", members).read_bytes()


@pytest.mark.parametrize(
    ("cut", "whole", "says"),
    [
        (1312, 0, "cut off inside member 'm0', at byte 1312"),
        (1536, 1, "without its end-of-archive blocks.* at byte 1536 .last member: 'm0'"),
        (1836, 1, "inside a header, at byte 1836 .last member: 'm0'"),
        (2448, 1, "cut off inside member 'm1', at byte 2448"),
        (4608, 3, "without its end-of-archive blocks.* at byte 4608 .last member: 'm2'"),
    ],
)
def test_cut_archive_is_named_and_what_came_before_is_kept(
    tmp_path: Path, destination: FakeDestination, cut: int, whole: int, says: str
) -> None:
    path = tmp_path / "cut.tar"
    path.write_bytes(three_members(tmp_path)[:cut])
    report = run(path, destination)
    assert report.damage is not None
    assert __import__("re").search(says, report.damage), report.damage
    assert sorted(destination.tree(b"/data")) == [b"m%d" % index for index in range(whole)]
    assert destination.log[-1] == "sync"


def test_flipped_byte_in_a_header_is_named(tmp_path: Path, destination: FakeDestination) -> None:
    data = bytearray(three_members(tmp_path))
    data[1536 + 20] ^= 1
    path = tmp_path / "flipped.tar"
    path.write_bytes(data)
    report = run(path, destination)
    assert report.damage is not None and "damaged header" in report.damage and "'m0'" in report.damage
    assert list(destination.tree(b"/data")) == [b"m0"]


@pytest.mark.parametrize("compress", [gzip.compress, bz2.compress, lzma.compress])
def test_damaged_compression_is_named(
    tmp_path: Path, destination: FakeDestination, compress: Callable[[bytes], bytes]
) -> None:
    members = [member(f"m{index}", os.urandom(100_000)) for index in range(30)]
    whole = bytearray(compress(write(tmp_path / "a.tar", members).read_bytes()))
    path = tmp_path / "damaged"
    path.write_bytes(whole[: len(whole) // 2])
    report = run(path, destination)
    assert report.damage is not None and "at byte" in report.damage
    cut_members = len(destination.tree(b"/data"))
    whole[len(whole) // 2] ^= 0xFF
    path.write_bytes(whole)
    report = run(path, FakeDestination())
    assert report.damage is not None and "at byte" in report.damage
    # zlib and bzip2 give whole blocks or more before the damage.
    assert compress is lzma.compress or cut_members > 3


def test_checksum_at_the_end_of_gzip_is_verified(tmp_path: Path, destination: FakeDestination) -> None:
    packed = bytearray(gzip.compress(three_members(tmp_path)))
    packed[-6] ^= 1
    path = tmp_path / "a.tgz"
    path.write_bytes(packed)
    report = run(path, destination)
    assert report.damage is not None and "CRC" in report.damage


@pytest.mark.parametrize("data", [b"", b"hello, this is no archive\n" * 100, b"PK\x03\x04" + bytes(600)])
def test_other_files_are_refused(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file"
    path.write_bytes(data)
    with pytest.raises(NotATar):
        TarSource(str(path), devices=False)


def test_archive_without_members(tmp_path: Path, destination: FakeDestination) -> None:
    report = run(write(tmp_path / "a.tar", []), destination)
    assert report.complete and report.entries == 0


def test_large_member_is_streamed(tmp_path: Path, destination: FakeDestination) -> None:
    data = os.urandom(STREAMED_BYTES_MIN + 12345)
    archive = write(tmp_path / "a.tar", [member("before", b"b"), member("big", data), member("after", b"a")])
    assert run(archive, destination).complete
    assert_agrees(archive, destination)
    cut = tmp_path / "cut.tar"
    cut.write_bytes(archive.read_bytes()[: 10 << 20])
    other = FakeDestination()
    report = run(cut, other)
    assert report.damage is not None and "'big'" in report.damage
    assert list(other.tree(b"/data")) == [b"before"]


@pytest.mark.skipif(shutil.which("tar") is None, reason="GNU tar is not installed")
@pytest.mark.parametrize("form", ["gnu", "posix"])
@pytest.mark.parametrize("size", [300_000, STREAMED_BYTES_MIN + (8 << 20)])
def test_sparse_members(tmp_path: Path, destination: FakeDestination, form: str, size: int) -> None:
    folder = tmp_path / "source"
    folder.mkdir()
    with open(folder / "sparse", "wb") as file:
        for offset in range(8192, size - 8192, size // 40):
            file.seek(offset)
            file.write(b"run at %d" % offset)
        file.truncate(size)
    (folder / "z").write_text("after")
    archive = tmp_path / "a.tar"
    command = ["tar", "--sparse", f"--format={form}", "-C", str(folder), "-cf", str(archive), "sparse", "z"]
    subprocess.run(command, check=True)
    report = run(archive, destination)
    assert report.complete, (report.problems, report.damage)
    there = destination.tree(b"/data")
    assert bytes(there[b"sparse"].data) == (folder / "sparse").read_bytes()
    assert bytes(there[b"z"].data) == b"after"


def test_unknown_member_type_is_named(tmp_path: Path, destination: FakeDestination) -> None:
    archive = write(tmp_path / "a.tar", [member("volume-label", type=b"V"), member("f", b"x")])
    report = run(archive, destination)
    assert report.problems[0][0] == b"volume-label" and list(destination.tree(b"/data")) == [b"f"]


@pytest.mark.parametrize("form", [tarfile.GNU_FORMAT, tarfile.PAX_FORMAT])
def test_any_flipped_byte_ends_in_a_report(tmp_path: Path, form: int) -> None:
    """Damage anywhere is an archive imported (a flipped byte of data cannot be seen), named damage, or a
    refusal; never a crash, a hang or a name outside the target."""
    members = [*ordinary()[:9], member(LONG, b"long"), member("zz/last", b"z" * 700)]
    whole = write(tmp_path / "a.tar", members, form).read_bytes()
    used = len(whole.rstrip(b"\0"))
    path = tmp_path / "flipped.tar"
    for at in range(0, used, 23):
        damaged = bytearray(whole)
        damaged[at] ^= 1 << at % 8
        path.write_bytes(damaged)
        target = FakeDestination()
        try:
            report = run(path, target)
        except NotATar:
            continue
        assert all(name == b"/" or name.startswith(b"/data") for name in target.nodes)
        if report.complete:
            assert len(target.tree(b"/data")) >= len(members) - 1
