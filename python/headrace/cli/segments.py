"""`python -m headrace.cli.segments`: what lies in segments, and the files in them, without any engine.

It reads segment files as they lie, a volume's or a bucket's that were copied here; it starts nothing and
changes nothing of them. A segment that is damaged is named on stderr and the others are read.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator

import click

from headrace.cli.exit_codes import ExitCode
from headrace.cli.text import counted, json_name, shown, warn
from headrace.control.extraction import Reader, extract, find_segments, open_segment
from headrace.errors import Corrupt
from headrace.model.segment import Record
from headrace.units import format_bytes

HEADINGS = "# segment offset length inode mode uid gid mtime file_offset file_bytes path"


@click.command()
@click.argument("paths", nargs=-1, required=True, metavar="PATH...")
@click.option("--extract", "folder", metavar="DIR", help="Write the files into DIR, missing or empty.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs: one object per line.")
def segments(paths: tuple[str, ...], folder: str | None, as_json: bool) -> int:
    """List the records in segments, or get the files in them back.

    PATH is ULID.pack, ULID.file (its ULID.idx beside it) or a folder that holds such, like VOLUME/segments;
    all of one volume. Exit code 6 if something is damaged: everything else is listed or extracted.

    \b
    Example:
      python -m headrace.cli.segments vol/segments --extract rescued
    """
    damages = _Damages()
    readers = list(_open(find_segments(paths), damages))
    if folder is None:
        _list(readers, damages, as_json)
    else:
        done = extract(readers, folder, warn)
        damages.count += done.damaged_files + done.unread_segments
        if as_json:
            fields = {"files": done.files, "bytes": done.file_bytes, "damaged_files": done.damaged_files}
            click.echo(json.dumps(fields))
        else:
            files = counted(done.files, "file", "files")
            click.echo(
                f"extracted {files}, {format_bytes(done.file_bytes)}, into {shown(folder)}; "
                f"{done.damaged_files} of them damaged"
            )
    for reader in readers:
        if not reader.closed:
            # As a crash leaves it: what is not whole was never acknowledged.
            why = "all of it is valid" if reader.damage is None else f"valid until: {reader.damage}"
            warn(f"segment {reader.segment} is open; {why}")
    return ExitCode.FAILURE if damages.count else ExitCode.OK


class _Damages:
    """Tells of damage and remembers that there was some."""

    def __init__(self) -> None:
        self.count = 0

    def tell(self, text: str) -> None:
        self.count += 1
        warn(text)

    def on_damage(self, damage: Corrupt) -> None:
        self.tell(str(damage))


def _open(paths: list[str], damages: _Damages) -> Iterator[Reader]:
    for path in paths:
        try:
            yield open_segment(path, damages.on_damage)
        except OSError as error:  # every error of ours is one too
            damages.tell(f"{path}: {error}")


def _list(readers: Iterable[Reader], damages: _Damages, as_json: bool) -> None:
    if not as_json:
        click.echo(HEADINGS)
    for reader in readers:
        try:
            for record in reader.records():
                click.echo(_json_line(record) if as_json else _line(record))
        except OSError as error:
            damages.tell(str(error))


def _line(record: Record) -> str:
    seconds, rest = divmod(record.mtime_ns, 1_000_000_000)
    return (
        f"{record.segment} {record.offset} {record.length} {record.ino} {record.mode:o} {record.uid} "
        f"{record.gid} {seconds}.{rest:09d} {record.file_offset} {record.file_bytes} {shown(record.path)}"
    )


def _json_line(record: Record) -> str:
    fields = {
        "segment": record.segment,
        "offset": record.offset,
        "length": record.length,
        "ino": record.ino,
        "mode": record.mode,
        "uid": record.uid,
        "gid": record.gid,
        "mtime_ns": record.mtime_ns,
        "file_offset": record.file_offset,
        "file_bytes": record.file_bytes,
        "crc32c": list(record.crcs),
        **json_name("path", record.path),
    }
    return json.dumps(fields, ensure_ascii=False)


if __name__ == "__main__":
    from headrace.cli.main import cli, main

    # The same errors, signals and exit codes as every command of `headrace` has.
    cli.add_command(segments)
    sys.argv.insert(1, "segments")
    main()
