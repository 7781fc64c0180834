"""The weights of a recurrent layer in one chunk of memory, as cuDNN takes them.

torch copies weights into such a chunk at every call and warns if they are not in one yet. The weights of a sharded
layer never are: those in parts are gathered into fresh memory at every call, and those of which a rank has the whole
must stay where they are, since parameters and optimizers change them in place. So they are copied here, instead of by
torch, and gradients reach them as if they had been used themselves.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor

from shardwise._torch import aten, is_dispatch_mode_on, is_dual_level, storage_identity

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
