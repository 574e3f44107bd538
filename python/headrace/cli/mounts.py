"""Mounts of Headrace as the kernel lists them, and how to end one, also when its engine is gone."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import subprocess
from typing import NamedTuple

from headrace.client.connection import of_os_error
from headrace.client.volume import connect
from headrace.errors import Conflict, HeadraceError, NotFound

_HELPER_SECONDS_MAX = 30
# What a process has of a mount besides its open files.
_PLACES_OF_PROCESS = ("cwd", "root", "exe")


class MountPoint(NamedTuple):
    """One line of /proc/self/mounts."""

    device: bytes
    path: bytes
    kind: bytes
    options: tuple[bytes, ...] = ()

    @property
    def volume(self) -> str:
        """The volume's folder, of a mount of ours: its device reads headrace:/folder."""
        return os.fsdecode(self.device.removeprefix(b"headrace:"))


def mount_points() -> list[MountPoint]:
    """What is mounted, in the order of mounting; empty where /proc is missing."""

    def unescaped(field: bytes) -> bytes:
        return re.sub(rb"\\([0-7]{3})", lambda match: bytes([int(match[1], 8)]), field)

    try:
        with open("/proc/self/mounts", "rb") as file:
            fields = [line.split(b" ") for line in file]
    except OSError:
        return []
    return [
        MountPoint(unescaped(line[0]), unescaped(line[1]), line[2], tuple(line[3].split(b",")))
        for line in fields
        if len(line) > 3
    ]


def headrace_mounts() -> list[MountPoint]:
    """Those whose type says that they are ours (fuse.headrace)."""
    return [mount for mount in mount_points() if mount.kind == b"fuse.headrace"]


def mount_at(path: bytes) -> MountPoint | None:
    """Our mount exactly on `path` (absolute), the topmost if there are several."""
    return next((mount for mount in reversed(headrace_mounts()) if mount.path == path), None)


def mount_above(path: str) -> MountPoint | None:
    """The mount that `path` lies in; None where /proc does not tell."""
    where = os.fsencode(os.path.realpath(path))
    above = [
        mount
        for mount in mount_points()
        if where == mount.path or where.startswith(mount.path.rstrip(b"/") + b"/")
    ]
    # Of mounts on one path the last one is on top.
    return max(reversed(above), key=lambda mount: len(mount.path), default=None)


def mount_holding(path: str) -> MountPoint | None:
    """Our mount that `path` lies in, if it lies in one."""
    mount = mount_above(path)
    return mount if mount is not None and mount.kind == b"fuse.headrace" else None


def file_system_of(path: str) -> str:
    """The type of the file system that `path` lies on, such as ext4."""
    mount = mount_above(path)
    return "unknown" if mount is None else mount.kind.decode(errors="replace")


def mounts_of(volume: str) -> list[str]:
    """Where the volume in the folder `volume` is mounted."""
    folder = os.path.realpath(volume)
    return [
        os.fsdecode(mount.path) for mount in headrace_mounts() if os.path.realpath(mount.volume) == folder
    ]


class User(NamedTuple):
    """A process that stands in a mount or has something of it open."""

    mountpoint: str
    pid: int
    name: str


def users_of(mountpoints: list[str]) -> list[User]:
    """Who uses the mounts, as far as this user may see; without this process. Looks at links in /proc alone,
    so that a mount that does not answer cannot block it."""
    found: list[User] = []
    try:
        pids = sorted(int(name) for name in os.listdir("/proc") if name.isdigit())
    except OSError:
        return found
    for pid in pids if mountpoints else ():
        if pid == os.getpid():
            continue
        links = _links_of(pid)
        found += [
            User(mountpoint, pid, _name_of(pid))
            for mountpoint in mountpoints
            if any(link == mountpoint or link.startswith(mountpoint.rstrip("/") + "/") for link in links)
        ]
    return found


def _links_of(pid: int) -> list[str]:
    paths = [f"/proc/{pid}/{place}" for place in _PLACES_OF_PROCESS]
    with contextlib.suppress(OSError):
        paths += [f"/proc/{pid}/fd/{number}" for number in os.listdir(f"/proc/{pid}/fd")]
    links = []
    for path in paths:
        with contextlib.suppress(OSError):
            links.append(os.readlink(path))
    return links


def _name_of(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/comm", "rb") as file:
            return os.fsdecode(file.read().rstrip(b"\n"))
    except OSError:
        return "a process"


def end_mount(mountpoint: str) -> None:
    """Ends the mount on `mountpoint`. The engine does it if it answers; else the kernel is asked directly.

    NotFound: no mount of ours is there. Conflict: files on it are open.
    """
    # Not realpath: it would look into a mount that may not answer.
    absolute = os.path.join(os.path.realpath(os.path.dirname(os.path.abspath(mountpoint))), "")
    path = os.fsencode(absolute + os.path.basename(os.path.abspath(mountpoint)))
    mount = mount_at(path)
    if mount is None:
        raise NotFound(f"no volume is mounted on {mountpoint}: see /proc/self/mounts")
    if os.path.isdir(mount.volume):
        try:
            with connect(mount.volume, start=False) as opened:
                opened.unmount(os.fsdecode(path))
            return
        except Conflict:
            raise
        except HeadraceError:
            pass  # no engine, or not this one's mount any more: what is left is the kernel's
    _unmount_by_kernel(os.fsdecode(path))


def _unmount_by_kernel(path: str) -> None:
    helper = (
        ["umount", path] if os.geteuid() == 0 else [shutil.which("fusermount3") or "fusermount", "-u", path]
    )
    try:
        done = subprocess.run(
            helper, capture_output=True, text=True, timeout=_HELPER_SECONDS_MAX, check=False, cwd="/"
        )
    except OSError as error:
        raise of_os_error(f"run {helper[0]}", error) from error
    except subprocess.TimeoutExpired as error:
        raise Conflict(f"{helper[0]} {path} did not end within {_HELPER_SECONDS_MAX} s") from error
    if done.returncode != 0:
        raise Conflict(done.stderr.strip() or f"{helper[0]} {path} failed with status {done.returncode}")
