"""`headrace demo`: real files through the whole of Headrace on this machine, in a few minutes.

Steps: a volume in a temporary folder -> import of a real tree -> mount -> comparison of every file, mode,
link and time with the source -> sealed view -> shuffled epochs against a simulated accelerator
(accelerator.py), read three ways -> table and verdict -> everything removed.

Invariant: nothing is left behind, also after Ctrl-C or SIGTERM: what a step makes, it puts on the `Cleanup`
before the next step begins, and cleaning up cannot be interrupted.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import signal
import sys
import sysconfig
import tarfile
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import click
import numpy as np
from numpy.typing import NDArray

from headrace.cli.accelerator import (
    BATCHES_AHEAD,
    EpochResult,
    SimulatedAccelerator,
    file_batches,
    loader_batches,
    run_epoch,
)
from headrace.cli.compare import Comparison, Copy, MountedCopy, VolumeCopy, compare_trees
from headrace.cli.exit_codes import ExitCode
from headrace.cli.import_command import show_progress
from headrace.cli.machine import peak_resident_bytes
from headrace.cli.page_cache import drop_page_cache
from headrace.cli.text import json_name, print_json, print_table, printable, shown, warn
from headrace.client import engine
from headrace.client.dataset import Dataset
from headrace.client.volume import Volume, connect
from headrace.control.destination import VolumeDestination
from headrace.control.importer import Importer, ImportReport
from headrace.control.trees import open_source
from headrace.errors import HeadraceError, Invalid, NotFound
from headrace.loaders.loader import Loader
from headrace.model.clock import monotonic_ns
from headrace.policy.order import permute
from headrace.units import format_bytes, format_count, format_seconds

BATCH_SIZE_MAX = 256
# A batch of large samples stays small enough for an engine to hold several within its default budget.
BATCH_BYTES_MAX = 20 << 20
# Batches get about a third of an engine's budget, and several are held at once.
_BUDGET_PER_BATCH = 24
# Enough steps for a p99; short enough that six cold epochs of a slow disk fit into the demo's three minutes.
SAMPLES_PER_EPOCH_MAX = 20_000
EPOCH_SECONDS_MAX = 12.0
EPOCHS = 2
SEED = 1
_DIFFERENCES_SHOWN = 10
_INTERRUPTIONS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
# The engine leaves by itself if this process is killed with -9: as soon as nobody is connected or mounted.
_IDLE_EXIT_SECONDS = 60
# Extracting an archive goes through floating point: its times are right to this.
_TAR_TIME_SLACK_NS = 1_000


class Cleanup(contextlib.ExitStack):
    """Undoes what was made, last first; a failure of one step is told and does not stop the others."""

    def undo(self, what: str, action: Callable[[], object]) -> None:
        def guarded() -> None:
            try:
                action()
            except (HeadraceError, OSError) as error:
                warn(f"clean up: {what}: {error}")

        self.callback(guarded)


@contextlib.contextmanager
def interruptions_later() -> Iterator[None]:
    """Ctrl-C and SIGTERM act only when the block has ended, so that what it makes is known to be made.

    Not by a signal mask: the engine, started in the block, would inherit it.
    """
    held: list[int] = []
    before = {
        number: signal.signal(number, lambda got, _frame: held.append(got)) for number in _INTERRUPTIONS
    }
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    if held:
        raise KeyboardInterrupt


@dataclass
class Tree:
    """A folder on the local disk and where in the volume it goes."""

    name: str
    folder: str
    # What is imported: the folder itself, or the archive it was unpacked from.
    origin: str
    time_slack_ns: int = 0

    @property
    def root(self) -> bytes:
        return b"/" + os.fsencode(self.name)


@dataclass
class Outcome:
    """Everything that the demo found out, for the table and for --json."""

    notes: list[str] = field(default_factory=list)
    imported: list[ImportReport] = field(default_factory=list)
    import_seconds: float = 0.0
    compared: Comparison = field(default_factory=Comparison)
    compared_by: str = "mount"
    compare_seconds: float = 0.0
    samples: int = 0
    sample_bytes: int = 0
    seal: str = ""
    batch_size: int = 0
    compute_seconds: float = 0.0
    cold: bool = True
    ways: dict[str, EpochResult] = field(default_factory=dict)
    engine_resident_bytes: int = 0
    seconds: float = 0.0

    @property
    def good(self) -> bool:
        return not self.compared.differences and all(report.complete for report in self.imported)


FILES, MOUNT, LOADER = "plain files", "mount", "Loader"


def run_demo(source: str | None, *, keep: bool, as_json: bool) -> ExitCode:
    """Runs all steps and prints what they found. FAILURE if a copy differs from its source."""

    def say(text: str) -> None:
        click.echo(printable(text), err=as_json)

    if signal.getsignal(signal.SIGHUP) is not signal.SIG_IGN:  # nohup
        signal.signal(signal.SIGHUP, signal.getsignal(signal.SIGTERM))
    outcome = Outcome()
    began_ns = monotonic_ns()
    # Importing more modules must not write new .pyc files into the tree that is being compared.
    sys.dont_write_bytecode = True
    cleanup = Cleanup()
    try:
        with interruptions_later():
            folder = os.path.realpath(tempfile.mkdtemp(prefix="headrace-demo-"))
            cleanup.undo(f"remove {folder}", lambda: _remove(folder))
        _steps(source, folder, cleanup, outcome, say)
        outcome.seconds = (monotonic_ns() - began_ns) / 1e9
        if keep:
            cleanup.pop_all()
            say(_how_to_remove(folder))
    except KeyboardInterrupt as error:
        raise KeyboardInterrupt("interrupted; the demo's volume and mount were removed") from error
    finally:
        for number in _INTERRUPTIONS:
            signal.signal(number, signal.SIG_IGN)
        cleanup.close()
    if as_json:
        print_json(_fields(outcome))
    else:
        _print_outcome(outcome)
    return ExitCode.OK if outcome.good else ExitCode.FAILURE


def _steps(
    source: str | None, folder: str, cleanup: Cleanup, outcome: Outcome, say: Callable[[str], None]
) -> None:
    trees = _trees(source, folder, say)
    path = os.path.join(folder, "vol")
    with interruptions_later():
        # What makes the volume would go on in its folder while that is removed; an engine that is only just
        # starting could not be asked to stop.
        engine.create(path)
        engine.start(path, idle_exit_seconds=_IDLE_EXIT_SECONDS)
        cleanup.undo("stop the engine", lambda: engine.stop(path))
    volume = connect(path, start=False)
    cleanup.callback(volume.close)
    say(f"Volume in {shown(path)}, served by an engine of its own.")

    begin = monotonic_ns()
    for tree in trees:
        outcome.imported.append(_import(tree, volume, say))
    outcome.import_seconds = (monotonic_ns() - begin) / 1e9

    dataset = volume.seal("/")
    outcome.seal, outcome.samples, outcome.sample_bytes = dataset.seal, len(dataset), dataset.nbytes
    if not len(dataset):
        raise Invalid("there is not one regular file in the source: nothing to train on")
    say(f"Sealed as a data set of {format_count(len(dataset))} samples, {format_bytes(dataset.nbytes)}.")
    outcome.batch_size, largest_bytes = _batch_size(dataset)
    if largest_bytes > BATCH_BYTES_MAX:
        # One sample alone is more than an engine plans for: this one gets the memory to hold a few.
        with interruptions_later():
            engine.stop(path)
            engine.start(
                path, idle_exit_seconds=_IDLE_EXIT_SECONDS, memory_bytes=largest_bytes * _BUDGET_PER_BATCH
            )

    mountpoint = _mount(volume, folder, cleanup, outcome, say)

    begin = monotonic_ns()
    for tree in trees:
        copy: Copy
        if mountpoint is not None:
            copy = MountedCopy(os.fsencode(mountpoint) + tree.root)
        else:
            copy = VolumeCopy(volume, tree.root)
        compared = compare_trees(os.fsencode(tree.folder), copy, tree.time_slack_ns)
        compared.differences = [(tree.root + b"/" + path, what) for path, what in compared.differences]
        outcome.compared.add(compared)
    outcome.compare_seconds = (monotonic_ns() - begin) / 1e9
    outcome.compared_by = "through the mount" if mountpoint is not None else "through the API"
    for line in _compared_lines(outcome):
        say(line)

    _epochs(volume, dataset, trees, mountpoint, outcome, say)
    status = volume.status()
    outcome.engine_resident_bytes = peak_resident_bytes(status.pid) or status.resident_bytes


# -- the source --------------------------------------------------------------------------------------------


def _trees(source: str | None, folder: str, say: Callable[[str], None]) -> list[Tree]:
    if source is not None:
        if not os.path.exists(source):
            raise NotFound(f"the source {source} does not exist")
        if os.path.isdir(source):
            absolute = os.path.realpath(source)
            return [Tree("data", absolute, absolute)]
        unpacked = os.path.join(folder, "plain")
        os.mkdir(unpacked)
        say(f"Unpacking {shown(source)} to the local disk, to compare with.")
        _unpack(source, unpacked)
        return [Tree("data", unpacked, os.path.abspath(source), _TAR_TIME_SLACK_NS)]
    standard = os.path.realpath(sysconfig.get_path("stdlib"))
    packages = os.path.realpath(sysconfig.get_path("purelib"))
    trees = [Tree("python", standard, standard)]
    if not packages.startswith(standard + os.sep) and os.path.isdir(packages):
        trees.append(Tree("site-packages", packages, packages))
    return trees


def _unpack(archive: str, folder: str) -> None:
    """Unpacks for the comparison: like the import, nothing outside the target and all modes kept."""
    links: list[tarfile.TarInfo] = []

    def inside(member: tarfile.TarInfo, path: str) -> tarfile.TarInfo | None:
        if member.isdev() and os.geteuid() != 0:
            return None
        try:
            checked = tarfile.tar_filter(member, path)
            if member.islnk() and (member.linkname.startswith("/") or ".." in member.linkname.split("/")):
                return None
        except tarfile.FilterError:
            return None
        if member.issym():
            links.append(checked)
        return checked.replace(mode=member.mode, deep=False)

    try:
        with tarfile.open(archive, errors="surrogateescape") as members:
            members.extractall(folder, filter=inside, numeric_owner=True)
        for link in links:  # extractall gives them no times
            path = os.path.join(folder, link.name)
            os.utime(path, (link.mtime, link.mtime), follow_symlinks=False)
    except tarfile.TarError as error:
        raise Invalid(f"{archive} is neither a folder nor a whole tar archive: {error}") from error


def _import(tree: Tree, volume: Volume, say: Callable[[str], None]) -> ImportReport:
    as_root = os.geteuid() == 0
    begin = monotonic_ns()
    source = open_source(tree.origin, volume_folder=volume.path, devices=as_root)
    destination = VolumeDestination(volume.path)
    importer = Importer(source, destination, tree.root, owners=as_root)
    try:
        with show_progress(source, importer.report, f"import {tree.name}"):
            report = importer.run()
    finally:
        source.close()
        destination.close()
    seconds = (monotonic_ns() - begin) / 1e9
    say(
        f"Imported {shown(tree.origin)}: {format_count(report.files)} files "
        f"({format_bytes(report.file_bytes)}), {format_count(report.directories)} directories, "
        f"{format_count(report.symlinks + report.hard_links)} links in {format_seconds(seconds)} "
        f"({format_count(report.files / seconds)} files/s)."
    )
    for path, why in report.problems[:_DIFFERENCES_SHOWN]:
        say(f"  not imported: {shown(path)}: {why}")
    if report.damage is not None:
        say(f"  {report.damage}")
    return report


# -- the mount and the comparison --------------------------------------------------------------------------


def _mount(
    volume: Volume, folder: str, cleanup: Cleanup, outcome: Outcome, say: Callable[[str], None]
) -> str | None:
    mountpoint = os.path.join(folder, "mnt")
    os.mkdir(mountpoint)
    cleanup.undo(f"unmount {mountpoint}", lambda: _unmount(volume, mountpoint))
    try:
        with interruptions_later():
            volume.mount(mountpoint)
    except HeadraceError as error:
        outcome.notes.append(
            f"no mount here ({error.message}): compared through the API, and no epoch by mount"
        )
        say(outcome.notes[-1])
        return None
    say(f"Mounted on {shown(mountpoint)}.")
    return mountpoint


def _unmount(volume: Volume, mountpoint: str) -> None:
    if os.path.ismount(mountpoint):
        volume.unmount(mountpoint)


def _remove(folder: str) -> None:
    # Never into a mount that could not be ended: that would delete through it.
    if os.path.ismount(os.path.join(folder, "mnt")):
        mountpoint = shlex.quote(os.path.join(folder, "mnt"))
        raise OSError(f"{folder}/mnt is still mounted: headrace unmount {mountpoint}, then remove {folder}")
    shutil.rmtree(folder)


def _how_to_remove(folder: str) -> str:
    volume = shlex.quote(os.path.join(folder, "vol"))
    return f"Kept in {folder}. To remove it: headrace down {volume} && rm -r {shlex.quote(folder)}"


# -- the epochs --------------------------------------------------------------------------------------------


def _epochs(
    volume: Volume,
    dataset: Dataset,
    trees: Sequence[Tree],
    mountpoint: str | None,
    outcome: Outcome,
    say: Callable[[str], None],
) -> None:
    count, batch_size = len(dataset), outcome.batch_size
    accelerator = SimulatedAccelerator.for_batches(batch_size, dataset.nbytes / count)
    outcome.compute_seconds = accelerator.compute_seconds
    if count > SAMPLES_PER_EPOCH_MAX:
        outcome.notes.append(
            f"an epoch here is the first {format_count(SAMPLES_PER_EPOCH_MAX)} samples of the shuffled order "
            f"of {format_count(count)}"
        )
    reason = drop_page_cache()
    outcome.cold = reason is None
    if reason is not None:
        outcome.notes.append(f"the page cache was not dropped before the epochs ({reason}): reads are warm")

    ways: dict[str, Callable[[int], Iterator[tuple[int, int]]]] = {
        FILES: lambda epoch: file_batches(_paths_on_disk(dataset, trees), _order(count, batch_size, epoch))
    }
    if mountpoint is not None:
        root = os.fsencode(mountpoint) + b"/"
        ways[MOUNT] = lambda epoch: file_batches(
            lambda index: root + dataset.paths.raw(index), _order(count, batch_size, epoch)
        )
    loader = Loader(
        dataset, batch_size, shuffle=True, seed=SEED, prefetch=BATCHES_AHEAD, rank=0, world_size=1
    )

    def by_loader(epoch: int) -> Iterator[tuple[int, int]]:
        loader.set_epoch(epoch)
        return loader_batches(loader, _order(count, batch_size, epoch))

    ways[LOADER] = by_loader
    for name, batches_of in ways.items():
        for epoch in range(EPOCHS):
            say(f"Epoch {epoch + 1} of {EPOCHS} by {name} ...")
            volume.sync()
            if outcome.cold:
                drop_page_cache()
            accelerator = SimulatedAccelerator(outcome.compute_seconds)
            with contextlib.closing(batches_of(epoch)) as batches:  # type: ignore[type-var]  # a generator
                result = run_epoch(batches, accelerator, EPOCH_SECONDS_MAX)
            if result.wall_ns > EPOCH_SECONDS_MAX * 1e9:
                outcome.notes.append(f"{name}, epoch {epoch + 1}: stopped after {EPOCH_SECONDS_MAX:.0f} s")
            previous = outcome.ways.get(name)
            outcome.ways[name] = result if previous is None else previous + result


def _batch_size(dataset: Dataset) -> tuple[int, int]:
    """A batch size and the bytes of the largest batch that it makes: below BATCH_BYTES_MAX, or little more
    than the largest sample alone. At least 8 steps an epoch, if there are so many samples."""
    count = len(dataset)
    enough = max(BATCH_BYTES_MAX, int(dataset.sizes.max()) * 5 // 4)
    batch_size = max(1, min(BATCH_SIZE_MAX, count // 8))
    while True:
        batches = (batch for epoch in range(EPOCHS) for batch in _order(count, batch_size, epoch))
        largest = max(int(dataset.sizes[batch].sum()) for batch in batches)
        if largest <= enough or batch_size == 1:
            return batch_size, largest
        batch_size //= 2


def _order(count: int, batch_size: int, epoch: int) -> list[NDArray[np.uint64]]:
    """The epoch's batches, whole ones only unless the data set is smaller than one."""
    taken = min(count, SAMPLES_PER_EPOCH_MAX)
    indices = permute(np.arange(taken, dtype=np.uint64), count, SEED, epoch)
    return [indices[at : at + batch_size] for at in range(0, max(1, taken - batch_size + 1), batch_size)]


