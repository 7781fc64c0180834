"""All ranks in one process: a comm whose ranks are threads and whose exchanges are copies in memory.

How the threads complete a collective together (`Rendezvous`):

1. Each rank posts its call (`RendezvousHub.post`) under the next sequence number and continues.
2. The last rank to post compares all calls. If they differ, the rendezvous has failed and every rank learns which two
   calls were made; else they become jobs: independent copies or reductions.
3. `RendezvousHub.finish`, called by whoever waits, takes jobs that nobody has taken until none is left, then waits for
   the others. So a rank that posted and continued is never waited for.
4. A rank that raises or returns early is recorded in the state that all hubs of the world share; waiting ranks wake.

On a GPU a job only queues work. So the last rank to post does all of them at once, on its stream, which waits for the
streams of the others; they wait for it in turn. Nobody waits for the device, and boxes are read in place.
Jobs of few bytes are also done at once on the CPU: to share them takes longer.

What ranks that are threads do in a collective, once all have called it: independent copies and reductions.

The order of work on a GPU that ranks share as threads: streams wait for each other only where they differ.

A stream is known here by its handle, a number that is read much faster than torch makes an object of it.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, Generic, NoReturn, TypeVar, cast

import torch
from torch import Tensor

from shardwise._torch import current_raw_stream, foreach_copy
from shardwise.comm import flat_tensors as tensors
from shardwise.comm.agree import agree_on_request, fold_texts, name_ranks
from shardwise.comm.flat_tensors import Edges
from shardwise.comm.protocol import (
    DEFAULT_TIMEOUT,
    Capabilities,
    Combine,
    Comm,
    CommError,
    OfferPlanner,
    PendingWork,
    ReduceOp,
    Request,
    TensorsByRank,
    Work,
)
from shardwise.comm.transports.kernels import copy_boxes

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
            matched = [tensors.match_tensors(*pair) for pair in zip(wanted, sent, strict=False)]
            if None in matched or len(sent) != len(wanted):
                sizes = ([t.nbytes for t in sent], [t.nbytes for t in wanted])
                raise CommError(tensors.check_edge(src, dst, *sizes, label=label) or f"{label!r}: shapes", (src, dst))
            pairs += cast(list[tuple[Tensor, Tensor]], matched)
    return [partial(_copy_pairs, pairs)]


def _copy_pairs(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    copy_boxes(pairs)


def plan_combining(
    payloads: Mapping[int, tuple[TensorsByRank, TensorsByRank, Combine]], *, label: str
) -> list[RendezvousJob]:
    """A job for each rank, which reads what the others send to it."""
    jobs: list[RendezvousJob] = []
    for rank, (_, receives, combine) in payloads.items():
        senders = {peer for peer, (sends, _, _) in payloads.items() if rank in sends}
        if senders != set(receives):
            text = f"{label!r}: {name_ranks(senders)} send to rank {rank}, which expects {sorted(receives)}"
            raise CommError(text, (rank,))
        jobs.append(partial(combine, {peer: payloads[peer][0][rank] for peer in sorted(senders)}))
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


def plan_all_reduce(payloads: Mapping[int, tuple[Tensor, Tensor]], *, op: ReduceOp) -> list[RendezvousJob]:
    """A reduction for each of as many pieces as there are ranks; where few elements are reduced, or on a GPU, one."""
    outs, wholes = zip(*payloads.values(), strict=True)
    if _is_one_job(wholes[0]):
        return plan_reduction([outs], wholes, op)
    cuts = (zip(*(run.tensor_split(len(runs)) for run in runs), strict=True) for runs in (outs, wholes))
    return [partial(_reduce_run, into, terms, op) for into, terms in zip(*cuts, strict=True)]


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


_DEFAULT = 0  # the handle of every device's default stream


def find_stream(device: torch.device) -> int | None:
    """The handle of this thread's stream of a device; None on the CPU."""
    if device.type != "cuda":
        return None
    index = cast("int | None", device.index)  # torch's types know no device without one
    return current_raw_stream(torch.cuda.current_device() if index is None else index)


