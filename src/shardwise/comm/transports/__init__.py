"""Transports: what moves the bytes of a `Comm` over a process group. `engine.Engine` is the protocol of one."""
