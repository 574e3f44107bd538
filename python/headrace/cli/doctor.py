"""`headrace doctor`: whether this machine can run Headrace, check by check, each with a verdict and a remedy.

Every check looks at one thing, changes nothing, and never raises: what cannot be found out is said so.
Nothing here waits on a mount that may hang: mounts are looked at from a child that is left behind if it
does not come back.
"""

from __future__ import annotations

import ctypes
import enum
import errno
import os
import platform
import re
import resource
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from importlib import metadata
from typing import NamedTuple

import click

from headrace import __version__
from headrace.cli.mounts import file_system_of, headrace_mounts
from headrace.cli.text import print_json, print_table, printable, shown
from headrace.client.engine import find_engine
from headrace.errors import HeadraceError
from headrace.model.clock import monotonic_ns, sleep_seconds
from headrace.model.message import VOLUME_FORMAT
from headrace.units import format_bytes

# pidfd_open, by which an engine notices the end of a client: 5.3.
_KERNEL_MIN = (5, 3)
# FUSE passthrough.
_KERNEL_PASSTHROUGH = (6, 9)
_OPEN_FILES_MIN = 1_024
# One segment being written, one being merged, and metadata, with some air.
_FREE_BYTES_MIN = 512 << 20
_FREE_BYTES_COMFORTABLE = 5 << 30
# A request of 1 MiB in pages of 4 KiB.
_FUSE_PAGES_MIN = 256
_SYS_IO_URING_SETUP = 425
_MOUNT_PATIENCE_SECONDS = 2.0
# flock and mmap across machines do not keep what SQLite and the engine need of them.
_NETWORK_FILE_SYSTEMS = {"nfs", "nfs4", "cifs", "smb3", "ceph", "lustre", "glusterfs", "9p", "afs", "beegfs"}


class Verdict(enum.Enum):
    OK = "ok"
    WARN = "warn"
    FAIL = "fail"


class Finding(NamedTuple):
    """One check's result. `remedy` is empty when there is nothing to do."""

    check: str
    verdict: Verdict
    detail: str
    remedy: str = ""


def examine(volume: str | None) -> list[Finding]:
    """All checks, of the machine and, if given, of a volume's folder."""
    checks: list[Callable[[], Finding | Iterator[Finding]]] = [
        _kernel,
        _python,
        _engine,
        _fuse_device,
        _fusermount,
        _passthrough,
        _fuse_request_size,
        _io_uring,
        _memfd,
        _pidfd,
        _open_files,
        _memory,
        _mounts,
        lambda: _space(volume or os.getcwd()),
        lambda: _file_system(volume or os.getcwd()),
    ]
    if volume is not None:
        checks.append(lambda: _volume(volume))
    findings: list[Finding] = []
    for check in checks:
        result = check()
        findings.extend([result] if isinstance(result, Finding) else result)
    return findings


def report(findings: list[Finding], as_json: bool) -> bool:
    """Prints the findings. True if none of them is a failure."""
    failed = [finding for finding in findings if finding.verdict is Verdict.FAIL]
    warned = [finding for finding in findings if finding.verdict is Verdict.WARN]
    if as_json:
        print_json(
            {
                "ok": not failed,
                "checks": [
                    {
                        "check": finding.check,
                        "verdict": finding.verdict.value,
                        "detail": finding.detail,
                        "remedy": finding.remedy or None,
                    }
                    for finding in findings
                ],
            }
        )
        return not failed
    print_table(
        ["check", "verdict", "found"],
        [[finding.check, finding.verdict.value, finding.detail] for finding in findings],
        left=3,
    )
    for finding in failed + warned:
        if finding.remedy:
            click.echo(f"{finding.verdict.value}: {finding.check}: {finding.remedy}")
    if failed:
        click.echo(f"{len(failed)} of {len(findings)} checks failed.")
    elif warned:
        click.echo(f"Headrace runs here; {len(warned)} of {len(findings)} checks have a remark.")
    else:
        click.echo("Everything is as it should be.")
    return not failed


def _read(path: str) -> str | None:
    try:
        with open(path, encoding="utf-8", errors="replace") as file:
            return file.read().strip()
    except OSError:
        return None


