"""Ranks of one host with device memory: a rank reads the others' tensors where they are, by CUDA's IPC.

1. A sender marks the moment at which its tensors are ready in its stream and sends the receiver their places: segment,
   handle, offset, shape, strides. Nothing is packed: a box of a larger tensor is a tensor with strides.
2. The receiver opens the segments it does not know, lets its stream wait for that moment, and uses the tensors as if
   they were its own: copies them into place, or reduces them. It marks the moment after that and confirms.
3. The sender lets its stream wait for the receivers' moments. From then on its program may write to what it lent.

No rank waits for a device here: only the messages are waited for, which say what streams will do. Ranks have GPUs with
peer access, or share one: then one rank does the work of all (`device_leader`).

Streams: a call belongs to the stream on which it was started, but it may be served on another one, by whoever waits.
So the stream that reads and writes first waits for the one that started the call, and both wait for the readers: memory
that is freed after `wait()` goes back to the stream it was made on.

Whether all ranks can read each other's device memory is found out in `device_connect`.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor

from shardwise.comm.faults import TransportError
from shardwise.comm.flat_tensors import Edges, as_bytes
from shardwise.comm.kernels.box_copies import copy_boxes, reduce_tensors
from shardwise.comm.kernels.run_sums import RunSum, reduce_runs
from shardwise.comm.protocol import PendingWork, ReduceOp, TakeLent, Work
from shardwise.comm.transports.device_leader import (
    CallBoxes,
    CutBoxes,
    KnownCalls,
    LeaderWork,
    LedCall,
    RankBoxes,
    TensorsByRank,
    boxes_as_they_are,
)
from shardwise.comm.transports.device_memory import LENT, READ
from shardwise.comm.transports.device_peers import DevicePeers
from shardwise.comm.transports.links import Frame, FrameKind, PeerSockets, different_sizes_error
from shardwise.comm.transports.peer_calls import CollectCall, PeerCall, PeerCalls
from shardwise.transfer.device_cost import is_one_shot_faster


class LendCall(PeerCall):
    """One call in which ranks lend each other tensors: `take` is called once, with those of all expected ranks."""

    def __init__(
        self,
        call: str,
        lent: Mapping[int, Sequence[Tensor]],
        expected: Iterable[int],
        take: TakeLent,
        peers: DevicePeers,
    ) -> None:
        super().__init__(call, expected, lent)
        self._lent, self._take, self._peers = lent, take, peers
        self._readers, self._arrived = tuple(lent), dict[int, bytes]()
        self._started_on, self._stream = peers.current_stream(), None

    def take(self, frame: Frame) -> Iterable[int]:
        """Keep where the tensors are; use them after the last message."""
        self._arrived[frame.rank] = bytes(frame.body)
        if self.expected:
            return ()
        self.use()
        return self._arrived

    def use(self) -> None:
        """Use the tensors of all ranks, on the current stream."""
        events, self._stream = self._peers.events, self._peers.current_stream()
        self._peers.order_streams(self._stream, self._started_on)
        for rank in self._arrived:
            events.wait(rank, LENT, self.number, self._stream)
        self._take({rank: self._peers.read(rank, self._arrived[rank]) for rank in sorted(self._arrived)})
        if self._arrived:
            self._peers.mark(READ, self.number, self._stream)

    def settle(self) -> None:
        """Let the current stream wait for what was read and written in this call."""
        stream = self._peers.current_stream()
        self._peers.order_streams(stream, self._stream)
        self._peers.await_readers(self._readers, self.number, stream)
        self._peers.order_streams(self._started_on, stream)
        self._lent = {}

    def give_up(self, ended: set[int]) -> None:
        """After a failure: what ranks read of this one's memory, they have read before its program goes on."""
        self._peers.await_possible_readers(set(self._readers) - ended, self.number)


