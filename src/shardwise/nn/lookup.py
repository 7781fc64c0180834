"""Embeddings of plain ids in a sharded table: each rank passes its own ids and gets its own result.

1. `embedding` fetches the rows that ids name from the ranks that hold them (`fetch`).
2. `embedding_bag` has sums and means of bags made where the rows are held (`pool`) if so fewer bytes travel. Else, and
   for maxima, limited norms and weights that get gradients, it fetches the rows and calls torch's own function on them.

So every mode and option means what it means for a plain table, for tables split by rows, columns or blocks, or whole
on some rank.

What lookups take besides ids and table: the options, their checks, and the collective call they make.

`embedding_bag` also takes what makes bags of ids: it is checked, and the length of each bag worked out.

How are plain tensors read by modules whose parameters are sharded? As this rank's own batch.

Every rank passes its own batch and gets the result for it, computed with the whole parameter. This applies inside
modules whose parameters `shard_parameter` or `shard_module` sharded, and inside `with plain_as_local_batch():`.
Elsewhere mixing a plain tensor with a sharded one is an error.

`linear` of plain inputs with a sharded weight: each rank passes its own rows and gets its own result.

Of two strategies the one that moves fewer bytes is chosen, by numbers that all ranks know:

1. the weight goes to every rank, and each multiplies its own rows; gradients of the weight are summed in backward;
2. the rows of all ranks form one sharded tensor, the engine multiplies it with the weight in its layout, and each rank
   gets its rows of the result.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._torch import count_running_calls
from shardwise.comm import Comm, DisagreementError
from shardwise.geometry import Mesh, MeshSpec, Shard
from shardwise.nn.lookup_fetch import (
    LocalBags,
    LookupCall,
    RowExpansion,
    RowRequest,
    fetch_rows,
    index_tensor,
    pool_bags,
    request_bag_sums,
    request_rows,
)
from shardwise.nn.lookup_routes import BoolArray, RowNumbers, check_table_shape
from shardwise.ops.explain import check_may_communicate, is_explaining_or_forbidding
from shardwise.ops.unshard import vary_along
from shardwise.ops.views import mesh_view
from shardwise.tensor.dispatch import Implementation, UnsupportedOpError, find_function, register_function, run_function
from shardwise.tensor.move import move_to, replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap


@dataclass(frozen=True, slots=True)
class LookupOptions:
    """The options of a lookup, in torch's words."""

    name: str
    padding_idx: int | None
    max_norm: float | None
    norm_type: float
    scale_grad_by_freq: bool
    sparse: bool

    def call(self, weight: ShardedTensor, **fields: object) -> LookupCall:
        """The collective call, after all checks that come out the same on every rank."""
        self._check(weight)
        layout, comm = weight.sharding, weight.comm
        if is_explaining_or_forbidding():
            check_may_communicate(self.name, layout, replicated_layout(layout.shape, comm.ranks))
        recorded = torch.is_grad_enabled() and weight.requires_grad
        wanted = {"max_norm": self.max_norm, "norm_type": self.norm_type, "dtype": str(weight.dtype), **fields}
        return LookupCall(layout, comm, recorded or self.max_norm is not None, self.name, wanted)

    def _check(self, weight: ShardedTensor) -> None:
        """Raise if a lookup does not support the request; no values are read."""
        check_table_shape(weight.shape)
        if self.scale_grad_by_freq or self.sparse:
            flag = "scale_grad_by_freq" if self.scale_grad_by_freq else "sparse"
            raise RuntimeError(f'{self.name} of a sharded table with flag on "{flag}" not supported! Turn it off')
        if self.max_norm is not None and self.max_norm <= 0.0:
            raise ValueError(f'"max_norm" must be larger than zero! It is {self.max_norm}')
        if weight.sharding.pending is not None:
            raise UnsupportedOpError(f"{self.name}: a reduction of the table is pending; redistribute it first")
        rows, padding = weight.shape[0], self.padding_idx
        if padding is not None and not -rows <= padding < rows:
            raise ValueError(f"padding_idx {padding} is outside of the table's {rows} rows")

    def apply_max_norm(self, weight: ShardedTensor, request: RowRequest) -> tuple[Tensor, ...]:
        """What this rank holds, on the tape, after rows that are wanted were scaled down to `max_norm`."""
        held: tuple[Tensor, ...] = weight._tape_tensors()
        if self.max_norm is not None:
            with torch.no_grad():
                request.renorm(weight.local_parts, self.max_norm, float(self.norm_type), held[0])
        return held

    def is_padding(self, ids: RowNumbers, rows: int) -> BoolArray | None:
        """Which of some ids are padding; None if none is."""
        if self.padding_idx is None:
            return None
        found = ids == self.padding_idx % rows
        return found if found.any() else None


