"""Other programs as contenders: transformers' `generate`, llama.cpp, vLLM.

They get the same prompt, length and sampler as far as theirs can be set so, draw with random numbers of
their own, and are told never to end early. What cannot be mapped becomes a note.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any

import torch
from torch import Tensor

from swiftgen.compare.contenders import Contender, OnEvent, Runner
from swiftgen.decoding.decode import StepEvent
from swiftgen.engine import Engine
from swiftgen.models.loading import load_weights
from swiftgen.models.sources import resolve_source
from swiftgen.system.errors import SwiftgenError

FOREIGN = {
    "hf": "Hugging Face transformers, generate",
    "hf-lookup": "Hugging Face transformers, generate with prompt lookup",
    "llama.cpp": "llama.cpp through llama-cpp-python",
    "vllm": "vLLM",
}
LOOKUP_TOKENS = 10  # transformers' own documentation suggests it
_NO_WINDOW = "its penalty sees the whole context, not the last {W:,} tokens"


class ForeignPrograms:
    """Programs of others as contenders; both ways of `generate` share one model, loaded on first use.

    Args:
        engine: Under the settings to be matched.
        total_tokens: Of prompt and text.
    """

    def __init__(self, engine: Engine, total_tokens: int) -> None:
        self._engine, self._total_tokens = engine, total_tokens
        self._hf: Any = None

    def contender(self, name: str, prompt_ids: Sequence[int], reference: str) -> Contender:
        """A contender by its name.

        Raises:
            SwiftgenError: it is not installed, or cannot run this preset.
        """
        if name.startswith("hf"):
            self._hf = self._hf or hf_runs(self._engine, self._total_tokens)
            run, notes = self._hf(name == "hf-lookup")
        else:
            make = {"llama.cpp": llama_cpp_run, "vllm": vllm_run}[name]
            run, notes = make(self._engine, self._total_tokens)
        return Contender(name, FOREIGN[name], run, prompt_ids, reference, False, notes)


def hf_runs(engine: Engine, total_tokens: int) -> Callable[[bool], tuple[Runner, tuple[str, ...]]]:
    """Runs of transformers' `generate` with one more copy of the model; the argument is for prompt lookup."""
    model = load_weights(engine.opened, total_tokens, engine.preset.long_context == "yarn").model

    def make(with_lookup: bool) -> tuple[Runner, tuple[str, ...]]:
        options, notes = generate_options(engine)
        if with_lookup:
            options["prompt_lookup_num_tokens"] = LOOKUP_TOKENS

        def run(prompt_ids: Sequence[int], num_tokens: int, seed: int, on_event: OnEvent) -> None:
            torch.manual_seed(seed)
            model.generate(
                torch.tensor([list(prompt_ids)], device=model.device),
                max_new_tokens=num_tokens,
                streamer=_EventStreamer(len(prompt_ids), num_tokens, on_event),
                **options,
            )

        return run, notes

    return make


def generate_options(engine: Engine) -> tuple[dict[str, Any], tuple[str, ...]]:
    """The preset's sampler for `generate`, and what of it has no counterpart."""
    preset, sampler = engine.preset, engine.preset.sampler
    options: dict[str, Any] = {"do_sample": sampler.temperature > 0, "pad_token_id": 0, "top_k": 0}
    if sampler.temperature > 0:
        options |= {
            "temperature": sampler.temperature,
            "top_k": sampler.top_k,
            "top_p": sampler.top_p,
            "min_p": sampler.min_p or None,
            "eta_cutoff": sampler.eta,
        }
    options["logits_processor"] = [_Suppression(engine)]
    notes: tuple[str, ...] = ()
    if preset.W and preset.theta != 1:
        options["repetition_penalty"] = preset.theta
        notes = (_NO_WINDOW.format(W=preset.W),)
    return options, notes


class _Suppression:
    """A logits processor for the tokens the preset never writes, among them those that end a text.

    transformers' own looks every token of the vocabulary up at every step, which would slow it down.
    """

    def __init__(self, engine: Engine) -> None:
        self._mask = torch.zeros(
            engine.opened.config.vocab_size, dtype=torch.bool, device=engine.opened.device
        )
        self._mask[list(engine.suppressed_ids)] = True

    def __call__(self, input_ids: Tensor, scores: Tensor) -> Tensor:
        return scores.masked_fill(self._mask, -torch.inf)


class _EventStreamer:
    """A transformers streamer: the prompt comes first, then the tokens of each step."""

    def __init__(self, num_prompt_tokens: int, num_tokens: int, on_event: OnEvent) -> None:
        self._num_prompt_tokens, self._num_left, self._on_event = num_prompt_tokens, num_tokens, on_event
        self._num_written = -1  # the prompt is still to come

    def put(self, value: Tensor) -> None:
        """See transformers' BaseStreamer."""
        if self._num_written < 0:
            self._num_written = 0
            return
        token_ids = value.flatten().tolist()[: self._num_left]
        if token_ids:
            self._num_left -= len(token_ids)
            self._num_written += len(token_ids)
            self._on_event(_event(token_ids, self._num_prompt_tokens + self._num_written))

    def end(self) -> None:
        """See transformers' BaseStreamer."""


