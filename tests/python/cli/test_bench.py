"""The bench's order of work and its report, with a driver and caches that are none."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest

from headrace.cli import bench
from headrace.cli.accelerator import SimulatedAccelerator, file_batches, run_epoch
from headrace.cli.driver import LargeFile, Measured, SmallFiles

ALL_SMALL = {
    "create_per_s", "create_fsync_per_s", "cold_read_per_s", "warm_read_per_s", "stat_cold_per_s",
    "stat_warm_per_s", "list_cold_per_s",
}  # fmt: skip
ALL_LARGE = {
    "write_mb_s", "read_cold_mb_s", "read_warm_mb_s", "random_4k_cold_per_s", "random_4k_hot_per_s"
}  # fmt: skip


class FakeDriver:
    """Notes what it is asked; each folder has its own speed."""

    log: list[tuple[str, str]]

    def __getattr__(self, phase: str) -> Any:
        def run(subject: SmallFiles | LargeFile, *arguments: int) -> Measured:
            side = Path(subject.folder).parts[-3]
            assert os.path.isdir(os.path.dirname(subject.folder))
            self.log.append((side, phase))
            return Measured(100, 200_000_000, 1.0 if side == "fast" else 2.0)

        return run


@pytest.fixture
def log(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, str]]:
    for name in ("fast", "slow"):
        (tmp_path / name).mkdir()
    lines: list[tuple[str, str]] = []

    def drop() -> None:
        lines.append(("", "cold"))

    monkeypatch.setattr(FakeDriver, "log", lines, raising=False)
    monkeypatch.setattr(bench, "Driver", FakeDriver)
    monkeypatch.setattr(bench, "drop_page_cache", drop)
    monkeypatch.setattr(bench, "describe_machine", lambda folders: {"cores": 2})
    return lines


def test_small_files_report(tmp_path: Path, log: list[tuple[str, str]], capsys: Any) -> None:
    bench.bench_small_files(str(tmp_path / "slow"), str(tmp_path / "fast"), 100, 10240, [1, 8], 3, True)
    report = json.loads(capsys.readouterr().out)
    assert set(report) >= {"target", "compare", "ratio", "rounds", "machine"} and report["rounds"] == 3
    assert set(report["target"]) == set(report["compare"]) == set(report["ratio"]) == ALL_SMALL
    for metric in ALL_SMALL:
        assert report["target"][metric] == {"1": 50.0, "8": 50.0}
        assert report["compare"][metric] == {"1": 100.0, "8": 100.0}
        assert report["ratio"][metric] == {"1": 0.5, "8": 0.5}
    assert list((tmp_path / "slow").iterdir()) == list((tmp_path / "fast").iterdir()) == []


def test_sides_alternate_and_cold_comes_right_before(tmp_path: Path, log: list[tuple[str, str]]) -> None:
    bench.bench_small_files(str(tmp_path / "slow"), str(tmp_path / "fast"), 100, 10240, [1], 2, True)
    one = ["create", "cold", "read", "read", "cold", "stat", "stat", "cold", "list", "create_fsync"]
    assert [phase for _, phase in log] == one * 4
    assert [side for side, phase in log if phase == "create"] == ["slow", "fast", "fast", "slow"]


def test_large_file_report(tmp_path: Path, log: list[tuple[str, str]], capsys: Any) -> None:
    bench.bench_large_file(str(tmp_path / "slow"), None, 1 << 20, [1, 8], 3, True)
    report = json.loads(capsys.readouterr().out)
    assert set(report["target"]) == ALL_LARGE and report["compare"] == report["ratio"] == {}
    assert report["target"]["write_mb_s"] == {"1": 100.0}
    assert set(report["target"]["random_4k_cold_per_s"]) == {"1", "8"}


def test_cold_that_is_impossible_is_null_and_said(
    tmp_path: Path, log: list[tuple[str, str]], capsys: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(bench, "drop_page_cache", lambda: "dropping the page cache needs root")
    bench.bench_small_files(str(tmp_path / "slow"), str(tmp_path / "fast"), 100, 10240, [1], 3, True)
    printed = capsys.readouterr()
    report = json.loads(printed.out)
    assert report["target"]["cold_read_per_s"] == {"1": None} and report["ratio"]["stat_cold_per_s"] == {
        "1": None
    }
    assert report["target"]["warm_read_per_s"] == {"1": 50.0}
    assert printed.err.count("needs root") == 1


def test_table_without_json(tmp_path: Path, log: list[tuple[str, str]], capsys: Any) -> None:
    bench.bench_small_files(str(tmp_path / "slow"), str(tmp_path / "fast"), 100, 10240, [1], 3, False)
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "100 files of 10.0 KiB, medians of 3 rounds"
    assert lines[1].split() == ["metric", "threads", "target", "compare", "ratio"]
    assert lines[2].split() == ["create_per_s", "1", "50.00", "100", "0.50"]


# -- the simulated accelerator ---------------------------------------------------------------------------


def test_accelerator_is_90_percent_busy_when_data_is_free() -> None:
    accelerator = SimulatedAccelerator(0.009)
    result = run_epoch(iter([(256, 2560)] * 30), accelerator, 60)
    assert 0.86 < result.utilisation < 0.92, result
    assert result.samples == 30 * 256 and result.waiting < 0.02
    assert abs(result.utilisation + result.waiting + result.overhead - 1) < 1e-9


def test_waiting_for_data_lowers_utilisation() -> None:
    import time

    def slow() -> Any:
        for _ in range(10):
            time.sleep(0.02)
            yield 1, 1

    result = run_epoch(slow(), SimulatedAccelerator(0.009), 60)
    assert 0.2 < result.utilisation < 0.35 and result.waiting > 0.6
    assert result.wait_seconds(0.5) >= 0.02


def test_epoch_ends_after_its_time() -> None:
    result = run_epoch(iter([(1, 1)] * 1000), SimulatedAccelerator(0.009), 0.1)
    assert 5 < result.samples < 20


def test_file_batches_read_every_file_and_raise_what_fails(tmp_path: Path) -> None:
    import numpy as np

    paths = [os.fsencode(tmp_path / str(index)) for index in range(100)]
    for index, path in enumerate(paths):
        Path(os.fsdecode(path)).write_bytes(bytes(index))
    order = np.arange(100, dtype=np.uint64)[::-1].reshape(10, 10)
    given = list(file_batches(paths.__getitem__, list(order)))
    assert [count for count, _ in given] == [10] * 10 and sum(size for _, size in given) == 4950
    os.unlink(paths[50])
    with pytest.raises(FileNotFoundError):
        list(file_batches(paths.__getitem__, list(order)))