def copy_ids_to_host(ids: Tensor, call: LookupCall, problem: str | None) -> RowNumbers:
    """Flat ids as short numbers in host memory; none where something is wrong with them."""
    if problem is not None:
        return np.zeros(0, call.number)
    flat: RowNumbers = ids.detach().reshape(-1).cpu().numpy().astype(call.number)
    return flat


def id_problem(ids: Any, rows: int) -> str | None:
    """Why these ids cannot be looked up, or None."""
    if not isinstance(ids, Tensor):
        return f"ids are a tensor, got {type(ids).__name__}; pass torch.as_tensor(ids)"
    if ids.dtype not in (torch.int32, torch.int64):
        return f"ids are int32 or int64, got {ids.dtype}"
    if not ids.numel():
        return None
    low, high = (int(v) for v in ids.aminmax())
    if low < 0 or high >= rows:
        return f"Index out of range in Input: ids from {low} to {high}, and the table has {rows} rows"
    return None


BAG_MODES = ("sum", "mean", "max")


@dataclass(frozen=True, eq=False, slots=True)
class BagArguments:
    """One rank's bags, in torch's words."""

    input: Tensor
    offsets: Tensor | None
    mode: str
    per_sample_weights: Tensor | None
    include_last_offset: bool

    def lengths(self) -> RowNumbers:
        """How many ids each bag has.

        >>> BagArguments(torch.zeros(5), torch.tensor([0, 0, 2]), "sum", None, False).lengths()
        array([0, 2, 3])
        """
        if self.offsets is None:
            return np.full(self.input.shape[0], self.input.shape[1])
        starts: RowNumbers = self.offsets.detach().cpu().numpy()
        return np.diff(starts) if self.include_last_offset else np.diff(starts, append=len(self.input))

    def problem(self, table: ShardedTensor) -> str | None:
        """Why these bags cannot be computed, or None."""
        found = self._mode_problem() or self._shape_problem() or self._weight_problem(table.dtype)
        if found is None and self.offsets is not None:
            found = _offset_problem(self.offsets, len(self.input), self.include_last_offset)
        return found or id_problem(self.input, table.shape[0])

    def _mode_problem(self) -> str | None:
        if self.mode not in BAG_MODES:
            return f"mode '{self.mode}' is not supported; it is sum, mean or max"
        if self.per_sample_weights is not None and self.mode != "sum":
            return f"per_sample_weights needs mode 'sum', got mode '{self.mode}'"
        return None

    def _shape_problem(self) -> str | None:
        dims = self.input.dim()
        if dims not in (1, 2):
            return f"Input has {dims} dims; bags are the rows of 2 dims, or runs of 1 dim given by offsets"
        if dims == 2 and self.offsets is not None:
            return "Input dimension needs to be exactly 1 dim where offsets are given"
        if dims == 1 and self.offsets is None:
            return "offsets is required for 1D input"
        if self.include_last_offset and self.offsets is None:
            return 'offsets is required for flag "include_last_offset"!'
        return None

    def _weight_problem(self, dtype: torch.dtype) -> str | None:
        weights = self.per_sample_weights
        if weights is None:
            return None
        if weights.shape != self.input.shape:
            size, wanted = tuple(weights.shape), tuple(self.input.shape)
            return f"per_sample_weights size {size} not equal to input size {wanted}"
        if weights.dtype != dtype:
            return f"per_sample_weights are {weights.dtype} and the table is {dtype}; use the same dtype"
        return None


