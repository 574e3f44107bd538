"""A reverse proxy before an S3 store that counts requests and breaks them as a test says.

    proxy.slow_down(first=2, method="GET", key=".pack")     two answers 503 SlowDown, then as before
    with proxy.cut_body(after_bytes=1000, operation="get"): every body is cut while the block lasts
    proxy.down(); ...; proxy.up()                           nobody listens, open connections are reset
    assert proxy.count(operation="put", kind="pack") == 1

Order of one request: written into the log; the *changes* of all rules that take it (`delay`,
`ignore_conditions`, `ignore_range`) are made; then the *fault* of the oldest rule that takes it happens, or
none. A rule whose fault another one forestalls keeps its turn. So does one whose fault the request gives no
chance (a flipped byte for an answer without a body): `rule.hits` counts what happened.

The Host header goes through unchanged: it is signed, and stores check the signature against what they
receive. Where a fault needs another request than the client signed, the proxy signs it anew with the store's
keys. What the log says of a request is written down before the client can see it.

One thread with an event loop; every method may be called from any thread. For low traffic.
"""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import hmac
import random
import re
import select
import socket
import struct
import termios
import threading
import time
import traceback
from collections import Counter
from collections.abc import AsyncIterator, Coroutine
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any, Literal, Self, TypedDict, TypeVar, Unpack
from urllib.parse import parse_qsl, unquote
from xml.sax.saxutils import escape

from support.objects import Access, address, free_ports
from support.system import wait_until

T = TypeVar("T")

Operation = Literal[
    "get", "head", "put", "copy", "delete",
    "create_upload", "upload_part", "complete_upload", "abort_upload",
    "list", "delete_many", "bucket",
]  # fmt: skip
Kind = Literal["marker", "pack", "file", "index", "backup", "other", "bucket"]

_CONDITIONS = ("if-match", "if-none-match", "if-modified-since", "if-unmodified-since")
_PIECE_BYTES = 256 * 1024
# How often a stall looks whether its client is still there.
_LOOK_SECONDS = 0.02


# What went through


@dataclass(frozen=True)
class Request:
    """One request and what became of it so far."""

    number: int
    at_seconds: float
    """Since the proxy started."""
    method: str
    operation: Operation
    bucket: str
    key: str
    kind: Kind
    query: str
    headers: dict[str, str]
    """Names in lower case; without the signature."""
    range: str | None = None
    """The Range header."""
    fault: str | None = None
    """The fault that happened to it, by the name of the method that made the rule."""
    store_status: int | None = None
    """What the store answered; None while it has not, or if it was not asked."""
    status: int | None = None
    """What the client was told; None while it was told nothing."""
    bytes_in: int = 0
    bytes_out: int = 0
    """Bytes of bodies, from the client and to it."""
    done: bool = False


class Selection(TypedDict, total=False):
    """Which requests; all of what is given must hold."""

    method: str
    operation: Operation
    kind: Kind
    key: str | re.Pattern[str]
    """A part of the key, or a pattern that is found in it."""


class Where(Selection, total=False):
    """Which requests a rule takes: of those selected, in the order in which they arrive."""

    skip: int
    """Lets so many pass at first."""
    every: int
    """Takes every nth."""
    probability: float
    """Takes them by chance, drawn from the proxy's seed."""
    first: int
    """Ends after so many hits."""
    for_seconds: float
    """Ends so long after it was made."""


# What a rule may do


@dataclass(frozen=True)
class Answer:
    """Answers by itself; the store is not asked."""

    status: int
    code: str
    message: str = "injected by the test"
    fields: tuple[tuple[str, str], ...] = ()
    headers: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class LoseRequest:
    """Ends the connection; the store is not asked."""

    how: Literal["reset", "close"]


@dataclass(frozen=True)
class BreakUpload:
    """Resets both connections after so many bytes of the request's body (None: half)."""

    after_bytes: int | None


@dataclass(frozen=True)
class LoseAnswer:
    """The store does its work; then the connection ends without a byte of the answer."""

    how: Literal["reset", "close"]


@dataclass(frozen=True)
class CutBody:
    """The body ends early (None: at half), by an orderly close or a reset."""

    after_bytes: int | None
    how: Literal["close", "reset"]


@dataclass(frozen=True)
class FlipByte:
    """One bit of the body's byte at this offset (None: in the middle) is another."""

    at: int | None


@dataclass(frozen=True)
class WrongRange:
    """The range beside the one that was asked for; "told": Content-Range says so, "hidden": it does not."""

    shift_bytes: int | None
    truth: Literal["told", "hidden"]


