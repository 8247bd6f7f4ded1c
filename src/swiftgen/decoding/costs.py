"""What verify passes and levels of drafts take, measured at one order of context length."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping, Sequence

_MEMORY = 0.1  # weight of the newest measurement, after the first few
_NUM_FIRST = 2
_OUTLIER = 2.0  # what takes this much longer than expected says more about the machine than about the pass
_FORGETTING = 0.002  # per step, of what is not used


class Costs:
    """Seconds of what a step does, by name: verify passes with all that follows them, and levels of drafts.

    Args:
        pass_sizes: Ascending. A size that was not tried yet is taken to cost what the next smaller one does,
            times what it was found to cost more before, and the cost of a size that is not used falls slowly
            towards that, so that no size is given up for good.
        before: What was found before: passes by their size as text, levels by their source. Sizes that are
            missing cost what the next smaller one does, and all the same if none is there.
    """

    def __init__(self, pass_sizes: Sequence[int], before: Mapping[str, float]) -> None:
        self._sizes = list(pass_sizes)
        self._before: dict[int, float] = {}
        last = next((before[str(size)] for size in pass_sizes if str(size) in before), 1.0)
        for size in pass_sizes:
            last = self._before[size] = before.get(str(size), last)
        _level_off(self._before)
        self._levels_before = {name: value for name, value in before.items() if not name.isdecimal()}
        self._measured: dict[int | str, float] = {}
        self._numbers: dict[int | str, int] = {}
        self._seconds = dict(self._before)

    def seconds(self, size: int) -> float:
        """Of a pass of one of the sizes."""
        return self._seconds[size]

    def level_seconds(self, source: str, share: float) -> float:
        """Of a level of drafts; before any was made it is taken to cost this share of the smallest pass."""
        first = self._sizes[0]
        share = self._levels_before.get(source, share * self._before[first]) / self._before[first]
        expected = share * self.seconds(first)  # the machine may be slower or faster now
        if self._numbers.get(source, 0) < _NUM_FIRST:
            return min(expected, self._measured.get(source, expected))
        return self._measured[source]

    def forget_level(self, source: str, share: float) -> None:
        """Let a level that was dear become a little cheaper, so that it is tried again some day."""
        if source in self._measured:
            excess = self._measured[source] - share * self.seconds(self._sizes[0])
            self._measured[source] -= _FORGETTING * max(0.0, excess)

    def row_seconds(self, num_rows: int) -> float:
        """What one row more than so many takes, sizes between those of passes interpolated."""
        if num_rows < self._sizes[0] or len(self._sizes) == 1:
            return 0.0
        i = min(bisect_left(self._sizes, num_rows + 1), len(self._sizes) - 1)
        small, large = self._sizes[i - 1], self._sizes[i]
        return max(0.0, self.seconds(large) - self.seconds(small)) / (large - small)

    def observe(self, num_rows: int, seconds: float) -> None:
        """Learn from a verify pass of so many rows."""
        size = next((s for s in self._sizes if s >= num_rows), self._sizes[-1])
        for other, unused in zip(self._sizes, self._sizes[1:], strict=False):
            if unused != size and unused in self._measured:
                expected = self.seconds(other) * self._before[unused] / self._before[other]
                excess = self._measured[unused] - expected
                self._measured[unused] -= _FORGETTING * max(0.0, excess)
        self._learn(size, seconds)
        tried = [s for s in self._sizes if s in self._measured]
        for s in self._sizes:
            near = next((t for t in reversed(tried) if t <= s), tried[0])
            self._seconds[s] = self._measured[near] * self._before[s] / self._before[near]
        _level_off(self._seconds)

    def observe_level(self, source: str, seconds: float) -> None:
        """Learn from a level of drafts."""
        self._learn(source, seconds)

    def known(self) -> dict[str, float]:
        """What is known now, as `before` has it."""
        known = {str(size): seconds for size, seconds in self._seconds.items()} if self._measured else {}
        levels = {name: seconds for name, seconds in self._measured.items() if isinstance(name, str)}
        scale = self.seconds(self._sizes[0]) / self._before[self._sizes[0]]
        unused = {name: seconds * scale for name, seconds in self._levels_before.items()}
        return {**known, **unused, **levels}

    def _learn(self, name: int | str, seconds: float) -> None:
        """The shortest of the first few counts: what is used for the first time has to be waited for."""
        number = self._numbers[name] = self._numbers.get(name, 0) + 1
        before = self._measured.get(name, seconds)
        if number <= _NUM_FIRST:
            self._measured[name] = min(before, seconds)
        else:
            self._measured[name] += _MEMORY * (min(seconds, _OUTLIER * before) - before)


def _level_off(seconds: dict[int, float]) -> None:
    """Let no pass, by ascending size, seem dearer than a larger one: that would be noise."""
    least = math.inf
    for size in reversed(seconds):
        least = seconds[size] = min(least, seconds[size])


def hopeful(seconds: dict[str, float]) -> dict[str, float]:
    """Passes of few measurements by their size, ascending, with half of what they take beyond the smallest.

    A size that seems dear is never tried, one that seems cheap is known after a step.
    """
    first = next(iter(seconds.values()), 1.0)
    return {size: (first + value) / 2 for size, value in seconds.items()}
