"""The examples in docstrings, run as they stand; those with `volume` or `folder` by the real engine."""

from __future__ import annotations

import doctest
import importlib
import pkgutil

import pytest


def examples() -> list[doctest.DocTest]:
    finder = doctest.DocTestFinder(exclude_empty=True)
    found = []
    for package in ("client", "loaders", "model", "policy"):
        parent = importlib.import_module(f"headrace.{package}")
        names = [f"{parent.__name__}.{info.name}" for info in pkgutil.iter_modules(parent.__path__)]
        for name in names:
            found += [test for test in finder.find(importlib.import_module(name)) if test.examples]
    for module in ("headrace.errors", "headrace.units"):
        found += [test for test in finder.find(importlib.import_module(module)) if test.examples]
    return found


EXAMPLES = examples()


@pytest.mark.parametrize("example", EXAMPLES, ids=[test.name for test in EXAMPLES])
def test_example(example: doctest.DocTest, request: pytest.FixtureRequest) -> None:
    text = "".join(line.source for line in example.examples)
    for fixture in ("volume", "folder"):
        if fixture in text.replace("as volume", ""):
            example.globs[fixture] = request.getfixturevalue(fixture)
    complaints: list[str] = []
    result = doctest.DocTestRunner(optionflags=doctest.ELLIPSIS).run(example, out=complaints.append)
    assert result.failed == 0, "".join(complaints)


def test_every_public_entry_has_an_example() -> None:
    names = {test.name.rpartition("headrace.")[2] for test in EXAMPLES}
    for entry in (
        "client.volume.connect", "client.volume.Volume.open", "client.volume.Volume.seal",
        "client.dataset.Dataset.read_batch", "loaders.loader.Loader", "model.batch.Batch",
        "policy.order.permute", "errors.HeadraceError", "units.parse_bytes",
    ):  # fmt: skip
        assert entry in names
