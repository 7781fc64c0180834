"""With which arguments is a model called? Found from the model, for a batch and a length of sequences on one rank."""

from __future__ import annotations

import inspect
from typing import Any

import torch
from torch import Tensor, nn

from shardwise.nn.patterns import PlanError
from shardwise.planner.rehearsal import Inputs


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
