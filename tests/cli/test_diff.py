"""Does `shardwise diff` find all that differs, and nothing else, across formats, layouts and worlds?"""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import shardwise
from shardwise import ChunkSpec, Comm, GridSpec, Mesh, MeshSpec, Replicate, Shard, ShardingSpec, run_local
from shardwise.checkpoint import verify as compare
from shardwise.checkpoint.store import open_store
from shardwise.checkpoint.verify import (
    ComparedTensor,
    Difference,
    Tolerance,
    compare_stored,
    decode_numbers,
    has_numbers,
)
from shardwise.cli.main import app
from shardwise.geometry.notation import DTYPES, DType

TYPES = [d for d in DTYPES if has_numbers(d) and d.itemsize <= 2]
SPECS: dict[str, ShardingSpec] = {
    "rows": ChunkSpec(0, 3),
    "columns": ChunkSpec(1, 2),
    "grid": GridSpec(((2, 5), (1, 3, 2)), ((3, 1, 0), (2, 3, 1))),
    "mesh": MeshSpec(Mesh.of(dp=2, tp=2), (Replicate(), Shard(0, sizes=(7, 0)))),
}


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["diff", *map(str, arguments)])


def data_of(*arguments: object, status: int) -> Any:
    result = run(*arguments, "--json")
    assert result.exit_code == status, result.output
    return json.loads(result.stdout)


def save(state: dict[str, Any], path: Path, spec: ShardingSpec | None = None) -> Path:
    """Save a state on four ranks, its 7 x 6 tensors laid out by a spec."""

    def laid_out(value: object) -> object:
        fits = isinstance(value, Tensor) and value.shape == (7, 6) and spec is not None
        return shardwise.shard(value, spec) if fits else value  # type: ignore[arg-type]  # fits: both are given

    def body(comm: Comm) -> None:
        shardwise.save({name: laid_out(value) for name, value in state.items()}, path)

    run_local(body, 1 if spec is None else 4)
    return path


@pytest.mark.parametrize("dtype", TYPES, ids=str)
def test_every_code_is_the_number_that_torch_says(dtype: DType) -> None:
    codes = np.arange(2 ** (8 * dtype.itemsize), dtype=f"u{dtype.itemsize}")
    if dtype.name == "bool":
        codes = codes[:2]
    theirs = torch.from_numpy(codes.copy()).view(getattr(torch, dtype.torch_name))
    wide = torch.float64 if theirs.is_floating_point() else torch.int64
    assert np.array_equal(decode_numbers(codes, dtype), theirs.to(wide).numpy(), equal_nan=True)


def test_wide_elements_are_numbers_too() -> None:
    for values in (torch.tensor([1.5, -2.0, math.inf]), torch.tensor([2**62, -5]), torch.tensor([1 + 2j, -3j])):
        for cast in (values, values.to(torch.complex64) if values.is_complex() else values.to(torch.int32)):
            dtype = shardwise.geometry.find_dtype(str(cast.dtype))
            bits = cast.numpy().view(np.dtype(f"u{min(8, dtype.itemsize)}"))
            assert decode_numbers(bits, dtype).tolist() == cast.tolist()
    pairs = np.array([1, 2, 0, -3], np.float16).view(np.uint32)
    assert decode_numbers(pairs, shardwise.geometry.find_dtype("complex32")).tolist() == [1 + 2j, -3j]


def stored(path: Path, name: str) -> ComparedTensor:
    store = open_store(path)
    return ComparedTensor(store, store.index.tensors[name])


