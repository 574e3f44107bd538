"""The commands of `headrace`. Each parses, calls the API, prints; what it does is elsewhere.

Errors: a command raises what the API raises; `main` turns it into one line on stderr and an exit code
(exit_codes.py). A traceback appears only with --debug, or for a fault of ours.
"""

from __future__ import annotations

import os
import shlex
import signal
import sys
from types import FrameType
from typing import Any, NoReturn

import click

from headrace import __version__
from headrace.cli.exit_codes import HELP_TEXT, ExitCode, exit_code_of
from headrace.cli.place import parse_place
from headrace.cli.text import counted, json_name, print_json, printable, shown, warn
from headrace.client import engine
from headrace.client.volume import Volume, connect
from headrace.errors import Conflict, Corrupt, HeadraceError, Invalid
from headrace.units import format_bytes, parse_bytes

_debug = False


class _Bytes(click.ParamType[int]):
    """A size such as 512MiB."""

    name = "size"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> int:
        try:
            return parse_bytes(value)
        except Invalid as error:
            self.fail(error.message, param, ctx)


BYTES = _Bytes()

json_option = click.option("--json", "as_json", is_flag=True, help="Print JSON, for programs.")


class _VolumeFolder(click.ParamType[str]):
    """A volume as a whole. Most likely mistake: a place in one."""

    name = "volume"

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> str:
        folder = str(value)
        whole = engine.volume_of_place(folder)
        if whole is not None and not os.path.lexists(folder):
            command = "this command" if ctx is None else ctx.info_name
            raise Invalid(f"{command} takes a whole volume: {shown(whole)}")
        return folder


VOLUME = _VolumeFolder()


def open_volume(volume: str, *, start: bool = True) -> Volume:
    """`connect`, with a folder that is no volume as the state's fault and not the arguments'."""
    try:
        return connect(volume, start=start)
    except Invalid as error:
        raise Conflict(error.message) from error


@click.group(
    epilog=HELP_TEXT,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 100},
)
@click.option("--debug", is_flag=True, help="Show tracebacks of errors.")
@click.version_option(__version__, "--version", message="headrace %(version)s")
def cli(debug: bool) -> None:
    """Headrace: one tree of files, fed to training at the speed of the disk.

    A volume is a folder made by `headrace create`; an engine process serves it and is started when it is
    needed. A place in a volume is written VOLUME:/path.

    \b
    First steps:
      headrace create ./vol
      headrace import ~/pictures ./vol:/pictures
      headrace ls ./vol:/pictures
      headrace mount ./vol ./mnt
      headrace demo
    """
    global _debug
    _debug = debug


@cli.command()
@click.argument("volume", type=VOLUME)
@click.option(
    "--object",
    "object_url",
    metavar="s3://BUCKET/PREFIX",
    help="Where its files are durable; the folder is then a cache of them, and holds the metadata.",
)
@click.option(
    "--from",
    "from_url",
    metavar="s3://BUCKET/PREFIX",
    help="Bring back the volume that is durable there, from its last backup. From then on it is this one.",
)
@click.option("--endpoint", metavar="URL", help="Of a store that is not Amazon's.")
@click.option("--region", metavar="NAME", help="Of the bucket. Default: as the AWS tools have it.")
@click.option(
    "--flash-bytes-max",
    type=BYTES,
    metavar="SIZE",
    help="With a bucket: what the folder may take, like 500GiB. Default: most of what is free.",
)
@json_option
def create(
    volume: str,
    object_url: str | None,
    from_url: str | None,
    endpoint: str | None,
    region: str | None,
    flash_bytes_max: int | None,
    as_json: bool,
) -> None:
    """Make a new volume in VOLUME, a folder that is missing or empty.

    With --object its files are durable in a bucket; credentials are found as the AWS tools find them.

    \b
    Examples:
      headrace create ./vol
      headrace create ./vol --object s3://my-bucket/vol --region eu-central-1
      headrace create ./again --from s3://my-bucket/vol
    """
    if object_url is not None and from_url is not None:
        raise Invalid("--object makes a new volume, --from brings one back: give one of them")
    made = engine.create(
        volume,
        object=object_url if from_url is None else from_url,
        endpoint=endpoint,
        region=region,
        flash_bytes_max=flash_bytes_max,
        adopt=from_url is not None,
    )
    if as_json:
        print_json({**json_name("path", os.fsencode(os.path.abspath(volume))), "volume": made})
    else:
        click.echo(f"created volume {made} in {shown(volume)}")


