"""Reading another process's memory with one copy and no intermediate buffer (Linux, same user, same host).

The kernel copies straight from the other process's pages into ours. There is nothing to clean up afterwards, and
nothing that a killed process could leave behind.
"""

from __future__ import annotations

import ctypes
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

_BATCH_RANGES = 512
_BATCH_BYTES = 1 << 30
_PR_SET_PTRACER = 0x59616D61

Range = tuple[int, int]
"""An address and a number of bytes."""


class _IoVec(ctypes.Structure):
    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def supported() -> bool:
    """Say whether this system has the call; whether it is allowed only a trial tells."""
    return sys.platform == "linux" and hasattr(_libc(), "process_vm_readv")


def allow_siblings() -> None:
    """Let processes with our parent read our memory where the kernel's Yama module restricts it to descendants."""
    scope = Path("/proc/sys/kernel/yama/ptrace_scope")
    if scope.exists() and scope.read_text().strip() == "1":
        _libc().prctl(_PR_SET_PTRACER, ctypes.c_ulong(os.getppid()), 0, 0, 0)


def read_memory(pid: int, source: Sequence[Range], target: Sequence[Range]) -> None:
    """Copy ranges of process `pid` into our own ranges of the same lengths, pair by pair; raise OSError if refused."""
    for remote, local in _batches(source, target):
        wanted = sum(length for _, length in local)
        got = _libc().process_vm_readv(pid, _vector(local), len(local), _vector(remote), len(remote), 0)
        if got != wanted:
            code = ctypes.get_errno() if got < 0 else 0
            raise OSError(code, f"read {max(got, 0)} of {wanted} bytes of process {pid}: {os.strerror(code)}")


def _batches(source: Sequence[Range], target: Sequence[Range]) -> Iterator[tuple[list[Range], list[Range]]]:
    """Group the pairs so that one call neither holds too many ranges nor too many bytes."""
    remote: list[Range] = []
    local: list[Range] = []
    total = 0
    for (theirs, length), (ours, _) in zip(source, target, strict=True):
        for at in range(0, length, _BATCH_BYTES):
            size = min(_BATCH_BYTES, length - at)
            if remote and (len(remote) == _BATCH_RANGES or total + size > _BATCH_BYTES):
                yield remote, local
                remote, local, total = [], [], 0
            remote.append((theirs + at, size))
            local.append((ours + at, size))
            total += size
    if remote:
        yield remote, local


def _vector(ranges: Sequence[Range]) -> ctypes.Array[_IoVec]:
    return (_IoVec * len(ranges))(*(_IoVec(*each) for each in ranges))


def _libc() -> ctypes.CDLL:
    return _LIBC


_LIBC = ctypes.CDLL(None, use_errno=True)
if hasattr(_LIBC, "process_vm_readv"):
    _LIBC.process_vm_readv.restype = ctypes.c_ssize_t
