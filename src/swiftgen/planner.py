"""Which tree to verify: acceptance estimates, pass costs, and the choice between them.

The paper's plan is fixed: a draft pass every step, the tree shape and k n-grams, all verified. The other
plans measure. Every candidate has an estimated chance to be accepted (by source, depth and rank), every
pass size a measured time; the tree kept is the one with the most expected tokens per second, which may be
the bare root: plain AR. None of this changes the text.
"""

from __future__ import annotations

import time
from collections.abc import Sequence

from swiftgen.drafters.base import Committed
from swiftgen.drafters.ngram import NgramDrafter
from swiftgen.drafters.self_draft import SelfDrafter
from swiftgen.sampling import History
from swiftgen.tree import DraftTree

PROBE_EVERY_STEPS = 1024
"""A plan that does not pay is tried again at every power of two of steps, and at least this often."""
_RANKS = 4  # candidates of this rank and below share an estimate
_MEMORY = 0.03  # weight of the newest outcome in an acceptance estimate
_TIME_MEMORY = 0.1
_PRIOR = {"base": 0.7, "heads": 0.15, "ngram": 0.1}


class AcceptanceEstimates:
    """Chance that a drafted token is the target's pick, given that its parent was."""

    def __init__(self) -> None:
        self._estimates: dict[tuple[str, int, int], float] = {}

    def chance(self, source: str, depth: int, rank: int) -> float:
        """Estimate in (0, 1)."""
        return self._estimates.get((source, depth, min(rank, _RANKS)), _PRIOR[source] / (1 + rank))

    def chances(self, tree: DraftTree) -> list[float]:
        """Chance of each node to be on the accepted path; the root is certain."""
        chances = [1.0]
        for node in range(1, len(tree)):
            own = self.chance(tree.sources[node], tree.depths[node], tree.ranks[node])
            chances.append(chances[tree.parents[node]] * own)
        return chances

    def observe(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Learn from a walk: every child of an accepted node was a hit or a miss."""
        accepted = set(path)
        for node in path:
            for child in tree.children(node):
                key = tree.sources[child], tree.depths[child], min(tree.ranks[child], _RANKS)
                before = self.chance(*key)
                self._estimates[key] = before + _MEMORY * ((child in accepted) - before)


class PassCosts:
    """Seconds a step takes by its pass size, as measured so far.

    Args:
        pass_sizes: Ascending. An untried size is taken to cost what the next smaller one does.
    """

    def __init__(self, pass_sizes: Sequence[int]) -> None:
        self._sizes = pass_sizes
        self._seconds: dict[int, float] = {}

    def seconds(self, size: int) -> float:
        """Estimate for a size; 1 before anything was measured."""
        known = [s for s in self._sizes if s in self._seconds and s <= size]
        if known:
            return self._seconds[known[-1]]
        return min(self._seconds.values(), default=1.0)

    def observe(self, size: int, seconds: float) -> None:
        """Learn from a step. The first measurement of a size is taken as it is."""
        before = self._seconds.get(size, seconds)
        self._seconds[size] = before + _TIME_MEMORY * (seconds - before)


class Planner:
    """Drafts one tree a step.

    Args:
        self_drafter, ngram_drafter: None leaves the source out; without both, every step is plain AR.
        pass_sizes: Sizes the target may use, ascending.
        measured: False verifies everything that was drafted, as the paper does.
    """

    def __init__(
        self,
        self_drafter: SelfDrafter | None,
        ngram_drafter: NgramDrafter | None,
        pass_sizes: Sequence[int],
        measured: bool,
    ) -> None:
        self._self_drafter = self_drafter
        self._ngram_drafter = ngram_drafter
        self._pass_sizes = pass_sizes
        self._measured = measured
        self._acceptance = AcceptanceEstimates()
        self._costs = PassCosts(pass_sizes)
        self._draft_pass_s = 0.0
        self._rates = {True: 0.0, False: 0.0}  # tokens/s with and without a draft pass
        self._num_steps = 0
        self._with_draft_pass = False

    def draft(self, tree: DraftTree, history: History) -> DraftTree:
        """Fill the tree with drafts and keep what is worth verifying."""
        self._with_draft_pass = self._self_drafter is not None and self._draft_pass_pays()
        if self._with_draft_pass and self._self_drafter:
            begin = time.perf_counter()
            self._self_drafter.propose(tree, history)
            self._draft_pass_s = time.perf_counter() - begin
        if self._ngram_drafter:
            self._ngram_drafter.propose(tree, history)
        return self._best_subtree(tree) if self._measured else tree

    def read(self, committed: Committed) -> None:
        """Show new text, at first the prompt, to the drafters."""
        for drafter in (self._self_drafter, self._ngram_drafter):
            if drafter:
                drafter.observe(committed)

    def observe(self, tree: DraftTree, path: Sequence[int], seconds: float, committed: Committed) -> None:
        """Learn from a step of `seconds` (drafting and verifying) whose accepted path is `path`."""
        self.read(committed)
        self._num_steps += 1
        self._acceptance.observe(tree, path)
        draft_s = self._draft_pass_s if self._with_draft_pass else 0.0
        size = next((s for s in self._pass_sizes if s >= len(tree)), self._pass_sizes[-1])
        self._costs.observe(size, seconds - draft_s)
        rate, arm = len(path) / seconds, self._with_draft_pass
        before = self._rates[arm] or rate
        self._rates[arm] = before + _TIME_MEMORY * (rate - before)

    def _draft_pass_pays(self) -> bool:
        """Whichever arm has been faster; the other one is probed now and then."""
        if not self._measured or self._num_steps == 0 or self._self_drafter is None:
            return True
        faster = self._rates[True] > self._rates[False]
        return faster != (_is_probe(self._num_steps) or _is_probe(self._num_steps - 1))

    def _best_subtree(self, tree: DraftTree) -> DraftTree:
        """The likeliest nodes, as many as give the most expected tokens per second."""
        chances = self._acceptance.chances(tree)
        order = sorted(range(len(tree)), key=lambda node: (-chances[node], node))
        best_rate, best_count, expected, done = 0.0, 1, 0.0, 0
        for size in self._pass_sizes:
            expected += sum(chances[node] for node in order[done:size])
            done = min(size, len(tree))
            rate = expected / self._costs.seconds(size)
            if rate > best_rate:
                best_rate, best_count = rate, done
            if done == len(tree):
                break
        return tree.keep(order[:best_count])


def _is_probe(num_steps: int) -> bool:
    return num_steps % PROBE_EVERY_STEPS == 0 or num_steps.bit_count() == 1
