"""The engine's process: finding the binary, making a volume, starting, stopping, and saying what is wrong.

Connecting to a volume goes: check the folder (is it a volume, of a format we read, ours to use) -> connect to
its socket -> if nobody listens, start `headraced` and wait for its ready line -> connect. Any number of
processes may do so at once: the engine's lock lets one win, the others are told "conflict" and connect to the
winner. The engine outlives the process that started it (own session, log in the volume's folder) and leaves
by itself when nobody has used it for 15 minutes.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import shlex
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import msgspec

from headrace.client.connection import Connection, connect_socket, of_os_error, owner_name
from headrace.client.wire import Channel
from headrace.errors import (
    AlreadyExists,
    Conflict,
    Corrupt,
    HeadraceError,
    Internal,
    Invalid,
    NotADirectory,
    NotFound,
    Permission,
    Unavailable,
)
from headrace.model import clock
from headrace.model.message import VOLUME_FORMAT, WIRE, ErrorBody, Hello, Shutdown, Welcome

MARKER = "HEADRACE"
# Recovery reads the open segments and the metadata log; a minute is ten times what it takes on a slow disk.
START_SECONDS_MAX = 60.0
STOP_SECONDS_MAX = 60.0
# An engine that a client started leaves when unused for this long; `headrace up` gives 0 (never).
IDLE_EXIT_SECONDS = 900
CREATE_SECONDS_MAX = 10.0
_MADE_BEFORE_MARKER = {"meta", "segments", "manifests", MARKER, f"{MARKER}.unfinished"}
_LOG_TAIL_BYTES = 2000

# Process ids of engines that this process started, to be reaped when they end.
_started: set[int] = set()


class Marker(msgspec.Struct, frozen=True):
    """The file HEADRACE in a volume's folder."""

    headrace: str
    format: int
    volume: str
    created_ns: int


class Ready(msgspec.Struct, frozen=True):
    """What an engine says when it serves. `recovery`: a sentence for each thing it mended at this start."""

    pid: int
    volume: str
    socket: str
    recovery: list[str] = []


class _ReadyLine(msgspec.Struct, frozen=True):
    ready: Ready | None = None
    error: ErrorBody | None = None


# For a person who looks at what a rescue has brought back.
WHAT_SEGMENTS_LACK = (
    "removals and renames (a removed file may be back, a renamed one may have its old name), truncations and "
    "changes of mode, owner and time since a file's last write, whether a file that was being written was "
    "complete, empty files, folders by themselves and their modes, links, extended attributes, setuid bits, "
    "snapshots and sealed views"
)


class _CreateLine(msgspec.Struct, frozen=True):
    volume: str | None = None
    error: ErrorBody | None = None
    files: int = 0
    bytes: int = 0
    notes: list[str] = []


class Rescued(msgspec.Struct, frozen=True):
    """What `rescue` has brought back. `notes`: what is not as it was, one sentence each, 1,000 at most."""

    volume: str
    files: int
    bytes: int
    notes: list[str]


def volume_folder(volume: str | os.PathLike[str]) -> str:
    """The volume's folder as an absolute path. Raises Invalid for what is not a folder's path."""
    path = os.fspath(volume)
    if not isinstance(path, str) or not path or "\0" in path:
        raise Invalid(f"{volume!r} is not the path of a volume's folder")
    if "://" in path:
        raise Invalid(f"{path} is not supported: this release serves volumes that are folders, like ./vol")
    return os.path.abspath(path)


def find_engine() -> str:
    """Path of the `headraced` to run: $HEADRACE_ENGINE, else beside this Python's scripts, else on PATH.

    Raises NotFound saying where it was looked for.
    """
    chosen = os.environ.get("HEADRACE_ENGINE")
    if chosen:
        if not os.access(chosen, os.X_OK) or os.path.isdir(chosen):
            raise NotFound(f"HEADRACE_ENGINE names {chosen}, which is not a program: correct or unset it")
        return os.path.abspath(chosen)
    folders = [sysconfig.get_path("scripts"), os.path.dirname(sys.executable)]
    for folder in folders:
        candidate = os.path.join(folder, "headraced")
        if os.access(candidate, os.X_OK):
            return candidate
    found = shutil.which("headraced")
    if found is None:
        raise NotFound(
            f"headraced is neither in {folders[0]} nor on PATH: install the headrace wheel, run "
            "`make build`, or name it in HEADRACE_ENGINE"
        )
    return os.path.abspath(found)


