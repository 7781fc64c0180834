"""One program, on torch's names and on ours, in one world: how each rank ended, and whether both ended alike.

A program takes `Names`, the package it runs on, and returns plain values (numbers, texts, lists), so that those of two
packages compare. It runs on torch first; that torch's own code ends as a test says is part of each test.
"""

from __future__ import annotations

import importlib
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from tests.world import Ranks

TORCH, OURS = "torch.distributed._shard", "shardwise.compat._shard"
SIZE = 4


@dataclass(frozen=True)
class Names:
    """One of the two packages; its modules are found by attribute."""

    root: str

    def __getattr__(self, name: str) -> Any:
        return self.module(name)

    def module(self, path: str) -> Any:
        return importlib.import_module(f"{self.root}.{path}")

    def chunks(self, dim: int, *ranks: int) -> Any:
        """A ChunkShardingSpec on these ranks, on all four without any."""
        return self.sharding_spec.ChunkShardingSpec(dim, [f"rank:{rank}/cpu" for rank in ranks or range(SIZE)])

    def piece(self, offsets: list[int], sizes: list[int], rank: int) -> Any:
        return self.metadata.ShardMetadata(offsets, sizes, f"rank:{rank}/cpu")

    def pieces(self, *pieces: tuple[list[int], list[int], int]) -> Any:
        """An EnumerableShardingSpec of (offsets, sizes, rank)."""
        return self.sharding_spec.EnumerableShardingSpec([self.piece(*piece) for piece in pieces])

    def shard(self, tensor: torch.Tensor, spec: Any, **options: Any) -> Any:
        return self.api._shard_tensor(tensor, spec, **options)


@dataclass(frozen=True)
class Ended:
    """How a program ended on one rank: with a value, or with an error (its classes by name, and its text)."""

    value: Any = None
    kinds: tuple[str, ...] = ()
    text: str = ""

    @property
    def shown(self) -> Any:
        return f"{self.kinds[0]}: {self.text}"[:400] if self.kinds else self.value


def end_of(root: str, program: Callable[..., Any], *args: Any) -> Ended:
    """Run a program on the names of one package, in this process."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch calls its own functions deprecated
            return Ended(program(Names(root), *args))
    except Exception as error:
        return Ended(kinds=tuple(kind.__name__ for kind in type(error).__mro__), text=str(error))


def _together(root: str, program: Callable[..., Any], *args: Any) -> Ended:
    """Run a program on one rank; no rank goes on before all have ended."""
    ended = end_of(root, program, *args)
    dist.barrier()
    return ended


def both(world: Ranks, program: Callable[..., Any], *args: Any) -> tuple[list[Ended], list[Ended]]:
    """How a program ends on each rank, with torch's names and with ours."""
    return world.run(_together, TORCH, program, *args), world.run(_together, OURS, program, *args)


def ours_of(world: Ranks, program: Callable[..., Any], *args: Any) -> list[Any]:
    """What a program gives on each rank with our names, or the text of its error."""
    return [ended.shown for ended in world.run(_together, OURS, program, *args)]


def same_values(world: Ranks, program: Callable[..., Any], *args: Any) -> list[Any]:
    """Assert that a program gives the same values on torch's names and on ours; return them."""
    theirs, ours = both(world, program, *args)
    assert_same_values(theirs, ours)
    return [ended.value for ended in theirs]


def assert_same_values(theirs: list[Ended], ours: list[Ended]) -> None:
    assert not any(ended.kinds for ended in theirs), f"torch raises: {[ended.shown for ended in theirs]}"
    for rank, (their, our) in enumerate(zip(theirs, ours, strict=True)):
        assert not our.kinds, f"rank {rank}: ours raises {our.shown}"
        assert our.value == their.value, f"rank {rank}: torch {their.value}, ours {our.value}"


def same_errors(world: Ranks, program: Callable[..., Any], *args: Any, words: tuple[str, ...]) -> None:
    """Assert that a program raises an error of torch's class, with these words, wherever torch's names do so."""
    assert_same_errors(*both(world, program, *args), words=words)


def assert_same_errors(theirs: list[Ended], ours: list[Ended], *, words: tuple[str, ...]) -> None:
    raising = [(their, our) for their, our in zip(theirs, ours, strict=True) if their.kinds]
    assert raising, f"torch does not raise: {[ended.shown for ended in theirs]}"
    for their, our in raising:
        told = f"torch: {their.shown}; ours: {our.shown}"
        assert all(word in their.text for word in words), told
        assert their.kinds[0] in our.kinds, told
        assert all(word in our.text for word in words), told


def numbers(*shape: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.arange(int(torch.Size(shape).numel())).reshape(shape).to(dtype)


def locals_of(sharded: Any) -> list[Any]:
    """The values of this rank's shards."""
    return [shard.tensor.tolist() for shard in sharded.local_shards()]


def described(metadata: Any) -> list[tuple[list[int], list[int], str]]:
    """The shards of a tensor's metadata."""
    return [(list(s.shard_offsets), list(s.shard_sizes), str(s.placement)) for s in metadata.shards_metadata]
