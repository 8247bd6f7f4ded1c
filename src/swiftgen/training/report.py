"""What a training leaves for people: the log of losses, held-out figures, and both drawn."""

from __future__ import annotations

import csv
import json
from dataclasses import asdict
from pathlib import Path

from swiftgen.system.storage import replace_file
from swiftgen.training.judge import TOP, Judgement
from swiftgen.training.trainer import StepReport


class LossLog:
    """A CSV file with the loss of every head, one line a step.

    Args:
        step: Steps done before; later lines of an earlier run are dropped.
    """

    def __init__(self, file: Path, step: int, num_heads: int) -> None:
        columns = ["step", "learning_rate"]
        columns += [f"{name}_{i}" for name in ("loss", "top1") for i in range(1, num_heads + 1)]
        lines = file.read_text(encoding="utf-8").splitlines()[1 : step + 1] if step and file.exists() else []
        self._file = file
        file.write_text("\n".join([",".join(columns), *lines, ""]), encoding="utf-8")

    def add(self, report: StepReport) -> None:
        """Append one step."""
        figures = [report.learning_rate, *report.losses, *report.top1]
        with self._file.open("a", encoding="utf-8") as file:
            file.write(",".join([str(report.step), *(f"{figure:.6g}" for figure in figures)]) + "\n")


def write_judgement(judgement: Judgement, folder: Path) -> None:
    """Keep the figures as JSON and as a table of one line per head."""
    data = json.dumps(asdict(judgement), indent=1).encode()
    replace_file(folder / "judgement.json", lambda temporary: temporary.write_bytes(data))
    with (folder / "judgement.csv").open("w", encoding="utf-8", newline="") as file:
        writer = csv.writer(file)
        writer.writerow(["head", "loss", *(f"top{n}" for n in TOP), *(f"drafted{n}" for n in TOP)])
        for i, loss in enumerate(judgement.losses):
            shares = [judgement.top[n][i] for n in TOP] + [judgement.drafted[n][i] for n in TOP]
            writer.writerow([i + 1, f"{loss:.4f}", *(f"{share:.4f}" for share in shares)])


def describe(judgement: Judgement) -> str:
    """A table for the terminal."""
    numbers = " ".join(f"{f'top-{n}':>7}" for n in TOP)
    lines = [f"held out: {judgement.num_positions:,} positions", f"head   loss {numbers}  drafted {numbers}"]
    for i, loss in enumerate(judgement.losses):
        plain, drafted = (
            " ".join(f"{100 * hits[n][i]:5.1f} %" for n in TOP) for hits in (judgement.top, judgement.drafted)
        )
        lines.append(f"{f'+{i + 2}':>4} {loss:6.2f} {plain}          {drafted}")
    lines.append(f"tokens per step, replayed with heads alone: {judgement.tokens_per_step:.2f}")
    return "\n".join(lines)


def draw_curves(losses: Path, judgement: Judgement, picture: Path) -> bool:
    """Draw the losses and the held-out hits; False without matplotlib (an extra)."""
    try:
        from matplotlib.figure import Figure
    except ImportError:
        return False
    with losses.open(encoding="utf-8") as file:
        rows = list(csv.DictReader(file))
    figure = Figure(figsize=(10, 4), layout="constrained")
    left, right = figure.subplots(1, 2)
    steps = [int(row["step"]) for row in rows]
    for i in range(len(judgement.losses)):
        left.plot(steps, [float(row[f"loss_{i + 1}"]) for row in rows], label=f"head {i + 1}", linewidth=1)
    left.set(xlabel="step", ylabel="cross entropy (nats)", title="Training loss")
    left.legend()
    heads = range(1, len(judgement.losses) + 1)
    for n in TOP:
        (line,) = right.plot(
            heads, [100 * s for s in judgement.drafted[n]], marker="o", label=f"drafted, {n}"
        )
        right.plot(
            heads, [100 * s for s in judgement.top[n]], marker=".", ls=":", color=line.get_color(),
            label=f"logits alone, {n}",
        )  # fmt: skip
    right.set(
        xlabel="head", ylabel="% of held-out tokens", title="Among the first n candidates", ylim=(0, 100)
    )
    right.set_xticks(list(heads))
    right.legend(fontsize="small")
    figure.savefig(picture, dpi=120)
    return True
