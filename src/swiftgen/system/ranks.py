"""Several processes that write one text, for models that need several cards.

    torchrun --nproc-per-node 4 -m swiftgen write --preset qwq-32b --tokens 50000 -o book.txt

Every rank has a share of the weights and of the KV cache (see `tensor_parallel`) and runs the same loop over
the same tokens. Each pass is a joint one, so the ranks must decide alike. What differs from one process:

- **Rank 0 leads.** It alone reads the command line and files, writes and speaks; it tells the others which
  function to call beside its own (`call_on_others`, `follow`). What it reads off a clock or hears as a signal
  decides what is drafted and when to stop, so that counts for all (`of_leader`).
- **Together or not at all.** What one rank cannot do, none does (`together`, `on_all`); when one ends, the
  others end too (`watched`), at the latest when torchrun asks for it (`_end_when_stuck`).

In one process each of these functions gives back what it got, and nothing is imported.
"""

from __future__ import annotations

import os
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, redirect_stderr, redirect_stdout, suppress
from datetime import timedelta
from functools import partial
from typing import Any, TypeVar

from swiftgen.system.errors import SwiftgenError

T = TypeVar("T")
_LOADING = timedelta(hours=2)  # the longest that ranks wait for each other
_GRACE_S = 20.0  # torchrun kills what does not end within 30 seconds
_STUCK = b"error: another process of this run does not answer; what is written so far is kept\n"


class RankLost(SwiftgenError):
    """Another rank has ended, so no further pass can be made."""

    def __init__(self) -> None:
        super().__init__("another process of this run has ended", exit_code=1)


class SaidByLeader(SwiftgenError):
    """On the other ranks, a failure that rank 0 reports."""


def num_ranks() -> int:
    """Processes that write together: those of torchrun, else 1."""
    return int(os.environ["WORLD_SIZE"]) if "TORCHELASTIC_RUN_ID" in os.environ else 1


def rank() -> int:
    """Number of this process, from 0."""
    return int(os.environ["RANK"]) if num_ranks() > 1 else 0


def local_rank() -> int:
    """Number of this process on its machine, which is that of its card."""
    return int(os.environ["LOCAL_RANK"]) if num_ranks() > 1 else 0


def num_local_ranks() -> int:
    """Processes of this run on this machine."""
    return int(os.environ["LOCAL_WORLD_SIZE"]) if num_ranks() > 1 else 1


def launcher() -> str:
    """What stands before `swiftgen` in a command that starts as many ranks; empty for one."""
    return f"torchrun --nproc-per-node {num_local_ranks()} -m " if num_ranks() > 1 else ""


def call_on_others(function: Callable[..., object], *args: object) -> None:
    """Have the other ranks call a function of a module; rank 0 must make the same passes beside it."""
    if num_ranks() > 1:
        _tell(partial(function, *args))


def follow() -> int:
    """What every rank but 0 does: wait for what to call, and call it, silently; returns the exit code."""
    with suppress(RankLost, SaidByLeader), _silenced(), watched():
        _end_when_stuck()
        call: Any = of_leader(None)
        return int(call() or 0) if call else 0
    return 1


@contextmanager
def leading() -> Iterator[None]:
    """What rank 0 does; if it calls nothing on the others, they end with it."""
    is_interrupted = False
    try:
        _end_when_stuck()
        with watched():
            yield
    except KeyboardInterrupt:  # the others were interrupted too
        is_interrupted = True
        raise
    finally:
        if num_ranks() > 1 and not _has_told and not is_interrupted:
            _tell(None)


def leave() -> None:
    """Part from the other ranks."""
    dist = sys.modules.get("torch.distributed")
    if num_ranks() > 1 and dist and dist.is_initialized():
        dist.destroy_process_group()


def of_leader(value: T) -> T:
    """A value as rank 0 has it; quickly if it is a float."""
    if num_ranks() == 1:
        return value
    import torch

    told: Any
    if isinstance(value, float):
        told = torch.tensor([value], dtype=torch.float64)
        _joined().broadcast(told, src=0)
        return told.item()  # type: ignore[no-any-return]
    told = [value]
    _joined().broadcast_object_list(told, src=0)
    return told[0]  # type: ignore[no-any-return]


def on_all(is_so: bool) -> bool:
    """Whether something holds on every rank."""
    if num_ranks() == 1:
        return is_so
    return all(_gathered(is_so))


@contextmanager
def together() -> Iterator[None]:
    """If the block fails on one rank, it fails on all; within it none may wait for another."""
    if num_ranks() == 1:
        yield
        return
    failure = None
    try:
        yield
    except SwiftgenError as error:
        failure = error
    for number, found in enumerate(_gathered(failure)):
        if found and rank():
            raise SaidByLeader(found.message, exit_code=found.exit_code)
        if found:
            who = f"process {number}: " if number else ""
            raise SwiftgenError(who + found.message, found.hint, found.exit_code)


@contextmanager
def watched() -> Iterator[None]:
    """Raises RankLost where a joint operation fails because another rank has ended."""
    try:
        yield
    except RuntimeError as error:
        if num_ranks() == 1 or not _is_of_a_dead_peer(error):
            raise
        raise RankLost from error


def _is_of_a_dead_peer(error: RuntimeError) -> bool:
    from torch.distributed import DistError

    return isinstance(error, DistError) or any(word in str(error) for word in ("gloo", "NCCL"))


_has_told = False


def _tell(call: Callable[[], object] | None) -> None:
    global _has_told
    _has_told = True
    of_leader(call)


def _gathered(value: T) -> list[T]:
    """The values of all ranks."""
    values: list[Any] = [None] * num_ranks()
    _joined().all_gather_object(values, value)
    return values


@contextmanager
def _silenced() -> Iterator[None]:
    """Nothing is printed in the block; what it raises is reported with a voice again."""
    with (
        open(os.devnull, "w", encoding="utf-8") as nowhere,
        redirect_stdout(nowhere),
        redirect_stderr(nowhere),
    ):
        yield


def _joined() -> Any:
    """torch.distributed, joined on first use: gloo for what ranks tell each other, NCCL between cards."""
    import torch
    from torch import distributed as dist

    if not dist.is_initialized():
        backend = "gloo"
        if torch.cuda.is_available():
            backend = "cpu:gloo,cuda:nccl"
            torch.cuda.set_device(local_rank())
        dist.init_process_group(backend, timeout=_LOADING)
    return dist


def _end_when_stuck() -> None:
    """From now on a signal ends this process after a while even if it waits for a rank that is dead.

    A handler in Python runs when the wait is over, which that of a broken NCCL operation never is.
    """
    if num_ranks() == 1 or threading.current_thread() is not threading.main_thread():
        return
    heard, told = os.pipe()
    os.set_blocking(told, False)
    signal.set_wakeup_fd(told, warn_on_full_buffer=False)

    def wait() -> None:
        os.read(heard, 1)
        time.sleep(_GRACE_S)
        if rank() == 0:
            os.write(2, _STUCK)
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
