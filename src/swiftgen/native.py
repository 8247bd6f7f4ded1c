"""CPU kernels written in C++: everything of a layer but its matrix products (`attention.cpp`, `kernels.cpp`),
and those too where weights have few bits (`quantised.cpp`).

They are built once, by the C++ compiler of the machine for its own processor, and kept in the cache folder.
Where that cannot be written, or others may write to it, each process builds its own: a library is executed.
Without a compiler the same is done by PyTorch operators, at about two thirds of the speed.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
import logging
import math
import os
import platform
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from swiftgen.attention import cpu_flash, cpu_prefix
from swiftgen.cache import CacheView
from swiftgen.errors import SwiftgenError
from swiftgen.model_store import building, cache_folder, writable_by_others

MAX_HEAD_DIM = 512  # as in attention.cpp
_SOURCES = (
    *("kernels.h", "keys.h", "pairs.h"),
    *("attention.cpp", "kernels.cpp", "quantised.cpp", "layers.cpp", "sampling.cpp", "drafts.cpp"),
)
_FLAGS = ("-O3", "-march=native", "-std=gnu++17", "-ffp-contract=fast", "-fPIC", "-shared", "-fopenmp")
_BUILD_TIMEOUT_S = 300

logger = logging.getLogger(__name__)


class _Pass(ctypes.Structure):
    """`Pass` of kernels.h."""

    _fields_ = (
        *[
            (name, ctypes.c_int32)
            for name in (
                *("is_bf16", "num_threads", "num_rows", "num_heads", "num_kv_heads", "head_dim"),
                *("num_prefix", "num_tail"),
            )
        ],
        *[
            (name, ctypes.c_void_p)
            for name in ("prefix_keys", "prefix_values", "tail_keys", "tail_values", "queries")
        ],
        *[
            (name, ctypes.c_int64)
            for name in ("prefix_stride", "tail_stride", "prefix_layer_stride", "tail_layer_stride")
        ],
        *[(name, ctypes.c_void_p) for name in ("cos", "signed_sin", "bias", "workspace")],
    )


class Heads(ctypes.Structure):
    """`Heads` of kernels.h: what is special in the attention of a layer.

    Args:
        scaling: Factor of the scores.
        norms: Weights `[D]` of the RMSNorms of query and key heads, and their epsilon.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("q_norm", "k_norm")],
        *[(name, ctypes.c_float) for name in ("norm_eps", "scaling")],
    )

    def __init__(self, scaling: float, norms: tuple[Tensor, Tensor, float] | None) -> None:
        super().__init__(scaling=scaling)
        self._kept = norms
        if norms:
            self.q_norm, self.k_norm = norms[0].data_ptr(), norms[1].data_ptr()
            self.norm_eps = norms[2]


class _Weights(ctypes.Structure):
    """`Weights` of quantised.cpp."""

    _fields_ = (
        *[(name, ctypes.c_int32) for name in ("bits", "in_features", "out_features")],
        *[(name, ctypes.c_void_p) for name in ("codes", "scales", "minima", "bias")],
    )


class DecoderLayer(ctypes.Structure):
    """`DecoderLayer` of layers.cpp; the norms are `(weight, epsilon)`."""

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("input_norm", "mlp_norm")],
        *[(name, ctypes.c_float) for name in ("input_eps", "mlp_eps")],
        ("heads", Heads),
        *[(name, ctypes.c_void_p) for name in ("qkv", "out", "gate_up", "down")],
    )

    def __init__(
        self,
        input_norm: tuple[Tensor, float],
        mlp_norm: tuple[Tensor, float],
        heads: Heads,
        qkv: Multiplication,
        out: Multiplication,
        gate_up: Multiplication,
        down: Multiplication,
    ) -> None:
        super().__init__(
            *(input_norm[0].data_ptr(), mlp_norm[0].data_ptr(), input_norm[1], mlp_norm[1], heads),
            *(qkv.address, out.address, gate_up.address, down.address),
        )


