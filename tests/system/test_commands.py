"""The command line against a real engine: the tour, exit codes, JSON, and what the demo leaves."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

import headrace
from headrace.client import engine
from support.commands import answer, failure, run, start
from support.system import CI, ROOT, engines_under, mounts_under, need_fuse, wait_until
from support.volumes import VolumeUnderTest

Make = Callable[[str], VolumeUnderTest]


@pytest.fixture
def source(scratch: Path) -> Path:
    """A small tree with everything that a tree may have."""
    top = scratch / "source"
    for part in ("cats", "dogs"):
        (top / part / "deep").mkdir(parents=True)
        for number in range(40):
            (top / part / f"{number:03}.jpg").write_bytes(part.encode() * (number * 60))
    (top / "link").symlink_to("cats/001.jpg")
    os.link(top / "cats" / "001.jpg", top / "dogs" / "hard")
    (top / "large").write_bytes(os.urandom(1 << 20) * 20)
    os.chmod(top / "cats" / "002.jpg", 0o600)
    os.utime(top / "dogs", ns=(5, 1_234_567_890_123_456_789))
    return top


def test_the_tour(new_volume: Make, source: Path, scratch: Path) -> None:
    need_fuse()
    volume = new_volume("unused")  # tears the engine down
    volume.folder = scratch / "vol"
    volume.name = str(volume.folder)
    folder = volume.name

    made = answer("create", folder)
    assert made["path"] == folder and len(made["volume"]) == 26
    up = answer("up", folder)
    assert up["started"] is True and up["pid"] == volume.pid
    assert answer("up", folder)["started"] is False

    imported = answer("import", source, f"{folder}:/pets")
    # A hard link is one file with two names.
    assert (imported["files"], imported["symlinks"], imported["hard_links"]) == (81, 1, 1)
    assert imported["complete"] is True and imported["problems"] == []
    again = answer("import", source, f"{folder}:/pets")
    assert again["files"] == 0 and again["skipped"] >= 81

    entries = answer("ls", f"{folder}:/pets")["entries"]
    assert [entry["name"] for entry in entries] == ["cats", "dogs", "large", "link"]
    assert run("ls", f"{folder}:/pets")[0].split() == ["cats", "dogs", "large", "link"]
    assert "link -> cats/001.jpg" in run("ls", "-l", f"{folder}:/pets")[0]
    assert answer("stat", f"{folder}:/pets/large")["size"] == 20 << 20
    assert answer("stat", f"{folder}:/pets/dogs")["mtime_ns"] == 1_234_567_890_123_456_789
    counted = answer("du", f"{folder}:/pets")
    assert counted["files"] == 81 and counted["directories"] == 5
    sealed = answer("seal", f"{folder}:/pets")
    assert sealed["samples"] == 82 and sealed["classes"] == 2
    assert len(headrace.connect(folder).dataset(sealed["seal"])) == 82

    point = scratch / "mnt"
    point.mkdir()
    answer("mount", folder, point)
    assert (point / "pets" / "large").read_bytes() == (source / "large").read_bytes()
    status = answer("status", folder)
    assert status["pid"] == volume.pid
    assert 0 < status["resident_bytes"] < 256 << 20
    assert status["mounts"][0]["mountpoint"] == str(point)
    run("status", folder)
    run("unmount", point)
    assert mounts_under(str(point)) == []

    assert answer("down", folder)["stopped"] is True
    assert answer("down", folder)["stopped"] is False
    assert engines_under(folder) == []
    failure("status", folder, code=7)


def test_arguments_that_are_wrong_are_said(volume: VolumeUnderTest) -> None:
    assert "VOLUME:/path" in failure("import", volume.folder, "no-colon-here", code=2)
    failure("frobnicate", code=2)
    failure("up", code=2)
    failure("up", volume.folder, "--memory-bytes", "lots", code=2)
    failure("stat", f"{volume.name}:/none", code=3)
    failure("import", volume.folder / "none", f"{volume.name}:/x", code=3)


def test_help_names_commands_and_exit_codes() -> None:
    out, _ = run("--help")
    for word in (
        "create",
        "up",
        "down",
        "status",
        "mount",
        "unmount",
        "import",
        "ls",
        "stat",
        "du",
        "seal",
        "seals",
        "bench",
    ):
        assert word in out
    assert "doctor" in out and "demo" in out and "Exit codes" in out
    assert headrace.__version__ in run("version")[0]


def test_both_programs_have_one_version(engine_binary: str) -> None:
    said = subprocess.run([engine_binary, "version"], capture_output=True, text=True, check=True).stdout
    assert said.split()[1] == headrace.__version__ == answer("version")["version"]


def test_doctor_has_a_verdict_for_everything(volume: VolumeUnderTest) -> None:
    checks = answer("doctor", volume.folder)["checks"]
    assert {check["verdict"] for check in checks} <= {"ok", "warn", "fail"}
    assert all(check["remedy"] for check in checks if check["verdict"] != "ok")
    assert any("fuse" in check["check"].lower() for check in checks)


def test_rest_and_metrics_on_the_socket(volume: VolumeUnderTest) -> None:
    import http.client
    import json
    import socket

    volume.connect().write_bytes("/file", b"x" * 1000)

    def get(path: str) -> tuple[int, bytes]:
        connection = http.client.HTTPConnection("localhost")
        connection.sock = socket.socket(socket.AF_UNIX)
        connection.sock.connect(str(volume.folder / "engine.sock"))
        connection.request("GET", path)
        response = connection.getresponse()
        body = response.read()
        connection.close()
        return response.status, body

    status, body = get("/metrics")
    assert status == 200
    lines = [line for line in body.decode().splitlines() if line and not line.startswith("#")]
    assert lines and all(line.rpartition(" ")[0].startswith("headrace") for line in lines)
    assert any(line.startswith("headrace") and float(line.rpartition(" ")[2]) > 0 for line in lines)
    for path in ("/v1/status", "/v1/volumes", "/v1/sessions", "/openapi.json"):
        status, body = get(path)
        assert status == 200 and json.loads(body), path
    assert json.loads(get("/v1/status")[1])["pid"] == volume.pid
    assert get("/none")[0] == 404
    document = json.loads(get("/openapi.json")[1])
    assert {"/v1/status", "/v1/volumes", "/v1/sessions"} <= set(document["paths"])


def test_logs_are_lines_of_json(volume: VolumeUnderTest) -> None:
    import json

    volume.restart()
    lines = (volume.folder / "engine.log").read_text().splitlines()
    assert lines
    for line in lines:
        assert isinstance(json.loads(line), dict), line


# Import


def test_an_import_that_was_interrupted_is_completed_by_another(new_volume: Make, scratch: Path) -> None:
    volume = new_volume("vol")
    volume.start()
    top = scratch / "source"
    for folder in range(20):
        (top / f"{folder}").mkdir(parents=True)
        for number in range(250):
            (top / f"{folder}" / f"{number}").write_bytes(b"%d:%d " % (folder, number) * 300)
    process = start("import", top, f"{volume.name}:/copy")
    api = volume.connect()
    deadline = time.monotonic() + 30
    while not (api.exists("/copy/3") or process.poll() is not None) and time.monotonic() < deadline:
        time.sleep(0.01)
    process.send_signal(signal.SIGINT)
    _, error = process.communicate(timeout=30)
    if process.returncode != 0:  # it may have been quicker than the signal
        assert process.returncode == 8, error
        assert "again" in error and "Traceback" not in error
    answer("import", top, f"{volume.name}:/copy")
    for folder in range(20):
        for number in range(0, 250, 17):
            assert api.read_bytes(f"/copy/{folder}/{number}") == b"%d:%d " % (folder, number) * 300
    assert answer("du", f"{volume.name}:/copy")["files"] == 5000
    assert not [name for folder, _, names in api.walk("/copy") for name in names if "partial" in name]


# The demo


@pytest.fixture
def demo_folder(scratch: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the demo makes its temporary folder."""
    folder = scratch / "tmp"
    folder.mkdir()
    monkeypatch.setenv("TMPDIR", str(folder))
    return folder


