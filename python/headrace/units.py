"""Sizes, counts and durations, from text and to text.

Bytes are binary units (KiB = 1,024); "10k", "10K", "10KB" and "10KiB" all mean 10,240, since a person who
types a size for a file system means powers of two. Rates and counts are decimal.
"""

from __future__ import annotations

import re

from headrace.errors import Invalid

KIB = 1 << 10
MIB = 1 << 20
GIB = 1 << 30

_SIZE = re.compile(r"\s*([0-9]+(?:\.[0-9]+)?)\s*(?:([kmgtpe])(?:i?b)?|b)?\s*", re.IGNORECASE)
_POWERS = {"": 0, "k": 1, "m": 2, "g": 3, "t": 4, "p": 5, "e": 6}


def parse_bytes(text: str | int) -> int:
    """The number of bytes that `text` says. Raises `Invalid` for anything else.

    >>> parse_bytes("10KiB"), parse_bytes("2g"), parse_bytes("1.5 MiB"), parse_bytes(7)
    (10240, 2147483648, 1572864, 7)
    """
    if isinstance(text, int):
        if text < 0:
            raise Invalid(f"a size cannot be negative: {text}")
        return text
    match = _SIZE.fullmatch(text)
    if match is None:
        raise Invalid(f"{text!r} is not a size: write a number with B, KiB, MiB, GiB or TiB, like 10KiB")
    number, unit = match.group(1), (match.group(2) or "").lower()
    scale: int = 1024 ** _POWERS[unit]
    return int(number) * scale if "." not in number else int(float(number) * scale)


def format_bytes(count: float) -> str:
    """`count` bytes with three significant digits at most.

    >>> format_bytes(0), format_bytes(1023), format_bytes(10240), format_bytes(3 * GIB + GIB // 2)
    ('0 B', '1023 B', '10.0 KiB', '3.5 GiB')
    """
    value = float(count)
    if abs(value) < 1024:
        return f"{value:.0f} B"
    units = iter(("KiB", "MiB", "GiB", "TiB", "PiB", "EiB"))
    unit = "B"
    while abs(value) >= 1023.5 and unit != "EiB":
        value, unit = value / 1024, next(units)
    return f"{value:.0f} {unit}" if abs(value) >= 100 else f"{value:.1f} {unit}"


def format_count(count: float) -> str:
    """A count with thousands separated.

    >>> format_count(1234567)
    '1,234,567'
    """
    return f"{count:,.0f}"


def format_seconds(seconds: float) -> str:
    """A duration in the unit that a person would choose.

    >>> format_seconds(0.0000042), format_seconds(0.25), format_seconds(42), format_seconds(3725)
    ('4.2 us', '250 ms', '42.0 s', '1:02:05')
    """
    if seconds < 0.001:
        return f"{seconds * 1e6:.1f} us"
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 60:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