@cli.command()
@click.argument("volume", type=VOLUME)
@click.option(
    "--from",
    "from_url",
    metavar="s3://BUCKET/PREFIX",
    required=True,
    help="Where the segments are. It is this folder's from then on.",
)
@click.option("--endpoint", metavar="URL", help="Of a store that is not Amazon's.")
@click.option("--region", metavar="NAME", help="Of the bucket. Default: as the AWS tools have it.")
@click.option(
    "--flash-bytes-max",
    type=BYTES,
    metavar="SIZE",
    help="What the folder may take, like 500GiB. Default: most of what is free.",
)
@json_option
def rescue(
    volume: str,
    from_url: str,
    endpoint: str | None,
    region: str | None,
    flash_bytes_max: int | None,
    as_json: bool,
) -> None:
    """Rebuild a tree in VOLUME, a new folder, from the segments in a bucket alone.

    For when the folder is lost and the backups of its metadata too; `create --from` brings back more, try it
    first. Every file of which a segment has bytes comes back under the last name that a segment knows. No
    byte is copied. It is said what is damaged, and what segments cannot know.

    \b
    Example:
      headrace rescue ./again --from s3://my-bucket/vol
    """
    rescued = engine.rescue(
        volume, from_url, endpoint=endpoint, region=region, flash_bytes_max=flash_bytes_max
    )
    lacking = f"not known to segments: {engine.WHAT_SEGMENTS_LACK}"
    if as_json:
        print_json(
            {
                **json_name("path", os.fsencode(os.path.abspath(volume))),
                "volume": rescued.volume,
                "files": rescued.files,
                "bytes": rescued.bytes,
                "notes": [*rescued.notes, lacking],
            }
        )
        return
    for note in rescued.notes:
        warn(note)
    files = counted(rescued.files, "file", "files")
    click.echo(
        f"rescued {files}, {format_bytes(rescued.bytes)}, as volume {rescued.volume} in {shown(volume)}"
    )
    click.echo(lacking)


@cli.command()
@click.argument("volume", type=VOLUME)
@click.option(
    "--system", is_flag=True, help="Serve all users of this machine, each with own rights (as root)."
)
@click.option("--memory-bytes", type=BYTES, metavar="SIZE", help="Memory budget of the engine, like 256MiB.")
@json_option
def up(volume: str, system: bool, memory_bytes: int | None, as_json: bool) -> None:
    """Start the engine of VOLUME and leave it running.

    Not needed before other commands: they start one that leaves when it is unused for 15 minutes.

    \b
    Example:
      headrace up ./vol --memory-bytes 512MiB
    """
    try:
        ready = engine.start(volume, memory_bytes=memory_bytes, system=system)
    except Invalid as error:
        raise Conflict(error.message) from error
    pid = ready.pid if ready is not None else engine.running_pid(volume)
    recovery = ready.recovery if ready is not None else []
    if as_json:
        print_json({"pid": pid, "started": ready is not None, "recovery": recovery})
        return
    click.echo(f"engine of {shown(volume)} {'started' if ready else 'runs already'}, pid {pid}")
    for line in recovery:
        click.echo(f"  recovery: {printable(line)}")


