"""Who may use whom among the crates, read from cargo itself: the arrow of ARCHITECTURE.md.

    base <- format <- {meta, flash} <- volume <- fuse <- node <- headraced

`USES` is the whole truth for our own crates: a new edge is a change here, made on purpose. `DOORS` says which
crate alone may know an outside library, so that it can be exchanged behind one door.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).parents[2]

USES = {
    "headrace-base": set(),
    "headrace-format": {"base"},
    "headrace-meta": {"base", "format"},
    "headrace-flash": {"base", "format"},
    "headrace-object": {"base"},
    "headrace-volume": {"base", "format", "meta", "flash", "object"},
    "headrace-fuse": {"base", "format", "volume"},
    "headrace-node": {"base", "format", "volume", "fuse"},
    "headrace-workload": {"base"},
    "headraced": {"base", "format", "volume", "node", "workload"},
}

DOORS = {
    "fuser": {"headrace-fuse"},
    "rusqlite": {"headrace-meta"},
    "axum": {"headrace-node"},
    "object_store": {"headrace-object"},
    "tokio": {"headrace-node", "headrace-object", "headrace-workload"},
    "metrics-exporter-prometheus": {"headrace-node"},
    "getrandom": {"headrace-base"},
    "ulid": {"headrace-base"},
    "crc-fast": {"headrace-base"},
    "tracing-subscriber": {"headraced"},
}


@pytest.fixture(scope="module")
def packages() -> dict[str, dict[str, Any]]:
    run = subprocess.run(
        ["cargo", "metadata", "--format-version", "1", "--no-deps", "--locked", "--offline"],
        cwd=ROOT,
        capture_output=True,
        check=False,
        text=True,
    )
    assert run.returncode == 0, run.stderr
    return {package["name"]: package for package in json.loads(run.stdout)["packages"]}


def shipped(package: dict[str, Any]) -> set[str]:
    """Names of what the package uses when it is built, not when it is tested."""
    return {dependency["name"] for dependency in package["dependencies"] if dependency["kind"] != "dev"}


def test_every_crate_stands_in_the_table(packages: dict[str, dict[str, Any]]) -> None:
    assert set(packages) == set(USES)


@pytest.mark.parametrize("crate", sorted(USES))
def test_a_crate_uses_only_crates_to_its_left(packages: dict[str, dict[str, Any]], crate: str) -> None:
    own = {name.removeprefix("headrace-") for name in shipped(packages[crate]) if name.startswith("headrace")}
    assert own <= USES[crate], f"{crate} may not use {sorted(own - USES[crate])}"


def test_the_table_has_no_circle() -> None:
    done: set[str] = set()
    left = {crate.removeprefix("headrace-"): uses for crate, uses in USES.items()}
    while left:
        ready = {crate for crate, uses in left.items() if uses <= done}
        assert ready, f"these use each other: {sorted(left)}"
        done |= ready
        left = {crate: uses for crate, uses in left.items() if crate not in ready}


@pytest.mark.parametrize("library", sorted(DOORS))
def test_a_library_has_one_door(packages: dict[str, dict[str, Any]], library: str) -> None:
    users = {name for name, package in packages.items() if library in shipped(package)}
    assert users <= DOORS[library], f"{library} is behind {DOORS[library]}, not {users - DOORS[library]}"


def test_crates_take_versions_and_lints_from_the_workspace(packages: dict[str, dict[str, Any]]) -> None:
    """One version for all, and no crate that the lints (unwrap, clock, chance) do not reach."""
    for name, package in packages.items():
        text = Path(package["manifest_path"]).read_text()
        assert "[lints]\nworkspace = true" in text, f"{name} does not inherit the workspace's lints"
        assert "version.workspace = true" in text, f"{name} has a version of its own"
        for dependency in package["dependencies"]:
            line = next(line for line in text.splitlines() if line.startswith(dependency["name"]))
            assert "workspace = true" in line, f"{name}: {line!r} pins a version beside the workspace's"
