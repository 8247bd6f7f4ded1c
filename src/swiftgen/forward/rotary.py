"""The angles of RoPE in a pass, for each kind of layer that has its own."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from swiftgen.forward.passes import Rotaries, Rotary


class SignedRotary(nn.Module):
    """A model's rotary embedding, with the sign of "rotate half" moved into the sine.

    `rotate_half(x) * sin` equals `roll(x, D / 2) * signed_sin`.

    Args:
        kinds: See `architectures.layer_rotaries`.
    """

    def __init__(self, rotary: nn.Module, kinds: Iterable[str | None]) -> None:
        super().__init__()
        self._rotary, self._kinds = rotary, tuple(dict.fromkeys(kinds))

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotaries:
        """Of one sequence."""
        return {kind: self._of_kind(kind, x, position_ids) for kind in self._kinds}

    def _of_kind(self, kind: str | None, x: Tensor, position_ids: Tensor) -> Rotary:
        options = {"layer_type": kind} if kind else {}
        cos, sin = self._rotary(x, position_ids=position_ids, **options)
        if kind is None:
            cos, sin = torch.ones_like(cos), torch.zeros_like(sin)
        half = sin.shape[-1] // 2
        return cos[0].unsqueeze(1), torch.cat([-sin[0, :, :half], sin[0, :, half:]], dim=-1).unsqueeze(1)


class RotaryTable(SignedRotary):
    """The same on a CPU, looked up: to reckon a few rows takes a dozen operations.

    The numbers are those of the dtype of the model, in float32.
    """

    _PAGE = 2048  # positions that are reckoned at a time

    def __init__(self, rotary: nn.Module, kinds: Iterable[str | None]) -> None:
        super().__init__(rotary, kinds)
        self._pages: dict[int, Rotaries] = {}  # those that the last pass needed

    def forward(self, x: Tensor, position_ids: Tensor) -> Rotaries:
        """Of one sequence."""
        positions = position_ids[0]
        first, last = int(positions.min()) // self._PAGE, int(positions.max()) // self._PAGE
        needed = range(first, last + 1)
        self._pages = {number: self._pages.get(number) or self._page(number, x) for number in needed}
        rows = positions - first * self._PAGE
        return {kind: self._looked_up(kind, rows) for kind in self._kinds}

    def _page(self, number: int, x: Tensor) -> Rotaries:
        begin = number * self._PAGE
        return super().forward(x, torch.arange(begin, begin + self._PAGE).unsqueeze(0))

    def _looked_up(self, kind: str | None, rows: Tensor) -> Rotary:
        cos, signed_sin = zip(*(page[kind] for page in self._pages.values()), strict=True)
        if len(cos) > 1:
            return torch.cat(cos)[rows].float(), torch.cat(signed_sin)[rows].float()
        return cos[0][rows].float(), signed_sin[0][rows].float()
