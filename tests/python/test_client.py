"""The client against a fake engine: calls, connections, forks, engine death, volumes that are none."""

from __future__ import annotations

import functools
import gc
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.client import engine as engine_process
from headrace.client.volume import Volume
from headrace.errors import (
    AlreadyExists,
    Corrupt,
    Internal,
    Invalid,
    NotADirectory,
    NotFound,
    Permission,
    Unavailable,
)
from headrace.model.message import PutEntry
from support.fake_engine import Canned, FakeEngine, lay_out, memfd_of
from support.manifest_builder import SEAL_TEXT, build
from support.system import need_root


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


def attr(size: int = 0, kind: str = "file", ino: int = 7) -> dict[str, Any]:
    return {
        "ino": ino, "kind": kind, "mode": 0o640, "nlink": 1, "uid": 1, "gid": 2, "rdev": 0, "size": size,
        "blocks": 0, "atime_ns": 1, "mtime_ns": -2_500_000_000, "ctime_ns": 3,
    }  # fmt: skip


class Files:
    """Files in memory behind the ops on handles."""

    def __init__(self, engine: FakeEngine) -> None:
        self.files: dict[bytes, bytearray] = {}
        self.inodes: dict[bytes, int] = {}
        self.handles: dict[int, bytes] = {}
        self.closed: list[int] = []
        for op in (
            "open",
            "pread",
            "pwrite",
            "fstat",
            "ftruncate",
            "fsync",
            "close",
            "put",
            "rename",
            "unlink",
            "stat",
        ):
            engine.answers[op] = getattr(self, op)

    def open(self, fields: dict[str, Any], payload: bytes) -> Canned:
        path, flags = fields["path"], fields["flags"]
        if flags["exclusive"] and path in self.files:
            return Canned(error={"kind": "conflict", "errno": 17, "message": "there"})
        if not flags["create"] and path not in self.files:
            return Canned(error={"kind": "not_found", "errno": 2, "message": f"{path!r} is not there"})
        self.files.setdefault(path, bytearray())
        self.inodes.setdefault(path, len(self.inodes) + 100)
        if flags["truncate"]:
            del self.files[path][:]
        handle = len(self.handles) + 1
        self.handles[handle] = path
        return Canned({"handle": handle, "attr": attr(len(self.files[path]), ino=self.inodes[path])})

    def pread(self, fields: dict[str, Any], payload: bytes) -> Canned:
        content = self.files[self.handles[fields["handle"]]]
        return Canned(None, bytes(content[fields["offset"] : fields["offset"] + fields["length"]]))

    def pwrite(self, fields: dict[str, Any], payload: bytes) -> Canned:
        content = self.files[self.handles[fields["handle"]]]
        at = len(content) if fields["offset"] is None else fields["offset"]
        content.extend(bytes(max(0, at - len(content))))
        content[at : at + len(payload)] = payload
        return Canned({"offset": at, "bytes": len(payload)})

    def fstat(self, fields: dict[str, Any], payload: bytes) -> Canned:
        return Canned(attr(len(self.files[self.handles[fields["handle"]]])))

    def ftruncate(self, fields: dict[str, Any], payload: bytes) -> Canned:
        content = self.files[self.handles[fields["handle"]]]
        content.extend(bytes(max(0, fields["size"] - len(content))))
        del content[fields["size"] :]
        return Canned()

    def fsync(self, fields: dict[str, Any], payload: bytes) -> Canned:
        return Canned()

    def close(self, fields: dict[str, Any], payload: bytes) -> Canned:
        self.closed.append(fields["handle"])
        return Canned()

    def put(self, fields: dict[str, Any], payload: bytes) -> Canned:
        at = 0
        for entry in fields["entries"]:
            self.files[entry["path"]] = bytearray(payload[at : at + entry["size"]])
            at += entry["size"]
        return Canned({"created": len(fields["entries"]), "replaced": 0, "bytes": at})

    def rename(self, fields: dict[str, Any], payload: bytes) -> Canned:
        self.files[fields["to"]] = self.files.pop(fields["from"])
        return Canned()

    def unlink(self, fields: dict[str, Any], payload: bytes) -> Canned:
        del self.files[fields["path"]]
        return Canned()

    def stat(self, fields: dict[str, Any], payload: bytes) -> Canned:
        if fields["path"] not in self.files:
            return Canned(error={"kind": "not_found", "errno": 2, "message": "not there"})
        return Canned(attr(len(self.files[fields["path"]])))


