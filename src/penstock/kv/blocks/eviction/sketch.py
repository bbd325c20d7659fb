"""How often keys were used lately, roughly, in constant memory. Owns counters, no keys: a count-min sketch that halves itself."""

from __future__ import annotations

import struct

import numpy as np

_ROWS = 4
_MOST = 15
_COUNTERS_PER_SLOT = 8  # per row; most keys of a prefix cache are seen once, and fewer counters would be full of those
_USES_PER_SLOT = 10  # between two halvings
_PLACES = struct.Struct(f"<{_ROWS}I")


class FrequencySketch:
    """Estimates that are never too low between halvings. A key is itself a hash of 16 bytes or more, so its words are the places."""

    def __init__(self, num_slots: int) -> None:
        width = 1 << (max(1, num_slots * _COUNTERS_PER_SLOT) - 1).bit_length()
        self._mask = width - 1
        self._rows = [bytearray(width) for _ in range(_ROWS)]
        self._num_uses = 0
        self._period = max(1, num_slots * _USES_PER_SLOT)

    def add(self, key: bytes) -> None:
        """Count one use. Only the lowest of a key's counters grow, so that others that share one are overrated less."""
        least = self.estimate(key)
        if least < _MOST:
            mask = self._mask
            for row, word in zip(self._rows, _PLACES.unpack_from(key), strict=True):
                if row[word & mask] == least:
                    row[word & mask] = least + 1
        self._num_uses += 1
        if self._num_uses >= self._period:
            self._halve()

    def estimate(self, key: bytes) -> int:
        """Written out row by row: two of these are most of what an eviction costs."""
        (row_a, row_b, row_c, row_d), mask = self._rows, self._mask
        words: tuple[int, int, int, int] = _PLACES.unpack_from(key)
        a, b, c, d = words
        return min(row_a[a & mask], row_b[b & mask], row_c[c & mask], row_d[d & mask])

    def _halve(self) -> None:
        for row in self._rows:
            counters = np.frombuffer(row, np.uint8)
            np.right_shift(counters, 1, out=counters)
        self._num_uses //= 2
