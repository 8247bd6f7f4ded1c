"""What decides how much is drafted: how likely drafts are right, what they take, and what time is worth.

One place learns all of it, from every step, and drafters and planner ask it. None of this changes the text.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

from swiftgen.decoding.acceptance import AcceptanceEstimates
from swiftgen.decoding.costs import Costs, hopeful
from swiftgen.decoding.stopwatch import REAL_TIME, Stopwatch
from swiftgen.forward.tree import DraftTree

_HIT_MEMORY = 0.1  # weight of the newest level, once there are many
_PRIOR_WEIGHT = 3.0  # levels that a first guess counts for
_HIT_FORGETTING = 0.0005  # per step without a level
_RATE_MEMORY = 0.02
_SLOWEST = 4.0  # a step that takes this much longer than others counts as that
_SHORTEST_CLASS = 7  # contexts of up to 2^7 tokens are alike


@dataclass(frozen=True)
class Prior:
    """What is taken of the levels of a source before any was made.

    Args:
        share: Their time, as a share of a plain step.
        hit, best_hit: How much a level adds to what its parents promise; and if all goes well.
    """

    share: float
    hit: float
    best_hit: float


class Level:
    """What is known of the levels that one source drafts, and whether another one pays.

    The hit rate of a source that is not asked rises slowly to the best that it may be, so that it is asked
    again some day: the text may have changed.
    """

    def __init__(self, estimates: Estimates, source: str, prior: Prior, hit: float | None) -> None:
        self._estimates, self._source, self._prior = estimates, source, prior
        self.hit = prior.hit if hit is None else (prior.hit + hit) / 2  # this text may be of another kind
        self._weight = _PRIOR_WEIGHT
        self._is_used = self._was_used = False  # in this step, and in the one before

    def start(self) -> Callable[[], float]:
        """Begin to make a level; what is returned tells the seconds since then."""
        return self._estimates.stopwatch.start()

    def observe(self, seconds: float, hit: float) -> None:
        """Learn from a level.

        Args:
            hit: Its gain, of what its parents promise.
        """
        if self._is_used or self._was_used:  # the first after others has found its data gone from the caches
            self._estimates.costs.observe_level(self._source, seconds)
        self._weight += 1.0
        self.hit += max(_HIT_MEMORY, 1.0 / self._weight) * (hit - self.hit)
        self._is_used = True

    def end_step(self) -> None:
        """Forget a little, if this step has not asked for a level."""
        if not self._is_used:
            self.hit += _HIT_FORGETTING * max(0.0, self._prior.best_hit - self.hit)
            self._estimates.costs.forget_level(self._source, self._prior.share)
        self._was_used, self._is_used = self._is_used, False

    def chance(self, tree: DraftTree, node: int) -> float:
        """Estimate of how likely a node is right if its parent is."""
        acceptance = self._estimates.acceptance
        return acceptance.chance(tree.sources[node], tree.depths[node], tree.chances[node])

    def gain(self, chances: Sequence[float], num_rows: int) -> float:
        """Tokens that nodes with these chances promise together, less the price of rows beyond one more."""
        row = self._estimates.tokens_per_s * self._estimates.costs.row_seconds(num_rows)
        return min(1.0, row + sum(max(0.0, chance - row) for chance in chances))

    def price(self, num_rows: int) -> float:
        """Tokens that could be written in the time of a level and of a row beyond so many."""
        costs = self._estimates.costs
        seconds = costs.level_seconds(self._source, self._prior.share) + costs.row_seconds(num_rows)
        return self._estimates.tokens_per_s * seconds

    def is_worth(self, promised: float, num_rows: int) -> bool:
        """Whether another level pays below nodes that promise so many tokens."""
        return promised * self.hit > self.price(num_rows)

    def promise(self, num_levels: int) -> float:
        """Tokens that up to so many levels below the root add to a step, less those their time is worth."""
        chance, promise = 1.0, 0.0
        for num_rows in range(1, num_levels + 1):
            chance *= self.hit
            surplus = chance - self.price(num_rows)
            if surplus <= 0:
                break
            promise += surplus
        return promise


@dataclass
class Known:
    """What outlives a run.

    Args:
        costs: By class of context length, then as `Costs` has them.
        acceptance: By source, depth and grade.
        hits: Of the levels, by source.
    """

    costs: dict[int, dict[str, float]] = field(default_factory=dict)
    acceptance: dict[tuple[str, int, int], float] = field(default_factory=dict)
    hits: dict[str, float] = field(default_factory=dict)


class Estimates:
    """All that is learnt while a text is written.

    Args:
        pass_sizes: Sizes the target may use, ascending.
        pass_seconds: What a pass of each size took before; empty if unknown.
        known: From earlier runs.
        stopwatch: Says how long levels and steps take.

    Attributes:
        pass_sizes: As above.
        costs: At the present length of the context.
        tokens_per_s: The price of time: how fast the text is written of late, and at least as fast as by
            plain decoding.
    """

    def __init__(
        self,
        pass_sizes: Sequence[int],
        pass_seconds: Sequence[float] = (),
        known: Known | None = None,
        stopwatch: Stopwatch = REAL_TIME,
    ) -> None:
        known = known or Known()
        self.stopwatch = stopwatch
        self.acceptance = AcceptanceEstimates(known.acceptance)
        self.pass_sizes = pass_sizes
        self._first = hopeful(dict(zip(map(str, pass_sizes), pass_seconds, strict=False)))
        self._known_costs, self._known_hits = dict(known.costs), known.hits
        self._levels: dict[str, Level] = {}
        self._class = 0
        self.costs = Costs(pass_sizes, self._first)
        self._tokens = self._seconds = self._weight = 0.0
        self._set_price()

    def level(self, source: str, prior: Prior) -> Level:
        """What is known of the levels of a source."""
        return self._levels.setdefault(source, Level(self, source, prior, self._known_hits.get(source)))

    def begin(self, context_tokens: int) -> None:
        """Begin a step after so many tokens."""
        length_class = max(_SHORTEST_CLASS, (context_tokens - 1).bit_length())
        if length_class == self._class:
            return
        self._remember_costs()
        before = self._known_costs.get(length_class) or self._nearest_costs(length_class)
        self._class, self.costs = length_class, Costs(self.pass_sizes, {**self._first, **before})
        self._set_price()

    def end(self, num_tokens: int, num_rows: int, draft_s: float, seconds: float) -> None:
        """Learn from a step.

        Args:
            num_rows: Of its verify pass.
            draft_s: Seconds of drafting, of all its `seconds`.
        """
        self.costs.observe(num_rows, seconds - draft_s)
        for level in self._levels.values():
            level.end_step()
        self._weight += 1.0
        memory = max(_RATE_MEMORY, 1.0 / self._weight)
        if self._seconds:
            seconds = min(seconds, _SLOWEST * self._seconds)
        self._tokens += memory * (num_tokens - self._tokens)
        self._seconds += memory * (seconds - self._seconds)
        self._set_price()

    def known(self) -> Known:
        """For runs to come."""
        self._remember_costs()
        hits = {**self._known_hits, **{source: level.hit for source, level in self._levels.items()}}
        return Known(self._known_costs, self.acceptance.known, hits)

    def _set_price(self) -> None:
        plain = 1 / self.costs.seconds(self.pass_sizes[0])
        self.tokens_per_s = max(plain, self._tokens / self._seconds if self._seconds else 0.0)

    def _remember_costs(self) -> None:
        if self._class and (known := self.costs.known()):
            self._known_costs[self._class] = known

    def _nearest_costs(self, length_class: int) -> Mapping[str, float]:
        """Of passes alone: what levels cost grows in another way, and one that seems dear is never tried."""
        nearest = min(self._known_costs, key=lambda known: abs(known - length_class), default=None)
        costs = {} if nearest is None else self._known_costs[nearest]
        return {name: seconds for name, seconds in costs.items() if name.isdecimal()}