@pytest.fixture
def fake(fake_engine: FakeEngine) -> Volume:
    return headrace.connect(fake_engine.folder, start=False)


# Connections


def test_a_call_uses_one_connection_again(fake_engine: FakeEngine, fake: Volume) -> None:
    fake_engine.answers["sync"] = lambda fields, payload: Canned()
    for _ in range(20):
        fake.sync()
    assert len(fake_engine.connections) == 1
    assert fake_engine.hellos == [b"\0HRWIRE\x01"]


def test_threads_do_not_wait_for_each_other(fake_engine: FakeEngine, fake: Volume) -> None:
    together = threading.Barrier(8, timeout=20)

    def answer(fields: dict[str, Any], payload: bytes) -> Canned:
        together.wait()
        return Canned(None, fields["path"])

    fake_engine.answers["read_file"] = answer
    found: dict[int, bytes] = {}

    def read(number: int) -> None:
        found[number] = fake.read_bytes(f"/{number}")

    threads = [threading.Thread(target=read, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert found == {number: b"/%d" % number for number in range(8)}


def test_engine_death_in_mid_call_names_volume_and_pid_and_the_next_call_connects(
    fake_engine: FakeEngine, fake: Volume
) -> None:
    fake_engine.answers["sync"] = lambda fields, payload: None
    with pytest.raises(Unavailable, match=rf"{fake_engine.folder} \(pid {os.getpid()}\) ended in mid-call"):
        fake.sync()
    fake_engine.answers["sync"] = lambda fields, payload: Canned()
    fake.sync()


def test_a_restarted_engine_costs_an_idle_client_nothing(fake_engine: FakeEngine, fake: Volume) -> None:
    fake_engine.answers["sync"] = lambda fields, payload: Canned()
    fake.sync()
    fake_engine.kill()
    fake_engine.listen()
    fake.sync()


def test_an_engine_that_is_ending_is_asked_again(fake_engine: FakeEngine) -> None:
    """A killed engine's socket takes connections into its queue until the process is gone."""
    real = fake_engine.answers["hello"]
    deaths = [True] * 5
    fake_engine.answers["hello"] = lambda fields, payload: (
        None if deaths and deaths.pop() else real(fields, payload)
    )
    fake_engine.answers["sync"] = lambda fields, payload: Canned()
    headrace.connect(fake_engine.folder, start=False).sync()
    assert not deaths


def test_without_an_engine_and_start_it_is_unavailable(fake_engine: FakeEngine, fake: Volume) -> None:
    fake_engine.kill()
    with pytest.raises(Unavailable, match="headrace up"):
        fake.sync()
    with pytest.raises(Unavailable, match="headrace up"):
        headrace.connect(fake_engine.folder, start=False)


def test_errors_keep_the_connection(fake_engine: FakeEngine, fake: Volume) -> None:
    error = {"kind": "not_found", "errno": 2, "message": "no /x in volume"}
    fake_engine.answers["read_file"] = lambda fields, payload: Canned(error=error)
    for _ in range(3):
        with pytest.raises(NotFound, match="no /x in volume"):
            fake.read_bytes("x")
    assert len(fake_engine.connections) == 1


def test_unexpected_descriptors_are_closed(fake_engine: FakeEngine, fake: Volume) -> None:
    fake_engine.answers["sync"] = lambda fields, payload: Canned(fds=[memfd_of(b"x")])
    with pytest.raises(Internal, match="descriptors"):
        fake.sync()
    before = open_fds()
    for _ in range(10):
        with pytest.raises(Internal):
            fake.sync()
    assert open_fds() == before


def test_wire_of_another_version_says_what_to_do(fake_engine: FakeEngine) -> None:
    fake_engine.answers["hello"] = lambda fields, payload: Canned(
        {"wire": 9, "engine": "9.0", "pid": 1, "volume": "", "format": 1}
    )
    with pytest.raises(Invalid, match="headrace down"):
        headrace.connect(fake_engine.folder, start=False)


def test_a_closed_volume_holds_no_connection_and_may_be_used_again(fake: Volume) -> None:
    fake.hello()
    before = open_fds()
    with fake:
        pass
    assert open_fds() < before
    assert fake.hello().engine == "fake"


def test_a_dropped_volume_closes_its_connections(fake_engine: FakeEngine) -> None:
    before = open_fds()
    for _ in range(5):
        dropped: Any = headrace.connect(fake_engine.folder, start=False)
        dropped.itself = dropped  # also out of a cycle, which the garbage collector takes apart in any order
        del dropped
    gc.collect()
    # The fake engine's side of them, in this process, is closed by a thread a moment later.
    deadline = time.monotonic() + 10
    while open_fds() > before + 1 and time.monotonic() < deadline:
        time.sleep(0.01)
    assert open_fds() <= before + 1


def test_a_forked_child_leaves_the_parents_stream_alone(fake_engine: FakeEngine, fake: Volume) -> None:
    fake_engine.answers["read_file"] = lambda fields, payload: Canned(None, fields["path"])
    assert fake.read_bytes("/parent") == b"/parent"
    connections = len(fake_engine.connections)
    inherited = fake._pool._idle[0]
    child = os.fork()
    if child == 0:
        status = 1
        try:
            assert inherited.closed
            assert fake.read_bytes("/child") == b"/child"
            status = 0
        finally:
            os._exit(status)
    assert fake.read_bytes("/again") == b"/again"
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    assert fake.read_bytes("/after") == b"/after"
    assert len(fake_engine.connections) == connections + 1


def test_ctrl_c_ends_a_call_and_the_next_one_is_in_step(fake_engine: FakeEngine, tmp_path: Path) -> None:
    # In a process of its own: pytest's main thread must not be interrupted.
    script = f"""
import os, signal, threading, time
import headrace
volume = headrace.connect({str(fake_engine.folder)!r}, start=False)
threading.Timer(0.3, lambda: os.kill(os.getpid(), signal.SIGINT)).start()
begin = time.monotonic()
try:
    volume.read_bytes("/slow")
except KeyboardInterrupt:
    assert time.monotonic() - begin < 2
    assert volume.read_bytes("/quick") == b"/quick"
    print("interrupted")
"""
    gate = threading.Event()

    def answer(fields: dict[str, Any], payload: bytes) -> Canned:
        if fields["path"] == b"/slow":
            gate.wait(20)
        return Canned(None, fields["path"])

    fake_engine.answers["read_file"] = answer
    ran = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, timeout=20, check=False
    )
    gate.set()
    assert ran.stdout == "interrupted\n", ran.stderr


def test_volume_pickles_to_its_path(fake: Volume) -> None:
    raw = pickle.dumps(fake)
    assert len(raw) < 1000
    copy = pickle.loads(raw)
    assert copy.path == fake.path
    assert copy.hello().engine == "fake"


# Files


def test_attributes_look_like_stat(fake_engine: FakeEngine, fake: Volume) -> None:
    fake_engine.answers["stat"] = lambda fields, payload: Canned(attr(5, "directory"))
    found = fake.stat("x")
    assert (found.st_mode, found.st_size, found.st_mtime) == (0o040640, 5, -2.5)
    assert fake_engine.requests[-1] == {"path": b"/x", "follow": True}


def test_paths_go_as_bytes_and_come_back_in_kind(fake_engine: FakeEngine, fake: Volume) -> None:
    names = [b"a", b"caf\xe9", b"new\nline", b"-", b" "]
    entries = [{"name": name, "ino": 1, "kind": "file", "attr": None} for name in names]
    fake_engine.answers["list"] = lambda fields, payload: Canned({"entries": entries, "next": None})
    assert fake.listdir(b"/x") == names
    assert [os.fsencode(name) for name in fake.listdir("/x")] == names
    with pytest.raises(Invalid, match="zero byte"):
        fake.listdir("/a\0b")


def test_listings_go_on_after_a_full_page(fake_engine: FakeEngine, fake: Volume) -> None:
    pages = {None: ([b"a", b"b"], b"b"), b"b": ([b"c"], None)}

    def answer(fields: dict[str, Any], payload: bytes) -> Canned:
        names, after = pages[fields["after"]]
        return Canned(
            {
                "entries": [{"name": n, "ino": 1, "kind": "file", "attr": attr(3)} for n in names],
                "next": after,
            }
        )

    fake_engine.answers["list"] = answer
    assert fake.listdir() == ["a", "b", "c"]
    assert [(entry.path, entry.stat().size) for entry in fake.scandir("d")] == [
        ("d/a", 3),
        ("d/b", 3),
        ("d/c", 3),
    ]


def test_large_reads_are_whole(fake_engine: FakeEngine, fake: Volume) -> None:
    content = os.urandom(40 << 20)
    fake_engine.answers["read_file"] = lambda fields, payload: Canned(None, content)
    assert fake.read_bytes("x") == content


def test_a_file_above_the_limit_is_read_and_written_in_pieces(fake_engine: FakeEngine, fake: Volume) -> None:
    files = Files(fake_engine)
    content = os.urandom(1 << 20) * 65
    error = {"kind": "invalid", "errno": 22, "message": "too large for one answer"}
    fake_engine.answers["read_file"] = lambda fields, payload: Canned(error=error)
    fake.write_bytes("/d/big", content)
    assert list(files.files) == [b"/d/big"]
    assert files.files[b"/d/big"] == content
    assert fake.read_bytes("/d/big") == content
    files.files[b"/small"] = bytearray(b"x")
    with pytest.raises(Invalid, match="too large"):
        fake.read_bytes("/small")  # the error was about something else
    assert sorted(files.closed) == sorted(files.handles)


def test_a_failed_large_write_leaves_no_partial_file(fake_engine: FakeEngine, fake: Volume) -> None:
    files = Files(fake_engine)
    fake_engine.answers["pwrite"] = lambda fields, payload: Canned(
        error={"kind": "full", "errno": 28, "message": "disk full"}
    )
    with pytest.raises(headrace.Full):
        fake.write_bytes("/big", bytes(9 << 20))
    assert files.files == {}


def test_put_checks_its_sizes(fake: Volume) -> None:
    with pytest.raises(Invalid, match="add up to 3 bytes, but 2"):
        fake.put([PutEntry(b"/a", size=3)], [b"ab"])


MODES = ["r", "rb", "w", "wb", "a", "ab", "x", "xb", "r+", "rb+", "w+b", "a+", "x+b"]


@pytest.mark.parametrize("mode", MODES)
def test_open_modes_do_what_the_builtin_does(
    fake_engine: FakeEngine, fake: Volume, tmp_path: Path, mode: str
) -> None:
    files = Files(fake_engine)
    for start in (None, b"0123456789\nline\n"):
        real = tmp_path / "real"
        real.unlink(missing_ok=True)
        files.files.clear()
        if start is not None:
            real.write_bytes(start)
            files.files[b"/f"] = bytearray(start)

        def drive(opener: Any, path: Any) -> list[Any]:
            seen: list[Any] = []
            try:
                file = opener(path, mode)
            except OSError as error:
                return [type(error).__mro__[-4].__name__, error.errno]
            with file:
                seen.append((file.readable(), file.writable(), file.seekable(), file.tell()))
                text = "b" not in mode
                if file.writable():
                    file.write("héllo" if text else b"h\0llo")
                    file.flush()
                    seen.append(file.tell())
                file.seek(0)
                if file.readable():
                    seen.append(file.readline())
                    seen.append(file.read())
                if file.writable():
                    file.seek(3)
                    file.write("!" if text else b"!")
                    file.flush()
                    file.seek(0, 2)
                    seen.append(file.tell())
                    seen.append(file.truncate(7))
            seen.append(file.closed)
            return seen

        def builtin(path: Path, mode: str) -> Any:
            return open(path, mode) if "b" in mode else open(path, mode, encoding="utf-8")

        expected = drive(builtin, real)
        found = drive(fake.open, "/f")
        if isinstance(expected[0], str):
            assert found[1] == expected[1]
        else:
            assert found == expected
            assert bytes(files.files[b"/f"]) == real.read_bytes()


@pytest.mark.parametrize("mode", ["", "rw", "q", "rr", "rbt", "b", "+"])
def test_senseless_open_modes_are_invalid(fake: Volume, mode: str) -> None:
    with pytest.raises(Invalid, match="file mode"):
        fake.open("/x", mode)


def test_an_open_file_dropped_unclosed_gives_its_handle_back(fake_engine: FakeEngine, fake: Volume) -> None:
    files = Files(fake_engine)
    before = open_fds()
    for _ in range(10):
        fake.open("/x", "wb", buffering=0)
    assert len(files.closed) == 10
    assert open_fds() == before


def test_a_file_open_for_reading_survives_an_engine_restart(fake_engine: FakeEngine, fake: Volume) -> None:
    files = Files(fake_engine)
    fake.write_bytes("/x", b"0123456789")
    with fake.open("/x", "rb", buffering=0) as file:
        assert file.read(3) == b"012"
        fake_engine.kill()
        fake_engine.listen()
        assert file.read(3) == b"345"
        files.inodes[b"/x"] = 5000
        fake_engine.kill()
        fake_engine.listen()
        with pytest.raises(headrace.Conflict, match="replaced"):
            file.read(3)


def test_a_file_open_for_writing_does_not_hide_an_engine_restart(
    fake_engine: FakeEngine, fake: Volume
) -> None:
    Files(fake_engine)
    file = fake.open("/x", "wb", buffering=0)
    file.write(b"abc")
    fake_engine.kill()
    fake_engine.listen()
    with pytest.raises(Unavailable, match="not synced"):
        file.write(b"def")
    file.close()


def test_an_open_file_works_on_both_sides_of_a_fork(fake_engine: FakeEngine, fake: Volume) -> None:
    Files(fake_engine)
    fake.write_bytes("/x", b"0123456789")
    with fake.open("/x", "rb", buffering=0) as file:
        assert file.read(2) == b"01"
        child = os.fork()
        if child == 0:
            os._exit(0 if file.read(3) == b"234" else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert file.read(3) == b"234"


# Data sets


FILES = {f"c{number % 3}/{number:03}": b"%d" % number * number for number in range(40)} | {"top": b"t"}


@pytest.fixture
def fake_dataset(fake_engine: FakeEngine, fake: Volume) -> headrace.Dataset:
    return serve_dataset(fake_engine, fake)


def serve_dataset(fake_engine: FakeEngine, fake: Volume) -> headrace.Dataset:
    raw = build(FILES)
    sealed = {
        "seal": SEAL_TEXT, "version": 3, "path": b"/data", "samples": len(FILES), "bytes": 1,
        "manifest_bytes": len(raw), "created_ns": 0,
    }  # fmt: skip
    fake_engine.answers["seal"] = lambda fields, payload: Canned(sealed, fds=[memfd_of(raw)])
    fake_engine.answers["open_seal"] = fake_engine.answers["seal"]
    contents = [FILES[path] for path in sorted(FILES)]

    def read_batch(fields: dict[str, Any], payload: bytes) -> Canned:
        rows = np.frombuffer(payload, dtype="<u8").tolist()
        samples = [contents[row] for row in rows]
        into = bytearray(4096 * (4 + (sum(map(len, samples)) + 16 * len(samples)) // 4096))
        layout = lay_out(memoryview(into), samples)
        into[: 8 * len(rows)] = payload
        return Canned(layout, fds=[memfd_of(bytes(into))])

    fake_engine.answers["read_batch"] = read_batch
    return fake.seal("/data")


def test_samples_by_number_slice_and_list(fake_dataset: headrace.Dataset) -> None:
    contents = [FILES[path] for path in fake_dataset.paths]
    n = len(contents)
    assert len(fake_dataset) == n
    assert fake_dataset[0] == contents[0]
    assert fake_dataset[-1] == contents[-1]
    assert fake_dataset[np.int64(5)] == contents[5]
    assert fake_dataset[3:9] == contents[3:9]
    assert fake_dataset[::-7] == contents[::-7]
    assert fake_dataset[[5, 5, -1]] == [contents[5], contents[5], contents[-1]]
    assert fake_dataset[np.array([2, 4], dtype=np.uint64)] == [contents[2], contents[4]]
    assert fake_dataset[np.arange(n) == 7] == [contents[7]]
    assert fake_dataset.__getitems__([1, 2]) == contents[1:3]
    assert fake_dataset[[]] == fake_dataset[5:5] == []
    assert list(fake_dataset) == contents
    wrong: Any
    for wrong in (n, -n - 1, [n], [-n - 1]):
        with pytest.raises(IndexError):
            fake_dataset[wrong]
    for wrong in ([0.5], [[1]]):
        with pytest.raises(Invalid):
            fake_dataset[wrong]
    with pytest.raises(TypeError):
        fake_dataset["x"]  # type: ignore[index]  # on purpose


def test_read_batch_gives_samples_in_the_order_asked(fake_dataset: headrace.Dataset) -> None:
    rows = [7, 0, 7, -1]
    batch = fake_dataset.read_batch(rows)
    contents = [FILES[path] for path in fake_dataset.paths]
    assert [sample.tobytes() for sample in batch] == [contents[row] for row in rows]
    assert batch[1].base is batch.data.base
    assert batch.labels.tolist() == [fake_dataset.labels[row] for row in rows]
    assert batch.indices.tolist() == [row % len(contents) for row in rows]
    copy = pickle.loads(pickle.dumps(batch))
    assert [sample.tobytes() for sample in copy] == [contents[row] for row in rows]


def test_batches_leave_no_descriptor_when_dropped(fake_dataset: headrace.Dataset) -> None:
    fake_dataset.read_batch([1])
    before = open_fds()
    for _ in range(20):
        fake_dataset.read_batch([1, 2])
        fake_dataset[1]
        fake_dataset[1:3]
    assert open_fds() == before


def test_dataset_pickles_to_two_names_and_is_rebuilt_on_use(
    fake_engine: FakeEngine, fake_dataset: headrace.Dataset
) -> None:
    raw = pickle.dumps(fake_dataset)
    assert len(raw) < 1000
    requests = len(fake_engine.requests)
    copy = pickle.loads(raw)
    assert len(fake_engine.requests) == requests
    assert copy[3] == fake_dataset[3]
    assert copy.paths == fake_dataset.paths
    assert copy.seal == fake_dataset.seal == SEAL_TEXT


def test_layouts_that_do_not_fit_are_internal(
    fake_engine: FakeEngine, fake_dataset: headrace.Dataset
) -> None:
    good = {"count": 1, "offsets_at": 8, "data_at": 64, "data_bytes": 10, "slot_bytes": 4096, "gather_ns": 0}
    for change in (
        {"count": 1 << 60}, {"offsets_at": 4}, {"offsets_at": 60}, {"data_at": 1 << 40}, {"data_bytes": 5000},
        {"slot_bytes": 1 << 30},
    ):  # fmt: skip
        layout = good | change
        canned = [Canned(layout, fds=[memfd_of(bytes(4096))])]
        fake_engine.answers["read_batch"] = functools.partial(lambda canned, *_: canned.pop(), canned)
        with pytest.raises(Internal):
            fake_dataset.read_batch([0])


# Volumes that are none


def test_a_missing_folder_says_create(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match=r"does not exist: make it with `headrace create"):
        headrace.connect(tmp_path / "missing")


def test_a_file_is_no_volume(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(NotADirectory, match="is a file; a volume is a folder"):
        headrace.connect(tmp_path / "file")
    with pytest.raises(NotADirectory, match="a part of this path is a file"):
        headrace.connect(tmp_path / "file" / "below")


def test_a_folder_without_marker_is_no_volume(tmp_path: Path) -> None:
    with pytest.raises(Invalid, match="not a volume"):
        headrace.connect(tmp_path)


def test_a_newer_format_says_upgrade(tmp_path: Path) -> None:
    (tmp_path / "HEADRACE").write_text(
        json.dumps({"headrace": "volume", "format": 2, "volume": "x", "created_ns": 0})
    )
    with pytest.raises(Invalid, match=r"holds format 2; this headrace reads 1-1: upgrade headrace"):
        headrace.connect(tmp_path)


@pytest.mark.parametrize("marker", ["", "{", "[]", '{"headrace": 3}'])
def test_a_damaged_marker_is_corrupt(tmp_path: Path, marker: str) -> None:
    (tmp_path / "HEADRACE").write_text(marker)
    with pytest.raises(Corrupt, match="HEADRACE is damaged"):
        headrace.connect(tmp_path)


def test_names_that_are_no_folders_are_invalid() -> None:
    for name in ("", "a\0b", "postgresql://host/db/name"):
        with pytest.raises(Invalid):
            headrace.connect(name)


def test_create_refuses_what_is_a_volume(fake_engine: FakeEngine) -> None:
    with pytest.raises(AlreadyExists, match="is a volume already"):
        engine_process.create(fake_engine.folder)


def test_a_missing_binary_says_where_it_was_looked_for(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.kill()
    monkeypatch.setenv("HEADRACE_ENGINE", "/nowhere/headraced")
    with pytest.raises(NotFound, match="HEADRACE_ENGINE names /nowhere/headraced"):
        headrace.connect(fake_engine.folder)


def test_a_binary_that_dies_at_once_shows_its_log(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_engine.kill()
    (tmp_path / "headraced").write_text("#!/bin/sh\necho cannot start because of the moon >&2\nexit 3\n")
    (tmp_path / "headraced").chmod(0o755)
    monkeypatch.setenv("HEADRACE_ENGINE", str(tmp_path / "headraced"))
    with pytest.raises(Unavailable, match="because of the moon"):
        headrace.connect(fake_engine.folder)


def test_an_engine_that_refuses_is_heard(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    fake_engine.kill()
    line = json.dumps({"error": {"kind": "corrupt", "errno": 5, "message": "metadata is damaged at page 7"}})
    (tmp_path / "headraced").write_text(
        f"#!{sys.executable}\nimport os, sys\n"
        f"os.write(int(sys.argv[sys.argv.index('--ready-fd') + 1]), {line.encode()!r} + b'\\n')\n"
    )
    (tmp_path / "headraced").chmod(0o755)
    monkeypatch.setenv("HEADRACE_ENGINE", str(tmp_path / "headraced"))
    with pytest.raises(Corrupt, match="page 7"):
        headrace.connect(fake_engine.folder)


def connect_as_nobody(folder: Path) -> str:
    """What `connect` says to a user without rights. Imports come first: Python may lie out of reach."""
    script = f"""
import os, pwd, sys
import headrace
os.setgroups([])
os.setgid(65534)
os.setuid(65534)
try:
    headrace.connect({str(folder)!r})
except headrace.Permission as error:
    print(error)
"""
    ran = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=30)
    assert ran.returncode == 0, ran.stderr
    return ran.stdout


def test_another_users_volume_says_whose_it_is() -> None:
    need_root()
    with tempfile.TemporaryDirectory() as parent:  # pytest's own folders are closed to others
        os.chmod(parent, 0o755)
        engine = FakeEngine(Path(parent, "volume"))
        (engine.folder / "engine.sock").chmod(0o600)
        assert "does not serve this user (uid 65534): work as user root (uid 0)" in connect_as_nobody(
            engine.folder
        )
        engine.kill()
        (engine.folder / "engine.sock").unlink()
        assert "may not be written by uid 65534: work as its owner" in connect_as_nobody(engine.folder)
        engine.folder.chmod(0o700)
        assert "belongs to user root (uid 0) and may not be read by uid 65534" in connect_as_nobody(
            engine.folder
        )
        os.chmod(parent, 0o700)
        assert "may not be entered by uid 65534" in connect_as_nobody(engine.folder)


def test_an_odd_system_error_names_what_was_done(
    fake_engine: FakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake_engine.kill()
    monkeypatch.setenv("HEADRACE_ENGINE", "/bin/true")
    (fake_engine.folder / "engine.log").mkdir()
    with pytest.raises((Invalid, Permission), match=r"engine\.log"):
        headrace.connect(fake_engine.folder)


def test_long_volume_paths_connect(tmp_path: Path) -> None:
    engine = FakeEngine(tmp_path / ("x" * 120) / ("y" * 120))
    assert headrace.connect(engine.folder, start=False).hello().engine == "fake"
    engine.kill()
