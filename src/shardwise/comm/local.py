"""All ranks in one process: a comm whose ranks are threads and whose exchanges are copies in memory.

How the threads complete a collective together (`Rendezvous`):

1. Each rank posts its call (`RendezvousHub.post`) under the next sequence number and continues.
2. The last rank to post compares all calls. If they differ, the rendezvous has failed and every rank learns which two
   calls were made; else they become jobs: independent copies or reductions.
3. `RendezvousHub.finish`, called by whoever waits, takes jobs that nobody has taken until none is left, then waits for
   the others. So a rank that posted and continued is never waited for.
4. A rank that raises or returns early is recorded in the state that all hubs of the world share; waiting ranks wake.

On a GPU a job only queues work. So the last rank to post does all of them at once, on its stream, which waits for the
streams of the others; they wait for it in turn. Nobody waits for the device, and boxes are read in place (`lend`).
There ranks take turns (`TurnTaking`): Python runs one thread at a time, and each call of torch lets another one in,
which costs more than the call. Jobs of few bytes are also done at once on the CPU: to share them takes longer.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self, TypeVar

import torch
from torch import Tensor

from shardwise.comm import flat_tensors as tensors
from shardwise.comm.protocol import (
    BOXES,
    DEFAULT_TIMEOUT,
    LENT,
    CommError,
    OfferPlanner,
    PendingWork,
    ReduceOp,
    TakeLent,
    Work,
)
from shardwise.comm.rank_text import fold_texts, name_ranks
from shardwise.comm.threads.jobs import (
    JobPlanner,
    MoveOffer,
    RendezvousJob,
    plan_all_reduce,
    plan_boxes,
    plan_broadcast,
    plan_exchange,
    plan_gather,
    plan_lending,
    plan_nothing,
    plan_offers,
    plan_reduce_scatter,
)
from shardwise.comm.threads.streams import find_stream, follow_stream, wait_for_streams
from shardwise.comm.threads.turns import TurnTaking
from shardwise.transfer.device_cost import DeviceTraffic

_AGREEMENT = "all_gather_bytes"
_MANY_BYTES = 1 << 62  # uncounted
AT_ONCE_BYTES = 1 << 18  # that ranks on the CPU pass together in a call that its last rank completes for all of them
T = TypeVar("T")


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
    """What all ranks of one world share: the lock, who failed, who has returned, their device, whose turn it is."""

    lock: threading.RLock = field(default_factory=threading.RLock)
    changed: threading.Condition = field(init=False)
    failure: tuple[int, BaseException] | None = None
    left: set[int] = field(default_factory=set)
    turns: TurnTaking | None = None
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
        if self.turns is not None:
            self.turns.pass_on()


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

    def __init__(self, ranks: tuple[int, ...], room: ThreadWorldState) -> None:
        self.ranks, self.room = ranks, room
        self._posted = dict.fromkeys(ranks, 0)
        self._open: dict[int, Rendezvous] = {}
        self._children: dict[tuple[int, ...], RendezvousHub] = {}

    def child(self, ranks: tuple[int, ...]) -> RendezvousHub:
        """Return the hub of a subset, the same one for all its members."""
        with self.room.lock:
            return self._children.setdefault(ranks, RendezvousHub(ranks, self.room))

    def post(
        self, rank: int, call: CollectiveCall, plan: Callable[[Mapping[int, Any]], list[RendezvousJob]]
    ) -> Rendezvous:
        """Add one rank's call to its next meeting; the last one turns the calls into jobs."""
        with self.room.lock:
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
        if self.room.turns is None:
            self.room.changed.notify_all()

    def _queue_jobs(self, meeting: Rendezvous, stream: int) -> None:
        """Do all jobs on one stream, after what the streams of all ranks have to do."""
        wait_for_streams(self.room.device, stream, [call.stream for call in meeting.calls.values()])
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
        if self.room.turns is not None:
            self._wait_for_turn(rank, meeting, deadline, self.room.turns)
        if not meeting.complete:
            with self.room.lock:
                while not meeting.complete:
                    self._check(rank, meeting)
                    if not self.room.changed.wait(max(0.0, deadline - time.monotonic())):
                        absent = self._absent_ranks(meeting)
                        self._give_up(meeting, _absence_error(meeting.calls[rank], absent, f"within {timeout:g} s"))
        self._run_jobs(meeting)
        if not meeting.running:
            return
        with self.room.lock:
            while meeting.running and meeting.error is None:
                if not self.room.changed.wait(max(0.0, deadline - time.monotonic())):
                    self._give_up(meeting, CommError(f"{meeting.calls[rank]}: copying took longer than {timeout:g} s"))

    def _wait_for_turn(self, rank: int, meeting: Rendezvous, deadline: float, turns: TurnTaking) -> None:
        """Return when the meeting is complete or the time is over."""
        while not meeting.complete and (left := deadline - time.monotonic()) > 0:
            turns.wait(rank, meeting, left)
            if not meeting.complete:
                with self.room.lock:
                    self._check(rank, meeting)

    def _give_up(self, meeting: Rendezvous, error: CommError) -> NoReturn:
        """End a meeting for all its ranks: a late one must not read what this rank's program writes from now on."""
        meeting.error = meeting.error or error
        self.room.changed.notify_all()
        raise error

    def _run_jobs(self, meeting: Rendezvous) -> None:
        """Do jobs that nobody does. Others look at `jobs`, then at `running`, without the lock."""
        while meeting.jobs:
            with self.room.lock:
                if not meeting.jobs or meeting.error is not None:
                    return
                meeting.running += 1
                job = meeting.jobs.pop()
            error = _run_job(job, meeting)
            with self.room.lock:
                meeting.error = error or meeting.error
                meeting.running -= 1
                if not meeting.running:
                    self.room.changed.notify_all()

    def _check(self, rank: int, meeting: Rendezvous) -> None:
        call = meeting.calls[rank]
        if meeting.error is not None:
            raise CommError(str(meeting.error), meeting.error.ranks)
        if self.room.failure is not None:
            who, error = self.room.failure
            if isinstance(error, CommError):
                raise CommError(str(error), error.ranks) from error
            raise CommError(f"{call}: rank {who} raised {type(error).__name__}: {error}", (who,)) from error
        gone = [r for r in self.ranks if r in self.room.left and r not in meeting.calls]
        if gone:
            raise _absence_error(call, gone, "before it returned")

    def _absent_ranks(self, meeting: Rendezvous) -> list[int]:
        return [r for r in self.ranks if r not in meeting.calls]


