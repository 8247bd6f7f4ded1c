"""Speculative text equals AR text to the last bit: every family, sampler and drafter."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from support.drafting import PROMPT, AdversarialPlanner, drafters, heads_for
from support.tiny import (
    FAMILIES,
    VOCAB_SIZE,
    ar_planner,
    new_cache,
    new_target,
    ready_heads,
    run,
    sampler,
    tiny_model,
    tiny_target,
)
from swiftgen.decoding.drafters.heads import HeadsDrafter
from swiftgen.decoding.drafters.lookup import LookupDrafter
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.estimates import Estimates
from swiftgen.decoding.planner import Planner
from swiftgen.forward.cache import BLOCK_TOKENS
from swiftgen.forward.exactness import choose_pass_sizes, known_exactness
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.tree import DraftTree

SAMPLERS = {
    "greedy": {"temperature": 0.0},
    "top_p": {"temperature": 0.7, "top_p": 0.8},
    "min_p": {"temperature": 1.2, "min_p": 0.1},
    "eta": {"temperature": 1.0, "eta": 0.02},
    "penalty": {"temperature": 0.6, "theta": 1.5, "W": 9},
}
HEADS = [
    f"{kind} heads {place}{tokens}"
    for kind in ("linear", "recurrent")
    for place in ("from the verify state", "after a draft pass")
    for tokens in ("", ", some tokens")
]
DRAFTERS = ("base", "several passes", *HEADS, "ngram", "all", "adversarial")
# Heads see nothing of a family but its hidden states, so beyond the first one a few kinds are enough.
FEWER_DRAFTERS = (
    "base",
    "recurrent heads from the verify state",
    "linear heads after a draft pass",
    "ngram",
    "all",
    "adversarial",
)
NUM_TOKENS = BLOCK_TOKENS + 40  # past two block boundaries
FEWER_TOKENS = 60  # past one


MATRIX = [("auto", family, sampler_name) for family in FAMILIES for sampler_name in SAMPLERS]
# PyTorch's operators, where `auto` means the native kernels: two samplers of a family are enough.
MATRIX += [
    ("sdpa", family, list(SAMPLERS)[(2 * number + offset) % len(SAMPLERS)])
    for number, family in enumerate(FAMILIES)
    for offset in range(2)
]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
@pytest.mark.parametrize(("attention", "family", "sampler_name"), MATRIX)
def test_drafts_change_nothing(attention: str, family: str, sampler_name: str, dtype: torch.dtype) -> None:
    target = tiny_target(family, dtype, attention)
    settings = SAMPLERS[sampler_name]
    is_first = family == FAMILIES[0] and attention == "auto"
    num_tokens = NUM_TOKENS if is_first else FEWER_TOKENS
    expected = run(target, ar_planner(target), sampler(**settings), PROMPT, num_tokens)
    assert len(set(expected.token_ids)) > 1
    by_heads = 0
    for kind in DRAFTERS if is_first else FEWER_DRAFTERS:
        sample = sampler(**settings)
        if kind == "adversarial":
            planner: Planner = AdversarialPlanner(target, expected.token_ids)
        else:
            way = drafters(target, family, kind, sample, [*PROMPT, *expected.token_ids])
            planner = Planner([way])
        actual = run(target, planner, sample, PROMPT, num_tokens)
        assert actual.same_bits(expected), kind
        sources = [source for event in actual.events for source in event.sources]
        by_heads += sources.count("heads")
        if is_first or kind == "adversarial":
            enough = num_tokens / 4 if kind == "adversarial" else 0
            assert len(sources) > enough, f"acceptance is to be tested too: {kind}"
    assert by_heads > 5 or not is_first


@pytest.mark.parametrize(
    ("attention", "sampler_name"), [*(("auto", name) for name in SAMPLERS), ("sdpa", "penalty")]
)
def test_measured_plan_changes_nothing(attention: str, sampler_name: str) -> None:
    target = tiny_target(attention=attention)
    settings = SAMPLERS[sampler_name]
    expected = run(target, ar_planner(target), sampler(**settings), PROMPT, NUM_TOKENS)
    sample = sampler(**settings)
    partial = PartialCache(target.cache_shape, budget=48, num_sinks=4, by_importance=False)
    ngrams = LookupDrafter()
    recurrent = heads_for("recurrent, some tokens", "llama", target.dtype)
    ways = [
        [HeadsDrafter(target, sample, recurrent, [4, 4, 4], beam=4), ngrams],
        [SelfDrafter(target, sample, partial, ready_heads("linear"), [2, 2, 2, 2]), ngrams],
        [ngrams],
        [],
    ]
    measured = Planner(ways, Estimates(target.pass_sizes))
    assert run(target, measured, sample, PROMPT, NUM_TOKENS).same_bits(expected)


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_tree_larger_than_the_largest_pass_takes_several(attention: str) -> None:
    target = tiny_target(attention=attention)
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
    target = new_target(tiny_model())
    honest = target.normed
    target.normed = lambda hidden: honest(hidden) + hidden.mean()  # type: ignore[method-assign]
    unembed = target.unembed
    target.unembed = lambda hidden, num_rows=None: unembed(hidden, num_rows) + num_rows  # type: ignore[method-assign]
    found = choose_pass_sizes(target)
    assert len(found.pass_sizes) == 1  # each size agrees with itself only


def test_the_check_is_made_once_and_times_every_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("SWIFTGEN_CACHE", str(tmp_path))
    target = new_target(tiny_model())
    found = known_exactness(target, "weights-1")
    assert len(found.pass_seconds) == len(found.pass_sizes)
    assert all(0 < seconds < 10 for seconds in found.pass_seconds)
    (file,) = (tmp_path / "exactness").iterdir()
    monkeypatch.setattr(target, "forward", lambda *_: pytest.fail("measured again"))
    assert known_exactness(target, "weights-1") == found
    monkeypatch.undo()
    monkeypatch.setenv("SWIFTGEN_CACHE", str(tmp_path))
    file.write_text('{"pass_sizes": [2], "lossless": true}')  # of a version that took no times
    assert known_exactness(target, "weights-1").pass_sizes == found.pass_sizes


def test_check_reports_when_no_size_is_exact() -> None:
    target = new_target(tiny_model())
    forward = target.forward

    def noisy(*args, **kwargs):  # type: ignore[no-untyped-def]
        output = forward(*args, **kwargs)
        return replace(output, hidden=output.hidden + torch.randn_like(output.hidden))

    target.forward = noisy  # type: ignore[method-assign]
    found = choose_pass_sizes(target)
    assert not found.lossless
    assert "up to rounding" in str(found)


def test_check_finds_an_lm_head_whose_rows_depend_on_their_neighbours() -> None:
    target = new_target(tiny_model())
    honest = target._lm_head
    target._lm_head = lambda rows: honest(rows) + rows.mean()  # type: ignore[assignment]
    assert not choose_pass_sizes(target).lossless


def test_check_works_on_the_smallest_vocabulary() -> None:
    assert choose_pass_sizes(new_target(tiny_model(vocab_size=5))).lossless
