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
which costs more than the call.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NoReturn, Self

import torch
from torch import Tensor

from shardwise.comm import flat_tensors as tensors
from shardwise.comm.local_jobs import (
    JobPlanner,
    RendezvousJob,
    plan_all_reduce,
    plan_boxes,
    plan_broadcast,
    plan_exchange,
    plan_gather,
    plan_lending,
    plan_nothing,
    plan_reduce_scatter,
)
from shardwise.comm.protocol import BOXES, DEFAULT_TIMEOUT, LENT, CommError, PendingWork, ReduceOp, TakeLent, Work
from shardwise.comm.rank_text import fold_texts, name_ranks
from shardwise.comm.turns import TurnTaking
from shardwise.transfer.device_cost import DeviceTraffic


def default_device() -> torch.device:
    """Return torch's default device, or the CPU if that is "meta": tensors without data are not moved."""
    device = find_default_device()
    return torch.device("cpu") if device.type == "meta" else device


def find_default_device() -> torch.device:
    """Return where torch makes tensors on this thread if no device is named, "meta" included."""
    return torch.empty(0).device


@dataclass(frozen=True)
class CollectiveCall:
    """What one rank requests; calls of one meeting must agree in all but the payload."""

    kind: str
    label: str
    detail: str
    payload: Any
    stream: Any = None

    def __str__(self) -> str:
        return tensors.describe_call(self.kind, self.label, self.detail)


@dataclass
class ThreadWorldState:
    """What all ranks of one world share: the lock, who failed, who has returned, and whether they take turns."""

    changed: threading.Condition = field(default_factory=threading.Condition)
    failure: tuple[int, BaseException] | None = None
    left: set[int] = field(default_factory=set)
    turns: TurnTaking | None = None

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


@dataclass
class Rendezvous:
    """One collective: the calls so far, then its jobs."""

    calls: dict[int, CollectiveCall] = field(default_factory=dict)
    jobs: list[RendezvousJob] = field(default_factory=list)
    complete: bool = False
    running: int = 0
    error: CommError | None = None
    stream: Any = None  # of a device on which the jobs were queued


