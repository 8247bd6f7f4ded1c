"""Commands that say what there is to write with, and how well it writes: doctor, compare and presets."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swiftgen.cli.options import (
    IN_DISPLAY,
    IN_LENGTH,
    IN_MODEL,
    Chat,
    PresetName,
    Prompt,
    PromptFile,
    overrides_of,
)


def doctor(
    *,
    preset: Annotated[
        str | None,
        typer.Option(metavar="NAME|FILE", help="What is to be written with. Default: smollm2-135m."),
    ] = None,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the preset. Can be repeated."),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="What was found as one line of JSON.")] = False,
    no_load: Annotated[
        bool, typer.Option("--no-load", help="Do not load the weights if the exactness check asks for it.")
    ] = False,
) -> int:
    """Show what this machine has, what a preset needs, and what to do about the rest.

    Nothing is fetched. Ends with 0 if the preset can be written with here, with 1 if
    something that it needs is missing.

    [bold]Examples[/bold]

      swiftgen doctor

      swiftgen doctor --preset llama31-8b --set model.dtype=bfloat16 --no-load

      swiftgen doctor --json | jq .needs.longest_text
    """
    from swiftgen.doctor.command import DoctorRequest
    from swiftgen.doctor.command import doctor as examine

    return examine(DoctorRequest(preset, overrides_of(settings or [], {}), json, not no_load))


def compare(
    *,
    baseline: Annotated[
        list[str] | None,
        typer.Option(
            "--baseline",
            "-b",
            metavar="NAME",
            help="ar (plain decoding, the default), paper, medusa, triforce, hf, hf-lookup, llama.cpp or "
            "vllm. Can be repeated; speed-ups are against the first.",
        ),
    ] = None,
    sweep: Annotated[
        list[str] | None,
        typer.Option(
            metavar="KEY=V1,V2,...",
            help="Compare values of a setting instead: any of the preset, or budget, temperature, "
            "cache (full, partial, dynamic) or prompt (tokens). Can be repeated.",
        ),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option("--tokens", "-n", metavar="N", help="Length of every text.", rich_help_panel=IN_LENGTH),
    ] = 1000,
    seeds: Annotated[
        str, typer.Option(metavar="N,N,...", help="One run for each.", rich_help_panel=IN_LENGTH)
    ] = "1,2,3",
    output: Annotated[
        Path | None,
        typer.Option(
            "--output",
            "-o",
            metavar="DIR",
            help="Write report.html, compare.json, compare.csv and the plots there.",
            rich_help_panel=IN_LENGTH,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Replace a report in DIR.", rich_help_panel=IN_LENGTH)
    ] = False,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    chat: Chat = None,
    preset: PresetName = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting of the preset. Can be repeated.",
            rich_help_panel=IN_MODEL,
        ),
    ] = None,
    quiet: Annotated[
        bool,
        typer.Option("--quiet", "-q", help="Show no progress, only the tables.", rich_help_panel=IN_DISPLAY),
    ] = False,
    json: Annotated[
        bool,
        typer.Option("--json", help="Figures as one line of JSON, no tables.", rich_help_panel=IN_DISPLAY),
    ] = False,
) -> int:
    """Write the same document in several ways, and compare speed and text.

    All get the same prompt, sampler and length. Every way is run once with every seed, in
    turns; figures are medians.

    [bold]Examples[/bold]

      swiftgen compare --baseline ar --baseline hf --tokens 1500 -o report

      swiftgen compare --set draft=paper --sweep tree=[1,1,1,1],[1,3,3,3] -o trees
    """
    from swiftgen.compare.command import CompareRequest
    from swiftgen.compare.command import compare as compare_ways

    return compare_ways(
        CompareRequest(
            preset=preset,
            overrides=overrides_of(settings or [], {"chat": chat}),
            baselines=baseline or [],
            sweeps=sweep or [],
            prompt=prompt,
            prompt_file=prompt_file,
            num_tokens=tokens,
            seeds=seeds,
            output=output,
            force=force,
            quiet=quiet,
            json=json,
        )
    )


def presets(
    name: Annotated[
        str | None, typer.Argument(help="Print this one, with all its settings.", show_default=False)
    ] = None,
) -> None:
    """List the presets, or print one.

    [bold]Examples[/bold]

      swiftgen presets

      swiftgen presets smollm2-135m > mine.yaml
    """
    from swiftgen.settings.presets import list_presets, load_preset, preset_yaml

    if name is not None:
        typer.echo(preset_yaml(load_preset(name)), nl=False)
        return
    infos = list_presets()
    width = max((len(info.name) for info in infos), default=0)
    for info in infos:
        typer.echo(f"{info.name:<{width}}  {info.description}")
