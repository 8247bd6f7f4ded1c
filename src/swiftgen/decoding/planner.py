"""What to draft and which tree to verify: acceptance estimates, pass costs, and the choice between them.

The paper's plan is fixed: a draft pass every step, the tree shape and k n-grams, all verified. The other
plans measure. Of the ways to draft that are there (heads, draft passes, looking back only), each step takes
the one that has written the most tokens per second. Every candidate has an estimated chance to be accepted,
every pass size a measured time; the tree kept is the one with the most expected tokens per second, which
may be the bare root: plain AR. None of this changes the text.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from swiftgen.decoding.drafters.base import Committed, Drafter, Pace
from swiftgen.decoding.history import History
from swiftgen.decoding.stopwatch import REAL_TIME, Stopwatch
from swiftgen.forward.tree import DraftTree

PROBE_STEPS = 8
"""A way to draft that is not the fastest is tried for so many steps ..."""
FIRST_PROBE, LAST_PROBE = 32, 2048
"""... first after the smaller number of steps, then after twice as many each time, up to the larger."""
_ENOUGH = 4.0  # expected tokens of a step from where on no further drafter is asked
_NEAR = 0.85  # a way this near to the fastest is tried at the first interval again
_HOPEFUL = 0.95  # a way that cannot come this near is not tried
_MEMORY = 0.03  # weight of the newest outcome in an acceptance estimate
_TIME_MEMORY = 0.1
_RATE_MEMORY = 0.02
_OUTLIER = 2.0  # a step this much slower than expected says more about the machine than about the pass
_FORGETTING = 0.002  # per step, of the cost of a size that is not used


class AcceptanceEstimates:
    """Chance that a drafted token is the target's pick, given that its parent was.

    Candidates of the same source and depth that their drafter thinks about equally likely share an
    estimate, which begins with what the drafter thinks.
    """

    def __init__(self) -> None:
        self._estimates: dict[tuple[str, int, int], float] = {}

    def chance(self, source: str, depth: int, drafted: float) -> float:
        """Estimate for a candidate that its drafter gives the chance `drafted`."""
        return self._estimates.get((source, depth, _grade(drafted)), drafted)

    def chances(self, tree: DraftTree) -> list[float]:
        """Chance of each node to be on the accepted path; the root is certain."""
        chances = [1.0]
        for node in range(1, len(tree)):
            own = self.chance(tree.sources[node], tree.depths[node], tree.chances[node])
            chances.append(chances[tree.parents[node]] * own)
        return chances

    def observe(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Learn from a walk: every child of an accepted node was a hit or a miss."""
        accepted = set(path)
        for node in path:
            for child in tree.children(node):
                key = tree.sources[child], tree.depths[child], _grade(tree.chances[child])
                before = self._estimates.get(key, tree.chances[child])
                self._estimates[key] = before + _MEMORY * ((child in accepted) - before)


def _grade(chance: float) -> int:
    """Chances by their odds, a factor of two each; all above 64:1 and below 1:64 are alike."""
    odds = chance / max(1.0 - chance, 1e-9)
    return round(min(6.0, max(-6.0, math.log2(max(odds, 1e-9)))))


