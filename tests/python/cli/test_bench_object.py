"""The object benchmark's parts that need no store: signatures, processor time, verdicts, the report."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import bench_object, object_report, store_client, store_processes
from headrace.cli.cpu_time import Meter, Usage
from headrace.cli.object_report import METRICS, Metric, Plan, Results
from headrace.cli.store_client import Bucket, Credentials
from headrace.errors import Invalid

PLAN = Plan(("epoch",), 20_000, 10_240, 1 << 31, 4_000, 3)


def test_targets_are_signed_as_amazon_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """The presigned example of the S3 manual, "Authenticating Requests: Using Query Parameters"."""
    credentials = Credentials("AKIAIOSFODNN7EXAMPLE", "wJalrXUtnFEMI/K7MDENG/bPxRfiCYEXAMPLEKEY")
    monkeypatch.setattr(store_client, "wall_ns", lambda: 1_369_353_600 * 10**9)
    monkeypatch.setattr(store_client, "_SIGNED_SECONDS", 86_400)
    target = store_client._signed("GET", "examplebucket.s3.amazonaws.com", "/test.txt", {}, credentials)
    signature = "aeeed9bbccd4d02ee5c0109b86d86835f995330da4c265957d157751f604d404"
    assert target.startswith(
        "/test.txt?X-Amz-Algorithm=AWS4-HMAC-SHA256&X-Amz-Credential=AKIAIOSFODNN7EXAMPLE%2F"
    )
    assert target.endswith(f"&X-Amz-Signature={signature}")


def test_a_signature_covers_the_address_and_the_key() -> None:
    bucket = Bucket("127.0.0.1:1", "b", Credentials("a", "s", session_token="t/1"))
    target = bucket.target("GET", "folder/a b+c")
    assert target.startswith("/b/folder/a%20b%2Bc?") and "X-Amz-Security-Token=t%2F1" in target
    assert bucket.at("127.0.0.1:2").target("GET", "folder/a b+c")[-64:] != target[-64:]
    assert bucket.target("PUT").startswith("/b?")


def test_credentials_of_a_named_store_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in os.environ if name.startswith("AWS_")]:
        monkeypatch.delenv(name)
    with pytest.raises(Invalid, match="AWS_SECRET_ACCESS_KEY"):
        Credentials.of_environment()
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "a")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "s")
    monkeypatch.setenv("AWS_CA_BUNDLE", "/a/users/own")
    assert Credentials.of_environment() == Credentials("a", "s", "us-east-1", "")
    with bench_object._environment(Credentials("b", "t", "eu-west-1")):
        ours = {name: value for name, value in os.environ.items() if name.startswith("AWS_")}
    assert ours == {"AWS_ACCESS_KEY_ID": "b", "AWS_SECRET_ACCESS_KEY": "t", "AWS_REGION": "eu-west-1"}
    assert os.environ["AWS_CA_BUNDLE"] == "/a/users/own" and os.environ["AWS_ACCESS_KEY_ID"] == "a"


@pytest.mark.parametrize("endpoint", ["https://127.0.0.1:1", "http://store", "127.0.0.1:9", "http://:9"])
def test_an_endpoint_that_the_driver_cannot_use_is_refused(endpoint: str) -> None:
    with pytest.raises(Invalid, match="http://ADDRESS:PORT"):
        bench_object._address(endpoint)


def test_an_endpoint_is_an_address() -> None:
    assert bench_object._address("http://127.0.0.1:9000/") == "127.0.0.1:9000"
    assert bench_object._address("http://localhost:9000") == "127.0.0.1:9000"


def test_processor_time_is_told_by_process() -> None:
    burn = "import time\nend = time.process_time() + 0.4\nwhile time.process_time() < end: pass"
    meter = Meter({"this": os.getpid()})
    subprocess.run([sys.executable, "-c", burn], check=True)
    usage = meter.usage()
    assert usage.cpu_seconds["driver"] >= 0.39
    assert set(usage.cpu_seconds) == {"this", "driver", "others"}
    assert usage.cpu_seconds["this"] < 0.35 and usage.cpu_seconds["others"] >= 0
    assert 0 <= usage.idle_share < 1 and 0 <= usage.others_share < 1


def test_goals_are_reached_or_not() -> None:
    at_least = Metric("a", "a", None, 5000)
    less = Metric("b", "b", None, 0.01, at_least=False)
    assert [at_least.reached(value) for value in (4999.0, 5000.0, None)] == [False, True, None]
    assert [less.reached(value) for value in (0.01, 0.0099)] == [False, True]
    assert Metric("c", "c").reached(1.0) is None
    assert (at_least.goal_text, less.goal_text) == (">= 5000", "< 0.01")


def results() -> Results:
    made = Results()
    for rate, idle in ((4000.0, 0.5), (6000.123, 0.04), (5500.0, 0.3)):
        made.add("epoch_files_per_s", rate)
        made.usages.setdefault("epoch", []).append(Usage(idle, 0.05, {"store": 1.0, "others": 0.5}))
    made.add("rclone_files_per_s", 315.0)
    made.usages["rclone"] = [Usage(0.02, 0.6, {"others": 4.0})]
    made.note("s3fs is left out: no program s3fs")
    made.note("s3fs is left out: no program s3fs")
    return made


def test_report_as_json(capsys: Any) -> None:
    object_report.report(PLAN, results(), {"cores": 2}, None, True)
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["metrics"]["epoch_files_per_s"] == {
        "title": "first cold epoch, slow store, files/s",
        "value": 5500.0,
        "rounds": [4000.0, 6000.0, 5500.0],
        "goal": ">= 5000",
        "reached": True,
        "idle_share": 0.3,
    }
    assert set(report["metrics"]) == {"epoch_files_per_s", "rclone_files_per_s"}
    assert report["phases"]["epoch"]["cpu_seconds"] == {"store": [1.0] * 3, "others": [0.5] * 3}
    assert set(report["peers"]) == {"rclone"} and report["peers"]["rclone"]["files"] == 4_000
    assert report["slow_store"] == {"latency_ms": 20, "connection_bytes_per_second": 100_000_000}
    assert printed.err.splitlines() == [
        "headrace: s3fs is left out: no program s3fs",
        "headrace: epoch: the processors were idle 4 % of the time: they limited it",
        "headrace: rclone: other programs used 60 % of the processors: repeat it without them",
    ]


def test_report_as_a_table(capsys: Any) -> None:
    object_report.report(PLAN, results(), {}, None, False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "20,000 files of 10.0 KiB, one of 2.0 GiB; medians of 3 rounds"
    epoch = next(line for line in lines if line.startswith("first cold epoch"))
    assert epoch.split()[-6:] == ["5,500", ">=", "5000", "yes", "30", "%"]
    assert lines[-1].startswith("rclone read 4,000 files: --read-only ")


def test_every_metric_has_its_own_name() -> None:
    keys = [metric.key for metric in METRICS]
    assert len(keys) == len(set(keys))


def test_a_program_that_does_not_start_is_named_with_what_it_said(tmp_path: Path) -> None:
    class Broken(store_processes.Child):
        def _command(self) -> list[str]:
            return ["sh", "-c", "echo no such disk >&2; exit 3"]

        def _serves(self) -> bool:
            return False

    with (
        pytest.raises(store_processes.Internal, match="sh ended with status 3: no such disk"),
        Broken(tmp_path / "log"),
    ):
        pass


def test_ports_are_free_and_neighbours() -> None:
    first = store_processes._free_ports(5, 10_000)
    assert 11_000 <= first < 19_000
