"""`fsck` finds what is missing or damaged, by name, and nothing where all is whole."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path

import pytest

import headrace
from headrace.cli import main as cli_main
from headrace.cli.exit_codes import ExitCode
from support.objects import Bucket
from support.volumes import ObjectVolumeUnderTest, VolumeUnderTest

KIB, MIB = 1 << 10, 1 << 20


@pytest.fixture
def object_volume(scratch: Path, object_store: Bucket) -> Iterator[ObjectVolumeUnderTest]:
    volume = ObjectVolumeUnderTest(scratch / "vol", object_store)
    volume.create()
    volume.start()
    yield volume
    volume.tear_down()


def fill(opened: headrace.Volume) -> None:
    draw = random.Random(1)
    for i in range(60):
        opened.write_bytes(f"/d{i % 3}/{i}", draw.randbytes(i * 300), parents=True)
    with opened.open("/large", "wb") as file:
        file.write(draw.randbytes(18 * MIB))
    opened.link("/d0/0", "/hard")
    opened.symlink("d0", "/link")
    opened.remove("/d1/1")
    opened.snapshot("one")
    opened.remove("/d2/2")
    opened.sync()


def test_a_whole_volume_has_no_problems(volume: VolumeUnderTest) -> None:
    opened = volume.connect()
    fill(opened)
    report = opened.fsck(deep=True)
    assert report.problems == []
    assert report.names >= 60 and report.segments >= 1 and report.verified_bytes >= 18 * MIB
    volume.restart()
    assert volume.connect().fsck().problems == []


def test_damage_on_disk_is_named(volume: VolumeUnderTest) -> None:
    opened = volume.connect()
    fill(opened)
    volume.restart()
    opened = volume.connect()
    large = next(path for path in volume.segments() if path.suffix == ".file")
    with open(large, "r+b") as file:
        file.seek(5 * MIB)
        file.write(b"damage")
    assert opened.fsck().problems == []
    report = opened.fsck(deep=True)
    assert report.problems_count == 1
    assert "large" in report.problems[0] and large.stem in report.problems[0]
    large.unlink()
    report = opened.fsck()
    assert report.problems_count == 1
    assert large.stem in report.problems[0] and "missing" in report.problems[0]


def test_the_bucket_is_checked_too(object_volume: ObjectVolumeUnderTest) -> None:
    opened = object_volume.connect()
    fill(opened)
    object_volume.evict()
    report = opened.fsck(deep=True)
    assert report.problems == [] and report.verified_bytes >= 18 * MIB
    object_volume.evict()
    key = next(key for key in object_volume.objects() if key.endswith(".pack"))
    object_volume.bucket.delete(key)
    report = opened.fsck()
    assert report.problems_count == 1
    assert Path(key).stem in report.problems[0]


def test_the_command_exits_as_for_damage(
    volume: VolumeUnderTest, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = volume.connect()
    fill(opened)
    volume.restart()
    monkeypatch.setattr("sys.argv", ["headrace", "fsck", volume.name])
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    assert ended.value.code in (0, None)
    assert "0 problems" in capsys.readouterr().out
    for path in volume.segments():
        path.unlink()
    with pytest.raises(SystemExit) as ended:
        cli_main.main()
    assert ended.value.code == ExitCode.FAILURE
