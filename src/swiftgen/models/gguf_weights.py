"""The weights of a GGUF file in a model: matrices in few bits where there are kernels for their type.

Names come from the tables of the gguf library. What transformers does to a tensor when it unpacks a file
(rows of heads in another order, norms less one) is asked of its own processors.
"""

from __future__ import annotations

import logging
import math
from collections import Counter
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import numpy as np
import torch
from torch import Tensor, nn

from swiftgen.models.architectures import model_class
from swiftgen.models.gguf_file import GgufFile
from swiftgen.models.gguf_header import GgufTensor
from swiftgen.models.tensor_parallel import distributed_config
from swiftgen.native.kernels import Kernels
from swiftgen.native.weights import PackedWeight
from swiftgen.system.errors import SwiftgenError
from swiftgen.system.ranks import num_ranks

if TYPE_CHECKING:
    from transformers import PretrainedConfig, PreTrainedModel

_ATTRIBUTE = "packed_weight"
# Matrices of a layer that become one, which is packed or is not.
_JOINED = ("attn_q", "attn_k", "attn_v"), ("ffn_gate", "ffn_up")
logger = logging.getLogger(__name__)


class PackedEmbedding(nn.Module):
    """`nn.Embedding` whose rows are unpacked when they are looked up."""

    def __init__(self, weight: PackedWeight, kernels: Kernels, dtype: torch.dtype, scale: float) -> None:
        super().__init__()
        self.packed, self.rounded_scale = weight, float(torch.tensor(scale, dtype=dtype))
        self._kernels, self._dtype = kernels, dtype
        self.num_embeddings, self.embedding_dim = weight.out_features, weight.in_features

    def forward(self, token_ids: Tensor) -> Tensor:
        """int64 `[...]` -> `[..., hidden]`."""
        rows = self._kernels.unpack(self.packed, token_ids.reshape(-1)).to(self._dtype)
        if self.rounded_scale != 1.0:
            rows = rows * self.rounded_scale
        return rows.view(*token_ids.shape, -1)


def model_of(
    file: GgufFile, config: PretrainedConfig, dtype: torch.dtype, kernels: Kernels | None
) -> PreTrainedModel:
    """The model of a file, in eval mode.

    Args:
        config: As planned for the run.
        dtype: Of what is computed, and of all that is unpacked.
        kernels: Where there are any, matrices stay in few bits, for `packed_of`.

    Raises:
        SwiftgenError: the file lacks a weight, or one has another shape.
    """
    with torch.device("meta"):
        model = model_class(config)(config).to(dtype)
    reader = _Reader(file, config, dtype, kernels)
    has_tensors = all(reader.has_name(name, parameter) for name, parameter in model.named_parameters())
    if num_ranks() > 1 or not has_tensors:
        return _unpacked_by_transformers(file, config, dtype)
    embedding_name = _name_of(model, model.get_input_embeddings())
    for name, module in list(model.named_modules()):
        for key, parameter in list(module.named_parameters(recurse=False)):
            full_name = f"{name}.{key}" if name else key
            if module is model.get_output_embeddings() and full_name not in reader and key == "weight":
                full_name = f"{embedding_name}.weight"  # tied
            tensor = reader.tensor(full_name, parameter.shape)
            packed = reader.packed(tensor) if isinstance(module, nn.Linear | nn.Embedding) else None
            if packed is None:
                value = nn.Parameter(reader.unpacked(tensor), requires_grad=False)
                setattr(module, key, value)
            elif isinstance(module, nn.Linear):
                attach(module, [packed])
            else:
                assert kernels is not None
                scale = float(getattr(module, "scalar_embed_scale", 1.0))
                model.set_input_embeddings(PackedEmbedding(packed, kernels, dtype, scale))
    _fill_buffers(model, config)
    reader.check_all_read()
    reader.report()
    return model.eval().requires_grad_(False)