def leftovers(folder: Path) -> tuple[list[str], list[int], list[str]]:
    return os.listdir(folder), engines_under(str(folder)), mounts_under(str(folder))


@pytest.mark.timeout(300)
def test_the_demo_compares_measures_and_leaves_nothing(
    source: Path, demo_folder: Path, engine_binary: str
) -> None:
    need_fuse()
    said = answer("demo", "--source", source)
    assert said["ok"] is True
    assert said["compare"]["differences"] == [] and said["compare"]["files"] == 82
    assert {"plain files", "mount", "Loader"} <= set(said["ways"])
    assert leftovers(demo_folder) == ([], [], [])


@pytest.mark.timeout(300)
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
@pytest.mark.parametrize("moment", [0.0, 0.7, 2.0, 6.0])
def test_an_interrupted_demo_leaves_nothing(
    demo_folder: Path, engine_binary: str, number: int, moment: float
) -> None:
    """At a moment after its folder is there: in the start of the engine, the import, an epoch."""
    process = start("demo", start_new_session=True)
    wait_until(lambda: os.listdir(demo_folder) or process.poll() is not None, 30)
    time.sleep(moment)
    process.send_signal(number)
    _, error = process.communicate(timeout=60)
    assert process.returncode in (8, -number), error
    assert "Traceback" not in error
    assert leftovers(demo_folder) == ([], [], [])


