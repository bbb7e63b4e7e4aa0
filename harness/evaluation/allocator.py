"""Keep freed memory in the process while batches are read ahead of the answers.

A picture of 12 megapixels is a block of 36 MB. glibc requests each such block from the system and returns it when it is
freed, so that every picture costs page faults. A block that is kept serves the next picture (docs/scale.md has the
measurements).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of malloc.h.
TRIM, MMAP = -1, -3

#: Bytes above which the free end of the heap is returned, and above which a block is mapped by itself.
KEPT = {TRIM: 2**31 - 1, MMAP: 2**30}

#: The values that glibc reaches by itself in a process that has freed large blocks.
USUAL = {TRIM: 2**26, MMAP: 2**25}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep freed memory in the process, and return it to the system at the end of the block.

    The kept memory settles at a few times the memory in use. Nothing changes without glibc, or if the environment
    configures allocation (`MALLOC_*`, `GLIBC_TUNABLES`).
    """
    library = ctypes.CDLL(None)
    configured = any(name.startswith(("MALLOC_", "GLIBC_TUNABLES")) for name in os.environ)
    if configured or not hasattr(library, "mallopt"):
        yield
        return
    for option, size in KEPT.items():
        library.mallopt(option, size)
    try:
        yield
    finally:
        for option, size in USUAL.items():
            library.mallopt(option, size)
        library.malloc_trim(0)
