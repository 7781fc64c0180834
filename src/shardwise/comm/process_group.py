"""A comm over a torch process group: checks arguments, picks the engine, names who failed.

Which engine moves the bytes is decided once, at the first operation, together by all ranks:

1. the backend for the comm's device is not gloo (nccl): torch's own collectives, on the device, unless ranks of one
   host share a GPU (`choose_device_engine`);
2. gloo, the comm's device is a GPU, and all ranks share a host: straight out of device memory (`device_memory`);
3. gloo, and all ranks share a host: straight out of one process's memory into the other's (`host_memory`);
4. gloo, and some ranks share a host: memory within a host, gloo's sockets between hosts (`hosts`);
5. gloo otherwise: point to point over its sockets; also where ranks are threads of one process, as in torch's tests;
6. torch's "fake" backend: ranks that do not exist are taken to say what this one says, and no values are moved.

Where some ranks share a host and others do not, `find_topology` says so, and moves are planned for it.

Tensors that live elsewhere than the engine's memory are copied there and back (through pinned host memory for a GPU).

How do some ranks make a torch process group by themselves?

1. torch asks its store, in a process that may hang: a thread waits for it, and the caller no longer than the time-out.
2. The members find the same name for the group, whatever other groups each of them has made.
"""

from __future__ import annotations

import hashlib
import logging
import threading
import weakref
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from datetime import timedelta
from functools import partial
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise._text import package_logger, public
from shardwise._torch import Store, default_store, group_backends, group_name, name_new_groups, ranks_are_threads
from shardwise.comm import flat_tensors as tensors
from shardwise.comm.agree import agree_on_request, check_digests, name_ranks
from shardwise.comm.background import BackgroundCall, BackgroundQueue
from shardwise.comm.faults import FaultLog, PendingCalls, TransportError, speak_once, to_transport_error
from shardwise.comm.local import default_device, number_device
from shardwise.comm.protocol import (
    DEFAULT_TIMEOUT,
    Capabilities,
    Combine,
    Comm,
    CommError,
    PendingWork,
    ReduceOp,
    Request,
    TensorsByRank,
    Work,
)
from shardwise.comm.transports.backends import FakeEngine, GlooEngine, NativeEngine
from shardwise.comm.transports.device_memory import choose_device_engine, connect_devices, find_request
from shardwise.comm.transports.engine import Engine, Stage
from shardwise.comm.transports.host_memory import connect_same_host
from shardwise.comm.transports.hosts import compose_engines
from shardwise.transfer.topology import Topology

_GRACE_SECONDS = 1.0
# Of the world with this store, by this rank: ranks may be threads of one process.
_groups_made: tuple[Store | None, Counter[tuple[int, tuple[int, ...]]]] = None, Counter()


def make_group(
    ranks: tuple[int, ...], rank: int, device: torch.device, timeout: float, backend: str | None
) -> dist.ProcessGroup:
    """Make the group of these ranks, which all call this; raises TransportError if they do not in time."""
    made: Future[dist.ProcessGroup] = Future()
    name = _find_name(ranks, rank, backend)

    def make() -> None:
        try:
            if device.type == "cuda":
                torch.cuda.set_device(device)  # a property of the thread
            limit = timedelta(seconds=timeout)
            with name_new_groups(name):
                group = dist.new_group(list(ranks), timeout=limit, backend=backend, use_local_synchronization=True)
            made.set_result(group)
        except BaseException as error:
            made.set_exception(error)

    if ranks_are_threads():
        make()  # another thread has no world
    else:
        threading.Thread(target=make, name="shardwise-new-group", daemon=True).start()
    others = tuple(r for r in ranks if r != rank)
    try:
        return made.result(timeout + _GRACE_SECONDS)
    except FutureTimeoutError as error:
        raise TransportError(f"no answer within {timeout:g} s", others, timed_out=True) from error
    except RuntimeError as error:
        raise to_transport_error(error, others) from error


