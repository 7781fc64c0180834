"""Scaled dot product attention: batch and heads sharded alike, or rows of the queries, or columns of the values.

Where the rows of keys and values are split too (context parallelism), there are three strategies:

- "ulysses": an all-to-all brings all rows of some heads to each rank, and the result back;
- "ring": rows stay. The keys and values of the other ranks arrive one rank after the other, each while the attention of
  the one before is computed, and partial results are joined by their logarithms of sums (`_Ring`);
- "gather": every rank gets all keys and values first.

By bytes alone: the ring takes half as many again as gathering, since keys and values travel a second time in the
backward pass. Ulysses takes fewer where there are many ranks or few heads in a group. Two things count as bytes, at
`OPERATIONS_PER_BYTE`: the ring moves beside computation, which is what is computed anyway taken off its bytes; and of
causal attention ranks with early rows have less to do, unless the rows are dealt in a zigzag. A plan's `attention`
names one of the three instead.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from shardwise._cache import cache_by_identity
from shardwise._torch import aten, is_any_autocast_enabled, is_dispatch_mode_on, is_dual_level, pytree
from shardwise.comm import Comm
from shardwise.geometry import Layout, Mesh, MeshSpec, Placement, Replicate, Shard
from shardwise.geometry.placements import split_part
from shardwise.ops.registration import register_sharding
from shardwise.ops.rule import Steps, Strategy, TensorMeta, takes_copies
from shardwise.ops.unshard import vary_along
from shardwise.ops.views import DimRun, LocalView, find_runs, global_rows, mesh_view, put_on_tape
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import move_to, start_moving
from shardwise.tensor.sharded_tensor import wrap

Mask = TensorMeta | None
_is_flash_enabled: Callable[[], bool] = torch.backends.cuda.flash_sdp_enabled
OPERATIONS_PER_BYTE = 1000  # that a device computes in the time in which a byte arrives
RING = "attention (ring)"


@register_sharding(aten.scaled_dot_product_attention.default)
@takes_copies
def attention(
    q: TensorMeta,
    k: TensorMeta,
    v: TensorMeta,
    mask: Mask = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> list[Strategy] | Steps:
    if dropout_p:
        return Steps(_attend_with_dropout)
    ndim = q.ndim
    if len({ndim, k.ndim, v.ndim}) > 1:
        return [_attention_strategy(Replicate(), (Replicate(),) * 3, mask, None, ndim)]
    found = _attention_batch_strategies(q, k, v, mask, enable_gqa)
    rows, columns = ndim - 2, ndim - 1
    local = _attend_rows if is_causal else None
    gathered = _attention_strategy(Shard(rows), (Shard(rows), Replicate(), Replicate()), mask, rows, ndim, local)
    out = Shard(rows, groups=(q.shape[rows],))  # which may be cut as the keys are, and be of another length
    ringed = _attention_strategy(out, (Shard(rows),) * 3, mask, rows, ndim, _attend_rows)
    by_columns = _attention_strategy(Shard(columns), (Replicate(), Replicate(), Shard(columns)), mask, None, ndim)
    spec = mesh_view(k.layout)
    split = [a for a, p in enumerate(k.placements) if p.is_shard(rows) and spec is not None and spec.mesh.shape[a] > 1]
    if split and spec is not None:
        cost = _RowCost.of(q, k, v, spec.mesh, is_causal)
        by_heads = [each for s in found[1:] for each in _name("ulysses", s, split, spec.mesh, None)]
        ring = [replace(ringed, name="ring", axes=tuple(split), cost=cost.of_ring)] if _can_ring(q, k, v, mask) else []
        found = [found[0], *by_heads, *ring, *_name("gather", gathered, split, spec.mesh, cost.of_gathering)]
    else:
        found.append(gathered)
    return [replace(s, local_if_empty=_attend_if_any) for s in (*found, by_columns)]


def _name(name: str, strategy: Strategy, split: Sequence[int], mesh: Mesh, cost: Any) -> list[Strategy]:
    """A strategy under a name along the axes that split keys, and without one along the others."""
    axes = range(mesh.ndim) if strategy.axes is None else strategy.axes
    named = replace(strategy, axes=tuple(a for a in axes if a in split), name=name, cost=cost)
    return [named, replace(strategy, axes=tuple(a for a in axes if a not in split))]


@dataclass(frozen=True)
class _RowCost:
    """What attention over split rows costs besides moving its inputs, in bytes that a rank receives.

    `work` is its computation, forward and half of backward; `moved` are the bytes of keys and values.
    """

    mesh: Mesh
    cuts: tuple[Placement, ...]
    moved: float
    work: float
    causal: bool

    @classmethod
    def of(cls, q: TensorMeta, k: TensorMeta, v: TensorMeta, mesh: Mesh, causal: bool) -> _RowCost:
        pairs = math.prod(q.shape[:-1]) * k.shape[-2] / (1 + causal)
        work = 1.75 * 2 * pairs * (q.shape[-1] + v.shape[-1]) / OPERATIONS_PER_BYTE
        return cls(mesh, k.placements, (k.numel() + v.numel()) * k.dtype.itemsize, work, causal)

    def of_ring(self, axis: int) -> float:
        ranks, cut = self.mesh.shape[axis], self.cuts[axis]
        balanced = not self.causal or (isinstance(cut, Shard) and cut.zigzag)
        seen = self.work / ranks
        return max(0.0, 1.5 * self.moved * (ranks - 1) / ranks - seen) + (0 if balanced else seen * (ranks - 1) / ranks)

    def of_gathering(self, axis: int) -> float:
        """All pairs are computed, and what is not seen is masked."""
        return self.work / self.mesh.shape[axis] if self.causal else 0.0


def _attend_if_any(
    view: LocalView,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Tensor:
    """Attention of any rows of the queries, and nothing where there is nothing.

    Kernels of some releases of torch end the process on tensors without heads, rows or columns.
    """
    if not (q.numel() and v.numel()):
        biases = [mask] if mask is not None and mask.is_floating_point() else []
        return put_on_tape(q.new_zeros((*q.shape[:-1], v.shape[-1])), q, k, v, *biases)
    if is_causal:
        rows = global_rows(view.layouts[0], view.rank, q.ndim - 2, q.device).unsqueeze(1)
        mask = torch.arange(k.shape[-2], device=q.device).unsqueeze(0) <= rows
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=dropout_p, **named)


def _attention_batch_strategies(
    q: TensorMeta, k: TensorMeta, v: TensorMeta, mask: Mask, grouped: bool
) -> list[Strategy]:
    """All replicated, and each dim before the last two sharded."""
    found = [_attention_strategy(Replicate(), (Replicate(),) * 3, mask, None, q.ndim)]
    for dim in range(q.ndim - 2):
        if q.shape[dim] == k.shape[dim] == v.shape[dim]:
            found.append(_attention_strategy(Shard(dim), (Shard(dim),) * 3, mask, dim, q.ndim))
        elif grouped and dim == q.ndim - 3 and (axes := _axes_of_groups(q, k)):
            # The result has the heads of the queries, however large the keys are: one group of that many.
            heads = Shard(dim, groups=(q.shape[dim],))
            found.append(replace(_attention_strategy(heads, (Shard(dim),) * 3, mask, dim, q.ndim), axes=axes))
    if grouped and (heads_of := _find_copied_heads(q, k, v)) is not None:
        axis, cut = heads_of
        own = _attention_strategy(Shard(q.ndim - 3), (Shard(q.ndim - 3), cut, cut), mask, q.ndim - 3, q.ndim)
        found.append(replace(own, axes=(axis,)))
    return found


def _find_copied_heads(q: TensorMeta, k: TensorMeta, v: TensorMeta) -> tuple[int, Shard] | None:
    """The axis along which every rank has the keys of its queries, some of them on several ranks; and their cut."""
    spec, dim = mesh_view(q.layout), q.ndim - 3
    axes = [a for a, p in enumerate(q.placements) if isinstance(p, Shard) and p.dim == dim]
    if spec is None or len(axes) != 1 or k.shape[dim] != v.shape[dim]:
        return None
    ranks, own = spec.mesh.shape[axes[0]], q.placements[axes[0]]
    cut, other = (_cut_of_heads(x, axes[0], ranks) for x in (k, v))
    if cut is None or cut != other or not isinstance(own, Shard):
        return None
    queries, keys = (split_part(((0, x.shape[dim]),), shard, ranks, "") for x, shard in ((q, own), (k, cut)))
    group = q.shape[dim] // k.shape[dim]
    for ours, theirs in zip(queries, keys, strict=True):
        heads = [head for start, stop in ours for head in range(start, stop)]
        wanted = [head for start, stop in theirs for head in range(start, stop)]
        each = len(heads) // len(wanted) if wanted else 0
        if heads and [head // group for head in heads] != [head for head in wanted for _ in range(each)]:
            return None
    return axes[0], cut


def _cut_of_heads(x: TensorMeta, axis: int, ranks: int) -> Shard | None:
    """How an axis alone cuts the heads of keys, with copies; a tensor that all ranks have is one of any cut."""
    dim, now = x.ndim - 3, x.placements[axis]
    if not isinstance(now, Shard) or now.each is None:
        return None
    if any(isinstance(p, Shard) and p.dim == dim for a, p in enumerate(x.placements) if a != axis):
        return None
    return Shard(dim, each=(ranks,)) if now.is_on_all(ranks) else now if now.dim == dim else None


def _axes_of_groups(q: TensorMeta, k: TensorMeta) -> tuple[int, ...]:
    """The axes along which heads of queries that share a key stay together: all together split the keys evenly.

    All axes of the mesh, or else those that split the heads of the queries now.
    """
    spec = mesh_view(q.layout)
    dim = q.ndim - 3
    plain = all(not (isinstance(p, Shard) and p.dim == dim and p != Shard(dim)) for p in (*q.placements, *k.placements))
    if not plain or spec is None:
        return ()
    splitting = tuple(a for a, p in enumerate(q.placements) if p == Shard(dim))
    for axes in (tuple(range(spec.mesh.ndim)), splitting):
        if k.shape[dim] % math.prod(spec.mesh.shape[a] for a in axes) == 0:
            return axes
    return ()


def _attention_strategy(
    out: Placement, inputs: tuple[Placement, ...], mask: Mask, dim: int | None, ndim: int, local: Any = None
) -> Strategy:
    """A strategy whose mask is cut along `dim` of the result, where it has that dim."""
    if mask is None:
        return Strategy((out,), inputs, local)
    own = -1 if dim is None else dim - (ndim - mask.ndim)
    cut: Placement = Shard(own) if own >= 0 and mask.shape[own] != 1 else Replicate()
    return Strategy((out,), (*inputs, cut), local)


def _attend_rows(
    view: LocalView,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **named: Any,
) -> Tensor:
    """Attention of some rows of the queries, wherever they are, over all rows of the keys, wherever those are."""
    rings = _ring_layouts(view.layouts[1]), _ring_layouts(view.layouts[2])
    if len(rings[0]) == 1:
        return _attend_if_any(view, q, k, v, mask, dropout_p, is_causal, **named)
    ring = _Ring(view, rings, mask, is_causal, named.get("scale"), named)
    if is_dual_level():
        return ring.attend_gathered(q, k, v)
    attended: Tensor = _RingFunction.apply(ring, q, k, v)  # type: ignore[no-untyped-call]  # untyped in torch
    return attended


@cache_by_identity
def _ring_layouts(layout: Layout) -> tuple[Layout, ...]:
    """Where the blocks of keys (or values) are after 0, 1, 2... steps around the axes that split their rows.

    Axes that replicate them get a dim of their own, which they split: their copies travel apart, and so do the addends
    of gradients.
    """
    spec, rows = mesh_view(layout), layout.ndim - 2
    assert spec is not None
    mesh = spec.mesh
    around = [a for a, p in enumerate(spec.placements) if p.is_shard(rows) and mesh.shape[a] > 1]
    copied = [a for a, p in enumerate(spec.placements) if isinstance(p, Replicate) and mesh.shape[a] > 1]
    placements = [p.along(p.dim + len(copied)) if isinstance(p, Shard) else p for p in spec.placements]
    for dim, axis in enumerate(copied):
        placements[axis] = Shard(dim)
    shape = (*(mesh.shape[a] for a in copied), *layout.shape)
    by_place = np.moveaxis(mesh.ranks, around, range(len(around)))
    flat, found = by_place.reshape(-1, *by_place.shape[len(around) :]), []
    for step in range(len(flat) if around else 1):
        ranks = np.roll(flat, -step, 0).reshape(by_place.shape)
        turned = Mesh(mesh.axes, np.moveaxis(ranks, range(len(around)), around))
        found.append(MeshSpec(turned, placements, spec.order).layout(shape))
    return tuple(found)


_Seen = tuple[slice, slice, Literal["all", "causal", "some"]]


def _list_seen(rows: Sequence[DimRun], columns: Sequence[DimRun]) -> list[_Seen]:
    """Which local rows see which local columns: all of them, causally, or some by a mask; few large blocks.

    >>> _list_seen([(2, 4, 0), (12, 14, 2)], [(0, 2, 0), (14, 16, 2)])
    [(slice(0, 4, None), slice(0, 2, None), 'all')]
    >>> _list_seen([(2, 4, 0), (12, 14, 2)], [(4, 6, 0), (10, 12, 2)])
    [(slice(2, 4, None), slice(0, 4, None), 'all')]
    """
    if [r[:2] for r in rows] == [c[:2] for c in columns]:
        return [(slice(0, _count(rows)), slice(0, _count(columns)), "causal")]
    found: list[_Seen] = []
    full: list[tuple[slice, slice]] = []
    for first, last, at in columns:
        own: list[tuple[slice, slice]] = []
        for begin, end, place in rows:
            pair = slice(place, place + end - begin), slice(at, at + last - first)
            if begin >= last - 1:
                own.append(pair)
            elif end > first:
                found.append((*pair, "causal" if (begin, end) == (first, last) else "some"))
        full += _join(own, 0)
    full.sort(key=lambda pair: (pair[0].start, pair[0].stop, pair[1].start))
    return [*((own, others, "all") for own, others in _join(full, 1)), *found]


def _join(pairs: Sequence[tuple[slice, slice]], side: int) -> list[tuple[slice, slice]]:
    """Pairs of which one continues another on one side and equals it on the other, joined."""
    found: list[tuple[slice, slice]] = []
    for pair in pairs:
        last = found[-1] if found else None
        if last is not None and last[1 - side] == pair[1 - side] and last[side].stop == pair[side].start:
            both = slice(last[side].start, pair[side].stop)
            found[-1] = (both, pair[1]) if side == 0 else (pair[0], both)
        else:
            found.append(pair)
    return found


def _count(runs: Sequence[DimRun]) -> int:
    return sum(end - begin for begin, end, _ in runs)


@dataclass(frozen=True)
class _Ring:
    """Attention of this rank's rows over the blocks of keys and values that arrive from one rank after the other.

    1. While a block is computed, the next one is on its way from the rank that has it.
    2. A block gives a result and the logarithm of its sum of exponentials for each row. Results are added, weighted by
       their share of the sum of all, in float32 or float64.
    3. The backward pass computes each block again from the final logarithms, sends the gradients of its keys and values
       home, and adds them there.

    Of causal attention only what is seen is computed: whole blocks, half ones (of a zigzag) or triangles.
    """

    view: LocalView
    layouts: tuple[tuple[Layout, ...], tuple[Layout, ...]]
    mask: Tensor | None
    causal: bool
    scale: float | None
    named: dict[str, Any]

    @property
    def comm(self) -> Comm:
        return self.view.comm

    @cached_property
    def rows(self) -> tuple[DimRun, ...]:
        layout = self.view.layouts[0]
        return find_runs(layout, self.view.rank, layout.ndim - 2)

    def attend(self, q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """The result and the logarithm of the sum of exponentials of each row."""
        wide = _wide(q.dtype)
        out = q.new_zeros((*q.shape[:-1], v.shape[-1]), dtype=wide)
        total = q.new_full(q.shape[:-1], -math.inf, dtype=wide)
        for step, keys, values in self._blocks(k, v):
            for rows, columns, bias, causal in self._seen(step, q, keys, values):
                part, logs = _attend_block(
                    q[..., rows, :], keys[..., columns, :], values[..., columns, :], bias, causal, self.scale
                )
                before = total[..., rows]
                joined = torch.logaddexp(before, logs)
                floor = joined.clamp_min(torch.finfo(wide).min)  # of a row that has seen nothing yet
                out[..., rows, :] *= (before - floor).exp().unsqueeze(-1)
                out[..., rows, :] += part * (logs - floor).exp().unsqueeze(-1)
                total[..., rows] = joined
        return out.to(q.dtype), total

    def differentiate(
        self, grad: Tensor, q: Tensor, k: Tensor, v: Tensor, out: Tensor, total: Tensor, needed: Sequence[bool]
    ) -> tuple[Tensor | None, ...]:
        """The gradients of queries, keys and values."""
        found = [torch.zeros_like(t, dtype=_wide(t.dtype)) for t in (q, k, v)]
        total = total.masked_fill(total == -math.inf, 0.0)
        arriving: Callable[[], Sequence[Tensor]] | None = None

        def add_arrived() -> None:
            for own, part in zip(found[1:], arriving() if arriving is not None else (), strict=False):
                own.add_(part)

        for step, keys, values in self._blocks(k, v):
            parts = found[1:] if step == 0 else [torch.zeros_like(t, dtype=_wide(t.dtype)) for t in (keys, values)]
            for rows, columns, bias, causal in self._seen(step, q, keys, values):
                block = (q[..., rows, :], keys[..., columns, :], values[..., columns, :])
                ends = (grad[..., rows, :], out[..., rows, :], total[..., rows])
                grads = _differentiate_block(*block, *ends, bias, causal, self.scale)
                found[0][..., rows, :] += grads[0]
                parts[0][..., columns, :] += grads[1]
                parts[1][..., columns, :] += grads[2]
            if step and any(needed[1:]):
                add_arrived()
                arriving = self._start(step, 0, [p.to(k.dtype) for p in parts], f"{RING} (backward)")
        add_arrived()
        wanted = zip(found, (q, k, v), needed, strict=True)
        return tuple(g.to(t.dtype) if is_needed else None for g, t, is_needed in wanted)

    def attend_gathered(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """The same by moves and operators of torch, for derivatives that the ring does not have."""
        keys, values = (self._gather(number, local) for number, local in ((1, k), (2, v)))
        return _attend_if_any(self.view, q, keys, values, self.mask, 0.0, self.causal, **self.named)

    def _gather(self, number: int, local: Tensor) -> Tensor:
        """All rows of keys or values; the gradients of all ranks are summed."""
        layout = self.view.layouts[number]
        spec = mesh_view(layout)
        assert spec is not None
        axes = [a for a, p in enumerate(spec.placements) if p.is_shard(layout.ndim - 2)]
        placements = [Replicate() if a in axes else p for a, p in enumerate(spec.placements)]
        whole = MeshSpec(spec.mesh, placements, spec.order).layout(layout.shape)
        moved = wrap(whole, move_to(wrap(layout, (local,), self.comm), whole, RING)[0], self.comm)
        return vary_along(moved, whole, axes)

    def _blocks(self, k: Tensor, v: Tensor) -> Iterator[tuple[int, Tensor, Tensor]]:
        """The keys and values of this rank and then of each other one, the next on its way while one is used."""
        keys, values = k, v
        for step in range(len(self.layouts[0])):
            last = step + 1 == len(self.layouts[0])
            arriving = None if last else self._start(0, step + 1, (k, v), RING)
            yield step, keys, values
            if arriving is not None:
                keys, values = arriving()

    def _start(self, begin: int, end: int, tensors: Sequence[Tensor], label: str) -> Callable[[], Sequence[Tensor]]:
        """Start moving keys and values, or their gradients, from where they are at one step to where at another."""
        given, wanted = [], [own[end] for own in self.layouts]
        shapes = [to.local_shapes(self.comm.rank)[0][-tensors[0].ndim :] for to in wanted]
        for own, tensor in zip(self.layouts, tensors, strict=True):
            copied = own[begin].ndim - tensor.ndim
            given.append(wrap(own[begin], (tensor[(None,) * copied],), self.comm))
        if is_dispatch_mode_on():  # a compiled program starts moves by itself
            moved = [move_to(t, to, label)[0][0] for t, to in zip(given, wanted, strict=True)]
            return lambda: [t.view(shape) for t, shape in zip(moved, shapes, strict=True)]
        running = start_moving(given, wanted, label)
        return lambda: [held[0].view(shape) for held, shape in zip(running.wait(), shapes, strict=True)]

    def _seen(
        self, step: int, q: Tensor, keys: Tensor, values: Tensor
    ) -> Iterator[tuple[slice, slice, Tensor | None, bool]]:
        """The rows and columns of a block that are computed, with what is added to their products."""
        if not (q.numel() and keys.numel() and values.numel()):
            return
        layout = self.layouts[0][step]
        columns = find_runs(layout, self.view.rank, layout.ndim - 2)
        if not self.causal:
            yield slice(0, q.shape[-2]), slice(0, keys.shape[-2]), self._bias(q, columns), False
            return
        for own, others, kind in _list_seen(self.rows, columns):
            bias = None
            if kind == "some":
                row, column = (
                    torch.tensor([i for a, b, _ in runs for i in range(a, b)], device=q.device)
                    for runs in (self.rows, columns)
                )
                hidden = column[others].unsqueeze(0) > row[own].unsqueeze(1)
                bias = torch.zeros(hidden.shape, dtype=q.dtype, device=q.device).masked_fill(hidden, -math.inf)
            yield own, others, bias, kind == "causal"

    def _bias(self, q: Tensor, columns: Sequence[DimRun]) -> Tensor | None:
        """The mask of some columns, as numbers to be added."""
        mask = self.mask
        if mask is None:
            return None
        if mask.shape[-1] != 1:
            runs = [mask[..., begin:end] for begin, end, _ in columns]
            mask = runs[0] if len(runs) == 1 else torch.cat(runs, -1)
        if mask.dtype != torch.bool:
            return mask.to(q.dtype)
        return torch.zeros(mask.shape, dtype=q.dtype, device=q.device).masked_fill(~mask, -math.inf)


class _RingFunction(torch.autograd.Function):
    """Attention around a ring; a derivative of its gradients is taken of gathered keys and values."""

    @staticmethod
    def forward(ctx: Any, ring: _Ring, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        with _without_autocast(q.device):
            out, total = ring.attend(q, k, v)
        ctx.ring = ring
        ctx.save_for_backward(q, k, v, out, total)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        ring, (q, k, v, out, total), needed = ctx.ring, ctx.saved_tensors, ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            again = ring.attend_gathered(q, k, v)
            wanted = [t for t, is_needed in zip((q, k, v), needed, strict=True) if is_needed]
            made = iter(torch.autograd.grad(again, wanted, grads[0], create_graph=True))
            return None, *(next(made) if is_needed else None for is_needed in needed)
        with _without_autocast(q.device):
            return None, *ring.differentiate(grads[0], q, k, v, out, total, needed)


def _without_autocast(device: torch.device) -> AbstractContextManager[Any]:
    """A context in which products are computed in the dtypes of their tensors."""
    return torch.autocast(device.type, enabled=False) if is_any_autocast_enabled() else nullcontext()


# One block on this rank: the result, the logarithm of the sum of exponentials of each row, and their gradients


def _wide(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which parts are added."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def _can_ring(q: TensorMeta, k: TensorMeta, v: TensorMeta, mask: Mask) -> bool:
    """Whether the ring computes it; a mask that is differentiated, and shapes that are broadcast, it does not."""
    if not (3 <= q.ndim <= 4 and q.dtype.is_floating_point and 0 not in (*q.shape, *k.shape, *v.shape)):
        return False
    if mask is not None and (mask.requires_grad or mask.shape[-1] not in (1, k.shape[-2]) or mask.ndim > q.ndim):
        return False
    alike = q.shape[:-3] == k.shape[:-3] == v.shape[:-3] and k.shape[:-1] == v.shape[:-1]
    return alike and q.shape[-1] == k.shape[-1] and q.shape[-3] % k.shape[-3] == 0


def _kernel_of(q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None) -> Literal["cpu", "math"]:
    """Which of torch's kernels computes a block; "math": products and sums, which hold all pairs of a block."""
    if q.shape[-1] == v.shape[-1] and q.device.type in ("cpu", "meta") and _is_flash_enabled():
        return "cpu"
    return "math"


