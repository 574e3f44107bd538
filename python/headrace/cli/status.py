"""`headrace status`: what an engine does, for people and for programs."""

from __future__ import annotations

from typing import Any

import click
import msgspec

from headrace.cli.text import counted, json_name, print_json, printable, shown
from headrace.client.volume import Volume
from headrace.model.clock import wall_ns
from headrace.model.message import ObjectStatus
from headrace.units import format_bytes, format_count, format_seconds


def _tier_rows(tier: ObjectStatus | None) -> list[tuple[str, str]]:
    if tier is None:
        return []
    held = tier.clean_bytes + tier.dirty_bytes
    flash = f"{format_bytes(held)} of {format_bytes(tier.flash_bytes_max)}"
    dirty = "nothing waits for upload"
    if tier.dirty_segments:
        dirty = (
            f"{format_bytes(tier.dirty_bytes)} in {counted(tier.dirty_segments, 'segment', 'segments')} "
            f"not in the object tier yet, the oldest for {format_seconds(tier.dirty_ms / 1000)}"
        )
    backup = "none yet"
    if tier.backup_ns is not None:
        age = max(0.0, (wall_ns() - tier.backup_ns) / 1e9)
        backup = f"of the metadata, {format_seconds(age)} ago"
    return [("object", tier.location), ("flash", f"{flash}; {dirty}"), ("backup", backup)]


def print_status(volume: Volume, as_json: bool) -> None:
    status = volume.status()
    space = volume.statfs()
    if as_json:
        # `path` and mountpoints are bytes: they get their own treatment.
        fields: dict[str, Any] = {
            name: getattr(status, name) for name in status.__struct_fields__ if name not in ("path", "mounts")
        }
        mounts = [
            {
                **json_name("mountpoint", mount.mountpoint),
                "read_only": mount.read_only,
                "requests": mount.requests,
            }
            for mount in status.mounts
        ]
        print_json(
            {
                **json_name("path", status.path),
                **fields,
                "mounts": mounts,
                "space": msgspec.to_builtins(space),
            }
        )
        return
    used = 100 * (1 - space.bytes_available / space.bytes_total) if space.bytes_total else 0
    rows = [
        ("volume", f"{shown(status.path)} ({status.volume}, format {status.format})"),
        ("engine", f"{status.engine}, pid {status.pid}"),
        (
            "memory",
            (
                f"{format_bytes(status.resident_bytes)} resident; buffers "
                f"{format_bytes(status.buffers_bytes)} of {format_bytes(status.memory_bytes_max)}"
            ),
        ),
        ("unsaved", format_bytes(status.dirty_bytes)),
        ("clients", f"{status.clients}, {status.streams} of them reading batches"),
        (
            "holds",
            ", ".join(
                [
                    counted(status.inodes, "inode", "inodes"),
                    counted(status.seals, "sealed view", "sealed views"),
                ]
            ),
        ),
        ("segments", f"{format_count(status.segments)}, {format_bytes(status.segment_bytes)}"),
        *_tier_rows(status.object),
        *(
            []
            if status.object
            else [("disk", f"{format_bytes(space.bytes_available)} free, {used:.0f} % used")]
        ),
    ]
    for mount in status.mounts:
        how = "read-only, " if mount.read_only else ""
        rows.append(
            ("mount", f"{shown(mount.mountpoint)} ({how}{counted(mount.requests, 'request', 'requests')})")
        )
    rows.extend(("recovery", printable(line)) for line in status.recovery)
    rows.extend(("warning", printable(line)) for line in status.warnings)
    for name, value in rows:
        click.echo(f"{name:>9}  {value}")
