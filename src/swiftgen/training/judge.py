"""How good heads are on held-out text: top-n hits per head, and accepted tokens per step.

A text is replayed as if the target had just written it with the sampler of the preset. The noise that
would have made the target pick each of its tokens is drawn in hindsight: Gumbel noise conditioned on which
token wins (Maddison et al. 2014, "A* sampling"). Drafts are ranked with that noise, as in decoding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import pad

from swiftgen.decoding.sampling import NEG_INF, Sampler
from swiftgen.heads.modules import DraftHeads
from swiftgen.training.base import FrozenBase
from swiftgen.training.objective import HeadsObjective, Positions, positions_of
from swiftgen.training.states import StateStore
from swiftgen.training.texts import Texts

TOP = (1, 3, 5)
_ROWS = 256


@dataclass(frozen=True)
class Judgement:
    """Figures on held-out text; one entry per head in every tuple.

    Args:
        num_positions: Positions judged.
        losses: Cross entropy in nats.
        top: For n in `TOP`, the share of tokens among the n likeliest of the head.
        drafted: For n in `TOP`, the same with penalty, temperature, filters and shared noise, as drafted.
        tokens_per_step: Replayed decoding with heads alone, from the verify state, with the preset's tree
            widths below the first level: 1 + accepted drafts.
    """

    num_positions: int
    losses: tuple[float, ...]
    top: dict[int, tuple[float, ...]]
    drafted: dict[int, tuple[float, ...]]
    tokens_per_step: float


@torch.no_grad()
def judge(
    base: FrozenBase,
    heads: DraftHeads,
    texts: Texts,
    store: StateStore,
    indices: Tensor,
    sampler: Sampler,
    widths: Sequence[int],
    on_progress: Callable[[], object] | None = None,
) -> Judgement:
    """Judge heads on some sequences.

    Args:
        widths: Candidates below each node, level by level.
        on_progress: Called after each sequence.
    """
    objective = HeadsObjective(base, heads, soft=False)
    num_positions, losses = 0, torch.zeros(heads.num_heads)
    plain: list[Tensor] = []
    drafted: list[Tensor] = []
    num_steps = num_written = 0
    for index in indices.tolist():
        length = int(texts.lengths[index])
        tokens = texts.tokens[index, :length].long()
        states = store.get(torch.tensor([index]))[:, : length - 1]
        positions = positions_of(states, tokens[None], torch.tensor([length]), heads.num_heads)
        losses += objective.losses(positions).cpu() * len(positions)
        num_positions += len(positions)
        ranks = _ranks(objective, base, heads, sampler, positions, tokens, states[0])
        plain.append(ranks[0])
        drafted.append(ranks[1])
        steps, written = _replay(ranks[1], widths)
        num_steps, num_written = num_steps + steps, num_written + written
        if on_progress:
            on_progress()
    return Judgement(
        num_positions,
        tuple((losses / num_positions).tolist()),
        _hits(torch.cat(plain, dim=1)),
        _hits(torch.cat(drafted, dim=1)),
        num_written / max(1, num_steps),
    )


def widths_for(tree: Sequence[int], num_heads: int) -> list[int]:
    """The widths of a tree shape below its first level, one for each head; the last one is repeated."""
    widths = list(tree[1:]) or [tree[0]]
    return (widths + [widths[-1]] * num_heads)[:num_heads]


def hindsight_noise(processed: Tensor, tokens: Tensor, generator: torch.Generator) -> Tensor:
    """Gumbel noise under which each row picks the given token.

    Args:
        processed: Processed logits `[rows, vocab]`, finite at the given tokens.
        tokens: int64 `[rows]`.

    Returns:
        float64 `[rows, vocab]`, distributed as Gumbel noise given that the token has won.
    """
    logits = processed.double()
    rows = torch.arange(len(logits), device=logits.device)
    largest = logits.logsumexp(dim=-1) - _exponential(logits[:, 0], generator).log()  # [rows]
    noise = -(_exponential(logits, generator) + torch.exp(logits - largest[:, None])).log()
    noise[rows, tokens] = largest - logits[rows, tokens]
    return noise


def _exponential(like: Tensor, generator: torch.Generator) -> Tensor:
    return torch.empty(like.shape, dtype=torch.float64).exponential_(generator=generator).to(like.device)


def _ranks(
    objective: HeadsObjective,
    base: FrozenBase,
    heads: DraftHeads,
    sampler: Sampler,
    positions: Positions,
    tokens: Tensor,
    states: Tensor,
) -> tuple[Tensor, Tensor]:
    """At which rank each head has the token of the text, by its logits alone and as drafted.

    Args:
        positions: All of one text.
        tokens, states: Of that text, `[S]` and `[S - 1, hidden]`.

    Returns:
        int64 `[num_heads, M]` each, 0 is the best rank.
    """
    outputs = objective.outputs(positions)
    vocab_size, device = base.config.vocab_size, states.device
    tokens = tokens.to(device)
    vocabulary = heads.vocabulary
    vocabulary = torch.arange(vocab_size, device=device) if vocabulary is None else vocabulary
    draft_sampler = sampler.restricted_to(vocabulary, vocab_size)
    generator = torch.Generator().manual_seed(0)
    # The windows of the first tokens reach back to the first one, which fills what is missing.
    width = min(max(sampler.W, 1), len(tokens))
    padded = torch.cat([tokens[:1].expand(width - 1), tokens])
    windows = padded.unfold(0, width, 1)
    num_positions = len(positions)
    plain = torch.full((heads.num_heads, num_positions), vocab_size, device=device)
    drafted = plain.clone()
    for first in range(1, len(tokens) - 1, _ROWS):
        rows = torch.arange(first, min(first + _ROWS, len(tokens) - 1), device=device)
        picked = tokens[rows + 1]
        processed = sampler.process(base.logits(states[rows].to(base.dtype)), windows[rows])
        is_excluded = processed.gather(1, picked[:, None])[:, 0] == NEG_INF
        processed[is_excluded, picked[is_excluded]] = processed[is_excluded].amax(dim=-1)
        noise = torch.zeros_like(processed, dtype=torch.float64)
        if sampler.settings.temperature > 0:
            noise = hindsight_noise(processed, picked, generator)
        noise = noise[:, vocabulary]
        columns = objective.columns(picked)
        for depth in range(1, heads.num_heads + 1):
            begin = rows - depth
            of = torch.nonzero((begin >= 0) & (begin < num_positions) & (columns >= 0))[:, 0]
            logits = objective.unembed(outputs[depth - 1][begin[of]])
            plain[depth - 1, begin[of]] = _rank(logits, columns[of])
            scores = draft_sampler.process(pad(logits, (0, 1)), windows[rows[of]])[:, :-1] + noise[of]
            drafted[depth - 1, begin[of]] = _rank(scores, columns[of])
    return plain.cpu(), drafted.cpu()


def _rank(scores: Tensor, columns: Tensor) -> Tensor:
    """How many scores of each row are above that of its column; excluded columns come last."""
    own = scores.gather(1, columns[:, None])
    rank = (scores > own).sum(dim=-1)
    return torch.where(own[:, 0] == NEG_INF, scores.shape[1], rank)


def _hits(ranks: Tensor) -> dict[int, tuple[float, ...]]:
    return {n: tuple((ranks < n).float().mean(dim=1).tolist()) for n in TOP}


def _replay(ranks: Tensor, widths: Sequence[int]) -> tuple[int, int]:
    """Steps and tokens of decoding one text with trees of these widths, one for each head."""
    hits = ranks < torch.tensor(widths)[:, None]
    accepted = hits.long().cumprod(dim=0).sum(dim=0).tolist()
    num_steps = position = 0
    while position < len(accepted):
        position += 1 + accepted[position]
        num_steps += 1
    return num_steps, position
