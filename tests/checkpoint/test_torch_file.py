"""Are files of torch.save read as torch reads them, a part at a time, and are forged ones no more than an error?"""

from __future__ import annotations

import io
import json
import os
import pickle
import random
import resource
import time
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint import reshard
from shardwise.checkpoint.files import MappedFile
from shardwise.checkpoint.formats.torch_file import PickleCall, PickleName, PickleReference, write_pickle
from shardwise.cli.main import app


def training_state() -> dict[str, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 6), nn.LayerNorm(6), nn.Linear(6, 4))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    base = torch.arange(60.0).reshape(6, 10)
    return {
        "model": model.state_dict(),
        "optim": optimizer.state_dict(),
        "views": {
            "t": base.t(),
            "slice": base[1:5, 2:9:3],
            "row": base[3],
            "whole": base,
            "permuted": base.reshape(3, 4, 5).permute(2, 0, 1),
        },
        "dtypes": [
            torch.ones(3).to(d) for d in (torch.bfloat16, torch.float8_e4m3fn, torch.int8, torch.bool, torch.complex64)
        ],
        "tied": (base, nn.Parameter(torch.ones(2))),
        "scalar": torch.tensor(2.5),
        "empty": torch.zeros(0, 3),
        "scheduler": torch.optim.lr_scheduler.MultiStepLR(optimizer, [3, 5, 5]).state_dict(),
        "step": 12,
        "loss": float("inf"),
        "name": "run",
        "size": torch.Size([2, 3]),
        "device": torch.device("cpu"),
    }


def leaves(node: Any, path: str = "") -> dict[str, Any]:
    if isinstance(node, dict):
        pairs = list(node.items())
    elif isinstance(node, list | tuple):
        pairs = list(enumerate(node))
    else:
        return {path: node}
    return {
        name: leaf
        for key, child in pairs
        for name, leaf in leaves(child, f"{path}.{key}" if path else str(key)).items()
    }


@pytest.fixture
def file(tmp_path: Path) -> Path:
    torch.save(training_state(), tmp_path / "run.pt")
    return tmp_path / "run.pt"


def test_every_tensor_and_value_is_what_torch_loads(file: Path) -> None:
    expected = leaves(torch.load(file, weights_only=True))
    device = expected.pop("device")
    assert device == torch.device("cpu")
    with shardwise.open(file) as opened:
        opened.verify()
        assert sorted(opened.names()) == sorted(name for name, leaf in expected.items() if isinstance(leaf, Tensor))
        assert opened.values() == {name: leaf for name, leaf in expected.items() if not isinstance(leaf, Tensor)}
        for name in opened:
            found, whole = opened[name].read(), expected[name].detach().cpu()
            assert found.dtype == whole.dtype and found.shape == whole.shape, name
            assert torch.equal(found.reshape(-1).view(torch.uint8), whole.contiguous().reshape(-1).view(torch.uint8)), (
                name
            )
        assert torch.equal(opened["views.permuted"][1:4, 2], expected["views.permuted"][1:4, 2].cpu())


def load_state(comm: Comm, path: Path) -> list[Tensor]:
    spec = ChunkSpec(0, comm.world_size)
    state = {"model": {name: shardwise.zeros(spec, *t.shape) for name, t in training_state()["model"].items()}}
    shardwise.load(state, path, strict=False)
    return [tensor.full() for tensor in state["model"].values()]


def test_it_is_loaded_by_ranks_and_resharded(file: Path, tmp_path: Path) -> None:
    expected = training_state()["model"]
    for found in run_local(load_state, 2, file):
        for whole, tensor in zip(found, expected.values(), strict=True):
            assert torch.equal(whole, tensor)
    reshard(file, tmp_path / "b", layout="S(0)", ranks=2, workers=2)
    assert CliRunner().invoke(app, ["diff", str(file), str(tmp_path / "b")]).exit_code == 0
    report = reshard(file, tmp_path / "hf", format="hf", only=["model.*"])
    assert report.tensors == 6 and sorted(shardwise.open(tmp_path / "hf")) == sorted(expected)
    shown = CliRunner().invoke(app, ["inspect", str(file), "--verify"])
    assert shown.exit_code == 0 and "torch.save file" in shown.stdout


