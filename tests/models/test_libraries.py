"""Targets in few bits: quantised by a library, and GGUF files of any type."""

from __future__ import annotations

import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType as Kind
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
)

from support.gguf_files import blocks
from support.model_files import ALPHABET, GGUF_NAMES, gguf_writer, preset_for, tiny_tokenizer
from support.tiny import ar_planner, new_target, run, sampler, sized_target
from swiftgen.cli.app import main
from swiftgen.commands.process import prepare_process
from swiftgen.document.document import read_tokens
from swiftgen.forward.linear import is_plain
from swiftgen.models import libraries as quantisers
from swiftgen.models.libraries import check_quantiser, stored_method
from swiftgen.models.loading import load_model, open_model
from swiftgen.system.errors import SwiftgenError

VOCAB_SIZE = len(ALPHABET) + 2
SIZES = {
    "vocab_size": VOCAB_SIZE,
    "hidden_size": 256,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 8,
    "num_key_value_heads": 4,
    "max_position_embeddings": 512,
    "eos_token_id": VOCAB_SIZE - 1,
    "bos_token_id": None,
    "initializer_range": 0.1,
}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A model in 16 bits."""
    torch.manual_seed(0)
    LlamaForCausalLM(LlamaConfig(**SIZES)).to(torch.bfloat16).save_pretrained(tmp_path / "tiny")
    tiny_tokenizer().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def write(folder: Path, name: str, *args: str) -> list[int]:
    """Tokens of a document that the model in a folder writes."""
    where = ["--set", f"model.source={folder}", "--set", "model.sha256=null", "--set", "model.device=cpu"]
    plain = ["--set", "heads=null", "--set", "alphabet=any", "--raw", "-p", "the hen", "-n", "40", "-q"]
    output = folder.parent / name
    assert main(["write", *where, *plain, *args, "-o", str(output)]) == 0
    return read_tokens(output.with_suffix(".swiftgen"))


class Halves(nn.Linear):
    """A stand-in for the linear layer of a library: codes, a scale, and a `forward` of its own."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None, device="meta")
        scale = linear.weight.abs().amax(dim=1, keepdim=True) / 127
        self.weight = nn.Parameter((linear.weight / scale).round().to(torch.int8), requires_grad=False)
        self.scale = nn.Buffer(scale)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.linear(x, self.weight.to(x.dtype) * self.scale)


class TestALibrarysLayers:
    def test_are_left_alone_and_exact(self):
        model = LlamaForCausalLM(LlamaConfig(**SIZES)).eval().requires_grad_(False)
        for layer in model.model.layers:
            for part, name in [
                (layer.self_attn, each) for each in ("q_proj", "k_proj", "v_proj", "o_proj")
            ] + [(layer.mlp, each) for each in ("gate_proj", "up_proj", "down_proj")]:
                setattr(part, name, Halves(getattr(part, name)))
        target = new_target(model)
        assert sum(isinstance(module, Halves) for module in model.modules()) == 14
        assert not target.arithmetic["fused_layers"]
        assert target.arithmetic["linears"] == f"Halves of {__name__.partition('.')[0]} "
        target = sized_target(target)
        written = run(target, ar_planner(target), sampler(), [1, 2, 3], 20)
        ids = torch.tensor([[1, 2, 3, *written.token_ids]])
        target._base.norm = target._norm
        assert len(written.token_ids) == 20
        expected = AutoModelForCausalLM.from_config(LlamaConfig(**SIZES))
        expected.load_state_dict({name: _plain(name, model) for name in expected.state_dict()})
        logits = expected.eval()(ids).logits[0, 2:-1]
        torch.testing.assert_close(written.logits, logits.detach(), rtol=1e-4, atol=1e-4)

    def test_what_is_plain(self):
        linear = nn.Linear(4, 4)
        assert is_plain(linear)
        assert not is_plain(Halves(linear))
        hooked = nn.Linear(4, 4)
        hooked.forward = hooked.forward
        assert not is_plain(hooked)


def _plain(name: str, model: nn.Module) -> Tensor:
    tensor = model.state_dict()[name]
    scale = model.state_dict().get(name.removesuffix("weight") + "scale")
    return tensor if scale is None else tensor * scale


