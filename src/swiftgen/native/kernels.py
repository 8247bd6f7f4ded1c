"""The kernels as functions of tensors."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from swiftgen.native.structs import Cell, DecoderLayer, Heads, Multiplication, Pass, is_bf16, pointer


class Kernels:
    """The library. Tensors must be contiguous, on the CPU, all bfloat16 or all float32.

    Attributes:
        build: Identifies source, compiler and processor: other builds may round differently.
        has_pairs: Whether attention in bfloat16 is as fast as PyTorch's with many rows.
    """

    def __init__(self, library: Path, build: str) -> None:
        self.build = build
        self._library = lib = ctypes.CDLL(str(library))
        address, number = ctypes.c_void_p, ctypes.c_int
        self.has_pairs = bool(lib.swiftgen_has_pairs())
        lib.swiftgen_padded_rows.argtypes = [number]
        lib.swiftgen_workspace.argtypes, lib.swiftgen_workspace.restype = [address], ctypes.c_int64
        lib.swiftgen_attend.argtypes = [address, address, number, address, address]
        lib.swiftgen_rotate.argtypes = [address, address, number, address]
        lib.swiftgen_layers.argtypes = [address, address, number, address, address]
        lib.swiftgen_layers_memory.argtypes = [address, number, number]
        lib.swiftgen_layers_memory.restype = ctypes.c_int64
        lib.swiftgen_rms_norm.argtypes = [
            *(number, address, address, address, address, ctypes.c_float, address, number, number)
        ]
        lib.swiftgen_silu_mul.argtypes = [number, address, address, number, number]
        lib.swiftgen_multiply.argtypes = [*(number, address, address, address, number, number, address)]
        lib.swiftgen_narrow.argtypes = [
            *(address, number, ctypes.c_int64, address, ctypes.c_int64, ctypes.c_float),
            *(address, ctypes.c_float, ctypes.c_float, address, address),
        ]
        lib.swiftgen_narrow.restype = ctypes.c_int64
        lib.swiftgen_score.argtypes = [
            *(address, number, ctypes.c_int64, address, ctypes.c_int64, address, address),
            *(ctypes.c_int64, ctypes.c_float, ctypes.c_float, address),
        ]
        lib.swiftgen_advance.argtypes = [
            *(number, address, address, address, number, number, number, address, address)
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
            *(is_bf16(out), gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
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
            *(is_bf16(states), ctypes.addressof(cell), states.data_ptr(), token_ids.data_ptr()),
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

    def workspace(self, described: Pass) -> Tensor:
        """Memory for a pass."""
        return torch.empty(self._library.swiftgen_workspace(ctypes.addressof(described)))

    def attend(self, described: Pass, heads: Heads, layer: int, qkv: Tensor, attended: Tensor) -> None:
        """RoPE, write to the cache, attend."""
        self._library.swiftgen_attend(
            *(ctypes.addressof(described), ctypes.addressof(heads), layer),
            *(qkv.data_ptr(), attended.data_ptr()),
        )

    def rotate(self, described: Pass, heads: Heads, layer: int, qkv: Tensor) -> None:
        """RoPE, write to the cache."""
        self._library.swiftgen_rotate(
            *(ctypes.addressof(described), ctypes.addressof(heads), layer, qkv.data_ptr())
        )

    def run_layers(self, described: Pass, layers: ctypes.Array[DecoderLayer], hidden: Tensor) -> None:
        """Take hidden states `[1, T, hidden]` through all layers, in place."""
        num_rows = hidden.shape[1]
        memory = torch.empty(
            self._library.swiftgen_layers_memory(ctypes.addressof(layers), is_bf16(hidden), num_rows),
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
            *(is_bf16(x), x.data_ptr(), pointer(delta), pointer(total), weight.data_ptr(), eps),
            *(out.data_ptr(), x.numel() // width, width),
        )