def _find_name(ranks: tuple[int, ...], rank: int, backend: str | None) -> str:
    """A name that all members find: their ranks, and how many groups of just these ranks the world has had."""
    global _groups_made
    store = default_store()
    if _groups_made[0] is not store:
        _groups_made = store, Counter()
    _groups_made[1][rank, ranks] += 1
    text = f"{ranks} {backend} {_groups_made[1][rank, ranks]}"
    return f"shardwise_{hashlib.sha1(text.encode(), usedforsecurity=False).hexdigest()}"


_FAULT_GRACE_SECONDS = 1.0
_AFTER_FAILURE = (
    "the ranks of this process group are out of step and it carries no more calls; where gloo timed out it has closed "
    "its connections, so calls of torch.distributed in the group fail too: start the ranks again, or make another "
    "group with torch.distributed.new_group and a comm of it"
)
_log = package_logger(__name__)
T = TypeVar("T")
_comm_by_group: dict[tuple[str, int], ProcessGroupComm] = {}  # by the name of a group and the rank of this thread
_comms_made: Counter[tuple[str, int]] = Counter()


class ProcessGroupComm(Comm):
    """The comm of a torch process group, the default one if none is passed; see `Comm` for the methods.

    `device` is where tensors normally live: by default the current GPU for a group with nccl, else torch's default
    device. Ranks of one host whose comm has a GPU read each other's device memory where it is.
    `shared_memory=False` keeps to the group's own backend even for ranks that share a host. `device_transport` is for
    groups with nccl: "auto", "ipc" or "nccl"; by default what SHARDWISE_DEVICE_TRANSPORT says, else "auto".

    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> ProcessGroupComm()
    ProcessGroupComm(rank=0, ranks=(0,), device='cpu')
    >>> dist.destroy_process_group()
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        device: torch.device | str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
        *,
        shared_memory: bool = True,
        device_transport: str | None = None,
    ) -> None:
        resolved = _resolve_group(group)
        self._group = weakref.ref(resolved)  # kept, it would keep its threads after torch has destroyed it
        self._backends = group_backends(resolved)
        self.rank = dist.get_rank()
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(resolved))
        self.device = number_device(device) if device is not None else _default_device(self._backends)
        self.timeout, self._shared_memory = timeout, shared_memory
        self._device_transport = find_request(device_transport if shared_memory else "nccl")
        self._calls = 0
        self._agreed_call = 0, 0  # numbers of the last call in which bytes were gathered: the comm's and the engine's
        self._engine: Engine | None = None
        self._capabilities = Capabilities(background=self.device.type == "cpu")
        self._topology: Topology | None = None
        self._failure: CommError | None = None
        self._board = _new_fault_log(resolved, self.rank)
        self._waits = PendingCalls(self._board, partial(_awaited_ranks, weakref.ref(self)))
        self._subsets: dict[tuple[int, ...], ProcessGroupComm] = {}
        self._queue = BackgroundQueue(partial(_abort_interrupted, weakref.ref(self)))

    @classmethod
    def of(
        cls,
        group: dist.ProcessGroup | None = None,
        *,
        device: torch.device | str | None = None,
        timeout: float = DEFAULT_TIMEOUT,
    ) -> ProcessGroupComm:
        """Return the comm of a group, the same one each time; the first call sets its device and time-out."""
        resolved = _resolve_group(group)
        key = group_name(resolved), dist.get_rank()
        known = _comm_by_group.get(key)
        if known is None or known.process_group is not resolved:
            known = _comm_by_group[key] = cls(resolved, device, timeout)
        return known

    @property
    def process_group(self) -> dist.ProcessGroup | None:  # type: ignore[override]  # of others it is given
        """The torch process group; None once torch has destroyed it."""
        return self._group()

    def __repr__(self) -> str:
        return f"ProcessGroupComm(rank={self.rank}, ranks={self.ranks}, device={str(self.device)!r})"

    @property
    def capabilities(self) -> Capabilities:
        """What its engine can do, once it is connected; devices have streams instead of a background."""
        return self._capabilities

    def find_topology(self) -> Topology | None:
        """Return which ranks share a host, if some do and others do not."""
        if self._engine is None and not ranks_are_threads():  # which are on one host
            self._gather_bytes("connect", b"", "connect")
        return self._topology

    def submit(self, run: Callable[[], T]) -> BackgroundCall[T]:
        """Make calls while this rank computes."""
        return self._queue.submit(run)

    def exchange(
        self,
        sends: TensorsByRank,
        receives: TensorsByRank,
        *,
        label: str,
        request: Request | None = None,
        combine: Combine | None = None,
    ) -> Work:
        """Move each edge's k-th sent tensor into its k-th received one."""
        if request is None:
            return self._exchange(sends, receives, label, combine)
        if not self._ready_engine().starts_early:
            agree_on_request(self, request, label=label)
            return self._exchange(sends, receives, label, combine)
        gather_digests = self._start_agreeing(request.digest, label)
        try:
            work = self._exchange(sends, receives, label, combine)
        except BaseException:
            gather_digests()
            raise

        def finish() -> None:
            check_digests(self, request, gather_digests(), label=label)
            work.wait()

        return PendingWork(finish)

    def _exchange(self, sends: TensorsByRank, receives: TensorsByRank, label: str, combine: Combine | None) -> Work:
        call = tensors.describe_call("exchange", label, "" if combine is None else "combined")
        if combine is not None or self._capabilities.reads_peers:
            if combine is None:
                sends, receives = tensors.nonempty_edges(self, sends, receives, label=label)

            def start(engine: Engine, stage: Stage) -> Work:
                lent = {rank: [stage.read(t) for t in listed] for rank, listed in sends.items()}
                if combine is not None:
                    return engine.lend(lent, receives, combine, call=call)
                filled = {rank: [stage.write(t) for t in listed] for rank, listed in receives.items()}
                return engine.exchange(lent, filled, call=call)

            return self._start(label, call, start)
        if self._capabilities.takes_strides:
            outgoing, incoming = tensors.nonempty_edges(self, sends, receives, label=label)
            own = [side.pop(self.rank, ()) for side in (outgoing, incoming)]
            if any(own):
                sent, wanted = (tensors.nonempty_bytes(listed, label=label) for listed in own)
                self._copy_own(sent, wanted, label)
        else:
            outgoing = tensors.check_edges(self, sends, "sends to", label=label)
            incoming = tensors.check_edges(self, receives, "receives from", label=label)
            self._copy_own(outgoing.pop(self.rank, []), incoming.pop(self.rank, []), label)
        return self._start(
            label, call, lambda e, s: e.exchange(s.read_edges(outgoing), s.write_edges(incoming), call=call)
        )

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, label: str) -> Work:
        """Fill `out` with every rank's tensor."""
        tensors.check_gather(out, tensor, self.world_size, label=label)
        whole, part = tensors.as_bytes(out, label=label), tensors.as_bytes(tensor, label=label)
        call = tensors.describe_call("all_gather", label, tensors.describe_run(tensor))
        return self._start(label, call, lambda e, s: e.all_gather_into(s.write(whole), s.read(part), call=call))

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce the i-th run of every rank's tensor into the i-th rank's `out`."""
        tensors.check_op(op, tensor.dtype, label=label)
        tensors.check_scatter(out, tensor, self.world_size, label=label)
        part, whole = tensors.flatten_contiguous(out, label=label), tensors.flatten_contiguous(tensor, label=label)
        call = tensors.describe_call("reduce_scatter", label, f"{op} of {tensors.describe_run(out)}")
        return self._start(label, call, lambda e, s: e.reduce_scatter_into(s.write(part), s.read(whole), op, call=call))

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce a tensor over all ranks, in place."""
        tensors.check_op(op, tensor.dtype, label=label)
        whole = tensors.flatten_contiguous(tensor, label=label)
        call = tensors.describe_call("all_reduce", label, f"{op} of {tensors.describe_run(tensor)}")
        return self._start(label, call, lambda e, s: e.all_reduce(s.update(whole), op, call=call))

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce a tensor over all ranks into another one, where others can read it without a copy."""
        if out is tensor:
            return self.all_reduce(out, op, label=label)
        tensors.check_op(op, tensor.dtype, label=label)
        part, whole = tensors.flatten_contiguous(out, label=label), tensors.flatten_contiguous(tensor, label=label)
        call = tensors.describe_call("all_reduce", label, f"{op} of {tensors.describe_run(tensor)}")
        return self._start(label, call, lambda e, s: e.all_reduce_into(s.write(part), s.read(whole), op, call=call))

    def broadcast(self, tensor: Tensor, src: int, *, label: str) -> Work:
        """Overwrite the tensor of every rank with that of rank `src`."""
        tensors.check_member(self, src, "source rank", label=label)
        whole = tensors.as_bytes(tensor, label=label)
        call = tensors.describe_call("broadcast", label, f"{tensors.describe_run(tensor)} from rank {src}")
        return self._start(label, call, lambda e, s: e.broadcast(s.update(whole), src, call=call))

    def barrier(self, *, label: str) -> None:
        """Return when every rank has called it."""
        self._gather_bytes("barrier", b"", label)

    def subset(self, ranks: Sequence[int]) -> ProcessGroupComm:
        """Return the comm of some of these ranks; only they call it."""
        wanted = tensors.check_subset(self, ranks)
        if wanted == self.ranks:
            return self
        if wanted not in self._subsets:
            self._queue.drain()  # what goes on there may be about to make the same group
            group = self._new_group(wanted)
            made = self._subsets[wanted] = ProcessGroupComm(
                group,
                self.device,
                self.timeout,
                shared_memory=self._shared_memory,
                device_transport=self._device_transport,
            )
            made._queue = self._queue  # a move of this comm may reduce in the subset: one order for the calls of both
        return self._subsets[wanted]

    def _new_group(self, ranks: tuple[int, ...], backend: str | None = None) -> dist.ProcessGroup:
        """Make torch's group of these ranks within the time-out."""
        try:
            return make_group(ranks, self.rank, self.device, self.timeout, backend)
        except TransportError as error:
            accident = error
        call = tensors.describe_call("subset", str(list(ranks)))
        grace = min(_FAULT_GRACE_SECONDS, self.timeout)
        raise self._board.explain(accident, number=self._calls, label=f"subset {list(ranks)}", call=call, grace=grace)

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        """Return every rank's bytes."""
        return self._gather_bytes("all_gather_bytes", data, label)

    def _start_agreeing(self, data: bytes, label: str) -> Callable[[], list[bytes]]:
        """Send bytes to all ranks before the next call, which may start at once; returns what waits for all bytes."""
        engine = self._ready_engine()
        call = tensors.describe_call("all_gather_bytes", label)
        number = self._begin(call)
        try:
            finish = engine.start_agreeing(data, call=call)
        except TransportError as accident:
            raise self._explain(accident, number, label, call) from accident.__cause__
        finally:
            self._waits.end(number)
        self._agreed_call = number, engine.calls

        def wait() -> list[bytes]:
            self._waits.begin(number, call)
            try:
                return finish()
            except TransportError as accident:
                raise self._explain(accident, number, label, call) from accident.__cause__
            finally:
                self._waits.end(number)

        return wait

    def withdraw_next_call(self) -> None:
        """After ranks disagreed: take back the call that some of them have started for their request."""
        engine = self._engine
        if engine is not None and engine.starts_early:
            self._calls = self._agreed_call[0] + 1
            engine.withdraw_call(self._agreed_call[1] + 1)

    def _gather_bytes(self, kind: str, data: bytes, label: str) -> list[bytes]:
        call = tensors.describe_call(kind, label)
        number = self._begin(call)
        try:
            engine = self._ready_engine()
            found = engine.all_gather_bytes(data, call=call)
            self._agreed_call = number, engine.calls
            return found
        except TransportError as accident:
            raise self._explain(accident, number, label, call) from accident.__cause__
        finally:
            self._waits.end(number)

    def _start(self, label: str, call: str, run: Callable[[Engine, Stage], Work]) -> Work:
        number = self._begin(call)
        try:
            engine = self._ready_engine()
            stage = engine.stage()
            work = run(engine, stage)
        except TransportError as accident:
            raise self._explain(accident, number, label, call) from accident.__cause__
        finally:
            self._waits.end(number)
        return PendingWork(partial(self._finish, work, stage, number, label, call))

    def _finish(self, work: Work, stage: Stage, number: int, label: str, call: str) -> None:
        self._waits.begin(number, call)
        try:
            work.wait()
        except TransportError as accident:
            raise self._explain(accident, number, label, call) from accident.__cause__
        finally:
            self._waits.end(number)
        stage.finish()

    def _begin(self, call: str) -> int:
        """Number a call; after one that failed the ranks are out of step, and all further ones are refused."""
        if self.device.type == "cuda" and not self.capabilities.captures_graphs:
            _refuse_capture(call)
        self._queue.drain()
        if self._failure is not None:
            again = CommError(str(self._failure), self._failure.ranks)
            again.add_note(f"This is the failure of an earlier call: {_AFTER_FAILURE}.")
            raise again
        self._calls += 1
        self._waits.begin(self._calls, call)
        return self._calls

    def _explain(self, accident: TransportError, number: int, label: str, call: str) -> CommError:
        grace = min(_FAULT_GRACE_SECONDS, self.timeout)
        error = self._board.explain(accident, number=number, label=label, call=call, grace=grace)
        self._failure = self._failure or error
        error.add_note(f"After this {_AFTER_FAILURE}.")
        if self._engine is not None:
            self._engine.abort(str(error), error.ranks)
        return error

    def _copy_own(self, sent: Sequence[Tensor], wanted: Sequence[Tensor], label: str) -> None:
        wrong = tensors.check_edge(self.rank, self.rank, [len(t) for t in sent], [len(t) for t in wanted], label=label)
        if wrong:
            raise ValueError(wrong)
        for target, source in zip(wanted, sent, strict=True):
            target.copy_(source)

    def _use_engine(self, engine: Engine) -> None:
        self._engine = engine
        self._capabilities = replace(engine.capabilities, background=self._capabilities.background)

    def _ready_engine(self) -> Engine:
        engine = self._engine
        if engine is None:
            self._use_engine(engine := self._choose_engine())
            level = logging.INFO if self.rank == self.ranks[0] else logging.DEBUG
            used, known = type(engine).__name__, self._backends
            _log.log(level, "%s use %s (device %s, backends %s)", name_ranks(self.ranks), used, self.device, known)
        return engine

    def _choose_engine(self) -> Engine:
        backend, own = self._backends.get(self.device.type), self.process_group
        if own is None:
            raise CommError(f"{self!r}: its process group was destroyed by destroy_process_group", ())
        if backend == "fake":
            return FakeEngine(self.rank, self.ranks)
        if ranks_are_threads():
            group = own if backend == "gloo" else self._new_group(self.ranks, "gloo")
            return GlooEngine(group, self.rank, self.ranks, self.timeout)
        if backend is not None and backend != "gloo":
            group = own if self._backends.get("cpu") == "gloo" else self._new_group(self.ranks, "gloo")
            host, hosts = self._connect_hosts(GlooEngine(group, self.rank, self.ranks, self.timeout))
            native = NativeEngine(own, self.rank, self.ranks, self.device, host)
            if self.device.type != "cuda" or self.world_size == 1 or hosts is None or len(set(hosts)) > 1:
                return native
            return choose_device_engine(native, self.rank, self.ranks, self.timeout, self._device_transport)
        gloo = GlooEngine(own, self.rank, self.ranks, self.timeout)
        if self.device.type == "cuda":
            wanted = self._shared_memory
            engine = connect_devices(gloo, self.rank, self.ranks, self.device, self.timeout, wanted=wanted)
            if engine is not None:
                return engine
        return self._connect_hosts(gloo)[0]

    def _connect_hosts(self, gloo: GlooEngine) -> tuple[Engine, tuple[int, ...] | None]:
        """The engine for host memory, and the host number of each rank, which becomes the comm's topology."""
        found = connect_same_host(gloo, self.rank, self.ranks, self.timeout, wanted=self._shared_memory)
        self._topology = _topology_of(self.ranks, found.hosts)
        return compose_engines(self.rank, self.ranks, found, gloo), found.hosts


