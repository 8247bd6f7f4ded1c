"""Drafts by the target itself: passes over the root with the partial KV cache, then the draft heads.

Paper, sections 3.2 and 3.4. The logits of the pass predict the next token, the heads those after it.
Candidates are ranked with the noise the target will use, so the first one is what the target would pick
if the partial cache told it everything. Beyond the paper, the best candidate can be the root of another
pass, and so on, where the context is so long that a draft pass costs little beside a verify pass.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from swiftgen.decoding.drafters.base import Committed, Pace
from swiftgen.decoding.drafters.heads import HeadsDrafter, ReadyHeads
from swiftgen.decoding.history import History
from swiftgen.decoding.sampling import Sampler
from swiftgen.decoding.stopwatch import REAL_TIME, Stopwatch
from swiftgen.forward.cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree

SOURCE = "base"
MAX_PASSES = 8
_TIME_MEMORY = 0.1


class SelfDrafter:
    """Draft passes, and a tree of the given shape from the last one.

    Args:
        heads: None drafts the level of the pass only.
        shape: Children per node at each level, like `[1, 3, 3, 3]`; levels beyond the heads are left out.
        beam, floor: As `HeadsDrafter` has them.
        pace: Another pass is made while it promises more tokens than its time is worth; None makes one.
        stopwatch: Says how long a pass takes.
    """

    num_passes = 1

    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        cache: PartialCache,
        heads: ReadyHeads | None,
        shape: Sequence[int],
        beam: int | None = None,
        floor: float = 0.0,
        pace: Pace | None = None,
        stopwatch: Stopwatch = REAL_TIME,
    ) -> None:
        self._target = target
        self._sampler = sampler
        self._cache = cache
        self._width = shape[0]
        self._heads: HeadsDrafter | None = None
        if heads:
            self._heads = HeadsDrafter(target, sampler, heads, shape[1:], beam, floor, pace, stopwatch)
        self._pace = pace
        self._stopwatch = stopwatch
        self._pass_s = 0.0

    @torch.inference_mode()
    def propose(self, tree: DraftTree, history: History) -> None:
        """Add the candidates of each pass, then those of the heads level by level."""
        if not tree.max_depth:
            return
        chain = DraftTree(tree.tokens[0], MAX_PASSES)  # what the passes read; the last token is new
        node, chance = 0, 1.0
        while True:
            elapsed = self._stopwatch.start()
            hidden = self._target.forward(chain, len(history) - 1, self._cache).hidden[-1]
            candidates = self._candidates(tree, node, history, hidden)
            self._learn(elapsed())
            if not candidates or len(chain) == min(MAX_PASSES, self._target.max_rows):
                break
            (node, confidence), *_ = candidates
            if tree.depths[node] == tree.max_depth or not self._is_worth_a_pass(chance * confidence):
                break
            chance *= confidence
            chain.add(len(chain) - 1, tree.tokens[node], SOURCE)
        if self._heads:
            nodes = [node for node, _ in candidates]
            self._heads.grow(tree, history, nodes, hidden, chance)

    def observe(self, committed: Committed) -> None:
        """Let the partial cache follow the full one."""
        if committed.queries is not None and committed.cache.length > committed.begin:
            self._cache.update(committed.cache, committed.begin, committed.queries)

    def _candidates(
        self, tree: DraftTree, parent: int, history: History, hidden: Tensor
    ) -> list[tuple[int, float]]:
        """The nodes of what the pass predicts below `parent`, best first, and how sure it is of each."""
        position = torch.tensor([len(history) + tree.depths[parent]])
        windows = history.windows(tree, self._sampler.W, [parent])
        logits = self._target.logits(hidden.unsqueeze(0))
        (candidates,) = self._sampler.rank(logits, position, windows, self._width)
        return [
            (node, confidence)
            for token, confidence in candidates
            if (node := tree.add(parent, token, SOURCE, confidence)) is not None
        ]

    def _is_worth_a_pass(self, chance: float) -> bool:
        """Whether a token more, if all so far is right, is worth the time of a pass."""
        return self._pace is not None and chance > self._pace.tokens_per_s * self._pass_s > 0.0

    def _learn(self, seconds: float) -> None:
        self._pass_s += (_TIME_MEMORY if self._pass_s else 1.0) * (seconds - self._pass_s)
