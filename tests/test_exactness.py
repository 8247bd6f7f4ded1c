"""Speculative text equals AR text to the last bit: every family, sampler and drafter."""

from __future__ import annotations

import random

import pytest
import torch

from swiftgen.cache import BLOCK_TOKENS, PartialCache
from swiftgen.drafters.ngram import NgramDrafter
from swiftgen.drafters.self_draft import SelfDrafter
from swiftgen.exactness import choose_pass_sizes
from swiftgen.planner import Planner
from swiftgen.sampling import Sampler
from swiftgen.target import Target
from swiftgen.tree import DraftTree
from tiny import (
    FAMILIES,
    VOCAB_SIZE,
    ar_planner,
    new_cache,
    random_heads,
    run,
    sampler,
    tiny_model,
    tiny_target,
)

SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "eta": {"temperature": 1.0, "eta": 0.02},
    "penalty": {"temperature": 0.6, "theta": 1.5, "W": 9},
}
DRAFTERS = ("base", "heads", "ngram", "all", "adversarial")
PROMPT = [5, 17, 3, 5, 17, 8, 60] * 16
NUM_TOKENS = BLOCK_TOKENS + 40  # past two block boundaries


class AdversarialPlanner(Planner):
    """Proposes wrong, repeated and unsorted trees in which the right tokens are hidden."""

    def __init__(self, target: Target, text: list[int]) -> None:
        super().__init__(None, None, target.pass_sizes, measured=False)
        self._text = text
        self._random = random.Random(0)

    def draft(self, tree, history):  # type: ignore[no-untyped-def]
        right = self._text[len(history) - len(PROMPT) :][: self._random.randrange(6)]
        node = 0
        for _ in range(self._random.randrange(1, 20)):
            if right and self._random.random() < 0.5:
                node = tree.add(node, right.pop(0), "base") or node
            place = self._random.randrange(len(tree))
            tree.add(place, self._random.randrange(VOCAB_SIZE), "ngram")
            tree.add(place, tree.tokens[-1], "ngram")
        return tree


def planner(target: Target, kind: str, sample: Sampler, text: list[int]) -> Planner:
    if kind == "adversarial":
        return AdversarialPlanner(target, text)
    self_drafter = ngram_drafter = None
    if kind != "ngram":
        heads = random_heads().to(target.dtype) if kind != "base" else None
        partial = PartialCache(target.cache_shape, budget=48, num_sinks=4)
        self_drafter = SelfDrafter(target, sample, partial, heads, [1, 3, 3, 3])
    if kind in ("ngram", "all"):
        ngram_drafter = NgramDrafter(4, 20, seed=0, below_root=True)
    return Planner(self_drafter, ngram_drafter, target.pass_sizes, measured=False)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize("sampler_name", SAMPLERS)
@pytest.mark.parametrize("family", FAMILIES)
def test_drafts_change_nothing(family: str, sampler_name: str, dtype: torch.dtype) -> None:
    target = tiny_target(family, dtype)
    settings = SAMPLERS[sampler_name]
    expected = run(target, ar_planner(target), sampler(**settings), PROMPT, NUM_TOKENS)
    assert len(set(expected.token_ids)) > 1
    for kind in DRAFTERS:
        sample = sampler(**settings)
        actual = run(target, planner(target, kind, sample, expected.token_ids), sample, PROMPT, NUM_TOKENS)
        assert actual.same_bits(expected), kind
        num_accepted = sum(event.num_accepted for event in actual.events)
        assert num_accepted > (NUM_TOKENS / 4 if kind == "adversarial" else 0), (
            "acceptance is to be tested too"
        )


def test_measured_plan_changes_nothing() -> None:
    target = tiny_target()
    settings = SAMPLERS["min_p"]
    expected = run(target, ar_planner(target), sampler(**settings), PROMPT, NUM_TOKENS)
    sample = sampler(**settings)
    partial = PartialCache(target.cache_shape, budget=48, num_sinks=4, by_importance=False)
    measured = Planner(
        SelfDrafter(target, sample, partial, random_heads(), [2, 2, 2, 2]),
        NgramDrafter(4, 20, seed=0, below_root=True),
        target.pass_sizes,
        measured=True,
    )
    assert run(target, measured, sample, PROMPT, NUM_TOKENS).same_bits(expected)


def test_a_tree_larger_than_the_largest_pass_takes_several() -> None:
    target = tiny_target()
    tree = DraftTree(5, max_depth=4)
    rng = random.Random(1)
    while len(tree) < 3 * target.max_rows:
        tree.add(rng.randrange(len(tree)), rng.randrange(VOCAB_SIZE), "base")
    cache = new_cache(target, 40)
    target.prefill(PROMPT, cache)
    hidden = target.forward(tree, len(PROMPT), cache).hidden
    for node in (1, target.max_rows, len(tree) - 1):
        alone = new_cache(target, 40)
        target.prefill(PROMPT, alone)
        for depth, ancestor in enumerate(tree.path(node)):
            row = target.forward(DraftTree(tree.tokens[ancestor], 0), len(PROMPT) + depth, alone).hidden
            alone.commit([0])
        assert torch.equal(hidden[node], row[0])


def test_check_finds_a_target_whose_rows_depend_on_each_other() -> None:
    target = Target(tiny_model())
    honest = target.normed
    target.normed = lambda hidden: honest(hidden) + hidden.mean()  # type: ignore[method-assign]
    unembed = target.unembed
    target.unembed = lambda hidden, num_rows=None: unembed(hidden, num_rows) + num_rows  # type: ignore[method-assign]
    found = choose_pass_sizes(target)
    assert len(found.pass_sizes) == 1  # each size agrees with itself only


def test_check_reports_when_no_size_is_exact() -> None:
    target = Target(tiny_model())
    forward = target.forward

    def noisy(*args, **kwargs):  # type: ignore[no-untyped-def]
        output = forward(*args, **kwargs)
        return type(output)(output.hidden + torch.randn_like(output.hidden), output.queries)

    target.forward = noisy  # type: ignore[method-assign]
    found = choose_pass_sizes(target)
    assert not found.lossless
    assert "up to rounding" in str(found)


def test_check_finds_an_lm_head_whose_rows_depend_on_their_neighbours() -> None:
    target = Target(tiny_model())
    honest = target._lm_head
    target._lm_head = lambda rows: honest(rows) + rows.mean()  # type: ignore[assignment]
    assert not choose_pass_sizes(target).lossless


def test_check_works_on_the_smallest_vocabulary() -> None:
    assert choose_pass_sizes(Target(tiny_model(vocab_size=5))).lossless
