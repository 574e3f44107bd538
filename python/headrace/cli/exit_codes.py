"""The exit codes of `headrace`: the one place that says what they mean. Stable: scripts rely on them."""

from __future__ import annotations

import enum

from headrace.errors import Conflict, HeadraceError, Invalid, NotFound, Permission, Unavailable


class ExitCode(enum.IntEnum):
    """What the process ends with."""

    OK = 0
    # 1 is what Python itself uses for a crash: never ours.
    BAD_ARGUMENTS = 2
    NOT_FOUND = 3
    PERMISSION = 4
    CONFLICT = 5
    FAILURE = 6
    UNAVAILABLE = 7
    INTERRUPTED = 8


# As `headrace --help` prints them.
HELP_TEXT = """\
\b
Exit codes:
  0  done
  2  bad arguments
  3  a volume, path or source was not found
  4  permission denied
  5  the state forbids it: not a volume, wrong format, busy, exists already
  6  failed: I/O error, no space, damaged data, or done in part (import names what is missing)
  7  the engine does not answer, or timed out: try again
  8  interrupted by Ctrl-C or SIGTERM
"""


def exit_code_of(error: BaseException) -> ExitCode:
    """The code for an error that ended a command."""
    if isinstance(error, KeyboardInterrupt):
        return ExitCode.INTERRUPTED
    if isinstance(error, (NotFound, FileNotFoundError)):
        return ExitCode.NOT_FOUND
    if isinstance(error, (Permission, PermissionError)):
        return ExitCode.PERMISSION
    if isinstance(error, Conflict):
        return ExitCode.CONFLICT
    if isinstance(error, (Unavailable, TimeoutError)):
        return ExitCode.UNAVAILABLE
    if isinstance(error, Invalid):
        return ExitCode.BAD_ARGUMENTS
    if isinstance(error, HeadraceError | OSError):
        return ExitCode.FAILURE
    return ExitCode.FAILURE
