"""The policy by which this process returns memory to the system. No TensorFlow here.

By default glibc returns each large block as soon as it is freed. Each training step frees and allocates the same blocks,
tens of megabytes each, and the system would fill each page with zeros again. So this module keeps freed large blocks in the process.
"""

from __future__ import annotations

import ctypes
import os

_TRIM_THRESHOLD, _MMAP_THRESHOLD, _ARENA_MAX = -1, -3, -8  # of <malloc.h>
_LARGE, _OLD = 2**30, 2**25  # bytes; glibc before 2.35 takes no more than the latter


def configure_malloc() -> bool:
    """Makes glibc keep freed large blocks, and limits arenas to the number of cores: only the main arena can keep them.

    Returns:
        True if glibc has accepted the settings. False without a change if the user has configured an allocator (`MALLOC_...`,
        `GLIBC_TUNABLES`, `LD_PRELOAD`), or the C library is not glibc.
    """
    if any(name.startswith("MALLOC_") or name in ("GLIBC_TUNABLES", "LD_PRELOAD") for name in os.environ):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    if not (mallopt(_MMAP_THRESHOLD, _LARGE) or mallopt(_MMAP_THRESHOLD, _OLD)):
        return False
    return bool(mallopt(_TRIM_THRESHOLD, _LARGE) and mallopt(_ARENA_MAX, len(os.sched_getaffinity(0))))