def test_folders_of_one_and_of_several_files(tmp_path: Path) -> None:
    one, several = tmp_path / "one", tmp_path / "several"
    one.mkdir()
    several.mkdir()
    parts = [{"a": torch.ones(2), "b": torch.arange(3)}, {"c": torch.zeros(2, 2)}]
    torch.save({**parts[0], **parts[1]}, one / "pytorch_model.bin")
    weight_map = {}
    for number, part in enumerate(parts):
        name = f"pytorch_model-{number + 1:05d}-of-00002.bin"
        torch.save(part, several / name)
        weight_map |= dict.fromkeys(part, name)
    index = several / "pytorch_model.bin.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    for folder in (one, several):
        with shardwise.open(folder) as opened:
            assert sorted(opened) == ["a", "b", "c"] and torch.equal(opened["b"].read(), torch.arange(3).cpu())
    index.write_text(json.dumps({"weight_map": {**weight_map, "c": weight_map["a"]}}))
    with pytest.raises(CheckpointError, match="tensor 'c' is not in this file, where the index says it is"):
        shardwise.open(several)
    index.write_text(json.dumps({"weight_map": {"c": "../one/pytorch_model.bin"}}))
    with pytest.raises(CheckpointError, match="is not a file name in this folder; nothing is read"):
        shardwise.open(several)


def test_only_the_storages_that_are_needed_are_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.save({"large": torch.ones(1 << 16), "small": torch.ones(4)}, tmp_path / "a.pt")
    read = 0
    plain = MappedFile.read

    def count(self: MappedFile, low: int, high: int) -> npt.NDArray[np.uint8]:
        nonlocal read
        read += high - low
        return plain(self, low, high)

    monkeypatch.setattr(MappedFile, "read", count)
    with shardwise.open(tmp_path / "a.pt") as opened:
        assert opened["small"][1:3].tolist() == [1.0, 1.0]
    assert 0 < read < 1 << 13


def test_files_without_checksums_are_read(tmp_path: Path) -> None:
    before = torch.serialization.get_crc32_options()
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(before)
    assert shardwise.open(tmp_path / "a.pt")["w"].read().tolist() == [1.0] * 3


def test_a_damaged_storage_is_found(file: Path) -> None:
    data = bytearray(file.read_bytes())
    place = data.index(torch.arange(60.0).numpy().tobytes())
    data[place + 9] ^= 1
    file.write_bytes(data)
    with shardwise.open(file) as opened:
        assert opened["scalar"].read() == 2.5
        with pytest.raises(CheckpointError, match=r"tensor 'views\.t': .* are damaged: their CRC-32 differs"):
            opened["views.t"].read()


class Attack:
    def __init__(self, place: Path) -> None:
        self.place = place

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.place}",)


@pytest.mark.parametrize("wrap", [lambda a: {"w": torch.ones(2), "a": a}, lambda a: a, lambda a: [[a]]])
def test_nothing_is_called(tmp_path: Path, wrap: Any) -> None:
    torch.save(wrap(Attack(tmp_path / "done")), tmp_path / "a.pt")
    with pytest.raises(CheckpointError, match=r"a\.pt: it names posix\.system, which is not .*; nothing is called"):
        shardwise.open(tmp_path / "a.pt")
    assert not (tmp_path / "done").exists()


def archive(pickled: bytes, storages: dict[str, bytes] | None = None, compressed: bool = False) -> bytes:
    buffer = io.BytesIO()
    with zipfile.ZipFile(buffer, "w", zipfile.ZIP_DEFLATED if compressed else zipfile.ZIP_STORED) as written:
        written.writestr("archive/data.pkl", pickled)
        for key, data in (storages or {}).items():
            written.writestr(f"archive/data/{key}", data)
    return buffer.getvalue()


def tensor(
    key: Any = "0", offset: Any = 0, sizes: Any = (4,), strides: Any = (1,), kind: str = "FloatStorage"
) -> PickleCall:
    held = PickleReference(("storage", PickleName("torch", kind), key, "cpu", 4))
    hooks = PickleCall(PickleName("collections", "OrderedDict"), ())
    return PickleCall(PickleName("torch._utils", "_rebuild_tensor_v2"), (held, offset, sizes, strides, False, hooks))


