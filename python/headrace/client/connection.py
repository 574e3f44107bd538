"""Connections to a volume's engine: one request in flight on each, taken from a pool by whoever calls.

A `Connection` is used by one caller at a time. The `Pool` keeps idle ones: a call takes one (or makes one),
and puts it back when the answer was read whole; threads therefore never wait for each other. An exception in
mid-call closes the connection, since its stream is then out of step. An idle connection whose engine has
gone is noticed before a request is written, so that a restarted engine costs no error; an engine that ends
in mid-call is `Unavailable`, and the next call connects anew.

Fork: the child closes its copies of the parent's descriptors without touching their streams
(`os.register_at_fork`, and by process id where a fork came without it) and connects anew at its first call.
No threads, and no lock that a finalizer or a forked child could find held: idle connections stand in a deque,
whose append and pop are atomic.
"""

from __future__ import annotations

import errno
import itertools
import os
import select
import shlex
import socket
import weakref
from collections import deque
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from headrace.client.wire import HELLO, Buffer, Channel, Disconnected, Frame, decode_answer, encode
from headrace.errors import HeadraceError, Internal, Invalid, NotFound, Permission, Unavailable
from headrace.model.message import Request

# Enough for the threads that call at once; more are made and closed again.
_IDLE_MAX = 4
SOCKET = "engine.sock"
# sun_path of a Unix socket address holds 108 bytes, one of them the ending zero.
SOCKET_PATH_BYTES_MAX = 107

# Every open connection, for the fork hook. A dict: unlike a WeakSet's, its iteration is one atomic copy.
_live: dict[int, weakref.ref[Connection]] = {}
_numbers = itertools.count()


class Reply(NamedTuple):
    """An answer: its message, its payload (bytes, or how many went into the caller's buffer), descriptors
    that the caller owns."""

    ok: Any
    payload: bytes
    received_bytes: int
    fds: list[int]


class Connection:
    """One connection to one engine."""

    def __init__(self, channel: Channel, volume: str) -> None:
        self._number = next(_numbers)
        self.channel = channel
        self.volume = volume
        self.owner_pid = os.getpid()
        self.engine_pid = channel.peer_pid()
        self.closed = False
        self._prefix = HELLO
        _live[self._number] = weakref.ref(self)
        # Closes the socket of a connection that was dropped, at the process's end too.
        weakref.finalize(self, _close_dropped, channel, self._number)

    def usable(self) -> bool:
        """Whether a request may be written: ours, open, and the engine has neither left nor spoken."""
        if self.closed or self.owner_pid != os.getpid():
            return False
        poller = select.poll()
        poller.register(self.channel.fileno(), select.POLLIN)
        return not poller.poll(0)

    def call(
        self,
        request: Request,
        answer: Any = None,
        payload: Sequence[Buffer] = (),
        into: memoryview | None = None,
        fds: int = 0,
    ) -> Reply:
        """Sends `request` and reads its answer; `answer` is the type expected in it.

        Blocks until the engine answers; Ctrl-C ends the wait and the connection. `fds`: descriptors that
        must come with a good answer. Raises what the engine answers, or Unavailable.
        """
        if self.closed or self.owner_pid != os.getpid():
            raise Unavailable(
                f"this connection to the engine of volume {self.volume} is closed, or another process's: "
                "take a new one",
                errno.ENOTCONN,
            )
        meta = encode(request)
        try:
            frame = self._exchange(meta, payload, into)
        except Disconnected as error:
            raise self.lost() from error
        try:
            ok = decode_answer(frame.meta, answer)
            if len(frame.fds) != fds:
                raise Internal(
                    f"the engine sent {len(frame.fds)} descriptors where {fds} were due: are headrace and "
                    "headraced of one release?"
                )
        except BaseException:
            for fd in frame.fds:
                os.close(fd)
            raise
        if isinstance(frame.payload, int):
            return Reply(ok, b"", frame.payload, frame.fds)
        return Reply(ok, frame.payload, len(frame.payload), frame.fds)

    def _exchange(self, meta: bytes, payload: Sequence[Buffer], into: memoryview | None) -> Frame:
        try:
            self.send(meta, payload)
            return self.channel.receive(into)
        except Invalid:
            raise  # refused before the first byte: the stream is in step
        except BaseException:
            self.close()
            raise

    def send(self, meta: bytes, payload: Sequence[Buffer] = ()) -> None:
        self.channel.send(self._prefix, meta, payload)
        self._prefix = b""

    def lost(self) -> Unavailable:
        return Unavailable(
            f"the engine of volume {self.volume} (pid {self.engine_pid}) ended in mid-call: whether the call "
            f"took effect is not known; the next call connects anew. See {self.volume}/engine.log",
            errno.ECONNRESET,
        )

    def close(self) -> None:
        """Closes our end; never blocks, may be repeated."""
        self.closed = True
        _live.pop(self._number, None)
        self.channel.close()


