"""`headrace tier`, `warm` and `evict`: where the bytes of a tree are, and moving them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass

import click

from headrace.cli.text import counted, json_name, print_json, stderr_is_terminal
from headrace.client.volume import Volume
from headrace.model.clock import monotonic_ns
from headrace.model.message import Kind, TierReport
from headrace.units import format_bytes, format_count, format_seconds

# One message each. Large enough that the store is kept busy, small enough that progress moves.
_FILES_AT_ONCE = 512
_BYTES_AT_ONCE = 256 << 20


@dataclass
class _Sum:
    files: int = 0
    bytes: int = 0
    flash_bytes: int = 0
    dirty_bytes: int = 0

    def add(self, report: TierReport) -> None:
        self.files += report.files
        self.bytes += report.bytes
        self.flash_bytes += report.flash_bytes
        self.dirty_bytes += report.dirty_bytes

    def fields(self) -> dict[str, int]:
        return {
            "files": self.files,
            "bytes": self.bytes,
            "flash_bytes": self.flash_bytes,
            "dirty_bytes": self.dirty_bytes,
        }


def show_tier(volume: Volume, path: bytes, as_json: bool) -> None:
    found = _Sum()
    for paths in _batches(volume, path):
        found.add(volume.tier(paths))
    if as_json:
        print_json({**json_name("path", path), **found.fields()})
        return
    share = 100 * found.flash_bytes / found.bytes if found.bytes else 100
    click.echo(f"{counted(found.files, 'file', 'files')}, {format_bytes(found.bytes)}")
    click.echo(f"on flash                    {format_bytes(found.flash_bytes)} ({share:.0f} %)")
    click.echo(f"not in the object tier yet  {format_bytes(found.dirty_bytes)}")


def warm_tree(volume: Volume, path: bytes, as_json: bool) -> None:
    total = _Sum()
    for paths in _batches(volume, path):
        total.add(volume.tier(paths))
    done = _Sum()
    started_ns = monotonic_ns()
    with _progress(total, done, started_ns):
        for paths in _batches(volume, path):
            done.add(volume.warm(paths))
    # What came last may have pushed out what came first.
    here = _Sum()
    for paths in _batches(volume, path):
        here.add(volume.tier(paths))
    seconds = (monotonic_ns() - started_ns) / 1e9
    fetched = max(0, done.flash_bytes - total.flash_bytes)
    if as_json:
        print_json({**json_name("path", path), **here.fields(), "fetched_bytes": fetched, "seconds": seconds})
        return
    click.echo(
        f"{counted(here.files, 'file', 'files')}, {format_bytes(here.bytes)}: "
        f"fetched {format_bytes(fetched)} in {format_seconds(seconds)}"
    )
    if here.flash_bytes < here.bytes:
        click.echo(
            f"only {format_bytes(here.flash_bytes)} of it are on flash: the rest does not fit or has holes; "
            f"`headrace status` shows the size of the flash tier"
        )


def evict_tree(volume: Volume, path: bytes, as_json: bool) -> None:
    # By paths even a walk through the whole tree would leave what only old versions name.
    everything = path == b"/"
    freed = volume.evict() if everything else sum(volume.evict(paths) for paths in _batches(volume, path))
    if as_json:
        print_json({**json_name("path", path), "freed_bytes": freed})
    else:
        click.echo(f"freed {format_bytes(freed)} of flash")


def _batches(volume: Volume, path: bytes) -> Iterator[list[bytes]]:
    """The files below `path`, directory by directory, some at a time."""
    if volume.stat(path, follow_links=False).kind is not Kind.DIRECTORY:
        yield [path]
        return
    batch: list[bytes] = []
    size = 0
    stack = [path]
    while stack:
        for entry in volume.scandir(stack.pop()):
            if entry.kind is Kind.DIRECTORY:
                stack.append(entry.path)
            elif entry.kind is Kind.FILE:
                batch.append(entry.path)
                size += entry.stat(follow_links=False).size
                if len(batch) >= _FILES_AT_ONCE or size >= _BYTES_AT_ONCE:
                    yield batch
                    batch, size = [], 0
    if batch:
        yield batch


@contextlib.contextmanager
def _progress(total: _Sum, done: _Sum, started_ns: int) -> Iterator[None]:
    """A line with files, bytes, rate and time left while the block runs, if stderr is a terminal."""
    if not stderr_is_terminal():
        yield
        return
    from rich.console import Console
    from rich.progress import BarColumn, Progress, ProgressColumn, Task, TextColumn
    from rich.text import Text

    class Facts(ProgressColumn):
        def render(self, task: Task) -> Text:
            seconds = max((monotonic_ns() - started_ns) / 1e9, 1e-3)
            task.completed = done.bytes
            text = (
                f"{format_count(done.files)}/{format_count(total.files)} files {format_bytes(done.bytes)}  "
                f"{format_bytes(done.bytes / seconds)}/s"
            )
            if 0 < done.bytes < total.bytes:
                left = seconds * (total.bytes - done.bytes) / done.bytes
                text += f"  {format_seconds(max(1, round(left)))} left"
            return Text(text)

    columns = (TextColumn("{task.description}"), BarColumn(bar_width=12), Facts())
    with Progress(*columns, console=Console(stderr=True), transient=True) as progress:
        progress.add_task("warming", total=max(1, total.bytes))
        yield
