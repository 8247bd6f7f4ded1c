"""Tiny random models of every supported family, and helpers to decode with them."""

from __future__ import annotations

import functools
import random
from dataclasses import dataclass, field

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from swiftgen.cache import FullCache
from swiftgen.decode import StepEvent, decode
from swiftgen.drafters.heads import ReadyHeads
from swiftgen.exactness import choose_pass_sizes
from swiftgen.heads import DraftHeads, new_heads
from swiftgen.planner import Planner
from swiftgen.presets import SamplerSettings
from swiftgen.sampling import Sampler
from swiftgen.target import Target
from swiftgen.tree import DraftTree

FAMILIES = ("llama", "qwen2", "qwen3", "mistral")
VOCAB_SIZE = 97
HIDDEN_SIZE = 48
DRAFT_VOCABULARY = torch.arange(0, VOCAB_SIZE, 2)
"""Tokens that heads of a smaller vocabulary can draft."""


def tiny_model(
    family: str = "llama",
    dtype: torch.dtype = torch.float32,
    vocab_size: int = VOCAB_SIZE,
    tied: bool = False,
) -> PreTrainedModel:
    """A random model, sharp enough that its samples vary with the context."""
    config = AutoConfig.for_model(
        family,
        vocab_size=vocab_size,
        hidden_size=HIDDEN_SIZE,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=1024,
        tie_word_embeddings=tied,
        sliding_window=None,
        initializer_range=0.2,
    )
    torch.manual_seed(7)
    return AutoModelForCausalLM.from_config(config, dtype=dtype).eval().requires_grad_(False)


@functools.cache
def tiny_target(family: str = "llama", dtype: torch.dtype = torch.float32, attention: str = "auto") -> Target:
    """A target with its pass sizes chosen; shared, since decoding does not change it."""
    target = Target(tiny_model(family, dtype), attention)
    exactness = choose_pass_sizes(target)
    assert exactness.lossless
    target.pass_sizes = exactness.pass_sizes
    return target


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
    keys: Tensor
    values: Tensor
    events: list[StepEvent] = field(default_factory=list)

    def same_bits(self, other: Run) -> bool:
        return (
            self.token_ids == other.token_ids
            and torch.equal(self.logits, other.logits)
            and torch.equal(self.keys, other.keys)
            and torch.equal(self.values, other.values)
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

    def recording_observe(tree, path, seconds, committed) -> None:  # type: ignore[no-untyped-def]
        accepted.append(passes[-1][path])
        observe(tree, path, seconds, committed)

    sampler.pick, planner.observe = recording_pick, recording_observe  # type: ignore[method-assign]
    events = list(decode(target, planner, sampler, cache, prompt, num_tokens, **options))  # type: ignore[arg-type]
    del sampler.pick, planner.observe
    token_ids = [token for event in events for token in event.token_ids]
    length = len(prompt) + num_tokens - 1
    return Run(
        token_ids,
        torch.cat(accepted)[: len(token_ids)],
        cache.keys[:, :, :length].clone(),
        cache.values[:, :, :length].clone(),
        events,
    )


def sampler(seed: int = 3, W: int = 20, theta: float = 1.0, **settings: float) -> Sampler:
    return Sampler(SamplerSettings(**settings), seed, W, theta)  # type: ignore[arg-type]


def ar_planner(target: Target) -> Planner:
    return Planner([[]], target.pass_sizes, measured=True)


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
