"""Attention that keeps what a fused kernel keeps, for tensors without values.

On the meta device torch computes scaled dot product attention step by step and keeps the weights of all pairs of rows.
On accelerators it runs a fused kernel, which keeps the queries, keys, values, the result and one number for each row.
The operator here is laid out by the rule of attention itself.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.overrides import TorchFunctionMode

from shardwise.ops.engine.known_calls.recording import note_special
from shardwise.ops.engine.rules import register_sharding, remove_sharding
from shardwise.ops.rules.attention import attention
from shardwise.tensor.dispatch import EVERY, overrides_scope, run_function, set_override

_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float dropout_p=0.0, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False) -> Tensor"
)
_READS_VALUES = (Tensor.item, Tensor.__bool__, Tensor.__contains__)  # checks of padding, layers left out at random
_ALL, _OF_ALL = (Tensor.all, torch.all), "_holds_for_all"


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("planned attention has no values; it is for tensors on the meta device")


planned_attention: Any = torch.library.custom_op(
    "shardwise::planned_attention", _refuse, mutates_args=(), schema=_ARGUMENTS
)
planned_attention_backward: Any = torch.library.custom_op(
    "shardwise::planned_attention_backward",
    _refuse,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v) -> (Tensor, Tensor, Tensor)",
)


@planned_attention.register_fake  # type: ignore[untyped-decorator]  # of an operator that is made at run time
def _allocate_result(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Kernels put the heads of a row next to each other, so that the result becomes one matrix without a copy."""
    if q.ndim < 4:
        return q.new_empty((*q.shape[:-1], v.shape[-1]))
    *outer, heads, rows, _ = q.shape
    return q.new_empty((*outer, rows, heads, v.shape[-1])).transpose(-3, -2)


planned_attention_backward.register_fake(lambda q, k, v: tuple(torch.empty_like(t) for t in (q, k, v)))


def _keep_tensors(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    q, k, v, *_ = inputs
    rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
    ctx.save_for_backward(q, k, v, output, rows)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, *_ = ctx.saved_tensors
    return (*planned_attention_backward(q, k, v), None, None, None)


planned_attention.register_autograd(_differentiate, setup_context=_keep_tensors)


@contextmanager
def fused_attention() -> Iterator[None]:
    """Compute attention of sharded tensors on the meta device by the planned one inside a `with` block."""
    with overrides_scope():
        set_override(F.scaled_dot_product_attention, EVERY, _attend)
        register_sharding(planned_attention._opoverload)(attention)
        try:
            yield
        finally:
            remove_sharding(planned_attention._opoverload)


def _attend(types: Any, args: tuple[Any, ...], kwargs: dict[str, Any], group: Any) -> Any:
    note_special()  # a shortcut would call torch's own function on the local tensors
    first = args[0] if args else kwargs["query"]
    if not first.is_meta or _drops_weights(args, kwargs):
        return run_function(F.scaled_dot_product_attention, args, kwargs)
    return planned_attention(*args, **{_SHORT.get(name, name): value for name, value in kwargs.items()})


_SHORT = {"query": "q", "key": "k", "value": "v", "attn_mask": "mask"}


def _drops_weights(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """Whether attention drops weights at random: it is computed step by step then."""
    return bool(args[4] if len(args) > 4 else kwargs.get("dropout_p", 0.0))


class NoValues(TorchFunctionMode):
    """Answers questions about values, of which there are none: no padding, no layer is left out.

    What holds for `all` elements is taken to hold, as in "no sequence is packed": that is how models ask for the usual.
    """

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if func in _READS_VALUES:
            return func is Tensor.__bool__ and _OF_ALL in args[0].__dict__
        result = func(*args, **(kwargs or {}))
        if func in _ALL and isinstance(result, Tensor):
            result.__dict__[_OF_ALL] = True
        return result


def count_attention_flops(q: Tensor, k: Tensor, v: Tensor) -> int:
    """The operations of the two products of attention, every pair of rows counted.

    >>> heads = torch.empty(1, 2, 8, 4, device="meta")
    >>> count_attention_flops(heads, heads, heads)
    2048
    """
    return int(2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]))
