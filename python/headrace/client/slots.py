"""A stream of batches that the engine gathers ahead into shared-memory slots.

```text
client                                   engine
Loader request                ->         gathers `prefetch` batches ahead
                              <-         Batch(slot 3, layout) + memfd at the slot's first use
arrays over the slot ... all dropped
Release(slot 3)               ->         may fill slot 3 again
closes the connection         ->         ends the stream
```
**A kept batch is never overwritten.** Each delivery has an array of its own over the slot's map (`root`);
every array and view the user can hold keeps it alive, and its finalizer gives the slot back. Maps stay valid
when the stream has ended, since memory lives as long as it is mapped and the engine fills no slot of an ended
stream. What a user still holds when the process forks is never given back: the child sees the same pages.

Finalizers run in any thread, in the middle of anything, and after fork: they append to a deque and send
without waiting, under a lock that they only try; who holds it sends for them. Nothing is sent by a process
other than the one that opened the stream.
"""

from __future__ import annotations

import itertools
import os
import select
import threading
import weakref
from collections import deque
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from headrace.client.shared_memory import batch_over, map_descriptor
from headrace.client.wire import HEADER, Disconnected, Frame, decode, decode_answer, encode
from headrace.errors import HeadraceError, Internal, Unavailable
from headrace.model import message

if TYPE_CHECKING:
    import mmap

    from numpy.typing import NDArray

    from headrace.client.connection import Connection
    from headrace.model.batch import Batch

_Event = message.Batch | message.End | message.Error

_open_streams: dict[int, BatchStream] = {}
_numbers = itertools.count()


def _withdraw_before_fork() -> None:
    for stream in list(_open_streams.values()):
        stream.withdraw()


def _forget_in_child() -> None:
    _open_streams.clear()


os.register_at_fork(before=_withdraw_before_fork, after_in_child=_forget_in_child)


class BatchStream:
    """The batches of one epoch, in order, on a connection that it takes over. For one thread at a time."""

    def __init__(self, connection: Connection, request: message.Loader) -> None:
        self._connection = connection
        self._owner_pid = os.getpid()
        self._maps: dict[int, mmap.mmap] = {}
        self._held: set[int] = set()
        self._withdrawn: set[int] = set()
        self._to_release: deque[int] = deque()
        self._sending = threading.Lock()
        self._closed = False
        self._started = False
        self._number = next(_numbers)
        try:
            connection.send(encode(request))
        except Disconnected as error:
            connection.close()
            raise connection.lost() from error
        except BaseException:
            connection.close()
            raise
        _open_streams[self._number] = self

    @property
    def usable(self) -> bool:
        """False when closed, and in a forked child, which opens a stream of its own."""
        return not self._closed and self._owner_pid == os.getpid()

    def next(self) -> Batch | None:
        """The next batch, labels to be set; None at the end. Blocks until the engine has it; Ctrl-C ends it.

        Raises the engine's error (Corrupt, Full when all slots are kept), Unavailable when it ended. The
        stream is closed by any exception.
        """
        try:
            self._flush()
            if self._to_release:
                self._wait_to_send()
            frame = self._receive()
            return self._batch_of(frame)
        except Disconnected as error:
            self.close()
            raise Unavailable(
                f"the engine of volume {self._connection.volume} (pid {self._connection.engine_pid}) ended "
                "while batches were read: iterate again to start it anew (with state_dict() and "
                f"load_state_dict() at the same place). See {self._connection.volume}/engine.log"
            ) from error
        except BaseException:
            self.close()
            raise

    def _receive(self) -> Frame:
        frame = self._connection.channel.receive()
        if not self._started:
            self._started = True
            if "event" not in msgspec.msgpack.decode(frame.meta):
                decode_answer(frame.meta, None)  # raises what the request was refused with
                frame = self._connection.channel.receive()
        return frame

    def _batch_of(self, frame: Frame) -> Batch | None:
        try:
            event: _Event = decode(frame.meta, _Event)
            if isinstance(event, message.End):
                self.close()
                return None
            if isinstance(event, message.Error):
                raise HeadraceError.of(event.kind, event.errno, event.message)
            if frame.fds:
                self._maps[event.slot] = map_descriptor(frame.fds[0], event.layout.slot_bytes)
        finally:
            for fd in frame.fds:
                os.close(fd)
        mapped = self._maps.get(event.slot)
        if mapped is None:
            raise Internal(f"the engine sent a batch in slot {event.slot} and never the slot's memory")
        root: NDArray[np.uint8] = np.frombuffer(mapped, dtype=np.uint8)
        batch = batch_over(root, event.layout)
        batch.number = event.batch
        self._held.add(event.slot)
        finalizer = weakref.finalize(root, self._dropped, event.slot)
        finalizer.atexit = False  # the process's end gives everything back
        return batch

    def _dropped(self, slot: int) -> None:
        """The last view of the slot's batch is gone. Runs as a finalizer: see the file's header."""
        self._held.discard(slot)
        if slot not in self._withdrawn and self.usable:
            self._to_release.append(slot)
            self._flush()

    def withdraw(self) -> None:
        """Slots that are held now are never given back."""
        self._withdrawn.update(self._held.copy())

    def _flush(self) -> None:
        """Sends the releases that wait, unless another thread does or the socket is full."""
        while self._to_release and self.usable and self._sending.acquire(blocking=False):
            room = True
            try:
                while room and self._to_release:
                    slot = self._to_release.popleft()
                    meta = encode(message.Release(slot))
                    room = self._connection.channel.try_send(HEADER.pack(len(meta), 0, 0) + meta)
                    if not room:
                        self._to_release.appendleft(slot)
            except OSError:
                # The engine is gone: there is nobody to release to, and `next` says so to the user.
                self._to_release.clear()
            finally:
                self._sending.release()
            if not room:
                break
        if self._closed:
            self._close_connection()

    def _wait_to_send(self) -> None:
        """The socket was full: the engine may be waiting for these releases before it sends again."""
        poller = select.poll()
        poller.register(self._connection.channel.fileno(), select.POLLIN | select.POLLOUT)
        while self._to_release:
            _, happened = poller.poll()[0]
            if happened & select.POLLOUT:
                self._flush()
            if happened & ~select.POLLOUT:
                return

    def close(self) -> None:
        """Ends the stream; batches that are held stay valid. Never blocks, may be repeated."""
        self._closed = True
        _open_streams.pop(self._number, None)
        self._maps.clear()
        self._close_connection()

    def _close_connection(self) -> None:
        # Not while a finalizer sends: its descriptor's number could be another file's by then.
        if self._sending.acquire(blocking=False):
            try:
                self._connection.close()
            finally:
                self._sending.release()
