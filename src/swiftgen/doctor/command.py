"""The `doctor` command: what is here, what a preset would need, and what to do about what is missing.

It asks nothing of the network, and writes nothing but what the first `write` would: kernels, an unpacked
GGUF file and the result of the exactness check, all in the cache folder.
"""

from __future__ import annotations

import json
import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from swiftgen.commands.process import prepare_process
from swiftgen.commands.stdout import write_stdout
from swiftgen.display.wording import harmless
from swiftgen.doctor.findings import Finding, Section, State, run_checks
from swiftgen.settings.presets import load_preset
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.version import __version__

EXIT_NOT_READY = 1
_STYLES: dict[State, str] = {"ok": "green", "note": "yellow", "missing": "bold red", "unknown": "yellow"}


@dataclass(frozen=True)
class DoctorRequest:
    """What the command line asked for.

    Args:
        preset: Name or file; None is the default preset.
        overrides: Settings that win over it.
        json: One line for programs in place of the tables.
        may_load: Whether the weights may be loaded if the exactness check has not been made yet.
    """

    preset: str | None
    overrides: Mapping[str, Any]
    json: bool
    may_load: bool


@dataclass(frozen=True)
class Diagnosis:
    """All findings.

    Args:
        preset: Its name.
        machine: What is here.
        needs: What the preset needs.
    """

    preset: str
    machine: Section
    needs: Section

    @property
    def missing(self) -> list[str]:
        """Names of what stands in the way of writing."""
        return [_spaced(name) for name, finding in self._named() if finding.state == "missing"]

    @property
    def to_do(self) -> list[str]:
        """What to do, the needed things first."""
        named = sorted(self._named(), key=lambda item: item[1].state != "missing")
        return [f"{_spaced(name)}: {finding.advice}" for name, finding in named if finding.advice]

    def as_json(self) -> dict[str, Any]:
        """All of it, in JSON's types."""
        return {
            "preset": self.preset,
            "ready": not self.missing,
            "to_do": self.to_do,
            "machine": {name: finding.as_json() for name, finding in self.machine.items()},
            "needs": {name: finding.as_json() for name, finding in self.needs.items()},
        }

    def _named(self) -> Iterator[tuple[str, Finding]]:
        yield from self.machine.items()
        yield from self.needs.items()


def doctor(request: DoctorRequest) -> int:
    """Prints the findings; returns 0 if the preset can be written with, 1 if something needed is missing.

    Raises:
        SwiftgenError: there is no such preset, or a setting is wrong.
    """
    diagnosis = diagnose(request)
    if request.json:
        write_stdout(json.dumps(diagnosis.as_json()) + "\n")
    else:
        console = Console(highlight=False)
        with console.capture() as capture:
            show(diagnosis, console)
        write_stdout(capture.get())
    return EXIT_NOT_READY if diagnosis.missing else 0


def diagnose(request: DoctorRequest) -> Diagnosis:
    """Asks all questions.

    Raises:
        SwiftgenError: see `doctor`.
    """
    preset = load_preset(request.preset, request.overrides)
    machine = run_checks({"software": _software}, frozenset({"software"}))
    if machine["software"].state != "ok":
        return Diagnosis(preset.name, machine, {})
    prepare_process()
    from swiftgen.doctor.checks_machine import machine_checks
    from swiftgen.doctor.checks_preset import PresetChecks

    checks = PresetChecks(preset, request.may_load)
    place = checks.place()
    machine |= run_checks(machine_checks(checks.device))
    needs = checks.needs(machine["bandwidth"].figures.get("gb_per_s"))
    return Diagnosis(preset.name, machine, place | needs)


def show(diagnosis: Diagnosis, console: Console) -> None:
    """Prints the findings: tables on a terminal, else one plain line each."""
    for title, section in (("machine", diagnosis.machine), (f"preset {diagnosis.preset}", diagnosis.needs)):
        if not section:
            continue
        console.print(Text(harmless(title), style="bold"))
        if console.is_terminal:
            console.print(_table(section))
        else:
            for name, finding in section.items():
                line = f"  {finding.state:<8} {_spaced(name):<15} {harmless(finding.text)}"
                console.print(Text(line), soft_wrap=True)
    if diagnosis.to_do:
        console.print(Text("what to do", style="bold"))
    for advice in diagnosis.to_do:
        console.print(Text(f"  - {harmless(advice)}"), soft_wrap=True)
    verdict = f"ready to write with {diagnosis.preset}"
    if diagnosis.missing:
        verdict = f"not ready to write with {diagnosis.preset}: see {', '.join(diagnosis.missing)}"
    style = _STYLES["missing" if diagnosis.missing else "ok"]
    console.print(Text(harmless(verdict), style=style), soft_wrap=True)


def _table(section: Section) -> Table:
    table = Table(box=None, show_header=False, padding=(0, 1, 0, 1), pad_edge=True)
    table.add_column(no_wrap=True)
    table.add_column(style="dim", no_wrap=True)
    table.add_column(overflow="fold")
    for name, finding in section.items():
        table.add_row(
            Text(finding.state, style=_STYLES[finding.state]), _spaced(name), Text(harmless(finding.text))
        )
    return table


def _spaced(name: str) -> str:
    return name.replace("_", " ")


def _software() -> Finding:
    try:
        import torch
        import transformers
    except Exception as error:  # a broken build of either fails in its own way
        raise SwiftgenError(
            f"PyTorch or transformers cannot be imported: {' '.join(str(error).split())}",
            "Install them again; `make setup` does it with the versions that are tested.",
        ) from error
    figures = {
        "swiftgen": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "transformers": str(transformers.__version__),
    }
    return Finding(" · ".join(f"{name} {version}" for name, version in figures.items()), figures=figures)
