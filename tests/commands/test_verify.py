"""`verify`: documents that are exact, and every way in which one can not be."""

from __future__ import annotations

import json
import shutil
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import yaml

import swiftgen
from support.documents import change_manifest, num_prompt_tokens
from swiftgen.cli.app import main
from swiftgen.document.document import TOKENS_NAME, read_tokens, run_folder
from swiftgen.document.manifest import read_manifest
from swiftgen.forward.target import Target

pytestmark = pytest.mark.usefixtures("module_cache")

NUM_TOKENS = 300
PROMPT = "Tell me of the sea."


@pytest.fixture(scope="module")
def written(tmp_path_factory: pytest.TempPathFactory, preset_file: Path) -> Path:
    path = tmp_path_factory.mktemp("documents") / "book.txt"
    options = ["--preset", str(preset_file), "-n", str(NUM_TOKENS), "-o", str(path), "--seed", "5"]
    assert main(["write", "-q", "--prompt", PROMPT, *options]) == 0
    return path


@pytest.fixture
def document(written: Path, tmp_path: Path) -> Path:
    """A copy of its own."""
    shutil.copytree(run_folder(written), tmp_path / run_folder(written).name)
    return Path(shutil.copy(written, tmp_path))


Verify = Callable[[Path], tuple[int, list[str]]]


@pytest.fixture
def verify(capsys: pytest.CaptureFixture[str]) -> Verify:
    """Exit code, and the lines on stdout or, for an error, on stderr."""

    def run(path: Path) -> tuple[int, list[str]]:
        capsys.readouterr()
        code = main(["verify", "-q", str(path)])
        out, err = capsys.readouterr()
        return code, (err if code == 2 else out).splitlines()

    return run


def change_tokens(path: Path, change: Callable[[list[int]], object]) -> None:
    token_ids = read_tokens(run_folder(path))
    change(token_ids)
    data = struct.pack(f"<{len(token_ids)}I", *token_ids)
    (run_folder(path) / TOKENS_NAME).write_bytes(data)


def test_a_document_is_exact(document: Path, verify: Verify):
    assert verify(document) == (
        0,
        [
            "300 of 300 tokens are exactly what plain decoding writes",
            "the text file is the decoding of the token log",
        ],
    )


@pytest.mark.parametrize(
    "options",
    [["--draft", "paper"], ["--draft", "none"], ["--temperature", "0"], ["--set", "theta=1.0"], ["--raw"]],
)
def test_so_it_is_however_it_was_written(
    options: list[str],
    preset_file: Path,
    tmp_path: Path,
    verify: Verify,
):
    path = tmp_path / "book.txt"
    command = ["write", "-q", "--preset", str(preset_file), "-n", "150", "-o", str(path), "-p", PROMPT]
    assert main([*command, *options]) == 0
    assert verify(path)[0] == 0


def test_a_text_that_ended_by_itself_is_exact(preset_file: Path, tmp_path: Path, verify: Verify):
    path = tmp_path / "book.txt"
    command = ["write", "-q", "--preset", str(preset_file), "-n", "400", "-o", str(path), "-p", PROMPT]
    for seed in range(20):
        assert main([*command, "--stop-at-eos", "--force", "--seed", str(seed)]) == 0
        if read_manifest(run_folder(path)).stop_reason == "eos":
            break
    else:
        pytest.fail("no text ended by itself")
    code, lines = verify(path)
    assert (code, len(lines)) == (0, 2)


@pytest.mark.parametrize("place", [0, 1, 63, 64, 128, 200, NUM_TOKENS - 1])
def test_a_changed_token_is_found(place: int, document: Path, verify: Verify):
    position = num_prompt_tokens(document) + place
    before = read_tokens(run_folder(document))[position]

    def change(token_ids: list[int]) -> None:
        token_ids[position] = 40 if before != 40 else 41

    change_tokens(document, change)
    code, lines = verify(document)
    assert code == 1
    assert lines[0] == f"token {place + 1:,} of 300 is not what plain decoding writes"
    assert f"({40 if before != 40 else 41}), the model picks" in lines[1]
    assert f"({before})" in lines[1]
    assert lines[2].startswith("the text file differs from the token log at byte")


def test_a_changed_prompt_is_found(document: Path, verify: Verify):
    change_tokens(document, lambda token_ids: token_ids.__setitem__(2, token_ids[2] + 1))
    assert verify(document)[0] == 1


@pytest.mark.parametrize(
    ("keys", "value"),
    [
        (["seed"], 6),
        (["preset", "sampler", "temperature"], 1.4),
        (["preset", "sampler", "min_p"], 0.2),
        (["preset", "theta"], 1.3),
        (["preset", "W"], 2),
        (["preset", "suppress"], list(range(30, 60))),
    ],
)
def test_a_changed_seed_or_setting_is_found(keys: list[str], value: object, document: Path, verify: Verify):
    def change(data: dict[str, Any]) -> None:
        *groups, key = keys
        for group in groups:
            data = data[group]
        data[key] = value

    change_manifest(document, change)
    code, lines = verify(document)
    assert code == 1
    assert "is not what plain decoding writes" in lines[0]
    assert lines[2] == "the text file is the decoding of the token log"


