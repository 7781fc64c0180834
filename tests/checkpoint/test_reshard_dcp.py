"""Are folders of torch.distributed.checkpoint read and written as torch does it, without trusting what is in them?"""

from __future__ import annotations

import io
import os
import pickle
import random
import shutil
import warnings
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor

import shardwise
from shardwise import ChunkSpec, Comm, run_local
from shardwise.checkpoint import CheckpointError, reshard
from shardwise.checkpoint import reshard_copy as planning
from shardwise.checkpoint.formats.torch_file import (
    DATA,
    PickleCall,
    PickleName,
    PicklePairs,
    read_archive,
    write_archive,
    write_pickle,
)
from shardwise.checkpoint.index import combine_crc

DTYPES = (torch.float32, torch.bfloat16, torch.int64, torch.bool, torch.uint16, torch.float8_e5m2, torch.complex64)


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    """torch warns that there is no process group."""
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        yield


def values(dtype: torch.dtype) -> Tensor:
    numbers = torch.arange(30).reshape(6, 5)
    return (numbers % 3 == 0) if dtype == torch.bool else numbers.float().to(dtype)


def state() -> dict[str, Any]:
    model = {str(d).removeprefix("torch."): values(d) for d in DTYPES}
    model["transposed"] = torch.arange(12.0).reshape(3, 4).t()
    model["channels_last"] = torch.arange(120).reshape(2, 3, 4, 5).contiguous(memory_format=torch.channels_last)
    model["scalar"], model["empty"] = torch.tensor(7, dtype=torch.int8), torch.zeros(0, 5)
    rest = {"step": 3, "betas": (0.9, float("inf")), "names": ["a", None], "big": 1 << 70, "flag": True, "text": "ü\n"}
    return {"model": model, "listed": [torch.ones(2), 5], **rest}


def blank(node: Any) -> Any:
    if isinstance(node, Tensor):
        return torch.zeros(node.shape, dtype=node.dtype)
    if isinstance(node, dict):
        return {key: blank(child) for key, child in node.items()}
    return [blank(child) for child in node] if isinstance(node, list) else None


def same(one: Any, other: Any) -> bool:
    if isinstance(one, Tensor):
        alike = one.dtype == other.dtype and one.shape == other.shape
        return alike and torch.equal(*(t.cpu().contiguous().reshape(-1).view(torch.uint8) for t in (one, other)))
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(same, one, other))
    return type(one) is type(other) and bool(one == other)


