"""A comm over a torch process group: checks arguments, picks the engine, names who failed.

Which engine moves the bytes is decided once, at the first operation, together by all ranks:

1. the backend for the comm's device is not gloo (nccl): torch's own collectives, on the device; between GPUs of one
   host each transfer is read out of device memory instead where that is faster (`device_choice`);
2. gloo, the comm's device is a GPU, and all ranks share a host: straight out of device memory (`same_host_device`);
3. gloo, and all ranks share a host: straight out of one process's memory into the other's (`same_host`);
4. gloo, and some ranks share a host: memory within a host, gloo's sockets between hosts (`several_hosts`);
5. gloo otherwise: point to point over its sockets.

Where some ranks share a host and others do not, `find_topology` says so, and moves are planned for it.

Tensors that live elsewhere than the engine's memory are copied there and back (through pinned host memory for a GPU).
"""

from __future__ import annotations

import logging
import weakref
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import partial
from typing import Self, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from shardwise._log import package_logger
from shardwise._torch import group_backends, group_name
from shardwise.comm import flat_tensors as tensors
from shardwise.comm.background import BackgroundQueue
from shardwise.comm.faults import FaultLog, PendingCalls, TransportError
from shardwise.comm.local import default_device, number_device
from shardwise.comm.new_groups import make_group
from shardwise.comm.protocol import BOXES, DEFAULT_TIMEOUT, LENT, CommError, PendingWork, ReduceOp, TakeLent, Work
from shardwise.comm.rank_text import name_ranks
from shardwise.comm.transports.device_choice import choose_device_engine, find_request
from shardwise.comm.transports.device_connect import connect_devices
from shardwise.comm.transports.engine import Engine, LendingEngine, Stage, find_agreeing
from shardwise.comm.transports.gloo import GlooEngine
from shardwise.comm.transports.host_names import find_hosts
from shardwise.comm.transports.nccl import NativeEngine
from shardwise.comm.transports.same_host import connect_same_host
from shardwise.comm.transports.several_hosts import compose_engines
from shardwise.transfer.device_cost import DeviceTraffic
from shardwise.transfer.topology import Topology

_FAULT_GRACE_SECONDS = 1.0
_log = package_logger(__name__)
_comm_by_group: dict[str, ProcessGroupComm] = {}
_comms_made: Counter[str] = Counter()


