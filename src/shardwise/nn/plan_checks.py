"""Does a plan fit the model and the ranks? Everything is checked before anything changes, on all ranks together.

What is wrong on one rank only, and plans that differ between ranks, are raised on every rank: none waits for others.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TypeAlias

from torch import Tensor

from shardwise.comm import Comm, DisagreementError, advise_ranks, agree, name_ranks
from shardwise.compat.specs import has_own_sharding
from shardwise.geometry import Layout, Mesh, MeshSpec, ShardingSpec
from shardwise.nn.patterns import PlanError
from shardwise.tensor.move import format_layout_text
from shardwise.tensor.sharded_tensor import ShardedTensor

PlanFields: TypeAlias = dict[str, object]


def check_on_all_ranks(comm: Comm, check: Callable[[], PlanFields]) -> None:
    """Run a check on every rank; raise on all of them if one fails, or if the fields they return differ.

    >>> from shardwise.comm import run_local
    >>> try:
    ...     run_local(lambda comm: check_on_all_ranks(comm, lambda: {"src_rank": comm.rank}), 2)
    ... except DisagreementError as error:
    ...     print(error)
    'shard_module': the ranks pass different plans: src_rank is 0 on rank 0 and 1 on rank 1; pass the same on every rank
    """
    own, fields = None, PlanFields()
    try:
        fields = check()
    except Exception as error:  # of any kind: the other ranks must hear of it
        own = error
    try:
        agree(comm, fields, label="shard_module", what="plans", problem=None if own is None else str(own))
    except DisagreementError:
        if own is not None:
            raise own from None
        raise


def check_source(src_rank: int, comm: Comm) -> None:
    """Raise unless the source is a rank of the group, counted in it."""
    if not 0 <= src_rank < comm.world_size:
        raise ValueError(f"src_rank={src_rank} is not in the group: it has ranks 0 to {comm.world_size - 1}")


def check_mesh(mesh: Mesh, comm: Comm, *, whole: bool) -> None:
    """Raise unless the ranks of a mesh are in a group, or are all of it."""
    ranks = set(mesh.ranks.reshape(-1).tolist())
    if ranks <= set(comm.ranks) if not whole else ranks == set(comm.ranks):
        return
    advice = advise_ranks(comm)
    if ranks < set(comm.ranks):
        advice = (
            "with an input_plan all of them take part: pass a mesh of all, or the process_group of the mesh's ranks"
        )
    here, there = name_ranks(sorted(ranks)), name_ranks(comm.ranks)
    raise PlanError(f"the mesh {mesh} has {here}, and the process group has {there}; {advice}")


def lay_out_specs(specs: Mapping[str, ShardingSpec], tensors: Mapping[str, Tensor]) -> dict[str, Layout]:
    """The layout of each planned tensor, except specs with a user's `shard`; raises with all that does not fit."""
    problems, found = [], {}
    for name, spec in specs.items():
        shape = tuple(tensors[name].shape)
        try:
            if isinstance(tensors[name], ShardedTensor):
                raise PlanError("it is already sharded; change its layout with redistribute()")
            if not has_own_sharding(spec):
                found[name] = spec.layout(shape)
        except ValueError as error:
            problems.append(f"{name} of shape {shape}: {error}")
    if problems:
        raise PlanError("\n".join(problems))
    return found


def check_ranks(layouts: Mapping[str, Layout], comm: Comm) -> None:
    """Raise unless all layouts are on ranks of a group."""
    problems = []
    for name, layout in layouts.items():
        outside = sorted(set(layout.ranks) - set(comm.ranks))
        if outside:
            by = f"the mesh {layout.spec.mesh}" if isinstance(layout.spec, MeshSpec) else "its spec"
            problems.append(
                f"{name}: {by} names {name_ranks(outside)}, not in the process group ({name_ranks(comm.ranks)}); "
                f"{advise_ranks(comm)}"
            )
    if problems:
        raise PlanError("\n".join(problems))


def layout_texts(layouts: Mapping[str, Layout]) -> PlanFields:
    """What ranks compare of their plans."""
    return {name: format_layout_text(layout) for name, layout in layouts.items()}
