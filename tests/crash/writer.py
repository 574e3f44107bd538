"""A program that writes to a volume until it is told to stop or its engine dies, and keeps a journal.

    python writer.py ROAD PLACE JOURNAL SEED STEPS     ROAD: mount (PLACE: a mounted folder) or api (a volume)

The journal lies on the local disk. A line {"intend": step, ...} is written before a step, {"done": step}
when the file system has acknowledged it as durable. Whoever reads it knows what must be there: every step
that is done, and perhaps the one that was intended last. Contents are made from (seed, step), so that the
journal stays small. What each step promises:

    new       write a new file, fsync it                      the file with its content
    append    append to a file, fsync it                      old content + new
    overwrite write in the middle of a file, fsync it         old content with the new in it
    replace   write beside, fsync, rename over, fsync folder  the new content
    remove    unlink, fsync folder                            no file
    large     17 MiB in one file, fsync it                    the file with its content (a file segment)
"""

from __future__ import annotations

import json
import os
import random
import sys
from typing import Any

import headrace

LARGE_BYTES = 17 << 20
# Where the api writes; the mount road is given this folder.
FOLDER = "/work/"


def content_of(seed: int, step: int, size: int) -> bytes:
    unit = random.Random(seed * 1_000_003 + step).randbytes(min(size, 4093)) or b""
    return (unit * (size // max(1, len(unit)) + 1))[:size]


def plan(seed: int, steps: int) -> list[dict[str, Any]]:
    """The steps, with sizes and offsets; `size` of the file that is changed is known from the ones before."""
    draw = random.Random(seed)
    sizes: dict[str, int] = {}
    planned = []
    for step in range(steps):
        kind = draw.choices(["new", "append", "overwrite", "replace", "remove"], weights=[8, 4, 4, 4, 2])[0]
        if kind != "new" and not sizes:
            kind = "new"
        if step and step % 25 == 0:
            kind = "large"
        size = LARGE_BYTES if kind == "large" else draw.choice([0, 10, 700, 2048, 10_240, 70_000, 300_000])
        name = f"{kind}-{step}" if kind in ("new", "large") else draw.choice(sorted(sizes))
        what: dict[str, Any] = {"step": step, "kind": kind, "name": name, "size": size, "offset": 0}
        if kind == "append":
            what["offset"] = sizes[name]
            sizes[name] += size
        elif kind == "overwrite":
            what["offset"] = draw.randrange(sizes[name] + 1)
            sizes[name] = max(sizes[name], what["offset"] + size)
        elif kind == "remove":
            del sizes[name]
        else:
            sizes[name] = size
        planned.append(what)
    return planned


class ByMount:
    def __init__(self, place: str) -> None:
        self._folder = place

    def _at(self, name: str) -> str:
        return os.path.join(self._folder, name)

    def write(self, name: str, offset: int, data: bytes, new: bool) -> None:
        fd = os.open(self._at(name), os.O_WRONLY | (os.O_CREAT | os.O_EXCL if new else 0), 0o644)
        try:
            view = memoryview(data)
            while view:
                written = os.pwrite(fd, view, offset)
                view, offset = view[written:], offset + written
            os.fsync(fd)
        finally:
            os.close(fd)

    def replace(self, name: str, data: bytes) -> None:
        self.write(name + ".tmp", 0, data, True)
        os.rename(self._at(name + ".tmp"), self._at(name))
        self._sync_folder()

    def remove(self, name: str) -> None:
        os.unlink(self._at(name))
        self._sync_folder()

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY | os.O_DIRECTORY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


class ByApi:
    def __init__(self, place: str) -> None:
        self._volume = headrace.connect(place, start=False)

    def write(self, name: str, offset: int, data: bytes, new: bool) -> None:
        with self._volume.open(FOLDER + name, "xb" if new else "r+b", buffering=0) as file:
            file.seek(offset)
            view = memoryview(data)
            while view:
                view = view[file.write(view) :]
            file.sync()  # type: ignore[attr-defined]  # VolumeFile, as buffering=0 gives it

    def replace(self, name: str, data: bytes) -> None:
        self._volume.write_bytes(FOLDER + name, data, durable=True)

    def remove(self, name: str) -> None:
        self._volume.remove(FOLDER + name)
        self._volume.sync()


def main() -> int:
    road, place, journal_path, seed, steps = sys.argv[1:]
    journal = os.open(journal_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def note(what: dict[str, Any]) -> None:
        os.write(journal, json.dumps(what).encode() + b"\n")

    try:
        actor = ByMount(place) if road == "mount" else ByApi(place)
        for what in plan(int(seed), int(steps)):
            note({"intend": what["step"]})
            data = content_of(int(seed), what["step"], what["size"])
            if what["kind"] == "remove":
                actor.remove(what["name"])
            elif what["kind"] == "replace":
                actor.replace(what["name"], data)
            else:
                actor.write(what["name"], what["offset"], data, what["kind"] in ("new", "large"))
            note({"done": what["step"]})
    except OSError as error:
        note({"error": str(error), "errno": error.errno})
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