def _paths_on_disk(dataset: Dataset, trees: Sequence[Tree]) -> Callable[[int], bytes]:
    folders = {os.fsencode(tree.name): os.fsencode(tree.folder) for tree in trees}

    def path_of(index: int) -> bytes:
        name, _, rest = dataset.paths.raw(index).partition(b"/")
        return folders[name] + b"/" + rest

    return path_of


# -- what is printed ---------------------------------------------------------------------------------------


def _compared_lines(outcome: Outcome) -> list[str]:
    compared = outcome.compared
    what = (
        f"Compared {format_count(compared.files)} files ({format_bytes(compared.file_bytes)}), "
        f"{format_count(compared.directories)} directories and {format_count(compared.others)} links with "
        f"the source, {outcome.compared_by}, in {format_seconds(outcome.compare_seconds)}: "
    )
    if not compared.differences:
        return [what + "bytes, modes, times and links are the same."]
    found = sorted(compared.differences)
    lines = [f"{what}{format_count(len(found))} DIFFERENCES"]
    lines += [f"  {shown(path)} {why}" for path, why in found[:_DIFFERENCES_SHOWN]]
    return lines if len(found) <= _DIFFERENCES_SHOWN else [*lines, "  ..."]


def _print_outcome(outcome: Outcome) -> None:
    step_ms = outcome.compute_seconds * 1e3 * 10 / 9
    click.echo("")
    click.echo(
        f"Simulated accelerator (no GPU is used: a step is a sleep): batches of {outcome.batch_size}, "
        f"{outcome.compute_seconds * 1e3:.2f} ms compute + {step_ms - outcome.compute_seconds * 1e3:.2f} ms "
        f"overhead a step, so 90 % busy if data were free. {EPOCHS} shuffled epochs, "
        f"{'page cache dropped before each' if outcome.cold else 'page cache NOT dropped'}."
    )
    click.echo("")
    print_table(
        ["read by", "samples/s", "data wait p50", "p99", "accelerator busy", "waiting for data", "overhead"],
        [
            [
                name,
                format_count(result.samples_per_second),
                format_seconds(result.wait_seconds(0.5)),
                format_seconds(result.wait_seconds(0.99)),
                f"{result.utilisation:.0%}",
                f"{result.waiting:.0%}",
                f"{result.overhead:.0%}",
            ]
            for name, result in outcome.ways.items()
        ],
    )
    for note in outcome.notes:
        click.echo(printable(f"Note: {note}."))
    click.echo(_verdict(outcome))


