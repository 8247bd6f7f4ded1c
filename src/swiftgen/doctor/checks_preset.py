"""What `doctor` asks about a preset: what it needs, and whether this machine has it."""

from __future__ import annotations

import torch
from rich.console import Console

from swiftgen.decoding.plans import run_memory
from swiftgen.display.wording import count, size
from swiftgen.doctor.findings import Finding, Section, run_checks
from swiftgen.forward.arithmetic import arithmetic_of
from swiftgen.forward.backend import Backend, choose_backend
from swiftgen.forward.exactness import Exactness, kept_exactness, known_exactness
from swiftgen.forward.memory import MemoryEstimate, fitting_tokens
from swiftgen.forward.target import Target
from swiftgen.heads.files import check_heads, load_heads
from swiftgen.models.architectures import head_dim
from swiftgen.models.gguf_file import description_folder
from swiftgen.models.gguf_weights import stays_packed
from swiftgen.models.hub import is_hub_id
from swiftgen.models.loading import OpenedModel, load_weights, open_model
from swiftgen.models.positions import planned_config
from swiftgen.models.sources import resolve_source
from swiftgen.native.kernels import Kernels
from swiftgen.settings.schema import Preset
from swiftgen.system.cache_folder import not_here
from swiftgen.system.devices import free_bytes, resolve_device, resolve_dtype
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import expand_user
from swiftgen.text.stream import TextStream

KV_TOKENS = 10_000
"""The length for which a KV cache is reckoned."""
_NEEDED = frozenset({"runs_on", "model", "tokenizer", "attention", "memory", "heads"})


