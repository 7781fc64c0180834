"""One training step of a sharded model on one rank, without values and without other ranks.

1. A copy of the model on the meta device is sharded by the plan: the rank has its local parts only.
2. The forward and the backward pass run as they do in training. Every operator takes its own rule and its own choice
   of layouts, and every move is counted (`StepMeter`), so the figures are those of the real step.
3. Results have no values, so a model that looks at values (a loss that stops on NaN, experts that count their tokens)
   cannot be rehearsed.

A comm that sends nothing: one rank of a world of any size, for a step that is rehearsed without values.

Every rank is taken to pass what this one passes: the same arguments, and batches of the same length.

With which arguments is a model called? Found from the model, for a batch and a length of sequences on one rank.

What does a step without values do on one rank? Its memory, its moves and its operators are counted, in their order.

1. Every storage is counted from the operator that makes it until nothing refers to it: so the figures have what
   autograd keeps, what checkpointed code computes again, and what is freed after the forward pass.
2. Moves between layouts are operators here (`shardwise::move`), each with its layouts.
3. Operations of matrix products, convolutions and attention are counted by torch's own formulas, and of each operator
   the bytes that it reads and writes. Of causal attention half of the pairs are counted.
4. What is held belongs to the module that ran when it was made.

Attention that keeps what a fused kernel keeps, for tensors without values.

On the meta device torch computes scaled dot product attention step by step and keeps the weights of all pairs of rows.
On accelerators it runs a fused kernel, which keeps the queries, keys, values, the result and one number for each row.
The operator here is laid out by the rule of attention itself.

Where does a model come from? A function that makes it, or a `config.json` of Hugging Face; on the meta device.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import sys
import threading
import weakref
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise._cache import cached
from shardwise._text import parse_json
from shardwise._torch import aten, is_in_backward, present_ops, pytree, storage_identity
from shardwise.comm import use_comm
from shardwise.comm.stand_in import StandInComm
from shardwise.geometry import Placement
from shardwise.geometry.notation import DType, find_dtype
from shardwise.nn.plan import ModelPlan, PlanError
from shardwise.nn.shard_module import shard_by_patterns
from shardwise.nn.stages import NoValues
from shardwise.ops.dispatch_cache import note_special
from shardwise.ops.registration import register_sharding, remove_sharding
from shardwise.ops.rules.attention import attention
from shardwise.ops.views import mesh_view
from shardwise.tensor.dispatch import EVERY, overrides_scope, run_function, set_override
from shardwise.tensor.move import Move, find_numbered
from shardwise.tensor.sharded_tensor import ShardedTensor


@lru_cache(maxsize=64)
def silent_comm(rank: int, ranks: tuple[int, ...]) -> StandInComm:
    """The comm of one rank of many, alone in its process, on the meta device; one for each rank.

    What is remembered about moves is remembered by comm.

    >>> silent_comm(0, (0, 1)).all_gather_bytes(b"x", label="lengths")
    [b'x', b'x']
    """

    def refuse(label: str) -> Exception:
        return NotImplementedError(f"'{label}' needs the other ranks, which a plan does not have")

    return StandInComm(
        rank,
        ranks,
        torch.device("meta"),
        refuse=refuse,
        ask=lambda label, data: [data] * len(ranks),
        completes=True,
    )


_ARGUMENTS = (
    "(Tensor q, Tensor k, Tensor v, Tensor? mask=None, float dropout_p=0.0, bool is_causal=False, *, "
    "float? scale=None, bool enable_gqa=False) -> Tensor"
)


def _refuse(*args: Any, **kwargs: Any) -> Any:
    raise NotImplementedError("planned attention has no values; it is for tensors on the meta device")


planned_attention: Any = torch.library.custom_op(
    "shardwise::planned_attention", _refuse, mutates_args=(), schema=_ARGUMENTS
)
planned_attention_backward: Any = torch.library.custom_op(
    "shardwise::planned_attention_backward",
    _refuse,
    mutates_args=(),
    schema="(Tensor q, Tensor k, Tensor v, bool is_causal) -> (Tensor, Tensor, Tensor)",
)


@planned_attention.register_fake  # type: ignore[untyped-decorator]  # of an operator that is made at run time
def _allocate_result(q: Tensor, k: Tensor, v: Tensor, *args: Any, **kwargs: Any) -> Tensor:
    """Kernels put the heads of a row next to each other, so that the result becomes one matrix without a copy."""
    if q.ndim < 4:
        return q.new_empty((*q.shape[:-1], v.shape[-1]))
    *outer, heads, rows, _ = q.shape
    return q.new_empty((*outer, rows, heads, v.shape[-1])).transpose(-3, -2)


planned_attention_backward.register_fake(lambda q, k, v, is_causal: tuple(torch.empty_like(t) for t in (q, k, v)))


def _keep_tensors(ctx: Any, inputs: tuple[Any, ...], keyword_only_inputs: Any, output: Tensor) -> None:
    q, k, v, *more = inputs
    ctx.is_causal = more[2]
    rows = q.new_empty(q.shape[:-1], dtype=torch.float32)
    ctx.save_for_backward(q, k, v, output, rows)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Any, ...]:
    q, k, v, *_ = ctx.saved_tensors
    return (*planned_attention_backward(q, k, v, ctx.is_causal), None, None, None)


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


def count_attention_flops(q: Tensor, k: Tensor, v: Tensor, *, is_causal: bool = False) -> int:
    """The operations of the two products of attention, every pair of rows counted, or half of them if it is causal.

    >>> heads = torch.empty(1, 2, 8, 4, device="meta")
    >>> count_attention_flops(heads, heads, heads), count_attention_flops(heads, heads, heads, is_causal=True)
    (2048, 1024)
    """
    every = int(2 * q.shape[:-1].numel() * k.shape[-2] * (q.shape[-1] + v.shape[-1]))
    return every // 2 if is_causal else every


MOVE_KINDS = ("gather", "gradient", "activation")


class MeteredMove(NamedTuple):
    """One move of a step: which, in which pass, and the parameter that it gathers, or whose gradient it makes.

    `gathers`: it moves the parameter itself. `place` counts the operators before it, `ready` those until its inputs are
    made, and `use` those before the first one that reads its result.
    """

    record: Move
    backward: bool
    parameter: str | None = None
    gathers: bool = False
    place: int = 0
    ready: int = 0
    use: int = 0

    @property
    def kind(self) -> str:
        """One of `MOVE_KINDS`: what is moved."""
        return "activation" if self.parameter is None else "gather" if self.gathers else "gradient"


class MeteredOperator(NamedTuple):
    """One operator of a step: what `node_seconds` asks for; `shape` is that of a product."""

    flops: int
    nbytes: int
    shape: tuple[float, float, float] | None
    dtype: str


class StepMeter(TorchDispatchMode):  # type: ignore[no-untyped-call]  # untyped in torch
    """Counts what runs inside a `with` block on tensors of the meta device.

    >>> with StepMeter() as meter:
    ...     x = torch.ones(8, 4, device="meta") @ torch.ones(4, 2, device="meta")
    >>> meter.flops, meter.live_bytes
    (128, 64)
    """

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.live_bytes = self.peak_bytes = self.flops = 0
        self.operators: list[MeteredOperator] = []
        self.modules: list[str] = [""]
        self._moves: list[MeteredMove] = []
        self._uses: dict[int, int] = {}
        self._sizes: dict[int, tuple[int, str]] = {}
        self._names: dict[int, str] = {}
        self._made_by: dict[int, int] = {}
        self._made_at: dict[int, int] = {}

    @property
    def moves(self) -> tuple[MeteredMove, ...]:
        """The moves in their order; a result that nothing reads is needed at the end."""
        last = len(self.operators)
        return tuple(m._replace(use=self._uses.get(i, last)) for i, m in enumerate(self._moves))

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ShardedTensor) for kind in types):
            return NotImplemented  # its local tensors come here
        result = func(*args, **(kwargs or {}))
        made = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
        given = [value for value in pytree.tree_leaves((args, kwargs)) if isinstance(value, Tensor)]
        if func is torch.ops.shardwise.move.default:
            self._note_move(find_numbered(args[1]), args[0], made)
        elif not _is_view(func):
            self._note_operator(func, args, kwargs or {}, result, given, made)
        self.hold(made)
        return result

    def _note_operator(
        self, func: Any, args: Any, kwargs: Any, result: Any, given: Sequence[Tensor], made: Sequence[Tensor]
    ) -> None:
        flops = _count_flops(func, args, kwargs, result)
        self.flops += flops
        for tensor in given:
            number = self._made_by.get(key := storage_identity(tensor.untyped_storage()))
            if number is not None:
                self._uses.setdefault(number, len(self.operators))
        nbytes = 0 if func in _WRITES_NOTHING else sum(t.numel() * t.element_size() for t in (*given, *made))
        first = made[0] if made else given[0] if given else None
        shape = _product_shape(given[-2:]) if flops else None
        if flops and len(kinds := {t.dtype for t in given if t.is_floating_point()}) > 1:  # not seen on the meta device
            raise RuntimeError(f"{func} of {' and '.join(sorted(map(str, kinds)))}")
        dtype = "f32" if first is None else _short_dtype(first.dtype)
        self.operators.append(MeteredOperator(flops, nbytes, shape, dtype))
        for tensor in made:
            key = storage_identity(tensor.untyped_storage())
            self._made_at[key] = len(self.operators)

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count the memory of these tensors until it is freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_identity(storage)
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes(), self.modules[-1]
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)[0]
        for notes in (self._names, self._made_by, self._made_at):
            notes.pop(key, None)

    def held_keys(self) -> set[int]:
        """What is held now."""
        return set(self._sizes)

    def bytes_by_module(self, without: set[int]) -> dict[str, int]:
        """What is held now, by the module that ran when it was made, without some of it."""
        found: dict[str, int] = {}
        for key, (nbytes, module) in self._sizes.items():
            if key not in without:
                found[module] = found.get(module, 0) + nbytes
        return found

    def name_tensors(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Let moves of these local tensors be moves of a parameter."""
        for tensor in tensors:
            self._names[storage_identity(tensor.untyped_storage())] = name

    def name_gradients(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Let the moves that made these local tensors be moves of a parameter."""
        for tensor in tensors:
            number = self._made_by.get(storage_identity(tensor.untyped_storage()))
            if number is not None:
                self._moves[number] = self._moves[number]._replace(parameter=name, gathers=False)

    def _note_move(self, record: Move, sources: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        keys = [storage_identity(t.untyped_storage()) for t in sources]
        name = next((n for key in keys if (n := self._names.get(key)) is not None), None)
        place = len(self.operators)
        ready = max((self._made_at.get(key, 0) for key in keys), default=0)
        for key in keys:  # a move of what another one makes
            if key in self._made_by:
                self._uses.setdefault(self._made_by[key], place)
                ready = place
        for tensor in made:
            self._made_by[storage_identity(tensor.untyped_storage())] = len(self._moves)
        self._moves.append(MeteredMove(record, is_in_backward(), name, name is not None, place, ready))


def _count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if func is planned_attention._opoverload:
        return count_attention_flops(*args[:3], is_causal=bool(args[5] if len(args) > 5 else kwargs.get("is_causal")))
    if func is planned_attention_backward._opoverload:
        return count_attention_flops(*args[:3], is_causal=args[3]) * 5 // 2  # five products, where there were two
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


_WRITES_NOTHING = set(
    present_ops([aten.empty.memory_format, aten.empty_like.default, aten.new_empty.default, aten._unsafe_view.default])
)


@cached()
def _is_view(func: Any) -> bool:
    """Whether all that an operator returns is memory of its arguments, which it does not write to."""
    schema = func._schema
    return bool(schema.returns) and all(r.alias_info is not None and not r.alias_info.is_write for r in schema.returns)


def _short_dtype(dtype: torch.dtype) -> str:
    return find_dtype(str(dtype)).name


def _product_shape(factors: Sequence[Tensor]) -> tuple[float, float, float] | None:
    """The rows, columns and terms of a product of two matrices, or of many pairs of them."""
    if len(factors) != 2 or not 2 <= factors[0].ndim == factors[1].ndim <= 3:
        return None
    a, b = factors
    return float(a.shape[:-1].numel()), float(b.shape[-1]), float(a.shape[-1])


Inputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any]
Loss: TypeAlias = Callable[[Any], Tensor]

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Rehearsal:
    """What one rank's step needs: the bytes that it holds, operations, moves.

    `peak_bytes` has parameters, buffers, gradients and activations, without the state of an optimizer;
    `activations` those of each module at the end of the forward pass; `forward_flops` are a part of `flops`;
    `returned` are the placements of what each module returns.
    """

    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    peak_bytes: int
    flops: int
    moves: tuple[MeteredMove, ...]
    operators: tuple[MeteredOperator, ...]
    activations: Mapping[str, int]
    forward_flops: int
    returned: Mapping[str, tuple[Placement, ...]]


def rehearse(
    model: nn.Module,
    plan: ModelPlan,
    inputs: Inputs,
    rank: int,
    computed: DType | None,
    loss: Loss | None = None,
    *,
    again: bool | Sequence[str] = False,
) -> Rehearsal:
    """Run one step of a model, whose parameters may be on the meta device, as one rank of a plan.

    `again`: modules that are computed again in the backward pass, in place of those of the plan (`recompute`).

    >>> from shardwise.geometry import Mesh
    >>> plan = ModelPlan(Mesh.of(tp=2), {"weight": "S(0)"}, input_plan="replicated")
    >>> found = rehearse(nn.Linear(4, 8, bias=False), plan, (torch.ones(2, 4),), 0, None)
    >>> found.flops, [(m.record.label, m.backward) for m in found.moves]
    (128, [])
    """
    if plan.stages is not None:
        raise PlanError("a plan with stages has no step of a whole model: leave out its stages and the axis pp")
    plan = replace(plan, recompute=again) if again else plan
    dtype: torch.dtype | None = None if computed is None else getattr(torch, computed.torch_name)
    twin = copy_to_meta(model, dtype)
    ranks = tuple(sorted(plan.mesh.ranks.reshape(-1).tolist()))
    comm = silent_comm(rank, ranks)
    meter, given = StepMeter(), inputs_on_meta(inputs, dtype)
    with step_without_values(comm):
        shard_by_patterns(twin, plan, 0, comm)
        with torch.device("meta"), NoValues(), meter:
            try:
                return _run_step(twin, given, loss or sum_of_outputs, meter)
            except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
                raise PlanError(
                    f"a step of {type(model).__name__} cannot be run without values: {type(error).__name__}: {error}; "
                    f"{_advise(plan)}"
                ) from error


def inputs_on_meta(inputs: Inputs, dtype: torch.dtype | None) -> Inputs:
    """The same arguments without values, floats in `dtype`."""
    made: Inputs = pytree.tree_map_only(Tensor, lambda t: _cast(t.detach().to("meta"), dtype), inputs)
    return made


@contextmanager
def step_without_values(comm: StandInComm) -> Iterator[None]:
    """One rank's step in a `with` block: one at a time in a process, with gradients, attention as kernels keep it."""
    with _one_at_a_time, fused_attention(), use_comm(comm), torch.enable_grad():
        yield


@contextmanager
def note_modules(
    model: nn.Module, running: list[str], returned: Callable[[str, ShardedTensor], None]
) -> Iterator[None]:
    """Keep the names of the modules that run, the innermost last; `returned` sees the first result of each."""

    def leave(name: str, output: Any) -> None:
        running.pop()
        for leaf in pytree.tree_leaves(output if not hasattr(output, "to_tuple") else output.to_tuple()):
            if isinstance(leaf, ShardedTensor) and leaf.is_floating_point():
                returned(name, leaf)
                return

    with ExitStack() as stack:
        for name, part in model.named_modules():
            stack.callback(part.register_forward_pre_hook(lambda *_, n=name: running.append(n)).remove)
            stack.callback(part.register_forward_hook(lambda *a, n=name: leave(n, a[-1]), always_call=True).remove)
        yield


def _advise(plan: ModelPlan) -> str:
    if plan.input_plan is None:
        return (
            "the plan does not say how inputs are laid out: give it an input_plan, such as 'dp: S(0)' or 'replicated'"
        )
    return "pass inputs= (the arguments of one forward pass on a rank) or loss=, or estimate from parameter shapes"


def _run_step(twin: nn.Module, inputs: Any, loss: Loss, meter: StepMeter) -> Rehearsal:
    for name, parameter in twin.named_parameters():
        meter.hold(_parts(parameter))
        meter.name_tensors(name, _parts(parameter))
    parameters = meter.live_bytes
    for buffer in twin.buffers():
        meter.hold(_parts(buffer))
    held = meter.live_bytes
    given = [leaf for leaf in pytree.tree_leaves(inputs) if isinstance(leaf, Tensor)]
    before = meter.held_keys()
    meter.hold(given)
    returned: dict[str, tuple[Placement, ...]] = {}
    with note_modules(twin, meter.modules, lambda name, t: returned.update({name: placements_of(t)})):
        outputs = twin(**inputs) if isinstance(inputs, Mapping) else twin(*inputs)
    value = loss(outputs)
    del outputs
    activations, forward_flops = meter.live_bytes - held, meter.flops
    by_module = meter.bytes_by_module(before)
    value.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            meter.name_gradients(name, _parts(parameter.grad))
    counted = (activations, meter.peak_bytes, meter.flops, meter.moves, tuple(meter.operators))
    return Rehearsal(parameters, held - parameters, *counted, by_module, forward_flops, returned)


def placements_of(tensor: ShardedTensor) -> tuple[Placement, ...]:
    """The placements of a tensor on its mesh, none if it is irregular."""
    spec = mesh_view(tensor.sharding)
    return () if spec is None else spec.placements


def _parts(tensor: Tensor) -> tuple[Tensor, ...]:
    return tensor.local_parts if isinstance(tensor, ShardedTensor) else (tensor,)


def sum_of_outputs(outputs: Any) -> Tensor:
    """The loss of a model that returns one (`outputs.loss`), or else the sum of its first result with gradients."""
    known = getattr(outputs, "loss", None)
    if isinstance(known, Tensor):
        return known
    for leaf in pytree.tree_leaves(outputs if not hasattr(outputs, "to_tuple") else outputs.to_tuple()):
        if isinstance(leaf, Tensor) and leaf.requires_grad:
            return leaf.sum()
    raise ValueError("no result of the model depends on its parameters, so there is no gradient")


def copy_to_meta(model: nn.Module, dtype: torch.dtype | None) -> nn.Module:
    """A copy of a model without values; parameters and persistent buffers of floats take `dtype`.

    >>> weight = copy_to_meta(nn.Linear(2, 2), torch.bfloat16).weight
    >>> weight.device, weight.dtype
    (device(type='meta'), torch.bfloat16)
    """
    memo: dict[int, Any] = {}
    for parameter in model.parameters():
        made = _cast(parameter.detach().to("meta"), dtype)
        memo[id(parameter)] = nn.Parameter(made, requires_grad=parameter.requires_grad)
    for part in model.modules():
        for name, buffer in part.named_buffers(recurse=False):
            kept = name in part._non_persistent_buffers_set
            memo[id(buffer)] = _cast(buffer.detach().to("meta"), None if kept else dtype)
    return copy.deepcopy(model, memo)


def _cast(tensor: Tensor, dtype: torch.dtype | None) -> Tensor:
    return tensor if dtype is None or not tensor.is_floating_point() else tensor.to(dtype)


def make_inputs(model: nn.Module, batch: int, sequence: int) -> Inputs:
    """The arguments of one forward pass, without values.

    - A model of transformers that reads tokens, or a model with an embedding: numbers of tokens, [batch, sequence]; a
      model of transformers for language gets them as labels too, so that it computes its own loss.
    - A model with linear layers only: [batch, features of the first one], or [batch, sequence, features].

    >>> [tuple(value.shape) for value in make_inputs(nn.Sequential(nn.Embedding(10, 4), nn.Linear(4, 2)), 2, 8)]
    [(2, 8)]
    """
    if getattr(model, "main_input_name", None) == "input_ids" and hasattr(model, "config"):
        return _token_inputs(model, batch, sequence)
    first = next((m for m in model.modules() if isinstance(m, nn.Embedding | nn.Linear)), None)
    if isinstance(first, nn.Embedding):
        return (torch.zeros(batch, sequence, dtype=torch.long, device="meta"),)
    if isinstance(first, nn.Linear) and not any(isinstance(m, nn.modules.conv._ConvNd) for m in model.modules()):
        return (torch.zeros(batch, sequence, first.in_features, dtype=first.weight.dtype, device="meta"),)
    raise PlanError(
        f"the arguments of {type(model).__name__} cannot be guessed; pass inputs=, the arguments of one forward pass "
        "on a rank, as a tuple or a dict; a factory may return (model, inputs)"
    )


def _token_inputs(model: nn.Module, batch: int, sequence: int) -> dict[str, Any]:
    ids = torch.zeros(batch, sequence, dtype=torch.long, device="meta")
    named: dict[str, Any] = {"input_ids": ids}
    taken = inspect.signature(model.forward).parameters
    if getattr(model.config, "is_encoder_decoder", False):
        named["decoder_input_ids"] = ids
    if "labels" in taken and any(word in type(model).__name__ for word in ("LM", "Generation")):
        named["labels"] = ids
    if "use_cache" in taken:
        named["use_cache"] = False
    return named


def count_tokens(inputs: Inputs) -> int:
    """The rows that a rank passes in: the elements of the first tensor of numbers, else its length without features."""
    tensors = [v for v in (inputs.values() if isinstance(inputs, dict) else inputs) if isinstance(v, Tensor)]
    if not tensors:
        return 0
    first = tensors[0]
    return first.numel() if not first.is_floating_point() else first.shape[: max(1, first.ndim - 1)].numel()


class ModelSource(NamedTuple):
    """A model on the meta device, and the arguments of its forward pass if the factory returned them."""

    model: nn.Module
    inputs: Inputs | None = None


def load_model(source: str) -> ModelSource:
    """The model of a factory `package.module:function`, or of a `config.json` (or the folder that it is in).

    A factory is called on the meta device and returns a module, or a module and the arguments of a forward pass.

    >>> load_model("torch.nn:Identity").model
    Identity()
    """
    path = Path(source)
    if path.suffix == ".json" or path.is_dir():
        return ModelSource(load_config_model(path / "config.json" if path.is_dir() else path))
    module, colon, name = source.partition(":")
    if not colon or not module or not name:
        raise PlanError(
            f"{source!r} is neither a factory such as package.module:function nor a config.json; a factory is called "
            "without arguments and returns a module"
        )
    return _call_factory(source, _find_factory(module, name))


def _find_factory(module: str, name: str) -> Any:
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())  # as `python -m` does
    try:
        found: Any = importlib.import_module(module)
    except ImportError as error:
        raise PlanError(f"the module {module} of the factory {module}:{name} cannot be imported: {error}") from error
    except (Exception, SystemExit) as error:  # of any kind: it is code of the user's
        raise PlanError(
            f"the module {module} of the factory {module}:{name} raises {type(error).__name__} when imported: {error}"
        ) from error
    for part in name.split("."):
        if not hasattr(found, part):
            raise PlanError(f"the module {module} has no {name}; a factory is a function without arguments")
        found = getattr(found, part)
    return found


