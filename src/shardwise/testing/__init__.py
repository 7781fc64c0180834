"""Tools for tests about layouts: NumPy oracles here, Hypothesis strategies in `shardwise.testing.strategies`."""

from shardwise.testing.oracle import allocate, assemble, global_values, reduce_addends, scatter, simulate, small_layouts

__all__ = ["allocate", "assemble", "global_values", "reduce_addends", "scatter", "simulate", "small_layouts"]
