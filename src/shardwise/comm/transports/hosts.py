"""Ranks of several hosts: memory is read within a host, the group's backend carries bytes between hosts.

What counts is how many bytes pass between hosts. Each byte enters a host once and is passed on inside:

1. An exchange uses both ways at once: what is sent to ranks of this host goes through memory, the rest over the
   backend. Equal bytes for several ranks of a host are sent by a plan that knows them (`transfer/reductions.py`).
2. A gather sends a part of this rank's run to each rank of another host; these then share what they got.
3. A reduction first reduces within the host: each rank of the host reduces a part of every run that another host
   needs, and sends it to the rank that needs it, which adds up the sums of the hosts.
4. An all-reduce is a reduction in runs, one for each rank, and a gather of them. So all ranks of a host take part in
   what passes between hosts, and hosts may have different numbers of ranks.

Collectives go through in windows, several of which are on their way at a time: while one passes between hosts, the
next is reduced within. Addends are combined in a fixed order, first those of a host, then the sums of the hosts; every
result is computed on one rank and sent to the others, so that all have the same bits. A collective is complete when the
call returns.

Few bytes are gathered by the backend's own collective: one message costs less than one between hosts and two within.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor

from shardwise._text import package_logger
from shardwise.comm.flat_tensors import Edges, as_bytes, finish_average, reduce_runs
from shardwise.comm.protocol import CompletedWork, PendingWork, ReduceOp, Work
from shardwise.comm.transports.engine import Engine
from shardwise.comm.transports.host_memory import HostNeighbours

_log = package_logger(__name__)
_SMALL_BYTES = 1 << 12
_WINDOW_BYTES = (1 << 20, 8 << 20)  # the least and the most of all runs together
_WINDOWS = 8  # if they are not too small or too large: the first and the last one do not overlap with others
_WINDOWS_AT_ONCE = 3


class SeveralHostsEngine(Engine):
    """Moves host tensors between ranks of several hosts.

    `hosts` lists the ranks of each host, `ranks` all of them in group order; `near` connects those of this rank's host,
    unless it is alone there; `far` connects all ranks.
    """

    device = torch.device("cpu")

    def __init__(
        self,
        rank: int,
        ranks: tuple[int, ...],
        hosts: Sequence[tuple[int, ...]],
        near: Engine | None,
        far: Engine,
    ) -> None:
        self._rank, self._ranks, self._hosts, self._near, self._far = rank, ranks, tuple(hosts), near, far
        self._own = next(members for members in hosts if rank in members)
        self._index = {r: i for i, r in enumerate(self._ranks)}
        self._place = self._own.index(rank)
        self._outside = tuple(r for r in self._ranks if r not in self._own)
        self._waits_for: Engine = far
        self._kept: list[Tensor] = []

    @property
    def awaited(self) -> tuple[int, ...]:  # type: ignore[override]  # computed
        """The ranks that the present wait is for."""
        return self._waits_for.awaited

    def exchange(self, sends: Edges, receives: Edges, *, call: str) -> Work:
        """Start what goes between hosts and what stays within one."""
        far = self._far.exchange(self._pick(sends, False), self._pick(receives, False), call=call)
        return self._start_near(self._pick(sends, True), self._pick(receives, True), call, far)

    def all_gather_into(self, out: Tensor, tensor: Tensor, *, call: str) -> Work:
        """Gather a part of each run on each rank of this host, and share them."""
        if out.nbytes <= _SMALL_BYTES:
            self._waits_for = self._far
            return self._far.all_gather_into(out, tensor, call=call)
        runs = out.view(len(self._ranks), -1)
        mine = runs[self._index[self._rank]]
        if mine.data_ptr() != tensor.data_ptr():
            mine.copy_(tensor)
        return self._run(self._gather([run[at] for run in runs], call) for at in _cut_windows(tensor, len(self._ranks)))

    def reduce_scatter_into(self, out: Tensor, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce the runs within each host, then the sums of the hosts."""
        runs = tensor.view(len(self._ranks), -1)
        return self._run(
            self._reduce(out[at], [run[at] for run in runs], op, call) for at in _cut_windows(out, len(self._ranks))
        )

    def all_reduce(self, tensor: Tensor, op: ReduceOp, *, call: str) -> Work:
        """Reduce a run on each rank, and gather them."""
        if tensor.nbytes <= _SMALL_BYTES:
            self._waits_for = self._far
            return self._far.all_reduce(tensor, op, call=call)
        cut = (tensor[at].tensor_split(len(self._ranks)) for at in _cut_windows(tensor))
        return self._run(self._reduce_and_gather(list(runs), op, call) for runs in cut)

    def broadcast(self, tensor: Tensor, src: int, *, call: str) -> Work:
        """Send a part to each rank of another host, which share them; ranks of the source's host read all of it."""
        view = as_bytes(tensor, label=call)
        self.all_gather_bytes(b"", call=call)  # a source does not hear from ranks that await another one
        return self._run(self._spread(view[at], src, call) for at in _cut_windows(view))

    def all_gather_bytes(self, data: bytes, *, call: str) -> list[bytes]:
        """Gather over the backend, which compares what the ranks call."""
        self._waits_for = self._far
        return self._far.all_gather_bytes(data, call=call)

    def abort(self, reason: str, ranks: Iterable[int]) -> None:
        """Notify the ranks of this host; the others learn it from the notes in the store."""
        for engine in (self._near, self._far):
            if engine is not None:
                engine.abort(reason, ranks)

    def close(self) -> None:
        """Close the connections."""
        for engine in (self._near, self._far):
            if engine is not None:
                engine.close()

    def _pick(self, edges: Edges, near: bool) -> Edges:
        return {rank: tensors for rank, tensors in edges.items() if (rank in self._own) == near}

    def _start_near(self, sends: Edges, receives: Edges, call: str, far: Work | None = None) -> Work:
        """An exchange within the host, and work between hosts that was started before."""
        near = None if self._near is None else self._near.exchange(sends, receives, call=call)
        return PendingWork(partial(self._wait, near, far))

    def _wait(self, near: Work | None, far: Work | None) -> None:
        """Within the host first: there bytes move only while ranks wait, between hosts they do so anyway."""
        for engine, work in ((self._near, near), (self._far, far)):
            if engine is not None and work is not None:
                self._waits_for = engine
                work.wait()

    def _only(self, far: Work) -> Work:
        return PendingWork(partial(self._wait, None, far))

    def _run(self, windows: Iterable[Iterator[Work]]) -> Work:
        """Run windows, each a series of works, several of them at a time and in the same order on every rank."""
        running: deque[tuple[Iterator[Work], Work]] = deque()
        for window in windows:
            running.append((window, next(window)))
            while len(running) >= _WINDOWS_AT_ONCE:
                _advance(running)
        while running:
            _advance(running)
        return CompletedWork()

    def _reduce_and_gather(self, runs: list[Tensor], op: ReduceOp, call: str) -> Iterator[Work]:
        yield from self._reduce(runs[self._index[self._rank]], runs, op, call)
        yield from self._gather(runs, call)

    def _reduce(self, out: Tensor, runs: Sequence[Tensor], op: ReduceOp, call: str) -> Iterator[Work]:
        """Reduce every rank's run of this rank into `out`."""
        own = self._own
        adding: ReduceOp = "sum" if op == "avg" else op
        pieces = [self._pieces_for(place, runs) for place in range(len(own))]
        lengths = [len(piece) for piece in pieces[self._place]]
        others = [members for members in self._hosts if members is not own]
        rooms = [sum(lengths)] * (len(own) + 1) + [len(others) * len(out)]
        memory = self._take(sum(rooms) * out.element_size())
        *addends, sums, rest = memory[: sum(rooms) * out.element_size()].view(out.dtype).split_with_sizes(rooms)
        for target, piece in zip(addends[self._place].split_with_sizes(lengths), pieces[self._place], strict=True):
            target.copy_(piece)
        sends = {r: pieces[place] for place, r in enumerate(own) if r != self._rank}
        receives = {r: addends[place].split_with_sizes(lengths) for place, r in enumerate(own) if r != self._rank}
        yield self._start_near(_edges(sends), _edges(receives), call)
        reduce_runs(sums, addends, adding)
        mine, *parts = sums.split_with_sizes(lengths)
        totals = dict(zip(others, rest.view(len(others), len(out)), strict=True))
        far_receives: dict[int, Sequence[Tensor]] = {}
        for members, total in totals.items():
            far_receives |= {r: [p] for r, p in zip(members, total.tensor_split(len(members)), strict=True)}
        far_sends = {r: [part] for r, part in zip(self._outside, parts, strict=True)}
        yield self._only(self._far.exchange(_edges(far_sends), _edges(far_receives), call=call))
        reduce_runs(out, [totals.get(members, mine) for members in self._hosts], adding)
        finish_average(out, op, len(self._ranks))
        self._kept.append(memory)

    def _pieces_for(self, place: int, runs: Sequence[Tensor]) -> list[Tensor]:
        """What the rank at a place of this host reduces: its own run, and its part of each run for another host."""
        parts = [runs[self._index[r]].tensor_split(len(self._own))[place] for r in self._outside]
        return [runs[self._index[self._own[place]]], *parts]

    def _gather(self, runs: Sequence[Tensor], call: str) -> Iterator[Work]:
        """Fill the runs of all other ranks with theirs."""
        mine = runs[self._index[self._rank]]
        sends, receives = self._send_parts(mine), {r: [self._part(runs[self._index[r]])] for r in self._outside}
        far = self._far.exchange(sends, _edges(receives), call=call)
        yield self._share([mine], {r: [runs[self._index[r]]] for r in self._own}, call, far)
        passed = {
            r: [self._part(runs[self._index[far_rank]], place) for far_rank in self._outside]
            for place, r in enumerate(self._own)
        }
        yield self._share(passed[self._rank], passed, call)

    def _spread(self, view: Tensor, src: int, call: str) -> Iterator[Work]:
        """Fill the view of every rank with that of the source."""
        sends, receives = self._send_parts(view) if self._rank == src else {}, {src: [self._part(view)]}
        far = self._far.exchange(sends, {} if src in self._own else _edges(receives), call=call)
        if src in self._own:
            is_source = self._rank == src
            near_sends = {r: [view] for r in self._own if r != src} if is_source else {}
            yield self._start_near(near_sends, {} if is_source else {src: [view]}, call, far)
            return
        yield self._only(far)
        parts = {r: [self._part(view, place)] for place, r in enumerate(self._own)}
        yield self._share(parts[self._rank], parts, call)

    def _send_parts(self, run: Tensor) -> Edges:
        """For each rank of another host its part of a run."""
        others = [members for members in self._hosts if members is not self._own]
        return _edges({r: [part] for host in others for r, part in zip(host, run.tensor_split(len(host)), strict=True)})

    def _part(self, run: Tensor, place: int | None = None) -> Tensor:
        """The part of a run from another host that the rank at a place of this host gets: this rank without one."""
        return run.tensor_split(len(self._own))[self._place if place is None else place]

    def _share(
        self, mine: Sequence[Tensor], parts: dict[int, list[Tensor]], call: str, far: Work | None = None
    ) -> Work:
        """Send tensors to all others of this host and receive theirs into `parts`."""
        others = [r for r in self._own if r != self._rank]
        sends, receives = {r: mine for r in others}, {r: parts[r] for r in others}
        return self._start_near(_edges(sends), _edges(receives), call, far)

    def _take(self, size: int) -> Tensor:
        """Scratch memory of so many bytes, kept memory if there is enough: fresh memory is slow to touch."""
        del self._kept[_WINDOWS_AT_ONCE:]
        found = next((i for i, kept in enumerate(self._kept) if len(kept) >= size), None)
        return self._kept.pop(found) if found is not None else torch.empty(size, dtype=torch.uint8, device="cpu")