class SameHostDeviceEngine:
    """Moves device tensors between processes of one host."""

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        links: PeerSockets,
        peers: DevicePeers,
        timeout: float,
        *,
        has_leader: bool = False,
        shares_gpu: bool = False,
    ) -> None:
        self.shares_gpu = shares_gpu  # whether two of the ranks have one GPU
        self._has_leader, self._known = has_leader, KnownCalls()
        self._rank, self._ranks, self._peers, self.device = rank, ranks, peers, peers.device
        self._index = ranks.index(rank)
        self._others = tuple(r for r in ranks if r != rank)
        self._calls = PeerCalls(rank, links, self._others, timeout)

    @property
    def reduces_in_one_call(self) -> bool:
        """Whether each reduction is one call, which can be taken back while ranks agree: the leader makes it."""
        return self._has_leader

    @property
    def awaited(self) -> tuple[int, ...]:
        """The ranks that the present wait is for."""
        return self._calls.awaited

    def lend(
        self, sends: Mapping[int, Sequence[Tensor]], receives: Iterable[int], take: TakeLent, *, call: str
    ) -> Work:
        """Lend tensors of any strides to ranks; `take` reads what others lend, on this rank's stream."""
        with self._calls.lock, self._abort_if_raised(call):
            messages, lent = self._peers.describe(sends, rank=self._rank, call=call)
            operation = LendCall(call, lent, receives, take, self._peers)
            number = self._calls.register(operation)
            if lent:
                self._peers.mark(LENT, number, self._peers.current_stream())
            if not operation.expected:
                operation.use()
            self._calls.start(operation, FrameKind.RANGES, messages)
        return PendingWork(partial(self._finish, operation))

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Copy what is lent into what is received."""
        return self.exchange_boxes(sends, receives, call=call)

    def exchange_boxes(self, sends: TensorsByRank, receives: TensorsByRank, *, call: str) -> Work:
        """Copy tensors of any strides, those that this rank sends to itself included."""
        if self._has_leader:
            return self._lead(boxes_as_they_are(RankBoxes(sends, receives)), partial(_copy_all, call), call)
        own = list(zip(receives.get(self._rank, ()), sends.get(self._rank, ()), strict=True))

        def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
            copy_boxes([*own, *(pair for r in lent for pair in _pair_boxes(call, r, self._rank, lent[r], receives[r]))])

        others = {r: tensors for r, tensors in sends.items() if r != self._rank}
        return self.lend(others, (r for r in receives if r != self._rank), take, call=call)

    def exchange_cut(self, key: Hashable, bases: Sequence[Tensor], cut: CutBoxes, *, call: str) -> Work:
        """Copy boxes that `cut` makes of whole tensors; it need not be called where the leader knows them."""
        if not self._has_leader:
            return self.exchange_boxes(*cut(), call=call)
        return self._lead(CallBoxes(key, bases, lambda: RankBoxes(*cut())), partial(_copy_all, call), call)

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Every rank reads every other rank's tensor."""
        parts = list(out.view(len(self._ranks), -1))
        if parts[self._index].data_ptr() != tensor.data_ptr():
            parts[self._index].copy_(tensor)
        return self._share(parts, tensor, call)

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Every rank reads its run of all others, and reduces them in rank order."""
        if self._has_leader:
            boxes = CallBoxes("reduce_scatter", (tensor, out), partial(self._cut_runs, out, tensor))
            return self._lead(boxes, partial(_reduce_all, call, op), call)
        return self._reduce(out, list(tensor.view(len(self._ranks), -1)), op, call)

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce small tensors on every rank; reduce-scatter and gather large ones, in place."""
        if not self._has_leader and is_one_shot_faster(tensor.nbytes, len(self._ranks)):
            total = torch.empty_like(tensor)
            return PendingWork(partial(_copy_after, self._reduce_at_once(total, tensor, op, call), tensor, total))
        return self.all_reduce_into(tensor, tensor, op, call=call)

    def all_reduce_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """The same, into another tensor: in one call, unless ranks with GPUs of their own had to read too much."""
        if self._has_leader:
            boxes = RankBoxes({self._rank: [tensor]}, {self._rank: [out]})
            return self._lead(boxes_as_they_are(boxes), partial(_reduce_to_all, call, op), call)
        if is_one_shot_faster(tensor.nbytes, len(self._ranks)):
            return self._reduce_at_once(out, tensor, op, call)
        runs, results = (list(t.tensor_split(len(self._ranks))) for t in (tensor, out))
        self._reduce(results[self._index], runs, op, call).wait()
        return self._share(results, results[self._index], call)

    def _reduce_at_once(self, out: Tensor, tensor: Tensor, op: ReduceOp, call: str) -> Work:
        return self._reduce(out, [tensor] * len(self._ranks), op, call)

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Every rank reads the source's tensor."""
        view = [as_bytes(tensor, label=call)] if tensor.numel() else []
        sends = dict.fromkeys(self._others, view) if self._rank == src and view else {}
        return self.exchange(sends, {src: view} if self._rank != src and view else {}, call=call)

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Send the bytes along with the messages."""
        return self._start_collecting(data, call)()

    @property
    def calls(self) -> int:
        """The number of the last call that was started."""
        return self._calls.started

    def start_agreeing(self, data: bytes, *, call: str) -> Callable[[], list[bytes]]:
        """Send bytes to all others; returns what waits for theirs. The next call may be started before that.

        Its messages are taken from those ranks only that sent the same bytes.
        """
        return self._start_collecting(data, call, agreeing=True)

    @property
    def is_agreeing(self) -> bool:
        """Whether ranks compare what they ask for: a call that is started now may be withdrawn."""
        return self._calls.agreeing is not None

    def withdraw_call(self, number: int) -> None:
        """Take back a call that some ranks have started and others have not."""
        self._calls.withdraw(number)

    def _start_collecting(self, data: bytes, call: str, *, agreeing: bool = False) -> Callable[[], list[bytes]]:
        operation = CollectCall(call, self._others, data)
        with self._calls.lock:
            self._calls.register(operation)
            self._calls.start(operation, FrameKind.DATA, dict.fromkeys(self._others, data))
            self._calls.agreeing = operation if agreeing else None

        def finish() -> list[bytes]:
            self._wait(operation)
            self._calls.agreeing = None
            return [data if rank == self._rank else operation.taken[rank] for rank in self._ranks]

        return finish

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify all peers that this rank has stopped, and refuse further calls."""
        self._calls.abort(reason, ranks)

    def close(self) -> None:
        """Close the connections."""
        self._calls.close()

    def _share(self, parts: Sequence[Tensor], mine: Tensor, call: str) -> Work:
        """Lend one tensor to all others and copy theirs into `parts`, in group order."""
        edges = {r: [t] for r, t in zip(self._ranks, parts, strict=True) if r != self._rank and t.numel()}
        return self.exchange({r: [mine] for r in self._others} if mine.numel() else {}, edges, call=call)

    def _cut_runs(self, out: Tensor, tensor: Tensor) -> RankBoxes:
        runs = tensor.view(len(self._ranks), -1)
        return RankBoxes({r: [run] for r, run in zip(self._ranks, runs, strict=True)}, {self._rank: [out]})

    def _reduce(self, out: Tensor, runs: Sequence[Tensor], op: ReduceOp, call: str) -> Work:
        """Lend the i-th run to the i-th rank and reduce what all ranks lend and this rank's own run."""
        sends = {r: [run] for r, run in zip(self._ranks, runs, strict=True) if r != self._rank and run.numel()}
        own = runs[self._index]
        expected = self._others if own.numel() else ()

        def take(lent: Mapping[int, Sequence[Tensor]]) -> None:
            if own.numel():
                for rank in lent:
                    _pair_boxes(call, rank, self._rank, lent[rank], [out])
                terms = [own if rank == self._rank else lent[rank][0] for rank in self._ranks]
                reduce_tensors(out, terms, op)

        return self.lend(sends, expected, take, call=call)

    def _lead(self, boxes: CallBoxes, work: LeaderWork, call: str) -> Work:
        """Let the leader do a call's work for all ranks."""
        with self._calls.lock, self._abort_if_raised(call):
            operation = LedCall(call, self._rank, self._ranks, boxes, work, self._peers, self._known)
            self._calls.register(operation)
            self._calls.start(operation, FrameKind.RANGES, operation.describe())
        return PendingWork(partial(self._finish, operation))

    def _finish(self, operation: LendCall | LedCall) -> None:
        self._wait(operation)
        operation.settle()

    def _wait(self, operation: PeerCall) -> None:
        with self._abort_if_raised(operation.call):
            self._calls.wait(operation)

    @contextmanager
    def _abort_if_raised(self, call: str) -> Iterator[None]:
        """Abort for a rank that ran out of memory or was interrupted: its program may write to what it lent."""
        try:
            yield
        except TransportError:
            raise  # whoever called finds out the cause, and then aborts
        except BaseException as error:
            self.abort(f"{call}: rank {self._rank} was ended by {type(error).__name__}", (self._rank,))
            raise


