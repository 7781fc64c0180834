"""L4: weights from any job to any other, live. `publish` in the trainer, `subscribe` in the server.

The two are separate worlds that were started apart. They meet at an address, exchange descriptions of their tensors
once, and from then on every `pull` takes over all tensors of one `push`, each rank reading just what it lacks.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping

from shardwise._text import public
from shardwise.checkpoint.changes import FilePublisher
from shardwise.checkpoint.digests import Digest, digest
from shardwise.comm.current import GroupOrComm, resolve_comm
from shardwise.geometry.state_map import StateMap, TensorShape
from shardwise.sync.plan import DEFAULT_BUFFER_BYTES
from shardwise.sync.ports import check_transport
from shardwise.sync.publisher import KEEP, Keep, Member, Publisher, Removed
from shardwise.sync.recording import RecordingError, record
from shardwise.sync.session import RefusedError, SyncError, find_token, parse_address
from shardwise.sync.subscriber import APPLY, Apply, Subscriber, Verification

__all__ = [
    "Digest",
    "FilePublisher",
    "Member",
    "Publisher",
    "RecordingError",
    "RefusedError",
    "Removed",
    "StateMap",
    "Subscriber",
    "SyncError",
    "TensorShape",
    "Verification",
    "digest",
    "publish",
    "publish_files",
    "record",
    "subscribe",
]

Token = str | bytes | os.PathLike[str] | None
NameMapping = StateMap | Mapping[str, object] | str | os.PathLike[str] | None
Names = NameMapping | Callable[[Mapping[str, TensorShape]], NameMapping]


@public
def publish(
    state: object,
    address: str,
    *,
    token: Token = None,
    name: str | None = None,
    delta: bool = False,
    keep: Keep = "auto",
    deadline: float = 30.0,
    comm: GroupOrComm | None = None,
) -> Publisher:
    """Offer the weights of this world at an address; all ranks call it. `Publisher.push` makes a version of them.

    `state` is a module or a nested dict of ShardedTensors, DTensors and tensors, which count as equal on all ranks.
    `token` is the secret that subscribers need: a text, the path of a file, or the variable SHARDWISE_SYNC_TOKEN.
    Without one only this user's processes of this machine can subscribe, and the address is a loopback one.
    With `delta` every push is compared with the one before, and subscribers on other hosts get only what changed since
    the version that they have. `keep` says where versions stay: in memory of the "host", or of the "device", where
    readers of this machine open them by CUDA IPC; "auto" is the device if two versions take at most a quarter of what
    is free there. `deadline` bounds every wait, in seconds. `name` is what errors call this world.

    >>> import torch, shardwise
    >>> with shardwise.sync.publish({"w": torch.ones(2)}, "tcp://127.0.0.1:0") as link:
    ...     link.push(step=0)
    ...     link.version
    0
    """
    place = parse_address(address)
    return Publisher(
        state,
        place,
        find_token(token, place[0]),
        resolve_comm(comm),
        name=name,
        delta=bool(delta),
        keep=_check_keep(keep),
        deadline=_check(deadline),
    )


@public
def publish_files(
    state: object,
    path: str | os.PathLike[str],
    *,
    max_kept_bytes: int | None = None,
    comm: GroupOrComm | None = None,
) -> FilePublisher:
    """Write versions of weights to a folder or URL as a chain; all ranks call it. `FilePublisher.push` writes one.

    The first push saves a full checkpoint at `path`, later ones what changed, to `path` with `.deltas` behind it.
    `shardwise.load(state, path, version=step)` reads them in any layout; `shardwise compact` makes the chain short.
    What changed is found by comparing with a copy on the host; a rank whose part has more than `max_kept_bytes` keeps
    hashes of blocks instead, and writes whole blocks of 4,096 elements.

    >>> import tempfile, torch, shardwise
    >>> weights, path = {"w": torch.zeros(10_000)}, f"{tempfile.mkdtemp()}/ckpt"
    >>> link = shardwise.sync.publish_files(weights, path)
    >>> link.push(step=10)
    >>> weights["w"][::100] = 1.0
    >>> link.push(step=20)
    >>> link.written_bytes
    609
    >>> int(shardwise.load({"w": torch.zeros(10_000)}, path, version=20)["w"].sum())
    100
    """
    return FilePublisher(state, path, resolve_comm(comm), max_kept_bytes)


@public
def subscribe(
    state: object,
    address: str,
    *,
    token: Token = None,
    names: Names = None,
    apply: Apply = "stage",
    verify: bool | None = None,
    max_buffer_bytes: int = DEFAULT_BUFFER_BYTES,
    transport: str = "auto",
    after: Callable[[int], None] | None = None,
    name: str | None = None,
    deadline: float = 30.0,
    comm: GroupOrComm | None = None,
) -> Subscriber:
    """Meet a publisher and plan how the tensors of this world are filled; all ranks call it. Then `Subscriber.pull`.

    `names` says how they are made of the publisher's where the names differ: a TOML file or a dict as `shardwise
    reshard` takes them (old pattern to new name), or a `StateMap`. Both `state` and `names` may be functions of what
    the publisher has (name to `TensorShape`), called when that is known. `apply` says how a version is taken over:
    "stage" copies it into the tensors once it is complete, "swap" exchanges their memory, "in_place" reads into them.
    With `verify` digests of what was read are compared before a version is taken over; by default this is done where
    only changes were read. `after(step)` runs on each rank after that. From other hosts boxes of at most
    `max_buffer_bytes` travel at a time. `transport` asks for one way of bytes: "memory" (of the same host), "sockets",
    "gloo", "nccl", or the name of a one-sided transport of torch 2.15; "auto" takes the best that both ends have.

    >>> import torch, shardwise
    >>> fused = {"qk": torch.zeros(3)}
    >>> with shardwise.sync.publish({"q": torch.ones(2), "k": torch.full((1,), 2.0)}, "tcp://127.0.0.1:0") as trainer:
    ...     trainer.push(step=5)
    ...     with shardwise.sync.subscribe(
    ...         fused, trainer.address, names={"change": [{"fuse": ["q", "k"], "to": "qk"}]}
    ...     ) as link:
    ...         link.pull()
    5
    >>> fused["qk"]
    tensor([1., 1., 2.])
    """
    place = parse_address(address)
    if apply not in APPLY:
        raise ValueError(f"apply is one of {', '.join(APPLY)}; got {apply!r}")
    return Subscriber(
        state,
        place,
        find_token(token, place[0]),
        resolve_comm(comm),
        names=names,
        apply=apply,
        verify=verify,
        max_buffer_bytes=check_limit(max_buffer_bytes),
        transport=check_transport(transport),
        after=after,
        name=name,
        deadline=_check(deadline),
    )


def _check_keep(keep: Keep) -> Keep:
    if keep not in KEEP:
        raise ValueError(f"keep is one of {', '.join(KEEP)}; got {keep!r}")
    return keep


def check_limit(max_buffer_bytes: int) -> int:
    """The limit, if it is one."""
    if not max_buffer_bytes > 0:
        raise ValueError(f"max_buffer_bytes is a number of bytes above 0, got {max_buffer_bytes}")
    return int(max_buffer_bytes)


def _check(deadline: float) -> float:
    if not deadline > 0:
        raise ValueError(f"a deadline is a number of seconds above 0, got {deadline}")
    return float(deadline)