def _absence_error(call: CollectiveCall, absent: list[int], until: str) -> CommError:
    return CommError(f"{call}: {name_ranks(absent)} did not take part {until}", tuple(absent))


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


class LocalComm:
    """One rank's comm in a world of threads; see `Comm` for the methods and `run_local` to start such a world.

    >>> alone = LocalComm.alone()
    >>> alone.rank, alone.ranks, alone.process_group
    (0, (0,), None)
    """

    process_group = None
    takes_offers = True

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

    def __deepcopy__(self, memo: object) -> Self:
        """The same: a comm is how this process reaches others, of which a copy has no more."""
        return self

    @property
    def world_size(self) -> int:
        """How many ranks this comm has."""
        return len(self.ranks)

    def find_topology(self) -> None:
        """All ranks share a host: there is none."""

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], *, label: str
    ) -> Work:
        """Copy each edge's k-th sent tensor into its k-th received one."""
        outgoing = tensors.check_edges(self, sends, "sends to", label=label)
        incoming = tensors.check_edges(self, receives, "receives from", label=label)
        nbytes = sum(len(run) for edges in (outgoing, incoming) for runs in edges.values() for run in runs)
        return self._start("exchange", label, "", (outgoing, incoming), partial(plan_exchange, label=label), nbytes)

    @property
    def lends_memory(self) -> bool:
        """Whether boxes are read where they are: on a GPU, where a copy only has to be queued."""
        return self.device.type == "cuda"

    def prefers_lending(self, count: Callable[[], DeviceTraffic | None]) -> bool:
        """Threads have nothing faster."""
        return True

    def exchange_boxes(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], *, label: str
    ) -> Work:
        """Copy tensors of any strides, all ranks' in one job."""
        return self._start("exchange", label, BOXES, (sends, receives), partial(plan_boxes, label=label), _MANY_BYTES)

    def lend(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Iterable[int], take: TakeLent, *, label: str
    ) -> Work:
        """Lend tensors to other ranks, and read what they lend."""
        payload = sends, set(receives), take
        return self._start("exchange", label, LENT, payload, partial(plan_lending, label=label), _MANY_BYTES)

    def all_gather(self, tensor: Tensor, *, label: str) -> list[Tensor]:
        """Return every rank's tensor, in the order of `ranks`."""
        out = tensor.detach().new_empty((self.world_size, *tensor.shape))
        self.all_gather_into(out, tensor.detach().contiguous(), label=label).wait()
        return list(out.unbind(0))

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

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce a tensor over all ranks, in place."""
        tensors.check_op(op, tensor.dtype, label=label)
        detail = f"{op} of {tensors.describe_run(tensor)}"
        whole = tensors.flatten_contiguous(tensor, label=label)
        return self._start("all_reduce", label, detail, whole, partial(plan_all_reduce, op=op), tensor.nbytes)

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
