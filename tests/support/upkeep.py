"""A made-up text, and everything that follows a text while it is written."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

from swiftgen.decoding.decode import StepEvent
from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.drafters.lookup import LookupDrafter
from swiftgen.decoding.drafters.ngram import NgramDrafter
from swiftgen.decoding.history import History
from swiftgen.figures.distinct import DistinctN
from swiftgen.figures.loops import LoopDetector
from swiftgen.figures.metrics import RunMetrics
from swiftgen.forward.tree import DraftTree

STEP_TOKENS = 4
W = 1024


def made_up_text(num_tokens: int, vocab_size: int = 49_152, seed: int = 0) -> list[int]:
    """Tokens with the frequencies of words; every tenth stretch has been there before."""
    rng = random.Random(seed)
    text: list[int] = []
    while len(text) < num_tokens:
        if len(text) > 100 and rng.random() < 0.1:
            begin = rng.randrange(len(text) - 20)
            text += text[begin : begin + 20]
        else:
            text += [int(vocab_size ** rng.random()) - 1 for _ in range(20)]
    return text[:num_tokens]


def upkeep_parts(num_tokens: int) -> dict[str, Callable[[list[int]], object]]:
    """What follows a text, by name: each takes the tokens of a step.

    Args:
        num_tokens: Of the whole text.
    """
    history, metrics = History(num_tokens), RunMetrics()
    lookup, ngrams = LookupDrafter(), NgramDrafter(4, 20, seed=0)

    def follow_history(token_ids: list[int]) -> None:
        history.extend(token_ids)
        history.windows(tree_of(token_ids), W)

    def draft_with(drafter: LookupDrafter | NgramDrafter) -> Callable[[list[int]], None]:
        def follow(token_ids: list[int]) -> None:
            drafter.observe(committed(token_ids))
            drafter.propose(tree_of(token_ids), history)

        return follow

    return {
        "history": follow_history,
        "distinct": DistinctN().update,
        "loops": LoopDetector().update,
        "lookup": draft_with(lookup),
        "n-grams": draft_with(ngrams),
        "figures": lambda token_ids: (metrics.observe(event_of(token_ids)), metrics.snapshot()),
    }


def tree_of(token_ids: Sequence[int]) -> DraftTree:
    """A small tree below the last token."""
    tree = DraftTree(token_ids[-1], max_depth=8)
    for token in token_ids:
        tree.add(0, token, "base")
    tree.add_path(1, token_ids, "base")
    return tree


def committed(token_ids: list[int]) -> Committed:
    """As drafters that look at tokens alone see it."""
    return Committed(token_ids, cache=None, begin=0, queries=None, state=None)  # type: ignore[arg-type]


def event_of(token_ids: Sequence[int]) -> StepEvent:
    return StepEvent(tuple(token_ids), ("base",) * 3, 3, 8, 0, 0, 0.0, 0.0, 0.0, text="abc ")