def _copy_after(work: Work, target: Tensor, source: Tensor) -> None:
    """Overwrite a tensor after the others have read it."""
    work.wait()
    target.copy_(source)


def _pair_boxes(
    call: str, src: int, dst: int, sent: Sequence[Tensor], wanted: Sequence[Tensor]
) -> list[tuple[Tensor, Tensor]]:
    """The k-th tensor that is received and the k-th that is sent; they must match."""
    if [t.shape for t in sent] != [t.shape for t in wanted]:
        theirs, ours = [t.nbytes for t in sent], [t.nbytes for t in wanted]
        if theirs != ours:
            raise different_sizes_error(call, src, dst, f"{theirs} bytes", str(ours))
        shapes = [str([tuple(t.shape) for t in each]) for each in (sent, wanted)]
        raise different_sizes_error(call, src, dst, f"shapes {shapes[0]}", shapes[1])
    return list(zip(wanted, sent, strict=True))


def _copy_all(call: str, boxes: Mapping[int, RankBoxes]) -> Callable[[], None] | None:
    """Make the copies of all ranks."""
    pairs: list[tuple[Tensor, Tensor]] = []
    for src, mine in boxes.items():
        for dst, theirs in boxes.items():
            pairs += _pair_boxes(call, src, dst, mine.sends.get(dst, ()), theirs.receives.get(src, ()))
    return copy_boxes(pairs)


def _reduce_all(call: str, op: ReduceOp, boxes: Mapping[int, RankBoxes]) -> Callable[[], None] | None:
    """Make the reductions of all ranks: the i-th rank gets the sum of all ranks' i-th runs."""
    sums: list[RunSum] = []
    for dst, mine in boxes.items():
        out = mine.receives[dst][0]
        terms = [term for src in boxes for _, term in _pair_boxes(call, src, dst, boxes[src].sends[dst], [out])]
        if out.numel():
            sums.append((terms, [out]))
    return reduce_runs(sums, op)


def _reduce_to_all(call: str, op: ReduceOp, boxes: Mapping[int, RankBoxes]) -> Callable[[], None] | None:
    """Reduce the tensors of all ranks; all of them get the result."""
    first = next(iter(boxes))
    targets = [mine.receives[rank][0] for rank, mine in boxes.items()]
    terms = [t for r in boxes for _, t in _pair_boxes(call, r, first, boxes[r].sends[r], targets[:1])]
    return reduce_runs([(terms, targets)], op) if targets[0].numel() else None
