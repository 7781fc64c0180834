"""L4: sharded programs as graphs of local tensors and moves."""

from shardwise.compiler.compiled import CompiledProgram, compile

__all__ = ["CompiledProgram", "compile"]
