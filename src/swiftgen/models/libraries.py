"""Models quantised by a library: bitsandbytes, torchao, GPTQ, AWQ, and whatever else transformers loads.

Lossless then means: the text that the quantised model writes. Its linear layers stay as the library made them
(`linear.is_plain`), and the exactness check decides which of their passes agree.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from swiftgen.system.errors import SwiftgenError
from swiftgen.system.ranks import num_ranks

_PACKAGES = {
    "bitsandbytes": ("bnb", ("bitsandbytes",)),
    "torchao": ("torchao", ("torchao",)),
    "gptq": ("gptq", ("gptqmodel", "optimum")),
    "awq": ("gptq", ("gptqmodel",)),
    "compressed-tensors": ("compressed-tensors", ("compressed_tensors",)),
}
"""Of a method as config.json names it: the extra of swiftgen, and the modules that must be there."""
_ON_LOADING = {
    "bnb-8bit": ("bitsandbytes", 8.0),
    "bnb-4bit": ("bitsandbytes", 4.5),  # NF4, a float32 scale for every 64 weights
    "torchao-int8": ("torchao", 8.0),
}
"""Of `model.quantization`: the method, and the bits of a weight."""
_TALKATIVE = ("bitsandbytes", "torchao", "torch.utils._pytree")  # they warn at every import, or every pass


def check_quantiser(stored: str, wanted: str, source: str) -> None:
    """Raise SwiftgenError unless what quantises a model is here.

    Args:
        stored: how the weights are quantised in their files, or empty, see `stored_method`.
        wanted: the preset's `model.quantization`.
        source: of the model, for the message.
    """
    if stored and wanted != "none":
        raise SwiftgenError(
            f"{source} is quantised already ({stored}), model.quantization is {wanted}",
            "leave model.quantization at none",
        )
    method = stored or (_ON_LOADING[wanted][0] if wanted != "none" else "")
    if method in ("", "gguf"):
        return
    if num_ranks() > 1:  # not tried
        raise SwiftgenError(
            f"weights quantised by {method} run in one process", "start it without torchrun, or use 16 bits"
        )
    extra, modules = _PACKAGES.get(method, ("", ()))
    if missing := [module for module in modules if find_spec(module) is None]:
        raise SwiftgenError(
            f"weights quantised by {method} need the package {missing[0].replace('_', '-')}",
            f"pip install 'swiftgen[{extra}]'",
        )


def quiet_libraries() -> None:
    """From now on no warnings from libraries that quantise."""
    for logger in _TALKATIVE:
        logging.getLogger(logger).setLevel(logging.ERROR)


def stored_method(config: Any) -> str:
    """How the weights of a checkpoint are quantised, as config.json names it; empty if they are not."""
    found = getattr(config, "quantization_config", None)
    if found is None:
        return ""
    settings = found if isinstance(found, Mapping) else vars(found)
    return str(settings.get("quant_method") or "bitsandbytes")  # older ones of bitsandbytes do not say


def quantisation_config(wanted: str, dtype: Any) -> Any:
    """What transformers needs to quantise on loading.

    Args:
        wanted: The preset's `model.quantization`.
        dtype: What is computed in.
    """
    if wanted == "torchao-int8":
        from torchao.quantization import Int8WeightOnlyConfig
        from transformers import TorchAoConfig

        return TorchAoConfig(Int8WeightOnlyConfig())
    from transformers import BitsAndBytesConfig

    if wanted == "bnb-8bit":
        # Columns are taken for outliers by all rows of a pass, so with a threshold no row would be exact.
        return BitsAndBytesConfig(load_in_8bit=True, llm_int8_threshold=0.0)
    return BitsAndBytesConfig(load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_compute_dtype=dtype)


def library_of(linear: object) -> str:
    """The library whose class a linear layer or its weight has, with its version; empty if it has none."""
    for part in (linear, getattr(linear, "weight", None)):
        package = type(part).__module__.partition(".")[0]
        if package not in ("builtins", "swiftgen", "torch", "transformers"):
            return f"{type(part).__name__} of {package} {getattr(sys.modules[package], '__version__', '')}"
    return ""


def bytes_loaded(name: str, entry: Mapping[str, Any], wanted: str, dtype_bytes: int) -> int:
    """Memory of a tensor once it is loaded.

    Args:
        name, entry: Of the header of a safetensors file.
        wanted: The preset's `model.quantization`.
        dtype_bytes: Of a number in the dtype of the model.
    """
    num_numbers = 1
    for size in entry["shape"]:
        num_numbers *= size
    if entry["dtype"] not in ("F64", "F32", "F16", "BF16"):  # codes, which stay as they are
        begin, end = entry["data_offsets"]
        return int(end) - int(begin)
    is_linear = ".layers." in name and name.endswith(".weight") and len(entry["shape"]) == 2
    if is_linear and wanted != "none":
        return int(num_numbers * _ON_LOADING[wanted][1] / 8)
    return int(num_numbers * dtype_bytes)
