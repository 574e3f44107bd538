"""The command line with the real engine: import, listing, mount, bench, demo, and what each leaves behind."""

from __future__ import annotations

import json
import os
import select
import shutil
import signal
import stat
import subprocess
import tarfile
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from command import COMMAND, assert_one_line, run, run_as, run_json, run_on_terminal

import headrace
from headrace.cli.compare import MountedCopy, VolumeCopy, compare_trees
from headrace.cli.mounts import headrace_mounts
from headrace.client import engine as engine_process

IS_ROOT = os.geteuid() == 0
OTHER_USER = 12345
CIFAR = Path(__file__).resolve().parents[3].parent / "shared" / "data" / "cifar10-test.tar.xz"


def can_mount() -> bool:
    return os.access("/dev/fuse", os.R_OK | os.W_OK) and (IS_ROOT or shutil.which("fusermount3") is not None)


needs_fuse = pytest.mark.skipif(
    not can_mount() and os.environ.get("CI") != "true",
    reason="no FUSE for this user (/dev/fuse, fusermount3)",
)


@pytest.fixture
def made(folder: str) -> str:
    """A new volume's folder."""
    assert run("create", folder).returncode == 0
    return folder


@pytest.fixture
def mountpoint(made: str, tmp_path: Path) -> Iterator[str]:
    point = str(tmp_path / "mnt")
    os.mkdir(point)
    done = run("mount", made, point)
    assert done.returncode == 0, done.stderr
    yield point
    if os.path.ismount(point):
        run("unmount", point)
    assert not os.path.ismount(point)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    root = tmp_path / "source"
    for index in range(600):
        folder = root / f"class{index % 7}" / f"deep{index % 3}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}.bin").write_bytes(os.urandom(index * 29))
        os.utime(folder / f"{index}.bin", ns=(0, 1_600_000_000_000_000_000 + index))
    (root / "empty").touch()
    (root / "read only").mkdir()
    (root / "read only" / "file").write_text("x")
    (root / "to_file").symlink_to("class0/deep0/0.bin")
    (root / "to_folder").symlink_to("class1")
    (root / "dangling").symlink_to("../nowhere")
    (root / "loop").symlink_to("loop")
    os.link(root / "class1/deep1/1.bin", root / "class2" / "hard")
    os.mkfifo(root / "fifo")
    os.close(os.open(os.fsencode(root) + b"/\xff\xfe\n\t-\\ ", os.O_CREAT | os.O_WRONLY))
    (root / ("n" * 255)).write_text("long")
    (root / "setuid").touch()
    (root / "setuid").chmod(0o4755)
    with open(root / "sparse", "wb") as file:
        file.write(b"head")
        file.seek(90 << 20)
        file.write(b"tail")
        file.truncate(100 << 20)
    (root / "large").write_bytes(os.urandom((17 << 20) + 5))
    (root / "read only").chmod(0o555)
    os.utime(root, ns=(0, 1_500_000_000_000_000_000))
    return root


def differences(tree: Path, volume: str, path: bytes) -> list[tuple[bytes, str]]:
    with headrace.connect(volume) as opened:
        return compare_trees(os.fsencode(tree), VolumeCopy(opened, path)).differences


def engine_is_running(volume: str) -> bool:
    return engine_process.running_pid(volume) is not None


def kill_engine(volume: str) -> None:
    pid = run_json("status", volume)["pid"]
    ended = os.pidfd_open(pid)
    os.kill(pid, signal.SIGKILL)
    assert select.select([ended], [], [], 10)[0]
    os.close(ended)


def test_life_of_a_volume(folder: str) -> None:
    assert len(run_json("create", folder)["volume"]) == 26
    assert_one_line(run("create", folder), 5, "is a volume already")
    assert_one_line(run("status", folder), 7, "headrace up")
    started = run_json("up", folder, "--memory-bytes", "128MiB")
    assert started["started"] and not run_json("up", folder)["started"]
    fields = run_json("status", folder)
    assert fields["pid"] == started["pid"] and fields["memory_bytes_max"] == 128 << 20
    assert 0 < fields["resident_bytes"] < 256 << 20
    assert run_json("down", folder) == {"stopped": True, "mounts_in_use": []}
    assert run_json("down", folder) == {"stopped": False, "mounts_in_use": []}
    assert not engine_is_running(folder)


