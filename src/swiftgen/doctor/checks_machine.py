"""What `doctor` asks about the machine, whatever is written on it."""

from __future__ import annotations

import math
import shutil
import tempfile
from pathlib import Path

import psutil
import torch

from swiftgen.display.wording import size
from swiftgen.doctor.findings import Check, Finding
from swiftgen.forward.attention import flash_attn_installed
from swiftgen.native.build import found_compilers, kernels_for
from swiftgen.system.cache_folder import CACHE_VARIABLE, cache_folder, writable_by_others
from swiftgen.system.devices import free_bytes
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.machine import processor_name, read_gb_per_s, usable_cores, vector_units

_SMALL_DISK_BYTES = 2**30
_UNNEEDED = "converted"  # what earlier versions unpacked of GGUF files
_CPU = torch.device("cpu")
_ANY_HEAD_DIM = 64


def machine_checks(device: torch.device) -> dict[str, Check]:
    """The questions, by name.

    Args:
        device: where the model will run.
    """
    return {
        "processor": processor,
        "threads": threads,
        "gpu": gpu,
        "memory": lambda: memory(device),
        "bandwidth": lambda: bandwidth(device),
        "native_kernels": lambda: native_kernels(device),
        "flash_attn": lambda: flash_attn(device),
        "cache_folder": cache,
    }


def processor() -> Finding:
    """Its name, its vector units, and those that PyTorch uses."""
    name, units, used = processor_name(), vector_units(), torch.backends.cpu.get_cpu_capability()
    text = " · ".join([name, *([" ".join(units)] if units else []), f"PyTorch uses {used}"])
    return Finding(text, figures={"name": name, "units": units, "torch_uses": used})


def threads() -> Finding:
    """Threads of PyTorch against the cores they may use."""
    number, cores = torch.get_num_threads(), usable_cores()
    text = f"{number} {'thread' if number == 1 else 'threads'}, {cores:g} of the machine's "
    text += f"{psutil.cpu_count()} cores may be used"
    figures = {"threads": number, "usable_cores": cores, "cores": psutil.cpu_count()}
    fitting = max(1, math.floor(cores))
    if number > math.ceil(cores):
        advice = f"More threads than cores wait for each other: set OMP_NUM_THREADS={fitting}."
        return Finding(text, "note", advice, figures)
    # Two threads on one physical core share its units, so PyTorch takes one for each by default.
    useful = min(fitting, psutil.cpu_count(logical=False) or fitting)
    if number < useful:
        advice = f"Cores are left unused: set OMP_NUM_THREADS={useful}, or unset it."
        return Finding(text, "note", advice, figures)
    return Finding(text, figures=figures)


def gpu() -> Finding:
    """The CUDA devices that PyTorch sees."""
    names = [torch.cuda.get_device_name(i) for i in range(_num_gpus())]
    return Finding(", ".join(names) or "none that PyTorch can use", figures={"names": names})


def memory(device: torch.device) -> Finding:
    """What is free for a new allocation, of the device and of the machine."""
    free, total = free_bytes(_CPU), psutil.virtual_memory().total
    text = f"{size(free)} free of {size(total)}"
    figures = {"free_bytes": free, "total_bytes": total}
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        text += f" · GPU {size(free)} free of {size(total)}"
        figures |= {"gpu_free_bytes": free, "gpu_total_bytes": total}
    return Finding(text, figures=figures)


def bandwidth(device: torch.device) -> Finding:
    """How fast the memory is read that holds the weights."""
    gb_per_s = read_gb_per_s(device)
    return Finding(f"{gb_per_s:.1f} GB/s read from {device}", figures={"gb_per_s": round(gb_per_s, 2)})


def native_kernels(device: torch.device) -> Finding:
    """The kernels for CPUs, built now unless they are there."""
    compilers = found_compilers()
    figures = {"compilers": compilers, "built": False}
    if device.type != "cpu":
        return Finding(f"not used on {device}", figures=figures)
    try:
        kernels_for("native", _CPU, torch.float32, _ANY_HEAD_DIM)
    except SwiftgenError as error:
        advice = "Install g++ or clang++: without the native kernels a text is written at half the speed."
        if compilers:
            advice = "Set CXX to another C++ compiler, or repair it."
        return Finding(error.message, "note", advice, figures)
    return Finding(f"built · {compilers[0]}", figures=figures | {"built": True})


def flash_attn(device: torch.device) -> Finding:
    """Whether the package is there, and whether it would be used."""
    is_there, is_used = flash_attn_installed(), device.type == "cuda"
    text = f"{'installed' if is_there else 'not installed'}, {'used' if is_used else 'not used'} on {device}"
    figures = {"installed": is_there}
    if is_used and not is_there:
        text = f"not installed, PyTorch's own operators are used on {device}"
        return Finding(text, "note", "pip install flash-attn (the extra `flash` of swiftgen).", figures)
    return Finding(text, figures=figures)


def cache() -> Finding:
    """Where models, kernels, results of the check and what runs have learnt are kept, and the room there."""
    folder = cache_folder()
    problem = _cache_problem(folder)
    figures = {"path": str(folder), "writable": not problem}
    if problem:
        advice = f"Nothing new can be kept: repair it, or set {CACHE_VARIABLE} to another folder."
        return Finding(f"{folder} cannot be written: {problem}", "note", advice, figures)
    if place := writable_by_others(folder):
        figures["shared"] = str(place)
        advice = (
            f"Native kernels are not kept there. Take the right away (chmod go-w), or set {CACHE_VARIABLE}."
        )
        return Finding(f"{folder} · others may write to {place}", "note", advice, figures)
    free = shutil.disk_usage(_nearest(folder)).free
    figures["free_bytes"] = free
    text = f"{folder} · {size(free)} free"
    if unneeded := sum(file.stat().st_size for file in (folder / _UNNEEDED).rglob("*") if file.is_file()):
        figures["unneeded_bytes"] = unneeded
        advice = f"Delete {folder / _UNNEEDED}: GGUF files are read as they are now."
        return Finding(f"{text}, {size(unneeded)} not needed any more", "note", advice, figures)
    if free < _SMALL_DISK_BYTES:
        advice = f"Free some space, or set {CACHE_VARIABLE} to a folder on another disk."
        return Finding(text, "note", advice, figures)
    return Finding(text, figures=figures)


def _cache_problem(folder: Path) -> str:
    """Why nothing can be written there; empty if something can."""
    try:
        with tempfile.TemporaryFile(dir=_nearest(folder)):
            return ""
    except OSError as error:
        return error.strerror or str(error)


def _nearest(folder: Path) -> Path:
    """The folder, or the nearest above it that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def _num_gpus() -> int:
    return torch.cuda.device_count() if torch.cuda.is_available() else 0
