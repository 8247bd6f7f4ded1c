"""Every family, in the variants that are not a plain Llama: exact, and what transformers computes."""

from __future__ import annotations

import copy
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PretrainedConfig, PreTrainedModel

from support.drafting import AdversarialPlanner, drafters
from support.tiny import (
    VARIANTS,
    VOCAB_SIZE,
    ar_planner,
    backend_for,
    new_cache,
    new_target,
    run,
    sampler,
    tiny_model,
    tiny_target,
)
from swiftgen.decoding.decode import decode
from swiftgen.decoding.drafters.self_draft import SelfDrafter
from swiftgen.decoding.planner import Planner
from swiftgen.forward.arithmetic import arithmetic_of
from swiftgen.forward.cache import BLOCK_TOKENS
from swiftgen.forward.conformance import checked_target
from swiftgen.forward.experts import all_rows_experts, batched_experts
from swiftgen.forward.partial_cache import PartialCache
from swiftgen.forward.tree import DraftTree
from swiftgen.models.architectures import check_supported, layer_windows
from swiftgen.models.positions import planned_config, usable_positions
from swiftgen.system.errors import SwiftgenError

PROMPT = [(5 * i * i + 3) % VOCAB_SIZE for i in range(240)]  # longer than every window
NUM_TOKENS = 40  # past a block boundary
LENGTH = len(PROMPT) + NUM_TOKENS
SAMPLER = {"temperature": 0.9, "min_p": 0.05, "theta": 1.2}
IN_BF16 = ("mistral, window 100", "gemma2", "gemma3", "phi4", "granite", "qwen3_moe")
MATRIX = [("auto", name, torch.float32) for name in VARIANTS]
MATRIX += [("auto", name, torch.bfloat16) for name in IN_BF16]
MATRIX += [("sdpa", name, torch.float32) for name in IN_BF16]  # PyTorch's operators


@pytest.mark.parametrize(("attention", "name", "dtype"), MATRIX)
def test_drafts_change_nothing(attention: str, name: str, dtype: torch.dtype) -> None:
    target = tiny_target(name, dtype, attention, planned_tokens=LENGTH)
    expected = run(target, ar_planner(target), sampler(**SAMPLER), PROMPT, NUM_TOKENS)
    assert len(set(expected.token_ids)) > 5
    for kind, enough in (("base", 3), ("ngram", NUM_TOKENS / 2), ("adversarial", NUM_TOKENS / 4)):
        sample = sampler(**SAMPLER)
        planner: Planner = AdversarialPlanner(target, expected.token_ids, len(PROMPT))
        if kind != "adversarial":
            way = drafters(target, name, kind, sample, [*PROMPT, *expected.token_ids])
            planner = Planner([way])
        actual = run(target, planner, sample, PROMPT, NUM_TOKENS)
        assert actual.same_bits(expected), kind
        assert sum(len(event.sources) for event in actual.events) >= enough, kind


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
@pytest.mark.parametrize("name", VARIANTS)
def test_logits_are_those_of_transformers(name: str, attention: str) -> None:
    model = tiny_model(name, planned_tokens=LENGTH)
    expected = own_logits(model, PROMPT)
    target = new_target(model, attention)
    cache = new_cache(target, len(PROMPT))
    last_block = target.prefill(PROMPT[:-1], cache)
    assert last_block is not None
    num_rows = len(last_block.hidden)
    assert_close(target.logits(last_block.hidden), expected[-1 - num_rows : -1])
    root = target.forward(DraftTree(PROMPT[-1], 0), len(PROMPT) - 1, cache, num_rows=8)
    assert_close(target.logits(root.hidden, num_rows=8), expected[-1:])


def own_logits(model: PreTrainedModel, token_ids: list[int]) -> Tensor:
    """Of the unmodified model: `[tokens, vocab]`."""
    logits: Tensor = copy.deepcopy(model)(torch.tensor([token_ids])).logits[0]
    return logits


