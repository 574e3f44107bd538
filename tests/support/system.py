"""What the tests need from the machine, and what they may leave on it: nothing.

`need` is the one place that decides between skip and failure: a machine of a user's may lack FUSE, root or
the input data, the machine that guards main (CI=true) may not.
"""

from __future__ import annotations

import ctypes
import os
import pickle
import re
import select
import signal
import subprocess
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

import pytest

ROOT = Path(__file__).parents[2]
CI = os.environ.get("CI") == "true"
NOBODY = 65534

T = TypeVar("T")


def need(condition: object, reason: str) -> None:
    """Skips the test with `reason` unless `condition`; under CI=true it fails."""
    if condition:
        return
    if CI:
        pytest.fail(f"CI must not skip: {reason}")
    pytest.skip(reason)


def need_root() -> None:
    need(os.geteuid() == 0, "needs root (users, mounts)")


def need_fuse() -> None:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR))
        why = ""
    except OSError as error:
        why = f"no FUSE here: /dev/fuse: {error.strerror}"
    need(not why, why)


def shared_data(name: str) -> Path:
    """A file of the real input data that lies beside the checkout."""
    path = ROOT.parent / "shared" / "data" / name
    need(path.exists(), f"needs the input data {name} in ../shared/data")
    return path


def wait_until(condition: Callable[[], T], seconds: float = 10.0, what: str = "") -> T:
    """The first true answer of `condition`; fails after `seconds`."""
    deadline = time.monotonic() + seconds
    while True:
        answer = condition()
        if answer:
            return answer
        assert time.monotonic() < deadline, f"not within {seconds} s: {what or condition}"
        time.sleep(0.01)


def mounts() -> list[tuple[str, str, str]]:
    """(device, mountpoint, type) of what is mounted here."""

    def plain(field: str) -> str:
        return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), field)

    lines = Path("/proc/self/mounts").read_text(errors="surrogateescape").splitlines()
    fields = [line.split(" ") for line in lines]
    return [(plain(line[0]), plain(line[1]), line[2]) for line in fields if len(line) > 2]


def mounts_under(folder: str) -> list[str]:
    """Mountpoints in `folder`, innermost first."""
    found = [point for _, point, _ in mounts() if point == folder or point.startswith(folder + "/")]
    return sorted(found, key=len, reverse=True)


def engines_under(folder: str) -> list[int]:
    """Process ids of engines that serve a volume in `folder`."""
    found = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            words = (entry / "cmdline").read_bytes().split(b"\0")
            state = (entry / "stat").read_text(errors="replace").rpartition(")")[2].split()[0]
        except OSError:
            continue
        ours = state != "Z" and os.path.basename(words[0]) == b"headraced"
        if ours and any(word.startswith(os.fsencode(folder)) for word in words):
            found.append(int(entry.name))
    return found


def detach(mountpoint: str) -> None:
    """Ends a mount whatever its state."""
    helper = ["umount", "-l", mountpoint] if os.geteuid() == 0 else ["fusermount3", "-uz", mountpoint]
    subprocess.run(helper, check=False, capture_output=True)


def kill_and_wait(pid: int, number: int = signal.SIGKILL, seconds: float = 10.0) -> None:
    """Sends a signal to a process of this test, which need not be a child, and waits until it is gone."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return
    try:
        signal.pidfd_send_signal(descriptor, number)  # type: ignore[attr-defined,unused-ignore]
    except ProcessLookupError:
        pass
    finally:
        os.close(descriptor)
    wait_until(lambda: not alive(pid), seconds, f"end of process {pid} after signal {number}")


def alive(pid: int) -> bool:
    """Whether any thread of `pid` runs: a leader that is a zombie may leave others behind, with its locks."""
    try:
        descriptor = os.pidfd_open(pid)
    except ProcessLookupError:
        return False
    try:
        poller = select.poll()
        poller.register(descriptor, select.POLLIN)
        return not poller.poll(0)
    finally:
        os.close(descriptor)


def as_user(uid: int, function: Callable[[], T], groups: tuple[int, ...] = ()) -> T:
    """What `function` returns or raises when a process of user `uid` (its group the same) calls it.

    A forked child, since another user may not even read the interpreter's files: what it calls must be
    imported here already. Results and exceptions come back pickled.
    """
    reader, writer = os.pipe()
    child = os.fork()
    if child == 0:
        status = 1
        try:
            os.close(reader)
            os.setgroups(list(groups))
            os.setresgid(uid, uid, uid)
            os.setresuid(uid, uid, uid)
            # A process that changed its user is not "dumpable", and its /proc belongs to root: unlike one
            # that a user started.
            ctypes.CDLL(None).prctl(4, 1, 0, 0, 0)
            os.umask(0o022)
            try:
                answer: tuple[bool, object] = (True, function())
            except BaseException as error:  # noqa: BLE001  # it is handed to the parent, whatever it is
                error.add_note(traceback.format_exc())
                answer = (False, error)
            with os.fdopen(writer, "wb") as pipe:
                pickle.dump(answer, pipe)
            status = 0
        finally:
            os._exit(status)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        raw = pipe.read()
    _, status = os.waitpid(child, 0)
    assert raw, f"the process of user {uid} ended with status {status} and said nothing"
    good, value = pickle.loads(raw)
    if not good:
        raise value
    return value  # type: ignore[no-any-return]
