"""What does a rank of a subscriber read, and from whom? Computed once by each reading rank for itself alone.

1. The publisher describes its state: names, element types, layouts (each once), and where its ranks are. The
   description is JSON, checked against budgets like a file of a stranger.
2. Each piece of a tensor that the rank wants is cut by the terms of the map. A term turns boxes of the destination into
   boxes of the source, and these meet the source's pieces.
3. Of the replicas that have a box, those of the reader's own host are preferred, and they take equal shares of the
   bytes over all tensors together: the rule of `transfer.senders`, with the ranks rotated by the reader's number.
4. The result is a list of strided copies for each rank that is read from. No rank lists what others read.

What do several ranks of a host need from another host, and which of them reads it for all?

1. Each rank lists what it reads over the network: the tensor, the cell of its layout, and the box within.
2. Ranks of one host cut boxes that overlap without being equal along each other's edges.
3. Of those that need a box one reads it, in equal shares of the bytes: the rule of `transfer.senders`. The others get
   it out of its memory, by an exchange within their own world.

All ranks of a host compute the same from the same lists. What one rank needs twice it reads once, too.
"""

from __future__ import annotations

import itertools
import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor

from shardwise.checkpoint.convert import NameMap, suggest_names
from shardwise.checkpoint.digests import cut_box
from shardwise.checkpoint.index import StoredCut, TensorEntry
from shardwise.checkpoint.state import torch_dtype
from shardwise.geometry import Box, DType, Layout, LayoutError, find_dtype, layout_from_json, layout_to_json
from shardwise.geometry.mesh import IntArray
from shardwise.geometry.state_map import (
    MAX_MAP_BYTES,
    SCALE_RULES,
    BlockScale,
    MappedTensor,
    MapTerm,
    StateMap,
    TensorShape,
    terms_of_view,
)
from shardwise.sync.slots import KeptPieces, place_pieces
from shardwise.transfer.overlap import overlaps_with_boxes, overlaps_with_layout
from shardwise.transfer.senders import Owners, choose_senders
from shardwise.transfer.topology import Topology

DEFAULT_BUFFER_BYTES = 64 << 20
MAX_TENSORS = 1_000_000
MAX_PIECES = 1 << 22
MAX_RANKS = 1 << 16
MOST_CUTS = 256


@dataclass(frozen=True)
class RankPlace:
    """How a rank of the publisher is reached: the host it is on, the name of its local listener, host and port."""

    host: str
    name: str | None
    address: tuple[str, int]


@dataclass(frozen=True, eq=False)
class Published:
    """What a publisher has: tensors by name with layouts, where its ranks are, and where pieces are in their slots."""

    world: str
    tensors: Mapping[str, tuple[DType, Layout]]
    tied: tuple[int, ...]
    places: tuple[RankPlace, ...]
    delta: bool = False
    kept: list[KeptPieces] = field(default_factory=list)
    slot_bytes: IntArray = field(default_factory=lambda: np.zeros(0, np.int64))

    @cached_property
    def entries(self) -> list[tuple[DType, Layout]]:
        """The tensors by number."""
        return list(self.tensors.values())

    def placed(self) -> Published:
        """The same with the places of all pieces."""
        numbers = {host: i for i, host in enumerate(dict.fromkeys(place.host for place in self.places))}
        hosts = [numbers[place.host] for place in self.places]
        pairs = [(layout, dtype.itemsize) for dtype, layout in self.tensors.values()]
        kept, ends = place_pieces(pairs, self.tied, hosts)
        return replace(self, kept=kept, slot_bytes=ends)

    @property
    def types(self) -> dict[str, TensorShape]:
        """The tensors without their layouts."""
        return {name: TensorShape(layout.shape, dtype.name) for name, (dtype, layout) in self.tensors.items()}

    def to_text(self) -> str:
        """The description as JSON."""
        numbers: dict[Layout, int] = {}
        rows = [
            [name, dtype.name, numbers.setdefault(layout, len(numbers)), tied]
            for (name, (dtype, layout)), tied in zip(self.tensors.items(), self.tied, strict=True)
        ]
        data = {
            "world": self.world,
            "layouts": [layout_to_json(layout) for layout in numbers],
            "tensors": rows,
            "ranks": [[place.host, place.name, *place.address] for place in self.places],
            "delta": self.delta,
        }
        return json.dumps(data, separators=(",", ":"))