def assert_close(actual: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


class TestWindows:
    @pytest.mark.parametrize(
        ("name", "windows"),
        [
            ("linear", (None, None)),
            ("mistral, window 100", (100, 100)),
            ("qwen2, window 200", (None, 200)),
            ("gemma3", (70, None)),
            ("phi3", (130, 130)),
        ],
    )
    def test_of_layers(self, name: str, windows: tuple[int | None, ...]):
        assert layer_windows(tiny_model(name).config) == windows

    def test_a_family_that_slides_throughout_does_not_look_at_layer_types(self):
        config = tiny_model("mistral, window 100").config
        config.layer_types = ["full_attention", "sliding_attention"]
        assert layer_windows(config) == (100, 100)

    def test_a_layer_reads_nothing_before_its_window(self):
        target = tiny_target("mistral, window 100")
        cache = new_cache(target, 400)
        target.prefill([*PROMPT, *PROMPT[:100]], cache)
        before, last = cache.length - 100, DraftTree(7, 0)
        expected = target.forward(last, cache.length, cache).hidden
        for tensor in cache.stores[100].between(0, before - 127):
            tensor.fill_(float("nan"))
        assert torch.equal(target.forward(last, cache.length, cache).hidden, expected)

    @pytest.mark.parametrize("attention", ["auto", "sdpa"])
    @pytest.mark.parametrize("name", ["gemma3", "mistral, window 100", "mistral, window 3"])
    def test_keys_behind_the_window_are_dropped(
        self, name: str, attention: str, monkeypatch: pytest.MonkeyPatch
    ):
        target, num_tokens = tiny_target(name, attention=attention), 200
        greedy = {"temperature": 0.0}
        expected = run(target, ar_planner(target), sampler(**greedy), PROMPT, num_tokens)
        monkeypatch.setattr("swiftgen.forward.cache._SLACK_TOKENS", 0)
        adversarial = AdversarialPlanner(target, expected.token_ids, len(PROMPT))
        for planner in (ar_planner(target), adversarial):
            actual = run(target, planner, sampler(**greedy), PROMPT, num_tokens)
            assert actual.same_bits(expected)
        cache = new_cache(target, len(PROMPT) + num_tokens)
        target.prefill([*PROMPT, *expected.token_ids], cache)
        window = target.windows[0]
        assert window is not None
        store = cache.stores[window]
        assert store.begin >= cache.length - window - 2 * BLOCK_TOKENS > 0
        assert store.keys.shape[2] <= window + 4 * BLOCK_TOKENS

    def test_drafts_read_the_window_from_the_full_cache(self):
        target = tiny_target("gemma3", planned_tokens=LENGTH)
        partial = PartialCache(target.cache_shape, budget=48, num_sinks=4)
        sample = sampler(**SAMPLER)
        planner = Planner([[SelfDrafter(target, sample, partial, None, [1])]])
        cache = new_cache(target, LENGTH)
        list(decode(target, planner, sample, cache, PROMPT, NUM_TOKENS))
        view = partial.view(2, 0, window=70)
        store, length = cache.stores[70], cache.length
        assert torch.equal(view.prefix_keys, store.between(length - 48, length)[0])
        assert partial.view(2, 0).prefix_keys.shape[2] == 48

    @pytest.mark.parametrize(
        ("name", "attention", "fused"),
        [
            *((name, "auto", True) for name in ("qwen2, window 200", "gemma2", "phi4")),
            *[("mixtral", "auto", False), ("qwen2, window 200", "sdpa", True), ("gemma2", "sdpa", False)],
        ],
    )
    def test_the_arithmetic_is_known_before(self, name: str, attention: str, fused: bool):
        model = tiny_model(name)
        expected = new_target(tiny_model(name), attention).arithmetic
        assert expected["fused_layers"] == fused
        backend = backend_for(model, attention)
        is_native = fused and backend.kernels is not None
        assert str(expected["attention"]).startswith("native" if is_native else "cpu_prefix")
        assert arithmetic_of(model.config, torch.float32, torch.device("cpu"), backend) == expected


class TestPositions:
    @pytest.mark.parametrize(("planned", "reach"), [(100, 128), (128, 128), (129, 1024), (500, 1024)])
    def test_longrope_is_fixed_on_one_side_of_its_limit(self, planned: int, reach: int):
        """What transformers computes for a text of the planned length, at every length."""
        config = planned_config(tiny_model("phi4").config, planned, stretch=False)
        assert config.max_position_embeddings == reach
        text = PROMPT[:planned]
        expected = own_logits(tiny_model("phi4"), text)
        fixed = tiny_model("phi4", planned_tokens=planned)
        assert_close(fixed(torch.tensor([text])).logits[0], expected)
        assert_close(fixed(torch.tensor([text[:90]])).logits[0], expected[:90])

    @pytest.mark.parametrize(("planned", "reach"), [(100, 128), (200, 256), (256, 256), (257, 384)])
    def test_dynamic_is_fixed_at_a_whole_multiple(self, planned: int, reach: int):
        config = planned_config(tiny_model("dynamic").config, planned, stretch=False)
        assert config.max_position_embeddings == reach
        text = [*PROMPT, *PROMPT][:reach]
        expected = own_logits(tiny_model("dynamic"), text)
        fixed = tiny_model("dynamic", planned_tokens=planned)
        assert_close(fixed(torch.tensor([text])).logits[0], expected)
        assert_close(fixed(torch.tensor([text[:90]])).logits[0], expected[:90])

    def test_usable(self):
        assert usable_positions(tiny_model("dynamic").config) == 1024
        assert usable_positions(tiny_model("phi4").config) == 1024

    @pytest.mark.parametrize(("name", "words"), [("phi4", "longrope"), ("gemma3", "layerwise")])
    def test_stretched_by_yarn_only_from_plain_ones(self, name: str, words: str):
        with pytest.raises(SwiftgenError, match=f"model's own {words} positions"):
            planned_config(tiny_model(name).config, 3000, stretch=True)

    def test_others_stay(self):
        config = tiny_model("llama3").config
        assert planned_config(config, 5000, stretch=False) is config


class TestExperts:
    @pytest.mark.parametrize("name", ["qwen3_moe", "mixtral"])
    @pytest.mark.parametrize("compute", [all_rows_experts, batched_experts])
    def test_a_row_does_not_depend_on_the_others(self, name: str, compute):  # type: ignore[no-untyped-def]
        experts = tiny_model(name).base_model.layers[1].mlp.experts
        generator = torch.Generator().manual_seed(0)
        hidden = torch.randn(64, 48, generator=generator)
        chosen = torch.rand(64, experts.num_experts, generator=generator).topk(2).indices
        weights = torch.rand(64, 2, generator=generator)
        experts.config._experts_implementation = "eager"
        torch.testing.assert_close(
            compute(experts, hidden, chosen, weights), experts(hidden, chosen, weights)
        )
        for size in (4, 8, 32, 64):
            rows = torch.arange(size)
            first = compute(experts, hidden[rows], chosen[rows], weights[rows])[0]
            others = torch.cat([rows[-1:], 63 - rows[: size - 1]])
            others[-1] = 0
            moved = compute(experts, hidden[others], chosen[others], weights[others])[-1]
            assert torch.equal(first, moved)


class TestRefused:
    @pytest.mark.parametrize(
        ("config", "words"),
        [
            (SimpleNamespace(model_type="gpt7"), "'gpt7' is not supported"),
            (SimpleNamespace(model_type="gemma3"), "'gemma3' is not supported"),  # with pictures
            (SimpleNamespace(model_type="bert"), "'bert' is not supported"),
            (AutoConfig.for_model("rwkv"), "rwkv models keep a state"),
            (AutoConfig.for_model("mamba"), "layers of the type 'linear_attention'"),
            (AutoConfig.for_model("qwen3_next"), "layers of the type 'linear_attention'"),
            (
                AutoConfig.for_model("lfm2", full_attn_idxs=[1]),
                "layers of the type 'conv'",
            ),
            (AutoConfig.for_model("gpt_neox"), "its config has no num_key_value_heads"),
            (
                AutoConfig.for_model("gemma3_text", use_bidirectional_attention=True),
                "attends to later tokens",
            ),
        ],
    )
    def test_before_loading(self, config: PretrainedConfig, words: str):
        with pytest.raises(SwiftgenError, match=words) as caught:
            check_supported(config)
        assert "\n" not in caught.value.message


def unknown_model(family: str, **settings: object) -> PreTrainedModel:
    sizes = {"vocab_size": VOCAB_SIZE, "hidden_size": 48, "intermediate_size": 64, "num_hidden_layers": 2}
    heads = {"num_attention_heads": 6, "num_key_value_heads": 2, "max_position_embeddings": 1024}
    ids = {"pad_token_id": None, "bos_token_id": None, "eos_token_id": None}
    config = AutoConfig.for_model(family, **sizes, **heads, **ids, initializer_range=0.2, **settings)
    check_supported(config)
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval().requires_grad_(False)


class TestTried:
    def test_one_that_computes_what_transformers_does(self):
        model = unknown_model("starcoder2", sliding_window=200)
        expected = own_logits(model, [*PROMPT, *PROMPT])
        target = checked_target(model, backend_for(model))
        assert target.windows == (200, 200)
        output = target.prefill([*PROMPT, *PROMPT], new_cache(target, 480))
        assert output is not None
        assert_close(target.logits(output.hidden), expected[-len(output.hidden) :])

    def test_one_whose_logits_are_scaled(self):
        model = unknown_model("cohere", logit_scale=0.3)
        checked_target(model, backend_for(model))

    def test_one_that_computes_something_else(self):
        model = unknown_model("starcoder2", sliding_window=None)
        forward = model.forward

        def scaled(*args: object, **options: object) -> object:
            output = forward(*args, **options)
            output.logits = 1.1 * output.logits
            return output

        model.forward = scaled
        with pytest.raises(SwiftgenError, match=r"'starcoder2' is not supported: its logits are .*% from"):
            checked_target(model, backend_for(model))

    def test_one_with_attention_sinks(self):
        model = unknown_model("gpt_oss", head_dim=8, num_local_experts=4)
        with pytest.raises(SwiftgenError, match="attention sinks"):
            checked_target(model, backend_for(model))

    def test_one_that_is_built_otherwise(self):
        model = unknown_model("olmo3", sliding_window=200)
        del model.base_model.norm
        model.base_model.last_norm = torch.nn.Identity()
        with pytest.raises(SwiftgenError, match="'olmo3' is not supported") as caught:
            checked_target(model, backend_for(model))
        assert "\n" not in caught.value.message
