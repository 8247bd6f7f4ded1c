"""Which device and dtype a run uses, and how much memory the device has left."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import psutil
import torch
from torch import Tensor

from swiftgen.system.cgroups import memory_left_bytes
from swiftgen.system.cpuinfo import cpuinfo_lines
from swiftgen.system.errors import SwiftgenError, first_line
from swiftgen.system.ranks import num_local_ranks

_BF16_CAPABILITY, _FP16_CAPABILITY = (8, 0), (7, 0)  # first with tensor cores for it


def resolve_device(name: str) -> torch.device:
    """The device a preset's `model.device` stands for.

    Raises:
        SwiftgenError: if there is no such device, or it cannot be used.
    """
    if name == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    device = torch.device(name)
    if device.type == "cuda":
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        if (device.index or 0) >= count:
            raise SwiftgenError(
                f"model.device is {name}, but torch sees {count} CUDA devices{_why_no_cuda(count)}",
                "Use --set model.device=cpu.",
            )
    return device


def _why_no_cuda(count: int) -> str:
    """What PyTorch says, in one line: a build without CUDA, no driver, or a driver that is too old for it."""
    if count:
        return ""
    if torch.version.cuda is None:
        return ": this PyTorch is built without CUDA"
    try:
        torch.cuda.init()
    except (RuntimeError, AssertionError) as error:
        return f": {first_line(error)}"
    return ""


def resolve_dtype(name: str, device: torch.device) -> torch.dtype:
    """The dtype a preset's `model.dtype` stands for; "auto" is the 16 bits the hardware computes in.

    That is bfloat16, on older GPUs float16, else float32.

    Raises:
        SwiftgenError: if bfloat16 is asked for on a GPU that has none.
    """
    if device.type == "cuda":
        found = capability(device)
        if name == "bfloat16" and found < _BF16_CAPABILITY:
            raise SwiftgenError(
                f"{device} has no bfloat16 (compute capability {found[0]}.{found[1]}, bfloat16 needs 8.0)",
                "Use --set model.dtype=float16 or float32.",
            )
        if name == "auto":
            if found >= _BF16_CAPABILITY:
                return torch.bfloat16
            return torch.float16 if found >= _FP16_CAPABILITY else torch.float32
    if name != "auto":
        return {"bfloat16": torch.bfloat16, "float16": torch.float16, "float32": torch.float32}[name]
    return torch.bfloat16 if _cpu_has_bf16() else torch.float32


def capability(device: torch.device) -> tuple[int, int]:
    """Compute capability of a CUDA device, e.g. (8, 0) for Ampere and (9, 0) for Hopper."""
    return torch.cuda.get_device_capability(device)


def device_name(device: torch.device) -> str:
    """What the rounding depends on: the kind of device, and of GPUs the model."""
    return f"cuda {torch.cuda.get_device_name(device)}" if device.type == "cuda" else device.type


@contextmanager
def memory_errors(device: torch.device, doing: str, hint: str) -> Iterator[None]:
    """Turn running out of GPU memory into a SwiftgenError.

    Args:
        doing: What is done inside.
        hint: What to do about it.
    """
    try:
        yield
    except torch.cuda.OutOfMemoryError as error:
        message = f"the memory of {device} ran out while {doing}: {first_line(error)}"
        raise SwiftgenError(message, hint) from error


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """A CPU tensor on a device, without waiting: a GPU copies from pinned memory when its turn comes.

    PyTorch keeps the pinned memory until the copy is done.
    """
    if device.type != "cuda":
        return tensor if device.type == "cpu" else tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


def _cpu_has_bf16() -> bool:
    # Elsewhere torch emulates bfloat16 on the CPU, slower than float32.
    if hasattr(torch.cpu, "get_capabilities"):
        found = torch.cpu.get_capabilities()
        return any(found.get(unit) for unit in ("avx512_bf16", "amx_bf16", "bf16", "sve_bf16"))
    words = " ".join(cpuinfo_lines()).split()
    return any(unit in words for unit in ("avx512_bf16", "amx_bf16", "bf16"))


def free_bytes(device: torch.device) -> int:
    """Memory a new allocation can get: of the GPU, or of this machine within its cgroup's limit."""
    if device.type == "cuda":
        kept = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        return int(torch.cuda.mem_get_info(device)[0] + kept)  # PyTorch keeps what it has freed
    return min([int(psutil.virtual_memory().available), *memory_left_bytes()]) // num_local_ranks()


def used_bytes(device: torch.device) -> int:
    """Memory this process has taken: of the GPU at its peak, or of this machine now."""
    if device.type == "cuda":
        return int(torch.cuda.max_memory_allocated(device))
    return int(psutil.Process().memory_info().rss)