def volume_of_place(text: str) -> str | None:
    """The volume's folder, if `text` is written like a place in a volume that is there (./vol:/path)."""
    ends = [
        at for at in range(len(text) - 1, 0, -1) if text[at] == ":" and text[at + 1 : at + 2] in ("", "/")
    ]
    return next((text[:at] for at in ends if os.path.exists(os.path.join(text[:at], MARKER))), None)


def check_volume(folder: str) -> Marker:
    """The marker of the volume in `folder`, or an error that says what is there instead and what to do.

    NotFound: nothing there. NotADirectory: a file. Invalid: no volume, or a newer format. Permission: not
    ours to read. Corrupt: the marker is damaged.
    """
    try:
        is_folder = os.path.isdir(folder) if os.stat(folder) else False
    except FileNotFoundError:
        whole = volume_of_place(folder)
        if whole is not None:
            raise Invalid(
                f"{folder} is a place in volume {whole}: give the volume's folder alone, and the path to the "
                "calls that take one"
            ) from None
        raise NotFound(
            f"volume {folder} does not exist: make it with `headrace create {shlex.quote(folder)}`"
        ) from None
    except NotADirectoryError:
        raise NotADirectory(f"volume {folder}: a part of this path is a file") from None
    except PermissionError:
        raise Permission(
            f"volume {folder}: a folder above it may not be entered by uid {os.geteuid()}"
        ) from None
    except OSError as error:
        raise of_os_error(f"look at volume {folder}", error) from error
    if not is_folder:
        raise NotADirectory(f"{folder} is a file; a volume is a folder: give the folder's path")
    try:
        raw = Path(folder, MARKER).read_bytes()
    except FileNotFoundError:
        raise Invalid(
            f"{folder} is a folder but not a volume (no file {MARKER} in it): make one in a new or empty "
            f"folder with `headrace create`"
        ) from None
    except PermissionError:
        raise Permission(
            f"volume {folder} belongs to {owner_name(folder)} and may not be read by uid {os.geteuid()}: "
            "work as its owner, or have it started for all with "
            f"`headrace up --system {shlex.quote(folder)}` as root"
        ) from None
    except OSError as error:
        raise of_os_error(f"read {folder}/{MARKER}", error) from error
    try:
        marker = msgspec.json.decode(raw, type=Marker)
    except msgspec.DecodeError as error:
        raise Corrupt(
            f"{folder}/{MARKER} is damaged ({error}): restore it from a backup, with the whole folder"
        ) from error
    if marker.headrace != "volume":
        raise Invalid(f"{folder} holds a headrace {marker.headrace!r}, not a volume")
    if marker.format > VOLUME_FORMAT:
        raise Invalid(
            f"volume {folder} holds format {marker.format}; this headrace reads 1-{VOLUME_FORMAT}: "
            "upgrade headrace"
        )
    return marker


def create(
    volume: str | os.PathLike[str],
    *,
    object: str | None = None,
    endpoint: str | None = None,
    region: str | None = None,
    flash_bytes_max: int | None = None,
    adopt: bool = False,
) -> str:
    """Makes a volume in a new or empty folder and returns its id. Starts nothing.

    object: `s3://bucket/prefix`, where the files are to be durable; the folder is then a cache of them, of
    `flash_bytes_max` bytes at most (default: most of what is free on its disk), and holds the metadata.
    Without it they are durable in the folder. endpoint, region: of the store; default as the AWS tools have
    it (AWS_ENDPOINT_URL_S3, AWS_REGION). Credentials come from the environment, here and whenever an engine
    starts, and are kept nowhere. The store is probed first, which takes some twenty requests and 5 MB.

    adopt: bring the volume back that is durable at `object`, from its last metadata backup: the whole tree is
    there when this returns (some seconds for a million files), bytes come as they are read. The volume is
    this folder's from then on; one that was made for it before uploads nothing more and says why.

    AlreadyExists: there is a volume, in the folder or under the prefix. Invalid: the store cannot be trusted
    with a volume (the message says what it does wrong). NotFound: no such bucket. Otherwise the engine's
    error: a folder that is not empty, no permission.
    """
    given = {
        "--object": object,
        "--endpoint": endpoint,
        "--region": region,
        "--flash-bytes-max": flash_bytes_max,
    }
    return _make(volume, given, ["--from"] if adopt else [])[0]