class ProcessGroupComm:
    """The comm of a torch process group, the default one if none is passed; see `Comm` for the methods.

    `device` is where tensors normally live: by default the current GPU for a group with nccl, else torch's default
    device. Ranks of one host whose comm has a GPU read each other's device memory where it is.
    `shared_memory=False` keeps to the group's own backend even for ranks that share a host. `device_transport` is for
    groups with nccl: "auto", "measured", "ipc" or "nccl"; by default what SHARDWISE_DEVICE_TRANSPORT says, else "auto".

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
        self.process_group: dist.ProcessGroup = _resolve_group(group)
        self._backends = group_backends(self.process_group)
        self.rank = dist.get_rank()
        self.ranks: tuple[int, ...] = tuple(dist.get_process_group_ranks(self.process_group))
        self.device = number_device(device) if device is not None else _default_device(self._backends)
        self.timeout, self._shared_memory = timeout, shared_memory
        self._device_transport = find_request(device_transport if shared_memory else "nccl")
        self._calls = 0
        self._agreed_call = 0, 0  # numbers of the last call in which bytes were gathered: the comm's and the engine's
        self._engine: Engine | None = None
        self._topology: Topology | None = None
        self._failure: CommError | None = None
        self._board = _new_fault_log(self.process_group, self.rank)
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
        known = _comm_by_group.get(group_name(resolved))
        if known is None or known.process_group is not resolved:
            known = _comm_by_group[group_name(resolved)] = cls(resolved, device, timeout)
        return known

    def __repr__(self) -> str:
        return f"ProcessGroupComm(rank={self.rank}, ranks={self.ranks}, device={str(self.device)!r})"

    def __deepcopy__(self, memo: object) -> Self:
        """The same: a comm is how this process reaches others, of which a copy has no more."""
        return self

    @property
    def world_size(self) -> int:
        """How many ranks this comm has."""
        return len(self.ranks)

    def find_topology(self) -> Topology | None:
        """Return which ranks share a host, if some do and others do not."""
        if self._engine is None:
            self._gather_bytes("connect", b"", "connect")
        return self._topology

    @property
    def background(self) -> BackgroundQueue | None:
        """The queue of calls that go on while this rank computes; None on devices, which have streams for that."""
        return self._queue if self.device.type == "cpu" else None

    def exchange(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], *, label: str
    ) -> Work:
        """Move each edge's k-th sent tensor into its k-th received one."""
        outgoing = tensors.check_edges(self, sends, "sends to", label=label)
        incoming = tensors.check_edges(self, receives, "receives from", label=label)
        self._copy_own(outgoing.pop(self.rank, []), incoming.pop(self.rank, []), label)
        call = tensors.describe_call("exchange", label)
        return self._start(
            label, call, lambda e, s: e.exchange(s.read_edges(outgoing), s.write_edges(incoming), call=call)
        )

    @property
    def lends_memory(self) -> bool:
        """Whether ranks read each other's tensors where they are: device memory of one host does."""
        return hasattr(self._engine, "lend")

    def prefers_lending(self, count: Callable[[], DeviceTraffic | None]) -> bool:
        """Whether memory that can be lent is to be lent: if there is another transport, it may be faster."""
        chooser = getattr(self._engine, "prefers_lending", None)
        return chooser is None or chooser(count())

    def exchange_boxes(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Mapping[int, Sequence[Tensor]], *, label: str
    ) -> Work:
        """Copy tensors of any strides, those that this rank sends to itself included."""
        call = tensors.describe_call("exchange", label, BOXES)

        def start(engine: Engine, stage: Stage) -> Work:
            lent = {rank: [stage.read(t) for t in listed] for rank, listed in sends.items()}
            filled = {rank: [stage.write(t) for t in listed] for rank, listed in receives.items()}
            return cast(LendingEngine, engine).exchange_boxes(lent, filled, call=call)

        return self._start(label, call, start)

    def exchange_cut(
        self,
        key: Hashable,
        bases: Sequence[Tensor],
        cut: Callable[[], tuple[Mapping[int, Sequence[Tensor]], Mapping[int, Sequence[Tensor]]]],
        *,
        label: str,
    ) -> Work:
        """The same with boxes that `cut` makes of the bases, equal ones for equal keys and places of the bases."""
        engine = self._engine
        if engine is None or any(t.device.type != engine.device.type for t in bases):
            return self.exchange_boxes(*cut(), label=label)
        call = tensors.describe_call("exchange", label, BOXES)
        return self._start(label, call, lambda e, _: cast(LendingEngine, e).exchange_cut(key, bases, cut, call=call))

    def lend(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Iterable[int], take: TakeLent, *, label: str
    ) -> Work:
        """Lend tensors to other ranks, and read what they lend."""
        call = tensors.describe_call("exchange", label, LENT)

        def start(engine: Engine, stage: Stage) -> Work:
            lent = {rank: [stage.read(t) for t in listed] for rank, listed in sends.items()}
            return cast(LendingEngine, engine).lend(lent, receives, take, call=call)

        return self._start(label, call, start)

    def all_gather(self, tensor: Tensor, *, label: str) -> list[Tensor]:
        """Return every rank's tensor, in the order of `ranks`."""
        out = tensor.detach().new_empty((self.world_size, *tensor.shape))
        self.all_gather_into(out, tensor.detach().contiguous(), label=label).wait()
        return list(out.unbind(0))

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

    @property
    def reduces_in_one_call(self) -> bool:
        """Whether a reduction is one call, which can be taken back while ranks agree."""
        return getattr(self._engine, "reduces_in_one_call", False)

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce a tensor over all ranks into another one of its shape, where memory is lent."""
        tensors.check_op(op, tensor.dtype, label=label)
        part, whole = tensors.flatten_contiguous(out, label=label), tensors.flatten_contiguous(tensor, label=label)
        call = tensors.describe_call("all_reduce", label, f"{op} of {tensors.describe_run(tensor)}")

        def start(engine: Engine, stage: Stage) -> Work:
            return cast(LendingEngine, engine).all_reduce_into(stage.write(part), stage.read(whole), op, call=call)

        return self._start(label, call, start)

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
            group = self._new_group(wanted)
            self._subsets[wanted] = ProcessGroupComm(
                group,
                self.device,
                self.timeout,
                shared_memory=self._shared_memory,
                device_transport=self._device_transport,
            )
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

    def start_agreeing(self, data: bytes, *, label: str) -> Callable[[], list[bytes]] | None:
        """Send bytes to all ranks before the next call, which may start at once; returns what waits for all bytes.

        None where the engine completes a call before it starts the next one.
        """
        engine = find_agreeing(self._engine)
        if engine is None:
            return None
        call = tensors.describe_call("all_gather_bytes", label)
        number = self._begin(call)
        try:
            finish = engine.start_agreeing(data, call=call)
        except TransportError as accident:
            raise self._explain(accident, number, label, call) from accident
        finally:
            self._waits.end(number)
        self._agreed_call = number, engine.calls

        def wait() -> list[bytes]:
            self._waits.begin(number, call)
            try:
                return finish()
            except TransportError as accident:
                raise self._explain(accident, number, label, call) from accident
            finally:
                self._waits.end(number)

        return wait

    def withdraw_next_call(self) -> None:
        """After ranks disagreed: take the call back that some of them have started since and others have not."""
        engine = find_agreeing(self._engine)
        if engine is not None:
            self._calls = self._agreed_call[0] + 1
            engine.withdraw_call(self._agreed_call[1] + 1)

    def _gather_bytes(self, kind: str, data: bytes, label: str) -> list[bytes]:
        call = tensors.describe_call(kind, label)
        number = self._begin(call)
        try:
            engine = self._ready_engine()
            found = engine.all_gather_bytes(data, call=call)
            agreeing = find_agreeing(engine)
            self._agreed_call = number, 0 if agreeing is None else agreeing.calls
            return found
        except TransportError as accident:
            raise self._explain(accident, number, label, call) from accident
        finally:
            self._waits.end(number)

    def _start(self, label: str, call: str, run: Callable[[Engine, Stage], Work]) -> Work:
        number = self._begin(call)
        try:
            engine = self._ready_engine()
            stage = Stage(engine.device)
            work = run(engine, stage)
        except TransportError as accident:
            raise self._explain(accident, number, label, call) from accident
        finally:
            self._waits.end(number)
        return PendingWork(partial(self._finish, work, stage, number, label, call))

    def _finish(self, work: Work, stage: Stage, number: int, label: str, call: str) -> None:
        self._waits.begin(number, call)
        try:
            work.wait()
        except TransportError as accident:
            raise self._explain(accident, number, label, call) from accident
        finally:
            self._waits.end(number)
        stage.finish()

    def _begin(self, call: str) -> int:
        """Number a call; after one that failed the ranks are out of step, and all further ones are refused."""
        if self.device.type == "cuda" and not isinstance(self._engine, NativeEngine):
            _refuse_capture(call)
        self._queue.drain()
        if self._failure is not None:
            raise CommError(str(self._failure), self._failure.ranks)
        self._calls += 1
        self._waits.begin(self._calls, call)
        return self._calls

    def _explain(self, accident: TransportError, number: int, label: str, call: str) -> CommError:
        grace = min(_FAULT_GRACE_SECONDS, self.timeout)
        error = self._board.explain(accident, number=number, label=label, call=call, grace=grace)
        self._failure = self._failure or error
        if self._engine is not None:
            self._engine.abort(str(error), error.ranks)
        return error

    def _copy_own(self, sent: Sequence[Tensor], wanted: Sequence[Tensor], label: str) -> None:
        wrong = tensors.check_edge(self.rank, self.rank, [len(t) for t in sent], [len(t) for t in wanted], label=label)
        if wrong:
            raise ValueError(wrong)
        for target, source in zip(wanted, sent, strict=True):
            target.copy_(source)

    def _ready_engine(self) -> Engine:
        if self._engine is None:
            self._engine = self._choose_engine()
            level = logging.INFO if self.rank == self.ranks[0] else logging.DEBUG
            used, known = type(self._engine).__name__, self._backends
            _log.log(level, "%s use %s (device %s, backends %s)", name_ranks(self.ranks), used, self.device, known)
        return self._engine

    def _choose_engine(self) -> Engine:
        backend = self._backends.get(self.device.type)
        if backend is not None and backend != "gloo":
            group = self.process_group if self._backends.get("cpu") == "gloo" else self._new_group(self.ranks, "gloo")
            host = GlooEngine(group, self.rank, self.ranks, self.timeout)
            native = NativeEngine(self.process_group, self.rank, self.ranks, self.device, host)
            hosts = find_hosts(native, self.rank, self.ranks)
            self._topology = _topology_of(self.ranks, hosts)
            if self.device.type != "cuda" or self.world_size == 1 or hosts is None or len(set(hosts)) > 1:
                return native
            return choose_device_engine(native, host, self.rank, self.ranks, self.timeout, self._device_transport)
        gloo = GlooEngine(self.process_group, self.rank, self.ranks, self.timeout)
        wanted = self._shared_memory
        if self.device.type == "cuda":
            engine = connect_devices(gloo, self.rank, self.ranks, self.device, self.timeout, wanted=wanted)
            if engine is not None:
                return engine
        found = connect_same_host(gloo, self.rank, self.ranks, self.timeout, wanted=wanted)
        self._topology = _topology_of(self.ranks, found.hosts)
        return compose_engines(self.rank, self.ranks, found, gloo)


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
    name = group_name(group)
    _comms_made[name] += 1
    return FaultLog(name, _comms_made[name], rank)


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