def wait_for_streams(device: torch.device, stream: int, others: Iterable[int | None]) -> None:
    """Have a stream wait for those of other ranks; if there are any, also for the default stream.

    Ranks that use streams of their own still share tensors that were made on the default one.
    """
    different = {other for other in others if other is not None} - {stream}
    for other in (different | {_DEFAULT}) - {stream} if different else ():
        _open_stream(device, stream).wait_stream(_open_stream(device, other))


def follow_stream(device: torch.device, stream: int, done: int | None) -> None:
    """Have a stream follow the one on which work was done for it, and the default stream follow both."""
    if done is not None and done != stream:
        _open_stream(device, stream).wait_stream(_open_stream(device, done))
    if stream != _DEFAULT:
        _open_stream(device, _DEFAULT).wait_stream(_open_stream(device, stream))


def _open_stream(device: torch.device, handle: int) -> Any:
    if handle == _DEFAULT:
        return torch.cuda.default_stream(device)
    return torch.cuda.ExternalStream(handle, device=device)  # type: ignore[no-untyped-call]  # untyped in torch


_AGREEMENT = "all_gather_bytes"
_MANY_BYTES = 1 << 62  # uncounted
_ON_HOST, _ON_DEVICE = Capabilities(fuses_moves=True), Capabilities(fuses_moves=True, reads_peers=True)
AT_ONCE_BYTES = 1 << 18  # that ranks on the CPU pass together in a call that its last rank completes for all of them


def default_device() -> torch.device:
    """Return torch's default device, or the CPU if that is "meta": tensors without data are not moved."""
    device = find_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def number_device(device: torch.device | str) -> torch.device:
    """Return a device with its number: "cuda" is the current GPU, as tensors that are made there say.

    >>> number_device("cpu")
    device(type='cpu')
    """
    device = torch.device(device)
    number: Any = device.index  # None where there is none, which torch's types do not say
    if number is not None or device.type in ("cpu", "meta"):
        return device
    return torch.device(device.type, torch.get_device_module(device).current_device())


def find_default_device() -> torch.device:
    """Return where torch makes tensors on this thread if no device is named, "meta" included."""
    return torch.empty(0).device


@dataclass(slots=True)
class CollectiveCall:
    """What one rank requests; calls of one meeting must agree in kind, label and detail."""

    kind: str
    label: str
    detail: str
    payload: Any
    nbytes: int = 0
    stream: int | None = None  # of the device

    def __str__(self) -> str:
        return tensors.describe_call(self.kind, self.label, self.detail)


