"""Decoder layers by the native kernels, of every family whose layers have the parts they know."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from swiftgen.forward.layers import FusedLayer, activation_of, has_parts
from swiftgen.forward.linear import MakeLinear, QuantisedLinear
from swiftgen.forward.passes import Pass, Rotaries
from swiftgen.forward.rotary import RotaryTable, SignedRotary
from swiftgen.models.architectures import (
    has_known_layers,
    has_plain_layers,
    layer_rotaries,
    norm_eps,
    norm_weight,
)
from swiftgen.native.kernels import Kernels
from swiftgen.native.structs import ACTIVATIONS, DecoderLayer, Norm


class NativeLayer(FusedLayer):
    """A fused layer by the native kernels: its norms, its gate and its multipliers as the family has them."""

    def __init__(self, layer: Any, index: int, make_linear: MakeLinear, kernels: Kernels) -> None:
        super().__init__(layer, index, make_linear)
        self._kernels = kernels
        config, attention = layer.self_attn.config, layer.self_attn
        self._norms = [described_norm(config, norm) for norm in self.norms]
        over_each = self.heads.norms is not None
        self._norms_of_all_heads = [
            described_norm(config, None if over_each else getattr(attention, name, None))
            for name in ("q_norm", "k_norm")
        ]
        self._residual_scale = float(getattr(layer, "residual_multiplier", 1.0))
        number = native_activation(self.act)
        assert number is not None, "see fuse_layers"
        self._activation = number

    @property
    def described(self) -> DecoderLayer | None:
        """The layer for a native call; None where the kernels do not do its matrix products."""
        linears = self.qkv, self.out, self.gate_up, self.down
        products = [linear.product for linear in linears if isinstance(linear, QuantisedLinear)]
        if len(products) < len(linears):
            return None
        norms = [*self._norms, *self._norms_of_all_heads]
        return DecoderLayer(norms, self.heads.described, products, self._residual_scale, self._activation)

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Rotaries, tree_pass: Pass, **unused: Any
    ) -> Tensor:
        """`[1, T, hidden]` -> `[1, T, hidden]`."""
        kernels, scale = self._kernels, self._residual_scale
        input_norm, attention_norm, mlp_norm, output_norm = self._norms
        qkv = self._with_normed_heads(self.qkv(kernels.rms_norm(hidden_states, input_norm)))
        attended = tree_pass.attend(self._index, qkv, position_embeddings[self._rotary], self.heads)
        hidden_states = kernels.add(hidden_states, self.out(attended), attention_norm, scale)
        gate_up = self.gate_up(kernels.rms_norm(hidden_states, mlp_norm))
        mlp: Tensor = self.down(kernels.gate(gate_up, self._activation))
        return kernels.add(hidden_states, mlp, output_norm, scale)

    def _with_normed_heads(self, qkv: Tensor) -> Tensor:
        """By norms that go over all query heads, and over all key heads."""
        q_norm, k_norm = self._norms_of_all_heads
        if not q_norm.size:
            return qkv
        q, k, v = qkv.split([q_norm.size, k_norm.size, k_norm.size], dim=-1)
        q, k = (self._kernels.rms_norm(part.contiguous(), norm) for part, norm in ((q, q_norm), (k, k_norm)))
        return torch.cat([q, k, v], dim=-1)


def fuse_layers(base: Any, make_linear: MakeLinear, kernels: Kernels | None = None) -> bool:
    """Replace all layers of a base model, or none if any has other parts than expected.

    Args:
        kernels: Used where they know all that the layers do.

    Returns:
        Whether they were replaced.
    """
    config, layers = base.config, base.layers
    if not (has_known_layers(config) and all(map(has_parts, layers))):
        return False
    is_native = kernels is not None and all(
        native_activation(activation_of(layer.mlp)) is not None for layer in layers
    )
    if not (is_native or has_plain_layers(config)):
        return False
    for index, layer in enumerate(layers):
        parts = layer, index, make_linear
        layers[index] = NativeLayer(*parts, kernels) if is_native and kernels else FusedLayer(*parts)
    base.rotary_emb = (RotaryTable if is_native else SignedRotary)(base.rotary_emb, layer_rotaries(config))
    return True


def native_activation(act: nn.Module) -> int | None:
    """The number of an activation among those of the kernels."""
    x = torch.linspace(-3, 3, 7)
    return next((number for number, own in enumerate(ACTIVATIONS) if torch.equal(act(x), own(x))), None)


def described_norm(config: Any, norm: Any) -> Norm:
    """A norm of a model, or None, for native calls."""
    return Norm() if norm is None else Norm(norm_weight(config, norm), norm_eps(norm))