def _verdict(outcome: Outcome) -> str:
    if not outcome.good:
        return "FAILED: the copy differs from its source, see above."
    others = [
        f"{result.utilisation:.0%} by {name}" for name, result in outcome.ways.items() if name != LOADER
    ]
    return (
        f"The Loader kept the simulated accelerator {outcome.ways[LOADER].utilisation:.0%} busy "
        f"({', '.join(others)}); every file compared equal; the engine used at most "
        f"{format_bytes(outcome.engine_resident_bytes)} of memory; {format_seconds(outcome.seconds)} in all."
    )


def _fields(outcome: Outcome) -> dict[str, Any]:
    return {
        "ok": outcome.good,
        "seconds": round(outcome.seconds, 3),
        "import": {
            "files": sum(report.files for report in outcome.imported),
            "bytes": sum(report.file_bytes for report in outcome.imported),
            "directories": sum(report.directories for report in outcome.imported),
            "symlinks": sum(report.symlinks for report in outcome.imported),
            "hard_links": sum(report.hard_links for report in outcome.imported),
            "seconds": round(outcome.import_seconds, 3),
            "problems": [
                {**json_name("path", path), "reason": printable(why)}
                for report in outcome.imported
                for path, why in report.problems
            ],
        },
        "compare": {
            "by": outcome.compared_by,
            "files": outcome.compared.files,
            "bytes": outcome.compared.file_bytes,
            "directories": outcome.compared.directories,
            "others": outcome.compared.others,
            "seconds": round(outcome.compare_seconds, 3),
            "differences": [
                {**json_name("path", path), "what": printable(what)}
                for path, what in outcome.compared.differences
            ],
        },
        "dataset": {"samples": outcome.samples, "bytes": outcome.sample_bytes},
        "accelerator": {
            "simulated": True,
            "batch_size": outcome.batch_size,
            "compute_seconds": outcome.compute_seconds,
            "page_cache_dropped": outcome.cold,
        },
        "ways": {
            name: {
                "samples_per_second": round(result.samples_per_second, 1),
                "samples": result.samples,
                "data_wait_p50_seconds": result.wait_seconds(0.5),
                "data_wait_p99_seconds": result.wait_seconds(0.99),
                "accelerator_busy": round(result.utilisation, 4),
                "waiting_for_data": round(result.waiting, 4),
                "overhead": round(result.overhead, 4),
            }
            for name, result in outcome.ways.items()
        },
        "engine_resident_bytes_max": outcome.engine_resident_bytes,
        "notes": outcome.notes,
    }