def _attend_block(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, causal: bool, scale: float | None
) -> tuple[Tensor, Tensor]:
    if _kernel_of(q, k, v, bias) == "cpu":
        out, logs = aten._scaled_dot_product_flash_attention_for_cpu.default(
            *map(_four, (q, k, v)), 0.0, causal, attn_mask=_four(bias), scale=scale
        )
        out, logs = out.reshape(*q.shape[:-1], v.shape[-1]), logs.reshape(q.shape[:-1])
    else:
        scores = _scores(q, k, bias, causal, scale)
        logs = scores.logsumexp(-1)
        weights = (scores - logs.clamp_min(torch.finfo(logs.dtype).min).unsqueeze(-1)).exp()
        out = weights @ _repeat(v, q).to(weights.dtype)
    if bias is not None:  # of rows that see nothing kernels return 0 or more
        logs = logs.masked_fill((bias == -math.inf).all(-1).expand(logs.shape), -math.inf)
    return out, logs


def _differentiate_block(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    grad: Tensor,
    out: Tensor,
    total: Tensor,
    bias: Tensor | None,
    causal: bool,
    scale: float | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of a block's queries, keys and values, from the result and the logarithms of all blocks."""
    if _kernel_of(q, k, v, bias) == "cpu":
        grads = aten._scaled_dot_product_flash_attention_for_cpu_backward.default(
            *map(_four, (grad, q, k, v, out)),
            _four(total.unsqueeze(-1)).squeeze(-1),
            0.0,
            causal,
            attn_mask=_four(bias),
            scale=scale,
        )
        return tuple(g.reshape(t.shape) for g, t in zip(grads, (q, k, v), strict=True))
    scores = _scores(q, k, bias, causal, scale)
    weights = (scores - total.unsqueeze(-1)).exp()
    grad, out = grad.to(weights.dtype), out.to(weights.dtype)
    values = weights.transpose(-2, -1) @ grad
    inner = weights * (grad @ _repeat(v, q).to(weights.dtype).transpose(-2, -1) - (grad * out).sum(-1, keepdim=True))
    inner = inner * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    keys = inner.transpose(-2, -1) @ q.to(weights.dtype)
    queries = inner @ _repeat(k, q).to(weights.dtype)
    return queries, _sum_repeated(keys, k), _sum_repeated(values, v)


def _four(tensor: Any) -> Any:
    """A tensor of four dims, as kernels take them."""
    return tensor if tensor is None else tensor[(None,) * (4 - tensor.ndim)]


def _scores(q: Tensor, k: Tensor, bias: Tensor | None, causal: bool, scale: float | None) -> Tensor:
    wide = _wide(q.dtype)
    scores = q.to(wide) @ _repeat(k, q).to(wide).transpose(-2, -1)
    scores = scores * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)
    if causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril().logical_not(), -math.inf)
    return scores if bias is None else scores + bias


