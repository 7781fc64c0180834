"""Is memory bounded by what a file has, and is what cannot be read one error, never a traceback of something else?"""

from __future__ import annotations

import json
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import shardwise
from shardwise import CheckpointError, ChunkSpec, Mesh
from shardwise.checkpoint import NameMap, reshard
from shardwise.cli.view import find_file_kind
from shardwise.geometry import LayoutError
from shardwise.nn import load_plan
from shardwise.page.facts import read_trace

DEEP = 100_000
BILLION = 10**9


def peak_bytes(work: Callable[[], object]) -> int:
    """The most memory that Python's objects and arrays took meanwhile."""
    tracemalloc.start()
    try:
        work()
        return tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()


def test_a_billion_ranks_are_refused(tmp_path: Path) -> None:
    shardwise.save({"w": torch.ones(4)}, tmp_path / "a")
    for make in (
        lambda: reshard(tmp_path / "a", tmp_path / "b", layout="S(0)", ranks=BILLION),
        lambda: Mesh.of(dp=BILLION),
        lambda: Mesh.of(dp=1 << 11, tp=1 << 11),
        lambda: Mesh((1 << 10, 1 << 11), ("dp", "tp")),
        lambda: ChunkSpec(0, BILLION),
    ):

        def refuse(make: Callable[[], object] = make) -> None:
            with pytest.raises(LayoutError, match="ranks are more than 1048576; pass a smaller number of ranks"):
                make()

        assert peak_bytes(refuse) < 10 << 20
    assert not (tmp_path / "b").exists() and Mesh.of(dp=1 << 20).size == 1 << 20


@pytest.mark.parametrize("tree", ["[{}]", '{{"dict": [["a", [{}]]]}}', '{{"tuple": [[{}]]}}'])
def test_an_index_of_zeros_takes_memory_like_its_length(tree: str, tmp_path: Path) -> None:
    shardwise.save({"w": torch.ones(2)}, tmp_path / "c")
    index = tmp_path / "c" / "shardwise.index.json"
    content = json.loads(index.read_text())
    del content["index_sum"]
    zeros = ",".join("0" * 40_000)
    text = json.dumps({**content, "tree": 7}).replace('"tree": 7', f'"tree": {tree.format(zeros)}')
    index.write_text(text)

    def read() -> None:
        with shardwise.open(tmp_path / "c") as checkpoint:
            assert checkpoint.names() == ["w"]
        with pytest.raises(CheckpointError, match="does not fit"):
            shardwise.load({"x": 1}, tmp_path / "c")

    assert peak_bytes(read) < 30 * len(text)


def test_a_header_of_empty_tensors_takes_memory_like_its_length(tmp_path: Path) -> None:
    entry = {"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}
    header = json.dumps({f"t{i}": entry for i in range(20_000)}, separators=(",", ":")).encode()
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header)

    def read() -> None:
        with shardwise.open(tmp_path / "a.safetensors") as checkpoint:
            assert len(checkpoint) == 20_000

    assert peak_bytes(read) < 15 * len(header)


def test_a_key_that_appears_twice_in_a_header_is_damage(tmp_path: Path) -> None:
    header = (
        b'{"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]},"a":{"dtype":"U8","shape":[1],"data_offsets":[0,1]}}'
    )
    (tmp_path / "a.safetensors").write_bytes(len(header).to_bytes(8, "little") + header + b"0")
    with pytest.raises(CheckpointError, match="the header is not JSON: a key appears twice"):
        shardwise.open(tmp_path / "a.safetensors")


def test_names_that_share_bytes_are_named_and_very_many_are_refused(tmp_path: Path) -> None:
    weight = torch.arange(1 << 18, dtype=torch.float32)
    torch.save({f"w{i}": weight for i in range(300)}, tmp_path / "many.pt")
    with pytest.raises(
        CheckpointError, match=r"300 tensors of 314572800 bytes are made of 1048576 bytes, .* about 300"
    ):
        reshard(tmp_path / "many.pt", tmp_path / "b")
    assert not (tmp_path / "b").exists()
    torch.save({"a": weight, "b": weight, "c": weight[1:], "d": torch.ones(2)}, tmp_path / "few.pt")
    assert reshard(tmp_path / "few.pt", tmp_path / "c").repeated == ("b",)
    assert reshard(tmp_path / "c", tmp_path / "d").repeated == ()


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", "[" * DEEP),
        ("a.json", '{"mesh": ' + "[" * DEEP),
        ("a.toml", "a = " + "[" * DEEP),
        ("a.yaml", "[" * DEEP),
    ],
)
def test_what_is_nested_too_deeply_is_one_error(name: str, text: str, tmp_path: Path) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError, match=rf"{name} is not valid {path.suffix[1:].upper()}: it is nested too deeply"):
        load_plan(path)
    if name == "a.json":
        assert find_file_kind(str(path)) == "trace"
        with pytest.raises(LayoutError, match="is not valid JSON: it is nested too deeply"):
            read_trace(path)
    if name == "a.toml":
        with pytest.raises(CheckpointError, match="is not valid TOML: it is nested too deeply"):
            NameMap.of(path)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("a.json", '{"mesh": "tp=2", "parameters": {"w": "tp: S(0)", "w": "tp: S(1)"}}'),
        ("a.json", '{"mesh": "tp=2", "parameters": {}, "mesh": "tp=4"}'),
        ("a.yaml", "mesh: tp=2\nparameters:\n  w: 'tp: S(0)'\n  w: 'tp: S(1)'\n"),
        ("a.toml", "mesh = 'tp=2'\nmesh = 'tp=4'\n"),
    ],
)
def test_a_key_that_appears_twice_in_a_plan_is_an_error(name: str, text: str, tmp_path: Path) -> None:
    if name == "a.yaml":
        pytest.importorskip("yaml")
    (tmp_path / name).write_text(text)
    with pytest.raises(ValueError, match=r"is not valid .*(appears twice|Cannot overwrite)"):
        load_plan(tmp_path / name)


def test_a_plan_that_is_not_text_is_an_error(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_bytes(b"\xff\xfe{}")
    with pytest.raises(ValueError, match=r"a\.json is not valid JSON: 'utf-8' codec"):
        load_plan(tmp_path / "a.json")


@pytest.mark.parametrize("name", ["a\0b.safetensors", "\ud800.safetensors", "..", "a/b.safetensors", ""])
def test_names_that_no_file_has(name: str, tmp_path: Path) -> None:
    index: dict[str, Any] = {"weight_map": {"w": name}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(CheckpointError, match=r"[nN]ot a file name"):
        shardwise.open(tmp_path)
    for text in ("a\0b", "memory://\0"):
        with pytest.raises(ValueError):
            shardwise.open(text)


def test_urls_that_say_too_little_are_errors() -> None:
    for url in ("reference://x", "dir://x", "simplecache://x"):
        with pytest.raises(CheckpointError, match=url.partition(":")[0]):
            shardwise.open(url)


def test_paths_that_are_not_utf_8(tmp_path: Path) -> None:
    path = str(tmp_path) + "/\udcff\udcfe"
    shardwise.save({"w": torch.ones(2)}, path)
    assert reshard(path, path + "2", layout="S(0)", ranks=2).files == 2
    assert shardwise.load({"w": torch.zeros(2)}, path + "2")["w"].tolist() == [1, 1]