def rescue(
    volume: str | os.PathLike[str],
    object: str,
    *,
    endpoint: str | None = None,
    region: str | None = None,
    flash_bytes_max: int | None = None,
) -> Rescued:
    """Makes a volume of what the segments at `object` say about themselves, when no metadata is left.

    Every file of which a segment has bytes is there, under the last path that a segment knows, with its old
    inode number; no byte is copied. The prefix is this folder's from then on, as with
    `create(adopt=True)`, which knows more and is to be tried first. What segments do not hold cannot come
    back: see `WHAT_SEGMENTS_LACK`. Damaged segments are named in the notes and left out, and stay where they
    are.

    Reads the descriptions of all segments: one request for each pack of small files, some more for others.
    Errors as `create`; NotFound also if there is no segment.
    """
    given = {
        "--object": object,
        "--endpoint": endpoint,
        "--region": region,
        "--flash-bytes-max": flash_bytes_max,
    }
    made, line = _make(volume, given, ["--rescue"])
    return Rescued(made, line.files, line.bytes, line.notes)


def _make(
    volume: str | os.PathLike[str], given: dict[str, str | int | None], flags: list[str]
) -> tuple[str, _CreateLine]:
    folder = volume_folder(volume)
    if os.path.exists(os.path.join(folder, MARKER)):
        raise AlreadyExists(f"{folder} is a volume already: use it, or choose another folder")
    whole = volume_of_place(folder)
    if whole is not None and not os.path.lexists(folder):
        raise Invalid(f"{folder} is a place in volume {whole}: give a new folder outside it")
    options = [f"{name}={value}" for name, value in given.items() if value is not None]
    run = subprocess.run(
        [find_engine(), "create", "--volume", folder, *options, *flags],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        cwd="/",
        check=False,
    )
    line = run.stdout.strip().splitlines()[-1:] or [b""]
    try:
        answer = msgspec.json.decode(line[0], type=_CreateLine)
    except msgspec.DecodeError as error:
        raise Internal(
            f"headraced create {folder} ended with status {run.returncode} and said "
            f"{_tail_text(run.stdout + run.stderr)!r}"
        ) from error
    if answer.error is not None:
        raise HeadraceError.of(answer.error.kind, answer.error.errno, answer.error.message)
    if answer.volume is None:
        raise Internal(f"headraced create {folder} answered {line[0]!r}, without the volume's id")
    return answer.volume, answer


def create_if_missing(folder: str) -> None:
    """Makes a volume in `folder` unless there is one. Of many that try at once one does it, others wait."""
    if os.path.exists(os.path.join(folder, MARKER)):
        return
    try:
        create(folder)
    except Conflict:
        deadline_ns = clock.monotonic_ns() + int(CREATE_SECONDS_MAX * 1e9)
        while not os.path.exists(os.path.join(folder, MARKER)):
            # The marker comes last. What is there before it is another's volume in the making, or no volume.
            if set(os.listdir(folder)) - _MADE_BEFORE_MARKER or clock.monotonic_ns() > deadline_ns:
                raise
            clock.sleep_seconds(0.01)


def running_pid(volume: str | os.PathLike[str]) -> int | None:
    """Process id of the engine that listens for `volume`, or None. Needs permission to use its socket."""
    try:
        channel = connect_socket(volume_folder(volume))
    except NotFound:
        return None
    try:
        return channel.peer_pid()
    finally:
        channel.close()


def open_connection(folder: str, start_if_needed: bool = True) -> Connection:
    """A new connection to the engine of the volume in `folder`, started if need be, and greeted.

    Blocks while an engine starts, START_SECONDS_MAX at most. Raises what `check_volume` and `start` raise,
    Unavailable when no engine runs and none is to be started, Invalid when it speaks another wire version.
    """
    deadline_ns = clock.monotonic_ns() + int(START_SECONDS_MAX * 1e9)
    while True:
        connection = Connection(_connect_or_start(folder, start_if_needed), folder)
        try:
            greet(connection)
        except Unavailable:
            # An engine that is ending still takes connections into its queue. A greeting changes nothing, so
            # that it, unlike other requests, can be said again to the next one.
            if clock.monotonic_ns() > deadline_ns:
                raise
            clock.sleep_seconds(0.01)
        except BaseException:
            connection.close()
            raise
        else:
            return connection


