"""Loading tiny random models, converting a tiny GGUF, and every check made before weights are loaded."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from transformers import AutoConfig, MistralConfig, Qwen2Config

from support.model_files import VOCAB_SIZE, preset_for, save_model, tiny_config, tiny_model, write_gguf
from swiftgen.forward.cache import CacheShape, FullCache
from swiftgen.forward.memory import MemoryEstimate, check_length, check_memory, estimate_memory
from swiftgen.models.architectures import check_supported
from swiftgen.models.loading import LoadedModel, load_model, load_weights, open_model
from swiftgen.models.positions import yarn_config
from swiftgen.settings.presets import load_preset
from swiftgen.system import devices
from swiftgen.system.devices import resolve_device, resolve_dtype
from swiftgen.system.errors import SwiftgenError


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return save_model(tmp_path / "tiny")


def edit_json(file: Path, **changes: object) -> None:
    data = json.loads(file.read_text(encoding="utf-8"))
    file.write_text(json.dumps({**data, **changes}), encoding="utf-8")


def failure(source: Path, **overrides: object) -> SwiftgenError:
    with pytest.raises(SwiftgenError) as caught:
        load_model(preset_for(source, **overrides))
    assert "\n" not in caught.value.message
    return caught.value


class TestLoading:
    def test_local_folder(self, folder: Path, capfd: pytest.CaptureFixture[str]):
        capfd.readouterr()
        loaded = load_model(preset_for(folder))
        assert capfd.readouterr().out == ""
        assert isinstance(loaded, LoadedModel)
        assert (loaded.source, loaded.max_positions) == (str(folder), 128)
        assert (loaded.dtype, loaded.device) == (torch.float32, torch.device("cpu"))
        assert loaded.eos_token_ids == (VOCAB_SIZE - 1,)
        assert not loaded.model.training
        assert not any(parameter.requires_grad for parameter in loaded.model.parameters())
        ids = torch.tensor([[1, 2, 3]])
        torch.testing.assert_close(loaded.model(ids).logits, tiny_model()(ids).logits, rtol=0, atol=0)
        assert loaded.tokenizer.decode(loaded.tokenizer("né w\n")["input_ids"]) == "né w\n"

    def test_dtype(self, folder: Path):
        loaded = load_model(preset_for(folder, **{"model.dtype": "bfloat16"}))
        assert loaded.dtype == torch.bfloat16
        assert {parameter.dtype for parameter in loaded.model.parameters()} == {torch.bfloat16}

    def test_opening_loads_no_weights(self, folder: Path):
        opened = open_model(preset_for(folder))
        num_params = sum(parameter.numel() for parameter in tiny_model().parameters())
        assert opened.weights_bytes(None) == 4 * num_params
        assert opened.fingerprint == load_weights(opened).fingerprint

    def test_all_ends_of_text(self, folder: Path):
        edit_json(folder / "generation_config.json", eos_token_id=[7, 8, 10**6])
        edit_json(folder / "config.json", eos_token_id=[8, 9])
        assert load_model(preset_for(folder)).eos_token_ids == (7, 8, 9, VOCAB_SIZE - 1)

    def test_tied_embeddings(self, tmp_path: Path):
        save_model(tmp_path / "m", tie_word_embeddings=True)
        model = load_model(preset_for(tmp_path / "m")).model
        assert model.get_output_embeddings().weight is model.get_input_embeddings().weight

    def test_missing_weights_are_not_made_up(self, folder: Path):
        edit_json(folder / "config.json", num_hidden_layers=3)
        assert "lacks weights" in failure(folder).message

    def test_weights_of_another_shape(self, folder: Path):
        edit_json(folder / "config.json", intermediate_size=64)
        failure(folder)

    def test_unknown_family(self, folder: Path):
        edit_json(folder / "config.json", model_type="gemma9", auto_map={"AutoConfig": "code.Config"})
        (folder / "code.py").write_text("raise SystemExit('remote code was run')", encoding="utf-8")
        error = failure(folder)
        assert "'gemma9'" in error.message
        assert "llama, mistral, mixtral, olmo2" in error.hint

    def test_code_beside_a_known_family_is_not_run(self, folder: Path):
        edit_json(folder / "config.json", auto_map={"AutoModelForCausalLM": "code.Model"})
        (folder / "code.py").write_text("raise SystemExit('remote code was run')", encoding="utf-8")
        load_model(preset_for(folder))

    def test_damaged_files(self, folder: Path):
        weights = folder / "model.safetensors"
        whole = weights.read_bytes()
        weights.write_bytes(whole[:-100])
        assert "cannot load" in failure(folder).message
        (folder / "config.json").write_text("{", encoding="utf-8")
        assert "config.json is damaged" in failure(folder).message

    def test_no_tokenizer(self, folder: Path):
        (folder / "tokenizer.json").unlink()
        assert "tokenizer" in failure(folder).message


class TestSupported:
    @pytest.mark.parametrize(
        ("config", "words"),
        [
            (SimpleNamespace(), "None"),
            (
                SimpleNamespace(model_type="llama", rope_parameters={"rope_type": "proportional"}),
                "proportional",
            ),
            (
                SimpleNamespace(model_type="llama", rope_parameters={"full": {"rope_type": "dynamic"}}),
                "dynamic",
            ),
        ],
    )
    def test_refused(self, config: object, words: str):
        with pytest.raises(SwiftgenError, match=words):
            check_supported(config)

    def test_accepted(self):
        check_supported(tiny_config())
        check_supported(MistralConfig(sliding_window=4096))
        check_supported(Qwen2Config(use_sliding_window=True, max_window_layers=1))
        yarn = {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64, "rope_theta": 1e4}
        check_supported(tiny_config(rope_parameters=yarn))


class TestGguf:
    def test_described_once_and_read_exactly(
        self, tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
    ):
        write_gguf(tmp_path / "tiny.gguf", tiny_model())
        capfd.readouterr()
        first = load_model(preset_for(tmp_path / "tiny.gguf"))
        assert capfd.readouterr().out == ""
        for name, tensor in tiny_model().state_dict().items():
            assert torch.equal(first.model.state_dict()[name], tensor), name
        assert first.max_positions == 128
        assert first.eos_token_ids == (VOCAB_SIZE - 1,)
        assert first.tokenizer.decode(first.tokenizer("né w\n")["input_ids"]) == "né w\n"
        assert not list((cache / "work").iterdir())
        monkeypatch.setattr("swiftgen.models.gguf_file._describe", lambda *_: pytest.fail("described again"))
        assert load_model(preset_for(tmp_path / "tiny.gguf")).fingerprint == first.fingerprint

    def test_one_description_for_all_dtypes(self, tmp_path: Path, cache: Path):
        write_gguf(tmp_path / "tiny.gguf", tiny_model())
        for dtype in ("float32", "bfloat16"):
            opened = open_model(preset_for(tmp_path / "tiny.gguf", **{"model.dtype": dtype}))
            assert opened.dtype == getattr(torch, dtype)
        (kept,) = (cache / "gguf").iterdir()
        assert not list(kept.glob("*.safetensors"))

    def test_damaged_file_leaves_no_description(self, tmp_path: Path, cache: Path):
        write_gguf(tmp_path / "tiny.gguf", tiny_model())
        whole = (tmp_path / "tiny.gguf").read_bytes()
        for length in (8, len(whole) // 2):
            (tmp_path / "tiny.gguf").write_bytes(whole[:length])
            assert "tiny.gguf" in failure(tmp_path / "tiny.gguf").message
        assert not list((cache / "gguf").iterdir())


class TestDevices:
    def test_device(self):
        assert resolve_device("cpu") == torch.device("cpu")
        assert resolve_device("auto").type == ("cuda" if torch.cuda.is_available() else "cpu")
        with pytest.raises(SwiftgenError) as caught:
            resolve_device("cuda:99")
        assert "cpu" in caught.value.hint

    @pytest.mark.parametrize(("has_units", "expected"), [(True, torch.bfloat16), (False, torch.float32)])
    def test_auto_dtype_on_cpu(self, monkeypatch: pytest.MonkeyPatch, has_units: bool, expected: torch.dtype):
        monkeypatch.setattr(devices, "_cpu_has_bf16", lambda: has_units)
        assert resolve_dtype("auto", torch.device("cpu")) == expected
        assert resolve_dtype("float16", torch.device("cpu")) == torch.float16

    def test_free_memory(self):
        assert devices.free_bytes(torch.device("cpu")) > 0


class TestMemory:
    def test_estimate(self):
        estimate = estimate_memory(tiny_config(), 1000, 50, torch.bfloat16)
        # keys and values x layers x KV heads x head width x bytes x tokens
        assert estimate.kv_bytes == 2 * 2 * 2 * 8 * 2 * 50
        assert estimate.weights_bytes == 1000
        assert estimate.total_bytes == 1000 + estimate.kv_bytes + estimate.work_bytes
        wide = estimate_memory(tiny_config(head_dim=16), 1000, 50, torch.float32)
        assert wide.kv_bytes == 4 * estimate.kv_bytes

    def test_layers_with_a_window_have_room_for_little_more(self):
        config = AutoConfig.for_model("gemma3_text", sliding_window=512)
        short, long = (estimate_memory(config, 0, n, torch.bfloat16) for n in (10_000, 30_000))
        sliding = [kind for kind in config.layer_types if kind == "sliding_attention"]
        per_layer = 2 * config.num_key_value_heads * config.head_dim * 2
        assert long.sliding_bytes == short.sliding_bytes == per_layer * len(sliding) * (512 + 1024)
        assert long.kv_bytes == per_layer * (config.num_hidden_layers - len(sliding)) * 30_000
        cache = FullCache(
            CacheShape(4, 1, 8, torch.float32, torch.device("cpu"), (512, 512, None, 512)), 30_000
        )
        assert cache.num_bytes == 2 * 8 * 4 * (30_000 + 3 * (512 + 1024))

    def test_refusal_says_what_fits(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("swiftgen.forward.memory.free_bytes", lambda _: 3 * 2**30)
        check_memory(MemoryEstimate(2**30, 2**30, 2**30, num_tokens=1024), "cpu")
        with pytest.raises(SwiftgenError) as caught:
            check_memory(MemoryEstimate(2**30, 4 * 2**30, 2**30, num_tokens=4096), "cpu")
        assert "needs 6.0 GiB (weights 1.0, KV cache of 4,096 tokens 4.0, work 1.0)" in caught.value.message
        assert "3.0 GiB" in caught.value.message
        assert "1,024 tokens" in caught.value.hint

    def test_weights_alone_do_not_fit(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr("swiftgen.forward.memory.free_bytes", lambda _: 2**30)
        with pytest.raises(SwiftgenError) as caught:
            check_memory(MemoryEstimate(2**31, 1000, 0, num_tokens=10), "cpu")
        assert "weights alone" in caught.value.hint


class TestPositions:
    def test_length(self):
        check_length(28, 100, 128, "error")
        check_length(28, 10_000, 128, "yarn")
        with pytest.raises(SwiftgenError) as caught:
            check_length(29, 100, 128, "error")
        assert "29 tokens of prompt and 100 to write need 129 positions, the model has 128" in str(
            caught.value
        )
        assert "at most 99 tokens" in caught.value.hint
        assert "long_context=yarn" in caught.value.hint
        with pytest.raises(SwiftgenError) as caught:
            check_length(200, 1, 128, "error")
        assert "Shorten the prompt" in caught.value.hint

    def test_yarn_only_when_needed(self):
        config = tiny_config()
        assert yarn_config(config, 128) is config
        stretched = yarn_config(config, 300)
        assert stretched.max_position_embeddings == 384
        assert stretched.rope_parameters["rope_type"] == "yarn"
        assert stretched.rope_parameters["factor"] == 3.0
        assert stretched.rope_parameters["original_max_position_embeddings"] == 128
        assert config.rope_parameters["rope_type"] == "default"

    def test_yarn_again_keeps_the_original(self):
        again = yarn_config(yarn_config(tiny_config(), 300), 1000)
        assert again.rope_parameters["original_max_position_embeddings"] == 128
        assert again.rope_parameters["factor"] == 8.0

    def test_yarn_over_another_rule(self):
        rope = {"rope_type": "linear", "factor": 2.0, "rope_theta": 10000.0}
        with pytest.raises(SwiftgenError, match="linear"):
            yarn_config(tiny_config(rope_parameters=rope), 1000)

    def test_load_model_stretches_on_request(self, folder: Path):
        yarn = preset_for(folder, long_context="yarn")
        assert load_model(yarn, total_tokens=100).max_positions == 128
        loaded = load_model(yarn, total_tokens=200)
        assert loaded.max_positions == 256
        assert loaded.model.model.rotary_emb.attention_scaling != 1.0
        assert load_model(preset_for(folder), total_tokens=200).max_positions == 128

    def test_load_model_plans_positions_that_grow(self, folder: Path):
        rope = {"rope_type": "dynamic", "factor": 4.0, "rope_theta": 10000.0}
        edit_json(folder / "config.json", rope_parameters=rope)
        assert open_model(preset_for(folder)).max_positions == 512
        loaded = load_model(preset_for(folder), total_tokens=300)
        assert loaded.max_positions == 384
        assert loaded.model.config.rope_parameters["rope_type"] == "default"


@pytest.mark.slow
def test_default_model_for_real(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.delenv("SWIFTGEN_CACHE")
    loaded = load_model(load_preset())
    assert loaded.max_positions == 8192
    ids = loaded.tokenizer("The capital of France is", return_tensors="pt")["input_ids"]
    best = int(loaded.model(ids).logits[0, -1].argmax())
    assert loaded.tokenizer.decode([best]).strip() == "Paris"
