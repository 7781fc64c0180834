"""Which function of the user's runs in place of a torch function on sharded tensors?

1. `custom_sharded_op_impl(func)`: for every sharded tensor.
2. `custom_sharding_spec_op(spec_class, func)`: for tensors laid out by that class of spec or by one derived from it.
3. `sharded_op_impl(func)`: a default, which the two above override.

`shardwise.tensor.dispatch` has the table, keyed by the functions and classes themselves: two classes of one name do
not collide. Registering a function again replaces the earlier implementation.

Which torch functions mean something else on torch's ShardedTensor than on the native one?

1. Random values: each local shard is filled from this rank's generator, as the same call on a local tensor would.
2. `torch.equal` and `torch.allclose`: two tensors of one process group, compared shard by shard, metadata included.
3. Lookups, and `linear` of plain rows with a sharded weight: they are this rank's own, and so is the result.
4. All other plain tensors beside sharded ones (a bias, a mask, the weight of a norm) are the same on every rank.

A user's own implementation (`custom_sharded_op_impl`) comes before these. In every function, all tensors belong to one
process group.

Results of native functions, as tensors of torch's class and of its specs, whose attributes programs read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable, Mapping
from inspect import signature
from typing import Any, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._torch import pytree
from shardwise.comm import any_rank
from shardwise.comm.current import GroupOrComm, comm_of, same_group
from shardwise.compat.specs import ChunkShardingSpec
from shardwise.geometry import Layout, MeshSpec, Shard
from shardwise.nn.lookup import is_local_batch_mode, plain_as_local_batch
from shardwise.ops.implicit_replication import reads_plain_as_replicated
from shardwise.tensor.dispatch import (
    DEFAULT,
    EVERY,
    Override,
    find_override,
    override_for,
    plain_leaves,
    set_override,
    sharded_leaves,
)
from shardwise.tensor.dispatch import overrides_scope as custom_ops_scope
from shardwise.tensor.sharded_tensor import ShardedTensor

Op: TypeAlias = Callable[..., Any]
Impl: TypeAlias = Override
Table: TypeAlias = dict[Op, Impl]
Decorator: TypeAlias = Callable[[Impl], Impl]

__all__ = [
    "Decorator",
    "Impl",
    "Op",
    "Table",
    "ask_custom_ops",
    "check_op_arguments",
    "check_signature",
    "custom_ops_scope",
    "custom_sharded_op_impl",
    "custom_sharding_spec_op",
    "dispatch_custom_op",
    "find_custom_op",
    "find_default_op",
    "find_spec_op",
    "function_name",
    "has_custom_op",
    "sharded_op_impl",
]


def custom_sharded_op_impl(func: Op) -> Decorator:
    """Decorate a function that implements a torch function whenever a sharded tensor is among its arguments.

    It takes the arguments of `__torch_function__` and the process group of the tensors (the comm where the ranks are
    threads): `(types, args, kwargs, process_group)`.

    >>> import torch
    >>> with custom_ops_scope():
    ...     @custom_sharded_op_impl(torch.asin)
    ...     def asin(types, args, kwargs, process_group):
    ...         return "ours"
    ...     find_custom_op(torch.asin) is asin
    True
    >>> find_custom_op(torch.asin) is None
    True
    """
    return functools.partial(_register_custom_op, EVERY, func)


def custom_sharding_spec_op(sharding_spec_class: type, func: Op) -> Decorator:
    """Decorate a function that implements a torch function on tensors laid out by a class of sharding specs.

    >>> import torch
    >>> from shardwise.geometry import ChunkSpec
    >>> class Rows(ChunkSpec):
    ...     pass
    >>> with custom_ops_scope():
    ...     @custom_sharding_spec_op(ChunkSpec, torch.asin)
    ...     def asin(types, args, kwargs, process_group):
    ...         return "ours"
    ...     find_spec_op(Rows(0, ranks=2), torch.asin) is asin
    True
    """
    if not isinstance(sharding_spec_class, type):
        raise TypeError(
            f"custom_sharding_spec_op takes a class of sharding specs and a torch function; got "
            f"{sharding_spec_class!r} in place of the class"
        )
    return functools.partial(_register_custom_op, sharding_spec_class, func)


def sharded_op_impl(func: Op) -> Decorator:
    """Decorate the default implementation of a torch function, used where no custom one is registered.

    >>> import torch
    >>> with custom_ops_scope():
    ...     @sharded_op_impl(torch.asin)
    ...     def asin(types, args, kwargs, process_group):
    ...         return "the default"
    ...     find_default_op(torch.asin) is asin
    True
    """
    return functools.partial(_register_custom_op, DEFAULT, func)


def find_custom_op(func: Op) -> Impl | None:
    """Return the implementation registered by `custom_sharded_op_impl`, or None."""
    return find_override(func, EVERY)


def find_spec_op(spec: object, func: Op) -> Impl | None:
    """Return the implementation registered for the nearest class of a spec, its bases included, or None."""
    return find_override(func, *type(spec).__mro__)


def find_default_op(func: Op) -> Impl | None:
    """Return the implementation registered by `sharded_op_impl`, or None."""
    return find_override(func, DEFAULT)


def has_custom_op(sharding_spec: object, op: Op) -> bool:
    """Whether a class of the spec has its own implementation of a torch function.

    >>> import torch
    >>> has_custom_op(None, torch.asin)
    False
    """
    return find_spec_op(sharding_spec, op) is not None


def dispatch_custom_op(
    sharding_spec: object,
    op: Op,
    types: Iterable[type],
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any] | None,
    process_group: GroupOrComm | None,
) -> Any:
    """Call the implementation that a class of the spec has of a torch function.

    >>> import torch
    >>> dispatch_custom_op(None, torch.asin, (), (), {}, None)
    Traceback (most recent call last):
    ...
    RuntimeError: Custom op: asin not registered for NoneType or its bases; register it with custom_sharding_spec_op
    """
    impl = find_spec_op(sharding_spec, op)
    if impl is None:
        raise RuntimeError(
            f"Custom op: {function_name(op)} not registered for {type(sharding_spec).__qualname__} or its bases; "
            "register it with custom_sharding_spec_op"
        )
    return impl(types, args, kwargs, process_group)


def ask_custom_ops(cls: type[Tensor], *names: str) -> None:
    """Let implementations of `torch.Tensor.<name>` answer methods that a class of sharded tensors has of its own."""
    for name in names:
        setattr(cls, name, _ask_first(getattr(cls, name), getattr(Tensor, name)))


def _ask_first(own: Op, func: Op) -> Op:
    @functools.wraps(own)
    def method(self: Any, *args: Any, **kwargs: Any) -> Any:
        if override_for(func, self.sharding.spec) is None:
            return own(self, *args, **kwargs)
        return type(self).__torch_function__(func, (type(self),), (self, *args), kwargs)

    return method


def check_op_arguments(op: Op, args: Iterable[Any] = (), kwargs: Mapping[str, Any] | None = None) -> None:
    """Raise unless a call has a sharded tensor among its arguments and all of them use one process group.

    >>> import torch
    >>> check_op_arguments(torch.asin, (1.0,))
    Traceback (most recent call last):
    ...
    TypeError: torch function 'asin', with args: (float) and kwargs: (), called without any distributed tensor!
    """
    args, kwargs = tuple(args), dict(kwargs or {})
    if not args and not kwargs:
        raise ValueError(f"No input for '{function_name(op)}'! Pass at least one ShardedTensor")
    comms = [comm for leaf in pytree.tree_leaves((args, kwargs)) if (comm := comm_of(leaf)) is not None]
    if not comms:
        given = ", ".join(type(a).__name__ for a in args)
        named = ", ".join(f"{k}: {type(v).__name__}" for k, v in kwargs.items())
        raise TypeError(
            f"torch function '{function_name(op)}', with args: ({given}) and kwargs: ({named}), "
            "called without any distributed tensor!"
        )
    for other in comms[1:]:
        if not same_group(comms[0], other):
            raise RuntimeError(
                "All distributed tensors should use the same ProcessGroup if used together in an op; "
                f"'{function_name(op)}' got tensors on {comms[0]!r} and {other!r}"
            )


def function_name(func: object) -> str:
    """Return the name by which users know a torch function.

    >>> import torch
    >>> function_name(torch.Tensor.add)
    'add'
    """
    return str(getattr(func, "__name__", None) or func)


def check_signature(op: Op, impl: Impl) -> None:
    """Raise unless an implementation takes the four arguments that it is called with."""
    if len(signature(impl).parameters) != 4:
        raise TypeError(
            "Custom sharded op function expects signature: (types, args, kwargs, process_group), but received "
            f"signature: {signature(impl)} for '{function_name(op)}'"
        )


def _register_custom_op(scope: object, op: Op, impl: Impl) -> Impl:
    """Register an implementation, wrapped in the check of its arguments."""
    check_signature(op, impl)

    @functools.wraps(impl)
    def checked(types: Any, args: Any, kwargs: Any, process_group: Any) -> Any:
        check_op_arguments(op, args, kwargs)
        return impl(types, args, {} if kwargs is None else kwargs, process_group)

    set_override(op, scope, checked)
    return checked


Meaning: TypeAlias = Callable[[Callable[..., Any], tuple[Any, ...], dict[str, Any]], Any]


def call_torch_meaning(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Return what torch's meaning of a function gives; NotImplemented where the native one is the same."""
    tensors = list(sharded_leaves(args, kwargs))
    if len(tensors) > 1:
        check_op_arguments(func, tensors)
    own = _MEANINGS.get(func)
    if own is None or override_for(func, tensors[0].sharding.spec) is not None:
        return NotImplemented
    return own(func, args, kwargs)