@cli.command()
@click.argument("volume", type=VOLUME)
@json_option
def down(volume: str, as_json: bool) -> None:
    """Stop the engine of VOLUME: flush, unmount, end.

    Its mounts go with it, also those in use (which it names), and do not come back with `headrace up`.

    \b
    Example:
      headrace down ./vol
    """
    from headrace.cli.mounts import mounts_of, users_of

    users = users_of(mounts_of(volume))
    try:
        stopped = engine.stop(volume)
    except Invalid as error:
        raise Conflict(error.message) from error
    left = mounts_of(volume)
    if as_json:
        in_use = [
            {**json_name("mountpoint", os.fsencode(user.mountpoint)), "pid": user.pid, "name": user.name}
            for user in users
        ]
        print_json({"stopped": stopped, "mounts_in_use": in_use})
        return
    click.echo(f"engine of {shown(volume)} {'stopped' if stopped else 'was not running'}")
    for mountpoint in dict.fromkeys(user.mountpoint for user in users):
        names = ", ".join(f"{user.name} ({user.pid})" for user in users if user.mountpoint == mountpoint)
        now = (
            f"end it with `headrace unmount {shlex.quote(mountpoint)}`"
            if mountpoint in left
            else "it is gone now"
        )
        warn(f"mount {mountpoint} was in use by {names}; {now}")


@cli.command()
@click.argument("volume", type=VOLUME)
@json_option
def status(volume: str, as_json: bool) -> None:
    """Show what the engine of VOLUME does.

    Its memory, mounts, clients, segments and warnings. Starts nothing: exit code 7 if no engine runs.

    \b
    Example:
      headrace status ./vol --json
    """
    from headrace.cli.status import print_status

    with open_volume(volume, start=False) as opened:
        print_status(opened, as_json)


@cli.command()
@click.argument("volume", type=VOLUME)
@click.argument("mountpoint")
@click.option("--read-only", is_flag=True, help="Refuse all changes through this mount.")
@click.option("--allow-other", is_flag=True, help="Let other users in, each with own rights.")
@json_option
def mount(volume: str, mountpoint: str, read_only: bool, allow_other: bool, as_json: bool) -> None:
    """Mount VOLUME on the empty folder MOUNTPOINT.

    \b
    Example:
      mkdir mnt && headrace mount ./vol ./mnt
    """
    with open_volume(volume) as opened:
        mounted = opened.mount(mountpoint, read_only=read_only, allow_other=allow_other)
    if as_json:
        print_json({**json_name("mountpoint", mounted.mountpoint), "notes": mounted.notes})
        return
    click.echo(f"{shown(volume)} is mounted on {shown(mounted.mountpoint)}")
    for note in mounted.notes:
        warn(f"note: {note}")


@cli.command()
@click.argument("mountpoint")
def unmount(mountpoint: str) -> None:
    """End the mount on MOUNTPOINT, also one whose engine is gone.

    \b
    Example:
      headrace unmount ./mnt
    """
    from headrace.cli.mounts import end_mount

    end_mount(mountpoint)
    click.echo(f"unmounted {shown(mountpoint)}")


@cli.command(name="import")
@click.argument("source")
@click.argument("target", metavar="VOLUME:/path")
@click.option("--replace", is_flag=True, help="Overwrite also what is newer in the volume.")
@json_option
def import_(source: str, target: str, replace: bool, as_json: bool) -> ExitCode:
    """Copy SOURCE, a folder or a tar archive, into a volume.

    What is in SOURCE lands in the folder VOLUME:/path, with modes, times, links and (as root) owners.
    Extended attributes are left out. Archives may be compressed (gzip, xz, bzip2). Mounts of the volume and
    its own folder, if they lie in SOURCE, are skipped. Ends with exit code 6 if anything is missing, and
    names it.

    Safe to run again, after an interruption or when SOURCE has changed: what is there already is skipped,
    what differs is replaced, except where the volume's entry is newer than the source's. Such entries are
    kept and named; --replace overwrites them.

    \b
    Examples:
      headrace import ~/pictures ./vol:/pictures
      headrace import train.tar.xz ./vol:/train
    """
    from headrace.cli.import_command import run_import

    place = parse_place(target)
    with open_volume(place.volume) as volume:
        return run_import(source, place, volume, replace, as_json)


