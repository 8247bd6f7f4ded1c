"""Draft heads: small residual layers that predict the tokens after the next one.

Paper, section 3.2, and the reference checkpoints: `s_0` is the last hidden state before the final norm,
`s_i = s_{i-1} + W_i RMSNorm_i(s_{i-1})`, and the logits of head i are `lm_head(RMSNorm'_i(s_i))` with
the target's own frozen lm_head. Head i, read at position p, predicts the token at p + 1 + i.
"""

from __future__ import annotations

from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor, nn

from swiftgen.errors import SwiftgenError

KIND = "linear"
WEIGHTS_FILE = "heads.safetensors"


class LinearHead(nn.Module):
    """One residual step: `s + W RMSNorm(s)`, and the norm before the lm_head."""

    def __init__(self, hidden_size: int, eps: float) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        self.linear = nn.Linear(hidden_size, hidden_size, bias=False)
        self.post_layernorm = nn.RMSNorm(hidden_size, eps=eps)
        nn.init.zeros_(self.linear.weight)  # an untrained head predicts what the base predicts

    def forward(self, state: Tensor) -> Tensor:
        """Next state, `[..., hidden]`."""
        next_state: Tensor = state + self.linear(self.input_layernorm(state))
        return next_state

    def output(self, state: Tensor) -> Tensor:
        """What the lm_head reads of a state this head has made."""
        normed: Tensor = self.post_layernorm(state)
        return normed


class LinearHeads(nn.Module):
    """The paper's chained heads.

    Args:
        hidden_size, num_heads: Of the target; heads drafted below the base.
        eps: Of the RMSNorms.
    """

    def __init__(self, hidden_size: int, num_heads: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.hidden_size = hidden_size
        self.heads = nn.ModuleList(LinearHead(hidden_size, eps) for _ in range(num_heads))

    def forward(self, state: Tensor) -> Tensor:
        """What each head hands to the lm_head: `[hidden]` -> `[num_heads, hidden]`."""
        outputs = []
        for head in self.heads:
            assert isinstance(head, LinearHead)
            state = head(state)
            outputs.append(head.output(state))
        return torch.stack(outputs)


def save_heads(heads: LinearHeads, folder: Path, base_model: str) -> None:
    """Write the heads as safetensors with what is needed to check them against a model."""
    folder.mkdir(parents=True, exist_ok=True)
    metadata = {
        "kind": KIND,
        "hidden_size": str(heads.hidden_size),
        "num_heads": str(len(heads.heads)),
        "base_model": base_model,
    }
    save_file(dict(heads.state_dict()), folder / WEIGHTS_FILE, metadata)


def load_heads(path: str | Path, hidden_size: int, eps: float) -> LinearHeads:
    """Read heads and check that they fit a model of this hidden size.

    Raises:
        SwiftgenError: If there are none at `path`, the file is not a heads file, or it is for another model.
    """
    file = Path(path).expanduser()
    file = file / WEIGHTS_FILE if file.is_dir() else file
    if not file.is_file():
        raise SwiftgenError(
            f"no draft heads at {path}", f"give a folder with {WEIGHTS_FILE} or set `heads: null`"
        )
    try:
        with safe_open(file, framework="pt") as handle:
            metadata = handle.metadata() or {}
            state = {name: handle.get_tensor(name) for name in handle.keys()}  # noqa: SIM118
        if metadata.get("kind") != KIND:
            raise SwiftgenError(
                f"{file} is not a swiftgen heads file (kind {metadata.get('kind', 'missing')!r})",
                f"known kinds: {KIND}",
            )
        if int(metadata["hidden_size"]) != hidden_size:
            raise SwiftgenError(
                f"the heads in {file} are for hidden size {metadata['hidden_size']}, "
                f"the model has {hidden_size}",
                f"they belong to {metadata.get('base_model', 'an unnamed model')}",
            )
        heads = LinearHeads(hidden_size, int(metadata["num_heads"]), eps)
        heads.load_state_dict(state)
    except (SafetensorError, KeyError, ValueError, RuntimeError) as error:
        raise SwiftgenError(
            f"the heads file {file} is damaged: {str(error).splitlines()[0]}",
            "fetch or train the heads again",
        ) from error
    return heads
