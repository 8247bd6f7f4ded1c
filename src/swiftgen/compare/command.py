"""The `compare` command: who writes the same document how fast, and whether it is the same document."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from swiftgen.commands.process import load_engine
from swiftgen.commands.prompts import read_prompt
from swiftgen.commands.stdout import write_stdout
from swiftgen.commands.write import MAX_SEED
from swiftgen.compare.contenders import AR, OWN_WAYS, SUBJECT, Contender, own_run
from swiftgen.compare.foreign import hf_runs, llama_cpp_run, vllm_run
from swiftgen.compare.measure import Run, run_in_turns
from swiftgen.compare.report import CSV_NAME, HTML_NAME, JSON_NAME, write_report
from swiftgen.compare.results import Comparison, standings_of, to_json
from swiftgen.compare.sweep import Sweep, parse_sweep
from swiftgen.compare.tables import describe
from swiftgen.document.manifest import installed_versions, now_utc
from swiftgen.engine import Engine
from swiftgen.settings.presets import load_preset
from swiftgen.system.errors import EXIT_INTERRUPTED, SwiftgenError, first_line
from swiftgen.system.redaction import redacted

_FOREIGN = {
    "hf": "Hugging Face transformers, generate",
    "hf-lookup": "Hugging Face transformers, generate with prompt lookup",
    "llama.cpp": "llama.cpp through llama-cpp-python",
    "vllm": "vLLM",
}
BASELINES = (*OWN_WAYS, *_FOREIGN)


@dataclass(frozen=True)
class CompareRequest:
    """What the command line asked for.

    Args:
        baselines: Names out of `BASELINES`; speed-ups are measured against the first.
        sweeps: Each `name=value,value,...`; they replace the comparison with other baselines than `ar`.
        seeds: Whole numbers with commas between them.
        output: Folder for the report; None writes none.
    """

    preset: str | None
    overrides: Mapping[str, Any]
    baselines: Sequence[str]
    sweeps: Sequence[str]
    prompt: str | None
    prompt_file: Path | None
    num_tokens: int
    seeds: str
    output: Path | None
    force: bool
    quiet: bool
    json: bool


def compare(request: CompareRequest) -> int:
    """Compares, prints the tables and writes the report; returns the exit code.

    Raises:
        SwiftgenError: whatever the user can set right; as much as possible before the model is loaded.
    """
    return _Session(request).run()


class _Session:
    """One call of the command."""

    def __init__(self, request: CompareRequest) -> None:
        self._request = request
        self._baselines = _checked_baselines(request)
        self._seeds = _parse_seeds(request.seeds)
        if request.num_tokens < 1:
            raise SwiftgenError(f"--tokens is {request.num_tokens}", "ask for at least 1 token")
        prompt = read_prompt(request.prompt, request.prompt_file, False)
        # Texts that end at different places could not be compared.
        self._overrides = {**request.overrides, "eos": "ignore"}
        preset = load_preset(request.preset, self._overrides)
        sweeps = [parse_sweep(text, preset.draft) for text in request.sweeps]
        for sweep in sweeps:
            for point in sweep.points:
                load_preset(request.preset, self._overrides | dict(point.overrides))
        if request.output is not None:
            _check_folder(request.output, request.force)
        self._say(f"loading {preset.name} ...")
        self._sweeps = sweeps
        self._engine: Engine = load_engine(preset)
        self._prompt_ids = self._engine.encode(prompt)
        self._engine.prepare(len(self._prompt_ids), request.num_tokens)

    def run(self) -> int:
        """All comparisons, one after the other."""
        request = self._request
        if not self._sweeps:
            contenders, failures = self._contenders()
            others = ", ".join(c.name for c in contenders if c.name != SUBJECT)
            title = f"{self._engine.preset.name}, {request.num_tokens:,} tokens: swiftgen and {others}"
            return self._compare(title, contenders, failures, request.output)
        for sweep in self._sweeps:
            title = f"{self._engine.preset.name}, {request.num_tokens:,} tokens: sweep over {sweep.name}"
            folder = request.output / sweep.name if request.output else None
            if code := self._compare(title, self._sweep_contenders(sweep), {}, folder):
                return code
        return 0

    def _compare(
        self, title: str, contenders: Sequence[Contender], failures: dict[str, str], folder: Path | None
    ) -> int:
        request = self._request
        runs: list[Run] = []
        is_interrupted = False
        total = len(contenders) * len(self._seeds) * request.num_tokens
        with tqdm(total=total, unit=" tokens", disable=request.quiet, file=sys.stderr) as bar:

            def on_tokens(name: str, count: int) -> None:
                bar.set_description_str(name, refresh=False)
                bar.update(count)

            def on_failure(contender: Contender, error: Exception) -> None:
                failures[contender.name] = _reason(error)

            try:
                run_in_turns(
                    contenders, request.num_tokens, self._seeds, self._engine.opened.device, on_tokens,
                    runs.append, on_failure,
                )  # fmt: skip
            except KeyboardInterrupt:
                is_interrupted = True
        if not runs:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            raise SwiftgenError("no run came to its end", reasons or "it was interrupted")
        comparison = Comparison(title, self._facts(), standings_of(contenders, runs), failures)
        self._publish(comparison, folder)
        if is_interrupted:
            print(f"interrupted: {len(runs)} runs are in the figures", file=sys.stderr)
            return EXIT_INTERRUPTED
        return 0

    def _publish(self, comparison: Comparison, folder: Path | None) -> None:
        if folder is not None:
            try:
                folder.mkdir(parents=True, exist_ok=True)
                problem = write_report(comparison, folder)
            except OSError as error:
                raise SwiftgenError(f"cannot write to {folder}: {error.strerror or error}") from error
            if problem:
                print(f"the report has no plots: {problem}", file=sys.stderr)
        if self._request.json:
            write_stdout(json.dumps(to_json(comparison)) + "\n")
        else:
            write_stdout(describe(comparison))
        if folder is not None:
            self._say(f"the report is {folder / HTML_NAME}; figures in {JSON_NAME} and {CSV_NAME} beside it")

    def _contenders(self) -> tuple[list[Contender], dict[str, str]]:
        """The baselines that can run here and swiftgen itself; and why the others cannot."""
        contenders: list[Contender] = []
        failures: dict[str, str] = {}
        foreign = _Foreign(self._engine, len(self._prompt_ids) + self._request.num_tokens)
        for name in self._baselines:
            reference = contenders[0].name if contenders else ""
            try:
                if name in OWN_WAYS:
                    contenders.append(self._own(name, *OWN_WAYS[name], reference))
                else:
                    contenders.append(foreign.contender(name, self._prompt_ids, reference))
            except SwiftgenError as error:
                failures[name] = _reason(error)
                print(f"{name} is left out: {_reason(error)}", file=sys.stderr)
        if not contenders:
            raise SwiftgenError("no baseline is left to compare with", "name others with --baseline")
        reference = contenders[0].name
        preset = self._engine.preset
        contenders.append(self._own(SUBJECT, f"swiftgen, draft={preset.draft}", {}, reference))
        return contenders, failures

    def _own(
        self,
        name: str,
        description: str,
        overrides: Mapping[str, Any],
        reference: str,
        prompt_tokens: int | None = None,
    ) -> Contender:
        preset = load_preset(self._request.preset, {**self._overrides, **overrides})
        if preset.draft == "heads" and not preset.heads:
            raise SwiftgenError("the preset has no draft heads", "train some with `swiftgen train-heads`")
        run, prompt_ids = own_run(self._engine, preset), self._prompt_ids[:prompt_tokens]
        is_exact = self._engine.is_lossless
        notes = () if is_exact else (f"decoding is {self._engine.exactness} on this machine",)
        return Contender(name, description, run, prompt_ids, reference, is_exact, notes)

    def _sweep_contenders(self, sweep: Sweep) -> list[Contender]:
        """swiftgen at every point, and plain decoding, once for each text that it would write."""
        contenders: list[Contender] = []
        for point in sweep.points:
            if point.prompt_tokens and point.prompt_tokens > len(self._prompt_ids):
                raise SwiftgenError(
                    f"--sweep {point.label}: the prompt has {len(self._prompt_ids):,} tokens",
                    "give a longer one with --prompt-file",
                )
            reference = f"{AR}, {point.label}" if point.changes_text else AR
            if all(contender.name != reference for contender in contenders):
                text, overrides = OWN_WAYS[AR]
                overrides = {**point.overrides, **overrides} if point.changes_text else overrides
                contenders.append(self._own(reference, text, overrides, "", point.prompt_tokens))
            description = f"swiftgen, {point.label}"
            contenders.append(
                self._own(point.label, description, point.overrides, reference, point.prompt_tokens)
            )
        return contenders

    def _facts(self) -> dict[str, Any]:
        engine, preset = self._engine, self._engine.preset
        return {
            "preset": preset.name,
            "model": preset.model.source,
            "settings": preset.model_dump(mode="json", exclude={"name", "description", "model"}),
            "num_tokens": self._request.num_tokens,
            "num_prompt_tokens": len(self._prompt_ids),
            "seeds": self._seeds,
            "exactness": engine.exactness,
            "machine": {
                "device": _device_name(engine.opened.device),
                "dtype": str(engine.opened.dtype).removeprefix("torch."),
                "threads": torch.get_num_threads(),
                "system": platform.platform(terse=True),
            },
            "versions": installed_versions(),
            "date": now_utc().isoformat(),
        }

    def _say(self, text: str) -> None:
        if not self._request.quiet:
            print(text, file=sys.stderr)


class _Foreign:
    """Programs of others, made on first use; both ways of `generate` share one model."""

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
        return Contender(name, _FOREIGN[name], run, prompt_ids, reference, False, notes)


def _checked_baselines(request: CompareRequest) -> list[str]:
    names = list(dict.fromkeys(request.baselines)) or [AR]
    if unknown := [name for name in names if name not in BASELINES]:
        raise SwiftgenError(f"unknown baseline {unknown[0]!r}", f"known are {', '.join(BASELINES)}")
    if request.sweeps and names != [AR]:
        raise SwiftgenError("a sweep is measured against ar alone", "leave --baseline out")
    return names


def _parse_seeds(text: str) -> list[int]:
    try:
        seeds = [int(seed) for seed in text.split(",")]
    except ValueError:
        seeds = []
    if not seeds or min(seeds) < 0 or max(seeds) > MAX_SEED or len(set(seeds)) < len(seeds):
        raise SwiftgenError(
            f"--seeds is {text!r}", "allowed are different whole numbers, 0 or more: --seeds 1,2,3"
        )
    return seeds


def _check_folder(folder: Path, force: bool) -> None:
    if folder.exists() and not folder.is_dir():
        raise SwiftgenError(f"{folder} is a file", "name a folder with -o")
    if folder.is_dir() and any(folder.iterdir()) and not force:
        raise SwiftgenError(
            f"the folder {folder} exists and is not empty",
            "name another with -o, or replace the report in it with --force",
        )
    parent = next(place for place in (folder, *folder.absolute().parents) if place.exists())
    if not os.access(parent, os.W_OK | os.X_OK):
        raise SwiftgenError(f"the folder {parent} is not writable", "choose another place with -o")


def _reason(error: Exception) -> str:
    if isinstance(error, SwiftgenError):
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return redacted(first_line(error))


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type}, {os.cpu_count()} cores"