def _repeat(shared: Tensor, q: Tensor) -> Tensor:
    """Keys or values, once for each head of the queries."""
    times = q.shape[-3] // shared.shape[-3]
    return shared if times == 1 else shared.repeat_interleave(times, -3)


def _sum_repeated(grad: Tensor, shared: Tensor) -> Tensor:
    heads = shared.shape[-3]
    return grad.view(*grad.shape[:-3], heads, grad.shape[-3] // heads, *grad.shape[-2:]).sum(-3)


def _attend_with_dropout(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """Attention step by step, so that the dropped weights do not depend on the layout."""
    if enable_gqa:
        key, value = _repeat(key, query), _repeat(value, query)
    scores = query @ key.transpose(-2, -1) * (1 / math.sqrt(query.shape[-1]) if scale is None else scale)
    if is_causal:
        scores = scores.masked_fill(torch.ones_like(scores, dtype=torch.bool).tril().logical_not(), float("-inf"))
    if attn_mask is not None:
        masked = attn_mask.dtype == torch.bool
        scores = scores.masked_fill(attn_mask.logical_not(), float("-inf")) if masked else scores + attn_mask
    return F.dropout(scores.softmax(-1), dropout_p) @ value


def _register_fused_attention(op: Any) -> None:
    """Register the rule of a kernel that torch picks: batch or heads sharded."""

    def attend_if_any(view: Any, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Any:
        if q.numel() and v.numel():
            return op(q, k, v, *args, **kwargs)
        args, kwargs = pytree.tree_map_only(Tensor, lambda t: t.detach().to("meta"), ((q, k, v, *args), kwargs))
        made = pytree.tree_map_only(Tensor, lambda t: torch.zeros_like(t, device=q.device), op(*args, **kwargs))
        return (put_on_tape(made[0], q, k, v), *made[1:])

    @register_sharding(op)
    def fused_attention(q: TensorMeta, k: TensorMeta, v: TensorMeta, *args: Any, **kwargs: Any) -> list[Any]:
        """The second output has a row for each query; further ones are not part of the result."""
        mask = next((a for a in (*args, *kwargs.values()) if isinstance(a, TensorMeta)), None)
        dropout_p = next((a for a in args if isinstance(a, float)), kwargs.get("dropout_p", 0.0))
        if dropout_p:
            raise UnsupportedOpError(
                "attention with dropout draws random numbers; call torch.nn.functional.scaled_dot_product_attention, "
                "which draws the same ones for every layout"
            )
        replicated, *cut = _attention_batch_strategies(q, k, v, mask, grouped=False)
        two = [Strategy((s.outputs[0], s.outputs[0], *(Replicate(),) * 7), s.inputs) for s in cut]
        found = [Strategy((Replicate(),) * 9, replicated.inputs), *two]
        return [replace(s, local_if_empty=attend_if_any) for s in found]


for _op in (
    aten._scaled_dot_product_flash_attention_for_cpu.default,
    aten._scaled_dot_product_flash_attention.default,
    aten._scaled_dot_product_efficient_attention.default,
    aten._scaled_dot_product_cudnn_attention.default,
):
    _register_fused_attention(_op)
