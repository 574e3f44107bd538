"""Each fault of the proxy arrives as its method says, at a real store that checks signatures.

boto3 shows what a client makes of it; `Raw` shows what was on the wire. Needs no engine.
"""

from __future__ import annotations

import http.client
import os
import re
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest
from botocore.auth import S3SigV4Auth
from botocore.awsrequest import AWSRequest
from botocore.credentials import Credentials
from botocore.exceptions import (
    BotoCoreError,
    ClientError,
    ConnectionClosedError,
    EndpointConnectionError,
    FlexibleChecksumError,
    ResponseStreamingError,
)

from support.fault_proxy import FaultProxy, Rule
from support.objects import Access, Bucket, SeaweedFS
from support.system import wait_until

PACK = "segments/AB/01ARZ3NDEKTSV4RRFFQ69G5FAB.pack"
DATA = bytes(number * number % 251 for number in range(200_000))


@pytest.fixture
def store(object_store: Bucket, fault_proxy: FaultProxy) -> Iterator[Bucket]:
    """The bucket through the proxy, with one pack in it; the log is empty."""
    bucket = object_store.through(fault_proxy.access)
    object_store.put(PACK, DATA)
    yield bucket
    bucket.close()


@dataclass
class Answer:
    status: int
    headers: dict[str, str]
    body: bytes
    """What came of it."""
    ended_by: Exception | None = None


class Raw:
    """Signed requests on one connection, answers as they are on the wire."""

    def __init__(self, bucket: Bucket, seconds_max: float = 10.0) -> None:
        self.bucket = bucket
        host = bucket.access.endpoint.removeprefix("http://")
        self.connection = http.client.HTTPConnection(host, timeout=seconds_max)

    def send(self, method: str, key: str, body: bytes = b"", **headers: str) -> None:
        access = self.bucket.access
        url = f"{access.endpoint}/{self.bucket.name}/{key}"
        named = {name.replace("_", "-"): value for name, value in headers.items()}
        request = AWSRequest(method, url, headers=named, data=body)
        S3SigV4Auth(Credentials(access.access_key, access.secret_key), "s3", access.region).add_auth(request)
        self.connection.request(method, f"/{self.bucket.name}/{key}", body or None, dict(request.headers))

    def ask(self, method: str, key: str, body: bytes = b"", **headers: str) -> Answer:
        self.send(method, key, body, **headers)
        return self.receive()

    def receive(self) -> Answer:
        response = self.connection.getresponse()
        answer = Answer(response.status, {name.lower(): value for name, value in response.getheaders()}, b"")
        try:
            while piece := response.read1(65536):
                answer.body += piece
            # read1 does not say that the end came early.
            if response.length:
                raise http.client.IncompleteRead(answer.body, response.length)
        except (OSError, http.client.IncompleteRead) as error:
            answer.ended_by = error
        response.close()
        return answer

    def close(self) -> None:
        self.connection.close()


@pytest.fixture
def raw(store: Bucket) -> Iterator[Raw]:
    connection = Raw(store)
    yield connection
    connection.close()


def code_of(call: Callable[[], object]) -> tuple[int, str]:
    """Status and code of the error with which `call` fails."""
    with pytest.raises(ClientError) as error:
        call()
    answer: dict[str, Any] = error.value.response
    return answer["ResponseMetadata"]["HTTPStatusCode"], answer["Error"]["Code"]


# Without faults


def test_without_rules_nothing_is_changed(object_store: Bucket, store: Bucket) -> None:
    for key in ("sp ace", "ü/ß", "a%2Fb", "a+b=c&d?e#f", "~tilde'(*)!", "x" * 255):
        store.put(key, key.encode())
        assert object_store.get(key) == key.encode() == store.get(key)
    assert store.sizes() == object_store.sizes()
    assert store.get(PACK, 1000, 2000) == DATA[1000:2000]
    store.delete("a+b=c&d?e#f")
    assert not object_store.exists("a+b=c&d?e#f")
    assert code_of(lambda: store.get("missing")) == (404, "NoSuchKey")
    assert code_of(lambda: store.put(PACK, b"", IfNoneMatch="*")) == (412, "PreconditionFailed")


