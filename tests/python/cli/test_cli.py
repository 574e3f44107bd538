"""The command line without an engine: places, names, output, errors and exit codes, doctor."""

from __future__ import annotations

import base64
import json
import os
import re
import signal
import subprocess
import threading
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from command import COMMAND, assert_one_line, run, run_json, run_on_terminal

import headrace
from headrace import errors
from headrace.cli import doctor
from headrace.cli.exit_codes import HELP_TEXT, ExitCode, exit_code_of
from headrace.cli.import_command import print_summary
from headrace.cli.main import cli
from headrace.cli.mounts import mount_points
from headrace.cli.place import parse_place
from headrace.cli.text import json_name, shown
from headrace.control.importer import ImportReport
from headrace.errors import Invalid, NotFound
from support.fake_engine import Canned, FakeEngine

# -- places and names --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "volume", "path"),
    [
        ("./vol:/a/b", "./vol", b"/a/b"),
        ("vol:/", "vol", b"/"),
        ("./vol:", "./vol", b"/"),
        ("C:/vol:/a", "C:/vol", b"/a"),
        ("odd:name:/a", "odd:name", b"/a"),
        ("postgresql://host/db/name:/a", "postgresql://host/db/name", b"/a"),
        ("vol:/a//b/./c/", "vol", b"/a/b/c"),
        (os.fsdecode(b"v\xff:/\xfe"), os.fsdecode(b"v\xff"), b"/\xfe"),
    ],
)
def test_place_is_split_at_the_last_colon_slash(text: str, volume: str, path: bytes) -> None:
    assert parse_place(text) == (volume, path)


def test_path_in_the_volume_may_hold_colon_slash(tmp_path: Path) -> None:
    assert parse_place(f"{tmp_path}:/a:/b") == (str(tmp_path), b"/a:/b")


@pytest.mark.parametrize("text", ["vol", "", ":", ":/a", "vol:a", "vol:/a/../b"])
def test_what_is_no_place_is_refused(text: str) -> None:
    with pytest.raises(Invalid):
        parse_place(text)


def test_volume_alone_is_its_root_where_allowed() -> None:
    assert parse_place("./vol", bare_volume=True) == ("./vol", b"/")


@pytest.mark.parametrize(
    ("name", "text"),
    [
        (b"plain", "plain"),
        ("größe".encode(), "größe"),
        (b"a\xff", "a\\xff"),
        (b"a\nb\x1b[31m", "a\\nb\\x1b[31m"),
        (b"back\\slash", "back\\\\slash"),
        ("\u202eevil".encode(), "\\xe2\\x80\\xaeevil"),
    ],
)
def test_names_are_safe_to_print(name: bytes, text: str) -> None:
    assert shown(name) == text


def test_json_has_the_bytes_of_odd_names() -> None:
    assert json_name("path", b"/ok") == {"path": "/ok"}
    fields = json_name("path", b"/\xff")
    assert base64.b64decode(fields["path_b64"]) == b"/\xff" and fields["path"] == "/\\xff"


# -- errors and exit codes -----------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (errors.Invalid("x"), 2),
        (errors.NotFound("x"), 3),
        (FileNotFoundError(2, "x"), 3),
        (errors.Permission("x"), 4),
        (errors.Conflict("x"), 5),
        (errors.AlreadyExists("x"), 5),
        (errors.Full("x"), 6),
        (errors.Corrupt("x"), 6),
        (errors.Internal("x"), 6),
        (errors.Unavailable("x"), 7),
        (KeyboardInterrupt(), 8),
    ],
)
def test_exit_code_of_each_kind_of_error(error: BaseException, code: int) -> None:
    assert exit_code_of(error) == code


def test_exit_codes_are_the_documented_ones() -> None:
    documented = [int(number) for number in re.findall(r"^  (\d)  ", HELP_TEXT, re.MULTILINE)]
    assert documented == [code.value for code in ExitCode]
    assert HELP_TEXT.replace("\b\n", "").splitlines()[1].strip() in run("--help").stdout


