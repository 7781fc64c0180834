"""Shardwise as a weight transfer engine of vLLM, on both sides. Needs vLLM, which is imported here.

1. In each worker: `register()` before the engine starts, and `WeightTransferConfig(backend="shardwise")`. In its four
   phases the engine subscribes (init), prepares the model (start), pulls a version (update) and ends (finish).
2. In the trainer: `TrainerEngine.trainer_init(TrainerInit(address, rank=rank), client=client, source=source)`
   publishes a `WeightSource`, each rank its own part; `send_weights()` pushes a version and drives all workers' phases.
3. mode="direct": a worker records its model's `load_weights` once, then reads just the boxes that its parameters are
   made of, into their memory. It is right where vLLM changes nothing after loading.
4. mode="load": it reads whole tensors to the host, and runs `load_weights` within vLLM's own layerwise reload.
5. mode="auto" is "direct" if the loader can be recorded and no module has steps after loading: quantization, or a
   `process_weights_after_loading` of its own. Else it is "load".
6. `ShardedSource` is the other way: a module of ShardedTensors as a `WeightSource`, for vLLM's own engines.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor, nn
from vllm.distributed.weight_transfer import (
    ParamMeta,
    Replicate,
    Shard,
    TrainerWeightTransferEngine,
    WeightSource,
    WeightTransferEngine,
    WeightTransferEngineFactory,
    WeightTransferTrainerFactory,
)
from vllm.distributed.weight_transfer.base import TrainerInitInfo, WeightTransferInitInfo, WeightTransferUpdateInfo

from shardwise import geometry
from shardwise.checkpoint.state import torch_dtype
from shardwise.comm import Comm, gather_values
from shardwise.comm.current import resolve_comm
from shardwise.geometry import Layout, Mesh, MeshSpec, find_dtype
from shardwise.geometry.state_map import StateMap, TensorShape
from shardwise.sync.plan import DEFAULT_BUFFER_BYTES
from shardwise.sync.publisher import Publisher, tensors_of
from shardwise.sync.recording import RecordingError, record
from shardwise.sync.session import SyncError, find_token, parse_address
from shardwise.sync.subscriber import Apply, Subscriber
from shardwise.tensor import ShardedTensor, wrap

BACKEND = "shardwise"
MODES = ("auto", "direct", "load")


@dataclass
class WorkerInit(WeightTransferInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """What a worker must know: the address, the token (or the variable SHARDWISE_SYNC_TOKEN), and how weights go in.

    `mode` is "direct" (record the loader, read into parameters), "load" (run the loader at each version) or "auto".
    `apply` is that of `subscribe`: "in_place" takes no memory of the device.
    """

    address: str
    token: str | None = None
    mode: str = "auto"
    apply: Apply = "stage"
    deadline: float = 30.0

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"mode is one of {', '.join(MODES)}; got {self.mode!r}")


def _find_later_steps(model: nn.Module) -> str | None:
    """A module whose weights vLLM changes after they are loaded, so that parameters are not what a loader writes."""
    for name, module in model.named_modules():
        method = type(getattr(module, "quant_method", None)).__name__
        if hasattr(module, "process_weights_after_loading") or not method.startswith(("NoneType", "Unquantized")):
            return f"{name or 'the model'} has steps after loading"
    return None


def _whole_tensors(types: Mapping[str, TensorShape]) -> dict[str, Tensor]:
    """Memory on the host for all that is published."""
    return {
        name: torch.empty(kind.shape, dtype=torch_dtype(find_dtype(kind.dtype)), device="cpu")
        for name, kind in types.items()
    }


@dataclass
class WorkerUpdate(WeightTransferUpdateInfo):  # type: ignore[misc]  # vLLM has no types here
    """Which version to take; None: the newest."""

    step: int | None = None


class WorkerEngine(WeightTransferEngine):  # type: ignore[misc]  # vLLM has no types here
    """The engine of a vLLM worker; all workers of a replica take a version together."""

    init_info_cls = WorkerInit
    update_info_cls = WorkerUpdate
    supports_draft_weight_update = False

    _link: Subscriber | None = None
    _loaded: dict[str, Tensor] | None = None
    """Whole tensors on the host, where the loader runs at each version."""

    def init_transfer_engine(self, init_info: WorkerInit) -> None:
        self.shutdown()
        place, comm = parse_address(init_info.address), resolve_comm()
        maps: list[StateMap | None] = []

        def choose(types: Mapping[str, TensorShape]) -> Mapping[str, Tensor]:
            found = None if init_info.mode == "load" else self._record(types, init_info.mode, comm)
            maps[:] = [found]
            self._loaded = None if found is not None else _whole_tensors(types)
            if found is None:
                return self._loaded or {}
            return {name: tensor for name, tensor in tensors_of(self.model).items() if name in found.targets}

        options: dict[str, Any] = {"names": lambda types: maps[0], "after": None, "verify": None, "name": None}
        options |= {
            "transport": "auto",
            "apply": init_info.apply,
            "deadline": init_info.deadline,
            "max_buffer_bytes": DEFAULT_BUFFER_BYTES,
        }
        self._link = Subscriber(choose, place, find_token(init_info.token, place[0]), comm, **options)

    def _record(self, types: Mapping[str, TensorShape], mode: str, comm: Comm) -> StateMap | None:
        """What this worker's parameters are made of, if that can be recorded on all workers."""
        problem = _find_later_steps(self.model) if mode == "auto" else None
        found = None
        try:
            found = record(self.model.load_weights, types, into=self.model, check=False, allow_unwritten=["*"])
            if unwritten := [name for name, _ in self.model.named_parameters() if name not in found.targets]:
                problem = problem or f"the loader does not write {', '.join(unwritten[:4])}"
        except Exception as error:  # of any kind: it is the model's code, on tensors that it was not written for
            problem = f"{type(error).__name__}: {error}"
        everyone = gather_values(comm, problem, label="sync vllm: recorded")
        problems = [f"rank {rank}: {text}" for rank, text in everyone.items() if text is not None]
        if problems and mode == "direct":
            raise RecordingError("; ".join(problems[:4]))
        return None if problems else found

    def start_weight_update(self) -> None:
        if self._loaded is not None:
            from vllm.model_executor.model_loader.reload import initialize_layerwise_reload

            initialize_layerwise_reload(self.model)

    def receive_weights(self, update_info: WorkerUpdate) -> None:
        link = self._link
        if link is None:
            raise RuntimeError("no trainer is connected; call init_weight_transfer_engine first")
        while link.version is None or (update_info.step is not None and link.version < update_info.step):
            if link.pull() is None:
                why = link.problem or "nothing newer was pushed"
                raise SyncError(f"version {update_info.step} has not come: {why}")
        if update_info.step is None:
            link.pull(0)
        link.check()
        if self._loaded is not None:
            self.model.load_weights(iter(self._loaded.items()))

    def finish_weight_update(self) -> None:
        if self._loaded is not None:
            from vllm.model_executor.model_loader.reload import finalize_layerwise_reload

            finalize_layerwise_reload(self.model, self.model_config)

    def shutdown(self) -> None:
        link, self._link, self._loaded = self._link, None, None
        if link is not None:
            link.close()