@cli.command()
@click.argument("place", metavar="VOLUME:/path")
@click.option("-l", "--long", "long", is_flag=True, help="Modes, owners, sizes and times as well.")
@json_option
def ls(place: str, long: bool, as_json: bool) -> None:
    """List a folder of a volume.

    \b
    Example:
      headrace ls -l ./vol:/pictures
    """
    from headrace.cli.listing import list_place

    parsed = parse_place(place, bare_volume=True)
    with open_volume(parsed.volume) as volume:
        list_place(volume, parsed.path, long, as_json)


@cli.command()
@click.argument("place", metavar="VOLUME:/path")
@json_option
def stat(place: str, as_json: bool) -> None:
    """Show the attributes of one name in a volume. Symbolic links are not followed.

    \b
    Example:
      headrace stat ./vol:/pictures/cat.jpg
    """
    from headrace.cli.listing import stat_place

    parsed = parse_place(place, bare_volume=True)
    with open_volume(parsed.volume) as volume:
        stat_place(volume, parsed.path, as_json)


@cli.command()
@click.argument("place", metavar="VOLUME:/path")
@json_option
def du(place: str, as_json: bool) -> None:
    """Count the files and bytes of a tree. A file with several links counts once.

    \b
    Example:
      headrace du ./vol:/pictures
    """
    from headrace.cli.listing import measure

    parsed = parse_place(place, bare_volume=True)
    with open_volume(parsed.volume) as volume:
        measured = measure(volume, parsed.path)
    if as_json:
        print_json({**json_name("path", parsed.path), **measured})
        return
    click.echo(
        f"{format_bytes(measured['bytes'])} in {counted(measured['files'], 'file', 'files')}, "
        f"{counted(measured['directories'], 'directory', 'directories')}, "
        f"{counted(measured['others'], 'other', 'others')}"
    )


@cli.command()
@click.argument("volume", type=VOLUME)
@click.option("--deep", is_flag=True, help="Read and verify every byte too: fetches all of the volume.")
@json_option
def fsck(volume: str, deep: bool, as_json: bool) -> None:
    """Check that VOLUME is whole, on flash and in the object tier. Changes nothing.

    Exit code 6 if something is damaged or missing; each problem is named.

    \b
    Example:
      headrace fsck ./vol --deep
    """
    with open_volume(volume) as opened:
        report = opened.fsck(deep=deep)
    if as_json:
        print_json({name: getattr(report, name) for name in report.__struct_fields__})
    else:
        for problem in report.problems:
            click.echo(printable(problem))
        verified = f", {format_bytes(report.verified_bytes)} verified" if deep else ""
        click.echo(
            f"{counted(report.names, 'name', 'names')}, {counted(report.inodes, 'inode', 'inodes')}, "
            f"{counted(report.segments, 'segment', 'segments')}{verified}: "
            f"{counted(report.problems_count, 'problem', 'problems')}"
        )
    if report.problems_count:
        raise Corrupt(f"{counted(report.problems_count, 'problem', 'problems')} in {shown(volume)}")


@cli.command()
@click.argument("volume", type=VOLUME)
@json_option
def compact(volume: str, as_json: bool) -> None:
    """Write packs of VOLUME anew that are mostly dead or small: the engine does so by itself now and then.

    \b
    Example:
      headrace compact ./vol
    """
    with open_volume(volume) as opened:
        done = opened.compact()
    if as_json:
        print_json({"packs": done.packs, "bytes": done.bytes})
    else:
        click.echo(
            f"wrote {counted(done.packs, 'pack', 'packs')} anew, {format_bytes(done.bytes)} of records"
        )


@cli.command()
@click.argument("volume", type=VOLUME)
@json_option
def backup(volume: str, as_json: bool) -> None:
    """Store the metadata of VOLUME in its bucket now: the engine does so every five minutes by itself.

    With it `headrace create --from` brings the volume back on any machine. Waits for uploads.

    \b
    Example:
      headrace backup ./vol
    """
    with open_volume(volume) as opened:
        done = opened.backup()
    if as_json:
        print_json({name: getattr(done, name) for name in done.__struct_fields__})
    elif done.changed:
        click.echo(
            f"backed up version {done.version}: {counted(done.rows, 'row', 'rows')}, "
            f"{format_bytes(done.bytes)}"
        )
    else:
        click.echo(f"nothing has changed since the backup of version {done.version}")


