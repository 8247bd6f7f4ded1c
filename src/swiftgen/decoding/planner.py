"""What to draft and which tree to verify: the choice between what estimates promise.

The paper's plan is fixed: a draft pass every step, the tree shape and k n-grams, all verified. The other
plans weigh. Time has a price, the tokens that are written in it: a step takes the way to draft, and keeps the
part of the tree, that promise the most tokens beyond the price of their time. That may be the bare root:
plain AR. None of this changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence

from swiftgen.decoding.drafters.base import Committed, Drafter
from swiftgen.decoding.estimates import Estimates
from swiftgen.decoding.history import History
from swiftgen.decoding.stopwatch import REAL_TIME
from swiftgen.forward.tree import DraftTree

ENTER, STAY = 0.1, 0.03
"""Tokens a step that a way with levels has to promise beyond its time before it is taken, and while it is:
a tie within the noise goes to plain decoding."""
ROWS_MARGIN = 0.02
"""Tokens a step that a larger pass has to promise beyond its time."""
_ENOUGH = 4.0  # expected tokens of a step from where on no further drafter is asked
_ERROR_MEMORY, _ERROR_PRIOR, _ERROR_FORGETTING = 0.015, 15.0, 0.002
_MAX_ERROR = 0.3  # tokens a step that a way may bring less than it promises; more is the machine's doing
_FIRST_PLAIN, _PLAIN_EVERY = 2, 128  # steps without levels, so that what plain decoding takes stays known


class Planner:
    """Drafts one tree a step.

    Args:
        ways: The ways to draft, each the drafters that fill a tree in this order. An empty way is plain AR.
        estimates: Those that the drafters have; None verifies everything the first way drafts, as the paper
            does.
    """

    def __init__(self, ways: Sequence[Sequence[Drafter]], estimates: Estimates | None = None) -> None:
        self._ways = sorted(ways, key=len) if estimates else ways
        self._way = self._ways[0]
        self._errors = [0.0] * len(ways)  # tokens a step by which each way has brought less than promised
        self._times_taken = [0] * len(ways)
        self._promise: float | None = None
        self._drafters = list({id(drafter): drafter for way in ways for drafter in way}.values())
        self._estimates = estimates
        self._elapsed = (estimates.stopwatch if estimates else REAL_TIME).start()
        self._draft_s, self._num_steps = 0.0, 0
        self._drafted = DraftTree(0, 0)

    def draft(self, tree: DraftTree, history: History) -> DraftTree:
        """Begin a step: fill the tree with drafts and keep what is worth verifying."""
        estimates = self._estimates
        if estimates is None:
            for drafter in self._ways[0]:
                drafter.propose(tree, history)
            return tree
        estimates.begin(len(history))
        self._elapsed = estimates.stopwatch.start()
        for number, drafter in enumerate(self._best_way()):
            if number and len(tree) > 1 and sum(estimates.acceptance.chances(tree)) > _ENOUGH:
                break
            drafter.propose(tree, history)
        self._draft_s, self._drafted = self._elapsed(), tree
        return self._best_subtree(tree, estimates)

    def read(self, committed: Committed) -> None:
        """Show new text, at first the prompt, to the drafters."""
        for drafter in self._drafters:
            drafter.observe(committed)

    def observe(self, tree: DraftTree, path: Sequence[int], committed: Committed) -> None:
        """Learn from a step, which began with `draft` and ends here, whose accepted path is `path`."""
        self.read(committed)
        if self._estimates:
            self._estimates.acceptance.observe(self._drafted, committed.token_ids)
            seconds = self._elapsed()
            self._learn_error(len(path), seconds, self._estimates)
            self._estimates.end(len(path), len(tree), self._draft_s, seconds)
        self._num_steps += 1

    def _best_way(self) -> Sequence[Drafter]:
        """The one that promises the most; the simplest unless another promises more by a margin."""
        self._promise = None
        if len(self._ways) == 1 or self._num_steps < _FIRST_PLAIN or self._num_steps % _PLAIN_EVERY == 0:
            return self._ways[0]
        promises = [sum(drafter.promise() for drafter in way) for way in self._ways]
        likely = [promise - error for promise, error in zip(promises, self._errors, strict=True)]
        best = max(range(1, len(likely)), key=likely.__getitem__)
        if likely[best] > (ENTER if self._way is self._ways[0] else STAY):
            self._way, self._promise = self._ways[best], promises[best]
        else:
            self._way = self._ways[0]
        return self._way

    def _learn_error(self, num_tokens: int, seconds: float, estimates: Estimates) -> None:
        """See what has become of the promise of this step; forget a little what became of others."""
        self._errors = [(1 - _ERROR_FORGETTING) * error for error in self._errors]
        if self._promise is None:
            return
        way = self._ways.index(self._way)
        price = estimates.tokens_per_s * (seconds - estimates.costs.seconds(estimates.pass_sizes[0]))
        error = self._promise - (num_tokens - 1 - price)
        self._times_taken[way] += 1
        memory = max(_ERROR_MEMORY, 1 / (self._times_taken[way] + _ERROR_PRIOR))
        learnt = self._errors[way] + memory * (error - self._errors[way])
        self._errors[way] = min(max(learnt, 0.0), _MAX_ERROR)

    def _best_subtree(self, tree: DraftTree, estimates: Estimates) -> DraftTree:
        """The likeliest nodes, as many as promise the most tokens beyond the price of their pass."""
        if len(tree) == 1:
            return tree
        chances = estimates.acceptance.chances(tree)
        order = sorted(range(len(tree)), key=lambda node: (-chances[node], node))
        best_surplus, best_count, expected, done = float("-inf"), 1, 0.0, 0
        for size in estimates.pass_sizes:
            expected += sum(chances[node] for node in order[done:size])
            done = min(size, len(tree))
            surplus = expected - estimates.tokens_per_s * estimates.costs.seconds(size)
            if surplus > best_surplus + ROWS_MARGIN:
                best_surplus, best_count = surplus, done
            if done == len(tree):
                break
        return tree.keep(order[:best_count])
