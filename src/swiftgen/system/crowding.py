"""How threads wait for each other: awake while the cores are theirs, asleep where others want them.

A pass is many short parallel regions. The threads of OpenMP wait for the next one without giving up their
core, for milliseconds, and that is fastest as long as nobody else wants the cores. If somebody does, a thread
that waits keeps the very thread from running that it waits for, and a pass takes ten times as long. libgomp
waits for microseconds instead while it has more threads than there are cores, which it looks at anew each
time. So when the system says that our threads queue for cores, idle teams are added until there are more, and
dismissed when the queue is gone. The teams that work stay as they are, and so does every result.

Where there is no libgomp or no schedstat (Linux has both) nothing is changed.
"""

from __future__ import annotations

import functools
import os
import threading
import time
from collections.abc import Mapping
from pathlib import Path

import torch

from swiftgen.system.machine import usable_cores

INTERVAL_S = 0.5
CROWDED, ALONE = 0.1, 0.03
"""Share of the time that our threads would run in which they queue: from where on there are others, and below
which there are none."""
_ALONE_INTERVALS = 10
_IDLE_SHARE = 0.05  # of a core: what a process that does so little meets says nothing
_TEAM_NUMBERS = 2**20  # enough for all threads to get some
_TASKS = Path("/proc/self/task")

Times = Mapping[str, tuple[int, int]]
"""Of each thread the nanoseconds that it ran and that it queued."""


def use_allowed_cores() -> None:
    """Lets PyTorch use no more threads than a container allows, unless OMP_NUM_THREADS says how many."""
    allowed = max(1, int(usable_cores()))
    if "OMP_NUM_THREADS" not in os.environ and torch.get_num_threads() > allowed:
        torch.set_num_threads(allowed)


@functools.cache
def watch_cores() -> None:
    """From now on, waits are short while others want the cores."""
    if torch.get_num_threads() > 1 and _thread_times():
        threading.Thread(target=_watch, name="core watch", daemon=True).start()


def _watch() -> None:
    watch = CoreWatch(num_teams(torch.get_num_threads()))
    while True:
        time.sleep(INTERVAL_S)
        watch.update(_thread_times())


def num_teams(num_threads: int) -> int:
    """Idle teams of so many threads with which libgomp has more threads than it knows of cores."""
    num_cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return (num_cores - 1) // (num_threads - 1)


class CoreWatch:
    """Decides from the times of all threads, told every `INTERVAL_S`, whether waits are to be short.

    Args:
        num_teams: Idle teams that make them short.
    """

    def __init__(self, num_teams: int) -> None:
        self._num_teams = num_teams
        self._teams: list[IdleTeam] = []
        self._before: Times = {}
        self._num_alone = 0

    @property
    def is_crowded(self) -> bool:
        """Whether others want the cores."""
        return bool(self._teams)

    def update(self, times: Times) -> None:
        """Learns from an interval."""
        share, self._before = queue_share(self._before, times), times
        if share is None:
            return
        self._num_alone = self._num_alone + 1 if share < ALONE else 0
        if share > CROWDED and not self._teams:
            self._teams = [IdleTeam() for _ in range(self._num_teams)]
        elif self._num_alone >= _ALONE_INTERVALS:
            self.dismiss()

    def dismiss(self) -> None:
        """Ends the idle teams."""
        for team in self._teams:
            team.end()
        self._teams = []


class IdleTeam:
    """A thread that has once had help, so that its OpenMP threads are there; all of them sleep."""

    def __init__(self) -> None:
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._stay, name="idle team", daemon=True)
        self._thread.start()

    def _stay(self) -> None:
        torch.ones(_TEAM_NUMBERS).neg()
        self._ended.wait()

    def end(self) -> None:
        """Ends its threads."""
        self._ended.set()
        self._thread.join()


def queue_share(before: Times, after: Times) -> float | None:
    """Of the time that threads ran or queued, the share that they queued; None if they hardly did either."""
    ran = sum(after[task][0] - before[task][0] for task in after.keys() & before.keys())
    queued = sum(after[task][1] - before[task][1] for task in after.keys() & before.keys())
    if ran + queued < _IDLE_SHARE * INTERVAL_S * 1e9:
        return None
    return queued / (ran + queued)


def _thread_times() -> dict[str, tuple[int, int]]:
    times = {}
    try:
        for task in _TASKS.iterdir():
            ran, queued, _ = (task / "schedstat").read_text(encoding="ascii").split()
            times[task.name] = int(ran), int(queued)
    except (OSError, ValueError):  # a thread that has just ended, or a system without these figures
        pass
    return times
