"""What computes a pass on this machine, chosen once for a run and handed down."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from swiftgen.forward.attention import PrefixKernel, cpu_prefix
from swiftgen.forward.spans import SpanPrefix, best_prefix
from swiftgen.native.build import kernels_for
from swiftgen.native.kernels import Kernels
from swiftgen.system.errors import SwiftgenError, first_line


@dataclass(frozen=True)
class Backend:
    """The kernels of a run.

    Args:
        asked: The preset's `model.attention`.
        kernels: The native ones; None where PyTorch's operators are to be used.
        prefix: Computes the prefix where they do not.
        static_prefix: Computes that of passes with static shapes; None where there are none, as on CPUs.
        is_integer: Whether activations are rounded to 8 bits where weights have few (`native/integer.h`).
    """

    asked: str
    kernels: Kernels | None
    prefix: PrefixKernel
    static_prefix: SpanPrefix | None
    is_integer: bool = False


def choose_backend(
    asked: str, device: torch.device, dtype: torch.dtype, head_dim: int, activations: str = "full"
) -> Backend:
    """The fastest backend for a preset's `model.attention` (auto, native, sdpa or flash).

    Args:
        device, dtype, head_dim: Of the model.
        activations: The preset's `model.activations`.

    Raises:
        SwiftgenError: If what is asked for is not installed, or cannot run on this device or dtype.
    """
    kernels = kernels_for(asked, device, dtype, head_dim)
    if device.type == "cpu" and asked != "flash":
        return Backend(asked, kernels, cpu_prefix, None, kernels is not None and activations != "full")
    try:
        prefix = best_prefix(asked, device, dtype, head_dim)
    except ImportError as error:
        raise SwiftgenError(
            f"attention 'flash' cannot run here: {first_line(error)}",
            "install flash-attn for this PyTorch (the extra 'flash'; see docs/gpu.md), "
            "or use `--set model.attention=auto`",
        ) from error
    return Backend(asked, kernels, prefix, prefix)