@public
def comm_from_device_mesh(mesh: DeviceMesh, axis: str | int | None = None) -> ProcessGroupComm:
    """Return the comm of one axis of torch's DeviceMesh that this rank is in (of a mesh of one axis, of that one).

    >>> from torch.distributed.device_mesh import init_device_mesh
    >>> dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    >>> comm_from_device_mesh(init_device_mesh("cpu", (1,), mesh_dim_names=("tp",)), "tp").ranks
    (0,)
    >>> dist.destroy_process_group()
    """
    return ProcessGroupComm.of(mesh.get_group(axis))


def _refuse_capture(call: str) -> None:
    """Refuse a call while the current stream is captured: its messages between processes are not part of a graph."""
    if torch.cuda.is_current_stream_capturing():
        raise RuntimeError(
            f"{call}: the current stream is captured into a CUDA graph, which would not repeat the messages between "
            "the ranks; make the call outside of the capture, or use nccl alone (SHARDWISE_DEVICE_TRANSPORT=nccl) and "
            "make a call before the capture"
        )


def _topology_of(ranks: tuple[int, ...], hosts: tuple[int, ...] | None) -> Topology | None:
    """The hosts of these ranks by rank number; None if they are all on one host, or each on its own."""
    if hosts is None or len(set(hosts)) in (1, len(ranks)):
        return None
    by_rank = dict(zip(ranks, hosts, strict=True))
    return Topology(hosts=[by_rank.get(r, -1) for r in range(max(ranks) + 1)])


