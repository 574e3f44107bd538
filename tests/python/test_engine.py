"""The client with the real engine: starting it, files, sealed views, loaders, processes, crashes."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import headrace
from headrace.client import engine as engine_process
from headrace.errors import (
    AlreadyExists,
    Conflict,
    Invalid,
    IsADirectory,
    NotADirectory,
    NotFound,
    Unavailable,
)
from headrace.model.message import Kind, PutEntry
from headrace.policy.order import permute
from support.lettered_samples import answer_checked, checked, content, sample_of

N = 600


def open_fds() -> int:
    return len(os.listdir("/proc/self/fd"))


@pytest.fixture
def dataset(volume: headrace.Volume) -> headrace.Dataset:
    """N files in classes a, b, c and one right in the root; 0 to 22 KB each."""
    entries = [
        PutEntry(b"/train/%c/%04d" % (b"abc"[number % 3], number), size=len(content(number)))
        for number in range(N)
    ]
    volume.put(entries, [content(number) for number in range(N)], parents=True)
    volume.write_bytes("/train/zz", b"in the root")
    return volume.seal("/train")


# Starting and stopping


def test_connect_starts_an_engine_and_stop_ends_it(folder: str) -> None:
    volume = headrace.connect(folder, create=True)
    pid = engine_process.running_pid(folder)
    status = volume.status()
    assert status.pid == pid
    assert os.fsdecode(status.path) == folder
    assert headrace.connect(folder, start=False).status().pid == pid
    assert engine_process.stop(folder)
    assert engine_process.running_pid(folder) is None
    assert not engine_process.stop(folder)
    assert not Path(f"/proc/{pid}").exists()
    with pytest.raises(Unavailable, match="headrace up"):
        headrace.connect(folder, start=False)
    # The same volume object goes on: an engine is started for it.
    assert volume.status().pid != pid


def test_what_was_written_is_there_after_a_restart(folder: str) -> None:
    volume = headrace.connect(folder, create=True)
    volume.write_bytes("/a/b", b"kept", parents=True)
    engine_process.stop(folder)
    assert volume.read_bytes("/a/b") == b"kept"


def test_start_says_that_one_runs(folder: str) -> None:
    engine_process.create(folder)
    ready = engine_process.start(folder)
    assert ready is not None
    assert ready.pid == engine_process.running_pid(folder)
    assert engine_process.start(folder) is None
    with pytest.raises(AlreadyExists):
        engine_process.create(folder)


def test_create_refuses_a_folder_with_other_files(folder: str) -> None:
    os.mkdir(folder)
    Path(folder, "thesis.txt").write_text("do not touch")
    with pytest.raises((Conflict, Invalid), match=folder):
        headrace.connect(folder, create=True)
    assert os.listdir(folder) == ["thesis.txt"]


CONNECT = """
import sys, headrace
volume = headrace.connect(sys.argv[1], create=True)
volume.write_bytes("/" + sys.argv[2], b"x")
print(volume.status().pid)
"""


def test_eight_processes_that_start_at_once_share_one_engine(folder: str) -> None:
    children = [
        subprocess.Popen(
            [sys.executable, "-c", CONNECT, folder, str(number)],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for number in range(8)
    ]
    said = [child.communicate(timeout=100) for child in children]
    assert [child.returncode for child in children] == [0] * 8, said
    assert len({out for out, _ in said}) == 1
    assert headrace.connect(folder).listdir() == [str(number) for number in range(8)]


def test_an_engine_killed_is_started_again_by_the_next_call(folder: str) -> None:
    volume = headrace.connect(folder, create=True)
    volume.write_bytes("/kept", b"kept", durable=True)
    pid = volume.status().pid
    os.kill(pid, signal.SIGKILL)
    deadline = time.monotonic() + 10
    while engine_process.running_pid(folder) is not None and time.monotonic() < deadline:
        time.sleep(0.01)
    assert volume.read_bytes("/kept") == b"kept"
    assert volume.status().pid != pid


def test_the_engine_outlives_the_process_that_started_it(folder: str) -> None:
    ran = subprocess.run(
        [sys.executable, "-c", CONNECT, folder, "x"], capture_output=True, text=True, timeout=60
    )
    assert ran.returncode == 0, ran.stderr
    assert engine_process.running_pid(folder) == int(ran.stdout)


# Files


def test_files_come_back_as_they_were_written(volume: headrace.Volume) -> None:
    for size in (0, 1, 2047, 2048, 10_240, 65_536, 1 << 20, (16 << 20) + 5):
        data = os.urandom(size)
        volume.write_bytes("/f", data)
        assert volume.read_bytes("/f") == data
        assert volume.stat("/f").size == size


def test_a_file_above_64_mib_is_written_and_read_whole(volume: headrace.Volume) -> None:
    data = os.urandom(1 << 20) * 66
    volume.write_bytes("/big", data, durable=True)
    assert volume.read_bytes("/big") == data
    assert volume.listdir() == ["big"]


def test_names_of_any_bytes(volume: headrace.Volume) -> None:
    names = [b"caf\xe9", b"new\nline", b"-dash", b" ", b"\xff" * 255, "é".encode(), b"%2F", b"back\\slash"]
    for name in names:
        volume.write_bytes(b"/n/" + name, name, parents=True)
    assert volume.listdir(b"/n") == sorted(names)
    assert [os.fsencode(name) for name in volume.listdir("/n")] == sorted(names)
    for shown in volume.listdir("n"):
        assert volume.read_bytes("/n/" + shown) == os.fsencode(shown)


def test_the_tree_can_be_worked_on(volume: headrace.Volume) -> None:
    volume.makedirs("/a/b/c")
    volume.makedirs("/a/b/c", exist_ok=True)
    with pytest.raises(FileExistsError):
        volume.mkdir("/a/b")
    with pytest.raises(FileNotFoundError):
        volume.mkdir("/x/y")
    volume.write_bytes("/a/one", b"1")
    with pytest.raises(NotADirectory):
        volume.mkdir("/a/one/two")
    with pytest.raises(IsADirectory):
        volume.read_bytes("/a/b")
    with pytest.raises(OSError) as caught:
        volume.rmdir("/a/b")
    assert caught.value.errno == 39  # ENOTEMPTY
    volume.symlink("one", "/a/link")
    volume.symlink("nowhere", "/a/dangling")
    assert volume.readlink("/a/link") == "one"
    assert volume.readlink(b"/a/link") == b"one"
    assert volume.read_bytes("/a/link") == b"1"
    assert (volume.exists("/a/link"), volume.exists("/a/dangling"), volume.exists("/a/one/x")) == (
        True,
        False,
        False,
    )
    assert volume.stat("/a/link").kind is Kind.FILE
    assert volume.stat("/a/link", follow_links=False).kind is Kind.SYMLINK
    volume.link("/a/one", "/a/uno")
    assert volume.stat("/a/uno").nlink == 2
    volume.rename("/a/uno", "/a/eins")
    with pytest.raises(AlreadyExists):
        volume.rename("/a/eins", "/a/link", replace=False)
    volume.write_bytes("/a/two", b"2")
    volume.exchange("/a/one", "/a/two")
    assert (volume.read_bytes("/a/one"), volume.read_bytes("/a/two")) == (b"2", b"1")
    with pytest.raises(Invalid):
        volume.rename("/a", "/a/b/a")
    changed = volume.set_attributes("/a/one", mode=0o600, mtime_ns=-5, size=3)
    assert (changed.st_mode, changed.mtime_ns, changed.size) == (0o100600, -5, 3)
    assert volume.read_bytes("/a/one") == b"2\0\0"
    volume.setxattr("/a/one", "user.color", b"\0red")
    assert volume.getxattr("/a/one", "user.color") == b"\0red"
    assert volume.listxattr("/a/one") == ["user.color"]
    volume.removexattr("/a/one", "user.color")
    with pytest.raises(NotFound):
        volume.getxattr("/a/one", "user.color")
    walked = {folder: (sorted(folders), sorted(others)) for folder, folders, others in volume.walk("/a")}
    assert walked["/a"] == (["b"], ["dangling", "eins", "link", "one", "two"])
    assert set(walked) == {"/a", "/a/b", "/a/b/c"}
    volume.remove("/a/one")
    volume.rmdir("/a/b/c")
    with pytest.raises(FileNotFoundError):
        volume.remove("/a/one")
    volume.sync()
    assert volume.statfs().bytes_total > 0


def test_long_listings_are_whole_and_sorted(volume: headrace.Volume) -> None:
    names = [b"%05d" % number for number in range(9000)]
    for at in range(0, len(names), 3000):
        volume.put([PutEntry(b"/d/" + name) for name in names[at : at + 3000]], parents=True)
    assert volume.listdir(b"/d") == names
    assert [entry.name for entry in volume.scandir("/d")] == [os.fsdecode(name) for name in names]
    assert all(entry.is_file() and entry.stat().size == 0 for entry in volume.scandir("/d"))


def test_open_files_read_write_append_and_seek(volume: headrace.Volume) -> None:
    with volume.open("/f", "w+b") as file:
        file.write(b"0123456789" * 1000)
        file.seek(5)
        assert file.read(3) == b"567"
        file.seek(-3, os.SEEK_END)
        assert file.read() == b"789"
    with volume.open("/f", "ab") as one, volume.open("/f", "ab", buffering=0) as two:
        one.write(b"one")
        two.write(b"two")
        one.flush()
    assert volume.read_bytes("/f").endswith(b"789twoone")
    with pytest.raises(FileExistsError):
        volume.open("/f", "x")
    with pytest.raises(FileNotFoundError):
        volume.open("/g")
    with pytest.raises(IsADirectoryError):
        volume.open("/")
    with volume.open("/text", "w", encoding="utf-16") as text:
        text.write("grüße\n")
    with volume.open("/text", encoding="utf-16") as text:
        assert list(text) == ["grüße\n"]


def test_an_open_file_outlives_its_name(volume: headrace.Volume) -> None:
    volume.write_bytes("/f", b"still here")
    with volume.open("/f", "rb", buffering=0) as file:
        volume.remove("/f")
        assert file.read() == b"still here"


# Sealed views


def test_a_sealed_view_stays_as_it_was(volume: headrace.Volume, dataset: headrace.Dataset) -> None:
    paths = list(dataset.paths)
    assert len(paths) == len(dataset) == N + 1
    assert paths == sorted(paths)
    for path in paths[:50]:
        volume.write_bytes("/train/" + path, b"changed")
    volume.remove("/train/" + paths[60])
    assert [dataset[row] for row in range(0, N, 7)] == [sample_of(path) for path in paths[0:N:7]]
    assert dataset[[60, -1]] == [sample_of(paths[60]), b"in the root"]
    assert dataset[5:8] == [sample_of(path) for path in paths[5:8]]
    later = volume.seal("/train")
    assert later.version > dataset.version
    assert len(later) == N
    assert later[0] == b"changed"
    assert [sealed.seal for sealed in volume.seals()] == [dataset.seal, later.seal]
    assert volume.seals()[0].samples == N + 1


def test_labels_are_folders(dataset: headrace.Dataset) -> None:
    assert dataset.classes == ["a", "b", "c"]
    assert dataset.labels.tolist() == [-1 if path == "zz" else "abc".index(path[0]) for path in dataset.paths]
    assert dataset.sizes.tolist() == [len(sample_of(path)) for path in dataset.paths]
    assert dataset.nbytes == sum(len(sample_of(path)) for path in dataset.paths)
    assert dataset.root == "/train"


def test_a_view_is_opened_again_by_its_id_after_a_restart(folder: str, dataset: headrace.Dataset) -> None:
    engine_process.stop(folder)
    again = headrace.connect(folder).dataset(dataset.seal)
    assert again.paths == dataset.paths
    assert (again.version, again[3]) == (dataset.version, dataset[3])
    with pytest.raises(NotFound):
        len(headrace.connect(folder).dataset("0" * 26))
    with pytest.raises(Invalid):
        len(headrace.connect(folder).dataset("nonsense"))


def test_read_batch_out_of_range_is_an_index_error(dataset: headrace.Dataset) -> None:
    with pytest.raises(IndexError):
        dataset.read_batch([N + 1])
    assert len(dataset.read_batch([])) == 0


# Loader


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("rank", "world_size"), [(0, 1), (1, 3)])
@pytest.mark.parametrize("drop_last", [False, True])
def test_the_stream_the_index_and_the_permutation_agree(
    dataset: headrace.Dataset, shuffle: bool, rank: int, world_size: int, drop_last: bool
) -> None:
    loader = headrace.Loader(
        dataset, 16, shuffle=shuffle, seed=11, drop_last=drop_last, rank=rank, world_size=world_size
    )
    loader.set_epoch(2)
    positions = np.arange(len(dataset))
    order = (permute(positions, len(dataset), 11, 2) if shuffle else positions)[rank::world_size]
    seen = []
    for number, batch in enumerate(loader):
        loader.set_epoch(2)
        single = loader[number]
        expected = order[number * 16 : (number + 1) * 16]
        assert batch.number == single.number == number
        assert batch.indices.tolist() == single.indices.tolist() == expected.tolist()
        assert batch.labels.tolist() == single.labels.tolist() == dataset.labels[expected].tolist()
        paths = dataset.paths[batch.indices]
        for sample, other, path in zip(batch, single, paths, strict=True):
            assert sample.tobytes() == other.tobytes() == sample_of(path)
        seen += batch.indices.tolist()
    assert len(loader) == number + 1
    if not drop_last:
        assert seen == order.tolist()


def test_epochs_differ_and_each_holds_every_sample_once(dataset: headrace.Dataset) -> None:
    loader = headrace.Loader(dataset, 64, shuffle=True, seed=1)
    epochs = [[index for batch in loader for index in batch.indices.tolist()] for _ in range(3)]
    assert all(sorted(epoch) == list(range(N + 1)) for epoch in epochs)
    assert len({tuple(epoch) for epoch in epochs}) == 3
    again = headrace.Loader(dataset, 64, shuffle=True, seed=1)
    assert [index for batch in again for index in batch.indices.tolist()] == epochs[0]


def test_kept_batches_are_not_overwritten(dataset: headrace.Dataset) -> None:
    loader = headrace.Loader(dataset, 4, shuffle=True, prefetch=2)
    kept = [(batch[0], dataset.paths[int(batch.indices[0])]) for batch in loader if batch.number % 10 == 0]
    for _ in range(2):
        assert sum(len(batch) for batch in loader) == N + 1
    assert len(kept) > 10
    for sample, path in kept:
        assert sample.tobytes() == sample_of(path)


def test_resume_gives_before_and_after_the_cut_each_sample_once(dataset: headrace.Dataset) -> None:
    for cut in (0, 1, 7, 150, 151):
        loader = headrace.Loader(dataset, 4, shuffle=True, seed=3)
        before: list[int] = []
        for batch in loader:
            if batch.number == cut:
                break
            before += batch.indices.tolist()
            state = loader.state_dict()
        if cut == 0:
            state = headrace.Loader(dataset, 4, shuffle=True, seed=3).state_dict()
        resumed = headrace.Loader(dataset, 4, shuffle=True)
        resumed.load_state_dict(state)
        if cut < 151:
            after = [index for batch in resumed for index in batch.indices.tolist()]
            assert sorted(before + after) == list(range(N + 1))
        assert resumed.epoch == 1


def test_breaking_off_100_times_leaks_nothing(dataset: headrace.Dataset) -> None:
    loader = headrace.Loader(dataset, 16)
    dataset[0]
    for _ in range(3):
        next(iter(loader))
    fds = open_fds()
    maps = Path("/proc/self/maps").read_text().count("headrace-batch")
    resident = dataset.volume.status().buffers_bytes
    for _ in range(100):
        for batch in loader:
            assert batch.number == 0
            break
    del batch
    assert open_fds() <= fds
    assert Path("/proc/self/maps").read_text().count("headrace-batch") <= maps
    deadline = time.monotonic() + 5
    while time.monotonic() < deadline:
        status = dataset.volume.status()
        if status.streams == 0 and status.buffers_bytes <= resident:
            break
        time.sleep(0.02)
    assert (status.streams, status.buffers_bytes) <= (0, resident)


def test_keeping_more_than_the_engine_has_memory_for_is_full(folder: str) -> None:
    engine_process.create(folder)
    engine_process.start(folder, memory_bytes=64 << 20)
    volume = headrace.connect(folder)
    volume.mkdir("/d")
    for number in range(120):
        volume.write_bytes(f"/d/{number}", bytes(1 << 20))
    loader = headrace.Loader(volume.seal("/d"), 4)
    with pytest.raises(headrace.Full) as caught:
        kept = list(loader)
        assert not kept
    assert str(caught.value)
    assert sum(len(batch) for batch in loader) == 120  # without keeping them there is memory enough


def test_engine_death_in_a_stream_is_unavailable_and_the_state_resumes(dataset: headrace.Dataset) -> None:
    loader = headrace.Loader(dataset, 4, shuffle=True)
    seen: list[int] = []
    with pytest.raises(Unavailable, match="ended while batches were read"):
        for batch in loader:
            seen += batch.indices.tolist()
            if batch.number == 20:
                os.kill(dataset.volume.status().pid, signal.SIGKILL)
    loader.load_state_dict(loader.state_dict())
    seen += [index for batch in loader for index in batch.indices.tolist()]
    assert sorted(seen) == list(range(N + 1))


# Processes


@pytest.mark.parametrize("method", ["fork", "spawn", "forkserver"])
@pytest.mark.parametrize("used_before", [False, True])
def test_every_start_method_reads_right_bytes_in_eight_workers(
    dataset: headrace.Dataset, method: str, used_before: bool
) -> None:
    fresh = dataset if used_before else dataset.volume.dataset(dataset.seal)
    if used_before:
        assert checked(dataset, [1, 2]) == "right"
    context: Any = multiprocessing.get_context(method)
    answers = context.Queue()
    workers = [
        context.Process(target=answer_checked, args=(fresh, list(range(number, N, 9)), answers))
        for number in range(8)
    ]
    for worker in workers:
        worker.start()
    assert [answers.get(timeout=100) for _ in workers] == ["right"] * 8
    for worker in workers:
        worker.join(20)
        assert worker.exitcode == 0
    assert checked(fresh, [0, N]) == "right"
    answers.close()
    answers.join_thread()


def test_200_forks_around_reads(dataset: headrace.Dataset) -> None:
    loader = headrace.Loader(dataset, 16, shuffle=True)
    iterator = iter(loader)
    for round_number in range(200):
        row = round_number % N
        assert dataset[row] == sample_of(dataset.paths[row])
        child = os.fork()
        if child == 0:
            os._exit(0 if dataset[row + 1] == sample_of(dataset.paths[row + 1]) else 1)
        assert dataset[row] == sample_of(dataset.paths[row])
        if round_number % 10 == 0:
            batch = next(iterator)
            assert batch[0].tobytes() == sample_of(dataset.paths[int(batch.indices[0])])
            del batch
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_pickles_are_small(dataset: headrace.Dataset) -> None:
    assert len(pickle.dumps(dataset)) < 1024
    assert len(pickle.dumps(headrace.Loader(dataset))) < 64 * 1024


HOLD = """
import sys, time, headrace
loader = headrace.Loader(headrace.connect(sys.argv[1]).dataset(sys.argv[2]), 16)
batches = iter(loader)
kept = [next(batches) for _ in range(8)]
print("holding", flush=True)
time.sleep(60)
"""


def test_what_a_killed_process_held_is_free_within_five_seconds(
    folder: str, dataset: headrace.Dataset
) -> None:
    before = dataset.volume.status()
    child = subprocess.Popen(
        [sys.executable, "-c", HOLD, folder, dataset.seal], stdout=subprocess.PIPE, text=True
    )
    with child:
        assert child.stdout is not None
        assert child.stdout.readline() == "holding\n"
        held = dataset.volume.status()
        assert held.streams >= 1 or held.buffers_bytes > before.buffers_bytes
        child.kill()
    deadline = time.monotonic() + 5
    while True:
        now = dataset.volume.status()
        if now.streams == 0 and now.buffers_bytes <= before.buffers_bytes and now.clients <= before.clients:
            break
        assert time.monotonic() < deadline, (before, now)
        time.sleep(0.05)


def test_sixteen_workers_with_256_descriptors(folder: str, dataset: headrace.Dataset) -> None:
    script = """
import resource, sys, multiprocessing, headrace
resource.setrlimit(resource.RLIMIT_NOFILE, (256, 256))
dataset = headrace.connect(sys.argv[1]).dataset(sys.argv[2])
def work(number):
    return sum(len(batch) for batch in headrace.Loader(dataset, 16, rank=number, world_size=16))
with multiprocessing.get_context("fork").Pool(16) as pool:
    print(sum(pool.map(work, range(16))))
"""
    ran = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", script, folder, dataset.seal],
        capture_output=True, text=True, timeout=100,
    )  # fmt: skip
    assert (ran.stdout, ran.returncode) == (f"{N + 1}\n", 0), ran.stderr


def test_threads_share_a_volume(volume: headrace.Volume) -> None:
    from concurrent.futures import ThreadPoolExecutor

    def work(number: int) -> Counter[bool]:
        found: Counter[bool] = Counter()
        for turn in range(30):
            data = b"%d.%d" % (number, turn) * 50
            volume.write_bytes(f"/{number}", data)
            found[volume.read_bytes(f"/{number}") == data] += 1
        return found

    with ThreadPoolExecutor(12) as pool:
        assert sum(pool.map(work, range(12)), Counter()) == {True: 360}