@cli.command()
@click.argument("place", metavar="VOLUME:/path")
@click.argument("target", metavar="DIR|s3://BUCKET/PREFIX")
@click.option("--endpoint", metavar="URL", help="Of a store that is not Amazon's.")
@click.option("--region", metavar="NAME", help="Of the bucket. Default: as the AWS tools have it.")
@json_option
def export(place: str, target: str, endpoint: str | None, region: str | None, as_json: bool) -> ExitCode:
    """Write a tree out as plain files or objects, which need no Headrace to be read.

    Into a folder come files, links and special files with their modes, times and attributes, owners too as
    root. Into a bucket come the files alone, each as one object PREFIX/relative/path; the engine stores them,
    with the credentials that it was started with. What is there with the same size and time is left as it is:
    run it again to go on after an interruption. Exit code 6 if something could not be exported.

    \b
    Examples:
      headrace export ./vol:/pictures ~/pictures
      headrace export ./vol:/data s3://my-bucket/data --region eu-central-1
    """
    from headrace.cli.export_command import run_export

    parsed = parse_place(place, bare_volume=True)
    if not target.startswith("s3://") and (endpoint is not None or region is not None):
        raise Invalid(f"--endpoint and --region are for buckets, {shown(target)} is a folder")
    with open_volume(parsed.volume) as volume:
        return run_export(volume, parsed, target, endpoint, region, as_json)


@cli.command()
@click.argument("place", metavar="VOLUME:/path")
@json_option
def tier(place: str, as_json: bool) -> None:
    """Show how much of a tree is on flash, and how much of that not in the object tier yet.

    \b
    Example:
      headrace tier ./vol:/pictures
    """
    from headrace.cli.tiering import show_tier

    parsed = parse_place(place, bare_volume=True)
    with open_volume(parsed.volume) as volume:
        show_tier(volume, parsed.path, as_json)


@cli.command()
@click.argument("place", metavar="VOLUME:/path")
@json_option
def warm(place: str, as_json: bool) -> None:
    """Bring a tree from the object tier to flash, so that the first read of it is fast.

    \b
    Example:
      headrace warm ./vol:/pictures
    """
    from headrace.cli.tiering import warm_tree

    parsed = parse_place(place, bare_volume=True)
    with open_volume(parsed.volume) as volume:
        warm_tree(volume, parsed.path, as_json)


@cli.command()
@click.argument("place", metavar="VOLUME[:/path]")
@json_option
def evict(place: str, as_json: bool) -> None:
    """Remove from flash what is in the object tier too: of a tree, or of the whole volume.

    Files lie together in segments, and whole segments go: neighbours of the tree may be among them. What is
    not in the object tier yet stays.

    \b
    Example:
      headrace evict ./vol:/pictures
    """
    from headrace.cli.tiering import evict_tree

    parsed = parse_place(place, bare_volume=True)
    with open_volume(parsed.volume) as volume:
        evict_tree(volume, parsed.path, as_json)


@cli.command()
@click.argument("place", metavar="VOLUME:/path")
@json_option
def seal(place: str, as_json: bool) -> None:
    """Freeze a folder of a volume as a data set for training.

    Prints the id to give to `Volume.dataset(id)`. The folder may change on; the sealed view does not.

    \b
    Example:
      headrace seal ./vol:/pictures
    """
    parsed = parse_place(place, bare_volume=True)
    with open_volume(parsed.volume) as volume:
        dataset = volume.seal(parsed.path)
        fields = {
            "seal": dataset.seal,
            "version": dataset.version,
            "samples": len(dataset),
            "classes": len(dataset.classes),
        }
    if as_json:
        print_json({**json_name("path", parsed.path), **fields})
    else:
        click.echo(f"sealed {parsed} as {dataset.seal}: {counted(len(dataset), 'sample', 'samples')}")