def test_large_bodies_go_through_in_both_directions(store: Bucket) -> None:
    data = os.urandom(40 << 20)
    store.put("large", data)
    assert store.get("large") == data


def test_multipart_uploads_go_through(store: Bucket, fault_proxy: FaultProxy) -> None:
    client, parts, data = store.client, [], os.urandom((5 << 20) + 7)
    where = {"Bucket": store.name, "Key": "parts.file"}
    upload = client.create_multipart_upload(**where)["UploadId"]
    for number, part in enumerate((data[: 5 << 20], data[5 << 20 :]), 1):
        etag = client.upload_part(**where, UploadId=upload, PartNumber=number, Body=part)["ETag"]
        parts.append({"PartNumber": number, "ETag": etag})
    client.complete_multipart_upload(**where, UploadId=upload, MultipartUpload={"Parts": parts})
    assert store.get("parts.file") == data
    again = client.create_multipart_upload(**where)["UploadId"]
    client.abort_multipart_upload(**where, UploadId=again)
    operations = [request.operation for request in fault_proxy.requests(kind="file")]
    uploads = ["create_upload", "upload_part", "upload_part", "complete_upload"]
    assert operations == [*uploads, "get", "create_upload", "abort_upload"]


def test_the_store_checks_signatures_behind_the_proxy(store: Bucket) -> None:
    wrong = store.through(Access(store.access.endpoint, store.access.access_key, "another secret"))
    assert code_of(lambda: wrong.get(PACK)) == (403, "SignatureDoesNotMatch")
    wrong.close()


def test_one_connection_serves_many_requests(raw: Raw) -> None:
    raw.ask("GET", PACK)
    used = raw.connection.sock
    for _ in range(3):
        assert raw.ask("GET", PACK).body == DATA
        assert raw.ask("HEAD", PACK).headers["content-length"] == str(len(DATA))
    assert raw.connection.sock is used


def test_many_clients_at_once(store: Bucket, fault_proxy: FaultProxy) -> None:
    with ThreadPoolExecutor(16) as pool:
        assert all(data == DATA for data in pool.map(lambda _: store.get(PACK), range(200)))
    assert fault_proxy.count(kind="pack", method="GET") == 200
    assert fault_proxy.bytes_out() == 200 * len(DATA)


# The log


def test_requests_are_counted_by_method_and_kind_of_key(store: Bucket, fault_proxy: FaultProxy) -> None:
    for key in ("p/HEADRACE", "p/segments/AB/X.pack", "p/segments/AB/X.file", "p/segments/AB/X.idx"):
        store.put(key, b"12345")
    store.put("p/backups/HEADRACE/1.pack", b"")
    store.put("p/other", b"")
    store.exists("p/HEADRACE")
    store.keys("p/")
    counts = fault_proxy.counts()
    assert counts == {
        ("PUT", "marker"): 1,
        ("PUT", "pack"): 1,
        ("PUT", "file"): 1,
        ("PUT", "index"): 1,
        ("PUT", "backup"): 1,
        ("PUT", "other"): 1,
        ("HEAD", "marker"): 1,
        ("GET", "bucket"): 1,
    }
    assert fault_proxy.count(operation="put") == 6
    assert fault_proxy.count(operation="list") == 1
    assert fault_proxy.count(key=re.compile(r"\.(pack|file)$")) == 3
    fault_proxy.reset()
    assert fault_proxy.requests() == []
    store.exists("p/HEADRACE")
    assert fault_proxy.count() == 1


def test_a_request_is_described(store: Bucket, fault_proxy: FaultProxy) -> None:
    store.get(PACK, 10, 30)
    store.put("new", b"12345", IfNoneMatch="*")
    code_of(lambda: store.get("missing"))
    get, put, missing = fault_proxy.requests()
    assert (get.method, get.bucket, get.key, get.range) == ("GET", store.name, PACK, "bytes=10-29")
    assert (get.status, get.store_status, get.bytes_out, get.fault) == (206, 206, 20, None)
    assert (put.bytes_in, put.bytes_out, put.status) == (5, 0, 200)
    assert put.headers["if-none-match"] == "*"
    assert put.headers["host"] == fault_proxy.endpoint.removeprefix("http://")
    assert "authorization" not in put.headers
    assert missing.status == 404
    wait_until(lambda: all(request.done for request in fault_proxy.requests()))
    store.keys("p")
    assert "prefix=p" in fault_proxy.requests(operation="list")[0].query


