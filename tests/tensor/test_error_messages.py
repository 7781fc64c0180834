"""What a new user gets wrong on the first day: each error says what was passed, the rule, and what to write instead."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard

import shardwise
from shardwise import (
    ChunkSpec,
    CommError,
    DisagreementError,
    LayoutError,
    Mesh,
    MeshSpec,
    ModelPlan,
    NotationError,
    Partial,
    Replicate,
    Shard,
    ShardedOptimizer,
    launch,
    run_local,
)
from shardwise import plan_transfer as plan
from shardwise import shard as lay_out

X: Any = torch.ones(8, 4)
ONE: Any = Mesh.of(tp=1)
any_: Any = shardwise  # functions that a type checker would stop from being called like this
ROWS, COLUMNS = ChunkSpec(0, 2).layout((8, 4)), ChunkSpec(1, 2).layout((8, 4))


def model() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4))


def on_chunks() -> Any:
    return lay_out(X, ChunkSpec(0, 1))


def on_mesh() -> Any:
    return lay_out(X, ONE, [Shard(0)])


INIT = "this process is a world by itself: call torch.distributed.init_process_group"
MISTAKES: dict[str, tuple[Callable[[], Any], str]] = {
    "no ranks were started": (
        lambda: lay_out(X, ChunkSpec(0, 4)),
        f"names ranks 1-3, not in the comm .rank 0.; {INIT}",
    ),
    "no ranks for a plan": (
        lambda: shardwise.shard_module(model(), ModelPlan(Mesh.of(tp=4), {"0.weight": "S(0)"})),
        f"the mesh tp=4 has ranks 0-3, and the process group has rank 0; {INIT}",
    ),
    "an array": (
        lambda: lay_out(X.numpy(), ChunkSpec(0, 1)),
        "got ndarray; make a tensor of it first: torch.as_tensor",
    ),
    "placements without a mesh": (lambda: lay_out(X, Shard(0)), r"placements need a mesh: shard\(x, Mesh.of\(tp=4\)"),
    "a list of placements": (lambda: lay_out(X, [TorchShard(0)]), "placements need a mesh"),
    "a mesh without placements": (lambda: lay_out(X, ONE), "the mesh tp=1 needs placements, one for each axis"),
    "a placement as the source": (
        lambda: lay_out(X, ChunkSpec(0, 1), Replicate()),
        r"src_rank is a rank, or None .* got Replicate: Replicate\(\)",
    ),
    "a text as the source": (lambda: lay_out(X, ChunkSpec(0, 1), "0"), "src_rank is a rank, .* got str: '0'"),
    "a dim that is not there": (lambda: lay_out(X, ChunkSpec(5, 1)), r"shape \(8, 4\) has a dim from -2 to 1"),
    "torch's words for ranks": (lambda: any_.ChunkSpec(0, ["rank:0/cpu"]), "ranks as numbers, a count such as 4"),
    "a device as ranks": (lambda: any_.ChunkSpec(0, "cpu"), "ChunkSpec takes ranks as numbers"),
    "axes by name": (lambda: any_.Mesh(dp=2, tp=2), r"Mesh\(dp=2, tp=2\): .* is Mesh.of\(dp=2, tp=2\)"),
    "sizes without names": (
        lambda: any_.Mesh.of(2, 2),
        r"Mesh.of\(2, 2\) does not name its axes; write Mesh.of\(dp=2, tp=2\)",
    ),
    "a shape without names": (lambda: any_.Mesh((2, 2)), r"Mesh takes names of axes and ranks.* got \(2, 2\) and None"),
    "ranks as a size": (lambda: any_.Mesh.of(dp=[0, 1]), r"'dp' has a number of ranks, got list: \[0, 1\]; to choose"),
    "an axis in place of a dim": (
        lambda: any_.Shard("tp"),
        r"Shard takes the number of a tensor's dim.* got str: 'tp'",
    ),
    "a class in place of a placement": (lambda: MeshSpec(ONE, [Shard]), r"this is the class Shard; write Shard\(0\)"),
    "a shape in place of a mesh": (lambda: MeshSpec((2, 2), [Shard(0)]), "a mesh is a Mesh, .* got tuple"),
    "too few placements": (lambda: MeshSpec(Mesh.of(dp=2, tp=2), [TorchShard(0)]), "needs 2 placements.* got 1"),
    "another reduction": (lambda: Partial("mean"), "the reduction is one of sum, avg"),
    "no target": (lambda: on_mesh().redistribute(), "redistribute takes a spec, .* got NoneType"),
    "a device as a target": (lambda: on_mesh().redistribute("cuda"), r"expected S\(dim\), R or P .*found 'cuda'"),
    "placements on chunks": (
        lambda: on_chunks().redistribute([TorchReplicate()]),
        "placements need a mesh, and this tensor",
    ),
    "parts without a shape": (lambda: shardwise.from_local(X, ChunkSpec(0, 1)), "needs the global shape; pass shape="),
    "a plan of texts": (
        lambda: any_.plan_transfer("S(0)", "S(1)", itemsize=4),
        "expected a dtype and a shape such as f32.8,4.; found 'S'",
    ),
    "a plan of specs": (lambda: any_.plan_transfer(ChunkSpec(0, 2), COLUMNS, itemsize=4), r"spec.layout\(\(8, 4\)\)"),
    "a plan without a width": (
        lambda: any_.plan_transfer(ROWS, COLUMNS),
        "needs the bytes of an element, and none is known; pass itemsize=4 for f32",
    ),
    "a plan of two widths": (
        lambda: any_.plan_transfer("f32[8,4] on tp=2: S(0)", "f64[8,4] on tp=2: S(1)"),
        "needs the bytes of an element, and got 4 and 8",
    ),
    "a plan of tensors": (lambda: any_.plan_transfer(on_chunks(), COLUMNS, itemsize=4), "pass its .sharding"),
    "a pattern with a typing error": (
        lambda: shardwise.shard_module(model(), ModelPlan(ONE, {"0.wieght": "S(0)"})),
        "'0.wieght' matches no parameter; near it: 0.weight",
    ),
    "a placement by its long name": (
        lambda: shardwise.shard_module(model(), ModelPlan(ONE, {"0.weight": "Shard(0)"})),
        r"expected S\(dim\), R or P \(for Shard\(dim\), Replicate\(\), Partial\(\)\)",
    ),
    "a list of patterns": (lambda: any_.ModelPlan(ONE, ["0.weight"]), "maps patterns to placements, .* got list"),
    "mesh and patterns exchanged": (
        lambda: any_.ModelPlan({"0.weight": "S(0)"}, ONE),
        "got Mesh in place of the patterns",
    ),
    "a plan without a mesh": (
        lambda: any_.shard_module(model(), {"0.weight": "S(0)"}),
        r"such as ModelPlan\(Mesh.of\(tp=2\), .* got dict",
    ),
    "ranks without a function": (lambda: any_.run_local(2, print), r"run_local\(fn, world_size, \*args\)"),
    "a name to launch": (lambda: any_.launch("main", 2), r"launch\(fn, world_size, \*args\) .*; got str and int"),
    "an optimizer that is made": (
        lambda: any_.ShardedOptimizer(dict(model().named_parameters()), torch.optim.SGD(model().parameters())),
        "takes the class of an optimizer and its options, .* got SGD as the class",
    ),
    "parameters without names": (
        lambda: any_.ShardedOptimizer(model().parameters(), torch.optim.SGD),
        r"by name, such as dict\(model.named_parameters\(\)\)",
    ),
    "a size before the spec": (lambda: any_.zeros(4, 4), r"the spec comes first.* zeros\(ChunkSpec\(0, 4\), 8, 4\)"),
    "a tensor as a spec": (lambda: any_.ShardedTensor(X), r"shard\(x, spec\) shards an existing tensor"),
    "a text to replicate": (lambda: any_.replicate("x"), "replicate takes a tensor that every rank has, got str"),
    "a plain tensor as a DTensor": (lambda: shardwise.compat.from_dtensor(X), "takes a DTensor, got Tensor; shard"),
    "a mesh as a text": (lambda: any_.Mesh("tp=2"), r"got 'tp=2' and None; write Mesh.of\(dp=2, tp=2\)"),
    "names too few": (
        lambda: any_.Mesh((2, 2), ("tp",)),
        r"the shape \(2, 2\) has 2 axes, and the names \('tp',\) are 1",
    ),
    "ranks that are no numbers": (lambda: any_.Mesh(("dp", "tp"), "x"), "the ranks of a mesh are numbers"),
    "a number to parse": (lambda: any_.parse_layout(3), r"parse_layout takes a str as 'text', got int: 3; the call is"),
    "a number as placements": (lambda: any_.parse_placements(3), "parse_placements takes a str as 'text', got int: 3"),
    "a plan and a model exchanged": (
        lambda: any_.describe_plan(model(), ModelPlan(ONE, {})),
        r"describe_plan takes a ModelPlan as 'plan', got Sequential; the call is describe_plan\(plan, module\)",
    ),
    "a class as a model": (
        lambda: any_.shard_module(nn.Linear, ModelPlan(ONE, {})),
        r"shard_module takes a Module as 'module', got type",
    ),
    "a tensor as a model": (lambda: any_.shard_module(X, ModelPlan(ONE, {})), "takes a Module as 'module', got Tensor"),
    "a dtype as a text": (
        lambda: any_.zeros("tp: S(0)", 4, dtype="float32"),
        "zeros takes a dtype or None as 'dtype', got str: 'float32'",
    ),
    "no size": (lambda: shardwise.randn("tp: S(0)"), "has no dim.*the size follows the spec, as in zeros"),
    "a seed as a text": (lambda: any_.manual_seed("x"), "manual_seed takes an int as 'seed', got str: 'x'"),
    "a tensor in place of a list": (
        lambda: any_.redistribute_many(on_mesh(), "R"),
        r"takes a list of tensors and a list of targets, got ShardedTensor and str; one is x.redistribute\(\)",
    ),
    "a number as pieces": (
        lambda: any_.EnumerableSpec(3),
        "EnumerableSpec takes a Sequence of Piece as .pieces., got int: 3",
    ),
    "a path as a checkpoint": (lambda: any_.Checkpoint("run"), "Checkpoint takes a Store as .store., got str: .run."),
    "numbers as pieces": (
        lambda: any_.infer_spec((4,), [3]),
        r"infer_spec takes a Sequence of Piece as 'pieces', got list: \(int\)",
    ),
    "no ranks to plan for": (lambda: shardwise.BalancedPlanner(0), "a number of ranks, 1 or more, .* got 0"),
    "a trace nowhere": (lambda: shardwise.trace("/no/such/folder/x.json").__enter__(), "there is no folder /no/such"),
    "a trace without a path": (lambda: any_.trace(3).__enter__(), "trace takes the path of a file to write.* got int"),
    "an input plan of another axis": (
        lambda: shardwise.shard_module(model(), ModelPlan(ONE, {"0.weight": "S(0)"}, input_plan="dp: S(0)")),
        r"input_plan 'dp: S\(0\)': .* names the axis 'dp'; the mesh has tp",
    ),
    "a layout of other dims": (lambda: shardwise.draw("f32[8,4] on tp=2: S(3)"), "has a dim from -2 to 1"),
    "round brackets": (
        lambda: shardwise.parse_layout("f32(8,4) on tp=2: S(0)"),
        r"expected '\[' and the shape after the dtype, as in f32\[8,4\]; found '\('",
    ),
    "a mesh after @": (
        lambda: shardwise.parse_layout("f32[8,4] @ tp=2: S(0)"),
        r"@ is followed by the number of a rank, and a mesh by on: 'on tp=2: S\(0\)'",
    ),
    "a word of a split misspelt": (
        lambda: shardwise.parse_layout("f32[8,4] on tp=2: S(0) size(3,5)"),
        "expected nothing more after the layout; found 'size'; write sizes",
    ),
    "a star for a whole name": (
        lambda: shardwise.shard_module(model(), ModelPlan(ONE, {"*": "S(0)"})),
        r"'\*' matches no parameter; .*; \* is one part of a name, \*\* any number of parts: '\*\*'",
    ),
    "a lambda to launch": (
        lambda: launch(lambda: 1, 2),
        r"<lambda> or its arguments cannot be sent .*; use a function defined at the top of a module",
    ),
    "a path and no state": (
        lambda: any_.load("run/step-80"),
        r"missing 1 required positional argument: 'path'; the call is load\(state, path, strict=True",
    ),
    "a plan without its model": (
        lambda: any_.describe_plan(ModelPlan(ONE, {})),
        r"missing 1 required positional argument: 'module'; the call is describe_plan\(plan, module\)",
    ),
    "two plans": (
        lambda: any_.shard_module(model(), ModelPlan(ONE, {}), ModelPlan(ONE, {})),
        "src_rank is the number of a rank of the group, got ModelPlan",
    ),
    "a shape as a text": (
        lambda: any_.ChunkSpec(0, 2).layout("8,4"),
        "a shape must be a sequence of integers, got '8,4'",
    ),
    "a dim as a text": (lambda: any_.ChunkSpec("0", 2), "a dim must be an integer, got '0'"),
    "a rank as a text": (
        lambda: on_chunks().gather_to("0"),
        r"gather_to takes the number of a rank, as in gather_to\(0\); got str: '0'",
    ),
    "a package as a text": (lambda: shardwise.compat.install("torch"), r"a list of packages, .*; pass \['torch'\]"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_the_error_says_what_to_write(name: str) -> None:
    call, text = MISTAKES[name]
    with pytest.raises((ValueError, TypeError), match=text) as caught:
        call()
    assert not isinstance(caught.value, DisagreementError)  # one process agrees with itself
    check_is_short(caught.value, Path(__file__).name)


def check_is_short(error: BaseException, file: str) -> None:
    """At most five frames of ours below the last line of the caller's file, and no second traceback in front of it."""
    frames = traceback.extract_tb(error.__traceback__)
    callers = [at for at, frame in enumerate(frames) if frame.filename.endswith(file)]
    ours = [f for f in frames[callers[-1] + 1 :] if f.filename.startswith(str(Path(shardwise.__file__).parent))]
    assert len(ours) <= 5, "".join(traceback.format_list(frames))
    shown = "".join(traceback.format_exception(error))
    assert shown.count("Traceback (most recent call last)") == 1, shown


