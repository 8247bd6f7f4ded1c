"""What the processor is and can do, and how fast memory is read."""

from __future__ import annotations

import os
import platform
import statistics
import time

import torch

from swiftgen.system.cgroups import cpu_limits
from swiftgen.system.cpuinfo import cpuinfo_lines
from swiftgen.system.devices import free_bytes
from swiftgen.system.errors import SwiftgenError

VECTOR_UNITS = (
    *("avx2", "avx512f", "avx512_vnni", "avx512_bf16", "amx_bf16"),  # x86
    *("asimd", "sve", "i8mm", "bf16", "svebf16"),  # Arm
)
"""Units that decide about speed, by their names in /proc/cpuinfo."""
_READ_BYTES = {"cpu": 2**29, "cuda": 2**32}  # more than any cache holds, and long enough to time
_NUM_READS = 9


def processor_name() -> str:
    """As the maker calls it, as far as the system tells."""
    return _cpuinfo("model name") or platform.processor() or platform.machine()


def vector_units() -> list[str]:
    """Those of `VECTOR_UNITS` that the processor has; empty where the system does not tell."""
    found = (_cpuinfo("flags") or _cpuinfo("Features")).split()
    return [unit for unit in VECTOR_UNITS if unit in found]


def usable_cores() -> float:
    """Cores this process may use: of the machine, by its affinity, and by the limits of its container."""
    allowed = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return min([float(allowed), *cpu_limits()])


def read_gb_per_s(device: torch.device | str = "cpu", num_bytes: int | None = None) -> float:
    """Memory reads of all threads together, in GB/s: a sum over more than any cache holds, the median of 9.

    Args:
        device: whose memory.
        num_bytes: to read; None is 512 MiB on a CPU and 4 GiB on a GPU, or a quarter of what is free.

    Raises:
        SwiftgenError: if so little is free that caches would be measured.
    """
    device = torch.device(device)
    if num_bytes is None:
        num_bytes = min(_READ_BYTES[device.type], free_bytes(device) // 4)
        if num_bytes < _READ_BYTES[device.type] // 4:
            raise SwiftgenError("there is too little free memory to measure it in")
    numbers = torch.ones(num_bytes // 4, device=device)
    times_s = []
    for _ in range(_NUM_READS):
        begin = time.perf_counter()
        numbers.sum().item()  # waits for the device
        times_s.append(time.perf_counter() - begin)
    return num_bytes / statistics.median(times_s) / 1e9


def _cpuinfo(key: str) -> str:
    """The first value of a key; empty if there is none."""
    found = (line.partition(":") for line in cpuinfo_lines())
    return next((value.strip() for name, _, value in found if name.strip() == key), "")
