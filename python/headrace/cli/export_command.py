"""`headrace export`: the exporter with a line of progress, and a summary that names what is missing."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import click

from headrace.cli.exit_codes import ExitCode
from headrace.cli.place import Place
from headrace.cli.text import counted, json_name, print_json, printable, shown, stderr_is_terminal, warn
from headrace.client.volume import Volume
from headrace.control.exporter import BucketExport, ExportReport, FolderExport
from headrace.errors import HeadraceError
from headrace.model.clock import monotonic_ns
from headrace.units import format_bytes, format_count, format_seconds

_LEFT_OUT_SHOWN = 20
_REFRESHES_PER_SECOND = 5


def run_export(
    volume: Volume, place: Place, target: str, endpoint: str | None, region: str | None, as_json: bool
) -> ExitCode:
    """Exports, shows progress on a terminal, prints the summary. FAILURE if something is missing."""
    started_ns = monotonic_ns()
    export: BucketExport | FolderExport
    if target.startswith("s3://"):
        export = BucketExport(volume, place.path, target, endpoint=endpoint, region=region)
    else:
        export = FolderExport(volume, place.path, target)
    try:
        with _progress(export.report, started_ns):
            report = export.run()
    except HeadraceError as error:
        if not export.report.files and not export.report.unchanged:
            raise
        done = counted(export.report.files, "file", "files")
        raise HeadraceError.of(
            error.kind,
            error.errno or 0,
            f"export stopped after {done}: {error.message}; run it again to go on",
        ) from error
    except KeyboardInterrupt as error:
        done = counted(export.report.files, "file", "files")
        raise KeyboardInterrupt(f"interrupted after {done}; run the same command again to go on") from error
    seconds = (monotonic_ns() - started_ns) / 1e9
    if as_json:
        print_json(
            {
                **json_name("path", place.path),
                "target": target,
                "files": report.files,
                "bytes": report.file_bytes,
                "unchanged": report.unchanged,
                "links": report.links,
                "left_out": [
                    {**json_name("path", entry.path), "why": entry.why, "is_problem": entry.is_problem}
                    for entry in report.left_out
                ],
                "seconds": seconds,
            }
        )
    else:
        click.echo(
            f"exported {counted(report.files, 'file', 'files')}, {format_bytes(report.file_bytes)}, "
            f"to {shown(target)} in {format_seconds(seconds)}; "
            f"{format_count(report.unchanged)} were there already"
        )
        for entry in report.left_out[:_LEFT_OUT_SHOWN]:
            warn(f"left out {shown(entry.path)}: {printable(entry.why)}")
        more = len(report.left_out) - _LEFT_OUT_SHOWN
        if more > 0:
            warn(f"left out {format_count(more)} more; --json lists all")
    return ExitCode.FAILURE if report.problems else ExitCode.OK


@contextlib.contextmanager
def _progress(report: ExportReport, started_ns: int) -> Iterator[None]:
    """A line with files, bytes and rate while the block runs, if stderr is a terminal."""
    if not stderr_is_terminal():
        yield
        return
    from rich.console import Console
    from rich.progress import Progress, ProgressColumn, SpinnerColumn, Task, TextColumn
    from rich.text import Text

    class Facts(ProgressColumn):
        def render(self, task: Task) -> Text:
            seconds = max((monotonic_ns() - started_ns) / 1e9, 1e-3)
            return Text(
                f"{format_count(report.files)} files {format_bytes(report.file_bytes)}  "
                f"{format_bytes(report.file_bytes / seconds)}/s  "
                f"{format_count(report.unchanged)} there already"
            )

    with Progress(
        SpinnerColumn(),
        TextColumn("{task.description}"),
        Facts(),
        console=Console(stderr=True),
        transient=True,
        refresh_per_second=_REFRESHES_PER_SECOND,
    ) as progress:
        progress.add_task("exporting", total=None)
        yield
