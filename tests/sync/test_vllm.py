"""Does a trainer of vLLM's interface reach workers of that interface, with whole versions, in all four phases?"""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from functools import cached_property
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import shardwise
from shardwise.sync import SyncError
from tests.sync import vllm_stand_in as vllm
from tests.sync.test_recording import Engine, built, values
from tests.sync.worlds import TOKEN, free_address, run_worlds


class Client:
    """Calls of the trainer, carried out by the threads of all workers, as vLLM's own clients do."""

    def __init__(self, workers: int) -> None:
        self.calls: list[queue.Queue[Any]] = [queue.Queue() for _ in range(workers)]
        self.answers: queue.Queue[str | None] = queue.Queue()

    def _all(self, name: str, *arguments: Any) -> None:
        for calls in self.calls:
            calls.put((name, arguments))
        problems = [self.answers.get(timeout=100) for _ in self.calls]
        if problem := next((p for p in problems if p is not None), None):
            raise RuntimeError(problem)

    def init_weight_transfer_engine(self, init_info: dict[str, Any]) -> None:
        self._all("init", init_info)

    def start_weight_update(self) -> None:
        self._all("start_weight_update")

    def update_weights(self, update_info: dict[str, Any]) -> None:
        self._all("update_weights", update_info)

    def finish_weight_update(self, weight_version: str | None = None) -> None:
        self._all("finish_weight_update")

    def serve(self, worker: Any, rank: int) -> None:
        """What a worker does until the trainer says that it is over."""
        while (call := self.calls[rank].get(timeout=100)) is not None:
            name, arguments = call
            try:
                if name == "init":
                    worker.init_transfer_engine(worker.parse_init_info(*arguments))
                else:
                    getattr(worker, name)(*arguments)
                self.answers.put(None)
            except Exception as error:
                self.answers.put(str(error))
        worker.shutdown()


class HalfSource(vllm.WeightSource):
    """Rows of all matrices on two ranks, everything else on both."""

    def __init__(self, rank: int, state: dict[str, Tensor]) -> None:
        self.rank, self.state = rank, state

    @cached_property
    def metadata(self) -> list[vllm.ParamMeta]:  # type: ignore[override]  # as vLLM asks for it
        split = {"owners": (0, 1), "mesh_shape": (2,), "placements": (vllm.Shard(0),)}
        return [
            vllm.ParamMeta(n, x.dtype, tuple(x.shape), **(split if x.ndim > 1 else {})) for n, x in self.state.items()
        ]

    def iter_local(self) -> Iterator[tuple[str, Tensor]]:
        for name, x in self.state.items():
            yield name, x.chunk(2)[self.rank].clone() if x.ndim > 1 else x


class FullSource(HalfSource):
    """All of it on one rank."""

    metadata = cached_property(lambda self: [vllm.ParamMeta(n, x.dtype, tuple(x.shape)) for n, x in self.state.items()])
    metadata.__set_name__(None, "metadata")
    iter_local = vllm.WeightSource.iter_local

    def iter_full(self) -> Iterator[tuple[str, Tensor]]:
        yield from self.state.items()


class Computing(Engine):
    """A loader that cannot be recorded."""

    def load_weights(self, weights: Any) -> None:
        super().load_weights((name, loaded * 1.0) for name, loaded in weights)


class Repacking(Engine):
    """A model whose parameters are changed after loading."""

    def process_weights_after_loading(self, dtype: torch.dtype) -> None:
        raise NotImplementedError


KINDS = [(Engine, "auto"), (Computing, "auto"), (Engine, "load"), (Repacking, "auto"), (Repacking, "direct")]


