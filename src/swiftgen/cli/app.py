"""The command line: thin commands, and one place where errors become two lines on stderr.

Imports stay light, so that `swiftgen --help` answers at once; a command imports what it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from swiftgen.cli.heads import heads_app, train_heads
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
from swiftgen.commands.stdout import ReaderGone
from swiftgen.system import ranks
from swiftgen.system.errors import SwiftgenError, exit_code_of
from swiftgen.system.redaction import redacted

_MAX_CHARACTERS = 1_000  # of a line on stderr; what comes from outside may be a megabyte
EXIT_READER_GONE = 141  # what a shell reports for a program that SIGPIPE ended

_ALONE = ("compare", "doctor", "train-heads")

app = typer.Typer(
    name="swiftgen",
    help="Write very long documents with a local language model, fast, and exactly as plain decoding would.",
    epilog="Begin with: swiftgen write --tokens 2000 -o book.txt",
    invoke_without_command=True,
    add_completion=False,
    pretty_exceptions_show_locals=False,  # they may hold secrets
    rich_markup_mode="rich",
    context_settings={"help_option_names": ["-h", "--help"]},
)


app.command("train-heads")(train_heads)
app.add_typer(heads_app, name="heads")


def main(args: Sequence[str] | None = None) -> int:
    """Runs the command line; returns the exit code.

    Args:
        args: without the program name; None is the process's own.
    """
    try:
        if ranks.rank():
            return ranks.follow()
        with ranks.leading():
            return (
                app(args=None if args is None else list(args), prog_name="swiftgen", standalone_mode=False)
                or 0
            )
    except SwiftgenError as error:
        _report(error.message, error.hint)
        return error.exit_code
    except ReaderGone:
        # Python flushes stdout on its way out, which would fail again.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_READER_GONE
    except KeyboardInterrupt as interrupt:
        return exit_code_of(interrupt)
    except Exception as error:
        # A usage error. Its class has moved between click and typer's own copy; its shape has not.
        if not hasattr(error, "format_message"):
            raise
        context = getattr(error, "ctx", None)
        command = context.command_path if context else "swiftgen"
        _report(error.format_message(), f"`{command} --help` shows what is possible")
        return int(getattr(error, "exit_code", 2))
    finally:
        ranks.leave()


def _report(message: str, hint: str) -> None:
    for label, color, text in (("error", typer.colors.RED, message), ("hint", typer.colors.CYAN, hint)):
        if text:
            typer.echo(typer.style(f"{label}:", fg=color, bold=True) + f" {_one_line(text)}", err=True)


def _one_line(text: str) -> str:
    """Paths and keys come from outside: nothing in them may break the line or reach the terminal raw."""
    joined = " ".join(redacted(text).split())
    if len(joined) > _MAX_CHARACTERS:
        joined = f"{joined[: _MAX_CHARACTERS // 2]} ... {joined[-_MAX_CHARACTERS // 2 :]}"
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode("ascii") for c in joined)


def _show_version(wanted: bool) -> None:
    if wanted:
        from swiftgen.system.version import __version__

        typer.echo(f"swiftgen {__version__}")
        raise typer.Exit


@app.callback()
def _options(
    context: typer.Context,
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version.")
    ] = False,
) -> None:
    if context.invoked_subcommand in _ALONE and ranks.num_ranks() > 1:
        raise SwiftgenError(
            f"{context.invoked_subcommand} runs in one process",
            "start it without torchrun; write, resume and verify run in several",
        )
    if context.invoked_subcommand is None:
        typer.echo(context.get_help())


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
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


@app.command()
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
