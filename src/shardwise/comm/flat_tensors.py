"""Tensors as runs of bytes, and the arithmetic of a reduction, the same in every transport."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from shardwise._cache import cached
from shardwise.comm.agree import name_ranks
from shardwise.comm.background import is_in_background
from shardwise.comm.protocol import ReduceOp
from shardwise.geometry.mesh import IntArray

# Elements that are reduced at a time: they stay in cache, and torch uses one thread for so few. Its other threads would
# wait for each other at the end of every block, which takes long where ranks share cores.
REDUCE_BLOCK_ELEMENTS = 1 << 15
_OPS = ("sum", "avg", "min", "max", "product")


class RankGroup(Protocol):
    """The part of a comm that argument checks need."""

    @property
    def rank(self) -> int: ...
    @property
    def ranks(self) -> tuple[int, ...]: ...


def as_bytes(tensor: Tensor, *, label: str) -> Tensor:
    """Return the bytes of a contiguous tensor as a flat uint8 view of the same memory.

    A tensor that is lazily conjugated or negated has no such view and is refused.

    >>> as_bytes(torch.zeros(2, 3, dtype=torch.complex64), label="demo").shape
    torch.Size([48])
    """
    check_contiguous(tensor, label=label)
    return _as_one_run(tensor).view(torch.uint8)


def check_contiguous(tensor: Tensor, *, label: str) -> None:
    """Refuse a tensor whose elements are not one run of memory, or are to be conjugated or negated when read."""
    if not tensor.is_contiguous():
        raise ValueError(
            f"{label!r}: a tensor of shape {tuple(tensor.shape)} and strides {tensor.stride()} is not contiguous; "
            "only contiguous tensors are moved, so pass tensor.contiguous()"
        )
    check_values(tensor, label=label)


def check_values(tensor: Tensor, *, label: str) -> None:
    """Refuse a tensor whose elements are to be conjugated or negated when read."""
    if tensor.is_conj() or tensor.is_neg():
        raise ValueError(f"{label!r}: a lazily conjugated or negated tensor; pass tensor.resolve_conj().resolve_neg()")


def flatten_contiguous(tensor: Tensor, *, label: str) -> Tensor:
    """Return a contiguous tensor as a flat view of the same memory, off the autograd tape."""
    check_contiguous(tensor, label=label)
    return _as_one_run(tensor)


def _as_one_run(tensor: Tensor) -> Tensor:
    """A contiguous tensor's elements as one run; a single element keeps no stride from where it was taken."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


@cached()
def _runs_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[IntArray, int]:
    """Where the runs of memory of such a tensor begin, and how long each is, in elements."""
    length, dims = 1, len(shape)
    while dims and (shape[dims - 1] == 1 or strides[dims - 1] == length):
        dims -= 1
        length *= shape[dims]
    starts = np.zeros(1, np.int64)
    for size, step in zip(shape[:dims], strides[:dims], strict=True):
        starts = (starts[:, None] + np.arange(size) * step).reshape(-1)
    return starts, length


def run_bytes(tensor: Tensor) -> int:
    """How many bytes of a tensor are adjacent in memory, at least.

    >>> run_bytes(torch.zeros(4, 6)), run_bytes(torch.zeros(4, 6)[:, :3]), run_bytes(torch.zeros(4, 6).t())
    (96, 12, 4)
    """
    return _runs_of(tuple(tensor.shape), tensor.stride())[1] * tensor.element_size()


def memory_runs(tensor: Tensor) -> IntArray:
    """The address and the number of bytes of each run of memory of a tensor, in the order of its elements."""
    starts, length = _runs_of(tuple(tensor.shape), tensor.stride())
    runs = np.empty((len(starts), 2), np.int64)
    np.multiply(starts, tensor.element_size(), out=runs[:, 0])
    runs[:, 0] += tensor.data_ptr()
    runs[:, 1] = length * tensor.element_size()
    return runs


def fill_from_bytes(target: Tensor, data: bytearray, at: int) -> None:
    """Fill a tensor of any strides from its bytes, in the order of its elements, which begin at a place of `data`."""
    kind = _BY_WIDTH[target.element_size()]
    if at % target.element_size():
        data, at = data[at : at + target.nbytes], 0
    values = torch.frombuffer(data, dtype=kind, count=target.numel(), offset=at)
    target.detach().view(kind).copy_(values.view(target.shape))


