"""`doctor`: every figure against another way to get it, every way in which something can be missing."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from rich.console import Console
from transformers import LlamaForCausalLM

import swiftgen
from support.model_files import (
    HIDDEN_SIZE,
    MAX_POSITIONS,
    VOCAB_SIZE,
    save_model,
    tiny_config,
    tiny_model,
    tiny_tokenizer,
    write_gguf,
)
from support.tiny import FAMILIES, backend_for
from support.tiny import tiny_model as tiny_family
from swiftgen.cli.app import main
from swiftgen.decoding.plans import run_memory
from swiftgen.doctor import checks_machine, checks_preset
from swiftgen.doctor.command import Diagnosis, DoctorRequest, diagnose, show
from swiftgen.doctor.findings import Finding, run_checks
from swiftgen.forward import attention
from swiftgen.forward import memory as limits
from swiftgen.forward.arithmetic import arithmetic_of
from swiftgen.forward.exactness import Exactness
from swiftgen.forward.memory import MemoryEstimate, check_memory
from swiftgen.forward.target import Target
from swiftgen.heads.files import HeadsInfo, save_heads
from swiftgen.heads.modules import new_heads
from swiftgen.native import build as native
from swiftgen.settings.presets import DEFAULT_PRESET, load_preset
from swiftgen.system import machine
from swiftgen.system.errors import SwiftgenError

pytestmark = pytest.mark.usefixtures("module_cache")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
MACHINE = [
    *("software", "processor", "threads", "gpu", "memory", "bandwidth"),
    *("native_kernels", "flash_attn", "cache_folder"),
]
NEEDS = [
    *("runs_on", "model", "tokenizer", "attention", "weights", "kv_cache", "memory", "longest_text"),
    *("heads", "exactness", "plain_decoding"),
]


@pytest.fixture(autouse=True)
def small_reads_and_no_network(monkeypatch: pytest.MonkeyPatch) -> None:
    """Memory is read in no time, and nothing may be fetched."""
    monkeypatch.setattr(machine, "_READ_BYTES", {"cpu": 2**22})

    def local_only(repo_id: str, *, local_files_only: bool, **_: Any) -> str:
        assert local_files_only
        raise FileNotFoundError(repo_id)

    monkeypatch.setattr("huggingface_hub.snapshot_download", local_only)
    monkeypatch.setattr("huggingface_hub.hf_hub_download", lambda *_, **__: pytest.fail("fetched"))
    monkeypatch.setattr("swiftgen.models.wheels.download_wheel", lambda *_: pytest.fail("fetched"))


Doctor = Callable[..., tuple[int, dict[str, Any]]]


@pytest.fixture
def doctor(preset_file: Path, capsys: pytest.CaptureFixture[str]) -> Doctor:
    """Exit code and JSON, for the tiny preset unless another is named."""

    def run(
        *settings: str, preset: Path | str = preset_file, load: bool = False
    ) -> tuple[int, dict[str, Any]]:
        options = [part for setting in settings for part in ("--set", setting)]
        capsys.readouterr()
        code = main(["doctor", "--preset", str(preset), "--json", *options, *([] if load else ["--no-load"])])
        lines = capsys.readouterr().out.splitlines()
        assert len(lines) == 1
        found = json.loads(lines[0])
        assert found["ready"] == (code == 0)
        return code, found

    return run


@pytest.fixture
def no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    """Kernels are looked for anew, on a machine without any compiler."""
    monkeypatch.setattr(native, "_built", native._built.__wrapped__)
    monkeypatch.setattr(native, "_compilers", list)


def parameters() -> int:
    model = LlamaForCausalLM(tiny_config(max_position_embeddings=MAX_POSITIONS))
    return sum(parameter.numel() for parameter in model.parameters())


class TestWhatIsHere:
    def test_every_question_has_an_answer(self, doctor: Doctor):
        code, found = doctor(load=True)
        assert code == 0
        assert set(found) == {"preset", "ready", "to_do", "machine", "needs"}
        assert (found["preset"], list(found["machine"]), list(found["needs"])) == ("tiny", MACHINE, NEEDS)
        for finding in (*found["machine"].values(), *found["needs"].values()):
            assert list(finding)[:3] == ["state", "text", "advice"]
            assert finding["state"] in ("ok", "note")
            assert finding["text"]
            assert "\n" not in finding["text"] + finding["advice"]

    def test_software_and_processor(self, doctor: Doctor):
        found = doctor()[1]["machine"]
        assert found["software"]["torch"] == torch.__version__
        assert found["software"]["swiftgen"] == swiftgen.__version__
        assert found["processor"]["torch_uses"] == torch.backends.cpu.get_cpu_capability()
        assert found["threads"]["threads"] == torch.get_num_threads()
        assert 0 < found["threads"]["usable_cores"] <= psutil.cpu_count()
        assert len(found["gpu"]["names"]) == (torch.cuda.device_count() if torch.cuda.is_available() else 0)
        assert 0 < found["memory"]["free_bytes"] < found["memory"]["total_bytes"]

    def test_more_threads_than_cores(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
        monkeypatch.setattr(checks_machine, "usable_cores", lambda: 2.5)
        code, found = doctor()
        assert (code, found["machine"]["threads"]["state"]) == (0, "note")
        assert "OMP_NUM_THREADS=2" in found["machine"]["threads"]["advice"]
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        assert checks_machine.threads().state == "ok"

    def test_fewer_threads_than_cores(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(checks_machine, "usable_cores", lambda: 8.0)
        monkeypatch.setattr(
            "swiftgen.doctor.checks_machine.psutil.cpu_count", lambda logical=True: 8 if logical else 4
        )
        monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
        assert checks_machine.threads().state == "ok"  # one for each physical core
        monkeypatch.setattr(torch, "get_num_threads", lambda: 3)
        assert checks_machine.threads().state == "note"
        assert "OMP_NUM_THREADS=4" in checks_machine.threads().advice

    def test_no_compiler(self, doctor: Doctor, no_compiler: None):
        code, found = doctor()
        assert code == 0
        assert found["machine"]["native_kernels"]["state"] == "note"
        assert "no C++ compiler was found" in found["machine"]["native_kernels"]["text"]
        assert "Install g++ or clang++" in found["machine"]["native_kernels"]["advice"]
        assert not found["machine"]["native_kernels"]["built"]
        assert found["needs"]["attention"]["name"] == "cpu_prefix"
        assert any("g++" in line for line in found["to_do"])

    def test_kernels_that_are_asked_for_and_cannot_be_had(self, doctor: Doctor, no_compiler: None):
        code, found = doctor("model.attention=native")
        assert (code, found["needs"]["attention"]["state"]) == (1, "missing")
        assert "no C++ compiler" in found["needs"]["attention"]["text"]

    def test_flash_attn(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(checks_machine, "flash_attn_installed", lambda: False)
        assert doctor()[1]["machine"]["flash_attn"]["state"] == "ok"  # no use on a CPU
        assert checks_machine.flash_attn(CUDA).state == "note"
        assert "flash-attn" in checks_machine.flash_attn(CUDA).advice
        monkeypatch.setattr(checks_machine, "flash_attn_installed", lambda: True)
        assert checks_machine.flash_attn(CUDA) == Finding(
            "installed, used on cuda", figures={"installed": True}
        )

    def test_flash_attn_that_is_asked_for(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(attention, "flash_attn_installed", lambda: False)
        code, found = doctor("model.attention=flash")
        assert (code, found["needs"]["attention"]["state"]) == (1, "missing")
        assert "model.attention=auto" in found["needs"]["attention"]["advice"]

    def test_a_gpu(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (2**30, 2**31))
        found = checks_machine.memory(CUDA)
        assert (found.figures["gpu_free_bytes"], found.figures["gpu_total_bytes"]) == (2**30, 2**31)
        assert found.text.endswith("GPU 1.00 GiB free of 2.00 GiB")
        assert checks_machine.native_kernels(CUDA).text == "not used on cuda"

    def test_a_cache_folder(self, doctor: Doctor, cache: Path):
        found = doctor()[1]["machine"]["cache_folder"]
        assert (found["state"], found["path"], found["writable"]) == ("ok", str(cache), True)
        assert found["free_bytes"] == pytest.approx(psutil.disk_usage(str(cache.parent)).free, rel=0.05)

    def test_a_broken_cache_folder(
        self,
        doctor: Doctor,
        cache: Path,
        preset_file: Path,
    ):
        cache.write_text("a file", encoding="utf-8")
        code, found = doctor(load=True)
        assert code == 0  # the model lies elsewhere
        assert (found["machine"]["cache_folder"]["state"], found["machine"]["cache_folder"]["writable"]) == (
            "note",
            False,
        )
        assert "SWIFTGEN_CACHE" in found["machine"]["cache_folder"]["advice"]
        assert found["needs"]["exactness"]["lossless"]

    def test_what_earlier_versions_left(self, doctor: Doctor, cache: Path):
        (cache / "converted" / "a").mkdir(parents=True)
        assert doctor()[1]["machine"]["cache_folder"]["state"] == "ok"
        (cache / "converted" / "a" / "model.safetensors").write_bytes(bytes(3000))
        found = doctor()[1]["machine"]["cache_folder"]
        assert (found["state"], found["unneeded_bytes"]) == ("note", 3000)
        assert str(cache / "converted") in found["advice"]

    def test_a_cache_folder_that_others_may_write(self, doctor: Doctor, cache: Path):
        cache.mkdir()
        cache.chmod(0o777)
        found = doctor()[1]["machine"]["cache_folder"]
        assert (found["state"], found["shared"]) == ("note", str(cache))
        assert "chmod go-w" in found["advice"]

    def test_a_full_disk(self, cache: Path, monkeypatch: pytest.MonkeyPatch):
        usage = psutil.disk_usage(str(cache.parent))._replace(free=1000)
        monkeypatch.setattr("swiftgen.doctor.checks_machine.shutil.disk_usage", lambda _: usage)
        assert (checks_machine.cache().state, checks_machine.cache().figures["free_bytes"]) == ("note", 1000)


class TestWhatAPresetNeeds:
    def test_sizes(self, doctor: Doctor):
        found = doctor()[1]["needs"]
        assert found["weights"]["bytes"] == 4 * parameters()
        # keys and values x layers x KV heads x head width x bytes x tokens
        assert found["kv_cache"]["bytes"] == 2 * 2 * 2 * 8 * 4 * 10_000
        assert found["kv_cache"]["num_tokens"] == 10_000
        assert found["model"]["positions"] == found["longest_text"]["num_tokens"] == MAX_POSITIONS
        assert found["runs_on"] == {
            **found["runs_on"],
            "device": "cpu",
            "dtype": "float32",
        }
        assert found["tokenizer"]["num_tokens"] == len(tiny_tokenizer())

    def test_what_memory_allows(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(checks_machine, "read_gb_per_s", lambda _: 2.0)
        found = doctor()[1]["needs"]["plain_decoding"]
        read = 4 * (parameters() - VOCAB_SIZE * HIDDEN_SIZE)  # of the embeddings, one row is read
        assert found["memory_allows_tokens_per_s"] == pytest.approx(2e9 / read, abs=0.01)
        kv_bytes = 2 * 2 * 2 * 8 * 4 * MAX_POSITIONS
        assert found["late_tokens"] == MAX_POSITIONS
        assert found["memory_allows_tokens_per_s_late"] == pytest.approx(2e9 / (read + kv_bytes), abs=0.01)

    def test_a_text_as_long_as_memory(
        self,
        doctor: Doctor,
        preset_file: Path,
        monkeypatch: pytest.MonkeyPatch,
    ):
        preset = load_preset(str(preset_file))
        config = tiny_config(max_position_embeddings=MAX_POSITIONS)

        def needed(num_tokens: int) -> MemoryEstimate:
            return run_memory(preset, config, 4 * parameters(), num_tokens, torch.float32, CPU)

        def fits(num_tokens: int) -> bool:
            try:
                check_memory(needed(num_tokens), CPU)
            except SwiftgenError:
                return False
            return True

        free = needed(300).total_bytes + 77
        for module in (checks_preset, limits):
            monkeypatch.setattr(module, "free_bytes", lambda _: free)
        code, found = doctor()
        longest = found["needs"]["longest_text"]
        assert (code, longest["state"], longest["num_tokens"]) == (0, "note", 300)
        assert fits(longest["num_tokens"])
        assert not fits(longest["num_tokens"] + 1)
        assert found["needs"]["memory"]["fitting_tokens"] == 300

    def test_a_text_beyond_the_positions(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(checks_preset, "free_bytes", lambda _: 2**33)
        found = doctor("long_context=yarn")[1]["needs"]["longest_text"]
        assert found["num_tokens"] == found["fitting_tokens"] > MAX_POSITIONS

    def test_too_little_memory(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch, cache: Path):
        monkeypatch.setattr(checks_preset, "free_bytes", lambda _: 2**20)
        monkeypatch.setattr(checks_preset, "load_weights", lambda *_: pytest.fail("loaded"))
        code, found = doctor(load=True)
        assert (code, found["needs"]["memory"]["state"]) == (1, "missing")
        assert "1.0 MiB free" in found["needs"]["memory"]["text"]
        assert "smaller model" in found["to_do"][0]
        assert "longest_text" not in found["needs"]
        assert found["needs"]["exactness"]["state"] == "unknown"

    def test_an_unknown_preset(self, capsys: pytest.CaptureFixture[str]):
        assert main(["doctor", "--preset", "smollm2"]) == 2
        out, err = capsys.readouterr()
        assert (out, err.splitlines()[0]) == ("", "error: there is no preset named 'smollm2'")

    def test_a_model_that_is_not_here(self, doctor: Doctor, cache: Path):
        for preset in (DEFAULT_PRESET, "llama31-8b"):
            code, found = doctor(preset=preset, load=True)
            assert (code, found["needs"]["model"]["state"]) == (1, "missing")
            assert "is not on this machine yet" in found["needs"]["model"]["text"]
            assert "`swiftgen write` fetches it" in found["to_do"][0]
        assert found["needs"].keys() == {"runs_on", "model", "heads"}

    @pytest.mark.parametrize(
        ("setting", "missing"),
        [
            ("model.source=./nowhere", "model"),
            ("model.device=cuda:99", "runs_on"),
            ("draft=heads", "heads"),
            ("heads=./nowhere", "heads"),
            ("heads=some/heads", "heads"),
        ],
    )
    def test_what_else_can_be_missing(self, setting: str, missing: str, doctor: Doctor):
        code, found = doctor(setting)
        assert (code, found["needs"][missing]["state"]) == (1, "missing")
        assert found["needs"][missing]["advice"] in found["to_do"][0]

    def test_a_chat_without_a_template(self, doctor: Doctor, tmp_path: Path):
        save_model(tmp_path)
        code, found = doctor(f"model.source={tmp_path}", "chat=true")
        assert (code, found["needs"]["tokenizer"]["state"]) == (1, "missing")
        assert doctor(f"model.source={tmp_path}", "chat=false")[0] == 0

    def test_a_file_that_was_never_read(self, doctor: Doctor, tmp_path: Path, cache: Path):
        write_gguf(tmp_path / "tiny.gguf", tiny_model())
        setting = f"model.source={tmp_path / 'tiny.gguf'}"
        code, found = doctor(setting)
        assert (code, found["needs"]["model"]["state"]) == (1, "missing")
        assert "without --no-load" in found["needs"]["model"]["advice"]
        assert not (cache / "gguf").exists()
        assert doctor(setting, load=True)[0] == doctor(setting)[0] == 0

    @pytest.mark.parametrize("has_units", [False, True])
    def test_dtypes(self, has_units: bool, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("swiftgen.system.devices._cpu_has_bf16", lambda: has_units)
        slower, faster = ("float32", "bfloat16") if has_units else ("bfloat16", "float32")
        found = doctor(f"model.dtype={slower}")[1]["needs"]["runs_on"]
        assert (found["dtype"], found["state"]) == (slower, "note")
        assert f"model.dtype={faster}" in found["advice"]
        found = doctor("model.dtype=auto")[1]["needs"]["runs_on"]
        assert (found["dtype"], found["state"]) == (faster, "ok")


class TestHeads:
    @pytest.fixture
    def heads(self, tmp_path: Path) -> Callable[..., Path]:
        def save(hidden_size: int = HIDDEN_SIZE, fingerprint: str = "") -> Path:
            info = HeadsInfo("tiny", fingerprint, VOCAB_SIZE)
            save_heads(new_heads("linear", hidden_size, 2, 1e-6), tmp_path, info)
            return tmp_path

        return save

    def test_heads_that_fit(self, doctor: Doctor, heads: Callable[..., Path]):
        code, found = doctor(f"heads={heads()}")
        assert (code, found["needs"]["heads"]["state"]) == (0, "ok")
        assert (found["needs"]["heads"]["kind"], found["needs"]["heads"]["num_heads"]) == ("linear", 2)

    def test_heads_of_another_size(self, doctor: Doctor, heads: Callable[..., Path]):
        code, found = doctor(f"heads={heads(hidden_size=16)}")
        assert (code, found["needs"]["heads"]["state"]) == (1, "missing")
        assert "hidden size 16" in found["needs"]["heads"]["text"]

    def test_heads_of_other_weights(self, doctor: Doctor, heads: Callable[..., Path]):
        fingerprint = doctor()[1]["needs"]["model"]["fingerprint"]
        assert doctor(f"heads={heads(fingerprint=fingerprint)}")[1]["needs"]["heads"]["state"] == "ok"
        code, found = doctor(f"heads={heads(fingerprint='other')}")
        assert (code, found["needs"]["heads"]["state"]) == (0, "note")

    def test_no_heads(self, doctor: Doctor):
        assert doctor()[1]["needs"]["heads"]["state"] == "note"
        assert "heads" not in doctor("draft=none")[1]["needs"]

    def test_heads_of_the_hub(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *_: "/some/config.json")
        assert doctor("heads=some/heads")[0] == 0


class TestExactness:
    def test_it_is_that_of_a_run(self, doctor: Doctor, preset_file: Path, cache: Path):
        found = doctor()[1]["needs"]["exactness"]
        assert (found["state"], found["text"]) == ("note", "not checked yet")
        found = doctor(load=True)[1]["needs"]["exactness"]
        kept = list((cache / "exactness").iterdir())
        engine = swiftgen.load(str(preset_file))
        engine.prepare(10, 10)
        assert list((cache / "exactness").iterdir()) == kept  # found by the run
        assert found["text"] == engine.exactness
        assert found["lossless"] is engine.is_lossless
        assert found["pass_sizes"] == engine.arithmetic["pass_sizes"]

    def test_what_is_kept_needs_no_weights(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        doctor(load=True)
        monkeypatch.setattr(checks_preset, "load_weights", lambda *_: pytest.fail("loaded"))
        assert doctor(load=True)[1]["needs"]["exactness"]["lossless"]
        assert doctor()[1]["needs"]["exactness"]["lossless"]

    def test_up_to_rounding(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(checks_preset, "kept_exactness", lambda *_: Exactness((8,), False, (0.25,)))
        code, found = doctor()
        assert (code, found["needs"]["exactness"]["state"]) == (0, "note")
        assert found["needs"]["exactness"]["lossless"] is False
        assert found["needs"]["plain_decoding"]["pass_s"] == 0.25

    @pytest.mark.parametrize("family", FAMILIES)
    @pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
    @pytest.mark.parametrize("attention", ["auto", "sdpa"])
    def test_the_arithmetic_of_a_model_without_its_weights(
        self, family: str, dtype: torch.dtype, attention: str
    ):
        model = tiny_family(family, dtype)
        backend = backend_for(model, attention)
        expected = arithmetic_of(model.config, dtype, CPU, backend)
        assert expected == Target(model, backend).arithmetic


class TestFailures:
    @pytest.mark.parametrize(
        ("place", "name"),
        [
            ("doctor.checks_machine.processor_name", "processor"),
            ("doctor.checks_machine.usable_cores", "threads"),
            ("doctor.checks_machine._num_gpus", "gpu"),
            ("doctor.checks_machine.psutil.virtual_memory", "memory"),
            ("doctor.checks_machine.read_gb_per_s", "bandwidth"),
            ("doctor.checks_machine.found_compilers", "native_kernels"),
            ("doctor.checks_machine.flash_attn_installed", "flash_attn"),
            ("doctor.checks_machine.cache_folder", "cache_folder"),
        ],
    )
    def test_a_probe_of_the_machine(
        self, place: str, name: str, doctor: Doctor, monkeypatch: pytest.MonkeyPatch
    ):
        def fail(*_: object) -> None:
            raise RuntimeError("no\nluck")

        monkeypatch.setattr(f"swiftgen.{place}", fail)
        if "virtual_memory" in place:
            monkeypatch.setattr(checks_preset, "free_bytes", lambda _: 2**33)
        code, found = doctor()
        assert (code, list(found["machine"])) == (0, MACHINE)
        states = {key: finding["state"] for key, finding in found["machine"].items()}
        assert states[name] == "unknown"
        assert found["machine"][name]["text"] == "could not be found out (RuntimeError: no luck)"
        if name == "bandwidth":
            assert "plain_decoding" not in found["needs"]

    def test_a_needed_probe(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        def fail(*_: object, **__: object) -> None:
            raise ValueError

        monkeypatch.setattr(checks_preset, "open_model", fail)
        code, found = doctor()
        assert (code, found["needs"]["model"]["state"]) == (1, "missing")
        assert found["needs"]["model"]["text"] == "could not be found out (ValueError: no reason given)"

    def test_no_transformers(self, doctor: Doctor, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setitem(sys.modules, "transformers", None)
        code, found = doctor()
        assert (code, list(found["machine"]), found["needs"]) == (1, ["software"], {})
        assert "make setup" in found["to_do"][0]

    def test_states(self):
        def refuse() -> Finding:
            raise SwiftgenError("it is wrong", "mend it")

        refused = run_checks({"a": refuse, "b": refuse, "c": lambda: None}, frozenset({"a"}))
        assert refused == {
            "a": Finding("it is wrong", "missing", "mend it"),
            "b": Finding("it is wrong", "note", "mend it"),
        }


class TestDisplay:
    DIAGNOSIS = Diagnosis(
        "tiny",
        {"cache_folder": Finding("a" * 70, "note", "free some")},
        {"model": Finding("not \x1b[31mhere", "missing", "fetch it")},
    )

    def shown(self, console: Console) -> str:
        with console.capture() as capture:
            show(self.DIAGNOSIS, console)
        return capture.get()

    def test_plain_lines(self):
        assert self.shown(Console(width=40, highlight=False)).splitlines() == [
            "machine",
            f"  note     cache folder    {'a' * 70}",
            "preset tiny",
            "  missing  model           not ␛[31mhere",
            "what to do",
            "  - model: fetch it",
            "  - cache folder: free some",
            "not ready to write with tiny: see model",
        ]

    def test_on_a_terminal(self):
        shown = self.shown(Console(width=40, force_terminal=True, highlight=False))
        assert "\x1b[1;31mmissing" in shown
        assert "\x1b[31mhere" not in shown
        folded = self.shown(Console(width=40, force_terminal=True, color_system=None, highlight=False))
        assert max(map(len, folded.splitlines()[:4])) <= 40
        assert folded.count("a" * 10) >= 3

    def test_the_command(self, preset_file: Path, capsys: pytest.CaptureFixture[str]):
        assert main(["doctor", "--preset", str(preset_file), "--no-load"]) == 0
        out, err = capsys.readouterr()
        assert err == ""
        assert out.splitlines()[0] == "machine"
        assert out.splitlines()[-1] == "ready to write with tiny"
        diagnosis = diagnose(DoctorRequest(str(preset_file), {}, json=False, may_load=False))
        assert len(out.splitlines()) >= len(diagnosis.machine) + len(diagnosis.needs) + 3


def test_nothing_heavy_before_a_preset_is_known():
    code = "import sys, swiftgen.doctor.command; assert not {'torch', 'transformers'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", code], check=True)