@dataclass(frozen=True)
class Stall:
    """Nothing happens for so long, or until the rule is removed; then all goes on."""

    seconds: float
    at: Literal["request", "answer", "body"]
    after_bytes: int | None = None


@dataclass(frozen=True)
class Delay:
    """A change: goes to the store later."""

    seconds: float


@dataclass(frozen=True)
class Drop:
    """A change: the store does not see these headers."""

    headers: tuple[str, ...]


Fault = Answer | LoseRequest | BreakUpload | LoseAnswer | CutBody | FlipByte | WrongRange | Stall
Change = Delay | Drop


@dataclass(eq=False)
class Rule:
    """A fault and the requests that it takes. As a context manager it is removed at the block's end."""

    name: str
    action: Fault | Change
    where: Where
    _proxy: FaultProxy
    _made_at: float
    hits: int = 0
    """Requests to which it happened."""
    removed: bool = False
    _seen: int = 0
    _taken: int = 0

    def remove(self) -> None:
        """Takes no more requests, and lets go those that it holds."""
        self._proxy._remove(self)

    def wait(self, hits: int = 1, seconds: float = 10.0) -> None:
        """Until it has happened so often."""
        wait_until(lambda: self.hits >= hits, seconds, f"{hits} hits of {self.name} {self.where}")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.remove()

    def _takes(self, request: Request, now: float, draw: random.Random) -> bool:
        """Whether it takes this request. Called once a request, since it counts and draws."""
        where = self.where
        if self.removed or now - self._made_at > where.get("for_seconds", float("inf")):
            return False
        if not _selected(request, where):
            return False
        self._seen += 1
        position = self._seen - where.get("skip", 0)
        if position <= 0 or position % where.get("every", 1):
            return False
        # Drawn whatever follows, so that the draws depend on the requests alone.
        lucky = "probability" not in where or draw.random() < where["probability"]
        if not lucky or self._taken >= where.get("first", self._taken + 1):
            return False
        self._taken += 1
        return True


def _selected(request: Request, selection: Selection) -> bool:
    key = selection.get("key", "")
    found = key in request.key if isinstance(key, str) else key.search(request.key) is not None
    return (
        found
        and request.method == selection.get("method", request.method)
        and request.operation == selection.get("operation", request.operation)
        and request.kind == selection.get("kind", request.kind)
    )


# HTTP/1.1


class _Gone(Exception):
    """The connection cannot go on. It is closed, or reset if `reset`."""

    def __init__(self, *, reset: bool) -> None:
        super().__init__("reset" if reset else "close")
        self.reset = reset


