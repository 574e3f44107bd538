"""System calls that Python's `os` does not have."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from pathlib import Path

AT_FDCWD = -100
RENAME_NOREPLACE = 1
RENAME_EXCHANGE = 2

_libc = ctypes.CDLL(None, use_errno=True)


def _answer(result: int) -> None:
    if result != 0:
        number = ctypes.get_errno()
        raise OSError(number, os.strerror(number))


def renameat2(source: Path | bytes, target: Path | bytes, flags: int) -> None:
    """rename(2) with RENAME_NOREPLACE or RENAME_EXCHANGE."""
    _answer(_libc.renameat2(AT_FDCWD, os.fsencode(source), AT_FDCWD, os.fsencode(target), flags))


def fallocate(fd: int, mode: int, offset: int, length: int) -> None:
    """fallocate(2); mode 0 allocates and extends, 1 keeps the size, 3 punches a hole."""
    _answer(_libc.fallocate(fd, mode, ctypes.c_int64(offset), ctypes.c_int64(length)))


def syncfs(fd: int) -> None:
    _answer(_libc.syncfs(fd))


def aligned(length: int) -> mmap.mmap:
    """Memory that starts on a page, as O_DIRECT wants it."""
    return mmap.mmap(-1, length)


def errno_of(call: object, *arguments: object, **named: object) -> str:
    """ "OK" or the name of the errno that `call(*arguments)` ends with."""
    assert callable(call)
    try:
        call(*arguments, **named)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    return "OK"