W = torch.arange(24.0).reshape(6, 4)
FOLDER = "/no/such/folder"
# Calls of every rank of two, on a tensor of 6 x 4 that is cut by rows: the error's type and parts of its text.
ON_TWO_RANKS: dict[str, tuple[Callable[[Any], Any], type[Exception], tuple[str, ...]]] = {
    "another letter": (lambda a: lay_out(W, "tp: Q(0)"), NotationError, ("expected S(dim), R or P", "found 'Q'", "^")),
    "a long word": (lambda a: lay_out(W, "tp: Replicate()"), NotationError, ("found 'Replicate'; write R",)),
    "a long word for a cut": (lambda a: a.redistribute("Shard(1)"), NotationError, ("found 'Shard'; write S(0)",)),
    "no bracket": (lambda a: a.redistribute("S 0"), NotationError, ("expected '(' after S, as in S(0)",)),
    "a dim too far": (lambda a: lay_out(W, "tp: S(5)"), LayoutError, ("shape (6, 4) has a dim from -2 to 1",)),
    "a dim too far in a move": (lambda a: a.redistribute("S(2)"), LayoutError, ("shape (6, 4) has a dim from -2",)),
    "sizes that do not add up": (
        lambda a: a.redistribute("S(0) sizes(2,2)"),
        LayoutError,
        ("length 6", "(2, 2)", "of 2 ranks"),
    ),
    "no mesh size": (lambda a: lay_out(W, "R, S(0)"), LayoutError, ("does not say how large its axes are", "on dp=2")),
    "a mesh too large": (lambda a: lay_out(W, "on tp=4: S(0)"), LayoutError, ("names ranks 2, 3", "ranks 0, 1")),
    "one placement too many": (
        lambda a: a.redistribute("S(0), R"),
        LayoutError,
        ("has 2 placements; the mesh tp=2 has 1 axis",),
    ),
    "placements too few": (
        lambda a: lay_out(W, Mesh.of(dp=1, tp=2), [Shard(0)]),
        LayoutError,
        ("needs 2 placements, one for each axis; got 1",),
    ),
    "an unknown axis": (lambda a: a.redistribute("pp: S(0)"), LayoutError, ("names the axis 'pp'; the mesh has tp",)),
    "another shape": (
        lambda a: lay_out(W, "f32[4,6] on tp=2: S(0)"),
        LayoutError,
        ("the text says f32[4,6], and the tensor is f32[6,4]",),
    ),
    "another dtype": (
        lambda a: a.redistribute("bf16[6,4] on tp=2: S(1)"),
        LayoutError,
        ("the text says bf16[6,4], and the tensor is f32[6,4]",),
    ),
    "a number as a spec": (lambda a: lay_out(W, 3.7), TypeError, ("shard takes a spec", "got float: 3.7")),
    "a number as a target": (lambda a: a.redistribute(7), TypeError, ("redistribute takes a spec", "got int: 7")),
    "a text as a source": (lambda a: lay_out(W, "tp: S(0)", "banana"), TypeError, ("src_rank is a rank", "'banana'")),
    "a source that is not there": (lambda a: lay_out(W, "tp: S(0)", 5), LayoutError, ("src_rank 5", "ranks 0, 1")),
    "a number as a comm": (lambda a: lay_out(W, "tp: S(0)", comm=17), ValueError, ("process_group is", "got int: 17")),
    "a list as a tensor": (lambda a: lay_out([1.0], "tp: S(0)"), TypeError, ("got list", "torch.as_tensor(x)")),
    "nothing as a tensor": (lambda a: lay_out(None, "tp: S(0)", None), TypeError, ("passes no tensor",)),
    "a sharded tensor again": (lambda a: lay_out(a, "tp: S(1)"), TypeError, ("got ShardedTensor", "redistribute()")),
    "a sparse tensor": (lambda a: lay_out(W.to_sparse(), "tp: S(0)"), LayoutError, ("torch.sparse_coo", "to_dense()")),
    "parts that do not fit": (
        lambda a: shardwise.from_local(torch.ones(2, 2), ChunkSpec(0, 2), (6, 4)),
        LayoutError,
        ("of shapes [(3, 4)], got [(2, 2)]",),
    ),
    "parts without a shape": (
        lambda a: shardwise.from_local(torch.ones(3, 4), ChunkSpec(0, 2)),
        LayoutError,
        ("needs the global shape; pass shape=",),
    ),
    "a plain tensor beside it": (
        lambda a: a + torch.ones(6, 4),
        RuntimeError,
        ("shape (6, 4)", "shardwise.replicate(t)"),
    ),
    "a sparse tensor beside it": (lambda a: a + W.to_sparse(), RuntimeError, ("next to a ShardedTensor",)),
    "matrices that do not fit": (lambda a: a @ a, RuntimeError, ("cannot be multiplied (6x4 and 6x4)",)),
    "a weight that does not fit": (
        lambda a: nn.functional.linear(a, lay_out(torch.ones(3, 5), "tp: R")),
        RuntimeError,
        ("cannot be multiplied (6x4 and 5x3)",),
    ),
    "rows of other lengths": (lambda a: torch.cat([a, a[:, :2]], 0), RuntimeError, ("Expected", "4", "2")),
    "lengths that do not broadcast": (
        lambda a: a + lay_out(torch.ones(5, 4), "tp: S(0)"),
        RuntimeError,
        ("6", "[5, 4]"),
    ),
    "another number of elements": (lambda a: a.view(5, 5), RuntimeError, ("[5, 5] is invalid", "[6, 4] with 24")),
    "a row too far": (lambda a: a[10], IndexError, ("index 10 is out of bounds for dimension 0 with size 6",)),
    "a dim that it has not": (lambda a: a.sum(7), IndexError, ("[-2, 1], but got 7",)),
    "a number of many": (lambda a: a.item(), RuntimeError, ("24 elements cannot be converted to Scalar",)),
    "a loss of many": (lambda a: a.clone().requires_grad_().backward(), RuntimeError, ("only for scalar", "(6, 4)")),
    "another kind of tensor": (lambda a: a.to_sparse(), RuntimeError, ("torch.sparse_coo", "always torch.strided")),
    "gather without an index": (lambda a: a.gather(0), TypeError, ("no index was passed; gather_to(0)",)),
    "gather to nobody": (lambda a: a.gather_to(9), ValueError, ("gather to rank 9", "ranks 0, 1")),
    "a move where none may be": (lambda a: without_communication(a), RuntimeError, ("communication is forbidden",)),
    "targets too few": (
        lambda a: shardwise.redistribute_many([a, a], ["R"]),
        TypeError,
        ("got 2 tensors and 1 target",),
    ),
    "a buffer of text": (lambda a: a.redistribute("R", max_buffer_bytes="1 MB"), ValueError, ("got '1 MB'",)),
    "a buffer too small": (lambda a: a.redistribute("S(1)", max_buffer_bytes=1), ValueError, ("at least",)),
    "a pattern of nothing": (
        lambda a: shardwise.shard_module(model(), ModelPlan(Mesh.of(tp=2), {"0.wieght": "S(0)"})),
        ValueError,
        ("'0.wieght' matches no parameter", "0.weight"),
    ),
    "another plan": (lambda a: any_.shard_module(model(), {"0.weight": "S(0)"}), TypeError, ("ModelPlan(",)),
    "no checkpoint": (lambda a: shardwise.load({"w": a}, FOLDER), ValueError, ("no such checkpoint",)),
    "a small letter": (lambda a: a.redistribute("s(0)"), NotationError, ("found 's'; write S(0) for dim 0",)),
    "a mesh without on": (
        lambda a: lay_out(W, "tp=2: S(0)"),
        NotationError,
        ("a mesh follows the word on: 'on tp=2: S(0)'", "^"),
    ),
    "axes for dims, as in JAX": (
        lambda a: lay_out(W, ("tp", None)),
        TypeError,
        ("got tuple: ('tp', None)", "shard(x, 'on tp=2: S(0)')"),
    ),
    "a dim twice": (lambda a: a.permute(0, 0), RuntimeError, ("duplicate dims are not allowed",)),
    "a dim to turn that is not there": (lambda a: a.transpose(0, 3), IndexError, ("[-2, 1], but got 3",)),
    "lengths that do not expand": (
        lambda a: a.expand(7, 4),
        RuntimeError,
        ("must match the existing size (6)", "Target sizes: [7, 4].  Tensor sizes: [6, 4]"),
    ),
    "lengths too few": (
        lambda a: a.expand(2),
        RuntimeError,
        ("torch.FloatTensor{[6, 4]}, size=[2]", "greater or equal"),
    ),
    "a length that may be any": (lambda a: a[:0].reshape(0, -1), RuntimeError, ("[0, -1]: the -1 may be any length",)),
    "the trace of no matrix": (
        lambda a: a[None].trace(),
        RuntimeError,
        ("expected a matrix, but got tensor with dim 3",),
    ),
    "a plain gradient": (
        lambda a: setattr(a.clone().requires_grad_(), "grad", W),
        ValueError,
        ("[6,4] on tp=2: S(0), got Tensor; pass shard(t, '[6,4] on tp=2: S(0)')",),
    ),
    "a parameter by its path": (
        lambda a: shardwise.shard_parameter(model(), "0.weight", ChunkSpec(0, 2)),
        AttributeError,
        ("shard_parameter(module.get_submodule('0'), 'weight', spec)",),
    ),
    "a parameter misspelt": (
        lambda a: shardwise.shard_parameter(nn.Linear(2, 2), "wieght", ChunkSpec(0, 2)),
        AttributeError,
        ("Linear has no attribute `wieght`; near it: weight",),
    ),
    "ids in a list": (
        lambda a: table_in_halves()([1, 2]),
        ValueError,
        ("ids are a tensor, got list; pass torch.as_tensor(ids)",),
    ),
    "a plain target of a loss": (
        lambda a: nn.functional.mse_loss(a, W),
        RuntimeError,
        ("argument 'target' next to a ShardedTensor", 'output_plan="plain"'),
    ),
}