@dataclass
class TrainerInit(TrainerInitInfo):  # type: ignore[misc]  # vLLM has no types here
    """What a trainer's rank must know; the workers hear the address, the token and the mode from the first rank."""

    backend: ClassVar[str] = BACKEND

    address: str
    token: str | None = None
    mode: str = "auto"
    apply: Apply = "stage"
    delta: bool = False
    deadline: float = 30.0


class TrainerEngine(TrainerWeightTransferEngine):  # type: ignore[misc]  # vLLM has no types here
    """The trainer's side: a `WeightSource` that is published, each rank its own part."""

    init_info_cls = TrainerInit

    @classmethod
    def trainer_init(cls, init_info: TrainerInit, *, client: Any, source: Any = None) -> TrainerEngine:
        """Publish a source and let the workers subscribe; all ranks call it."""
        if source is None:
            raise ValueError("pass source=, the trainer's WeightSource: its parameters are what is published")
        engine = cls(client=client, source=source, is_sender=init_info.is_sender, rank=init_info.rank)
        engine._start(init_info)
        return engine

    def _start(self, init_info: TrainerInit) -> None:
        place, self._step = parse_address(init_info.address), 0
        self._comm, self._state = resolve_comm(), dict[str, Any]()
        self._take()
        token = find_token(init_info.token, place[0])
        options = {"name": None, "delta": init_info.delta, "keep": "auto", "deadline": init_info.deadline}
        self.link = Publisher(self._state, place, token, self._comm, **options)
        problem = None
        if self.is_sender:
            said = {"address": self.link.address, "deadline": init_info.deadline}
            said |= {"mode": init_info.mode, "apply": init_info.apply}
            try:
                self.client.init_weight_transfer_engine({**said, "token": init_info.token})
            except Exception as error:  # of any kind, from the workers: the other ranks must hear of it
                problem = str(error)
        self._report(problem, "init")

    def _take(self) -> None:
        """This rank's parts of the source as they are now, in the layouts that the source declares."""
        local = self.source.implements_iter_local()
        held = dict(self.source.iter_local() if local else self.source.iter_full())
        for meta in self.source.metadata:
            layout = layout_of(meta, self._comm, local)
            if layout is None:
                self._state[meta.name] = held[meta.name]
            else:
                parts = (held[meta.name],) if self._comm.rank in layout.ranks else ()
                self._state[meta.name] = wrap(layout, parts, self._comm, dtype=meta.dtype)

    def send_weights(self) -> None:
        """Push the source's weights as the next version, and let all workers take it; all ranks call it."""
        self._take()
        self._step += 1
        self.link.push(self._step)
        problem = None
        if self.is_sender:
            try:
                self.client.start_weight_update()
                self.client.update_weights({"step": self._step})
                self.client.finish_weight_update(str(self._step))
            except Exception as error:  # of any kind, from the workers: the other ranks must hear of it
                problem = str(error)
        self._report(problem, "send_weights")

    def _report(self, problem: str | None, label: str) -> None:
        found = [p for p in gather_values(self._comm, problem, label=f"sync vllm: {label}").values() if p]
        if found:
            raise SyncError(f"{label}: the workers did not take the weights: {found[0]}")

    def shutdown(self) -> None:
        """Stop publishing; the workers keep what they have."""
        self.link.close()


