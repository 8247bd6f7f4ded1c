"""The documentation says what is so: commands, settings, links and the Python example."""

from __future__ import annotations

import ast
import json
import re
import shlex
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typer
from pydantic import BaseModel
from tokenizers import Tokenizer, decoders, pre_tokenizers
from tokenizers.models import BPE
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

import swiftgen
from swiftgen.cli.app import app
from swiftgen.settings.presets import list_presets, load_preset, parse_override
from swiftgen.settings.schema import Preset

ROOT = Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PRESETS = ROOT / "docs" / "presets.md"
PAGES = [README, ROOT / "CHANGELOG.md", *sorted((ROOT / "docs").glob("*.md"))]
SOURCES = (
    "README.md",
    "CHANGELOG.md",
    "Makefile",
    "pyproject.toml",
    ".ci",
    "docs",
    "presets",
    "src",
    "tests",
)
PLACEHOLDERS = {"src/swiftgen/decoding/drafters/yours.py", "presets/name.yaml", "llama.cpp"}
# Names that the pages may have though neither package nor tests define them.
NOT_OURS = {
    *("torchrun", "taskset", "nohup", "flock", "HF_TOKEN", "GOMP_SPINCOUNT"),  # of the shell and of libraries
    *("tokenizer.decode", "tokenizers.DecodeStream", "torch.profiler", "mm", "bmm", "softmax", "device_map"),
    *("base_model.layers", "base_model.norm", "use_cache", "proportional", "vdpbf16ps"),
    "prepare_varlen_num_blocks",
    *("sat", "KEY", "book.swiftgen", "book.txt.old", "states.done"),  # of examples, and names of files
}
# Of pip and of tests/tools/bench_decode.py.
OTHER_PROGRAMS_OPTIONS = {
    "--upkeep",
    *("--no-deps", "--text", "--prompts", "--repeats", "--ask", "--mix", "--drafts", "--no-generate"),
    *("--tiny", "--kills"),
    *("--nproc-per-node", "--nnodes"),  # of torchrun
}

every_page = pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)


@cache
def text_of(page: Path) -> str:
    return page.read_text(encoding="utf-8")


def code_blocks(text: str) -> Iterator[tuple[str, list[str]]]:
    """Fenced blocks with their language, and indented blocks with none."""
    block: list[str] | None = None
    language, fenced, after_blank = "", False, True
    for line in [*text.splitlines(), ""]:
        if line.startswith("```"):
            if fenced and block is not None:
                yield language, block
            fenced, language = not fenced, line.removeprefix("```").strip()
            block = [] if fenced else None
        elif fenced and block is not None:
            block.append(line)
        elif line.startswith("    ") and (block is not None or after_blank):
            block = [*(block or []), line.removeprefix("    ")]
        elif block is not None:
            yield "", block
            block = None
        after_blank = not line.strip()


def command_lines(text: str) -> Iterator[str]:
    """Lines to be typed: after a `$` in a console block, all that begin with a program elsewhere."""
    for language, lines in code_blocks(text):
        joined = "\n".join(lines).replace("\\\n", " ").splitlines()
        for line in joined:
            if language == "console" and line.startswith("$ "):
                yield line.removeprefix("$ ")
            elif language in ("", "sh") and re.match(r"(\w+ .*\| )?swiftgen\b", line):
                yield re.split(r"\s{2,}", line)[0]  # a remark may follow at a distance