# Which requests a rule takes


def statuses(store: Bucket, count: int, key: str = PACK) -> str:
    """One letter for each of `count` reads: . for good, x for an error."""
    seen = ""
    for _ in range(count):
        try:
            store.get(key, 0, 10)
            seen += "."
        except ClientError:
            seen += "x"
    return seen


def test_first_skip_and_every(store: Bucket, fault_proxy: FaultProxy) -> None:
    rule = fault_proxy.slow_down(first=2)
    assert statuses(store, 4) == "xx.."
    assert rule.hits == 2
    fault_proxy.clear()
    fault_proxy.slow_down(skip=1, first=2)
    assert statuses(store, 5) == ".xx.."
    fault_proxy.clear()
    fault_proxy.slow_down(every=3)
    assert statuses(store, 7) == "..x..x."
    fault_proxy.clear()
    fault_proxy.slow_down(skip=1, every=2, first=2)
    assert statuses(store, 8) == "..x.x..."


def test_a_rule_takes_only_what_it_selects(store: Bucket, fault_proxy: FaultProxy) -> None:
    store.put("other.file", b"1234567890")
    for rule in (
        fault_proxy.slow_down(method="GET", key=".pack"),
        fault_proxy.slow_down(kind="pack", operation="get"),
        fault_proxy.slow_down(key=re.compile(r"^segments/.*\.pack$")),
    ):
        with rule:
            assert statuses(store, 1) == "x"
            assert statuses(store, 1, "other.file") == "."
            store.keys("segments")
    assert statuses(store, 1) == "."
    with fault_proxy.slow_down(method="HEAD"):
        assert statuses(store, 1) == "."
        assert code_of(lambda: store.exists(PACK))[0] == 503


def test_chance_is_seeded(object_store: Bucket) -> None:
    object_store.put(PACK, DATA)
    seen = []
    for seed in (1, 1, 2):
        with FaultProxy(object_store.access, seed=seed) as proxy:
            bucket = object_store.through(proxy.access)
            proxy.slow_down(probability=0.5)
            seen.append(statuses(bucket, 40))
            bucket.close()
    assert seen[0] == seen[1] != seen[2]
    assert 8 < seen[0].count("x") < 32


