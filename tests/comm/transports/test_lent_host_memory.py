"""Does a call over host memory end only if what it read is what was lent?"""

from __future__ import annotations

import os

import pytest
import torch

from shardwise.comm.transports.host_memory import (
    CopyOperation,
    MemoryLease,
    ReduceOperation,
    RemoteLease,
    is_supported,
    pack_offer,
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
    kind, body = pack_offer([theirs.view(torch.uint8)])
    assert kind is FrameKind.RANGES and isinstance(body, bytes)
    frame = Frame(1, kind, 1, operation.call, bytearray(body))
    if not ended:
        assert operation.accept(frame) == [1]
        assert operation.awaited() == set() and bool((out == (2.0 if name == "copy" else 3.0)).all())
        return
    lease.end()
    with pytest.raises(LenderGoneError, match="rank 1 has ended the lease"):
        operation.accept(frame)
    assert operation.awaited() == {1}