class Multiplication:
    """A matrix product with a weight in few bits, see `quantised.QuantisedWeight`.

    Args:
        bits: Of a code.
        codes, scales, minima: With 16 rows of the weight together: `[out / 16, in / 32, 16, ...]`.
        bias: `[out]`, or None.

    Attributes:
        address: Of its `Weights`.
    """

    def __init__(
        self,
        multiply: Any,
        bits: int,
        codes: Tensor,
        scales: Tensor,
        minima: Tensor | None,
        bias: Tensor | None,
    ) -> None:
        self._multiply = multiply
        self._kept = codes, scales, minima, bias
        num_groups, num_blocks, group = scales.shape
        self._in, self._out, self._group = num_blocks * 32, num_groups * group, group
        pointers = codes.data_ptr(), scales.data_ptr(), _pointer(minima), _pointer(bias)
        self._weights = _Weights(bits, self._in, self._out, *pointers)
        self.address = ctypes.addressof(self._weights)

    def __call__(self, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        x = x.contiguous()
        num_rows = x.numel() // self._in
        out = x.new_empty(*x.shape[:-1], self._out)
        scratch = torch.empty(-(-num_rows // self._group) * self._group * self._in)
        self._multiply(
            *(_is_bf16(x), x.data_ptr(), self.address, out.data_ptr(), num_rows),
            *(torch.get_num_threads(), scratch.data_ptr()),
        )
        return out


class Cell(ctypes.Structure):
    """`Cell` of drafts.cpp: recurrent draft heads with the parts of the target they read.

    Args:
        norms: Weights `[hidden]` of the RMSNorms of state, token and output.
        eps: Of the norms.
        embedding: `[vocab, hidden]`.
        gate_up, down, lm_head: Matrix products.
    """

    _fields_ = (
        *[(name, ctypes.c_void_p) for name in ("state_norm", "token_norm", "post_norm", "embedding")],
        *[(name, ctypes.c_void_p) for name in ("gate_up", "down", "lm_head")],
        ("eps", ctypes.c_float),
    )

    def __init__(
        self,
        norms: Sequence[Tensor],
        eps: float,
        embedding: Tensor,
        gate_up: Multiplication,
        down: Multiplication,
        lm_head: Multiplication,
    ) -> None:
        products = gate_up, down, lm_head
        super().__init__(
            *(tensor.data_ptr() for tensor in (*norms, embedding)),
            *(product.address for product in products),
            eps,
        )
        self._kept = norms, embedding, products


class Kernels:
    """The library. Tensors must be contiguous, on the CPU, all bfloat16 or all float32.

    Attributes:
        build: Identifies source, compiler and processor: other builds may round differently.
        has_pairs: Whether attention in bfloat16 is as fast as PyTorch's with many rows.
    """

    def __init__(self, library: Path, build: str) -> None:
        self.build = build
        self._library = lib = ctypes.CDLL(str(library))
        pointer, number = ctypes.c_void_p, ctypes.c_int
        self.has_pairs = bool(lib.swiftgen_has_pairs())
        lib.swiftgen_padded_rows.argtypes = [number]
        lib.swiftgen_workspace.argtypes, lib.swiftgen_workspace.restype = [pointer], ctypes.c_int64
        lib.swiftgen_attend.argtypes = [pointer, pointer, number, pointer, pointer]
        lib.swiftgen_rotate.argtypes = [pointer, pointer, number, pointer]
        lib.swiftgen_layers.argtypes = [pointer, pointer, number, pointer, pointer]
        lib.swiftgen_layers_memory.argtypes = [pointer, number, number]
        lib.swiftgen_layers_memory.restype = ctypes.c_int64
        lib.swiftgen_rms_norm.argtypes = [
            *(number, pointer, pointer, pointer, pointer, ctypes.c_float, pointer, number, number)
        ]
        lib.swiftgen_silu_mul.argtypes = [number, pointer, pointer, number, number]
        lib.swiftgen_multiply.argtypes = [*(number, pointer, pointer, pointer, number, number, pointer)]
        lib.swiftgen_narrow.argtypes = [
            *(pointer, number, ctypes.c_int64, pointer, ctypes.c_int64, ctypes.c_float),
            *(pointer, ctypes.c_float, ctypes.c_float, pointer, pointer),
        ]
        lib.swiftgen_narrow.restype = ctypes.c_int64
        lib.swiftgen_score.argtypes = [
            *(pointer, number, ctypes.c_int64, pointer, ctypes.c_int64, pointer, pointer),
            *(ctypes.c_int64, ctypes.c_float, ctypes.c_float, pointer),
        ]
        lib.swiftgen_advance.argtypes = [
            *(number, pointer, pointer, pointer, number, number, number, pointer, pointer)
        ]
        names = "attend", "rotate", "rms_norm", "silu_mul", "multiply", "layers", "score", "advance"
        for name in names:
            getattr(lib, f"swiftgen_{name}").restype = None

    def rms_norm(self, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        """RMSNorm over the last dimension, rounded once."""
        out = torch.empty_like(x)
        self._rms_norm(x, None, None, weight, eps, out)
        return out

    def add_rms_norm(self, x: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        """`x + delta`, and its RMSNorm."""
        total, out = torch.empty_like(x), torch.empty_like(x)
        self._rms_norm(x, delta, total, weight, eps, out)
        return total, out

    def silu_mul(self, gate_up: Tensor) -> Tensor:
        """`silu(gate) * up` of `[..., 2 * width]`, gate first: `[..., width]`."""
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        self._library.swiftgen_silu_mul(
            *(_is_bf16(out), gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
        )
        return out

    def multiplication(
        self, bits: int, codes: Tensor, scales: Tensor, minima: Tensor | None, bias: Tensor | None
    ) -> Multiplication:
        """A matrix product, see `Multiplication`."""
        return Multiplication(self._library.swiftgen_multiply, bits, codes, scales, minima, bias)

    def advance(
        self, cell: Cell, states: Tensor, token_ids: Tensor, num_columns: int
    ) -> tuple[Tensor, Tensor]:
        """States of draft heads one position on, `[N, hidden]`, and float32 logits there, `[N, num_columns]`.

        Args:
            states: `[N, hidden]`.
            token_ids: int64 `[N]`, the token that follows each state.
            num_columns: Of the lm_head, the first ones.
        """
        states = states.contiguous()
        next_states, logits = torch.empty_like(states), torch.empty(len(states), num_columns)
        self._library.swiftgen_advance(
            *(_is_bf16(states), ctypes.addressof(cell), states.data_ptr(), token_ids.data_ptr()),
            *(len(states), num_columns, torch.get_num_threads(), next_states.data_ptr(), logits.data_ptr()),
        )
        return next_states, logits

    def narrow(
        self, logits: Tensor, windows: Tensor, theta: float, bias: Tensor, reach: float, slack: float
    ) -> Tensor:
        """Penalty and suppression in place, and the columns that are near the largest logit of some row.

        Args:
            logits: float32 `[T, vocab]`.
            windows: int64 `[T, window]`, columns that are penalised once.
            theta: Penalty value.
            bias: float32 `[vocab]`, 0 or -inf.
            reach: How far below the largest logit a column may be, plus `slack * (1 + |largest|)`.

        Returns:
            int64, ascending.
        """
        num_rows, size = logits.shape
        marks, columns = torch.empty(size, dtype=torch.uint8), torch.empty(size, dtype=torch.int64)
        count = self._library.swiftgen_narrow(
            *(logits.data_ptr(), num_rows, size, windows.data_ptr(), windows.shape[1], theta),
            *(bias.data_ptr(), reach, slack, marks.data_ptr(), columns.data_ptr()),
        )
        return columns[:count]

    def score(
        self,
        logits: Tensor,
        columns: Tensor,
        token_ids: Tensor,
        positions: Tensor,
        seed: int,
        temperature: float,
        min_p: float,
    ) -> Tensor:
        """Temperature, min-p and noise of some columns, see `Sampler.scores`: float64 `[T, C]`.

        Args:
            logits: float32 `[T, vocab]`.
            columns, token_ids: int64 `[C]`, columns and the tokens they stand for.
            positions: int64 `[T]`.
        """
        num_rows, size = logits.shape
        scores = torch.empty(num_rows, len(columns), dtype=torch.float64)
        token_ids, positions = token_ids.contiguous(), positions.contiguous()
        self._library.swiftgen_score(
            *(logits.data_ptr(), num_rows, size, columns.data_ptr(), len(columns), token_ids.data_ptr()),
            *(positions.data_ptr(), seed, temperature, math.log(min_p), scores.data_ptr()),
        )
        return scores

    def padded_rows(self, num_rows: int) -> int:
        """Query rows of a KV head as they lie in vectors."""
        padded: int = self._library.swiftgen_padded_rows(num_rows)
        return padded

    def workspace(self, described: _Pass) -> Tensor:
        """Memory for a pass."""
        return torch.empty(self._library.swiftgen_workspace(ctypes.addressof(described)))

    def attend(self, described: _Pass, heads: Heads, layer: int, qkv: Tensor, attended: Tensor) -> None:
        """RoPE, write to the cache, attend."""
        self._library.swiftgen_attend(
            *(ctypes.addressof(described), ctypes.addressof(heads), layer),
            *(qkv.data_ptr(), attended.data_ptr()),
        )

    def rotate(self, described: _Pass, heads: Heads, layer: int, qkv: Tensor) -> None:
        """RoPE, write to the cache."""
        self._library.swiftgen_rotate(
            *(ctypes.addressof(described), ctypes.addressof(heads), layer, qkv.data_ptr())
        )

    def run_layers(self, described: _Pass, layers: ctypes.Array[DecoderLayer], hidden: Tensor) -> None:
        """Take hidden states `[1, T, hidden]` through all layers, in place."""
        num_rows = hidden.shape[1]
        memory = torch.empty(
            self._library.swiftgen_layers_memory(ctypes.addressof(layers), _is_bf16(hidden), num_rows),
            dtype=torch.uint8,
        )
        self._library.swiftgen_layers(
            *(ctypes.addressof(described), ctypes.addressof(layers), len(layers)),
            *(hidden.data_ptr(), memory.data_ptr()),
        )

    def _rms_norm(
        self, x: Tensor, delta: Tensor | None, total: Tensor | None, weight: Tensor, eps: float, out: Tensor
    ) -> None:
        width = x.shape[-1]
        self._library.swiftgen_rms_norm(
            *(_is_bf16(x), x.data_ptr(), _pointer(delta), _pointer(total), weight.data_ptr(), eps),
            *(out.data_ptr(), x.numel() // width, width),
        )


class NativePass:
    """One pass over T rows, see `attention.TreePass`.

    Args:
        view: What the rows attend to; gets their keys and values.
        visible: Which row sees which, bool `[T, rows of the tree so far]`.
        num_heads: Query heads.
        is_prefill: The pass has to agree with no other but itself, so attention is left to PyTorch's flash
            kernel where that is faster at many rows.

    Attributes:
        has_all_layers: Whether `run_layers` can be used.
    """

    def __init__(
        self,
        kernels: Kernels,
        view: CacheView,
        visible: Tensor,
        num_heads: int,
        is_prefill: bool = False,
    ) -> None:
        num_layers, num_kv_heads, num_tail, head_dim = view.tail_keys.shape
        group, num_rows = num_heads // num_kv_heads, len(visible)
        self._kernels, self._view = kernels, view
        self._bias = torch.zeros(num_tail, kernels.padded_rows(group * num_rows))
        own = self._bias[num_tail - visible.shape[1] :, : group * num_rows]
        own.masked_fill_(~visible.T.repeat(1, group), float("-inf"))
        shape = (num_layers, num_kv_heads, group, num_rows, head_dim)
        self._queries = torch.empty(shape, dtype=view.tail_keys.dtype)
        self._mask: Tensor | None = None
        if is_prefill and not (kernels.has_pairs and view.tail_keys.dtype == torch.bfloat16):
            mask = self._bias[:, : group * num_rows].T
            self._mask = mask.to(view.tail_keys.dtype, memory_format=torch.contiguous_format)
        self.has_all_layers = self._mask is None
        self._described = _Pass(
            is_bf16=_is_bf16(view.tail_keys),
            num_threads=torch.get_num_threads(),
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_prefix=view.prefix_keys.shape[2],
            num_tail=num_tail,
            prefix_keys=view.prefix_keys.data_ptr(),
            prefix_values=view.prefix_values.data_ptr(),
            tail_keys=view.tail_keys.data_ptr(),
            tail_values=view.tail_values.data_ptr(),
            queries=self._queries.data_ptr(),
            prefix_stride=view.prefix_keys.stride(1),
            tail_stride=view.tail_keys.stride(1),
            prefix_layer_stride=view.prefix_keys.stride(0),
            tail_layer_stride=view.tail_keys.stride(0),
            bias=self._bias.data_ptr(),
        )
        self._workspace = kernels.workspace(self._described)
        self._described.workspace = self._workspace.data_ptr()

    def attend(self, layer: int, qkv: Tensor, rotary: tuple[Tensor, Tensor], heads: Heads) -> Tensor:
        """RoPE, write keys and values to the cache, attend.

        Args:
            layer: Its index.
            qkv: `[1, T, (H + 2 Hkv) * D]`.
            rotary: Cosine and signed sine, float32 `[T, 1, D]`.

        Returns:
            `[1, T, H * D]`.
        """
        described = self._described
        described.cos, described.signed_sin = rotary[0].data_ptr(), rotary[1].data_ptr()
        if self._mask is not None:
            self._kernels.rotate(described, heads, layer, qkv)
            return self._attend_by_flash(layer, heads.scaling, self._mask)
        out = qkv.new_empty(1, qkv.shape[1], described.num_heads * described.head_dim)
        self._kernels.attend(described, heads, layer, qkv, out)
        return out

    def _attend_by_flash(self, layer: int, scaling: float, mask: Tensor) -> Tensor:
        view, queries = self._view, self._queries[layer]
        q = queries.flatten(1, 2)  # [Hkv, G*T, D]
        out, lse = cpu_flash(q, view.tail_keys[layer], view.tail_values[layer], scaling, mask)
        if view.prefix_keys.shape[2]:
            before, lse_before = cpu_prefix(q, view.prefix_keys[layer], view.prefix_values[layer], scaling)
            weights = torch.softmax(torch.cat([lse, lse_before], dim=1), dim=1)
            out = (torch.cat([out, before], dim=1) * weights.unsqueeze(-1)).sum(dim=1)
        num_rows, head_dim = queries.shape[2:]
        return out.to(q.dtype).reshape(-1, num_rows, head_dim).transpose(0, 1).reshape(1, num_rows, -1)

    def run_layers(
        self, layers: ctypes.Array[DecoderLayer], hidden: Tensor, rotary: tuple[Tensor, Tensor]
    ) -> Tensor:
        """All layers at once: hidden states `[1, T, hidden]` before them -> after them.

        Args:
            rotary: As in `attend`.
        """
        described = self._described
        described.cos, described.signed_sin = rotary[0].data_ptr(), rotary[1].data_ptr()
        hidden = hidden.clone()
        self._kernels.run_layers(described, layers, hidden)
        return hidden

    def stacked_queries(self) -> Tensor:
        """`[num_layers, Hkv, G, T, D]`."""
        return self._queries


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
    folder = resources.files("swiftgen")
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
    """The library, built in a folder."""
    for name, source in sources.items():
        (folder / name).write_text(source, encoding="utf-8")
    made = folder / "kernels.so"
    files = [str(folder / name) for name in sources if name.endswith(".cpp")]
    command = [compiler, *_FLAGS, *files, "-o", str(made)]
    subprocess.run(command, capture_output=True, timeout=_BUILD_TIMEOUT_S, check=True)
    if not made.exists():
        raise subprocess.SubprocessError(f"{compiler} wrote nothing")
    return made


def _compilers() -> Sequence[str]:
    return [os.environ.get("CXX", ""), "c++", "g++", "clang++"]


def _processor() -> str:
    """The processor's name and units; code built for one may not run on another."""
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() + platform.machine()
    return "\n".join(sorted({line for line in lines if line.startswith(("model name", "flags", "Features"))}))


def _is_bf16(tensor: Tensor) -> bool:
    return tensor.dtype == torch.bfloat16


def _pointer(tensor: Tensor | None) -> int | None:
    return None if tensor is None else tensor.data_ptr()