def _release() -> tuple[int, int]:
    match = re.match(r"(\d+)\.(\d+)", platform.release())
    return (int(match[1]), int(match[2])) if match else (0, 0)


def _kernel() -> Finding:
    found = f"{platform.system()} {platform.release()} {platform.machine()}"
    if platform.system() != "Linux":
        return Finding("kernel", Verdict.FAIL, found, "Headrace runs on Linux only")
    if _release() < _KERNEL_MIN:
        return Finding(
            "kernel", Verdict.FAIL, found, "the engine needs Linux 5.3 or later: upgrade the kernel"
        )
    return Finding("kernel", Verdict.OK, found)


def _python() -> Finding:
    # Not the version's lower bound: the package does not import on an older Python.
    found = [platform.python_version()]
    try:
        found += [f"{name} {metadata.version(name)}" for name in ("numpy", "msgspec", "click", "rich")]
    except metadata.PackageNotFoundError as error:
        return Finding("python", Verdict.WARN, ", ".join(found), f"{error}: pip install it")
    return Finding("python", Verdict.OK, ", ".join(found))


def _engine() -> Finding:
    try:
        binary = os.fspath(find_engine())
    except (HeadraceError, OSError) as error:
        return Finding("engine", Verdict.FAIL, str(error), "install the headrace wheel, or run `make build`")
    try:
        answer = subprocess.run([binary, "version"], capture_output=True, text=True, timeout=20, check=False)
    except (OSError, subprocess.TimeoutExpired) as error:
        return Finding("engine", Verdict.FAIL, f"{binary} does not run: {error}", "reinstall headrace")
    # "headraced 0.1.0 release"
    words = answer.stdout.split()[1:]
    found = f"{binary}, {' '.join(words) or 'of no version'}"
    if answer.returncode != 0 or not words:
        return Finding("engine", Verdict.FAIL, f"{found}, exit {answer.returncode}", "reinstall headrace")
    if words[0] != __version__:
        return Finding(
            "engine",
            Verdict.FAIL,
            f"{found}, but the Python package is {__version__}",
            "install both from one wheel, or run `make build`",
        )
    if words[1:] == ["dev"]:
        return Finding("engine", Verdict.WARN, f"{found}: a development build, slow", "run `make build`")
    return Finding("engine", Verdict.OK, found)


def _fuse_device() -> Finding:
    try:
        os.close(os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC))
    except OSError as error:
        remedy = "modprobe fuse (as root); in a container, pass the device: docker run --device /dev/fuse"
        if error.errno in (errno.EACCES, errno.EPERM):
            remedy = "make /dev/fuse readable and writable for you (chmod 666 /dev/fuse as root)"
        return Finding(
            "/dev/fuse", Verdict.WARN, f"{error.strerror}: no mount; API and Loader work without", remedy
        )
    return Finding("/dev/fuse", Verdict.OK, "can be opened")


def _fusermount() -> Finding:
    path = shutil.which("fusermount3")
    if path is None:
        if os.geteuid() == 0:
            return Finding("fusermount3", Verdict.OK, "not installed, and root mounts without it")
        return Finding(
            "fusermount3",
            Verdict.WARN,
            "not installed: only root can mount",
            "install it (apt-get install fuse3)",
        )
    setuid = bool(os.stat(path).st_mode & 0o4000)
    if not setuid and os.geteuid() != 0:
        return Finding(
            "fusermount3", Verdict.WARN, f"{path} is not setuid root", f"chmod u+s {path} (as root)"
        )
    configuration = _read("/etc/fuse.conf") or ""
    others = any(line.strip() == "user_allow_other" for line in configuration.splitlines())
    note = "" if others or os.geteuid() == 0 else "; --allow-other needs user_allow_other in /etc/fuse.conf"
    return Finding("fusermount3", Verdict.OK, path + note)


def _passthrough() -> Finding:
    if _release() < _KERNEL_PASSTHROUGH:
        return Finding(
            "FUSE passthrough",
            Verdict.WARN,
            "needs Linux 6.9: reads of large files go through the engine",
            "a newer kernel makes mounted reads of large files faster; nothing else depends on it",
        )
    if os.geteuid() != 0:
        return Finding("FUSE passthrough", Verdict.OK, "in this kernel; only root's engine may use it")
    return Finding("FUSE passthrough", Verdict.OK, "in this kernel")


