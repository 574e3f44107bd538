"""The stores that other tests use are what those tests take them for: signatures are checked, what was
acknowledged outlives kill -9, and nothing is left behind. Needs no engine."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from botocore.exceptions import BotoCoreError, ClientError

from support.objects import Access, Bucket, Moto, ObjectServer, SeaweedFS, ServerFailed, free_ports
from support.system import ROOT, alive, wait_until


def code_of(error: pytest.ExceptionInfo[ClientError]) -> str:
    code: str = error.value.response["Error"]["Code"]
    return code


@pytest.fixture
def own_server(object_server: SeaweedFS, scratch: Path) -> Iterator[SeaweedFS]:
    """A second server; the session's proves that there can be one."""
    with SeaweedFS(scratch) as server:
        yield server


def test_a_bucket_tells_what_is_in_it(object_store: Bucket) -> None:
    object_store.put("segments/AB/one.pack", b"x" * 1000)
    object_store.put("segments/AB/two.pack", bytes(range(256)))
    object_store.put("HEADRACE", b"")
    assert object_store.sizes("segments/") == {"segments/AB/one.pack": 1000, "segments/AB/two.pack": 256}
    assert object_store.keys() == ["HEADRACE", "segments/AB/one.pack", "segments/AB/two.pack"]
    assert object_store.get("segments/AB/two.pack", 10, 13) == b"\x0a\x0b\x0c"
    assert object_store.get("segments/AB/two.pack", 250) == bytes(range(250, 256))
    object_store.delete("HEADRACE")
    assert not object_store.exists("HEADRACE")
    assert object_store.count() == 2


def test_each_test_has_an_empty_bucket(object_store: Bucket) -> None:
    assert object_store.keys() == []


def test_a_listing_of_many_pages_is_complete(object_store: Bucket) -> None:
    names = [f"many/{number:04}" for number in range(1010)]
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda name: object_store.put(name, b"1"), names))
    assert object_store.keys("many/") == names


def test_signatures_are_checked(object_server: SeaweedFS, object_store: Bucket) -> None:
    access = object_server.access
    for wrong, code in [
        (Access(access.endpoint, access.access_key, "another secret"), "SignatureDoesNotMatch"),
        (Access(access.endpoint, "NOBODY", access.secret_key), "InvalidAccessKeyId"),
    ]:
        bucket = object_store.through(wrong)
        with pytest.raises(ClientError) as error:
            bucket.put("key", b"")
        assert code_of(error) == code
        bucket.close()
    assert object_store.keys() == []


def test_the_reader_may_not_write(object_server: SeaweedFS, object_store: Bucket) -> None:
    object_store.put("key", b"data")
    reader = object_store.through(object_server.reader)
    assert reader.get("key") == b"data"
    with pytest.raises(ClientError) as error:
        reader.put("key", b"other")
    assert code_of(error) == "AccessDenied"
    reader.close()


def test_a_missing_bucket_is_not_made(object_server: SeaweedFS, object_store: Bucket) -> None:
    missing = Bucket(object_server.access, "missing")
    with pytest.raises(ClientError) as error:
        missing.put("key", b"")
    assert code_of(error) == "NoSuchBucket"
    missing.close()


def test_of_many_writers_of_a_new_key_one_wins(object_store: Bucket) -> None:
    """If-None-Match: * decides between writers at once: what the marker of a volume relies on."""
    writers = 4
    for number in range(5):
        together = threading.Barrier(writers)

        def write(writer: int, key: str = f"marker-{number}", together: threading.Barrier = together) -> str:
            together.wait()
            try:
                object_store.put(key, b"%d" % writer, IfNoneMatch="*")
            except ClientError as error:
                return str(error.response["Error"]["Code"])
            return f"won {writer}"

        with ThreadPoolExecutor(writers) as pool:
            answers = list(pool.map(write, range(writers)))
        won = [answer for answer in answers if answer.startswith("won")]
        assert len(won) == 1, answers
        assert set(answers) - set(won) == {"PreconditionFailed"}
        assert object_store.get(f"marker-{number}") == won[0].removeprefix("won ").encode()