def test_a_rule_ends_by_itself_or_when_removed(store: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.slow_down(for_seconds=2.0)
    assert statuses(store, 1) == "x"
    wait_until(lambda: statuses(store, 1) == ".", 10.0)
    with fault_proxy.slow_down():
        assert statuses(store, 1) == "x"
    assert statuses(store, 1) == "."


def test_the_oldest_rule_acts_and_the_other_keeps_its_turn(store: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.no_such_key(first=1)
    later = fault_proxy.slow_down(first=1)
    assert code_of(lambda: store.get(PACK)) == (404, "NoSuchKey")
    assert later.hits == 0
    assert code_of(lambda: store.get(PACK)) == (503, "SlowDown")
    assert store.get(PACK) == DATA


def test_first_holds_for_requests_at_once(store: Bucket, fault_proxy: FaultProxy) -> None:
    rule = fault_proxy.stall(0.3, first=3)
    with ThreadPoolExecutor(12) as pool:
        assert all(data == DATA for data in pool.map(lambda _: store.get(PACK), range(12)))
    assert rule.hits == 3
    assert len([request for request in fault_proxy.requests() if request.fault == "stall"]) == 3


def test_a_fault_without_a_chance_waits_for_one(store: Bucket, fault_proxy: FaultProxy) -> None:
    rule = fault_proxy.flip_byte(first=1)
    store.put("empty", b"")
    assert store.get("empty") == b""
    assert code_of(lambda: store.get("missing")) == (404, "NoSuchKey")
    assert store.exists(PACK)
    assert rule.hits == 0
    with pytest.raises(FlexibleChecksumError):
        store.get(PACK)
    assert rule.hits == 1
    assert store.get(PACK) == DATA


# Answers


@pytest.mark.parametrize(
    ("make", "status", "code"),
    [
        (FaultProxy.slow_down, 503, "SlowDown"),
        (FaultProxy.internal_error, 500, "InternalError"),
        (FaultProxy.access_denied, 403, "AccessDenied"),
        (FaultProxy.expired_token, 400, "ExpiredToken"),
        (FaultProxy.no_such_key, 404, "NoSuchKey"),
        (lambda proxy: proxy.expired_token(403), 403, "ExpiredToken"),
        (lambda proxy: proxy.answer(409, "OperationAborted"), 409, "OperationAborted"),
    ],
)
def test_an_error_comes_instead_of_the_answer(
    store: Bucket,
    object_store: Bucket,
    fault_proxy: FaultProxy,
    make: Callable[[FaultProxy], Rule],
    status: int,
    code: str,
) -> None:
    with make(fault_proxy) as rule:
        assert code_of(lambda: store.get(PACK)) == (status, code)
        assert code_of(lambda: store.put("new", DATA)) == (status, code)
        with pytest.raises(ClientError) as error:
            store.client.head_object(Bucket=store.name, Key=PACK)
        assert error.value.response["ResponseMetadata"]["HTTPStatusCode"] == status
        # boto3 asks once more after a HEAD that answers 400: it looks for the bucket's region.
        assert rule.hits == fault_proxy.count() == (4 if status == 400 else 3)
    for request in fault_proxy.requests():
        assert (request.store_status, request.status, request.fault) == (None, status, rule.name)
    assert fault_proxy.requests(method="PUT")[0].bytes_in == len(DATA)
    assert not object_store.exists("new")
    assert store.get(PACK) == DATA


def test_the_connection_outlives_an_error(raw: Raw, fault_proxy: FaultProxy) -> None:
    fault_proxy.slow_down(first=1, retry_after_seconds=2)
    answer = raw.ask("PUT", "new", DATA)
    used = raw.connection.sock
    assert (answer.status, answer.headers["retry-after"]) == (503, "2")
    assert b"<Code>SlowDown</Code>" in answer.body
    fault_proxy.slow_down(first=1, method="HEAD")
    assert raw.ask("HEAD", PACK).status == 503
    assert raw.ask("GET", PACK).body == DATA
    assert raw.connection.sock is used


def test_the_wrong_region_is_named(raw: Raw, fault_proxy: FaultProxy) -> None:
    with fault_proxy.wrong_region("eu-north-1"):
        answer = raw.ask("GET", PACK)
    assert (answer.status, answer.headers["x-amz-bucket-region"]) == (301, "eu-north-1")
    assert "location" not in answer.headers
    assert b"<Code>PermanentRedirect</Code>" in answer.body
    with fault_proxy.wrong_region("eu-north-1", 400):
        answer = raw.ask("GET", PACK)
    assert answer.status == 400
    assert b"<Code>AuthorizationHeaderMalformed</Code>" in answer.body
    assert b"<Region>eu-north-1</Region>" in answer.body


# Connections


@pytest.mark.parametrize(
    ("how", "error"), [("reset", ConnectionResetError), ("close", http.client.RemoteDisconnected)]
)
def test_a_request_is_lost(
    raw: Raw, object_store: Bucket, fault_proxy: FaultProxy, how: Any, error: type[Exception]
) -> None:
    fault_proxy.lose_request(how, first=1)
    with pytest.raises(error) as raised:
        raw.ask("PUT", "new", b"data")
    assert type(raised.value) is error
    assert not object_store.exists("new")
    request = fault_proxy.requests()[0]
    assert (request.store_status, request.status, request.fault) == (None, None, "lose_request")


@pytest.mark.parametrize(
    ("how", "error"), [("reset", ConnectionResetError), ("close", http.client.RemoteDisconnected)]
)
def test_an_answer_is_lost_and_the_store_has_done_it(
    raw: Raw, object_store: Bucket, fault_proxy: FaultProxy, how: Any, error: type[Exception]
) -> None:
    fault_proxy.lose_answer(how, first=1)
    with pytest.raises(error) as raised:
        raw.ask("PUT", "new", DATA)
    assert type(raised.value) is error
    assert object_store.get("new") == DATA
    request = fault_proxy.requests()[0]
    assert (request.store_status, request.status, request.fault) == (200, None, "lose_answer")


def test_a_lost_answer_shows_in_a_conditional_retry(store: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.lose_answer(operation="put", first=1)
    with pytest.raises(ConnectionClosedError):
        store.put("marker", b"mine", IfNoneMatch="*")
    assert code_of(lambda: store.put("marker", b"mine", IfNoneMatch="*")) == (412, "PreconditionFailed")


def test_an_upload_breaks_off(store: Bucket, object_store: Bucket, fault_proxy: FaultProxy) -> None:
    data = os.urandom(8 << 20)
    with fault_proxy.break_upload(1 << 20, operation="put") as rule:
        with pytest.raises((BotoCoreError, ConnectionError)):
            store.put("new", data)
        assert rule.hits == 1
    request = fault_proxy.requests()[0]
    assert request.store_status is None
    assert 1 << 20 <= request.bytes_in < len(data)
    assert not object_store.exists("new")
    store.put("new", data)
    assert object_store.get("new") == data


# Bodies


def test_a_body_is_cut(raw: Raw, fault_proxy: FaultProxy) -> None:
    fault_proxy.cut_body(after_bytes=12_345, first=1)
    answer = raw.ask("GET", PACK)
    assert (answer.status, answer.headers["content-length"]) == (200, str(len(DATA)))
    assert answer.body == DATA[:12_345]
    assert isinstance(answer.ended_by, http.client.IncompleteRead)
    assert fault_proxy.requests()[0].bytes_out == 12_345
    raw.close()
    assert raw.ask("GET", PACK).body == DATA


@pytest.mark.parametrize("after_bytes", [0, 1, len(DATA) - 1, len(DATA) + 5, None])
def test_a_cut_body_is_never_whole(raw: Raw, fault_proxy: FaultProxy, after_bytes: int | None) -> None:
    with fault_proxy.cut_body(after_bytes):
        answer = raw.ask("GET", PACK)
    wanted = len(DATA) // 2 if after_bytes is None else min(after_bytes, len(DATA) - 1)
    assert answer.body == DATA[:wanted]
    assert answer.ended_by is not None


def test_boto3_notices_a_cut_body(store: Bucket, fault_proxy: FaultProxy) -> None:
    with fault_proxy.cut_body(), pytest.raises(ResponseStreamingError, match="IncompleteRead"):
        store.get(PACK)
    with fault_proxy.break_body(), pytest.raises(ResponseStreamingError, match="ConnectionReset"):
        store.get(PACK)


def test_a_body_breaks_in_the_middle(raw: Raw, fault_proxy: FaultProxy) -> None:
    fault_proxy.break_body(after_bytes=100_000, first=1)
    answer = raw.ask("GET", PACK)
    assert answer.status == 200
    assert answer.body == DATA[:100_000]
    assert isinstance(answer.ended_by, ConnectionResetError)


@pytest.mark.parametrize(("at", "where"), [(0, 0), (None, len(DATA) // 2), (len(DATA) - 1, len(DATA) - 1)])
def test_one_bit_of_one_byte_is_flipped(
    store: Bucket, fault_proxy: FaultProxy, at: int | None, where: int
) -> None:
    with fault_proxy.flip_byte(at):
        got = store.client.get_object(Bucket=store.name, Key=PACK, ChecksumMode="DISABLED")["Body"].read()
    assert len(got) == len(DATA)
    assert [place for place in range(len(DATA)) if got[place] != DATA[place]] == [where]
    assert got[where] == DATA[where] ^ 1
    assert store.get(PACK) == DATA


def test_a_wrong_range_is_told(raw: Raw, fault_proxy: FaultProxy) -> None:
    with fault_proxy.wrong_range(shift_bytes=500):
        answer = raw.ask("GET", PACK, Range="bytes=1000-1999")
    assert answer.status == 206
    assert answer.headers["content-range"] == f"bytes 1500-2499/{len(DATA)}"
    assert answer.body == DATA[1500:2500]


@pytest.mark.parametrize(("start", "got"), [(1000, 999), (0, 1)])
def test_wrong_bytes_are_hidden(raw: Raw, fault_proxy: FaultProxy, start: int, got: int) -> None:
    with fault_proxy.wrong_bytes() as rule:
        answer = raw.ask("GET", PACK, Range=f"bytes={start}-{start + 99}")
        assert rule.hits == 1
    assert answer.status == 206
    assert answer.headers["content-range"] == f"bytes {start}-{start + 99}/{len(DATA)}"
    assert answer.body == DATA[got : got + 100]


def test_a_wrong_range_needs_a_range(store: Bucket, fault_proxy: FaultProxy) -> None:
    with fault_proxy.wrong_bytes() as rule:
        assert store.get(PACK) == DATA
        assert rule.hits == 0
        assert code_of(lambda: store.get("missing", 5, 10)) == (404, "NoSuchKey")
        assert rule.hits == 0


def test_a_wrong_range_that_cannot_be_made_is_a_problem(store: Bucket, fault_proxy: FaultProxy) -> None:
    with fault_proxy.wrong_bytes() as rule:
        store.get(PACK, 0, len(DATA))
        assert rule.hits == 0
    assert len(fault_proxy.problems) == 1
    assert "is not as long" in fault_proxy.problems[0]
    fault_proxy.problems.clear()


def test_ranges_are_ignored(raw: Raw, fault_proxy: FaultProxy) -> None:
    with fault_proxy.ignore_range() as rule:
        answer = raw.ask("GET", PACK, Range="bytes=1000-1999")
        assert rule.hits == 1
    assert (answer.status, answer.body) == (200, DATA)
    assert raw.ask("GET", PACK, Range="bytes=1000-1999").status == 206


def test_a_store_that_lies_about_conditions(
    store: Bucket, object_store: Bucket, fault_proxy: FaultProxy
) -> None:
    store.put("marker", b"first", IfNoneMatch="*")
    with fault_proxy.ignore_conditions():
        store.put("marker", b"second", IfNoneMatch="*")
        assert object_store.get("marker") == b"second"
        store.put("marker", b"third", IfMatch='"00000000000000000000000000000000"')
        got = store.client.get_object(Bucket=store.name, Key="marker", IfMatch='"0"')
        assert got["Body"].read() == b"third"
    assert code_of(lambda: store.put("marker", b"fourth", IfNoneMatch="*")) == (412, "PreconditionFailed")


# Time


@pytest.mark.parametrize("at", ["request", "answer"])
def test_a_stall_before_the_answer(raw: Raw, object_store: Bucket, fault_proxy: FaultProxy, at: Any) -> None:
    fault_proxy.stall(0.5, at, first=1)
    began = time.monotonic()
    raw.send("PUT", "new", b"data")
    time.sleep(0.25)
    assert object_store.exists("new") == (at == "answer")
    assert fault_proxy.requests()[0].status is None
    assert raw.receive().status == 200
    assert 0.5 <= time.monotonic() - began < 3
    assert object_store.get("new") == b"data"


def test_a_stall_inside_a_body(raw: Raw, fault_proxy: FaultProxy) -> None:
    fault_proxy.stall(0.5, "body", after_bytes=1000, first=1)
    raw.send("GET", PACK)
    response = raw.connection.getresponse()
    began = time.monotonic()
    assert response.read(1000) == DATA[:1000]
    assert time.monotonic() - began < 0.4
    assert response.read() == DATA[1000:]
    assert time.monotonic() - began > 0.4


def test_a_client_that_gives_up_ends_a_stall(store: Bucket, fault_proxy: FaultProxy) -> None:
    rule = fault_proxy.stall(90, "request", first=1)
    impatient = Raw(store, seconds_max=0.3)
    impatient.send("PUT", "new", os.urandom(100))
    with pytest.raises(TimeoutError):
        impatient.receive()
    impatient.close()
    wait_until(lambda: fault_proxy.requests()[0].done, 2.0)
    assert rule.hits == 1
    assert not store.exists("new")


@pytest.mark.parametrize("at", ["request", "answer"])
def test_a_held_request_goes_on_when_it_is_let_go(
    store: Bucket, object_store: Bucket, fault_proxy: FaultProxy, at: Any
) -> None:
    rule = fault_proxy.hold(at, operation="put")
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(store.put, "new", DATA)
        rule.wait()
        assert object_store.exists("new") == (at == "answer")
        assert not answer.done()
        rule.remove()
        answer.result(5.0)
    assert object_store.get("new") == DATA


def test_a_delay_leaves_other_faults_alone(store: Bucket, fault_proxy: FaultProxy) -> None:
    fault_proxy.delay(0.2)
    fault_proxy.slow_down(first=1)
    began = time.monotonic()
    assert code_of(lambda: store.get(PACK)) == (503, "SlowDown")
    assert time.monotonic() - began >= 0.2
    began = time.monotonic()
    assert store.get(PACK) == DATA
    assert 0.2 <= time.monotonic() - began < 2


# Down and up


def test_down_resets_and_refuses_until_up(raw: Raw, store: Bucket, fault_proxy: FaultProxy) -> None:
    assert raw.ask("GET", PACK).body == DATA
    connection = raw.connection.sock
    fault_proxy.down()
    with pytest.raises(ConnectionResetError):
        connection.recv(1)
    with pytest.raises(EndpointConnectionError):
        store.get(PACK)
    with pytest.raises(ConnectionRefusedError):
        Raw(store).ask("GET", PACK)
    fault_proxy.up()
    assert store.get(PACK) == DATA
    assert fault_proxy.count() == 2


def test_down_may_accept_and_reset(store: Bucket, fault_proxy: FaultProxy) -> None:
    for before in (fault_proxy.up, fault_proxy.down):
        before()
        fault_proxy.down("reset")
        host, port = fault_proxy.endpoint.removeprefix("http://").split(":")
        # The reset may come before connect() has looked.
        with (
            pytest.raises(ConnectionResetError),
            socket.create_connection((host, int(port)), timeout=5) as connection,
        ):
            connection.recv(1)
        with pytest.raises((ConnectionClosedError, EndpointConnectionError)):
            store.get(PACK)
        fault_proxy.up()
        assert store.get(PACK) == DATA


def test_down_ends_what_is_under_way(store: Bucket, fault_proxy: FaultProxy) -> None:
    rules = [fault_proxy.hold(operation="put"), fault_proxy.stall(90, "body", after_bytes=1000)]
    read, upload = Raw(store), Raw(store)
    read.send("GET", PACK)
    upload.send("PUT", "new", DATA)
    for rule in rules:
        rule.wait()
    fault_proxy.down()
    answer = read.receive()
    assert (answer.status, len(answer.body)) == (200, 1000)
    assert isinstance(answer.ended_by, ConnectionResetError)
    with pytest.raises(ConnectionResetError):
        upload.receive()
    assert all(request.done for request in fault_proxy.requests())
    read.close()
    upload.close()


def test_down_in_the_middle_of_much_traffic(store: Bucket, fault_proxy: FaultProxy) -> None:
    ends = threading.Event()
    outcomes: list[str] = []

    def reads() -> None:
        while not ends.is_set():
            try:
                assert store.get(PACK) == DATA
                outcomes.append("good")
            except (BotoCoreError, OSError):
                outcomes.append("failed")
                time.sleep(0.01)

    with ThreadPoolExecutor(4) as pool:
        tasks = [pool.submit(reads) for _ in range(4)]
        try:
            for _ in range(5):
                time.sleep(0.1)
                fault_proxy.down()
                time.sleep(0.05)
                fault_proxy.up()
            outcomes.clear()
            wait_until(lambda: outcomes.count("good") > 20)
        finally:
            ends.set()
        for task in tasks:
            task.result(10)


def test_a_dead_store_looks_dead(
    object_server: SeaweedFS, store: Bucket, raw: Raw, fault_proxy: FaultProxy
) -> None:
    assert raw.ask("GET", PACK).body == DATA
    object_server.kill()
    with pytest.raises(ConnectionResetError):
        raw.ask("GET", PACK)
    assert fault_proxy.requests()[-1].status is None
    object_server.restart()
    assert store.get(PACK) == DATA


def test_closing_leaves_no_thread_and_no_port(object_store: Bucket) -> None:
    with FaultProxy(object_store.access) as proxy:
        bucket = object_store.through(proxy.access)
        bucket.keys()
        proxy.hold()
        waiting = Raw(bucket)
        waiting.send("GET", PACK)
        proxy.wait_for(2)
    assert not proxy._thread.is_alive()
    with pytest.raises(ConnectionResetError):
        waiting.receive()
    with pytest.raises(ConnectionRefusedError):
        Raw(bucket).ask("GET", PACK)
    proxy.close()
    waiting.close()
    bucket.close()
