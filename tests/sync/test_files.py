"""Do versions in files give the weights that were pushed, in any layout, whatever is missing, damaged or replaced?"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import shardwise
from shardwise.checkpoint import CheckpointError, changes, compact, loading
from shardwise.checkpoint.changes import list_versions
from shardwise.cli.main import app
from shardwise.comm import Comm, LocalComm
from shardwise.sync import publish_files
from tests.sync.worlds import gathered, laid_out, parts_of, run_worlds, whole

SHAPE = (60, 90)
WRITTEN = ("plain", "on x=3: S(0)", "on x=3: S(1)", "on x=3: R", "on x=3: S(0) sizes(0,50,10)")
READ = ("plain", "on x=2: S(0)", "on x=2: S(1)", "on x=2: S(1) block(7)", "on x=2: R")


def scatter(x: torch.Tensor, seed: int, share: float) -> None:
    flags = torch.rand(x.shape, generator=torch.Generator().manual_seed(seed)) < share
    x[flags] = float(seed)


def write_chain(path: str, wholes: list[torch.Tensor], steps: int, **options: Any) -> list[list[torch.Tensor]]:
    """Push random changes from 3 ranks; the values of each step."""

    def train(comm: Comm) -> tuple[list[Any], list[int]]:
        state = {f"w{i}": laid_out(x, spec, comm) for i, (x, spec) in enumerate(zip(wholes, WRITTEN, strict=True))}
        link = publish_files(state, path, comm=comm, **options)
        seen, written = [], []
        for step in range(steps):
            values = [each.clone() for each in wholes]
            for number, each in enumerate(values):
                for past in range(1, step + 1):
                    scatter(each, 10 * past + number, 0.01)
            for (mine, spec), value in zip(zip(state.values(), WRITTEN, strict=True), values, strict=True):
                for part, new in zip(parts_of(mine), parts_of(laid_out(value, spec, comm)), strict=True):
                    part.copy_(new)
            link.push(step)
            seen.append(values)
            written.append(link.written_bytes)
        return seen, written

    found = run_worlds((train, 3))[0]
    total = sum(x.numel() * x.element_size() for x in wholes)
    assert all(0 < sum(rank[1][step] for rank in found) < 0.03 * total for step in range(1, steps)) or options
    return found[0][0]


def read_version(path: str, version: int, **options: Any) -> list[torch.Tensor]:
    """What 2 ranks load in their layouts."""

    def serve(comm: Comm) -> list[torch.Tensor]:
        state = {f"w{i}": laid_out(torch.zeros(SHAPE), spec, comm) for i, spec in enumerate(READ)}
        shardwise.load(state, path, version=version, comm=comm, **options)
        return [gathered(x).clone() for x in state.values()]

    return run_worlds((serve, 2))[0][0]


@pytest.mark.parametrize("where", ["folder", "url", "hashes"])
def test_every_version_in_every_layout(where: str, tmp_path: Path) -> None:
    path = f"memory://chain-{tmp_path.name}/ckpt" if where == "url" else str(tmp_path / "ckpt")
    options = {"max_kept_bytes": 0} if where == "hashes" else {}
    seen = write_chain(path, [whole(SHAPE, i) for i in range(len(WRITTEN))], 4, **options)
    assert list_versions(path) == [0, 1, 2, 3]
    for version, expected in enumerate(seen):
        for got, value in zip(read_version(path, version), expected, strict=True):
            assert torch.equal(got, value)
    assert compact(path, 2) == 2
    assert list_versions(path) == [2, 3]
    for version in (2, 3):
        assert all(map(torch.equal, read_version(path, version), seen[version]))
    with pytest.raises(CheckpointError, match=r"has no version 1; it has 2, 3"):
        read_version(path, 1)
    with shardwise.open(path) as checkpoint:
        assert torch.equal(checkpoint["w1"][:], seen[2][1])


def one_chain(path: Path, steps: int = 4) -> tuple[dict[str, torch.Tensor], Any]:
    weights = {"w": torch.zeros(5000), "n": torch.tensor(0, dtype=torch.int64)}
    link = publish_files(weights, path)
    for step in range(steps):
        weights["w"][step] = step + 1.0
        weights["n"].fill_(step)
        link.push(step)
    return weights, link


def load_one(path: Path, version: int, **options: Any) -> list[float]:
    state = {"w": torch.zeros(5000), "n": torch.tensor(-1)}
    shardwise.load(state, path, version=version, **options)
    assert int(state["n"]) == version
    return state["w"][:5].tolist()


def test_what_is_missing_or_wrong_is_named(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    weights, link = one_chain(path)
    assert load_one(path, 2) == [1.0, 2.0, 3.0, 0.0, 0.0]
    for step, match in ((2, "step 2 is not after 3"), (-1, "a step is an int"), (None, "a step is an int")):
        with pytest.raises(CheckpointError, match=match):
            link.push(step)
    with pytest.raises(CheckpointError, match=r"has no version 9; it has 0, 1, 2, 3"):
        load_one(path, 9)
    with pytest.raises(CheckpointError, match="under stored names"):
        load_one(path, 1, names=shardwise.checkpoint.NameMap.of({"rename": {"w": "v"}}))
    versions = tmp_path / "ckpt.deltas"
    moved = versions / "000000000001"
    kept = tmp_path / "kept"
    shutil.move(moved, kept)
    for version in (2, 3):
        with pytest.raises(CheckpointError, match="version 2 follows 1, which is missing"):
            load_one(path, version)
    shutil.move(kept, moved)
    data = next(moved.glob("*.safetensors"))
    content = bytearray(data.read_bytes())
    for at in range(len(content) - 40, len(content), 7):
        spoiled = content.copy()
        spoiled[at] ^= 0x11
        data.write_bytes(spoiled)
        with pytest.raises(CheckpointError, match=r"checksum|damaged|not a version"):
            load_one(path, 1)
    data.write_bytes(content)
    shardwise.save({"w": torch.full((5000,), 7.0), "n": torch.tensor(0)}, path)  # the chain is that of another one
    with pytest.raises(CheckpointError, match=r"w \(1 of 2 tensors\) are not those of version 3"):
        load_one(path, 3)
    assert load_one(path, 3, verify=False)[:4] == [7.0, 2.0, 3.0, 4.0]
    assert weights["w"][3] == 4.0


def test_a_publisher_goes_on_with_a_chain(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    weights, link = one_chain(path, 2)
    again = publish_files(weights, path)
    weights["w"][4] = 9.0
    weights["n"].fill_(5)
    again.push(5)
    assert again.written_bytes > 5000 * 4  # nothing is known of what is stored: everything counts as changed
    weights["w"][3] = 8.0
    weights["n"].fill_(6)
    again.push(6)
    assert again.written_bytes < 50
    assert load_one(path, 5) == [1.0, 2.0, 0.0, 0.0, 9.0]
    assert load_one(path, 6) == [1.0, 2.0, 0.0, 8.0, 9.0]
    weights["more"] = torch.ones(2)
    with pytest.raises(CheckpointError, match="names, types or layouts have changed"):
        again.push(7)
    with pytest.raises(CheckpointError, match="has other tensors: more"):
        publish_files(weights, path).push(7)
    with pytest.raises(CheckpointError, match="step is not a tensor"):
        publish_files({"w": torch.ones(1), "step": 3}, tmp_path / "other").push(0)
    assert link.version == 1


def test_a_push_that_failed_is_made_good_by_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "ckpt"
    weights, link = one_chain(path, 2)

    def full(*_: Any, **__: Any) -> None:
        raise CheckpointError("no space is left")

    weights["w"][2] = 3.0
    with monkeypatch.context() as patched:
        patched.setattr(changes, "save", full)
        with pytest.raises(CheckpointError, match="no space"):
            link.push(2)
    assert link.version == 1 and load_one(path, 1)[:3] == [1.0, 2.0, 0.0]
    weights["n"].fill_(3)
    link.push(3)
    assert load_one(path, 3)[:3] == [1.0, 2.0, 3.0]


def test_compaction_may_stop_anywhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    class Stopped(Exception):
        pass

    def stop(*_: Any, **__: Any) -> None:
        raise Stopped

    for number, (module, name) in enumerate(
        [(loading, "save"), (loading, "start_chain_at"), (changes, "_save_version"), (changes, "_remove_version")]
    ):
        path = tmp_path / str(number) / "ckpt"
        weights, link = one_chain(path)
        with monkeypatch.context() as patched:
            patched.setattr(module, name, stop)
            with pytest.raises(Stopped):
                compact(path, 2)
        assert load_one(path, 2)[:4] == [1.0, 2.0, 3.0, 0.0]
        assert load_one(path, 3)[:4] == [1.0, 2.0, 3.0, 4.0]
        weights["n"].fill_(4)
        link.push(4)  # the publisher goes on meanwhile
        if number:  # versions before are gone, and say so
            with pytest.raises(CheckpointError, match=r"compacted into 2|not those of version 1"):
                load_one(path, 1)
        assert compact(path) == 4
        assert load_one(path, 4)[:4] == [1.0, 2.0, 3.0, 4.0]
        assert list_versions(path) == [4]


def test_ranks_that_differ_are_told(tmp_path: Path) -> None:
    def train(comm: Comm) -> None:
        link = publish_files({"w": torch.ones(2)}, tmp_path / "ckpt", comm=comm)
        with pytest.raises(CheckpointError, match=r"the step is \[0, 1\] on the ranks"):
            link.push(comm.rank)
        link.push(1)
        with pytest.raises(CheckpointError, match="version is not the same on ranks 0 and 1"):
            shardwise.load({"w": torch.ones(2)}, tmp_path / "ckpt", version=1 if comm.rank else None, comm=comm)

    run_worlds((train, 2))


def test_part_of_a_state_and_other_types(tmp_path: Path) -> None:
    path = tmp_path / "ckpt"
    one_chain(path)
    served = {"v": torch.zeros(5000, dtype=torch.float64)}
    shardwise.load(served, path, version=3, strict=False, cast=True, names={"v": "w"})
    assert served["v"][:5].tolist() == [1.0, 2.0, 3.0, 4.0, 0.0]
    model = torch.nn.Linear(3, 2)
    link = publish_files({"model": model}, tmp_path / "module", comm=LocalComm.alone())
    link.push(0)
    with torch.no_grad():
        model.weight[1, 2] = 5.0
    link.push(1)
    other = torch.nn.Linear(3, 2)
    shardwise.load({"model": other}, tmp_path / "module", version=1)
    assert torch.equal(other.weight, model.weight)
    assert np.array_equal(other.bias.detach().numpy(), model.bias.detach().numpy())


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "ckpt"
    one_chain(path)
    with pytest.raises(SystemExit) as ended:
        app(["compact", str(path), "--version", "2", "--json"])
    assert not ended.value.code
    assert json.loads(capsys.readouterr().out)["removed"] == 2
    with pytest.raises(CheckpointError, match="has no versions"):
        shardwise.save({"w": torch.ones(1)}, tmp_path / "plain")
        compact(tmp_path / "plain")
