"""Making reads cold: dropping the kernel's page, dentry and inode caches."""

from __future__ import annotations

import os

_DROP_CACHES = "/proc/sys/vm/drop_caches"


def drop_page_cache() -> str | None:
    """Writes back and drops what the kernel has cached, of the whole machine. None, or why it cannot.

    Only root may; in many containers not even root.
    """
    os.sync()  # only clean pages are dropped
    try:
        descriptor = os.open(_DROP_CACHES, os.O_WRONLY | os.O_CLOEXEC)
        try:
            os.write(descriptor, b"3")
        finally:
            os.close(descriptor)
    except OSError as error:
        if os.geteuid() != 0:
            return "dropping the page cache needs root"
        return f"{_DROP_CACHES}: {error.strerror}"
    return None
