"""Models of every family whose passes are one native call: exact, and what transformers writes."""

from __future__ import annotations

import copy
import functools

import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn
from transformers import PreTrainedModel

from support.drafting import AdversarialPlanner
from support.gguf_files import blocks
from support.tiny import FAMILIES, VARIANTS, ar_planner, new_cache, new_target, run, sampler, tiny_model
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.planner import Planner
from swiftgen.forward.exactness import NATIVE_SIZES, choose_pass_sizes
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.target import Target
from swiftgen.models.gguf_weights import attach
from swiftgen.native.build import kernels_for

KERNELS = kernels_for("auto", torch.device("cpu"), torch.float32, 64)
if KERNELS is None:
    pytest.skip("this machine cannot build the native kernels", allow_module_level=True)

NAMES = [*FAMILIES, *(name for name in VARIANTS if name not in ("qwen3_moe", "mixtral"))]
VOCAB_SIZE = 112
SIZES = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 8}  # whole blocks of weights
PROMPT = [(5 * i * i + 3) % VOCAB_SIZE for i in range(240)]  # longer than every window
NUM_TOKENS = 40  # past a block boundary
SAMPLER = {"temperature": 0.9, "min_p": 0.05, "theta": 1.2}


@functools.cache
def models_of(name: str, dtype: torch.dtype) -> tuple[PreTrainedModel, PreTrainedModel]:
    """A model whose matrices are in few bits, and transformers' own with the same numbers."""
    assert KERNELS is not None
    planned = len(PROMPT) + NUM_TOKENS
    model = tiny_model(name, dtype, vocab_size=VOCAB_SIZE, planned_tokens=planned, eos_token_id=None, **SIZES)
    packed = {}
    for place, linear in model.named_modules():
        if isinstance(linear, nn.Linear):
            rows, weights = blocks(linear.weight.float().numpy(), Kind.Q8_0)
            packed[place] = KERNELS.pack(Kind.Q8_0, torch.from_numpy(rows), linear.in_features)
            linear.weight.copy_(torch.from_numpy(weights))
    own = copy.deepcopy(model)
    for place, weight in packed.items():
        attach(model.get_submodule(place), [weight])
    return model, own


def target_of(name: str, dtype: torch.dtype = torch.float32, activations: str = "full") -> Target:
    target = new_target(copy.deepcopy(models_of(name, dtype)[0]), activations=activations)
    assert target.is_native
    return target


@pytest.mark.parametrize("name", NAMES)
def test_greedy_text_and_logits_are_those_of_transformers(name: str) -> None:
    own = models_of(name, torch.float32)[1]
    target = target_of(name)
    written = run(target, ar_planner(target), sampler(temperature=0.0), PROMPT, NUM_TOKENS)
    logits: Tensor = own(torch.tensor([[*PROMPT, *written.token_ids]])).logits[0]
    torch.testing.assert_close(written.logits, logits[len(PROMPT) - 1 : -1], rtol=1e-4, atol=1e-4)
    expected = own.generate(torch.tensor([PROMPT]), max_new_tokens=NUM_TOKENS, do_sample=False)
    assert written.token_ids == expected[0, len(PROMPT) :].tolist()
    last_block = target.prefill(PROMPT, new_cache(target, len(PROMPT)))
    assert last_block is not None
    num_rows = len(last_block.hidden)
    actual = target.logits(last_block.hidden)
    torch.testing.assert_close(actual, logits[len(PROMPT) - num_rows : len(PROMPT)], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(
    ("activations", "dtype"), [("full", torch.float32), ("full", torch.bfloat16), ("int8", torch.bfloat16)]
)
@pytest.mark.parametrize("name", NAMES)
def test_drafts_change_nothing(name: str, dtype: torch.dtype, activations: str) -> None:
    target = target_of(name, dtype, activations)
    exactness = choose_pass_sizes(target)
    assert exactness.lossless
    assert exactness.pass_sizes == NATIVE_SIZES
    target = target.with_pass_sizes(exactness.pass_sizes)
    expected = run(target, ar_planner(target), sampler(**SAMPLER), PROMPT, NUM_TOKENS)
    assert len(set(expected.token_ids)) > 5
    sample = sampler(**SAMPLER)
    partial = PartialCache(target.cache_shape, budget=48, num_sinks=4)
    drafting = SelfDrafter(target, sample, partial, None, [4, 3, 3, 3])
    for planner, enough in (
        (AdversarialPlanner(target, expected.token_ids, len(PROMPT)), NUM_TOKENS / 4),
        (Planner([[drafting]]), 3),
    ):
        actual = run(target, planner, sample, PROMPT, NUM_TOKENS)
        assert actual.same_bits(expected)
        assert sum(len(event.sources) for event in actual.events) >= enough
