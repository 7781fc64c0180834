"""Which comm does a call use? The one that is passed, as a comm, a torch group or a DeviceMesh; else the current one.

1. `use_comm` makes a comm the current one of a block, `run_local` runs a function as every rank of a world of threads,
   each with its own comm, and `load_with_process_group` says onto which group tensors are unpickled.
2. `resolve_comm` finds the comm of what a caller passes, `group_of` what callers that speak torch are handed back.
3. A DeviceMesh has process groups. It is made at most once for a mesh, by all ranks together, and kept as long as it is
   used; one that a tensor came from is used again.
"""

from __future__ import annotations

import importlib
import os
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from contextvars import ContextVar, copy_context
from dataclasses import dataclass
from inspect import Signature, signature
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar, cast
from weakref import WeakValueDictionary

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise._text import shorten_traceback
from shardwise.comm.local import (
    LocalComm,
    RendezvousHub,
    ThreadWorldState,
    default_device,
    find_default_device,
    number_device,
)
from shardwise.comm.process_group import ProcessGroupComm
from shardwise.comm.protocol import Comm, CommError
from shardwise.comm.stand_in import traced_comm
from shardwise.geometry import Mesh
from shardwise.geometry.mesh import is_device_mesh, to_mesh

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh


_current: ContextVar[Comm | None] = ContextVar("shardwise_comm", default=None)
_alone = LocalComm.alone()
_TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@contextmanager
def use_comm(comm: Comm) -> Iterator[Comm]:
    """Make a comm the current one of this thread (and of code it awaits) inside a `with` block.

    >>> with use_comm(LocalComm.alone()) as comm:
    ...     current_comm() is comm
    True
    """
    token = _current.set(comm)
    try:
        yield comm
    finally:
        _current.reset(token)


def current_comm() -> Comm | None:
    """Return the comm set by `use_comm` or `run_local` in this thread, or None.

    >>> current_comm() is None
    True
    """
    return _current.get()


def default_comm() -> Comm:
    """Return the comm that calls use: the current one, else torch's default process group, else this process alone.

    A process that torchrun or another launcher started as one of several (RANK, WORLD_SIZE) is not alone: without a
    process group it is an error.

    >>> default_comm().ranks
    (0,)
    """
    comm = _current.get()
    if comm is not None:
        return comm
    if dist.is_available() and dist.is_initialized():
        return ProcessGroupComm.of(None)
    rank, size = os.environ.get("RANK", ""), os.environ.get("WORLD_SIZE", "")
    if rank.isdecimal() and size.isdecimal() and int(size) > 1:
        raise CommError(
            f"this process is rank {rank} of {size} (RANK, WORLD_SIZE), but torch.distributed has no process group, so "
            "each rank would work alone and overwrite what the others save; call torch.distributed."
            "init_process_group() first, start the program through shardwise.launch(fn), or pass comm="
        )
    return _alone


def advise_ranks(comm: Comm) -> str:
    """What to do about ranks that a comm does not have, as the end of an error message.

    >>> advise_ranks(default_comm())
    'this process is a world by itself: call torch.distributed.init_process_group() first, or start ranks with ...'
    """
    if comm.process_group is None and comm.world_size == 1:
        return (
            "this process is a world by itself: call torch.distributed.init_process_group() first, or start ranks with "
            "shardwise.launch, torchrun or shardwise.run_local"
        )
    return f"start that many processes, or name ranks among these {comm.world_size}"


def given_world() -> tuple[int, int] | None:
    """Return the rank and size that torchrun's variables give this process; None if they are not set.

    >>> given_world() is None
    True
    """
    if not all(name in os.environ for name in _TORCHRUN):
        return None
    return int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])


_meshes: WeakValueDictionary[tuple[Mesh, str], Any] = WeakValueDictionary()