class RendezvousHub:
    """The meetings of one group of ranks of a world of threads."""

    def __init__(self, ranks: tuple[int, ...], room: ThreadWorldState) -> None:
        self.ranks, self.room = ranks, room
        self._posted = dict.fromkeys(ranks, 0)
        self._open: dict[int, Rendezvous] = {}
        self._children: dict[tuple[int, ...], RendezvousHub] = {}

    def child(self, ranks: tuple[int, ...]) -> RendezvousHub:
        """Return the hub of a subset, the same one for all its members."""
        with self.room.changed:
            return self._children.setdefault(ranks, RendezvousHub(ranks, self.room))

    def post(
        self, rank: int, call: CollectiveCall, plan: Callable[[Mapping[int, Any]], list[RendezvousJob]]
    ) -> Rendezvous:
        """Add one rank's call to its next meeting; the last one turns the calls into jobs."""
        with self.room.changed:
            number = self._posted[rank]
            self._posted[rank] += 1
            meeting = self._open.setdefault(number, Rendezvous())
            meeting.calls[rank] = call
            if len(meeting.calls) == len(self.ranks):
                del self._open[number]
                self._close(meeting, call, plan)
            return meeting

    def last_call(self, rank: int) -> int:
        """Return the number of a rank's last call."""
        return self._posted[rank] - 1

    def withdraw(self, rank: int, number: int) -> None:
        """Take back a call that a rank has posted or not; all ranks withdraw it, and none waits for it."""
        with self.room.changed:
            self._posted[rank] = number + 1
            self._open.pop(number, None)

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
        meeting.complete = True
        if self.room.turns is None:
            self.room.changed.notify_all()

    def _queue_jobs(self, meeting: Rendezvous, stream: Any) -> None:
        """Do all jobs on one stream, after what the streams of all ranks have to do."""
        others = {call.stream for call in meeting.calls.values()} - {stream, None}
        for other in others | ({_default_stream(stream)} if others else set()):
            stream.wait_stream(other)
        while meeting.jobs and meeting.error is None:
            meeting.error = _run_job(meeting.jobs.pop(), meeting)
        meeting.stream = stream

    def finish(self, rank: int, meeting: Rendezvous, timeout: float) -> None:
        """Return when the meeting's jobs are done, doing those that nobody does; raise if it cannot be completed."""
        deadline = time.monotonic() + timeout
        if self.room.turns is not None:
            self._wait_for_turn(rank, meeting, deadline, self.room.turns)
        with self.room.changed:
            while not meeting.complete:
                self._check(rank, meeting)
                if not self.room.changed.wait(max(0.0, deadline - time.monotonic())):
                    absent = self._absent_ranks(meeting)
                    self._give_up(meeting, _absence_error(meeting.calls[rank], absent, f"within {timeout:g} s"))
        if meeting.jobs or meeting.running:
            self._run_jobs(meeting)
        with self.room.changed:
            while meeting.running and meeting.error is None:
                if not self.room.changed.wait(max(0.0, deadline - time.monotonic())):
                    self._give_up(meeting, CommError(f"{meeting.calls[rank]}: copying took longer than {timeout:g} s"))
            if meeting.error is not None:
                raise CommError(str(meeting.error), meeting.error.ranks) from meeting.error.__cause__

    def _wait_for_turn(self, rank: int, meeting: Rendezvous, deadline: float, turns: TurnTaking) -> None:
        """Return when the meeting is complete or the time is over."""
        while not meeting.complete and (left := deadline - time.monotonic()) > 0:
            with self.room.changed:
                self._check(rank, meeting)
            turns.wait(rank, meeting, left)

    def _give_up(self, meeting: Rendezvous, error: CommError) -> NoReturn:
        """End a meeting for all its ranks: a late one must not read what this rank's program writes from now on."""
        meeting.error = meeting.error or error
        self.room.changed.notify_all()
        raise error

    def _run_jobs(self, meeting: Rendezvous) -> None:
        while True:
            with self.room.changed:
                if not meeting.jobs or meeting.error is not None:
                    return
                job = meeting.jobs.pop()
                meeting.running += 1
            error = _run_job(job, meeting)
            with self.room.changed:
                meeting.running -= 1
                if error is not None:
                    meeting.error = error
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


def _run_job(job: RendezvousJob, meeting: Rendezvous) -> CommError | None:
    try:
        job()
    except Exception as cause:
        error = CommError(f"{next(iter(meeting.calls.values()))}: {type(cause).__name__}: {cause}")
        error.__cause__ = cause
        return error
    return None


def _mismatch_error(calls: Mapping[int, CollectiveCall]) -> CommError | None:
    texts = {rank: str(calls[rank]) for rank in sorted(calls)}
    if len(set(texts.values())) == 1:
        return None
    who = fold_texts(texts)
    return CommError(f"the ranks made different calls ({who}); every rank must make the same calls in the same order")