def read_description(text: str) -> Published:
    """The publisher's description, checked: what it says may neither be wrong nor make much of little."""
    try:
        data = json.loads(text)
        places = tuple(
            RankPlace(str(host), None if name is None else str(name), (str(at), int(port)))
            for host, name, at, port in data["ranks"]
        )
        if not 0 < len(places) <= MAX_RANKS or len(data["tensors"]) > MAX_TENSORS:
            raise LayoutError(f"it names {len(places)} ranks and {len(data['tensors'])} tensors")
        layouts = [_check_layout(each, len(places)) for each in data["layouts"]]
        if sum(len(layout.table) for layout in layouts) > MAX_PIECES:
            raise LayoutError(f"its layouts have more than {MAX_PIECES} pieces")
        tensors: dict[str, tuple[DType, Layout]] = {}
        tied: list[int] = []
        for number, (name, dtype, layout, first) in enumerate(data["tensors"]):
            tensors[str(name)] = found = find_dtype(dtype), layouts[layout]
            if not 0 <= first <= number or (first < number and list(tensors.values())[first] != found):
                raise LayoutError(f"{name} is not tied to tensor {first}")
            tied.append(first)
        if len(tensors) < len(tied):
            raise LayoutError("a name appears twice")
        return Published(str(data["world"])[:200], tensors, tuple(tied), places, bool(data["delta"])).placed()
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, OverflowError, RecursionError) as error:
        raise LayoutError(f"the publisher's description is damaged: {str(error)[:300]}") from error


def _check_layout(data: Any, ranks: int) -> Layout:
    spec = data["spec"]
    listed = len(json.dumps(spec))
    for placement in spec.get("placements") or ():
        if placement.get("block") is not None and data["shape"][placement["dim"]] // placement["block"] > MAX_PIECES:
            raise LayoutError("a layout has too many blocks")
    if math.prod(s for s in spec.get("splits") or () if isinstance(s, int)) > listed:
        raise LayoutError("a layout has more parts than ranks")
    layout = layout_from_json(data)
    if layout.pending is not None or max(layout.ranks, default=0) >= ranks:
        raise LayoutError(f"a layout on ranks up to {max(layout.ranks, default=0)} of {ranks}")
    return layout


def resolve_map(names: object, types: Mapping[str, TensorShape]) -> StateMap:
    """What `names=` says, as a map of these source tensors.

    A `StateMap` is taken as it is; a path ending in .json holds one. Everything else is a `NameMap`: a TOML file, or a
    dict of patterns and new names, as `shardwise reshard` takes them.
    """
    if names is None:
        return StateMap.identity(types)
    if isinstance(names, StateMap):
        found = names
    elif (path := str(names)).endswith(".json") and not isinstance(names, Mapping):
        with open(path, "rb") as file:
            text = file.read(MAX_MAP_BYTES + 1)
        if len(text) > MAX_MAP_BYTES:
            raise LayoutError(f"{path}: a map has at most {MAX_MAP_BYTES} bytes")
        found = StateMap.from_json(json.loads(text), path)
    elif isinstance(names, NameMap | Mapping | str | os.PathLike):
        try:
            return map_of_names(NameMap.of(names), types)
        except OSError as error:
            raise LayoutError(f"names={names!r}: {error.strerror}; pass the path of a TOML or JSON file") from error
    else:
        raise LayoutError(f"names= is a StateMap, a dict or the path of a file; got {names!r}")
    for name in sorted(found.used_sources()):
        wanted = found.sources[name]
        if name not in types:
            raise LayoutError(f"the map takes {name}, which is not published{suggest_names(name, list(types))}")
        if types[name].shape != wanted.shape:
            raise LayoutError(f"the map is for {name} of {wanted}; the publisher has {types[name]}")
    return replace(found, sources={**found.sources, **types})


def map_of_names(names: NameMap, types: Mapping[str, TensorShape]) -> StateMap:
    """What a map of names makes of these tensors: each as if stored row by row, and its views decoded."""
    listed = list(types)
    entries: dict[str, TensorEntry] = {}
    for number, (name, kind) in enumerate(types.items()):
        ndim = len(kind.shape)
        cut = StoredCut(kind.shape, np.zeros((1, ndim), np.int64), np.array([kind.shape], np.int64).reshape(1, ndim))
        entries[name] = TensorEntry(name, find_dtype(kind.dtype), cut, [number], [0], [""])
    targets: dict[str, MappedTensor] = {}
    for name, entry in names.apply(entries).items():
        terms: list[MapTerm] = []
        for box in range(len(entry.cut)):
            view, source = entry.view_of(box), listed[entry.files[box]]
            offsets, sizes = entry.cut.offsets[box].tolist(), entry.cut.sizes[box].tolist()
            terms += terms_of_view(offsets, sizes, source, types[source].shape, view.start, view.strides)
        targets[name] = MappedTensor(entry.shape, entry.dtype.name, tuple(terms))
    return StateMap(dict(types), targets)


@dataclass(frozen=True)
class Wanted:
    """A tensor of the subscriber: its name, its layout, and the local tensors of the rank that plans."""

    name: str
    layout: Layout
    dtype: torch.dtype
    parts: tuple[Tensor, ...]
    whole: bool
    """The rank has one local tensor that is all of it: the map may be that of this rank alone."""


@dataclass(frozen=True)
class SentScales:
    """What a read is quantized to by the rank that sends it, and where its scales go."""

    scale: BlockScale
    target: int
    part: int
    here: tuple[slice, ...]