def test_mistakes_are_one_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_ENGINE", "/bin/false")  # never reached
    (tmp_path / "file").touch()
    (tmp_path / "folder").mkdir()
    newer = tmp_path / "newer"
    newer.mkdir()
    marker = {"headrace": "volume", "format": 99, "volume": "0" * 26, "created_ns": 0}
    (newer / "HEADRACE").write_text(json.dumps(marker))
    assert_one_line(run("ls", f"{tmp_path}/none:/"), 3, f"{tmp_path}/none", "headrace create")
    assert_one_line(run("ls", f"{tmp_path}/file:/"), 5, "is a file")
    assert_one_line(run("status", tmp_path / "folder"), 5, "not a volume")
    assert_one_line(run("up", newer), 5, "format 99", "upgrade headrace")
    assert_one_line(run("down", newer), 5, "format 99")
    assert_one_line(run("create", newer), 5, "is a volume already")
    assert_one_line(run("import", tmp_path, "vol"), 2, "VOLUME:/path")
    assert_one_line(run("unmount", tmp_path), 3, "no volume is mounted")
    assert_one_line(run("bench", "small-files", "--target", tmp_path / "none"), 3, "--target")


def test_bad_arguments_are_2_and_name_the_option() -> None:
    for arguments in (["frobnicate"], ["ls"], ["up", "v", "--memory-bytes", "much"], ["ls", "--frob", "v"]):
        done = run(*arguments)
        assert done.returncode == 2 and "Traceback" not in done.stderr, done.stderr
    assert "10KiB" in run("up", "v", "--memory-bytes", "much").stderr


def test_traceback_only_with_debug(tmp_path: Path) -> None:
    done = run("--debug", "ls", f"{tmp_path}/none:/")
    assert "Traceback" in done.stderr and done.returncode == 1


def test_every_command_has_help_with_an_example() -> None:
    def check(group: Any, path: list[str]) -> int:
        checked = 0
        for name, command in group.commands.items():
            if hasattr(command, "commands"):
                checked += check(command, [*path, name])
                continue
            text = CliRunner().invoke(cli, [*path, name, "--help"]).output
            assert f"headrace {' '.join([*path, name])}" in text.split("Example", 1)[1], name
            checked += 1
        return checked

    assert check(cli, []) == 31


def test_version_is_an_option_too() -> None:
    assert CliRunner().invoke(cli, ["--version"]).output == CliRunner().invoke(cli, ["version"]).output


def test_commands_for_a_whole_volume_name_it_when_they_get_a_place(tmp_path: Path) -> None:
    (tmp_path / "vol").mkdir()
    (tmp_path / "vol" / "HEADRACE").touch()
    for text in ("./vol:/pictures", "./vol:", "./vol:/"):
        done = run("mount", text, "mnt", cwd=tmp_path)
        assert_one_line(done, 2, "mount takes a whole volume: ./vol\n")
    with pytest.raises(Invalid, match="is a place in volume"):
        headrace.connect(f"{tmp_path}/vol:/pictures")


def test_missing_volume_is_one_error_with_a_command_to_paste(tmp_path: Path) -> None:
    missing = f"{tmp_path}/my vol"
    with pytest.raises(NotFound) as caught:
        headrace.connect(missing)
    assert f"`headrace create '{missing}'`" in str(caught.value)
    # What a traceback would show before it.
    shown = caught.value.__cause__ or (
        None if caught.value.__suppress_context__ else caught.value.__context__
    )
    assert shown is None


def test_import_summary_counts_and_asks_to_repeat_only_what_may_help(
    capsys: pytest.CaptureFixture[str],
) -> None:
    def told(**fields: Any) -> tuple[str, str]:
        print_summary(ImportReport(**fields), 0.0)
        return tuple(capsys.readouterr())

    refused = (b"../x", "refused: its name leads out")
    out, err = told(files=1, skipped=1, problems=[refused], refused=1)
    assert "imported 1 file (" in out and "; 1 entry was there already" in out
    assert err.endswith("headrace: 1 entry was not imported; everything else is in\n")
    _, err = told(problems=[(b"a", "busy"), refused], refused=1)
    assert err.endswith("Run the same command again to try 1 of them once more\n")
    _, err = told(problems=[(b"a", "busy")])
    assert err.endswith("Run the same command again to try it once more\n")
    out, err = told(files=2, replaced=2, kept=[b"a", b"b"])
    assert "; replaced 2" in out
    assert "2 entries are newer in the volume and were kept; --replace overwrites them" in err
    assert "kept: b" in err


# -- output, against a fake engine --------------------------------------------------------------------


