"""Tiny random models of every supported family, and helpers to decode with them."""

from __future__ import annotations

import functools
import itertools
import random
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swiftgen.decoding.decode import StepEvent, decode
from swiftgen.decoding.drafters.heads import ReadyHeads
from swiftgen.decoding.estimates import Estimates
from swiftgen.decoding.planner import Planner
from swiftgen.decoding.sampling import Sampler
from swiftgen.decoding.stopwatch import Stopwatch
from swiftgen.forward.backend import Backend, choose_backend
from swiftgen.forward.cache import FullCache
from swiftgen.forward.exactness import choose_pass_sizes
from swiftgen.forward.spans import best_prefix
from swiftgen.forward.target import Target
from swiftgen.forward.tree import DraftTree
from swiftgen.heads.modules import DraftHeads, new_heads
from swiftgen.models.architectures import head_dim
from swiftgen.models.gguf_weights import device_of
from swiftgen.models.positions import planned_config
from swiftgen.settings.schema import SamplerSettings

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
_WIDE = {"head_dim": 16, "intermediate_size": 64}
_ROPE = {"rope_theta": 10000.0}
VARIANTS: dict[str, tuple[str, dict[str, object]]] = {
    "linear": ("llama", {"rope_parameters": _ROPE | {"rope_type": "linear", "factor": 2.0}}),
    "llama3": (
        "llama",
        {
            "rope_parameters": _ROPE
            | {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0}
            | {"original_max_position_embeddings": 64}
        },
    ),
    "yarn": (
        "llama",
        {
            "rope_parameters": _ROPE
            | {"rope_type": "yarn", "factor": 8.0, "original_max_position_embeddings": 128}
        },
    ),
    "dynamic": (
        "llama",
        {"max_position_embeddings": 128, "rope_parameters": _ROPE | {"rope_type": "dynamic", "factor": 8.0}},
    ),
    "mistral, window 100": ("mistral", {"sliding_window": 100}),
    "mistral, window 3": ("mistral", {"sliding_window": 3}),
    "qwen2, window 200": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 200, "max_window_layers": 1, "layer_types": None},
    ),
    "gemma2": (
        "gemma2",
        _WIDE
        | {"sliding_window": 150, "query_pre_attn_scalar": 20, "attn_logit_softcapping": 3.0}
        | {"final_logit_softcapping": 5.0},
    ),
    "gemma3": (
        "gemma3_text",
        _WIDE
        | {"sliding_window": 70, "query_pre_attn_scalar": 20, "final_logit_softcapping": 5.0}
        | {"layer_types": ["sliding_attention", "full_attention"]},
    ),
    "phi3": ("phi3", {"sliding_window": 130}),
    "phi4": (  # longrope, and RoPE on half of each head
        "phi3",
        {
            "original_max_position_embeddings": 128,
            "rope_parameters": _ROPE
            | {"rope_type": "longrope", "short_factor": [1.0, 1.5], "long_factor": [2.0, 6.0]}
            | {"original_max_position_embeddings": 128, "partial_rotary_factor": 0.5},
        },
    ),
    "smollm3": ("smollm3", {"no_rope_layers": [1, 0]}),
    "granite": (
        "granite",
        {"embedding_multiplier": 3.0, "attention_multiplier": 0.3}
        | {"residual_multiplier": 0.6, "logits_scaling": 0.7},
    ),
    "olmo2": ("olmo2", {}),
    "qwen3_moe": (
        "qwen3_moe",
        {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
    ),
    "mixtral": ("mixtral", {"num_local_experts": 4, "num_experts_per_tok": 2, "intermediate_size": 32}),
}
"""What families can do beyond a plain Llama: a family, and settings."""
VOCAB_SIZE = 97
HIDDEN_SIZE = 48
DRAFT_VOCABULARY = torch.arange(0, VOCAB_SIZE, 2)
"""Tokens that heads of a smaller vocabulary can draft."""


def tiny_model(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB_SIZE,
    tied: bool = False,
    planned_tokens: int | None = None,
    **changes: object,
) -> PreTrainedModel:
    """A random model, sharp enough that its samples vary with the context.

    Args:
        family: Or a key of `VARIANTS`.
        planned_tokens: How long its texts are, where its positions depend on that.
        changes: Of its config.
    """
    model_type, settings = VARIANTS.get(family, (family, {}))
    settings = {
        "vocab_size": vocab_size,
        "hidden_size": HIDDEN_SIZE,
        "intermediate_size": 80,
        "num_hidden_layers": 2,
        "num_attention_heads": 6,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 1024,
        "tie_word_embeddings": tied,
        "sliding_window": None,
        "initializer_range": 0.2,
        "pad_token_id": None,
        **settings,
        **changes,
    }
    config = AutoConfig.for_model(model_type, **settings)
    if planned_tokens is not None:
        config = planned_config(config, planned_tokens, stretch=False)
    torch.manual_seed(7)
    model = AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)
    if family in VARIANTS:  # whose norms and biases do nothing as they begin
        for name, parameter in model.named_parameters():
            if "norm" in name or name.endswith("bias"):
                parameter += 0.3 * torch.randn_like(parameter)
    return model


def backend_for(
    model: PreTrainedModel, attention: str = "auto", static: bool = False, activations: str = "full"
) -> Backend:
    """What computes its passes; `static` has those with static shapes on a CPU too."""
    place = device_of(model), model.dtype, head_dim(model.config)
    backend = choose_backend(attention, *place, activations)
    return replace(backend, static_prefix=best_prefix(attention, *place)) if static else backend


