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

from bench.op_samples import Expected, Trial, backward
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
class Outcome:
    """How a trial ended, and the words of the error or of the difference."""

    name: str
    kind: str
    text: str = ""


@dataclass(frozen=True)
class Kind:
    """A kind of distributed tensor: how a whole tensor is laid out, how it is put together, how it refuses."""

    place: Callable[[Tensor, int | None], Tensor]
    whole: Callable[[Any], Any]
    clear: tuple[type[Exception], ...]


def ours() -> Kind:
    """ShardedTensors on the ranks of the current comm."""
    mesh = Mesh.of(tp=RANKS)

    def place(tensor: Tensor, dim: int | None) -> Tensor:
        laid = shard(tensor.detach(), MeshSpec(mesh, [Replicate() if dim is None else Shard(dim)]), None)
        return laid.detach().clone().requires_grad_(tensor.requires_grad)

    def whole(value: Any) -> Any:
        return value.full() if isinstance(value, ShardedTensor) else value

    return Kind(place, whole, CLEAR)


def attempt(trial: Trial, wanted: Expected, kind: Kind) -> Outcome:
    """Run a trial on this rank; every rank runs it."""
    try:
        arguments = trial.placed(kind.place)
        result, tensors = trial.call(arguments)
        leaves = [kind.whole(leaf) for leaf in pytree.tree_leaves(result)]
    except CommError:
        raise
    except kind.clear as error:
        return Outcome(trial.name, REFUSED, str(error))
    except Exception as error:
        return Outcome(trial.name, UNCLEAR, f"{type(error).__name__}: {error}")
    return _judged(trial, wanted, kind, leaves, tensors)


def _judged(trial: Trial, wanted: Expected, kind: Kind, leaves: list[Any], tensors: Sequence[Tensor]) -> Outcome:
    try:
        _compare(leaves, wanted.leaves, "result")
        backward(leaves[:1] if trial.first_only else leaves)
        found = [None if t.grad is None else kind.whole(t.grad) for t in tensors]
        _compare([_filled(f, w) for f, w in zip(found, wanted.gradients, strict=True)], wanted.gradients, "gradient")
    except CommError:
        raise
    except AssertionError as error:
        return Outcome(trial.name, WRONG, str(error))
    except Exception as error:
        return Outcome(trial.name, UNCLEAR, f"{type(error).__name__} after the call: {error}")
    return Outcome(trial.name, RIGHT)


def _filled(found: Tensor | None, wanted: Tensor | None) -> Tensor | None:
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


def run_ours(given: Sequence[tuple[Trial, Expected]]) -> list[Outcome]:
    """Run trials on ShardedTensors, all ranks in this process; a trial that breaks the world is run again alone."""

    def body(comm: Comm) -> list[Outcome]:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            return [_together(attempt(trial, wanted, ours()), comm) for trial, wanted in given]

    try:
        return run_local(body, RANKS, timeout=LIMIT)[0]
    except CommError as error:
        if len(given) == 1:
            return [Outcome(given[0][0].name, WRONG, f"ranks differ: {error}")]
        return [outcome for one in given for outcome in run_ours([one])]


def _together(outcome: Outcome, comm: Comm) -> Outcome:
    """The worst of all ranks' outcomes; ranks that end differently are wrong together."""
    kinds = [data.decode() for data in comm.all_gather_bytes(outcome.kind.encode(), label=outcome.name)]
    if len(set(kinds)) == 1 or WRONG in kinds:
        return outcome if outcome.kind == WRONG or WRONG not in kinds else Outcome(outcome.name, WRONG, "elsewhere")
    return Outcome(outcome.name, WRONG, f"ranks end as {', '.join(kinds)}: {outcome.text}")