def _cut_windows(run: Tensor, runs: int = 1) -> Iterator[slice]:
    """Cut a run, of so many equal ones, in the windows that go through one after the other."""
    least, most = _WINDOW_BYTES
    size = min(max(run.nbytes * runs // _WINDOWS, least), most)
    step = max(1, size // (run.element_size() * runs))
    return (slice(at, at + step) for at in range(0, len(run), step))


def _advance(running: deque[tuple[Iterator[Work], Work]]) -> None:
    """Complete one work of each window and start the next one."""
    for _ in range(len(running)):
        window, work = running.popleft()
        work.wait()
        following = next(window, None)
        if following is not None:
            running.append((window, following))


def _edges(tensors: Mapping[int, Sequence[Tensor]]) -> Edges:
    """One side of an exchange: byte views, without those that have no bytes."""
    views = {r: [as_bytes(t, label="collective") for t in each if t.numel()] for r, each in tensors.items()}
    return {r: each for r, each in views.items() if each}


def compose_engines(rank: int, ranks: tuple[int, ...], found: HostNeighbours, far: Engine) -> Engine:
    """The engine that suits what the ranks found out about their hosts, the same kind on every rank."""
    if not found.connected or found.hosts is None:
        return far
    numbered = list(zip(ranks, found.hosts, strict=True))
    hosts = [tuple(r for r, host in numbered if host == number) for number in sorted(set(found.hosts))]
    if len(hosts) == 1:
        assert found.engine is not None
        return found.engine
    _log.info(
        "%d ranks on %d hosts: memory is read within a host, sockets are used between hosts", len(ranks), len(hosts)
    )
    return SeveralHostsEngine(rank, ranks, hosts, found.engine, far)