def repeated(depth: int) -> bytes:
    value: Any = 1
    for _ in range(depth):
        value = [value] * 10
    return pickle.dumps(value, protocol=2)


DATA = {"0": bytes(16)}
FORGED: dict[str, tuple[bytes, str]] = {
    "past the end": (archive(write_pickle({"w": tensor(offset=1)}), DATA), "ends at byte 20 of a storage of 16 bytes"),
    "huge": (archive(write_pickle({"w": tensor(sizes=(1 << 60,))}), DATA), "of a storage of 16 bytes"),
    "expanded": (archive(write_pickle({"w": tensor(sizes=(9, 4), strides=(0, 1))}), DATA), "share bytes"),
    "negative": (archive(write_pickle({"w": tensor(offset=-1)}), DATA), "sizes and strides that are none"),
    "fewer strides": (archive(write_pickle({"w": tensor(sizes=(2, 2))}), DATA), "its strides are"),
    "no storage": (archive(write_pickle({"w": tensor(key="../1")}), DATA), "its storage is missing"),
    "a key that is no text": (archive(write_pickle({"w": tensor(key=7)}), DATA), "a storage without a name"),
    "another storage": (archive(write_pickle({"w": tensor(kind="Tensor")}), DATA), "unknown dtype 'Tensor'"),
    "wide": (archive(repeated(9)), "grows when it is written out"),
    "cycle": (archive(b"\x80\x02]q\x00h\x00a."), "nested too deeply"),
    "deep": (archive(b"\x80\x02" + b"]" * 5000 + b"N" + b"a" * 5000 + b"."), "nested too deeply"),
    "two of one name": (
        archive(write_pickle({"a.b": tensor(), "a": {"b": tensor()}}), DATA),
        "two tensors are called 'a.b'",
    ),
    "compressed": (archive(write_pickle({"w": tensor()}), DATA, compressed=True), "not an archive of torch.save"),
    "an archive of something else": (archive(b"").replace(b"data.pkl", b"code.pkl"), "an archive without data.pkl"),
    "the start of an archive": (b"PK\x03\x04", "not an archive of torch.save"),
    "old": (b"\x80\x02\x8a\nl\xfc\x9cF\xf9 j\xa8P\x19." + bytes(50), "a file of torch before 1.6"),
    "something else": (b"hello", "not a file of torch.save"),
    "empty": (b"", "not a file of torch.save"),
}


@pytest.mark.parametrize(("data", "message"), FORGED.values(), ids=list(FORGED))
def test_forged_files_are_refused(tmp_path: Path, data: bytes, message: str) -> None:
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=message):
        shardwise.open(tmp_path / "a.pt")


def test_cut_and_changed_files_give_errors_in_little_time_and_memory(file: Path, tmp_path: Path) -> None:
    whole, chance = file.read_bytes(), random.Random(3)
    before, started = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, time.process_time()
    refused = 0
    for number in range(400):
        data = bytearray(whole)
        if number % 4 == 0:
            data = data[: chance.randrange(len(data))]
        else:
            for _ in range(chance.randrange(1, 6)):
                data[chance.randrange(len(data)) if number % 4 == 1 else chance.randrange(2500)] = chance.randrange(256)
        (tmp_path / "b.pt").write_bytes(data)
        try:
            with shardwise.open(tmp_path / "b.pt") as opened:
                opened.verify()
                for name in opened:
                    opened[name].read()
        except CheckpointError:
            refused += 1
    assert refused > 200
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 64 << 10 and time.process_time() - started < 60


def test_a_directory_that_claims_many_records_takes_no_memory(tmp_path: Path) -> None:
    data = bytearray(archive(write_pickle({"w": tensor()}), DATA))
    end = data.rindex(b"PK\x05\x06")
    data[end + 8 : end + 12] = b"\xff\xff\xff\xff"
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"not an archive of torch.save"):
        shardwise.open(tmp_path / "a.pt")


def test_nothing_is_written_in_this_format(tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match="unknown format 'torch'; known: shardwise, dcp, hf"):
        shardwise.save({"w": torch.ones(2)}, tmp_path / "a", format="torch")
