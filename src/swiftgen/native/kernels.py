"""The kernels as functions of tensors."""

from __future__ import annotations

import ctypes
import math
from pathlib import Path

import torch
from torch import Tensor

from swiftgen.native.structs import Cell, Heads, Model, Norm, Pass, Product, check_layouts, is_bf16
from swiftgen.native.weights import PackedWeight


class Kernels:
    """The library. Tensors must be contiguous, on the CPU, all bfloat16 or all float32.

    Attributes:
        build: Identifies source, compiler and processor: other builds may round differently.
    """

    def __init__(self, library: Path, build: str) -> None:
        self.build = build
        self._library = lib = ctypes.CDLL(str(library))
        check_layouts(lib)
        address, number, size = ctypes.c_void_p, ctypes.c_int, ctypes.c_int64
        lib.swiftgen_has_pairs.argtypes = [number]
        lib.swiftgen_padded_rows.argtypes = [number]
        lib.swiftgen_workspace.argtypes, lib.swiftgen_workspace.restype = [address], ctypes.c_int64
        lib.swiftgen_attend.argtypes = [address, address, number, address, address]
        lib.swiftgen_rotate.argtypes = [address, address, number, address]
        lib.swiftgen_forward.argtypes = [address] * 5
        lib.swiftgen_unembed.argtypes = [address, number, address, number, number, address, address]
        lib.swiftgen_unembed_memory.argtypes = [address, number, number]
        lib.swiftgen_unembed_memory.restype = size
        lib.swiftgen_forward_memory.argtypes = [address, number, number, number]
        lib.swiftgen_forward_memory.restype = size
        lib.swiftgen_rms_norm.argtypes = [*(number, address, address, address, number, number)]
        lib.swiftgen_add.argtypes = [
            *(number, address, address, address, ctypes.c_float, address, number, number)
        ]
        lib.swiftgen_gate.argtypes = [*(number, number, address, address, number, number)]
        lib.swiftgen_multiply.argtypes = [number, address, address, address, number, number, address]
        lib.swiftgen_prepared_bytes.argtypes, lib.swiftgen_prepared_bytes.restype = [number] * 3, size
        lib.swiftgen_packed_bytes.argtypes, lib.swiftgen_packed_bytes.restype = [number, size, size], size
        lib.swiftgen_pack.argtypes = [number, address, address, size, size, address, number]
        lib.swiftgen_unpack.argtypes = [number, address, address, size, size, address]
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
        names = (
            *("attend", "rotate", "rms_norm", "add", "gate", "multiply", "forward", "score", "advance"),
            *("pack", "unpack", "unembed"),
        )
        for name in names:
            getattr(lib, f"swiftgen_{name}").restype = None

    def rms_norm(self, x: Tensor, norm: Norm) -> Tensor:
        """RMSNorm over the last dimension, rounded once."""
        out, width = torch.empty_like(x), x.shape[-1]
        self._library.swiftgen_rms_norm(
            *(is_bf16(x), x.data_ptr(), ctypes.addressof(norm)),
            *(out.data_ptr(), x.numel() // width, width),
        )
        return out

    def add(self, x: Tensor, delta: Tensor, norm: Norm, scale: float) -> Tensor:
        """`x + scale * norm(delta)`, rounded once."""
        out, width = torch.empty_like(x), x.shape[-1]
        self._library.swiftgen_add(
            *(is_bf16(x), x.data_ptr(), delta.data_ptr(), ctypes.addressof(norm), scale),
            *(out.data_ptr(), x.numel() // width, width),
        )
        return out

    def gate(self, gate_up: Tensor, activation: int) -> Tensor:
        """`activation(gate) * up` of `[..., 2 * width]`, gate first: `[..., width]`.

        Args:
            activation: Its number among `structs.ACTIVATIONS`.
        """
        width = gate_up.shape[-1] // 2
        out = gate_up.new_empty(*gate_up.shape[:-1], width)
        self._library.swiftgen_gate(
            *(is_bf16(out), activation, gate_up.data_ptr(), out.data_ptr(), out.numel() // width, width)
        )
        return out

    def can_pack(self, type_number: int, out_features: int, in_features: int) -> bool:
        """Whether there are products with weights of this type and shape."""
        return bool(self._library.swiftgen_packed_bytes(type_number, out_features, in_features))

    def pack(
        self, type_number: int, rows: Tensor, in_features: int, order: Tensor | None = None
    ) -> PackedWeight:
        """A weight from the rows of a GGUF tensor; ask `can_pack` first.

        Args:
            rows: uint8 `[out, bytes]`.
            order: int64 `[out]`, which row becomes the first, second, ...; None is as they are.
        """
        rows, out_features = rows.contiguous(), len(rows)
        order = torch.arange(out_features) if order is None else order.contiguous()
        num_bytes = self._library.swiftgen_packed_bytes(type_number, out_features, in_features)
        data = torch.zeros(num_bytes, dtype=torch.uint8)
        self._library.swiftgen_pack(
            *(type_number, rows.data_ptr(), order.data_ptr(), out_features, in_features),
            *(data.data_ptr(), torch.get_num_threads()),
        )
        return PackedWeight(type_number, out_features, in_features, data)

    def unpack(self, weight: PackedWeight, rows: Tensor) -> Tensor:
        """Rows of a weight as they are multiplied with: float32 `[N, in]`.

        Args:
            rows: int64 `[N]`, which.
        """
        rows = rows.contiguous()
        out = torch.empty(len(rows), weight.in_features)
        self._library.swiftgen_unpack(
            *(weight.type_number, weight.data.data_ptr(), rows.data_ptr(), len(rows)),
            *(weight.in_features, out.data_ptr()),
        )
        return out

    def multiply(self, product: Product, x: Tensor) -> Tensor:
        """`[..., in]` -> `[..., out]`."""
        x = x.contiguous()
        num_rows, num_threads = x.numel() // product.in_features, torch.get_num_threads()
        dtype = torch.float32 if product.is_wide else x.dtype
        out = torch.empty(*x.shape[:-1], product.out_features, dtype=dtype)
        num_bytes = self._library.swiftgen_prepared_bytes(num_rows, product.in_features, num_threads)
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._library.swiftgen_multiply(
            *(is_bf16(x), x.data_ptr(), ctypes.addressof(product), out.data_ptr(), num_rows),
            *(num_threads, memory.data_ptr()),
        )
        return out

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

    def has_pairs(self, head_dim: int) -> bool:
        """Whether attention in bfloat16 is as fast as PyTorch's with many rows."""
        return bool(self._library.swiftgen_has_pairs(head_dim))

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

    def forward(self, described: Pass, model: Model, token_ids: Tensor, dtype: torch.dtype) -> Tensor:
        """Take tokens through the layers of a model: hidden states before the last norm, `[T, hidden]`.

        Args:
            token_ids: int64 `[T]`.
        """
        num_rows, is_half = len(token_ids), int(dtype == torch.bfloat16)
        num_bytes = self._library.swiftgen_forward_memory(
            *(ctypes.addressof(model), is_half, num_rows, described.num_threads)
        )
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        hidden = torch.empty(num_rows, model.hidden_size, dtype=dtype)
        self._library.swiftgen_forward(
            *(ctypes.addressof(described), ctypes.addressof(model), token_ids.data_ptr()),
            *(hidden.data_ptr(), memory.data_ptr()),
        )
        return hidden

    def unembed(self, model: Model, hidden: Tensor) -> Tensor:
        """The last norm and the lm_head: `[T, hidden]` -> float32 `[T, vocab]`."""
        hidden, num_threads = hidden.contiguous(), torch.get_num_threads()
        logits = torch.empty(len(hidden), model.lm_head_product.out_features)
        num_bytes = self._library.swiftgen_unembed_memory(
            *(ctypes.addressof(model), len(hidden), num_threads)
        )
        memory = torch.empty(num_bytes, dtype=torch.uint8)
        self._library.swiftgen_unembed(
            *(ctypes.addressof(model), is_bf16(hidden), hidden.data_ptr(), len(hidden)),
            *(num_threads, logits.data_ptr(), memory.data_ptr()),
        )
        return logits