@dataclass
class ThreadWorldState:
    """What all ranks of one world share: the lock, who failed, who has returned, their device."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    failure: tuple[int, BaseException] | None = None
    left: set[int] = field(default_factory=set)
    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    def __post_init__(self) -> None:
        self.changed = threading.Condition(self.lock)

    def fail(self, rank: int, error: BaseException) -> None:
        """Record the first failure and wake everybody."""
        with self.changed:
            self.failure = self.failure or (rank, error)
            self.changed.notify_all()

    def leave(self, rank: int) -> None:
        """Record that a rank will call nothing more."""
        with self.changed:
            self.left.add(rank)
            self.changed.notify_all()


@dataclass(slots=True)
class Rendezvous:
    """One collective: the calls so far, then its jobs."""

    calls: dict[int, CollectiveCall] = field(default_factory=dict)
    jobs: list[RendezvousJob] = field(default_factory=list)
    complete: bool = False
    running: int = 0
    error: CommError | None = None
    stream: int | None = None  # of a device on which the jobs were queued


class RendezvousHub:
    """The meetings of one group of ranks of a world of threads."""

    def __init__(self, ranks: tuple[int, ...], world: ThreadWorldState) -> None:
        self.ranks, self.world = ranks, world
        self._posted = dict.fromkeys(ranks, 0)
        self._open: dict[int, Rendezvous] = {}
        self._children: dict[tuple[int, ...], RendezvousHub] = {}

    def child(self, ranks: tuple[int, ...]) -> RendezvousHub:
        """Return the hub of a subset, the same one for all its members."""
        with self.world.lock:
            return self._children.setdefault(ranks, RendezvousHub(ranks, self.world))

    def post(
        self, rank: int, call: CollectiveCall, plan: Callable[[Mapping[int, Any]], list[RendezvousJob]]
    ) -> Rendezvous:
        """Add one rank's call to its next meeting; the last one turns the calls into jobs."""
        with self.world.lock:
            number = self._posted[rank]
            self._posted[rank] = number + 1
            meeting = self._open.get(number)
            if meeting is None:
                meeting = self._open[number] = Rendezvous()
            meeting.calls[rank] = call
            if len(meeting.calls) == len(self.ranks):
                del self._open[number]
                self._close(meeting, call, plan)
            return meeting

    def _close(
        self,
        meeting: Rendezvous,
        call: CollectiveCall,
        plan: Callable[[Mapping[int, Any]], list[RendezvousJob]],
    ) -> None:
        meeting.error = meeting.error or _mismatch_error(meeting.calls)
        if meeting.error is None:
            try:
                meeting.jobs = plan({rank: meeting.calls[rank].payload for rank in self.ranks})
            except CommError as error:
                meeting.error = error
        if call.stream is not None:
            self._queue_jobs(meeting, call.stream)
        elif sum(call.nbytes for call in meeting.calls.values()) <= AT_ONCE_BYTES:
            _run_at_once(meeting)
        meeting.complete = True
        self.world.changed.notify_all()

    def _queue_jobs(self, meeting: Rendezvous, stream: int) -> None:
        """Do all jobs on one stream, after what the streams of all ranks have to do."""
        wait_for_streams(self.world.device, stream, [call.stream for call in meeting.calls.values()])
        _run_at_once(meeting)
        meeting.stream = stream

    def finish(self, rank: int, meeting: Rendezvous, timeout: float) -> None:
        """Return when the meeting's jobs are done, doing those that nobody does; raise if it cannot be completed."""
        if not meeting.complete or meeting.jobs or meeting.running:
            self._complete(rank, meeting, timeout)
        if meeting.error is not None:
            raise CommError(str(meeting.error), meeting.error.ranks) from meeting.error.__cause__

    def _complete(self, rank: int, meeting: Rendezvous, timeout: float) -> None:
        deadline = time.monotonic() + timeout
        if not meeting.complete:
            with self.world.lock:
                while not meeting.complete:
                    self._check(rank, meeting)
                    if not self.world.changed.wait(max(0.0, deadline - time.monotonic())):
                        absent = self._absent_ranks(meeting)
                        self._give_up(meeting, _absence_error(meeting.calls[rank], absent, f"within {timeout:g} s"))
        self._run_jobs(meeting)
        if not meeting.running:
            return
        with self.world.lock:
            while meeting.running and meeting.error is None:
                if not self.world.changed.wait(max(0.0, deadline - time.monotonic())):
                    self._give_up(meeting, CommError(f"{meeting.calls[rank]}: copying took longer than {timeout:g} s"))

    def _give_up(self, meeting: Rendezvous, error: CommError) -> NoReturn:
        """End a meeting for all its ranks: a late one must not read what this rank's program writes from now on."""
        meeting.error = meeting.error or error
        self.world.changed.notify_all()
        raise error

    def _run_jobs(self, meeting: Rendezvous) -> None:
        """Do jobs that nobody does. Others look at `jobs`, then at `running`, without the lock."""
        while meeting.jobs:
            with self.world.lock:
                if not meeting.jobs or meeting.error is not None:
                    return
                meeting.running += 1
                job = meeting.jobs.pop()
            error = _run_job(job, meeting)
            with self.world.lock:
                meeting.error = error or meeting.error
                meeting.running -= 1
                if not meeting.running:
                    self.world.changed.notify_all()

    def _check(self, rank: int, meeting: Rendezvous) -> None:
        call = meeting.calls[rank]
        if meeting.error is not None:
            raise CommError(str(meeting.error), meeting.error.ranks)
        if self.world.failure is not None:
            who, error = self.world.failure
            if isinstance(error, CommError):
                raise CommError(str(error), error.ranks) from error
            raise CommError(f"{call}: rank {who} raised {type(error).__name__}: {error}", (who,)) from error
        gone = [r for r in self.ranks if r in self.world.left and r not in meeting.calls]
        if gone:
            raise _absence_error(call, gone, "before it returned")

    def _absent_ranks(self, meeting: Rendezvous) -> list[int]:
        return [r for r in self.ranks if r not in meeting.calls]


