"""`headrace snapshot`: what each of its commands prints."""

from __future__ import annotations

import json

import click

from headrace.cli.listing import format_moment
from headrace.cli.text import json_name, print_json, print_table, shown
from headrace.client.volume import Volume
from headrace.model.message import Change, Snapshot
from headrace.units import format_count

_SIGNS = {Change.ADDED: "+", Change.REMOVED: "-", Change.CHANGED: "M", Change.RENAMED: "R"}


def _fields(snapshot: Snapshot) -> dict[str, object]:
    return {
        **json_name("name", snapshot.name),
        "version": snapshot.version,
        "created_ns": snapshot.created_ns,
    }


def create(volume: Volume, name: bytes, as_json: bool) -> None:
    made = volume.snapshot(name)
    if as_json:
        print_json(_fields(made))
    else:
        click.echo(f"made snapshot {shown(made.name)}: read it under /.snapshots/{shown(made.name)}")


def list_snapshots(volume: Volume, as_json: bool) -> None:
    snapshots = volume.snapshots()
    if as_json:
        print_json({"snapshots": [_fields(snapshot) for snapshot in snapshots]})
        return
    rows = [
        [shown(snapshot.name), str(snapshot.version), format_moment(snapshot.created_ns, "minutes")]
        for snapshot in snapshots
    ]
    print_table(["snapshot", "version", "created"], rows, left=1)


def diff(volume: Volume, older: bytes, newer: bytes | None, as_json: bool) -> None:
    """A line as soon as it is known: there may be millions."""
    for one in volume.snapshot_diff(older, newer):
        if as_json:
            origin = {} if one.from_ is None else json_name("from", one.from_)
            fields = {"change": one.change.value, "kind": one.kind.value, **json_name("path", one.path)}
            click.echo(json.dumps({**fields, **origin}))
            continue
        path = shown(one.path)
        if one.from_ is not None:
            path = f"{shown(one.from_)} -> {path}"
        click.echo(f"{_SIGNS[one.change]} {path}")


def restore(volume: Volume, name: bytes, as_json: bool) -> None:
    restored = volume.restore_snapshot(name)
    if as_json:
        print_json({**json_name("before", restored.before), "changed": restored.changed})
    else:
        click.echo(
            f"restored {shown(name)}: {format_count(restored.changed)} rows of metadata were put back; "
            f"what was before is the snapshot {shown(restored.before)}"
        )


def delete(volume: Volume, name: bytes, as_json: bool) -> None:
    volume.delete_snapshot(name)
    if as_json:
        print_json(json_name("name", name))
    else:
        click.echo(f"deleted the snapshot {shown(name)}")