def test_how_it_was_drafted_does_not_matter(document: Path, verify: Verify):
    change_manifest(document, lambda data: data["preset"].update(draft="self", tree=[1], kv_budget=16))
    assert verify(document)[0] == 0


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        (lambda data: data[:50] + b"X" + data[51:], "the text file differs from the token log at byte 50"),
        (lambda data: data[:-4], "the text file has "),
        (lambda data: data + b"x", "the text file has "),
        (lambda data: b"", "the text file has 0 bytes"),
    ],
    ids=["changed", "cut", "longer", "empty"],
)
def test_a_changed_text_is_found(
    change: Callable[[bytes], bytes], problem: str, document: Path, verify: Verify
):
    document.write_bytes(change(document.read_bytes()))
    code, lines = verify(document)
    assert code == 1
    assert lines[0].startswith("300 of 300 tokens are exactly")
    assert lines[1].startswith(problem)


def stop(path: Path, num_tokens: int, status: str) -> None:
    """As if the run had been stopped there; its text is that of the whole tokens."""
    from swiftgen.engine import load
    from swiftgen.text.stream import TextStream

    change_manifest(path, lambda data: data.update(status=status, stop_reason=None))
    change_tokens(
        path, lambda token_ids: token_ids.__delitem__(slice(num_prompt_tokens(path) + num_tokens, None))
    )
    tokenizer = load(str(yaml_preset(path))).tokenizer
    text = TextStream(tokenizer).push(read_tokens(run_folder(path))[num_prompt_tokens(path) :])
    path.write_bytes(text.encode())


def yaml_preset(path: Path) -> Path:
    """The settings of a run as a preset file."""
    file = path.with_name("preset.yaml")
    file.write_text(yaml.safe_dump(dict(read_manifest(run_folder(path)).preset)), encoding="utf-8")
    return file


@pytest.mark.parametrize("num_tokens", [1, 100, 217])
def test_a_run_that_was_stopped_is_exact_as_far_as_it_goes(num_tokens: int, document: Path, verify: Verify):
    stop(document, num_tokens, "stopped")
    code, lines = verify(document)
    assert code == 0
    assert lines[0] == f"{num_tokens} of {num_tokens} tokens are exactly what plain decoding writes"
    assert lines[2] == f"the run was stopped at {num_tokens} of 300 tokens"


def test_a_run_that_was_killed_may_lack_the_last_text_and_have_half_a_record(document: Path, verify: Verify):
    stop(document, 200, "running")
    document.write_bytes(document.read_bytes()[:-3])
    with (run_folder(document) / TOKENS_NAME).open("ab") as log:
        log.write(b"\1\0\0")
    assert verify(document)[0] == 0
    document.write_bytes(document.read_bytes() + b"more")
    assert verify(document)[0] == 1


def test_many_tokens_are_checked_in_one_pass(document: Path, verify: Verify, monkeypatch: pytest.MonkeyPatch):
    rows: list[int] = []
    forward = Target.forward

    def counting(self: Target, tree: Any, *args: Any, **options: Any) -> Any:
        rows.append(len(tree))
        return forward(self, tree, *args, **options)

    swiftgen.load(str(yaml_preset(document))).prepare(10, 10)  # the check of the pass sizes makes passes too
    monkeypatch.setattr(Target, "forward", counting)
    assert verify(document)[0] == 0
    assert len(rows) < NUM_TOKENS / 10


def test_other_arithmetic_is_told(document: Path, verify: Verify):
    change_manifest(document, lambda data: data["arithmetic"].update(attention="another"))
    code, lines = verify(document)
    assert code == 0
    assert lines[2] == "it was written with other arithmetic (see run.yaml): a difference may be rounding"


def test_json(document: Path, capsys: pytest.CaptureFixture[str]):
    capsys.readouterr()
    assert main(["verify", "-q", "--json", str(document)]) == 0
    out, err = capsys.readouterr()
    result = json.loads(out)
    assert (result["exact"], result["num_checked"], result["mismatch"], err) == (True, 300, None, "")
    place = num_prompt_tokens(document) + 7
    change_tokens(document, lambda token_ids: token_ids.__setitem__(place, token_ids[place] ^ 1))
    assert main(["verify", "-q", "--json", str(document)]) == 1
    result = json.loads(capsys.readouterr().out)
    assert (result["exact"], result["num_checked"], result["mismatch"]["position"]) == (False, 7, place)


def test_what_cannot_be_verified_is_an_error(document: Path, verify: Verify, tmp_path: Path):
    other = tmp_path / "other.txt"
    other.write_text("no run")
    for path in (other, tmp_path / "missing.txt"):
        code, (error, hint) = verify(path)
        assert (code, "no run folder" in error, "write -o" in hint) == (2, True, True)

    change_tokens(document, lambda token_ids: token_ids.__setitem__(-1, 1_000_000))
    code, (error, *_) = verify(document)
    assert (code, "damaged: it holds token 1000000" in error) == (2, True)

    change_tokens(document, lambda token_ids: token_ids.__delitem__(slice(3, None)))
    assert verify(document)[0] == 2


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: data["preset"].update(theta="big"), "damaged: preset.theta"),
        (lambda data: data["preset"].update(speed=3), "damaged: preset.speed"),
        (lambda data: data["model"].update(fingerprint="0" * 64), "not the model that wrote"),
        (lambda data: data.update(num_prompt_tokens=0), "damaged: num_prompt_tokens"),
        (lambda data: data.update(format=2), "newer swiftgen"),
    ],
    ids=["setting", "unknown setting", "model", "prompt", "format"],
)
def test_a_damaged_manifest_is_an_error(
    change: Callable[[dict[str, Any]], object], message: str, document: Path, verify: Verify
):
    change_manifest(document, change)
    code, (error, *_) = verify(document)
    assert code == 2
    assert message in error


def test_a_text_file_that_is_gone_is_an_error(document: Path, verify: Verify):
    document.unlink()
    code, (error, *_) = verify(document)
    assert (code, "cannot read" in error) == (2, True)
