"""What only a GPU can show: `pytest -m gpu`. docs/gpu.md says what to expect."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, LlamaConfig

from support.drafting import RandomDrafter
from support.tiny import ar_planner, new_target, run, sampler, sized_target
from swiftgen.decoding.decode import StepEvent, decode
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.plans import max_tree_rows, run_memory
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward import spans
from swiftgen.forward.cache import CacheShape, FullCache
from swiftgen.forward.exactness import choose_pass_sizes
from swiftgen.forward.spans import SPAN_TOKENS, SpanPrefix, plain_spans, span_lengths
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree
from swiftgen.settings.presets import load_preset
from swiftgen.system.devices import capability, free_bytes, memory_errors
from swiftgen.system.errors import SwiftgenError

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no CUDA device"),
]
CUDA = torch.device("cuda", 0)
VOCAB_SIZE, MAX_POSITIONS = 1000, 150_000
HALF_TYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
TYPES = pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.float16, torch.float32], ids=["bf16", "fp16", "fp32"]
)


def model(dtype: torch.dtype, **settings: Any) -> Any:
    """Random weights, heads as wide as those of real models."""
    config = LlamaConfig(
        **{
            "vocab_size": VOCAB_SIZE,
            "hidden_size": 512,
            "intermediate_size": 1024,
            "num_hidden_layers": 4,
            "num_attention_heads": 8,
            "num_key_value_heads": 2,
            "head_dim": 64,
            "max_position_embeddings": MAX_POSITIONS,
            "initializer_range": 0.1,
            **settings,
        }
    )
    torch.manual_seed(7)
    with torch.device(CUDA):
        return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


_targets: dict[torch.dtype, Target] = {}


def gpu_target(dtype: torch.dtype) -> Target:
    if dtype not in _targets:
        _targets[dtype] = sized_target(new_target(model(dtype)))
    return _targets[dtype]


def prompt(num_tokens: int) -> list[int]:
    return [(7 * i) % VOCAB_SIZE for i in range(num_tokens)]


@TYPES
def test_trees_write_what_ar_writes_to_the_last_bit(dtype: torch.dtype):
    """Across the border of a span, where another graph begins."""
    target = gpu_target(dtype)
    context, num_tokens = prompt(SPAN_TOKENS - 60), 160
    expected = run(target, ar_planner(target), sampler(temperature=1.0), context, num_tokens)
    for num_nodes in (7, 16, 30, 60, 100):
        planner = Planner([[RandomDrafter(expected.token_ids, num_nodes, 5)]])
        actual = run(target, planner, sampler(temperature=1.0), context, num_tokens)
        assert actual.same_bits(expected), num_nodes
        assert sum(event.num_accepted for event in actual.events) > 30


@TYPES
def test_a_graph_computes_what_the_pass_computes_without(dtype: torch.dtype):
    target = gpu_target(dtype)
    results = []
    for with_graph in (True, False):
        cache = FullCache(target.cache_shape, 2 * SPAN_TOKENS)
        target.prefill(prompt(SPAN_TOKENS + 300), cache)
        passes = target._static_passes(cache)
        assert passes is not None
        assert passes._graphs is not None
        passes._graphs._usable = with_graph
        output = target.forward(DraftTree(3, 0), cache.length, cache)
        captured = [static._graph is not None for static in passes._passes.values()]
        assert captured == [with_graph]
        results.append((output.logits(), output.hidden, output.queries))
    for mine, others in zip(*results, strict=True):
        assert torch.equal(mine, others)


def kernels() -> Iterator[tuple[str, SpanPrefix]]:
    """Those that can be used here."""
    if capability(CUDA) >= (8, 0):
        if spans._torch_has_varlen():
            yield "torch", SpanPrefix(spans.torch_spans, "torch")
        for name, module, is_flash_2 in (("2", "flash_attn", True), ("3", "flash_attn_interface", False)):
            try:
                attend = spans._flash_function(module, name)
            except ImportError:
                continue
            if is_flash_2 or capability(CUDA)[0] == 9:
                yield f"flash-attn {name}", SpanPrefix(spans.flash_spans(attend, is_flash_2), name)


KERNELS = dict(kernels()) if torch.cuda.is_available() else {}


def prefix(num_keys: int, num_rows: int, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    shape = CacheShape(1, 8, 128, dtype, CUDA)
    generator = torch.Generator(CUDA).manual_seed(num_keys)
    keys, values = (shape.empty(num_keys + 100, SPAN_TOKENS)[0] for _ in range(2))
    for tensor in (keys, values):
        tensor.copy_(torch.randn(tensor.shape, generator=generator, device=CUDA))
    return torch.randn(8, num_rows, 128, generator=generator, device=CUDA).to(dtype), keys, values


@HALF_TYPES
@pytest.mark.parametrize("num_keys", [128, SPAN_TOKENS, SPAN_TOKENS + 128, 30_080])
@pytest.mark.parametrize("name", KERNELS or ["none"])
def test_flash_kernels_against_matrix_products(name: str, num_keys: int, dtype: torch.dtype):
    if name not in KERNELS:
        pytest.skip("no flash kernel can be used here")
    q, k, v = prefix(num_keys, 64, dtype)
    lengths = span_lengths(num_keys, 8).int().to(CUDA)
    expected, expected_lse = SpanPrefix(plain_spans, "").over(q, k, v, lengths, 0.09)
    out, lse = KERNELS[name].over(q, k, v, lengths, 0.09)
    torch.testing.assert_close(out.float(), expected, rtol=2e-2, atol=2e-2 * float(expected.abs().max()))
    torch.testing.assert_close(lse, expected_lse, rtol=1e-4, atol=1e-3)


@HALF_TYPES
@pytest.mark.parametrize("name", KERNELS or ["none"])
def test_a_row_of_a_flash_kernel_depends_on_nothing_else(name: str, dtype: torch.dtype):
    """Not on how many rows there are, nor on where it stands, nor on empty spans; at 100,000 keys."""
    if name not in KERNELS:
        pytest.skip("no flash kernel can be used here")
    q, k, v = prefix(100_096, 4 * 64, dtype)
    expected, expected_lse = KERNELS[name].over(q, k, v, span_lengths(100_096, 32).int().to(CUDA), 0.09)
    lengths = span_lengths(100_096, 25).int().to(CUDA)
    for rows in (range(8), range(64), range(200, 256), [255, 3, 77, 128, 5, 6, 7, 8]):
        out, lse = KERNELS[name].over(q[:, list(rows)].contiguous(), k, v, lengths, 0.09)
        assert torch.equal(out, expected[:25, list(rows)])
        assert torch.equal(lse, expected_lse[:25, :, list(rows)])


def events_of(target: Target, cache: FullCache, sample: Sampler, num_tokens: int) -> Iterator[StepEvent]:
    return decode(target, ar_planner(target), sample, cache, prompt(300), num_tokens)


@pytest.mark.parametrize("settings", [{"min_p": 0.1}, {"top_p": 0.9}, {"temperature": 0.0}])
def test_a_step_waits_once_for_the_device(settings: dict[str, float]):
    target = gpu_target(torch.bfloat16)
    cache = FullCache(target.cache_shape, 2000)
    events = events_of(target, cache, sampler(W=50, theta=1.2, **settings), 40)
    for _ in range(5):
        next(events)
    torch.cuda.set_sync_debug_mode("warn")
    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            for _ in range(20):
                next(events)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    waits = [str(warning.message) for warning in caught if "synchronizing" in str(warning.message)]
    assert len(waits) == 20, waits[:3]


def test_the_estimate_of_the_memory_is_right_within_5_percent():
    """A model of 3.8 GB and a text of 60,000 tokens, measured by what the device has left."""
    settings = {
        "vocab_size": 128_256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 4,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "initializer_range": 0.02,
    }
    _targets.clear()
    torch.cuda.empty_cache()
    preset = load_preset(None, {"draft": "none"})
    num_tokens, before = 60_000, free_bytes(CUDA)
    large = model(torch.bfloat16, **settings)
    num_bytes = sum(parameter.numel() for parameter in large.parameters()) * 2
    estimate = run_memory(preset, large.config, num_bytes, num_tokens, torch.bfloat16, CUDA)
    target = new_target(large)
    target = target.with_pass_sizes(choose_pass_sizes(target).pass_sizes)
    torch.cuda.empty_cache()
    cache = FullCache(target.cache_shape, num_tokens + max_tree_rows(preset))
    cache.keys.zero_(), cache.values.zero_()
    cache.length = num_tokens - 1000
    for _ in range(3):
        target.forward(DraftTree(1, 0), cache.length, cache)
    cache.length = 0
    list(events_of(target, cache, sampler(min_p=0.1), 20))
    used = before - int(torch.cuda.mem_get_info(CUDA)[0])
    assert used == pytest.approx(estimate.total_bytes, rel=0.05)


def test_a_card_that_is_full_is_one_line():
    total = int(torch.cuda.mem_get_info(CUDA)[1])
    failing = pytest.raises(SwiftgenError, match="ran out while writing")
    with failing as caught, memory_errors(CUDA, "writing", "Use less."):
        torch.empty(2 * total, dtype=torch.uint8, device=CUDA)
    assert "\n" not in caught.value.message
    assert torch.ones(3, device=CUDA).sum().item() == 3  # and the card can still be used
