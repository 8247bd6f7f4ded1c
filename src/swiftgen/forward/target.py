"""Target: the one forward pass.

Everything the target computes goes through `Target.forward`: T rows, each at its own position, attending
to the committed prefix and to its ancestors. One live row is AR decoding, a tree is verification, a chain
is prefill. There is no second code path and so no second rounding.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from swiftgen.forward.arithmetic import Arithmetic, kinds_of_linears
from swiftgen.forward.attention import new_tree_pass, seen_keys, use_tree_attention
from swiftgen.forward.backend import Backend
from swiftgen.forward.cache import BLOCK_TOKENS, CacheShape, FullCache, KVCache
from swiftgen.forward.experts import use_independent_experts
from swiftgen.forward.linear import MakeLinear, linear_maker, replace_linears
from swiftgen.forward.native_layer import NativeLayer, fuse_layers
from swiftgen.forward.native_model import drafting_model, native_model
from swiftgen.forward.native_pass import NativePass, layer_kinds
from swiftgen.forward.passes import Pass, PassOutput
from swiftgen.forward.static_pass import StaticPass, StaticPasses
from swiftgen.forward.tree import DraftTree
from swiftgen.models.architectures import (
    embedding_multiplier,
    head_dim,
    layer_rotaries,
    layer_windows,
    logits_rule,
    take_final_norm,
)
from swiftgen.models.gguf_weights import device_of
from swiftgen.models.tensor_parallel import num_kv_heads
from swiftgen.native.structs import Product
from swiftgen.system.devices import send

LM_HEAD_ROWS = 32
"""Rows per lm_head call; a larger matrix product may choose a kernel that adds in another order."""


class Target:
    """A Hugging Face decoder whose attention is ours.

    Its layers are fused where `layers` knows them, else driven through the attention interface. The final
    norm is taken out (the heads need the state before it) and applied by `logits`. Once made, a target does
    not change.

    Args:
        model: A causal language model in eval mode; it is changed in place and belongs to the target.
        backend: For its device, dtype and width of heads.

    Attributes:
        windows: Sliding window of each layer, see `architectures.layer_windows`.
        pass_sizes: Rows that a pass may have, ascending; see `with_pass_sizes`.
        finish_logits: What the model does behind its lm_head, see `architectures.logits_rule`.
        is_drafting: Whether passes need not be exact; see `drafting`.

    Raises:
        SwiftgenError: If the native kernels are asked for, and do not fit the layers.
    """

    def __init__(self, model: PreTrainedModel, backend: Backend) -> None:
        self.config = model.config
        self.device, self.dtype = device_of(model), model.dtype
        use_tree_attention(model)
        use_independent_experts(model)
        self._base: nn.Module = model.base_model
        self._norm = take_final_norm(self._base)
        self.windows = layer_windows(self.config)
        self._kinds = layer_kinds(self.windows, layer_rotaries(self.config))
        self.pass_sizes: tuple[int, ...] = (BLOCK_TOKENS,)
        self.finish_logits = logits_rule(self.config)
        self._group = self.config.num_attention_heads // self.config.num_key_value_heads
        self._backend = backend
        make_linear = linear_maker(self.device, self.dtype, backend.kernels, backend.is_integer)
        self._arithmetic = self._take_over_layers(make_linear)
        self._lm_head: nn.Module = make_linear(model.lm_head, is_fine=True, is_wide=True)
        self._native = native_model(self._base, self._norm, self._lm_head)
        self._static_passes_of: WeakKeyDictionary[FullCache, StaticPasses] = WeakKeyDictionary()
        self.is_drafting = False

    def _take_over_layers(self, make_linear: MakeLinear) -> Arithmetic:
        """Let the layers compute our way, and say which it is."""
        is_fused = fuse_layers(self._base, make_linear, self._backend.kernels)
        if not is_fused:
            replace_linears(self._base, make_linear)
        layers: Any = self._base.layers
        return Arithmetic(
            self.device,
            self.dtype,
            self._backend,
            kinds_of_linears(self._base, self._backend),
            any(self.windows),
            is_fused,
            is_native=isinstance(layers[0], NativeLayer),
        )

    def with_pass_sizes(self, sizes: Sequence[int]) -> Target:
        """The same target, whose passes have other sizes, ascending."""
        return self._with(pass_sizes=tuple(sizes))

    def with_windows(self, windows: Sequence[int | None]) -> Target:
        """The same target with other sliding windows of its layers."""
        kinds = layer_kinds(windows, layer_rotaries(self.config))
        return self._with(windows=tuple(windows), _kinds=kinds)

    def drafting(self, lm_head: Product | None = None, num_columns: int | None = None) -> Target:
        """The same target as it drafts: need not be exact, but quick.

        Native passes are of any number of rows and in integers.

        Args:
            lm_head: Takes the place of the target's own, cut to some tokens.
            num_columns: How many of its columns are logits, the first ones; None is all.
        """
        if self._native is None:
            return self
        model, finish = drafting_model(self._native, lm_head), self.finish_logits
        return self._with(
            _native=model,
            is_drafting=True,
            pass_sizes=tuple(range(1, LM_HEAD_ROWS + 1)),
            finish_logits=lambda logits: finish(logits[:, :num_columns]),
        )

    def _with(self, **attributes: object) -> Target:
        other = copy.copy(self)
        vars(other).update(attributes, _static_passes_of=WeakKeyDictionary())
        return other

    @property
    def cache_shape(self) -> CacheShape:
        """Dimensions of a KV cache for this model."""
        config = self.config
        return CacheShape(
            config.num_hidden_layers,
            num_kv_heads(config),
            head_dim(config),
            self.dtype,
            self.device,
            self.windows if any(self.windows) else (),
        )

    @property
    def arithmetic(self) -> dict[str, object]:
        """What the rounding of a result depends on, beside the hardware."""
        return self._arithmetic.described()

    @property
    def is_native(self) -> bool:
        """Whether a pass is one native call."""
        return self._native is not None

    @property
    def max_rows(self) -> int:
        """Rows of the largest pass."""
        return self.pass_sizes[-1]

    def pass_size(self, num_rows: int) -> int:
        """The smallest allowed pass that holds `num_rows` rows."""
        return next(size for size in self.pass_sizes if size >= num_rows)

    @torch.inference_mode()
    def forward(
        self,
        tree: DraftTree,
        position: int,
        cache: KVCache,
        num_rows: int | None = None,
        is_prefill: bool = False,
        first: int = 0,
    ) -> PassOutput:
        """One pass over the nodes of a tree; a tree of more nodes than the largest pass takes several.

        Args:
            tree: Its nodes become rows in their order; the rest of the pass is padding.
            position: Absolute position of the root.
            num_rows: Rows of the pass, padding included; by default the smallest allowed pass.
            is_prefill: The rows are a chain, and nothing but another prefill has to agree with them.
            first: Node to begin with; those before have been computed over this cache, as it is.
        """
        parts = [
            self._forward_rows(tree, begin, position, cache, num_rows, is_prefill)
            for begin in range(first, len(tree), num_rows or self.max_rows)
        ]
        return PassOutput.joined(parts)

    @torch.inference_mode()
    def make_ready(self, cache: FullCache) -> None:
        """Prepare what can be prepared for passes over a cache, so that none of them has to wait for it."""
        if passes := self._static_passes(cache):
            passes.make_ready(self.pass_sizes, cache.length)

    def _static_passes(self, cache: KVCache) -> StaticPasses | None:
        """The passes with static shapes over this cache, if the model can be run by them."""
        prefix = self._backend.static_prefix
        if prefix is None or not self._arithmetic.is_static or not isinstance(cache, FullCache):
            return None
        if cache not in self._static_passes_of:
            passes = StaticPasses(self._run_rows, prefix, cache, self._group)
            self._static_passes_of[cache] = passes
        return self._static_passes_of[cache]

    def _run_rows(self, token_ids: Tensor, positions: Tensor, static: StaticPass) -> tuple[Tensor, Tensor]:
        hidden = self._run(token_ids, positions, static)[0]
        return hidden, self.logits(hidden, len(hidden))

    def _forward_rows(
        self,
        tree: DraftTree,
        first: int,
        position: int,
        cache: KVCache,
        num_rows: int | None,
        is_prefill: bool,
    ) -> PassOutput:
        """One pass over nodes of a tree from `first` on, as many as it holds."""
        live = min(len(tree) - first, num_rows or self.max_rows)
        size = num_rows or self.pass_size(live)
        if not is_prefill and (passes := self._static_passes(cache)):
            hidden, queries, logits = passes.run(tree, first, size, position)
            return PassOutput(hidden[:live], queries[:, :, :, :live], lambda: logits[:live])
        padding = size - live
        rows = slice(first, first + live)
        token_ids = torch.tensor([tree.tokens[rows] + tree.tokens[:1] * padding])
        so_far = torch.tensor(tree.depths[: first + live] + [0] * padding) + position
        visible = tree.visibility(first + size)[first:]
        tree_pass = self._new_pass(cache, visible, so_far, is_prefill)
        positions = send(so_far[None, first:], self.device)
        hidden = self._run(send(token_ids, self.device), positions, tree_pass)[0, :live]
        queries = tree_pass.stacked_queries()[:, :, :, :live]
        return PassOutput(hidden, queries, lambda: self.logits(hidden, num_rows))

    def _run(self, token_ids: Tensor, positions: Tensor, tree_pass: Pass) -> Tensor:
        """Hidden states before the final norm, `[1, T, hidden]`, of tokens and positions `[1, T]`."""
        base: Any = self._base
        if not self._arithmetic.is_fused:
            hidden: Tensor = base(
                input_ids=token_ids, position_ids=positions, use_cache=False, tree_pass=tree_pass
            ).last_hidden_state
            return hidden
        # What the model's own `forward` does, without the checks and masks that take a millisecond.
        if self._native and isinstance(tree_pass, NativePass) and tree_pass.has_all_layers:
            rotaries = base.rotary_emb(self._norm.weight, positions)
            return tree_pass.run(self._native, token_ids[0], rotaries).unsqueeze(0)
        hidden = base.embed_tokens(token_ids)
        if (factor := embedding_multiplier(self.config)) != 1:
            hidden = hidden * factor
        rotaries = base.rotary_emb(hidden, positions)
        for layer in base.layers:
            hidden = layer(hidden, position_embeddings=rotaries, tree_pass=tree_pass)
        return hidden

    def _new_pass(self, cache: KVCache, visible: Tensor, positions: Tensor, is_prefill: bool) -> Pass:
        """A pass over the last T rows of a tree, see `attention.new_tree_pass`."""
        backend = self._backend
        if self._arithmetic.is_native and backend.kernels:
            num_rows, num_so_far = visible.shape
            kinds, num_heads = self._kinds, self.config.num_attention_heads
            views = [cache.view(num_rows, num_so_far - num_rows, window) for window in kinds.windows]
            seen = [
                seen_keys(view, visible, positions, window)
                for view, window in zip(views, kinds.windows, strict=True)
            ]
            return NativePass(backend.kernels, kinds, views, seen, num_heads, is_prefill, self.is_drafting)
        return new_tree_pass(cache, self.windows, visible, positions, self._group, backend.prefix)

    def normed(self, hidden: Tensor) -> Tensor:
        """The model's final norm: what the lm_head reads, `[T, hidden]`."""
        normed: Tensor = self._norm(hidden)
        return normed

    def logits(self, hidden: Tensor, num_rows: int | None = None) -> Tensor:
        """Final norm and lm_head: `[T, hidden]` -> float32 `[T, vocab]`."""
        if self._native and self._backend.kernels:
            return self.finish_logits(self._backend.kernels.unembed(self._native, hidden))
        return self.unembed(self.normed(hidden), num_rows)

    @torch.inference_mode()
    def unembed(self, hidden: Tensor, num_rows: int | None = None) -> Tensor:
        """The lm_head and what follows it, padded like a pass: `[T, hidden]` -> float32 `[T, vocab]`."""
        logits = []
        for part in hidden.split(min(LM_HEAD_ROWS, self.max_rows)):
            size = min(LM_HEAD_ROWS, num_rows or self.pass_size(len(part)))
            padded = nn.functional.pad(part, (0, 0, 0, size - len(part)))
            logits.append(self.finish_logits(self._lm_head(padded)[: len(part)].float()))
        return logits[0] if len(logits) == 1 else torch.cat(logits)

    def prefill(
        self, token_ids: Sequence[int], cache: FullCache, on_progress: Callable[[int], None] | None = None
    ) -> PassOutput | None:
        """Append tokens to the cache in chains that end at block boundaries.

        Every chain is padded to one size, so the cache depends on the tokens alone. Returns the last
        pass (None without tokens).
        """
        output = None
        done = 0
        while done < len(token_ids):
            room = BLOCK_TOKENS - cache.num_tail_tokens
            chain = token_ids[done : done + room]
            tree = DraftTree(chain[0], max_depth=BLOCK_TOKENS)
            tree.add_path(0, chain[1:], "prompt")
            output = self.forward(tree, cache.length, cache, num_rows=BLOCK_TOKENS, is_prefill=True)
            cache.commit(range(len(chain)))
            done += len(chain)
            if on_progress:
                on_progress(done)
        return output
