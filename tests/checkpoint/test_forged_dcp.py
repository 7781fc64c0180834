"""Does a forged folder of torch.distributed.checkpoint get no further than an error, whatever its pickles say?"""

from __future__ import annotations

import os
import pickle
import random
import resource
import shutil
import struct
import time
import zlib
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp

import shardwise
from shardwise import CheckpointError
from shardwise.checkpoint.formats.torch_file import (
    PICKLE,
    PickleCall,
    PickleName,
    read_archive,
    read_pickle,
    write_archive,
    write_pickle,
)
from shardwise.geometry import find_dtype

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is")


def body(value: Any) -> bytes:
    """The pickle of a value, without its first and last code."""
    return write_pickle(value)[2:-1]


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


@pytest.mark.parametrize("state", [{"itemsize": 1}, (None, {"itemsize": 1}), ["f32", "float32", 1]])
@pytest.mark.parametrize(
    "name",
    [PickleName("torch", "float32"), PickleName("torch._utils", "_rebuild_tensor_v2"), PickleName("torch", "Size")],
)
def test_a_pickle_changes_nothing_of_the_library(name: PickleName, state: Any) -> None:
    with pytest.raises(CheckpointError, match="a file: damaged: ValueError: unexpected state for a"):
        read_pickle(b"\x80\x02" + body(name) + body(state) + b"b.", "a file")
    assert find_dtype("float32").itemsize == 4


def test_a_number_in_a_pickle_takes_no_memory() -> None:
    before = peak_bytes()
    for code in (b"r\xff\xff\xff\x7f", b"p2147483647\n"):
        assert read_pickle(b"\x80\x02N" + code + b".", "a file") is None
    for code in (b"B\xff\xff\xff\x7f", b"\x8e" + (1 << 40).to_bytes(8, "little"), b"\x8b\xff\xff\xff\x7f"):
        with pytest.raises(CheckpointError, match="damaged"):
            read_pickle(b"\x80\x05" + code + b".", "a file")
    assert peak_bytes() - before < 64 << 20


def test_calls_make_nothing_longer_than_a_shape() -> None:
    long = PickleCall(PickleName("torch", "Size"), ([0] * 65,))
    with pytest.raises(CheckpointError, match="damaged: ValueError: no shape"):
        read_pickle(write_pickle(long), "a file")
    parts = ("x" * 1000,) * 1000
    assert not isinstance(
        read_pickle(write_pickle(PickleCall(PickleName("pathlib", "PosixPath"), parts)), "a file"), str
    )


def repeated(depth: int) -> bytes:
    """The pickle of a list that is short there, and has 10 ** depth entries when it is written out."""
    value: Any = 1
    for _ in range(depth):
        value = [value] * 10
    return pickle.dumps(value, protocol=2)


GROWING = {
    "wide": repeated(9),
    "cycle": b"\x80\x02]q\x00h\x00a.",
    "deep": b"\x80\x02" + b"]" * 5000 + b"N" + b"a" * 5000 + b".",
}


@pytest.mark.parametrize("pickled", GROWING.values(), ids=list(GROWING))
def test_values_that_grow_when_they_are_written_out_are_opaque(tmp_path: Path, pickled: bytes) -> None:
    dcp.save({"w": torch.ones(2), "value": 1}, checkpoint_id=tmp_path / "a")
    replace_value(tmp_path / "a", pickled)
    with shardwise.open(tmp_path / "a") as checkpoint:
        assert checkpoint.values() == {} and checkpoint.names() == ["w"]


def replace_value(folder: Path, pickled: bytes) -> None:
    """Put another archive behind the file, and let the metadata point to it."""
    archive, _ = write_archive({PICKLE: pickled}, None)
    file = folder / "__0_0.distcp"
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    key = next(k for k in metadata.storage_data if k.fqn == "value")
    place = metadata.storage_data[key]
    place.offset, place.length = file.stat().st_size, len(archive)
    with file.open("ab") as opened:
        opened.write(archive)
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def test_tensors_that_share_bytes_are_refused_before_they_are_taken_apart(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(1000, 1000).t()}, checkpoint_id=tmp_path / "a")
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    entry = metadata.state_dict_metadata["w"]
    (key, place), *_ = metadata.storage_data.items()
    for number in range(40):
        name = f"w{number}"
        metadata.state_dict_metadata[name] = entry
        metadata.storage_data[type(key)(name, key.offset, key.index)] = place
    (tmp_path / "a" / ".metadata").write_bytes(pickle.dumps(metadata))
    with pytest.raises(CheckpointError, match="tensor 'w0': its 4000000 bytes overlap others"):
        shardwise.open(tmp_path / "a")


