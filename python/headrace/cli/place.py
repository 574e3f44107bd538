"""`VOLUME:/path`: how a place in a volume is written on the command line."""

from __future__ import annotations

import os
from typing import NamedTuple

from headrace.errors import Invalid


class Place(NamedTuple):
    """A path (bytes, absolute, normalised) in a volume."""

    volume: str
    path: bytes

    def __str__(self) -> str:
        return f"{self.volume}:{os.fsdecode(self.path)}"


def parse_place(text: str, *, bare_volume: bool = False) -> Place:
    """Splits at `:/`. Both sides may hold it too: the split is the last one whose left side exists, or the
    last of all. `vol:` means `vol:/`; with `bare_volume` a volume alone means its root as well.

    >>> parse_place("./vol:/data/train")
    Place(volume='./vol', path=b'/data/train')
    >>> parse_place("C:/vol:/data").volume
    'C:/vol'
    """
    splits = [at for at in range(len(text) - 1, 0, -1) if text.startswith(":/", at)]
    if not splits and len(text) > 1 and text.endswith(":") and not (bare_volume and os.path.isdir(text)):
        return Place(text[:-1], b"/")
    if bare_volume and (not splits or os.path.isdir(text)):
        return Place(text, b"/")
    if not splits:
        raise Invalid(f"{text!r} is not a place in a volume: write VOLUME:/path, as in ./vol:/data")
    at = next((at for at in splits if os.path.lexists(text[:at])), splits[0])
    volume, path = text[:at], os.fsencode(text[at + 1 :])
    parts = [part for part in path.split(b"/") if part not in (b"", b".")]
    if b".." in parts:
        raise Invalid(f"{text!r}: a path in a volume is written without '..'")
    return Place(volume, b"/" + b"/".join(parts))