@dataclass(frozen=True)
class Read:
    """A strided copy: what is cut out of a piece in a rank's slot, and where it goes.

    `wire` is the element type that travels, the narrower of both; `to` is that of where it goes. `origin` is the tensor
    and the cell of its layout. With `scales` codes travel, behind the scales of their blocks. What `is_passed` comes
    from a rank of this host that reads it.
    """

    target: int
    part: int
    here: tuple[slice, ...]
    offset: int
    shape: tuple[int, ...]
    dtype: DType
    index: tuple[slice | int, ...]
    order: tuple[int, ...]
    widen: tuple[slice | None, ...]
    sizes: tuple[int, ...]
    wire: DType
    to: DType
    origin: tuple[int, int]
    scales: SentScales | None = None
    is_passed: bool = False

    def view(self, memory: Tensor) -> Tensor:
        """The elements that are read, in the memory of a slot."""
        count = math.prod(self.shape) * self.dtype.itemsize
        piece = memory[self.offset : self.offset + count].view(torch_dtype(self.dtype)).view(self.shape)
        return piece[self.index].permute(self.order)

    def to_json(self) -> list[Any]:
        """What the rank that sends must know."""
        index = [i if isinstance(i, int) else [i.start, i.stop, i.step] for i in self.index]
        made = None if self.scales is None else [list(self.scales.scale.block), self.scales.scale.rule]
        return [self.offset, list(self.shape), self.dtype.name, index, list(self.order), self.wire.name, made]

    @property
    def is_repeated(self) -> bool:
        """Whether the same values fill several indices of a dim."""
        return any(kept is None for kept in self.widen)

    def once(self, place: Tensor) -> Tensor:
        """What travels, in the place that the read fills."""
        return place[tuple(slice(None) if kept is not None else 0 for kept in self.widen)]

    def in_source_order(self, place: Tensor) -> Tensor:
        """What the read fills, as a view with the dims of its source: of one shape on all ranks that need the same."""
        back = sorted(range(len(self.order)), key=self.order.__getitem__)
        return self.once(place).permute(back)[tuple(None if isinstance(i, int) else slice(None) for i in self.index)]

    @property
    def sent_shape(self) -> tuple[int, ...]:
        """The shape of what travels: without dims along which it is repeated."""
        return tuple(n for n, kept in zip(self.sizes, self.widen, strict=True) if kept is not None)

    @property
    def sent_bytes(self) -> int:
        scales = 0 if self.scales is None else 4 * math.prod(cut.stop - cut.start for cut in self.scales.here)
        return math.prod(self.sent_shape) * self.wire.itemsize + scales


@dataclass(frozen=True)
class Filled:
    """A box of a local tensor that has one value."""

    target: int
    part: int
    here: tuple[slice, ...]
    value: float


@dataclass(frozen=True)
class Quantized:
    """A box of a local tensor that is read in a wide type, and becomes codes and scales once it is complete."""

    target: int
    part: int
    here: tuple[slice, ...]
    scale_target: int
    scale_part: int
    scale_here: tuple[slice, ...]
    scale: BlockScale
    wide: torch.dtype


@dataclass(frozen=True)
class ReadPlan:
    """All that one rank reads, by the rank that it reads from, what it fills, and what it quantizes after that."""

    reads: Mapping[int, tuple[Read, ...]]
    fills: tuple[Filled, ...]
    quantized: tuple[Quantized, ...] = ()
    gives: tuple[Mapping[int, tuple[Read, ...]], ...] = ()
    """By round, what ranks of this host get out of this rank's memory."""
    gets: tuple[Mapping[int, tuple[Read, ...]], ...] = ()
    """By round, what this rank gets from ranks of its host."""

    @property
    def nbytes(self) -> int:
        """The bytes that are read."""
        return sum(read.sent_bytes for reads in self.reads.values() for read in reads)


@dataclass(frozen=True)
class AskedRead:
    """What a rank that sends knows of a read."""

    offset: int
    shape: tuple[int, ...]
    dtype: DType
    index: tuple[slice | int, ...]
    order: tuple[int, ...]
    wire: DType
    scale: BlockScale | None

    def packed(self, memory: Tensor) -> Tensor:
        """The elements in the memory of a slot as they travel: one run in the order of the reader."""
        count = math.prod(self.shape) * self.dtype.itemsize
        piece = memory[self.offset : self.offset + count].view(torch_dtype(self.dtype)).view(self.shape)
        view = piece[self.index].permute(self.order)
        if self.scale is None:
            return view.to(torch_dtype(self.wire)).contiguous()
        return join_codes(*quantize_blocks(view, self.scale, torch_dtype(self.wire)))


def join_codes(codes: Tensor, scales: Tensor) -> Tensor:
    """Codes behind their scales, as bytes."""
    return torch.cat([each.contiguous().view(-1).view(torch.uint8) for each in (scales, codes)])


