"""Runs `headrace` as a process of its own, the way a person does."""

from __future__ import annotations

import json
import os
import pty
import subprocess
import sys
import traceback
from typing import Any

COMMAND = [sys.executable, "-m", "headrace.cli.main"]


def run(*arguments: str | os.PathLike[str], **options: Any) -> subprocess.CompletedProcess[str]:
    options.setdefault("timeout", 120)
    return subprocess.run(
        [*COMMAND, *map(os.fspath, arguments)],
        capture_output=True,
        text=True,
        errors="surrogateescape",
        stdin=subprocess.DEVNULL,
        **options,
    )


def run_json(*arguments: str | os.PathLike[str], code: int = 0, **options: Any) -> Any:
    """The parsed output of a command with --json, which must end with `code`."""
    done = run(*arguments, "--json", **options)
    assert done.returncode == code, (done.returncode, done.stdout, done.stderr)
    return json.loads(done.stdout)


def run_on_terminal(*arguments: str | os.PathLike[str]) -> tuple[int, str]:
    """Exit code and everything that a terminal was sent."""
    leader, follower = pty.openpty()
    child = subprocess.Popen(
        [*COMMAND, *map(os.fspath, arguments)], stdin=follower, stdout=follower, stderr=follower
    )
    os.close(follower)
    output = b""
    while True:
        try:
            piece = os.read(leader, 65536)
        except OSError:  # EIO: the last holder of the other end has left
            break
        if not piece:
            break
        output += piece
    os.close(leader)
    return child.wait(timeout=60), output.decode(errors="surrogateescape")


def assert_one_line(done: subprocess.CompletedProcess[str], code: int, *words: str) -> None:
    """A user's mistake: the code, one line on stderr that starts with "headrace: " and has `words`."""
    assert done.returncode == code, (done.returncode, done.stderr)
    assert done.stderr.startswith("headrace: ") and done.stderr.count("\n") == 1, done.stderr
    for word in words:
        assert word in done.stderr, done.stderr


def run_as(user: int, *arguments: str | os.PathLike[str]) -> subprocess.CompletedProcess[str]:
    """The same command in a forked child that has become another user, who may not be able to start Python
    from where it is installed."""
    import tempfile

    from headrace.cli import import_command, listing, main  # loaded before the rights to read them go

    assert import_command and listing
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
        pid = os.fork()
        if pid == 0:
            code = 70
            try:
                os.dup2(out.fileno(), 1)
                os.dup2(err.fileno(), 2)
                sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
                sys.argv = ["headrace", *map(os.fspath, arguments)]
                os.setgroups([])
                os.setgid(user)
                os.setuid(user)
                try:
                    code = main._run()
                except BaseException:  # noqa: BLE001  # told, then the child ends
                    traceback.print_exc()
                sys.stdout.flush()
                sys.stderr.flush()
            finally:
                os._exit(code)
        _, status = os.waitpid(pid, 0)
        out.seek(0)
        err.seek(0)
        return subprocess.CompletedProcess(
            list(map(str, arguments)),
            os.waitstatus_to_exitcode(status),
            out.read().decode(),
            err.read().decode(),
        )
