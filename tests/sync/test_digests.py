"""Is the digest the same in every layout, file and order of ranks, and another one for other weights?"""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from typer.testing import CliRunner, Result

import shardwise
from shardwise.checkpoint import digests
from shardwise.cli.main import app
from shardwise.geometry.state_map import StateMap, TensorShape
from shardwise.sync.recording import apply_map
from tests.sync.worlds import run_worlds, whole

DTYPES = (
    *(torch.float32, torch.bfloat16, torch.float64, torch.complex64, torch.complex128),
    *(torch.float8_e4m3fn, torch.int64, torch.int8, torch.bool),
)
LAYOUTS = ("on x=3: S(0)", "on x=3: S(1)", "on x=3: R", "on x=3: S(1) sizes(0,5,2)", "f32[5,7,3] as grid")


def loop_over_words(x: Tensor) -> digests.Sums:
    """The sums as the module's text defines them, one word after another."""
    data = x.contiguous().reshape(-1).view(torch.uint8).numpy().reshape(x.shape[:-1].numel(), -1)
    size = min(4, x.dtype.itemsize)
    words = data.view({1: np.uint8, 2: np.uint16, 4: np.uint32}[size])
    runs = -(-words.shape[1] // digests._RUN)
    totals = [0, 0]
    for row in range(words.shape[0]):
        for column in range(words.shape[1]):
            for lane, (a, b) in enumerate(digests._LANES):
                key = np.array([row * runs + column // digests._RUN], np.uint64)
                r = int(digests._mix(key, a)[0])
                c = int(digests._mix(np.array([column % digests._RUN], np.uint64), b)[0])
                totals[lane] += r * c * int(words[row, column])
    return totals[0] % (1 << 64), totals[1] % (1 << 64)


@pytest.mark.parametrize("dtype", DTYPES)
def test_sums_are_as_defined_and_boxes_add_up(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(digests, "_RUN", 4)
    monkeypatch.setattr(digests, "_BLOCK_WORDS", 6)
    monkeypatch.setattr(digests, "_CHUNK_BYTES", 64)
    x = whole((2, 3, 11), 5).to(dtype)
    wanted = loop_over_words(x)
    assert digests.sum_box(x, (0, 0, 0), x.shape) == wanted
    parts = []
    for a in (slice(0, 1), slice(1, 3)):
        for b in (slice(0, 3), slice(3, 9), slice(9, 11)):
            parts.append(digests.sum_box(x[:, a, b], (0, a.start, b.start), x.shape))
    assert digests.add_sums(parts) == wanted


@given(st.lists(st.integers(1, 5), max_size=3), st.data())
def test_one_changed_bit_changes_it(shape: list[int], data: st.DataObject) -> None:
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float64, torch.uint8]))
    x = whole(shape, 1).to(dtype)
    bits = x.clone().reshape(-1).view(torch.uint8)
    place = data.draw(st.integers(0, bits.numel() - 1))
    bits[place] ^= 1 << data.draw(st.integers(0, 7))
    assert shardwise.digest(x) != shardwise.digest(bits.view(dtype).reshape(x.shape))


def test_order_shape_type_and_name_count() -> None:
    x = whole((4, 6), 0)
    other = [x.t().contiguous(), x.flip(0), x.reshape(6, 4), x.double(), x.view(torch.int32), -x, x * 0]
    found = [shardwise.digest(each) for each in (x, *other)]
    assert len(set(found)) == len(found)
    assert shardwise.digest(x.t().contiguous().t()) == found[0]
    assert shardwise.digest(torch.tensor(0.0)) != shardwise.digest(torch.tensor(-0.0))
    assert shardwise.digest(torch.empty(0, 3)) != shardwise.digest(torch.empty(3, 0))
    a, b = shardwise.digest({"a": x, "b": x, "n": 3}), shardwise.digest({"a": x, "c": x})
    assert a != b and a.difference(b) == ["b", "c"]
    assert a == shardwise.digest({"b": x, "a": x}) and str(a) == a.hex and len(a.hex) == 32


def test_every_layout_has_the_same() -> None:
    x, y = whole((5, 7), 2), whole((9,), 3, torch.bfloat16)
    wanted = shardwise.digest({"x": x, "y": y})

    def body(comm: shardwise.Comm) -> list[shardwise.sync.Digest]:
        found = []
        for spec in LAYOUTS[:4]:
            shard = shardwise.shard(x, spec, src_rank=None)
            found.append(shardwise.digest({"x": shard, "y": y}))
            assert shardwise.digest(shard) == shardwise.digest(x)
        return found

    for got in run_worlds((body, 3))[0]:
        assert got == [wanted] * 4


def test_replicas_that_differ_and_pending_sums_are_errors() -> None:
    def body(comm: shardwise.Comm) -> None:
        with pytest.raises(ValueError, match=r"w: ranks 0 and 1 have different values in \[0:4\]"):
            shardwise.digest({"w": torch.full((4,), comm.rank)})
        with pytest.raises(ValueError, match="pending reduction; redistribute it first"):
            shardwise.digest(shardwise.from_local(torch.ones(2), "on x=2: P", shape=(2,)))

    run_worlds((body, 2))


def test_a_checkpoint_has_that_of_its_state(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    state = {"model": {"w": whole((6, 4), 1), "b": whole((5,), 2, torch.bfloat16), "s": torch.tensor(3.0)}, "step": 7}
    wanted = shardwise.digest(state)

    def save(comm: shardwise.Comm) -> None:
        sharded = shardwise.shard(state["model"]["w"], "on x=2: S(1)", src_rank=None)  # type: ignore[index]
        shardwise.save({**state, "model": {**state["model"], "w": sharded}}, tmp_path / "cut")  # type: ignore[dict-item]

    shardwise.save(state, tmp_path / "whole")
    run_worlds((save, 2))
    monkeypatch.setattr(digests, "_CHUNK_BYTES", 32)
    for name in ("whole", "cut"):
        with shardwise.open(tmp_path / name) as checkpoint:
            assert shardwise.digest(checkpoint) == wanted
        shown = CliRunner().invoke(app, ["digest", str(tmp_path / name), "--json"])
        assert json.loads(shown.stdout)["digest"] == wanted.hex
    shown = CliRunner().invoke(app, ["digest", str(tmp_path / "cut"), "--by-tensor", "--name", "model.w"])
    assert shown.stdout.splitlines()[0] == f"{wanted.by_tensor['model.w']}  model.w"
    missing = CliRunner().invoke(app, ["digest", str(tmp_path / "cut"), "--name", "z"])
    assert missing.exit_code == 2 and "no tensor fits z" in missing.stderr


def test_checkpoints_are_compared_by_digest_also_under_other_names(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(digests, "_CHUNK_BYTES", 64)
    q, k = whole((6, 4), 1), whole((2, 4), 2)
    shardwise.save({"q": q, "k": k, "n": torch.ones(3)}, tmp_path / "trained")
    shardwise.save({"qk": torch.cat([q, k]).t().contiguous(), "n": torch.ones(3)}, tmp_path / "served")
    names = tmp_path / "names.toml"
    names.write_text('[[change]]\nfuse = ["q", "k"]\nto = "qk"\n[[change]]\ntranspose = "qk"\n')

    def diff(*arguments: object) -> Result:
        return CliRunner().invoke(app, ["diff", *map(str, arguments)])

    same = diff(tmp_path / "trained", tmp_path / "served", "--digest", "--names", names)
    assert (same.exit_code, same.stdout) == (0, "the same: 2 tensors by digest\n"), same.output
    printed = tmp_path / "served.json"
    printed.write_text(CliRunner().invoke(app, ["digest", str(tmp_path / "served"), "--json"]).stdout)
    assert diff(tmp_path / "trained", printed, "--digest", "--names", names).exit_code == 0
    other = diff(tmp_path / "trained", printed, "--digest")
    assert other.exit_code == 1 and other.stdout.splitlines()[-1] == (
        "different: 2 tensors only in A, 1 tensor only in B"
    )
    shardwise.save({"qk": torch.cat([q, k + 1]).t().contiguous(), "n": torch.ones(3)}, tmp_path / "stale")
    stale = json.loads(diff(tmp_path / "trained", tmp_path / "stale", "--digest", "--names", names, "--json").stdout)
    assert [row["name"] for row in stale["different"]] == ["qk"] and not stale["same"]
    for wrong, text in (
        (("--names", names), "with --digest only"),
        (("--digest", "--atol", "1"), "digests are of bits"),
        (("--digest", "--name", "z"), "has a tensor called z"),
    ):
        found = diff(tmp_path / "trained", tmp_path / "served", *wrong)
        assert found.exit_code == 2 and text in found.stderr


def test_padding_steps_and_casts_of_a_map_have_the_digest_of_what_it_makes(tmp_path: Path) -> None:
    types = {"w": TensorShape((6, 4), "f32"), "v": TensorShape((3,), "f32")}
    state = {"w": whole((6, 4), 1), "v": whole((3,), 2)}
    made = StateMap.identity(types).transpose("w").pad("w", 1, 9, 2.0).cast("w", "bf16").stack(["v"], "s")
    path = tmp_path / "c"
    shardwise.save(state, path)
    with shardwise.open(path) as checkpoint:
        for name, target in made.targets.items():
            assert digests.digest_made(checkpoint, target) == shardwise.digest(apply_map(made, name, state)).hex