@pytest.mark.parametrize("wanted", ["bnb-8bit", "bnb-4bit", "torchao-int8"])
class TestOnLoading:
    def test_text_with_drafts_is_that_without(self, folder: Path, wanted: str):
        pytest.importorskip({"b": "bitsandbytes", "t": "torchao"}[wanted[0]])
        options = "--set", f"model.quantization={wanted}", "--set", "model.dtype=bfloat16"
        plain = write(folder, "plain.txt", "--draft", "none", *options)
        assert write(folder, "drafted.txt", "--draft", "auto", *options) == plain
        assert write(folder, "paper.txt", "--draft", "paper", *options) == plain

    def test_memory(self, folder: Path, wanted: str):
        pytest.importorskip({"b": "bitsandbytes", "t": "torchao"}[wanted[0]])
        preset = preset_for(folder, **{"model.quantization": wanted, "model.dtype": "bfloat16"})
        model = load_model(preset).model
        assert open_model(preset).weights_bytes == pytest.approx(_bytes_of(model), rel=0.05)


def _bytes_of(model: nn.Module) -> int:
    """Memory of all weights, with the scales that a library keeps beside or inside them."""
    total = 0
    for tensor in [*model.parameters(), *model.buffers()]:
        state = getattr(tensor, "quant_state", None)
        inner = [getattr(tensor, name) for name in getattr(tensor, "tensor_data_names", [])]
        parts = inner or [tensor] + ([state.absmax] if state else [])
        total += sum(part.numel() * part.element_size() for part in parts)
    return total


class TestStored:
    @pytest.mark.parametrize("wanted", ["bnb-8bit", "bnb-4bit", "torchao-int8"])
    def test_a_checkpoint_quantised_before(self, folder: Path, wanted: str):
        pytest.importorskip({"b": "bitsandbytes", "t": "torchao"}[wanted[0]])
        preset = preset_for(folder, **{"model.quantization": wanted, "model.dtype": "bfloat16"})
        saved = folder.parent / "saved"
        load_model(preset).model.save_pretrained(saved)
        tiny_tokenizer().save_pretrained(saved)
        now = write(
            folder, "now.txt", "--set", f"model.quantization={wanted}", "--set", "model.dtype=bfloat16"
        )
        assert write(saved, "before.txt", "--set", "model.dtype=bfloat16") == now
        opened = open_model(preset_for(saved, **{"model.dtype": "bfloat16"}))
        assert opened.weights_bytes == pytest.approx(open_model(preset).weights_bytes, rel=0.05)

    def test_bytes_are_those_of_the_file(self, folder: Path, monkeypatch: pytest.MonkeyPatch):
        codes = {"dtype": "I32", "shape": [8, 4], "data_offsets": [0, 128]}
        halves = {"dtype": "F16", "shape": [8, 4], "data_offsets": [128, 192]}
        assert quantisers.bytes_loaded("model.layers.0.mlp.up_proj.qweight", codes, "none", 4) == 128
        assert quantisers.bytes_loaded("model.norm.weight", halves, "none", 4) == 128
        assert quantisers.bytes_loaded("model.layers.0.mlp.up_proj.weight", halves, "bnb-4bit", 2) == 18