def table_in_halves() -> nn.Module:
    table = nn.Embedding(10, 4)
    shardwise.shard_parameter(table, "weight", ChunkSpec(0, 2))
    return table


def without_communication(a: Any) -> None:
    with shardwise.no_communication():
        a.full()


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_what_all_ranks_do_wrong_is_said_once(name: str) -> None:
    call, kind, texts = ON_TWO_RANKS[name]

    def body() -> None:
        call(lay_out(W, "tp: S(0)"))

    with pytest.raises(kind) as caught:
        run_local(body, 2)
    assert not isinstance(caught.value, DisagreementError)
    text = str(caught.value)
    assert [part for part in texts if part not in text] == [], text
    assert "all_gather_bytes" not in text and "ranks 0, 1: " not in text
    check_is_short(caught.value, Path(__file__).name)


def test_there_are_many_mistakes() -> None:
    assert len(MISTAKES) + len(ON_TWO_RANKS) >= 60


@pytest.mark.parametrize(
    ("body", "kind", "text"),
    [
        (lambda r: lay_out(W, f"tp: S({r})"), DisagreementError, "specs: [6,4] on tp=2: S(0) on rank 0 and [6,4] on"),
        (lambda r: lay_out(W, "tp: S(0)") if r else None, CommError, "'shard': rank 0 did not take part"),
        (
            lambda r: lay_out(W, "tp: R").redistribute("S(0)") if r else lay_out(W, "tp: R").full(),
            CommError,
            "made different calls (rank 0: 'full'; rank 1: 'redistribute')",
        ),
    ],
)
def test_what_ranks_do_differently_names_the_calls_of_the_user(
    body: Callable[[int], Any], kind: type[Exception], text: str
) -> None:
    with pytest.raises(kind, match=re.escape(text)) as caught:
        run_local(lambda comm: body(comm.rank), 2, timeout=30)
    assert "all_gather_bytes" not in str(caught.value)


