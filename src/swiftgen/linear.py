"""Linear layers for inference: on CPUs with weights in few bits, or in oneDNN's own blocked layout.

The latter take half the time of plain `F.linear` in bf16. With both, a row's result does not depend on how
many rows are computed with it (see docs/design.md), which is what lets a tree be verified exactly.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from swiftgen.native import Kernels
from swiftgen.quantised import QuantisedLinear, quantised_of

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