@cli.command()
@click.argument("volume", type=VOLUME)
@json_option
def seals(volume: str, as_json: bool) -> None:
    """List the sealed views of VOLUME, oldest first.

    \b
    Example:
      headrace seals ./vol
    """
    from headrace.cli.listing import list_seals

    with open_volume(volume) as opened:
        list_seals(opened, as_json)


@cli.command("seal-delete")
@click.argument("volume", type=VOLUME)
@click.argument("seal")
@json_option
def seal_delete(volume: str, seal: str, as_json: bool) -> None:
    """Delete a sealed view of VOLUME. Who has it open reads on; what only it held is given back.

    \b
    Example:
      headrace seal-delete ./vol 01K6QZ4V8Y0000000000000042
    """
    with open_volume(volume) as opened:
        opened.delete_seal(seal)
    if as_json:
        print_json({"seal": seal})
    else:
        click.echo(f"deleted the sealed view {seal}")


@cli.group()
def snapshot() -> None:
    """Keep states of a whole volume: make, list, compare, restore, delete.

    A snapshot is made at once, costs what changes after it, and shows as the read-only folder
    .snapshots/NAME.
    """


@snapshot.command("create")
@click.argument("volume", type=VOLUME)
@click.argument("name")
@json_option
def snapshot_create(volume: str, name: str, as_json: bool) -> None:
    """Keep VOLUME as it is now under NAME.

    \b
    Example:
      headrace snapshot create ./vol monday
    """
    from headrace.cli.snapshots import create

    with open_volume(volume) as opened:
        create(opened, os.fsencode(name), as_json)


@snapshot.command("ls")
@click.argument("volume", type=VOLUME)
@json_option
def snapshot_ls(volume: str, as_json: bool) -> None:
    """List the snapshots of VOLUME.

    \b
    Example:
      headrace snapshot ls ./vol
    """
    from headrace.cli.snapshots import list_snapshots

    with open_volume(volume) as opened:
        list_snapshots(opened, as_json)


@snapshot.command("diff")
@click.argument("volume", type=VOLUME)
@click.argument("older")
@click.argument("newer", required=False)
@json_option
def snapshot_diff(volume: str, older: str, newer: str | None, as_json: bool) -> None:
    """Show what changed from the snapshot OLDER to NEWER, or to the present.

    One path a line: + added, - removed, M changed, R renamed. --json prints one object a line.

    \b
    Example:
      headrace snapshot diff ./vol monday
    """
    from headrace.cli.snapshots import diff

    with open_volume(volume) as opened:
        diff(opened, os.fsencode(older), None if newer is None else os.fsencode(newer), as_json)


@snapshot.command("restore")
@click.argument("volume", type=VOLUME)
@click.argument("name")
@json_option
def snapshot_restore(volume: str, name: str, as_json: bool) -> None:
    """Make VOLUME what it was at the snapshot NAME.

    What it is now is kept as the snapshot before-restore-TIME. Refused while files are open for writing, or
    files are open that would change.

    \b
    Example:
      headrace snapshot restore ./vol monday
    """
    from headrace.cli.snapshots import restore

    with open_volume(volume) as opened:
        restore(opened, os.fsencode(name), as_json)


@snapshot.command("delete")
@click.argument("volume", type=VOLUME)
@click.argument("name")
@json_option
def snapshot_delete(volume: str, name: str, as_json: bool) -> None:
    """Delete the snapshot NAME. What only it held is given back in the background.

    \b
    Example:
      headrace snapshot delete ./vol monday
    """
    from headrace.cli.snapshots import delete

    with open_volume(volume) as opened:
        delete(opened, os.fsencode(name), as_json)


@cli.group()
def bench() -> None:
    """Measure folders, mounts and the Loader.

    Each is measured side by side with another folder, if that is given: rounds alternate between --target
    and --compare, and medians of the rounds are shown. Cold means that the page cache was dropped (as root),
    and for a mounted volume that its engine was restarted.
    """


_target_options = [
    click.option("--target", required=True, metavar="DIR", help="Folder to measure, e.g. in a mount."),
    click.option("--compare", metavar="DIR", help="Folder to measure beside it, e.g. on the local disk."),
    click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True),
    json_option,
]