def swiftgen_calls(line: str) -> Iterator[list[str]]:
    """The arguments of each `swiftgen` in a line of shell."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split = True
    call: list[str] | None = None
    skip_next = False
    for word in lexer:
        if skip_next:
            skip_next = False
        elif word in ("|", "&&", ";", "||"):
            if call is not None:
                yield call
            call = None
        elif word in (">", "<", ">>"):
            skip_next = True
        elif call is not None:
            call.append(word)
        elif word == "swiftgen":
            call = []
    if call is not None:
        yield call


ALL_CALLS = [
    (page.name, call)
    for page in PAGES
    for line in command_lines(text_of(page))
    for call in swiftgen_calls(line)
]


def command_of(call: list[str]) -> tuple[Any, list[str]]:
    """The command that a call names, and its arguments."""
    found: Any = typer.main.get_command(app)
    while call and call[0] in getattr(found, "commands", {}):
        found, call = found.commands[call[0]], call[1:]
    return found, call


def all_options(command: Any) -> set[str]:
    options = {option for parameter in command.params for option in parameter.opts + parameter.secondary_opts}
    return options.union(*map(all_options, getattr(command, "commands", {}).values()))


def inline_code(text: str) -> list[str]:
    outside = re.sub(r"^```.*?^```", "", text, flags=re.DOTALL | re.MULTILINE)
    return [code.replace("\\|", "|") for code in re.findall(r"`([^`\n]+)`", outside)]


def test_the_readme_begins_with_its_two_commands() -> None:
    lines = [line for line in text_of(README).splitlines() if line.strip()]
    assert lines[0] == "# swiftgen"
    assert lines[2:4] == ["    make book", "    make test"]


@every_page
def test_make_targets_exist(page: Path) -> None:
    targets = set(re.findall(r"^(\w+):", (ROOT / "Makefile").read_text(encoding="utf-8"), flags=re.MULTILINE))
    named = re.findall(r"(?:^    |`)make (\w+)", text_of(page), flags=re.MULTILINE)
    assert set(named) <= targets
    assert page != README or {"book", "test", "setup"} <= set(named)


def test_there_are_commands_to_check() -> None:
    assert sum(page == "README.md" for page, _ in ALL_CALLS) > 8


@pytest.mark.parametrize(("page", "call"), ALL_CALLS, ids=lambda value: " ".join(value)[:60])
def test_commands_parse(page: str, call: list[str]) -> None:
    """Every command with its options and values, without running it."""
    if not call or call[0].startswith("--"):
        assert call[:1] in ([], ["--help"], ["--version"])
        return
    command, args = command_of(call)
    assert not hasattr(command, "commands"), call
    if "--help" in args:
        assert args == ["--help"]
        return
    given = command.make_context(call[0], args).params
    if call[0] == "presets":
        assert given["name"] is None or load_preset(given["name"])
        return
    overrides = dict(parse_override(setting) for setting in given.get("settings") or ())
    overrides |= {"draft": given["draft"]} if given.get("draft") else {}
    preset = given.get("preset")
    if preset is None or not preset.endswith(".yaml"):
        # A preset of the reader's own is not here; an error is shown with a name that does not exist.
        load_preset(None if preset == "smollm2" else preset, overrides)


@every_page
def test_inline_commands_and_options_exist(page: Path) -> None:
    for code in inline_code(text_of(page)):
        if code.startswith("swiftgen "):
            words = code.split()[1:]
            _, rest = command_of(words)
            assert len(rest) < len(words) or words[0] in ("--help", "--version"), code
    known = all_options(typer.main.get_command(app)) | {"--help", "--version"} | OTHER_PROGRAMS_OPTIONS
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z-]*", text_of(page)))
    assert named <= known


@every_page
def test_links_lead_somewhere(page: Path) -> None:
    prose = re.sub(r"^```.*?^```", "", text_of(page), flags=re.DOTALL | re.MULTILINE)
    for target in re.findall(r"\]\(([^)\s]+)\)", prose):
        if target.startswith("https://"):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        assert file.exists(), target
        if anchor:
            assert anchor in anchors(file), target


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", text_of(page), flags=re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@cache
def our_files() -> list[str]:
    """Paths from the root of the repository, each with a slash before it."""
    folders = (ROOT / name for name in ("src", "tests", "docs", "presets"))
    files = (file for folder in folders for file in folder.rglob("*") if file.is_file())
    return [f"/{file.relative_to(ROOT)}" for file in files]


@every_page
def test_files_that_are_named_exist(page: Path) -> None:
    """By their path, in running text also by its end."""
    assert all((ROOT / tool).is_file() for tool in re.findall(r"\btests/[\w/]+\.py", text_of(page)))
    for code in set(inline_code(text_of(page))) - PLACEHOLDERS:
        if re.fullmatch(r"[\w/]+\.(py|cpp|h)|(src|tests|docs|presets)/[\w./-]+\.\w+", code):
            assert any(file.endswith(f"/{code}") for file in our_files()), code


def defined_by(node: ast.AST) -> list[str]:
    """The names that a node defines: functions, classes, arguments, attributes, fields, constants."""
    match node:
        case ast.arg(arg=name) | ast.Attribute(attr=name, ctx=ast.Store()) | ast.FunctionDef(name=name):
            return [name]
        case ast.Module() | ast.ClassDef():  # not what is local to a function
            assigned = [each for each in node.body if isinstance(each, ast.Assign | ast.AnnAssign)]
            names = [each for part in assigned for each in ast.walk(part) if isinstance(each, ast.Name)]
            found = [each.id for each in names if isinstance(each.ctx, ast.Store)]
            return [*found, node.name] if isinstance(node, ast.ClassDef) else found
    return []


@cache
def our_names() -> set[str]:
    """Modules, what package and tests define, also as `module.name` and `Class.member`, settings, strings."""
    names = {name for name, _ in settings_with_defaults(Preset)}
    names |= {f"swiftgen.{name}" for name in swiftgen.__all__}
    for file in [*(ROOT / "src" / "swiftgen").rglob("*.py"), *(ROOT / "tests").rglob("*.py")]:
        module = file.relative_to(ROOT).with_suffix("").parts
        names |= {".".join(module[begin:]) for begin in range(len(module))} | set(module)
        tree = ast.parse(file.read_text(encoding="utf-8"))
        for scope in ast.walk(tree):
            if isinstance(scope, ast.Module | ast.ClassDef):
                owner = scope.name if isinstance(scope, ast.ClassDef) else module[-1]
                inside = {name for node in ast.walk(scope) for name in defined_by(node)}
                names |= inside | {f"{owner}.{name}" for name in inside}
            elif isinstance(scope, ast.Constant) and isinstance(scope.value, str) and module[0] == "src":
                names.add(scope.value)
    return names


@every_page
def test_names_in_backticks_exist(page: Path) -> None:
    """Modules, functions, classes, settings, and other words that the program knows."""
    named = {re.sub(r"(\(|: |=).*$", "", code) for code in inline_code(text_of(page))}
    named = {name for name in named if re.fullmatch(r"[A-Za-z_]\w*(\.\w+)*", name)}
    unknown = named - our_names() - NOT_OURS
    assert not {name for name in unknown if not name.endswith((".py", ".md", ".txt"))}


def test_the_python_example_runs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    examples = ["\n".join(lines) for language, lines in code_blocks(text_of(README)) if language == "python"]
    assert len(examples) == 1
    save_tiny_chat_model(tmp_path / "model")
    preset = {"model": {"source": str(tmp_path / "model"), "device": "cpu", "dtype": "float32"}, "chat": True}
    (tmp_path / "smollm2-135m.yaml").write_text(json.dumps(preset), encoding="utf-8")
    monkeypatch.setenv("SWIFTGEN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(
        "swiftgen.settings.presets._shipped", lambda: {"smollm2-135m": tmp_path / "smollm2-135m.yaml"}
    )
    exec(compile(examples[0], "README.md", "exec"), {})
    shown = capsys.readouterr().out
    assert re.search(r"\n\d+ of 60 tokens were drafted\. lossless", shown)


def save_tiny_chat_model(folder: Path) -> None:
    """A random Llama that speaks in bytes and takes any chat."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: index for index, token in enumerate([*alphabet, "<end>"])}
    tokenizer = Tokenizer(BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    wrapped = PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")
    wrapped.chat_template = "{% for message in messages %}{{ message['content'] }}{% endfor %}"
    wrapped.save_pretrained(folder)
    config = LlamaConfig(
        vocab_size=len(vocab),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=512,
        bos_token_id=None,
        eos_token_id=vocab["<end>"],
    )
    torch.manual_seed(0)
    LlamaForCausalLM(config).save_pretrained(folder)


def settings_with_defaults(model: type[BaseModel], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, field in model.model_fields.items():
        if isinstance(field.annotation, type) and issubclass(field.annotation, BaseModel):
            yield from settings_with_defaults(field.annotation, f"{prefix}{name}.")
        else:
            yield prefix + name, field.default


def table_row(text: str, first_cell: str) -> list[str]:
    """The cells of the table row that starts with this name."""
    rows = [line for line in text.splitlines() if line.startswith(f"| `{first_cell}` |")]
    assert len(rows) == 1, first_cell
    return [cell.strip() for cell in rows[0].strip("|").split(" | ")]


# What a page says in words where the schema has no plain value.
DEFAULTS_IN_WORDS = {"name": "the name of the file", "description": "empty", "model.source": "required"}


@pytest.mark.parametrize(("name", "default"), list(settings_with_defaults(Preset)))
def test_every_setting_is_documented_with_its_default(name: str, default: Any) -> None:
    in_yaml = json.dumps(list(default) if isinstance(default, tuple) else default, default=str).strip('"')
    shown = table_row(text_of(PRESETS), name)[-1].replace("`", "")
    assert shown.startswith(DEFAULTS_IN_WORDS.get(name, in_yaml))


@pytest.mark.parametrize("name", [info.name for info in list_presets()])
def test_every_shipped_preset_is_documented_with_its_values(name: str) -> None:
    assert table_row(text_of(README), name)
    preset = load_preset(name)
    _, _, _, sampler, *cells = table_row(text_of(PRESETS), name)
    assert cells == [
        str(preset.theta),
        str(preset.W),
        str(preset.kv_budget),
        "yes" if preset.chat else "no",
    ]
    values = {"temperature": preset.sampler.temperature}
    values |= {"top-p": preset.sampler.top_p} if preset.sampler.top_p < 1 else {}
    values |= {"min-p": preset.sampler.min_p} if preset.sampler.min_p > 0 else {}
    assert sampler == ", ".join(f"{key} {value}" for key, value in values.items())


def test_the_changelog_knows_this_version() -> None:
    changelog = text_of(ROOT / "CHANGELOG.md")
    assert f"## [{swiftgen.__version__}]" in changelog
    assert "## [Unreleased]" in changelog


def test_no_file_names_a_package_registry() -> None:
    """Where packages come from is up to the machine, never to this repository."""
    # Split, so that this file does not name them either.
    hosts = ["pypi" + ".org", "python" + "hosted", "download.py" + "torch", "hugging" + "face.co"]
    for name in SOURCES:
        place = ROOT / name
        for file in [place] if place.is_file() else place.rglob("*"):
            if file.is_file() and file.suffix != ".pyc":
                text = file.read_text(encoding="utf-8", errors="replace").lower()
                assert not [host for host in hosts if host in text], file
