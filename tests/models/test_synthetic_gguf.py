"""The tool that makes a GGUF file in the shapes of a model of 8B, with small ones."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from gguf import GGMLQuantizationType as Kind

import swiftgen
from support.model_files import tiny_model, write_gguf
from swiftgen.models.gguf_header import read_header
from tools.synthetic_gguf import main


def test_a_tiny_file_has_the_types_of_q4_k_m_and_writes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    write_gguf(tmp_path / "tokenizer.gguf", tiny_model())
    made = tmp_path / "made.gguf"
    arguments = ["synthetic_gguf.py", str(made), "--tokenizer", str(tmp_path / "tokenizer.gguf"), "--tiny"]
    monkeypatch.setattr(sys, "argv", arguments)
    main()
    tensors = read_header(made).tensors
    assert {tensors[f"blk.{i}.ffn_down.weight"].type_number for i in (0, 3, 7)} == {Kind.Q6_K}
    assert (
        tensors["blk.1.ffn_down.weight"].type_number == tensors["token_embd.weight"].type_number == Kind.Q4_K
    )
    engine = swiftgen.load(
        overrides={"model.source": str(made), "model.sha256": None, "chat": False, "heads": None}
    )
    assert sum(len(event.token_ids) for event in engine.stream("he", num_tokens=8)) == 8
