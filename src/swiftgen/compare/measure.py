"""Running contenders in turns, and what is noted of each run on the way."""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import psutil
import torch

from swiftgen.compare.contenders import Contender
from swiftgen.decoding.decode import StepEvent
from swiftgen.figures.metrics import MetricsSnapshot, RunMetrics
from swiftgen.system.errors import SwiftgenError

NUM_MARKS = 20
WARM_UP_TOKENS = 32


@dataclass(frozen=True)
class Mark:
    """A run when it passed one of the evenly spaced lengths.

    Args:
        num_tokens: Written so far; a step can carry a run a few tokens past the length.
        seconds: Since the prompt was read.
        acceptance_rate: None if nothing was drafted, or if the contender does not tell.
        acceptance_rate_now: Over the last `NOW_WINDOW_TOKENS` tokens.
        tokens_per_step: Tokens per pass of the model.
        draft_s, verify_s, sample_s: Of `seconds`; zero where the contender does not tell.
        distinct: Distinct-1 to Distinct-4 of the text so far.
    """

    num_tokens: int
    seconds: float
    acceptance_rate: float | None
    acceptance_rate_now: float | None
    tokens_per_step: float
    draft_s: float
    verify_s: float
    sample_s: float
    distinct: tuple[float, ...]

    @property
    def tokens_per_s(self) -> float:
        """Average since the prompt was read."""
        return self.num_tokens / self.seconds


@dataclass(frozen=True)
class Run:
    """One run of one contender.

    Args:
        prefill_s: From the start to the end of the prompt.
        memory_bytes: The most it took beyond what was in memory before it began; None if unknown.
        marks: The last one is the end.
        token_ids: The text.
    """

    contender: str
    seed: int
    prefill_s: float
    memory_bytes: int | None
    marks: tuple[Mark, ...]
    token_ids: array[int]

    @property
    def sha256(self) -> str:
        """Of the token ids, four bytes each."""
        return hashlib.sha256(self.token_ids.tobytes()).hexdigest()


def mark_lengths(num_tokens: int) -> list[int]:
    """Where runs of a length are marked: `NUM_MARKS` places, evenly spaced, fewer if the run is shorter."""
    count = min(NUM_MARKS, num_tokens)
    return [num_tokens * (i + 1) // count for i in range(count)]


def run_in_turns(
    contenders: Sequence[Contender],
    num_tokens: int,
    seeds: Sequence[int],
    device: torch.device,
    on_tokens: Callable[[str, int], object],
    on_run: Callable[[Run], object],
    on_failure: Callable[[Contender, Exception], object],
) -> None:
    """Run every contender once with every seed, seed by seed, so that a machine that drifts is fair to all.

    Each is warmed up first, and each seed begins with another contender. One that fails is left out from
    there on.

    Args:
        on_tokens: Called with a contender's name and the number of tokens of each step.
        on_run: Called with every run that has ended.
        on_failure: Called with a contender that raised an exception, and with the exception.
    """
    left = list(contenders)

    def attempt(contender: Contender, action: Callable[[], object]) -> None:
        try:
            action()
        except Exception as error:  # programs of others raise whatever they like
            left.remove(contender)
            on_failure(contender, error)

    for contender in contenders:
        num_warm_up = min(WARM_UP_TOKENS, num_tokens)
        attempt(contender, partial(contender.run, contender.prompt_ids, num_warm_up, seeds[0], _ignore))
    for turn, seed in enumerate(seeds):
        first = turn % len(contenders)
        for contender in [*contenders[first:], *contenders[:first]]:
            if contender in left:
                attempt(contender, partial(_measure, contender, num_tokens, seed, device, on_tokens, on_run))


def _ignore(event: StepEvent) -> None:
    """What the steps of a warm-up are for."""


def _measure(
    contender: Contender,
    num_tokens: int,
    seed: int,
    device: torch.device,
    on_tokens: Callable[[str, int], object],
    on_run: Callable[[Run], object],
) -> None:
    metrics = RunMetrics()
    lengths = mark_lengths(num_tokens)
    marks: list[Mark] = []
    token_ids = array("I")

    def observe(event: StepEvent) -> None:
        metrics.observe(event)
        token_ids.extend(event.token_ids)
        while len(marks) < len(lengths) and len(token_ids) >= lengths[len(marks)]:
            marks.append(_mark(metrics.snapshot()))
        on_tokens(contender.name, len(event.token_ids))

    memory = PeakMemory(device)
    metrics.start()
    contender.run(contender.prompt_ids, num_tokens, seed, observe)
    if len(marks) < len(lengths):
        raise SwiftgenError(f"{contender.name} ended after {len(token_ids):,} of {num_tokens:,} tokens")
    prefill_s = metrics.snapshot().prefill_s
    on_run(Run(contender.name, seed, prefill_s, memory.grown_bytes(), tuple(marks), token_ids))


def _mark(snapshot: MetricsSnapshot) -> Mark:
    return Mark(
        snapshot.num_tokens,
        snapshot.decode_s,
        snapshot.acceptance_rate,
        snapshot.acceptance_rate_now,
        snapshot.tokens_per_step or 0.0,
        snapshot.draft_s,
        snapshot.verify_s,
        snapshot.sample_s,
        snapshot.distinct,
    )


class PeakMemory:
    """The most memory in use since it was made, beyond what was in use then.

    On a GPU that of PyTorch; else the resident memory of the process, whose peak only Linux can set back.
    """

    _RESET_PEAK = "5"  # see proc(5), /proc/pid/clear_refs

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._can_reset = False
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self._before = torch.cuda.memory_allocated(device)
            return
        with suppress(OSError):
            Path("/proc/self/clear_refs").write_text(self._RESET_PEAK, encoding="ascii")
            self._can_reset = True
        self._before = psutil.Process().memory_info().rss

    def grown_bytes(self) -> int | None:
        """None where it cannot be known."""
        if self._device.type == "cuda":
            return int(torch.cuda.max_memory_allocated(self._device)) - self._before
        if not self._can_reset:
            return None
        peak = next(
            line for line in Path("/proc/self/status").read_text("ascii").splitlines() if "VmHWM" in line
        )
        return max(0, int(peak.split()[1]) * 1024 - self._before)
