"""Moves as operators of torch: `shardwise::move`, and its two halves `shardwise::start_moves` and `wait_moves`.

1. Where a program is traced, a move is a call of `shardwise::move` on this rank's local tensors. Which move it is, is
   a constant: a number under which a table has the layouts, the comm and the rest (`MoveRecord`). The number is a
   digest of the record, so that code that was compiled and cached means the same move in another process. The table
   has a move as long as its comm lives.
2. A graph may start a group of moves early and wait for them late; a slot says which start a wait is for. Both return
   a token, which orders them before what follows. A wait takes the local tensors again: they stay alive until then.
3. On tensors without data (fake tensors) the results are empty tensors of the destination's shapes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from threading import Lock
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from shardwise._torch_graphs import define_operator
from shardwise.comm import Comm
from shardwise.comm.traced import real_comm
from shardwise.geometry import Layout, format_layout
from shardwise.tensor.moving.execute import RunningMoves, TransferJob, execute, resolve_lazy, start_transfers
from shardwise.tensor.moving.parts import notify_watchers, plan_for_rank
from shardwise.tensor.moving.reductions import rescale
from shardwise.tensor.moving.row_exchange import RowExchange, exchange_rows, plan_row_exchange
from shardwise.tensor.recorder import profiled_move
from shardwise.transfer import Transfer

AGAIN = ", again in backward"  # ends the label of a move whose result is not kept for the backward pass


@dataclass(frozen=True, slots=True, weakref_slot=True)
class MoveRecord:
    """One move: what `shardwise::move` does for a number."""

    src: Layout
    dst: Layout
    comm: Comm
    dtype: torch.dtype
    label: str
    max_buffer_bytes: int | None
    scale: tuple[int, int]
    out_dtype: torch.dtype | None = None  # of the results, if it is another one
    device: torch.device | None = None  # of the tensor, for a rank without parts, if it is not the comm's

    def text(self) -> str:
        """The move in words that are the same on every rank."""
        return (
            f"{self.label}: {self.dtype} {_layout_text(self.src)} -> {_layout_text(self.dst)} x {self.scale} "
            f"in {self.max_buffer_bytes} as {self.out_dtype or self.dtype}"
        )

    @property
    def in_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of this rank's local tensors before the move."""
        return self.src.local_shapes(self.comm.rank)

    @property
    def out_shapes(self) -> tuple[tuple[int, ...], ...]:
        """The shapes of this rank's local tensors after the move."""
        return self.dst.local_shapes(self.comm.rank)

    def run(self, locals_: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Carry the move out."""
        rows = self._plan_rows() if self.src.depends_on_data or self.dst.depends_on_data else None
        if rows is not None:
            notify_watchers(rows, self.label, self.src, self.dst)
            moved: tuple[Tensor, ...] = (exchange_rows(rows, locals_[0], self.comm, self.label),)
        else:
            plan = self.make_plan()
            notify_watchers(plan, self.label, self.src, self.dst)
            with profiled_move(self.label, self.src, self.dst):
                moved = execute(
                    plan, locals_, self.comm, self.dtype, self.label, self.out_dtype, self.device_of(locals_)
                )
        for tensor in moved:
            rescale(tensor, self.scale)
        return moved

    def device_of(self, locals_: Sequence[Tensor]) -> torch.device:
        """Where the results are: with this rank's local tensors, and without those where the tensor is."""
        return locals_[0].device if locals_ else self.device or self.comm.device

    def _plan_rows(self) -> RowExchange | None:
        """The move as one of rows, where it is one and all ranks of the comm have some part of the tensor."""
        if len(self.src.ranks) != self.comm.world_size:
            return None
        return plan_row_exchange(self.src, self.dst, self.dtype.itemsize, self.comm.rank)

    def make_plan(self) -> Transfer:
        """How the bytes travel."""
        return plan_for_rank(self.src, self.dst, self.dtype.itemsize, self.max_buffer_bytes, self.comm)

    def make_job(self, locals_: Sequence[Tensor]) -> TransferJob:
        """The move as one of several that share an exchange."""
        plan = self.make_plan()
        notify_watchers(plan, self.label, self.src, self.dst)
        sources = resolve_lazy([t.detach() for t in locals_])
        return TransferJob(plan, sources, self.dtype, self.device_of(locals_), self.out_dtype)


def _layout_text(layout: Layout) -> str:
    return f"{layout!r} {layout._layout_digest.hex()}" if len(layout.table) > 64 else format_layout(layout, None)


_records: WeakValueDictionary[int, MoveRecord] = WeakValueDictionary()
_records_lock = Lock()
_KEPT = "_move_records"  # of a comm: those of its moves that have numbers
_running: dict[tuple[int, ...], RunningMoves] = {}


def record_move(record: MoveRecord) -> int:
    """The number of a move; the same one for the same move, in every process."""
    text = f"{record.text()} on rank {record.comm.rank} of {record.comm.ranks}"
    again = 0
    while True:  # comms of the same ranks have numbers of their own: `run_local` makes new ones
        digest = hashlib.blake2b(f"{text} {again}".encode(), digest_size=8).digest()
        number = int.from_bytes(digest, "little") >> 1
        with _records_lock:
            known = _records.setdefault(number, record)
            if known is record:
                record.comm.__dict__.setdefault(_KEPT, []).append(record)
        if known.comm is record.comm and known == record:
            return number
        again += 1


def find_record(number: int) -> MoveRecord:
    """The move that has a number."""
    return _records[number]


def call_move_operator(record: MoveRecord, locals_: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Make a move through `shardwise::move`, so that a trace holds it."""
    number = record_move(
        MoveRecord(
            record.src,
            record.dst,
            real_comm(record.comm),
            record.dtype,
            record.label,
            record.max_buffer_bytes,
            record.scale,
            record.out_dtype,
            record.device,
        )
    )
    return tuple(torch.ops.shardwise.move(list(locals_), number))


def _run_move(locals_: list[Tensor], transfer: int) -> list[Tensor]:
    return list(_records[transfer].run(locals_))


def _split_locals(locals_: Sequence[Tensor], records: Sequence[MoveRecord]) -> list[Sequence[Tensor]]:
    """The local tensors of each move of a group."""
    found, position = [], 0
    for record in records:
        found.append(locals_[position : position + len(record.in_shapes)])
        position += len(record.in_shapes)
    return found


def _start_moves(locals_: list[Tensor], after: list[Tensor], transfers: list[int], slot: int) -> Tensor:
    records = [_records[number] for number in transfers]
    jobs = [record.make_job(parts) for record, parts in zip(records, _split_locals(locals_, records), strict=True)]
    _running[slot, *transfers] = start_transfers([jobs], records[0].comm, records[0].label)
    return _make_token()


def _wait_moves(locals_: list[Tensor], after: list[Tensor], transfers: list[int], slot: int) -> list[Tensor]:
    """The destination tensors of all moves of a group, and a token."""
    outputs: list[Tensor] = []
    running = _running.pop((slot, *transfers))
    with profiled_move(f"{_records[transfers[0]].label}: wait"):
        results = running.wait()
    for number, moved in zip(transfers, results, strict=True):
        for tensor in moved:
            rescale(tensor, _records[number].scale)
        outputs += moved
    return [*outputs, _make_token()]


def _make_token() -> Tensor:
    return torch.empty(0, dtype=torch.float32, device="cpu")


def _fake_results(locals_: Sequence[Tensor], transfers: Sequence[int]) -> list[Tensor]:
    records = [_records[number] for number in transfers]
    outputs = []
    for record, parts in zip(records, _split_locals(locals_, records), strict=True):
        dtype, device = record.out_dtype or record.dtype, record.device_of(parts)
        outputs += [torch.empty(shape, dtype=dtype, device=device) for shape in record.out_shapes]
    return outputs


define_operator(
    "move(Tensor[] locals, int transfer) -> Tensor[]",
    _run_move,
    lambda locals_, transfer: _fake_results(locals_, [transfer]),
)
define_operator(
    "start_moves(Tensor[] locals, Tensor[] after, int[] transfers, int slot) -> Tensor",
    _start_moves,
    lambda locals_, after, transfers, slot: _make_token(),
)
define_operator(
    "wait_moves(Tensor[] locals, Tensor[] after, int[] transfers, int slot) -> Tensor[]",
    _wait_moves,
    lambda locals_, after, transfers, slot: [*_fake_results(locals_, transfers), _make_token()],
)