@pytest.mark.parametrize("part_bytes", [4 << 20, 16])
def test_any_two_layouts_differ_exactly_where_their_values_do(
    tmp_path: Path, part_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(compare, "PART_BYTES", part_bytes)
    ours = torch.randn(7, 6, generator=torch.Generator().manual_seed(3))
    theirs = ours.clone()
    theirs[2, 5] += 0.5
    theirs[6, 0] = theirs[6, 0] * 1.25
    for name, spec in SPECS.items():
        save({"x": ours}, tmp_path / f"a-{name}", spec)
        save({"x": theirs}, tmp_path / f"b-{name}", spec)
    apart = (ours.double() - theirs.double()).abs()
    wanted = Difference(2, float(apart.max()), float((apart / theirs.double().abs()).max()))
    for one in SPECS:
        for other in SPECS:
            a, same, b = (stored(tmp_path / n, "x") for n in (f"a-{one}", f"a-{other}", f"b-{other}"))
            seen: list[int] = []
            assert compare_stored(a, same, on_bytes=seen.append) == Difference()
            assert sum(seen) == ours.nbytes, "every element is compared once"
            assert compare_stored(a, b) == wanted
            assert compare_stored(a, b, Tolerance(atol=float(apart.max()))) == Difference()


NAN, INF = math.nan, math.inf
PAIRS: list[tuple[list[Any], list[Any], torch.dtype, Difference]] = [
    ([NAN, INF, 1.0], [NAN, INF, 1.0], torch.float32, Difference()),
    ([0.0, NAN, INF], [-0.0, 2.0, -INF], torch.float32, Difference(3, INF, INF)),
    ([0.0], [-0.0], torch.float64, Difference(1, 0.0, 0.0)),
    ([2**63 - 1, -5], [-(2**63), -4], torch.int64, Difference(2, 2.0**64, 2.0)),
    ([3 + 4j, 1j], [0j, 1j], torch.complex128, Difference(1, 5.0, INF)),
    ([True, False], [False, False], torch.bool, Difference(1, 1.0, INF)),
    ([1.5, 2.0], [1.5, 3.0], torch.float8_e4m3fn, Difference(1, 1.0, 1 / 3)),
    ([256.0, 1.0], [255.0, 1.0], torch.bfloat16, Difference(1, 1.0, 1 / 255)),
]


@pytest.mark.parametrize(
    "ours, theirs, dtype, wanted", PAIRS, ids=[str(p[2]).split(".")[1] + str(p[3].count) for p in PAIRS]
)
def test_elements_of_every_kind(tmp_path: Path, ours: Any, theirs: Any, dtype: torch.dtype, wanted: Difference) -> None:
    for name, values in (("a", ours), ("b", theirs)):
        save(
            {"x": torch.tensor(values).to(dtype) if dtype.itemsize < 4 else torch.tensor(values, dtype=dtype)},
            tmp_path / name,
        )
    assert compare_stored(stored(tmp_path / "a", "x"), stored(tmp_path / "b", "x")) == wanted


def test_nans_of_different_bits_are_equal(tmp_path: Path) -> None:
    for name, bits in (("a", 0x7FC00000), ("b", 0x7FC00001)):
        save({"x": torch.tensor([bits], dtype=torch.int32).view(torch.float32)}, tmp_path / name)
    assert run(tmp_path / "a", tmp_path / "b").exit_code == 0


def state() -> dict[str, Any]:
    w = torch.arange(42.0).reshape(7, 6)
    return {"w": w, "b": torch.ones(5), "scalar": torch.tensor(3), "none": torch.ones(0, 4), "step": 7, "loss": NAN}


def test_the_same_in_another_layout_and_world(tmp_path: Path) -> None:
    a, b = save(state(), tmp_path / "a", SPECS["rows"]), save(state(), tmp_path / "b", SPECS["grid"])
    result = run(a, b)
    assert (result.exit_code, result.stderr) == (0, "")
    lines = result.stdout.splitlines()
    assert lines[0].startswith("w: layout as chunk(0) over 0-2 in A, as grid(2+5, 1+3+2) over")
    assert lines[1] == "the same: 4 tensors, 2 values; 1 of other layout (--layouts counts them)"
    data = data_of(a, b, "--layouts", status=1)
    assert [entry["name"] for entry in data["layouts"]] == ["w"] and data["different"] == []
    assert run(a, b, "--layouts").stdout.splitlines()[-1] == "different: 1 layout"


def test_everything_that_differs_is_told(tmp_path: Path) -> None:
    a = save({**state(), "extra": torch.ones(2), "tag": "x"}, tmp_path / "a", SPECS["rows"])
    other = state()
    other["w"][3, 3] += 1
    other |= {"b": torch.ones(5, dtype=torch.float64), "scalar": torch.ones(1, dtype=torch.int64), "step": 8}
    b = save({**other, "more": torch.ones(1)}, tmp_path / "b", SPECS["rows"])
    result = run(a, b)
    assert result.exit_code == 1
    assert result.stdout.splitlines() == [
        "only in A: tensor extra",
        "only in B: tensor more",
        "w: 1 of 42 elements differ, by at most 1, relative 0.0454545",
        "b: f32 in A, f64 in B",
        "scalar: shape () in A, (1,) in B",
        "only in A: tag = 'x'",
        "step: 7 in A, 8 in B",
        "different: 3 of 4 tensors in both, 1 tensor only in A, 1 tensor only in B, 2 values",
    ]
    data = data_of(a, b, status=1)
    assert set(data) == {"a", "b", "same", "compared", "only_a", "only_b", "different", "opaque", "layouts", "values"}
    assert (data["same"], data["compared"], data["only_a"], data["only_b"]) == (False, 4, ["extra"], ["more"])
    assert data["different"][0] == {
        "name": "w",
        "dtype": {"a": "f32", "b": "f32"},
        "shape": {"a": [7, 6], "b": [7, 6]},
        "elements": 1,
        "max_abs": 1.0,
        "max_rel": 1 / 22,
    }
    assert [t["elements"] for t in data["different"]] == [1, 0, None]
    assert data["values"]["different"] == [{"name": "step", "a": 7, "b": 8}]
    assert run(a, b, "--limit", "2").stdout.splitlines()[2] == "and 5 more; --limit 0 shows all"


def test_only_the_names_asked_for(tmp_path: Path) -> None:
    other = state()
    other["w"] += 1
    a, b = save(state(), tmp_path / "a"), save(other, tmp_path / "b")
    assert run(a, b).exit_code == 1
    assert run(a, b, "--name", "b", "--name", "s*").stdout == "the same: 2 tensors, 1 value\n"
    none = run(a, b, "--name", "decoder.*")
    assert (none.exit_code, none.stdout) == (2, "")
    assert none.stderr.endswith("has anything called decoder.*\n")


def test_tolerances_hold_for_tensors_and_values(tmp_path: Path) -> None:
    a = save({"x": torch.tensor([100.0, 0.0]), "lr": 1.0}, tmp_path / "a")
    b = save({"x": torch.tensor([101.0, 0.5]), "lr": 1.01}, tmp_path / "b")
    assert [run(a, b, *more).exit_code for more in ((), ("--rtol", "0.02"), ("--atol", "0.5"))] == [1, 1, 1]
    assert run(a, b, "--atol", "0.5", "--rtol", "0.01").exit_code == 0
    assert run(a, b, "--atol", "-1").exit_code == 2


def test_a_hugging_face_folder_has_tensors_only(tmp_path: Path) -> None:
    a = save(state(), tmp_path / "a", SPECS["mesh"])
    tensors = {name: value for name, value in state().items() if isinstance(value, Tensor)}
    shardwise.save_hf(tensors, tmp_path / "hf", max_file_bytes=100)
    result = run(a, tmp_path / "hf")
    assert result.exit_code == 0, result.output
    assert result.stdout == "the same: 4 tensors; values are not compared: one of the formats has none\n"
    tensors["b"][0] = 2
    shardwise.save_hf(tensors, tmp_path / "hf")
    assert data_of(tmp_path / "hf", a, status=1)["different"][0]["name"] == "b"


def test_damaged_bytes_are_an_error_and_no_difference(tmp_path: Path) -> None:
    a, b = save(state(), tmp_path / "a"), save(state(), tmp_path / "b")
    file = next(b.glob("*.safetensors"))
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(bytes(data))
    result = run(a, b)
    assert (result.exit_code, result.stdout) == (2, "")
    assert "are damaged: their checksum differs" in result.stderr and str(file) in result.stderr
    assert run(a, tmp_path / "c").stderr.startswith(f"error: {tmp_path / 'c'}: no such file or folder; expected")
