"""The command line: thin commands, and one place where errors become two lines on stderr.

Imports stay light, so that `swiftgen --help` answers at once; a command imports what it needs.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from typing import Annotated

import typer

from swiftgen.cli.documents import resume, verify, write
from swiftgen.cli.heads import heads_app, train_heads
from swiftgen.cli.inspection import compare, doctor, presets
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

# In the order of the help.
for command in (train_heads, write, resume, verify, doctor, compare, presets):
    app.command()(command)
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