def target_options(function: Any) -> Any:
    for option in reversed(_target_options):
        function = option(function)
    return function


@bench.command(name="small-files")
@click.option("--files", type=click.IntRange(min=1), default=20_000, show_default=True)
@click.option("--size", "size_bytes", type=BYTES, default="10KiB", show_default=True, metavar="SIZE")
@click.option("--threads", default="1,8", show_default=True, help="Thread counts, separated by commas.")
@target_options
def small_files(
    files: int, size_bytes: int, threads: str, target: str, compare: str | None, rounds: int, as_json: bool
) -> None:
    """Create, read, stat and list many small files.

    \b
    Example:
      headrace bench small-files --target ./mnt --compare /tmp --files 20000 --size 10KiB
    """
    from headrace.cli.bench import bench_small_files

    bench_small_files(target, compare, files, size_bytes, _thread_counts(threads), rounds, as_json)


@bench.command(name="large-file")
@click.option("--bytes", "total_bytes", type=BYTES, default="2GiB", show_default=True, metavar="SIZE")
@click.option("--threads", default="1,8", show_default=True, help="Thread counts of the random reads.")
@target_options
def large_file(
    total_bytes: int, threads: str, target: str, compare: str | None, rounds: int, as_json: bool
) -> None:
    """Write and read one large file, whole and in random blocks of 4 KiB.

    \b
    Example:
      headrace bench large-file --target ./mnt --compare /tmp --bytes 2GiB
    """
    from headrace.cli.bench import bench_large_file

    bench_large_file(target, compare, total_bytes, _thread_counts(threads), rounds, as_json)


@bench.command(name="loader")
@click.option("--volume", type=VOLUME, required=True, metavar="VOLUME")
@click.option("--path", required=True, metavar="PATH", help="Folder in the volume to seal and read.")
@click.option("--batch", "batch_size", type=click.IntRange(min=1), default=256, show_default=True)
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@json_option
def loader(volume: str, path: str, batch_size: int, rounds: int, as_json: bool) -> None:
    """Read a folder of a volume through the Loader, shuffled, every byte range touched.

    \b
    Example:
      headrace bench loader --volume ./vol --path /pictures --batch 256
    """
    from headrace.cli.bench import bench_loader

    open_volume(volume).close()  # its errors come first
    bench_loader(volume, path, batch_size, rounds, as_json)


@bench.command(name="object")
@click.option("--files", type=click.IntRange(min=1), default=20_000, show_default=True)
@click.option("--size", "size_bytes", type=BYTES, default="10KiB", show_default=True, metavar="SIZE")
@click.option("--bytes", "large_bytes", type=BYTES, default="2GiB", show_default=True, metavar="SIZE")
@click.option(
    "--peer-files",
    type=click.IntRange(min=0),
    default=4_000,
    show_default=True,
    help="How many of the files s3fs and rclone read, since they take minutes for all; 0: leave them out.",
)
@click.option("--only", metavar="PARTS", help="Some of epoch,large,fsync, separated by commas.")
@click.option("--endpoint", metavar="URL", help="A store to measure on instead of starting SeaweedFS.")
@click.option("--bucket", default="headrace-bench", show_default=True, help="In it. Made if missing.")
@click.option("--folder", metavar="DIR", help="Where all data lies meanwhile: on a fast disk.")
@click.option("--rounds", type=click.IntRange(min=1), default=3, show_default=True)
@json_option
def object_(
    files: int,
    size_bytes: int,
    large_bytes: int,
    peer_files: int,
    only: str | None,
    endpoint: str | None,
    bucket: str,
    folder: str | None,
    rounds: int,
    as_json: bool,
) -> None:
    """Measure volumes whose files are durable in an object store, against their goals.

    Starts SeaweedFS (`weed`) and a proxy that makes it slow: 20 ms for each request, 100 MB/s for each
    connection. Beside the volume, s3fs and rclone read the same files as plain objects, if they are
    installed. Needs root (to drop the page cache), 12 GiB of disk and some minutes.

    \b
    Example:
      headrace bench object --only epoch --rounds 1
    """
    from headrace.cli.bench_object import bench_object
    from headrace.cli.object_report import PARTS, Plan

    parts = PARTS if only is None else only.split(",")
    if not set(parts) <= set(PARTS):
        raise click.BadParameter(f"{only!r}: write some of {','.join(PARTS)}", param_hint="--only")
    plan = Plan(parts, files, size_bytes, large_bytes, min(peer_files, files), rounds)
    bench_object(plan, endpoint, bucket, folder, as_json)


