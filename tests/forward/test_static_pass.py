"""The pass with static shapes, on the CPU without a graph: exact against AR, close to the ordinary pass."""

from __future__ import annotations

import gc
from weakref import ref

import pytest
import torch

from support import fakes
from support.drafting import RandomDrafter
from support.tiny import (
    VOCAB_SIZE,
    ar_planner,
    backend_for,
    new_cache,
    new_target,
    random_tree,
    run,
    sampler,
    shuffled,
    sized_target,
    tiny_model,
)
from swiftgen.decoding.planner import Planner
from swiftgen.forward import cache as caches
from swiftgen.forward import spans, static_pass
from swiftgen.forward.cache import BLOCK_TOKENS, FullCache
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree

SPAN = BLOCK_TOKENS
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])


@pytest.fixture(autouse=True)
def short_spans(monkeypatch: pytest.MonkeyPatch) -> None:
    """Some texts of a few hundred tokens have several spans."""
    for module in (spans, static_pass, caches):
        monkeypatch.setattr(module, "SPAN_TOKENS", SPAN)


_targets: dict[tuple[str, torch.dtype], Target] = {}


def static_target(family: str = "llama", dtype: torch.dtype = torch.float32) -> Target:
    if (family, dtype) not in _targets:
        _targets[family, dtype] = sized_target(new_target(tiny_model(family, dtype), "sdpa", static=True))
    return _targets[family, dtype]


def decoded(target: Target, num_nodes: int, num_prompt: int, num_tokens: int, tokens: list[int]):
    planner = ar_planner(target)
    if num_nodes > 1:
        planner = Planner([[RandomDrafter(tokens, num_nodes, 5)]])
    prompt = [(7 * i) % VOCAB_SIZE for i in range(num_prompt)]
    return run(target, planner, sampler(temperature=1.0), prompt, num_tokens)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("llama", torch.float32), ("llama", torch.bfloat16), ("qwen3", torch.bfloat16)],
    ids=["llama fp32", "llama bf16", "qwen3 bf16"],
)
def test_trees_of_every_size_write_what_ar_writes_to_the_last_bit(family: str, dtype: torch.dtype):
    target = static_target(family, dtype)
    expected = decoded(target, 1, 110, 40, [])
    for num_nodes in (2, 4, 8, 16, 32, 60):
        actual = decoded(target, num_nodes, 110, 40, expected.token_ids)
        assert actual.same_bits(expected), num_nodes
        assert sum(event.num_accepted for event in actual.events) > 5


@DTYPES
def test_a_tree_of_several_passes_writes_what_ar_writes(dtype: torch.dtype):
    target = static_target("llama", dtype)
    expected = decoded(target, 1, 250, 20, [])
    actual = decoded(target, 2 * target.max_rows + 9, 250, 20, expected.token_ids)
    assert actual.same_bits(expected)


@DTYPES
@pytest.mark.parametrize("num_context", [0, 1, 127, 128, 300])
def test_it_is_close_to_the_ordinary_pass(num_context: int, dtype: torch.dtype):
    static = static_target("llama", dtype)
    ordinary = new_target(tiny_model("llama", dtype), "sdpa").with_pass_sizes(static.pass_sizes)
    context = [(5 * i) % VOCAB_SIZE for i in range(num_context)]
    tree = random_tree(num_context, num_nodes=13)
    tree.tokens = [token % VOCAB_SIZE for token in tree.tokens]
    results = []
    for target in (ordinary, static):
        cache = new_cache(target, num_context)
        cache.keys.fill_(float("nan")), cache.values.fill_(float("nan"))
        target.prefill(context, cache)
        output = target.forward(tree, num_context, cache)
        keys, values = (x[:, :, num_context : num_context + 13] for x in (cache.keys, cache.values))
        results.append((output.logits(), output.hidden, output.queries, keys, values))
        assert (cache in target._static_passes_of) == (target is static)
    tolerance = 1e-4 if dtype == torch.float32 else 0.06
    for mine, others in zip(*results, strict=True):
        assert mine.shape == others.shape
        torch.testing.assert_close(mine, others, rtol=tolerance, atol=tolerance * float(others.abs().max()))


@DTYPES
def test_neither_the_order_of_drafts_nor_the_capacity_change_a_bit(dtype: torch.dtype):
    target, tree = static_target("llama", dtype), random_tree(3, num_nodes=16)
    tree.tokens = [token % VOCAB_SIZE for token in tree.tokens]
    context = [(5 * i) % VOCAB_SIZE for i in range(420)]
    expected = None
    for seed, capacity in ((0, 700), (1, 1000), (2, 560)):
        other, places = shuffled(tree, seed)
        cache = FullCache(target.cache_shape, capacity)
        target.prefill(context, cache)
        output = target.forward(other, len(context), cache)
        found = output.logits()[places]
        expected = found if expected is None else expected
        assert torch.equal(found, expected)


