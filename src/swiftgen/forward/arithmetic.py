"""What the rounding of a target's results depends on, beside the hardware."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch
from torch import nn

from swiftgen.forward.backend import Backend
from swiftgen.forward.cache import BLOCK_TOKENS
from swiftgen.forward.linear import PackedLinear, QuantisedLinear, can_pack
from swiftgen.forward.native_layer import native_activation
from swiftgen.models.architectures import (
    activation_name,
    has_known_layers,
    has_plain_layers,
    layer_windows,
)
from swiftgen.models.libraries import library_of
from swiftgen.system.devices import device_name
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.ranks import num_ranks

if TYPE_CHECKING:
    from transformers import PretrainedConfig


@dataclass(frozen=True)
class Arithmetic:
    """How a target computes.

    Args:
        device, dtype: Of the model.
        backend: What it has to compute with.
        linears: How its layers multiply, see `kinds_of_linears`.
        has_windows: Whether layers of it have a sliding window.
        is_fused: Whether its layers are fused.
        is_native: Whether the native kernels run them.

    Raises:
        SwiftgenError: If the native kernels are asked for, and do not run the layers.
    """

    device: torch.device
    dtype: torch.dtype
    backend: Backend
    linears: str
    has_windows: bool
    is_fused: bool
    is_native: bool

    def __post_init__(self) -> None:
        if self.backend.asked == "native" and not self.is_native:
            raise SwiftgenError(
                "the native CPU kernels do not fit the layers of this model",
                "use `--set model.attention=auto`",
            )

    @cached_property
    def is_static(self) -> bool:
        """Whether passes with static shapes run the model.

        They cannot where something is decided by values on the device (experts), where a window moves with
        the text, where other ranks are waited for, or where weights are multiplied in ways that a graph may
        not hold.
        """
        is_plain = self.linears in ("plain", "packed") and self.is_fused and not self.is_native
        has_kernel = self.backend.static_prefix is not None
        return has_kernel and is_plain and not self.has_windows and num_ranks() == 1

    def described(self) -> dict[str, object]:
        """As it is recorded."""
        kernels = self.backend.kernels
        attention = f"native {kernels.build}" if kernels and self.is_native else self.backend.prefix.__name__
        return {
            "torch": torch.__version__,
            "device": device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": attention,
            "linears": self.linears,
            "fused_layers": self.is_fused,
            "static_shapes": self.is_static,
            "block_tokens": BLOCK_TOKENS,
            "ranks": num_ranks(),
        }


def kinds_of_linears(base: nn.Module, backend: Backend) -> str:
    """How the layers of a model multiply."""
    quantised = _quantised(backend)
    kinds = {type(module) for module in base.modules() if not library_of(module)}
    names = {QuantisedLinear: quantised, PackedLinear: "packed", nn.Linear: "plain"}
    own = [name for kind, name in names.items() if kind in kinds]
    return " and ".join([*own, *sorted({library_of(module) for module in base.modules()} - {""})])


def _quantised(backend: Backend) -> str:
    kernels = backend.kernels
    return f"quantised {kernels.build if kernels else ''}{' int8' if backend.is_integer else ''}"


def arithmetic_of(
    config: PretrainedConfig,
    dtype: torch.dtype,
    device: torch.device,
    backend: Backend,
    stays_packed: Collection[bool] = (),
) -> dict[str, object]:
    """What `Target.arithmetic` of a model will be, without its weights.

    Args:
        config: of the model, which is of a supported architecture.
        dtype, device: as it is loaded.
        stays_packed: of a GGUF file, see `gguf_weights.stays_packed`.

    Raises:
        SwiftgenError: if the attention asked for cannot run here.
    """
    from transformers.activations import ACT2FN

    kernels, has_windows = backend.kernels, any(layer_windows(config))
    dense = "packed" if can_pack(device, dtype) else "plain"
    kinds = {_quantised(backend): True in stays_packed, dense: stays_packed != {True}}
    linears = " and ".join(kind for kind, is_there in kinds.items() if is_there)
    activation = ACT2FN[activation_name(config)]
    is_native = kernels is not None and has_known_layers(config) and native_activation(activation) is not None
    is_fused = is_native or has_plain_layers(config)
    return Arithmetic(device, dtype, backend, linears, has_windows, is_fused, is_native).described()