def _call_factory(source: str, factory: Any) -> ModelSource:
    try:
        with torch.device("meta"):
            made = factory()
    except (Exception, SystemExit) as error:  # of any kind: it is code of the user's
        raise PlanError(
            f"{source} raised {type(error).__name__}: {error}; a factory is called without arguments, on the meta "
            "device, where tensors have no values"
        ) from error
    model, inputs = made if isinstance(made, tuple) and len(made) == 2 else (made, None)
    if not isinstance(model, nn.Module):
        raise PlanError(
            f"{source} returned {type(model).__name__}; a factory returns a module, or a module and the arguments of a "
            "forward pass"
        )
    if inputs is not None and not isinstance(inputs, tuple | dict):
        inputs = (inputs,)
    return ModelSource(model, inputs)


def load_config_model(path: Path) -> nn.Module:
    """The model that a `config.json` of Hugging Face describes, by its `architectures`; no code of its folder."""
    data, transformers = _read_config(path), _import_transformers(path)
    fields = {name: value for name, value in data.items() if name != "auto_map"}
    try:
        kinds = [getattr(transformers, str(name), None) for name in data.get("architectures") or ()]
        config = transformers.AutoConfig.for_model(**fields)
        with torch.device("meta"):
            kind = next((found for found in kinds if found is not None), None)
            make = transformers.AutoModelForCausalLM.from_config if kind is None else kind
            made: nn.Module = make(config)
    except Exception as error:  # of any kind: the file may have anything in it
        raise PlanError(f"{path}: transformers cannot make a model of it: {_describe_cause(error)}") from error
    return made


def _describe_cause(error: BaseException) -> str:
    """What an error was raised for first: a failed import hides that behind errors of its own."""
    while error.__cause__ is not None:
        error = error.__cause__
    return f"{type(error).__name__}: {error}"


def _read_config(path: Path) -> dict[str, Any]:
    try:
        data = parse_json(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PlanError(f"{path} is not valid JSON: {error}") from error
    if not isinstance(data, dict) or "model_type" not in data:
        raise PlanError(f"{path} is not a config of a model: it has no model_type")
    return data


def _import_transformers(path: Path) -> ModuleType:
    try:
        return importlib.import_module("transformers")
    except ImportError as error:
        raise PlanError(
            f"{path}: a config.json is read by the package transformers, which is not installed; install "
            "shardwise[hf], or pass a factory such as package.module:function"
        ) from error
