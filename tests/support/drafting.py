"""Ways to draft for tiny models, adversarial ones among them."""

from __future__ import annotations

import functools
import random
from collections.abc import Sequence

import torch

from support.tiny import DRAFT_VOCABULARY, VOCAB_SIZE, Priced, random_heads, ready_heads
from swiftgen.decoding.drafters.base import Committed, Drafter
from swiftgen.decoding.drafters.heads import HeadsDrafter, ReadyHeads
from swiftgen.decoding.drafters.lookup import LookupDrafter
from swiftgen.decoding.drafters.ngram import NgramDrafter
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.history import History
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree

PROMPT = [5, 17, 3, 5, 17, 8, 60] * 16


class AdversarialPlanner(Planner):
    """Proposes wrong, repeated and unsorted trees in which the right tokens are hidden."""

    def __init__(self, target: Target, text: list[int], num_prompt_tokens: int = len(PROMPT)) -> None:
        super().__init__([[]])
        self._text, self._num_prompt_tokens = text, num_prompt_tokens
        self._random = random.Random(0)

    def draft(self, tree, history):  # type: ignore[no-untyped-def]
        right = self._text[len(history) - self._num_prompt_tokens :][: self._random.randrange(6)]
        node = 0
        for _ in range(self._random.randrange(1, 20)):
            if right and self._random.random() < 0.5:
                node = tree.add(node, right.pop(0), "base") or node
            place = self._random.randrange(len(tree))
            tree.add(place, self._random.randrange(VOCAB_SIZE), "ngram")
            tree.add(place, tree.tokens[-1], "ngram")
        return tree


class RandomDrafter:
    """Trees of the tokens that come, hidden among others."""

    def __init__(self, tokens: list[int], num_nodes: int, seed: int) -> None:
        self._tokens, self._num_nodes = tokens, num_nodes
        self._random, self._written = random.Random(seed), 0

    def propose(self, tree: DraftTree, history: History) -> None:
        ahead = self._tokens[self._written : self._written + self._random.randrange(5)]
        for _ in range(4 * self._num_nodes):  # fewer nodes where the block ends
            if len(tree) < self._num_nodes - len(ahead):
                tree.add(self._random.randrange(len(tree)), self._random.randrange(VOCAB_SIZE), "base")
        if ahead and self._random.random() < 0.9:
            tree.add_path(0, ahead, "base")

    def observe(self, committed: Committed) -> None:
        self._written += len(committed.token_ids) if committed.begin else 0


@functools.cache
def heads_for(kind: str, family: str, dtype: torch.dtype) -> ReadyHeads:
    """The heads that a way to draft names, for a tiny model."""
    vocabulary = DRAFT_VOCABULARY if "some tokens" in kind else None
    heads = random_heads("recurrent" if "recurrent" in kind else "linear", vocabulary)
    return ready_heads(heads, family, dtype)


def drafters(
    target: Target, family: str, kind: str, sample: Sampler, text: Sequence[int] = ()
) -> list[Drafter]:
    """One way to draft."""
    way: list[Drafter] = []
    heads = heads_for(kind, family, target.dtype)
    partial = PartialCache(target.cache_shape, budget=48, num_sinks=4)
    if "verify state" in kind:
        way.append(HeadsDrafter(target, sample, heads, [4, 2, 2], beam=2))
    elif "draft pass" in kind:
        way.append(SelfDrafter(target, sample, partial, heads, [1, 4, 2, 2], beam=2))
    elif kind == "base":
        way.append(SelfDrafter(target, sample, partial, None, [1, 3, 3, 3]))
    elif kind == "several passes":
        way.append(SelfDrafter(target, sample, partial, heads, [2, 2, 2], beam=2, estimates=Priced(1e-9)))
    elif kind == "all":  # as the paper has it
        way.append(SelfDrafter(target, sample, partial, heads, [1, 3, 3, 3]))
        way.append(NgramDrafter(4, 20, seed=0))
    elif kind == "ngram":
        lookup = LookupDrafter()
        # Random models repeat nothing: as if all of the text had stood before the prompt, with other ends.
        for begin in range(0, len(text), 5):
            lookup.observe(Committed([*text[begin : begin + 9], 7, 1], None, 0, None, None))  # type: ignore[arg-type]
        way.append(lookup)
    return way
