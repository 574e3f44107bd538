"""The door to time in Python, so that whoever needs it can be given another clock.

Nothing else in the package calls `time`; functions that measure or wait take these as defaults.
"""

from __future__ import annotations

import time

monotonic_ns = time.monotonic_ns
# Since 1970, for what other systems read (signatures expire by it); never to measure with.
wall_ns = time.time_ns
sleep_seconds = time.sleep
