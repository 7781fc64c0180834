"""How does a trial end, on ShardedTensors and on torch's DTensors? Right, refused in clear words, unclear, or wrong."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.testing import assert_close
from torch.utils import _pytree as pytree

from bench.op_samples import Expected, OpTrial, backward
from shardwise import Mesh, MeshSpec, Replicate, Shard, ShardedTensor, shard
from shardwise.comm import Comm, CommError, run_local
from shardwise.geometry import LayoutError
from shardwise.ops import HiddenCommunicationError, MixedTensorsError
from shardwise.tensor.dispatch import UnsupportedOpError

RIGHT, REFUSED, UNCLEAR, WRONG = "right", "refused", "unclear", "wrong"
CLEAR = (UnsupportedOpError, MixedTensorsError, LayoutError, HiddenCommunicationError)
RANKS = 2
LIMIT = 20.0
TOLERANCE = {torch.float64: 1e-8, torch.complex128: 1e-8, torch.float32: 1e-4, torch.complex64: 1e-4}


@dataclass(frozen=True)
class TrialOutcome:
    """How a trial ended, and the words of the error or of the difference."""

    name: str
    kind: str
    text: str = ""


@dataclass(frozen=True)
class TensorKind:
    """A kind of distributed tensor: how a whole tensor is laid out, how it is put together, how it refuses."""

    place: Callable[[Tensor, int | None], Tensor]
    whole: Callable[[Any], Any]
    clear: tuple[type[Exception], ...]


def our_tensor_kind() -> TensorKind:
    """ShardedTensors on the ranks of the current comm."""
    mesh = Mesh.of(tp=RANKS)

    def place(tensor: Tensor, dim: int | None) -> Tensor:
        laid = shard(tensor.detach(), MeshSpec(mesh, [Replicate() if dim is None else Shard(dim)]), None)
        return laid.detach().clone().requires_grad_(tensor.requires_grad)

    def whole(value: Any) -> Any:
        return value.full() if isinstance(value, ShardedTensor) else value

    return TensorKind(place, whole, CLEAR)


def run_trial(trial: OpTrial, wanted: Expected, kind: TensorKind) -> TrialOutcome:
    """Run a trial on this rank; every rank runs it."""
    try:
        arguments = trial.placed(kind.place)
        result, tensors = trial.call(arguments)
        leaves = [kind.whole(leaf) for leaf in pytree.tree_leaves(result)]
    except CommError:
        raise
    except kind.clear as error:
        return TrialOutcome(trial.name, REFUSED, str(error))
    except Exception as error:
        return TrialOutcome(trial.name, UNCLEAR, f"{type(error).__name__}: {error}")
    return _judge_trial(trial, wanted, kind, leaves, tensors)


def _judge_trial(
    trial: OpTrial, wanted: Expected, kind: TensorKind, leaves: list[Any], tensors: Sequence[Tensor]
) -> TrialOutcome:
    try:
        _compare(leaves, wanted.leaves, "result")
        backward(leaves[:1] if trial.first_only else leaves)
        found = [None if t.grad is None else kind.whole(t.grad) for t in tensors]
        _compare(
            [_fill_missing_gradient(f, w) for f, w in zip(found, wanted.gradients, strict=True)],
            wanted.gradients,
            "gradient",
        )
    except CommError:
        raise
    except AssertionError as error:
        return TrialOutcome(trial.name, WRONG, str(error))
    except Exception as error:
        return TrialOutcome(trial.name, UNCLEAR, f"{type(error).__name__} after the call: {error}")
    return TrialOutcome(trial.name, RIGHT)


def _fill_missing_gradient(found: Tensor | None, wanted: Tensor | None) -> Tensor | None:
    """No gradient is a gradient of zeros, and the other way round."""
    if found is None and wanted is not None:
        return torch.zeros_like(wanted)
    return None if wanted is None and found is not None and not bool(found.any()) else found


def _compare(found: Sequence[Any], wanted: Sequence[Any], what: str) -> None:
    assert len(found) == len(wanted), f"{len(found)} values where {len(wanted)} are expected"
    for number, (one, other) in enumerate(zip(found, wanted, strict=True)):
        if not isinstance(other, Tensor):
            assert one == other, f"{what} {number}: {one!r} where {other!r} is expected"
            continue
        assert isinstance(one, Tensor), f"{what} {number} is no tensor"
        near = TOLERANCE.get(other.dtype, 0.0)
        assert_close(
            one.detach().resolve_conj().resolve_neg(),
            other.resolve_conj().resolve_neg(),
            rtol=near,
            atol=near,
            equal_nan=True,
            msg=lambda text, number=number: f"{what} {number}: {text}",  # type: ignore[misc]  # bound by default
        )


def run_ours(given: Sequence[tuple[OpTrial, Expected]]) -> list[TrialOutcome]:
    """Run trials on ShardedTensors, all ranks in this process; a trial that breaks the world is run again alone."""

    def body(comm: Comm) -> list[TrialOutcome]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [_gather_worst_outcome(run_trial(trial, wanted, our_tensor_kind()), comm) for trial, wanted in given]

    try:
        return run_local(body, RANKS, timeout=LIMIT)[0]
    except CommError as error:
        if len(given) == 1:
            return [TrialOutcome(given[0][0].name, WRONG, f"ranks differ: {error}")]
        return [outcome for one in given for outcome in run_ours([one])]


def _gather_worst_outcome(outcome: TrialOutcome, comm: Comm) -> TrialOutcome:
    """The worst of all ranks' outcomes; ranks that end differently are wrong together."""
    kinds = [data.decode() for data in comm.all_gather_bytes(outcome.kind.encode(), label=outcome.name)]
    if len(set(kinds)) == 1 or WRONG in kinds:
        return (
            outcome if outcome.kind == WRONG or WRONG not in kinds else TrialOutcome(outcome.name, WRONG, "elsewhere")
        )
    return TrialOutcome(outcome.name, WRONG, f"ranks end as {', '.join(kinds)}: {outcome.text}")
