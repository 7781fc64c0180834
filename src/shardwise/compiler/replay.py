"""`mode="reduce-overhead"`: the graph of a kind is recorded once as a CUDA graph, which later calls replay.

1. A kind can be recorded if it is one graph (a whole training step, or a call without gradients), all its tensors are
   on one GPU, and its moves, if they send anything, are calls of nccl. `why_not_recorded` names what stands against
   that; such a kind runs as with the default mode.
2. The first calls run as usual: they compile, and warm up what allocates or connects on first use.
3. Then the graph is recorded, and run by a replay. Parameters, buffers and the state of optimizers are used where they
   are. Arguments and gradients are copied into memory of the graph, and back if the program writes to them. Learning
   rates are numbers in device memory. Results are copied out, so that the next replay leaves them alone.
4. Where memory of the state was replaced since (`p.data = other`), the graph is recorded again.
5. Where moves send something, the ranks decide together: all of them replay, or none.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from operator import methodcaller
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.fx import GraphModule, Node

from shardwise._text import package_logger
from shardwise._torch import aten, foreach_copy, present_ops
from shardwise.comm import Comm, fold_texts, gather_values
from shardwise.compiler.guards import bytes_spanned
from shardwise.compiler.schedule import moves_that_send

Run: TypeAlias = Callable[..., Sequence[Tensor]]
Record: TypeAlias = Callable[[Callable[[], Sequence[Tensor]]], tuple[Sequence[Tensor], Callable[[], None]]]
"""What records a call on a device: returns its results, in memory that stays, and what runs it again."""

_log = package_logger(__name__)
DEFAULT, REDUCE_OVERHEAD = "default", "reduce-overhead"
WARM_UPS, MAX_RECORDINGS = 2, 8
_NUMBERS = set(present_ops([aten.full.default, aten.scalar_tensor.default]))
_COPIES = set(present_ops([aten._to_copy.default, aten.copy.default, aten.copy_.default]))
_data_pointer = methodcaller("data_ptr")


def check_mode(mode: str | None) -> str:
    """The mode that was asked for; raises unless there is one of that name."""
    if mode in (None, DEFAULT):
        return DEFAULT
    if mode != REDUCE_OVERHEAD:
        raise ValueError(f"mode is {DEFAULT!r} or {REDUCE_OVERHEAD!r}, got {mode!r}")
    return mode


def record_cuda_graph(run: Callable[[], Sequence[Tensor]]) -> tuple[Sequence[Tensor], Callable[[], None]]:
    """Record a call as a CUDA graph."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        results = run()
    return results, graph.replay


RECORDERS: dict[str, Record] = {"cuda": record_cuda_graph}


def why_not_recorded(
    graphs: Mapping[str, GraphModule], given: Sequence[Tensor], in_state: int, draws: bool
) -> str | None:
    """What stands against recording a kind with these graphs and inputs, of which the first are state; or None."""
    if "step" not in graphs:
        return "its forward and backward passes are two graphs; compile the whole step"
    devices = {t.device for t in given if t.numel()}
    if not any(device.type in RECORDERS for device in devices):
        return f"its tensors are on {', '.join(sorted(map(str, devices))) or 'no device'}, not on a GPU"
    if draws:
        return "it draws random numbers of sharded tensors, which are made on the host"
    if len(devices) > 1:
        return _describe_devices(given, in_state)
    (device,) = devices
    node = next((n for n in graphs["step"].graph.nodes if _is_elsewhere(n, device)), None)
    return None if node is None else f"{node.name} of its graph is not computed on {device} alone"


def _describe_devices(given: Sequence[Tensor], in_state: int) -> str:
    places = [i for i, t in enumerate(given) if t.numel() and t.device.type not in RECORDERS]
    if not places:
        return "its tensors are on several devices"
    device = given[places[0]].device
    if places[0] < in_state:
        return (
            f"a parameter, a buffer or a state of an optimizer is on {device} (optimizers keep their steps on the GPU "
            "with fused=True or capturable=True)"
        )
    return f"an argument is on {device}; pass it on the GPU"


def _is_elsewhere(node: Node, device: torch.device) -> bool:
    """Whether a node makes a tensor with elements on another device, except for numbers that kernels take."""
    made = node.meta.get("val")
    values = [v for v in (made if isinstance(made, list | tuple) else [made]) if isinstance(v, Tensor)]
    if node.op == "output" or all(v.device == device or not v.numel() for v in values):
        return False
    copied = any(user.target in _COPIES for user in node.users)
    return copied or node.target not in _NUMBERS or any(v.dim() for v in values)