def llama_cpp_run(engine: Engine, total_tokens: int) -> tuple[Runner, tuple[str, ...]]:
    """llama.cpp on the GGUF file that the preset names.

    Raises:
        SwiftgenError: llama-cpp-python is not installed, or the preset's model is no GGUF file.
    """
    llama_cpp = _imported("llama_cpp", "llama.cpp", "pip install llama-cpp-python")
    resolved = resolve_source(engine.preset.model)
    if resolved.kind != "gguf":
        raise SwiftgenError("llama.cpp reads GGUF files only", "use a preset whose model is one")
    preset, sampler = engine.preset, engine.preset.sampler
    num_threads = torch.get_num_threads()
    model = llama_cpp.Llama(
        model_path=str(resolved.path),
        n_ctx=total_tokens + 8,
        n_threads=num_threads,
        n_threads_batch=num_threads,
        n_gpu_layers=-1 if engine.opened.device.type == "cuda" else 0,
        flash_attn=True,
        last_n_tokens_size=preset.W or 64,
        verbose=False,
    )

    def run(prompt_ids: Sequence[int], num_tokens: int, seed: int, on_event: OnEvent) -> None:
        model.set_seed(seed)
        model.reset()  # or it would keep what it has of the same prompt
        tokens = model.generate(
            list(prompt_ids),
            top_k=sampler.top_k,
            top_p=sampler.top_p,
            min_p=sampler.min_p,
            temp=sampler.temperature,
            repeat_penalty=preset.theta if preset.W else 1.0,
        )
        for count, token in zip(range(1, num_tokens + 1), tokens, strict=False):
            on_event(_event([token], len(prompt_ids) + count))

    notes = [f"computes with the file's own {resolved.path.stem.rpartition('.')[2]} weights"]
    notes += _left_out(engine)
    return run, tuple(notes)


def vllm_run(engine: Engine, total_tokens: int) -> tuple[Runner, tuple[str, ...]]:
    """vLLM on the preset's model.

    Raises:
        SwiftgenError: vLLM is not installed, or the preset runs on no GPU.
    """
    if engine.opened.device.type != "cuda":
        raise SwiftgenError("vLLM needs a GPU here", "set model.device=cuda, or leave this baseline out")
    vllm = _imported("vllm", "vLLM", "pip install vllm")
    preset, sampler = engine.preset, engine.preset.sampler
    model = vllm.LLM(
        model=str(engine.opened.folder),
        dtype=str(engine.opened.dtype).removeprefix("torch."),
        max_model_len=total_tokens,
        enable_prefix_caching=False,
    ).llm_engine

    def run(prompt_ids: Sequence[int], num_tokens: int, seed: int, on_event: OnEvent) -> None:
        params = vllm.SamplingParams(
            temperature=sampler.temperature,
            top_k=sampler.top_k or -1,
            top_p=sampler.top_p,
            min_p=sampler.min_p,
            repetition_penalty=preset.theta if preset.W else 1.0,
            max_tokens=num_tokens,
            ignore_eos=True,
            seed=seed,
        )
        model.add_request(str(seed), {"prompt_token_ids": list(prompt_ids)}, params)
        count = 0
        while model.has_unfinished_requests():
            for output in model.step():
                token_ids = list(output.outputs[0].token_ids)[count:]
                if token_ids:
                    count += len(token_ids)
                    on_event(_event(token_ids, len(prompt_ids) + count))

    notes = _left_out(engine)
    if preset.W and preset.theta != 1:
        notes.append(_NO_WINDOW.format(W=preset.W))
    return run, tuple(notes)


def _event(token_ids: Sequence[int], context_tokens: int) -> StepEvent:
    """A step of which only the tokens are known."""
    return StepEvent(tuple(token_ids), (), 0, 0, context_tokens, 0, 0.0, 0.0, 0.0)


def _left_out(engine: Engine) -> list[str]:
    """Settings that neither llama.cpp nor vLLM have."""
    preset = engine.preset
    left_out = {"eta": preset.sampler.eta > 0, "alphabet": preset.alphabet != "any"}
    return [f"{name} is not applied" for name, is_set in left_out.items() if is_set]


def _imported(module: str, name: str, command: str) -> Any:
    try:
        return import_module(module)
    except ModuleNotFoundError as error:
        if error.name == module:
            raise SwiftgenError(f"{name} is not installed", command) from None
        raise SwiftgenError(f"{name} cannot be loaded: {error}", command) from None
    except (ImportError, OSError, RuntimeError) as error:  # of its own parts and libraries
        raise SwiftgenError(f"{name} cannot be loaded: {error}", command) from None
