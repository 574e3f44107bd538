"""The command line as a user runs it: a process, its output, its exit code."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from typing import Any

from support.system import ROOT

_PYTHONPATH = {"PYTHONPATH": str(ROOT / "python")}
Words = str | os.PathLike[str]


def start(*arguments: Words, **options: Any) -> subprocess.Popen[str]:
    """`headrace ARGUMENTS`, running."""
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.cli.main", *map(str, arguments)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        errors="surrogateescape",
        env=os.environ | _PYTHONPATH,
        **options,
    )


def run(*arguments: Words, code: int = 0, seconds: float = 150) -> tuple[str, str]:
    """What `headrace ARGUMENTS` printed, (stdout, stderr), when it ended with `code`; never a traceback."""
    process = start(*arguments)
    try:
        out, error = process.communicate(timeout=seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        out, error = process.communicate()
        raise AssertionError(f"headrace {arguments} has not ended after {seconds} s: {out}{error}") from None
    assert "Traceback" not in error, error
    assert process.returncode == code, f"exit code {process.returncode}, not {code}: {out}{error}"
    assert "\r" not in out + error, "a progress line was drawn into a pipe"
    return out, error


def answer(*arguments: Words, code: int = 0) -> Any:
    """What `headrace ARGUMENTS --json` printed, decoded."""
    return json.loads(run(*arguments, "--json", code=code)[0])


def failure(*arguments: Words, code: int) -> str:
    """What `headrace ARGUMENTS` said on stderr when it ended with `code`."""
    said = run(*arguments, code=code)[1]
    assert said.strip(), "it failed without a word"
    return said
