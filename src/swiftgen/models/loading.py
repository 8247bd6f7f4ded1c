"""Loading a model: config and tokenizer first (cheap, enough for every check), then the weights.

    opened = open_model(preset)          # fetches if need be; no weights in memory
    check_length(...); check_memory(...) # refuse here, before minutes of loading
    loaded = load_weights(opened, total_tokens)

`load_model` does both steps. Models are the unmodified classes of transformers; nothing is loaded that
could run code from a hub.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch

from swiftgen.models.architectures import FAMILIES, check_family, check_supported, model_class
from swiftgen.models.gguf_file import GgufFile, described
from swiftgen.models.gguf_weights import model_of, num_bytes
from swiftgen.models.libraries import bytes_loaded, check_quantiser, quantisation_config, stored_method
from swiftgen.models.positions import planned_config, usable_positions
from swiftgen.models.quiet import quiet_transformers
from swiftgen.models.sources import read_header, resolve_source, shards
from swiftgen.models.tensor_parallel import device_of_rank, distributed_config
from swiftgen.native.kernels import Kernels
from swiftgen.settings.schema import Preset
from swiftgen.system.devices import resolve_device, resolve_dtype
from swiftgen.system.errors import SwiftgenError, first_line
from swiftgen.system.ranks import num_ranks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel, PreTrainedTokenizerBase


@dataclass(frozen=True)
class OpenedModel:
    """Everything about a model but its weights.

    Attributes:
        folder: config.json, tokenizer and safetensors, ready to load.
        quantization: the preset's `model.quantization`.
        gguf: the file, if the weights are read from one; None if they are in the folder.
        For the rest see `LoadedModel`.
    """

    folder: Path
    config: PretrainedConfig
    tokenizer: PreTrainedTokenizerBase
    source: str
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    max_positions: int
    gguf: GgufFile | None
    quantization: str
    dtype: torch.dtype
    device: torch.device

    @property
    def place(self) -> Path:
        """The file or the folder that the weights are read from."""
        return self.gguf.path if self.gguf else self.folder

    def weights_bytes(self, kernels: Kernels | None) -> int:
        """Memory of all parameters, or of the share of one rank; see `load_weights`."""
        if self.gguf:
            return num_bytes(self.gguf, self.dtype, kernels)
        return _weights_bytes(self.folder, self.quantization, self.dtype) // num_ranks()


@dataclass(frozen=True)
class LoadedModel:
    """A model ready to run: in eval mode, without gradients, on `device` in `dtype`.

    Attributes:
        source: what the preset said.
        fingerprint: identifies the weights, see `ResolvedSource`.
        eos_token_ids: every token that ends a text, by the generation config, the config or the tokenizer.
        max_positions: positions the model can use, as planned for the run.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    fingerprint: str
    eos_token_ids: tuple[int, ...]
    max_positions: int
    dtype: torch.dtype
    device: torch.device


def load_model(preset: Preset, total_tokens: int | None = None) -> LoadedModel:
    """Open a preset's model and load its weights.

    Args:
        preset: names the source, dtype, device and the long-context rule.
        total_tokens: planned prompt and text together; see `load_weights`.

    Raises:
        SwiftgenError: see `open_model`.
    """
    return load_weights(open_model(preset), total_tokens, preset.long_context == "yarn")


def open_model(preset: Preset, *, local_only: bool = False) -> OpenedModel:
    """Find the weights, or fetch them; load config and tokenizer only.

    Args:
        preset: names the source, dtype and device.
        local_only: refuse a model that would have to be fetched.

    Raises:
        SwiftgenError: no such model or device, no network, wrong hash, gated, unsupported architecture.
    """
    device = resolve_device(device_of_rank(preset.model.device))
    dtype = resolve_dtype(preset.model.dtype, device)
    resolved = resolve_source(preset.model, local_only=local_only)
    is_gguf, quantization = resolved.kind == "gguf", preset.model.quantization
    if is_gguf:
        check_quantiser("gguf", quantization, resolved.source)
    gguf = described(resolved) if is_gguf else None
    folder = gguf.folder if gguf else resolved.path
    with quiet_transformers():
        config = _load_config(folder)
        check_supported(config)
        if not is_gguf:
            check_quantiser(stored_method(config), quantization, resolved.source)
        tokenizer = _load_tokenizer(folder)
    return OpenedModel(
        folder=folder,
        config=config,
        tokenizer=tokenizer,
        source=resolved.source,
        fingerprint=resolved.fingerprint,
        eos_token_ids=_eos_token_ids(folder, config, tokenizer),
        max_positions=usable_positions(config),
        quantization=quantization,
        gguf=gguf,
        dtype=dtype,
        device=device,
    )