@dataclass(frozen=True)
class _Head:
    """The first line of a message, in three words, and its headers as they came."""

    line: tuple[str, str, str]
    headers: tuple[tuple[str, str], ...]

    def get(self, name: str) -> str | None:
        values = [value for found, value in self.headers if found.lower() == name]
        return ",".join(values) if values else None

    def without(self, *names: str) -> _Head:
        return replace(self, headers=tuple(pair for pair in self.headers if pair[0].lower() not in names))

    def with_header(self, name: str, value: str) -> _Head:
        return replace(self, headers=(*self.without(name.lower()).headers, (name, value)))

    @property
    def ends_connection(self) -> bool:
        return "HTTP/1.0" in self.line or "close" in (self.get("connection") or "").lower()

    @property
    def status(self) -> int:
        return int(self.line[1])

    def body_bytes(self) -> int | None:
        """Length of the body, None if it comes in chunks."""
        if "chunked" in (self.get("transfer-encoding") or "").lower():
            return None
        return int(self.get("content-length") or 0)

    def encode(self) -> bytes:
        lines = [" ".join(self.line).rstrip(), *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")


async def _read_head(reader: asyncio.StreamReader) -> _Head | None:
    """None if the other side closed between two messages."""
    try:
        raw = await reader.readuntil(b"\r\n\r\n")
    except asyncio.IncompleteReadError as error:
        if error.partial:
            raise ConnectionError("the other side closed inside a head") from error
        return None
    first, *rest = raw.decode("latin-1")[:-4].split("\r\n")
    words = [*first.split(" ", 2), "", ""]
    headers = []
    for line in rest:
        name, _, value = line.partition(":")
        headers.append((name, value.strip()))
    return _Head((words[0], words[1], words[2]), tuple(headers))


async def _body(reader: asyncio.StreamReader, length: int | None) -> AsyncIterator[bytes]:
    """The body's pieces, as they are on the wire: chunks keep their frames."""
    while length is None:
        frame = await reader.readuntil(b"\r\n")
        size = int(frame.split(b";")[0], 16)
        if size == 0:
            trailer = b""
            while not (frame + trailer).endswith(b"\r\n\r\n"):
                trailer += await reader.readuntil(b"\r\n")
            yield frame + trailer
            return
        yield frame + await reader.readexactly(size + 2)
    while length:
        piece = await reader.read(min(length, _PIECE_BYTES))
        if not piece:
            raise ConnectionError(f"the other side closed with {length} bytes of a body to come")
        length -= len(piece)
        yield piece


async def _rest(reader: asyncio.StreamReader) -> AsyncIterator[bytes]:
    """A body that ends with the connection."""
    while piece := await reader.read(_PIECE_BYTES):
        yield piece


def _sign(head: _Head, access: Access) -> _Head:
    """The request signed anew: for the headers that it still has, and the same time and body hash."""
    authorization = head.get("authorization")
    if authorization is None:
        return head
    match = re.fullmatch(
        r"AWS4-HMAC-SHA256 Credential=([^/]+)/([^,]+), *SignedHeaders=([^,]+), *Signature=\w+", authorization
    )
    if match is None:
        raise ValueError(f"cannot sign a request anew whose authorization is {authorization[:60]!r}")
    key_id, scope, names = match.groups()
    if key_id != access.access_key:
        raise ValueError(f"cannot sign for {key_id}: the proxy was given the keys of {access.access_key}")
    signed = [name for name in names.split(";") if head.get(name) is not None]
    method, target, _ = head.line
    path, _, query = target.partition("?")
    fields = sorted(part if "=" in part else f"{part}=" for part in query.split("&") if part)
    lines = [f"{name}:{' '.join((head.get(name) or '').split())}\n" for name in signed]
    payload = head.get("x-amz-content-sha256") or "UNSIGNED-PAYLOAD"
    if payload.startswith("STREAMING-AWS4-HMAC"):
        raise ValueError("cannot sign a request anew whose body carries signatures of its own")
    canonical = "\n".join([method, path, "&".join(fields), "".join(lines), ";".join(signed), payload])
    digest = hashlib.sha256(canonical.encode("latin-1")).hexdigest()
    text = "\n".join(["AWS4-HMAC-SHA256", head.get("x-amz-date") or "", scope, digest])
    key = b"AWS4" + access.secret_key.encode()
    for word in [*scope.split("/"), text]:
        key = hmac.new(key, word.encode(), hashlib.sha256).digest()
    names = ";".join(signed)
    return head.with_header(
        "Authorization",
        f"AWS4-HMAC-SHA256 Credential={key_id}/{scope}, SignedHeaders={names}, Signature={key.hex()}",
    )


def _describe(number: int, at_seconds: float, head: _Head) -> Request:
    method, target, _ = head.line
    path, _, query = target.partition("?")
    bucket, _, key = unquote(path).lstrip("/").partition("/")
    names = {name for name, _ in parse_qsl(query, keep_blank_values=True)}
    return Request(
        number=number,
        at_seconds=at_seconds,
        method=method,
        operation=_operation(method, key, names, copies=head.get("x-amz-copy-source") is not None),
        bucket=bucket,
        key=key,
        kind=_kind(key),
        query=query,
        headers={name.lower(): value for name, value in head.headers if name.lower() != "authorization"},
        range=head.get("range"),
    )


def _operation(method: str, key: str, query: set[str], *, copies: bool) -> Operation:
    match method:
        case "GET" if not key:
            about = {"location", "versioning", "uploads", "policy", "acl", "lifecycle", "encryption"}
            return "bucket" if query & about else "list"
        case "POST" if not key and "delete" in query:
            return "delete_many"
        case _ if not key:
            return "bucket"
        case "GET":
            return "get"
        case "HEAD":
            return "head"
        case "PUT":
            return "upload_part" if "partNumber" in query else "copy" if copies else "put"
        case "POST":
            return "create_upload" if "uploads" in query else "complete_upload"
        case "DELETE":
            return "abort_upload" if "uploadId" in query else "delete"
    return "bucket"


def _kind(key: str) -> Kind:
    last = key.rpartition("/")[2]
    suffixes: dict[str, Kind] = {"pack": "pack", "file": "file", "idx": "index"}
    if not key:
        return "bucket"
    if last == "HEADRACE":
        return "marker"
    if "/backups/" in f"/{key}":
        return "backup"
    return suffixes.get(last.rpartition(".")[2], "other")


# The proxy


@dataclass
class _Connection:
    """A client's connection and the one to the store that goes with it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter
    store: tuple[asyncio.StreamReader, asyncio.StreamWriter] | None = None


@dataclass
class _Pending:
    """One request on its way: its place in the log, the rule whose fault it gets (None: no chance for it)."""

    number: int
    head: _Head
    rule: Rule | None
    hit: bool = False
    changes: list[Change] = field(default_factory=list)

    @property
    def fault(self) -> Fault | None:
        action = None if self.rule is None else self.rule.action
        return None if isinstance(action, Delay | Drop) else action


class FaultProxy:
    """The proxy before the store that `store` reaches; clients use `access`. Ends with `close` or its block.

    problems: what went wrong in the proxy itself, or with a rule that could not do what it says; empty in a
    good test (the fixture checks).
    """

    def __init__(self, store: Access, *, seed: int = 0) -> None:
        self._store = store
        self._port = free_ports(1)
        self.access = replace(store, endpoint=f"http://127.0.0.1:{self._port}")
        self.problems: list[str] = []
        self._draw = random.Random(seed)
        self._lock = threading.Lock()
        self._log: list[Request] = []
        self._log_from = 0
        self._rules: list[Rule] = []
        self._started_at = time.monotonic()
        self._loop = asyncio.new_event_loop()
        self._listener: socket.socket | None = None
        self._accepted: set[socket.socket] = set()
        self._connections: set[asyncio.Task[None]] = set()
        self._resetting = False
        self._thread = threading.Thread(target=self._loop.run_forever, name="fault-proxy", daemon=True)
        self._thread.start()
        self.up()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def endpoint(self) -> str:
        return self.access.endpoint

    def close(self) -> None:
        """Resets what is open and ends. Again: nothing."""
        if self._loop.is_closed():
            return
        self.down()
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10.0)
        self._loop.close()

    # What went through

    def requests(self, **selection: Unpack[Selection]) -> list[Request]:
        """Those since the start or the last `reset`, oldest first, with those under way."""
        with self._lock:
            log = list(self._log)
        return [request for request in log if _selected(request, selection)]

    def count(self, **selection: Unpack[Selection]) -> int:
        return len(self.requests(**selection))

    def counts(self) -> Counter[tuple[str, str]]:
        """Requests by (method, kind of key)."""
        return Counter((request.method, request.kind) for request in self.requests())

    def bytes_out(self, **selection: Unpack[Selection]) -> int:
        """Bytes of bodies that clients were given."""
        return sum(request.bytes_out for request in self.requests(**selection))

    def reset(self) -> None:
        """Empties the log; rules stay. Requests under way are not counted any more."""
        with self._lock:
            self._log_from += len(self._log)
            self._log.clear()

    def wait_for(
        self, count: int = 1, seconds: float = 10.0, **selection: Unpack[Selection]
    ) -> list[Request]:
        """Waits until so many requests have arrived, and returns them."""
        wait_until(lambda: self.count(**selection) >= count, seconds, f"{count} requests {selection}")
        return self.requests(**selection)

    # Faults in answers

    def answer(
        self,
        status: int,
        code: str,
        *,
        message: str = "injected by the test",
        fields: tuple[tuple[str, str], ...] = (),
        headers: tuple[tuple[str, str], ...] = (),
        **where: Unpack[Where],
    ) -> Rule:
        """Answers with this status and an S3 error of this code; the store is not asked."""
        return self._add("answer", Answer(status, code, message, fields, headers), where)

    def slow_down(self, *, retry_after_seconds: int | None = None, **where: Unpack[Where]) -> Rule:
        """503 SlowDown."""
        after = () if retry_after_seconds is None else (("Retry-After", str(retry_after_seconds)),)
        action = Answer(503, "SlowDown", "Please reduce your request rate.", headers=after)
        return self._add("slow_down", action, where)

    def internal_error(self, **where: Unpack[Where]) -> Rule:
        """500 InternalError."""
        return self._add("internal_error", Answer(500, "InternalError"), where)

    def access_denied(self, **where: Unpack[Where]) -> Rule:
        """403 AccessDenied."""
        return self._add("access_denied", Answer(403, "AccessDenied", "Access Denied"), where)

    def expired_token(self, status: int = 400, **where: Unpack[Where]) -> Rule:
        """ExpiredToken, for which S3's table of errors says 400; other stores and STS say 403."""
        action = Answer(status, "ExpiredToken", "The provided token has expired.")
        return self._add("expired_token", action, where)

    def no_such_key(self, **where: Unpack[Where]) -> Rule:
        """404 NoSuchKey: a listing or a read that lags behind, or an object that somebody deleted."""
        return self._add("no_such_key", Answer(404, "NoSuchKey", "The specified key does not exist."), where)

    def wrong_region(
        self, region: str = "eu-west-1", status: Literal[301, 400] = 301, **where: Unpack[Where]
    ) -> Rule:
        """301 PermanentRedirect without a Location, or 400 AuthorizationHeaderMalformed; names the region."""
        hint = (("x-amz-bucket-region", region),)
        if status == 301:
            message = (
                "The bucket you are attempting to access must be addressed using the specified endpoint."
            )
            endpoint = (("Endpoint", f"s3.{region}.amazonaws.com"),)
            action = Answer(301, "PermanentRedirect", message, fields=endpoint, headers=hint)
        else:
            message = f"The authorization header is malformed; expecting '{region}'"
            action = Answer(400, "AuthorizationHeaderMalformed", message, (("Region", region),), hint)
        return self._add("wrong_region", action, where)

    # Faults of connections

    def lose_request(self, how: Literal["reset", "close"] = "reset", **where: Unpack[Where]) -> Rule:
        """The connection ends before an answer; the store never saw the request."""
        return self._add("lose_request", LoseRequest(how), where)

    def lose_answer(self, how: Literal["reset", "close"] = "reset", **where: Unpack[Where]) -> Rule:
        """The store did what was asked, and the client does not learn it: the unknown outcome of a PUT."""
        return self._add("lose_answer", LoseAnswer(how), where)

    def break_upload(self, after_bytes: int | None = None, **where: Unpack[Where]) -> Rule:
        """The request's body breaks off (None: at half), for the client and for the store."""
        return self._add("break_upload", BreakUpload(after_bytes), where)

    def stall(
        self,
        seconds: float,
        at: Literal["request", "answer", "body"] = "answer",
        *,
        after_bytes: int | None = None,
        **where: Unpack[Where],
    ) -> Rule:
        """Nothing for so long: before the store is asked, before the answer's head, or inside its body
        (`after_bytes` of it came; None: half). Then all goes on. `remove` ends the stall at once."""
        return self._add("stall", Stall(seconds, at, after_bytes), where)

    def hold(self, at: Literal["request", "answer"] = "request", **where: Unpack[Where]) -> Rule:
        """Holds requests until `remove`: a crash window. `rule.wait()` returns when one is held."""
        return self._add("hold", Stall(float("inf"), at), where)

    # Faults in bodies of good answers

    def cut_body(self, after_bytes: int | None = None, **where: Unpack[Where]) -> Rule:
        """An orderly close after so many bytes (None: half); Content-Length promised all."""
        return self._add("cut_body", CutBody(after_bytes, "close"), where)

    def break_body(self, after_bytes: int | None = None, **where: Unpack[Where]) -> Rule:
        """A reset after so many bytes (None: half): how a 500 looks when the head is sent already."""
        return self._add("break_body", CutBody(after_bytes, "reset"), where)

    def flip_byte(self, at: int | None = None, **where: Unpack[Where]) -> Rule:
        """One bit of the body's byte at this offset (None: the middle one) is another."""
        return self._add("flip_byte", FlipByte(at), where)

    def wrong_range(self, shift_bytes: int | None = None, **where: Unpack[Where]) -> Rule:
        """A 206 whose Content-Range, rightly, names another range than was asked for.

        Only requests for a range with both ends are taken. shift_bytes None: one byte earlier, or later
        where the range begins at 0."""
        return self._add("wrong_range", WrongRange(shift_bytes, "told"), where)

    def wrong_bytes(self, shift_bytes: int | None = None, **where: Unpack[Where]) -> Rule:
        """A 206 with the Content-Range that was asked for and the bytes beside it: only a checksum tells."""
        return self._add("wrong_bytes", WrongRange(shift_bytes, "hidden"), where)

    # Changes

    def delay(self, seconds: float, **where: Unpack[Where]) -> Rule:
        """Each request goes to the store so much later. Faults of other rules happen besides."""
        return self._add("delay", Delay(seconds), where)

    def ignore_conditions(self, **where: Unpack[Where]) -> Rule:
        """The store that lies: If-None-Match, If-Match and their like are not looked at."""
        return self._add("ignore_conditions", Drop(_CONDITIONS), where)

    def ignore_range(self, **where: Unpack[Where]) -> Rule:
        """The store knows no ranges: 200 with the whole object."""
        return self._add("ignore_range", Drop(("range",)), where)

    # Rules

    def clear(self) -> None:
        """Removes all rules."""
        with self._lock:
            for rule in self._rules:
                rule.removed = True
            self._rules.clear()

    def _add(self, name: str, action: Fault | Change, where: Where) -> Rule:
        rule = Rule(name, action, where, self, time.monotonic())
        with self._lock:
            self._rules.append(rule)
        return rule

    def _remove(self, rule: Rule) -> None:
        with self._lock:
            rule.removed = True
            if rule in self._rules:
                self._rules.remove(rule)

    # Down and up

    def down(self, how: Literal["refuse", "reset"] = "refuse") -> None:
        """Resets all connections; new ones are refused, or accepted and reset. Until `up`."""
        self._call(self._down(how))

    def up(self) -> None:
        self._call(self._up())

    def _call(self, coroutine: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(coroutine, self._loop).result(10.0)

    async def _down(self, how: Literal["refuse", "reset"]) -> None:
        if how == "reset":
            await self._up()
        self._resetting = how == "reset"
        if how == "refuse" and self._listener is not None:
            self._loop.remove_reader(self._listener)
            self._listener.close()
            self._listener = None
        tasks = list(self._connections)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        # A task that was cancelled before its first step could not close what it was given.
        while self._accepted:
            _close_by_reset(self._accepted.pop())

    async def _up(self) -> None:
        self._resetting = False
        if self._listener is not None:
            return
        listener = socket.socket()
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.setblocking(False)
            listener.bind(address(self.endpoint))
            listener.listen(256)
        except BaseException:
            listener.close()
            raise
        self._listener = listener
        self._loop.add_reader(listener, self._accept, listener)

    def _accept(self, listener: socket.socket) -> None:
        # Not a task that awaits sock_accept: cancelled in the wrong moment, that loses what it accepted.
        try:
            client, _ = listener.accept()
        except (BlockingIOError, ConnectionAbortedError):
            return
        except OSError:
            self.problems.append(traceback.format_exc())
            return
        if self._resetting:
            return _close_by_reset(client)
        client.setblocking(False)
        self._accepted.add(client)
        task = self._loop.create_task(self._serve(client))
        self._connections.add(task)
        task.add_done_callback(self._connections.discard)

    # One connection

    async def _serve(self, client: socket.socket) -> None:
        self._accepted.discard(client)
        client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        try:
            reader, writer = await asyncio.open_connection(sock=client, limit=_PIECE_BYTES)
        except BaseException:
            _close_by_reset(client)
            raise
        connection = _Connection(reader, writer)
        reset = True
        try:
            while (head := await _read_head(reader)) is not None:
                await self._exchange(connection, head)
                if head.ends_connection:
                    break
            reset = False
        except _Gone as gone:
            reset = gone.reset
        except (OSError, asyncio.IncompleteReadError):
            # One side ended in the middle; the other one learns it as it would without a proxy.
            pass
        except Exception:  # noqa: BLE001  # the test must hear of it
            self.problems.append(traceback.format_exc())
        finally:
            # Also when cancelled by `down`.
            if connection.store is not None:
                _reset(connection.store[1])
            if reset:
                _reset(writer)
            else:
                writer.close()
                with suppress(OSError):
                    await writer.wait_closed()

    async def _exchange(self, connection: _Connection, head: _Head) -> None:
        pending = self._arrive(head)
        taken_by = pending.rule
        try:
            await self._changes_and_fault(connection, pending)
        finally:
            if taken_by is not None and not pending.hit:
                with self._lock:
                    taken_by._taken -= 1
            self._note(pending, done=True)

    async def _changes_and_fault(self, connection: _Connection, pending: _Pending) -> None:
        head = pending.head
        sent = head.without("expect")
        for change in pending.changes:
            if isinstance(change, Delay):
                await asyncio.sleep(change.seconds)
            else:
                sent = sent.without(*change.headers)
        match pending.fault:
            case LoseRequest(how):
                if how == "close":
                    # Closing with unread bytes would be a reset.
                    await self._drain_request(connection, pending)
                self._hit(pending)
                raise _Gone(reset=how == "reset")
            case Answer() as answer:
                await self._drain_request(connection, pending)
                self._hit(pending)
                return await self._answer(connection, pending, answer)
            case Stall(seconds, "request"):
                self._hit(pending)
                await self._stand_still(connection, pending, seconds)
            case WrongRange(shift):
                moved = _moved_range(head.get("range"), shift)
                if moved is None:
                    pending.rule = None
                else:
                    sent = sent.with_header("Range", moved)
        if sent.headers != head.without("expect").headers:
            sent = _sign(sent, self._store)
        answer_head, store_reader = await self._ask(connection, pending, sent)
        await self._pass_back(connection, pending, answer_head, store_reader)
        if answer_head.ends_connection:
            raise _Gone(reset=False)

    async def _answer(self, connection: _Connection, pending: _Pending, answer: Answer) -> None:
        fields = [("Code", answer.code), ("Message", answer.message), *answer.fields]
        inner = "".join(f"<{name}>{escape(value)}</{name}>" for name, value in fields)
        path = escape(pending.head.line[1].partition("?")[0])
        body = (
            f'<?xml version="1.0" encoding="UTF-8"?>\n<Error>{inner}<Resource>{path}</Resource>'
            f"<RequestId>{pending.number}</RequestId></Error>"
        ).encode()
        headers = [
            ("Content-Type", "application/xml"),
            ("Content-Length", str(len(body))),
            ("x-amz-request-id", str(pending.number)),
            *answer.headers,
        ]
        sent = b"" if pending.head.line[0] == "HEAD" else body
        self._note(pending, status=answer.status, more_out=len(sent))
        line = ("HTTP/1.1", str(answer.status), answer.code)
        connection.writer.write(_Head(line, tuple(headers)).encode() + sent)
        await connection.writer.drain()

    # To the store

    async def _request_body(self, connection: _Connection, pending: _Pending) -> AsyncIterator[bytes]:
        length = pending.head.body_bytes()
        if length != 0 and "100-continue" in (pending.head.get("expect") or "").lower():
            connection.writer.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        async for piece in _body(connection.reader, length):
            self._note(pending, more_in=len(piece))
            yield piece

    async def _drain_request(self, connection: _Connection, pending: _Pending) -> None:
        async for _ in self._request_body(connection, pending):
            pass

    async def _ask(
        self, connection: _Connection, pending: _Pending, sent: _Head
    ) -> tuple[_Head, asyncio.StreamReader]:
        reader, writer = await self._store_connection(connection)
        breaks_at: int | None = None
        if isinstance(pending.fault, BreakUpload):
            breaks_at = _offset(pending.fault.after_bytes, sent.body_bytes())
            if breaks_at is None:
                pending.rule = None
        writer.write(sent.encode())
        done = 0
        async for piece in self._request_body(connection, pending):
            if breaks_at is not None and done + len(piece) > breaks_at:
                self._hit(pending)
                writer.write(piece[: breaks_at - done])
                await _flush(writer)
                raise _Gone(reset=True)
            done += len(piece)
            # A store may refuse before it has read all: its answer is what counts.
            with suppress(ConnectionError):
                writer.write(piece)
                await writer.drain()
        while True:
            head = await _read_head(reader)
            if head is None:
                raise ConnectionError("the store closed without an answer")
            if head.status >= 200:
                break
        self._note(pending, store_status=head.status)
        return head, reader

    async def _store_connection(
        self, connection: _Connection
    ) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        if connection.store is not None and connection.store[0].at_eof():
            # The store closed an idle connection: that is no fault of this request's.
            _reset(connection.store[1])
            connection.store = None
        if connection.store is None:
            host, port = address(self._store.endpoint)
            connection.store = await asyncio.open_connection(host, port, limit=_PIECE_BYTES)
        return connection.store

    # Back to the client

    async def _pass_back(
        self, connection: _Connection, pending: _Pending, head: _Head, store: asyncio.StreamReader
    ) -> None:
        bodiless = pending.head.line[0] == "HEAD" or head.status in (204, 304)
        length = 0 if bodiless else head.body_bytes()
        ends = head.ends_connection and not bodiless and head.get("content-length") is None and length == 0
        body = _rest(store) if ends else _body(store, length)
        good = 200 <= head.status < 300
        at: int | None = None
        match pending.fault:
            case LoseAnswer(how):
                async for _ in body:
                    pass
                self._hit(pending)
                raise _Gone(reset=how == "reset")
            case Stall(seconds, "answer"):
                self._hit(pending)
                await self._stand_still(connection, pending, seconds)
            case WrongRange(_, truth):
                head = self._rename_range(pending, head, truth)
            case CutBody(after_bytes) | FlipByte(after_bytes) | Stall(_, "body", after_bytes):
                at = _offset(after_bytes, length) if good else None
                if at is None:
                    pending.rule = None
        self._note(pending, status=head.status)
        connection.writer.write(head.encode())
        position = 0
        async for piece in body:
            if at is not None and at < position + len(piece):
                self._hit(pending)
                piece = await self._spoil(connection, pending, piece, at - position)
                position = at
                at = None
            position += len(piece)
            await self._send(connection, pending, piece)

    async def _spoil(self, connection: _Connection, pending: _Pending, piece: bytes, at: int) -> bytes:
        """What the fault says, at offset `at` of `piece`; what comes before is sent, the rest returned."""
        await self._send(connection, pending, piece[:at])
        rest = piece[at:]
        match pending.fault:
            case CutBody(_, how):
                await _flush(connection.writer)
                raise _Gone(reset=how == "reset")
            case FlipByte():
                rest = bytes([rest[0] ^ 1]) + rest[1:]
            case Stall(seconds):
                await self._stand_still(connection, pending, seconds)
        return rest

    async def _send(self, connection: _Connection, pending: _Pending, piece: bytes) -> None:
        self._note(pending, more_out=len(piece))
        connection.writer.write(piece)
        await connection.writer.drain()

    def _rename_range(self, pending: _Pending, head: _Head, truth: Literal["told", "hidden"]) -> _Head:
        if head.status not in (206, 416):
            pending.rule = None
            return head
        asked = _both_ends(pending.head.get("range"))
        told = re.fullmatch(r"bytes (\d+)-(\d+)/(\d+)", head.get("content-range") or "")
        if asked is None or told is None or int(told[2]) - int(told[1]) != asked[1] - asked[0]:
            self.problems.append(
                f"{pending.rule and pending.rule.name}: the range beside {pending.head.get('range')} of "
                f"{pending.head.line[1]} is not as long ({head.status}, {head.get('content-range')}): "
                "ask for less than the whole object, or shift otherwise"
            )
            return head
        self._hit(pending)
        if truth == "told":
            return head
        return head.with_header("Content-Range", f"bytes {asked[0]}-{asked[1]}/{told[3]}")

    async def _stand_still(self, connection: _Connection, pending: _Pending, seconds: float) -> None:
        rule = pending.rule
        until = self._loop.time() + seconds
        while rule is not None and not rule.removed and self._loop.time() < until:
            if _has_left(connection.writer):
                raise _Gone(reset=True)
            await asyncio.sleep(min(_LOOK_SECONDS, max(0.0, until - self._loop.time())))

    # The log

    def _arrive(self, head: _Head) -> _Pending:
        now = time.monotonic()
        with self._lock:
            number = self._log_from + len(self._log)
            request = _describe(number, now - self._started_at, head)
            self._log.append(request)
            pending = _Pending(number, head, None)
            for rule in self._rules:
                if isinstance(rule.action, Delay | Drop):
                    if rule._takes(request, now, self._draw):
                        rule.hits += 1
                        pending.changes.append(rule.action)
                elif pending.rule is None and rule._takes(request, now, self._draw):
                    pending.rule = rule
        return pending

    def _hit(self, pending: _Pending) -> None:
        """The fault happens now: said before the client can notice."""
        if pending.rule is not None:
            pending.hit = True
            with self._lock:
                pending.rule.hits += 1
            self._note(pending, fault=pending.rule.name)

    def _note(self, pending: _Pending, *, more_in: int = 0, more_out: int = 0, **facts: Any) -> None:
        with self._lock:
            place = pending.number - self._log_from
            if place < 0:
                return  # reset since
            request = self._log[place]
            more = {"bytes_in": request.bytes_in + more_in, "bytes_out": request.bytes_out + more_out}
            self._log[place] = replace(request, **(more | facts))


def _offset(wanted: int | None, length: int | None) -> int | None:
    """The byte of a body where a fault happens; None if the body is empty or comes in chunks."""
    if not length:
        return None
    return min(length // 2 if wanted is None else wanted, length - 1)


def _both_ends(header: str | None) -> tuple[int, int] | None:
    match = re.fullmatch(r"bytes=(\d+)-(\d+)", header or "")
    return None if match is None else (int(match[1]), int(match[2]))


def _moved_range(header: str | None, shift_bytes: int | None) -> str | None:
    ends = _both_ends(header)
    if ends is None:
        return None
    shift = shift_bytes if shift_bytes is not None else -1 if ends[0] else 1
    return f"bytes={max(0, ends[0] + shift)}-{ends[1] + shift}"


# A close with no time to linger is a reset.
_NO_LINGER = struct.pack("ii", 1, 0)


def _close_by_reset(connection: socket.socket) -> None:
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    connection.close()


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError):
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
    writer.transport.abort()


def _has_left(writer: asyncio.StreamWriter) -> bool:
    """Whether the other side closed, though bytes of its may be unread."""
    poller = select.poll()
    poller.register(writer.get_extra_info("socket").fileno(), select.POLLRDHUP)
    return bool(poller.poll(0))


async def _flush(writer: asyncio.StreamWriter, seconds_max: float = 5.0) -> None:
    """Until the other side's kernel has all that was written: a reset would take back the rest."""
    writer.transport.set_write_buffer_limits(0)
    connection = writer.get_extra_info("socket")
    deadline = time.monotonic() + seconds_max
    await writer.drain()
    while time.monotonic() < deadline:
        waiting = struct.unpack("i", fcntl.ioctl(connection.fileno(), termios.TIOCOUTQ, b"\0\0\0\0"))[0]
        if waiting == 0:
            return
        await asyncio.sleep(0.002)
