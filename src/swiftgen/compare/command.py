"""The `compare` command: who writes the same document how fast, and whether it is the same document."""

from __future__ import annotations

import json
import os
import platform
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from swiftgen.commands.prompts import read_prompt
from swiftgen.commands.stdout import write_stdout
from swiftgen.commands.write import MAX_SEED
from swiftgen.compare.contenders import AR, OWN_WAYS, SUBJECT, Contender, OwnEngine, Way
from swiftgen.compare.foreign import FOREIGN, ForeignPrograms
from swiftgen.compare.measure import Run, run_in_turns
from swiftgen.compare.report import CSV_NAME, HTML_NAME, JSON_NAME, check_folder, write_report
from swiftgen.compare.results import Comparison, standings_of, to_json
from swiftgen.compare.sweep import parse_sweep, ways_of
from swiftgen.compare.tables import describe
from swiftgen.document.manifest import installed_versions, now_utc
from swiftgen.engine import Engine
from swiftgen.settings.presets import load_preset
from swiftgen.settings.schema import Preset, in_memory
from swiftgen.system.errors import EXIT_INTERRUPTED, SwiftgenError, first_line
from swiftgen.system.redaction import redacted

BASELINES = (*OWN_WAYS, *FOREIGN)


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
        self._preset = preset = self._preset_of({})
        sweeps = [parse_sweep(text, preset.draft) for text in request.sweeps]
        self._sweeps = [(sweep.name, ways_of(sweep, self._preset_of)) for sweep in sweeps]
        if request.output is not None:
            check_folder(request.output, request.force)
        self._own = OwnEngine(prompt, request.num_tokens, lambda p: self._say(f"loading {p.name} ..."))

    def run(self) -> int:
        """All comparisons, one after the other."""
        request = self._request
        title = f"{self._preset.name}, {request.num_tokens:,} tokens:"
        failures: dict[str, str] = {}
        if not self._sweeps:
            contenders = self._contenders(failures)
            others = ", ".join(c.name for c in contenders if c.name != SUBJECT)
            return self._compare(f"{title} swiftgen and {others}", [contenders], failures, request.output)
        for name, ways in self._sweeps:
            folder, failures = request.output / name if request.output else None, {}
            groups = self._groups(ways, failures)
            if code := self._compare(f"{title} sweep over {name}", groups, failures, folder):
                return code
        return 0

    def _compare(
        self, title: str, groups: Iterable[Sequence[Contender]], failures: dict[str, str], folder: Path | None
    ) -> int:
        """Run one group after the other, each in turns of its own, and publish all of them together."""
        contenders: list[Contender] = []
        runs: list[Run] = []
        engines: list[dict[str, str]] = []
        is_interrupted = False
        try:
            for group in groups:
                contenders += group
                engines.append(_described(self._own.engine))
                self._run(group, runs, failures)
        except KeyboardInterrupt:
            if not contenders:
                raise
            is_interrupted = True
        if not runs:
            reasons = "; ".join(f"{name}: {reason}" for name, reason in failures.items())
            raise SwiftgenError("no run came to its end", reasons or "it was interrupted")
        comparison = Comparison(title, self._facts(engines), standings_of(contenders, runs), failures)
        self._publish(comparison, folder)
        if is_interrupted:
            print(f"interrupted: {len(runs)} runs are in the figures", file=sys.stderr)
            return EXIT_INTERRUPTED
        return 0

    def _run(self, group: Sequence[Contender], runs: list[Run], failures: dict[str, str]) -> None:
        request, device = self._request, self._own.engine.opened.device
        total = len(group) * len(self._seeds) * request.num_tokens
        with tqdm(total=total, unit=" tokens", disable=request.quiet, file=sys.stderr) as bar:

            def on_tokens(name: str, count: int) -> None:
                bar.set_description_str(name, refresh=False)
                bar.update(count)

            def on_failure(contender: Contender, error: Exception) -> None:
                failures[contender.name] = _reason(error)

            run_in_turns(group, request.num_tokens, self._seeds, device, on_tokens, runs.append, on_failure)

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

    def _contenders(self, failures: dict[str, str]) -> list[Contender]:
        """The baselines that can run here and swiftgen itself."""
        contenders: list[Contender] = []
        self._own.load([self._preset])
        engine = self._own.engine
        subject = self._own.contender(Way(SUBJECT, f"swiftgen, draft={self._preset.draft}", self._preset, ""))
        foreign = ForeignPrograms(engine, len(subject.prompt_ids) + self._request.num_tokens)
        for name in self._baselines:
            reference = contenders[0].name if contenders else ""
            try:
                if name in OWN_WAYS:
                    description, overrides = OWN_WAYS[name]
                    way = Way(name, description, self._preset_of(overrides), reference)
                    contenders.append(self._own.contender(way))
                else:
                    contenders.append(foreign.contender(name, subject.prompt_ids, reference))
            except SwiftgenError as error:
                _leave_out(name, error, failures)
        if not contenders:
            raise SwiftgenError("no baseline is left to compare with", "name others with --baseline")
        return [*contenders, replace(subject, reference=contenders[0].name)]

    def _groups(self, ways: Sequence[Way], failures: dict[str, str]) -> Iterator[list[Contender]]:
        """The ways of a sweep by the engine that they share, which is loaded when it is their turn.

        What cannot be loaded is left out, unless nothing has been measured yet.
        """
        for number, (_, group) in enumerate(groupby(ways, key=lambda way: in_memory(way.preset))):
            together = list(group)
            try:
                self._own.load([way.preset for way in together])
                contenders = [self._own.contender(way) for way in together]
            except SwiftgenError as error:
                if not number:
                    raise
                for way in together:
                    _leave_out(way.name, error, failures)
            else:
                yield contenders

    def _preset_of(self, overrides: Mapping[str, Any]) -> Preset:
        return load_preset(self._request.preset, {**self._overrides, **overrides})

    def _facts(self, engines: Sequence[Mapping[str, str]]) -> dict[str, Any]:
        """What was compared where; of several engines all that differs."""
        preset = self._preset
        engine = {key: ", ".join(dict.fromkeys(each[key] for each in engines)) for key in engines[0]}
        return {
            "preset": preset.name,
            "model": preset.model.source,
            "settings": preset.model_dump(mode="json", exclude={"name", "description", "model"}),
            "num_tokens": self._request.num_tokens,
            "num_prompt_tokens": self._own.num_prompt_tokens,
            "seeds": self._seeds,
            "exactness": engine["exactness"],
            "machine": {
                "device": engine["device"],
                "dtype": engine["dtype"],
                "threads": torch.get_num_threads(),
                "system": platform.platform(terse=True),
            },
            "versions": installed_versions(),
            "date": now_utc().isoformat(),
        }

    def _say(self, text: str) -> None:
        if not self._request.quiet:
            print(text, file=sys.stderr)


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


def _reason(error: Exception) -> str:
    if isinstance(error, SwiftgenError):
        return f"{error.message} ({error.hint})" if error.hint else error.message
    return redacted(first_line(error))


def _leave_out(name: str, error: SwiftgenError, failures: dict[str, str]) -> None:
    failures[name] = _reason(error)
    print(f"{name} is left out: {_reason(error)}", file=sys.stderr)


def _described(engine: Engine) -> dict[str, str]:
    return {
        "exactness": engine.exactness,
        "device": _device_name(engine.opened.device),
        "dtype": str(engine.opened.dtype).removeprefix("torch."),
    }


def _device_name(device: torch.device) -> str:
    if device.type == "cuda":
        return str(torch.cuda.get_device_name(device))
    return f"{device.type}, {os.cpu_count()} cores"