def comm_of_device_mesh(device_mesh: DeviceMesh) -> Comm:
    """The comm of all ranks of a DeviceMesh: the current one where it has these ranks, else the group of its axis."""
    around, ranks = default_comm(), sorted(device_mesh.mesh.flatten().tolist())
    if sorted(around.ranks) == ranks:
        return around
    if device_mesh.ndim == 1:
        return ProcessGroupComm.of(device_mesh.get_group())
    raise ValueError(
        f"the mesh has {len(ranks)} of the {around.world_size} ranks of the world and {device_mesh.ndim} axes; pass "
        "comm=, a comm of exactly the mesh's ranks"
    )


def remember_device_mesh(device_mesh: DeviceMesh) -> Mesh:
    """The Mesh of a DeviceMesh; `find_device_mesh` leads back to it."""
    mesh = to_mesh(device_mesh)
    _meshes[(mesh, device_mesh.device_type)] = device_mesh
    return mesh


def find_device_mesh(mesh: Mesh, device_type: str, comm: Comm) -> DeviceMesh:
    """The DeviceMesh of a Mesh: one that is known, else a new one, which every rank of the world has to ask for."""
    known = _meshes.get((mesh, device_type))
    if known is None:
        if comm.process_group is None:
            raise ValueError(
                f"DTensor needs a torch process group, and the comm of this tensor has none: {comm!r}; start the "
                "ranks with shardwise.launch or torchrun, or use x.sharding.spec.mesh, which needs none"
            )
        made = importlib.import_module("torch.distributed.device_mesh").DeviceMesh
        known = made(device_type, torch.tensor(mesh.ranks.tolist(), device="cpu"), mesh_dim_names=mesh.axes)
        _meshes[(mesh, device_type)] = known
    found: DeviceMesh = known
    return found


T = TypeVar("T")


@dataclass(frozen=True)
class RankBody:
    """A function that every rank runs, called with the comm of the rank if it takes one.

    It takes one if its first parameter is named `comm`, or if the arguments alone are one too few.

    >>> RankBody.of(lambda: default_comm().rank, ())(), RankBody.of(lambda comm: comm.world_size, ())()
    (0, 1)
    """

    fn: Callable[..., Any]
    takes_comm: bool

    @classmethod
    def of(cls, fn: Callable[..., Any], args: tuple[Any, ...]) -> RankBody:
        """Find out from a function's parameters; one that takes neither is refused before any rank is started."""
        try:
            known = signature(fn)
        except (TypeError, ValueError):  # built-in functions have no parameters to look at
            return cls(fn, False)
        first = next(iter(known.parameters.values()), None)
        named = first is not None and first.name == "comm" and first.kind is not first.VAR_POSITIONAL
        fits = [with_comm for with_comm in (named, not named) if _binds(known, args, with_comm)]
        if not fits:
            name = getattr(fn, "__name__", repr(fn))
            raise TypeError(
                f"each rank calls {name}(*args) or {name}(comm, *args), and {name}{known} takes neither with "
                f"{len(args)} argument{'s' * (len(args) != 1)}"
            )
        return cls(fn, fits[0])

    def __call__(self, *args: Any) -> Any:
        return self.fn(default_comm(), *args) if self.takes_comm else self.fn(*args)


def _binds(known: Signature, args: tuple[Any, ...], with_comm: bool) -> bool:
    try:
        known.bind(*((None, *args) if with_comm else args))
    except TypeError:
        return False
    return True


