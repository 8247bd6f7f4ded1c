"""Measured time that decides what is drafted, the same on every rank."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

from swiftgen.system.ranks import of_leader


@dataclass(frozen=True)
class Stopwatch:
    """Measures spans of time.

    Args:
        clock: Seconds since some moment.
    """

    clock: Callable[[], float] = time.perf_counter

    def start(self) -> Callable[[], float]:
        """Begin a span; what is returned tells the seconds since then.

        Those of rank 0 count for all, so every rank must ask as often as the others.
        """
        begin_s = self.clock()
        return lambda: of_leader(self.clock() - begin_s)


REAL_TIME = Stopwatch()
