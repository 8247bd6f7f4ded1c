"""Weights in 4 or 8 bits, as GGUF files have them, for the native kernels.

The model is the one that transformers unpacks: every weight kept here in few bits gives exactly the number
that the unpacked model has, which is checked when the file is unpacked. What changes is how much memory a
pass reads, and at a few rows that is what a pass costs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from swiftgen.models.architectures import head_dim

FILE_NAME = "quantised.safetensors"
_ATTRIBUTE = "quantised_weight"
BLOCK, GROUP = 32, 16  # as in quantised.cpp
_PARTS = {
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_LAYER = re.compile(r"model\.layers\.(\d+)\.(.+)")


@dataclass(frozen=True)
class QuantisedWeight:
    """The weight of a linear layer: `code * scale + minimum`, in blocks of 32 along a row.

    Args:
        codes: uint8 `[out, in / 32, 16]`, 4 bits each, of a block the first half in the low ones; or int8
            `[out, in / 32, 32]`.
        scales: float16 `[out, in / 32]`.
        minima: The same; None with 8 bits, where it is 0.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None

    @property
    def bits(self) -> int:
        """Of a code."""
        return 4 if self.codes.dtype == torch.uint8 else 8

    def dequantised(self, dtype: torch.dtype) -> Tensor:
        """The weight itself, `[out, in]`, rounded once."""
        codes = self.codes
        if self.bits == 4:
            codes = torch.cat([codes & 15, codes >> 4], dim=-1)
        values = codes.float() * self.scales.float().unsqueeze(-1)
        if self.minima is not None:
            values += self.minima.float().unsqueeze(-1)
        return values.to(dtype).flatten(1)

    def is_for(self, weight: Tensor) -> bool:
        """Whether types and shapes are those that a weight `[out, in]` needs."""
        if weight.shape[1] % BLOCK or self.codes.dtype not in (torch.uint8, torch.int8):
            return False
        shape = weight.shape[0], weight.shape[1] // BLOCK
        scales = [self.scales] + ([self.minima] if self.minima is not None else [])
        return (
            self.codes.shape == (*shape, BLOCK * self.bits // 8)
            and all(each.shape == shape and each.dtype == torch.float16 for each in scales)
            and len(scales) == (2 if self.bits == 4 else 1)
        )

    def rows(self, index: Tensor) -> QuantisedWeight:
        """Some of its rows."""
        minima = None if self.minima is None else self.minima[index]
        return QuantisedWeight(self.codes[index], self.scales[index], minima)

    @staticmethod
    def nearest(weight: Tensor) -> QuantisedWeight:
        """A weight `[out, in]` in 8 bits, to the nearest step; for what need not be exact, like drafts."""
        blocks = weight.float().unflatten(1, (-1, BLOCK))
        scales = (blocks.abs().amax(dim=-1) / 127).half()
        steps = scales.float().clamp(min=torch.finfo(torch.float16).tiny).unsqueeze(-1)
        return QuantisedWeight((blocks / steps).round().clamp(-127, 127).to(torch.int8), scales, None)

    @staticmethod
    def joined(weights: Sequence[QuantisedWeight]) -> QuantisedWeight | None:
        """Weights one below the other; None if their bits differ."""
        if len({weight.bits for weight in weights}) > 1:
            return None
        minima = [weight.minima for weight in weights if weight.minima is not None]
        return QuantisedWeight(
            torch.cat([weight.codes for weight in weights]),
            torch.cat([weight.scales for weight in weights]),
            torch.cat(minima) if minima else None,
        )


def save_quantised(gguf: Path, model: nn.Module, config: Any, folder: Path) -> None:
    """Keep the codes of an unpacked model where they give the weight of every layer to the last bit.

    A file that has other kinds of weights too is left at that. The lm_head is kept if it can be.

    Args:
        gguf: The file that the model was unpacked from.
        config: Of the model.
    """
    from gguf import GGUFReader

    tensors = {tensor.name: tensor for tensor in GGUFReader(gguf).tensors}
    kept: dict[str, Tensor] = {}
    for name, module in model.named_modules():
        if not isinstance(module, nn.Linear):
            continue
        tensor = tensors.get(_gguf_name(name, tensors))
        weight = _matching(None if tensor is None else _read(tensor), module.weight, config)
        if weight is not None:
            parts = {f"{name}.{part}": value for part, value in vars(weight).items()}
            kept |= {key: value.contiguous() for key, value in parts.items() if value is not None}
        elif name != "lm_head":
            return
    save_file(kept, folder / FILE_NAME)


def quantised_bytes(folder: Path) -> int:
    """Size of what `save_quantised` left in a model folder; 0 if it left nothing."""
    file = folder / FILE_NAME
    return file.stat().st_size if file.is_file() else 0


def attach_quantised(model: nn.Module, folder: Path) -> None:
    """Give the linear layers of a model what `save_quantised` kept of them, for `quantised_of`.

    Raises:
        SafetensorError, ValueError: the file is damaged.
    """
    kept = load_file(folder / FILE_NAME)
    for name, module in model.named_modules():
        if isinstance(module, nn.Linear) and f"{name}.codes" in kept:
            weight = QuantisedWeight(
                kept[f"{name}.codes"], kept[f"{name}.scales"], kept.get(f"{name}.minima")
            )
            if not weight.is_for(module.weight):
                raise ValueError(f"{FILE_NAME} does not fit {name}")
            attach(module, weight)


def attach_zeros(model: nn.Module) -> None:
    """Give all linear layers weights in 4 bits, for a model of which only the make matters."""
    for module in model.modules():
        if isinstance(module, nn.Linear):
            blocks = module.out_features, module.in_features // BLOCK
            zeros = torch.zeros(blocks, dtype=torch.float16)
            attach(module, QuantisedWeight(torch.zeros(*blocks, BLOCK // 2, dtype=torch.uint8), zeros, zeros))


def attach(linear: nn.Linear, weight: QuantisedWeight) -> None:
    """Give a layer its weight in few bits, for `quantised_of`."""
    setattr(linear, _ATTRIBUTE, weight)


def quantised_of(linear: nn.Module) -> QuantisedWeight | None:
    """What was attached to a layer."""
    return getattr(linear, _ATTRIBUTE, None)


def _matching(quantised: QuantisedWeight | None, weight: Tensor, config: Any) -> QuantisedWeight | None:
    """The same in the order of rows in which it gives a weight to the last bit; None if it does in none."""
    if quantised is None or not quantised.is_for(weight):
        return None
    for ordered in (quantised, quantised.rows(_llama_rows(len(weight), config))):
        if torch.equal(ordered.dequantised(weight.dtype), weight):
            return ordered
    return None


def _gguf_name(name: str, tensors: Mapping[str, Any]) -> str:
    """What a GGUF file calls the weight of a linear layer; an lm_head tied to the embedding has its name."""
    if name == "lm_head":
        return "output.weight" if "output.weight" in tensors else "token_embd.weight"
    match = _LAYER.fullmatch(name)
    return f"blk.{match[1]}.{_PARTS.get(match[2], '')}.weight" if match else ""


def _llama_rows(num_rows: int, config: Any) -> Tensor:
    """llama.cpp keeps the rows of a q or k head in another order, for its own way to rotate them."""
    width = head_dim(config)
    if num_rows % width:
        return torch.arange(num_rows)
    return torch.arange(num_rows).view(-1, width // 2, 2).transpose(1, 2).flatten()


def _read(tensor: Any) -> QuantisedWeight | None:
    """A tensor of a GGUF file; None if it is of another type than Q4_0, Q4_1 and Q8_0."""
    data = torch.from_numpy(tensor.data.copy())
    kind = tensor.tensor_type.name
    num_halves = {"Q4_0": 1, "Q4_1": 2, "Q8_0": 1}.get(kind)
    if num_halves is None:
        return None
    num_bytes = 2 * num_halves + (32 if kind == "Q8_0" else 16)
    blocks = data.view(data.shape[0], -1, num_bytes)
    halves = blocks[..., : 2 * num_halves].contiguous().view(torch.float16)
    codes, scales = blocks[..., 2 * num_halves :].contiguous(), halves[..., 0].contiguous()
    if kind == "Q8_0":
        return QuantisedWeight(codes.view(torch.int8), scales, None)
    minima = halves[..., 1].contiguous() if kind == "Q4_1" else -8 * scales
    return QuantisedWeight(codes, scales, minima)
