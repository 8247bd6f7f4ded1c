"""The figures of a run: speed, acceptance, Distinct-n, loops, where the time went.

Acceptance rate and Distinct-n are defined as in the TokenSwift paper (arXiv 2502.18890, section 4.1):
accepted draft tokens / offered levels of draft (gamma x steps), and unique n-grams / n-grams.
"""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from swiftgen.figures.distinct import DistinctN
from swiftgen.figures.loops import Loop, LoopDetector

if TYPE_CHECKING:
    from swiftgen.decoding.decode import StepEvent

NOW_WINDOW_S = 5.0
NOW_WINDOW_TOKENS = 1000


@dataclass(frozen=True)
class MetricsSnapshot:
    """Cumulative figures at one moment; rates are None while there is nothing to divide by."""

    num_tokens: int  # generated, without the prompt
    num_steps: int  # verify passes
    num_drafted: int  # levels of draft offered, summed over the steps
    num_accepted: int  # draft tokens accepted
    acceptance_rate: float | None
    tokens_per_step: float | None
    acceptance_rate_now: float | None  # over the last NOW_WINDOW_TOKENS tokens
    tokens_per_s_now: float | None  # over the last NOW_WINDOW_S seconds
    tokens_per_s: float | None  # over the whole decoding time
    prefill_s: float
    decode_s: float  # wall-clock time since the end of the prefill
    draft_s: float
    verify_s: float
    sample_s: float
    wins: dict[str, int]  # accepted draft tokens by source
    distinct: tuple[float, ...]  # Distinct-1..4
    loop: Loop | None  # the one the text is in
    num_loops: int  # found so far
    longest_loop: Loop | None  # of these, the one with the most repeated tokens
    context_tokens: int
    kv_bytes: int
    num_tokens_before: int  # those of num_tokens that were there when this process began; not in the rates
    stop_reason: str | None

    @property
    def other_s(self) -> float:
        """Decoding time outside draft, verify and sampling (writing, display, bookkeeping)."""
        return max(0.0, self.decode_s - self.draft_s - self.verify_s - self.sample_s)

    def to_json(self) -> dict[str, Any]:
        """Plain values for one JSON line; floats rounded to six decimals."""
        plain = asdict(self) | {"distinct": list(self.distinct)}
        return {key: _rounded(value) for key, value in plain.items()}


class RunMetrics:
    """Collects the figures of one run from its step events.

    Args:
        clock: seconds from any origin; the time of the first call is the start of the prefill.
        written: tokens of the run that were there before this process.
        find_loops: whether to look for loops.
    """

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        written: Sequence[int] = (),
        find_loops: bool = True,
    ) -> None:
        self._clock = clock
        self._start_s = clock()
        self._decode_start_s: float | None = None
        self._last_s = self._start_s
        self._window: deque[tuple[float, int]] = deque()  # (time, tokens so far)
        self._drafts: deque[tuple[int, int, int]] = deque()  # (tokens, drafted, accepted) so far
        self._num_tokens_before = self._num_tokens = len(written)
        self._num_steps = self._num_drafted = 0
        self._draft_s = self._verify_s = self._sample_s = 0.0
        self._wins: Counter[str] = Counter()
        self._distinct = DistinctN()
        self._distinct.update(written)
        self._find_loops = find_loops
        self._loops = LoopDetector()
        if find_loops:
            self._loops.update(written)
        self._context_tokens = self._kv_bytes = 0
        self._stop_reason: str | None = None

    @property
    def num_tokens(self) -> int:
        """Tokens generated so far."""
        return self._num_tokens

    @property
    def loop(self) -> Loop | None:
        """The loop the text is in."""
        return self._loops.current

    def start(self) -> None:
        """Sets the start of the prefill to now, if loading came in between."""
        self._start_s = self._last_s = self._clock()

    def observe(self, event: StepEvent) -> None:
        """Adds one decoding step."""
        now = self._last_s = self._clock()
        if self._decode_start_s is None:
            # The first event arrives a step after the end of the prefill, which it does not report.
            step_s = event.draft_s + event.verify_s + event.sample_s
            self._decode_start_s = max(self._start_s, now - step_s)
            self._window.append((self._decode_start_s, self._num_tokens_before))
            self._drafts.append((self._num_tokens_before, 0, 0))
        self._num_tokens += len(event.token_ids)
        self._num_steps += 1
        self._num_drafted += event.draft_depth
        self._wins.update(event.sources)
        self._draft_s += event.draft_s
        self._verify_s += event.verify_s
        self._sample_s += event.sample_s
        self._distinct.update(event.token_ids)
        if self._find_loops:
            self._loops.update(event.token_ids)
        self._context_tokens, self._kv_bytes = event.context_tokens, event.kv_bytes
        self._stop_reason = event.stop_reason
        self._window.append((now, self._num_tokens))
        while len(self._window) > 2 and self._window[1][0] <= now - NOW_WINDOW_S:
            self._window.popleft()
        self._drafts.append((self._num_tokens, self._num_drafted, self._wins.total()))
        while self._drafts[1][0] <= self._num_tokens - NOW_WINDOW_TOKENS:
            self._drafts.popleft()

    def snapshot(self) -> MetricsSnapshot:
        """The figures after the last observed step."""
        begun = self._decode_start_s is not None
        decode_start_s = self._decode_start_s if self._decode_start_s is not None else self._clock()
        decode_s = self._last_s - decode_start_s if begun else 0.0
        num_accepted = self._wins.total()
        num_new = self._num_tokens - self._num_tokens_before
        return MetricsSnapshot(
            num_tokens=self._num_tokens,
            num_steps=self._num_steps,
            num_drafted=self._num_drafted,
            num_accepted=num_accepted,
            acceptance_rate=_ratio(num_accepted, self._num_drafted),
            tokens_per_step=_ratio(num_new, self._num_steps),
            acceptance_rate_now=self._acceptance_now(),
            tokens_per_s_now=self._rate_now(),
            tokens_per_s=_ratio(num_new, decode_s),
            prefill_s=decode_start_s - self._start_s,
            decode_s=decode_s,
            draft_s=self._draft_s,
            verify_s=self._verify_s,
            sample_s=self._sample_s,
            wins=dict(self._wins),
            distinct=self._distinct.values,
            loop=self._loops.current,
            num_loops=self._loops.num_found,
            longest_loop=self._loops.longest,
            context_tokens=self._context_tokens,
            kv_bytes=self._kv_bytes,
            num_tokens_before=self._num_tokens_before,
            stop_reason=self._stop_reason,
        )

    def _rate_now(self) -> float | None:
        if not self._window:
            return None
        (from_s, from_tokens), (to_s, to_tokens) = self._window[0], self._window[-1]
        return _ratio(to_tokens - from_tokens, to_s - from_s)

    def _acceptance_now(self) -> float | None:
        if not self._drafts:
            return None
        (_, from_drafted, from_accepted), (_, drafted, accepted) = self._drafts[0], self._drafts[-1]
        return _ratio(accepted - from_accepted, drafted - from_drafted)


def _ratio(part: float, whole: float) -> float | None:
    return part / whole if whole > 0 else None


def _rounded(value: Any) -> Any:
    if isinstance(value, float):
        return round(value, 6)
    return [_rounded(item) for item in value] if isinstance(value, list) else value