def attr(kind: str = "file", **fields: Any) -> dict[str, Any]:
    whole = {
        "ino": 7, "kind": kind, "mode": 0o640, "nlink": 1, "uid": 0, "gid": 0, "rdev": 0, "size": 1234,
        "blocks": 8, "atime_ns": 0, "mtime_ns": 1_700_000_000_123_456_789, "ctime_ns": 0,
    }  # fmt: skip
    return {**whole, **fields}


def serve(engine: FakeEngine, names: list[bytes]) -> None:
    def stat(fields: dict[str, Any], payload: bytes) -> Canned:
        return Canned(attr("directory" if fields["path"] == b"/" else "file"))

    def listing(fields: dict[str, Any], payload: bytes) -> Canned:
        entries = [{"name": name, "ino": 7, "kind": "file", "attr": attr()} for name in names]
        return Canned({"entries": entries, "next": None})

    engine.answers |= {"stat": stat, "list": listing}


def test_ls_escapes_and_lists(fake_engine: FakeEngine) -> None:
    serve(fake_engine, [b"a", b"b\xff\n"])
    assert run("ls", f"{fake_engine.folder}:/").stdout == "a\nb\\xff\\n\n"
    assert run("ls", fake_engine.folder).stdout == "a\nb\\xff\\n\n"
    long = run("ls", "-l", f"{fake_engine.folder}:/").stdout
    assert re.fullmatch(r"(-rw-r----- 1 \S+ \S+ 1234 2023-11-1\d \d\d:\d\d (a|b\\xff\\n)\n){2}", long), long
    entries = run_json("ls", f"{fake_engine.folder}:/")["entries"]
    assert [entry.get("name_b64") for entry in entries] == [None, base64.b64encode(b"b\xff\n").decode()]
    assert entries[0]["mtime_ns"] == 1_700_000_000_123_456_789 and entries[0]["size"] == 1234


def test_stat_and_du(fake_engine: FakeEngine) -> None:
    serve(fake_engine, [b"a", b"b"])
    fields = run_json("stat", f"{fake_engine.folder}:/x")
    assert (fields["path"], fields["kind"], fields["mode"]) == ("/x", "file", 0o640)
    assert "1234 bytes (1.2 KiB)" in run("stat", f"{fake_engine.folder}:/x").stdout
    assert run_json("du", fake_engine.folder) == {
        "path": "/", "bytes": 2468, "files": 2, "directories": 1, "others": 0
    }  # fmt: skip


