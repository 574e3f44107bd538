"""Stops and starts a volume's engine as it was, with its mounts: what "cold" means for a measurement."""

from __future__ import annotations

import os
import stat
from collections.abc import Callable
from typing import TypeVar

from headrace.cli.machine import peak_resident_bytes
from headrace.cli.mounts import headrace_mounts
from headrace.client import engine
from headrace.client.volume import connect
from headrace.errors import Conflict

Result = TypeVar("Result")


class EngineRestart:
    """The engine of one volume. Takes over its memory budget, `--system` and its mounts."""

    def __init__(self, volume: str) -> None:
        self._volume = volume

    def run(self, between: Callable[[], Result]) -> Result:
        """Ends the mounts and the engine, calls `between`, starts it and mounts again.

        Conflict: files in a mount are open, or someone works in it.
        """
        with connect(self._volume) as opened:
            status = opened.status()
            # What only the running one shows: its socket's rights, the kernel's list of mounts.
            system = self._serves_all()
            shared = {mount.path for mount in headrace_mounts() if b"allow_other" in mount.options}
            for mount in status.mounts:
                try:
                    opened.unmount(os.fsdecode(mount.mountpoint))
                except Conflict as error:
                    where = os.fsdecode(mount.mountpoint)
                    raise Conflict(
                        f"{error.message}: leave {where} for the time of the measurement"
                    ) from error
        engine.stop(self._volume)
        try:
            return between()
        finally:
            engine.start(
                self._volume,
                memory_bytes=status.memory_bytes_max,
                idle_exit_seconds=engine.IDLE_EXIT_SECONDS,
                system=system,
            )
            with connect(self._volume, start=False) as opened:
                for mount in status.mounts:
                    opened.mount(
                        os.fsdecode(mount.mountpoint),
                        read_only=mount.read_only,
                        allow_other=mount.mountpoint in shared,
                    )

    def resident_bytes_max(self) -> int:
        """The most memory that the engine has had resident since it was started."""
        with connect(self._volume) as opened:
            status = opened.status()
            return peak_resident_bytes(status.pid) or status.resident_bytes

    def _serves_all(self) -> bool:
        try:
            mode = os.stat(os.path.join(self._volume, "engine.sock")).st_mode
        except FileNotFoundError:
            return False
        return bool(mode & stat.S_IWOTH)
