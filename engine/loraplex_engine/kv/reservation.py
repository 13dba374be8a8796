"""Memory that is really there: one anonymous mapping, its pages touched by threads of their own while others work.

Under load nothing can fail for want of a page, and the start does not wait for the kernel to clear gigabytes. Knows
bytes, neither tensors nor blocks.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from collections.abc import Iterator

_PIECE_BYTES = 64 << 20
_NUM_THREADS = 2


class Reservation:
    """`num_bytes` of zeroed memory, huge pages where the kernel has them.

    Raises:
        MemoryError: The kernel does not promise that much.
    """

    def __init__(self, num_bytes: int) -> None:
        try:
            self.buffer = mmap.mmap(-1, max(num_bytes, mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        except OSError as error:
            raise MemoryError(f"The kernel refuses to map {num_bytes} bytes: {error.strerror}.") from error
        if hasattr(mmap, "MADV_HUGEPAGE"):
            self.buffer.madvise(mmap.MADV_HUGEPAGE)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.buffer))
        pieces = iter(range(address, address + len(self.buffer), _PIECE_BYTES))
        self._stop = address + len(self.buffer)
        self._lock = threading.Lock()
        self._threads = [threading.Thread(target=self._touch, args=(pieces,)) for _ in range(_NUM_THREADS)]
        for thread in self._threads:
            thread.start()

    def wait(self) -> mmap.mmap:
        """Return the memory once all of its pages are there."""
        for thread in self._threads:
            thread.join()
        return self.buffer

    def _touch(self, pieces: Iterator[int]) -> None:
        while True:
            with self._lock:
                start = next(pieces, None)
            if start is None:
                return
            # a call through ctypes holds no interpreter lock
            ctypes.memset(start, 0, min(_PIECE_BYTES, self._stop - start))
