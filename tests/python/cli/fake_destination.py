"""A volume in memory, for the importer's tests: refuses what the engine refuses, remembers what was asked."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.control.importer import Existing, Refused
from headrace.control.source import Entry


@dataclass
class Node:
    kind: str
    mode: int
    uid: int | None
    gid: int | None
    mtime_ns: int | None
    ino: int
    data: bytearray = field(default_factory=bytearray)
    target: bytes | None = None
    rdev: int = 0
    # Byte ranges that were written, to see holes.
    written: list[tuple[int, int]] = field(default_factory=list)


class FakeDestination:
    def __init__(self) -> None:
        self.nodes: dict[bytes, Node] = {b"/": Node("directory", 0o755, 0, 0, 0, 1)}
        self.log: list[str] = []
        self.refuse: set[bytes] = set()
        self.on_put: Callable[[list[bytes]], None] = lambda paths: None
        self._ino = 1

    # What tests look at.

    def tree(self, root: bytes) -> dict[bytes, Node]:
        prefix = root.rstrip(b"/") + b"/"
        return {path[len(prefix) :]: node for path, node in self.nodes.items() if path.startswith(prefix)}

    # The Destination protocol.

    def stat(self, path: bytes) -> Existing | None:
        self.log.append("stat")
        node = self.nodes.get(path)
        return None if node is None else self._existing(node)

    def listing(self, path: bytes) -> dict[bytes, Existing]:
        self.log.append("list")
        prefix = path.rstrip(b"/") + b"/"
        if self._node(path or b"/").kind != "directory":
            raise Refused("not a directory")
        return {
            name[len(prefix) :]: self._existing(node)
            for name, node in list(self.nodes.items())
            if name.startswith(prefix) and len(name) > len(prefix) and b"/" not in name[len(prefix) :]
        }

    def put(self, entries: Sequence[tuple[bytes, Entry]], payload: Sequence[bytes], owners: bool) -> None:
        self.log.append(f"put {len(entries)}")
        self.on_put([path for path, _ in entries])
        rest = iter(payload)
        for path, entry in entries:
            data = next(rest) if entry.kind == "file" and not entry.hard_link else b""
            self._put_one(path, entry, data, owners)
        assert next(rest, None) is None, "payload that belongs to no entry"

    def _put_one(self, path: bytes, entry: Entry, data: bytes, owners: bool) -> None:
        if path in self.refuse:
            raise Refused("refused by the test")
        self._parent_of(path)
        there = self.nodes.get(path)
        if there is not None and (there.kind == "directory") != (entry.kind == "directory"):
            raise Refused(f"a {there.kind} is there")
        if there is not None and there.kind == "directory":
            return
        if entry.hard_link:
            assert entry.target is not None
            if self._node(entry.target).kind == "directory":
                raise Refused("hard link to a directory")
            self.nodes[path] = self._node(entry.target)
            return
        assert len(data) == entry.size, (path, len(data), entry.size)
        self._ino += 1
        owner = (entry.uid, entry.gid) if owners else (1000, 1000)
        node = Node(entry.kind, entry.mode, *owner, entry.mtime_ns, self._ino, bytearray(data), entry.target)
        node.rdev = entry.rdev
        self.nodes[path] = node
        self._parent_of(path).mtime_ns = -1

    def make_directories(self, path: bytes) -> None:
        at = b""
        for part in path.strip(b"/").split(b"/"):
            at += b"/" + part
            if at not in self.nodes:
                self._ino += 1
                self.nodes[at] = Node("directory", 0o755, 0, 0, -1, self._ino)

    def set_attributes(self, items: Sequence[tuple[bytes, Entry]], owners: bool) -> list[tuple[bytes, str]]:
        for path, entry in items:
            node = self._node(path)
            node.mode, node.mtime_ns = entry.mode, entry.mtime_ns
            if owners:
                node.uid, node.gid = entry.uid, entry.gid
        return []

    def open_new(self, path: bytes) -> FakeHandle:
        self._parent_of(path)
        self._ino += 1
        self.nodes[path] = Node("file", 0o600, 0, 0, -1, self._ino)
        return FakeHandle(self.nodes[path])

    def rename(self, source: bytes, destination: bytes) -> None:
        there = self.nodes.get(destination)
        if there is not None and there.kind == "directory":
            raise Refused("is a directory")
        self.nodes[destination] = self.nodes.pop(source)

    def unlink(self, path: bytes) -> None:
        if self._node(path).kind == "directory":
            raise Refused("is a directory")
        del self.nodes[path]

    def remove_directory(self, path: bytes) -> None:
        if self.tree(path):
            raise Refused("is not empty")
        del self.nodes[path]

    def sync(self) -> None:
        self.log.append("sync")

    def _node(self, path: bytes) -> Node:
        try:
            return self.nodes[path]
        except KeyError:
            raise Refused(f"{path!r} is not there") from None

    def _parent_of(self, path: bytes) -> Node:
        parent = self._node(path.rpartition(b"/")[0] or b"/")
        if parent.kind != "directory":
            raise Refused("parent is not a directory")
        return parent

    @staticmethod
    def _existing(node: Node) -> Existing:
        uid, gid, mtime_ns = node.uid or 0, node.gid or 0, node.mtime_ns or 0
        return Existing(node.kind, len(node.data), node.mode, uid, gid, mtime_ns, node.rdev, node.ino)


class FakeHandle:
    def __init__(self, node: Node) -> None:
        self._node = node

    def write_at(self, offset: int, data: bytes) -> None:
        missing = offset - len(self._node.data)
        if missing > 0:
            self._node.data.extend(bytes(missing))
        self._node.data[offset : offset + len(data)] = data
        self._node.written.append((offset, len(data)))

    def truncate(self, size: int) -> None:
        self._node.data.extend(bytes(max(0, size - len(self._node.data))))
        del self._node.data[size:]

    def close(self) -> None:
        pass
