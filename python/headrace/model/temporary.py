"""Names under which large files are written before they get their own.

    .headrace-partial-PID-N-NAME     `Volume.write_bytes`
    .headrace-import-NUMBER-NAME     the importer

The last part is the name that is meant. Segments know only the path from the time of the write, so it is by
this that a rescue (here, and in the engine's rescue.rs) knows whose bytes they are. Where the whole would be
too long for a name, it goes without.
"""

from __future__ import annotations

import re

_NAME_BYTES_MAX = 255
_TEMPORARY = re.compile(rb"\.headrace-(?:partial-\d+|import)-\d+(?:-(.+))?", re.DOTALL)


def temporary_name(kind: bytes, name: bytes) -> bytes:
    """For a file that is to become `name`. kind: `import-NUMBER` or `partial-PID-N`.

    >>> temporary_name(b"import-12", b"a.bin")
    b'.headrace-import-12-a.bin'
    """
    whole = b".headrace-%s-%s" % (kind, name)
    return whole if len(whole) <= _NAME_BYTES_MAX else b".headrace-%s" % kind


def is_temporary(name: bytes) -> bool:
    return _TEMPORARY.fullmatch(name) is not None


def meant_path(path: bytes) -> bytes:
    """The path that is meant, where the last name is such a temporary one; else the path itself.

    >>> meant_path(b"data/.headrace-partial-77-0-a-1"), meant_path(b"data/b")
    (b'data/a-1', b'data/b')
    """
    folder, slash, name = path.rpartition(b"/")
    found = _TEMPORARY.fullmatch(name)
    return folder + slash + found[1] if found is not None and found[1] else path
