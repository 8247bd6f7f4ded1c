"""Replaying a text: the token the target picks at every position, in passes of many rows.

A row of a pass has the same bits whatever else is in the pass, so a chain of the text's own tokens gives, at
every node, the pick that decoding made there one step after the other.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from swiftgen.cache import BLOCK_TOKENS, FullCache
from swiftgen.sampling import NEG_INF, History, Sampler
from swiftgen.target import Target
from swiftgen.tree import DraftTree


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
    num_left = len(token_ids) - num_prompt_tokens
    while num_left:
        position = cache.length
        to_block_end = BLOCK_TOKENS - position % BLOCK_TOKENS
        chain = token_ids[position : position + min(target.max_rows, to_block_end, num_left)]
        tree = DraftTree(chain[0], max_depth=len(chain))
        tree.add_path(0, chain[1:], "text")
        hidden = target.forward(tree, position, cache).hidden
        positions = torch.arange(len(chain)) + position + 1
        windows = history.windows(tree, sampler.W)
        picks = sampler.pick(target.logits(hidden), positions, windows)
        following = token_ids[position + 1 : position + 1 + len(chain)]
        for row, (found, picked) in enumerate(zip(following, picks, strict=True)):
            if found != picked:
                one = slice(row, row + 1)
                scores, ids = sampler.scores(target.logits(hidden[one]), positions[one], windows[one])
                score_of = dict(zip(ids.tolist(), scores[0].tolist(), strict=True))
                margin = score_of.get(picked, NEG_INF) - score_of.get(found, NEG_INF)
                is_possible = margin < math.inf
                yield Mismatch(position + 1 + row, found, picked, margin if is_possible else None)
                return
        cache.commit(range(len(chain)))
        history.extend(following)
        num_left -= len(chain)
        yield len(token_ids) - num_prompt_tokens - num_left