def parse_read(row: Any, slot_bytes: int) -> AskedRead:
    """What `Read.to_json` wrote, checked against the length of a slot."""
    offset, shape, dtype, index, order, wire, made = row
    kinds = find_dtype(dtype), find_dtype(wire)
    count = math.prod(shape) * kinds[0].itemsize
    if not (0 <= offset <= slot_bytes - count) or offset % 16 or any(n < 0 for n in shape) or len(index) != len(shape):
        raise ValueError("a reader asks for what is not in a slot")
    cut = tuple(i if isinstance(i, int) else slice(*map(int, i)) for i in index)
    scale = None
    if made is not None:
        scale = BlockScale("", tuple(map(int, made[0])), str(made[1]))
        if len(scale.block) != len(order) or min(scale.block, default=1) < 1 or scale.rule not in SCALE_RULES:
            raise ValueError(f"a reader asks for blocks of {scale.block} with the rule {scale.rule!r:.40}")
    return AskedRead(offset, tuple(map(int, shape)), kinds[0], cut, tuple(map(int, order)), kinds[1], scale)


class _Demands:
    """Columns of all boxes that a rank needs, over all tensors: each has a source (a box that ranks keep) and bytes."""

    def __init__(self) -> None:
        self.rows: list[IntArray] = []
        self.ranks: list[IntArray] = []
        self.counts: list[IntArray] = []
        self.sources: list[int] = []
        self.weights: list[int] = []
        self.made: list[tuple[Any, ...]] = []
        self.wide = {-1}
        """Numbers of boxes of which not all parts can be quantized by ranks that send them."""
        self._known: dict[int, tuple[int, Mapping[int, int]]] = {}
        self._total = 0

    def number_of(self, published: Published, tensor: int, cell: int) -> int:
        """The number of the source that is a cell of a published tensor."""
        tensor = published.tied[tensor]
        if tensor not in self._known:
            table = published.entries[tensor][1].table
            kept = published.kept[tensor].rows
            order = np.lexsort((table.ranks[kept], table.cells[kept]))
            cells, counts = np.unique(table.cells[kept], return_counts=True)
            self.rows.append(order)
            self.ranks.append(table.ranks[kept][order])
            self.counts.append(counts)
            self._known[tensor] = self._total, {c: i for i, c in enumerate(cells.tolist())}
            self._total += len(counts)
        base, numbers = self._known[tensor]
        return base + numbers[cell]

    def choose(self, hosts: Sequence[int], own_host: int, turn: int) -> tuple[IntArray, IntArray]:
        """For each demand the rank that is read from, and which of its tensor's kept pieces it is."""
        ranks, rows = np.concatenate(self.ranks), np.concatenate(self.rows)
        size = len(hosts)
        turned = (ranks + turn) % size
        starts = np.concatenate([[0], np.cumsum(np.concatenate(self.counts))])
        owners = Owners(np.arange(len(ranks)), starts, turned)
        reader = np.full(len(self.sources), size, np.int64)  # a rank that holds nothing itself
        by_turn = [hosts[(r - turn) % size] for r in range(size)]
        topology = Topology(hosts=[*by_turn, own_host]) if own_host in hosts else None
        weights = np.maximum(np.asarray(self.weights, np.int64), 1)
        chosen = choose_senders(owners, np.asarray(self.sources, np.int64), reader, weights, topology)
        return ranks[chosen], rows[chosen]