@dataclass(frozen=True)
class GraphInputs:
    """Which inputs of a graph are state, the first ones; which others are read; which are written to."""

    in_state: int
    copied: frozenset[int]
    written: frozenset[int]

    @staticmethod
    def of(graph: GraphModule | None, in_state: int, count: int, total: int, written: set[int]) -> GraphInputs:
        """Those of a graph: some are state, some change from call to call, and some stay where they are."""
        nodes = [] if graph is None else [node for node in graph.graph.nodes if node.op == "placeholder"]
        all_used = len(nodes) != total  # a tensor that is passed twice is one node
        copied = (i for i in range(in_state, count) if all_used or nodes[i].users)
        return GraphInputs(in_state, frozenset(copied), frozenset(written))


@dataclass(eq=False)
class Replay:
    """The graph of one kind: run as it is at first, recorded then, replayed later."""

    run: Run
    graphs: Mapping[str, GraphModule]
    inputs: GraphInputs
    comm: Comm
    draws: bool
    problem: str | None = None
    replays: int = 0
    _calls: int = 0
    _recordings: int = 0
    _is_decided: bool = False
    _asks_ranks: bool = False
    _replay: Callable[[], None] | None = None
    _fixed: list[Tensor] = field(default_factory=list)  # what the recorded graph reads and writes
    _addresses: list[int] = field(default_factory=list)
    _results: list[Tensor] = field(default_factory=list)
    _stream: Any = None

    def __call__(self, *given: Tensor) -> Sequence[Tensor]:
        """Run the graph on these tensors; its results are new ones."""
        self._calls += 1
        if self._calls == 1:
            self.problem = why_not_recorded(self.graphs, given, self.inputs.in_state, bool(self.draws))
            self._note_problem()
        if self._calls <= WARM_UPS or _is_part_of_a_graph(given):
            return self.run(*given)
        if not self._is_decided:
            self._is_decided = True
            self._decide(given)
        elif self._replay is not None and self._find_addresses(given) != self._addresses:
            self._record_again(given)
        return self.run(*given) if self._replay is None else self._run_again(given)

    def describe(self) -> str:
        """What became of it, in words."""
        if self.problem is not None:
            return f"no CUDA graph: {self.problem}"
        if not self._recordings:
            return f"no CUDA graph yet: it is recorded in call {WARM_UPS + 1}"
        return f"CUDA graph: recorded {self._recordings} times, replayed {self.replays} times"

    def _decide(self, given: Sequence[Tensor]) -> None:
        """Record the graph; where its moves send something, on all ranks or on none."""
        sending = list(moves_that_send(self.graphs["step"])) if "step" in self.graphs else []
        if not all(move.comm.capabilities.captures_graphs for move in sending):
            self.problem = self.problem or "its moves need messages between the ranks, which a replay would not repeat"
            return
        self._asks_ranks = bool(sending) and self.comm.world_size > 1
        if self.problem is None:
            self.problem = self._record(given)
        if self._asks_ranks:
            found = gather_values(self.comm, self.problem, label="compile")
            problems = {rank: text for rank, text in found.items() if text is not None}
            self.problem = fold_texts(problems) if problems else None
        if self.problem is not None:
            self._forget()
            self._note_problem()

    def _note_problem(self) -> None:
        if self.problem is not None:
            _log.warning("shardwise.compile records no CUDA graph: %s", self.problem)

    def _record_again(self, given: Sequence[Tensor]) -> None:
        """Record the graph for memory that has replaced other; the other ranks replay theirs."""
        self._forget()
        if self._recordings == MAX_RECORDINGS and not self._asks_ranks:
            self.problem = f"the memory of its state was replaced {MAX_RECORDINGS} times"
            return
        self.problem = self._record(given)
        if self.problem is not None:
            self._forget()
            if self._asks_ranks:
                raise RuntimeError(f"rank {self.comm.rank} cannot record its CUDA graph again: {self.problem}")

    def _forget(self) -> None:
        self._replay, self._fixed, self._results = None, [], []

    def _find_addresses(self, given: Sequence[Tensor]) -> list[int]:
        return list(map(_data_pointer, given[: self.inputs.in_state]))

    def _record(self, given: Sequence[Tensor]) -> str | None:
        """Record the graph; return what stood against it, or None. Nothing is computed, so nothing has to be undone."""
        device = next(t.device.type for t in given if t.numel())
        try:
            self._fixed = self._fix_inputs(given)
            results, self._replay = RECORDERS[device](lambda: self.run(*self._fixed))
        except Exception as error:  # whatever a device refuses while it records
            return f"{type(error).__name__}: {(str(error).splitlines() or [''])[0]}"
        self._results = list(results)
        if any(map(_repeats_memory, self._results)):
            return "a result repeats its memory, as expand() makes it"
        if _overlap(self._results, self._fixed):
            return "a result shares memory with an argument, with a parameter or with another result"
        self._recordings += 1
        self._addresses = self._find_addresses(given)
        return None

    def _fix_inputs(self, given: Sequence[Tensor]) -> list[Tensor]:
        """State and numbers where they are, all other inputs in memory of the graph."""
        own: dict[int, Tensor] = {}
        for tensor in (t for i, t in enumerate(given) if i in self.inputs.copied and id(t) not in own):
            if _repeats_memory(tensor):
                raise ValueError("an argument repeats its memory, as expand() makes it")
            own[id(tensor)] = _empty_as(tensor).copy_(tensor.detach())
        return [own[id(t)] if i in self.inputs.copied else t for i, t in enumerate(given)]

    def _run_again(self, given: Sequence[Tensor]) -> list[Tensor]:
        """Replay the graph with these inputs."""
        assert self._replay is not None
        self._wait_for_last()
        copied, written = self.inputs.copied, self.inputs.written
        copy_tensors([self._fixed[i] for i in copied], [given[i].detach() for i in copied])
        self._replay()
        self.replays += 1
        back = copied & written
        copy_tensors([given[i].detach() for i in back], [self._fixed[i] for i in back])
        torch.autograd.graph.increment_version([given[i] for i in written if not given[i].is_inference()])
        results = list(map(_empty_as, self._results))
        copy_tensors(results, self._results)
        return results

    def _wait_for_last(self) -> None:
        """The memory of the graph belongs to one replay after the other, whatever stream they are on."""
        if self._fixed[0].device.type != "cuda":
            return
        stream = torch.cuda.current_stream()
        if self._stream is not None and self._stream != stream:
            stream.wait_stream(self._stream)
        self._stream = stream


