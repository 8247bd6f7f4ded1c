"""Options that several commands have, and the settings they stand for."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from swiftgen.settings.plans import PLANS
from swiftgen.system.errors import SwiftgenError

IN_PROMPT, IN_LENGTH = "Prompt", "Length and output"
IN_MODEL, IN_DISPLAY = "Model and sampling", "Display"

Prompt = Annotated[
    str | None,
    typer.Option("--prompt", "-p", metavar="TEXT", help="The prompt.", rich_help_panel=IN_PROMPT),
]
PromptFile = Annotated[
    Path | None,
    typer.Option(metavar="FILE", help="Read the prompt from a UTF-8 file.", rich_help_panel=IN_PROMPT),
]
Chat = Annotated[
    bool | None,
    typer.Option(
        "--chat/--raw",
        help="Answer the prompt as a chat, or continue it as it is. Default: as the preset says.",
        rich_help_panel=IN_PROMPT,
    ),
]
OnLoop = Annotated[
    str,
    typer.Option(
        metavar="WHAT",
        help="When the text goes round in a circle: warn, stop (the run; all is kept) or ignore it.",
        rich_help_panel=IN_LENGTH,
    ),
]
PresetName = Annotated[
    str | None,
    typer.Option(
        metavar="NAME|FILE",
        help="Model and settings; `swiftgen presets` lists them. Default: smollm2-135m.",
        rich_help_panel=IN_MODEL,
    ),
]
Draft = Annotated[
    str | None,
    typer.Option(
        metavar="HOW",
        help="Changes speed, never the text. "
        + "; ".join(f"{plan.name}: {plan.help}" for plan in PLANS.values())
        + ".",
        rich_help_panel=IN_MODEL,
    ),
]


def overrides_of(settings: list[str], flags: dict[str, Any]) -> dict[str, Any]:
    """Preset overrides from --set and from the flags that stand for a setting."""
    from swiftgen.settings.presets import parse_override

    overrides = dict(parse_override(setting) for setting in settings)
    for key, value in flags.items():
        if value is None:
            continue
        if key in overrides:
            raise SwiftgenError(f"{key} is set twice, by a flag and by --set", "keep one of them")
        overrides[key] = value
    return overrides