def plan_reads(
    published: Published,
    state_map: StateMap,
    wanted: Sequence[Wanted],
    rank: int,
    host: str,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    *,
    takes_codes: bool = False,
) -> ReadPlan:
    """What the rank of a subscriber reads, from whom, and what it fills; no box has more than `max_buffer_bytes`.

    With `takes_codes` ranks of other hosts quantize what they send, where blocks are whole there and bytes are saved.
    """
    names, demands, fills = {n: i for i, n in enumerate(published.tensors)}, _Demands(), list[Filled]()
    layouts, quantized = published.entries, plan_quantized(published, state_map, wanted, rank)
    wide = {(each.target, each.part): each.wide for each in quantized}
    boxes = {(each.target, each.part, *(cut.start for cut in each.here)): i for i, each in enumerate(quantized)}
    for number, want in enumerate(wanted):
        if want.name in state_map.scales:
            continue
        target = state_map.targets.get(want.name)
        if target is None:
            raise LayoutError(
                f"{want.name} is wanted, and neither the publisher nor the map has it"
                + suggest_names(want.name, list(state_map.targets))
            )
        _check_shape(want, target)
        for part, box, origin in _local_boxes(want, rank):
            made = boxes.get((number, part, *origin), -1)
            for term in _terms_in(target, box):
                here = tuple(
                    slice(o - b + at, o - b + at + n)
                    for o, b, at, n in zip(term.box.offsets, box.offsets, origin, term.box.sizes, strict=True)
                )
                if term.source is None:
                    fills.append(Filled(number, part, here, term.fill))
                    demands.wide.add(made)
                    continue
                source = names[term.source]
                dtype, layout = layouts[source]
                most = max(1, max_buffer_bytes // dtype.itemsize)
                block = None if made < 0 else quantized[made].scale.block
                cut = (
                    (c, each.cut(b)) for c, each in _meet_cells(term, layout) for b in _cut_units(each.box, most, block)
                )
                for cell, met in cut:
                    demands.sources.append(demands.number_of(published, source, cell))
                    demands.weights.append(met.box.numel * dtype.itemsize)
                    shifted = tuple(
                        slice(s.start + m - o, s.start + m - o + n)
                        for s, m, o, n in zip(here, met.box.offsets, term.box.offsets, met.box.sizes, strict=True)
                    )
                    to = wide.get((number, part), want.dtype)
                    if made >= 0 and not _saves_bytes(quantized[made], met, dtype, want):
                        demands.wide.add(made)
                    demands.made.append((number, part, shifted, source, met, to, made))
    if not demands.made:
        return ReadPlan({}, tuple(fills), quantized)
    reads, sent = _find_owners(published, demands, wanted, quantized if takes_codes else (), rank, host)
    left = tuple(each for made, each in enumerate(quantized) if made not in sent)
    return ReadPlan({owner: tuple(reads[owner]) for owner in sorted(reads)}, tuple(fills), left)


def _find_owners(
    published: Published,
    demands: _Demands,
    wanted: Sequence[Wanted],
    quantized: Sequence[Quantized],
    rank: int,
    host: str,
) -> tuple[dict[int, list[Read]], set[int]]:
    """The reads by the rank that has each, and the numbers of the boxes that are quantized where they are."""
    hosts = {h: i for i, h in enumerate(dict.fromkeys(place.host for place in published.places))}
    numbers = [hosts[place.host] for place in published.places]
    ranks, rows = demands.choose(numbers, hosts.get(host, len(hosts)), rank % len(numbers))
    near = {r for r, at in enumerate(published.places) if at.host == host and at.name is not None}
    demands.wide.update(each[-1] for each, owner in zip(demands.made, ranks.tolist(), strict=True) if owner in near)
    sent = {made for made in range(len(quantized)) if made not in demands.wide}
    reads: dict[int, list[Read]] = {}
    for (number, part, here, source, met, to, made), owner, row in zip(
        demands.made, ranks.tolist(), rows.tolist(), strict=True
    ):
        scales = _scales_of(quantized[made], here) if made in sent else None
        to = wanted[number].dtype if scales is not None else to
        read = _make_read(published, number, part, here, source, met, to, row)
        reads.setdefault(owner, []).append(replace(read, scales=scales))
    return reads, sent


def _cut_units(box: Box, most: int, block: tuple[int, ...] | None) -> Iterable[Box]:
    """A box in parts of at most so many elements; between blocks, and in smaller parts, if it may be quantized."""
    if block is None or any(o % b for o, b in zip(box.offsets, block, strict=True)):
        yield from cut_box(box, most)
        return
    blocks = Box(
        tuple(o // b for o, b in zip(box.offsets, block, strict=True)),
        tuple(-(-n // b) for n, b in zip(box.sizes, block, strict=True)),
    )
    for part in cut_box(blocks, max(1, most // (4 * math.prod(block)))):  # quantizing takes some copies of it
        offsets = tuple(o * b for o, b in zip(part.offsets, block, strict=True))
        ends = (min(end * b, last) for end, b, last in zip(part.ends, block, box.ends, strict=True))
        yield Box(offsets, tuple(end - o for o, end in zip(offsets, ends, strict=True)))


def _saves_bytes(made: Quantized, met: MapTerm, source: DType, want: Wanted) -> bool:
    """Whether a rank that has this part of a box could quantize it: blocks are whole, and fewer bytes travel."""
    block, box, wide = made.scale.block, met.box, find_dtype(str(made.wide))
    whole = all(
        o % b == 0 and (end % b == 0 or end == n)
        for o, end, b, n in zip(box.offsets, box.ends, block, want.layout.shape, strict=True)
    )
    exact = source == wide or source.itemsize < wide.itemsize
    blocks = math.prod(-(-n // b) for n, b in zip(box.sizes, block, strict=True))
    fewer = box.numel * want.dtype.itemsize + 4 * blocks < box.numel * source.itemsize
    return whole and exact and fewer and all(kept is not None for kept in met.widen)


def _scales_of(made: Quantized, here: tuple[slice, ...]) -> SentScales:
    """Where the scales of a part of a box go."""
    at = tuple(
        slice(
            scales.start + (cut.start - whole.start) // b,
            scales.start + -(-(cut.stop - whole.start) // b),
        )
        for cut, whole, scales, b in zip(here, made.here, made.scale_here, made.scale.block, strict=True)
    )
    return SentScales(made.scale, made.scale_target, made.scale_part, at)


def plan_quantized(
    published: Published, state_map: StateMap, wanted: Sequence[Wanted], rank: int
) -> tuple[Quantized, ...]:
    """The boxes that a rank quantizes, each with the box of its scales; no box goes through a block."""
    numbers, found = {want.name: i for i, want in enumerate(wanted)}, list[Quantized]()
    for number, want in enumerate(wanted):
        target = state_map.targets.get(want.name)
        if target is None or target.scale is None:
            continue
        scale = target.scale
        scales = None if scale.name not in numbers else wanted[numbers[scale.name]]
        if scales is None or scales.dtype != torch.float32 or scales.layout.shape != scale.shape(target.shape):
            raise LayoutError(
                f"{want.name} is quantized, and {scale.name} gets its scales; pass a float32 tensor of the shape "
                f"{list(scale.shape(target.shape))} under that name"
            )
        if want.dtype != torch_dtype(find_dtype(target.dtype)):
            raise LayoutError(f"{want.name} is {find_dtype(str(want.dtype))} here, and quantized to {target.dtype}")
        kinds = [find_dtype(published.types[t.source].dtype) for t in target.terms if t.source is not None]
        wide = torch_dtype(max(kinds, key=lambda kind: kind.itemsize, default=find_dtype("f32")))
        for part, box, origin in _local_boxes(want, rank):
            scale_part, scale_here = _place_of_scales(want.name, target, box, _local_boxes(scales, rank))
            here = tuple(slice(o, o + n) for o, n in zip(origin, box.sizes, strict=True))
            found.append(Quantized(number, part, here, numbers[scale.name], scale_part, scale_here, scale, wide))
    return tuple(found)


def _place_of_scales(
    name: str, target: MappedTensor, box: Box, held: Sequence[tuple[int, Box, tuple[int, ...]]]
) -> tuple[int, tuple[slice, ...]]:
    """Which local tensor has the scales of a box, and where."""
    scale = target.scale
    assert scale is not None
    low = tuple(o // b for o, b in zip(box.offsets, scale.block, strict=True))
    high = tuple(-(-end // b) for end, b in zip(box.ends, scale.block, strict=True))
    whole = (min(h * b, n) for h, b, n in zip(high, scale.block, target.shape, strict=True))
    if any(o % b for o, b in zip(box.offsets, scale.block, strict=True)) or box.ends != tuple(whole):
        raise LayoutError(
            f"{name}: a rank has {box}, which goes through blocks of {scale.block}; cut between them, as "
            f"S(0) unit({scale.block[0]}) does"
        )
    region = Box(low, tuple(h - o for o, h in zip(low, high, strict=True)))
    found = next(((part, other, start) for part, other, start in held if other.intersect(region) == region), None)
    if found is None:
        raise LayoutError(f"{scale.name}: a rank lacks {region}, the scales of {box} of {name}")
    shift = tuple(at - o for at, o in zip(found[2], found[1].offsets, strict=True))
    return found[0], region.shifted(shift).slices


def quantize_blocks(values: Tensor, scale: BlockScale, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """The codes of values in blocks that begin with them, and the scale of each block.

    >>> values, scale = torch.tensor([[1.0, -896.0, 0.5]]), BlockScale("s", (1, 2))
    >>> codes, scales = quantize_blocks(values, scale, torch.float8_e4m3fn)
    >>> codes.float().tolist(), scales.tolist()
    ([[0.5, -448.0, 448.0]], [[2.0, 0.0011160714784637094]])
    """
    most = torch.finfo(dtype).max
    pads = [pad for n, b in zip(reversed(values.shape), reversed(scale.block), strict=True) for pad in (0, -n % b)]
    padded = torch.nn.functional.pad(values.float(), pads)
    split = [size for n, b in zip(padded.shape, scale.block, strict=True) for size in (n // b, b)]
    blocks = padded.reshape(split)
    inner = tuple(range(1, 2 * values.ndim, 2))
    scales = blocks.abs().amax(dim=inner, keepdim=True) / most
    if scale.rule == "amax_pow2":
        scales = torch.exp2(torch.ceil(torch.log2(scales)))
    scales = torch.where(scales > 0, scales, torch.where(scales.isnan(), scales, 1.0))
    codes = (blocks / scales).clamp(-most, most).reshape(padded.shape)
    codes = codes[tuple(slice(0, n) for n in values.shape)].to(dtype)
    return codes, scales.reshape([n // b for n, b in zip(padded.shape, scale.block, strict=True)])


def _check_shape(want: Wanted, target: MappedTensor) -> None:
    if target.shape != want.layout.shape:
        raise LayoutError(
            f"{want.name} has the shape {list(want.layout.shape)} here, and {list(target.shape)} is what the "
            "publisher's tensors make; pass names= that says how it is made of them"
        )
    ours, theirs = find_dtype(str(want.dtype)), find_dtype(target.dtype)
    kinds = {_kind(ours), _kind(theirs)}
    if len(kinds) > 1:
        fix = "only floats are converted to each other"
        if any(kind.startswith("f8") for kind in kinds):
            fix = "codes of fp8 have scales: pass a map with StateMap.quantize, or with StateMap.cast without scales"
        raise LayoutError(f"{want.name} is {ours} here and {theirs} there; {fix}")


def _kind(dtype: DType) -> str:
    return "float" if dtype.name.startswith(("f", "bf")) and not dtype.name.startswith(("f4", "f8")) else dtype.name


def _local_boxes(want: Wanted, rank: int) -> list[tuple[int, Box, tuple[int, ...]]]:
    """The boxes that a rank has of a tensor: the number of the local tensor, the box, and where it is in there."""
    if want.whole:
        return [(0, Box.whole(want.layout.shape), (0,) * want.layout.ndim)]
    table = want.layout.table.take(want.layout.rows_of(rank))
    columns = zip(
        table.slots.tolist(), table.offsets.tolist(), table.sizes.tolist(), table.local_offsets.tolist(), strict=True
    )
    return [(slot, Box(tuple(o), tuple(s)), tuple(at)) for slot, o, s, at in columns if math.prod(s)]


def _terms_in(target: MappedTensor, box: Box) -> list[MapTerm]:
    """The terms of a tensor that a box of it meets, cut to it."""
    if len(target.terms) == 1:
        met = target.terms[0].box.intersect(box)
        return [] if met is None else [target.terms[0].cut(met)]
    offsets = np.array([t.box.offsets for t in target.terms], np.int64)
    sizes = np.array([t.box.sizes for t in target.terms], np.int64)
    found = overlaps_with_boxes(target.shape, np.array([box.offsets]), np.array([box.sizes]), offsets, sizes)
    rows = zip(found.cells.tolist(), found.starts.tolist(), found.sizes.tolist(), strict=True)
    return [target.terms[cell].cut(Box(tuple(o), tuple(s))) for cell, o, s in rows]


def _meet_cells(term: MapTerm, layout: Layout) -> list[tuple[int, MapTerm]]:
    """The boxes of a source layout that a term takes from, by cell, each with its part of the term."""
    ends = [
        s + 1 if axis < 0 else s + step * (term.box.sizes[axis] - 1) + 1
        for s, step, axis in zip(term.starts, term.steps, term.axes, strict=True)
    ]
    low, high = np.array([term.starts], np.int64).reshape(1, -1), np.array([ends], np.int64).reshape(1, -1)
    found = overlaps_with_layout(low, high - low, layout)
    made: list[tuple[int, MapTerm]] = []
    for cell, start, size in zip(found.cells.tolist(), found.starts.tolist(), found.sizes.tolist(), strict=True):
        offsets, sizes = list(term.box.offsets), list(term.box.sizes)
        for d, (s, step, axis) in enumerate(zip(term.starts, term.steps, term.axes, strict=True)):
            if axis >= 0:
                first = -(-(start[d] - s) // step)
                sizes[axis] = -(-(start[d] + size[d] - s) // step) - first
                offsets[axis] = term.box.offsets[axis] + first
        if min(sizes, default=1) > 0:
            made.append((cell, term.cut(Box(tuple(offsets), tuple(sizes)))))
    return made


def _make_read(
    published: Published,
    number: int,
    part: int,
    here: tuple[slice, ...],
    source: int,
    term: MapTerm,
    to: torch.dtype,
    row: int,
) -> Read:
    dtype, layout = published.entries[source]
    kept = published.kept[source]
    piece, offset = int(kept.rows[row]), int(kept.offsets[row])
    origin = tuple(layout.table.offsets[piece].tolist())
    shape = tuple(layout.table.sizes[piece].tolist())
    inside = replace(term, starts=tuple(s - o for s, o in zip(term.starts, origin, strict=True)))
    wanted = find_dtype(str(to))
    wire = wanted if wanted.itemsize < dtype.itemsize else dtype
    origin = published.tied[source], int(layout.table.cells[piece])
    index, order, widen = inside.index, inside.order, inside.widen
    return Read(number, part, here, offset, shape, dtype, index, order, widen, term.box.sizes, wire, wanted, origin)


# What several ranks of a host need.

Key: TypeAlias = tuple[int, int, str, str, tuple[tuple[int, int, int], ...]]
"""A box that is read: tensor, cell, the type it has where it arrives, how it is quantized; start, length
and step for each source dim.
"""


def list_reads(plan: ReadPlan, near: Iterable[int]) -> str:
    """What a rank reads over the network, for the others of its host; `near` are owners whose memory it maps."""
    skipped = set(near)
    return json.dumps([_key(r) for owner, reads in plan.reads.items() if owner not in skipped for r in reads])


def _key(read: Read) -> Key:
    cuts = [
        (i, 1, 1) if isinstance(i, int) else (i.start, len(range(i.start, i.stop, i.step)), i.step) for i in read.index
    ]
    made = "" if read.scales is None else f"{read.scales.scale.block} {read.scales.scale.rule} {read.order}"
    return (*read.origin, read.to.name, made, tuple(cuts))


def _parse(row: Sequence[object]) -> Key:
    tensor, cell, to, made, cuts = row
    return int(tensor), int(cell), str(to), str(made), tuple(tuple(cut) for cut in cuts)  # type: ignore[call-overload,attr-defined]  # of our own world


def share_reads(plan: ReadPlan, rank: int, lists: Mapping[int, str], near: Iterable[int], limit: int) -> ReadPlan:
    """The plan of a rank of a host that reads each byte once, given the lists of all ranks of the host.

    Up to `limit` bytes are passed on in a round.
    """
    keys = {peer: [_parse(row) for row in json.loads(text)] for peer, text in lists.items()}
    cuts = _find_cuts({key for listed in keys.values() for key in listed})
    needed: dict[Key, list[int]] = {}
    for peer in sorted(keys):
        for key in keys[peer]:
            for piece in _cut(key, cuts):
                needed.setdefault(piece, []).append(peer)
    shared = sorted(key for key, peers in needed.items() if len(peers) > 1)
    skipped, mine = set(near), dict[Key, list[tuple[int, Read]]]()
    kept: dict[int, list[Read]] = {owner: [] for owner in plan.reads}
    for owner, reads in plan.reads.items():
        for read in reads:
            for part in [read] if owner in skipped else [_cut_read(read, key) for key in _cut(_key(read), cuts)]:
                if owner in skipped or len(needed[_key(part)]) == 1:
                    kept[owner].append(part)
                else:
                    mine.setdefault(_key(part), []).append((owner, part))
    gives, gets = list[dict[int, tuple[Read, ...]]](), list[dict[int, tuple[Read, ...]]]()
    passed: list[tuple[int, Read]] = []
    sizes = [_nbytes(key) for key in shared]
    rounds: list[int] = ((np.cumsum(sizes) - sizes) // limit).tolist() if shared else []
    for number, key, reader in zip(rounds, shared, _choose_readers(shared, needed, sizes), strict=True):
        while len(gives) <= number:
            gives.append({})
            gets.append({})
        held = mine.get(key, [])
        others = list(needed[key])
        others.remove(reader)
        if reader == rank:
            kept[held[0][0]].append(held[0][1])
            for peer in others:
                gives[-1][peer] = (*gives[-1].get(peer, ()), held[0][1])
            held = held[1:]
        passed += held
        if held:
            gets[-1][reader] = (*gets[-1].get(reader, ()), *(read for _, read in held))
    for owner, read in passed:
        kept[owner].append(replace(read, is_passed=True))
    reads_of = {owner: tuple(reads) for owner, reads in kept.items()}
    return replace(plan, reads=reads_of, gives=tuple(gives), gets=tuple(gets))


def _choose_readers(shared: Sequence[Key], needed: Mapping[Key, Sequence[int]], sizes: Sequence[int]) -> list[int]:
    members = [sorted(set(needed[key])) for key in shared]
    ranks = np.array([rank for each in members for rank in each], np.int64)
    if not len(ranks):
        return []
    starts = np.concatenate([[0], np.cumsum([len(each) for each in members])])
    nobody = np.full(len(shared), int(ranks.max()) + 1, np.int64)
    owners = Owners(np.arange(len(ranks)), starts, ranks)
    chosen = choose_senders(owners, np.arange(len(shared)), nobody, np.maximum(np.array(sizes, np.int64), 1), None)
    found: list[int] = ranks[chosen].tolist()
    return found


def _nbytes(key: Key) -> int:
    return math.prod(count for _, count, _ in key[4]) * find_dtype(key[2]).itemsize


def _find_cuts(keys: Iterable[Key]) -> dict[tuple[int, int, str], list[list[int]]]:
    """Along each dim the edges of boxes of a cell that overlap without being equal; cells without any are not there."""
    groups: dict[tuple[int, int, str], list[Box]] = {}
    for key in keys:
        if not key[3] and all(step == 1 for _, _, step in key[4]):
            box = Box(tuple(start for start, _, _ in key[4]), tuple(count for _, count, _ in key[4]))
            groups.setdefault(key[:3], []).append(box)
    found = {}
    for group, boxes in groups.items():
        few = len(boxes) <= MOST_CUTS and any(a.intersect(b) is not None for a, b in itertools.combinations(boxes, 2))
        if few:
            edges = zip(*(zip(box.offsets, box.ends, strict=True) for box in boxes), strict=True)
            found[group] = [sorted({at for pair in dim for at in pair}) for dim in edges]
    return found


def _cut(key: Key, cuts: Mapping[tuple[int, int, str], Sequence[Sequence[int]]]) -> list[Key]:
    edges = cuts.get(key[:3])
    if edges is None or key[3] or any(step != 1 for _, _, step in key[4]):
        return [key]
    dims = []
    for (start, count, _), listed in zip(key[4], edges, strict=True):
        at = [start, *(e for e in listed if start < e < start + count), start + count]
        dims.append([(a, b - a, 1) for a, b in itertools.pairwise(at)])
    if math.prod(len(dim) for dim in dims) > MOST_CUTS:
        return [key]
    return [(*key[:4], tuple(piece)) for piece in itertools.product(*dims)]


def _cut_read(read: Read, key: Key) -> Read:
    """The part of a read that is a box of its source."""
    if _key(read) == key:
        return read
    index, here, sizes = list(read.index), list(read.here), list(read.sizes)
    along = [dim for dim, kept in enumerate(read.widen) if kept is not None]
    left = [d for d, i in enumerate(read.index) if not isinstance(i, int)]
    for place, source in enumerate(read.order):
        dim, d = along[place], left[source]
        start, count, _ = key[4][d]
        whole = read.index[d]
        assert isinstance(whole, slice)
        first = here[dim].start + start - whole.start
        index[d], here[dim], sizes[dim] = slice(start, start + count, 1), slice(first, first + count), count
    return replace(read, index=tuple(index), here=tuple(here), sizes=tuple(sizes))
