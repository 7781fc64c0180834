"""Do links end right where programs do what nobody planned: changed tensors, threads, forks, other tokens, restarts?"""

from __future__ import annotations

import gc
import os
import signal
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from typing import Any

import pytest
import torch
from torch import nn

import shardwise
from shardwise.comm import Comm
from shardwise.sync import RefusedError, StateMap, SyncError, publish, subscribe
from tests.fake_device import FakeDevice
from tests.sync.test_ports import stand_in
from tests.sync.worlds import LIMIT, TOKEN, free_address, gathered, laid_out, whole

ANY = "tcp://127.0.0.1:0"
BACK = 1_000_000  # the first version of a trainer that came back: more than one makes while another world starts


def pair(weights: Any, served: Any, **options: Any) -> tuple[Any, Any]:
    """A publisher and its subscriber, which has version 0."""
    trainer = publish(weights, ANY, token=TOKEN, name="trainer")
    link = subscribe(served, trainer.address, token=TOKEN, name="server", **options)
    trainer.push(0)
    assert link.pull(30) == 0
    return trainer, link


def wait_for(child: int) -> int:
    """How a forked process has ended; one that hangs is killed."""
    until = time.monotonic() + LIMIT / 2
    while True:
        process, status = os.waitpid(child, os.WNOHANG)
        if process:
            return status
        if time.monotonic() > until:
            os.kill(child, signal.SIGKILL)
        time.sleep(0.01)


