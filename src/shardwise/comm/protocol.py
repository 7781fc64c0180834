"""The one small interface through which bytes leave a process.

Everything above this layer talks to a `Comm` and never to `torch.distributed`. Three rules hold for all of them:

1. Every operation is collective: all ranks of the comm call the same operations in the same order, with the same
   `label`. A rank with nothing to send calls `exchange({}, {})`.
2. A tensor that is read must not change, and one that is written must not be used, until `Work.wait()` returned.
3. Each call carries the comm's time-out. A rank that raises, dies or calls something else makes the others raise
   `CommError`, which names the rank and the label.

`CommError` is a transport that failed, `DisagreementError` ranks that made different requests.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, Protocol, Self, TypeAlias, TypeVar, runtime_checkable

import torch
import torch.distributed as dist
from torch import Tensor

from shardwise.comm.background import BackgroundCall
from shardwise.transfer.topology import Topology


class CommError(RuntimeError):
    """A collective could not be completed: a rank died, raised, timed out, or made another call.

    >>> raise CommError("'gather w': rank 2 did not take part within 5 s", ranks=(2,))
    Traceback (most recent call last):
    ...
    shardwise.comm.protocol.CommError: 'gather w': rank 2 did not take part within 5 s
    """

    def __init__(self, message: str, ranks: tuple[int, ...] = ()) -> None:
        super().__init__(message)
        self.ranks = ranks

    def __reduce__(self) -> tuple[type[CommError], tuple[str, tuple[int, ...]], dict[str, object]]:
        return type(self), (str(self), self.ranks), self.__dict__


class DisagreementError(ValueError):
    """Ranks called one collective operation with different arguments; every rank raises it.

    >>> issubclass(DisagreementError, ValueError)
    True
    """


ReduceOp = Literal["sum", "avg", "min", "max", "product"]
DEFAULT_TIMEOUT = 300.0
LEAST_RUN_BYTES = 512
"""Of tensors that are sent with their strides: shorter runs of memory are copied into one first."""
FAST_RUN_BYTES = 1 << 13
"""Runs of so many bytes are read one by one as fast as they are copied into one; shorter ones save memory."""
T = TypeVar("T")
TensorsByRank = Mapping[int, Sequence[Tensor]]


@runtime_checkable
class Work(Protocol):
    """A started operation; `wait()` completes it; it may be called repeatedly.

    >>> from shardwise.comm import run_local
    >>> def total(comm):
    ...     x = torch.ones(1)
    ...     work = comm.all_reduce(x, label="total")  # other work may be done here
    ...     work.wait()
    ...     return x.item()
    >>> run_local(total, 3)
    [3.0, 3.0, 3.0]
    """

    def wait(self) -> None:
        """Return when the results are in place and the sources are free again; raise `CommError` if it failed."""
        ...


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What a comm can do beyond what all of them can; fixed once it is connected, and the same on every rank."""

    sends: bool = True
    """Bytes leave the process; not those of a stand-in."""
    background: bool = False
    """`submit` runs calls in a thread, in order."""
    reads_peers: bool = False
    """Ranks read each other's tensors where they are: `exchange` takes any strides, and `combine`."""
    takes_strides: bool = False
    """`exchange` takes tensors of any strides: their bytes in the order of their elements."""
    reduction_elements: int = 0
    """The elements of buffers that a reduction takes, however many there are; 0 if it takes more for longer ones."""
    fuses_moves: bool = False
    """One rank can do for all of them what they have agreed on: `agree_and_run`."""
    captures_graphs: bool = False
    """Calls can be part of a CUDA graph."""


@dataclass(frozen=True, slots=True)
class Request:
    """What ranks compare before a call: its fields as canonical text, and the digest of the text."""

    text: bytes
    digest: bytes


Combine = Callable[[Mapping[int, Sequence[Tensor]]], None]
"""What reads the tensors that other ranks send, by rank."""

OfferPlanner: TypeAlias = Callable[[Sequence[T]], list[Callable[[], None]]]
"""Makes jobs of what the ranks offered, in their order."""


