"""A pass by the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from swiftgen.forward.attention import cpu_flash, cpu_prefix
from swiftgen.forward.cache import CacheView
from swiftgen.forward.passes import Heads, Rotaries, Rotary
from swiftgen.native import structs
from swiftgen.native.kernels import Kernels


@dataclass(frozen=True)
class LayerKinds:
    """Which layers of a model are alike to a pass.

    Args:
        windows, rotaries: Of each kind, see `architectures.layer_windows` and `layer_rotaries`.
        places: The kind of each layer, and where its keys lie in a cache.
    """

    windows: tuple[int | None, ...]
    rotaries: tuple[str | None, ...]
    places: ctypes.Array[structs.LayerPlace]


def layer_kinds(windows: Sequence[int | None], rotaries: Sequence[str | None]) -> LayerKinds:
    """The kinds of layers with these windows and angles."""
    of_layers = list(zip(windows, rotaries, strict=True))
    kinds = list(dict.fromkeys(of_layers))
    places = (
        structs.LayerPlace(kinds.index(kind), windows[:layer].count(kind[0]))
        for layer, kind in enumerate(of_layers)
    )
    return LayerKinds(
        tuple(window for window, _ in kinds),
        tuple(rotary for _, rotary in kinds),
        (structs.LayerPlace * len(of_layers))(*places),
    )


class NativePass:
    """One pass over T rows, see `passes.Pass`.

    Args:
        views: For each kind what its rows attend to; gets their keys and values.
        seen: For each kind which of the keys of edge and tail each row sees, see `attention.seen_keys`.
        num_heads: Query heads.
        is_prefill: The pass has to agree with no other but itself, so attention is left to PyTorch's flash
            kernel, which knows no caps, where that is faster at many rows.
        is_draft: A row that sees all keys has to agree with no other, and is computed the quick way.

    Attributes:
        has_all_layers: Whether `run` can be used.
    """

    def __init__(
        self,
        kernels: Kernels,
        kinds: LayerKinds,
        views: Sequence[CacheView],
        seen: Sequence[Tensor],
        num_heads: int,
        is_prefill: bool = False,
        is_draft: bool = False,
    ) -> None:
        tail = views[0].tail_keys
        num_kv_heads, num_tail, head_dim = tail.shape[1:]
        group, num_rows = num_heads // num_kv_heads, len(seen[0])
        self._kernels, self._kinds, self._views = kernels, kinds, views
        self._is_draft = is_draft and num_rows == 1
        self._biases = [] if self._is_draft else [self._bias(each, group) for each in seen]
        shape = (len(kinds.places), num_kv_heads, group, num_rows, head_dim)
        self._queries = torch.empty(shape, dtype=tail.dtype)
        self._masks: list[Tensor] = []
        if is_prefill and not (tail.dtype == torch.bfloat16 and kernels.has_pairs(head_dim)):
            self._masks = [bias[:, : group * num_rows].T.to(tail.dtype).contiguous() for bias in self._biases]
        self.has_all_layers = not self._masks
        self._of_kinds = (structs.LayerKind * len(views))(*map(self._of_kind, range(len(views))))
        self._described = structs.Pass(
            is_bf16=structs.is_bf16(tail),
            num_threads=torch.get_num_threads(),
            num_rows=num_rows,
            num_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            num_tail=num_tail,
            num_kinds=len(views),
            is_draft=self._is_draft,
            kinds=ctypes.addressof(self._of_kinds),
            places=ctypes.addressof(kinds.places),
            queries=self._queries.data_ptr(),
        )
        self._workspace = kernels.workspace(self._described)
        self._described.workspace = self._workspace.data_ptr()

    def _bias(self, seen: Tensor, group: int) -> Tensor:
        """What is added to scores, float32 `[keys, padded rows]`; from `[T, keys]`."""
        num_rows, num_keys = seen.shape
        bias = torch.zeros(num_keys, self._kernels.padded_rows(group * num_rows))
        bias[:, : group * num_rows].masked_fill_(~seen.T.repeat(1, group), float("-inf"))
        return bias

    def _of_kind(self, kind: int) -> structs.LayerKind:
        view = self._views[kind]
        return structs.LayerKind(
            bias=None if self._is_draft else self._biases[kind].data_ptr(),
            edge_keys=structs.pointer(view.edge_keys),
            edge_values=structs.pointer(view.edge_values),
            prefix_keys=view.prefix_keys.data_ptr(),
            prefix_values=view.prefix_values.data_ptr(),
            tail_keys=view.tail_keys.data_ptr(),
            tail_values=view.tail_values.data_ptr(),
            prefix_stride=view.prefix_keys.stride(1),
            tail_stride=view.tail_keys.stride(1),
            prefix_layer_stride=view.prefix_keys.stride(0),
            tail_layer_stride=view.tail_keys.stride(0),
            num_edge=0 if view.edge_keys is None else view.edge_keys.shape[2],
            num_prefix=view.prefix_keys.shape[2],
        )

    def attend(self, layer: int, qkv: Tensor, rotary: Rotary, heads: Heads) -> Tensor:
        """See `Pass`; `rotary` is float32."""
        described = self._described
        self._turn(self._kinds.places[layer].kind, rotary)
        if self._masks and not heads.cap:
            self._kernels.rotate(described, heads.described, layer, qkv)
            return self._attend_by_flash(layer, heads.scaling)
        out = qkv.new_empty(1, qkv.shape[1], described.num_heads * described.head_dim)
        self._kernels.attend(described, heads.described, layer, qkv, out)
        return out

    def _turn(self, kind: int, rotary: Rotary) -> None:
        """Set the angles of the layers of a kind."""
        cos, signed_sin = rotary
        of_kind = self._of_kinds[kind]
        of_kind.cos, of_kind.signed_sin = cos.data_ptr(), signed_sin.data_ptr()
        self._described.rotary_dim = cos.shape[-1]

    def _attend_by_flash(self, layer: int, scaling: float) -> Tensor:
        place, queries = self._kinds.places[layer], self._queries[layer]
        view, mask = self._views[place.kind], self._masks[place.kind]
        q = queries.flatten(1, 2)  # [Hkv, G*T, D]
        keys, values = view.tail_with_edge(place.index)
        out, lse = cpu_flash(q, keys, values, scaling, mask)
        if view.prefix_keys.shape[2]:
            prefix = view.prefix_keys[place.index], view.prefix_values[place.index]
            before, lse_before = cpu_prefix(q, *prefix, scaling)
            weights = torch.softmax(torch.cat([lse, lse_before], dim=1), dim=1)
            out = (torch.cat([out, before], dim=1) * weights.unsqueeze(-1)).sum(dim=1)
        num_rows, head_dim = queries.shape[2:]
        return out.to(q.dtype).reshape(-1, num_rows, head_dim).transpose(0, 1).reshape(1, num_rows, -1)

    def run(self, model: structs.Model, token_ids: Tensor, rotaries: Rotaries) -> Tensor:
        """All layers at once: token ids `[T]` -> hidden states before the last norm, `[T, hidden]`."""
        for kind, rotary in enumerate(self._kinds.rotaries):
            self._turn(kind, rotaries[rotary])
        return self._kernels.forward(self._described, model, token_ids, self._queries.dtype)

    def stacked_queries(self) -> Tensor:
        """See `Pass`."""
        return self._queries
