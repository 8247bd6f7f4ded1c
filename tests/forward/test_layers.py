"""Fused layers compute what the model's own layers do."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import nn

from support.tiny import FAMILIES, new_cache, new_target, tiny_model
from swiftgen.forward.layers import FusedLayer
from swiftgen.forward.native_layer import NativeLayer, fuse_layers

TOKENS = [(5 * i * i + 3) % 97 for i in range(200)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("attention", ["native", "sdpa"])
def test_target_agrees_with_the_unmodified_model(family: str, attention: str) -> None:
    model = tiny_model(family)
    if family == "qwen2":  # its biases are zero at first
        for name, parameter in model.named_parameters():
            if name.endswith("bias"):
                nn.init.normal_(parameter)
    expected = copy.deepcopy(model)(torch.tensor([TOKENS])).logits[0, -1]
    target = new_target(model, attention)
    expected_class = NativeLayer if attention == "native" else FusedLayer
    assert all(type(layer) is expected_class for layer in model.base_model.layers)
    output = target.prefill(TOKENS, new_cache(target, len(TOKENS)))
    assert output is not None
    actual = target.logits(output.hidden[-1:])[0]
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-4)


def test_layers_with_other_parts_stay_as_they_are() -> None:
    model = tiny_model()
    expected = copy.deepcopy(model)(torch.tensor([TOKENS])).logits[0, -1]
    layer = model.base_model.layers[1]
    layer.post_mlp_layernorm = nn.Identity()
    target = new_target(model)
    assert not target.arithmetic["fused_layers"]
    assert model.base_model.layers[1] is layer
    output = target.prefill(TOKENS, new_cache(target, len(TOKENS)))
    assert output is not None
    torch.testing.assert_close(target.logits(output.hidden[-1:])[0], expected, rtol=1e-4, atol=1e-4)


def test_fuse_layers_says_whether_it_did() -> None:
    def same(linear: nn.Linear, *, is_fine: bool = False, is_wide: bool = False) -> nn.Module:
        return linear

    base = tiny_model().base_model
    assert fuse_layers(base, same)
    assert not fuse_layers(base, same)  # already fused: other parts


def test_layers_with_another_activation_take_no_native_kernels() -> None:
    model = tiny_model()
    for layer in model.base_model.layers:
        layer.mlp.act_fn = nn.GELU()
    expected = copy.deepcopy(model)(torch.tensor([TOKENS])).logits[0, -1]
    target = new_target(model)
    assert all(type(layer) is FusedLayer for layer in model.base_model.layers)
    assert target.arithmetic["attention"] == "cpu_prefix"
    output = target.prefill(TOKENS, new_cache(target, len(TOKENS)))
    assert output is not None
    torch.testing.assert_close(target.logits(output.hidden[-1:])[0], expected, rtol=1e-4, atol=1e-4)
