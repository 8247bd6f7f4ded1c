"""Decoder layers with fewer operations, swapped into a loaded model.

At a few rows a pass spends more time starting operations than computing. A fused layer does what the
model's own does with one matrix product for q, k and v, one for gate and up, and three operations for
RoPE. The model's classes stay as they are; only loaded modules are replaced, and only where their family is
known to compute this (`architectures.Family.layers`), with the parts expected here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from swiftgen.forward.linear import MakeLinear, is_plain
from swiftgen.forward.passes import Heads, Pass, Rotaries
from swiftgen.models.architectures import head_dim, layer_rotaries, norm_eps, norm_weight
from swiftgen.models.gguf_weights import attach, packed_of

_PARTS = {
    "": [{"post_attention_layernorm", "self_attn", "mlp"}],
    "self_attn": [{"q_proj", "k_proj", "v_proj", "o_proj"}, {"qkv_proj", "o_proj"}],
    "mlp": [{"gate_proj", "up_proj", "down_proj", "act_fn"}, {"gate_up_proj", "down_proj", "activation_fn"}],
}
"""What a layer must have, one set or another; it may have these besides:"""
_OPTIONAL = {
    *("input_layernorm", "pre_feedforward_layernorm", "post_feedforward_layernorm", "q_norm", "k_norm"),
    *("resid_attn_dropout", "resid_mlp_dropout"),
}


class FusedLayer(nn.Module):
    """One pre-norm decoder layer with grouped-query attention and a gated MLP.

    Args:
        layer: The model's own layer; its weights are used, the layer itself is not.
        index: Its number.
        make_linear: Turns a plain linear layer into the kind to compute with.
    """

    def __init__(self, layer: Any, index: int, make_linear: MakeLinear) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        config = attention.config
        self._index, self._rotary = index, layer_rotaries(config)[index]
        self.heads = Heads(
            config.num_attention_heads,
            config.num_key_value_heads,
            attention.scaling,
            _head_norms(attention, config),
            getattr(attention, "attn_logit_softcapping", None) or 0.0,
        )
        self.norms = _norms_of(layer)
        self.qkv = make_linear(_joined(attention, "qkv_proj", ["q_proj", "k_proj", "v_proj"]))
        self.out = make_linear(attention.o_proj)
        self.gate_up = make_linear(_joined(mlp, "gate_up_proj", ["gate_proj", "up_proj"]))
        self.act = activation_of(mlp)
        self.down = make_linear(mlp.down_proj, is_fine=True)  # its inputs vary most

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Rotaries, tree_pass: Pass, **unused: Any
    ) -> Tensor:
        """`[1, T, hidden]` -> `[1, T, hidden]`."""
        input_norm, _, mlp_norm, _ = self.norms
        qkv = self.qkv(_normed(input_norm, hidden_states))
        attended = tree_pass.attend(self._index, qkv, position_embeddings[self._rotary], self.heads)
        hidden_states = hidden_states + self.out(attended)
        gate, up = self.gate_up(_normed(mlp_norm, hidden_states)).chunk(2, dim=-1)
        mlp: Tensor = self.down(self.act(gate) * up)
        return hidden_states + mlp


def has_parts(layer: nn.Module) -> bool:
    """Whether a layer has the parts that fused layers are made of, and each computes in the plain way."""
    if not all(is_plain(module) for name, module in layer.named_modules() if name.endswith("_proj")):
        return False
    for name, choices in _PARTS.items():
        found = {child for child, _ in layer.get_submodule(name).named_children()}
        if found - _OPTIONAL not in choices:
            return False
    return True


def activation_of(mlp: Any) -> nn.Module:
    """What the gate of an MLP goes through."""
    found: nn.Module = mlp.activation_fn if hasattr(mlp, "activation_fn") else mlp.act_fn
    return found


def _norms_of(layer: Any) -> tuple[Any, Any, Any, Any]:
    """The norms before and behind attention, before and behind the MLP; None where there is none.

    Where nothing else is behind attention, the norm of that name is the one before the MLP.
    """
    before, behind = getattr(layer, "input_layernorm", None), layer.post_attention_layernorm
    if not hasattr(layer, "post_feedforward_layernorm"):
        return before, None, behind, None
    return before, behind, getattr(layer, "pre_feedforward_layernorm", None), layer.post_feedforward_layernorm


def _head_norms(attention: Any, config: Any) -> tuple[Tensor, Tensor, float] | None:
    """Weights and epsilon of norms over each head."""
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if q_norm is None or k_norm is None or q_norm.weight.shape[0] != head_dim(config):
        return None
    return norm_weight(config, q_norm), norm_weight(config, k_norm), norm_eps(q_norm)


def _normed(norm: Any, x: Tensor) -> Tensor:
    """The model's RMSNorm as one call."""
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _joined(module: Any, name: str, parts: Sequence[str]) -> nn.Linear:
    """One linear layer whose output is theirs side by side; the module's own, if it has it."""
    if hasattr(module, name):
        found: nn.Linear = getattr(module, name)
        return found
    linears = [getattr(module, part) for part in parts]
    shape = linears[0].in_features, sum(linear.out_features for linear in linears)
    joined = nn.Linear(*shape, bias=linears[0].bias is not None, device="meta")
    packed = [packed_of(linear) for linear in linears]
    if all(packed):
        attach(joined, [weight for weights in packed for weight in weights])
    else:
        joined.weight = nn.Parameter(torch.cat([linear.weight for linear in linears]), requires_grad=False)
    if linears[0].bias is not None:
        joined.bias = nn.Parameter(torch.cat([linear.bias for linear in linears]), requires_grad=False)
    return joined
