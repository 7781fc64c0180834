"""Plain inputs of a sharded model: replicated, each rank's own part of dim 0, or cut along another dim by the plan.

Tensors among a model's arguments become ShardedTensors before its forward runs. Lengths of parts are exchanged, so that
they may differ from rank to rank and from batch to batch. Along an axis that splits another dim (the sequence, in
context parallelism) every rank passes the whole, and keeps its part: nothing is sent. Plain tensors that the forward
makes itself (positions, masks) are the same on every rank and are read as replicated. With an `output_plan` of "plain"
the outputs of the outermost module come back as plain tensors.

Inputs that are the same on every rank are compared by shape and dtype, in a `with check_replicas():` block by value.

Outputs of a sharded model as plain tensors: what code outside of the model expects that knows nothing of sharding.

An output whose dim 0 is as long as the batch comes back as the rows that this rank passed in; all others, losses among
them, come back whole on every rank. Both are differentiable: gradients flow back as for the sharded outputs.

Outputs of modules that a plan's `activations` name are brought to the placements that it says, as they are returned.

Methods that models of transformers and peft have besides `forward`, made to work on sharded parameters.

- `generate`: all ranks generate for the whole batch in step, so that no rank stops while others wait for it. Where
  each rank passes its own rows, the rows of all are gathered first, and each rank gets those of its own back.
- `save_pretrained`: the tensors are gathered on the first rank, which writes; every rank calls it, and every rank
  raises what went wrong.

- `resize_token_embeddings`: the tables are made whole, resized on every rank, and sharded again as the plan says, with
  the values of the first rank. Called on the model that was sharded.


A module keeps its class's name and bases: its class becomes a subclass with these methods, found by their names.
"""

from __future__ import annotations

import copy
import hashlib
import io
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from contextvars import ContextVar, Token
from dataclasses import dataclass
from functools import cache, lru_cache, partial
from inspect import signature
from itertools import zip_longest
from math import prod
from pickle import PicklingError
from typing import Any, TypeAlias, cast

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._text import public
from shardwise._torch import count_running_calls, is_transformed_tensor, proxy_mode, pytree
from shardwise._tree import flatten_nest, map_nest, unflatten_nest
from shardwise.comm import Comm, DisagreementError, agree, gather_raw, gather_values, name_ranks
from shardwise.comm.stand_in import StandInComm, is_tracing, traced_comm
from shardwise.geometry import Layout, LayoutError, Mesh, MeshSpec, Placement, Replicate, Shard, format_placement
from shardwise.geometry.mesh import IntArray
from shardwise.nn.plan import PLAIN, ModelPlan
from shardwise.ops.implicit_replication import plain_as_replicated
from shardwise.ops.propagation import prefer_strategies
from shardwise.ops.unshard import pin_parameter
from shardwise.ops.views import NoViewError, express_shard, mesh_spec, redistribute_to, view_on_mesh
from shardwise.tensor.creation import shard
from shardwise.tensor.dispatch import RECORDS_ONE_RANK, UnsupportedOpError
from shardwise.tensor.functions import warn_compiled_callers
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.recorder import recorded_wait, recorders
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

# For each length of dim 0 of an input that is split over ranks: how it is split.
BatchSplits: TypeAlias = Mapping[int, MeshSpec]


def find_batch_splits(tensors: Sequence[Any], placements: Sequence[Placement]) -> BatchSplits:
    """How the inputs that are split over ranks are split, by their length."""
    if not any(p.is_shard(0) for p in placements):
        return {}
    # An input that all ranks have whole (a state of layers first) says nothing about rows, whatever its length.
    rows = [t for t in tensors if isinstance(t, ShardedTensor) and t.ndim > 0]
    placed = [t for t in rows if any(p.is_shard(0) for p in t.placements or ())]
    specs = {int(t.shape[0]): t.sharding.spec for t in placed if isinstance(t.sharding.spec, MeshSpec)}
    return {length: MeshSpec(s.mesh, batch_placements(s.placements), s.order) for length, s in specs.items()}


def batch_placements(placements: Sequence[Placement]) -> tuple[Placement, ...]:
    """The same without cuts of other dims than 0, along which every rank passes the whole.

    >>> batch_placements((Shard(0), Shard(1), Replicate()))
    (Shard(0), Replicate(), Replicate())
    """
    return tuple(p if p.is_shard(0) else Replicate() for p in placements)


def make_plain(tree: Any, mesh: Mesh, splits: BatchSplits, comm: Comm) -> Any:
    """The same nest with its ShardedTensors as plain tensors; of those that have the rows of a batch, this rank's.

    >>> import torch
    >>> from shardwise import run_local, shard
    >>> mesh = Mesh.of(tp=2)
    >>> spec = MeshSpec(mesh, (Shard(0),))
    >>> run_local(lambda comm: make_plain([shard(torch.arange(4), spec)], mesh, {}, comm), 2)[1]
    [tensor([0, 1, 2, 3])]
    """
    return map_nest(lambda value: _take_rows(value, mesh, splits, comm), tree)