class LocalComm:
    """One rank's comm in a world of threads; see `Comm` for the methods and `run_local` to start such a world.

    >>> alone = LocalComm.alone()
    >>> alone.rank, alone.ranks, alone.process_group
    (0, (0,), None)
    """

    process_group = None

    def __init__(
        self, rank: int, hub: RendezvousHub, *, device: torch.device | str = "cpu", timeout: float = DEFAULT_TIMEOUT
    ):
        self.rank, self.ranks, self._hub = rank, hub.ranks, hub
        self.device, self.timeout = torch.device(device), timeout
        self._agreed_call = 0  # the number of the last call in which bytes were gathered

    @classmethod
    def alone(cls, device: torch.device | str = "cpu") -> LocalComm:
        """Return the comm of a world of one rank, for a script that runs without any set-up."""
        return cls(0, RendezvousHub((0,), ThreadWorldState()), device=device)

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
        return self._start("exchange", label, "", (outgoing, incoming), partial(plan_exchange, label=label))

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
        return self._start("exchange", label, BOXES, (sends, receives), partial(plan_boxes, label=label))

    def lend(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Iterable[int], take: TakeLent, *, label: str
    ) -> Work:
        """Lend tensors to other ranks, and read what they lend."""
        return self._start("exchange", label, LENT, (sends, set(receives), take), partial(plan_lending, label=label))

    def all_gather(self, tensor: Tensor, *, label: str) -> list[Tensor]:
        """Return every rank's tensor, in the order of `ranks`."""
        out = tensor.detach().new_empty((self.world_size, *tensor.shape))
        self.all_gather_into(out, tensor.detach().contiguous(), label=label).wait()
        return list(out.unbind(0))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, label: str) -> Work:
        """Fill `out` with every rank's tensor."""
        tensors.check_gather(out, tensor, self.world_size, label=label)
        payload = (tensors.flatten_contiguous(out, label=label), tensors.flatten_contiguous(tensor, label=label))
        return self._start("all_gather", label, tensors.describe_run(tensor), payload, plan_gather)

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
        )

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce a tensor over all ranks, in place."""
        tensors.check_op(op, tensor.dtype, label=label)
        detail = f"{op} of {tensors.describe_run(tensor)}"
        whole = tensors.flatten_contiguous(tensor, label=label)
        return self._start("all_reduce", label, detail, whole, partial(plan_all_reduce, op=op))

    def broadcast(self, tensor: Tensor, src: int, *, label: str) -> Work:
        """Overwrite the tensor of every rank with that of rank `src`."""
        tensors.check_member(self, src, "source rank", label=label)
        detail = f"{tensors.describe_run(tensor)} from rank {src}"
        whole = tensors.flatten_contiguous(tensor, label=label)
        return self._start("broadcast", label, detail, whole, partial(plan_broadcast, src=src))

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
        return self._start_collecting(data, label)()

    def start_agreeing(self, data: bytes, *, label: str) -> Callable[[], list[bytes]] | None:
        """Send bytes to all ranks before the next call, which may start at once; returns what waits for all bytes."""
        return self._start_collecting(data, label) if self.lends_memory else None

    def withdraw_next_call(self) -> None:
        """After ranks disagreed: take the call back that some of them have started since and others have not."""
        self._hub.withdraw(self.rank, self._agreed_call + 1)

    def _start_collecting(self, data: bytes, label: str) -> Callable[[], list[bytes]]:
        meeting = self._hub.post(self.rank, CollectiveCall("all_gather_bytes", label, "", data), plan_nothing)
        self._agreed_call = self._hub.last_call(self.rank)

        def finish() -> list[bytes]:
            self._hub.finish(self.rank, meeting, self.timeout)
            return [meeting.calls[rank].payload for rank in self.ranks]

        return finish

    def _post(self, kind: str, label: str, detail: str, payload: Any, plan: JobPlanner) -> Rendezvous:
        return self._hub.post(self.rank, CollectiveCall(kind, label, detail, payload, self._current_stream()), plan)

    def _start(self, kind: str, label: str, detail: str, payload: Any, plan: JobPlanner) -> Work:
        meeting = self._post(kind, label, detail, payload, plan)
        return PendingWork(partial(self._finish, meeting))

    def _finish(self, meeting: Rendezvous) -> None:
        self._hub.finish(self.rank, meeting, self.timeout)
        stream = self._current_stream()
        if meeting.stream not in (None, stream):
            stream.wait_stream(meeting.stream)
        if stream is not None and stream != _default_stream(stream):
            _default_stream(stream).wait_stream(stream)

    def _current_stream(self) -> Any:
        """This thread's stream of the device; None on the CPU."""
        return torch.cuda.current_stream(self.device) if self.device.type == "cuda" else None


def _default_stream(stream: Any) -> Any:
    """The default stream of a stream's device: ranks that use others of their own still share tensors made on it."""
    return torch.cuda.default_stream(stream.device)
