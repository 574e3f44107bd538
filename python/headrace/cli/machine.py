"""The machine that a measurement was made on, as its report names it."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from typing import Any

from headrace import __version__
from headrace.cli.mounts import file_system_of
from headrace.client.engine import find_engine


def describe_machine(folders: dict[str, str]) -> dict[str, Any]:
    """Processor, cores, memory, kernel, the engine's build, and the file system of each named folder."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_bytes": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "headrace": __version__,
        "engine_build": _engine_build(),
        "file_systems": {name: file_system_of(folder) for name, folder in folders.items()},
    }


def peak_resident_bytes(pid: int) -> int | None:
    """The most memory that process `pid` has had resident so far; None if it is not ours to see."""
    try:
        with open(f"/proc/{pid}/status", encoding="utf-8", errors="replace") as file:
            match = re.search(r"^VmHWM:\s+(\d+) kB$", file.read(), re.MULTILINE)
    except OSError:
        return None
    return int(match[1]) << 10 if match else None


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8", errors="replace") as file:
            match = re.search(r"^(?:model name|Model|Processor)\s*:\s*(.+)$", file.read(), re.MULTILINE)
    except OSError:
        match = None
    return match[1].strip() if match else platform.machine()


def _engine_build() -> str:
    """ "release", "dev", or "unknown" for an engine that does not say."""
    said = subprocess.run([find_engine(), "version"], capture_output=True, text=True, timeout=20, check=False)
    match = re.search(r"\b(release|dev)\b", said.stdout)
    return match[1] if match else "unknown"