def run_local(
    fn: Callable[..., T],
    world_size: int = 4,
    *args: Any,
    nprocs: int | None = None,
    timeout: float = 60.0,
    device: torch.device | str | None = None,
) -> list[T]:
    """Run `fn(*args)` on `world_size` ranks that are threads of this process; return their results in rank order.

    Inside, `default_comm()` is the comm of the rank; a function whose first parameter is `comm` is passed it. `launch`
    calls the same functions on processes. `nprocs` is another name for `world_size`.

    `device` is where new tensors are, by default torch's default device. On a GPU all ranks share it.

    An exception on one rank ends the others at their next collective and is raised here, with a note that names its
    rank. Each thread computes with one intra-op thread and runs its own backward pass. Torch's global random
    generator is shared by all threads, so seed generators of your own.

    >>> def total(comm, scale):
    ...     x = torch.tensor([comm.rank * scale])
    ...     comm.all_reduce(x, label="total").wait()
    ...     return x.item()
    >>> run_local(total, 3, 10)
    [30, 30, 30]
    >>> run_local(lambda: default_comm().rank, 3)
    [0, 1, 2]
    """
    body, world_size = read_ranks("run_local", fn, world_size if nprocs is None else nprocs, args)
    device = default_device() if device is None else number_device(device)
    world = ThreadWorldState(device=device)
    hub = RendezvousHub(tuple(range(world_size)), world)
    results: dict[int, T] = {}
    comms = [LocalComm(rank, hub, device=device, timeout=timeout) for rank in range(world_size)]
    intra_op_threads = torch.get_num_threads()
    try:
        threads = [_start_rank(comm, body, args, results, world) for comm in comms]
        _join_ranks(threads, world, timeout)
    finally:
        torch.set_num_threads(intra_op_threads)
    if world.failure is not None:
        rank, error = world.failure
        error.add_note(f"on rank {rank} of run_local (world of {world_size})")
        raise error
    return [results[rank] for rank in range(world_size)]


def read_ranks(name: str, fn: Callable[..., Any], world_size: int, args: tuple[Any, ...]) -> tuple[RankBody, int]:
    """The body of the ranks and their number, checked; for `run_local` and `launch`."""
    if not isinstance(world_size, int) or isinstance(world_size, bool) or not callable(fn):  # type: ignore[redundant-expr]  # callers may not be typed
        raise TypeError(
            f"{name}(fn, world_size, *args) calls fn(*args) on each rank; got {type(fn).__name__} and "
            f"{type(world_size).__name__}"
        )
    if world_size < 1:
        raise ValueError(f"{name} with world_size={world_size}: pass at least 1 rank")
    return RankBody.of(fn, args), world_size


def _start_rank(
    comm: LocalComm, fn: RankBody, args: tuple[Any, ...], results: dict[int, T], world: ThreadWorldState
) -> threading.Thread:
    grad, device = torch.is_grad_enabled(), find_default_device()
    gpu = _find_gpu(comm.device)
    context = copy_context()

    def body() -> None:
        try:
            if gpu is not None:
                _enter_gpu(gpu)
            results[comm.rank] = _run_as_rank(fn, comm, args, grad, device)
            world.leave(comm.rank)
        except BaseException as error:
            world.fail(comm.rank, shorten_traceback(error))

    thread = threading.Thread(target=context.run, args=(body,), name=f"rank {comm.rank}", daemon=True)
    thread.start()
    return thread


def _find_gpu(device: torch.device) -> int | None:
    """The number of a GPU, of the caller's present one if it has none; None for another device."""
    if device.type != "cuda":
        return None
    index: int | None = device.index
    return torch.cuda.current_device() if index is None else index


def _enter_gpu(number: int) -> None:
    """Make a GPU the present one of this thread, with its context, which a thread has after its first call only.

    Memory comes from torch's pool without a call, and then cuBLAS warns that there is no context.
    """
    torch.cuda.set_device(number)
    torch.cuda.current_stream(number).query()


def _run_as_rank(body: RankBody, comm: Comm, args: tuple[Any, ...], grad: bool, device: torch.device) -> Any:
    torch.set_num_threads(1)
    made_there = nullcontext() if find_default_device() == device else device
    with use_comm(comm), torch.autograd.set_multithreading_enabled(False), torch.set_grad_enabled(grad), made_there:
        return body.fn(comm, *args) if body.takes_comm else body.fn(*args)


