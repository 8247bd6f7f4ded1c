"""A comparison on disk: compare.json, compare.csv, plots and one HTML file that needs no other."""

from __future__ import annotations

import base64
import json
import os
from collections.abc import Mapping
from importlib import resources
from pathlib import Path

from swiftgen.compare.results import Comparison, to_csv, to_json
from swiftgen.compare.tables import end_table, length_table, notes_of
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.storage import replace_file

JSON_NAME, CSV_NAME, HTML_NAME = "compare.json", "compare.csv", "report.html"


def check_folder(folder: Path, force: bool) -> None:
    """Make sure, before anything is measured, that a report can be written to a folder.

    Raises:
        SwiftgenError: it is a file, not writable, or not empty and not to be replaced by `force`.
    """
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


def write_report(comparison: Comparison, folder: Path) -> str:
    """Write everything into an existing folder; returns why there are no plots, or nothing.

    Raises:
        OSError: the folder cannot be written.
    """
    from swiftgen.compare.plots import draw_plots

    _write(folder / JSON_NAME, json.dumps(to_json(comparison), indent=1) + "\n")
    _write(folder / CSV_NAME, to_csv(comparison))
    plots: Mapping[Path, str] = {}
    problem = ""
    try:
        plots = draw_plots(comparison, folder)
    except SwiftgenError as error:
        problem = f"{error.message}: {error.hint}"
    _write(folder / HTML_NAME, render(comparison, plots))
    return problem


def render(comparison: Comparison, plots: Mapping[Path, str]) -> str:
    """The HTML report, its plots inside.

    Args:
        plots: PNG files, with what each shows.
    """
    from jinja2 import Environment, StrictUndefined

    source = resources.files("swiftgen.compare").joinpath("report.html.jinja").read_text(encoding="utf-8")
    template = Environment(autoescape=True, undefined=StrictUndefined).from_string(source)
    return template.render(
        title=comparison.title,
        tables=[("The whole text", end_table(comparison)), ("As it grows", length_table(comparison))],
        contenders=[(s.contender.name, s.contender.description) for s in comparison.standings],
        notes=notes_of(comparison),
        plots=[
            (caption, base64.b64encode(file.read_bytes()).decode("ascii")) for file, caption in plots.items()
        ],
        facts=[(name.replace("_", " "), _plain(value)) for name, value in comparison.facts.items()],
    )


def _plain(value: object) -> str:
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)


def _write(file: Path, text: str) -> None:
    replace_file(file, lambda temporary: temporary.write_text(text, encoding="utf-8"))
