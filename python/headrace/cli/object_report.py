"""What the object benchmark measures, its goals, and how it is reported."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import click

from headrace.cli.cpu_time import IDLE_SHARE_ENOUGH, OTHERS_SHARE_MAX, Usage
from headrace.cli.store_processes import Rclone, S3fs
from headrace.cli.text import print_json, print_table, warn
from headrace.units import format_bytes, format_count

PARTS = ("epoch", "large", "fsync")

# The slow store of the goals.
LATENCY_MS = 20
CONNECTION_BYTES_PER_SECOND = 100_000_000


class Metric(NamedTuple):
    key: str
    title: str
    # The phase whose processor time explains it.
    phase: str | None = None
    # The value to reach: at least, or less than, by `at_least`.
    goal: float | None = None
    at_least: bool = True

    def reached(self, value: float | None) -> bool | None:
        if self.goal is None or value is None:
            return None
        return value >= self.goal if self.at_least else value < self.goal

    @property
    def goal_text(self) -> str:
        return "" if self.goal is None else f"{'>=' if self.at_least else '<'} {self.goal:g}"


# In the order of the report. A part adds its own; what was not measured is left out.
METRICS = (
    Metric("import_files_per_s", "import to the slow store, all durable, files/s", "import", 5000),
    Metric("import_puts_per_file", "PUT requests per file written", "import", 0.01, at_least=False),
    Metric("epoch_files_per_s", "first cold epoch, slow store, files/s", "epoch", 5000),
    Metric("epoch_gets_per_file", "GET requests per file of it", "epoch", 0.05, at_least=False),
    Metric("s3fs_files_per_s", "s3fs, plain objects, slow store, files/s", "s3fs"),
    Metric("rclone_files_per_s", "rclone mount, plain objects, slow store, files/s", "rclone"),
    Metric("s3fs_gets_per_file", "GET and HEAD requests per file of s3fs", "s3fs"),
    Metric("rclone_gets_per_file", "GET and HEAD requests per file of rclone", "rclone"),
    Metric("epoch_times_peers", "first cold epoch, times the faster of the two", None, 10),
    Metric("large_cold_mb_s", "large file cold from the fast store, MB/s", "large"),
    Metric("store_get_cold_mb_s", "the store's own GET rate, MB/s", "store-get"),
    Metric("large_cold_share", "share of the store's rate", None, 0.8),
    Metric("large_cached_mb_s", "the same, the store's pages in memory, MB/s", "large-cached"),
    Metric("store_get_cached_mb_s", "the store's own GET rate then, MB/s", "store-get-cached"),
    Metric("large_cached_share", "share of the store's rate then", None, 0.8),
    Metric("fsync_p50_ms", "fsync of a 4 KiB file, fast store, p50, ms", "fsync", 15, at_least=False),
    Metric("fsync_p99_ms", "the same, p99, ms", "fsync"),
    Metric("store_put_4k_ms", "the store's own PUT of 4 KiB, mean, ms", "store-put"),
)


@dataclass(frozen=True)
class Plan:
    """What is measured."""

    parts: Sequence[str]
    files: int
    size_bytes: int
    large_bytes: int
    # How many of the files s3fs and rclone read; they are slow, and steady.
    peer_files: int
    rounds: int


@dataclass
class Results:
    """Values by metric and processor time by phase, one of each round."""

    values: dict[str, list[float]] = field(default_factory=dict)
    usages: dict[str, list[Usage]] = field(default_factory=dict)
    # What went wrong without being an error: peers that are missing, cold that is impossible.
    notes: list[str] = field(default_factory=list)

    def add(self, key: str, value: float) -> None:
        self.values.setdefault(key, []).append(value)

    def note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)

    def median(self, key: str) -> float | None:
        values = self.values.get(key)
        return statistics.median(values) if values else None

    def idle_share(self, phase: str | None) -> float | None:
        usages = self.usages.get(phase or "", [])
        return statistics.median(usage.idle_share for usage in usages) if usages else None


def report(
    plan: Plan, results: Results, machine: dict[str, Any], endpoint: str | None, as_json: bool
) -> None:
    measured = [metric for metric in METRICS if metric.key in results.values]
    for note in results.notes:
        warn(note)
    for phase, usages in results.usages.items():
        least = min(usage.idle_share for usage in usages)
        others = max(usage.others_share for usage in usages)
        if others > OTHERS_SHARE_MAX:
            warn(
                f"{phase}: other programs used {100 * others:.0f} % of the processors: repeat it without them"
            )
        elif least < IDLE_SHARE_ENOUGH:
            warn(f"{phase}: the processors were idle {100 * least:.0f} % of the time: they limited it")
    if as_json:
        print_json(
            {
                "metrics": {metric.key: _metric_fields(metric, results) for metric in measured},
                "phases": {phase: _phase_fields(usages) for phase, usages in results.usages.items()},
                "peers": {
                    peer.name: {"options": list(peer.options), "files": plan.peer_files}
                    for peer in (S3fs, Rclone)
                    if f"{peer.name}_files_per_s" in results.values
                },
                "notes": results.notes,
                "files": plan.files,
                "size_bytes": plan.size_bytes,
                "large_bytes": plan.large_bytes,
                "rounds": plan.rounds,
                "store": endpoint or "SeaweedFS on loopback",
                "slow_store": {
                    "latency_ms": LATENCY_MS,
                    "connection_bytes_per_second": CONNECTION_BYTES_PER_SECOND,
                },
                "machine": machine,
            }
        )
        return
    rows = []
    for metric in measured:
        value, idle = results.median(metric.key), results.idle_share(metric.phase)
        verdict = {True: "yes", False: "no", None: ""}[metric.reached(value)]
        shown_idle = "" if idle is None else f"{100 * idle:.0f} %"
        rows.append([metric.title, _shown(value), metric.goal_text, verdict, shown_idle])
    files = f"{format_count(plan.files)} files of {format_bytes(plan.size_bytes)}"
    click.echo(f"{files}, one of {format_bytes(plan.large_bytes)}; medians of {plan.rounds} rounds")
    print_table(["metric", "value", "goal", "reached", "cpu idle"], rows)
    for peer in (S3fs, Rclone):
        if f"{peer.name}_files_per_s" in results.values:
            click.echo(f"{peer.name} read {format_count(plan.peer_files)} files: {' '.join(peer.options)}")


def _metric_fields(metric: Metric, results: Results) -> dict[str, Any]:
    value = results.median(metric.key)
    return {
        "title": metric.title,
        "value": _rounded(value),
        "rounds": [_rounded(one) for one in results.values[metric.key]],
        "goal": metric.goal_text or None,
        "reached": metric.reached(value),
        "idle_share": results.idle_share(metric.phase),
    }


def _phase_fields(usages: list[Usage]) -> dict[str, Any]:
    names = usages[0].cpu_seconds
    return {
        "idle_share": [usage.idle_share for usage in usages],
        "others_share": [usage.others_share for usage in usages],
        "cpu_seconds": {name: [usage.cpu_seconds.get(name) for usage in usages] for name in names},
    }


def _rounded(value: float | None) -> float | None:
    """Four significant digits."""
    if value is None or value == 0:
        return value
    return round(value, 3 - math.floor(math.log10(abs(value))))


def _shown(value: float | None) -> str:
    if value is None:
        return "-"
    return format_count(value) if value >= 100 else f"{_rounded(value):g}"
