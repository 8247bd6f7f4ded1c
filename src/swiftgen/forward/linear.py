"""Linear layers for inference: on CPUs with weights in few bits, or in oneDNN's own blocked layout.

The latter take half the time of plain `F.linear` in bf16. With both, a row's result does not depend on how
many rows are computed with it (see docs/design.md), which is what lets a tree be verified exactly.
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch import Tensor, nn

from swiftgen.models.gguf_weights import packed_of
from swiftgen.native.kernels import Kernels
from swiftgen.native.structs import Product


class MakeLinear(Protocol):
    """Turns a plain linear layer into the kind to compute with."""

    def __call__(self, linear: nn.Linear, *, is_fine: bool = False, is_wide: bool = False) -> nn.Module:
        """Make one.

        Args:
            is_fine: Activations are rounded to 16 bits where others are to 8.
            is_wide: The result may be float32 in a model of bfloat16, rounded less.
        """
        ...


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
    """`nn.Linear` for inference by the native kernels, with a weight in few bits.

    Args:
        product: What it computes.
    """

    def __init__(self, product: Product, kernels: Kernels) -> None:
        super().__init__()
        self.in_features, self.out_features = product.in_features, product.out_features
        self.product, self._kernels = product, kernels

    def forward(self, x: Tensor) -> Tensor:
        """`[..., in_features]` -> `[..., out_features]`."""
        return self._kernels.multiply(self.product, x)


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


def linear_maker(
    device: torch.device, dtype: torch.dtype, kernels: Kernels | None, is_integer: bool = False
) -> MakeLinear:
    """What turns a plain linear layer into the fastest kind that computes the same here.

    Args:
        kernels: Layers with a weight in few bits use them.
        is_integer: Whether these round their activations to 8 bits, some of them to 16.
    """
    packs = can_pack(device, dtype)

    def make(linear: nn.Linear, *, is_fine: bool = False, is_wide: bool = False) -> nn.Module:
        if not is_plain(linear):
            return linear
        if kernels and (weights := packed_of(linear)):
            num_bytes = 1 + is_fine if is_integer else 0
            return QuantisedLinear(Product(weights, linear.bias, num_bytes, is_wide), kernels)
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