_BY_WIDTH = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def nonempty_bytes(tensors: Sequence[Tensor], *, label: str) -> list[Tensor]:
    """Return the byte views of those tensors that have any bytes."""
    return [as_bytes(t, label=label) for t in tensors if t.numel()]


def describe_run(tensor: Tensor) -> str:
    """What a tensor is to a collective: so many elements of a dtype.

    >>> describe_run(torch.zeros(2, 3))
    '6 elements of float32'
    """
    return f"{tensor.numel()} elements of {str(tensor.dtype).removeprefix('torch.')}"


def describe_call(kind: str, label: str, detail: str = "") -> str:
    """A call as ranks compare it and as errors show it.

    >>> describe_call("all_reduce", "loss", "sum of 1 elements of float32")
    "all_reduce 'loss' (sum of 1 elements of float32)"
    >>> describe_call("all_gather_bytes", "shard")  # the ranks agree on a call of the user's
    "'shard'"
    """
    if kind == "all_gather_bytes" and not detail:
        return repr(label)
    return f"{kind} {label!r}" + (f" ({detail})" if detail else "")


Edges = dict[int, list[Tensor]]


def check_edges(group: RankGroup, given: Mapping[int, Sequence[Tensor]], what: str, *, label: str) -> Edges:
    """Check the ranks of one side of an exchange and return its byte views, ranks without bytes left out."""
    check_peers(group, given, what, label=label)
    views = {rank: nonempty_bytes(tensors, label=label) for rank, tensors in given.items()}
    return {rank: tensors for rank, tensors in views.items() if tensors}


def check_peers(group: RankGroup, given: Mapping[int, Sequence[Tensor]], what: str, *, label: str) -> None:
    """Raise unless all ranks of one side of an exchange are in the group."""
    unknown = given.keys() - group.ranks
    if unknown:
        raise ValueError(
            f"{label!r}: rank {group.rank} {what} {name_ranks(sorted(unknown))}, not in this comm "
            f"({name_ranks(group.ranks)}); use a comm that includes them"
        )


def nonempty_edges(
    group: RankGroup, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], *, label: str
) -> tuple[dict[int, list[Tensor]], dict[int, list[Tensor]]]:
    """Check the ranks of an exchange and return its tensors of any strides, those without elements left out."""
    check_peers(group, sends, "sends to", label=label)
    check_peers(group, receives, "receives from", label=label)
    return _nonempty(sends, label), _nonempty(receives, label)


def _nonempty(side: Mapping[int, Sequence[Tensor]], label: str) -> dict[int, list[Tensor]]:
    kept = {}
    for rank, listed in side.items():
        for tensor in listed:
            if tensor.is_conj() or tensor.is_neg():
                check_values(tensor, label=label)
        if found := [t for t in listed if t.numel()]:
            kept[rank] = found
    return kept


def match_tensors(target: Tensor, source: Tensor) -> tuple[Tensor, Tensor] | None:
    """The two ends of an edge as tensors of one shape and dtype: their bytes if they differ; None if they do not match.

    >>> match_tensors(torch.zeros(2, dtype=torch.int64), torch.zeros(4)) is None
    False
    >>> match_tensors(torch.zeros(2), torch.zeros(3))
    """
    if target.shape == source.shape and target.dtype == source.dtype:
        return target, source
    if target.nbytes != source.nbytes or not (target.is_contiguous() and source.is_contiguous()):
        return None
    return _as_one_run(target).view(torch.uint8), _as_one_run(source).view(torch.uint8)


def check_edge(src: int, dst: int, sent: Sequence[int], wanted: Sequence[int], *, label: str) -> str | None:
    """Return what is wrong with one edge of an exchange, from the bytes of its tensors on both sides.

    >>> check_edge(0, 1, [8], [8], label="move")
    >>> check_edge(0, 1, [8], [8, 4], label="move")
    "'move': rank 0 sends [8] bytes to rank 1, which receives [8, 4]; the k-th tensors on both sides must match"
    """
    if list(sent) == list(wanted):
        return None
    return (
        f"{label!r}: rank {src} sends {list(sent)} bytes to rank {dst}, which receives {list(wanted)}; "
        "the k-th tensors on both sides must match"
    )


def check_op(op: str, dtype: torch.dtype, *, label: str) -> None:
    """Refuse an unknown reduction, or an average that the dtype cannot hold."""
    if op not in _OPS:
        raise ValueError(f"{label!r}: reduction {op!r} is unknown; use one of {', '.join(_OPS)}")
    if op == "avg" and not (dtype.is_floating_point or dtype.is_complex):
        raise ValueError(f"{label!r}: 'avg' of {dtype} would be rounded; use 'sum' or a floating dtype")


