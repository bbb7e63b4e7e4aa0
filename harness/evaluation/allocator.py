"""Freed memory stays in the process while batches are read ahead of the answers.

A picture of 12 megapixels is a block of 36 MB. glibc asks the system for each such block and hands it back as soon as
it is freed, so that every picture is paid for in page faults. Kept, a block is used again by the next picture
(docs/scale.md has the measurements).
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Iterator
from contextlib import contextmanager

#: `M_TRIM_THRESHOLD` and `M_MMAP_THRESHOLD` of malloc.h.
TRIM, MMAP = -1, -3

#: Bytes from which on a free end of the heap goes back, and from which on a block is mapped by itself.
KEPT = {TRIM: 2**31 - 1, MMAP: 2**30}

#: What glibc itself comes to in a process that has freed large blocks.
USUAL = {TRIM: 2**26, MMAP: 2**25}


@contextmanager
def kept_memory() -> Iterator[None]:
    """Keep what is freed in the process, and give it back to the system at the end.

    What is kept settles at a few times what is in use at once, however long it goes on. Nothing changes without glibc,
    or where the environment says how it is to allocate (`MALLOC_*`, `GLIBC_TUNABLES`).
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