def num_bytes(file: GgufFile, dtype: torch.dtype, kernels: Kernels | None) -> int:
    """Memory of the weights of a file, or of the share of one rank; see `model_of`."""
    total = sum(
        tensor.num_bytes if can_stay(file, tensor, kernels) else math.prod(tensor.shape) * dtype.itemsize
        for tensor in file.tensors.values()
    )
    return total // num_ranks()


def can_stay(file: GgufFile, tensor: GgufTensor, kernels: Kernels | None) -> bool:
    """Whether a tensor is a matrix that the kernels read in its few bits, as are those it is joined with."""
    if kernels is None or file.has_experts or num_ranks() > 1:  # see `_unpacked_by_transformers`
        return False
    layer, _, part = tensor.name.removesuffix(".weight").rpartition(".")
    parts = next((parts for parts in _JOINED if part in parts), ())
    found = [file.tensors.get(f"{layer}.{name}.weight") for name in parts]
    return all(
        len(each.shape) == 2 and kernels.can_pack(each.type_number, *each.shape)
        for each in [tensor, *filter(None, found)]
    )


def stays_packed(file: GgufFile, kernels: Kernels | None) -> set[bool]:
    """Whether matrices of the layers do: true of some of them, false of some, or both."""
    layers = [tensor for tensor in file.tensors.values() if tensor.name.startswith("blk.")]
    return {can_stay(file, tensor, kernels) for tensor in layers if len(tensor.shape) > 1}


def device_of(model: nn.Module) -> torch.device:
    """Where the weights of a model are; those in few bits are beside it, and their parameters nowhere."""
    return next(parameter.device for parameter in model.parameters() if not parameter.is_meta)


def table_of(embedding: nn.Module) -> tuple[Tensor | PackedWeight, float] | None:
    """The rows of an embedding and their factor; None if it looks them up in a way of its own."""
    if isinstance(embedding, PackedEmbedding):
        return embedding.packed, embedding.rounded_scale
    # A weight of another type is spread over ranks.
    if not (isinstance(embedding, nn.Embedding) and type(embedding.weight) is nn.Parameter):
        return None
    scale = getattr(embedding, "embed_scale", None)
    if type(embedding) is not nn.Embedding and scale is None:
        return None
    return embedding.weight, 1.0 if scale is None else float(scale.to(embedding.weight.dtype))


def attach(linear: nn.Linear, weights: Sequence[PackedWeight]) -> None:
    """Give a layer its weight in few bits, for `packed_of`; its parts lie one below the other."""
    setattr(linear, _ATTRIBUTE, tuple(weights))


def packed_of(linear: nn.Module) -> tuple[PackedWeight, ...]:
    """What was attached to a layer; nothing if its weight is an ordinary one."""
    found: tuple[PackedWeight, ...] = getattr(linear, _ATTRIBUTE, ())
    return found