def _close_dropped(channel: Channel, number: int) -> None:
    _live.pop(number, None)
    channel.close()


def _drop_inherited() -> None:
    """In a forked child: the parent's connections are not ours."""
    for reference in list(_live.values()):
        connection = reference()
        if connection is not None:
            connection.close()
    _live.clear()


os.register_at_fork(after_in_child=_drop_inherited)


class Pool:
    """Connections to the engine of one volume. Safe from any thread and after fork."""

    def __init__(self, connect: Callable[[], Connection]) -> None:
        self._connect = connect
        self._idle: deque[Connection] = deque()

    def take(self) -> Connection:
        """A usable connection that is the caller's alone, until `give`."""
        while True:
            connection = self._take_idle()
            if connection is None:
                return self._connect()
            if connection.usable():
                return connection
            connection.close()

    def _take_idle(self) -> Connection | None:
        try:
            return self._idle.pop()
        except IndexError:
            return None

    def give(self, connection: Connection) -> None:
        """Returns a connection that is in step and holds nothing."""
        if connection.closed or connection.owner_pid != os.getpid() or len(self._idle) >= _IDLE_MAX:
            connection.close()
        else:
            self._idle.append(connection)

    def call(
        self,
        request: Request,
        answer: Any = None,
        payload: Sequence[Buffer] = (),
        into: memoryview | None = None,
        fds: int = 0,
    ) -> Reply:
        """`Connection.call` on a connection of the pool."""
        connection = self.take()
        try:
            return connection.call(request, answer, payload, into, fds)
        finally:
            self.give(connection)

    def close(self) -> None:
        while self._idle:
            self._idle.pop().close()


def connect_socket(volume: str) -> Channel:
    """A channel to the engine that serves `volume`, or raises: NotFound when no engine listens there,
    Permission when its socket is not for this user."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        address = os.path.join(volume, SOCKET)
        if len(os.fsencode(address)) <= SOCKET_PATH_BYTES_MAX:
            sock.connect(address)
        else:
            _connect_through_descriptor(sock, volume)
    except (ConnectionRefusedError, FileNotFoundError, NotADirectoryError):
        sock.close()
        raise NotFound(f"no engine runs for volume {volume}") from None
    except PermissionError as error:
        sock.close()
        raise Permission(
            f"the engine of volume {volume} does not serve this user (uid {os.geteuid()}): work as "
            f"{owner_name(volume)}, or have it started for all with "
            f"`headrace up --system {shlex.quote(volume)}` as root",
            error.errno,
        ) from error
    except BaseException:
        sock.close()
        raise
    return Channel(sock)


def _connect_through_descriptor(sock: socket.socket, volume: str) -> None:
    # Only for long paths: /proc/self is closed to a process that has changed its user without exec.
    folder = os.open(volume, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not os.path.exists(f"/proc/self/fd/{folder}"):
            raise Invalid(
                f"the path {os.path.join(volume, SOCKET)} is longer than the {SOCKET_PATH_BYTES_MAX} bytes "
                "of a socket's address, and /proc/self/fd is closed to this process: move the volume",
                errno.ENAMETOOLONG,
            )
        sock.connect(f"/proc/self/fd/{folder}/{SOCKET}")
    finally:
        os.close(folder)


def of_os_error(doing: str, error: OSError) -> HeadraceError:
    """Our error for what the system answered while `doing`; the number decides the kind, as in the engine."""
    number = error.errno or errno.EIO
    kind = "invalid"
    for name, members in _KIND_OF_ERRNO.items():
        if number in members:
            kind = name
    return HeadraceError.of(kind, number, f"{doing}: {os.strerror(number)}")


_KIND_OF_ERRNO = {
    "not_found": {errno.ENOENT, errno.ESTALE, errno.ENODATA},
    "permission": {errno.EPERM, errno.EACCES, errno.EROFS},
    "full": {errno.ENOSPC, errno.EDQUOT, errno.EMFILE, errno.ENFILE, errno.ENOMEM},
    "unavailable": {errno.EAGAIN, errno.EINTR, errno.ETIMEDOUT, errno.ENOTCONN},
    "conflict": {errno.EEXIST, errno.ENOTEMPTY, errno.EBUSY},
    "internal": {errno.EIO},
}


def owner_name(path: str) -> str:
    """Who owns `path`, as "user alice (uid 1001)"."""
    import pwd

    try:
        uid = os.stat(path).st_uid
    except OSError:
        return "its owner"
    try:
        return f"user {pwd.getpwuid(uid).pw_name} (uid {uid})"
    except KeyError:
        return f"the user with uid {uid}"
