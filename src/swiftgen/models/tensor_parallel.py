"""A model spread over ranks by the tensor-parallel plan that transformers has for it.

Its sums over the ranks are replaced: from three ranks on, a library adds the parts of a row in an order that
depends on where in the pass the row lies. In float64 the order does not survive the rounding to the dtype of
the model, as in the attention (rule 3 of docs/design.md).
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import TYPE_CHECKING, Any

from swiftgen.models.architectures import model_class
from swiftgen.system import ranks
from swiftgen.system.errors import SwiftgenError

if TYPE_CHECKING:
    from torch import Tensor
    from transformers import PretrainedConfig
    from transformers.distributed import DistributedConfig


def distributed_config(config: PretrainedConfig) -> DistributedConfig | None:
    """How transformers is to spread a model over the ranks; None for one rank.

    Raises:
        SwiftgenError: there is no plan for such a model, or its heads cannot be spread over so many.
    """
    if ranks.num_ranks() == 1:
        return None
    from transformers.distributed import DistributedConfig

    num_kv_heads(config)
    base, styles = model_class(config).base_model_prefix, _order_free_styles()
    plan: dict[str, str] = config.base_model_tp_plan
    sums = {f"{base}.{name}": styles[style] for name, style in plan.items() if style in styles}
    return DistributedConfig(tp_size=ranks.num_ranks(), tp_plan=sums)


def device_of_rank(asked: str) -> str:
    """What a preset's `model.device` means on this rank: the card of its number on its machine.

    Raises:
        SwiftgenError: another is asked for, or there is none of that number.
    """
    if ranks.num_ranks() == 1:
        return asked
    import torch

    num_cards = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if not num_cards:
        return asked
    if asked not in ("auto", "cuda"):
        raise SwiftgenError(
            f"model.device is {asked}, but of several processes each has the card of its number",
            "leave model.device at auto; CUDA_VISIBLE_DEVICES chooses among the cards",
        )
    if ranks.local_rank() >= num_cards:
        raise SwiftgenError(
            f"there are more processes than cards, of which torch sees {num_cards}",
            f"start {num_cards} with --nproc-per-node",
        )
    return f"cuda:{ranks.local_rank()}"


def num_kv_heads(config: PretrainedConfig) -> int:
    """KV heads of a model that each rank has.

    Raises:
        SwiftgenError: there is no plan for such a model, or they cannot be spread over so many ranks.
    """
    num_heads, num_ranks = int(config.num_key_value_heads), ranks.num_ranks()
    if num_ranks == 1:
        return num_heads
    from transformers.distributed.tensor_parallel import get_kv_heads_per_rank

    plan = getattr(config, "base_model_tp_plan", None)
    if not plan:
        raise SwiftgenError(
            f"transformers has no tensor-parallel plan for {config.model_type} models",
            "run without torchrun, in one process",
        )
    found = get_kv_heads_per_rank(plan, num_heads, num_ranks)
    if found is None:
        fitting = [n for n in range(1, num_heads + 1) if num_heads % n == 0]
        raise SwiftgenError(
            f"the {num_heads} KV heads of this model cannot be spread over {num_ranks} processes",
            f"possible with --nproc-per-node: {', '.join(map(str, fitting))}",
        )
    return int(found)


def whole(tensor: Tensor) -> Tensor:
    """A weight in one piece, also if it is spread over the ranks."""
    gather: Callable[[], Tensor] | None = getattr(tensor, "full_tensor", None)
    return gather() if gather else tensor


@cache
def _order_free_styles() -> dict[str, str]:
    """Of each of transformers' parallel styles that add something up, the one that takes its place here."""
    from torch.distributed.tensor import Replicate
    from transformers.distributed.parallel_utils import ALL_PARALLEL_STYLES
    from transformers.distributed.tensor_parallel import MoeExpertsParallel, RowwiseParallel

    class Rowwise(RowwiseParallel):  # type: ignore[misc]
        transform_output_post_forward = _summed

    class Experts(MoeExpertsParallel):  # type: ignore[misc]
        transform_output_post_forward = _summed

    styles = {
        "rowwise": Rowwise(),
        "rowwise_rep": Rowwise(),
        "rowwise_split_input": Rowwise(input_layouts=Replicate()),
        "moe_tp_experts": Experts(),
    }
    for name, style in styles.items():
        ALL_PARALLEL_STYLES.register(f"swiftgen_{name}", style)
    return {name: f"swiftgen_{name}" for name in styles}


def _summed(style: Any, module: Any, output: Tensor, mesh: Any) -> Tensor:
    """The parts of all ranks together, and the bias once."""
    from torch import distributed as dist

    total = output.double()
    dist.all_reduce(total, group=mesh.get_group())
    summed = total.to(output.dtype)
    bias = module._parameters.get("bias")
    return summed if bias is None else summed + whole(bias)
