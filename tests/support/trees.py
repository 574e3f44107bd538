"""A tree of files as a value that can be compared: names, kinds, modes, links, contents, attributes."""

from __future__ import annotations

import hashlib
import os
import stat
from dataclasses import dataclass


@dataclass(frozen=True)
class Node:
    """What a name is. `first_name` is the first of its hard links, so that equal trees link alike."""

    kind: str
    mode: int
    links: int
    owner: tuple[int, int]
    size: int
    content: str
    attributes: tuple[tuple[str, bytes], ...]
    first_name: bytes
    mtime_ns: int | None


def tree_of(root: str | os.PathLike[str], *, times: bool = False) -> dict[bytes, Node]:
    """Every name below `root` (a path relative to it) and what it is; the root itself is b"".

    Listing and looking up must agree: an entry that cannot be looked at is an error.
    """
    top = os.fsencode(root)
    found: dict[bytes, Node] = {}
    first_names: dict[tuple[int, int], bytes] = {}
    waiting = [b""]
    while waiting:
        relative = waiting.pop()
        path = os.path.join(top, relative) if relative else top
        status = os.lstat(path)
        first = first_names.setdefault((status.st_dev, status.st_ino), relative)
        found[relative] = _node(path, status, first, times)
        if stat.S_ISDIR(status.st_mode):
            names = os.listdir(path)
            assert len(names) == len(set(names)), f"{path!r} lists a name twice: {names}"
            waiting += sorted((os.path.join(relative, name) for name in names), reverse=True)
    return found


def _node(path: bytes, status: os.stat_result, first: bytes, times: bool) -> Node:
    kind = stat.S_IFMT(status.st_mode)
    content, size = "", 0
    if stat.S_ISREG(kind):
        with open(path, "rb") as file:
            data = file.read()
        size = status.st_size
        assert len(data) == size, f"{path!r} has {size} bytes by stat and {len(data)} by reading"
        content = hashlib.blake2b(data, digest_size=16).hexdigest()
    elif stat.S_ISLNK(kind):
        content = repr(os.readlink(path))
    names = [] if stat.S_ISLNK(kind) else sorted(os.listxattr(path, follow_symlinks=False))
    attributes = [
        (name, os.getxattr(path, name, follow_symlinks=False)) for name in names if name.startswith("user.")
    ]
    return Node(
        {stat.S_IFREG: "file", stat.S_IFDIR: "directory", stat.S_IFLNK: "symlink"}.get(kind, oct(kind)),
        stat.S_IMODE(status.st_mode),
        status.st_nlink,
        (status.st_uid, status.st_gid),
        size,
        content,
        tuple(attributes),
        first,
        status.st_mtime_ns if times else None,
    )


def differences(expected: dict[bytes, Node], found: dict[bytes, Node]) -> list[str]:
    """What differs, in words; empty when the trees are equal."""
    said = []
    for name in sorted(expected.keys() | found.keys()):
        if name not in found:
            said.append(f"{name!r} is missing: {expected[name]}")
        elif name not in expected:
            said.append(f"{name!r} should not be there: {found[name]}")
        elif expected[name] != found[name]:
            said.append(f"{name!r} is {found[name]}, should be {expected[name]}")
    return said