def _new_fault_log(group: dist.ProcessGroup, rank: int) -> FaultLog:
    speak_once()
    name = group_name(group)
    _comms_made[name, rank] += 1
    return FaultLog(name, _comms_made[name, rank], rank)


def _awaited_ranks(comm: weakref.ref[ProcessGroupComm]) -> tuple[int, ...]:
    alive = comm()
    return alive._engine.awaited if alive is not None and alive._engine is not None else ()


def _abort_interrupted(comm: weakref.ref[ProcessGroupComm], error: BaseException) -> None:
    """End a call in the background whose caller was interrupted: the program may go on and write to what is read."""
    alive = comm()
    if alive is not None and alive._engine is not None:
        alive._engine.abort(f"rank {alive.rank} was ended by {type(error).__name__}", (alive.rank,))


def _resolve_group(group: dist.ProcessGroup | None) -> dist.ProcessGroup:
    if not dist.is_initialized():
        raise ValueError(
            "ProcessGroupComm without a process group: call torch.distributed.init_process_group first, "
            "or start the ranks with shardwise.launch or shardwise.run_local"
        )
    resolved = group if group is not None else dist.group.WORLD
    if not isinstance(resolved, dist.ProcessGroup):
        raise ValueError(f"rank {dist.get_rank()} is not a member of the process group; only its members make its comm")
    return resolved


def _default_device(by_type: Mapping[str, str]) -> torch.device:
    if by_type.get("cuda", "gloo") != "gloo" and torch.cuda.is_available():
        return torch.device("cuda", torch.cuda.current_device())
    return default_device()