def check_gather(out: Tensor, tensor: Tensor, world_size: int, *, label: str) -> None:
    """Refuse an output whose dtype or size does not fit `world_size` inputs."""
    if out.dtype != tensor.dtype or out.numel() != world_size * tensor.numel():
        raise ValueError(
            f"{label!r}: {world_size} ranks with {tensor.numel()} elements of {tensor.dtype} each do not fill "
            f"an output of {out.numel()} elements of {out.dtype}; pass {world_size * tensor.numel()} of {tensor.dtype}"
        )


def check_scatter(out: Tensor, tensor: Tensor, world_size: int, *, label: str) -> None:
    """Refuse an input that is not `world_size` times the output."""
    if out.dtype != tensor.dtype or tensor.numel() != world_size * out.numel():
        raise ValueError(
            f"{label!r}: an input of {tensor.numel()} elements of {tensor.dtype} does not split into "
            f"{world_size} outputs of {out.numel()} elements of {out.dtype}; pass {world_size * out.numel()}"
        )


def check_member(group: RankGroup, rank: int, what: str, *, label: str) -> None:
    """Refuse a rank that is not in the group."""
    if rank not in group.ranks:
        raise ValueError(
            f"{label!r}: {what} {rank} is not in this comm ({name_ranks(group.ranks)}); "
            "ranks are numbered as in the world, not within the group"
        )


def check_subset(group: RankGroup, ranks: Sequence[int]) -> tuple[int, ...]:
    """Return the ranks of a subset in ascending order, or say why it cannot be made."""
    wanted = tuple(sorted(ranks))
    if len(set(wanted)) != len(wanted) or not set(wanted) <= set(group.ranks):
        raise ValueError(
            f"subset of {name_ranks(ranks)} of a comm over {name_ranks(group.ranks)}: "
            "pass each rank once, and only ranks of the comm"
        )
    if group.rank not in wanted:
        raise ValueError(
            f"rank {group.rank} asks for the subset of {name_ranks(wanted)} without being in it; only its members call"
        )
    return wanted


def cut_for_one_thread(*tensors: Tensor) -> Iterator[tuple[Tensor, ...]]:
    """Tensors of one shape, whole; in the background in blocks that torch computes with one thread.

    The background has no threads of OpenMP to itself: they would take cores from those of the program.

    >>> [len(block) for (block,) in cut_for_one_thread(torch.zeros(40_000))]
    [40000]
    """
    first = tensors[0]
    small = first.numel() <= REDUCE_BLOCK_ELEMENTS or first.device.type != "cpu"
    if small or not is_in_background() or not all(t.is_contiguous() for t in tensors):
        yield tensors
        return
    yield from zip(*(torch.split(t.view(-1), REDUCE_BLOCK_ELEMENTS) for t in tensors), strict=True)


def add_to(total: Tensor, other: Tensor) -> None:
    """Add a tensor in place, complex numbers part by part.

    Torch multiplies by 1 first, which makes a part of inf + 0j not a number.
    """
    if total.is_complex() and other.dtype == total.dtype and not (total.is_conj() or other.is_conj()):
        total, other = torch.view_as_real(total), torch.view_as_real(other)
    total.add_(other)


def accumulate_run(total: Tensor, other: Tensor, op: ReduceOp) -> None:
    """Fold `other` into `total`, in place."""
    if op in ("sum", "avg"):
        add_to(total, other)
    elif op == "product":
        total.mul_(other)
    elif op == "min":
        torch.minimum(total, other, out=total)
    else:
        torch.maximum(total, other, out=total)


def finish_average(total: Tensor, op: ReduceOp, count: int) -> None:
    """Turn a sum into an average where one is requested."""
    if op == "avg":
        total.div_(count)


def reduce_runs(out: Tensor, runs: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce flat tensors of one length into `out`, in the order given: every rank gets the same bits."""
    step = REDUCE_BLOCK_ELEMENTS if out.device.type == "cpu" else max(1, len(out))
    scratch = out.new_empty(min(len(out), step))
    for at in range(0, len(out), step):
        block = slice(at, at + step)
        total = scratch[: len(runs[0][block])].copy_(runs[0][block])
        for other in runs[1:]:
            accumulate_run(total, other[block], op)
        finish_average(total, op, len(runs))
        out[block].copy_(total)