# Bench


@pytest.mark.timeout(300)
def test_bench_small_files_measures_both_sides(mount: Path, volume: VolumeUnderTest, scratch: Path) -> None:
    (scratch / "disk").mkdir()
    said = answer(
        "bench", "small-files", "--target", mount, "--compare", scratch / "disk", "--files", "200",
        "--size", "10KiB", "--threads", "1,2", "--rounds", "1",
    )  # fmt: skip
    metrics = {
        "create_per_s", "create_fsync_per_s", "cold_read_per_s", "warm_read_per_s", "stat_cold_per_s",
        "stat_warm_per_s", "list_cold_per_s",
    }  # fmt: skip
    for side in ("target", "compare", "ratio"):
        assert metrics <= set(said[side]), side
    assert set(said["target"]["warm_read_per_s"]) == {"1", "2"}
    assert said["target"]["warm_read_per_s"]["1"] > 0
    assert said["rounds"] == 1 and said["machine"]
    assert os.listdir(mount) == [] and os.listdir(scratch / "disk") == []


@pytest.mark.timeout(300)
def test_bench_large_file_and_loader_measure(mount: Path, volume: VolumeUnderTest) -> None:
    said = answer("bench", "large-file", "--target", mount, "--bytes", "32MiB", "--rounds", "1")
    for metric in (
        "write_mb_s",
        "read_cold_mb_s",
        "read_warm_mb_s",
        "random_4k_cold_per_s",
        "random_4k_hot_per_s",
    ):
        assert metric in said["target"]
    api = volume.connect()
    for number in range(600):
        api.write_bytes(f"/train/{number}", b"x" * 10_000, parents=True)
    said = answer(
        "bench", "loader", "--volume", volume.name, "--path", "/train", "--batch", "64", "--rounds", "1"
    )
    assert {"samples_cold_per_s", "samples_warm_per_s"} <= set(said["target"])


def test_an_idle_engine_leaves(new_volume: Make) -> None:
    volume = new_volume("vol")
    ready = engine.start(volume.name, idle_exit_seconds=1)
    assert ready is not None
    deadline = time.monotonic() + 20
    while engines_under(volume.name) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert engines_under(volume.name) == []
    # The next client starts another one.
    with headrace.connect(volume.name) as api:
        api.write_bytes("/file", b"x")


def test_this_run_uses_the_engine_of_this_checkout(engine_binary: str) -> None:
    """So that no test passes by another version's merits."""
    if CI:
        assert Path(engine_binary).resolve().parent == (ROOT / ".venv" / "bin").resolve()
    assert Path(headrace.__file__).is_relative_to(ROOT / "python"), sys.path
