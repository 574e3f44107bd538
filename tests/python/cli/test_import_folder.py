"""What an import of a folder promises, against a volume in memory; with the engine: test_cli_engine.py."""

from __future__ import annotations

import os
import socket
import stat
from pathlib import Path

import pytest
from fake_destination import FakeDestination

from headrace.control import folder_source
from headrace.control.folder_source import FolderSource
from headrace.control.importer import Importer, ImportReport, Refused
from headrace.control.source import STREAMED_BYTES_MIN, Entry

IS_ROOT = os.geteuid() == 0


def run(
    source: Path, destination: FakeDestination, root: bytes = b"/data", *, replace: bool = False
) -> ImportReport:
    folder = FolderSource(os.fsencode(source), devices=IS_ROOT)
    return Importer(folder, destination, root, owners=IS_ROOT, replace=replace).run()


def assert_same(source: Path, destination: FakeDestination, root: bytes = b"/data") -> None:
    """Every name, kind, byte, mode, time and link of `source` is in the volume, and nothing else."""
    there = destination.tree(root)
    expected = set()
    for folder, folders, files in os.walk(os.fsencode(source)):
        for name in folders + files:
            path = os.path.join(folder, name)
            relative = os.path.relpath(path, os.fsencode(source))
            expected.add(relative)
            status, node = os.lstat(path), there[relative]
            assert node.mtime_ns == status.st_mtime_ns, relative
            if stat.S_ISLNK(status.st_mode):
                assert (node.kind, node.target) == ("symlink", os.readlink(path))
                continue
            assert node.mode == stat.S_IMODE(status.st_mode), relative
            if stat.S_ISREG(status.st_mode):
                assert bytes(node.data) == Path(os.fsdecode(path)).read_bytes(), relative
    assert set(there) == expected


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for index in range(30):
        folder = root / f"class{index % 3}" / "deep"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.bin").write_bytes(os.urandom(index * 37))
    (root / "empty").touch()
    (root / "empty_folder").mkdir(mode=0o555)
    (root / "to_file").symlink_to("class0/deep/0.bin")
    (root / "dangling").symlink_to("../nowhere")
    (root / "loop").symlink_to("loop")
    (root / "mode").touch(mode=0o4751)
    (root / "mode").chmod(0o4751)
    os.utime(root / "class1", ns=(1, 1_234_567_890_123_456_789))
    os.utime(root / "class2" / "deep" / "2.bin", ns=(1, -5_000_000_001))
    os.close(os.open(os.fsencode(root) + b"/\xff\xfe\n name \\ ", os.O_CREAT | os.O_WRONLY))
    (root / ("n" * 255)).write_text("long")
    return root


def test_tree_arrives_whole(tree: Path, destination: FakeDestination) -> None:
    report = run(tree, destination)
    assert report.complete, report.problems
    assert_same(tree, destination)
    assert (report.files, report.symlinks) == (34, 3)
    assert destination.nodes[b"/data"].mtime_ns == tree.stat().st_mtime_ns
    assert destination.log[-1] == "sync"


def test_second_run_sends_nothing(tree: Path, destination: FakeDestination) -> None:
    run(tree, destination)
    destination.log.clear()
    report = run(tree, destination)
    assert report.entries == 0 and report.skipped == 34 + 3 + 7
    assert not [line for line in destination.log if line.startswith("put")]
    assert_same(tree, destination)


def test_second_run_replaces_what_differs(tree: Path, destination: FakeDestination) -> None:
    run(tree, destination)
    (tree / "class0/deep/3.bin").write_bytes(b"new")
    (tree / "class1/deep/4.bin").chmod(0o600)
    (tree / "to_file").unlink()
    (tree / "to_file").symlink_to("empty")
    report = run(tree, destination)
    assert (report.files, report.symlinks) == (2, 1)
    assert_same(tree, destination)


def test_what_is_newer_in_the_volume_is_kept_until_told_otherwise(
    tree: Path, destination: FakeDestination
) -> None:
    run(tree, destination)
    edited = destination.nodes[b"/data/class0/deep/3.bin"]
    assert edited.mtime_ns is not None
    edited.data[:] = b"edited in the volume"
    edited.mtime_ns += 1
    (tree / "class1/deep/4.bin").write_bytes(b"newer in the source")
    report = run(tree, destination)
    assert report.complete and report.kept == [b"class0/deep/3.bin"]
    assert (report.files, report.replaced) == (1, 1)
    assert destination.nodes[b"/data/class0/deep/3.bin"].data == b"edited in the volume"
    report = run(tree, destination, replace=True)
    assert (report.files, report.replaced, report.kept) == (1, 1, [])
    assert_same(tree, destination)