def test_what_was_acknowledged_outlives_kill_nine(own_server: SeaweedFS) -> None:
    bucket = own_server.make_bucket()
    data = {f"key-{number}": os.urandom(5000) for number in range(50)}
    data["large"] = os.urandom(9 << 20)
    for key, value in data.items():
        bucket.put(key, value)
    own_server.kill()
    with pytest.raises(BotoCoreError):
        bucket.get("large")
    own_server.restart()
    assert {key: bucket.get(key) for key in data} == data
    own_server.stop()
    own_server.restart()
    assert bucket.keys() == sorted(data)
    assert {key: bucket.get(key) for key in data} == data
    bucket.close()


def test_a_paused_server_answers_when_it_is_resumed(own_server: SeaweedFS) -> None:
    bucket = own_server.make_bucket()
    bucket.put("key", b"data")
    own_server.pause()
    with ThreadPoolExecutor(1) as pool:
        answer = pool.submit(bucket.get, "key")
        time.sleep(0.3)
        assert not answer.done()
        own_server.resume()
        assert answer.result(10) == b"data"
    bucket.close()


def test_a_server_that_a_test_left_paused_or_killed_runs_again(own_server: SeaweedFS) -> None:
    bucket = own_server.make_bucket()
    for leave in (own_server.pause, own_server.kill):
        leave()
        own_server.ensure_running()
        bucket.put("key", b"data")
    bucket.close()


def test_a_server_that_ended_by_itself_is_reported(own_server: SeaweedFS) -> None:
    os.kill(own_server.pid, signal.SIGKILL)
    wait_until(lambda: not alive(own_server.pid))
    with pytest.raises(ServerFailed, match=r"ended by itself with code -9; its log:\n(.|\n)*SeaweedFS"):
        own_server.ensure_running()


class Broken(ObjectServer):
    """A server that says why it will not start."""

    def _choose_ports(self) -> None:
        self.access = Access(f"http://127.0.0.1:{free_ports(1)}", "key", "secret")

    def _command(self) -> list[str]:
        return ["/bin/sh", "-c", "echo the disk is on fire >&2; exit 3"]


def test_a_server_that_does_not_start_shows_its_log(scratch: Path) -> None:
    with pytest.raises(ServerFailed, match=r"code 3(.|\n)*the disk is on fire"):
        Broken(scratch).start()


_STARTS_A_SERVER = """
import sys
from pathlib import Path
from support.objects import SeaweedFS
server = SeaweedFS(Path(sys.argv[1]))
server.start()
print(server.pid, *server._leftovers(), flush=True)
sys.stdin.read()
"""


def test_a_server_ends_with_the_test_run_that_was_killed(object_server: SeaweedFS, scratch: Path) -> None:
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(map(str, (ROOT / "tests", ROOT / "python")))}
    with subprocess.Popen(
        [sys.executable, "-c", _STARTS_A_SERVER, str(scratch)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=environment,
    ) as run:
        assert run.stdout is not None
        words = run.stdout.readline().split()
        pid = int(words[0])
        assert alive(pid)
        run.kill()
    wait_until(lambda: not alive(pid), 5.0, "end of the server")
    # Nobody was left to do it.
    for path in words[1:]:
        Path(path).unlink(missing_ok=True)


def test_an_ended_server_leaves_no_socket_behind(object_server: SeaweedFS, scratch: Path) -> None:
    server = SeaweedFS(scratch)
    server.start()
    made = [path for path in server._leftovers() if path.exists()]
    assert made, "it makes sockets elsewhere now: clean those up"
    server.kill()
    assert not [path for path in made if path.exists()]
    ports = {str(port + above) for port in server._ports.values() for above in (0, server._GRPC_ABOVE)}
    left = [path for path in Path("/tmp").glob("seaweedfs-*.sock") if path.stem.rpartition("-")[2] in ports]
    assert not left


def test_moto_answers_as_aws_does(scratch: Path) -> None:
    with Moto(scratch) as moto:
        bucket = moto.make_bucket()
        bucket.put("key", b"data", IfNoneMatch="*")
        with pytest.raises(ClientError) as error:
            bucket.put("key", b"other", IfNoneMatch="*")
        assert code_of(error) == "PreconditionFailed"
        with pytest.raises(ClientError) as error:
            bucket.get("missing")
        assert code_of(error) == "NoSuchKey"
        assert bucket.get("key", 1, 3) == b"at"
        assert bucket.sizes() == {"key": 4}
        bucket.close()
