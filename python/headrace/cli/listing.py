"""`headrace ls`, `stat` and `du`: what a volume holds, for people and for programs."""

from __future__ import annotations

import datetime
import stat as stat_bits
from typing import Any

import click

from headrace.cli.text import json_name, print_json, print_table, shown
from headrace.client.volume import Volume
from headrace.model.message import Attr, Kind
from headrace.units import format_bytes, format_count


def list_place(volume: Volume, path: bytes, long: bool, as_json: bool) -> None:
    """The entries of a folder, or the one name that `path` is."""
    attr = volume.stat(path)
    if attr.kind is Kind.DIRECTORY:
        items = [(entry.name, entry.stat(follow_links=False)) for entry in volume.scandir(path)]
        parent = path
    else:
        parent, _, name = path.rpartition(b"/")
        items = [(name, attr)]
    rows = [(name, attr, _link_target(volume, parent, name, attr, long or as_json)) for name, attr in items]
    if as_json:
        print_json(
            {
                **json_name("path", path),
                "entries": [
                    {**json_name("name", name), **attr_fields(attr), **_target_fields(target)}
                    for name, attr, target in rows
                ],
            }
        )
    elif long:
        cells = [
            [
                stat_bits.filemode(attr.st_mode),
                str(attr.nlink),
                _user(attr.uid),
                _group(attr.gid),
                str(attr.size),
                format_moment(attr.mtime_ns, "minutes"),
                shown(name) + (f" -> {shown(target)}" if target is not None else ""),
            ]
            for name, attr, target in rows
        ]
        _print_long(cells)
    else:
        for name, _, _ in rows:
            click.echo(shown(name))


def _print_long(rows: list[list[str]]) -> None:
    """As ls -l: numbers to the right, names last and as long as they are."""
    if not rows:
        return
    widths = [max(len(row[index]) for row in rows) for index in range(len(rows[0]) - 1)]
    right = {1, 4}
    for row in rows:
        cells = [
            cell.rjust(width) if index in right else cell.ljust(width)
            for index, (cell, width) in enumerate(zip(row, widths, strict=False))
        ]
        click.echo(" ".join([*cells, row[-1]]))


def _link_target(volume: Volume, parent: bytes, name: bytes, attr: Attr, wanted: bool) -> bytes | None:
    if attr.kind is not Kind.SYMLINK or not wanted:
        return None
    return volume.readlink(parent.rstrip(b"/") + b"/" + name)


def _target_fields(target: bytes | None) -> dict[str, str]:
    return {} if target is None else json_name("target", target)


def attr_fields(attr: Attr) -> dict[str, Any]:
    """An inode's attributes as `--json` prints them; `mode` are the permission bits."""
    return {
        "kind": attr.kind.value,
        "mode": attr.mode,
        "size": attr.size,
        "nlink": attr.nlink,
        "uid": attr.uid,
        "gid": attr.gid,
        "ino": attr.ino,
        "blocks": attr.blocks,
        "rdev": attr.rdev,
        "atime_ns": attr.atime_ns,
        "mtime_ns": attr.mtime_ns,
        "ctime_ns": attr.ctime_ns,
    }


def stat_place(volume: Volume, path: bytes, as_json: bool) -> None:
    attr = volume.stat(path, follow_links=False)
    target = volume.readlink(path) if attr.kind is Kind.SYMLINK else None
    if as_json:
        print_json({**json_name("path", path), **attr_fields(attr), **_target_fields(target)})
        return
    rows = [
        ["path", shown(path) + (f" -> {shown(target)}" if target is not None else "")],
        ["kind", attr.kind.value.replace("_", " ")],
        ["size", f"{attr.size} bytes" + (f" ({format_bytes(attr.size)})" if attr.size >= 1024 else "")],
        ["mode", f"{attr.mode:04o} ({stat_bits.filemode(attr.st_mode)})"],
        ["owner", f"{_user(attr.uid)} ({attr.uid}), group {_group(attr.gid)} ({attr.gid})"],
        ["links", str(attr.nlink)],
        ["inode", str(attr.ino)],
        ["modified", format_moment(attr.mtime_ns, "auto")],
        ["changed", format_moment(attr.ctime_ns, "auto")],
        ["accessed", format_moment(attr.atime_ns, "auto")],
    ]
    if attr.kind in (Kind.CHAR_DEVICE, Kind.BLOCK_DEVICE):
        rows.append(["device", str(attr.rdev)])
    for name, value in rows:
        click.echo(f"{name:>9}  {value}")


def measure(volume: Volume, path: bytes) -> dict[str, int]:
    """Bytes and files below `path`, each inode once."""
    counted = {"bytes": 0, "files": 0, "directories": 0, "others": 0}
    linked: set[int] = set()

    def add(attr: Attr) -> None:
        if attr.kind is Kind.DIRECTORY:
            counted["directories"] += 1
            return
        if attr.nlink > 1:
            if attr.ino in linked:
                return
            linked.add(attr.ino)
        counted["files" if attr.kind is Kind.FILE else "others"] += 1
        if attr.kind is Kind.FILE:
            counted["bytes"] += attr.size

    attr = volume.stat(path, follow_links=False)
    add(attr)
    stack = [path] if attr.kind is Kind.DIRECTORY else []
    while stack:
        for entry in volume.scandir(stack.pop()):
            attr = entry.stat(follow_links=False)
            add(attr)
            if attr.kind is Kind.DIRECTORY:
                stack.append(entry.path)
    return counted


def list_seals(volume: Volume, as_json: bool) -> None:
    """The sealed views of a volume."""
    seals = volume.seals()
    if as_json:
        print_json(
            {
                "seals": [
                    {
                        "seal": seal.seal,
                        **json_name("path", seal.path),
                        "samples": seal.samples,
                        "bytes": seal.sample_bytes,
                        "version": seal.version,
                        "created_ns": seal.created_ns,
                    }
                    for seal in seals
                ]
            }
        )
        return
    rows = [
        [
            seal.seal,
            shown(seal.path),
            format_count(seal.samples),
            format_bytes(seal.sample_bytes),
            format_moment(seal.created_ns, "minutes"),
        ]
        for seal in seals
    ]
    print_table(["seal", "path", "samples", "bytes", "created"], rows, left=2)


def _user(uid: int) -> str:
    import pwd

    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _group(gid: int) -> str:
    import grp

    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)


def format_moment(nanoseconds: int, precision: str) -> str:
    """Local time; a time that no calendar here can show, as seconds."""
    seconds, rest = divmod(nanoseconds, 1_000_000_000)
    try:
        moment = datetime.datetime.fromtimestamp(seconds).astimezone()
    except (OverflowError, OSError, ValueError):
        return f"@{seconds}.{rest:09}"
    if precision == "minutes":
        return moment.strftime("%Y-%m-%d %H:%M")
    return f"{moment:%Y-%m-%d %H:%M:%S}.{rest:09} {moment:%z}"
