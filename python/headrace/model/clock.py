"""The door to time in Python, so that whoever needs it can be given another clock.

Nothing else in the package calls `time`; functions that measure or wait take these as defaults.
"""

from __future__ import annotations

import time

monotonic_ns = time.monotonic_ns
sleep_seconds = time.sleep