def test_import_brings_everything_and_again_nothing(made: str, tree: Path) -> None:
    report = run_json("import", tree, f"{made}:/data")
    assert report["complete"] and report["hard_links"] == 1 and report["special"] == 1, report
    assert differences(tree, made, b"/data") == []
    with headrace.connect(made) as volume:
        assert volume.stat("/data/class2/hard").ino == volume.stat("/data/class1/deep1/1.bin").ino
        assert volume.stat("/data/sparse").blocks * 512 < 1 << 20
    again = run_json("import", tree, f"{made}:/data")
    assert again["complete"] and again["files"] + again["directories"] + again["hard_links"] == 0, again
    assert differences(tree, made, b"/data") == []
    (tree / "class3" / "deep0" / "new").write_text("new")
    (tree / "empty").write_text("not empty any more")
    assert run_json("import", tree, f"{made}:/data")["files"] == 2
    assert differences(tree, made, b"/data") == []


def test_import_survives_the_engine(made: str, tree: Path) -> None:
    run_json("import", tree, f"{made}:/data")
    kill_engine(made)
    assert differences(tree, made, b"/data") == []


def test_interrupted_import_says_how_to_go_on_and_does(made: str, tmp_path: Path) -> None:
    source = tmp_path / "many"
    for index in range(20_000):
        folder = source / f"{index // 500:03}"
        folder.mkdir(parents=True, exist_ok=True)
        (folder / f"{index}").write_bytes(b"%d" % index * 100)
    child = subprocess.Popen(
        [*COMMAND, "import", str(source), f"{made}:/many"],
        stderr=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with headrace.connect(made) as volume:
        while not volume.exists("/many/001"):
            time.sleep(0.01)
            assert child.poll() is None
    child.send_signal(signal.SIGINT)
    out, err = child.communicate(timeout=30)
    assert child.returncode == 8 and out == "", (out, err)
    assert "run the same command again to go on" in err and err.count("\n") == 1
    report = run_json("import", source, f"{made}:/many")
    assert report["skipped"] > 500 and report["files"] < 20_000
    assert differences(source, made, b"/many") == []


def test_import_of_an_archive(made: str, tree: Path, tmp_path: Path) -> None:
    archive = tmp_path / "tree.tar.gz"
    with tarfile.open(
        archive, "w:gz", format=tarfile.PAX_FORMAT, errors="surrogateescape", compresslevel=1
    ) as members:
        members.add(tree, ".")
    report = run_json("import", archive, f"{made}:/data")
    assert report["complete"], report
    with headrace.connect(made) as volume:
        copy = VolumeCopy(volume, b"/data")
        assert compare_trees(os.fsencode(tree), copy, time_slack_ns=1000).differences == []
    assert run_json("import", archive, f"{made}:/data")["files"] == 0


def test_damaged_archive_ends_with_6_and_keeps_the_rest(made: str, tree: Path, tmp_path: Path) -> None:
    archive = tmp_path / "tree.tar"
    with tarfile.open(archive, "w") as members:
        members.add(tree / "class0", "class0")
    archive.write_bytes(archive.read_bytes()[: archive.stat().st_size // 2])
    done = run("import", archive, f"{made}:/data")
    assert done.returncode == 6 and "cut off inside" in done.stderr and "Traceback" not in done.stderr
    assert run_json("du", f"{made}:/data")["files"] > 10


@pytest.mark.skipif(not CIFAR.exists(), reason=f"{CIFAR} is not there")
def test_cifar_is_imported_byte_for_byte(made: str, tmp_path: Path) -> None:
    report = run_json("import", CIFAR, f"{made}:/cifar")
    assert report["complete"] and report["files"] > 1000
    unpacked = tmp_path / "unpacked"
    with tarfile.open(CIFAR) as members:
        members.extractall(unpacked, filter="fully_trusted", numeric_owner=True)
    with headrace.connect(made) as volume:
        found = compare_trees(os.fsencode(unpacked), VolumeCopy(volume, b"/cifar"), time_slack_ns=1000)
    assert [each for each in found.differences if each[0]] == []
    assert found.files == report["files"]


@pytest.fixture
def home(engine_binary: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that another user may reach and write to, with an engine that this user may run."""
    path = Path(tempfile.mkdtemp(prefix="headrace-home-"))
    path.chmod(0o755)
    shutil.copy(engine_binary, path / "headraced")
    monkeypatch.setenv("HEADRACE_ENGINE", str(path / "headraced"))
    (path / "own").mkdir()
    os.chown(path / "own", OTHER_USER, OTHER_USER)
    yield path
    run_as(OTHER_USER, "down", str(path / "own" / "vol"))
    shutil.rmtree(path)


@pytest.mark.skipif(not IS_ROOT, reason="needs root to become another user")
def test_import_by_another_user_names_what_it_may_not_read(home: Path) -> None:
    source = home / "source"
    source.mkdir()
    (source / "mine").write_text("open to all")
    (source / "secret").write_text("root's")
    (source / "secret").chmod(0o600)
    (source / "closed").mkdir(mode=0o700)
    (source / "locked").mkdir()
    (source / "locked" / "inside").write_text("x")
    (source / "locked").chmod(0o555)
    volume = str(home / "own" / "vol")
    assert run_as(OTHER_USER, "create", volume).returncode == 0
    for _ in range(2):
        done = run_as(OTHER_USER, "import", source, f"{volume}:/data")
        assert done.returncode == 6, done
        assert "not imported: secret: cannot be opened: permission denied" in done.stderr
        assert "not imported: closed: cannot be read as a directory: permission denied" in done.stderr
        assert "2 entries were not imported" in done.stderr
    listed = json.loads(run_as(OTHER_USER, "ls", f"{volume}:/data", "--json").stdout)
    entries = {entry["name"]: entry for entry in listed["entries"]}
    assert set(entries) == {"mine", "closed", "locked"}
    assert {entry["uid"] for entry in entries.values()} == {OTHER_USER}
    assert entries["locked"]["mode"] == 0o555 and entries["closed"]["mode"] == 0o700
    # And the other way round: what is not this user's is refused in one line.
    roots = str(home / "roots")
    assert run("create", roots).returncode == 0
    try:
        run("up", roots)
        assert_one_line(run_as(OTHER_USER, "ls", roots), 4, "root")
    finally:
        run("down", roots)


def test_ls_stat_du_seal(made: str, tree: Path) -> None:
    run_json("import", tree, f"{made}:/data")
    names = run("ls", f"{made}:/data").stdout.splitlines()
    assert "\\xff\\xfe\\n\\t-\\\\ " in names and "class0" in names
    assert "to_file -> class0/deep0/0.bin" in run("ls", "-l", f"{made}:/data").stdout
    assert run_json("stat", f"{made}:/data/dangling")["target"] == "../nowhere"
    counted = run_json("du", f"{made}:/data")
    size = {
        (status.st_ino): status.st_size
        for path in tree.rglob("*")
        if stat.S_ISREG((status := path.lstat()).st_mode)
    }
    assert (counted["files"], counted["bytes"]) == (len(size), sum(size.values()))
    sealed = run_json("seal", f"{made}:/data")
    with headrace.connect(made) as volume:
        assert len(volume.dataset(sealed["seal"])) == sealed["samples"] > 600
    assert_one_line(run("stat", f"{made}:/data/none"), 3, "/data/none")
    assert_one_line(run("seal", f"{made}:/none"), 3)


@needs_fuse
def test_mount_and_unmount(made: str, mountpoint: str, tree: Path) -> None:
    run_json("import", tree, f"{made}:/data")
    copy = MountedCopy(os.fsencode(mountpoint) + b"/data")
    assert compare_trees(os.fsencode(tree), copy).differences == []
    assert [mount.volume for mount in headrace_mounts() if mount.path == os.fsencode(mountpoint)] == [made]
    assert_one_line(run("mount", made, mountpoint), 5, mountpoint)
    busy = os.open(os.path.join(mountpoint, "data", "large"), os.O_RDONLY)
    try:
        assert_one_line(run("unmount", mountpoint), 5, mountpoint)
    finally:
        os.close(busy)
    assert run("unmount", mountpoint).returncode == 0
    assert_one_line(run("unmount", mountpoint), 3, "no volume is mounted")
    (Path(mountpoint) / "in the way").touch()
    assert_one_line(run("mount", made, mountpoint), 5, "not empty")


@needs_fuse
def test_mount_of_a_dead_engine_is_seen_and_ended(made: str, mountpoint: str) -> None:
    kill_engine(made)
    found = [check for check in run_json("doctor", made, code=6)["checks"] if check["check"] == "mounts"]
    assert any(check["verdict"] == "fail" and mountpoint in check["detail"] for check in found), found
    assert run("unmount", mountpoint).returncode == 0
    assert not os.path.ismount(mountpoint)


@needs_fuse
def test_import_into_itself_is_refused(made: str, mountpoint: str, tree: Path) -> None:
    run_json("import", tree, f"{made}:/data")
    assert_one_line(run("import", f"{mountpoint}/data", f"{made}:/data/copy"), 2, "itself, which is mounted")
    assert_one_line(run("import", f"{mountpoint}/data", f"{made}:/copy"), 2, "itself, which is mounted")
    assert_one_line(run("import", made, f"{made}:/x"), 2, "own folder")


@needs_fuse
def test_import_of_what_is_around_a_mount_ends(made: str, mountpoint: str, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("x")
    done = run("import", tmp_path, f"{made}:/self", timeout=30)
    assert done.returncode == 0, done.stderr
    assert f"skipped {mountpoint}: it is a mount of the volume" in done.stderr
    assert f"skipped {made}: it is the volume's own folder" in done.stderr
    assert run("ls", f"{made}:/self").stdout.split() == ["file"]


def test_edits_in_the_volume_survive_another_import(made: str, tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.mkdir()
    (source / "a").write_text("from the source")
    run_json("import", source, f"{made}:/data")
    with headrace.connect(made) as volume:
        volume.write_bytes("/data/a", b"edited")
        report = run_json("import", source, f"{made}:/data")
        assert report["kept"] == [{"path": "a"}] and volume.read_bytes("/data/a") == b"edited"
        report = run_json("import", source, f"{made}:/data", "--replace")
        assert (report["replaced"], report["kept"]) == (1, [])
        assert volume.read_bytes("/data/a") == b"from the source"


def test_seals_are_listed(made: str, tree: Path) -> None:
    run_json("import", tree, f"{made}:/data")
    sealed = run_json("seal", f"{made}:/data")
    (listed,) = run_json("seals", made)["seals"]
    assert (listed["seal"], listed["path"], listed["samples"]) == (sealed["seal"], "/data", sealed["samples"])
    assert sealed["seal"] in run("seals", made).stdout


def test_a_seal_is_deleted(made: str, tree: Path) -> None:
    run_json("import", tree, f"{made}:/data")
    sealed = run_json("seal", f"{made}:/data")
    assert run_json("seal-delete", made, sealed["seal"]) == {"seal": sealed["seal"]}
    assert run_json("seals", made) == {"seals": []}
    assert_one_line(run("seal-delete", made, sealed["seal"]), 3, "there is no sealed view", sealed["seal"])


def test_snapshots_by_command(made: str, tree: Path) -> None:
    run_json("import", tree, f"{made}:/data")
    before = run_json("du", f"{made}:/")
    created = run_json("snapshot", "create", made, "monday")
    assert created["name"] == "monday" and created["version"] >= 1
    assert run_json("snapshot", "ls", made)["snapshots"] == [created]
    assert "monday" in run("snapshot", "ls", made).stdout
    assert_one_line(run("snapshot", "create", made, "monday"), 5, "there is a snapshot", "monday")
    assert run("ls", f"{made}:/.snapshots").stdout == "monday\n"
    assert run("ls", f"{made}:/.snapshots/monday").stdout == "data\n"
    assert run_json("du", f"{made}:/.snapshots/monday") == {**before, "path": "/.snapshots/monday"}

    with headrace.connect(made) as volume:
        volume.write_bytes("/new", b"x")
        volume.rename("/data", "/moved")
        volume.write_bytes(b"/caf\xe9", b"x")
    shown = run("snapshot", "diff", made, "monday")
    assert shown.stdout.splitlines() == ["+ /caf\\xe9", "R /data -> /moved", "+ /new"]
    lines = run("snapshot", "diff", made, "monday", "--json").stdout.splitlines()
    assert [json.loads(line) for line in lines][1] == {
        "change": "renamed",
        "kind": "directory",
        "path": "/moved",
        "from": "/data",
    }
    assert_one_line(run("snapshot", "restore", made, "friday"), 3, "there is no snapshot", "friday")
    restored = run_json("snapshot", "restore", made, "monday")
    assert restored["before"].startswith("before-restore-") and restored["changed"] > 3
    assert run_json("du", f"{made}:/") == before
    assert run("snapshot", "diff", made, "monday").stdout == ""
    assert run("snapshot", "diff", made, "monday", restored["before"]).stdout == shown.stdout
    assert run_json("snapshot", "delete", made, restored["before"]) == {"name": restored["before"]}
    assert "deleted the snapshot monday" in run("snapshot", "delete", made, "monday").stdout
    assert run_json("snapshot", "ls", made) == {"snapshots": []}


@needs_fuse
def test_down_names_who_used_the_mount(made: str, mountpoint: str) -> None:
    user = subprocess.Popen(["sleep", "60"], cwd=mountpoint)
    try:
        done = run("down", made)
        assert done.returncode == 0, done.stderr
        assert f"mount {mountpoint} was in use by sleep ({user.pid}); it is gone now" in done.stderr
    finally:
        user.kill()
        user.wait()


def test_import_on_a_terminal_shows_progress_and_in_a_pipe_none(made: str, tree: Path) -> None:
    piped = run("import", tree, f"{made}:/a")
    assert piped.stderr == "" and "\r" not in piped.stdout and piped.stdout.count("\n") == 1
    code, seen = run_on_terminal("import", tree, f"{made}:/b")
    assert code == 0 and "files/s" in seen and "\x1b[" in seen


@needs_fuse
@pytest.mark.skipif(not IS_ROOT, reason="dropping the page cache needs root")
def test_bench_of_a_mount_beside_the_disk(made: str, mountpoint: str, tmp_path: Path) -> None:
    options = ["--target", mountpoint, "--compare", str(tmp_path), "--rounds", "1"]
    small = run_json("bench", "small-files", *options, "--files", "300", "--threads", "1,2")
    for side in ("target", "compare"):
        assert len(small[side]) == 7
        assert all(value > 0 for by_threads in small[side].values() for value in by_threads.values()), small
    assert small["machine"]["file_systems"]["target"] == "fuse.headrace"
    large = run_json("bench", "large-file", *options, "--bytes", "32MiB")
    assert len(large["target"]) == 5 and set(large["target"]["random_4k_hot_per_s"]) == {"1", "8"}
    assert os.listdir(mountpoint) == [] and not list(tmp_path.glob(".headrace-bench*"))
    assert os.path.ismount(mountpoint)


def test_bench_of_the_loader(made: str, tree: Path) -> None:
    run_json("import", tree, f"{made}:/data")
    options = ["--volume", "vol", "--path", "/data/class1", "--batch", "16", "--rounds", "1"]
    report = run_json("bench", "loader", *options, cwd=os.path.dirname(made))
    assert report["target"]["samples_warm_per_s"]["1"] > 0
    assert (report["target"]["samples_cold_per_s"]["1"] is None) == (not IS_ROOT)


def leftovers(folder: Path) -> list[str]:
    """Files, mounts and engines under `folder`; other tests may run demos of their own at the same time."""
    inside = os.fsencode(folder) + b"/"
    found = [
        *map(str, folder.iterdir()),
        *(str(mount.path) for mount in headrace_mounts() if inside in mount.path),
    ]
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            line = Path("/proc", pid, "cmdline").read_bytes()
        except OSError:
            continue
        if b"headraced" in line and inside in line:
            found.append(f"engine {pid}")
    return found


@pytest.mark.parametrize("packed", [False, True])
def test_demo_shows_three_ways_and_leaves_nothing(
    tree: Path, tmp_path: Path, engine_binary: str, packed: bool
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    source = tree
    if packed:
        source = tmp_path / "tree.tar"
        with tarfile.open(source, "w", errors="surrogateescape") as members:
            members.add(tree, ".")
    report = run_json("demo", "--source", source, env={**os.environ, "TMPDIR": str(temporary)})
    assert report["ok"] and report["compare"]["differences"] == [], report
    ways = {"plain files", "Loader"} | ({"mount"} if can_mount() else set())
    assert set(report["ways"]) == ways and report["accelerator"]["simulated"]
    for way in report["ways"].values():
        shares = way["accelerator_busy"] + way["waiting_for_data"] + way["overhead"]
        assert 0.98 < shares < 1.02 and 0 < way["accelerator_busy"] < 0.93
    assert len({way["samples"] for way in report["ways"].values()}) == 1
    assert leftovers(temporary) == []


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("after", ["Volume in", "Sealed as", "Epoch 1"])
def test_interrupted_demo_leaves_nothing(
    tree: Path, tmp_path: Path, engine_binary: str, number: signal.Signals, after: str
) -> None:
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    child = subprocess.Popen(
        [*COMMAND, "demo", "--source", str(tree)],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, "TMPDIR": str(temporary), "PYTHONUNBUFFERED": "1"},
    )
    assert child.stdout is not None
    for line in child.stdout:
        if line.startswith(after):
            break
    child.send_signal(number)
    _, err = child.communicate(timeout=60)
    assert child.returncode == 8 and err.startswith("headrace: interrupted"), err
    assert leftovers(temporary) == []


def test_doctor_of_a_good_machine(made: str) -> None:
    done = run("doctor", made, "--json")
    checks = {check["check"]: check for check in json.loads(done.stdout)["checks"]}
    assert checks["volume"]["verdict"] == "ok" and checks["engine"]["verdict"] != "fail", checks