def _take_rows(value: Any, mesh: Mesh, splits: BatchSplits, comm: Comm) -> Any:
    split = splits.get(int(value.shape[0])) if isinstance(value, Tensor) and value.ndim > 0 else None
    whole = MeshSpec(mesh, (Replicate(),) * mesh.ndim)
    if not isinstance(value, ShardedTensor):
        if split is None:
            return value
        value = wrap(whole.layout(tuple(value.shape)), (value,), comm)  # made by the model, of all rows
    spec = split if split is not None else whole
    local: Tensor = value.redistribute(spec).local_tensor()
    if split is None and splits and local.requires_grad and value.sharding.pending is None and _is_of_parameters(local):
        local = local.view_as(local)
        local.register_hook(lambda grad: _check_equal_gradients(grad, comm))  # type: ignore[no-untyped-call]  # in torch
    return local


def _is_of_parameters(value: Tensor) -> bool:
    """Whether a value is made of parameters alone, in a few steps, without anything that the batch went into."""
    seen: set[Any] = set()
    left: list[Any] = [value.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        move = getattr(node, "move", getattr(node, "back", None))  # of ours, that sums: values or gradients of rows
        if len(seen) > _FEW_STEPS or (move is not None and move.src.pending is not None):
            return False
        left += [before for before, _ in node.next_functions]
    return True


def _check_equal_gradients(grad: Tensor, comm: Comm) -> None:
    """Raise where ranks have other gradients for one value: each is of its own rows, and nothing sums them."""
    own = [float(grad.detach().double().sum()), float(grad.detach().double().norm())]
    every = gather_values(comm, own, label="gradient of an output without rows").values()
    size = max(abs(number) for numbers in every for number in numbers)
    if any(abs(a - b) > 1e-4 * size for numbers in every for a, b in zip(numbers, own, strict=True)):
        raise LayoutError(
            f"the ranks have other gradients for an output of shape {tuple(grad.shape)} that is made of parameters "
            "alone: each computed with its own rows, so its parameters would differ between ranks; return it with "
            "the rows of the batch, as value.expand(len(x), *value.shape), or compute the loss in the model"
        )


_FEW_STEPS = 32
_input_scopes: ContextVar[tuple[InputScope, ...]] = ContextVar("shardwise_inputs", default=())
_whole_batch: ContextVar[bool] = ContextVar("shardwise_whole_batch", default=False)


@dataclass(frozen=True)
class InputScope:
    """A module whose forward runs: how its plain tensors are read, and how its batch is split over ranks."""

    module: nn.Module
    reading: ExitStack
    splits: BatchSplits


@contextmanager
def whole_batch_inputs() -> Iterator[None]:
    """Read plain inputs of sharded models, and plain tensors near sharded ones, as the same on every rank."""
    token = _whole_batch.set(True)
    try:
        with plain_as_replicated():
            yield
    finally:
        _whole_batch.reset(token)


def register_input_hooks(module: nn.Module, plan: ModelPlan, comm: Comm) -> None:
    """Make a model read its plain inputs, and return its outputs, as a plan says."""
    given, by_name = plan.input_placements, plan.named_input_placements
    assert given is not None
    replicated = plan.replicated.placements
    order = list(signature(module.forward).parameters) if by_name else []

    @public
    def enter(module: nn.Module, args: Any, kwargs: Any) -> tuple[Any, Any]:
        warn_compiled_callers()
        _drop_interrupted(module)
        placements = replicated if _whole_batch.get() else given
        if kwargs and any(p.is_shard(0) for p in placements):
            kwargs = {name: _join_items(name, value, plan, comm) for name, value in kwargs.items()}
        taken: tuple[Any, Any]
        plain = not kwargs and all(type(value) is Tensor for value in args)
        if plain and not by_name:  # the usual case, without looking into nests
            placed = _place_tensors(args, plan.mesh, placements, comm)
            taken = tuple(placed), kwargs
        else:
            leaves, structure = flatten_nest((args, kwargs))
            pads = _pads_of_leaves(args, kwargs, plan.pad_inputs) if plan.pad_inputs else ()
            own = by_name if by_name and placements is given else {}
            named = [own.get(name or "") for name in _names_of_leaves(args, kwargs, order)] if own else ()
            placed = _place_tensors(leaves, plan.mesh, placements, comm, pads, named)
            taken = unflatten_nest(placed, structure)
        named_too = () if placements is replicated else itertools.chain(*by_name.values())
        splits = find_batch_splits(placed, (*placements, *named_too))
        reading = ExitStack()
        reading.enter_context(plain_as_replicated())
        if plan.attention is not None:
            reading.enter_context(prefer_strategies(plan.attention))
        _input_scopes.set((*_input_scopes.get(), InputScope(module, reading, splits)))
        return taken

    @public
    def leave(module: nn.Module, _args: Any, output: Any) -> Any:
        opened = _input_scopes.get()
        if not opened or opened[-1].module is not module:  # the inputs could not be placed
            return None
        _input_scopes.set(opened[:-1])
        opened[-1].reading.__exit__(None, None, None)
        if plan.output_plan != PLAIN or len(opened) > 1 or output is None:  # None: the forward raised
            return None
        return make_plain(output, plan.mesh, opened[-1].splits, comm)

    module.register_forward_pre_hook(enter, with_kwargs=True)
    module.register_forward_hook(leave, always_call=True)


def register_activation_hooks(module: nn.Module, plan: ModelPlan) -> None:
    """Redistribute what the modules return that the plan's `activations` name."""
    for name, text in plan.activation_modules(module).items():
        hook = partial(_redistribute_output, name, plan.mesh, plan.activation_placements(text))
        module.get_submodule(name).register_forward_hook(hook)


def _redistribute_output(
    name: str, mesh: Mesh, wanted: Mapping[str, Placement], _module: nn.Module, _args: Any, output: Any
) -> Any:
    """The same nest with its first floating-point ShardedTensor in the placements wanted."""
    leaves, structure = flatten_nest(output)
    number = next(
        (i for i, t in enumerate(leaves) if isinstance(t, ShardedTensor) and t.is_floating_point()), len(leaves)
    )
    if number == len(leaves):
        return output
    tensor, label = leaves[number], f"activations of {name}"
    spec = view_on_mesh(tensor.sharding, mesh)
    if spec is None:
        raise LayoutError(
            f"{label}: its output is {format_layout_text(tensor.sharding)}, which has no placements on the plan's mesh "
            f"{mesh}; redistribute it in the module"
        )
    leaves[number] = redistribute_to(tensor, activation_layout(spec, tuple(tensor.shape), wanted, label), label)
    return unflatten_nest(leaves, structure)


def activation_layout(spec: MeshSpec, shape: tuple[int, ...], wanted: Mapping[str, Placement], label: str) -> Layout:
    """The layout of a tensor of this shape along the axes that `wanted` names, and as in a spec along the others.

    >>> batch = MeshSpec(Mesh.of(dp=2, tp=2), (Shard(0), Replicate()))
    >>> activation_layout(batch, (4, 8, 6), {"tp": Shard(1)}, "activations").spec
    MeshSpec(dp=2,tp=2, (Shard(0), Shard(1)))
    """
    mesh, placements, order = spec.mesh, list(spec.placements), spec.order
    for axis, placement in wanted.items():
        ranks, at = mesh.axis_size(axis), mesh.axes.index(axis)
        if isinstance(placement, Shard) and placement.dim >= len(shape):
            raise LayoutError(
                f"{label}: {axis}: {format_placement(placement)} splits dim {placement.dim}, and its output has the "
                f"shape {shape}; name another module or another dim in the plan's activations"
            )
        short = isinstance(placement, Shard) and shape[placement.dim] < ranks
        if not short and placements[at] != placement:
            order = (*(a for a in order if a != axis), axis)  # within what other axes split already
        placements[at] = Replicate() if short else placement
    return mesh_spec(mesh, tuple(placements), order).layout(shape)


def _drop_interrupted(entered: nn.Module) -> None:
    """Leave the scopes of calls that do not run any more: they were interrupted, as by Ctrl-C."""
    opened = list(_input_scopes.get())
    while opened and count_running_calls(opened[-1].module) <= (opened[-1].module is entered):
        opened.pop().reading.__exit__(None, None, None)
        _input_scopes.set(tuple(opened))


def place_inputs(tree: Any, mesh: Mesh, placements: Sequence[Placement], comm: Comm) -> Any:
    """The same nest of arguments with its plain tensors as ShardedTensors: whole ones, or parts of dim 0.

    >>> import torch
    >>> from shardwise.comm import run_local
    >>> def body(comm):
    ...     batch = torch.ones(comm.rank + 1, 3)
    ...     return tuple(place_inputs([batch], Mesh.of(dp=2), (Shard(0),), comm)[0].shape)
    >>> run_local(body, 2)
    [(3, 3), (3, 3)]
    """
    leaves, structure = flatten_nest(tree)
    return unflatten_nest(_place_tensors(leaves, mesh, placements, comm), structure)


def whole_inputs(module: nn.Module, plan: ModelPlan, args: Any, kwargs: Any) -> tuple[Any, Any]:
    """The arguments of a model as all ranks together pass them, on the meta device; this rank passes its own rows.

    >>> plan = ModelPlan(Mesh.of(dp=4, tp=2), {}, input_plan="dp: S(0)")
    >>> whole_inputs(nn.Linear(3, 3), plan, (torch.ones(2, 3),), {})[0][0].shape
    torch.Size([8, 3])
    """
    leaves, structure = flatten_nest((args, kwargs))
    names = _names_of_leaves(args, kwargs, list(signature(module.forward).parameters))
    by_name, default, mesh = plan.named_input_placements, plan.input_placements or (), plan.stage_mesh(0)
    for i, (name, leaf) in enumerate(zip(names, leaves, strict=True)):
        if isinstance(leaf, Tensor):
            cut = zip(by_name.get(name or "", default), mesh.shape, strict=True)
            parts = prod(size for placement, size in cut if placement.is_shard(0)) if leaf.ndim else 1
            shape = (leaf.shape[0] * parts, *leaf.shape[1:]) if leaf.ndim else ()
            leaves[i] = torch.zeros(shape, dtype=leaf.dtype, device="meta")
    whole: tuple[Any, Any] = unflatten_nest(leaves, structure)
    return whole


def _pads_of_leaves(args: Any, kwargs: Mapping[str, Any], pads: Mapping[str, float]) -> list[float | None]:
    """The number that fills up each leaf of a call's arguments, where the plan has one for it.

    >>> _pads_of_leaves((1,), {"labels": 2, "both": [3, 4]}, {"labels": -100})
    [None, -100, None, None]
    """
    if "attention_mask" in pads and "input_ids" in kwargs and kwargs.get("attention_mask") is None:
        pads = {}  # without a mask, a model reads what fills up its tokens as tokens
    counts = [(None, len(flatten_nest(args)[0])), *((n, len(flatten_nest(v)[0])) for n, v in kwargs.items())]
    return [None if name is None else pads.get(name) for name, count in counts for _ in range(count)]


def _names_of_leaves(args: Any, kwargs: Mapping[str, Any], order: Sequence[str]) -> list[str | None]:
    """The argument in which each leaf of a call's arguments is, by the names of parameters in their order.

    >>> _names_of_leaves((1, [2, 3]), {"labels": 4}, ("ids", "both", "labels"))
    ['ids', 'both', 'both', 'labels']
    """
    given = [*zip_longest(order[: len(args)], args), *kwargs.items()]
    return [name for name, value in given for _ in flatten_nest(value)[0]]


def _place_tensors(
    values: Sequence[Any],
    mesh: Mesh,
    placements: Sequence[Placement],
    comm: Comm,
    pads: Sequence[float | None] = (),
    named: Sequence[Sequence[Placement] | None] = (),
) -> list[Any]:
    """`named`: the placements of a value that has its own."""
    comm, found = traced_comm(comm), list(values)
    plain = [i for i, value in enumerate(found) if isinstance(value, Tensor) and not isinstance(value, ShardedTensor)]
    _refuse_transforms([found[i] for i in plain], comm)
    shapes = [tuple(found[i].shape) for i in plain]
    wanted = [tuple((named[i] if named else None) or placements) for i in plain]
    _check_dims([shape for i, shape in zip(plain, shapes, strict=True) if not (named and named[i])], mesh, placements)
    batches = [batch_placements(each) for each in wanted]
    if any(isinstance(p, Shard) for each in batches for p in each):
        given = [pads[i] if pads else None for i in plain]
        layouts, lengths = _gather_part_layouts(shapes, mesh, batches, comm, given)
        for index, pad, longest in zip(plain, given, lengths, strict=True):
            if pad is not None and (tail := tuple(found[index].shape[1:])) != longest:
                sides = [n for have, want in zip(tail, longest, strict=True) for n in (want - have, 0)]
                found[index] = F.pad(found[index], sides[::-1], value=pad)
    else:
        if plain:
            _agree_on_whole_inputs([found[i] for i in plain], comm)
        layouts = [_input_layout(shape, mesh, batch) for shape, batch in zip(shapes, batches, strict=True)]
    for index, layout in zip(plain, layouts, strict=True):
        found[index] = wrap(layout, (found[index].contiguous(),), comm)
    if _comparing.get() and not isinstance(comm, StandInComm):
        compare_replicas({f"tensor {n} of the inputs": found[i] for n, i in enumerate(plain)})
    for index, each, batch in zip(plain, wanted, batches, strict=True):
        if each != batch:
            found[index] = _cut_input(found[index], each, is_named=bool(named) and named[index] is not None)
    return found


def _check_dims(shapes: Sequence[tuple[int, ...]], mesh: Mesh, placements: Sequence[Placement]) -> None:
    """Raise if a plan splits a dim that none of the inputs has."""
    most = max(map(len, shapes), default=math.inf)
    for axis, placement in zip(mesh.axes, placements, strict=True):
        if isinstance(placement, Shard) and placement.dim > 1 and placement.dim >= most:
            raise LayoutError(
                f"inputs: the plan's input_plan {axis}: {format_placement(placement)} splits dim {placement.dim}, and "
                f"the inputs have the shapes {', '.join(map(str, shapes[:4]))}; split one of their dims"
            )


def _join_items(name: str, value: Any, plan: ModelPlan, comm: Comm) -> Any:
    """A list with a dict of tensors for each row (boxes in an image): those of all parts, on every rank."""
    if not isinstance(value, list) or not value or not all(isinstance(item, dict) for item in value):
        return value
    mesh, comm = plan.mesh, traced_comm(comm)
    buffer = io.BytesIO()
    torch.save([{key: _detach(leaf) for key, leaf in item.items()} for item in value], buffer)
    if is_tracing():
        raise UnsupportedOpError(f"inputs: {name} is a list with a dict for each row, whose values a graph cannot hold")
    given = gather_raw(comm, buffer.getvalue(), label=f"inputs: {name}")
    placements = plan.input_placements or ()
    parts = [axis for axis, p in zip(mesh.axes, placements, strict=True) if p.is_shard(0)]
    here = {axis: at for axis, at in mesh.coordinates(comm.rank).items() if axis not in parts}
    ranks = [int(rank) for rank in mesh.submesh(*parts, **here).ranks.reshape(-1)]
    device = next((leaf.device for leaf in value[0].values() if isinstance(leaf, Tensor)), None)
    items = [item for r in ranks for item in torch.load(io.BytesIO(given[r]), map_location=device, weights_only=True)]

    def place(leaf: Any) -> Any:
        if not isinstance(leaf, Tensor):
            return leaf
        return wrap(_input_layout(tuple(leaf.shape), mesh, plan.replicated.placements), (leaf,), comm)

    return [{key: place(leaf) for key, leaf in item.items()} for item in items]


def _detach(leaf: Any) -> Any:
    return leaf.detach() if isinstance(leaf, Tensor) else leaf


def _refuse_transforms(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Raise where torch follows plain inputs in its own ways, which do not see what the ranks send each other."""
    traced = torch.jit.is_tracing()  # type: ignore[attr-defined, no-untyped-call]  # untyped in torch
    if traced or (proxy_mode() is not None and not isinstance(comm, StandInComm)):
        raise UnsupportedOpError(RECORDS_ONE_RANK)
    if any(map(is_transformed_tensor, tensors)):
        raise UnsupportedOpError(
            "inputs: a tensor inside of a transform of torch.func: torch.func.jvp takes ShardedTensors, so pass it "
            "shardwise.replicate(x); for grad and vjp use torch.autograd.grad; vmap (gradients for each sample) takes "
            "local tensors: call torch.func.functional_call on an unsharded copy with the values of `p.full()`"
        )


def _cut_input(tensor: ShardedTensor, wanted: Sequence[Placement], *, is_named: bool) -> ShardedTensor:
    """The part that a plan gives this rank of a tensor that every rank has whole along dims after dim 0.

    Without a name, tensors of tokens, or of embeddings of them, are cut: those of masks and others have other dims.
    """
    spec, shape = tensor.sharding.spec, tuple(tensor.shape)
    assert isinstance(spec, MeshSpec)
    placements = list(spec.placements)
    for axis, placement in enumerate(wanted):
        if isinstance(placement, Shard) and placement.dim > 0:
            dims = range(placement.dim + 1, len(shape) + 1 if is_named else placement.dim + 3)
            if is_named and len(shape) not in dims:
                raise LayoutError(
                    f"inputs: {spec.mesh.axes[axis]}: {format_placement(placement)} splits dim {placement.dim}, and "
                    f"the argument that the plan's input_plan names has the shape {shape}"
                )
            if len(shape) in dims and shape[placement.dim] >= spec.mesh.shape[axis]:
                placements[axis] = placement
    return redistribute_to(tensor, _input_layout(shape, spec.mesh, tuple(placements), spec.order), "inputs")


def _agree_on_whole_inputs(tensors: Sequence[Tensor], comm: Comm) -> None:
    """Raise on every rank where the ranks pass tensors of other shapes or dtypes, as with a batch for each of them."""
    fields = {f"tensor {i}": f"{str(t.dtype)[6:]} {tuple(t.shape)}" for i, t in enumerate(tensors)}
    with recorded_wait(comm, "inputs: shapes") if recorders else nullcontext():
        agree(comm, fields, label="inputs", what="tensors to a model whose plan reads them as replicated")


@lru_cache(maxsize=1024)
def _input_layout(
    shape: tuple[int, ...], mesh: Mesh, placements: tuple[Placement, ...], order: tuple[str, ...] | None = None
) -> Layout:
    return MeshSpec(mesh, placements, order).layout(shape)


def _gather_part_layouts(
    shapes: Sequence[tuple[int, ...]],
    mesh: Mesh,
    placements: Sequence[Sequence[Placement]],
    comm: Comm,
    pads: Sequence[float | None],
) -> tuple[list[Layout], list[tuple[int, ...]]]:
    """The layouts of which these are this rank's parts, and the lengths in dims after dim 0, the longest where padded.

    One small exchange collects the shapes of all ranks.
    """
    with recorded_wait(comm, "inputs: lengths") if recorders else nullcontext():
        gathered = gather_values(comm, shapes, label="inputs")
    by_rank = {r: [tuple(s) for s in given] for r, given in gathered.items()}
    if any(len(given) != len(shapes) for given in by_rank.values()):
        raise DisagreementError(
            f"inputs: the ranks pass {sorted({len(g) for g in by_rank.values()})} plain tensors; pass equally many"
        )
    layouts = []
    for i, pad in enumerate(pads):
        parts = {r: g[i] for r, g in by_rank.items()}
        if pad is not None and len({len(s) for s in parts.values()}) == 1:
            longest = tuple(map(max, zip(*(s[1:] for s in parts.values()), strict=True)))
            parts = {r: (*s[:1], *longest) for r, s in parts.items()}
        layouts.append(_infer_input_layout(parts, mesh, placements[i]))
    return layouts, [layout.shape[1:] for layout in layouts]


def _infer_input_layout(shapes: dict[int, tuple[int, ...]], mesh: Mesh, placements: Sequence[Placement]) -> Layout:
    """The layout of one input from the shapes of all ranks' parts."""
    cut = [axis for axis, p in enumerate(placements) if isinstance(p, Shard)]
    ranks = np.moveaxis(mesh.ranks, cut, range(len(cut)))
    ranks = ranks.reshape(*ranks.shape[: len(cut)], -1)
    found = np.array([shapes[r][0] if shapes[r] else 0 for r in ranks.reshape(-1).tolist()]).reshape(ranks.shape)
    lengths, first = found[..., 0], shapes[int(ranks.reshape(-1)[0])]
    if any(s[1:] != first[1:] or len(s) != len(first) for s in shapes.values()) or (found != lengths[..., None]).any():
        raise DisagreementError(
            f"inputs: the parts have the shapes {sorted(set(shapes.values()))}; parts differ in dim 0 only, and only "
            f"along {_format_axes(mesh, cut) if cut else 'axes that split it'}; to fill shorter ones up, name the "
            "arguments and their numbers in the plan's pad_inputs, as in {'input_ids': 0, 'attention_mask': 0, "
            "'labels': -100}, and pass the mask"
        )
    if not first:
        return MeshSpec(mesh, (Replicate(),) * mesh.ndim).layout(())
    given = list(placements)
    for level, axis in enumerate(cut):
        given[axis] = _infer_split(lengths.sum(tuple(range(level + 1, len(cut)))), mesh, axis)
    return MeshSpec(mesh, given).layout((int(lengths.sum()), *first[1:]))


def _infer_split(lengths: IntArray, mesh: Mesh, axis: int) -> Shard:
    """How an axis cuts dim 0, from the lengths along it (last) in each part of the axes before it."""
    sizes = [tuple(row) for row in lengths.reshape(-1, lengths.shape[-1]).tolist()]
    try:
        return express_shard(0, sizes)
    except NoViewError:
        raise DisagreementError(
            f"inputs: the parts along axis {mesh.axes[axis]!r} have the lengths {' and '.join(map(str, sizes))} in the "
            "parts of the axes before it; use the same lengths in all of them, or those of torch.chunk"
        ) from None


def _format_axes(mesh: Mesh, axes: Sequence[int]) -> str:
    names = [repr(mesh.axes[axis]) for axis in axes]
    return f"axis {names[0]}" if len(names) == 1 else f"the axes {', '.join(names)}"


_comparing: ContextVar[bool] = ContextVar("shardwise_comparing_replicas", default=False)


class check_replicas:  # called as a function, and used in `with`
    """Raise on every rank unless the ranks that hold the same part of a tensor hold the same values, bit for bit.

    Takes modules (parameters, their gradients, buffers), optimizers (their state), ShardedTensors, and nests of them;
    plain tensors are not compared. In a `with` block the values are compared again at its end, and so are the inputs
    of sharded models that all ranks, or some of them, are to pass alike. Called on every rank.

    >>> from shardwise import Mesh, MeshSpec, Replicate, run_local
    >>> from shardwise.tensor.sharded_tensor import wrap
    >>> layout = MeshSpec(Mesh.of(dp=2), (Replicate(),)).layout((2,))
    >>> def body(comm):
    ...     check_replicas({"bias": wrap(layout, (torch.ones(2) + comm.rank,), comm)})
    >>> try:
    ...     run_local(body, 2)
    ... except DisagreementError as error:
    ...     print(error)
    check_replicas: bias differs between ranks 0, 1
    """

    def __init__(self, *values: Any) -> None:
        self._values = values
        self._tokens: list[Token[bool]] = []
        compare_replicas(_name_tensors(values))

    def __enter__(self) -> None:
        self._tokens.append(_comparing.set(True))

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        _comparing.reset(self._tokens.pop())
        if kind is None:
            compare_replicas(_name_tensors(self._values))


def _name_tensors(values: Sequence[Any]) -> dict[str, ShardedTensor]:
    """The ShardedTensors in modules, optimizers and nests, by a name for messages."""
    found: dict[str, Any] = {}
    for value in values:
        if isinstance(value, nn.Module):
            parameters = dict(value.named_parameters())
            found |= parameters | dict(value.named_buffers())
            found |= {f"the gradient of {name}": p.grad for name, p in parameters.items()}
        else:
            # A ShardedOptimizer names the state of a parameter; that of others is numbered.
            state = value.state_dict()["state"] if isinstance(value, torch.optim.Optimizer) else value
            leaves = pytree.tree_flatten_with_path(state)[0]
            found |= {pytree.keystr(path).strip("[]'") or "the tensor": leaf for path, leaf in leaves}
    return {name: tensor for name, tensor in found.items() if isinstance(tensor, ShardedTensor)}


def compare_replicas(tensors: Mapping[str, ShardedTensor]) -> None:
    """Raise on all ranks of each comm where replicas differ; one exchange of digests for the tensors of a comm."""
    by_comm: dict[int, tuple[Comm, dict[str, dict[str, str]]]] = {}
    for name, tensor in tensors.items():
        pieces = tensor.sharding.pieces_of(tensor.comm.rank) if tensor.sharding.pending is None else ()
        parts = zip(pieces, tensor.local_parts, strict=False)
        held = {f"{p.box.offsets}{p.box.sizes}": _digest_values(local) for p, local in parts}
        by_comm.setdefault(id(tensor.comm), (tensor.comm, {}))[1][name] = held
    for comm, digests in by_comm.values():
        first: dict[tuple[str, str], tuple[int, str]] = {}
        differing: dict[str, set[int]] = {}
        for rank, given in gather_values(comm, digests, label="check_replicas").items():
            for name, boxes in given.items():
                for box, digest in boxes.items():
                    other, seen = first.setdefault((name, box), (rank, digest))
                    if seen != digest:
                        differing.setdefault(name, set()).update((other, rank))
        if differing:
            shown = [f"{name} differs between {name_ranks(sorted(ranks))}" for name, ranks in differing.items()]
            left = f"; and {len(shown) - _MOST_SHOWN} more" if len(shown) > _MOST_SHOWN else ""
            raise DisagreementError(f"check_replicas: {'; '.join(shown[:_MOST_SHOWN])}{left}")


def _digest_values(local: Tensor) -> str:
    values = local.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    return hashlib.blake2b(values.tobytes(), digest_size=8).hexdigest()


_MOST_SHOWN = 8
_METHODS = ("generate", "save_pretrained", "resize_token_embeddings")


@dataclass(frozen=True)
class ShardedBy:
    """The plan and the ranks of a sharded module."""

    plan: ModelPlan
    comm: Comm

    def __deepcopy__(self, memo: dict[int, Any]) -> ShardedBy:
        return self  # copies of a model are on the same ranks

    def __reduce__(self) -> Any:
        raise PicklingError(
            "a sharded model is bound to the ranks that run it, so it cannot be pickled; write its values: "
            "shardwise.save({'model': model}, path), model.save_pretrained(path) of transformers, or on every rank "
            "torch.save(model.state_dict(), a path of its own)"
        )


def adapt_methods(module: nn.Module, plan: ModelPlan, comm: Comm) -> None:
    """Give a model's `generate` and `save_pretrained` a form for sharded parameters, wherever a part has them."""
    for part in module.modules():
        kind = type(part)
        # The plan has the names of the parameters in the model itself.
        own = _METHODS if part is module else _METHODS[:2]
        names = tuple(name for name in own if callable(getattr(kind, name, None)))
        if names or part is module:  # it is first there, so that pickle finds it, and says why, before the hooks
            part.__dict__ = {"_sharded_by": ShardedBy(plan, comm), **part.__dict__}
        if names:
            part.__class__ = _derive_class(kind, names)  # type: ignore[arg-type]  # a class is hashable
            part.__dict__.pop("_compiled_call", None)  # of transformers' generate(); in a copy it is the original's
        if "generate" in names and part is not module and plan.input_plan is not None:
            register_input_hooks(part, plan, comm)  # a wrapper's generate() calls the forward of the model inside


@cache
def _derive_class(kind: type[nn.Module], names: tuple[str, ...]) -> type[nn.Module]:
    made = {"generate": _generate, "save_pretrained": _save_pretrained, "resize_token_embeddings": _resize_embeddings}
    body: dict[str, Any] = {name: made[name](getattr(kind, name)) for name in names}
    body["__reduce_ex__"] = lambda self, _: (_make_part, (self._sharded_by, kind, names), self.__dict__)
    return type(kind.__name__, (kind,), {**body, "__module__": kind.__module__, "__qualname__": kind.__qualname__})


def _make_part(by: ShardedBy, kind: type[nn.Module], names: tuple[str, ...]) -> nn.Module:
    """A part without attributes: what `copy.deepcopy` begins with."""
    derived = _derive_class(kind, names)  # type: ignore[arg-type]  # a class is hashable
    return derived.__new__(derived)


def _generate(original: Any) -> Any:
    def generate(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        by: ShardedBy = self.__dict__["_sharded_by"]
        kwargs = {**kwargs, **_without_compiling(self, kwargs)}
        placements = by.plan.input_placements or ()
        if not any(p.is_shard(0) for p in placements):
            with whole_batch_inputs():
                return pytree.tree_map(_to_plain, original(self, *args, **kwargs))
        args, kwargs, added = _fill_up_prompts(args, kwargs, by)
        placed = place_inputs((args, kwargs), by.plan.mesh, batch_placements(placements), by.comm)
        batch = next(t for t in pytree.tree_leaves(placed) if isinstance(t, ShardedTensor) and t.ndim > 0)
        args, kwargs = pytree.tree_map(_to_plain, placed)
        with whole_batch_inputs():
            made = original(self, *args, **kwargs)
        own = pytree.tree_map(lambda value: _take_own_rows(_to_plain(value), batch), made)
        return own[:, added:] if added and isinstance(own, Tensor) else own

    generate.__doc__ = original.__doc__
    return generate


def _fill_up_prompts(args: Any, kwargs: dict[str, Any], by: ShardedBy) -> tuple[Any, dict[str, Any], int]:
    """Prompts of other lengths on other ranks filled up on the left, where a mask says so; how much was added here."""
    pads, ids = by.plan.pad_inputs, args[0] if args else kwargs.get("input_ids")
    mask = kwargs.get("attention_mask")
    asked = pads and isinstance(ids, Tensor) and isinstance(mask, Tensor) and ids.ndim == mask.ndim == 2
    own = ids.shape[1] if asked and ids is not None else None
    lengths = gather_values(by.comm, own, label="generate: lengths of prompts")
    if not asked or None in lengths.values():
        return args, kwargs, 0
    assert pads is not None and isinstance(ids, Tensor) and isinstance(mask, Tensor)
    added = max(lengths.values()) - ids.shape[1]
    filled = F.pad(ids, (added, 0), value=pads.get("input_ids", 0))
    kwargs = {**kwargs, "attention_mask": F.pad(mask, (added, 0))}
    return ((filled, *args[1:]), kwargs, added) if args else (args, {**kwargs, "input_ids": filled}, added)


def _without_compiling(model: nn.Module, given: Mapping[str, Any]) -> dict[str, Any]:
    """What keeps transformers from compiling for a static cache on a GPU, which it does unless configured otherwise.

    torch.compile leaves out what touches ShardedTensors; CUDA graphs of the little that is left would be in the way.
    """
    settings = getattr(model, "generation_config", None)
    own = given.get("generation_config")
    asked = given.get("compile_config") or getattr(own or settings, "compile_config", None)
    if asked is not None or "disable_compile" in given or not hasattr(own or settings, "disable_compile"):
        return {}
    if own is None:
        return {"disable_compile": True}
    changed = copy.copy(own)
    changed.disable_compile = True
    return {"generation_config": changed}


def _to_plain(value: Any) -> Any:
    return value.full() if isinstance(value, ShardedTensor) else value


def _take_own_rows(value: Any, batch: ShardedTensor) -> Any:
    """The rows of a result that belong to this rank's rows of the batch; a row may have several (beams, samples)."""
    length = int(batch.shape[0])
    if not isinstance(value, Tensor) or value.ndim == 0 or length == 0 or value.shape[0] % length:
        return value
    box = batch.sharding.pieces_of(batch.comm.rank)[0].box
    each = value.shape[0] // length
    return value[box.offsets[0] * each : (box.offsets[0] + box.sizes[0]) * each]


def _save_pretrained(original: Any) -> Any:
    def save_pretrained(
        self: nn.Module, save_directory: Any, *args: Any, state_dict: Mapping[str, Any] | None = None, **kwargs: Any
    ) -> Any:
        comm = self.__dict__["_sharded_by"].comm
        whole = gather_state(self.state_dict() if state_dict is None else state_dict, comm, self)
        if comm.rank == comm.ranks[0]:
            return call_together(
                comm, "save_pretrained", lambda: original(self, save_directory, *args, state_dict=whole, **kwargs)
            )
        return call_together(comm, "save_pretrained", lambda: None)

    save_pretrained.__doc__ = original.__doc__
    return save_pretrained


def call_together(comm: Comm, label: str, call: Callable[[], Any]) -> Any:
    """What a function returns, after it has returned on all ranks; where it failed on one, all of them raise."""
    result, problem = None, None
    try:
        result = call()
    except Exception as error:  # of any kind: the other ranks must hear of it
        problem = error
    try:
        agree(comm, {}, label=label, what="calls", problem=problem)
    except DisagreementError:
        if problem is not None:
            raise problem from None
        raise
    return result


def _resize_embeddings(original: Any) -> Any:
    def resize_token_embeddings(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        by: ShardedBy = self.__dict__["_sharded_by"]
        ends: list[Any] = [getattr(self, get)() for get in ("get_input_embeddings", "get_output_embeddings")]
        whole: dict[int, nn.Parameter] = {}
        for part in (p for p in ends if isinstance(p, nn.Module)):
            for name, parameter in list(part.named_parameters(recurse=False)):
                if isinstance(parameter, ShardedTensor):
                    value = nn.Parameter(parameter.detach().full(), requires_grad=parameter.requires_grad)
                    part.register_parameter(name, whole.setdefault(id(parameter), value))
        result = original(self, *args, **kwargs)
        specs, made = by.plan.specs(self), dict[int, nn.Parameter]()
        for name, parameter in list(self.named_parameters(remove_duplicate=False)):
            if isinstance(parameter, ShardedTensor):
                continue
            if id(parameter) not in made:
                sharded = shard(parameter.detach(), specs[name], by.comm.ranks[0], comm=by.comm)
                made[id(parameter)] = nn.Parameter(sharded, requires_grad=parameter.requires_grad)
                pin_parameter(cast(ShardedTensor, made[id(parameter)]), by.plan.pinned_axes(specs[name]))
            path, _, last = name.rpartition(".")
            self.get_submodule(path).register_parameter(last, made[id(parameter)])
        return result

    resize_token_embeddings.__doc__ = original.__doc__
    return resize_token_embeddings


def gather_state(state: Mapping[str, Any], comm: Comm, module: nn.Module | None = None) -> dict[str, Any]:
    """A state with its tensors whole, in CPU memory of the first rank; empty on the others.

    Parameters that a module has under several names stay one tensor.
    """
    first = comm.ranks[0]
    aliases = find_aliases(module) if module is not None else {}
    whole: dict[str, Any] = {}
    for name, value in state.items():
        same = aliases.get(name, name)
        if same != name and same in whole:
            whole[name] = whole[same]
        elif isinstance(value, ShardedTensor):
            with torch.no_grad():
                found = value.gather_to(first)
            whole[name] = None if found is None else found.cpu()
        else:
            whole[name] = value.cpu() if isinstance(value, Tensor) else value
    return whole if comm.rank == first else {}


def find_aliases(module: nn.Module) -> dict[str, str]:
    """The first name of each parameter that has several."""
    names: dict[int, str] = {}
    return {n: names.setdefault(id(p), n) for n, p in module.named_parameters(remove_duplicate=False)}