def _fuse_request_size() -> Finding:
    text = _read("/proc/sys/fs/fuse/max_pages_limit")
    if text is None or not text.isdigit():
        return Finding("FUSE request size", Verdict.OK, "1 MiB, the limit of this kernel")
    pages = int(text)
    size = format_bytes(pages * resource.getpagesize())
    if pages < _FUSE_PAGES_MIN:
        return Finding(
            "FUSE request size",
            Verdict.WARN,
            f"max_pages_limit is {pages} ({size})",
            f"sysctl fs.fuse.max_pages_limit={_FUSE_PAGES_MIN} (as root) for faster large files",
        )
    return Finding("FUSE request size", Verdict.OK, f"up to {size}")


def _io_uring() -> Finding:
    remedy = "not needed today; sysctl kernel.io_uring_disabled=0, or a seccomp profile that allows it"
    libc = ctypes.CDLL(None, use_errno=True)
    # No entries and no parameters: a kernel that has it answers EINVAL or EFAULT and makes nothing.
    libc.syscall(_SYS_IO_URING_SETUP, 0, None)
    number = ctypes.get_errno()
    if number in (errno.EINVAL, errno.EFAULT):
        return Finding("io_uring", Verdict.OK, "allowed")
    return Finding("io_uring", Verdict.WARN, f"not allowed ({os.strerror(number)})", remedy)


def _memfd() -> Finding:
    try:
        os.close(os.memfd_create("headrace-doctor", os.MFD_CLOEXEC))
    except OSError as error:
        return Finding(
            "memfd",
            Verdict.FAIL,
            f"memfd_create: {error.strerror}: batches cannot be shared",
            "allow memfd_create in the container's seccomp profile",
        )
    return Finding("memfd", Verdict.OK, "works (/dev/shm is not needed)")


def _pidfd() -> Finding:
    try:
        os.close(os.pidfd_open(os.getpid()))
    except OSError as error:
        return Finding(
            "pidfd",
            Verdict.FAIL,
            f"pidfd_open: {error.strerror}: what a killed client held would not be released",
            "allow pidfd_open in the container's seccomp profile",
        )
    return Finding("pidfd", Verdict.OK, "works")


def _open_files() -> Finding:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    found = f"{soft} (at most {hard})"
    if soft < _OPEN_FILES_MIN:
        return Finding(
            "open files",
            Verdict.WARN,
            found,
            f"ulimit -n {max(_OPEN_FILES_MIN, min(hard, 65536))}, before `headrace up`",
        )
    return Finding("open files", Verdict.OK, found)


def _memory() -> Finding:
    match = re.search(r"^MemAvailable:\s+(\d+) kB", _read("/proc/meminfo") or "", re.MULTILINE)
    if match is None:
        return Finding("memory", Verdict.WARN, "/proc/meminfo does not say what is available")
    available = int(match[1]) << 10
    if available < 512 << 20:
        return Finding(
            "memory",
            Verdict.WARN,
            f"{format_bytes(available)} available",
            "give the engine less (headrace up --memory-bytes 128MiB), or end other programs",
        )
    return Finding("memory", Verdict.OK, f"{format_bytes(available)} available")


def _mounts() -> Iterator[Finding]:
    mounts = headrace_mounts()
    if not mounts:
        yield Finding("mounts", Verdict.OK, "none of Headrace")
    for mount in mounts:
        name = shown(mount.path)
        trouble = _mount_trouble(mount.path)
        if trouble is None:
            yield Finding("mounts", Verdict.OK, f"{name} answers")
        else:
            remedy = f"headrace unmount {printable(shlex.quote(os.fsdecode(mount.path)))}"
            yield Finding("mounts", Verdict.FAIL, f"{name}: {trouble}", remedy)