def _offset_problem(offsets: Tensor, ids: int, include_last_offset: bool) -> str | None:
    if offsets.dim() != 1 or offsets.dtype not in (torch.int32, torch.int64):
        return f"offsets have 1 dim and are int32 or int64, got {offsets.dim()} dims of {offsets.dtype}"
    starts = offsets.detach().cpu().numpy()
    if include_last_offset and (not len(starts) or starts[-1] != ids):
        return f'the last of the offsets is the number of ids, {ids}, when the flag "include_last_offset" is on'
    if ids and not len(starts):
        return f"there are {ids} ids and no offsets; pass at least the offset 0"
    if len(starts) and starts[0] != 0:
        return f"the first offset is {starts[0]}; it must be 0"
    if len(starts) and (starts[-1] > ids or (starts[1:] < starts[:-1]).any()):
        return f"offsets ascend from 0 to at most {ids}, the number of ids; these end at {starts[-1]}"
    return None


# Who requested it: modules whose forward runs, None for a block.
_local_batch_scopes: ContextVar[tuple[nn.Module | None, ...]] = ContextVar("shardwise_local_batch", default=())


@contextmanager
def plain_as_local_batch() -> Iterator[None]:
    """Read plain inputs of embedding, embedding_bag and linear with sharded parameters as this rank's own batch.

    >>> import torch
    >>> from shardwise.geometry import ChunkSpec
    >>> from shardwise.tensor import shard
    >>> table = shard(torch.arange(6.0).reshape(3, 2), ChunkSpec(0, ranks=1))
    >>> with plain_as_local_batch():
    ...     torch.nn.functional.embedding(torch.tensor([2, 0]), table)
    tensor([[4., 5.],
            [0., 1.]])
    """
    token = _local_batch_scopes.set((*_local_batch_scopes.get(), None))
    try:
        yield
    finally:
        _local_batch_scopes.reset(token)


def is_local_batch_mode() -> bool:
    """Whether plain inputs are this rank's own batch here."""
    return bool(_local_batch_scopes.get())


def is_local_batch(inputs: Sequence[Any], parameters: Sequence[Any]) -> bool:
    """Whether a call has plain inputs that are this rank's own batch, next to a sharded parameter."""
    sharded = any(isinstance(p, ShardedTensor) for p in parameters)
    return sharded and is_local_batch_mode() and not any(isinstance(i, ShardedTensor) for i in inputs)


def register_local_batch_hooks(module: nn.Module) -> None:
    """Make a module read plain inputs as this rank's own batch, from the beginning of its forward to the end."""
    if _enter_local_batch not in module._forward_pre_hooks.values():
        module.register_forward_pre_hook(_enter_local_batch)
        module.register_forward_hook(_leave_local_batch, always_call=True)


def _enter_local_batch(module: nn.Module, _args: Any) -> None:
    readers = _local_batch_scopes.get()
    while readers and readers[-1] is not None and count_running_calls(readers[-1]) <= (readers[-1] is module):
        readers = readers[:-1]  # its call was interrupted, as by Ctrl-C
    _local_batch_scopes.set((*readers, module))


def _leave_local_batch(module: nn.Module, _args: Any, _output: Any) -> None:
    readers = _local_batch_scopes.get()
    if readers and readers[-1] is module:  # not so if an earlier hook raised before `_enter_local_batch` ran
        _local_batch_scopes.set(readers[:-1])