class Comm:
    """Moves bytes between the ranks of one group; what it can do in addition is in its `capabilities`.

    >>> from shardwise.comm import run_local
    >>> def swap(comm):
    ...     mine, theirs = torch.full((2,), comm.rank), torch.empty(2, dtype=torch.int64)
    ...     other = 1 - comm.rank
    ...     comm.exchange({other: [mine]}, {other: [theirs]}, label="swap").wait()
    ...     return theirs.tolist()
    >>> run_local(swap, 2)
    [[1, 1], [0, 0]]
    """

    rank: int
    """This rank, in the numbering that layouts use: the global rank of the world."""
    ranks: tuple[int, ...]
    """The ranks of this comm, in the order in which collectives list them."""
    device: torch.device
    """Where tensors handed to this comm normally live."""
    timeout: float
    """Seconds after which a collective that does not complete raises."""
    process_group: dist.ProcessGroup | None = None
    """The torch group underneath; None when all ranks are threads of one process."""

    def __deepcopy__(self, memo: object) -> Self:
        """The same: a comm is how this process reaches others, of which a copy has no more."""
        return self

    @property
    def world_size(self) -> int:
        """How many ranks this comm has."""
        return len(self.ranks)

    @property
    def capabilities(self) -> Capabilities:
        """What it can do in addition."""
        return Capabilities()

    def find_topology(self) -> Topology | None:
        """Return which ranks share a host, the same on every rank; None if all do, or none of them.

        The first call may ask all ranks.
        """
        return None

    def exchange(
        self,
        sends: TensorsByRank,
        receives: TensorsByRank,
        *,
        label: str,
        request: Request | None = None,
        combine: Combine | None = None,
    ) -> Work:
        """Send tensors to any ranks and receive into tensors from any ranks.

        Keys are ranks. Values are moved as bytes, so every dtype works and the two sides may use different dtypes and
        shapes. On each edge the k-th tensor sent fills the k-th tensor received: their bytes must match, tensors
        without elements left out of the count. A rank may send to itself.

        `request`: the ranks agree on it first; if they do not, every rank raises `DisagreementError`, at the latest in
        `wait()`, and nothing has been received. A transport may send digests and data at once; no other rank can tell.

        Where ranks read each other's memory (`reads_peers`) tensors have any strides, and both sides of an edge one
        shape. Every rank may pass `combine` there: it is called once, in `wait()` or before, with what the others send
        to this rank, in their memory, and only reads it; `receives` then says what is expected, and is not written.
        """
        raise NotImplementedError

    def all_gather(self, tensor: Tensor, *, label: str) -> list[Tensor]:
        """Return every rank's tensor (all of one shape and dtype), in the order of `ranks`."""
        out = tensor.detach().new_empty((self.world_size, *tensor.shape))
        self.all_gather_into(out, tensor.detach().contiguous(), label=label).wait()
        return list(out.unbind(0))

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, label: str) -> Work:
        """Fill the contiguous `out` with every rank's contiguous tensor, one after another in the order of `ranks`."""
        raise NotImplementedError

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Cut the contiguous `tensor` in `world_size` equal runs; reduce all ranks' i-th run into rank i's `out`."""
        raise NotImplementedError

    def all_reduce(self, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """Reduce a contiguous tensor over all ranks, in place; every rank gets the same bits."""
        return self.all_reduce_into(tensor, tensor, op, label=label)

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp = "sum", *, label: str) -> Work:
        """The same into another contiguous tensor of its size and dtype, or into itself."""
        raise NotImplementedError

    def broadcast(self, tensor: Tensor, src: int, *, label: str) -> Work:
        """Overwrite a contiguous tensor on every rank with that of rank `src`, in place."""
        raise NotImplementedError

    def barrier(self, *, label: str) -> None:
        """Return when every rank has called it."""
        raise NotImplementedError

    def subset(self, ranks: Sequence[int]) -> Comm:
        """Return the comm of some of these ranks, ascending; cached; only the ranks named call it."""
        raise NotImplementedError

    def all_gather_bytes(self, data: bytes, *, label: str) -> list[bytes]:
        """Return every rank's bytes in the order of `ranks`; lengths may differ; meant for small objects."""
        raise NotImplementedError

    def submit(self, run: Callable[[], T]) -> BackgroundCall[T]:
        """Make calls of this comm while the rank computes, after those submitted before (`background`)."""
        raise NotImplementedError

    def agree_and_run(
        self, data: bytes, offer: T, plan: OfferPlanner[T], nbytes: int, *, label: str
    ) -> tuple[list[bytes], bool]:
        """Gather bytes, and do what the ranks offer if all of them do and all bytes agree (`fuses_moves`).

        `plan` makes jobs of the offers of all ranks, in their order; each rank passes `nbytes` of tensors. Returns the
        bytes, and whether the jobs are done. Ranks that call `all_gather_bytes` meanwhile have nothing to offer.
        """
        raise NotImplementedError

    def withdraw_next_call(self) -> None:
        """After ranks disagreed: take back the call that some of them have started for their request."""


class CompletedWork:
    """Work that has nothing left to do."""

    def wait(self) -> None:
        """Return at once."""


class PendingWork:
    """Work completed by calling `finish` once; a failure is raised again at every later `wait`.

    >>> work = PendingWork(lambda: print("moved"))
    >>> work.wait()
    moved
    >>> work.wait()
    """

    def __init__(self, finish: Callable[[], None]) -> None:
        self._finish: Callable[[], None] | None = finish
        self._error: BaseException | None = None

    def wait(self) -> None:
        """Run the completion if it has not run; raise what it raised."""
        if self._error is not None:
            raise self._error
        finish, self._finish = self._finish, None
        if finish is None:
            return
        try:
            finish()
        except BaseException as error:
            self._error = error
            raise
