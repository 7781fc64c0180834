"""A program in the making: its inputs and statements so far, what they give on whole tensors, and what is exact."""

from __future__ import annotations

import re
from dataclasses import dataclass, field
from random import Random
from typing import Any

from torch import Tensor

from shardwise.testing.fuzz.layouts import World, random_spec
from shardwise.testing.fuzz.operators import Operator
from shardwise.testing.fuzz.program import Input, Statement
from shardwise.testing.fuzz.values import fill

LENGTHS = (1, 2, 3, 3, 4, 4, 5, 5, 6, 7, 8)
CLASSES: dict[str, tuple[str, ...]] = {
    "any": ("float64", "float32", "bfloat16", "complex128", "int64", "bool"),
    "num": ("float64", "float32", "bfloat16", "complex128", "int64"),
    "real": ("float64", "float32", "bfloat16", "int64"),
    "float": ("float64", "float32", "bfloat16", "complex128"),
    "rfloat": ("float64", "float32", "bfloat16"),
    "int": ("int64",),
    "bool": ("bool",),
    "cplx": ("complex128",),
}


@dataclass
class Draft:
    """A program in the making: what it holds so far, with the values on whole tensors."""

    rng: Random
    world: World
    dtype: str
    mode: str
    inputs: list[Input] = field(default_factory=list)
    steps: list[Statement] = field(default_factory=list)
    names: dict[str, Any] = field(default_factory=dict)
    inexact: set[str] = field(default_factory=set)

    @property
    def tensors(self) -> dict[str, Tensor]:
        return {name: value for name, value in self.names.items() if isinstance(value, Tensor)}

    def pick(self, shape: tuple[int, ...], dtype: str, fill: str = "integers", reuse: float = 0.6) -> str:
        """A tensor of this shape, dtype and fill: one that is there, or a new input."""
        if fill == "integers":
            found = [n for n, t in self.tensors.items() if tuple(t.shape) == shape and name_dtype(t) == dtype]
        else:
            found = [i.name for i in self.inputs if (i.shape, i.dtype, i.fill) == (shape, dtype, fill)]
        return self.rng.choice(found) if found and self.rng.random() < reuse else self.add(shape, dtype, fill)

    def add(self, shape: tuple[int, ...], dtype: str, fill_: str = "integers") -> str:
        """A new input."""
        same = [i.spec for i in self.inputs if i.shape == shape and i.dtype == dtype]
        spec = random_spec(self.rng, self.world, shape, dtype)
        if same and self.rng.random() < 0.5:
            spec = self.rng.choice(same)
        if fill_ == "integers" and self.rng.random() < 0.15:
            fill_ = self.rng.choice(("normal", "positive", "constant")) if "float" in dtype else "positive"
        tape = ("float" in dtype or "complex" in dtype) and not re.search(r"P\((avg|min|max|product)\)", spec)
        item = Input(f"a{len(self.inputs)}", dtype, shape, spec, fill_, tape and self.rng.random() < 0.6)
        self.inputs.append(item)
        values = fill(item, 0)
        self.names[item.name] = values.requires_grad_() if item.requires_grad else values
        if item.fill == "normal" or dtype == "bfloat16" or self.mode == "autocast":
            self.inexact.add(item.name)
        return item.name

    def shape(self, dims: int, only: bool) -> tuple[int, ...]:
        """A small shape; a dim of no elements is rare."""
        count = dims if only else self.rng.randint(dims, max(dims, 3))
        lengths = LENGTHS if self.rng.random() < 0.9 else (*LENGTHS, 0)
        return tuple(self.rng.choice(lengths) for _ in range(count))

    def first(self, operator: Operator) -> str:
        """The first tensor of a statement."""
        known = CLASSES[operator.kind]

        def fits(name: str, tensor: Tensor) -> bool:
            right = tensor.ndim == operator.dims if operator.only else tensor.ndim >= operator.dims
            return right and name_dtype(tensor) in known and not (operator.needs and name in self.inexact)

        found = [name for name, tensor in self.tensors.items() if fits(name, tensor)]
        if found and self.rng.random() < 0.85:
            results = [name for name in found if name.startswith("v")][-3:]
            return self.rng.choice(results if results and self.rng.random() < 0.7 else found)
        return self.add(self.shape(operator.dims, operator.only), self.dtype if self.dtype in known else known[0])


def name_dtype(tensor: Tensor) -> str:
    """The dtype of a tensor without the name of torch."""
    return str(tensor.dtype).removeprefix("torch.")
