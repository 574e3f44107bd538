"""What goes to the terminal: names that may hold any bytes, tables, JSON, progress.

A terminal gets colour and a progress bar; a pipe or a file gets plain lines without carriage returns.
Names are shown escaped, so that no file name can move the cursor or break a line: control characters,
backslashes and bytes that are not UTF-8 as backslash sequences. JSON has the name as text and, where the
name is not UTF-8, its bytes as base64 beside it (`path_b64`).
"""

from __future__ import annotations

import base64
import json
import os
import sys
from collections.abc import Sequence
from typing import Any

import click

from headrace.units import format_count

_ESCAPES = {"\n": "\\n", "\t": "\\t", "\r": "\\r"}


def shown(name: bytes | str) -> str:
    """A name made safe to print.

    >>> shown(b"a\\xff\\n")
    'a\\\\xff\\\\n'
    """
    text = os.fsdecode(name) if isinstance(name, bytes) else name
    return printable(text.replace("\\", "\\\\"))


def printable(text: str) -> str:
    """A sentence made safe to print: control characters and bytes that are not UTF-8 escaped."""
    return text if text.isprintable() else "".join(_escaped(character) for character in text)


def _escaped(character: str) -> str:
    if character in _ESCAPES:
        return _ESCAPES[character]
    if "\udc80" <= character <= "\udcff":  # a byte that is not UTF-8 (surrogateescape)
        return f"\\x{ord(character) - 0xDC00:02x}"
    if character.isprintable():
        return character
    return "".join(f"\\x{byte:02x}" for byte in character.encode("utf-8", "surrogatepass"))


def json_name(key: str, name: bytes) -> dict[str, str]:
    """The fields that stand for a name in JSON: `key`, and `key_b64` if it is not UTF-8."""
    try:
        return {key: name.decode()}
    except UnicodeDecodeError:
        return {key: shown(name), f"{key}_b64": base64.b64encode(name).decode()}


def counted(count: int, one: str, many: str) -> str:
    """A count with its noun.

    >>> counted(1, "entry", "entries"), counted(1200, "entry", "entries")
    ('1 entry', '1,200 entries')
    """
    return f"{format_count(count)} {one if count == 1 else many}"


def print_json(value: Any) -> None:
    click.echo(json.dumps(value, ensure_ascii=False, indent=2))


def warn(text: str) -> None:
    """One line on stderr."""
    click.echo(f"headrace: {printable(text)}", err=True)


def stdout_is_terminal() -> bool:
    return sys.stdout.isatty()


def stderr_is_terminal() -> bool:
    return sys.stderr.isatty()


def print_table(headings: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1) -> None:
    """Columns aligned; the first `left` ones to the left, the others to the right."""
    if stdout_is_terminal():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
        for index, heading in enumerate(headings):
            table.add_column(Text(heading), justify="left" if index < left else "right", overflow="fold")
        for row in rows:
            table.add_row(*(Text(cell) for cell in row))
        Console().print(table)
        return
    widths = [max(len(line[index]) for line in (headings, *rows)) for index in range(len(headings))]
    for line in (headings, *rows):
        cells = [
            cell.ljust(width) if index < left else cell.rjust(width)
            for index, (cell, width) in enumerate(zip(line, widths, strict=True))
        ]
        click.echo("  ".join(cells).rstrip())