class TestRefusals:
    @pytest.mark.parametrize(
        ("method", "package", "extra"),
        [
            ("gptq", "gptqmodel", "gptq"),
            ("awq", "gptqmodel", "gptq"),
            ("bitsandbytes", "bitsandbytes", "bnb"),
            ("torchao", "torchao", "torchao"),
            ("compressed-tensors", "compressed-tensors", "compressed-tensors"),
        ],
    )
    def test_a_package_that_is_missing(
        self, method: str, package: str, extra: str, monkeypatch: pytest.MonkeyPatch
    ):
        monkeypatch.setattr(quantisers, "find_spec", lambda name: None)
        with pytest.raises(SwiftgenError) as caught:
            check_quantiser(method, "none", "somewhere")
        assert caught.value.message == f"weights quantised by {method} need the package {package}"
        assert caught.value.hint == f"pip install 'swiftgen[{extra}]'"

    def test_only_commands_silence_them(self, monkeypatch: pytest.MonkeyPatch):
        logger = logging.getLogger("torchao")
        monkeypatch.setattr(logger, "level", logging.INFO)
        monkeypatch.setattr(quantisers, "find_spec", lambda name: name)
        check_quantiser("torchao", "none", "somewhere")
        assert logger.level == logging.INFO
        prepare_process()
        assert logger.level == logging.ERROR

    def test_twice(self):
        with pytest.raises(SwiftgenError, match="quantised already"):
            check_quantiser("gptq", "bnb-4bit", "somewhere")

    def test_on_several_ranks(self, monkeypatch: pytest.MonkeyPatch):
        monkeypatch.setattr(quantisers, "num_ranks", lambda: 2)
        check_quantiser("gguf", "none", "somewhere")
        check_quantiser("", "none", "somewhere")
        with pytest.raises(SwiftgenError, match="quantised by awq run in one process"):
            check_quantiser("awq", "none", "somewhere")

    def test_a_gguf_file_twice(self, tmp_path: Path):
        write_gguf(tmp_path / "m.gguf", None, LlamaConfig(**SIZES))
        with pytest.raises(SwiftgenError, match="quantised already"):
            open_model(preset_for(tmp_path / "m.gguf", **{"model.quantization": "bnb-8bit"}))

    def test_methods(self):
        assert stored_method(SimpleNamespace()) == ""
        assert stored_method(SimpleNamespace(quantization_config={"quant_method": "awq"})) == "awq"
        assert stored_method(SimpleNamespace(quantization_config={"load_in_8bit": True})) == "bitsandbytes"


KINDS = [Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q5_1, Kind.Q4_K, Kind.Q5_K, Kind.Q6_K]


