"""Who used the processors during a measurement: where they were never idle, they are what was measured."""

from __future__ import annotations

import os
import resource
from collections.abc import Mapping
from dataclasses import dataclass, field

# Less idle time than this share, and the processors are what limits.
IDLE_SHARE_ENOUGH = 0.1
# With more than this share used by other programs, the numbers are of another machine.
OTHERS_SHARE_MAX = 0.15
_TICKS_PER_SECOND = os.sysconf("SC_CLK_TCK")


@dataclass(frozen=True)
class Usage:
    """Between two points in time. Waiting for a disk counts as idle."""

    idle_share: float
    # Of all processor time, what none of the watched processes used.
    others_share: float
    # By name of process. "driver": what this process waited for meanwhile; "others": everything else.
    cpu_seconds: dict[str, float] = field(default_factory=dict)


class Meter:
    """Starts when it is made. processes: name -> pid of those to watch, which must live on."""

    def __init__(self, processes: Mapping[str, int]) -> None:
        self._processes = dict(processes)
        self._begin = self._look()

    def usage(self) -> Usage:
        idle, total, now = self._look()
        begin_idle, begin_total, begin_seconds = self._begin
        share = (idle - begin_idle) / max(1, total - begin_total)
        used = {name: value - begin_seconds[name] for name, value in now.items()}
        busy = (total - begin_total - (idle - begin_idle)) / _TICKS_PER_SECOND
        used["others"] = max(0.0, busy - sum(used.values()))
        others_share = used["others"] * _TICKS_PER_SECOND / max(1, total - begin_total)
        seconds = {name: round(value, 2) for name, value in used.items()}
        return Usage(round(share, 3), round(others_share, 3), seconds)

    def _look(self) -> tuple[int, int, dict[str, float]]:
        with open("/proc/stat", encoding="ascii") as file:
            # user nice system idle iowait irq softirq steal; guest times are part of user.
            ticks = [int(word) for word in file.readline().split()[1:9]]
        seconds = {name: process_seconds(pid) for name, pid in self._processes.items()}
        children = resource.getrusage(resource.RUSAGE_CHILDREN)
        seconds["driver"] = children.ru_utime + children.ru_stime
        return ticks[3] + ticks[4], sum(ticks), seconds


def process_seconds(pid: int) -> float:
    """Processor time that process `pid` has used so far."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        # Behind the name, which may hold anything: state is field 3, utime and stime are 14 and 15.
        fields = file.read().rpartition(b")")[2].split()
    return (int(fields[11]) + int(fields[12])) / _TICKS_PER_SECOND
