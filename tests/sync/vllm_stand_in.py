"""What `shardwise.sync.vllm` uses of vLLM's documented interface of weight transfer, in few lines, for tests.

Workers are driven as vLLM's own are: a dict becomes the engine's dataclass, and the phases come in their order.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass, field
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import torch
from torch import Tensor, nn

RELOADS: list[str] = []


@dataclass(frozen=True)
class Replicate:
    pass


@dataclass(frozen=True)
class Shard:
    dim: int


@dataclass(frozen=True)
class ParamMeta:
    name: str
    dtype: torch.dtype
    shape: tuple[int, ...]
    owners: tuple[int, ...] | None = field(default=None, kw_only=True)
    mesh_shape: tuple[int, ...] | None = field(default=None, kw_only=True)
    placements: tuple[Any, ...] | None = field(default=None, kw_only=True)


class WeightSource:
    metadata: list[ParamMeta]

    def implements_iter_local(self) -> bool:
        return type(self).iter_local is not WeightSource.iter_local

    def implements_iter_full(self) -> bool:
        return type(self).iter_full is not WeightSource.iter_full

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        raise NotImplementedError


class WeightTransferInitInfo:
    pass


class WeightTransferUpdateInfo:
    pass


@dataclass
class TrainerInitInfo:
    backend: ClassVar[str]
    rank: int = field(kw_only=True)

    @property
    def is_sender(self) -> bool:
        return self.rank == 0


class WeightTransferEngine:
    init_info_cls: type
    update_info_cls: type

    def __init__(self, config: Any, vllm_config: Any, device: torch.device, model: nn.Module) -> None:
        self.config, self.device, self.model, self.model_config = config, device, model, vllm_config.model_config

    def parse_init_info(self, given: dict[str, Any]) -> Any:
        return self.init_info_cls(**given)

    def update_weights(self, given: dict[str, Any]) -> None:
        self.receive_weights(self.update_info_cls(**given))

    def receive_weights(self, update_info: Any) -> None:
        raise NotImplementedError


class TrainerWeightTransferEngine:
    def __init__(self, *, client: Any, source: Any = None, is_sender: bool = True, rank: int = 0) -> None:
        self.client, self.source, self.is_sender, self.rank = client, source, is_sender, rank


class Factory:
    def __init__(self) -> None:
        self.known: dict[str, type] = {}

    def register_engine(self, name: str, engine: type) -> None:
        if name in self.known:
            raise ValueError(f"{name} is known")
        self.known[name] = engine


def install(monkeypatch: Any) -> ModuleType:
    """Put the stand-in where vLLM would be, and import the adapter."""
    names = ("vllm", "vllm.distributed", "vllm.distributed.weight_transfer", "vllm.distributed.weight_transfer.base")
    names += ("vllm.model_executor", "vllm.model_executor.model_loader", "vllm.model_executor.model_loader.reload")
    made = {name: ModuleType(name) for name in names}
    for name in names[2:4]:
        for each in (Replicate, Shard, ParamMeta, WeightSource, WeightTransferInitInfo, WeightTransferUpdateInfo):
            setattr(made[name], each.__name__, each)
        for each in (TrainerInitInfo, WeightTransferEngine, TrainerWeightTransferEngine):
            setattr(made[name], each.__name__, each)
    made[names[2]].WeightTransferEngineFactory = Factory()  # type: ignore[attr-defined]  # of a module made here
    made[names[2]].WeightTransferTrainerFactory = Factory()  # type: ignore[attr-defined]  # of a module made here
    reload = made[names[-1]]
    reload.initialize_layerwise_reload = lambda model: RELOADS.append("start")  # type: ignore[attr-defined]  # as above
    reload.finalize_layerwise_reload = lambda model, config: RELOADS.append("finish")  # type: ignore[attr-defined]
    for name, module in made.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.delitem(sys.modules, "shardwise.sync.vllm", raising=False)
    import shardwise.sync.vllm as adapter  # vLLM is there now

    monkeypatch.delitem(sys.modules, "shardwise.sync.vllm")
    return adapter


def worker_of(engine_class: Any, model: nn.Module) -> Any:
    """An engine as a worker of vLLM makes it."""
    config = SimpleNamespace(parallel_config=None, model_config="the model's")
    return engine_class(SimpleNamespace(backend="shardwise"), config, torch.device("cpu"), model)
