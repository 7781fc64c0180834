"""Does a broken or forged checkpoint give a clear error, on every rank, with nothing loaded and no memory spent?"""

from __future__ import annotations

import json
import random
import resource
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, run_local
from shardwise.checkpoint.formats.huggingface import header_bytes
from shardwise.checkpoint.formats.shardwise import INDEX_NAME

Forge = Callable[[dict[str, Any]], object]
HUGE = 10**25


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint of two ranks: a sharded tensor, a plain one, a number."""
    path = tmp_path_factory.mktemp("good") / "c"

    def write(comm: Comm) -> None:
        x = shardwise.shard(torch.arange(24.0).reshape(6, 4), ChunkSpec(0, 2))
        shardwise.save({"x": x, "y": torch.arange(5), "n": 3}, path)

    run_local(write, 2)
    return path


@pytest.fixture
def copy(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "c"))


def forge(folder: Path, change: Forge) -> None:
    content = json.loads((folder / INDEX_NAME).read_text())
    del content["index_sum"]  # one who forges an index can forge that as well
    change(content)
    (folder / INDEX_NAME).write_text(json.dumps(content))


def state() -> dict[str, Any]:
    return {"x": torch.full((6, 4), 9.0), "y": torch.full((5,), 9), "n": 9}


def refused(folder: Path) -> str:
    """The error of a load; the state is as it was."""
    mine = state()
    with pytest.raises(CheckpointError) as error:
        shardwise.load(mine, folder)
    assert repr(mine) == repr(state()), "nothing is half-loaded"
    return str(error.value)


WRAPPING = {  # so many bytes that they are few again in 64 bits
    "shape": [2**60, 4],
    "offsets": [[0, 0], [2**59, 0]],
    "sizes": [[2**59, 4], [2**59, 4]],
}

FORGERIES: list[tuple[Forge, str]] = [
    (lambda c: c["cuts"][0].update(WRAPPING), "tensor 'x': float32[1152921504606846976, 4] is too large"),
    (lambda c: c.update(version=2), "version 2 of the format; this shardwise reads version 1"),
    (lambda c: c.update(format="other"), "not the index of a shardwise checkpoint"),
    (lambda c: c["files"][0].__setitem__(0, "../secret.safetensors"), "is not a file name in the checkpoint's folder"),
    (lambda c: c["files"][0].__setitem__(0, "/etc/passwd"), "is not a file name in the checkpoint's folder"),
    (lambda c: c["files"][0].__setitem__(0, "a\x00.safetensors"), "is not a file name in the checkpoint's folder"),
    (lambda c: c["files"][0].__setitem__(1, HUGE), "are invalid"),
    (lambda c: c["files"][0].__setitem__(1, 10**15), "the index says 1000000000000000"),
    (lambda c: c["files"].append(c["files"][0]), "a file is listed twice"),
    (lambda c: c.update(block_bytes=0), "blocks of 0 bytes"),
    (lambda c: c["cuts"][0].update(shape=[HUGE, 4]), "is invalid"),
    (lambda c: c["cuts"][0].update(shape=[6, -4]), "is invalid"),
    (lambda c: c["cuts"][0].update(shape=[7, 4]), "the boxes of tensor 'x' do not tile it: no piece covers [6:7, 0:4]"),
    (lambda c: c["cuts"][0]["offsets"].__setitem__(1, [2, 0]), "do not tile it: boxes of a tensor"),
    (lambda c: c["cuts"][0]["sizes"].__setitem__(1, [3, HUGE]), "are not rows of 2 ints"),
    (lambda c: c["cuts"][0]["sizes"].__setitem__(1, [3, 2**61]), "is outside"),
    (lambda c: c["cuts"][0]["sizes"].pop(), "2 offsets and 1 sizes of boxes"),
    (lambda c: c["cuts"][0]["sizes"].__setitem__(0, ["a", 4]), "are not rows of 2 ints"),
    (lambda c: c["cuts"][0]["sizes"].__setitem__(0, [3.0, 4]), "are not rows of 2 ints"),
    (lambda c: c["tensors"]["x"].__setitem__(0, "float33"), "tensor 'x': unknown dtype 'float33'"),
    (lambda c: c["tensors"]["x"].__setitem__(0, "float64"), "tensor 'x'"),
    (lambda c: c["tensors"]["x"].__setitem__(1, 7), "tensor 'x': there is no cut 7"),
    (lambda c: c["tensors"]["x"][2].__setitem__(0, 5), "a tensor names a file that is not listed"),
    (lambda c: c["tensors"]["x"][2].__setitem__(0, -1), "are not byte offsets"),
    (lambda c: c["tensors"]["x"][3].__setitem__(0, 2**61), "are outside the data of rank00000-00000.safetensors"),
    (lambda c: c["tensors"]["x"][3].__setitem__(0, 0), "are outside the data of rank00000-00000.safetensors"),
    (lambda c: c["tensors"]["x"][3].__setitem__(0, HUGE), "are not byte offsets"),
    (lambda c: c["tensors"]["x"][3].__setitem__(0, "1"), "are not byte offsets"),
    (lambda c: c["tensors"].update(z=c["tensors"]["x"]), "tensors 'x' and 'z' overlap in rank00000-00000.safetensors"),
    (lambda c: c["tensors"]["x"][4].__setitem__(0, ""), "tensor 'x': it lacks checksums"),
    (lambda c: c["tensors"]["x"][4].__setitem__(0, "z" * 16), "tensor 'x': its checksums are not rows"),
    (lambda c: c["tensors"]["x"][4].__setitem__(0, "0" * 16), "tensor 'x': bytes 232 to 280 are damaged"),
    (lambda c: c["tensors"]["x"].pop(), "the index is damaged"),
    (lambda c: c.pop("tensors"), "the index is damaged: KeyError"),
    (lambda c: c.update(tensors=[1]), "the index is damaged"),
    (lambda c: c.update(tree={"dict": [["x", {"tensor": "w"}]]}), "names tensor 'w', which is not stored"),
    (lambda c: c.update(tree={"what": 1}), "the tree of the index has an unknown kind ['what']"),
    (lambda c: c.update(tree={"dict": [[[1], 2]]}), "has keys that are not strings or ints"),
    (lambda c: c.update(tree=nested(150)), "nested deeper than 100 levels"),
]


def nested(depth: int) -> Any:
    node: Any = 1
    for _ in range(depth):
        node = [node]
    return node


@pytest.mark.parametrize("change, text", FORGERIES, ids=[text[:40] for _, text in FORGERIES])
def test_forged_indices_are_refused(copy: Path, change: Forge, text: str) -> None:
    forge(copy, change)
    told = refused(copy)
    assert text in told and str(copy) in told


@pytest.mark.parametrize(
    "data, text",
    [
        (b"", "not JSON"),
        (b"\xff\xfe", "not JSON"),
        (b"[" * 100_000, "not JSON: RecursionError"),
        (b"[1, 2]", "not the index of a shardwise checkpoint"),
        (b'{"format": "shardwise", "version": 1, "block_bytes": ' + b"9" * 5000 + b"}", "not JSON: ValueError"),
    ],
)
def test_an_index_that_is_none(copy: Path, data: bytes, text: str) -> None:
    (copy / INDEX_NAME).write_bytes(data)
    assert text in refused(copy)


def test_an_absurdly_long_index_is_not_read(copy: Path) -> None:
    with (copy / INDEX_NAME).open("r+b") as file:
        file.truncate(1 << 40)
    assert f"{INDEX_NAME}: {1 << 40} bytes; no more than" in refused(copy)


def test_truncated_missing_and_flipped_files(copy: Path) -> None:
    file = copy / "rank00001-00000.safetensors"
    data = file.read_bytes()
    file.write_bytes(data[:-1])
    assert f"{file}: {len(data) - 1} bytes; the index says {len(data)}" in refused(copy)
    file.write_bytes(data[:70] + b"?" + data[71:])
    assert f"{file}: the header is damaged" in refused(copy)
    file.unlink()
    assert f"{file}: cannot be read: No such file or directory" in refused(copy)
    file.mkdir()
    assert f"{file}: cannot be read: Is a directory" in refused(copy)


def test_every_flipped_bit_of_a_file_is_found(copy: Path) -> None:
    file = copy / "rank00001-00000.safetensors"
    data = file.read_bytes()
    for position in range(0, len(data), 5):
        changed = bytearray(data)
        changed[position] ^= 1 << position % 8
        file.write_bytes(changed)
        with pytest.raises(CheckpointError, match=f"{file.name}: .*damaged"), shardwise.open(copy) as checkpoint:
            checkpoint.verify()


def test_without_verification_damage_goes_in(copy: Path) -> None:
    file = copy / "rank00001-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    shardwise.load(state(), copy, verify=False)


def load_told(comm: Comm, path: Path) -> str:
    x = shardwise.full(ChunkSpec(1, 2), (6, 4), 9.0)
    try:
        shardwise.load({"x": x, "y": torch.zeros(5, dtype=torch.int64), "n": 0}, path)
    except CheckpointError as error:
        assert all((t == 9).all() for t in x.local_tensors())
        return str(error)
    return "loaded"


def test_damage_that_one_rank_finds_is_told_to_all(copy: Path) -> None:
    assert run_local(load_told, 2, copy) == ["loaded", "loaded"]
    file = copy / "rank00000-00000.safetensors"
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    told = run_local(load_told, 2, copy)
    assert told[0] == told[1] and "tensor 'x': bytes" in told[0]


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_to_the_index(copy: Path, seed: int) -> None:
    """Whatever is changed in the index, a load gives an error of ours or the stored values."""
    rng = random.Random(seed)
    content = json.loads((copy / INDEX_NAME).read_text())
    for _ in range(rng.randint(1, 3)):
        mutate(content, rng)
    (copy / INDEX_NAME).write_text(json.dumps(content))
    load_or_refuse(copy)


def mutate(node: Any, rng: random.Random) -> None:
    """Change one place of a JSON value, deep inside."""
    while True:
        keys = list(node) if isinstance(node, dict) else list(range(len(node)))
        if not keys:
            return
        key = rng.choice(keys)
        if isinstance(node[key], dict | list) and node[key] and rng.random() < 0.85:
            node = node[key]
            continue
        odd = [None, True, -1, 0, 1, 2**31, 2**63, HUGE, 1.5, "", "x", [], {}, [[0]], {"dict": []}, {"tensor": "x"}]
        choice = rng.random()
        if choice < 0.15:
            del node[key]
        elif choice < 0.4 and type(node[key]) is int:
            node[key] += rng.choice([-8, -1, 1, 8, 64])
        else:
            node[key] = rng.choice(odd)
        return


def load_or_refuse(path: Path) -> None:
    mine = state()
    try:
        shardwise.load(mine, path, strict=False)
        with shardwise.open(path) as checkpoint:
            checkpoint.state()
            for name in checkpoint:
                assert checkpoint[name].layout.shape == tuple(checkpoint[name].shape)
    except CheckpointError:
        return
    assert torch.equal(mine["x"], torch.arange(24.0).reshape(6, 4)) or (mine["x"] == 9).all()
    assert torch.equal(mine["y"], torch.arange(5)) or (mine["y"] == 9).all()


@pytest.mark.parametrize("seed", range(40))
def test_random_bytes_in_the_index_and_in_headers(copy: Path, seed: int) -> None:
    rng = random.Random(seed)
    for file in sorted(copy.iterdir()):
        data = bytearray(file.read_bytes())
        for _ in range(rng.randint(0, 2)):
            data[rng.randrange(min(len(data), 400))] = rng.choice(b'\x00\xff"{}[],:019-e')
        file.write_bytes(data[: rng.choice([len(data), len(data), len(data) - 1])])
    load_or_refuse(copy)


@pytest.mark.parametrize("seed", range(40))
def test_random_damage_to_a_single_safetensors_file(tmp_path: Path, seed: int) -> None:
    rng = random.Random(seed)
    entries = {"a": ("F32", [2, 3], 24), "b": ("U8", [4], 4)}
    start = header_bytes(entries)
    content = json.loads(start[8:])
    mutate(content, rng)
    text = json.dumps(content).encode()
    (tmp_path / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(28))
    try:
        with shardwise.open(tmp_path) as checkpoint:
            checkpoint.state()
    except CheckpointError as error:
        assert "model.safetensors" in str(error)


@pytest.mark.parametrize(
    "start, text",
    [
        (b"", "is not a safetensors file"),
        ((10**18).to_bytes(8, "little"), "claims a header of 1000000000000000000 bytes"),
        ((3).to_bytes(8, "little") + b"[1]", "the header is a list"),
        ((2).to_bytes(8, "little") + b"{]", "the header is not JSON"),
    ],
)
def test_headers_that_are_none(tmp_path: Path, start: bytes, text: str) -> None:
    (tmp_path / "x.safetensors").write_bytes(start)
    with pytest.raises(CheckpointError, match=text.replace("(", r"\(")):
        shardwise.open(tmp_path / "x.safetensors")


def header_of(entry: dict[str, Any]) -> bytes:
    text = json.dumps({"w": entry}).encode()
    return len(text).to_bytes(8, "little") + text


@pytest.mark.parametrize(
    "entry, text",
    [
        ({"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}, r"takes 8 bytes; its range is 0:4"),
        (
            {"dtype": "F32", "shape": [2**60], "data_offsets": [0, 2**62]},
            "its range is 0:4611686018427387904 of",
        ),
        ({"dtype": "F99", "shape": [2], "data_offsets": [0, 8]}, "tensor 'w': unknown dtype 'F99'"),
        ({"dtype": "F32", "shape": [-2], "data_offsets": [0, 8]}, "no valid dtype, shape and data_offsets"),
        ({"dtype": "U8", "shape": [4], "data_offsets": [4, 8]}, "begins at byte .* and leaves a gap before it"),
        ({"dtype": "U8", "shape": [4], "data_offsets": [0, 4]}, "its tensors end at byte"),
    ],
)
def test_entries_of_headers(tmp_path: Path, entry: dict[str, Any], text: str) -> None:
    (tmp_path / "model.safetensors").write_bytes(header_of(entry) + bytes(8))
    with pytest.raises(CheckpointError, match=text):
        shardwise.open(tmp_path)


def test_the_map_of_a_hugging_face_folder_stays_inside(tmp_path: Path) -> None:
    shardwise.save_hf({"a": torch.ones(4), "b": torch.ones(4)}, tmp_path / "m", max_file_bytes=16)
    index = tmp_path / "m" / "model.safetensors.index.json"
    for weight_map, text in (
        ({"a": "../x.safetensors"}, "is not a file name in this folder"),
        ({"a": "model-00002-of-00002.safetensors"}, "tensor 'a' is not in this file"),
        ({"a": "model-00009-of-00002.safetensors"}, "cannot be read"),
        ({"a": 3}, "no weight_map"),
    ):
        index.write_text(json.dumps({"weight_map": weight_map}))
        with pytest.raises(CheckpointError, match=text):
            shardwise.open(tmp_path / "m")


def test_a_block_size_in_the_layout_does_not_blow_up(copy: Path) -> None:
    shape, spec = [2**40], {"kind": "mesh", "mesh": {"axes": ["x"], "ranks": [0, 1]}}
    spec["placements"] = [{"kind": "shard", "dim": 0, "block": 1}]
    forge(copy, lambda c: c["cuts"].append({"shape": shape, "offsets": [], "sizes": [], "spec": spec}))
    assert "do not tile it" in refused(copy)


def peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def long_names(content: dict[str, Any]) -> None:
    content["tree"] = {"dict": [["x" * 100_000, {"dict": [[str(i), 0] for i in range(5000)]}]]}


def wide_strings(content: dict[str, Any]) -> None:
    content["cuts"][0]["sizes"] = [["1", "1"]] * 2000 + [["1" * 200_000, "1"]]


SMALL_BUT_LARGE: list[tuple[Forge, str]] = [
    (lambda c: c["cuts"][0].update(spec={"kind": "chunk", "dim": 0, "ranks": 30_000_000}), "ranks are not listed"),
    (
        lambda c: c["cuts"][0].update(
            spec={"kind": "grid", "splits": [3_000_000, 3_000_000], "ranks": [[0, 1], [2, 3]]}
        ),
        "3000000 parts of a dim on 4 ranks",
    ),
    (lambda c: c["cuts"][0].update(spec={"kind": "chunk", "dim": 0, "ranks": ["a" * 100_000, 1]}), "are not ints"),
    (long_names, "the names in the state are much longer than the index"),
    (wide_strings, "are not rows of 2 ints"),
    (lambda c: c["cuts"][0].update(shape=[0] * 1_000_000), "a shape has more than 64 dims"),
]


@pytest.mark.parametrize("change, text", SMALL_BUT_LARGE, ids=[text[:30] for _, text in SMALL_BUT_LARGE])
def test_small_files_take_little_memory(copy: Path, change: Forge, text: str) -> None:
    forge(copy, change)
    before = peak_bytes()
    with pytest.raises(CheckpointError, match=text), shardwise.open(copy) as opened:
        assert opened["x"].layout is None
    assert peak_bytes() - before < (64 << 20) + 10 * (copy / INDEX_NAME).stat().st_size


def test_a_header_with_a_shape_of_a_million_dims(tmp_path: Path) -> None:
    (tmp_path / "m.safetensors").write_bytes(header_bytes({"x": ("F32", [0] * 1_000_000, 0)}))
    with pytest.raises(CheckpointError, match="its entry has no valid dtype, shape and data_offsets") as error:
        shardwise.open(tmp_path / "m.safetensors")
    assert len(str(error.value)) < 1000


@pytest.mark.parametrize("at", ["0.125", '"n"', '"tree"', "index_sum", '"version"'])
def test_the_index_has_a_checksum_of_its_own(tmp_path: Path, at: str) -> None:
    shardwise.save({"x": torch.ones(2), "lr": 0.125, "n": 1}, tmp_path / "c")
    index = tmp_path / "c" / INDEX_NAME
    data = bytearray(index.read_bytes())
    for bit in range(8):
        flipped = bytearray(data)
        flipped[data.index(at.encode()) + 2] ^= 1 << bit
        index.write_bytes(flipped)
        with pytest.raises(CheckpointError, match=r"damaged|not JSON|not the index|version"):
            shardwise.open(tmp_path / "c")


def test_an_index_without_a_checksum_of_its_own_is_read(copy: Path) -> None:
    forge(copy, lambda content: None)
    assert b"index_sum" not in (copy / INDEX_NAME).read_bytes()
    assert shardwise.load(state(), copy)["n"] == 3
