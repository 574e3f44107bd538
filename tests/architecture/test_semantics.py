"""docs/semantics.md names a test for each promise; each of them exists."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "semantics.md"
RUST = {
    "headrace-volume": "crates/volume",
    "headrace-format": "crates/format",
    "headrace-flash": "crates/flash",
    "headrace-meta": "crates/meta",
}


def promises() -> list[str]:
    rows = [line for line in PAGE.read_text().splitlines() if re.match(r"\| [^-]", line)]
    return [row for row in rows if "promise" not in row]


def test_each_promise_names_a_test() -> None:
    lines = promises()
    assert len(lines) > 30
    bare = [line for line in lines if "::" not in line]
    assert not bare, bare


def test_each_named_test_exists() -> None:
    missing = []
    for place, name in re.findall(r"`([\w./-]+)::(\w+)`", PAGE.read_text()):
        if place in RUST:
            sources = (ROOT / RUST[place]).rglob("*.rs")
            found = any(re.search(rf"fn {name}\b|mod {name}\b", path.read_text()) for path in sources)
            found = found or any((ROOT / RUST[place]).rglob(f"{name}.rs"))
        else:
            path = ROOT / "tests" / place
            pattern = rf"^def {name}\("
            found = path.is_file() and re.search(pattern, path.read_text(), re.MULTILINE) is not None
        if not found:
            missing.append(f"{place}::{name}")
    assert not missing, missing
