"""Speculative text is an exact sample: the joint distribution of three tokens against the model's own.

A model with a vocabulary of five writes three tokens under tens of thousands of seeds, drafted as a wide
tree. What it should write is computed by the unmodified transformers model and compared by chi-square.
"""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import replace

import pytest
import torch
from torch import Tensor

from support.tiny import new_cache, new_target, tiny_model
from swiftgen.decoding.decode import decode
from swiftgen.decoding.history import History
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.cache import FullCache
from swiftgen.forward.passes import PassOutput
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree
from swiftgen.settings.schema import SamplerSettings

VOCAB_SIZE, PROMPT, NUM_TOKENS = 5, [3], 3
NUM_SEEDS = 20_000
TEXTS = list(itertools.product(range(VOCAB_SIZE), repeat=NUM_TOKENS))
PENALTY = {"theta": 1.5, "W": 2}


class WidePlanner(Planner):
    """Drafts these tokens at each of two levels: all combinations of them."""

    def __init__(self, tokens: list[int]) -> None:
        super().__init__([[]])
        self.tokens = tokens
        self.tree = DraftTree(0, 0)

    def draft(self, tree: DraftTree, history: History) -> DraftTree:
        for path in itertools.product(self.tokens, repeat=2):
            tree.add_path(0, path, "base")
        self.tree = tree
        return tree


class MemoTarget:
    """A target that computes the same pass over the same text once; decoding cannot tell the difference."""

    def __init__(self, target: Target) -> None:
        self._target = target
        self._outputs: dict[object, PassOutput] = {}
        self.history = History(0)

    def prefill(self, token_ids: list[int], cache: FullCache, on_progress: object) -> None:
        assert not token_ids

    def forward(self, tree: DraftTree, position: int, cache: FullCache) -> PassOutput:
        assert len(self.history) == position + 1
        before_root = self.history.last(position + 1)[:-1]
        key = (*before_root, "root", *tree.tokens, "parents", *tree.parents)
        if key not in self._outputs:
            fresh = new_cache(self._target, position)
            self._target.prefill(before_root, fresh)
            output = self._target.forward(tree, position, fresh)
            logits = output.logits()
            self._outputs[key] = replace(output, logits=logits.clone)
        return self._outputs[key]

    def make_ready(self, cache: FullCache) -> None:
        """Nothing to prepare."""


class BiasedSampler(Sampler):
    """Accepts as the reference implementation does: every leaf draws for itself, the longest match wins."""

    def __init__(self, planner: WidePlanner) -> None:
        super().__init__(SamplerSettings(), 0, 0, 1.0)
        self._planner = planner
        self._generator = torch.Generator().manual_seed(0)

    def pick(self, logits: Tensor, positions: Tensor, windows: Tensor) -> list[int]:
        tree = self._planner.tree
        paths = [tree.path(leaf) for leaf in range(len(tree)) if not tree.children(leaf)]
        rows = torch.tensor(paths)  # [leaves, 3]
        draws = torch.multinomial(logits.softmax(-1)[rows.flatten()], 1, generator=self._generator).view_as(
            rows
        )
        drafted = torch.tensor(tree.tokens)[rows]
        num_accepted = (draws[:, :-1] == drafted[:, 1:]).cumprod(1).sum(1)
        best = int(num_accepted.argmax())
        picks = [-1] * len(tree)
        for path, drawn in zip([*paths, paths[best]], [*draws.tolist(), draws[best].tolist()], strict=True):
            for node, draw in zip(path, drawn, strict=True):
                picks[node] = draw
        return picks


def probabilities(theta: float = 1.0, W: int = 0) -> dict[tuple[int, ...], float]:
    """Of every text of three tokens, by transformers' own forward pass."""
    model = tiny_model(vocab_size=VOCAB_SIZE)
    found = {}
    with torch.inference_mode():
        for text in TEXTS:
            ids = [*PROMPT, *text]
            logits = model(torch.tensor([ids])).logits[0].double()
            chance = 1.0
            for i, token in enumerate(text):
                row = logits[i].clone()
                for seen in set(ids[: i + 1][-W:]) if theta != 1.0 else ():
                    row[seen] = row[seen] / theta if row[seen] > 0 else row[seen] * theta
                chance *= row.softmax(0)[token].item()
            found[text] = chance
    assert sum(found.values()) == pytest.approx(1)
    return found


@pytest.fixture(scope="module")
def target() -> Iterator[Target]:
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)  # tensors of five columns: waking a second thread takes longer than the work
    yield new_target(tiny_model(vocab_size=VOCAB_SIZE)).with_pass_sizes((64,))
    torch.set_num_threads(num_threads)


def written(
    target: Target, planner: WidePlanner, make_sampler: Callable[[int], Sampler], num_seeds: int
) -> Counter[tuple[int, ...]]:
    """How often each text was written."""
    memo = MemoTarget(target)
    cache = new_cache(target, len(PROMPT) + NUM_TOKENS)
    texts: Counter[tuple[int, ...]] = Counter()
    for seed in range(num_seeds):
        cache.length = 0
        text: list[int] = []
        memo.history = History(10)
        memo.history.extend(PROMPT)
        for event in decode(memo, planner, make_sampler(seed), cache, PROMPT, NUM_TOKENS):  # type: ignore[arg-type]
            text += event.token_ids
            memo.history.extend(event.token_ids)
        texts[tuple(text)] += 1
    return texts


def excess(texts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """Chi-square in standard deviations from what chance gives (Wilson and Hilferty 1931).

    Texts expected fewer than ten times share a cell.
    """
    num_texts = sum(texts.values())
    cells = {text: chance * num_texts for text, chance in expected.items() if chance * num_texts >= 10}
    assert len(cells) > 40
    rest = num_texts - sum(cells.values())
    rest_seen = sum(count for text, count in texts.items() if text not in cells)
    chi_square = sum((texts[text] - mean) ** 2 / mean for text, mean in cells.items())
    if rest >= 10:
        chi_square += (rest_seen - rest) ** 2 / rest
    degrees = len(cells) - (rest < 10)
    spread = 2 / (9 * degrees)
    return ((chi_square / degrees) ** (1 / 3) - 1 + spread) / math.sqrt(spread)


def sample(seed: int) -> Sampler:
    return Sampler(SamplerSettings(), seed, 0, 1.0)


def penalised(seed: int) -> Sampler:
    return Sampler(SamplerSettings(), seed, int(PENALTY["W"]), PENALTY["theta"])


def test_texts_drafted_in_full_have_their_exact_probability(target: Target):
    planner = WidePlanner([0, 1, 2, 3, 4])  # every pick was drafted, so one step writes all three tokens
    texts = written(target, planner, sample, NUM_SEEDS)
    assert abs(excess(texts, probabilities())) < 3.3


def test_penalised_texts_drafted_in_part_have_their_exact_probability(target: Target):
    planner = WidePlanner([1, 2, 4])  # some steps accept nothing, some one token, some two
    texts = written(target, planner, penalised, NUM_SEEDS)
    assert abs(excess(texts, probabilities(**PENALTY))) < 3.3
    assert excess(texts, probabilities()) > 10  # the penalty matters


def test_the_longest_match_among_independent_draws_would_be_found_out(target: Target):
    planner = WidePlanner([1, 2, 4])
    biased = BiasedSampler(planner)
    texts = written(target, planner, lambda seed: biased, NUM_SEEDS // 5)
    assert excess(texts, probabilities()) > 10
