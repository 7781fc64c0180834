"""Do changes alone give the same weights: every encoding, every layout, skipped versions, links that broke?"""

from __future__ import annotations

import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch

from shardwise.checkpoint.changes import BLOCK, ChangeLog, compare, decode_changes, encode_changes, most_bytes, write_at
from shardwise.comm import Comm
from shardwise.sync import publish, subscribe
from tests.sync.worlds import TOKEN, free_address, gathered, laid_out, parts_of, run_worlds, whole

COUNTS = (0, 1, 7, BLOCK - 1, BLOCK, BLOCK + 1, 3 * BLOCK + 5)
TYPES = (torch.uint8, torch.float8_e4m3fn, torch.bfloat16, torch.float32, torch.float64, torch.complex128, torch.bool)


def random_row(count: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    if dtype == torch.bool:
        return torch.rand(count, generator=generator) < 0.5
    data = torch.randint(0, 256, (count * dtype.itemsize,), generator=generator, dtype=torch.uint8)
    return data.view(dtype) if count else torch.empty(0, dtype=dtype)


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return not compare(a, b).any()


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_changes_are_read_as_they_were_written(dtype: torch.dtype) -> None:
    for count, share in itertools.product(COUNTS, (0.0, 0.001, 0.01, 0.2, 0.9, 1.0)):
        old, new = random_row(count, dtype, 1), random_row(count, dtype, 2)
        flags = np.random.default_rng(count).random(count) < share
        flags[: count // 3] = False  # blocks of every kind side by side
        new = torch.where(torch.from_numpy(flags), new, old) if dtype != torch.float8_e4m3fn else new
        data = encode_changes(new, flags)
        assert len(data) <= most_bytes(count, dtype.itemsize)
        positions, values = decode_changes(data, count, dtype)
        assert set(np.flatnonzero(flags)) <= set(positions.tolist())
        made = old.clone()
        made[positions] = values
        expected = old.clone()
        expected[positions] = new[positions]
        assert same_bits(made, expected)
        if dtype != torch.float8_e4m3fn:
            assert same_bits(made, new)


def test_one_percent_takes_a_tenth_at_most() -> None:
    flags = np.random.default_rng(3).random(200_000) < 0.01
    for dtype in TYPES[:-1]:
        assert len(encode_changes(random_row(len(flags), dtype, 1), flags)) < 0.05 * len(flags) * dtype.itemsize
    blocks = np.zeros(200_000, np.bool_)
    blocks[BLOCK : 3 * BLOCK] = True
    assert len(encode_changes(random_row(len(flags), torch.float32, 1), blocks)) == 49 + 2 * BLOCK * 4


def test_damaged_changes_are_refused() -> None:
    flags = np.random.default_rng(3).random(2 * BLOCK + 10) < 0.01
    data = encode_changes(random_row(len(flags), torch.int32, 1), flags)
    for damaged in (data[:-1], np.append(data, np.uint8(0)), data[:2]):
        with pytest.raises(ValueError, match="changes of 8202 elements"):
            decode_changes(damaged, len(flags), torch.int32)
    for byte in range(len(data) // 8):
        spoiled = data.copy()
        spoiled[byte] ^= 0xFF
        try:
            positions, values = decode_changes(spoiled, len(flags), torch.int32)
        except ValueError:
            continue
        assert len(positions) == len(values) and positions.max() < len(flags)


def test_values_are_written_into_views_of_every_kind() -> None:
    flags = np.random.default_rng(1).random(24) < 0.4
    values = torch.arange(24.0)
    positions = torch.from_numpy(np.flatnonzero(flags))
    for order in itertools.permutations(range(3)):
        memory = torch.zeros([(2, 3, 4)[d] for d in order]).permute([order.index(d) for d in range(3)])
        write_at(memory, positions, values[positions], (2, 3, 4), (slice(None),) * 3)
        assert torch.equal(memory.flatten(), torch.where(torch.from_numpy(flags), values, 0.0))
    repeated = torch.zeros(2, 5, 3, 2, 4)
    write_at(repeated, positions, values[positions], (2, 3, 4), (slice(None), None, slice(None), None, slice(None)))
    once = torch.where(torch.from_numpy(flags), values, 0.0).view(2, 1, 3, 1, 4)
    assert torch.equal(repeated, once.expand(2, 5, 3, 2, 4))
    number = torch.zeros(3)
    write_at(number, torch.tensor([0]), torch.tensor([7.0]), (), (None,))
    assert number.tolist() == [7.0] * 3


def test_a_log_forgets_the_oldest() -> None:
    log = ChangeLog(limit=64)
    for version in range(1, 40):
        flags = np.zeros(64, np.bool_)
        flags[version] = True
        log.add(version, version - 1, {0: flags, 1: np.zeros(3, np.bool_)})
    union = log.since(30, 39)
    assert union is not None
    assert np.flatnonzero(union.flags(0, 64)).tolist() == list(range(31, 40))
    assert union.flags(1, 3) is None
    assert log.since(10, 39) is None
    assert log.since(39, 39).flags(0, 64) is None  # type: ignore[union-attr]
    dense = ChangeLog(limit=1 << 20)
    for version in range(200):
        dense.add(version + 1, version, {0: np.ones(8, np.bool_)})
    assert dense.since(100, 200) is None and dense.since(150, 200) is not None


LAYOUTS = ("plain", "on x=2: S(0)", "on x=2: S(1)", "on x=2: R")


def scatter(x: torch.Tensor, seed: int, share: float) -> None:
    """Change a share of the elements of a local tensor to values that follow from the seed."""
    flags = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < share
    x[flags] = float(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_readers_of_other_hosts_get_what_changed(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    address, shape = free_address(), (96, 128)
    steps = (1, 2, 5, 6)  # what is pulled: some versions are skipped
    pulled = {step: threading.Barrier(2) for step in steps}

    def train(comm: Comm) -> list[Any]:
        wholes = [whole(shape, i) for i in range(len(LAYOUTS))]
        seen = []
        state = {
            f"w{i}": laid_out(each, spec, comm) for i, (each, spec) in enumerate(zip(wholes, LAYOUTS, strict=True))
        }
        with publish(state, address, token=TOKEN, delta=True) as link:
            for step in range(1, 7):
                for number, (name, spec) in enumerate(zip(state, LAYOUTS, strict=True)):
                    scatter(wholes[number], 10 * step + number, 0.01 * (step != 6))
                    for mine, part in zip(
                        parts_of(state[name]), parts_of(laid_out(wholes[number], spec, comm)), strict=True
                    ):
                        mine.copy_(part)
                link.push(step)
                if step in steps:
                    seen.append([each.clone() for each in wholes])
                    if comm.rank == 0:
                        pulled[step].wait(60)
                        pulled[step].wait(60)
                    comm.barrier(label="pulled")
        return seen

    def serve(comm: Comm) -> list[Any]:
        wanted = {
            f"w{i}": laid_out(torch.zeros(shape, dtype=dtype), spec, comm) for i, spec in enumerate(LAYOUTS[::-1])
        }
        got, link = [], None
        for step in steps:
            if comm.rank == 0:
                pulled[step].wait(60)
            link = link or subscribe(wanted, address, token=TOKEN)
            while link.version != step:
                assert link.pull(20) == step
            got.append(([gathered(x).clone() for x in wanted.values()], link.read_bytes))
            comm.barrier(label="read")
            if comm.rank == 0:
                pulled[step].wait(60)
        assert link is not None
        link.close()
        return got

    trained, served = run_worlds((train, 2), (serve, 2))
    for rank in served:
        sizes = [nbytes for _, nbytes in rank]
        for (tensors, _), expected in zip(rank, trained[0], strict=True):
            assert all(torch.equal(x, y.to(dtype)) for x, y in zip(tensors, expected, strict=True))
        assert sizes[1] < 0.06 * sizes[0]  # one version of one percent
        assert sizes[1] < sizes[2] < 0.13 * sizes[0]  # the union of three
        assert sizes[3] < 200  # nothing changed: a length for each read


def one_link(monkeypatch: pytest.MonkeyPatch, **options: Any) -> tuple[dict[str, torch.Tensor], Any, Any, Any]:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    weights, served = {"w": torch.zeros(50, 100)}, {"w": torch.full((50, 100), -1.0)}
    trainer = publish(weights, "tcp://127.0.0.1:0", token=TOKEN, delta=True)
    trainer.push(0)
    link = subscribe(served, trainer.address, token=TOKEN, **options)
    assert link.pull() == 0 and link.read_bytes == 20000
    return weights, served, trainer, link


def test_changes_are_read_only_on_top_of_what_is_staged(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served, trainer, link = one_link(monkeypatch)
    with trainer, link:
        served["w"][3] = 77.0  # a program may write to what it serves: the staged copy is apart
        weights["w"][0, 5] = 1.0
        trainer.push(1)
        assert link.pull() == 1 and link.read_bytes < 30
        assert torch.equal(served["w"], weights["w"])
        link._staging[0][0][7] = 5.0  # what should not happen: the digest finds it, and all is read again
        weights["w"][0, 6] = 1.0
        trainer.push(2)
        assert link.pull(0) is None
        assert link.problem is not None and "what was read is not what was pushed" in link.problem
        assert link.version == 1
        assert link.pull() == 2 and link.read_bytes == 20000
        assert torch.equal(served["w"], weights["w"])


def test_a_failed_push_and_a_revoked_slot_break_no_chain(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served, trainer, link = one_link(monkeypatch)
    with trainer, link:
        copy = VersionError(trainer)
        weights["w"][1] = 1.0
        monkeypatch.setattr("shardwise.sync.publisher.compare", copy)
        with pytest.raises(RuntimeError, match="step 1 was not published"):
            trainer.push(1)
        monkeypatch.undo()
        monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
        weights["w"][2] = 2.0
        trainer.push(2)  # what changed since version 0 is not known
        assert link.pull() == 2 and link.read_bytes == 20000
        for step in (3, 4, 5):
            weights["w"][step] = float(step)
            lease = link._ask({"do": "again", "seq": trainer._last[1]})["version"] if step == 3 else None
            trainer.push(step)  # that of step 3 is leased until 5: steps 4 and 5 are written to one slot
            assert lease is None or lease[1] == 2
        assert link.pull() == 5 and link.read_bytes < 1800
        assert torch.equal(served["w"], weights["w"])


class VersionError:
    """A comparison that fails as a full memory would."""

    def __init__(self, trainer: Any) -> None:
        self.trainer = trainer

    def __call__(self, *_: Any) -> Any:
        raise RuntimeError("no memory is left")


def test_another_publisher_at_the_address_is_read_from_the_start(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("shardwise.sync.subscriber.identify_host", lambda: "another host")
    address, served = free_address(), {"w": torch.zeros(50, 100)}
    first = publish({"w": torch.full((50, 100), 1.0)}, address, token=TOKEN, delta=True)
    first.push(1)
    link = subscribe(served, address, token=TOKEN)
    assert link.pull() == 1
    first.close()
    with publish({"w": torch.full((50, 100), 2.0)}, address, token=TOKEN, delta=True) as second, link:
        second.push(1)
        second.push(2)  # the same numbers as those of the first: nothing changed from 1 to 2 here
        while link.pull(5) is None:
            time.sleep(0.05)
        assert link.read_bytes == 20000
        assert torch.equal(served["w"], torch.full((50, 100), 2.0))


def test_reads_of_changes_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    weights, served, trainer, link = one_link(monkeypatch)
    with trainer, link:
        weights["w"][0, 0] = 3.0
        trainer.push(1)
        source = link._sources[0]
        until = time.monotonic() + 10
        row = [0, [1], "f32", [[0, 1, 1]], [0], "f32", None]  # the header of the slot is not a piece
        source.channel.send({"do": "list", "list": 1, "rows": [row]}, until)
        source.channel.receive(until)
        wanted = {"do": "read", "list": 1, "runs": [1], "slot": 1, "generation": 4, "since": 1}
        source.channel.send(wanted, until)
        assert source.channel.receive(until) == {"whole": True, "delta": True}
        with pytest.raises(OSError, match="closed"):
            source.channel.receive(until)
        while link.version != 1:
            link.pull(1)
        assert torch.equal(served["w"], weights["w"])
