"""One training step of a sharded model on one rank, without values and without other ranks.

1. A copy of the model on the meta device is sharded by the plan: the rank has its local parts only.
2. The forward and the backward pass run as they do in training. Every operator takes its own rule and its own choice
   of layouts, and every move is counted (`StepMeter`), so the figures are those of the real step.
3. Results have no values, so a model that looks at values (a loss that stops on NaN, experts that count their tokens)
   cannot be rehearsed.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

from shardwise._torch import pytree
from shardwise.comm import use_comm
from shardwise.nn.model_plan import ModelPlan
from shardwise.nn.patterns import PlanError
from shardwise.nn.shard_module import shard_by_patterns
from shardwise.planner.attention import NoValues, fused_attention
from shardwise.planner.meter import MeteredMove, StepMeter
from shardwise.planner.silent_comm import silent_comm
from shardwise.tensor.sharded_tensor import ShardedTensor

Inputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any]
Loss: TypeAlias = Callable[[Any], Tensor]

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Rehearsal:
    """What one rank's step needs: the bytes that it holds, operations, moves.

    `peak_bytes` has parameters, buffers, gradients and activations, without the state of an optimizer.
    """

    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    peak_bytes: int
    flops: int
    moves: tuple[MeteredMove, ...]


def rehearse(
    model: nn.Module, plan: ModelPlan, inputs: Inputs, rank: int, dtype: torch.dtype | None, loss: Loss | None = None
) -> Rehearsal:
    """Run one step of a model, whose parameters may be on the meta device, as one rank of a plan.

    >>> from shardwise.geometry import Mesh
    >>> plan = ModelPlan(Mesh.of(tp=2), {"weight": "S(0)"}, input_plan="replicated")
    >>> found = rehearse(nn.Linear(4, 8, bias=False), plan, (torch.ones(2, 4),), 0, None)
    >>> found.flops, [(m.record.label, m.backward) for m in found.moves]
    (128, [])
    """
    twin = copy_to_meta(model, dtype)
    ranks = tuple(sorted(plan.mesh.ranks.reshape(-1).tolist()))
    comm = silent_comm(rank, ranks)
    meter, given = StepMeter(), pytree.tree_map_only(Tensor, lambda t: _cast(t.detach().to("meta"), dtype), inputs)
    with _one_at_a_time, ExitStack() as stack:
        stack.enter_context(fused_attention())
        stack.enter_context(use_comm(comm))
        stack.enter_context(torch.enable_grad())
        shard_by_patterns(twin, plan, 0, comm)
        stack.enter_context(torch.device("meta"))
        stack.enter_context(NoValues())
        stack.enter_context(meter)
        try:
            return _run_step(twin, given, loss or sum_of_outputs, meter)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
            raise PlanError(
                f"a step of {type(model).__name__} cannot be run without values: {type(error).__name__}: {error}; "
                f"{_advise(plan)}"
            ) from error


def _advise(plan: ModelPlan) -> str:
    if plan.input_plan is None:
        return (
            "the plan does not say how inputs are laid out: give it an input_plan, such as 'dp: S(0)' or 'replicated'"
        )
    return "pass inputs= (the arguments of one forward pass on a rank) or loss=, or estimate from parameter shapes"


def _run_step(twin: nn.Module, inputs: Any, loss: Loss, meter: StepMeter) -> Rehearsal:
    for name, parameter in twin.named_parameters():
        meter.hold(_parts(parameter))
        meter.name_tensors(name, _parts(parameter))
    parameters = meter.live_bytes
    for buffer in twin.buffers():
        meter.hold(_parts(buffer))
    held = meter.live_bytes
    given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    meter.hold(given)
    outputs = twin(**inputs) if isinstance(inputs, Mapping) else twin(*inputs)
    value = loss(outputs)
    del outputs
    activations = meter.live_bytes - held
    value.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            meter.name_gradients(name, _parts(parameter.grad))
    return Rehearsal(parameters, held - parameters, activations, meter.peak_bytes, meter.flops, tuple(meter.moves))


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.local_parts if isinstance(tensor, ShardedTensor) else (tensor,)


def sum_of_outputs(outputs: Any) -> Tensor:
    """The loss of a model that returns one (`outputs.loss`), or else the sum of its first result with gradients."""
    known = getattr(outputs, "loss", None)
    if isinstance(known, Tensor):
        return known
    for leaf in pytree.tree_leaves(outputs if not hasattr(outputs, "to_tuple") else outputs.to_tuple()):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return leaf.sum()
    raise ValueError("no result of the model depends on its parameters, so there is no gradient")


def copy_to_meta(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a model without values; parameters and persistent buffers of floats take `dtype`.

    >>> weight = copy_to_meta(nn.Linear(2, 2), torch.bfloat16).weight
    >>> weight.device, weight.dtype
    (device(type='meta'), torch.bfloat16)
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        made = _cast(parameter.detach().to("meta"), dtype)
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False):
            kept = name in part._non_persistent_buffers_set
            memo[id(buffer)] = _cast(buffer.detach().to("meta"), None if kept else dtype)
    return copy.deepcopy(model, memo)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)
