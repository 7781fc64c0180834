"""Recurrent layers, cells and packed sequences.

A layer (LSTM, GRU, RNN) runs torch's own code on each rank's part of the batch:

1. Axes that split the batch keep it; along all others input and state are replicated. Parameters are replicated.
2. The state that torch starts from is made of zeros. These are plain tensors, the same on every rank, so they are read
   as replicated, and cut as the batch is. A plain state of other values is refused, as plain tensors are anywhere.
3. Dropout between the layers draws values that do not depend on the layout, so the layers then run one by one.

Cells, and tensors in irregular pieces, are broken down into other operators. A packed sequence mixes the rows of all
sequences, so its data is replicated.

The weights of a recurrent layer in one chunk of memory, as cuDNN takes them.

torch copies weights into such a chunk at every call and warns if they are not in one yet. The weights of a sharded
layer never are: those in parts are gathered into fresh memory at every call, and those of which a rank has the whole
must stay where they are, since parameters and optimizers change them in place. So they are copied here, instead of by
torch, and gradients reach them as if they had been used themselves.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import Tensor

from shardwise._torch import (
    aten,
    is_dispatch_mode_on,
    is_dual_level,
    pack_padded_sequence,
    pad_packed_sequence,
    pytree,
    storage_identity,
)
from shardwise.comm import Comm
from shardwise.geometry import Layout, MeshSpec, Placement, Replicate, Shard
from shardwise.ops.implicit_replication import plain_as_replicated, reads_plain_as_replicated, replicate
from shardwise.ops.unshard import vary_along
from shardwise.ops.views import mesh_view
from shardwise.tensor.dispatch import register_function, run_function
from shardwise.tensor.move import format_layout_text, move_to, replicated_layout
from shardwise.tensor.sharded_tensor import ShardedTensor, wrap

GATES = {"LSTM": 4, "GRU": 3, "RNN_TANH": 1, "RNN_RELU": 1}


@dataclass(frozen=True)
class CellSizes:
    """What cuDNN asks about the weights of a layer; `proj_size` is 0 without a projection."""

    kind: str
    weights_per_layer: int
    input_size: int
    hidden_size: int
    proj_size: int

    @classmethod
    def of(cls, kind: str, weights: Sequence[Tensor], layers: int, bidirectional: bool) -> Self:
        """Read the sizes off the weights of a layer, which torch lists layer by layer.

        >>> lstm = torch.nn.LSTM(5, 4, 2, proj_size=3)
        >>> CellSizes.of("LSTM", lstm._flat_weights, 2, False)
        CellSizes(kind='LSTM', weights_per_layer=5, input_size=5, hidden_size=4, proj_size=3)
        """
        each = len(weights) // (layers * (1 + bidirectional))
        proj_size = weights[each - 1].shape[0] if each % 2 else 0
        return cls(kind, each, weights[0].shape[1], weights[0].shape[0] // GATES[kind], proj_size)


def put_in_one_chunk(
    kind: str, weights: Sequence[Tensor], layers: int, batch_first: bool, bidirectional: bool
) -> list[Tensor]:
    """The weights, copied into one chunk where cuDNN is about to use them."""
    if not _uses_cudnn(weights):
        return list(weights)
    sizes = CellSizes.of(kind, weights, layers, bidirectional)

    def flatten(aliases: list[Tensor]) -> None:
        aten._cudnn_rnn_flatten_weight.default(
            aliases,
            sizes.weights_per_layer,
            sizes.input_size,
            torch.backends.cudnn.rnn.get_cudnn_mode(kind),  # type: ignore[no-untyped-call]  # untyped in torch
            sizes.hidden_size,
            sizes.proj_size,
            layers,
            batch_first,
            bidirectional,
        )

    return list(OneChunk.apply(flatten, *weights))  # type: ignore[no-untyped-call]  # untyped in torch


def _uses_cudnn(weights: Sequence[Tensor]) -> bool:
    """Whether cuDNN takes these weights, which are not in one chunk yet."""
    first = weights[0]
    if first.device.type != "cuda" or torch.version.cuda is None or is_dispatch_mode_on() or is_dual_level():
        return False
    one_kind = len({(w.dtype, w.device) for w in weights}) == 1
    apart = len({storage_identity(w.untyped_storage()) for w in weights}) > 1
    return one_kind and apart and bool(torch.backends.cudnn.is_acceptable(first))  # type: ignore[no-untyped-call]


class OneChunk(torch.autograd.Function):
    """Copies of tensors; `flatten(aliases)` makes them by pointing tensors of the same memory to other memory."""

    @staticmethod
    def forward(ctx: Any, flatten: Callable[[list[Tensor]], None], *weights: Tensor) -> tuple[Tensor, ...]:
        # Tensors of their own: what `flatten` does to them changes neither the weights nor their versions.
        aliases = [aten.set_.source_Tensor(w.new_empty(0), w.detach().contiguous()) for w in weights]
        flatten(aliases)
        return tuple(aliases)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        return None, *grads


LAYERS = ("lstm", "gru", "rnn_tanh", "rnn_relu")
CELLS = ("lstm_cell", "gru_cell", "rnn_tanh_cell", "rnn_relu_cell")


@dataclass(frozen=True)
class _LayerCall:
    """The arguments of a recurrent function; `batch_sizes` are those of a packed sequence, else None."""

    function: Callable[..., Any]
    data: Any
    batch_sizes: Tensor | None
    states: tuple[Any, ...]
    weights: tuple[Any, ...]
    biases: bool
    layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool = False

    @property
    def batch_dim(self) -> int | None:
        return None if self.batch_sizes is not None else 0 if self.batch_first else 1

    def run(self, data: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> tuple[Tensor, ...]:
        """Call torch's function on local tensors; the results as one flat tuple."""
        packed = () if self.batch_sizes is None else (self.batch_sizes,)
        state = list(states) if self.function is torch.lstm else states[0]
        tail = () if packed else (self.batch_first,)
        options = (self.biases, self.layers, self.dropout, self.train, self.bidirectional, *tail)
        kind = self.function.__name__.upper()
        chunk = put_in_one_chunk(kind, weights, self.layers, self.batch_first, self.bidirectional)
        found: tuple[Tensor, ...] = self.function(data, *packed, state, chunk, *options)
        return found


