"""Commands about draft heads: train-heads, and heads show, convert and eval."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from swiftgen.commands.process import prepare_process
from swiftgen.system.errors import SwiftgenError

_DATA, _HEADS, _TRAINING = "Data", "Heads", "Training"

heads_app = typer.Typer(help="Look at, convert and judge draft heads.", no_args_is_help=True)

Preset = Annotated[
    str | None,
    typer.Option(metavar="NAME|FILE", help="The model they are for. Default: smollm2-135m."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Any setting of the preset. Can be repeated."),
]


def train_heads(
    *,
    data: Annotated[
        str,
        typer.Option(
            metavar="DATA",
            help="self (the model writes its own), pg19, a .txt, .jsonl or .parquet file, or a folder.",
            rich_help_panel=_DATA,
        ),
    ],
    output: Annotated[
        Path,
        typer.Option("--output", "-o", metavar="DIR", help="Takes heads, checkpoints and figures."),
    ],
    preset: Preset = None,
    settings: Settings = None,
    sequence_length: Annotated[
        int, typer.Option(metavar="N", min=16, help="Tokens of a sequence.", rich_help_panel=_DATA)
    ] = 2048,
    max_sequences: Annotated[
        int | None,
        typer.Option(
            metavar="N", min=2, help="Read or write no more. Default: all; self: 192.", rich_help_panel=_DATA
        ),
    ] = None,
    self_batch: Annotated[
        int, typer.Option(metavar="N", min=1, help="self: texts written side by side.", rich_help_panel=_DATA)
    ] = 48,
    held_out: Annotated[
        float,
        typer.Option(min=0.001, max=0.5, help="Share of documents kept for judging.", rich_help_panel=_DATA),
    ] = 0.05,
    states_gb: Annotated[
        float,
        typer.Option(min=0, help="Keep hidden states on disk up to this size.", rich_help_panel=_DATA),
    ] = 4.0,
    kind: Annotated[
        str, typer.Option(help="recurrent, or linear as in the paper.", rich_help_panel=_HEADS)
    ] = "recurrent",
    num_heads: Annotated[
        int, typer.Option(metavar="N", min=1, max=8, help="Depths below the base.", rich_help_panel=_HEADS)
    ] = 3,
    width: Annotated[
        int,
        typer.Option(metavar="N", min=8, help="recurrent: width of the cell.", rich_help_panel=_HEADS),
    ] = 1024,
    vocabulary: Annotated[
        int,
        typer.Option(
            metavar="N",
            min=0,
            help="Draft only the N most frequent tokens; 0 is all.",
            rich_help_panel=_HEADS,
        ),
    ] = 0,
    steps: Annotated[int, typer.Option(metavar="N", min=1, rich_help_panel=_TRAINING)] = 200,
    batch_size: Annotated[
        int, typer.Option(metavar="N", min=1, help="Sequences per step.", rich_help_panel=_TRAINING)
    ] = 4,
    learning_rate: Annotated[float, typer.Option(metavar="X", min=0, rich_help_panel=_TRAINING)] = 5e-3,
    warmup: Annotated[int, typer.Option(metavar="N", min=0, help="Steps.", rich_help_panel=_TRAINING)] = 50,
    weight_decay: Annotated[float, typer.Option(metavar="X", min=0, rich_help_panel=_TRAINING)] = 0.1,
    soft: Annotated[
        bool,
        typer.Option(
            "--soft/--hard",
            help="Learn the model's distribution, or the token that followed.",
            rich_help_panel=_TRAINING,
        ),
    ] = True,
    seed: Annotated[int, typer.Option(metavar="N", min=0, rich_help_panel=_TRAINING)] = 0,
    checkpoint_every: Annotated[
        int, typer.Option(metavar="N", min=1, help="Steps.", rich_help_panel=_TRAINING)
    ] = 50,
    resume: Annotated[bool, typer.Option("--resume", help="Continue the training in DIR.")] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", help="Say how long it takes and how much memory; train nothing.")
    ] = False,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Show nothing but the figures.")] = False,
) -> int:
    """Train draft heads for a model, which itself stays as it is.

    Held-out figures go to stdout. Stop it at any time; --resume continues.

    [bold]Examples[/bold]

      swiftgen train-heads --data self -o heads

      swiftgen train-heads --preset llama31-8b --data pg19 --sequence-length 8192 -o heads

      swiftgen train-heads --data novels/ --kind linear --hard -o heads --dry-run
    """
    from swiftgen.cli.options import overrides_of
    from swiftgen.heads.modules import KINDS
    from swiftgen.training.request import TrainRequest
    from swiftgen.training.session import train_heads as train
    from swiftgen.training.trainer import Schedule

    if kind not in KINDS:
        raise SwiftgenError(f"unknown kind of heads {kind!r}", f"known are {', '.join(KINDS)}")
    schedule = Schedule(
        num_steps=steps,
        batch_size=batch_size,
        learning_rate=learning_rate,
        warmup_steps=warmup,
        weight_decay=weight_decay,
        soft=soft,
        seed=seed,
    )
    prepare_process()
    return train(
        TrainRequest(
            preset=preset,
            overrides=overrides_of(settings or [], {}),
            data=data,
            output=output,
            kind=kind,
            num_heads=num_heads,
            width=width,
            vocabulary=vocabulary,
            sequence_length=sequence_length,
            max_sequences=max_sequences,
            self_batch=self_batch,
            held_out=held_out,
            states_gb=states_gb,
            checkpoint_every=checkpoint_every,
            schedule=schedule,
            resume=resume,
            dry_run=dry_run,
            quiet=quiet,
        )
    )


@heads_app.command()
def show(
    heads: Annotated[str, typer.Argument(help="A folder, a file, or a hub id.", show_default=False)],
) -> None:
    """Say what heads are, and what they belong to.

    [bold]Example[/bold]

      swiftgen heads show TokenSwift/TokenSwift-Llama-3.1-8B
    """
    from swiftgen.heads.files import describe_heads, load_heads

    typer.echo(describe_heads(*load_heads(heads)))


@heads_app.command()
def convert(
    source: Annotated[
        str, typer.Argument(help="A published checkpoint: a folder or a hub id.", show_default=False)
    ],
    output: Annotated[Path, typer.Option("--output", "-o", metavar="DIR", help="Takes the heads.")],
) -> None:
    """Take the heads out of a published checkpoint, so that the rest of it is not needed.

    [bold]Example[/bold]

      swiftgen heads convert TokenSwift/TokenSwift-Llama-3.1-8B -o llama31-heads
    """
    from swiftgen.heads.files import load_heads, save_heads

    heads, info = load_heads(source)
    typer.echo(f"wrote {save_heads(heads, output, info)}", err=True)


@heads_app.command("eval")
def evaluate(
    heads: Annotated[str, typer.Argument(help="A folder, a file, or a hub id.", show_default=False)],
    *,
    data: Annotated[
        str,
        typer.Option(metavar="DATA", help="Text to judge by, as for train-heads, or its texts.safetensors."),
    ],
    preset: Preset = None,
    settings: Settings = None,
    sequence_length: Annotated[int, typer.Option(metavar="N", min=16, help="Tokens of a sequence.")] = 2048,
    max_sequences: Annotated[int, typer.Option(metavar="N", min=1, help="Judge by no more.")] = 16,
    json: Annotated[bool, typer.Option("--json", help="Print one line of JSON instead of a table.")] = False,
) -> None:
    """Judge heads on text: hits per head, and tokens per step when it is written again.

    [bold]Example[/bold]

      swiftgen heads eval heads --data novels/emma.txt
    """
    from swiftgen.cli.options import overrides_of
    from swiftgen.training.evaluate import judge_heads

    prepare_process()
    typer.echo(
        judge_heads(
            heads, data, preset, overrides_of(settings or [], {}), sequence_length, max_sequences, json
        )
    )