def _thread_counts(text: str) -> list[int]:
    try:
        counts = [int(part) for part in text.split(",")]
    except ValueError:
        counts = []
    if not counts or any(not 1 <= count <= 256 for count in counts):
        raise click.BadParameter(f"{text!r}: write thread counts like 1,8", param_hint="--threads")
    return counts


@cli.command()
@click.argument("volume", type=VOLUME, required=False)
@json_option
def doctor(volume: str | None, as_json: bool) -> ExitCode:
    """Check whether this machine can run Headrace, and VOLUME if given.

    Every check has a verdict (ok, warn, fail) and a remedy. Exit code 0 unless one fails.

    \b
    Example:
      headrace doctor ./vol
    """
    from headrace.cli.doctor import examine, report

    return ExitCode.OK if report(examine(volume), as_json) else ExitCode.FAILURE


@cli.command()
@click.option("--source", metavar="PATH|TAR", help="Tree to use instead of Python's own files.")
@click.option("--keep", is_flag=True, help="Leave the volume and the mount to look around.")
@json_option
def demo(source: str | None, keep: bool, as_json: bool) -> ExitCode:
    """See it work on real files, in minutes.

    Imports them, mounts them, compares every byte, and feeds a simulated accelerator from plain files, from
    the mount and from the Loader. Takes less than three minutes in a temporary folder and leaves nothing
    behind.

    \b
    Example:
      headrace demo --source ~/pictures
    """
    from headrace.cli.demo import run_demo

    return run_demo(source, keep=keep, as_json=as_json)


@cli.command()
@json_option
def version(as_json: bool) -> None:
    """Print the version of Headrace.

    \b
    Example:
      headrace version
    """
    if as_json:
        print_json({"version": __version__, "python": sys.version.split()[0]})
    else:
        click.echo(f"headrace {__version__}")


def _interrupt(_signal: int, _frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def main() -> NoReturn:
    """The entry point: runs a command, ends the process with an ExitCode."""
    signal.signal(signal.SIGTERM, _interrupt)
    # Names that are not UTF-8 may reach stdout in messages: never a UnicodeEncodeError instead of them.
    for stream in (sys.stdout, sys.stderr):
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")
    sys.exit(_run())


def _run() -> int:
    try:
        # Not cli.main(): it answers Ctrl-C and a closed pipe in its own way, with its own exit codes.
        with cli.make_context("headrace", sys.argv[1:]) as context:
            result = cli.invoke(context)
        sys.stdout.flush()
        return int(result) if result is not None else ExitCode.OK
    except click.exceptions.Exit as end:  # --help
        return end.exit_code
    except click.ClickException as error:
        error.show()
        return ExitCode.BAD_ARGUMENTS
    except (click.Abort, KeyboardInterrupt) as error:
        if _debug:
            raise
        warn(str(error) or "interrupted")
        return ExitCode.INTERRUPTED
    except BrokenPipeError:
        # Whoever read our output has seen enough. The interpreter must not flush into the pipe again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return ExitCode.OK
    except (HeadraceError, OSError) as error:
        if _debug:
            raise
        warn(_sentence(error))
        return exit_code_of(error)


def _sentence(error: HeadraceError | OSError) -> str:
    if isinstance(error, HeadraceError):
        return error.message
    if error.filename is not None:
        name = error.filename if isinstance(error.filename, str) else os.fsdecode(error.filename)
        return f"{name}: {error.strerror}"
    return str(error)


if __name__ == "__main__":
    main()
