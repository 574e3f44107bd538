"""The real torch: its DataLoader over a Loader and over a Dataset, with 0 and 4 workers, fork and spawn."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import pytest

from headrace.client import engine
from support.system import ROOT
from support.volumes import VolumeUnderTest

SAMPLES = 500


@pytest.mark.timeout(300)
@pytest.mark.parametrize(("workers", "method"), [(0, "none"), (4, "fork"), (4, "spawn")])
def test_a_dataloader_gets_every_sample(
    torch_python: str, volume: VolumeUnderTest, workers: int, method: str
) -> None:
    api = volume.connect()
    for number in range(SAMPLES):
        content = b"%06d" % number * (3 + number % 500)
        api.write_bytes(f"/train/class-{number % 7}/{number:06}", content, parents=True)
    dataset = api.seal("/train")
    run = subprocess.run(
        [
            torch_python,
            str(Path(__file__).with_name("torch_program.py")),
            volume.name,
            dataset.seal,
            str(workers),
            method,
        ],
        capture_output=True,
        text=True,
        timeout=280,
        env=os.environ | {"PYTHONPATH": str(ROOT / "python"), "HEADRACE_ENGINE": engine.find_engine()},
    )
    assert run.returncode == 0, run.stderr
    assert json.loads(run.stdout) == {
        "loader": SAMPLES,
        "dataset": SAMPLES,
        "kept": SAMPLES,
        "loss": True,
    }
    assert "Warning" not in run.stderr, run.stderr
