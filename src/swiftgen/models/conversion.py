"""GGUF files are unpacked once into safetensors; every later start loads that copy."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path

import torch
from rich.console import Console

from swiftgen.models.architectures import check_supported, model_class
from swiftgen.models.gguf_positions import scaled_rope
from swiftgen.models.gguf_weights import save_quantised
from swiftgen.models.sources import ResolvedSource
from swiftgen.system.cache_folder import building, cache_folder, cannot_write, need_space
from swiftgen.system.errors import SwiftgenError, first_line

# Part of the name of a converted copy: raise it when the conversion changes.
_CONVERSION = 3


def converted_copy(resolved: ResolvedSource, dtype: torch.dtype) -> Path:
    """The folder with a GGUF file's weights as safetensors in `dtype`; made on first use, then kept.

    Raises:
        SwiftgenError: if the file cannot be read or holds an unsupported architecture.
    """
    target = converted_folder(resolved, dtype)
    if target.is_dir():
        return target
    with building(target) as work:
        if not target.is_dir():  # else another process has just made it
            # The status keeps the real stderr; the bars of the conversion itself go nowhere.
            status = Console(file=sys.stderr).status(f"unpacking {resolved.path.name}, once")
            with status, contextlib.redirect_stderr(io.StringIO()):
                _convert(resolved.path, dtype, work / "model")
            os.rename(work / "model", target)
    return target


def converted_folder(resolved: ResolvedSource, dtype: torch.dtype) -> Path:
    """Where the converted copy of a GGUF file is kept; it need not exist yet."""
    name = f"{resolved.fingerprint[:32]}-{str(dtype).removeprefix('torch.')}-v{_CONVERSION}"
    return cache_folder() / "converted" / name


@contextlib.contextmanager
def quiet_transformers() -> Iterator[None]:
    """No progress bars and no warnings from transformers within the block."""
    from transformers.utils import logging as hf_logging

    verbosity, had_bars = hf_logging.get_verbosity(), hf_logging.is_progress_bar_enabled()
    hf_logging.set_verbosity_error()
    hf_logging.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        hf_logging.set_verbosity(verbosity)
        if had_bars:
            hf_logging.enable_progress_bar()


def _convert(gguf: Path, dtype: torch.dtype, target: Path) -> None:
    from transformers import AutoConfig, AutoTokenizer, GgufConfig

    try:
        with quiet_transformers():
            config = AutoConfig.from_pretrained(gguf.parent, gguf_file=gguf.name)
            config.rope_parameters = scaled_rope(gguf, config)
            check_supported(config)
            model, info = model_class(config).from_pretrained(
                gguf.parent,
                config=config,
                gguf_file=gguf.name,
                quantization_config=GgufConfig(dequantize=True),
                dtype=dtype,
                output_loading_info=True,
            )
            tokenizer = AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name)
    except SwiftgenError:
        raise
    except Exception as error:  # gguf and transformers raise whatever a damaged file leads to
        raise SwiftgenError(
            f"cannot read {gguf}: {first_line(error)}",
            "The file may be damaged, or its architecture or the type of its weights is new to transformers.",
        ) from error
    if info["missing_keys"]:
        raise SwiftgenError(f"{gguf} lacks weights of the model, e.g. {min(info['missing_keys'])}")
    need_space(sum(p.numel() * p.element_size() for p in model.parameters()), "the converted model")
    try:
        with quiet_transformers():
            model.save_pretrained(target)
            tokenizer.save_pretrained(target)
        save_quantised(gguf, model, config, target)
    except Exception as error:  # safetensors and tokenizers have kinds of their own for a full disk
        raise cannot_write(first_line(error)) from error
