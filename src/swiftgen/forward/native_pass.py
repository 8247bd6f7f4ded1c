"""A pass by the native kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from swiftgen.forward.attention import cpu_flash, cpu_prefix
from swiftgen.forward.cache import CacheView
from swiftgen.forward.passes import Heads, Rotary
from swiftgen.native import structs
from swiftgen.native.kernels import Kernels


class NativePass:
    """One pass over T rows, see `passes.Pass`.

    Args:
        view: What the rows attend to; gets their keys and values.
        visible: Which row sees which, bool `[T, rows of the tree so far]`.
        num_heads: Query heads.
        is_prefill: The pass has to agree with no other but itself, so attention is left to PyTorch's flash
            kernel where that is faster at many rows.
        is_draft: A row that sees all keys has to agree with no other, and is computed the quick way.

    Attributes:
        has_all_layers: Whether `run` can be used.
    """

    def __init__(
        self,
        kernels: Kernels,
        view: CacheView,
        visible: Tensor,
        num_heads: int,
        is_prefill: bool = False,
        is_draft: bool = False,
    ) -> None:
        num_layers, num_kv_heads, num_tail, head_dim = view.tail_keys.shape
        group, num_rows = num_heads // num_kv_heads, len(visible)
        self._kernels, self._view = kernels, view
        is_draft = is_draft and num_rows == 1
        self._bias = torch.empty(0)
        if not is_draft:
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
        self._described = structs.Pass(
            is_bf16=structs.is_bf16(view.tail_keys),
            num_threads=torch.get_num_threads(),
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_prefix=view.prefix_keys.shape[2],
            num_tail=num_tail,
            is_draft=is_draft,
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

    def attend(self, layer: int, qkv: Tensor, rotary: Rotary, heads: Heads) -> Tensor:
        """See `Pass`; `rotary` is float32."""
        described = self._described
        described.cos, described.signed_sin = rotary[0].data_ptr(), rotary[1].data_ptr()
        if self._mask is not None:
            self._kernels.rotate(described, heads.described, layer, qkv)
            return self._attend_by_flash(layer, heads.scaling, self._mask)
        out = qkv.new_empty(1, qkv.shape[1], described.num_heads * described.head_dim)
        self._kernels.attend(described, heads.described, layer, qkv, out)
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

    def run(self, model: structs.Model, token_ids: Tensor, rotary: Rotary) -> Tensor:
        """All layers at once: token ids `[T]` -> hidden states before the last norm, `[T, hidden]`."""
        described = self._described
        described.cos, described.signed_sin = rotary[0].data_ptr(), rotary[1].data_ptr()
        return self._kernels.forward(described, model, token_ids, self._queries.dtype)

    def stacked_queries(self) -> Tensor:
        """See `Pass`."""
        return self._queries
