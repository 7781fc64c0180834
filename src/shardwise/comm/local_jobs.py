"""What ranks that are threads do in a collective, once all have called it: independent copies and reductions."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import Tensor

from shardwise.comm import flat_tensors as tensors
from shardwise.comm.box_copies import copy_boxes
from shardwise.comm.flat_tensors import Edges
from shardwise.comm.protocol import CommError, ReduceOp, TakeLent
from shardwise.comm.rank_text import name_ranks

RendezvousJob = Callable[[], None]
JobPlanner = Callable[[Mapping[int, Any]], list[RendezvousJob]]
"""Makes jobs of what the ranks passed, by rank."""


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
    """A reduction for each rank's output."""
    wholes = [tensor for _, tensor in payloads.values()]
    count = len(wholes[0]) // len(wholes)
    return [
        partial(tensors.reduce_runs, out, [whole[i * count : (i + 1) * count] for whole in wholes], op)
        for i, (out, _) in enumerate(payloads.values())
    ]


def plan_all_reduce(payloads: Mapping[int, Tensor], *, op: ReduceOp) -> list[RendezvousJob]:
    """A reduction for each of as many pieces as there are ranks."""
    pieces = zip(*(tensor.tensor_split(len(payloads)) for tensor in payloads.values()), strict=True)
    return [partial(_reduce_to_all, list(runs), op) for runs in pieces]


def plan_broadcast(payloads: Mapping[int, Tensor], *, src: int) -> list[RendezvousJob]:
    """A copy for each rank but the source."""
    return [partial(_copy_run, tensor, payloads[src]) for rank, tensor in payloads.items() if rank != src]


def _copy_run(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _reduce_to_all(runs: Sequence[Tensor], op: ReduceOp) -> None:
    tensors.reduce_runs(runs[0], runs, op)
    for other in runs[1:]:
        other.copy_(runs[0])
