"""Traces of what ranks do: one file for all of them, with operators, moves and waiting."""

from shardwise.tracing.trace import trace

__all__ = ["trace"]
