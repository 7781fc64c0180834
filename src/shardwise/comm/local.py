"""All ranks in one process: a comm whose ranks are threads and whose exchanges are copies in memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from . import _tensors as tensors
from ._meeting import Call, Hub, Job, Meeting, Room
from ._tensors import Edges
from ._work import Pending
from .errors import CommError
from .protocol import DEFAULT_TIMEOUT, ReduceOp, Work

Plan = Callable[[Mapping[int, Any]], list[Job]]


class LocalComm:
    """One rank's comm in a world of threads; see `Comm` for the methods and `run_local` to start such a world.

    >>> alone = LocalComm.alone()
    >>> alone.rank, alone.ranks, alone.process_group
    (0, (0,), None)
    """

    process_group = None

    def __init__(self, rank: int, hub: Hub, *, device: torch.device | str = "cpu", timeout: float = DEFAULT_TIMEOUT):
        self.rank, self.ranks, self._hub = rank, hub.ranks, hub
        self.device, self.timeout = torch.device(device), timeout

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> LocalComm:
        """Return the comm of a world of one rank, for a script that runs without any set-up."""
        return cls(0, Hub((0,), Room()), device=device)

    def __repr__(self) -> str:
        return f"LocalComm(rank={self.rank}, ranks={self.ranks}, device={str(self.device)!r})"

    @property
    def world_size(self) -> int:
        """How many ranks this comm has."""
        return len(self.ranks)

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], *, label: str
    ) -> Work:
        """Copy each edge's k-th sent tensor into its k-th received one."""
        outgoing = tensors.edges(self, sends, "sends to", label=label)
        incoming = tensors.edges(self, receives, "receives from", label=label)
        return self._start("exchange", label, "", (outgoing, incoming), partial(_plan_exchange, label=label))

    def all_gather(self, tensor: Tensor, *, label: str) -> list[Tensor]:
        """Return every rank's tensor, in the order of `ranks`."""
        out = tensor.detach().new_empty((self.world_size, *tensor.shape))
        self.all_gather_into(out, tensor.detach().contiguous(), label=label).wait()
        return list(out.unbind(0))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, label: str) -> Work:
        """Fill `out` with every rank's tensor."""
        tensors.check_gather(out, tensor, self.world_size, label=label)
        payload = (tensors.flat(out, label=label), tensors.flat(tensor, label=label))
        return self._start("all_gather", label, _describe(tensor), payload, _plan_gather)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce the i-th run of every rank's tensor into the i-th rank's `out`."""
        tensors.check_op(op, tensor.dtype, label=label)
        tensors.check_scatter(out, tensor, self.world_size, label=label)
        payload = (tensors.flat(out, label=label), tensors.flat(tensor, label=label))
        return self._start(
            "reduce_scatter", label, f"{op} of {_describe(out)}", payload, partial(_plan_reduce_scatter, op=op)
        )

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce a tensor over all ranks, in place."""
        tensors.check_op(op, tensor.dtype, label=label)
        detail = f"{op} of {_describe(tensor)}"
        whole = tensors.flat(tensor, label=label)
        return self._start("all_reduce", label, detail, whole, partial(_plan_all_reduce, op=op))

    def broadcast(self, tensor: Tensor, src: int, *, label: str) -> Work:
        """Overwrite the tensor of every rank with that of rank `src`."""
        tensors.check_member(self, src, "source rank", label=label)
        detail = f"{_describe(tensor)} from rank {src}"
        whole = tensors.flat(tensor, label=label)
        return self._start("broadcast", label, detail, whole, partial(_plan_broadcast, src=src))

    def barrier(self, *, label: str) -> None:
        """Return when every rank has called it."""
        self._start("barrier", label, "", None, _plan_nothing).wait()

    def subset(self, ranks: Sequence[int]) -> LocalComm:
        """Return the comm of some of these ranks; only they call it."""
        wanted = tensors.check_subset(self, ranks)
        if wanted == self.ranks:
            return self
        return LocalComm(self.rank, self._hub.child(wanted), device=self.device, timeout=self.timeout)

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        """Return every rank's bytes."""
        meeting = self._post("all_gather_bytes", label, "", data, _plan_nothing)
        self._hub.finish(self.rank, meeting, self.timeout)
        return [meeting.calls[rank].payload for rank in self.ranks]

    def _post(self, kind: str, label: str, detail: str, payload: Any, plan: Plan) -> Meeting:
        self._settle()
        return self._hub.post(self.rank, Call(kind, label, detail, payload), plan)

    def _start(self, kind: str, label: str, detail: str, payload: Any, plan: Plan) -> Work:
        meeting = self._post(kind, label, detail, payload, plan)
        return Pending(partial(self._finish, meeting))

    def _finish(self, meeting: Meeting) -> None:
        self._hub.finish(self.rank, meeting, self.timeout)
        self._settle()

    def _settle(self) -> None:
        """Let a device finish: another rank's thread may use another stream."""
        if self.device.type == "cuda":
            torch.cuda.synchronize(self.device)


def _describe(tensor: Tensor) -> str:
    return f"{tensor.numel()} elements of {str(tensor.dtype).removeprefix('torch.')}"


def _plan_nothing(payloads: Mapping[int, Any]) -> list[Job]:
    return []


def _plan_exchange(payloads: Mapping[int, tuple[Edges, Edges]], *, label: str) -> list[Job]:
    jobs: list[Job] = []
    for src, (outgoing, _) in payloads.items():
        for dst, (_, incoming) in payloads.items():
            sent, wanted = outgoing.get(dst, []), incoming.get(src, [])
            wrong = tensors.check_edge(src, dst, [len(t) for t in sent], [len(t) for t in wanted], label=label)
            if wrong:
                raise CommError(wrong, (src, dst))
            jobs += [partial(_copy, target, source) for target, source in zip(wanted, sent, strict=True)]
    return jobs


def _plan_gather(payloads: Mapping[int, tuple[Tensor, Tensor]]) -> list[Job]:
    parts = [tensor for _, tensor in payloads.values()]
    count = len(parts[0])
    return [
        partial(_copy, out[i * count : (i + 1) * count], part)
        for out, _ in payloads.values()
        for i, part in enumerate(parts)
    ]


def _plan_reduce_scatter(payloads: Mapping[int, tuple[Tensor, Tensor]], *, op: ReduceOp) -> list[Job]:
    wholes = [tensor for _, tensor in payloads.values()]
    count = len(wholes[0]) // len(wholes)
    return [
        partial(tensors.reduce_runs, out, [whole[i * count : (i + 1) * count] for whole in wholes], op)
        for i, (out, _) in enumerate(payloads.values())
    ]


def _plan_all_reduce(payloads: Mapping[int, Tensor], *, op: ReduceOp) -> list[Job]:
    pieces = zip(*(tensor.tensor_split(len(payloads)) for tensor in payloads.values()), strict=True)
    return [partial(_reduce_to_all, list(runs), op) for runs in pieces]


def _plan_broadcast(payloads: Mapping[int, Tensor], *, src: int) -> list[Job]:
    return [partial(_copy, tensor, payloads[src]) for rank, tensor in payloads.items() if rank != src]


def _copy(target: Tensor, source: Tensor) -> None:
    target.copy_(source)


def _reduce_to_all(runs: Sequence[Tensor], op: ReduceOp) -> None:
    tensors.reduce_runs(runs[0], runs, op)
    for other in runs[1:]:
        other.copy_(runs[0])