def test_results_belong_to_the_caller():
    target = static_target()
    cache = new_cache(target, 10)
    first = target.forward(DraftTree(3, 0), 0, cache)
    kept = [x.clone() for x in (first.hidden, first.queries, first.logits())]
    target.forward(DraftTree(4, 0), 0, cache)
    for mine, before in zip((first.hidden, first.queries, first.logits()), kept, strict=True):
        assert torch.equal(mine, before)


def test_a_run_that_failed_leaves_nothing_to_the_next(monkeypatch: pytest.MonkeyPatch):
    """As where a graph cannot be captured."""
    target = static_target()
    cache = new_cache(target, 10)
    passes = target._static_passes(cache)
    assert passes is not None
    static = passes._pass(8, 0, 0)
    static.fill(DraftTree(3, 0), 0)
    expected, compute = static.run(), static._compute

    def failing(*inputs: object) -> object:
        compute(*inputs)  # type: ignore[arg-type]
        raise RuntimeError("operation not permitted when stream is capturing")

    with monkeypatch.context() as patch:
        patch.setattr(static, "_compute", failing)
        with pytest.raises(RuntimeError, match="not permitted"):
            static.run()
    for mine, others in zip(static.run(), expected, strict=True):
        assert torch.equal(mine, others)


@DTYPES
def test_no_pass_waits_for_the_device(dtype: torch.dtype):
    target = static_target("llama", dtype)
    cache = new_cache(target, 500)
    target.prefill(list(range(90)) * 4, cache)
    passes = target._static_passes(cache)
    assert passes is not None
    tree = random_tree(3, num_nodes=8)
    tree.tokens = [token % VOCAB_SIZE for token in tree.tokens]
    static = passes._pass(8, 0, cache.length)
    static.fill(tree, cache.length)
    with torch.inference_mode(), fakes.NoWaiting():
        static.run()


def test_passes_live_as_long_as_their_cache():
    target = static_target()
    cache = new_cache(target, 10)
    target.forward(DraftTree(3, 0), 0, cache)
    assert len(target._static_passes_of) >= 1
    keys, gone = ref(cache.keys), ref(cache)
    gc.disable()
    try:
        del cache
        assert gone() is None
        assert keys() is None  # gigabytes, which must not wait for the garbage collector
    finally:
        gc.enable()


def test_a_few_shapes_serve_all_lengths():
    target = static_target()
    cache = FullCache(target.cache_shape, 8 * SPAN + 200)
    passes = target._static_passes(cache)
    assert passes is not None
    for position in range(0, 8 * SPAN + 100, 37):
        cache.length = position
        target.forward(DraftTree(1, 0), position, cache)
    assert sorted(key[2] for key in passes._passes) == [1, 2, 4, 8]


@pytest.mark.parametrize(
    ("attention", "static"),
    [("auto", False), ("auto", True), ("sdpa", False)],
    ids=["native", "asked", "sdpa"],
)
def test_a_cpu_runs_the_ordinary_pass(attention: str, static: bool):
    backend = backend_for(tiny_model(), attention, static)
    if static and backend.kernels is None:
        pytest.skip("no native kernels here")
    target = Target(tiny_model(), backend)
    assert not target.arithmetic["static_shapes"]
    cache = new_cache(target, 10)
    target.forward(DraftTree(1, 0), 0, cache)
    assert cache not in target._static_passes_of


def test_models_it_cannot_run_are_left_to_the_ordinary_pass():
    model = tiny_model("mistral")
    model.config.sliding_window = 64
    model.config.layer_types = ["sliding_attention"] * 2
    target = new_target(model, "sdpa", static=True)
    assert target.windows == (64, 64)
    assert target.arithmetic["fused_layers"]
    assert not target.arithmetic["static_shapes"]
    cache = new_cache(target, 10)
    target.forward(DraftTree(1, 0), 0, cache)
    assert cache not in target._static_passes_of


def test_the_inputs_go_up_in_one_copy():
    inputs = static_pass._Inputs(
        {"a": (torch.int64, (3,)), "b": (torch.bool, (5,)), "c": (torch.int32, (2, 2))}, torch.device("cpu")
    )
    values = torch.tensor([1, -2, 3]), torch.arange(5) % 2 == 0, torch.arange(4).view(2, 2)
    before = {name: inputs[name].data_ptr() for name in "abc"}
    inputs.fill(a=values[0], b=values[1], c=values[2])
    for name, value in zip("abc", values, strict=True):
        assert torch.equal(inputs[name], value.to(inputs[name].dtype))
        assert inputs[name].data_ptr() == before[name]