def greet(connection: Connection) -> Welcome:
    """Who is at the other end. Raises Invalid if it speaks another wire version."""
    welcome: Welcome = connection.call(Hello(client="headrace-python"), Welcome).ok
    if welcome.wire != WIRE:
        raise Invalid(
            f"the engine of volume {connection.volume} (pid {welcome.pid}, {welcome.engine}) speaks wire "
            f"version {welcome.wire}, this headrace {WIRE}: stop it with "
            f"`headrace down {shlex.quote(connection.volume)}`, so that the installed one starts"
        )
    return welcome


def _connect_or_start(folder: str, start_if_needed: bool) -> Channel:
    try:
        return connect_socket(folder)
    except HeadraceError as error:
        failure = error
    # Not in the handler: what follows is not caused by the failed attempt.
    check_volume(folder)  # if the folder itself is the reason, that says more
    if not isinstance(failure, NotFound):
        raise failure
    if not start_if_needed:
        raise Unavailable(
            f"no engine runs for volume {folder}: start it with `headrace up {shlex.quote(folder)}`",
            errno.ECONNREFUSED,
        )
    _, channel = _start_or_join(folder, idle_exit_seconds=IDLE_EXIT_SECONDS)
    return channel


def start(
    volume: str | os.PathLike[str],
    *,
    memory_bytes: int | None = None,
    idle_exit_seconds: int = 0,
    system: bool = False,
) -> Ready | None:
    """Starts the engine of `volume` in the background and returns what it said; None if one ran already.

    memory_bytes: its memory budget, default the engine's. idle_exit_seconds: leave when unused for so long, 0
    never. system: serve all users (as root). Blocks until the engine serves, START_SECONDS_MAX at most.
    Raises what `check_volume` raises, what the engine says (Corrupt, Full, Permission), Unavailable when it
    does not get ready.
    """
    folder = volume_folder(volume)
    check_volume(folder)
    options = []
    if memory_bytes is not None:
        options += ["--memory-bytes", str(memory_bytes)]
    if system:
        options += ["--system"]
    ready, channel = _start_or_join(folder, idle_exit_seconds, options)
    channel.close()
    return ready


def _start_or_join(
    folder: str, idle_exit_seconds: int, options: list[str] | None = None
) -> tuple[Ready | None, Channel]:
    """A channel to the engine, and what it said at its start if it was this call that started it."""
    _check_startable(folder)
    command = [find_engine(), "serve", "--volume", folder, "--idle-exit-seconds", str(idle_exit_seconds)]
    command += options or []
    deadline_ns = clock.monotonic_ns() + int(START_SECONDS_MAX * 1e9)
    while True:
        outcome = _spawn(folder, command, deadline_ns)
        # Another engine has the lock. It is getting ready, or on its way out: then ours may start.
        patience_ns = clock.monotonic_ns() + 1_000_000_000
        while True:
            try:
                channel = connect_socket(folder)
            except NotFound:
                if clock.monotonic_ns() > patience_ns:
                    break
                clock.sleep_seconds(0.02)
            else:
                return (outcome if isinstance(outcome, Ready) else None), channel
        if clock.monotonic_ns() > deadline_ns:
            if isinstance(outcome, Conflict):
                raise Unavailable(
                    f"{outcome.message}; it has not answered for {START_SECONDS_MAX:.0f} s: see "
                    f"{folder}/engine.log",
                    errno.ETIMEDOUT,
                ) from outcome
            raise Unavailable(
                f"the engine of volume {folder} left again right after its start: see its engine.log"
            )


def _check_startable(folder: str) -> None:
    if os.access(folder, os.R_OK | os.W_OK | os.X_OK, effective_ids=True):
        return
    if os.statvfs(folder).f_flag & os.ST_RDONLY:
        raise Permission(
            f"volume {folder} lies on a file system mounted read-only: remount it read-write",
            errno.EROFS,
        )
    raise Permission(
        f"volume {folder} belongs to {owner_name(folder)} and may not be written by uid {os.geteuid()}: work "
        f"as its owner, or have it started for all with `headrace up --system {shlex.quote(folder)}` as root"
    )


