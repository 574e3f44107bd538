"""Every error that Headrace raises, told apart by what the caller must do.

The engine answers (kind, errno, message); `HeadraceError.of` makes the exception of it. The same tree stands
in `headrace_base::error` (Rust); the kinds' names travel on the wire.

All of them are `OSError`s: Headrace is a file system, and whoever guards file access with `except OSError`
guards it here too. Where a builtin says the same, the class is also that:

    kind         class          also                  what the caller may do
    invalid      Invalid        ValueError            fix the call
      EISDIR       IsADirectory   IsADirectoryError
      ENOTDIR      NotADirectory  NotADirectoryError
    not_found    NotFound       FileNotFoundError     the thing named is not there (also ESTALE, ENODATA)
    conflict     Conflict       -                     the state forbids it (ENOTEMPTY, EBUSY): look again
      EEXIST       AlreadyExists  FileExistsError
    unavailable  Unavailable    ConnectionError       try again later; the next call connects anew
    full         Full           -                     free space, quota or memory (ENOSPC, EDQUOT, EMFILE)
    corrupt      Corrupt        -                     stored bytes are not what was written (EIO): stop
    permission   Permission     PermissionError       the caller may not do this (also EROFS)
    internal     Internal       -                     a fault of ours (EIO): report it
"""

from __future__ import annotations

import errno as numbers
from typing import Any, ClassVar


class HeadraceError(OSError):
    """Base of all errors of this package.

    `str()` is the message alone; it names the thing, the value and the way out. `kind` is the wire's word,
    `errno` the Linux error number that the mount would answer for the same mistake.
    Pickles whole, so that a worker's error reaches its parent unchanged.

    >>> error = HeadraceError.of("not_found", 2, "/a/b is not there")
    >>> isinstance(error, FileNotFoundError), error.errno, str(error)
    (True, 2, '/a/b is not there')
    """

    kind: ClassVar[str] = "internal"
    errno_default: ClassVar[int] = numbers.EIO

    def __init__(self, message: str = "", errno: int | None = None) -> None:
        # One positional argument is enough: torch rebuilds a worker's exception as type(message).
        super().__init__(self.errno_default if errno is None else errno, message)
        self.message = message

    def __str__(self) -> str:
        return self.message

    def __reduce__(self) -> tuple[Any, ...]:
        # `__dict__` carries notes (add_note) and the message.
        return (type(self), (self.message, self.errno), self.__dict__)

    @staticmethod
    def of(kind: str, errno: int, message: str) -> HeadraceError:
        """The error that an engine named. An unknown kind (of a newer engine) becomes `Internal`."""
        by_number = _BY_KIND_AND_ERRNO.get((kind, errno))
        return (by_number or _BY_KIND.get(kind, Internal))(message, errno or None)


class Invalid(HeadraceError, ValueError):
    """The call cannot be right: fix it."""

    kind = "invalid"
    errno_default = numbers.EINVAL


class IsADirectory(Invalid, IsADirectoryError):
    """A file was needed and a directory is there."""

    errno_default = numbers.EISDIR


class NotADirectory(Invalid, NotADirectoryError):
    """A directory was needed and something else is there."""

    errno_default = numbers.ENOTDIR


class NotFound(HeadraceError, FileNotFoundError):
    """The thing named is not there."""

    kind = "not_found"
    errno_default = numbers.ENOENT


class Conflict(HeadraceError):
    """The state changed or forbids it: re-read and decide again."""

    kind = "conflict"
    errno_default = numbers.EBUSY


class AlreadyExists(Conflict, FileExistsError):
    """The name is taken."""

    errno_default = numbers.EEXIST


class Unavailable(HeadraceError, ConnectionError):
    """No engine answers, or it ended in mid-call: what the call did is unknown, reads may be repeated."""

    kind = "unavailable"
    errno_default = numbers.EAGAIN


class Full(HeadraceError):
    """Space, a quota or the memory budget is used up; the message says which."""

    kind = "full"
    errno_default = numbers.ENOSPC


class Corrupt(HeadraceError):
    """Stored bytes are not what was written; the message names segment and offset. Never retried by us."""

    kind = "corrupt"
    errno_default = numbers.EIO


class Permission(HeadraceError, PermissionError):
    """The caller may not do this."""

    kind = "permission"
    errno_default = numbers.EACCES


class Internal(HeadraceError):
    """A fault of Headrace: please report it with the message."""


_BY_KIND: dict[str, type[HeadraceError]] = {
    error.kind: error
    for error in (Invalid, NotFound, Conflict, Unavailable, Full, Corrupt, Permission, Internal)
}

_BY_KIND_AND_ERRNO: dict[tuple[str, int], type[HeadraceError]] = {
    (error.kind, error.errno_default): error for error in (IsADirectory, NotADirectory, AlreadyExists)
}
