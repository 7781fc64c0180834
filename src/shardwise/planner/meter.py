"""What does a step without values do on one rank? Its memory, its moves and its matrix products are counted.

1. Every storage is counted from the operator that makes it until nothing refers to it: so the figures have what
   autograd keeps, what checkpointed code computes again, and what is freed after the forward pass.
2. Moves between layouts are operators here (`shardwise::move`), each with its layouts.
3. Operations of matrix products, convolutions and attention are counted by torch's own formulas.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

from shardwise._torch import is_in_backward, pytree, storage_identity
from shardwise.planner.attention import count_attention_flops, planned_attention, planned_attention_backward
from shardwise.tensor.moving.move_operator import MoveRecord, find_record
from shardwise.tensor.sharded_tensor import ShardedTensor


@dataclass(frozen=True, slots=True)
class MeteredMove:
    """One move of a step: which, in which pass, and the parameter that it gathers, or whose gradient it makes."""

    record: MoveRecord
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
            self._note_move(find_record(args[1]), args[0], made)
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

    def _note_move(self, record: MoveRecord, sources: Iterable[Tensor], made: Iterable[Tensor]) -> None:
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