def test_another_type_with_deltas_a_late_reader_and_a_trainer_that_comes_back_in_another_layout(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    address, value = free_address(), whole((12, 10), 1)
    met, again = threading.Event(), threading.Event()

    def train(comm: Comm, spec: str, first: int, go_on: threading.Event) -> None:
        w, step, done = laid_out(value, spec, comm), first, False
        with publish({"w": w}, address, token=TOKEN, delta=True) as link:
            while not done or step < first + 2:
                if step > first:
                    w.add_(1)
                link.push(step)
                step += 1
                link.drain(0.05)
                said = shardwise.comm.gather_values(comm, go_on.is_set(), label="go on")
                done = all(said.values())  # the same on all ranks

    def pull_until(link: Any, step: int) -> None:
        until = time.monotonic() + LIMIT / 2
        while (link.version or 0) < step:
            told = shardwise.comm.gather_values(link.comm, time.monotonic() < until, label="in time")
            assert all(told.values()), link.problem
            link.pull(2)

    def serve(comm: Comm) -> list[Any]:
        served = {"w": laid_out(torch.zeros(12, 10, dtype=torch.float64), "on x=2: S(1)", comm)}
        link = subscribe(served, address, token=TOKEN)
        pull_until(link, 2)
        met.set()
        pull_until(link, BACK + 1)
        other = {"w": laid_out(torch.zeros(12, 10), "on x=2: S(0)", comm)}
        with subscribe(other, address, token=TOKEN, name="late") as second:
            assert second.pull(30) is not None
            found = [link.version, gathered(served["w"]), second.version, gathered(other["w"])]
        link.close()
        comm.barrier(label="both are done")
        again.set()
        return found

    with ThreadPoolExecutor(2) as pool:
        servers = pool.submit(shardwise.run_local, serve, 2, timeout=60)
        shardwise.run_local(lambda comm: train(comm, "on x=4: S(0)", 0, met), 4, timeout=60)
        shardwise.run_local(lambda comm: train(comm, "on a=3: S(1)", BACK, again), 3, timeout=60)
        for version, w, second, other in servers.result(60):
            assert torch.equal(w, value.double() + version - BACK)
            assert torch.equal(other, value + second - BACK)


def test_a_map_without_a_wanted_tensor_or_of_one_that_is_not_there_is_refused() -> None:
    with publish({"a": torch.ones(2), "b": torch.ones(3)}, ANY, token=TOKEN, name="trainer") as trainer:
        one = StateMap.identity(trainer._published.types).fuse(["a", "b"], "ab")
        with pytest.raises(RefusedError, match=r"'server' does not fit .*rank 0: c is wanted, and neither"):
            subscribe(
                {"ab": torch.zeros(5), "c": torch.zeros(1)}, trainer.address, token=TOKEN, names=one, name="server"
            )
    said = pytest.raises(RefusedError, match="rank 0: the map takes b, which is not published")
    with publish({"a": torch.ones(2)}, ANY, token=TOKEN) as trainer, said:
        subscribe({"ab": torch.zeros(5)}, trainer.address, token=TOKEN, names=one)

    def fail(types: Any) -> Any:
        raise KeyError("no such layer")

    said = pytest.raises(RefusedError, match="rank 0: 'no such layer'")
    with publish({"a": torch.ones(2)}, ANY, token=TOKEN) as trainer, said:
        subscribe({"a": torch.zeros(2)}, trainer.address, token=TOKEN, names=fail)


@pytest.mark.parametrize("change", ["shape", "type"])
def test_weights_that_change_their_form_are_refused_and_the_server_keeps_its_step(change: str) -> None:
    weights, served = {"w": nn.Parameter(torch.ones(4))}, {"w": torch.zeros(4)}
    trainer, link = pair(weights, served)
    with trainer, link:
        before = weights["w"].data
        weights["w"].data = torch.ones(5) if change == "shape" else torch.ones(4).double()
        with pytest.raises(ValueError, match="w is not what was published"):
            trainer.push(1)
        assert link.pull(0) is None and link.state == "current" and served["w"].tolist() == [1.0] * 4
        weights["w"].data = before.fill_(3)
        trainer.push(2)
        assert link.pull(30) == 2 and served["w"].tolist() == [3.0] * 4


@pytest.mark.parametrize("apply", ["stage", "swap", "in_place"])
def test_memory_of_served_tensors_may_be_exchanged(apply: str) -> None:
    weights, served = {"w": torch.ones(4), "v": torch.ones(2)}, {"w": nn.Parameter(torch.zeros(4)), "v": torch.zeros(2)}
    trainer, link = pair(weights, served, apply=apply)
    with trainer, link:
        for step in range(1, 4):
            served["w"].data = torch.full((4,), -1.0)
            weights["w"].fill_(step)
            trainer.push(step)
            assert link.pull(30) == step
            assert served["w"].tolist() == [float(step)] * 4, apply


@pytest.mark.parametrize("apply", ["stage", "swap", "in_place"])
def test_served_tensors_that_change_their_shape_are_an_error_that_names_them(apply: str) -> None:
    weights, served = {"w": torch.ones(4), "v": torch.ones(2)}, {"w": nn.Parameter(torch.zeros(4)), "v": torch.zeros(2)}
    trainer, link = pair(weights, served, apply=apply)
    with trainer, link:
        before = served["w"].data
        served["w"].data = torch.zeros(3)
        weights["v"].fill_(7)
        trainer.push(1)
        assert link.pull(0) is None and link.version in (0, None)
        assert link.problem is not None and "subscriber 'server'" in link.problem and "w" in link.problem, link.problem
        assert served["v"].tolist() != [7.0, 7.0] or apply == "in_place"
        served["w"].data = before
        assert link.pull(30) == 1 and served["v"].tolist() == [7.0] * 2


def test_tensors_that_cannot_be_written_are_refused_at_once() -> None:
    said = pytest.raises(ValueError, match=r"w has elements that share memory; pass a tensor of its own, x\.clone\(\)")
    with publish({"w": torch.ones(4)}, ANY, token=TOKEN) as trainer, said:
        subscribe({"w": torch.zeros(1).expand(4)}, trainer.address, token=TOKEN)


def test_tensors_of_inference_mode_are_filled() -> None:
    with torch.inference_mode():
        served = {"w": torch.zeros(4)}
    weights = {"w": torch.ones(4)}
    trainer, link = pair(weights, served)
    with trainer, link:
        assert served["w"].tolist() == [1.0] * 4


def test_two_publishers_of_one_address_are_an_error_of_all_ranks() -> None:
    def train(comm: Comm) -> str:
        try:
            publish({"w": laid_out(torch.ones(4), "on x=2: S(0)", comm)}, first.address, token=TOKEN, name="second")
        except ValueError as error:
            return str(error)
        return "two of them"

    with publish({"w": torch.ones(4)}, ANY, token=TOKEN) as first:
        said = shardwise.run_local(train, 2)
    assert all("publisher 'second' rank 0 cannot listen at" in text and "in use" in text for text in said), said


def test_another_token_after_a_restart_is_said_and_the_step_stays() -> None:
    weights, served, address = {"w": torch.ones(4)}, {"w": torch.zeros(4)}, free_address()
    link = None
    with publish(weights, address, token=TOKEN, name="trainer") as trainer:
        trainer.push(1)
        link = subscribe(served, address, token=TOKEN, name="server")
        assert link.pull(30) == 1
    weights["w"].fill_(2)
    with publish(weights, address, token="another secret", name="trainer") as trainer:
        trainer.push(2)
        assert link.pull(0.3) is None and (link.state, link.version) == ("waiting", 1)
        assert link.problem is not None and "the token is not that of the publisher" in link.problem
        assert "subscriber 'server' rank 0: publisher 'trainer'" in link.problem
    with publish(weights, address, token=TOKEN, name="trainer") as trainer:
        trainer.push(3)
        while link.version != 3:
            link.pull(5)
    link.close()


def test_pushes_of_several_threads_are_whole() -> None:
    weights, served = {f"w{i}": torch.zeros(1000) for i in range(20)}, {f"w{i}": torch.zeros(1000) for i in range(20)}
    trainer, link = pair(weights, served)
    with trainer, link, ThreadPoolExecutor(4) as pool:
        pushed = [pool.submit(trainer.push, step) for step in range(1, 40)]
        seen = []
        while not all(job.done() for job in pushed):
            seen.append(link.pull(0))
        for job in pushed:
            job.result()
        newest = link.pull(0) or link.version
        assert newest == trainer.version, (newest, trainer.version)
        assert link.verify()


def test_pulls_of_several_threads_are_whole() -> None:
    weights, served = {"w": torch.zeros(1000)}, {"w": torch.zeros(1000)}
    trainer, link = pair(weights, served)
    with trainer, link, ThreadPoolExecutor(4) as pool:
        for step in range(1, 20):
            weights["w"].fill_(step)
            trainer.push(step)
            found = list(pool.map(lambda _: link.pull(0), range(4)))
            assert found.count(step) == 1 and found.count(None) == 3, (found, link.problem)
            assert served["w"].tolist() == [float(step)] * 1000 and link.state == "current"


def test_draining_after_the_reader_has_died_ends() -> None:
    trainer, link = pair({"w": torch.ones(4)}, {"w": torch.zeros(4)})
    with trainer:
        link._control.close()
        link._drop_sources()
        trainer.push(1)
        began = time.monotonic()
        assert trainer.drain(20) == [] and time.monotonic() - began < 15
        assert [each.world for each in trainer.removed] == ["server"]


def test_the_newest_version_is_the_last_push_whatever_its_step() -> None:
    weights, served = {"w": torch.ones(1)}, {"w": torch.zeros(1)}
    trainer, link = pair(weights, served)
    with trainer, link:
        for step in (5, 3, 3, -1):
            weights["w"].add_(1)
            trainer.push(step)
            assert link.pull(30) == step and torch.equal(served["w"], weights["w"])
            assert link.pull(0) is None
        assert trainer.drain(10) == ["server"]


def test_what_was_swapped_out_may_be_read_until_the_next_pull() -> None:
    weights, served = {"w": torch.zeros(1000)}, {"w": nn.Parameter(torch.zeros(1000))}
    trainer, link = pair(weights, served, apply="swap")
    with trainer, link:
        for step in range(1, 5):
            old = served["w"].data
            weights["w"].fill_(step)
            trainer.push(step)
            assert link.pull(30) == step
            assert old.tolist() == [float(step - 1)] * 1000 and served["w"].tolist() == [float(step)] * 1000


def test_an_interrupted_pull_in_place_is_broken_and_the_next_heals_it(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served = {"w": torch.zeros(8), "v": torch.zeros(8)}, {"w": torch.zeros(8), "v": torch.zeros(8)}
    trainer, link = pair(weights, served, apply="in_place")
    with trainer, link:
        weights["w"].fill_(1)
        trainer.push(1)

        def interrupt(*_: Any) -> None:
            served["w"].fill_(1)
            raise KeyboardInterrupt

        with monkeypatch.context() as patch:
            patch.setattr(link, "_read_from", interrupt)
            with pytest.raises(KeyboardInterrupt):
                link.pull(30)
        assert link.state == "broken" and link.version is None
        with pytest.raises(SyncError, match="not those of one version, state 'broken'; pull first"):
            link.check()
        assert link.pull(30) == 1 and link.state == "current"


@pytest.mark.parametrize("far", [False, True])
def test_a_pull_that_is_interrupted_at_any_message_is_followed_by_a_right_one(
    far: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if far:
        monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    weights, served = {"w": torch.zeros(8)}, {"w": torch.zeros(8)}
    trainer, link = pair(weights, served)
    receive = shardwise.sync.session.Channel.receive
    with trainer, link:
        for at in range(8):
            weights["w"].fill_(at + 1)
            trainer.push(at + 1)
            left = [at]

            def count(self: Any, *args: Any, left: list[int] = left) -> Any:
                if threading.current_thread() is threading.main_thread():
                    left[0] -= 1
                    if left[0] < 0:
                        raise KeyboardInterrupt
                return receive(self, *args)

            with monkeypatch.context() as patch:
                patch.setattr(shardwise.sync.session.Channel, "receive", count)
                with suppress(KeyboardInterrupt):
                    link.pull(30)
            until = time.monotonic() + 30
            while link.version != at + 1 and time.monotonic() < until:
                link.pull(1)
            assert link.pull(0) is None  # it is connected again, whatever was interrupted
            assert served["w"].tolist() == [at + 1.0] * 8 and link.verify()


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
@pytest.mark.parametrize("ending", ["collected", "closed", "used"])
def test_a_fork_costs_neither_side_its_link(ending: str) -> None:
    weights, served = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    trainer = publish(weights, ANY, name="trainer")  # a token of its own, in a file
    link = subscribe(served, trainer.address, name="server")
    trainer.push(0)
    assert link.pull(30) == 0
    child = os.fork()
    if child == 0:
        code = 1
        try:
            if ending == "collected":
                del link, trainer
                gc.collect()
                code = 0
            elif ending == "closed":
                link.close()
                trainer.close()
                code = 0
            else:
                with pytest.raises(
                    SyncError, match="'server' rank 0: the link was made before this process was forked"
                ):
                    link.pull(0)
                with pytest.raises(ValueError, match="'trainer' rank 0: the link was made before this process was"):
                    trainer.push(1)
                code = 0
        finally:
            os._exit(code)
    assert wait_for(child) == 0
    with trainer, link:
        weights["w"].fill_(2)
        trainer.push(1)
        assert link.pull(30) == 1 and served["w"].tolist() == [2.0] * 4
        assert link.problem is None and trainer.removed == []
        with subscribe(served, trainer.address) as other:  # the token is still there
            assert other.pull(30) == 1


def test_a_hook_that_raises_leaves_the_version() -> None:
    calls = []

    def after(step: int) -> None:
        calls.append(step)
        if step == 1:
            raise RuntimeError("kernel")

    weights, served = {"w": torch.ones(4)}, {"w": torch.zeros(4)}
    trainer, link = pair(weights, served, after=after)
    with trainer, link:
        for step in (1, 2):
            weights["w"].fill_(step)
            trainer.push(step)
            if step == 1:
                with pytest.raises(RuntimeError, match="kernel"):
                    link.pull(30)
            else:
                assert link.pull(30) == 2
            assert link.version == step and served["w"].tolist() == [float(step)] * 4
    assert calls == [0, 1, 2]


def test_memory_that_a_server_does_not_get_is_an_error_of_all_its_ranks(monkeypatch: pytest.MonkeyPatch) -> None:
    with publish({"w": torch.ones(4, 4)}, ANY, token=TOKEN) as trainer:
        zeros = torch.zeros_like

        def serve(comm: Comm) -> str:
            def refuse(*args: Any, **kwargs: Any) -> Any:
                if shardwise.comm.default_comm().rank == 1:
                    raise MemoryError("no memory is left")
                return zeros(*args, **kwargs)

            monkeypatch.setattr(torch, "zeros_like", refuse)
            try:
                subscribe(
                    {"w": laid_out(torch.ones(4, 4), "on x=2: S(0)", comm)}, trainer.address, token=TOKEN, name="s"
                )
            except RefusedError as error:
                return str(error)
            return "it has memory"

        said = shardwise.run_local(serve, 2)
        monkeypatch.undo()
    assert all("subscriber 's' does not fit" in text and "rank 1: no memory is left" in text for text in said), said


def test_closed_links_say_so() -> None:
    trainer, link = pair({"w": torch.ones(4)}, {"w": torch.zeros(4)})
    link.close()
    trainer.close()
    with pytest.raises(SyncError, match="subscriber 'server' rank 0: the link is closed"):
        link.pull(0)
    with pytest.raises(ValueError, match="publisher 'trainer' rank 0: the link is closed"):
        trainer.push(1)
    for again in (link, trainer):
        again.close()
    with pytest.raises(SyncError, match="the link is closed"):
        link.verify()


def test_every_type_and_every_empty_shape_arrives() -> None:
    types = (torch.bool, torch.uint8, torch.int64, torch.complex64, torch.bfloat16, torch.float8_e4m3fn)
    weights = {str(t): torch.ones(3, 2).to(t) for t in types}
    weights |= {"none": torch.ones(0, 3), "one": torch.tensor(5), "thin": torch.ones(3, 0, 2)}
    served = {name: torch.zeros_like(x) for name, x in weights.items()}
    trainer, link = pair(weights, served, verify=True)
    with trainer, link:
        assert all(torch.equal(x.to(torch.complex64), weights[n].to(torch.complex64)) for n, x in served.items())


def test_a_trainer_that_comes_back_without_a_tensor_is_refused_until_it_has_it() -> None:
    address, served = free_address(), {"w": torch.zeros(4), "v": torch.zeros(2)}
    with publish({"w": torch.ones(4), "v": torch.ones(2)}, address, token=TOKEN, name="trainer") as trainer:
        trainer.push(1)
        link = subscribe(served, address, token=TOKEN, name="server")
        assert link.pull(30) == 1
    with publish({"w": torch.full((4,), 2.0)}, address, token=TOKEN, name="trainer") as trainer:
        trainer.push(2)
        assert link.pull(0.5) is None and (link.version, link.state) == (1, "waiting")
        assert link.problem is not None and "v is wanted, and neither the publisher nor the map has it" in link.problem
        assert served["w"].tolist() == [1.0] * 4
    with publish({"w": torch.full((4,), 3.0), "v": torch.ones(2)}, address, token=TOKEN) as trainer:
        trainer.push(3)
        while link.version != 3:
            link.pull(5)
        assert served["w"].tolist() == [3.0] * 4
    link.close()


def test_one_rank_of_a_server_may_read_by_another_way(monkeypatch: pytest.MonkeyPatch) -> None:
    """Rank 1 cannot open what rank 0 can; both have the same version."""
    device = FakeDevice()
    opened = device.open

    def open_on_one(handle: bytes, size: int) -> torch.Tensor:
        if shardwise.comm.default_comm().rank == 1:
            raise OSError(217, "peer access is not supported")
        return opened(handle, size)

    monkeypatch.setattr(device, "open", open_on_one)
    weights = {"w": whole((8, 6), 3)}

    def serve(comm: Comm) -> tuple[str, torch.Tensor]:
        served = {"w": laid_out(torch.zeros(8, 6), "on x=2: S(1)", comm)}
        with subscribe(served, trainer.address, token=TOKEN) as link:
            assert link.pull(30) == 1, link.problem
            return link.describe(), gathered(served["w"])

    with stand_in(device, monkeypatch), publish(weights, ANY, token=TOKEN) as trainer:
        trainer.push(1)
        found = shardwise.run_local(serve, 2)
    assert "by memory" in found[0][0] and "by sockets" in found[1][0] and "not by memory" in found[1][0]
    assert all(torch.equal(w, weights["w"]) for _, w in found)


@pytest.mark.parametrize("transport", ["auto", "gloo"])
def test_a_reader_that_comes_in_the_middle_sees_whole_versions(transport: str, monkeypatch: pytest.MonkeyPatch) -> None:
    weights, stop = {"a": torch.zeros(5000), "b": torch.zeros(5000)}, threading.Event()
    with stand_in(FakeDevice(), monkeypatch), publish(weights, ANY, token=TOKEN, keep="device") as trainer:

        def train() -> None:
            step = 0
            while not stop.is_set():
                step += 1
                for x in weights.values():
                    x.fill_(step)
                trainer.push(step, wait=step % 2 == 0)
                trainer.guard()

        with ThreadPoolExecutor(1) as pool:
            training = pool.submit(train)
            try:
                for _ in range(3):
                    served = {"a": torch.zeros(5000), "b": torch.zeros(5000)}
                    with subscribe(served, trainer.address, token=TOKEN, transport=transport) as link:
                        for _ in range(10):
                            step = link.pull(30)
                            assert step is not None, link.problem
                            assert all(x.tolist() == [float(step)] * 5000 for x in served.values())
            finally:
                stop.set()
            training.result(60)


def test_tensors_without_memory_are_refused_on_both_sides() -> None:
    weights = {"w": torch.ones(4), "m": torch.ones(2, device="meta")}
    with pytest.raises(ValueError, match="m: a tensor that is on the meta device"):
        publish(weights, ANY, token=TOKEN)
    served = {"w": torch.zeros(4), "m": torch.zeros(2, device="meta")}
    said = pytest.raises(ValueError, match="m: a tensor that is on the meta device")
    with publish({"w": torch.ones(4), "m": torch.ones(2)}, ANY, token=TOKEN) as trainer, said:
        subscribe(served, trainer.address, token=TOKEN)


def test_a_pull_that_looks_does_not_wait() -> None:
    with (
        publish({"w": torch.ones(4)}, ANY, token=TOKEN) as trainer,
        subscribe({"w": torch.zeros(4)}, trainer.address, token=TOKEN) as link,
    ):
        began = time.monotonic()
        assert [link.pull(0) for _ in range(20)] == [None] * 20 and time.monotonic() - began < 20
        assert link.state == "waiting" and link.problem is None
        with pytest.raises(SyncError, match="not those of one version, state 'waiting'; pull first"):
            link.verify()


def test_another_time_of_day_changes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Deadlines are of the monotonic clock; the two sides never compare clocks."""
    monkeypatch.setattr(time, "time", lambda: 0.0)
    trainer, link = pair({"w": torch.ones(4)}, {"w": torch.zeros(4)})
    monkeypatch.setattr(time, "time", lambda: 4e9)
    with trainer, link:
        trainer.push(1)
        assert link.pull(30) == 1 and trainer.drain(30) == ["server"]


def test_ranks_that_pull_with_other_times_are_an_error_of_both() -> None:
    def serve(comm: Comm) -> str:
        with subscribe({"w": laid_out(torch.zeros(4), "on x=2: S(0)", comm)}, trainer.address, token=TOKEN) as link:
            try:
                link.pull(float(comm.rank))
            except ValueError as error:
                said = str(error)
            comm.barrier(label="both have said so")
            assert link.pull(30) == 1
            return said

    with publish({"w": torch.ones(4)}, ANY, token=TOKEN) as trainer:
        trainer.push(1)
        assert all("timeout" in text for text in shardwise.run_local(serve, 2))


def test_a_server_reads_two_trainers() -> None:
    served = {"a": torch.zeros(2), "b": torch.zeros(2)}
    with publish({"a": torch.ones(2)}, ANY, token=TOKEN) as one, publish({"b": torch.ones(2)}, ANY, token=TOKEN) as two:
        one.push(1)
        two.push(2)
        first = subscribe({"a": served["a"]}, one.address, token=TOKEN)
        second = subscribe({"b": served["b"]}, two.address, token=TOKEN)
        assert (first.pull(30), second.pull(30)) == (1, 2)
        assert all(x.tolist() == [1.0, 1.0] for x in served.values()) and first.verify() and second.verify()
        first.close()
        second.close()