def _join_ranks(threads: list[threading.Thread], world: ThreadWorldState, timeout: float) -> None:
    """Wait for the ranks; once one has failed, for the others no longer than the time-out."""
    try:
        for thread in threads:
            while thread.is_alive() and world.failure is None:
                thread.join(0.05)
    except BaseException as error:
        world.fail(-1, CommError(f"run_local was interrupted by {type(error).__name__}"))
        raise
    for thread in threads:
        thread.join(timeout)


GroupOrComm: TypeAlias = dist.ProcessGroup | Comm
_loading_group: ContextVar[GroupOrComm | None] = ContextVar("shardwise_loading", default=None)


def resolve_comm(process_group: GroupOrComm | None = None) -> Comm:
    """Return the comm of a torch process group or of a comm; without one, that of the surrounding block or the world.

    >>> resolve_comm().ranks
    (0,)
    >>> from shardwise.comm import LocalComm
    >>> resolve_comm(alone := LocalComm.alone()) is alone
    True
    """
    group: object = process_group if process_group is not None else _loading_group.get()
    if group is None:
        return default_comm()
    if is_device_mesh(group):
        return comm_of_device_mesh(cast(Any, group))
    if isinstance(group, dist.ProcessGroup):
        return traced_comm(ProcessGroupComm.of(group))
    if isinstance(group, Comm):
        return traced_comm(group)
    if group is dist.GroupMember.NON_GROUP_MEMBER:
        raise ValueError("this rank is not a member of the process group passed; call only on the group's members")
    raise ValueError(
        "process_group is a torch ProcessGroup or DeviceMesh, a shardwise Comm or None; got "
        f"{type(group).__name__}: {group!r}"
    )


def group_of(comm: Comm) -> GroupOrComm:
    """Return what functions written for torch are handed as `process_group`: the torch group, else the comm itself.

    >>> group_of(resolve_comm())
    LocalComm(rank=0, ranks=(0,), device='cpu')
    """
    return comm.process_group if comm.process_group is not None else comm


def comm_of(value: object) -> Comm | None:
    """Return the comm of a sharded tensor, None for anything else.

    >>> comm_of(3) is None
    True
    """
    comm = getattr(value, "comm", None) if isinstance(value, Tensor) else None
    return comm if isinstance(comm, Comm) else None


def same_group(one: Comm, other: Comm) -> bool:
    """Whether two comms connect the same ranks by the same means.

    >>> same_group(resolve_comm(), resolve_comm())
    True
    """
    if one is other:
        return True
    if one.process_group is None or other.process_group is None:
        return one.process_group is other.process_group and one.ranks == other.ranks
    return one.process_group is other.process_group


@contextmanager
def load_with_process_group(process_group: GroupOrComm | None) -> Iterator[GroupOrComm | None]:
    """Unpickle sharded tensors onto this group inside a `with` block, instead of onto the default one.

    >>> from shardwise.comm import LocalComm
    >>> with load_with_process_group(LocalComm.alone()) as group:
    ...     get_current_process_group() is group
    True
    """
    if _loading_group.get() is not None:
        raise RuntimeError(
            'ProcessGroup already set by previous "load_with_process_group" context manager; '
            "leave that block before entering another"
        )
    token = _loading_group.set(process_group)
    try:
        yield process_group
    finally:
        _loading_group.reset(token)


def get_current_process_group() -> GroupOrComm:
    """Return the group of the surrounding `load_with_process_group` or `use_comm`, else torch's default group.

    >>> get_current_process_group()
    Traceback (most recent call last):
    ...
    ValueError: Default process group has not been initialized, please make sure to call init_process_group.
    """
    group = loading_group()
    if group is None:
        raise ValueError("Default process group has not been initialized, please make sure to call init_process_group.")
    return group


def loading_group() -> GroupOrComm | None:
    """Return the group that a tensor unpickled now belongs to, None where no world has been set up.

    >>> loading_group() is None
    True
    """
    if (group := _loading_group.get()) is not None:
        return group
    comm = current_comm()
    if comm is not None:
        return group_of(comm)
    return dist.group.WORLD if dist.is_available() and dist.is_initialized() else None