class _Reader:
    """Finds the tensors of a model in a file."""

    def __init__(
        self, file: GgufFile, config: PretrainedConfig, dtype: torch.dtype, kernels: Kernels | None
    ) -> None:
        from gguf import MODEL_ARCH_NAMES, get_tensor_name_map
        from transformers.modeling_gguf_pytorch_utils import TENSOR_PROCESSORS, TensorProcessor

        self._file, self._dtype, self._kernels = file, dtype, kernels
        arch = next(arch for arch, name in MODEL_ARCH_NAMES.items() if name == file.architecture)
        self._names = get_tensor_name_map(arch, config.num_hidden_layers)
        processor = TENSOR_PROCESSORS.get(file.architecture, TensorProcessor)
        self._process = processor(config=config.to_dict()).process
        self._others: Counter[str] = Counter()
        self._read: set[str] = set()

    def __contains__(self, name: str) -> bool:
        return self._gguf_name(name) in self._file.tensors

    def has_name(self, name: str, parameter: nn.Parameter) -> bool:
        """Whether a parameter is a tensor of its own in files of this family; those of experts are not."""
        return parameter.ndim <= 2 and self._names.get_name(name.rpartition(".")[0]) is not None

    def tensor(self, name: str, shape: torch.Size) -> GgufTensor:
        """The tensor of a parameter.

        Raises:
            SwiftgenError: there is none, or it has another shape.
        """
        found = self._file.tensors.get(self._gguf_name(name))
        if found is None:
            raise SwiftgenError(f"{self._file.path} lacks a weight of the model: {name}")
        if found.shape != tuple(shape):
            raise SwiftgenError(
                f"{found.name} in {self._file.path} is {list(found.shape)}, the model has {list(shape)}"
            )
        self._read.add(found.name)
        return found

    def packed(self, tensor: GgufTensor) -> PackedWeight | None:
        """A matrix in few bits; None where there are no kernels for its type or shape."""
        if self._kernels is None:
            return None
        if not can_stay(self._file, tensor, self._kernels):
            if tensor.type_name not in ("F32", "F16", "BF16"):
                self._others[tensor.type_name] += 1
            return None
        rows = np.arange(tensor.shape[0], dtype=np.float32)[:, None]
        order = torch.from_numpy(self._processed(rows, tensor)).flatten().long()
        return self._kernels.pack(tensor.type_number, self._file.read(tensor), tensor.shape[1], order)

    def unpacked(self, tensor: GgufTensor) -> Tensor:
        """Any tensor in the dtype of the model."""
        values = self._processed(self._file.numbers(tensor).numpy(), tensor)
        return torch.from_numpy(values).to(self._dtype)

    def check_all_read(self) -> None:
        """Raise SwiftgenError if the file has weights that the model does not: another would be computed."""
        left = [
            name for name in self._file.tensors if name not in self._read and not name.startswith("rope_")
        ]
        if left:
            raise SwiftgenError(
                f"{self._file.path} has weights that its model has no place for: {min(left)}",
                "Use the safetensors of this model.",
            )

    def report(self) -> None:
        """Say which weights take more memory than they do in the file."""
        if self._others:
            found = ", ".join(f"{count} of type {name}" for name, count in self._others.items())
            logger.warning(
                "%s has weights that are unpacked, which is slower: %s", self._file.path.name, found
            )

    def _gguf_name(self, name: str) -> str:
        base, _, suffix = name.rpartition(".")
        return f"{self._names.get_name(base)}.{suffix}"

    def _processed(self, values: np.ndarray[Any, Any], tensor: GgufTensor) -> np.ndarray[Any, Any]:
        processed: np.ndarray[Any, Any] = self._process(values, name=tensor.name).weights
        return np.ascontiguousarray(processed)


def _unpacked_by_transformers(
    file: GgufFile, config: PretrainedConfig, dtype: torch.dtype
) -> PreTrainedModel:
    """A model whose weights have no tensor each (experts), or are spread: all of it unpacked, in memory."""
    from transformers import GgufConfig

    model, info = model_class(config).from_pretrained(
        file.path.parent,
        config=config,
        gguf_file=file.path.name,
        quantization_config=GgufConfig(dequantize=True),
        dtype=dtype,
        distributed_config=distributed_config(config),
        output_loading_info=True,
    )
    if info["missing_keys"]:
        raise SwiftgenError(f"{file.path} lacks weights of the model, e.g. {min(info['missing_keys'])}")
    return cast("PreTrainedModel", model)


def _name_of(model: PreTrainedModel, module: nn.Module) -> str:
    return str(next(name for name, found in model.named_modules() if found is module))


def _fill_buffers(model: PreTrainedModel, config: PretrainedConfig) -> None:
    """What is computed from the config; the weights are there."""
    base: Any = model.base_model
    base.rotary_emb = type(base.rotary_emb)(config=config)
    embedding: Any = model.get_input_embeddings()
    if hasattr(embedding, "embed_scale"):
        embedding.embed_scale = torch.tensor(embedding.scalar_embed_scale)
    left = [name for name, buffer in model.named_buffers() if buffer.is_meta]
    if left:
        raise SwiftgenError(f"this model has numbers that no GGUF file holds: {left[0]}")
