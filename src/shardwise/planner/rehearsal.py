"""One training step of a sharded model on one rank, without values and without other ranks.

1. A copy of the model on the meta device is sharded by the plan: the rank has its local parts only.
2. The forward and the backward pass run as they do in training. Every operator takes its own rule and its own choice
   of layouts, and every move is counted (`StepMeter`), so the figures are those of the real step.
3. Results have no values, so a model that looks at values (a loss that stops on NaN, experts that count their tokens)
   cannot be rehearsed.

A comm that sends nothing: one rank of a world of any size, for a step that is rehearsed without values.

Every rank is taken to pass what this one passes: the same arguments, and batches of the same length.

With which arguments is a model called? Found from the model, for a batch and a length of sequences on one rank.

What does a step without values do on one rank? Its memory, its moves and its matrix products are counted.

1. Every storage is counted from the operator that makes it until nothing refers to it: so the figures have what
   autograd keeps, what checkpointed code computes again, and what is freed after the forward pass.
2. Moves between layouts are operators here (`shardwise::move`), each with its layouts.
3. Operations of matrix products, convolutions and attention are counted by torch's own formulas.

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
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise._text import parse_json
from shardwise._torch import is_in_backward, pytree, storage_identity
from shardwise.comm import use_comm
from shardwise.comm.stand_in import StandInComm
from shardwise.nn.plan import ModelPlan, PlanError
from shardwise.nn.shard_module import shard_by_patterns
from shardwise.ops.dispatch_cache import note_special
from shardwise.ops.registration import register_sharding, remove_sharding
from shardwise.ops.rules.attention import attention
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


@dataclass(frozen=True, slots=True)
class MeteredMove:
    """One move of a step: which, in which pass, and the parameter that it gathers, or whose gradient it makes."""

    record: Move
    backward: bool
    parameter: str | None = None


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
        self.moves: list[MeteredMove] = []
        self._sizes: dict[int, int] = {}
        self._names: dict[int, str] = {}
        self._made_by: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if any(issubclass(kind, ShardedTensor) for kind in types):
            return NotImplemented  # its local tensors come here
        result = func(*args, **(kwargs or {}))
        made = [value for value in pytree.tree_leaves(result) if isinstance(value, Tensor)]
        self.flops += _count_flops(func, args, kwargs or {}, result)
        if func is torch.ops.shardwise.move.default:
            self._note_move(find_numbered(args[1]), args[0], made)
        self.hold(made)
        return result

    def hold(self, tensors: Iterable[Tensor]) -> None:
        """Count the memory of these tensors until it is freed."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = storage_identity(storage)
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.live_bytes += storage.nbytes()
                self.peak_bytes = max(self.peak_bytes, self.live_bytes)
                weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.live_bytes -= self._sizes.pop(key)
        self._names.pop(key, None)
        self._made_by.pop(key, None)

    def name_tensors(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Let moves of these local tensors be moves of a parameter."""
        for tensor in tensors:
            self._names[storage_identity(tensor.untyped_storage())] = name

    def name_gradients(self, name: str, tensors: Iterable[Tensor]) -> None:
        """Let the moves that made these local tensors be moves of a parameter."""
        for tensor in tensors:
            number = self._made_by.get(storage_identity(tensor.untyped_storage()))
            if number is not None:
                move = self.moves[number]
                self.moves[number] = MeteredMove(move.record, move.backward, name)

    def _note_move(self, record: Move, sources: Iterable[Tensor], made: Iterable[Tensor]) -> None:
        names = (self._names.get(storage_identity(t.untyped_storage())) for t in sources)
        for tensor in made:
            self._made_by[storage_identity(tensor.untyped_storage())] = len(self.moves)
        self.moves.append(MeteredMove(record, is_in_backward(), next((n for n in names if n is not None), None)))


def _count_flops(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any], result: Any) -> int:
    if func is planned_attention._opoverload:
        return count_attention_flops(*args[:3])
    if func is planned_attention_backward._opoverload:
        return count_attention_flops(*args[:3]) * 5 // 2  # five products, where the forward pass has two
    formula = flop_registry.get(func.overloadpacket)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


Inputs: TypeAlias = tuple[Any, ...] | Mapping[str, Any]
Loss: TypeAlias = Callable[[Any], Tensor]

_one_at_a_time = threading.Lock()


@dataclass(frozen=True)
class Rehearsal:
    """What one rank's step needs: the bytes that it holds, operations, moves.

    `peak_bytes` has parameters, buffers, gradients and activations, without the state of an optimizer.
    """

    parameter_bytes: int
    buffer_bytes: int
    activation_bytes: int
    peak_bytes: int
    flops: int
    moves: tuple[MeteredMove, ...]


def rehearse(
    model: nn.Module, plan: ModelPlan, inputs: Inputs, rank: int, dtype: torch.dtype | None, loss: Loss | None = None
) -> Rehearsal:
    """Run one step of a model, whose parameters may be on the meta device, as one rank of a plan.

    >>> from shardwise.geometry import Mesh
    >>> plan = ModelPlan(Mesh.of(tp=2), {"weight": "S(0)"}, input_plan="replicated")
    >>> found = rehearse(nn.Linear(4, 8, bias=False), plan, (torch.ones(2, 4),), 0, None)
    >>> found.flops, [(m.record.label, m.backward) for m in found.moves]
    (128, [])
    """
    twin = copy_to_meta(model, dtype)
    ranks = tuple(sorted(plan.mesh.ranks.reshape(-1).tolist()))
    comm = silent_comm(rank, ranks)
    meter, given = StepMeter(), pytree.tree_map_only(Tensor, lambda t: _cast(t.detach().to("meta"), dtype), inputs)
    with _one_at_a_time, ExitStack() as stack:
        stack.enter_context(fused_attention())
        stack.enter_context(use_comm(comm))
        stack.enter_context(torch.enable_grad())
        shard_by_patterns(twin, plan, 0, comm)
        stack.enter_context(torch.device("meta"))
        stack.enter_context(NoValues())
        stack.enter_context(meter)
        try:
            return _run_step(twin, given, loss or sum_of_outputs, meter)
        except (RuntimeError, TypeError, ValueError, NotImplementedError, IndexError) as error:
            raise PlanError(
                f"a step of {type(model).__name__} cannot be run without values: {type(error).__name__}: {error}; "
                f"{_advise(plan)}"
            ) from error


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
    meter.hold(given)
    outputs = twin(**inputs) if isinstance(inputs, Mapping) else twin(*inputs)
    value = loss(outputs)
    del outputs
    activations = meter.live_bytes - held
    value.backward()  # type: ignore[no-untyped-call]  # untyped in torch
    for name, parameter in twin.named_parameters():
        if parameter.grad is not None:
            meter.name_gradients(name, _parts(parameter.grad))
    return Rehearsal(parameters, held - parameters, activations, meter.peak_bytes, meter.flops, tuple(meter.moves))


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