def load_weights(
    opened: OpenedModel,
    total_tokens: int | None = None,
    stretch: bool = False,
    kernels: Kernels | None = None,
) -> LoadedModel:
    """Load the weights of an opened model.

    Args:
        opened: from `open_model`.
        total_tokens: prompt and text that the positions are planned for; None leaves the model as it is.
        stretch: reach as far by YaRN if the model has fewer positions.
        kernels: matrices of GGUF files stay in their few bits for them; None unpacks all.

    Raises:
        SwiftgenError: if the weights are damaged or do not fit the config.
    """
    config = opened.config
    if total_tokens is not None:
        config = planned_config(config, total_tokens, stretch)
    try:
        with quiet_transformers():
            if opened.gguf:
                model = model_of(opened.gguf, config, opened.dtype, kernels)
                if opened.device.type != "cpu":
                    model = model.to(opened.device)
            else:
                model = _from_safetensors(opened, config)
    except torch.cuda.OutOfMemoryError as error:
        raise SwiftgenError(f"{opened.source} does not fit into the memory of {opened.device}") from error
    except SwiftgenError:
        raise
    except Exception as error:  # safetensors, transformers and torch each have their own kinds
        raise SwiftgenError(
            f"cannot load {opened.source} from {opened.place}: {first_line(error)}",
            "The files may be damaged: fetch or copy them again.",
        ) from error
    return LoadedModel(
        model=model.eval().requires_grad_(False),
        tokenizer=opened.tokenizer,
        source=opened.source,
        fingerprint=opened.fingerprint,
        eos_token_ids=opened.eos_token_ids,
        max_positions=int(config.max_position_embeddings),
        dtype=opened.dtype,
        device=opened.device,
    )


def _from_safetensors(opened: OpenedModel, config: PretrainedConfig) -> PreTrainedModel:
    spread = distributed_config(config)
    quantising = {}
    if opened.quantization != "none":
        quantising = {"quantization_config": quantisation_config(opened.quantization, opened.dtype)}
    device_map = None if opened.device.type == "cpu" or spread else {"": opened.device}
    model, info = model_class(config).from_pretrained(
        opened.folder,
        config=config,
        dtype=opened.dtype,
        device_map=device_map,
        distributed_config=spread,
        **quantising,
        use_safetensors=True,
        local_files_only=True,
        trust_remote_code=False,
        output_loading_info=True,
    )
    # transformers fills what is missing with random numbers and a warning.
    wrong = sorted({*info["missing_keys"], *(str(entry[0]) for entry in info["mismatched_keys"])})
    if wrong:
        raise SwiftgenError(f"{opened.source} lacks weights its config asks for, e.g. {wrong[0]}")
    return cast("PreTrainedModel", model)


def _load_config(folder: Path) -> PretrainedConfig:
    from transformers import AutoConfig

    raw = _read_json(folder / "config.json")
    if raw is None:
        raise SwiftgenError(f"{folder / 'config.json'} is damaged", "Fetch or copy the model again.")
    if raw.get("model_type") not in FAMILIES:  # may be unknown to transformers, or need code from the hub
        check_family(raw.get("model_type"))
    try:
        config: PretrainedConfig = AutoConfig.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # each family checks its own fields with its own exceptions
        raise SwiftgenError(f"cannot read {folder / 'config.json'}: {first_line(error)}") from error
    return config


def _load_tokenizer(folder: Path) -> PreTrainedTokenizerBase:
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    settings = _read_json(folder / "tokenizer_config.json") or {}
    # Finding the class of a tokenizer that needs none takes as long as loading it.
    plain = settings.get("tokenizer_class") in ("TokenizersBackend", "PreTrainedTokenizerFast")
    plain = plain and (folder / "tokenizer.json").is_file()
    loader = PreTrainedTokenizerFast if plain else AutoTokenizer
    try:
        tokenizer: PreTrainedTokenizerBase = loader.from_pretrained(
            folder, local_files_only=True, trust_remote_code=False
        )
    except Exception as error:  # missing files, damaged files and unknown classes all differ
        raise SwiftgenError(f"cannot load the tokenizer in {folder}: {first_line(error)}") from error
    return tokenizer


def _eos_token_ids(
    folder: Path, config: PretrainedConfig, tokenizer: PreTrainedTokenizerBase
) -> tuple[int, ...]:
    generation = _read_json(folder / "generation_config.json") or {}
    found: list[Any] = []
    for ids in (generation.get("eos_token_id"), config.eos_token_id, tokenizer.eos_token_id):
        found += ids if isinstance(ids, list) else [ids]
    return tuple(dict.fromkeys(i for i in found if isinstance(i, int) and 0 <= i < config.vocab_size))


def _weights_bytes(folder: Path, quantization: str, dtype: torch.dtype) -> int:
    """Memory of what the safetensors files hold, by their headers."""
    total = 0
    for name in shards(folder):
        try:
            header = json.loads(read_header(folder / name))
            header.pop("__metadata__", None)
            total += sum(
                bytes_loaded(key, entry, quantization, dtype.itemsize) for key, entry in header.items()
            )
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
            raise SwiftgenError(f"{folder / name} is damaged", "Fetch or copy the model again.") from error
    return total


def _read_json(file: Path) -> dict[str, Any] | None:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return None
    return data if isinstance(data, dict) else None
