"""Drafts by the target itself: passes over the root with the partial KV cache, then the draft heads.

Paper, sections 3.2 and 3.4. The logits of the pass predict the next token, the heads those after it.
Candidates are ranked with the noise the target will use, so the first one is what the target would pick
if the partial cache told it everything. Beyond the paper, the best candidate becomes the next row, and so on:
what was drafted is kept until the step ends, so each pass computes one row, however deep it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

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
MAX_PASSES = 16
_TIME_MEMORY = 0.1
FIRST_TRUST = 0.8
"""In the best candidate of a pass, before anything is learnt of it."""
_TRUST_MEMORY = 0.03


@dataclass
class _Share:
    """How often something is right, from a first guess on."""

    value: float
    weight: float = 2.0

    def observe(self, was_right: bool) -> None:
        self.weight += 1.0
        self.value += max(_TRUST_MEMORY, 1.0 / self.weight) * (was_right - self.value)


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
        # The paper's plan drafts once, so all of the vocabulary is worth its time.
        vocabulary = heads.vocabulary if heads and pace else None
        self._target, self._sampler = target.drafting(vocabulary), sampler
        if vocabulary is not None and self._target is not target:
            self._sampler = sampler.restricted_to(vocabulary, target.config.vocab_size)
        self._cache = cache
        self._width = shape[0]
        self._heads: HeadsDrafter | None = None
        if heads:
            self._heads = HeadsDrafter(target, sampler, heads, shape[1:], beam, floor, pace, stopwatch)
        self._pace = pace
        self._stopwatch = stopwatch
        self._pass_s = 0.0
        self._trust: dict[int, _Share] = {}  # how often the best candidate was right, by its confidence
        self._mean_trust = _Share(FIRST_TRUST)
        self._chain: list[tuple[int, float]] = []  # the best candidates of this step

    @torch.inference_mode()
    def propose(self, tree: DraftTree, history: History) -> None:
        """Add the candidates of each pass, then those of the heads level by level."""
        if not tree.max_depth:
            return
        chain = DraftTree(tree.tokens[0], MAX_PASSES)  # what the passes read; the last token is new
        node, chance = 0, 1.0
        self._chain = []
        while True:
            elapsed = self._stopwatch.start()
            last = len(chain) - 1
            output = self._target.forward(chain, len(history) - 1, self._cache, first=last)
            candidates = self._candidates(tree, node, history, output.logits())
            self._learn(elapsed())
            if not candidates or len(chain) == MAX_PASSES:
                break
            (node, trust), *_ = candidates
            if tree.depths[node] == tree.max_depth or not self._is_worth_a_pass(chance * trust):
                break
            chance *= trust
            chain.add(last, tree.tokens[node], SOURCE)
        if self._heads:
            nodes = [node for node, _ in candidates]
            self._heads.grow(tree, history, nodes, output.hidden[-1], chance)

    def observe(self, committed: Committed) -> None:
        """Learn which candidates were right, and let the partial cache follow the full one."""
        for (token, confidence), written in zip(self._chain, committed.token_ids, strict=False):
            self._learn_trust(confidence, token == written)
            if token != written:
                break
        self._chain = []
        if committed.queries is not None and committed.cache.length > committed.begin:
            self._cache.update(committed.cache, committed.begin, committed.queries)

    def _candidates(
        self, tree: DraftTree, parent: int, history: History, logits: Tensor
    ) -> list[tuple[int, float]]:
        """The nodes of what the pass predicts below `parent`, best first, and how likely each is right."""
        position = torch.tensor([len(history) + tree.depths[parent]])
        windows = history.windows(tree, self._sampler.W, [parent])
        (candidates,) = self._sampler.rank(logits, position, windows, self._width)
        if not candidates:
            return []
        best = candidates[0]
        trust = self._trust_in(best.confidence).value
        left = (1.0 - trust) / max(1.0 - best.confidence, 1e-6)  # for the others, by their shares
        chances = [trust, *(min(1.0, left * confidence) for _, confidence in candidates[1:])]
        self._chain.append(best)
        return [
            (node, chance)
            for (token, _), chance in zip(candidates, chances, strict=True)
            if (node := tree.add(parent, token, SOURCE, chance)) is not None
        ]

    def _trust_in(self, confidence: float) -> _Share:
        """How often a best candidate of this confidence is right; at first, where time counts, as any is."""
        guess = confidence if self._pace is None else max(confidence, self._mean_trust.value)
        return self._trust.setdefault(_grade(confidence), _Share(guess))

    def _learn_trust(self, confidence: float, was_right: bool) -> None:
        self._trust_in(confidence).observe(was_right)
        self._mean_trust.observe(was_right)

    def _is_worth_a_pass(self, chance: float) -> bool:
        """Whether a token more, if all so far is right, is worth the time of a pass and of a row."""
        if self._pace is None:
            return False
        price = self._pace.tokens_per_s * (self._pass_s + self._pace.row_s)
        return self._mean_trust.value * chance > price > 0.0

    def _learn(self, seconds: float) -> None:
        self._pass_s += (_TIME_MEMORY if self._pass_s else 1.0) * (seconds - self._pass_s)


def _grade(confidence: float) -> int:
    """Confidences that are taken to mean the same."""
    return int(8 * confidence)
