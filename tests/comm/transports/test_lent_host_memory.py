"""Does a call over host memory end only if what it read is what was lent, whatever runs of memory that is?"""

from __future__ import annotations

import os

import pytest
import torch

from shardwise.comm.flat_tensors import memory_runs, run_bytes
from shardwise.comm.transports.host_memory import (
    CopyOperation,
    MemoryLease,
    ReduceOperation,
    RemoteLease,
    is_supported,
    pack_offer,
    read_memory,
)
from shardwise.comm.transports.links import Frame, FrameKind, LenderGoneError, PeerCall

COUNT = 1 << 15  # more than comes along with a message

pytestmark = pytest.mark.skipif(not is_supported(), reason="the system does not let processes read others' memory")


@pytest.mark.parametrize("ended", [False, True])
@pytest.mark.parametrize("name", ["copy", "reduction"])
def test_call_whose_lease_has_ended_never_ends(name: str, ended: bool) -> None:
    """Also where the call was served by a wait for another one, which got the error."""
    lease, theirs = MemoryLease(), torch.full((COUNT,), 2.0, device="cpu")
    leases = {rank: RemoteLease(os.getpid(), lease.address, lease.secret) for rank in (0, 1)}
    mine, out = torch.ones(COUNT, device="cpu"), torch.zeros(COUNT, device="cpu")
    operation: PeerCall = ReduceOperation("sum", 0, leases, out, mine, "sum")
    if name == "copy":
        operation = CopyOperation("move", 0, {1: [out.view(torch.uint8)]}, leases)
    (kind, parts), lent = pack_offer([theirs.view(torch.uint8)])
    body = b"".join(parts)
    assert kind is FrameKind.RANGES and lent
    frame = Frame(1, kind, 1, operation.call, bytearray(body))
    if not ended:
        assert operation.accept(frame) == [1]
        assert operation.awaited() == set() and bool((out == (2.0 if name == "copy" else 3.0)).all())
        return
    lease.end()
    with pytest.raises(LenderGoneError, match="rank 1 has ended the lease"):
        operation.accept(frame)
    assert operation.awaited() == {1}


@pytest.mark.parametrize("strided", ["neither", "source", "target", "both"])
@pytest.mark.parametrize("width", [3, 128, 300])
def test_ranges_of_other_numbers_are_read_in_few_calls(strided: str, width: int) -> None:
    """Runs of 12, 512 and 1200 bytes, more than one system call takes, into as many bytes of other runs."""
    rows, made = 1100, torch.arange(1100 * 400, dtype=torch.float32, device="cpu").view(1100, 400)
    source = made[:, 7 : 7 + width] if strided in ("source", "both") else made[:, :width].contiguous()
    memory = torch.zeros(rows, 512, device="cpu")
    target = memory[:, 50 : 50 + width] if strided in ("target", "both") else memory.view(-1)[: rows * width]
    read_memory(os.getpid(), memory_runs(source), memory_runs(target))
    assert torch.equal(target.reshape(rows, width), source)
    assert torch.count_nonzero(memory) == torch.count_nonzero(source), "nothing else is written"
    assert run_bytes(source) == (source.nbytes if source.is_contiguous() else 4 * width)