def test_checkpoints_of_other_things(tmp_path: Path) -> None:
    save: Any = shardwise.save
    save(model(), tmp_path / "model")  # a module is saved as its state dict
    assert "0.weight" in shardwise.open(tmp_path / "model")
    with pytest.raises(shardwise.CheckpointError, match=r"got ndarray: pass torch.as_tensor\(x\)"):
        save({"x": X.numpy()}, tmp_path / "a")
    with pytest.raises(shardwise.CheckpointError, match=r"got dict; the state comes first: save\(state, path\)"):
        save(str(tmp_path / "a"), {"x": X})
    with pytest.raises(shardwise.CheckpointError, match="no such checkpoint"):
        shardwise.load({"x": X}, tmp_path / "a")


def test_what_is_right_beside_the_mistakes() -> None:
    assert plan(ROWS, COLUMNS, itemsize=4).moved_bytes == 64
    assert lay_out(X, ONE, [TorchReplicate()]).placements == (Replicate(),)
    assert run_local(lambda comm: comm.rank, 2) == [0, 1]
    assert callable(launch) and issubclass(ShardedOptimizer, torch.optim.Optimizer)


# A dim that a tensor of 2 dims has not, or one that comes twice: rules that count modulo the dims would compute.
DIMS: dict[str, Callable[[Any], Any]] = {
    "max": lambda a: a.max(2),
    "sum": lambda a: a.sum(dim=(0, 2)),
    "mean": lambda a: a.mean(-3),
    "mean, twice": lambda a: a.mean((0, -2)),
    "var": lambda a: a.var(2),
    "softmax": lambda a: a.softmax(2),
    "log_softmax": lambda a: a.log_softmax(dim=4),
    "cumsum": lambda a: a.cumsum(2),
    "cumsum_": lambda a: a.cumsum_(2),
    "argmax": lambda a: a.argmax(2),
    "aminmax": lambda a: torch.aminmax(a, dim=99),
    "norm": lambda a: torch.linalg.vector_norm(a, dim=2),
    "normalize": lambda a: nn.functional.normalize(a, dim=2),
    "squeeze": lambda a: a.squeeze((0, 0)),
    "split": lambda a: torch.unsafe_split(a, 1, 2),
    "unsqueeze": lambda a: a.unsqueeze(4),
    "stack": lambda a: torch.stack([a, a], 4),
    "cat": lambda a: torch.cat([a, a], 2),
    "narrow_copy": lambda a: torch.narrow_copy(a, -4, 0, 1),
}


