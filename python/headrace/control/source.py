"""What an import reads from: the entries of a tree, whichever form the tree comes in.

A source yields `Entry` values, parents before what lies in them, and never the root itself twice. The
importer decides which entries it needs and asks for their bytes: at once for a *sequential* source (a tar
cannot be read backwards), or later and from another thread for one that is not (a folder).

What goes wrong with one entry is a `SourceProblem`: it is noted and the import goes on. What ends the
source itself (a damaged archive) is `SourceDamaged`: what came before it stays imported.
Next: folder_source.py, tar_source.py, then importer.py.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

# Files above this are streamed to a temporary name instead of riding in a batch. The engine gives a file
# segment of its own to 16 MiB or more (design.md, section 4), so both sides change roads at one size.
STREAMED_BYTES_MIN = 16 << 20


class SourceProblem(Exception):
    """One entry that cannot be imported, and why. The import goes on without it."""


class SourceRefused(SourceProblem):
    """An entry that is never imported, however often it is tried."""


class SourceChanged(SourceProblem):
    """The file changed while it was read: reading it again may help."""


class SourceDamaged(Exception):
    """The source ends here in damage; entries that were yielded before are good."""


@dataclass(slots=True)
class Entry:
    """One name of the tree. `path` is relative to the tree's root, b"" for the root, never with `..`."""

    path: bytes
    kind: str
    mode: int
    uid: int
    gid: int
    # None: whatever it becomes (a directory that an archive does not name).
    mtime_ns: int | None
    size: int = 0
    # Text of a symbolic link, or for a hard link the path (relative as above) of the file linked to.
    target: bytes | None = None
    hard_link: bool = False
    rdev: int = 0
    # Where the source finds the bytes again: a folder's absolute path.
    origin: bytes = b""


@dataclass(slots=True)
class Extras:
    """What a source left out without an error, for the summary."""

    # Named one by one: they were asked for and are not there afterwards.
    problems: list[tuple[bytes, str]] = field(default_factory=list)
    # How many of the problems another run cannot mend.
    refused: int = 0
    # Said once each.
    notes: list[str] = field(default_factory=list)

    def problem(self, path: bytes, why: str) -> None:
        self.problems.append((path, why))

    def refuse(self, path: bytes, why: str) -> None:
        """A problem that another run cannot mend."""
        self.problem(path, why)
        self.refused += 1

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)


# (offset, bytes) runs of a file in rising order; what lies between them is a hole.
Runs = Iterator[tuple[int, bytes]]


class Source(Protocol):
    """A tree to import."""

    extras: Extras
    # The bytes of an entry must be asked for before the next entry is taken.
    sequential: bool

    def entries(self) -> Iterator[Entry]:
        """Entries in the order in which they are to be stored. Raises SourceDamaged."""

    def load(self, entry: Entry) -> bytes:
        """All bytes of a file up to STREAMED_BYTES_MIN; may set the entry's size, mode and mtime to what
        the file had when it was read. Raises SourceProblem, SourceDamaged."""

    def stream(self, entry: Entry) -> Runs:
        """The bytes of a larger file, holes left out. Raises SourceProblem if the file changed while it was
        read, at the latest at the end; SourceDamaged."""

    def position(self) -> tuple[int, int]:
        """(done, total) in bytes of the source as it lies on disk; total 0 if it does not know."""

    def count(self, tell: Callable[[int, int], bool]) -> None:
        """Counts files and bytes ahead of the import for its progress, where that is cheap: calls `tell`
        with the totals so far and stops when it gives False."""

    def close(self) -> None: ...
