"""Threads that share the cores with others, and with the limits of a container."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

import swiftgen
from swiftgen.commands.process import load_engine
from swiftgen.system import crowding
from swiftgen.system.crowding import ALONE, CROWDED, INTERVAL_S, CoreWatch, IdleTeam, num_teams, queue_share

INTERVAL_NS = int(INTERVAL_S * 1e9)


class Process:
    """Two threads that are always busy."""

    def __init__(self) -> None:
        self._ran = self._queued = 0

    def times(self, share: float, busy: float = 1.0) -> dict[str, tuple[int, int]]:
        """After an interval in which they queued for a share of the time."""
        self._ran += int(busy * (1 - share) * INTERVAL_NS)
        self._queued += int(busy * share * INTERVAL_NS)
        return {"1": (self._ran, self._queued), "2": (self._ran, self._queued)}


@pytest.fixture
def watch() -> Iterator[CoreWatch]:
    watch = CoreWatch(num_teams=1)
    yield watch
    watch.dismiss()


def test_waits_are_short_while_threads_queue_and_for_a_while_after(watch: CoreWatch):
    process = Process()
    watch.update(process.times(0.9))  # there is nothing to compare it with
    watch.update(process.times(CROWDED / 2))
    assert not watch.is_crowded
    watch.update(process.times(0.8))
    assert watch.is_crowded
    for _ in range(100):
        watch.update(process.times(2 * ALONE))
    assert watch.is_crowded
    for _ in range(9):
        watch.update(process.times(0.0))
        assert watch.is_crowded
    watch.update(process.times(0.0))
    assert not watch.is_crowded
    watch.update(process.times(0.3))
    assert watch.is_crowded


def test_one_bad_interval_begins_the_count_anew(watch: CoreWatch):
    process = Process()
    for _ in range(2):
        watch.update(process.times(0.8))
    for share in [*[0.0] * 9, 0.05, *[0.0] * 9]:
        watch.update(process.times(share))
        assert watch.is_crowded


def test_a_process_that_hardly_runs_learns_nothing(watch: CoreWatch):
    process = Process()
    for _ in range(20):
        watch.update(process.times(0.9, busy=0.01))
    assert not watch.is_crowded


def test_threads_that_come_or_go_do_not_count():
    before = {"1": (0, 0), "2": (0, 900 * INTERVAL_NS)}
    after = {"1": (INTERVAL_NS, INTERVAL_NS), "3": (0, 900 * INTERVAL_NS)}
    assert queue_share(before, after) == 0.5
    assert queue_share({}, after) is None


def test_an_idle_team_lives_until_it_is_dismissed():
    num_before = threading.active_count()
    watch = CoreWatch(num_teams=3)
    process = Process()
    watch.update(process.times(0.0))
    watch.update(process.times(0.5))
    watch.update(process.times(0.5))  # not as many again
    assert threading.active_count() == num_before + 3
    watch.dismiss()
    assert threading.active_count() == num_before
    IdleTeam().end()


@pytest.mark.parametrize(
    ("num_cores", "num_threads", "expected"), [(2, 2, 1), (16, 16, 1), (16, 4, 5), (16, 15, 1), (3, 2, 2)]
)
def test_with_the_idle_teams_there_are_more_threads_than_cores(
    num_cores: int, num_threads: int, expected: int, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(num_cores)), raising=False)
    assert num_teams(num_threads) == expected
    managed = 1 + (1 + expected) * (num_threads - 1)
    assert managed > num_cores >= managed - (num_threads - 1)


@pytest.mark.skipif(not crowding._TASKS.is_dir(), reason="no such figures on this system")
def test_the_times_of_this_process_grow():
    before = crowding._thread_times()
    torch.ones(2**22).sum()
    after = crowding._thread_times()
    assert sum(ran for ran, _ in after.values()) > sum(ran for ran, _ in before.values())


def test_there_is_one_watch_and_none_for_a_single_thread(monkeypatch: pytest.MonkeyPatch):
    started: list[str] = []

    class Thread:
        def __init__(self, name: str, **_: object) -> None:
            self.name = name

        def start(self) -> None:
            started.append(self.name)

    monkeypatch.setattr(crowding.threading, "Thread", Thread)
    monkeypatch.setattr(crowding, "_thread_times", lambda: {"1": (0, 0)})
    for num_threads in (1, 2):
        crowding.watch_cores.cache_clear()
        monkeypatch.setattr(torch, "get_num_threads", lambda n=num_threads: n)
        crowding.watch_cores()
        crowding.watch_cores()
    assert started == ["core watch"]
    crowding.watch_cores.cache_clear()


@pytest.mark.parametrize(
    ("cores", "threads", "variable", "expected"),
    [(1.5, 4, None, [1]), (0.3, 4, None, [1]), (4.0, 4, None, []), (8.0, 4, None, []), (1.5, 4, "4", [])],
)
def test_pytorch_keeps_to_the_cores_of_the_container(
    cores: float, threads: int, variable: str | None, expected: list[int], monkeypatch: pytest.MonkeyPatch
):
    chosen: list[int] = []
    monkeypatch.setattr(crowding, "usable_cores", lambda: cores)
    monkeypatch.setattr(torch, "get_num_threads", lambda: threads)
    monkeypatch.setattr(torch, "set_num_threads", chosen.append)
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    if variable:
        monkeypatch.setenv("OMP_NUM_THREADS", variable)
    crowding.use_allowed_cores()
    assert chosen == expected


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_command_keeps_to_them_and_lets_others_have_those_of_the_cpu(
    device: str, monkeypatch: pytest.MonkeyPatch
):
    called: list[str] = []
    engine = SimpleNamespace(opened=SimpleNamespace(device=torch.device(device)))
    monkeypatch.setattr(crowding, "use_allowed_cores", lambda: called.append("allowed"))
    monkeypatch.setattr(crowding, "watch_cores", lambda: called.append("watched"))
    monkeypatch.setitem(vars(swiftgen), "load", lambda preset: called.append(preset) or engine)
    assert load_engine("preset") is engine  # type: ignore[arg-type]
    assert called == ["allowed", "preset"] + ["watched"] * (device == "cpu")


_AS_IT_WAS = """
import logging, os, signal, sys, threading
import torch, transformers
from transformers.utils import logging as hf_logging

def state():
    levels = {name: logging.getLogger(name).level for name in names}
    handlers = [signal.getsignal(number) for number in signal.valid_signals()]
    return (
        torch.get_num_threads(), threading.enumerate(), levels, sys.stdout, sys.stderr, handlers,
        hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled(),
    )

names = [None, "bitsandbytes", "torchao", *logging.root.manager.loggerDict]
torch.set_num_threads(os.cpu_count() + 1)
before = state()
import swiftgen
engine = swiftgen.load(sys.argv[1], {"draft": "auto"})
assert len(list(engine.stream("The hen", num_tokens=20))) > 1
assert state() == before, (state(), before)
"""


def test_the_python_api_leaves_the_process_as_it_is(preset_file: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    subprocess.run([sys.executable, "-c", _AS_IT_WAS, str(preset_file)], check=True, timeout=100)
