"""Experts of a mixture as one layer: stacked weights, tokens brought to them, answers brought back.

The layer is an ordinary module. Sharded by a plan such as `{"**.experts.*": "ep: S(0)"}` each rank has some of the
experts; a tp axis may split their inner dim besides, as in `"ep: S(0), tp: S(1) groups(i,i)"`.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from shardwise._torch import aten
from shardwise.nn.routing import route_tokens


class GroupedExperts(nn.Module):
    """Gated MLPs, one for each expert: `down(activation(gate(x)) * up(x))`, computed by grouped products.

    `forward(x, expert_ids, weights)` takes tokens of any leading shape, and for each of them the numbers of its experts
    and their weights. `capacity_factor`: an expert takes so many times its even share of the batch; None: all it gets.

    >>> experts = GroupedExperts(num_experts=4, width=8, hidden=16)
    >>> y = experts(torch.ones(2, 3, 8), torch.tensor([[0, 3]]).expand(6, 2), torch.full((6, 2), 0.5))
    >>> tuple(y.shape), tuple(experts.gate_up.shape), tuple(experts.down.shape)
    ((2, 3, 8), (4, 32, 8), (4, 8, 16))
    """

    def __init__(
        self,
        num_experts: int,
        width: int,
        hidden: int,
        *,
        activation: Callable[[Tensor], Tensor] = F.silu,
        axis: str | None = "ep",
        capacity_factor: float | None = None,
        device: Any = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if capacity_factor is not None and capacity_factor <= 0:
            raise ValueError(f"capacity_factor={capacity_factor}: pass a positive number, or None for no limit")
        self.num_experts, self.axis, self.capacity_factor = num_experts, axis, capacity_factor
        self.activation = activation
        self.gate_up = nn.Parameter(torch.empty(num_experts, 2 * hidden, width, device=device, dtype=dtype))
        self.down = nn.Parameter(torch.empty(num_experts, width, hidden, device=device, dtype=dtype))
        self.reset_parameters()

    def reset_parameters(self) -> None:
        """Uniform values, as those of `nn.Linear`."""
        for weight in (self.gate_up, self.down):
            bound = 1 / math.sqrt(weight.shape[2])
            nn.init.uniform_(weight, -bound, bound)

    def forward(self, x: Tensor, expert_ids: Tensor, weights: Tensor) -> Tensor:
        tokens = x.reshape(-1, x.shape[-1])
        route = route_tokens(tokens, expert_ids, self.num_experts, axis=self.axis, capacity=self._capacity(expert_ids))
        gate, up = self._multiply(route.rows, self.gate_up, route.offsets).chunk(2, dim=-1)
        outputs = self._multiply(self.activation(gate) * up, self.down, route.offsets)
        return route.combine(outputs, weights).reshape(x.shape)

    def _multiply(self, rows: Tensor, weight: Tensor, offsets: Tensor) -> Tensor:
        product: Tensor = aten._grouped_mm.default(rows, weight.transpose(-2, -1), offsets)
        return product

    def _capacity(self, expert_ids: Tensor) -> int | None:
        if self.capacity_factor is None:
            return None
        return max(1, math.ceil(self.capacity_factor * expert_ids.numel() / self.num_experts))

    def extra_repr(self) -> str:
        experts, width, hidden = self.down.shape
        return f"num_experts={experts}, width={width}, hidden={hidden}, axis={self.axis!r}"