class PresetChecks:
    """The questions; later ones are left out where an earlier answer is missing that they build on.

    Args:
        preset: whose model is to write.
        may_load: whether the weights may be loaded for the exactness check.

    Attributes:
        device: where it runs; the CPU as long as that is not known.
    """

    def __init__(self, preset: Preset, may_load: bool) -> None:
        self.device = torch.device("cpu")
        self._preset, self._may_load = preset, may_load
        self._opened: OpenedModel | None = None
        self._estimate: MemoryEstimate | None = None
        self._fitting_tokens = self._longest_tokens = 0
        self._backend: Backend | None = None
        self._arithmetic: dict[str, object] | None = None
        self._exactness: Exactness | None = None

    def place(self) -> Section:
        """Device and dtype; first of all, since the checks of the machine go by the device."""
        return run_checks({"runs_on": self._runs_on}, _NEEDED)

    def needs(self, gb_per_s: float | None) -> Section:
        """All else.

        Args:
            gb_per_s: how fast the device reads its memory; None if that could not be measured.
        """
        checks = {
            "model": self._model,
            "tokenizer": self._tokenizer,
            "attention": self._attention,
            "weights": self._weights,
            "kv_cache": self._kv_cache,
            "memory": self._memory,
            "longest_text": self._longest_text,
            "heads": self._heads,
            "exactness": self._check_exactness,
            "plain_decoding": lambda: self._plain_decoding(gb_per_s),
        }
        return run_checks(checks, _NEEDED)

    def _runs_on(self) -> Finding:
        wanted = self._preset.model
        self.device = resolve_device(wanted.device)
        dtype, best = resolve_dtype(wanted.dtype, self.device), resolve_dtype("auto", self.device)
        name = _name(dtype)
        figures = {"device": str(self.device), "dtype": name}
        text = f"{self.device} in {name}"
        if best == torch.float32:
            text += ", there are no units for bfloat16"
            if dtype != torch.float32 and self.device.type == "cpu":
                return Finding(text, "note", "It is emulated: --set model.dtype=float32 is faster.", figures)
        elif dtype == torch.float32:
            return Finding(text, "note", "--set model.dtype=bfloat16 is faster here.", figures)
        return Finding(text, figures=figures)

    def _model(self) -> Finding:
        preset = self._preset
        resolved = resolve_source(preset.model, local_only=True)
        is_read = resolved.kind == "folder" or description_folder(resolved).is_dir()
        if not is_read and not self._may_load:
            raise SwiftgenError(
                f"{resolved.source} is here, and has not been read yet",
                "`swiftgen doctor` without --no-load reads it, and so does the first `swiftgen write`.",
            )
        self._opened = opened = open_model(preset, local_only=True)
        config = opened.config
        text = f"{opened.source} · {config.model_type}, {config.num_hidden_layers} layers"
        figures = {
            "source": opened.source,
            "fingerprint": opened.fingerprint,
            "family": config.model_type,
            "positions": opened.max_positions,
        }
        return Finding(text, figures=figures)

    def _tokenizer(self) -> Finding | None:
        if not self._opened:
            return None
        tokenizer = self._opened.tokenizer
        TextStream(tokenizer)  # refuses what cannot be streamed
        has_chat = bool(tokenizer.chat_template)
        if self._preset.chat and not has_chat:
            raise SwiftgenError(
                f"{self._opened.source} has no chat template", "Write raw text: --set chat=false."
            )
        text = f"{count(len(tokenizer))} tokens, {'with' if has_chat else 'no'} chat template"
        return Finding(text, figures={"num_tokens": len(tokenizer), "chat_template": has_chat})

    def _weights(self) -> Finding | None:
        if not self._opened:
            return None
        opened, kernels = self._opened, self._kernels
        kinds = {True: "the bits of the file", False: _name(opened.dtype)}
        kind = " and ".join(kinds[stays] for stays in sorted(self._stays_packed, reverse=True))
        text = f"{size(opened.weights_bytes(kernels))} in {kind}"
        return Finding(text, figures={"bytes": opened.weights_bytes(kernels)})

    @property
    def _kernels(self) -> Kernels | None:
        return self._backend.kernels if self._backend else None

    @property
    def _stays_packed(self) -> set[bool]:
        """Whether weights stay in the few bits of their file, see `gguf_weights.stays_packed`."""
        file = self._opened.gguf if self._opened else None
        return stays_packed(file, self._kernels) if file else {False}

    def _kv_cache(self) -> Finding | None:
        if not (opened := self._opened):
            return None
        weights_bytes = opened.weights_bytes(self._kernels)
        estimate = run_memory(
            self._preset, opened.config, weights_bytes, KV_TOKENS, opened.dtype, self.device
        )
        self._estimate = estimate
        figures = {"bytes": estimate.kv_bytes, "num_tokens": KV_TOKENS}
        return Finding(f"{size(estimate.kv_bytes)} for {count(KV_TOKENS)} tokens", figures=figures)

    def _memory(self) -> Finding | None:
        if not (estimate := self._estimate):
            return None
        free = free_bytes(self.device)
        self._fitting_tokens = max(0, fitting_tokens(estimate, free))
        before = estimate.weights_bytes + estimate.draft_bytes + estimate.work_bytes
        text = f"{size(before)} needed before the first token, {size(free)} free"
        figures = {"needed_bytes": before, "free_bytes": free, "fitting_tokens": self._fitting_tokens}
        if not self._fitting_tokens:
            advice = "Free some memory, use a smaller model, or another device (--set model.device=...)."
            return Finding(text, "missing", advice, figures)
        return Finding(text, figures=figures)

    def _longest_text(self) -> Finding | None:
        opened, fitting = self._opened, self._fitting_tokens
        if not opened or not fitting:
            return None
        positions = opened.max_positions
        self._longest_tokens = min(fitting, positions)
        figures = {"num_tokens": self._longest_tokens, "positions": positions, "fitting_tokens": fitting}
        if fitting < positions:
            text = f"{count(fitting)} tokens with the prompt: memory ends there"
            advice = f"All {_positions(positions)} of the model need more memory."
            return Finding(text, "note", advice, figures)
        if self._preset.long_context == "yarn":
            planned_config(opened.config, positions + 1, stretch=True)  # refuses what cannot be stretched
            self._longest_tokens = figures["num_tokens"] = fitting
            text = f"{count(fitting)} tokens with the prompt: memory ends there, beyond "
            return Finding(f"{text}{_positions(positions)} they are stretched (YaRN)", figures=figures)
        text = (
            f"{count(positions)} tokens with the prompt: all positions, memory has room for {count(fitting)}"
        )
        return Finding(text, figures=figures)

    def _attention(self) -> Finding | None:
        if not (opened := self._opened):
            return None
        settings = self._preset.model
        width = head_dim(opened.config)
        self._backend = choose_backend(
            settings.attention, opened.device, opened.dtype, width, settings.activations
        )
        self._arithmetic = arithmetic_of(
            opened.config, opened.dtype, opened.device, self._backend, self._stays_packed
        )
        name = str(self._arithmetic["attention"])
        return Finding(f"{name} (model.attention is {settings.attention})", figures={"name": name})

    def _heads(self) -> Finding | None:
        source, plan = self._preset.heads, self._preset.plan
        if not source:
            if plan.needs_heads:
                raise SwiftgenError(
                    f"draft is {plan.name}, and the preset has none", "Set `heads`, or another draft."
                )
            if "heads" not in plan.reads:
                return None
            return Finding("none", "note", "`swiftgen train-heads` makes some, which draft better.")
        if not expand_user(source).exists() and is_hub_id(source):
            return _heads_of_hub(source)
        heads, info = load_heads(source)
        text = f"{heads.num_heads} {heads.kind} heads"
        figures = {"kind": heads.kind, "num_heads": heads.num_heads}
        if not (opened := self._opened):
            return Finding(f"{text}, the model is not here to compare", figures=figures)
        check_heads(heads, info, source, opened.config.hidden_size, opened.config.vocab_size)
        if info.fingerprint not in ("", opened.fingerprint):
            text += f" for other weights ({info.base_model or 'unnamed'})"
            return Finding(text, "note", "They may draft badly: `swiftgen train-heads` makes some.", figures)
        return Finding(f"{text}, they fit", figures=figures)

    def _check_exactness(self) -> Finding | None:
        if not self._opened or not self._backend or not self._arithmetic:
            return None
        found = kept_exactness(self._arithmetic, self._opened.fingerprint)
        if not found and not self._may_load:
            advice = "`swiftgen doctor` without --no-load loads the weights and checks it."
            return Finding("not checked yet", "note", advice)
        if not found and not self._fitting_tokens:
            return Finding("not checked: the weights do not fit", "unknown")
        self._exactness = found = found or self._measured_exactness(self._opened, self._backend)
        figures = {
            "lossless": found.lossless,
            "pass_sizes": list(found.pass_sizes),
        }
        if found.lossless:
            return Finding(str(found), figures=figures)
        advice = "Try --set model.dtype=float32, on a GPU --set model.attention=sdpa."
        return Finding(str(found), "note", advice, figures)

    def _measured_exactness(self, opened: OpenedModel, backend: Backend) -> Exactness:
        with Console(stderr=True).status("loading the weights, to check which passes agree bit for bit"):
            loaded = load_weights(opened, opened.max_positions, kernels=backend.kernels)
            target = Target(loaded.model, backend)
            return known_exactness(target, opened.fingerprint)

    def _plain_decoding(self, gb_per_s: float | None) -> Finding | None:
        """Each token reads the weights and the KV cache once; of untied embeddings only a row."""
        opened, estimate = self._opened, self._estimate
        late_tokens = min(KV_TOKENS, self._longest_tokens)
        if not opened or not estimate or not gb_per_s or not late_tokens:
            return None
        config, read_bytes = opened.config, opened.weights_bytes(self._kernels)
        if not config.tie_word_embeddings and self._stays_packed == {False}:
            read_bytes -= config.vocab_size * config.hidden_size * opened.dtype.itemsize
        kv_bytes = estimate.kv_bytes * late_tokens // KV_TOKENS
        per_s, per_s_late = (gb_per_s * 1e9 / each for each in (read_bytes, read_bytes + kv_bytes))
        figures = {
            "memory_allows_tokens_per_s": round(per_s, 2),
            "memory_allows_tokens_per_s_late": round(per_s_late, 2),
            "late_tokens": late_tokens,
        }
        text = f"memory allows {per_s:.1f} tokens/s, {per_s_late:.1f} after {count(late_tokens)} tokens"
        if self._exactness:
            seconds = self._exactness.pass_seconds[0]
            text += f" · a pass of the exactness check took {seconds * 1e3:.1f} ms"
            figures["pass_s"] = round(seconds, 6)
        return Finding(text, figures=figures)


def _heads_of_hub(source: str) -> Finding:
    """Published heads as far as they can be judged without the network."""
    from huggingface_hub import try_to_load_from_cache

    if not isinstance(try_to_load_from_cache(source, "config.json"), str):
        raise not_here(source)
    return Finding(f"{source}, fetched before; whether they fit shows when they are loaded")


def _positions(number: int) -> str:
    return f"{count(number)} positions"


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
