"""`headrace import`: the importer with a progress bar, and a summary that names what is missing."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING

import click

from headrace.cli.exit_codes import ExitCode
from headrace.cli.place import Place
from headrace.cli.text import counted, json_name, print_json, printable, shown, stderr_is_terminal, warn
from headrace.client.volume import Volume
from headrace.control.destination import VolumeDestination
from headrace.control.importer import Importer, ImportReport, Refused
from headrace.control.source import Source
from headrace.control.trees import open_source
from headrace.errors import Conflict, HeadraceError
from headrace.model.clock import monotonic_ns
from headrace.units import format_bytes, format_count, format_seconds

if TYPE_CHECKING:
    from rich.progress import Task

PROBLEMS_SHOWN = 20
_REFRESHES_PER_SECOND = 5
# A small file costs about as much time as this many bytes of a large one; for the time left, not for truth.
_BYTES_PER_FILE = 64 << 10


def run_import(source_path: str, place: Place, volume: Volume, replace: bool, as_json: bool) -> ExitCode:
    """Imports, shows progress on a terminal, prints the summary. OK, or FAILURE if anything is missing."""
    started_ns = monotonic_ns()
    source = open_source(
        source_path,
        volume_folder=volume.path,
        mountpoints=[mount.mountpoint for mount in volume.status().mounts],
        devices=os.geteuid() == 0,
    )
    destination = VolumeDestination(volume.path)
    importer = Importer(source, destination, place.path, owners=os.geteuid() == 0, replace=replace)
    try:
        with show_progress(source, importer.report, "import"):
            report = importer.run()
    except Refused as error:
        # Of the target itself. The engine's own error, where there is one, has the better kind.
        told = error.__cause__ if isinstance(error.__cause__, HeadraceError) else Conflict(str(error))
        raise _told_from_above(f"import into {place}", told) from error
    except HeadraceError as error:
        done = counted(importer.report.entries, "entry", "entries")
        raise _told_from_above(f"import stopped after {done}; run it again to go on", error) from error
    except KeyboardInterrupt as error:
        done = counted(importer.report.entries, "entry", "entries")
        raise KeyboardInterrupt(
            f"interrupted after {done}, which are in; run the same command again to go on"
        ) from error
    finally:
        source.close()
        destination.close()
    seconds = (monotonic_ns() - started_ns) / 1e9
    if as_json:
        print_json(report_fields(report, seconds))
    else:
        print_summary(report, seconds)
    return ExitCode.OK if report.complete else ExitCode.FAILURE


def _told_from_above(doing: str, error: HeadraceError) -> HeadraceError:
    """The same error with what was being done before its message."""
    return HeadraceError.of(error.kind, error.errno or 0, f"{doing}: {error.message}")


def print_summary(report: ImportReport, seconds: float) -> None:
    parts = [f"{counted(report.files, 'file', 'files')} ({format_bytes(report.file_bytes)})"]
    for count, one, many in (
        (report.directories, "directory", "directories"),
        (report.symlinks, "symbolic link", "symbolic links"),
        (report.hard_links, "hard link", "hard links"),
        (report.special, "special file", "special files"),
    ):
        if count:
            parts.append(counted(count, one, many))
    rate = f", {format_count(report.files / seconds)} files/s" if report.files and seconds > 0 else ""
    line = f"imported {', '.join(parts)} in {format_seconds(seconds)}{rate}"
    if report.replaced:
        line += f"; replaced {format_count(report.replaced)}"
    if report.skipped:
        line += f"; {counted(report.skipped, 'entry was', 'entries were')} there already"
    click.echo(line)
    if report.kept:
        many = counted(
            len(report.kept),
            "entry is newer in the volume and was",
            "entries are newer in the volume and were",
        )
        warn(f"note: {many} kept; --replace overwrites {'it' if len(report.kept) == 1 else 'them'}")
        _name_some(report.kept, "kept: ")
    for note in report.notes:
        warn(f"note: {note}")
    for path, why in report.problems[:PROBLEMS_SHOWN]:
        warn(f"not imported: {shown(path)}: {why}")
    if len(report.problems) > PROBLEMS_SHOWN:
        warn(f"... and {format_count(len(report.problems) - PROBLEMS_SHOWN)} more (all with --json)")
    if report.problems:
        missing = f"{counted(len(report.problems), 'entry was', 'entries were')} not imported"
        # What is refused is refused again: only the others are worth another run.
        retried = len(report.problems) - report.refused
        if retried and report.refused:
            again = f". Run the same command again to try {format_count(retried)} of them once more"
        elif retried:
            these = "it" if retried == 1 else "these"
            again = f". Run the same command again to try {these} once more"
        else:
            again = ""
        warn(f"{missing}; everything else is in{again}")
    if report.damage is not None:
        warn(f"{report.damage}; everything before it is in")


def _name_some(paths: list[bytes], before: str) -> None:
    for path in paths[:PROBLEMS_SHOWN]:
        warn(f"{before}{shown(path)}")
    if len(paths) > PROBLEMS_SHOWN:
        warn(f"... and {format_count(len(paths) - PROBLEMS_SHOWN)} more (all with --json)")


def report_fields(report: ImportReport, seconds: float) -> dict[str, object]:
    """The report as `--json` prints it."""
    return {
        "complete": report.complete,
        "files": report.files,
        "bytes": report.file_bytes,
        "directories": report.directories,
        "symlinks": report.symlinks,
        "hard_links": report.hard_links,
        "special": report.special,
        "skipped": report.skipped,
        "replaced": report.replaced,
        "kept": [json_name("path", path) for path in report.kept],
        "seconds": round(seconds, 3),
        "problems": [{**json_name("path", path), "reason": printable(why)} for path, why in report.problems],
        "notes": [printable(note) for note in report.notes],
        "damage": None if report.damage is None else printable(report.damage),
    }


class _Total:
    """What the pre-scan has counted so far."""

    def __init__(self) -> None:
        self.files = 0
        self.size = 0
        self.known = False
        self._stopped = False

    def tell(self, files: int, size: int) -> bool:
        self.files, self.size = files, size
        return not self._stopped

    def count(self, source: Source) -> None:
        source.count(self.tell)
        self.known = not self._stopped and self.files > 0

    def stop(self) -> None:
        self._stopped = True


@contextlib.contextmanager
def show_progress(source: Source, report: ImportReport, doing: str) -> Iterator[None]:
    """A line with files, bytes, rate and time left while the block runs, if stderr is a terminal."""
    if not stderr_is_terminal():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, TextColumn
    from rich.table import Column
    from rich.text import Text

    total = _Total()
    started_ns = monotonic_ns()

    def fraction() -> float | None:
        position, size = source.position()
        if size:
            return position / size
        if not total.known:
            return None
        done = (report.entries + report.skipped) * _BYTES_PER_FILE + report.file_bytes + report.skipped_bytes
        return min(1.0, done / (total.files * _BYTES_PER_FILE + total.size))

    class Facts(ProgressColumn):
        def render(self, task: Task) -> Text:
            seconds = max((monotonic_ns() - started_ns) / 1e9, 1e-3)
            done = report.entries + report.skipped
            of_total = f"/{format_count(total.files)}" if total.known else ""
            text = (
                f"{format_count(done)}{of_total} files {format_bytes(report.file_bytes)}  "
                f"{format_count(done / seconds)}/s {format_bytes(report.file_bytes / seconds)}/s"
            )
            part = fraction()
            if part and part > 0.01:
                text += f"  {format_seconds(max(1, round(seconds * (1 - part) / part)))} left"
            if report.problems:
                text += f"  {format_count(len(report.problems))} problems"
            return Text(text)

    class Bar(BarColumn):
        def render(self, task: Task):  # type: ignore[no-untyped-def]  # rich's own type is of a private module
            part = fraction()
            task.total, task.completed = (None, 0) if part is None else (1.0, part)
            return super().render(task)

    # It only counts files. The process that imports does not fork.
    counter = threading.Thread(target=total.count, args=(source,), daemon=True)  # see above
    counter.start()
    # One line of 80 columns.
    columns = (TextColumn("{task.description}"), Bar(bar_width=12), Facts(Column(no_wrap=True)))
    with Progress(
        *columns, console=Console(stderr=True), refresh_per_second=_REFRESHES_PER_SECOND, transient=True
    ) as progress:
        progress.add_task(doing, total=None)
        try:
            yield
        finally:
            total.stop()
