"""Drafts by the target itself: passes over the root with the partial KV cache, then the draft heads.

Paper, sections 3.2 and 3.4. The logits of the pass predict the next token, the heads those after it.
Candidates are ranked with the noise the target will use, so the first one is what the target would pick
if the partial cache told it everything. Beyond the paper, the best candidate becomes the next row, and so on:
what was drafted is kept until the step ends, so each pass computes one row, however deep it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from swiftgen.decoding.acceptance import calibrated
from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.drafters.heads import HeadsDrafter, ReadyHeads
from swiftgen.decoding.estimates import Estimates, Prior
from swiftgen.decoding.history import History
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree

SOURCE = "base"
MAX_PASSES = 16
PRIOR = Prior(share=0.45, hit=0.85, best_hit=0.95)
BIAS = 1.4
"""See `calibrated`: with a share of one half the best candidate is right eight times in ten."""


class SelfDrafter:
    """Draft passes, and a tree of the given shape from the last one.

    Args:
        heads: None drafts the level of the pass only.
        shape: Children per node at each level, like `[1, 3, 3, 3]`; levels beyond the heads are left out.
        beam, floor: As `HeadsDrafter` has them.
        estimates: Another pass is made while it promises more tokens than its time is worth; None makes one.
    """

    def __init__(
        self,
        target: Target,
        sampler: Sampler,
        cache: PartialCache,
        heads: ReadyHeads | None,
        shape: Sequence[int],
        beam: int | None = None,
        floor: float = 0.0,
        estimates: Estimates | None = None,
    ) -> None:
        # The paper's plan drafts once, so all of the vocabulary is worth its time.
        cut = heads.cut_lm_head if heads and estimates else None
        self._target, self._sampler = target.drafting(*cut or ()), sampler
        if heads and cut and self._target is not target:
            self._sampler = heads.sampler(sampler, target.config.vocab_size)
        self._cache = cache
        self._width = shape[0]
        self._heads: HeadsDrafter | None = None
        if heads:
            self._heads = HeadsDrafter(target, sampler, heads, shape[1:], beam, floor, estimates)
        self._level = estimates.level(SOURCE, PRIOR) if estimates else None
        self._new: Committed | None = None  # what the partial cache has not followed yet

    @torch.inference_mode()
    def propose(self, tree: DraftTree, history: History) -> None:
        """Add the candidates of each pass, then those of the heads level by level."""
        if not tree.max_depth:
            return
        chain = DraftTree(tree.tokens[0], MAX_PASSES)  # what the passes read; the last token is new
        node, chance = 0, 1.0
        while True:
            elapsed = self._level.start() if self._level else None
            self._follow()
            last = len(chain) - 1
            output = self._target.forward(chain, len(history) - 1, self._cache, first=last)
            candidates = self._candidates(tree, node, history, output.logits())
            own = self._level.chance(tree, candidates[0]) if self._level and candidates else 0.0
            if self._level and elapsed:
                self._level.observe(elapsed(), own)
            if not candidates or len(chain) == MAX_PASSES:
                break
            node = candidates[0]
            is_deepest = tree.depths[node] == tree.max_depth
            if is_deepest or not self._level or not self._level.is_worth(chance * own, len(chain) + 1):
                break
            chance *= own
            chain.add(last, tree.tokens[node], SOURCE)
        if self._heads:
            self._heads.grow(tree, history, candidates, output.hidden[-1], chance)

    def promise(self) -> float:
        """Of the passes alone."""
        return self._level.promise(MAX_PASSES) if self._level else 0.0

    def observe(self, committed: Committed) -> None:
        """Note what the partial cache has to follow before the next pass."""
        if committed.queries is not None and committed.cache.length > committed.begin:
            begin = self._new.begin if self._new else committed.begin
            self._new = replace(committed, begin=begin)

    def _follow(self) -> None:
        """Let the partial cache follow the full one: in steps without a draft pass nobody needs it."""
        if self._new and self._new.queries is not None:
            self._cache.update(self._new.cache, self._new.begin, self._new.queries)
        self._new = None

    def _candidates(self, tree: DraftTree, parent: int, history: History, logits: Tensor) -> list[int]:
        """The nodes of what the pass predicts below `parent`, best first."""
        position = torch.tensor([len(history) + tree.depths[parent]])
        windows = history.windows(tree, self._sampler.W, [parent])
        (candidates,) = self._sampler.rank(logits, position, windows, self._width)
        if not candidates:
            return []
        # With shared noise the best is right far more often than its share says.
        (_, share), *others = candidates
        best = calibrated(share, BIAS)
        left = (1.0 - best) / max(1.0 - share, 1e-6)  # for the others, by their shares
        chances = [best, *(min(1.0, left * share) for _, share in others)]
        return [
            node
            for (token, _), chance in zip(candidates, chances, strict=True)
            if (node := tree.add(parent, token, SOURCE, chance)) is not None
        ]