def default_implementation(function: Callable[..., Any]) -> Implementation:
    """What a torch function does on ShardedTensors apart from local batches: its handler so far, else its operators."""
    known = find_function(function)

    def operators(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        return run_function(function, args, kwargs)

    return known or operators


def as_matrix(batch: Tensor) -> Tensor:
    """A batch as rows: all dims but the last one merged.

    >>> import torch
    >>> as_matrix(torch.zeros(2, 3, 4)).shape
    torch.Size([6, 4])
    """
    return batch.reshape(-1, batch.shape[-1])


Types = Sequence[type]
Args = tuple[Any, ...]
Kwargs = dict[str, Any]

_embed, _bag = default_implementation(F.embedding), default_implementation(F.embedding_bag)


@register_function(F.embedding)
def _embedding(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _embed_local_ids(*args, **kwargs) if _is_local_lookup(*args, **kwargs) else _embed(types, args, kwargs, comm)


@register_function(F.embedding_bag)
def _embedding_bag(types: Types, args: Args, kwargs: Kwargs, comm: Comm) -> Any:
    return _embed_local_bags(*args, **kwargs) if _is_local_lookup(*args, **kwargs) else _bag(types, args, kwargs, comm)


def _is_local_lookup(input: Any, weight: Any, offsets: Any = None, *rest: Any, **named: Any) -> bool:
    return is_local_batch((input, offsets, named.get("per_sample_weights")), (weight,))


def _embed_local_ids(
    input: Tensor,
    weight: ShardedTensor,
    padding_idx: int | None = None,
    max_norm: float | None = None,
    norm_type: float = 2.0,
    scale_grad_by_freq: bool = False,
    sparse: bool = False,
) -> Tensor:
    options = LookupOptions("embedding", padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    call = options.call(weight)
    problem = id_problem(input, weight.shape[0])
    ids = copy_ids_to_host(input, call, problem)
    request = request_rows(call, ids, problem)
    held = options.apply_max_norm(weight, request)
    places, order = (
        None if i is None else index_tensor(i, held[0]) for i in (request.query.places, request.query.order)
    )
    padding = options.is_padding(ids, weight.shape[0])
    dropped = None if padding is None else torch.from_numpy(padding).to(held[0].device)
    rows = fetch_rows(request, RowExpansion(request.query.size, places, order, dropped), held)
    return rows.view(*input.shape, weight.shape[1])


def _embed_local_bags(
    input: Tensor,
    weight: ShardedTensor,
    offsets: Tensor | None = None,
    max_norm: float | None = None,
    norm_type: float = 2,
    scale_grad_by_freq: bool = False,
    mode: str = "mean",
    sparse: bool = False,
    per_sample_weights: Tensor | None = None,
    include_last_offset: bool = False,
    padding_idx: int | None = None,
) -> Tensor:
    options = LookupOptions("embedding_bag", padding_idx, max_norm, norm_type, scale_grad_by_freq, sparse)
    call = options.call(weight, mode=mode)
    given = BagArguments(input, offsets, mode, per_sample_weights, include_last_offset)
    problem = given.problem(weight)
    ids = copy_ids_to_host(input, call, problem)
    result = None
    if mode != "max" and max_norm is None:
        result = _sum_bags_at_holders(call, weight, options, ids, given, problem)
    return result if result is not None else _embed_fetched_bags(call, weight, options, ids, given, problem)


def _sum_bags_at_holders(
    call: LookupCall,
    weight: ShardedTensor,
    options: LookupOptions,
    ids: RowNumbers,
    given: BagArguments,
    problem: str | None,
) -> Tensor | None:
    """The bags, summed where their rows are held, or None if fewer bytes travel otherwise."""
    lengths = given.lengths() if problem is None else np.zeros(0, np.int64)
    of, samples = np.repeat(np.arange(len(lengths)), lengths), given.per_sample_weights
    scales = None if samples is None or problem else samples.detach().reshape(-1).cpu()
    padding = options.is_padding(ids, weight.shape[0])
    if padding is not None:
        kept = np.flatnonzero(~padding)
        ids, of, scales = ids[kept], of[kept], None if scales is None else scales[torch.from_numpy(kept)]
    bags, held = LocalBags(ids, of, len(lengths), scales), weight._tape_tensors()
    recorded = samples is not None and torch.is_grad_enabled() and samples.requires_grad
    pooling = request_bag_sums(call, bags, held[0], possible=not recorded, problem=problem)
    if pooling is None:
        return None
    sums = pool_bags(pooling, held)
    return (
        sums / index_tensor(bags.lengths().clip(min=1), sums).to(sums.dtype).unsqueeze(1)
        if given.mode == "mean"
        else sums
    )


def _embed_fetched_bags(
    call: LookupCall,
    weight: ShardedTensor,
    options: LookupOptions,
    ids: RowNumbers,
    given: BagArguments,
    problem: str | None,
) -> Tensor:
    """The bags, by torch's own function on the rows that they name."""
    request = request_rows(call, ids, problem)
    held = options.apply_max_norm(weight, request)
    rows = fetch_rows(request, RowExpansion(request.query.size), held)
    at = np.arange(len(ids)) if request.query.places is None else request.query.places
    padding, place = options.is_padding(ids, weight.shape[0]), None
    if padding is not None:  # it is one row, also where ids were not made distinct
        place = int(at[padding][0])
        at = np.where(padding, place, at)
    return F.embedding_bag(
        index_tensor(at, rows).reshape(given.input.shape),
        rows,
        None if given.offsets is None else given.offsets.to(torch.int64),
        mode=given.mode,
        per_sample_weights=given.per_sample_weights,
        include_last_offset=given.include_last_offset,
        padding_idx=place,
    )


_linear_of_sharded = default_implementation(F.linear)


@register_function(F.linear)
def _linear(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    if _is_local_linear(*args, **kwargs):
        return _linear_local_rows(*args, **kwargs)
    return _linear_of_sharded(types, args, kwargs, comm)


def _is_local_linear(input: Any, weight: Any, bias: Any = None) -> bool:
    return is_local_batch((input,), (weight, bias))


def _linear_local_rows(input: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    mesh = _sharding_mesh(weight) if isinstance(weight, ShardedTensor) else None
    result = _linear_over_mesh(input, weight, mesh) if mesh is not None and isinstance(weight, ShardedTensor) else None
    if result is None:
        comm = next(t.comm for t in (weight, bias) if isinstance(t, ShardedTensor))
        return F.linear(input, _gather_parameter(weight, comm), None if bias is None else _gather_parameter(bias, comm))
    return result if bias is None else result + _gather_parameter(bias, weight.comm)  # type: ignore[attr-defined]


def _gather_parameter(parameter: Tensor, comm: Comm) -> Tensor:
    """All of a parameter, its gradients summed over the ranks; a plain one is the same on every rank."""
    dst = replicated_layout(tuple(parameter.shape), comm.ranks)
    if not isinstance(parameter, ShardedTensor):
        parameter = wrap(dst, (parameter,), comm)
    locals_, anchor = move_to(parameter, dst, "linear")
    return vary_along(wrap(dst, locals_, comm, dtype=parameter.dtype, anchor=anchor), dst, (0,))


def _sharding_mesh(weight: ShardedTensor) -> Mesh | None:
    """The one axis over all ranks that cuts the weight, if it is laid out so."""
    view = mesh_view(weight.sharding)
    if view is None or view.mesh.ndim != 1 or set(view.mesh.ranks.tolist()) != set(weight.comm.ranks):
        return None
    return view.mesh if isinstance(view.placements[0], Shard) and weight.comm.world_size > 1 else None


def _linear_over_mesh(input: Tensor, weight: ShardedTensor, mesh: Mesh) -> Tensor | None:
    """The second strategy, or None where the first one moves less."""
    comm, rows = weight.comm, as_matrix(input)
    own = torch.tensor([*rows.shape, int(input.requires_grad)], device=comm.device)
    received = dict(zip(comm.ranks, (t.tolist() for t in comm.all_gather(own, label="linear")), strict=True))
    _check_widths({r: t[1] for r, t in received.items()}, weight)
    total = sum(t[0] for t in received.values())
    if total * sum(weight.shape) >= weight.numel():
        return None
    if any(t[2] for t in received.values()) and not rows.requires_grad:
        rows = rows.detach().requires_grad_()  # every rank takes part in the backward pass of the others
    spec = MeshSpec(mesh, (Shard(0, sizes=tuple(received[r][0] for r in mesh.ranks.tolist())),))
    batch = wrap(spec.layout((total, weight.shape[1])), (rows.contiguous(),), comm)
    product: Any = F.linear(batch, weight)
    result = move_to(product, spec.layout((total, weight.shape[0])), "linear")[0][0]
    return result.reshape(*input.shape[:-1], weight.shape[0])


def _check_widths(widths: dict[int, int], weight: ShardedTensor) -> None:
    wrong = {r: w for r, w in widths.items() if w != weight.shape[1]}
    if wrong:
        raise DisagreementError(
            f"linear: a weight of shape {tuple(weight.shape)} takes inputs of width {weight.shape[1]}; the ranks "
            f"{sorted(wrong)} pass {sorted(set(wrong.values()))}"
        )
