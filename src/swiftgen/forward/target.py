"""Target: the one forward pass.

Everything the target computes goes through `Target.forward`: T rows, each at its own position, attending
to the committed prefix and to its ancestors. One live row is AR decoding, a tree is verification, a chain
is prefill. There is no second code path and so no second rounding.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from transformers import AttentionInterface, PreTrainedModel
from transformers.masking_utils import AttentionMaskInterface

from swiftgen.forward.attention import ATTENTION_NAME, new_tree_pass, prefix_kernel, tree_attention
from swiftgen.forward.cache import BLOCK_TOKENS, CacheShape, FullCache, KVCache
from swiftgen.forward.experts import use_independent_experts
from swiftgen.forward.layers import NativeLayer, NativeStack, fuse_layers
from swiftgen.forward.linear import PackedLinear, QuantisedLinear, linear_maker, replace_linears
from swiftgen.forward.native_pass import NativePass
from swiftgen.forward.passes import Pass
from swiftgen.forward.spans import SpanPrefix, best_prefix
from swiftgen.forward.static_pass import StaticPass, StaticPasses
from swiftgen.forward.tree import DraftTree
from swiftgen.models.architectures import head_dim, layer_windows, logits_rule, take_final_norm
from swiftgen.models.libraries import library_of
from swiftgen.models.tensor_parallel import num_kv_heads
from swiftgen.native.build import kernels_for
from swiftgen.system.devices import device_name, send
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.ranks import num_ranks

LM_HEAD_ROWS = 32
"""Rows per lm_head call; a larger matrix product may choose a kernel that adds in another order."""


@dataclass(frozen=True)
class PassOutput:
    """Results of one pass, live rows only.

    Args:
        hidden: Hidden states before the final norm, `[T, hidden]`.
        queries: `[num_layers, Hkv, G, T, D]`.
        known_logits: float32 `[T, vocab]`, if the pass computed them; `Target.logits_of` asks for them.
    """

    hidden: Tensor
    queries: Tensor
    known_logits: Tensor | None = None

    @staticmethod
    def joined(parts: Sequence[PassOutput]) -> PassOutput:
        """The rows of several passes as if they were one."""
        if len(parts) == 1:
            return parts[0]
        logits = [part.known_logits for part in parts if part.known_logits is not None]
        return PassOutput(
            torch.cat([part.hidden for part in parts]),
            torch.cat([part.queries for part in parts], dim=3),
            torch.cat(logits) if len(logits) == len(parts) else None,
        )


class Target:
    """A Hugging Face decoder whose attention is ours.

    Its layers are fused where `layers` knows them, else driven through the attention interface. The final
    norm is taken out (the heads need the state before it) and applied by `logits`.

    Args:
        model: A causal language model in eval mode; it is changed in place and belongs to the target.
        attention: Prefix kernel by its preset name.
        static: Use passes with static shapes where the model can be run by them; None does so on CUDA.

    Attributes:
        windows: Sliding window of each layer, see `architectures.layer_windows`.
        finish_logits: What the model does behind its lm_head, see `architectures.logits_rule`.
    """

    def __init__(self, model: PreTrainedModel, attention: str = "auto", static: bool | None = None) -> None:
        self.config = model.config
        self.device, self.dtype = model.device, model.dtype
        self._prefix_kernel = prefix_kernel(attention, self.device, self.dtype, head_dim(self.config))
        AttentionInterface.register(ATTENTION_NAME, tree_attention)
        AttentionMaskInterface.register(ATTENTION_NAME, _no_mask)
        model.set_attn_implementation(ATTENTION_NAME)
        use_independent_experts(model)
        self._base: nn.Module = model.base_model
        self._norm = take_final_norm(self._base)
        kernels = kernels_for(attention, self.device, self.dtype, head_dim(self.config))
        make_linear = linear_maker(self.device, self.dtype, kernels)
        self.windows = layer_windows(self.config)
        is_native = kernels is not None and not any(self.windows)  # which see all keys
        self._fused = fuse_layers(
            self._base, head_dim(self.config), make_linear, kernels if is_native else None
        )
        self._kernels = kernels if isinstance(self._base.layers[0], NativeLayer | NativeStack) else None
        if attention == "native" and not self._kernels:
            raise SwiftgenError(
                "the native CPU kernels do not fit the layers of this model",
                "use `--set model.attention=auto`",
            )
        if not self._fused:
            replace_linears(self._base, make_linear)
        self._lm_head: nn.Module = make_linear(model.lm_head)
        self.finish_logits = logits_rule(self.config)
        self._linears = _kinds_of_linears(self._base, kernels.build if kernels else "")
        self._group = self.config.num_attention_heads // self.config.num_key_value_heads
        self.pass_sizes: tuple[int, ...] = (BLOCK_TOKENS,)
        self._static_prefix: SpanPrefix | None = None
        if (self.device.type == "cuda" if static is None else static) and self._can_be_static():
            kernel = self._prefix_kernel
            if not isinstance(kernel, SpanPrefix):
                kernel = best_prefix(attention, self.device, self.dtype, head_dim(self.config))
            self._static_prefix = kernel
        self._static_passes_of: WeakKeyDictionary[FullCache, StaticPasses] = WeakKeyDictionary()

    def _can_be_static(self) -> bool:
        """Whether the model is one that a pass with static shapes can run.

        Others decide something by values on the device (experts), see a window that moves with the text, wait
        for other ranks, or multiply in ways that a graph may not hold.
        """
        plain = self._linears in ("plain", "packed")
        return self._fused and not self._kernels and not any(self.windows) and plain and num_ranks() == 1

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
        return {
            "torch": torch.__version__,
            "device": device_name(self.device),
            "dtype": str(self.dtype).removeprefix("torch."),
            "attention": f"native {self._kernels.build}" if self._kernels else self._prefix_kernel.__name__,
            "linears": self._linears,
            "fused_layers": self._fused,
            "static_shapes": self._static_prefix is not None,
            "block_tokens": BLOCK_TOKENS,
            "ranks": num_ranks(),
        }

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
    ) -> PassOutput:
        """One pass over the nodes of a tree; a tree of more nodes than the largest pass takes several.

        Args:
            tree: Its nodes become rows in their order; the rest of the pass is padding.
            position: Absolute position of the root.
            num_rows: Rows of the pass, padding included; by default the smallest allowed pass.
            is_prefill: The rows are a chain, and nothing but another prefill has to agree with them.
        """
        parts = []
        for first in range(0, len(tree), num_rows or self.max_rows):
            live = min(len(tree) - first, num_rows or self.max_rows)
            parts.append(
                self._forward_rows(
                    tree, first, live, num_rows or self.pass_size(live), position, cache, is_prefill
                )
            )
        return PassOutput.joined(parts)

    @torch.inference_mode()
    def make_ready(self, cache: FullCache) -> None:
        """Prepare what can be prepared for passes over a cache, so that none of them has to wait for it."""
        if passes := self._static_passes(cache):
            passes.make_ready(self.pass_sizes, cache.length)

    def _static_passes(self, cache: KVCache) -> StaticPasses | None:
        """The passes with static shapes over this cache, if the model can be run by them."""
        if self._static_prefix is None or not isinstance(cache, FullCache):
            return None
        if cache not in self._static_passes_of:
            passes = StaticPasses(self._run_rows, self._static_prefix, cache, self._group)
            self._static_passes_of[cache] = passes
        return self._static_passes_of[cache]

    def _run_rows(self, token_ids: Tensor, positions: Tensor, static: StaticPass) -> tuple[Tensor, Tensor]:
        hidden = self._run(token_ids, positions, static)[0]
        return hidden, self.logits(hidden, len(hidden))

    def _forward_rows(
        self,
        tree: DraftTree,
        first: int,
        live: int,
        size: int,
        position: int,
        cache: KVCache,
        is_prefill: bool,
    ) -> PassOutput:
        """Nodes `first` to `first + live` of the tree, padded to `size` rows."""
        if not is_prefill and (passes := self._static_passes(cache)):
            hidden, queries, logits = passes.run(tree, first, size, position)
            return PassOutput(hidden[:live], queries[:, :, :, :live], logits[:live])
        padding = size - live
        rows = slice(first, first + live)
        token_ids = torch.tensor([tree.tokens[rows] + tree.tokens[:1] * padding])
        so_far = torch.tensor(tree.depths[: first + live] + [0] * padding) + position
        visible = tree.visibility(first + size)[first:]
        tree_pass = self._new_pass(cache, visible, so_far, is_prefill)
        positions = send(so_far[None, first:], self.device)
        hidden = self._run(send(token_ids, self.device), positions, tree_pass)
        return PassOutput(hidden[0, :live], tree_pass.stacked_queries()[:, :, :, :live])

    def _run(self, token_ids: Tensor, positions: Tensor, tree_pass: Pass) -> Tensor:
        """Hidden states before the final norm, `[1, T, hidden]`, of tokens and positions `[1, T]`."""
        base: Any = self._base
        if not self._fused:
            hidden: Tensor = base(
                input_ids=token_ids, position_ids=positions, use_cache=False, tree_pass=tree_pass
            ).last_hidden_state
            return hidden
        # What the model's own `forward` does, without the checks and masks that take a millisecond.
        hidden = base.embed_tokens(token_ids)
        rotary = base.rotary_emb(hidden, positions)
        for layer in base.layers:
            hidden = layer(hidden, position_embeddings=rotary, tree_pass=tree_pass)
        return hidden

    def _new_pass(self, cache: KVCache, visible: Tensor, positions: Tensor, is_prefill: bool) -> Pass:
        """A pass over the last T rows of a tree, see `attention.new_tree_pass`."""
        if self._kernels:
            num_rows, num_so_far = visible.shape
            view = cache.view(num_rows, num_so_far - num_rows)
            return NativePass(self._kernels, view, visible, self.config.num_attention_heads, is_prefill)
        return new_tree_pass(cache, self.windows, visible, positions, self._group, self._prefix_kernel)

    def normed(self, hidden: Tensor) -> Tensor:
        """The model's final norm: what the lm_head reads, `[T, hidden]`."""
        normed: Tensor = self._norm(hidden)
        return normed

    def logits_of(self, output: PassOutput, num_rows: int | None = None) -> Tensor:
        """The logits of a pass; the caller may overwrite them."""
        if output.known_logits is not None:
            return output.known_logits
        return self.logits(output.hidden, num_rows)

    def logits(self, hidden: Tensor, num_rows: int | None = None) -> Tensor:
        """Final norm and lm_head: `[T, hidden]` -> float32 `[T, vocab]`."""
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


def _no_mask(*_: Any, **__: Any) -> None:
    """Mask function of our attention: the tree mask travels with the pass."""
    return None


def _kinds_of_linears(base: nn.Module, build: str) -> str:
    """How the layers of a model multiply."""
    kinds = {type(module) for module in base.modules() if not library_of(module)}
    names = {QuantisedLinear: f"quantised {build}", PackedLinear: "packed", nn.Linear: "plain"}
    own = [name for kind, name in names.items() if kind in kinds]
    return " and ".join([*own, *sorted({library_of(module) for module in base.modules()} - {""})])
