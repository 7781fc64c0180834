"""Weights of recurrent layers in one chunk of memory, as cuDNN takes them: copies through which gradients pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from shardwise._torch import aten
from shardwise.ops.rules.recurrent import CellSizes, OneChunk, put_in_one_chunk

LAYERS: dict[str, Callable[[], nn.Module]] = {
    "LSTM": lambda: nn.LSTM(5, 4, 2, bidirectional=True),
    "LSTM with projection": lambda: nn.LSTM(5, 4, proj_size=3, bias=False),
    "GRU": lambda: nn.GRU(5, 4, 3, bias=False),
    "RNN": lambda: nn.RNN(5, 4, nonlinearity="relu", bidirectional=True),
}


def flatten(aliases: list[Tensor]) -> None:
    """What cuDNN's function does, in another order of the weights."""
    chunk = torch.cat([t.flatten() for t in aliases])
    place = 0
    for alias in aliases:
        shape, strides = alias.shape, alias.stride()
        alias.set_(chunk.untyped_storage(), place, shape, strides)
        place += alias.numel()


@pytest.mark.parametrize("name", LAYERS)
def test_sizes_are_those_of_the_module(name: str) -> None:
    layer: Any = LAYERS[name]()
    kind = layer.mode
    sizes = CellSizes.of(kind, layer._flat_weights, layer.num_layers, layer.bidirectional)
    each = len(layer._flat_weights) // layer.num_layers // (1 + layer.bidirectional)
    assert sizes == CellSizes(kind, each, layer.input_size, layer.hidden_size, layer.proj_size)


def test_gradients_pass_through_the_copies_and_the_weights_stay_where_they_are() -> None:
    weights = [torch.randn(3, 2).requires_grad_(), torch.randn(4).requires_grad_()]
    before = [(w.data_ptr(), w._version, w.detach().clone()) for w in weights]
    copies = OneChunk.apply(flatten, *weights)  # type: ignore[no-untyped-call]  # untyped in torch
    assert len({c.untyped_storage().data_ptr() for c in copies}) == 1
    assert [(w.data_ptr(), w._version) for w in weights] == [(place, version) for place, version, _ in before]
    torch.stack([(i + 2) * c.square().sum() for i, c in enumerate(copies)]).sum().backward()  # type: ignore[no-untyped-call]
    with torch.no_grad():
        weights[0].add_(1)  # an optimizer's step does not reach copies that were made before it
    torch.testing.assert_close(copies[0], before[0][2])
    for i, weight in enumerate(weights):
        torch.testing.assert_close(weight.grad, 2 * (i + 2) * before[i][2])


def test_weights_that_cudnn_does_not_use_are_taken_as_they_are() -> None:
    layer = nn.LSTM(5, 4, device="cpu")
    weights: list[Tensor] = layer._flat_weights  # type: ignore[assignment]  # of torch
    assert all(a is b for a, b in zip(put_in_one_chunk("LSTM", weights, 1, False, False), weights, strict=True))


def test_cudnn_has_the_function_that_makes_the_chunk() -> None:
    names = [a.name for a in aten._cudnn_rnn_flatten_weight.default._schema.arguments]
    assert names == [
        "weight_arr",
        "weight_stride0",
        "input_size",
        "mode",
        "hidden_size",
        "proj_size",
        "num_layers",
        "batch_first",
        "bidirectional",
    ]
