"""Which device and dtype a run uses, and how much memory the device has left."""

from __future__ import annotations

from pathlib import Path

import psutil
import torch

from swiftgen.cgroups import memory_left_bytes
from swiftgen.errors import SwiftgenError


def resolve_device(name: str) -> torch.device:
    """The device a preset's `model.device` stands for.

    Raises:
        SwiftgenError: if there is no such device.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise SwiftgenError(
                f"model.device is {name}, but torch sees {count} CUDA devices", "Use --set model.device=cpu."
            )
    return device


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype a preset's `model.dtype` stands for; "auto" is bfloat16 where the hardware computes in it."""
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    fast = torch.cuda.is_bf16_supported() if device.type == "cuda" else _cpu_has_bf16()
    return torch.bfloat16 if fast else torch.float32


def _cpu_has_bf16() -> bool:
    # Elsewhere torch emulates bfloat16 on the CPU, slower than float32.
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        return any(found.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    try:
        words = set(Path("/proc/cpuinfo").read_text(encoding="utf-8").split())
    except OSError:
        return False
    return not words.isdisjoint({"avx512_bf16", "amx_bf16", "bf16"})


def free_bytes(device: torch.device) -> int:
    """Memory a new allocation can get: of the GPU, or of this machine within its cgroup's limit."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[0])
    return min([int(psutil.virtual_memory().available), *memory_left_bytes()])


def used_bytes(device: torch.device) -> int:
    """Memory this process has taken: of the GPU at its peak, or of this machine now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
