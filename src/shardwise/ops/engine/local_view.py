"""Where are this rank's local tensors in the global ones? What a strategy's function may ask."""

from __future__ import annotations

from dataclasses import dataclass

from shardwise.geometry import Layout
from shardwise.ops.engine.two_step import DimRun, find_runs, is_in_one_run
from shardwise.tensor.dispatch import UnsupportedOpError
from shardwise.tensor.move import format_layout_text


@dataclass(frozen=True, slots=True)
class LocalView:
    """What a strategy's `local` function may ask: this rank, and where its local tensors begin in the global ones."""

    rank: int
    layouts: tuple[Layout, ...]
    shapes: tuple[tuple[int, ...], ...]

    def interval(self, tensor: int, dim: int) -> tuple[int, int]:
        """The rows of a dim that this rank's local tensor holds; each rank must have one run, else all raise."""
        layout = self.layouts[tensor]
        if not is_in_one_run(layout, dim):
            counts = [len(find_runs(layout, rank, dim)) for rank in layout.ranks]
            raise UnsupportedOpError(
                f"dim {dim} of {format_layout_text(layout)} is stored in several runs, {max(counts)} on some ranks; "
                f"redistribute to a plain Shard({dim})"
            )
        return self.runs(tensor, dim)[0][:2]

    def runs(self, tensor: int, dim: int) -> tuple[DimRun, ...]:
        """The runs of a dim that this rank has: start, stop, and where they begin in the local tensor."""
        return find_runs(self.layouts[tensor], self.rank, dim)