def _absence_error(call: CollectiveCall, absent: list[int], until: str) -> CommError:
    text = f"{call}: {name_ranks(absent)} did not take part {until}; every rank must make the same calls"
    return CommError(text, tuple(absent))


def _run_at_once(meeting: Rendezvous) -> None:
    while meeting.jobs and meeting.error is None:
        meeting.error = _run_job(meeting.jobs.pop(), meeting)


def _run_job(job: RendezvousJob, meeting: Rendezvous) -> CommError | None:
    try:
        job()
    except Exception as cause:
        error = CommError(f"{next(iter(meeting.calls.values()))}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error
    return None


def _mismatch_error(calls: Mapping[int, CollectiveCall]) -> CommError | None:
    first, *others = calls.values()
    asked = first.kind, first.label, first.detail
    if all((call.kind, call.label, call.detail) == asked for call in others):
        return None
    texts = {rank: str(calls[rank]) for rank in sorted(calls)}
    who = fold_texts(texts)
    return CommError(f"the ranks made different calls ({who}); every rank must make the same calls in the same order")


class LocalComm(Comm):
    """One rank's comm in a world of threads; see `Comm` for the methods and `run_local` to start such a world.

    >>> alone = LocalComm.alone()
    >>> alone.rank, alone.ranks, alone.process_group
    (0, (0,), None)
    """

    def __init__(
        self, rank: int, hub: RendezvousHub, *, device: torch.device | str = "cpu", timeout: float = DEFAULT_TIMEOUT
    ):
        self.rank, self.ranks, self._hub = rank, hub.ranks, hub
        self.device, self.timeout = number_device(device), timeout

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> LocalComm:
        """Return the comm of a world of one rank, for a script that runs without any set-up."""
        return cls(0, RendezvousHub((0,), ThreadWorldState(device=torch.device(device))), device=device)

    def __repr__(self) -> str:
        return f"LocalComm(rank={self.rank}, ranks={self.ranks}, device={str(self.device)!r})"

    @property
    def capabilities(self) -> Capabilities:
        """On a GPU, where a copy only has to be queued, boxes are read where they are."""
        return _ON_DEVICE if self.device.type == "cuda" else _ON_HOST

    def exchange(
        self,
        sends: TensorsByRank,
        receives: TensorsByRank,
        *,
        label: str,
        request: Request | None = None,
        combine: Combine | None = None,
    ) -> Work:
        """Copy each edge's k-th sent tensor into its k-th received one."""
        if request is not None:
            agree_on_request(self, request, label=label)
        if combine is not None:
            payload = sends, receives, combine
            planner = partial(plan_combining, label=label)
            return self._start("exchange", label, "combined", payload, planner, _MANY_BYTES)
        if self.capabilities.reads_peers:
            sends, receives = tensors.nonempty_edges(self, sends, receives, label=label)
            return self._start("exchange", label, "", (sends, receives), partial(plan_boxes, label=label), _MANY_BYTES)
        outgoing = tensors.check_edges(self, sends, "sends to", label=label)
        incoming = tensors.check_edges(self, receives, "receives from", label=label)
        nbytes = sum(len(run) for edges in (outgoing, incoming) for runs in edges.values() for run in runs)
        return self._start("exchange", label, "", (outgoing, incoming), partial(plan_exchange, label=label), nbytes)

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, label: str) -> Work:
        """Fill `out` with every rank's tensor."""
        tensors.check_gather(out, tensor, self.world_size, label=label)
        payload = (tensors.flatten_contiguous(out, label=label), tensors.flatten_contiguous(tensor, label=label))
        return self._start("all_gather", label, tensors.describe_run(tensor), payload, plan_gather, out.nbytes)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce the i-th run of every rank's tensor into the i-th rank's `out`."""
        tensors.check_op(op, tensor.dtype, label=label)
        tensors.check_scatter(out, tensor, self.world_size, label=label)
        payload = (tensors.flatten_contiguous(out, label=label), tensors.flatten_contiguous(tensor, label=label))
        return self._start(
            "reduce_scatter",
            label,
            f"{op} of {tensors.describe_run(out)}",
            payload,
            partial(plan_reduce_scatter, op=op),
            tensor.nbytes,
        )

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce a tensor over all ranks into `out`, which may be the tensor itself."""
        tensors.check_op(op, tensor.dtype, label=label)
        detail = f"{op} of {tensors.describe_run(tensor)}"
        whole = tensors.flatten_contiguous(tensor, label=label)
        payload = whole if out is tensor else tensors.flatten_contiguous(out, label=label), whole
        return self._start("all_reduce", label, detail, payload, partial(plan_all_reduce, op=op), tensor.nbytes)

    def broadcast(self, tensor: Tensor, src: int, *, label: str) -> Work:
        """Overwrite the tensor of every rank with that of rank `src`."""
        tensors.check_member(self, src, "source rank", label=label)
        detail = f"{tensors.describe_run(tensor)} from rank {src}"
        whole = tensors.flatten_contiguous(tensor, label=label)
        return self._start("broadcast", label, detail, whole, partial(plan_broadcast, src=src), tensor.nbytes)

    def barrier(self, *, label: str) -> None:
        """Return when every rank has called it."""
        self._start("barrier", label, "", None, plan_nothing).wait()

    def subset(self, ranks: Sequence[int]) -> LocalComm:
        """Return the comm of some of these ranks; only they call it."""
        wanted = tensors.check_subset(self, ranks)
        if wanted == self.ranks:
            return self
        return LocalComm(self.rank, self._hub.child(wanted), device=self.device, timeout=self.timeout)

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        """Return every rank's bytes."""
        meeting = self._hub.post(self.rank, CollectiveCall(_AGREEMENT, label, "", data), plan_nothing)
        self._hub.finish(self.rank, meeting, self.timeout)
        return self._list_bytes(meeting)

    def agree_and_run(
        self, data: bytes, offer: T, plan: OfferPlanner[T], nbytes: int, *, label: str
    ) -> tuple[list[bytes], bool]:
        """Gather bytes, and do what the ranks offer if all of them do and all bytes agree."""
        payload = MoveOffer(data, offer)
        call = CollectiveCall(_AGREEMENT, label, "", payload, nbytes, find_stream(self.device))
        meeting = self._hub.post(self.rank, call, partial(plan_offers, plan=plan))
        self._finish(meeting)
        return self._list_bytes(meeting), payload.accepted

    def _list_bytes(self, meeting: Rendezvous) -> list[bytes]:
        payloads = [meeting.calls[rank].payload for rank in self.ranks]
        return [each.data if isinstance(each, MoveOffer) else each for each in payloads]

    def _start(self, kind: str, label: str, detail: str, payload: Any, plan: JobPlanner, nbytes: int = 0) -> Work:
        call = CollectiveCall(kind, label, detail, payload, nbytes, find_stream(self.device))
        return PendingWork(partial(self._finish, self._hub.post(self.rank, call, plan)))

    def _finish(self, meeting: Rendezvous) -> None:
        self._hub.finish(self.rank, meeting, self.timeout)
        stream = find_stream(self.device)
        if stream is not None:
            follow_stream(self.device, stream, meeting.stream)