def new_target(
    model: PreTrainedModel, attention: str = "auto", static: bool = False, activations: str = "full"
) -> Target:
    return Target(model, backend_for(model, attention, static, activations))


def sized_target(target: Target) -> Target:
    """With the pass sizes that are exact."""
    exactness = choose_pass_sizes(target)
    assert exactness.lossless
    return target.with_pass_sizes(exactness.pass_sizes)


@functools.cache
def tiny_target(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    attention: str = "auto",
    planned_tokens: int | None = None,
) -> Target:
    """A target with its pass sizes chosen; shared, since decoding does not change it."""
    return sized_target(new_target(tiny_model(family, dtype, planned_tokens=planned_tokens), attention))


def random_heads(kind: str, vocabulary: Tensor | None = None, num_heads: int = 3) -> DraftHeads:
    """Heads that disagree with the base."""
    torch.manual_seed(1)
    options = {"width": 32} if kind == "recurrent" else {}
    heads = new_heads(kind, HIDDEN_SIZE, num_heads, 1e-6, vocabulary=vocabulary, **options)
    for parameter in heads.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    return heads.requires_grad_(False)


def ready_heads(
    heads: DraftHeads | str, family: str = "llama", dtype: torch.dtype = torch.float32
) -> ReadyHeads:
    """Heads, or random ones of a kind, ready to draft for the tiny model of a family."""
    if isinstance(heads, str):
        heads = random_heads(heads)
    model = tiny_model(family, dtype)
    return ReadyHeads(heads, model.get_input_embeddings(), model.get_output_embeddings())


def new_cache(target: Target, num_tokens: int) -> FullCache:
    return FullCache(target.cache_shape, num_tokens + 512)


@dataclass
class Run:
    """All a run leaves behind, for comparison to the last bit."""

    token_ids: list[int]
    logits: Tensor
    cached: list[Tensor]
    events: list[StepEvent] = field(default_factory=list)

    def same_bits(self, other: Run) -> bool:
        return (
            self.token_ids == other.token_ids
            and torch.equal(self.logits, other.logits)
            and all(map(torch.equal, self.cached, other.cached))
        )


def run(
    target: Target, planner: Planner, sampler: Sampler, prompt: list[int], num_tokens: int, **options: object
) -> Run:
    """Decode and keep the logits and the cache of every accepted position."""
    cache = new_cache(target, len(prompt) + num_tokens)
    accepted: list[Tensor] = []
    passes: list[Tensor] = []
    pick, observe = sampler.pick, planner.observe

    def recording_pick(logits: Tensor, positions: Tensor, windows: Tensor) -> list[int]:
        passes.append(logits.clone())
        return pick(logits, positions, windows)

    def recording_observe(tree, path, committed) -> None:  # type: ignore[no-untyped-def]
        accepted.append(passes[-1][path])
        observe(tree, path, committed)

    sampler.pick, planner.observe = recording_pick, recording_observe  # type: ignore[method-assign]
    events = list(decode(target, planner, sampler, cache, prompt, num_tokens, **options))  # type: ignore[arg-type]
    del sampler.pick, planner.observe
    token_ids = [token for event in events for token in event.token_ids]
    length = len(prompt) + num_tokens - 1
    return Run(
        token_ids,
        torch.cat(accepted)[: len(token_ids)],
        kept_keys(cache, length),
        events,
    )


def kept_keys(cache: FullCache, length: int) -> list[Tensor]:
    """Keys and values of all layers, as far back as later tokens see them."""
    return [
        tensor.clone()
        for window, store in cache.stores.items()
        for tensor in store.between(max(0, length - (window or length)), length)
    ]


def sampler(seed: int = 3, W: int = 20, theta: float = 1.0, **settings: float) -> Sampler:
    return Sampler(SamplerSettings(**settings), seed, W, theta)  # type: ignore[arg-type]


def ar_planner(target: Target) -> Planner:
    return Planner([[]], Estimates(target.pass_sizes))


class Priced(Estimates):
    """Estimates in which time has a fixed price, and whatever is timed takes a second."""

    def __init__(self, tokens_per_s: float) -> None:
        self._price = tokens_per_s
        super().__init__((1, 2, 4, 8), (1.0, 1.0, 1.0, 1.0), stopwatch=ticking())

    def _set_price(self) -> None:
        self.tokens_per_s = self._price


def ticking() -> Stopwatch:
    """Each time its clock is read, a second has passed."""
    return Stopwatch(itertools.count(0.0).__next__)


def random_tree(seed: int, num_nodes: int) -> DraftTree:
    """At most six levels deep, in no order."""
    rng = random.Random(seed)
    tree = DraftTree(0, max_depth=6)
    while len(tree) < num_nodes:
        tree.add(rng.randrange(len(tree)), rng.randrange(999), "base")
    return tree


def shuffled(tree: DraftTree, seed: int) -> tuple[DraftTree, list[int]]:
    """The same tree with its nodes added in another order, and where each node went."""
    rng = random.Random(seed)
    other, place = DraftTree(tree.tokens[0], tree.max_depth), {0: 0}
    while len(place) < len(tree):
        ready = [node for node in range(len(tree)) if node not in place and tree.parents[node] in place]
        node = rng.choice(ready)
        added = other.add(place[tree.parents[node]], tree.tokens[node], "base")
        assert added is not None
        place[node] = added
    return other, [place[node] for node in range(len(tree))]
