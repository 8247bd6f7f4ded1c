"""Decoder layers with fewer operations, swapped into a loaded model.

At a few rows a pass spends more time starting operations than computing. A fused layer does what the
model's own does with one matrix product for q, k and v, one for gate and up, and three operations for
RoPE. The model's classes stay as they are; only loaded modules are replaced, and only where their family is
known to compute this (`architectures.Family.has_plain_layers`), with the parts expected here.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import rms_norm

from swiftgen.forward.linear import MakeLinear, QuantisedLinear, is_plain
from swiftgen.forward.passes import Heads, Pass, Rotary
from swiftgen.models.architectures import has_plain_layers
from swiftgen.models.gguf_weights import attach, packed_of
from swiftgen.native.kernels import Kernels
from swiftgen.native.structs import DecoderLayer

_PARTS = {
    "": {"input_layernorm", "post_attention_layernorm", "self_attn", "mlp"},
    "self_attn": {"q_proj", "k_proj", "v_proj", "o_proj"},
    "mlp": {"gate_proj", "up_proj", "down_proj", "act_fn"},
}
_OPTIONAL = {"q_norm", "k_norm"}


class SignedRotary(nn.Module):
    """A model's rotary embedding, with the sign of "rotate half" moved into the sine.

    `rotate_half(x) * sin` equals `roll(x, D / 2) * signed_sin`.
    """

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__()
        self._rotary = rotary

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotary:
        """Of one sequence."""
        cos, sin = self._rotary(x, position_ids=position_ids)
        half = sin.shape[-1] // 2
        return cos[0].unsqueeze(1), torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).unsqueeze(1)


class RotaryTable(SignedRotary):
    """The same on a CPU, looked up: to reckon a few rows takes a dozen operations.

    The numbers are those of the dtype of the model, in float32.
    """

    _PAGE = 2048  # positions that are reckoned at a time

    def __init__(self, rotary: nn.Module) -> None:
        super().__init__(rotary)
        self._pages: list[Rotary] = []
        self._table: Rotary = torch.empty(0), torch.empty(0)

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotary:
        """Of one sequence."""
        positions = position_ids[0]
        while (begin := self._PAGE * len(self._pages)) <= int(positions.max()):
            page = super().forward(x, torch.arange(begin, begin + self._PAGE).unsqueeze(0))
            self._pages.append((page[0].float(), page[1].float()))
            cos, signed_sin = zip(*self._pages, strict=True)
            self._table = torch.cat(cos), torch.cat(signed_sin)
        return self._table[0][positions], self._table[1][positions]


class FusedLayer(nn.Module):
    """One pre-norm decoder layer with grouped-query attention and a gated MLP.

    Args:
        layer: The model's own layer; its weights are used, the layer itself is not.
        index: Its number.
        head_dim: Width of an attention head.
        make_linear: Turns a plain linear layer into the kind to compute with.
    """

    def __init__(self, layer: Any, index: int, head_dim: int, make_linear: MakeLinear) -> None:
        super().__init__()
        attention, mlp = layer.self_attn, layer.mlp
        self._index = index
        num_heads, num_kv_heads = (
            linear.out_features // head_dim for linear in (attention.q_proj, attention.k_proj)
        )
        self.heads = Heads(num_heads, num_kv_heads, attention.scaling, _head_norms(attention))
        self.input_norm, self.mlp_norm = layer.input_layernorm, layer.post_attention_layernorm
        self.qkv = make_linear(_joined([attention.q_proj, attention.k_proj, attention.v_proj]))
        self.out = make_linear(attention.o_proj)
        self.gate_up = make_linear(_joined([mlp.gate_proj, mlp.up_proj]))
        self.act, self.down = mlp.act_fn, make_linear(mlp.down_proj, is_fine=True)  # its inputs vary most

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Rotary, tree_pass: Pass, **unused: Any
    ) -> Tensor:
        """`[1, T, hidden]` -> `[1, T, hidden]`."""
        qkv = self.qkv(_normed(self.input_norm, hidden_states))
        attended = tree_pass.attend(self._index, qkv, position_embeddings, self.heads)
        hidden_states = hidden_states + self.out(attended)
        gate, up = self.gate_up(_normed(self.mlp_norm, hidden_states)).chunk(2, dim=-1)
        mlp: Tensor = self.down(self.act(gate) * up)
        return hidden_states + mlp


class NativeLayer(FusedLayer):
    """The same with the native CPU kernels; its MLP is gated by SiLU."""

    def __init__(
        self, layer: Any, index: int, head_dim: int, make_linear: MakeLinear, kernels: Kernels
    ) -> None:
        super().__init__(layer, index, head_dim, make_linear)
        self._kernels = kernels

    @property
    def described(self) -> DecoderLayer | None:
        """The layer for a native call; None where the kernels do not do its matrix products."""
        linears = self.qkv, self.out, self.gate_up, self.down
        products = [linear.product for linear in linears if isinstance(linear, QuantisedLinear)]
        if len(products) < len(linears):
            return None
        norm, mlp_norm = self.input_norm, self.mlp_norm
        return DecoderLayer(
            (norm.weight, norm.variance_epsilon),
            (mlp_norm.weight, mlp_norm.variance_epsilon),
            self.heads.described,
            *products,
        )

    def forward(
        self, hidden_states: Tensor, *, position_embeddings: Rotary, tree_pass: Pass, **unused: Any
    ) -> Tensor:
        """`[1, T, hidden]` -> `[1, T, hidden]`."""
        kernels, norm, mlp_norm = self._kernels, self.input_norm, self.mlp_norm
        qkv = self.qkv(kernels.rms_norm(hidden_states, norm.weight, norm.variance_epsilon))
        attended = tree_pass.attend(self._index, qkv, position_embeddings, self.heads)
        hidden_states, normed = kernels.add_rms_norm(
            hidden_states, self.out(attended), mlp_norm.weight, mlp_norm.variance_epsilon
        )
        return hidden_states + self.down(kernels.silu_mul(self.gate_up(normed)))  # type: ignore[no-any-return]


def fuse_layers(base: Any, head_dim: int, make_linear: MakeLinear, kernels: Kernels | None = None) -> bool:
    """Replace all layers of a base model, or none if any has other parts than expected.

    Args:
        kernels: Used by layers whose activation they have.

    Returns:
        Whether they were replaced.
    """
    if not (has_plain_layers(base.config) and all(map(_fits, base.layers))):
        return False
    is_native = kernels is not None and all(is_silu(layer.mlp.act_fn) for layer in base.layers)
    for index, layer in enumerate(base.layers):
        parts = layer, index, head_dim, make_linear
        base.layers[index] = NativeLayer(*parts, kernels) if is_native and kernels else FusedLayer(*parts)
    base.rotary_emb = (RotaryTable if is_native else SignedRotary)(base.rotary_emb)
    return True


def is_silu(act: nn.Module) -> bool:
    """Whether an activation is the one that the native kernels have."""
    x = torch.linspace(-3, 3, 7)
    return torch.equal(act(x), torch.nn.functional.silu(x))


def _fits(layer: nn.Module) -> bool:
    if not all(is_plain(module) for name, module in layer.named_modules() if name.endswith("_proj")):
        return False
    for name, parts in _PARTS.items():
        found = {child for child, _ in layer.get_submodule(name).named_children()}
        if not parts <= found <= parts | _OPTIONAL:
            return False
    return True


def _head_norms(attention: Any) -> tuple[Tensor, Tensor, float] | None:
    q_norm, k_norm = getattr(attention, "q_norm", None), getattr(attention, "k_norm", None)
    if q_norm is None or k_norm is None:
        return None
    return q_norm.weight, k_norm.weight, q_norm.variance_epsilon


def _normed(norm: Any, x: Tensor) -> Tensor:
    """The model's RMSNorm as one call."""
    return rms_norm(x, norm.weight.shape, norm.weight, norm.variance_epsilon)


def _joined(linears: Sequence[nn.Linear]) -> nn.Linear:
    """One linear layer whose output is theirs side by side."""
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
