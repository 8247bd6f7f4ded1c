"""Algorithm 1 of the paper: draft, verify, accept, commit, update.

Speculative and AR decoding are the same loop; AR is the loop with nothing drafted. The text depends on
the target, the sampler, the seed and the prompt alone.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import dataclass

import torch

from swiftgen.decoding.drafters.base import Committed
from swiftgen.decoding.history import History
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.replay import chains
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.cache import BLOCK_TOKENS, FullCache
from swiftgen.forward.passes import PassOutput
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree


@dataclass(frozen=True)
class StepEvent:
    """One step of decoding.

    Args:
        token_ids: Tokens written by this step, in order.
        sources: Where each accepted draft token came from; its length is the number of accepted drafts.
        draft_depth: Levels drafted (gamma); 0 for a plain AR step.
        num_rows: Rows of the verify pass that carried tokens.
        context_tokens: Prompt and text so far.
        kv_bytes: Memory of the KV cache in use.
        draft_s, verify_s, sample_s: Seconds spent drafting, in the verify pass, and on sampling and upkeep.
        text: Newly final text (filled by the engine; empty here).
        stop_reason: "length" or "eos" on the last event, else None.
    """

    token_ids: tuple[int, ...]
    sources: tuple[str, ...]
    draft_depth: int
    num_rows: int
    context_tokens: int
    kv_bytes: int
    draft_s: float
    verify_s: float
    sample_s: float
    text: str = ""
    stop_reason: str | None = None

    @property
    def num_accepted(self) -> int:
        """Draft tokens the target agreed with."""
        return len(self.sources)


def decode(
    target: Target,
    planner: Planner,
    sampler: Sampler,
    cache: FullCache,
    prompt_ids: Sequence[int],
    num_tokens: int,
    stop_token_ids: Collection[int] = (),
    on_prefill: Callable[[int], None] | None = None,
    written: Sequence[int] = (),
) -> Iterator[StepEvent]:
    """Write `num_tokens` tokens after the prompt, or fewer if a stop token comes first.

    Args:
        cache: Empty, with room for prompt, text and one tree.
        stop_token_ids: The text ends before the first of these; its token is still in the last event.
        on_prefill: Called with the number of tokens read, of the prompt and of what is written.
        written: The first of the tokens, if they are there already; fewer than `num_tokens`.
    """
    history = History(len(prompt_ids) + num_tokens)
    history.extend(prompt_ids)
    output = target.prefill(prompt_ids[:-1], cache, on_prefill)
    planner.read(_committed(prompt_ids, cache, 0, output, -1))
    if written:
        output = _reread(target, cache, [*prompt_ids, *written], on_prefill)
        planner.read(_committed(written, cache, len(prompt_ids) - 1, output, -1))
        history.extend(written)
    target.make_ready(cache)

    num_left = num_tokens - len(written)
    while num_left:
        begin_s, position = time.perf_counter(), cache.length
        levels_to_block_end = BLOCK_TOKENS - 1 - position % BLOCK_TOKENS
        tree = DraftTree(history.last(1)[0], max_depth=min(levels_to_block_end, num_left - 1))
        tree = planner.draft(tree, history)
        drafted_s = time.perf_counter()

        output = target.forward(tree, position, cache)
        logits = output.logits()
        verified_s = time.perf_counter()

        positions = torch.tensor(tree.depths) + position + 1
        picks = sampler.pick(logits, positions, history.windows(tree, sampler.W))
        path = tree.walk(picks)
        cache.commit(path)

        token_ids = [tree.tokens[node] for node in path[1:]] + [picks[path[-1]]]
        token_ids, stop_reason = _cut(token_ids, num_left, stop_token_ids)
        num_left = 0 if stop_reason else num_left - len(token_ids)
        history.extend(token_ids)
        committed = _committed(token_ids, cache, position, output, path[-1])
        planner.observe(tree, path, committed)
        yield StepEvent(
            token_ids=tuple(token_ids),
            sources=tuple(tree.sources[node] for node in path[1:])[: len(token_ids)],
            draft_depth=tree.depth,
            num_rows=len(tree),
            context_tokens=len(history),
            kv_bytes=cache.used_bytes,
            draft_s=drafted_s - begin_s,
            verify_s=verified_s - drafted_s,
            sample_s=time.perf_counter() - verified_s,
            stop_reason=stop_reason,
        )


def _reread(
    target: Target, cache: FullCache, token_ids: Sequence[int], on_prefill: Callable[[int], None] | None
) -> PassOutput | None:
    """Bring the cache up to all tokens but the last; returns the last pass.

    Not in the longer passes of the prefill: the tokens were written by passes of at most `max_rows` rows, and
    only those agree bit for bit.
    """
    output = None
    for tree, passed in chains(target, cache, token_ids[:-1]):
        output = passed
        if on_prefill:
            on_prefill(cache.length + len(tree))
    return output


def _committed(
    token_ids: Sequence[int], cache: FullCache, begin: int, output: PassOutput | None, row: int
) -> Committed:
    """What a pass has added, whose last kept row is `row`; no pass was needed for a prompt of one token."""
    if output is None:
        return Committed(token_ids, cache, begin, None, None)
    return Committed(token_ids, cache, begin, output.queries[:, :, :, row], output.hidden[row])


def _cut(
    token_ids: list[int], num_left: int, stop_token_ids: Collection[int]
) -> tuple[list[int], str | None]:
    """Cut the tokens of a step at the first stop token (kept) or at the length asked for."""
    for i, token in enumerate(token_ids[:num_left]):
        if token in stop_token_ids:
            return token_ids[: i + 1], "eos"
    if len(token_ids) >= num_left:
        return token_ids[:num_left], "length"
    return token_ids, None
