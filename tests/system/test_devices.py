"""GPUs that are missing, old or full, as far as a machine without one can tell; and what a run needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from transformers import LlamaConfig

from support import fakes
from support.model_files import tiny_config
from support.tiny import random_tree, sampler
from swiftgen.cli.app import main
from swiftgen.decoding.history import History
from swiftgen.decoding.plans import max_tree_rows, run_memory
from swiftgen.engine import Engine
from swiftgen.forward.cache import FullCache
from swiftgen.forward.memory import check_memory, estimate_memory
from swiftgen.forward.target import Target
from swiftgen.settings.plans import PLANS
from swiftgen.settings.presets import load_preset
from swiftgen.system import devices
from swiftgen.system.devices import free_bytes, memory_errors, resolve_device, resolve_dtype, send
from swiftgen.system.errors import SwiftgenError

pytestmark = pytest.mark.usefixtures("module_cache")

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
OUT_OF_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.1 GiB"
LLAMA31_8B = LlamaConfig(
    hidden_size=4096,
    intermediate_size=14336,
    num_hidden_layers=32,
    num_attention_heads=32,
    num_key_value_heads=8,
    head_dim=128,
    vocab_size=128_256,
)
WEIGHTS_8B = 2 * 8_030_261_248


class TestChoice:
    @pytest.fixture(autouse=True)
    def no_gpu(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("torch.cuda.is_available", lambda: False)

    def failure(self) -> SwiftgenError:
        with pytest.raises(SwiftgenError, match="torch sees 0 CUDA devices") as caught:
            resolve_device("cuda")
        assert "\n" not in caught.value.message
        assert "cpu" in caught.value.hint
        return caught.value

    def test_a_build_without_cuda(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("torch.version.cuda", None)
        assert "built without CUDA" in self.failure().message

    def test_a_driver_that_is_too_old(self, monkeypatch: pytest.MonkeyPatch):
        def init() -> None:
            raise RuntimeError("The NVIDIA driver on your system is too old (found 11040).\nPlease ...")

        monkeypatch.setattr("torch.version.cuda", "12.8")
        monkeypatch.setattr("torch.cuda.init", init)
        assert "driver on your system is too old (found 11040)" in self.failure().message

    def test_no_number_of_that_kind(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("torch.cuda.is_available", lambda: True)
        monkeypatch.setattr("torch.cuda.device_count", lambda: 2)
        assert resolve_device("cuda:1") == torch.device("cuda:1")
        with pytest.raises(SwiftgenError, match=r"cuda:2, but torch sees 2 CUDA devices$"):
            resolve_device("cuda:2")

    @pytest.mark.parametrize(
        ("found", "expected"),
        [
            ((6, 1), torch.float32),
            ((7, 5), torch.float16),
            ((8, 0), torch.bfloat16),
            ((9, 0), torch.bfloat16),
        ],
    )
    def test_auto_takes_the_16_bits_a_card_has(
        self, found: tuple[int, int], expected: torch.dtype, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(devices, "capability", lambda device: found)
        assert resolve_dtype("auto", CUDA) == expected
        assert resolve_dtype("float16", CUDA) == torch.float16

    def test_bfloat16_on_a_card_without(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(devices, "capability", lambda device: (7, 5))
        with pytest.raises(SwiftgenError, match=r"no bfloat16 .compute capability 7\.5") as caught:
            resolve_dtype("bfloat16", CUDA)
        assert "float16" in caught.value.hint
        monkeypatch.setattr(devices, "capability", lambda device: (8, 6))
        assert resolve_dtype("bfloat16", CUDA) == torch.bfloat16


class TestMemory:
    def test_what_pytorch_keeps_can_be_used(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda device: (10_000, 80_000))
        monkeypatch.setattr("torch.cuda.memory_reserved", lambda device: 5_000)
        monkeypatch.setattr("torch.cuda.memory_allocated", lambda device: 3_000)
        assert free_bytes(CUDA) == 12_000

    def test_100k_tokens_of_an_8b_model_fit_a_card_of_40_gb(self, monkeypatch: pytest.MonkeyPatch):
        # An A100-40GB has 39.4 GiB, of which a context takes about half a GiB.
        monkeypatch.setattr("swiftgen.forward.memory.free_bytes", lambda device: int(38.9 * 2**30))
        estimate = run_memory(
            load_preset("llama31-8b"), LLAMA31_8B, WEIGHTS_8B, 100_000, torch.bfloat16, CUDA
        )
        check_memory(estimate, CUDA)
        assert estimate.kv_bytes == 100_000 * 131_072
        assert 28 * 2**30 < estimate.total_bytes < 31 * 2**30

    def test_a_gpu_spends_more_on_the_vocabulary(self):
        on_cpu = estimate_memory(LLAMA31_8B, 0, 1000, torch.bfloat16)
        on_gpu = estimate_memory(LLAMA31_8B, 0, 1000, torch.bfloat16, on_gpu=True)
        assert on_cpu.work_bytes < on_gpu.work_bytes < 4 * on_cpu.work_bytes

    def test_the_widest_tree_counts(self, monkeypatch: pytest.MonkeyPatch):
        settings = {"draft": "paper", "k": 1000, "tree": [2, 3], "ngram": 4}
        preset = load_preset(None, settings)
        rows = max_tree_rows(preset)
        assert rows >= 1 + (2 + 6) + 2 * 1000 * 3 + 128
        config = tiny_config()
        estimate = run_memory(preset, config, 1000, 200, torch.bfloat16, CPU)
        per_token = estimate.kv_bytes // 200
        assert estimate.draft_bytes == per_token * (rows + preset.kv_budget)
        monkeypatch.setattr("swiftgen.forward.memory.free_bytes", lambda device: estimate.total_bytes - 1)
        with pytest.raises(SwiftgenError, match=f"drafts of up to {rows:,} rows") as caught:
            check_memory(estimate, CPU)
        assert "smaller k" in caught.value.hint
        monkeypatch.setattr("swiftgen.forward.memory.free_bytes", lambda device: estimate.total_bytes)
        check_memory(estimate, CPU)

    @pytest.mark.parametrize("draft", PLANS)
    def test_a_tree_of_the_plan_has_room(self, draft: str):
        preset = load_preset(None, {"draft": draft})
        assert max_tree_rows(preset) > 64 + 128 or draft == "none"

    def test_an_engine_refuses_a_tree_too_wide_for_the_memory(
        self,
        preset_file: Path,
        monkeypatch: pytest.MonkeyPatch,
    ):
        narrow = Engine(load_preset(str(preset_file)))
        opened = narrow.opened
        weights_bytes = opened.weights_bytes(None)
        needed = run_memory(narrow.preset, opened.config, weights_bytes, 30, opened.dtype, CPU)
        monkeypatch.setattr("swiftgen.forward.memory.free_bytes", lambda device: needed.total_bytes)
        narrow.prepare(10, 20)
        wide = Engine(load_preset(str(preset_file), {"draft": "paper", "k": 1000}))
        with pytest.raises(SwiftgenError, match="drafts of up to") as caught:
            wide.prepare(10, 20)
        assert "smaller k" in caught.value.hint


class TestOutOfMemory:
    def test_it_becomes_one_line(self):
        error = torch.cuda.OutOfMemoryError(OUT_OF_MEMORY + "\nmore")
        with pytest.raises(SwiftgenError) as caught, memory_errors(CUDA, "loading", "Buy another."):
            raise error
        assert caught.value.message.startswith("the memory of cuda ran out while loading: CUDA out of memory")
        assert "\n" not in caught.value.message
        assert (caught.value.hint, caught.value.exit_code) == ("Buy another.", 2)
        with pytest.raises(ValueError, match=r"^x$"), memory_errors(CUDA, "", ""):
            raise ValueError("x")

    @pytest.fixture
    def full_after(self, monkeypatch: pytest.MonkeyPatch) -> list[int]:
        """The memory ends after so many passes."""
        left = [10**9]
        forward = Target.forward

        def limited(*args: object, **options: object) -> object:
            left[0] -= 1
            if left[0] < 0:
                raise torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)
            return forward(*args, **options)  # type: ignore[arg-type]

        monkeypatch.setattr(Target, "forward", limited)
        return left

    def test_the_text_is_kept_and_can_be_continued(
        self,
        preset_file: Path,
        full_after: list[int],
        tmp_path: Path,
        capsys: pytest.CaptureFixture[str],
    ):
        whole, cut = tmp_path / "whole.txt", tmp_path / "cut.txt"
        options = ["write", "--preset", str(preset_file), "--prompt", "The hen.", "-n", "60", "-q", "-o"]
        assert main([*options, str(whole)]) == 0
        full_after[0] = 12
        capsys.readouterr()
        assert main([*options, str(cut)]) == 2
        said = capsys.readouterr().err.strip().splitlines()
        assert len(said) == 2
        assert "memory of cpu ran out while writing: CUDA out of memory" in said[0]
        assert "swiftgen resume" in said[1]
        assert 0 < cut.stat().st_size < whole.stat().st_size
        full_after[0] = 10**9
        assert main(["resume", str(cut), "-q"]) == 0
        assert cut.read_bytes() == whole.read_bytes()

    def test_while_loading(self, preset_file: Path, monkeypatch: pytest.MonkeyPatch):
        def full(*_: object) -> None:
            raise torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)

        monkeypatch.setattr("swiftgen.decoding.ready.known_exactness", full)
        engine = Engine(load_preset(str(preset_file)))
        with pytest.raises(SwiftgenError, match="ran out while loading") as caught:
            engine.prepare(10, 20)
        assert "smaller model" in caught.value.hint

    def test_while_making_the_cache(self, preset_file: Path, monkeypatch: pytest.MonkeyPatch):
        engine = Engine(load_preset(str(preset_file)))
        engine.prepare(10, 20)

        def full(*_: object) -> FullCache:
            raise torch.cuda.OutOfMemoryError(OUT_OF_MEMORY)

        monkeypatch.setattr("swiftgen.engine.FullCache", full)
        with pytest.raises(SwiftgenError, match="ran out while making the KV cache") as caught:
            list(engine.stream("The hen.", num_tokens=20))
        assert "fewer --tokens" in caught.value.hint


def test_a_cpu_gets_the_tensor_itself():
    tensor = torch.arange(3)
    assert send(tensor, CPU) is tensor


@pytest.mark.parametrize(
    "settings", [{"min_p": 0.1}, {"top_p": 0.9}, {"top_k": 5}, {"eta": 0.01}, {"temperature": 0.0}]
)
def test_the_sampler_of_a_gpu_picks_the_same(settings: dict[str, float]):
    """On the CPU, with a tensor that says it is on a GPU: all columns, nothing that has to be waited for."""

    class OnGpu(torch.Tensor):
        is_cuda = True

    tree = random_tree(3, num_nodes=9)
    generator = torch.Generator().manual_seed(2)
    logits = torch.randn(9, 999, generator=generator) * 3
    history = History(50)
    history.extend(range(30))
    sample = sampler(W=20, theta=1.3, **settings)
    positions, windows = torch.tensor(tree.depths) + 31, history.windows(tree, 20)
    expected = sample.pick(logits.clone(), positions, windows)
    ranked = sample.rank(logits.clone(), positions, windows, 4)
    with fakes.NoWaiting():
        assert sample.pick(logits.clone().as_subclass(OnGpu), positions, windows) == expected
        found = sample.rank(logits.clone().as_subclass(OnGpu), positions, windows, 4)
    assert [[c.token for c in row] for row in found] == [[c.token for c in row] for row in ranked]
