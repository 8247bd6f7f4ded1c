"""Distinct-n: the share of n-grams that occur for the first time, at a constant cost per token."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

MAX_N = 4

_MASK = (1 << 64) - 1
_NUM_PARTS = 256
_FIRST_SLOTS = 16


class DistinctN:
    """Distinct-1..4 of a growing token sequence: unique n-grams / n-grams (1.0 while there are none).

    n-grams are kept as 64-bit hashes in flat tables, about 16 bytes for a unique n-gram: 64 MB for
    a million tokens that never repeat. Two different n-grams share a hash with a probability of
    about 1e-7 at that size, far below the digits shown.
    """

    def __init__(self) -> None:
        self._seen = [_HashSet() for _ in range(MAX_N)]
        self._recent: list[int] = []  # the last n - 1 token ids, newest first
        self._num_tokens = 0

    def update(self, token_ids: Iterable[int]) -> None:
        """Appends tokens to the sequence."""
        for token_id in token_ids:
            self._recent.insert(0, token_id)
            self._num_tokens += 1
            key = 0
            for seen, part in zip(self._seen, self._recent, strict=False):
                key = _mix(key + part + 1)
                seen.add(key)
            del self._recent[MAX_N - 1 :]

    @property
    def values(self) -> tuple[float, ...]:
        """Distinct-1, -2, -3 and -4."""
        counts = [max(0, self._num_tokens - n) for n in range(MAX_N)]
        return tuple(
            len(seen) / count if count else 1.0 for seen, count in zip(self._seen, counts, strict=True)
        )


def _mix(value: int) -> int:
    """The finaliser of splitmix64: every input bit changes about half of the output bits."""
    value = (value * 0x9E3779B97F4A7C15) & _MASK
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK
    return value ^ (value >> 31)


class _HashSet:
    """A set of well-mixed 64-bit keys with linear probing, at most two thirds full.

    It is split by the top byte into 256 tables that grow on their own, so that growing never stops
    the decoding for longer than a few milliseconds.
    """

    def __init__(self) -> None:
        self._tables = [array("Q", bytes(8 * _FIRST_SLOTS)) for _ in range(_NUM_PARTS)]
        self._sizes = [0] * _NUM_PARTS

    def __len__(self) -> int:
        return sum(self._sizes)

    def add(self, key: int) -> None:
        key = key or 1  # 0 marks a free slot
        part = key >> 56
        table = self._tables[part]
        slot = _find(table, key)
        if table[slot]:
            return
        table[slot] = key
        self._sizes[part] += 1
        if 3 * self._sizes[part] > 2 * len(table):
            self._tables[part] = _grown(table)


def _find(table: array[int], key: int) -> int:
    """The slot that holds `key`, or the free one where it belongs."""
    last = len(table) - 1
    slot = key & last
    while table[slot] not in (0, key):
        slot = (slot + 1) & last
    return slot


def _grown(table: array[int]) -> array[int]:
    larger = array("Q", bytes(16 * len(table)))
    for key in table:
        if key:
            larger[_find(larger, key)] = key
    return larger