def test_reader_that_leaves_early_is_no_error(fake_engine: FakeEngine) -> None:
    serve(fake_engine, [b"n%d" % number for number in range(50_000)])
    child = subprocess.Popen(
        [*COMMAND, "ls", f"{fake_engine.folder}:/"], stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    assert child.stdout is not None and child.stderr is not None
    child.stdout.read(3)
    child.stdout.close()
    assert child.stderr.read() == b"" and child.wait() == 0
    child.stderr.close()


def status(**fields: Any) -> Canned:
    whole = {
        "engine": "0.1.0", "pid": 42, "volume": "0" * 26, "path": b"/v\xff", "format": 1, "started_ns": 0,
        "session": "1" * 26, "resident_bytes": 1 << 20, "memory_bytes_max": 1 << 28, "buffers_bytes": 0,
        "dirty_bytes": 0, "mounts": [{"mountpoint": b"/mnt", "read_only": True, "requests": 3}], "clients": 1,
        "streams": 0, "seals": 0, "segments": 0, "segment_bytes": 0, "inodes": 1, "object": None, "recovery": [],
        "warnings": ["flash\x1b 97 % full"],
    }  # fmt: skip
    return Canned({**whole, **fields})


def test_status_for_people_and_programs(fake_engine: FakeEngine) -> None:
    space = {"bytes_total": 100, "bytes_free": 50, "bytes_available": 25, "inodes_used": 1}
    fake_engine.answers |= {"status": lambda *_: status(), "statfs": lambda *_: Canned(space)}
    fields = run_json("status", fake_engine.folder)
    assert (fields["pid"], fields["resident_bytes"]) == (42, 1 << 20)
    assert fields["mounts"] == [{"mountpoint": "/mnt", "read_only": True, "requests": 3}]
    assert base64.b64decode(fields["path_b64"]) == b"/v\xff"
    text = run("status", fake_engine.folder).stdout
    assert "75 % used" in text and "flash\\x1b 97 % full" in text


def test_status_without_engine_says_how_to_start_one(fake_engine: FakeEngine) -> None:
    fake_engine.kill()
    assert_one_line(run("status", fake_engine.folder), 7, "headrace up")


def test_engine_error_is_one_line_with_its_code(fake_engine: FakeEngine) -> None:
    fake_engine.answers["stat"] = lambda *_: Canned(
        error={"kind": "corrupt", "errno": 5, "message": "segment 01K6 offset 4096: checksum\nsecond line"}
    )
    assert_one_line(run("ls", fake_engine.folder), 6, "segment 01K6 offset 4096: checksum\\nsecond line")
    fake_engine.answers["stat"] = lambda *_: None
    assert_one_line(run("ls", fake_engine.folder), 7, "ended in mid-call")


def test_ctrl_c_and_sigterm_are_8(fake_engine: FakeEngine) -> None:
    for number in (signal.SIGINT, signal.SIGTERM):
        asked, answer = threading.Event(), threading.Event()

        def stat(fields: dict[str, Any], payload: bytes, asked: Any = asked, answer: Any = answer) -> None:
            asked.set()
            answer.wait(20)

        fake_engine.answers["stat"] = stat
        child = subprocess.Popen(
            [*COMMAND, "ls", fake_engine.folder], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
        )
        assert asked.wait(20)
        child.send_signal(number)
        out, err = child.communicate(timeout=20)
        answer.set()
        assert (child.returncode, out, err) == (8, "", "headrace: interrupted\n")


# -- doctor -------------------------------------------------------------------------------------------


def test_doctor_has_a_verdict_for_each_check(tmp_path: Path) -> None:
    done = run("doctor", "--json")
    report = json.loads(done.stdout)
    checks = {check["check"]: check for check in report["checks"]}
    assert {"kernel", "python", "engine", "/dev/fuse", "pidfd", "memfd", "free space", "mounts"} <= set(
        checks
    )
    assert {check["verdict"] for check in report["checks"]} <= {"ok", "warn", "fail"}
    assert done.returncode == (0 if report["ok"] else 6)
    for check in report["checks"]:
        assert check["verdict"] == "ok" or check["remedy"], check


def test_doctor_names_what_is_wrong_with_a_volume(tmp_path: Path) -> None:
    (tmp_path / "folder").mkdir()
    for path, says in ((tmp_path / "none", "is not there"), (tmp_path / "folder", "not a volume")):
        report = run_json("doctor", path, code=6)
        found = {check["check"]: check for check in report["checks"]}["volume"]
        assert found["verdict"] == "fail" and says in found["detail"] and found["remedy"]


def test_doctor_sees_a_full_disk(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    real = os.statvfs(tmp_path)

    class Full:
        f_bavail, f_frsize, f_blocks, f_files, f_favail = 10, 4096, real.f_blocks, 1000, 1000

    monkeypatch.setattr(os, "statvfs", lambda path: Full)
    findings = {finding.check: finding for finding in doctor.examine(str(tmp_path))}
    assert findings["free space"].verdict is doctor.Verdict.FAIL
    assert "40.0 KiB" in findings["free space"].detail


def test_doctor_sees_a_mount_whose_engine_is_gone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    gone = doctor.headrace_mounts.__globals__["MountPoint"](
        b"headrace:/vol", os.fsencode(tmp_path / "m"), b"fuse.headrace"
    )
    monkeypatch.setattr(doctor, "headrace_mounts", lambda: [gone])
    findings = [finding for finding in doctor.examine(None) if finding.check == "mounts"]
    assert findings[0].verdict is doctor.Verdict.FAIL
    assert findings[0].remedy == f"headrace unmount {tmp_path}/m"


def test_mount_points_are_those_of_the_kernel() -> None:
    assert b"/proc" in [mount.path for mount in mount_points()]


def test_terminal_gets_colour_and_a_pipe_does_not(tmp_path: Path) -> None:
    _, on_terminal = run_on_terminal("doctor")
    assert "\x1b[" in on_terminal
    piped = run("doctor")
    assert "\x1b" not in piped.stdout + piped.stderr and "\r" not in piped.stdout + piped.stderr
