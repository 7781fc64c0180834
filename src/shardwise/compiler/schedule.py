"""When do the moves of a graph start, and when are they waited for?

1. A move may start once its inputs are computed; views and casts of inputs are computed with the start. It is waited
   for before the first node that uses its result.
2. Walking through the nodes, each move starts as soon as it may, those that are used first before others, as long as
   the results of moves that are under way stay within a memory limit. So parameters of the next layers are gathered,
   and gradients of the last ones reduced, while others are computed with.
3. Small moves that may start share an exchange. They are collected up to a size, or until one of them is needed.
4. Each start and wait takes a token of the one before, so that no compiler changes their order: all ranks must keep it.

Everything is decided from layouts and the order of nodes, which are the same on every rank; the ranks compare the
result.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from operator import getitem
from typing import Any

import torch
from torch.fx import Graph, GraphModule, Node

from shardwise._torch import aten, present_ops
from shardwise.comm.stand_in import BEFORE_BACKWARD
from shardwise.tensor.move import AGAIN, Move, find_numbered

SMALL_BYTES = 256 << 10
BUCKET_BYTES = 1 << 20
VIEWS = set(
    present_ops(
        [
            aten.detach.default,
            aten.alias.default,
            aten.view.default,
            aten._unsafe_view.default,
            aten.reshape.default,
            aten.t.default,
            aten.transpose.int,
            aten.permute.default,
        ]
    )
)
FREE = VIEWS | set(present_ops([aten._to_copy.default, aten.clone.default]))


@dataclass(eq=False)
class GraphMove:
    """One move of a graph: where it may start at the earliest, and where its result is used first."""

    node: Any  # a node, or the number of a move in a rehearsal
    move: Move
    ready: int
    use: int
    needs: list[GraphMove] = field(default_factory=list)
    state: str = "waiting"  # then "running", then "done"

    @cached_property
    def size(self) -> int:
        """The bytes of its result on the rank that gets most."""
        return max(self.move.dst.elements_per_rank().values(), default=0) * self.move.dtype.itemsize

    def may_start(self, index: int) -> bool:
        """Whether its inputs are computed before the node of this index."""
        return self.state == "waiting" and self.ready <= index and all(m.state == "done" for m in self.needs)


@dataclass
class Schedule:
    """The moves of a graph in order, as texts that are the same on every rank, and as lines for people."""

    events: list[str] = field(default_factory=list)
    lines: list[str] = field(default_factory=list)
    count: int = 0

    @property
    def summary(self) -> str:
        """How many moves there are, and in how many exchanges."""
        return f"{self.count} moves in {sum(e.startswith('start') for e in self.events)} exchanges"


def schedule_moves(module: GraphModule, memory_limit: int) -> Schedule:
    """Split the moves of a graph in starts and waits, in place."""
    graph = module.graph
    _repeat_gathers(graph)
    _view_results_late(graph)
    nodes = list(graph.nodes)
    moves = _find_moves(nodes)
    schedule, writer, timeline = Schedule(count=len(moves)), _Writer(graph), Timeline(moves, memory_limit)
    if moves:
        first = next(i for i, node in enumerate(nodes) if node.op != "placeholder")
        for index in range(first, len(nodes)):
            for kind, group in timeline.events_before(index, at_start=index == first):
                schedule.events.append(f"{kind} " + " + ".join(m.move.text() for m in group))
                writer.write(kind, group, nodes[index])
                schedule.lines.append(_describe_event(kind, group, nodes[index], index))
        writer.erase(moves)
        module.recompile()
    return schedule


def moves_that_send(module: GraphModule) -> Iterator[Move]:
    """The moves of a graph that send something, scheduled or not."""
    for node in module.graph.nodes:
        if node.target is torch.ops.shardwise.start_moves.default:
            yield from map(find_numbered, node.args[2])
        elif node.target is torch.ops.shardwise.move.default and not _sends_nothing(move := _move_of(node)):
            yield move


def find_gathers_made_again(module: GraphModule) -> list[Node]:
    """The moves whose results the backward pass does not keep, with the views of them."""
    found: list[Node] = []
    for node in module.graph.nodes:
        if node.target is torch.ops.shardwise.move.default:
            again = _move_of(node).label.endswith(AGAIN)
        else:
            again = (node.target in VIEWS or node.target is getitem) and node.args[0] in found
        if again:
            found += [*(n for n in node.all_input_nodes if n.target in VIEWS), node]
    return list(dict.fromkeys(found))


def _repeat_gathers(graph: Graph) -> None:
    """In the graph of a whole step, gather again after the start of the backward pass what is not kept for it."""
    last = 1 + max((node.meta.get(BEFORE_BACKWARD, 0) for node in graph.nodes), default=0)
    for move in [n for n in graph.nodes if n.target is torch.ops.shardwise.move.default]:
        if not _move_of(move).label.endswith(AGAIN):
            continue
        views = {move: move}
        for node in graph.nodes:
            if (node.target is getitem or node.target in VIEWS) and node.args[0] in views:
                views[node] = node
        own = move.meta.get(BEFORE_BACKWARD, last)
        users = [n for n in graph.nodes if n not in views and any(a in views for a in n.all_input_nodes)]
        late = [n for n in users if n.meta.get(BEFORE_BACKWARD, last) > own and n.op != "output"]
        if late and len(late) < len(users):
            _copy_views(graph, list(views), late)


def _copy_views(graph: Graph, views: Sequence[Node], users: Sequence[Node]) -> None:
    """Let users have a copy of a move and of the views of its result, made before the first of them."""
    copies: dict[Node, Node] = {}
    with graph.inserting_before(users[0]):
        for view in views:
            copies[view] = graph.node_copy(view, lambda n: copies.get(n, n))
    for user in users:
        for view in views:
            user.replace_input_with(view, copies[view])
    for node in reversed([*views, *copies.values()]):
        if not node.users:
            graph.erase_node(node)


def _view_results_late(graph: Graph) -> None:
    """Put views of the results of moves before the nodes that use them: so that moves are waited for late."""
    made = {n for n in graph.nodes if n.target is getitem and n.args[0].target is torch.ops.shardwise.move.default}
    for node in graph.nodes:
        if node.target in VIEWS and node.args[0] in made:
            made.add(node)
    for node in reversed(list(graph.nodes)):
        if node in made and node.target in VIEWS and node.users:
            min(node.users).prepend(node)


def _find_moves(nodes: Sequence[Node]) -> list[GraphMove]:
    """The moves that send something, in the order in which they were traced."""
    number = {node: i for i, node in enumerate(nodes)}
    found: dict[Node, GraphMove] = {}
    for node in nodes:
        if node.target is not torch.ops.shardwise.move.default or _sends_nothing(layout_move := _move_of(node)):
            continue
        uses = [number[user] for part in node.users for user in part.users]
        move = GraphMove(node, layout_move, -1, min(uses, default=len(nodes) - 1))
        for value in _leave_free_nodes(node.args[0]):
            made = found.get(value.args[0]) if value.target is getitem else None  # type: ignore[arg-type]  # a node
            if made is None:
                move.ready = max(move.ready, number[value] + 1)
            else:
                move.needs.append(made)
        found[node] = move
    return sorted(found.values(), key=lambda m: (m.use, m.ready, number[m.node]))


def _move_of(node: Node) -> Move:
    number = node.args[1]
    assert isinstance(number, int)
    return find_numbered(number)


def _sends_nothing(move: Move) -> bool:
    return move.transfer.rank is None and all(step.rounds == 0 for step in move.transfer.steps)


def _leave_free_nodes(inputs: Any) -> Iterator[Node]:
    """The nodes from which inputs of a move are computed, beyond views and casts."""
    for value in inputs:
        if not isinstance(value, Node):
            continue
        if value.target in FREE:
            yield from _leave_free_nodes([value.args[0]])
        else:
            yield value


class Timeline:
    """Which moves are under way, as the nodes of a graph are walked through; `moves` are in the order of their use."""

    def __init__(self, moves: Sequence[GraphMove], limit: int) -> None:
        self._limit = limit
        self._running: list[list[GraphMove]] = []
        self._place = {id(move): place for place, move in enumerate(moves)}
        self._coming = sorted(moves, key=lambda m: -m.ready)  # those that become ready first at the end
        self._ready: list[GraphMove] = []  # and wait for others at most, in the order of their use

    def events_before(self, index: int, at_start: bool) -> Iterator[tuple[str, list[GraphMove]]]:
        """The starts and waits before the node of an index."""
        while self._coming and self._coming[-1].ready <= index:
            insort(self._ready, self._coming.pop(), key=lambda m: self._place[id(m)])
        while True:
            needed = next((g for g in self._running if any(m.use <= index for m in g)), None)
            if needed is not None:
                self._running.remove(needed)
                for move in needed:
                    move.state = "done"
                yield "wait", needed
                continue
            group = self._next_group(index, at_start)
            if group is None:
                return
            for move in group:
                move.state = "running"
                self._ready.remove(move)
            self._running.append(group)
            yield "start", group

    def _next_group(self, index: int, at_start: bool) -> list[GraphMove] | None:
        """What starts next: what is needed now, or else what may and fits in the limit."""
        free = [move for move in self._ready if move.may_start(index)]
        forced = [move for move in free if move.use <= index]
        room = self._limit - sum(move.size for group in self._running for move in group)
        large = next((move for move in free if move.size > SMALL_BYTES and move.size <= room), None)
        small = _take_bucket([move for move in free if move.size <= SMALL_BYTES], max(room, 0))
        if forced:
            return small if forced[0] in small else [forced[0]]
        if sum(move.size for move in small) >= BUCKET_BYTES - SMALL_BYTES or (at_start and small):
            return small
        return None if large is None else [large]


def _take_bucket(small: Sequence[GraphMove], room: int) -> list[GraphMove]:
    """The first of some small moves that fit in one exchange."""
    taken: list[GraphMove] = []
    size = 0
    for move in small:
        if size + move.size > min(BUCKET_BYTES, room) or (taken and move.move.comm is not taken[0].move.comm):
            break
        taken.append(move)
        size += move.size
    return taken


class _Writer:
    """Writes starts and waits into a graph."""

    def __init__(self, graph: Graph) -> None:
        self._graph = graph
        self._last: Node | None = None
        self._started: dict[int, tuple[Node, list[Any], int]] = {}

    def write(self, kind: str, group: list[GraphMove], before: Node) -> None:
        """Write a start or a wait before a node."""
        numbers = [move.node.args[1] for move in group]
        with self._graph.inserting_before(before):
            if kind == "start":
                given = [v for m in group for v in m.node.args[0][: len(_move_of(m.node).in_shapes)]]
                locals_ = [self._compute_before(value, before) for value in given]
                after = [] if self._last is None else [self._last]
                slot = len(self._started)
                self._last = self._call(torch.ops.shardwise.start_moves.default, locals_, after, numbers, slot)
                self._started[id(group)] = self._last, locals_, slot
                return
            token, locals_, slot = self._started[id(group)]
            after = list(dict.fromkeys([token, self._last or token]))
            waited = self._call(torch.ops.shardwise.wait_moves.default, locals_, after, numbers, slot)
            self._replace_results(group, waited)

    def _call(self, op: Any, locals_: list[Any], after: list[Any], numbers: list[Any], slot: int) -> Node:
        node = self._graph.call_function(op, (locals_, after, numbers, slot))
        node.meta["val"] = op(_values_of(locals_), _values_of(after), numbers, slot)
        return node

    def _compute_before(self, value: Node, before: Node) -> Node:
        """An input of a start; views and casts that come later are made here."""
        if value < before:
            return value
        made = self._graph.node_copy(value, lambda node: self._compute_before(node, before))
        made.meta = dict(value.meta)
        return made

    def _replace_results(self, group: Sequence[GraphMove], waited: Node) -> None:
        position = 0
        for move in group:
            made = [self._take(waited, position + i) for i in range(len(move.move.out_shapes))]
            position += len(made)
            for part in list(move.node.users):
                part.replace_all_uses_with(made[part.args[1]])
        self._last = self._take(waited, position)

    def _take(self, waited: Node, position: int) -> Node:
        node = self._graph.call_function(getitem, (waited, position))
        node.meta["val"] = waited.meta["val"][position]
        return node

    def erase(self, moves: Sequence[GraphMove]) -> None:
        """Remove the moves that were split."""
        for move in moves:
            inputs = move.node.all_input_nodes
            for part in list(move.node.users):
                self._graph.erase_node(part)
            self._graph.erase_node(move.node)
            for node in inputs:
                self._erase_unused(node)

    def _erase_unused(self, node: Node) -> None:
        """Remove views and casts that were made for a move alone."""
        if node.target in FREE and not node.users:
            inputs = node.all_input_nodes
            self._graph.erase_node(node)
            for other in inputs:
                self._erase_unused(other)


def _values_of(arguments: Any) -> Any:
    """What stands for the values of nodes: tensors without data."""
    return [value.meta["val"] if isinstance(value, Node) else value for value in arguments]


def _describe_event(kind: str, group: Sequence[GraphMove], before: Node, index: int) -> str:
    names = ", ".join(f"{m.move.label} {list(m.move.dst.shape)}" for m in group[:4])
    more = f" and {len(group) - 4} more" if len(group) > 4 else ""
    size = sum(m.size for m in group)
    return f"before node {index} ({before.name}): {kind} {names}{more}, {size} bytes"