def _spawn(folder: str, command: list[str], deadline_ns: int) -> Ready | Conflict:
    """Starts one engine and waits for its line. Conflict: another one owns the volume. Raises the rest."""
    log_path = os.path.join(folder, "engine.log")
    try:
        log = os.open(log_path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise of_os_error(f"open {log_path} for the engine's log", error) from error
    reader, writer = os.pipe()
    try:
        try:
            child = subprocess.Popen(
                [*command, "--ready-fd", str(writer)],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                cwd="/",
                start_new_session=True,
                pass_fds=(writer,),
            )
        except OSError as error:
            raise of_os_error(f"run {command[0]}", error) from error
        finally:
            os.close(writer)
            os.close(log)
        # The engine outlives us: Popen is neither to wait for it nor to warn; `_reap` collects it.
        child.returncode = 0
        _started.add(child.pid)
        line = _ready_line(reader, child.pid, folder, deadline_ns)
    finally:
        os.close(reader)
        _reap()
    if line.error is not None:
        refusal = HeadraceError.of(line.error.kind, line.error.errno, line.error.message)
        if isinstance(refusal, Conflict):
            return refusal
        raise refusal
    if line.ready is None:
        raise Internal(f"headraced said neither ready nor error for volume {folder}: see {log_path}")
    return line.ready


def _ready_line(reader: int, pid: int, folder: str, deadline_ns: int) -> _ReadyLine:
    raw = bytearray()
    poller = select.poll()
    poller.register(reader, select.POLLIN)
    while b"\n" not in raw:
        left_ms = (deadline_ns - clock.monotonic_ns()) // 1_000_000
        if left_ms <= 0 or not poller.poll(left_ms):
            raise Unavailable(
                f"the engine of volume {folder} (pid {pid}) is not ready after {START_SECONDS_MAX:.0f} s; it "
                f"goes on starting: try again later, and see {folder}/engine.log",
                errno.ETIMEDOUT,
            )
        piece = os.read(reader, 65536)
        if not piece:
            break
        raw += piece
    try:
        return msgspec.json.decode(bytes(raw), type=_ReadyLine)
    except msgspec.DecodeError as error:
        try:
            log = Path(folder, "engine.log").read_bytes()
        except OSError:
            log = b""
        raise Unavailable(
            f"the engine of volume {folder} (pid {pid}) ended before it was ready; the end of its log "
            f"{folder}/engine.log: {_tail_text(bytes(raw) + log)!r}"
        ) from error


def stop(volume: str | os.PathLike[str]) -> bool:
    """Stops the engine of `volume` cleanly and waits until its process is gone; False if none ran.

    Blocks while it flushes and unmounts, STOP_SECONDS_MAX at most, then Unavailable. Permission when it is
    not this user's engine.
    """
    folder = volume_folder(volume)
    connection: Connection | None = None
    with contextlib.suppress(NotFound):
        connection = Connection(connect_socket(folder), folder)
    if connection is None:
        check_volume(folder)
        return False
    pid = connection.engine_pid
    try:
        pidfd = os.pidfd_open(pid)
    except ProcessLookupError:
        connection.close()
        return True
    try:
        try:
            connection.call(Shutdown())
        except Unavailable:
            pass  # it left before it answered, which is what was asked
        finally:
            connection.close()
        poller = select.poll()
        poller.register(pidfd, select.POLLIN)
        if not poller.poll(STOP_SECONDS_MAX * 1000):
            raise Unavailable(
                f"the engine of volume {folder} (pid {pid}) is still stopping after {STOP_SECONDS_MAX:.0f} "
                f"s: see {folder}/engine.log; `kill -9 {pid}` loses nothing that was synced",
                errno.ETIMEDOUT,
            )
    finally:
        os.close(pidfd)
        _reap()
    return True


def _reap() -> None:
    """Collects engines that this process started and that have ended."""
    for pid in list(_started):
        try:
            done, _status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:  # collected elsewhere, or we are a forked child
            done = pid
        if done:
            _started.discard(pid)


def _tail_text(raw: bytes) -> str:
    return raw[-_LOG_TAIL_BYTES:].decode(errors="replace").strip()