def write_gguf(
    path: Path,
    kind: Kind | None,
    config: LlamaConfig | Qwen2Config,
    architecture: str = "llama",
    settings: dict[str, Any] | None = None,
    tensors: dict[str, np.ndarray] | None = None,
) -> dict[str, Tensor]:
    """A random model as a GGUF file with matrices of a type; returns its weights as transformers has them."""
    writer = gguf_writer(path, config, architecture)
    add = {str: writer.add_string, bool: writer.add_bool, int: writer.add_uint32, list: writer.add_array}
    for key, value in (settings or {}).items():
        add.get(type(value), writer.add_float32)(f"{architecture}.{key}", value)
    for name, data in (tensors or {}).items():
        writer.add_tensor(name, data)
    torch.manual_seed(5)
    expected = {}
    for name, tensor in AutoModelForCausalLM.from_config(config).state_dict().items():
        weights = tensor.numpy()
        place = name
        for old, new in GGUF_NAMES.items():
            place = place.replace(old, new)
        if kind is None or weights.ndim == 1:
            writer.add_tensor(place, weights)
        else:
            data, weights = blocks(weights, kind)
            writer.add_tensor(place, data, raw_dtype=kind)
        heads = {"q_proj": config.num_attention_heads, "k_proj": config.num_key_value_heads}
        num_heads = next((count for key, count in heads.items() if key in name), None)
        if architecture == "llama" and num_heads:
            width = weights.shape[1]
            weights = weights.reshape(num_heads, -1, 2, width).swapaxes(1, 2).reshape(-1, width)
        expected[name] = torch.from_numpy(weights.copy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return expected


class TestGguf:
    @pytest.mark.parametrize("kind", KINDS, ids=lambda kind: kind.name)
    def test_a_type_of_weights(self, tmp_path: Path, kind: Kind):
        expected = write_gguf(tmp_path / "m.gguf", kind, LlamaConfig(**SIZES))
        loaded = load_model(preset_for(tmp_path / "m.gguf")).model.state_dict()
        for name, weight in expected.items():
            torch.testing.assert_close(loaded[name], weight, rtol=0, atol=0, msg=name)

    @pytest.mark.parametrize("kind", [Kind.Q8_0, Kind.Q4_K], ids=lambda kind: kind.name)
    def test_qwen2_writes_the_same_with_drafts(self, tmp_path: Path, kind: Kind):
        expected = write_gguf(tmp_path / "m.gguf", kind, Qwen2Config(**SIZES), "qwen2")
        model = load_model(preset_for(tmp_path / "m.gguf")).model
        assert isinstance(model, Qwen2ForCausalLM)
        for name, weight in expected.items():
            torch.testing.assert_close(model.state_dict()[name], weight, rtol=0, atol=0, msg=name)
        plain = write(tmp_path / "m.gguf", "plain.txt", "--draft", "none")
        assert write(tmp_path / "m.gguf", "drafted.txt") == plain

    def test_an_architecture_that_is_unknown(self, tmp_path: Path):
        write_gguf(tmp_path / "m.gguf", None, LlamaConfig(**SIZES), "squid")
        with pytest.raises(SwiftgenError, match="architecture squid is not supported") as caught:
            open_model(preset_for(tmp_path / "m.gguf"))
        assert "architecture" in caught.value.hint

    def test_a_type_that_is_unknown(self, tmp_path: Path):
        write_gguf(tmp_path / "m.gguf", Kind.Q8_0, LlamaConfig(**SIZES))
        data = (tmp_path / "m.gguf").read_bytes()
        name = b"output.weight"
        kind_at = data.index(name) + len(name) + 4 + 2 * 8  # number of dimensions, and two of them
        assert data[kind_at : kind_at + 4] == int(Kind.Q8_0).to_bytes(4, "little")
        (tmp_path / "m.gguf").write_bytes(data[:kind_at] + (99).to_bytes(4, "little") + data[kind_at + 4 :])
        with pytest.raises(SwiftgenError, match=r"not known here: blk\.0\.attn_output\.weight is of type 99"):
            open_model(preset_for(tmp_path / "m.gguf"))


class TestPositionsOfGguf:
    def test_those_of_llama3(self, tmp_path: Path):
        rope = {"rope_type": "llama3", "rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0}
        rope |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
        config = LlamaConfig(**SIZES | {"max_position_embeddings": 131072, "rope_parameters": rope})
        model = LlamaForCausalLM(config)
        plain = 1 / 500000.0 ** (torch.arange(0, 32, 2) / 32)
        divisors = (plain / model.model.rotary_emb.inv_freq).numpy()
        assert divisors.max() == pytest.approx(8.0)
        write_gguf(tmp_path / "m.gguf", Kind.Q8_0, config, tensors={"rope_freqs.weight": divisors})
        loaded = load_model(preset_for(tmp_path / "m.gguf")).model
        torch.testing.assert_close(loaded.model.rotary_emb.inv_freq, model.model.rotary_emb.inv_freq)

    def rope_of(self, folder: Path, settings: dict[str, Any], **tensors: np.ndarray) -> dict[str, Any]:
        named = {f"{name}.weight": data for name, data in tensors.items()}
        write_gguf(folder / "m.gguf", Kind.Q8_0, LlamaConfig(**SIZES), settings=settings, tensors=named)
        rope: dict[str, Any] = open_model(preset_for(folder / "m.gguf")).config.rope_parameters
        return rope

    @pytest.mark.parametrize(
        "settings",
        [
            {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0},
            {"rope.scaling.factor": 4.0, "rope.scaling.finetuned": True},  # as llama.cpp takes it
            {"rope.scale_linear": 4.0},  # its name of 2023
        ],
    )
    def test_linear_ones(self, tmp_path: Path, settings: dict[str, Any]):
        rope = self.rope_of(tmp_path, settings)
        assert (rope["rope_type"], rope["factor"]) == ("linear", 4.0)

    @pytest.mark.parametrize(
        "settings",
        [
            {"rope.scaling.type": "none", "rope.scaling.factor": 4.0},
            {"rope.scaling.factor": 1.0},
            {"rope.dimension_count": 32, "attention.key_length": 32, "attention.value_length": 32},
            {"attention.causal": True, "attention.max_alibi_bias": 0.0, "attention.scale": 32**-0.5},
            {"attention.sliding_window": 1024, "logit_scale": 1.0},
        ],
    )
    def test_keys_that_change_nothing(self, tmp_path: Path, settings: dict[str, Any]):
        assert self.rope_of(tmp_path, settings)["rope_type"] == "default"

    def test_those_of_yarn(self, tmp_path: Path):
        settings = {"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}
        settings |= {"rope.scaling.original_context_length": 256, "rope.scaling.yarn_beta_fast": 16.0}
        rope = self.rope_of(tmp_path, settings | {"rope.scaling.attn_factor": 2.0})
        assert (rope["rope_type"], rope["factor"], rope["beta_fast"]) == ("yarn", 4.0, 16.0)
        assert rope["original_max_position_embeddings"] == 256
        assert rope["attention_factor"] == pytest.approx(2 * (1 + 0.1 * np.log(4)))

    def test_those_of_phi(self, tmp_path: Path):
        factors = {
            "rope_factors_long": np.full(16, 9, np.float32),
            "rope_factors_short": np.ones(16, np.float32),
        }
        settings = {"rope.scaling.original_context_length": 256, "rope.scaling.attn_factor": 1.25}
        rope = self.rope_of(tmp_path, settings, **factors)
        assert (rope["rope_type"], rope["long_factor"], rope["attention_factor"]) == (
            "longrope",
            [9.0] * 16,
            1.25,
        )

    @pytest.mark.parametrize(
        ("settings", "tensors"),
        [
            ({"rope.scaling.type": "longrope", "rope.scaling.factor": 4.0}, {}),
            ({"rope.scaling.type": "yarn", "rope.scaling.factor": 4.0}, {}),
            (
                {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, "rope.scaling.attn_factor": 2.0},
                {},
            ),
            ({"rope.scaling.yarn_log_multiplier": 0.1}, {}),
            ({"rope.scaling.alpha": 1000.0}, {}),
            ({}, {"rope_freqs": np.linspace(1, 8, 16, dtype=np.float32)}),
            ({}, {"rope_factors_long": np.ones(16, np.float32)}),
        ],
    )
    def test_unknown_ones_are_refused(
        self, tmp_path: Path, settings: dict[str, Any], tensors: dict[str, np.ndarray]
    ):
        with pytest.raises(SwiftgenError, match="scales its positions in a way not known here"):
            self.rope_of(tmp_path, settings, **tensors)

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("rope.dimension_sections", [16, 8, 8, 0]),
            ("rope.dimension_count_swa", 16),
            ("rope.freq_base_swa", 10000.0),
            ("rope.something_new", 1),
            ("attention.sliding_window", 64),
            ("attention.sliding_window_pattern", 6),
            ("attention.value_length", 64),
            ("attention.max_alibi_bias", 8.0),
            ("attention.clamp_kqv", 8.0),
            ("attention.causal", False),
            ("attention.scale", 0.5),
            ("attention.temperature_length", 8192),
            ("attn_logit_softcapping", 50.0),
            ("logit_scale", 0.25),
        ],
    )
    def test_a_key_is_applied_or_refused(self, tmp_path: Path, key: str, value: object):
        with pytest.raises(SwiftgenError, match=f"not known here in a model of its kind: {key} is") as caught:
            self.rope_of(tmp_path, {key: value})
        assert "\n" not in caught.value.message

    def test_a_head_that_turns_in_part(self, tmp_path: Path):
        """No Llama of transformers does."""
        with pytest.raises(SwiftgenError, match=r"rope\.dimension_count is 16"):
            self.rope_of(tmp_path, {"rope.dimension_count": 16, "attention.key_length": 32})

    def test_those_of_gemma(self, tmp_path: Path):
        """Only layers that see everything are scaled; the rest of its keys are applied."""
        config = Gemma3TextConfig(**SIZES | {"head_dim": 32, "num_hidden_layers": 3})
        settings = {"attention.key_length": 32, "attention.value_length": 32, "attention.sliding_window": 64}
        settings |= {"rope.scaling.type": "linear", "rope.scaling.factor": 8.0, "rope.freq_base_swa": 5000.0}
        settings |= {"attention.sliding_window_pattern": [True, False, True], "final_logit_softcapping": 30.0}
        write_gguf(tmp_path / "m.gguf", None, config, "gemma3", settings)
        found = open_model(preset_for(tmp_path / "m.gguf")).config
        assert found.rope_parameters["full_attention"]["factor"] == 8.0
        assert found.rope_parameters["sliding_attention"] == {"rope_type": "default", "rope_theta": 5000.0}
        assert found.layer_types == ["sliding_attention", "full_attention", "sliding_attention"]
        assert (found.final_logit_softcapping, found.query_pre_attn_scalar) == (30.0, 32)
