"""The library of kernels: built once, by the C++ compiler of the machine for its own processor.

It is kept in the cache folder. Where that cannot be written, or others may write to it, each process builds
its own: a library is executed. Without a compiler PyTorch's operators do the same, at half the speed.
"""

from __future__ import annotations

import functools
import hashlib
import logging
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib import resources
from pathlib import Path

import torch

from swiftgen.native.kernels import Kernels
from swiftgen.system.cache_folder import building, cache_folder, writable_by_others
from swiftgen.system.cpuinfo import cpuinfo_lines
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.machine import usable_cores

MAX_HEAD_DIM = 512  # as in attention.cpp
_SOURCES = sorted(
    file.name for file in resources.files("swiftgen.native").iterdir() if file.name.endswith((".h", ".cpp"))
)
_FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-ffp-contract=fast", "-fPIC", "-shared", "-fopenmp")
_BUILD_TIMEOUT_S = 300

logger = logging.getLogger(__name__)


def kernels_for(attention: str, device: torch.device, dtype: torch.dtype, head_dim: int) -> Kernels | None:
    """The kernels for a preset's `model.attention`; None where PyTorch's operators are to be used.

    Raises:
        SwiftgenError: If they are asked for and cannot be had.
    """
    if attention not in ("auto", "native"):
        return None
    kernels: Kernels | None = None
    if device.type != "cpu" or dtype not in (torch.float32, torch.bfloat16) or head_dim > MAX_HEAD_DIM:
        problem = "they are for CPUs, bfloat16 or float32, and heads of at most 512"
    else:
        kernels, problem = _built()
    if kernels is None and attention == "native":
        raise SwiftgenError(
            f"the native CPU kernels cannot be used: {problem}", "use `--set model.attention=auto` otherwise"
        )
    return kernels


def found_compilers() -> list[str]:
    """The C++ compilers of this machine, in the order in which they are tried: $CXX, c++, g++, clang++."""
    return list(dict.fromkeys(filter(None, map(shutil.which, _compilers()))))


@functools.cache
def _built() -> tuple[Kernels | None, str]:
    """The kernels, or None and why not; built unless the cache folder has them."""
    problem = "no C++ compiler was found (install g++ or clang++)"
    folder = resources.files("swiftgen.native")
    sources = {name: folder.joinpath(name).read_text(encoding="utf-8") for name in _SOURCES}
    for compiler in found_compilers():
        try:
            return _built_by(compiler, sources), ""
        except (OSError, AttributeError, subprocess.SubprocessError) as error:
            output = getattr(error, "stderr", None) or str(error).encode()
            logger.info("the native kernels could not be built: %s", output.decode(errors="replace"))
            problem = f"{compiler} could not build them"
    return None, problem


def _built_by(compiler: str, sources: Mapping[str, str]) -> Kernels:
    version = subprocess.run([compiler, "--version"], capture_output=True, timeout=60, check=True).stdout
    described = "\n".join([*sources.values(), *_FLAGS, version.decode(errors="replace"), _processor()])
    build = hashlib.sha256(described.encode()).hexdigest()[:16]
    library = cache_folder() / "kernels" / f"{build}.so"
    try:
        if place := writable_by_others(library):
            raise SwiftgenError(f"others may write to {place}")
        if not library.exists():
            _build(compiler, sources, library)
    except SwiftgenError as error:
        logger.warning("the native kernels are built for this run alone: %s", error.message)
        with tempfile.TemporaryDirectory(prefix="swiftgen-") as folder:
            return Kernels(_compiled(compiler, sources, Path(folder)), build)
    try:
        return Kernels(library, build)
    except (OSError, AttributeError):
        library.unlink(missing_ok=True)  # damaged: built anew the next time
        raise


def _build(compiler: str, sources: Mapping[str, str], library: Path) -> None:
    with building(library) as work:
        if library.exists():
            return
        _compiled(compiler, sources, work).replace(library)


def _compiled(compiler: str, sources: Mapping[str, str], folder: Path) -> Path:
    """The library, built in a folder; its sources are compiled side by side."""
    for name, source in sources.items():
        (folder / name).write_text(source, encoding="utf-8")

    def run(*arguments: str, made: Path) -> str:
        command = [compiler, *_FLAGS, *arguments, "-o", str(made)]
        subprocess.run(command, capture_output=True, timeout=_BUILD_TIMEOUT_S, check=True)
        return str(made)

    made = folder / "kernels.so"
    files = [folder / name for name in sources if name.endswith(".cpp")]
    with ThreadPoolExecutor(max(1, int(usable_cores()))) as pool:
        objects = list(pool.map(lambda file: run("-c", str(file), made=file.with_suffix(".o")), files))
    run(*objects, made=made)
    if not made.exists():
        raise subprocess.SubprocessError(f"{compiler} wrote nothing")
    return made


def _compilers() -> Sequence[str]:
    return [os.environ.get("CXX", ""), "c++", "g++", "clang++"]


def _processor() -> str:
    """The processor's name and units; code built for one may not run on another."""
    found = {line for line in cpuinfo_lines() if line.startswith(("model name", "flags", "Features"))}
    return "\n".join(sorted(found)) or platform.processor() + platform.machine()