@pytest.mark.parametrize("name", DIMS)
def test_a_dim_that_is_not_there_is_the_error_that_it_is_for_plain_tensors(name: str) -> None:
    with pytest.raises((IndexError, RuntimeError)) as plain:
        DIMS[name](W.clone())
    for layout in ("tp: S(0)", "tp: R"):
        with pytest.raises(type(plain.value)) as caught:
            run_local(lambda layout=layout: DIMS[name](lay_out(W, layout)), 2)
        assert str(caught.value) == str(plain.value)


def test_dims_that_are_there_are_taken() -> None:
    """A dim more for what makes one, -1 and 0 of a number, and one repeated where torch allows it."""

    def body() -> list[tuple[int, ...]]:
        a = lay_out(W, "tp: S(0)")
        found = [a.unsqueeze(2), a.unsqueeze(-3), torch.stack([a, a], -1), a.sum().softmax(-1), a.roll((1, 1), (0, 0))]
        return [tuple(t.shape) for t in found]

    assert run_local(body, 2)[0] == [(6, 4, 1), (1, 6, 4), (6, 4, 2), (), (6, 4)]


def test_what_ends_a_program_of_threads_shows_the_lines_of_the_caller() -> None:
    """`run_local` leaves out how it calls the ranks, and what torch calls in between."""

    def body() -> None:
        raise KeyError("mine")

    with pytest.raises(KeyError) as caught:
        run_local(body, 2)
    names = [frame.name for frame in traceback.extract_tb(caught.value.__traceback__)]
    assert names[-1] == "body" and "_run_as_rank" not in names and len(names) <= 4