def test_newer_file_in_place_of_a_directory_is_not_removed(tree: Path, destination: FakeDestination) -> None:
    run(tree, destination)
    for path in list(destination.tree(b"/data/class0")):
        del destination.nodes[b"/data/class0/" + path]
    folder = destination.nodes[b"/data/class0"]
    folder.kind, folder.data[:], folder.mtime_ns = "file", b"mine", 2**62
    report = run(tree, destination)
    assert not report.complete and "--replace" in report.problems[0][1]
    assert destination.nodes[b"/data/class0"].data == b"mine"
    assert run(tree, destination, replace=True).complete
    assert_same(tree, destination)


def test_interrupted_import_goes_on(
    tree: Path, destination: FakeDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace.control.importer.BATCH_ENTRIES", 5)
    calls = 0

    def interrupt(paths: list[bytes]) -> None:
        nonlocal calls
        calls += 1
        if calls == 4:
            raise KeyboardInterrupt

    destination.on_put = interrupt
    with pytest.raises(KeyboardInterrupt):
        run(tree, destination)
    assert destination.tree(b"/data")
    destination.on_put = lambda paths: None
    report = run(tree, destination)
    assert report.complete and report.skipped > 0
    assert_same(tree, destination)


def test_hard_links_stay_one_file(tree: Path, destination: FakeDestination) -> None:
    os.link(tree / "empty", tree / "class2" / "again")
    os.link(tree / "class0/deep/3.bin", tree / "class0/deep/3b.bin")
    report = run(tree, destination)
    there = destination.tree(b"/data")
    assert report.hard_links == 2
    assert there[b"class2/again"] is there[b"empty"]
    assert there[b"class0/deep/3b.bin"] is there[b"class0/deep/3.bin"]
    assert run(tree, destination).entries == 0


@pytest.mark.skipif(not IS_ROOT, reason="device nodes need root")
def test_fifo_socket_and_device(tree: Path, destination: FakeDestination) -> None:
    os.mkfifo(tree / "fifo", 0o640)
    with socket.socket(socket.AF_UNIX) as server:
        server.bind(str(tree / "sock"))
    os.mknod(tree / "null", 0o600 | stat.S_IFCHR, os.makedev(1, 3))
    assert run(tree, destination).complete
    there = destination.tree(b"/data")
    assert [there[name].kind for name in (b"fifo", b"sock", b"null")] == ["fifo", "socket", "char_device"]
    assert there[b"null"].rdev == os.makedev(1, 3)
    for name in ("fifo", "sock", "null"):
        (tree / name).unlink()


def test_device_is_named_and_skipped_without_root(tmp_path: Path, destination: FakeDestination) -> None:
    source = FolderSource(b"/dev", devices=False)
    report = Importer(source, destination, b"/data", owners=False).run()
    assert (b"null", "is a device, which only root can import") in report.problems


def test_large_file_keeps_its_holes(tree: Path, destination: FakeDestination) -> None:
    size = STREAMED_BYTES_MIN + (40 << 20)
    with open(tree / "sparse", "wb") as file:
        file.write(b"head")
        file.seek(30 << 20)
        file.write(b"middle" * 1000)
        file.truncate(size)
    report = run(tree, destination)
    node = destination.tree(b"/data")[b"sparse"]
    assert report.complete
    assert bytes(node.data) == (tree / "sparse").read_bytes()
    assert sum(length for _, length in node.written) < 1 << 20
    assert run(tree, destination).entries == 0


def test_leftover_of_an_interrupted_large_file_is_removed(tree: Path, destination: FakeDestination) -> None:
    run(tree, destination)
    destination.open_new(b"/data/class0/.headrace-import-12345")
    run(tree, destination)
    assert_same(tree, destination)


def test_unreadable_and_vanished_files_are_named(
    tree: Path, destination: FakeDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = os.open

    def refuse(path: bytes, *arguments: int, **options: int) -> int:
        if isinstance(path, bytes) and path.endswith(b"/3.bin"):
            raise PermissionError(13, "Permission denied")
        if isinstance(path, bytes) and path.endswith(b"/4.bin"):
            raise FileNotFoundError(2, "No such file")
        return opened(path, *arguments, **options)

    monkeypatch.setattr(folder_source.os, "open", refuse)
    report = run(tree, destination)
    assert dict(report.problems) == {
        b"class0/deep/3.bin": "cannot be opened: permission denied",
        b"class1/deep/4.bin": "vanished during the import",
    }
    there = destination.tree(b"/data")
    assert b"class0/deep/3.bin" not in there and b"class0/deep/6.bin" in there


def test_file_that_changes_under_the_read_is_retried_then_named(
    tree: Path, destination: FakeDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    read = os.read
    changes = {b"5.bin": 2, b"6.bin": 99}

    def meddle(descriptor: int, size: int) -> bytes:
        data = read(descriptor, size)
        name = os.path.basename(os.fsencode(os.readlink(f"/proc/self/fd/{descriptor}")))
        if changes.get(name, 0) > 0:
            changes[name] -= 1
            with open(f"/proc/self/fd/{descriptor}", "rb+") as file:
                file.write(b"x")
            os.utime(descriptor, ns=(1, changes[name]))
        return data

    monkeypatch.setattr(folder_source.os, "read", meddle)
    report = run(tree, destination)
    assert report.problems == [(b"class0/deep/6.bin", "changed while it was read, 3 times")]
    node = destination.tree(b"/data")[b"class2/deep/5.bin"]
    assert bytes(node.data) == (tree / "class2/deep/5.bin").read_bytes()


def test_name_that_became_a_symlink_is_not_followed(tree: Path, destination: FakeDestination) -> None:
    secret = tree.parent / "secret"
    secret.write_text("secret")
    source = FolderSource(os.fsencode(tree), devices=False)
    entry = Entry(b"x", "file", 0o644, 0, 0, 0, origin=os.fsencode(tree / "x"))
    (tree / "x").symlink_to(secret)
    with pytest.raises(Exception, match="became something else"):
        source.load(entry)


def test_one_refused_entry_does_not_stop_the_others(tree: Path, destination: FakeDestination) -> None:
    destination.refuse = {b"/data/class1/deep/4.bin"}
    report = run(tree, destination)
    assert report.problems == [(b"class1/deep/4.bin", "refused by the test")]
    assert report.files == 33
    assert b"class1/deep/7.bin" in destination.tree(b"/data")


def test_symlink_in_the_target_is_not_written_through(tree: Path, destination: FakeDestination) -> None:
    destination.make_directories(b"/data")
    destination.make_directories(b"/elsewhere")
    link = Entry(b"", "symlink", 0o777, 0, 0, 0, target=b"/elsewhere")
    destination.put([(b"/data/class1", link)], [], True)
    assert run(tree, destination).complete
    assert not destination.tree(b"/elsewhere")
    assert_same(tree, destination)


def test_directory_in_place_of_a_file_is_named(tree: Path, destination: FakeDestination) -> None:
    destination.make_directories(b"/data/empty/inside")
    report = run(tree, destination)
    assert report.problems == [(b"empty", "a directory is there")]


def test_file_in_place_of_a_directory_is_replaced(tree: Path, destination: FakeDestination) -> None:
    destination.make_directories(b"/data")
    destination.put([(b"/data/class0", Entry(b"", "file", 0o644, 0, 0, 0))], [b""], True)
    assert run(tree, destination).complete
    assert_same(tree, destination)


def test_target_that_is_a_file_is_refused(tree: Path, destination: FakeDestination) -> None:
    destination.put([(b"/data", Entry(b"", "file", 0o644, 0, 0, 0))], [b""], True)
    with pytest.raises(Refused, match="a file, not a directory"):
        run(tree, destination)


def test_root_of_the_volume_keeps_its_attributes(tree: Path, destination: FakeDestination) -> None:
    tree.chmod(0o700)
    assert run(tree, destination, b"/").complete
    assert destination.nodes[b"/"].mode == 0o755
    assert b"class0/deep/3.bin" in destination.tree(b"/")


def test_own_folder_of_the_volume_is_left_out(tree: Path, destination: FakeDestination) -> None:
    status = (tree / "class1").stat()
    source = FolderSource(os.fsencode(tree), devices=True, skip=frozenset([(status.st_dev, status.st_ino)]))
    report = Importer(source, destination, b"/data", owners=IS_ROOT).run()
    assert report.complete and "own folder" in report.notes[0]
    assert not [path for path in destination.tree(b"/data") if path.startswith(b"class1")]


def test_mounts_of_the_volume_are_left_out_by_device(
    tree: Path, destination: FakeDestination, monkeypatch: pytest.MonkeyPatch
) -> None:
    # No second file system here: a source whose every directory is on the skipped one.
    source = FolderSource(os.fsencode(tree), devices=True, skip_devices=frozenset([tree.stat().st_dev]))
    report = Importer(source, destination, b"/data", owners=IS_ROOT).run()
    assert report.complete and report.directories == 0
    assert f"skipped {tree}/class0: it is a mount of the volume that is imported into" in report.notes
    counted = []
    source.count(lambda files, size: counted.append(files) or True)
    assert counted == [len([name for name in tree.iterdir() if name.is_symlink() or not name.is_dir()])]


def test_count_sees_every_file(tree: Path) -> None:
    totals: list[tuple[int, int]] = []

    def tell(files: int, size: int) -> bool:
        totals.append((files, size))
        return True

    FolderSource(os.fsencode(tree), devices=False).count(tell)
    sizes = sum(index * 37 for index in range(30)) + 4
    assert totals[-1] == (34 + 3 + 7, sizes)
