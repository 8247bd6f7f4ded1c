"""Mixtures of experts whose rows do not depend on each other.

By default transformers sorts the rows of a pass by expert and multiplies each group at once. How many rows an
expert gets then decides how its sums are rounded, so a row would depend on what its neighbours choose. Here
every product has a shape that does not depend on the choices. The modules stay those of transformers; what
computes them is exchanged through its own interface.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel
from transformers.integrations.moe import ExpertsInterface, batched_mm_experts_forward

EXPERTS_NAME = "swiftgen"
_ROWS_AT_ONCE = 8  # batched products copy the weights of every row's experts


def use_independent_experts(model: PreTrainedModel) -> None:
    """Let the experts of a model, if it has any, compute each row on its own."""
    if model._can_set_experts_implementation():
        ExpertsInterface.register(EXPERTS_NAME, independent_experts)
        model.set_experts_implementation(EXPERTS_NAME)


def independent_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """The weighted sum of what each row's experts make of it, `[T, hidden]`.

    Args:
        experts: The module with the weights of all experts.
        hidden: `[T, hidden]`.
        chosen: Experts of each row, int64 `[T, k]`.
        weights: Their weights, `[T, k]`.
    """
    if hidden.device.type == "cpu":
        return all_rows_experts(experts, hidden, chosen, weights)
    return batched_experts(experts, hidden, chosen, weights)


def all_rows_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """All rows through every expert that any of them has chosen; of what it did not choose a row adds zero.

    The weights of an expert are read once, and reading is what takes the time.
    """
    used = torch.unique(chosen)
    spread = weights.new_zeros(len(hidden), experts.num_experts + 1).scatter_(1, chosen, weights)
    one_by_one = type(experts).forward.__wrapped__  # of transformers, below its choice of implementations
    summed: Tensor = one_by_one(experts, hidden, used.expand(len(hidden), -1), spread[:, used])
    return summed


def batched_experts(experts: Any, hidden: Tensor, chosen: Tensor, weights: Tensor) -> Tensor:
    """One product for each row and expert, a few rows at a time; no shape waits for the choices."""
    parts = zip(*(x.split(_ROWS_AT_ONCE) for x in (hidden, chosen, weights)), strict=True)
    return torch.cat([batched_mm_experts_forward(experts, *part) for part in parts])
