"""What do several ranks of a host need from another host, and which of them reads it for all?

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
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import TypeAlias

import numpy as np
from torch import Tensor

from shardwise.geometry import Box, find_dtype
from shardwise.sync.plan import Read, ReadPlan
from shardwise.transfer.senders import Owners, choose_senders

MOST_CUTS = 256
Key: TypeAlias = tuple[int, int, str, tuple[tuple[int, int, int], ...]]
"""A box that is read: tensor, cell, the type it has where it arrives; start, length and step for each source dim."""


def list_reads(plan: ReadPlan, near: Iterable[int]) -> str:
    """What a rank reads over the network, for the others of its host; `near` are owners whose memory it maps."""
    skipped = set(near)
    return json.dumps([_key(r) for owner, reads in plan.reads.items() if owner not in skipped for r in reads])


def _key(read: Read) -> Key:
    cuts = [
        (i, 1, 1) if isinstance(i, int) else (i.start, len(range(i.start, i.stop, i.step)), i.step) for i in read.index
    ]
    return (*read.origin, read.to.name, tuple(cuts))


def _parse(row: Sequence[object]) -> Key:
    tensor, cell, to, cuts = row
    return int(tensor), int(cell), str(to), tuple(tuple(cut) for cut in cuts)  # type: ignore[call-overload,attr-defined]  # of our own world


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
    return math.prod(count for _, count, _ in key[3]) * find_dtype(key[2]).itemsize


def _find_cuts(keys: Iterable[Key]) -> dict[tuple[int, int, str], list[list[int]]]:
    """Along each dim the edges of boxes of a cell that overlap without being equal; cells without any are not there."""
    groups: dict[tuple[int, int, str], list[Box]] = {}
    for key in keys:
        if all(step == 1 for _, _, step in key[3]):
            box = Box(tuple(start for start, _, _ in key[3]), tuple(count for _, count, _ in key[3]))
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
    if edges is None or any(step != 1 for _, _, step in key[3]):
        return [key]
    dims = []
    for (start, count, _), listed in zip(key[3], edges, strict=True):
        at = [start, *(e for e in listed if start < e < start + count), start + count]
        dims.append([(a, b - a, 1) for a, b in itertools.pairwise(at)])
    if math.prod(len(dim) for dim in dims) > MOST_CUTS:
        return [key]
    return [(*key[:3], tuple(piece)) for piece in itertools.product(*dims)]


def _cut_read(read: Read, key: Key) -> Read:
    """The part of a read that is a box of its source."""
    if _key(read) == key:
        return read
    index, here, sizes = list(read.index), list(read.here), list(read.sizes)
    along = [dim for dim, kept in enumerate(read.widen) if kept is not None]
    left = [d for d, i in enumerate(read.index) if not isinstance(i, int)]
    for place, source in enumerate(read.order):
        dim, d = along[place], left[source]
        start, count, _ = key[3][d]
        whole = read.index[d]
        assert isinstance(whole, slice)
        first = here[dim].start + start - whole.start
        index[d], here[dim], sizes[dim] = slice(start, start + count, 1), slice(first, first + count), count
    return replace(read, index=tuple(index), here=tuple(here), sizes=tuple(sizes))


def in_source_order(read: Read, place: Tensor) -> Tensor:
    """What a read fills, as a view with the dims of its source: of equal shape on all ranks that need the same."""
    once = place[tuple(slice(None) if kept is not None else 0 for kept in read.widen)]
    back = sorted(range(len(read.order)), key=read.order.__getitem__)
    return once.permute(back)[tuple(None if isinstance(i, int) else slice(None) for i in read.index)]


def is_repeated(read: Read) -> bool:
    """Whether the same values fill several indices of a dim."""
    return any(kept is None for kept in read.widen)