class PassCosts:
    """Seconds of a verify pass with all that follows it, by pass size.

    Args:
        pass_sizes: Ascending. An untried size is taken to cost what the next smaller one does, times what it
            was found to cost more before, and the cost of a size that is not used falls slowly towards that,
            so that no size is given up for good.
        before: Seconds of a pass of each size, measured before; empty if unknown.
    """

    def __init__(self, pass_sizes: Sequence[int], before: Sequence[float] = ()) -> None:
        self._sizes = pass_sizes
        self._before = dict(zip(pass_sizes, before or [1.0] * len(pass_sizes), strict=True))
        self._seconds: dict[int, float] = {}

    def seconds(self, size: int) -> float:
        """Estimate for a size."""
        tried = [s for s in self._sizes if s in self._seconds]
        if not tried:
            return self._before[size]
        near = next((s for s in reversed(tried) if s <= size), tried[0])
        return self._seconds[near] * self._before[size] / self._before[near]

    def row_seconds(self) -> float:
        """What a row adds to the smallest passes."""
        small, large = self._sizes[0], self._sizes[min(1, len(self._sizes) - 1)]
        return max(0.0, self.seconds(large) - self.seconds(small)) / max(1, large - small)

    def draft_pass_seconds(self) -> float:
        """Estimate for a pass of the draft, which reads no more context than the check at start did."""
        smallest = self._sizes[0]
        return min(self._before[smallest], self.seconds(smallest))

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a step. The first measurement of a size is taken as it is."""
        for other, known in zip(self._sizes, self._sizes[1:], strict=False):
            if known != size and known in self._seconds:
                expected = self.seconds(other) * self._before[known] / self._before[other]
                excess = self._seconds[known] - expected
                self._seconds[known] -= _FORGETTING * max(0.0, excess)
        before = self._seconds.get(size, seconds)
        self._seconds[size] = before + _TIME_MEMORY * (min(seconds, _OUTLIER * before) - before)


@dataclass
class _Way:
    """A way to draft, how fast it has been, and when it is tried again."""

    drafters: Sequence[Drafter]
    tokens: float = 0.0
    seconds: float = 0.0
    weight: float = 0.0
    next_interval: int = FIRST_PROBE
    steps_to_probe: int = 0

    @property
    def rate(self) -> float:
        """Tokens per second; infinite before it was tried."""
        return self.tokens / self.seconds if self.seconds else math.inf

    def wait(self, is_near: bool) -> None:
        """Set the time of the next trial; it comes soon if the way is near the fastest."""
        if is_near:
            self.next_interval = FIRST_PROBE
        self.steps_to_probe = self.next_interval
        self.next_interval = min(LAST_PROBE, 2 * self.next_interval)

    def observe(self, num_tokens: int, seconds: float) -> None:
        """Learn from a step."""
        self.weight += 1.0
        memory = max(_RATE_MEMORY, 1.0 / self.weight)
        if self.seconds:
            seconds = min(seconds, 2 * _OUTLIER * self.seconds)
        self.tokens += memory * (num_tokens - self.tokens)
        self.seconds += memory * (seconds - self.seconds)


class Planner:
    """Drafts one tree a step.

    Args:
        ways: The ways to draft, each the drafters that fill a tree in this order. An empty way is plain AR.
        pass_sizes: Sizes the target may use, ascending.
        measured: False verifies everything the first way drafts, as the paper does.
        pass_seconds: What a pass of each size took before; empty if unknown.
        pace: Told how fast the fastest way is, and what a row takes.
        stopwatch: Says how long a step and its drafting take.
    """

    def __init__(
        self,
        ways: Sequence[Sequence[Drafter]],
        pass_sizes: Sequence[int],
        measured: bool,
        pass_seconds: Sequence[float] = (),
        pace: Pace | None = None,
        stopwatch: Stopwatch = REAL_TIME,
    ) -> None:
        self._ways = [_Way(drafters) for drafters in ways]
        self._drafters = list({id(drafter): drafter for way in ways for drafter in way}.values())
        self._pass_sizes = pass_sizes
        self._measured = measured
        self._acceptance = AcceptanceEstimates()
        self._costs = PassCosts(pass_sizes, pass_seconds)
        self._way, self._steps_left = self._ways[0], 0
        self._draft_s = 0.0
        self._pace = pace or Pace()
        self._stopwatch, self._elapsed = stopwatch, stopwatch.start()

    def draft(self, tree: DraftTree, history: History) -> DraftTree:
        """Begin a step: fill the tree with drafts and keep what is worth verifying."""
        self._choose_way()
        self._elapsed = self._stopwatch.start()
        for number, drafter in enumerate(self._way.drafters):
            if number and self._measured and sum(self._acceptance.chances(tree)) > _ENOUGH:
                break
            drafter.propose(tree, history)
        self._draft_s = self._elapsed()
        return self._best_subtree(tree) if self._measured else tree

    def read(self, committed: Committed) -> None:
        """Show new text, at first the prompt, to the drafters."""
        for drafter in self._drafters:
            drafter.observe(committed)

    def observe(self, tree: DraftTree, path: Sequence[int], committed: Committed) -> None:
        """Learn from a step, which began with `draft` and ends here, whose accepted path is `path`."""
        seconds = self._elapsed()
        self.read(committed)
        self._acceptance.observe(tree, path)
        size = next((s for s in self._pass_sizes if s >= len(tree)), self._pass_sizes[-1])
        self._costs.observe(size, seconds - self._draft_s)
        self._way.observe(len(path), seconds)
        self._pace.tokens_per_s = max(way.rate for way in self._ways if way.seconds)
        self._pace.row_s = self._costs.row_seconds()

    def _choose_way(self) -> None:
        """Whichever way has been fastest; the others are tried for a few steps now and then."""
        if len(self._ways) == 1 or not self._measured:
            return
        if self._steps_left:
            self._steps_left -= 1
            return
        best = max(self._ways, key=lambda way: (way.seconds > 0, way.rate, -len(way.drafters)))
        hopeful = [way for way in self._ways if way is best or self._is_hopeful(way, best)]
        fastest = max(hopeful, key=lambda way: (way.rate, -len(way.drafters)))
        if self._way is not fastest and self._way.seconds:  # a trial has ended, or a way has been overtaken
            self._way.wait(is_near=self._way.rate > _NEAR * fastest.rate)
        self._way = fastest
        if fastest.rate == math.inf:
            self._steps_left = PROBE_STEPS - 1
            return
        for way in hopeful:
            way.steps_to_probe -= 1
            if way is not fastest and way.steps_to_probe <= 0:
                self._way, self._steps_left = way, PROBE_STEPS - 1
                way.weight = min(
                    way.weight, PROBE_STEPS
                )  # what it did long ago counts no more than this trial
                return

    def _is_hopeful(self, way: _Way, best: _Way) -> bool:
        """Whether a way could be about as fast as the best one tried: a draft pass adds about one token."""
        num_passes = sum(drafter.num_passes for drafter in way.drafters)
        if not num_passes or not best.seconds:
            return True
        seconds = best.seconds + num_passes * self._costs.draft_pass_seconds()
        return (best.tokens + num_passes) / seconds > _HOPEFUL * best.rate

    def _best_subtree(self, tree: DraftTree) -> DraftTree:
        """The likeliest nodes, as many as give the most expected tokens per second."""
        chances = self._acceptance.chances(tree)
        order = sorted(range(len(tree)), key=lambda node: (-chances[node], node))
        best_rate, best_count, expected, done = 0.0, 1, 0.0, 0
        for size in self._pass_sizes:
            expected += sum(chances[node] for node in order[done:size])
            done = min(size, len(tree))
            rate = expected / (self._draft_s + self._costs.seconds(size))
            if rate > best_rate:
                best_rate, best_count = rate, done
            if done == len(tree):
                break
        return tree.keep(order[:best_count])