def _is_part_of_a_graph(given: Sequence[Tensor]) -> bool:
    """Whether the caller records a CUDA graph, of which this call becomes a part."""
    return bool(given) and given[0].device.type == "cuda" and torch.cuda.is_current_stream_capturing()


def _empty_as(tensor: Tensor) -> Tensor:
    return torch.empty_strided(tensor.shape, tensor.stride(), dtype=tensor.dtype, device=tensor.device)


def _repeats_memory(tensor: Tensor) -> bool:
    return any(step == 0 and size > 1 for size, step in zip(tensor.shape, tensor.stride(), strict=True))


def _overlap(results: Sequence[Tensor], fixed: Sequence[Tensor]) -> bool:
    """Whether some results are in the memory of each other or of inputs, which their copies would not be."""
    inputs = {t.untyped_storage().data_ptr() for t in fixed if t.numel()}
    if any(t.untyped_storage().data_ptr() in inputs for t in results if t.numel()):
        return True
    spans = sorted((t.data_ptr(), t.data_ptr() + bytes_spanned(t)) for t in results if t.numel())
    return any(one[1] > other[0] for one, other in pairwise(spans))


def copy_tensors(to: Sequence[Tensor], sources: Sequence[Tensor]) -> None:
    """Copy tensors, those of one dtype by one call."""
    groups: dict[torch.dtype, tuple[list[Tensor], list[Tensor]]] = defaultdict(lambda: ([], []))
    for one, other in zip(to, sources, strict=True):
        groups[one.dtype][0].append(one)
        groups[one.dtype][1].append(other)
    for targets, origins in groups.values():
        foreach_copy(targets, origins)


def put_rates(rates: Sequence[float], device: torch.device, known: list[tuple[float, Tensor]]) -> list[Tensor]:
    """Learning rates in device memory: those that are `known`, written to where a number has changed."""
    for place, rate in enumerate(rates):
        if place == len(known):
            known.append((rate, torch.full((), rate, dtype=torch.float64, device=device)))
        elif known[place][0] != rate:
            known[place] = rate, known[place][1].fill_(rate)
    return [tensor for _, tensor in known[: len(rates)]]
