"""Secrets, planted wherever one may come in, and looked for in all that comes out."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import huggingface_hub
import pytest

from support.commands import Outcome
from swiftgen.cli.app import app, main
from swiftgen.compare.command import _reason
from swiftgen.document.document import run_folder
from swiftgen.models import wheels
from swiftgen.settings.presets import load_preset
from swiftgen.settings.schema import Preset
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.redaction import redacted

pytestmark = pytest.mark.usefixtures("module_cache")

SECRET = "SeCrEtSeCrEtSeCrEtSeCrEtSeCrEtSeCr"
TOKEN = f"hf_{SECRET}"
PASSWORD = "pass:word-of-a-proxy"
ADDRESS = f"https://me:{SECRET}@host.example/simple"


@pytest.fixture(autouse=True)
def planted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN", "OTHER_API_KEY"):
        monkeypatch.setenv(name, TOKEN)
    monkeypatch.setenv("PROXY_PASSWORD", PASSWORD)
    monkeypatch.setenv("PIP_INDEX_URL", ADDRESS)
    monkeypatch.chdir(tmp_path)


Call = Callable[..., Outcome]


@pytest.fixture
def call(capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture) -> Call:
    """Runs a command; no secret may come out."""

    def run(*args: str | Path) -> Outcome:
        capsys.readouterr()
        outcome = Outcome(main([str(arg) for arg in args]), *capsys.readouterr())
        for text in (outcome.out, outcome.err, caplog.text):
            assert SECRET not in text
            assert PASSWORD not in text
        return outcome

    return run


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (f"401 for {TOKEN}.", "401 for ***."),
        (f"cannot open {ADDRESS}", "cannot open https://***@host.example/simple"),
        ("https://user:p@host/a?b=1", "https://***@host/a?b=1"),
        (f"GET /x?a=1&access_token={SECRET}&b=2", "GET /x?a=1&access_token=***&b=2"),
        (f"?X-Amz-Signature={SECRET}&X-Amz-Credential={SECRET}", "?X-Amz-Signature=***&X-Amz-Credential=***"),
        (f"authorization: Bearer {SECRET}", "authorization: Bearer ***"),
        (f"proxy says {PASSWORD}", "proxy says ***"),
        ("hf_models/llama in me@host.example", "hf_models/llama in me@host.example"),
        ("tokens=5, https://host/a@b", "tokens=5, https://host/a@b"),
    ],
)
def test_what_is_hidden(text: str, expected: str):
    assert redacted(text) == expected
    assert redacted(expected) == expected


def test_a_short_or_unrelated_value_of_the_environment_hides_nothing(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SHORT_TOKEN", "abc")
    monkeypatch.setenv("HF_TOKEN_PATH", "/some/where/token")
    assert redacted("abc in /some/where/token") == "abc in /some/where/token"


SETTINGS = ["name", "description", "system", "heads", "model.source", "model.revision"]


@pytest.mark.parametrize("value", [TOKEN, ADDRESS, f"x {PASSWORD}"])
@pytest.mark.parametrize("key", SETTINGS)
def test_no_setting_holds_one(key: str, value: str, tmp_path: Path, call: Call):
    outcome = call("write", "-q", "-p", "x", "-n", "1", "-o", "book.txt", "--set", f"{key}={value}")
    assert (outcome.code, outcome.err) == (
        2,
        f"error: {key} holds a secret, which does not belong in a preset: "
        "log in with `hf auth login`, or set HF_TOKEN\n",
    )
    group, _, name = key.rpartition(".")
    line = f'{group}: {{{name}: "{value}"}}' if group else f'{name}: "{value}"'
    (tmp_path / "mine.yaml").write_text(f"extends: smollm2-135m\n{line}\n", encoding="utf-8")
    assert call("presets", tmp_path / "mine.yaml").code == 2
    assert list(tmp_path.iterdir()) == [tmp_path / "mine.yaml"]


@pytest.mark.parametrize("key", ["k", "tree", "draft", "model.sha256", "model.device", "sampler.min_p"])
def test_a_wrong_value_is_not_repeated(key: str, call: Call):
    assert call("write", "-q", "-p", "x", "--set", f"{key}={TOKEN}").code == 2
    assert call("write", "-q", "-p", "x", "--set", f"{TOKEN}={key}").code == 2


def test_a_wrong_argument_is_not_repeated(call: Call):
    for args in (
        ["write", "-q", "--preset", TOKEN],
        ["write", "-q", "--prompt-file", f"{TOKEN}.txt"],
        ["write", "-q", TOKEN],
        ["write", f"--{TOKEN}"],
        ["resume", f"{TOKEN}.txt"],
        [TOKEN],
        ["heads", "show", f"./{TOKEN}"],
        ["compare", "--sweep", f"{TOKEN}=1"],
    ):
        assert call(*args).code == 2


def test_a_hub_that_repeats_it(call: Call, monkeypatch: pytest.MonkeyPatch):
    def refuses(*_: object, **__: object) -> None:
        raise OSError(f"401 {ADDRESS}?token={SECRET} (Authorization: Bearer {TOKEN})")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuses)
    outcome = call("write", "-q", "-p", "x", "--set", "model.source=some/model", "--set", "model.sha256=")
    assert "cannot fetch some/model: 401 https://***@host.example" in outcome.err


def test_a_package_index_that_repeats_it():
    error = wheels._pip_failure("x==1", f"ERROR: no x in {ADDRESS}\n")
    assert error.message == "cannot fetch x==1: no x in https://***@host.example/simple"


def test_a_run_and_its_report(preset_file: Path, tmp_path: Path, call: Call):
    path = tmp_path / "book.txt"
    common = ["-q", "--preset", preset_file, "--raw"]
    assert call("write", *common, "-p", f"My token is {TOKEN}.", "-n", "4", "--json", "-o", path).code == 0
    assert call("resume", "-q", "--json", "-n", "8", path).code == 0
    assert call("verify", "-q", "--json", path).code == 0
    assert call("doctor", "--preset", preset_file, "--json", "--no-load").code in (0, 1)
    report = tmp_path / "report"
    compare = ["compare", "--preset", preset_file, "-p", f"{TOKEN} he", "-n", "4", "--seeds", "1", "-q"]
    assert call(*compare, "--baseline", "ar", "--set", "chat=false", "-o", report).code == 0
    written = [file for folder in (run_folder(path), report) for file in folder.rglob("*") if file.is_file()]
    assert len(written) >= 6
    for file in written:
        assert SECRET.encode() not in file.read_bytes(), file


def test_a_way_that_fails_in_a_comparison():
    assert SECRET not in _reason(OSError(f"cannot open {ADDRESS}"))
    assert SECRET not in _reason(SwiftgenError(f"no {TOKEN}", f"see {ADDRESS}"))


def test_a_traceback_shows_no_variables():
    assert app.pretty_exceptions_show_locals is False


def test_the_api_refuses_one_too():
    with pytest.raises(SwiftgenError, match="holds a secret"):
        load_preset(None, {"system": TOKEN})
    with pytest.raises(ValueError, match="holds a secret"):
        Preset.model_validate({"model": {"source": ADDRESS}})
    assert load_preset(None, {"system": "hf_ is a prefix"}).system == "hf_ is a prefix"