@pytest.mark.parametrize(("kind", "mode"), KINDS)
def test_a_trainer_reaches_its_workers(kind: type[Engine], mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, address, client = vllm.install(monkeypatch), free_address(), Client(2)
    vllm.RELOADS.clear()
    sent = values(), {name: x + 1 for name, x in values().items()}

    def train(comm: shardwise.Comm) -> None:
        state = dict(sent[0])
        init = adapter.TrainerInit(address, token=TOKEN, mode=mode, rank=comm.rank)
        engine = adapter.TrainerEngine.trainer_init(init, client=client, source=HalfSource(comm.rank, state))
        engine.send_weights()
        state.update(sent[1])
        engine.send_weights()
        comm.barrier(label="sent")
        if comm.rank == 0:
            for calls in client.calls:
                calls.put(None)
        engine.shutdown()

    def serve(comm: shardwise.Comm) -> None:
        model, wanted = built(comm.rank, 2, "cpu"), built(comm.rank, 2, "cpu")
        model.__class__ = kind
        pointers = [p.data_ptr() for p in model.parameters()]
        worker = vllm.worker_of(adapter.WorkerEngine, model)
        client.serve(worker, comm.rank)
        wanted.load_weights(sent[1].items())
        for name, x in wanted.state_dict().items():
            assert torch.equal(model.state_dict()[name], x), name
        assert pointers == [p.data_ptr() for p in model.parameters()]

    run_worlds((train, 2), (serve, 2))
    loads = mode == "load" or (mode == "auto" and kind is not Engine)
    assert sorted(vllm.RELOADS) == (["finish"] * 4 + ["start"] * 4 if loads else [])


def test_a_loader_that_must_be_recorded_says_why_it_cannot_be(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter, address, client = vllm.install(monkeypatch), free_address(), Client(1)
    model = built(0, 1, "cpu")
    model.__class__ = Computing
    serving = threading.Thread(target=client.serve, args=(vllm.worker_of(adapter.WorkerEngine, model), 0))
    serving.start()
    with pytest.raises(SyncError, match=r"init: the workers did not take the weights: .*mul of .* cannot be recorded"):
        init = adapter.TrainerInit(address, token=TOKEN, mode="direct", rank=0)
        adapter.TrainerEngine.trainer_init(init, client=client, source=FullSource(0, values()))
    client.calls[0].put(None)
    serving.join(20)
    with pytest.raises(ValueError, match="mode is one of auto, direct, load"):
        adapter.WorkerInit(address, mode="copy")
    with pytest.raises(ValueError, match="pass source="):
        adapter.TrainerEngine.trainer_init(adapter.TrainerInit(address, rank=0), client=client)


def test_sharded_modules_are_sources_of_other_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = vllm.install(monkeypatch)

    def body(comm: shardwise.Comm) -> None:
        model = nn.Linear(6, 4)
        with torch.no_grad():
            model.weight.copy_(torch.arange(24.0).reshape(4, 6))
        whole = model.weight.detach().clone()
        plan = {"weight": "S(1)", "bias": "S(0) sizes(1,3)"}
        shardwise.shard_module(model, shardwise.ModelPlan(shardwise.Mesh.of(x=2), plan))
        source = adapter.ShardedSource(model)
        weight, bias = source.metadata
        assert weight == vllm.ParamMeta(
            "weight", torch.float32, (4, 6), owners=(0, 1), mesh_shape=(2,), placements=(vllm.Shard(1),)
        )
        assert bias.owners is None and source.metadata is source.metadata
        full, local = dict(source.iter_full()), dict(source.iter_local())
        assert torch.equal(full["weight"], whole) and full["bias"].shape == local["bias"].shape == (4,)
        assert torch.equal(local["weight"], whole.chunk(2, dim=1)[comm.rank])

    run_worlds((body, 2))


def test_engines_are_registered_under_a_name(monkeypatch: pytest.MonkeyPatch) -> None:
    adapter = vllm.install(monkeypatch)
    adapter.register()
    adapter.register()
    assert adapter.WeightTransferEngineFactory.known == {"shardwise": adapter.WorkerEngine}
    assert adapter.WeightTransferTrainerFactory.known == {"shardwise": adapter.TrainerEngine}