def _read_call(function: Callable[..., Any], args: Sequence[Any]) -> _LayerCall | None:
    """The arguments by name, or None where they are not given by position, as torch's modules give them."""
    lists = [isinstance(a, list | tuple) for a in args[:4]]
    packed = len(lists) == 4 and (not lists[1] if function is torch.lstm else lists[3])
    sizes, rest = (args[1], args[2:]) if packed else (None, args[1:])
    if len(rest) != (7 if packed else 8):
        return None
    state, weights, *options = rest
    return _LayerCall(
        function,
        args[0],
        sizes,
        tuple(state) if isinstance(state, list | tuple) else (state,),
        tuple(weights),
        *options,
    )


def _register_layer(function: Callable[..., Any]) -> None:
    @register_function(function)
    def run(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        call = None if kwargs else _read_call(function, args)
        if call is None or not isinstance(call.data, ShardedTensor) or not _is_regular(call):
            return _run_broken_down(function, args, kwargs)
        if not all(isinstance(t, ShardedTensor) or _may_replicate(t) for t in (*call.states, *call.weights)):
            return NotImplemented
        if call.layers > 1 and call.train and call.dropout > 0:
            return _run_one_by_one(call)
        return _run_on_parts(call)


def _is_regular(call: _LayerCall) -> bool:
    held = [t for t in (call.data, *call.states, *call.weights) if isinstance(t, ShardedTensor)]
    return all(mesh_view(t.sharding) is not None and set(t.sharding.ranks) == set(t.comm.ranks) for t in held)


def _may_replicate(tensor: Tensor) -> bool:
    return reads_plain_as_replicated() or not bool(tensor.any())


def _run_on_parts(call: _LayerCall) -> Any:
    """Run the layers on this rank's part of the batch."""
    spec = mesh_view(call.data.sharding)
    assert spec is not None
    cuts = [p if isinstance(p, Shard) and p.dim == call.batch_dim else Replicate() for p in spec.placements]
    axes = [a for a, p in enumerate(cuts) if isinstance(p, Shard)]
    data = _bring(call.data, call.data, _cut_batch(spec, cuts, call.batch_dim))
    states = [_bring(s, call.data, _cut_batch(spec, cuts, 1)) for s in call.states]
    weights = [_bring(w, call.data, MeshSpec(spec.mesh, (Replicate(),) * len(cuts))) for w in call.weights]
    results = call.run(
        data.local_parts[0],
        [s.local_parts[0] for s in states],
        [vary_along(w, w.sharding, axes) for w in weights],
    )
    dims = (call.batch_dim, *(1 for _ in results[1:]))
    batch = None if call.batch_dim is None else call.data.shape[call.batch_dim]
    return tuple(_wrap_result(r, spec, cuts, d, batch, call.data.comm) for r, d in zip(results, dims, strict=True))


def _bring(tensor: Tensor, like: ShardedTensor, spec: MeshSpec) -> ShardedTensor:
    """A tensor, or a plain one that every rank has, in another layout."""
    held = tensor if isinstance(tensor, ShardedTensor) else replicate(tensor, like)
    layout: Layout = spec.layout(tuple(held.shape))
    if held.sharding == layout and mesh_view(held.sharding) == spec:
        return held
    locals_, anchor = move_to(held, layout, "recurrent layer")
    return wrap(layout, locals_, held.comm, dtype=held.dtype, device=held.device, anchor=anchor)


def _cut_batch(spec: MeshSpec, cuts: Sequence[Placement], dim: int | None) -> MeshSpec:
    """The same cuts of the batch, which is this dim."""
    moved = [p.along(dim) if isinstance(p, Shard) and dim is not None else Replicate() for p in cuts]
    return MeshSpec(spec.mesh, moved, spec.order)


def _wrap_result(
    result: Tensor, spec: MeshSpec, cuts: Sequence[Placement], dim: int | None, batch: int | None, comm: Comm
) -> ShardedTensor:
    shape = [batch if d == dim and batch is not None else n for d, n in enumerate(result.shape)]
    return wrap(_cut_batch(spec, cuts, dim).layout(shape), (result,), comm)


def _run_one_by_one(call: _LayerCall) -> Any:
    """Run the layers one by one, with dropout on the sharded tensor between them."""
    ways, each = 1 + call.bidirectional, len(call.weights) // call.layers
    data, ends = call.data, []
    for layer in range(call.layers):
        states = tuple(s[layer * ways : (layer + 1) * ways] for s in call.states)
        weights = call.weights[layer * each : (layer + 1) * each]
        result = _run_on_parts(replace(call, data=data, states=states, weights=weights, layers=1, dropout=0.0))
        ends.append(result[1:])
        last = layer == call.layers - 1
        data = result[0] if last else torch.nn.functional.dropout(result[0], call.dropout)
    return (data, *(torch.cat(list(parts)) for parts in zip(*ends, strict=True)))


def _run_broken_down(function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    given = [v for v in pytree.tree_leaves((args, kwargs)) if isinstance(v, Tensor)]
    if not all(isinstance(t, ShardedTensor) or _may_replicate(t) for t in given):
        return NotImplemented
    with plain_as_replicated():
        return run_function(function, args, kwargs)


def _register_cell(function: Callable[..., Any]) -> None:
    @register_function(function)
    def run(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
        return _run_broken_down(function, args, kwargs)


for _name in LAYERS:
    _register_layer(getattr(torch, _name))
for _name in CELLS:
    _register_cell(getattr(torch, _name))


@register_function(pack_padded_sequence)
def _pack(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    """Pack sequences that every rank has; the numbers of sequences in each step are plain, as torch keeps them."""
    data, sizes = pack_padded_sequence(*map(_take_whole, args))
    return wrap(replicated_layout(tuple(data.shape), comm.ranks), (data,), comm), sizes


@register_function(pad_packed_sequence)
def _pad(types: Sequence[type], args: tuple[Any, ...], kwargs: dict[str, Any], comm: Comm) -> Any:
    data, lengths = pad_packed_sequence(*map(_take_whole, args))
    return wrap(replicated_layout(tuple(data.shape), comm.ranks), (data,), comm), lengths


def _take_whole(value: Any) -> Any:
    """The whole of a ShardedTensor, gathered if it is split; anything else as it is."""
    if not isinstance(value, ShardedTensor):
        return value
    layout = replicated_layout(tuple(value.shape), value.comm.ranks)
    if value.sharding != layout and value.is_floating_point() and value.sharding.pending is None:
        warnings.warn(
            f"packed sequences are whole on every rank, so {format_layout_text(value.sharding)} is gathered, and each "
            "rank computes all of it; pass the padded batch to the layer without packing it, and it stays split",
            stacklevel=2,
        )
    return move_to(value, layout, "packed sequences")[0][0]