def layout_of(meta: Any, comm: Comm, local: bool) -> Layout | None:
    """The layout that vLLM's metadata declare; None for a tensor that every rank has."""
    if meta.owners is None or (tuple(meta.owners) == comm.ranks and not (local and meta.placements)):
        return None
    shape = tuple(meta.mesh_shape)
    mesh = Mesh(tuple(f"a{i}" for i in range(len(shape))), np.array(meta.owners, np.int64).reshape(shape))
    given = meta.placements if local and meta.placements else (Replicate(),) * len(shape)
    placements = [geometry.Shard(p.dim) if isinstance(p, Shard) else geometry.Replicate() for p in given]
    return MeshSpec(mesh, placements).layout(tuple(meta.shape))


class ShardedSource(WeightSource):  # type: ignore[misc]  # vLLM has no types here
    """A module of ShardedTensors as a source for vLLM's own engines: layouts where vLLM can say them, else whole."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module

    @cached_property
    def metadata(self) -> list[Any]:
        found = []
        for name, x in self._module.named_parameters():
            said: dict[str, Any] = {}
            if isinstance(x, ShardedTensor) and (mesh := _plain_mesh(x)) is not None:
                said = {"owners": tuple(mesh.mesh.ranks.reshape(-1).tolist()), "mesh_shape": mesh.mesh.shape}
                said["placements"] = tuple(
                    Shard(p.dim % x.ndim) if isinstance(p, geometry.Shard) else Replicate() for p in mesh.placements
                )
            found.append(ParamMeta(name, x.dtype, tuple(x.shape), **said))
        return found

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        for name, x in self._module.named_parameters():
            yield name, x.full().detach() if isinstance(x, ShardedTensor) else x.detach()

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for name, x in self._module.named_parameters():
            if isinstance(x, ShardedTensor):
                yield name, x.local_tensor() if _plain_mesh(x) is not None else x.full().detach()
            else:
                yield name, x.detach()


def _plain_mesh(x: ShardedTensor) -> MeshSpec | None:
    """The spec of a tensor that is cut as `torch.chunk` cuts, over the whole world; None for any other."""
    spec = x.sharding.spec
    if not isinstance(spec, MeshSpec) or not spec.splits_in_mesh_order:
        return None
    plain = (
        p == (geometry.Shard(p.dim) if isinstance(p, geometry.Shard) else geometry.Replicate()) for p in spec.placements
    )
    return spec if all(plain) and set(spec.mesh.ranks.reshape(-1).tolist()) == set(x.comm.ranks) else None


def register(name: str = BACKEND) -> None:
    """Make the engines known to vLLM under a name; call it in the trainer, and in each worker before it starts."""
    for factory, engine in ((WeightTransferEngineFactory, WorkerEngine), (WeightTransferTrainerFactory, TrainerEngine)):
        with suppress(ValueError):  # it is known already
            factory.register_engine(name, engine)
