"""Errors and units: what a caller can rely on."""

from __future__ import annotations

import errno
import pickle

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import errors
from headrace.errors import HeadraceError
from headrace.units import format_bytes, format_seconds, parse_bytes

KINDS = {
    "invalid": (errors.Invalid, ValueError),
    "not_found": (errors.NotFound, FileNotFoundError),
    "conflict": (errors.Conflict, OSError),
    "unavailable": (errors.Unavailable, ConnectionError),
    "full": (errors.Full, OSError),
    "corrupt": (errors.Corrupt, OSError),
    "permission": (errors.Permission, PermissionError),
    "internal": (errors.Internal, OSError),
}


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_is_its_class_and_its_builtin(kind: str) -> None:
    ours, builtin = KINDS[kind]
    error = HeadraceError.of(kind, 99, "what, where and what to do")
    assert type(error) is ours
    assert isinstance(error, builtin)
    assert isinstance(error, OSError)
    assert (str(error), error.errno, error.kind) == ("what, where and what to do", 99, kind)


@pytest.mark.parametrize(
    ("kind", "number", "builtin"),
    [
        ("conflict", errno.EEXIST, FileExistsError),
        ("invalid", errno.EISDIR, IsADirectoryError),
        ("invalid", errno.ENOTDIR, NotADirectoryError),
    ],
)
def test_errno_selects_the_builtin_where_one_fits(kind: str, number: int, builtin: type[OSError]) -> None:
    assert isinstance(HeadraceError.of(kind, number, ""), builtin)


def test_other_conflicts_are_not_file_exists() -> None:
    assert not isinstance(HeadraceError.of("conflict", errno.ENOTEMPTY, ""), FileExistsError)


def test_unknown_kind_is_internal_and_keeps_its_message() -> None:
    error = HeadraceError.of("haunted", 5, "boo")
    assert type(error) is errors.Internal
    assert str(error) == "boo"


def test_errors_pickle_whole() -> None:
    error = HeadraceError.of("conflict", errno.EEXIST, "there")
    error.add_note("seen by rank 3")
    copy = pickle.loads(pickle.dumps(error))
    assert type(copy) is errors.AlreadyExists
    assert (str(copy), copy.errno, copy.__notes__) == ("there", errno.EEXIST, ["seen by rank 3"])


def test_errors_can_be_rebuilt_from_text_alone() -> None:
    # torch's DataLoader does so with a worker's exception.
    error = errors.Corrupt("Caught Corrupt in worker 0")
    assert (str(error), error.errno) == ("Caught Corrupt in worker 0", errno.EIO)


@pytest.mark.parametrize("text", ["", "ten", "-1", "1.2.3", "5 miles", "1e3", "KiB"])
def test_what_is_no_size_is_invalid(text: str) -> None:
    with pytest.raises(errors.Invalid, match="is not a size"):
        parse_bytes(text)


@given(st.integers(0, 2**60))
def test_sizes_in_bytes_are_read_back(count: int) -> None:
    assert parse_bytes(str(count)) == parse_bytes(f"{count}B") == parse_bytes(count) == count


@given(st.integers(0, 2**62))
def test_shown_sizes_are_near_the_truth(count: int) -> None:
    assert abs(parse_bytes(format_bytes(count)) - count) <= max(count * 0.06, 0.5)


def test_durations_at_the_edges() -> None:
    assert [format_seconds(s) for s in (0, 0.001, 1, 60, 3600)] == [
        "0.0 us",
        "1 ms",
        "1.0 s",
        "1:00",
        "1:00:00",
    ]