@pytest.fixture(scope="module")
def torchs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that torch itself wrote."""
    path = tmp_path_factory.mktemp("dcp") / "torchs"
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", module="torch")
        dcp.save(state(), checkpoint_id=path)
    return path


def loaded_by_torch(path: Path) -> Any:
    into = blank(state())
    dcp.load(into, checkpoint_id=path)
    return into


def test_what_torch_wrote_is_opened(torchs: Path) -> None:
    with shardwise.open(torchs) as checkpoint:
        checkpoint.verify()
        assert same(checkpoint.state(), state())
        assert checkpoint["model.transposed"][1:3, ::2].tolist() == [[1.0, 9.0], [2.0, 10.0]]
        assert checkpoint.values()["betas.1"] == float("inf")


def test_what_torch_wrote_is_loaded(torchs: Path) -> None:
    def body(comm: Comm) -> None:
        into = {
            "model": {"float32": shardwise.zeros(ChunkSpec(1, 2), 6, 5), "transposed": torch.zeros(4, 3)},
            "step": 0,
        }
        shardwise.load(into, torchs, strict=False)
        assert torch.equal(into["model"]["float32"].full(), values(torch.float32))  # type: ignore[index]
        assert torch.equal(into["model"]["transposed"], state()["model"]["transposed"])  # type: ignore[index]
        assert into["step"] == 3

    run_local(body, 2)


@pytest.mark.parametrize("layout", ["S(0)", "S(1)", "R"])
@pytest.mark.parametrize("ranks", [1, 3])
def test_torch_loads_what_is_resharded(torchs: Path, tmp_path: Path, layout: str, ranks: int) -> None:
    report = reshard(torchs, tmp_path / "b", layout=layout, ranks=ranks, format="dcp")
    assert len(report.ranks) == ranks and report.left_out == ()
    assert same(loaded_by_torch(tmp_path / "b"), state())
    with shardwise.open(tmp_path / "b") as checkpoint:
        checkpoint.verify()
        assert same(checkpoint.state(), state())


def test_every_format_to_every_other(torchs: Path, tmp_path: Path) -> None:
    model = {f"model.{name}": t for name, t in state()["model"].items()} | {"listed.0": torch.ones(2)}
    reshard(torchs, tmp_path / "shardwise", layout="S(0)", ranks=2)
    reshard(torchs, tmp_path / "hf", format="hf")
    for source in (torchs, tmp_path / "shardwise", tmp_path / "hf"):
        for target in ("shardwise", "dcp", "hf"):
            path = tmp_path / f"{source.name} to {target}"
            cut = {} if target == "hf" else {"layout": "S(-1)", "ranks": 2}
            reshard(source, path, format=target, **cut)  # type: ignore[arg-type]
            with shardwise.open(path) as checkpoint:
                assert same({name: checkpoint[name].read() for name in checkpoint}, model), (source.name, target)
                whole = source.name != "hf" and target != "hf"
                assert not whole or same(checkpoint.state(), state())


def test_large_items_are_written_by_several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, torchs: Path) -> None:
    monkeypatch.setattr(planning, "SEGMENT_BYTES", 16)
    reshard(torchs, tmp_path / "b", layout="S(0)", ranks=2, format="dcp")
    assert same(loaded_by_torch(tmp_path / "b"), state())
    shardwise.open(tmp_path / "b").verify()
    monkeypatch.undo()
    reshard(torchs, tmp_path / "c", layout="S(0)", ranks=2, format="dcp", workers=2)
    for file in (tmp_path / "b").iterdir():
        assert file.read_bytes() == (tmp_path / "c" / file.name).read_bytes()


def test_entries_that_are_no_plain_values_are_opaque(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "odd": slice(1, 2), "step": 1}, checkpoint_id=tmp_path / "a")
    assert shardwise.open(tmp_path / "a").values() == {"step": 1}
    assert reshard(tmp_path / "a", tmp_path / "b").left_out == ("odd",)
    assert shardwise.open(tmp_path / "b").values() == {"step": 1}


def test_a_state_that_is_no_dict_is_refused(tmp_path: Path) -> None:
    shardwise.save([torch.ones(2)], tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"torch.distributed.checkpoint stores dicts"):
        reshard(tmp_path / "a", tmp_path / "b", format="dcp")
    with pytest.raises(CheckpointError, match="has one file for each rank; omit the limit"):
        reshard(tmp_path / "a", tmp_path / "b", format="dcp", max_file_bytes=100)


def test_a_flipped_bit_is_found_by_its_crc(torchs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(torchs, tmp_path / "a")
    file = path / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    data[data.index(values(torch.float32).numpy().tobytes()) + 5] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: tensor 'model.float32': .* CRC-32 differs"):
        shardwise.open(path).verify()
    with pytest.raises(CheckpointError, match="CRC-32 differs"):
        reshard(path, tmp_path / "b", layout="S(0)", ranks=2)


def test_a_pickle_that_runs_something_is_refused(torchs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(torchs, tmp_path / "a")
    evil = write_pickle(PickleCall(PickleName("os", "mkdir"), (str(tmp_path / "made"),)))
    (path / ".metadata").write_bytes(evil)
    with pytest.raises(CheckpointError, match=r"\.metadata: it names os.mkdir, which is not a metadata class of torch"):
        shardwise.open(path)
    assert not (tmp_path / "made").exists()
    pickle.loads(evil)
    assert (tmp_path / "made").exists(), "the pickle would have done it"


def test_names_of_files_stay_in_the_folder(torchs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(torchs, tmp_path / "a")
    metadata = (path / ".metadata").read_bytes()
    assert b"\x0c__0_0.distcp" in metadata
    (path / ".metadata").write_bytes(metadata.replace(b"\x0c__0_0.distcp", b"\x0c../.././../e"))
    with pytest.raises(CheckpointError, match=r"is not a file name in this folder"):
        shardwise.open(path)


def test_broken_folders_raise_and_nothing_else(torchs: Path, tmp_path: Path) -> None:
    path = shutil.copytree(torchs, tmp_path / "a")
    whole = {name: (path / name).read_bytes() for name in (".metadata", "__0_0.distcp")}
    chance = random.Random(0)
    refused = 0
    for number in range(60):
        name = (".metadata", "__0_0.distcp")[number % 2]
        data = bytearray(whole[name])
        for _ in range(chance.randint(1, 3)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        if number % 10 == 0:
            del data[chance.randrange(len(data)) :]
        (path / name).write_bytes(data)
        try:
            checkpoint = shardwise.open(path)
            checkpoint.verify()
            for tensor in checkpoint:
                checkpoint[tensor].read()
        except CheckpointError as error:
            refused += 1
            assert str(tmp_path) in str(error) or "is stored with the extension" in str(error)
        (path / name).write_bytes(whole[name])
    assert refused > 15
    assert same(shardwise.open(path).state(), state())


def test_archives_are_those_of_others(tmp_path: Path) -> None:
    buffer = io.BytesIO()
    torch.save(torch.arange(5.0), buffer)
    records = read_archive(memoryview(buffer.getvalue()), "torch's")
    data = buffer.getvalue()[records[DATA].begin :][: records[DATA].size]
    assert data == torch.arange(5.0).numpy().tobytes()
    before, after = write_archive({"a": b"one", "b/c": b""}, 7, 0)
    found = zipfile.ZipFile(io.BytesIO(before + b"1234567" + after))
    assert {n: found.getinfo(n).file_size for n in found.namelist()} == {
        "archive/a": 3,
        "archive/b/c": 0,
        "archive/data/0": 7,
    }
    assert found.read("archive/a") == b"one"
    for broken in (b"", b"PK", before, before + after[:-1], bytes(200)):
        with pytest.raises(CheckpointError, match=r"an item: not an archive of torch\.save"):
            read_archive(memoryview(broken), "an item")


def test_checksums_of_parts_join() -> None:
    import zlib

    chance = random.Random(1)
    for length in (0, 1, 7, 64, 1000, 70_000):
        one, other = chance.randbytes(11), chance.randbytes(length)
        assert combine_crc(zlib.crc32(one), zlib.crc32(other), length) == zlib.crc32(one + other)


def test_pickles_are_those_of_others() -> None:
    for value in (
        0,
        -1,
        255,
        1 << 31,
        -(1 << 31),
        -(1 << 31) - 1,
        1 << 2100,
        0.5,
        "",
        "ü" * 300,
        [],
        {},
        (),
        None,
        True,
    ):
        assert pickle.loads(write_pickle([value, (value,), {"k": value}])) == [value, (value,), {"k": value}]
    assert pickle.loads(write_pickle(PicklePairs([((1, 2), "a"), ("b", [3])]))) == {(1, 2): "a", "b": [3]}
    assert (
        os.path.basename(pickle.loads(write_pickle(PickleCall(PickleName("pathlib", "PurePosixPath"), ("a", "b")))))
        == "b"
    )
