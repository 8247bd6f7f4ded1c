"""Linear layers for inference: on CPUs with weights in few bits, or in oneDNN's own blocked layout.

The latter take half the time of plain `F.linear` in bf16. With both, a row's result does not depend on how
many rows are computed with it (see docs/design.md), which is what lets a tree be verified exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from swiftgen.models.gguf_weights import BLOCK, GROUP, QuantisedWeight, quantised_of
from swiftgen.native.kernels import Kernels

MakeLinear = Callable[[nn.Linear], nn.Module]


class PackedLinear(nn.Module):
    """`nn.Linear` for inference on CPU with a prepacked weight."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.in_features, self.out_features = linear.in_features, linear.out_features
        self.bias = linear.bias
        self._packed = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), None)

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        out: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return out


class QuantisedLinear(nn.Module):
    """`nn.Linear` for inference by the native kernels, with a weight in few bits."""

    def __init__(self, weight: QuantisedWeight, bias: Tensor | None, kernels: Kernels) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.scales.shape[0], weight.scales.shape[1] * BLOCK
        self.bias = bias
        self.multiplication = kernels.multiplication(
            weight.bits,
            _grouped(weight.codes),
            _grouped(weight.scales),
            None if weight.minima is None else _grouped(weight.minima),
            bias,
        )

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        out: Tensor = self.multiplication(x)
        return out

    @staticmethod
    def fits(weight: QuantisedWeight) -> bool:
        """Whether the kernels can compute with a weight."""
        return weight.scales.shape[0] % GROUP == 0


def _grouped(blocks: Tensor) -> Tensor:
    """`[out, in / 32, ...]` -> `[out / 16, in / 32, 16, ...]`: what is read together lies together."""
    groups: Tensor = blocks.unflatten(0, (-1, GROUP))
    return groups.transpose(1, 2).contiguous()


def can_pack(device: torch.device, dtype: torch.dtype) -> bool:
    """Whether this build of PyTorch can prepack weights of this dtype on this device."""
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16):
        return False
    if not torch.backends.mkldnn.is_available():
        return False
    try:
        PackedLinear(nn.Linear(64, 64, dtype=dtype))(torch.zeros(2, 64, dtype=dtype))
    except (RuntimeError, AttributeError):
        return False
    return True


def linear_maker(device: torch.device, dtype: torch.dtype, kernels: Kernels | None) -> MakeLinear:
    """What turns a plain linear layer into the fastest kind that computes the same here.

    Args:
        kernels: Where there are any, layers with a weight in few bits use them.
    """
    packs = can_pack(device, dtype)

    def make(linear: nn.Linear) -> nn.Module:
        if not is_plain(linear):
            return linear
        weight = quantised_of(linear)
        if kernels and weight and QuantisedLinear.fits(weight):
            return QuantisedLinear(weight, linear.bias, kernels)
        return PackedLinear(linear) if packs else linear

    return make


def is_plain(linear: nn.Module) -> bool:
    """Whether a layer is a matrix and nothing else: neither quantised by a library nor spread over ranks.

    Any other computes in its own way, and is left as it is.
    """
    has_own_forward = "forward" in vars(linear)  # as libraries put in the place of that of the class
    return type(linear) is nn.Linear and type(linear.weight) is nn.Parameter and not has_own_forward


def replace_linears(module: nn.Module, make: MakeLinear) -> None:
    """Replace every plain `nn.Linear` below `module`; its weight is dropped."""
    for name, child in module.named_children():
        if isinstance(child, nn.Linear):
            setattr(module, name, make(child))
        else:
            replace_linears(child, make)
