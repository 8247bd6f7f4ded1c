"""Replaying a text: the token the target picks at every position, in passes of many rows.

A row of a pass has the same bits whatever else is in the pass, so a chain of the text's own tokens gives, at
every node, the pick that decoding made there one step after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from swiftgen.decoding.history import History
from swiftgen.decoding.sampling import NEG_INF, Sampler
from swiftgen.forward.cache import BLOCK_TOKENS, FullCache
from swiftgen.forward.passes import PassOutput
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree


@dataclass(frozen=True)
class Mismatch:
    """Where a text is not what decoding writes.

    Args:
        position: Of the token in the text, prompt included.
        found, picked: The token that is there, and the one the target picks.
        margin: By how much the pick is ahead, in logits divided by the temperature, noise included; None if
            the token that is there cannot occur.
    """

    position: int
    found: int
    picked: int
    margin: float | None


def chains(
    target: Target, cache: FullCache, token_ids: Sequence[int]
) -> Iterator[tuple[DraftTree, PassOutput]]:
    """Passes over the tokens that the cache lacks, each as long as the largest pass and the block allow.

    The rows of a chain are committed when the next one is asked for.

    Args:
        cache: Holds the first of the tokens, or none.
    """
    while cache.length < len(token_ids):
        position = cache.length
        num_rows = min(target.max_rows, BLOCK_TOKENS - position % BLOCK_TOKENS)
        chain = token_ids[position : position + num_rows]
        tree = DraftTree(chain[0], max_depth=len(chain))
        tree.add_path(0, chain[1:], "text")
        yield tree, target.forward(tree, position, cache)
        cache.commit(range(len(chain)))


def replay(
    target: Target, sampler: Sampler, cache: FullCache, token_ids: Sequence[int], num_prompt_tokens: int
) -> Iterator[int | Mismatch]:
    """Compare every token after the prompt with the target's pick.

    Yields the number of tokens checked so far, pass by pass; a mismatch is the last that is yielded.

    Args:
        cache: Empty, with room for the text and one pass.
        token_ids: Prompt and text.
    """
    history = History(len(token_ids))
    history.extend(token_ids[:num_prompt_tokens])
    target.prefill(token_ids[: num_prompt_tokens - 1], cache)
    for tree, output in chains(target, cache, token_ids[:-1]):
        first = cache.length + 1
        positions = torch.arange(len(tree)) + first
        windows = history.windows(tree, sampler.W)
        picks = sampler.pick(output.logits(), positions, windows)
        following = token_ids[first : first + len(tree)]
        for row, (found, picked) in enumerate(zip(following, picks, strict=True)):
            if found != picked:
                one = slice(row, row + 1)
                logits = target.logits(output.hidden[one])
                scores, ids = sampler.scores(logits, positions[one], windows[one])
                score_of = dict(zip(ids.tolist(), scores[0].tolist(), strict=True))
                margin = score_of.get(picked, NEG_INF) - score_of.get(found, NEG_INF)
                is_possible = margin < math.inf
                yield Mismatch(first + row, found, picked, margin if is_possible else None)
                return
        history.extend(following)
        yield first + len(tree) - num_prompt_tokens