def takes_plain_as_replicated(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether the plain tensors of a call are the same on every rank, as torch's sharded operators take them.

    In modules whose parameters are sharded, those that are neither parameters nor masks may be a rank's own batch: they
    are not, and neither are tensors to write to.

    >>> import torch
    >>> takes_plain_as_replicated((torch.ones(2), 3), {}), takes_plain_as_replicated((3,), {})
    (True, False)
    """
    plain = [leaf for leaf in plain_leaves(args, kwargs) if leaf.ndim]
    if not plain or "out" in kwargs:
        return False
    return not is_local_batch_mode() or all(t.dtype == torch.bool or isinstance(t, nn.Parameter) for t in plain)


def _fill_each_shard(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call a function of torch.nn.init on every local shard."""
    tensor = args[0] if args else kwargs.pop("tensor")
    for name, value in kwargs.items():
        if value is None and name != "generator":
            raise ValueError(f"param: {name} shouldn't be None!")
    for shard in tensor.local_shards():
        func(shard.tensor, *args[1:], **kwargs)
    return tensor


def _draw_each_shard(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Call torch.rand_like or torch.randn_like on every local shard."""
    tensor = args[0] if args else kwargs.pop("input")
    made: Any = torch.empty_like(tensor, **kwargs)
    with torch.no_grad():
        for new, local in zip(made.local_parts, tensor.local_parts, strict=True):
            new.copy_(func(local, dtype=new.dtype, device=new.device))
    return made


def _compare_shards(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Compare metadata and local shards; all ranks get the same answer."""
    one, other = (*args, *(kwargs.pop(name) for name in ("input", "other") if name in kwargs))[:2]
    if not (isinstance(one, ShardedTensor) and isinstance(other, ShardedTensor)):
        raise TypeError(f"Both arguments to torch.{func.__name__} need to be of type ShardedTensor")
    if not one.comm.ranks:  # of a group of which this rank is not a member
        return not other.comm.ranks
    same = one.metadata() == other.metadata() and len(one.local_parts) == len(other.local_parts)
    options = (*args[2:],)
    same = same and all(
        func(mine, theirs, *options, **kwargs) for mine, theirs in zip(one.local_parts, other.local_parts, strict=True)
    )
    return not any_rank(one.comm, not same, label=func.__name__)


def _look_up_own_ids(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    with plain_as_local_batch():
        return ShardedTensor.__torch_function__(func, (), args, kwargs)


def _multiply_own_rows(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """Plain rows are this rank's own, unless the program says that all ranks have the same."""
    input = args[0] if args else kwargs.get("input")
    if isinstance(input, ShardedTensor) or reads_plain_as_replicated():
        return NotImplemented
    return _look_up_own_ids(func, args, kwargs)


def _make_contiguous(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """A tensor that is contiguous is its own result: on every rank, also where one row makes any local tensor so."""
    plain = len(args) == 1 and not kwargs and args[0].is_contiguous()
    return args[0] if plain and all(part.is_contiguous() for part in args[0].local_parts) else NotImplemented


def _convert_like(func: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """The dtype of another tensor; the spec, which may be of a user's class, is kept."""
    known = len(args) == 2 and not kwargs and isinstance(args[0], ShardedTensor) and isinstance(args[1], Tensor)
    return args[0].to(args[1].dtype) if known else NotImplemented


_MEANINGS: dict[Callable[..., Any], Meaning] = {
    nn.init.uniform_: _fill_each_shard,
    nn.init.normal_: _fill_each_shard,
    nn.init.kaiming_uniform_: _fill_each_shard,
    nn.init.constant_: _fill_each_shard,
    torch.rand_like: _draw_each_shard,
    torch.randn_like: _draw_each_shard,
    torch.equal: _compare_shards,
    torch.allclose: _compare_shards,
    Tensor.equal: _compare_shards,
    Tensor.allclose: _compare_shards,
    Tensor.contiguous: _make_contiguous,
    Tensor.type_as: _convert_like,
    F.embedding: _look_up_own_ids,
    F.embedding_bag: _look_up_own_ids,
    F.linear: _multiply_own_rows,
}


# By the identity of layouts, which equal ones of other specs do not share; each is kept alive beside its answer.
_chunk_layouts: dict[tuple[int, torch.device], tuple[Layout, Layout]] = {}
_MAX_CHUNK_LAYOUTS = 8192


def set_tensor_type(value: Any, cls: type[ShardedTensor]) -> Any:
    """Make a native ShardedTensor one of a class with torch's meaning, in place; anything else passes."""
    if type(value) is ShardedTensor:
        value.__class__ = cls
        value.sharding = _layout_of_chunks(value.sharding, value.device)
    return value


def _layout_of_chunks(layout: Layout, device: torch.device) -> Layout:
    """The same layout by a ChunkShardingSpec, whose `dim` and `placements` programs read; unchanged if it has none."""
    known = _chunk_layouts.get((id(layout), device))
    if known is None:
        if len(_chunk_layouts) >= _MAX_CHUNK_LAYOUTS:
            _chunk_layouts.clear()
        known = _chunk_layouts[id(layout), device] = (layout, _find_chunks(layout, device))
    return known[1]


def _find_chunks(layout: Layout, device: torch.device) -> Layout:
    spec = layout.spec
    if not isinstance(spec, MeshSpec) or spec.mesh.ndim != 1 or not isinstance(spec.placements[0], Shard):
        return layout
    placements = [f"rank:{rank}/{device}" for rank in spec.mesh.ranks.tolist()]
    same = ChunkShardingSpec(spec.placements[0].dim, list(placements)).layout(layout.shape)
    return same if same == layout else layout
