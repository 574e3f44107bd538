"""`headrace bench object` with the real store, proxy, engine and mount, small."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from support.commands import answer
from support.objects import seaweedfs_missing
from support.system import need, need_fuse, need_root


@pytest.mark.timeout(300)
def test_bench_object_measures_against_its_goals(scratch: Path) -> None:
    need_root()  # drops the page cache
    need_fuse()
    need(not seaweedfs_missing(), seaweedfs_missing())
    said = answer(
        "bench", "object", "--files", "400", "--bytes", "16MiB", "--peer-files", "20", "--rounds", "1",
        "--folder", scratch,
    )  # fmt: skip
    metrics = said["metrics"]
    own = {
        "import_files_per_s", "import_puts_per_file", "epoch_files_per_s", "epoch_gets_per_file",
        "large_cold_mb_s", "store_get_cold_mb_s", "large_cold_share", "large_cached_share", "fsync_p50_ms",
        "fsync_p99_ms", "store_put_4k_ms",
    }  # fmt: skip
    assert own <= set(metrics)
    for peer in ("s3fs", "rclone"):
        if shutil.which(peer):
            # The slow store's latency alone allows 8 threads 400 files a second.
            assert 0 < metrics[f"{peer}_files_per_s"]["value"] <= 400
            assert metrics[f"{peer}_gets_per_file"]["value"] >= 1
        else:
            assert any(peer in note for note in said["notes"])
    # All of 400 files came from the store, and in fewer requests than there are files.
    assert 0 < metrics["epoch_gets_per_file"]["value"] < 1
    assert 0 < metrics["import_puts_per_file"]["value"] < 1
    assert metrics["fsync_p50_ms"]["value"] <= metrics["fsync_p99_ms"]["value"]
    assert set(said["phases"]["epoch"]["cpu_seconds"]) == {"store", "proxy", "engine", "driver", "others"}
    assert list(scratch.iterdir()) == []