def test_a_part_that_repeats_an_element_is_refused(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "a")
    file = tmp_path / "a" / "__0_0.distcp"
    data = file.read_bytes()
    record = read_archive(memoryview(data), "a file")[PICKLE]
    pickled = data[record.begin : record.begin + record.size]
    assert b"K\x01\x85" in pickled, "the strides (1,)"
    forged = pickled.replace(b"K\x01\x85", b"K\x00\x85")
    sums = [zlib.crc32(text).to_bytes(4, "little") for text in (pickled, forged)]
    file.write_bytes(data.replace(pickled, forged))
    with pytest.raises(CheckpointError, match=r"tensor 'w': a record of .* bytes is damaged: its CRC-32 differs"):
        shardwise.open(tmp_path / "a")
    file.write_bytes(data.replace(pickled, forged).replace(*sums))
    with pytest.raises(CheckpointError, match="tensors 'w' and 'w' overlap"):
        shardwise.open(tmp_path / "a")


def test_a_pipe_is_no_file(tmp_path: Path) -> None:
    dcp.save({"w": torch.arange(4.0)}, checkpoint_id=tmp_path / "a")
    shardwise.save({"w": torch.arange(4.0)}, tmp_path / "b")
    for file in (tmp_path / "a" / "__0_0.distcp", tmp_path / "b" / "rank00000-00000.safetensors"):
        file.unlink()
        os.mkfifo(file)
    with pytest.raises(CheckpointError, match=r"__0_0.distcp: cannot be read: Not an ordinary file"):
        shardwise.open(tmp_path / "a")
    with pytest.raises(CheckpointError, match=r"rank00000-00000.safetensors: cannot be read: Not an ordinary file"):
        shardwise.load({"w": torch.zeros(4)}, tmp_path / "b")
    os.mkfifo(tmp_path / "c.safetensors")
    with pytest.raises(CheckpointError, match=r"c.safetensors: "):
        shardwise.open(tmp_path / "c.safetensors")


def test_random_changes_of_the_metadata(tmp_path: Path) -> None:
    """Whatever is changed in what a pickle says, opening gives an error of ours or a checkpoint."""
    dcp.save(
        {"w": torch.arange(6.0).reshape(2, 3), "t": torch.ones(2, 3).t(), "n": [1, 2]}, checkpoint_id=tmp_path / "a"
    )
    whole = (tmp_path / "a" / ".metadata").read_bytes()
    chance = random.Random(1)
    refused = 0
    for number in range(150):
        path = tmp_path / "a" / ".metadata"
        data = bytearray(whole)
        for _ in range(chance.randint(1, 4)):
            at = chance.randrange(2, len(data))
            data[at : at + chance.randint(0, 2)] = chance.choice(
                [b"", b"N", b"0", b"]", b"}", b")", b"b", b"R", b"K\xff"]
            )
        path.write_bytes(data)
        try:
            with shardwise.open(tmp_path / "a") as checkpoint:
                checkpoint.state()
        except CheckpointError:
            refused += 1
        assert number < 20 or refused
    shutil.rmtree(tmp_path / "a")


def doubled(depth: int) -> bytes:
    """A tuple of two tuples of two tuples ...: short as a pickle, and it takes for ever to hash or print."""
    return b"\x80\x02)" + b"q\x00h\x00\x86" * depth


SMALL_BUT_LONG = {
    "a byte array": b"\x80\x05\x96" + (1 << 31).to_bytes(8, "little") + b".",
    "a doubled key": b"\x80\x02}" + doubled(60)[2:] + b"Ns.",
    "a doubled name": b"\x80\x04" + doubled(60)[2:] + b"\x8c\x01a\x93.",
    "a doubled call": doubled(60) + b")R.",
    "a doubled shape": b"\x80\x02ctorch\nSize\n(" + doubled(60)[2:] + b"ltR.",
    "a frozen set": b"\x80\x04(K\x01\x91.",
    "a doubled path": b"\x80\x02cpathlib\nPath\n" + doubled(60)[2:] + b"R.",
}


@pytest.mark.parametrize("data", SMALL_BUT_LONG.values(), ids=list(SMALL_BUT_LONG))
def test_small_metadata_takes_little_memory_and_time(tmp_path: Path, data: bytes) -> None:
    (tmp_path / ".metadata").write_bytes(data)
    before, started = peak_bytes(), time.process_time()
    with pytest.raises(CheckpointError) as error:
        shardwise.open(tmp_path)
    assert time.process_time() - started < 2 and peak_bytes() - before < 64 << 20
    assert len(str(error.value)) < 1000


def test_values_are_checked_against_their_crc(tmp_path: Path) -> None:
    dcp.save({"w": torch.ones(2), "lr": 0.125}, checkpoint_id=tmp_path / "a")
    file = tmp_path / "a" / "__0_0.distcp"
    data = bytearray(file.read_bytes())
    at = data.index(struct.pack(">d", 0.125))
    data[at + 1] ^= 1
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match=r"value 'lr': a record of \d+ bytes is damaged: its CRC-32 differs"):
        shardwise.open(tmp_path / "a")
