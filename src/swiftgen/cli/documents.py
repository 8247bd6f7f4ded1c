"""Commands that write a document or read one back: write, resume and verify."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swiftgen.cli.options import (
    IN_DISPLAY,
    IN_LENGTH,
    IN_MODEL,
    IN_PROMPT,
    Chat,
    Draft,
    OnLoop,
    PresetName,
    Prompt,
    PromptFile,
    overrides_of,
)
from swiftgen.system.errors import SwiftgenError


def write(
    stdin: Annotated[
        str | None, typer.Argument(metavar="-", help="Read the prompt from stdin.", show_default=False)
    ] = None,
    *,
    prompt: Prompt = None,
    prompt_file: PromptFile = None,
    chat: Chat = None,
    system: Annotated[
        str | None,
        typer.Option(metavar="TEXT", help="System prompt of the chat.", rich_help_panel=IN_PROMPT),
    ] = None,
    tokens: Annotated[
        int,
        typer.Option("--tokens", "-n", metavar="N", help="Length to write.", rich_help_panel=IN_LENGTH),
    ] = 1000,
    output: Annotated[
        str,
        typer.Option(
            "--output",
            "-o",
            metavar="FILE",
            help="Write FILE, and a run folder beside it. - is stdout.",
            rich_help_panel=IN_LENGTH,
        ),
    ] = "-",
    force: Annotated[
        bool, typer.Option("--force", help="Replace an existing document.", rich_help_panel=IN_LENGTH)
    ] = False,
    stop_at_eos: Annotated[
        bool,
        typer.Option(
            "--stop-at-eos",
            help="Let the model end the text before the length is reached.",
            rich_help_panel=IN_LENGTH,
        ),
    ] = False,
    on_loop: OnLoop = "warn",
    preset: PresetName = None,
    seed: Annotated[
        int,
        typer.Option(
            metavar="N",
            help="The same seed gives the same text, however it is drafted.",
            rich_help_panel=IN_MODEL,
        ),
    ] = 0,
    temperature: Annotated[
        float | None, typer.Option(metavar="T", help="0 is greedy.", rich_help_panel=IN_MODEL)
    ] = None,
    draft: Draft = None,
    settings: Annotated[
        list[str] | None,
        typer.Option(
            "--set",
            metavar="KEY=VALUE",
            help="Any setting of the preset, for example sampler.min_p=0.1. Can be repeated.",
            rich_help_panel=IN_MODEL,
        ),
    ] = None,
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show nothing but errors.", rich_help_panel=IN_DISPLAY)
    ] = False,
    json: Annotated[
        bool,
        typer.Option(
            "--json",
            help="End with one line of JSON on stdout (on stderr if the text is there).",
            rich_help_panel=IN_DISPLAY,
        ),
    ] = False,
) -> int:
    """Write a document of exactly N tokens.

    Text goes to stdout or FILE as it is accepted, everything else to stderr. Without a
    prompt, a piped stdin is read; on a terminal the model is asked for a story.

    [bold]Examples[/bold]

      swiftgen write --tokens 2000 -o book.txt

      swiftgen write --prompt "Explain how bread rises." | less

      swiftgen write --raw --prompt-file start.txt --tokens 20000 -o novel.txt

      cat notes.txt | swiftgen write - --preset llama31-8b -n 100000 -o report.txt

      swiftgen write --draft none --set sampler.min_p=0.05 --seed 7 -o plain.txt
    """
    from swiftgen.commands.write import WriteRequest
    from swiftgen.commands.write import write as write_document

    if stdin not in (None, "-"):
        raise SwiftgenError(f"unexpected argument {stdin!r}", "a prompt is given with --prompt TEXT")
    flags = {
        "chat": chat,
        "system": system,
        "sampler.temperature": temperature,
        "draft": draft,
        "eos": "stop" if stop_at_eos else None,
    }
    return write_document(
        WriteRequest(
            preset=preset,
            overrides=overrides_of(settings or [], flags),
            prompt=prompt,
            prompt_file=prompt_file,
            prompt_from_stdin=stdin == "-",
            num_tokens=tokens,
            seed=seed,
            output=None if output == "-" else Path(output),
            force=force,
            quiet=quiet,
            json=json,
            on_loop=on_loop,
        )
    )


def resume(
    document: Annotated[Path, typer.Argument(metavar="FILE", help="A text file written by `write -o`.")],
    *,
    tokens: Annotated[
        int | None,
        typer.Option(
            "--tokens",
            "-n",
            metavar="M",
            help="Length of the whole text. Default: as planned.",
            show_default=False,
        ),
    ] = None,
    on_loop: OnLoop = "warn",
    anyway: Annotated[
        bool,
        typer.Option("--anyway", help="Go on though the model or its arithmetic is another; it is recorded."),
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but errors.")] = False,
    json: Annotated[bool, typer.Option("--json", help="End with one line of JSON on stdout.")] = False,
) -> int:
    """Go on with a document that was stopped, killed or is to be longer.

    The text is that of a run that was never stopped, byte for byte. All settings are
    those of the run, from its folder.

    [bold]Examples[/bold]

      swiftgen resume book.txt

      swiftgen resume book.txt --tokens 50000
    """
    from swiftgen.commands.resume import ResumeRequest
    from swiftgen.commands.resume import resume as resume_document

    return resume_document(ResumeRequest(document, tokens, anyway, quiet, json, on_loop))


def verify(
    document: Annotated[Path, typer.Argument(metavar="FILE", help="A text file written by `write -o`.")],
    quiet: Annotated[
        bool, typer.Option("--quiet", "-q", help="Show no progress, only what was found.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="What was found as one line of JSON.")] = False,
) -> int:
    """Check that a document is, token for token, what plain decoding writes.

    The token log is replayed with the seed and settings of the run, many tokens a pass,
    and the text is compared with the log. Ends with 0 if all is exact, with 1 if not.

    [bold]Examples[/bold]

      swiftgen verify book.txt

      swiftgen verify book.txt --json | jq .exact
    """
    from swiftgen.commands.verify import VerifyRequest
    from swiftgen.commands.verify import verify as verify_document

    return verify_document(VerifyRequest(document, quiet, json))
