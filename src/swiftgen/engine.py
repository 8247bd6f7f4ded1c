"""Engine: a preset made ready to write. The Python API of swiftgen.

engine = swiftgen.load("smollm2-135m")
for event in engine.stream("Write a story about the sea.", num_tokens=200, seed=1):
    print(event.text, end="")
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

from swiftgen.decoding.decode import StepEvent, decode
from swiftgen.decoding.memory import memory_file, recalled, remembering
from swiftgen.decoding.plans import max_tree_rows, new_planner, run_memory
from swiftgen.decoding.ready import Ready, made_ready
from swiftgen.decoding.replay import Mismatch, replay
from swiftgen.decoding.sampling import Sampler
from swiftgen.forward.backend import Backend, choose_backend
from swiftgen.forward.cache import BLOCK_TOKENS, FullCache
from swiftgen.forward.memory import check_length, check_memory
from swiftgen.heads.files import check_heads, load_heads
from swiftgen.heads.modules import DraftHeads
from swiftgen.models.architectures import head_dim
from swiftgen.models.loading import LoadedModel, load_weights, open_model
from swiftgen.models.positions import planned_config
from swiftgen.settings.presets import load_preset
from swiftgen.settings.schema import Preset, in_memory
from swiftgen.system import ranks
from swiftgen.system.devices import memory_errors
from swiftgen.system.errors import SwiftgenError
from swiftgen.text.alphabets import foreign_tokens
from swiftgen.text.prompt import encode, special_tokens
from swiftgen.text.stream import TextStream

PrefillCallback = Callable[[int, int], None]


def load(preset: str | Preset | None = None, overrides: Mapping[str, Any] | None = None) -> Engine:
    """Open a preset's model; its weights are loaded by the first `stream` (or by `prepare`).

    The process stays as it is: threads, signals and logging are its owner's (what commands set is in
    `commands.process` and `system.crowding`). Beside memory and the cache folder, loading touches the
    registries of transformers, which get entries of their own; its progress bars, and warnings, are off
    while it loads.

    Args:
        preset: a name, a path or a preset; None is the default one.
        overrides: dotted names -> values that win over the preset, e.g. {"sampler.temperature": 0}.

    Raises:
        SwiftgenError: unknown preset, missing or unsupported model, wrong hash, no network.
    """
    if not isinstance(preset, Preset):
        preset = load_preset(preset, overrides)
    elif overrides:
        raise SwiftgenError(
            "overrides go with the name of a preset", "load_preset(name, overrides) takes them"
        )
    return Engine(preset)


class Engine:
    """Writes text with one model and one preset; every stream starts afresh.

    Attributes:
        preset: all settings.
        opened: its model without the weights.
        tokenizer: the model's tokenizer.
        eos_token_ids: every token that ends a text.
        stretch_to: positions to plan for at least: a run that is continued keeps those it began with.
    """

    def __init__(self, preset: Preset) -> None:
        self.preset = preset
        self.opened = open_model(preset)
        self.tokenizer = self.opened.tokenizer
        self.eos_token_ids = self.opened.eos_token_ids
        self.stretch_to = 0
        self._ready: Ready | None = None

    @property
    def loaded(self) -> LoadedModel:
        """The model in memory; call `prepare` first."""
        return self._prepared.loaded

    @property
    def exactness(self) -> str:
        """One line for people on whether the text is exactly what AR would write."""
        return str(self._prepared.exactness)

    @property
    def is_lossless(self) -> bool:
        """Whether rows agree bit for bit on this machine."""
        return self._prepared.exactness.lossless

    @property
    def arithmetic(self) -> dict[str, object]:
        """What another run must match to write the same bytes."""
        target = self._prepared.target
        return target.arithmetic | {"pass_sizes": list(target.pass_sizes)}

    def encode(self, prompt: str, *, chat: bool | None = None, system: str | None = None) -> list[int]:
        """Token ids of a prompt, with the model's chat template unless raw text is asked for.

        Args:
            prompt: what the user wrote.
            chat: None is the preset's choice.
            system: system prompt of the chat; None is the preset's.

        Raises:
            SwiftgenError: if the prompt is empty, or chat is asked for and the model has no template.
        """
        is_chat = self.preset.chat if chat is None else chat
        system = self.preset.system if system is None else system
        return encode(self.tokenizer, prompt, is_chat, system, self.preset.model.source)

    def prepare(self, prompt_tokens: int, num_tokens: int) -> None:
        """Check that a run of this length fits, then load the weights unless they are in memory.

        Raises:
            SwiftgenError: beyond the model's positions, not enough memory, damaged weights, heads that do
                not fit.
        """
        preset, opened = self.preset, self.opened
        total = prompt_tokens + num_tokens
        reach, stretch = max(total, self.stretch_to), preset.long_context == "yarn"
        with ranks.together():
            check_length(prompt_tokens, num_tokens, opened.max_positions, preset.long_context)
            config = planned_config(opened.config, reach, stretch)
            # A model planned for another length would write another text.
            is_loaded = self._ready and self._ready.loaded.max_positions == config.max_position_embeddings
            weights_bytes = 0 if is_loaded else opened.weights_bytes(self._backend.kernels)
            needed = run_memory(preset, config, weights_bytes, total, opened.dtype, opened.device)
            check_memory(needed, opened.device)
            if is_loaded:
                return
            # What can be refused is refused before minutes of loading.
            backend, heads = self._backend, self._draft_heads()
        self._ready = None  # before the new weights come
        with memory_errors(opened.device, "loading", "Free memory of the GPU, or use a smaller model."):
            with ranks.together():
                loaded = load_weights(opened, reach, stretch, backend.kernels)
            self._ready = made_ready(loaded, heads, backend)

    @cached_property
    def _backend(self) -> Backend:
        """What computes the passes."""
        opened = self.opened
        settings, width = self.preset.model, head_dim(opened.config)
        return choose_backend(settings.attention, opened.device, opened.dtype, width, settings.activations)

    def _draft_heads(self) -> DraftHeads | None:
        """The preset's, which fit the model."""
        preset, config = self.preset, self.opened.config
        if not preset.heads:
            if preset.lacks_heads:
                raise SwiftgenError("the preset has no draft heads", "set `heads`, or draft otherwise")
            return None
        heads, info = load_heads(preset.heads)
        check_heads(heads, info, preset.heads, config.hidden_size, config.vocab_size)
        return heads

    def stream(
        self,
        prompt: str | Sequence[int],
        *,
        num_tokens: int,
        seed: int = 0,
        on_prefill: PrefillCallback | None = None,
        written: Sequence[int] = (),
    ) -> Iterator[StepEvent]:
        """Write exactly `num_tokens` tokens (fewer if the preset stops at EOS), step by step.

        The same prompt, seed and settings give the same text whatever is drafted.

        Args:
            prompt: text, or token ids from `encode`.
            num_tokens: tokens to write, 1 or more.
            seed: of the sampling noise.
            on_prefill: called with (done, total) tokens, of the prompt and of what is written.
            written: the first of the tokens, from a run that was stopped; the events begin after them.

        Raises:
            SwiftgenError: see `encode` and `prepare`.
        """
        if num_tokens <= len(written):
            raise SwiftgenError(
                f"cannot write {num_tokens - len(written)} tokens", "ask for 1 or more with --tokens"
            )
        prompt_ids = self.encode(prompt) if isinstance(prompt, str) else list(prompt)
        self.prepare(len(prompt_ids), num_tokens)
        written = list(written)
        begin = partial(self._begin, prompt_ids, num_tokens, seed, on_prefill, written)
        return self._with_text(begin, written)

    def replay(self, token_ids: Sequence[int], num_prompt_tokens: int, seed: int) -> Iterator[int | Mismatch]:
        """Compare a text, prompt first, with what `stream` writes after its prompt; call `prepare` first.

        Yields the number of tokens checked so far; a mismatch is the last that is yielded.
        """
        target = self._prepared.target
        cache = FullCache(target.cache_shape, len(token_ids) + BLOCK_TOKENS + target.max_rows)
        return replay(target, self.sampler(seed), cache, token_ids, num_prompt_tokens)

    def under(self, preset: Preset) -> Engine:
        """The same model in memory under other settings; call `prepare` first.

        Args:
            preset: With this engine's heads or none.

        Raises:
            ValueError: for settings that another engine has to be made for, see `schema.in_memory`.
        """
        heads = preset.heads or self.preset.heads
        if in_memory(preset.model_copy(update={"heads": heads})) != in_memory(self.preset):
            raise ValueError("another model, other heads or another long_context: load an engine for them")
        other = copy.copy(self)
        other.preset = preset
        other.__dict__.pop("suppressed_ids", None)  # those of the settings before
        return other

    def sampler(self, seed: int) -> Sampler:
        """The preset's sampler.

        Raises:
            SwiftgenError: if the preset suppresses tokens the model does not have.
        """
        preset, kernels = self.preset, self._backend.kernels
        return Sampler(preset.sampler, seed, preset.W, preset.theta, self.suppressed_ids, kernels)

    def _with_text(
        self, begin: Callable[[], Iterator[StepEvent]], written: Sequence[int]
    ) -> Iterator[StepEvent]:
        """The steps with their text; the KV cache is made when the first is asked for."""
        device = self._prepared.target.device
        hint = (
            "What is written is kept. Free memory of the GPU and go on with `swiftgen resume FILE`, with "
            "fewer --tokens if need be. A smaller kv_budget, k or tree also needs less."
        )
        with memory_errors(device, "making the KV cache", hint):
            events = begin()
        stream = TextStream(self.tokenizer)
        stream.push(written)
        while True:
            with memory_errors(device, "writing", hint):
                event = next(events, None)
            if event is None:
                return
            text = stream.push(event.token_ids)
            if event.stop_reason:
                text += stream.finish()
            yield replace(event, text=text)

    def _begin(
        self,
        prompt_ids: list[int],
        num_tokens: int,
        seed: int,
        on_prefill: PrefillCallback | None,
        written: Sequence[int],
    ) -> Iterator[StepEvent]:
        """The steps of a run, for which all is there."""
        preset, ready = self.preset, self._prepared
        target, sampler = ready.target, self.sampler(seed)
        cache = FullCache(target.cache_shape, len(prompt_ids) + num_tokens + max_tree_rows(preset))
        heads = ready.heads if preset.heads else None
        estimates = recalled(memory := memory_file(ready, preset), ready)
        planner = new_planner(preset, target, sampler, heads, seed, cache.capacity, estimates)
        total = len(prompt_ids) + len(written) - 1
        events = decode(
            target,
            planner,
            sampler,
            cache,
            prompt_ids,
            num_tokens,
            stop_token_ids=self.eos_token_ids if preset.eos == "stop" else (),
            on_prefill=(lambda done: on_prefill(done, total)) if on_prefill else None,
            written=written,
        )
        return remembering(events, estimates, memory) if preset.plan.measured else events

    @cached_property
    def suppressed_ids(self) -> set[int]:
        """Tokens that are never written: the preset's, special ones, and ids without a token."""
        preset, vocab_size = self.preset, self.opened.config.vocab_size
        allowed = self.eos_token_ids if preset.eos == "stop" else ()
        never = {*preset.suppress, *foreign_tokens(self.tokenizer, preset.alphabet), *self.eos_token_ids}
        never |= special_tokens(self.tokenizer, preset.suppress, vocab_size)
        return {i for i in never.difference(allowed) if i < vocab_size}

    @property
    def _prepared(self) -> Ready:
        if self._ready is None:
            raise RuntimeError("call prepare() first")
        return self._ready
