"""What ranks that are threads do in a collective, once all have called it: independent copies and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from shardwise._torch import foreach_copy
from shardwise.comm import flat_tensors as tensors
from shardwise.comm.flat_tensors import Edges
from shardwise.comm.kernels.box_copies import copy_boxes
from shardwise.comm.protocol import CommError, OfferPlanner, ReduceOp, TakeLent
from shardwise.comm.rank_text import name_ranks

RendezvousJob = Callable[[], None]
JobPlanner = Callable[[Mapping[int, Any]], list[RendezvousJob]]
"""Makes jobs of what the ranks passed, by rank."""
T = TypeVar("T")


@dataclass(slots=True)
class MoveOffer(Generic[T]):
    """What a rank offers for a move on which the ranks are agreeing by their bytes; accepted if all offer the same."""

    data: bytes
    offer: T
    accepted: bool = False


def plan_offers(payloads: Mapping[int, Any], *, plan: OfferPlanner[Any]) -> list[RendezvousJob]:
    """The jobs of a move for which all ranks made an offer, else none."""
    listed = list(payloads.values())
    if not all(isinstance(each, MoveOffer) for each in listed) or len({each.data for each in listed}) > 1:
        return []
    for each in listed:
        each.accepted = True
    return plan([each.offer for each in listed])


def plan_nothing(payloads: Mapping[int, Any]) -> list[RendezvousJob]:
    """No jobs: the ranks only meet."""
    return []


def plan_exchange(payloads: Mapping[int, tuple[Edges, Edges]], *, label: str) -> list[RendezvousJob]:
    """A copy for each tensor of each edge."""
    jobs: list[RendezvousJob] = []
    for src, (outgoing, _) in payloads.items():
        for dst, (_, incoming) in payloads.items():
            sent, wanted = outgoing.get(dst, []), incoming.get(src, [])
            wrong = tensors.check_edge(src, dst, [len(t) for t in sent], [len(t) for t in wanted], label=label)
            if wrong:
                raise CommError(wrong, (src, dst))
            jobs += [partial(_copy_run, target, source) for target, source in zip(wanted, sent, strict=True)]
    return jobs


def plan_boxes(
    payloads: Mapping[int, tuple[Mapping[int, Sequence[Tensor]], Mapping[int, Sequence[Tensor]]]], *, label: str
) -> list[RendezvousJob]:
    """One job that copies the boxes of all ranks."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for src, (outgoing, _) in payloads.items():
        for dst, (_, incoming) in payloads.items():
            sent, wanted = outgoing.get(dst, ()), incoming.get(src, ())
            if [t.shape for t in sent] != [t.shape for t in wanted]:
                sizes = ([t.nbytes for t in sent], [t.nbytes for t in wanted])
                raise CommError(tensors.check_edge(src, dst, *sizes, label=label) or f"{label!r}: shapes", (src, dst))
            pairs += zip(wanted, sent, strict=True)
    return [partial(_copy_pairs, pairs)]


def _copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    copy_boxes(pairs)


def plan_lending(
    payloads: Mapping[int, tuple[Mapping[int, Sequence[Tensor]], set[int], TakeLent]], *, label: str
) -> list[RendezvousJob]:
    """A job for each rank, which reads what the others lend to it."""
    jobs: list[RendezvousJob] = []
    for rank, (_, receives, take) in payloads.items():
        senders = {peer for peer, (sends, _, _) in payloads.items() if rank in sends}
        if senders != receives:
            text = f"{label!r}: {name_ranks(senders)} lend to rank {rank}, which expects {sorted(receives)}"
            raise CommError(text, (rank,))
        jobs.append(partial(take, {peer: payloads[peer][0][rank] for peer in sorted(senders)}))
    return jobs


def plan_gather(payloads: Mapping[int, tuple[Tensor, Tensor]]) -> list[RendezvousJob]:
    """A copy of each rank's tensor into each output."""
    parts = [tensor for _, tensor in payloads.values()]
    count = len(parts[0])
    return [
        partial(_copy_run, out[i * count : (i + 1) * count], part)
        for out, _ in payloads.values()
        for i, part in enumerate(parts)
    ]


def plan_reduce_scatter(payloads: Mapping[int, tuple[Tensor, Tensor]], *, op: ReduceOp) -> list[RendezvousJob]:
    """A reduction for each rank's output; where few elements are reduced, or on a GPU, one for all."""
    outs, wholes = zip(*payloads.values(), strict=True)
    return plan_reduction([[out] for out in outs], wholes, op)


def plan_all_reduce(payloads: Mapping[int, Tensor], *, op: ReduceOp) -> list[RendezvousJob]:
    """A reduction for each of as many pieces as there are ranks; where few elements are reduced, or on a GPU, one."""
    wholes = list(payloads.values())
    if _is_one_job(wholes[0]):
        return plan_reduction([wholes], wholes, op)
    pieces = zip(*(whole.tensor_split(len(wholes)) for whole in wholes), strict=True)
    return [partial(_reduce_run, runs, runs, op) for runs in pieces]


def _is_one_job(whole: Tensor) -> bool:
    return whole.device.type != "cpu" or len(whole) <= tensors.REDUCE_BLOCK_ELEMENTS


def plan_reduction(outs: Sequence[Sequence[Tensor]], wholes: Sequence[Tensor], op: ReduceOp) -> list[RendezvousJob]:
    """Reduce flat tensors of one length, in the order given; each of their consecutive runs goes into some outputs."""
    if _is_one_job(wholes[0]):
        return [partial(_reduce_at_once, outs, wholes, op)]
    lengths = [len(run[0]) for run in outs]
    runs = zip(*(torch.split(whole, lengths) for whole in wholes), strict=True)
    return [partial(_reduce_run, each, terms, op) for each, terms in zip(outs, runs, strict=True)]


def _reduce_run(outs: Sequence[Tensor], terms: Sequence[Tensor], op: ReduceOp) -> None:
    tensors.reduce_runs(outs[0], terms, op)
    for other in outs[1:]:
        other.copy_(outs[0])


def _reduce_at_once(outs: Sequence[Sequence[Tensor]], wholes: Sequence[Tensor], op: ReduceOp) -> None:
    """Reduce whole tensors, then copy: few calls, each of which costs more than its elements."""
    total = wholes[0].clone()
    for other in wholes[1:]:
        tensors.accumulate_run(total, other, op)
    tensors.finish_average(total, op, len(wholes))
    runs = torch.split(total, [len(run[0]) for run in outs]) if len(outs) > 1 else [total]
    pairs = [(out, run) for each, run in zip(outs, runs, strict=True) for out in each]
    foreach_copy([out for out, _ in pairs], [run for _, run in pairs])


def plan_broadcast(payloads: Mapping[int, Tensor], *, src: int) -> list[RendezvousJob]:
    """A copy for each rank but the source."""
    return [partial(_copy_run, tensor, payloads[src]) for rank, tensor in payloads.items() if rank != src]


def _copy_run(target: Tensor, source: Tensor) -> None:
    target.copy_(source)