def _mount_trouble(path: bytes) -> str | None:
    """Why a mount does not answer. Asked from a child: this process must not hang with it. By statvfs, which
    no kernel answers from its caches."""
    script = (
        "import os, sys\ntry: os.statvfs(os.fsencode(sys.argv[1]))\nexcept OSError as e: sys.exit(e.errno)"
    )
    child = subprocess.Popen(
        [sys.executable, "-S", "-E", "-c", script, os.fsdecode(path)],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    deadline = monotonic_ns() + int(_MOUNT_PATIENCE_SECONDS * 1e9)
    while child.poll() is None:
        if monotonic_ns() > deadline:
            child.kill()  # without waiting: a process that hangs in the kernel does not end
            return f"does not answer within {_MOUNT_PATIENCE_SECONDS:.0f} s"
        sleep_seconds(0.02)
    if child.returncode == 0:
        return None
    if child.returncode == errno.ENOTCONN:
        return "its engine is gone (transport endpoint is not connected)"
    return os.strerror(child.returncode) if child.returncode > 0 else "its check was killed"


def _existing(path: str) -> str:
    path = os.path.abspath(path)
    while not os.path.exists(path) and path != "/":
        path = os.path.dirname(path)
    return path


def _space(path: str) -> Finding:
    where = _existing(path)
    try:
        found = os.statvfs(where)
    except OSError as error:
        return Finding("free space", Verdict.FAIL, f"{shown(where)}: {error.strerror}")
    free = found.f_bavail * found.f_frsize
    detail = f"{format_bytes(free)} of {format_bytes(found.f_blocks * found.f_frsize)} at {shown(where)}"
    if free < _FREE_BYTES_MIN:
        return Finding("free space", Verdict.FAIL, detail, "free some space, or make the volume elsewhere")
    if free < _FREE_BYTES_COMFORTABLE:
        return Finding("free space", Verdict.WARN, detail, "imports and checkpoints will soon fill this disk")
    if found.f_files and found.f_favail < 10_000:
        return Finding("free space", Verdict.WARN, f"{detail}, but few inodes are left", "free some files")
    return Finding("free space", Verdict.OK, detail)


def _file_system(path: str) -> Finding:
    kind = file_system_of(_existing(path))
    if kind == "unknown":
        return Finding("file system", Verdict.WARN, "not known: /proc/self/mounts does not name it")
    if kind.split(".")[-1] in _NETWORK_FILE_SYSTEMS or kind in ("fuse.sshfs", "fuse.s3fs", "fuse.juicefs"):
        return Finding(
            "file system",
            Verdict.WARN,
            f"{kind}: a network file system",
            "keep a volume on a local disk: locks of network file systems do not hold between machines",
        )
    return Finding("file system", Verdict.OK, kind)


def _volume(volume: str) -> Iterator[Finding]:
    import json

    name = shown(volume)
    marker = os.path.join(volume, "HEADRACE")
    if not os.path.exists(volume):
        remedy = f"headrace create {printable(shlex.quote(volume))}"
        yield Finding("volume", Verdict.FAIL, f"{name} is not there", remedy)
        return
    if not os.path.isdir(volume):
        yield Finding("volume", Verdict.FAIL, f"{name} is not a folder", "name the volume's folder")
        return
    try:
        with open(marker, encoding="utf-8") as file:
            said = json.load(file)
        number = int(said["format"])
    except FileNotFoundError:
        yield Finding(
            "volume", Verdict.FAIL, f"{name} is a folder but not a volume", "headrace create makes one"
        )
        return
    except PermissionError:
        yield Finding("volume", Verdict.FAIL, f"{name} belongs to another user", "ask its owner, or use root")
        return
    except (OSError, ValueError, KeyError, TypeError) as error:
        yield Finding(
            "volume", Verdict.FAIL, f"{shown(marker)} is damaged: {error}", "restore it from a copy"
        )
        return
    if number > VOLUME_FORMAT:
        yield Finding(
            "volume",
            Verdict.FAIL,
            f"{name} has format {number}; this release reads up to {VOLUME_FORMAT}",
            "upgrade headrace",
        )
        return
    if not os.access(volume, os.W_OK):
        yield Finding("volume", Verdict.FAIL, f"{name} is read-only for you", "remount or chmod it writable")
        return
    yield Finding("volume", Verdict.OK, f"{name}, format {number}")
