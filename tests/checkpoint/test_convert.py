"""Is a converted checkpoint what torch makes of its tensors: renamed, split, fused, stacked, transposed, converted?"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from typer.testing import CliRunner, Result

import shardwise
from shardwise import CheckpointError, ChunkSpec, Comm, Mesh, MeshSpec, Replicate, Shard, ShardingSpec, run_local
from shardwise.checkpoint import NameMap, reshard
from shardwise.checkpoint import reshard_copy as copying
from shardwise.checkpoint import reshard_copy as planning
from shardwise.checkpoint.formats import FORMATS
from shardwise.cli.main import app
from tests.checkpoint.test_format import ToyFormat

SPECS: dict[str, ShardingSpec] = {
    "whole": ChunkSpec(0, 1),
    "rows": ChunkSpec(0, 3),
    "columns": ChunkSpec(1, 2),
    "grid": MeshSpec(Mesh.of(a=2, b=2), (Shard(0), Shard(1))),
}
Q, KV, WIDTH, EXPERTS = 8, 4, 6, 3


def numbers(*shape: int, start: int = 0, dtype: torch.dtype = torch.float32) -> Tensor:
    """A tensor that is a function of the global index."""
    return (start + torch.arange(torch.Size(shape).numel())).reshape(shape).to(dtype)


def stored(layers: int = 2) -> dict[str, Tensor]:
    """Tensors as models have them: fused and separate attention, gates, experts, and others."""
    found: dict[str, Tensor] = {}
    for layer in range(layers):
        at, start = f"layers.{layer}", 1000 * layer
        found[f"{at}.wqkv.weight"] = numbers(Q + 2 * KV, WIDTH, start=start)
        for number, (kind, length) in enumerate({"q": Q, "k": KV, "v": KV}.items()):
            found[f"{at}.attn.{kind}.weight"] = numbers(length, WIDTH, start=start + 200 * number)
        for expert in range(EXPERTS):
            found[f"{at}.experts.{expert}.w1"] = numbers(4, WIDTH, start=start + 50 * expert)
            found[f"{at}.experts.{expert}.w3"] = numbers(4, WIDTH, start=start + 50 * expert + 25)
        found[f"{at}.stacked"] = numbers(EXPERTS, 5, WIDTH, start=start)
        found[f"{at}.norm"] = numbers(WIDTH, start=start)
    return found


def save_state(path: Path, state: Any, spec: ShardingSpec, format: str = "shardwise") -> Path:
    def place(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: place(child) for key, child in node.items()}
        return shardwise.shard(node, spec) if isinstance(node, Tensor) and node.ndim > 1 else node

    def body(comm: Comm) -> None:
        shardwise.save(place(state), path, format=format)

    run_local(body, max(spec.layout((12, 12)).ranks) + 1)
    return path


def read_all(path: Path) -> dict[str, Tensor]:
    with shardwise.open(path) as opened:
        opened.verify()
        return {name: opened[name].read() for name in opened}


def interleave(parts: list[Tensor], groups: int) -> Tensor:
    return torch.cat([piece for turn in zip(*(p.chunk(groups) for p in parts), strict=True) for piece in turn])


ALL_CHANGES = f"""
[lengths]
q = {Q}
kv = {KV}

[rename]
"layers.*.norm" = "norms.*"

[[change]]
split = "layers.*.wqkv.weight"
to = ["s.*.q", "s.*.k", "s.*.v"]
sizes = ["q", "kv", "kv"]

[[change]]
fuse = ["layers.*.attn.q.weight", "layers.*.attn.k.weight", "layers.*.attn.v.weight"]
to = "f.*.qkv"
groups = 2

[[change]]
fuse = ["layers.*.experts.{{e}}.w1", "layers.*.experts.{{e}}.w3"]
to = "joined.*.{{e}}"

[[change]]
stack = "joined.{{layer}}.{{e}}"
to = "experts.{{layer}}.gate_up"

[[change]]
transpose = "experts.*.gate_up"

[[change]]
unstack = "layers.*.stacked"
to = "u.{{n}}.of.*"
dim = -1
"""


def expected_after_all(before: dict[str, Tensor]) -> dict[str, Tensor]:
    after: dict[str, Tensor] = {}
    for layer in range(2):
        at = f"layers.{layer}"
        for kind, part in zip("qkv", before[f"{at}.wqkv.weight"].split([Q, KV, KV]), strict=True):
            after[f"s.{layer}.{kind}"] = part
        after[f"f.{layer}.qkv"] = interleave([before[f"{at}.attn.{kind}.weight"] for kind in "qkv"], 2)
        pairs = [torch.cat([before[f"{at}.experts.{e}.{w}"] for w in ("w1", "w3")]) for e in range(EXPERTS)]
        after[f"experts.{layer}.gate_up"] = torch.stack(pairs).transpose(1, 2)
        after |= {f"u.{n}.of.{layer}": part for n, part in enumerate(before[f"{at}.stacked"].unbind(-1))}
        after[f"norms.{layer}"] = before[f"{at}.norm"]
    return after


def check_equal(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert sorted(found) == sorted(expected)
    for name, tensor in expected.items():
        assert found[name].dtype == tensor.dtype and torch.equal(found[name], tensor.cpu()), name


@pytest.fixture
def all_changes(tmp_path: Path) -> Path:
    (tmp_path / "map.toml").write_text(ALL_CHANGES)
    return tmp_path / "map.toml"


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("format", ["shardwise", "dcp", "hf"])
def test_every_change_from_every_layout(tmp_path: Path, all_changes: Path, spec: str, format: str) -> None:
    source = save_state(tmp_path / "a", stored(), SPECS[spec], format)
    reshard(source, tmp_path / "b", names=all_changes)
    check_equal(read_all(tmp_path / "b"), expected_after_all(stored()))
    with shardwise.open(source, names=all_changes) as opened:
        check_equal({name: opened[name].read() for name in opened}, expected_after_all(stored()))
        expected = expected_after_all(stored())["experts.1.gate_up"].cpu()
        assert torch.equal(opened["experts.1.gate_up"][1:, 2:5, 3], expected[1:, 2:5, 3])


def test_small_segments_blocks_and_workers_make_no_difference(
    tmp_path: Path, all_changes: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = save_state(tmp_path / "a", stored(), SPECS["grid"])
    reshard(source, tmp_path / "one", names=all_changes, dtype="bf16")
    reshard(source, tmp_path / "two", names=all_changes, dtype="bf16", workers=2)
    assert files_of(tmp_path / "one") == files_of(tmp_path / "two")
    monkeypatch.setattr(planning, "SEGMENT_BYTES", 24)
    monkeypatch.setattr(copying, "_CONVERT_BYTES", 8)
    reshard(source, tmp_path / "many", names=all_changes, dtype="bf16", format="hf")
    expected = {name: tensor.bfloat16() for name, tensor in expected_after_all(stored()).items()}
    for name in ("one", "two", "many"):
        check_equal(read_all(tmp_path / name), expected)


def files_of(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


def test_a_map_and_its_inverse_give_the_source_back(tmp_path: Path) -> None:
    there = {
        "lengths": {"kv": KV},
        "change": [
            {"fuse": [f"layers.*.attn.{k}.weight" for k in "qkv"], "to": "layers.*.qkv", "groups": "kv"},
            {"stack": "layers.*.experts.{e}.{w}", "to": "layers.*.experts.{w}", "dim": 1},
            {"transpose": "layers.*.stacked", "dims": [2, 0, 1]},
        ],
    }
    back = {
        "change": [
            {
                "split": "layers.*.qkv",
                "to": [f"layers.*.attn.{k}.weight" for k in "qkv"],
                "sizes": [Q, KV, KV],
                "groups": KV,
            },
            {"unstack": "layers.*.experts.{w}", "to": "layers.*.experts.{e}.{w}", "dim": 1},
            {"transpose": "layers.*.stacked", "dims": [1, 2, 0]},
        ]
    }
    source = save_state(tmp_path / "a", stored(), SPECS["columns"])
    reshard(source, tmp_path / "b", names=there, layout="S(0)", ranks=2)
    reshard(tmp_path / "b", tmp_path / "c", names=back, layout="S(0)", ranks=3)
    assert sorted(read_all(tmp_path / "b")) != sorted(stored())
    check_equal(read_all(tmp_path / "c"), stored())


MEASURED = """
import sys
from shardwise.checkpoint.resharding import reshard

names = {"change": [{"transpose": "a"}, {"fuse": ["a", "b"], "to": "both", "dim": 1}]}
reshard(sys.argv[1], sys.argv[2], names=names, dtype="bf16", workers=1, max_buffer_bytes=64 << 20)
assert "torch" not in sys.modules
print(next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM")))
"""


@pytest.mark.skipif(sys.platform != "linux", reason="the peak of memory is read from /proc")
def test_a_transposed_and_fused_tensor_keeps_within_the_memory(tmp_path: Path) -> None:
    a, b = numbers(4096, 3072), numbers(3072, 1024)
    shardwise.save({"a": a, "b": b}, tmp_path / "a")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    command = [sys.executable, "-c", MEASURED, str(tmp_path / "a"), str(tmp_path / "b")]
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, timeout=240)
    assert int(done.stdout) < 96 << 10, "interpreter and libraries take 48 MiB, source and result 90"
    assert torch.equal(shardwise.open(tmp_path / "b")["both"].read(), torch.cat([a.t(), b], dim=1).bfloat16().cpu())


def load_fused(comm: Comm, path: Path, names: Path) -> list[Tensor]:
    expected = expected_after_all(stored())
    specs = MeshSpec(Mesh.of(t=2), (Shard(0),)), MeshSpec(Mesh.of(t=2), (Replicate(),))
    state = {
        name: shardwise.zeros(specs[number % 2], *tensor.shape)
        for number, (name, tensor) in enumerate(expected.items())
    }
    shardwise.load(state, path, names=NameMap.of(names))
    whole = MeshSpec(Mesh.of(t=2), (Replicate(),))
    return [tensor.redistribute(whole).local_tensor() for tensor in state.values()]


def test_a_load_sees_a_checkpoint_through_a_map(tmp_path: Path, all_changes: Path) -> None:
    source = save_state(tmp_path / "a", stored(), SPECS["rows"])
    for found in run_local(load_fused, 2, source, all_changes):
        for whole, expected in zip(found, expected_after_all(stored()).values(), strict=True):
            assert torch.equal(whole, expected)


def test_damage_is_found_in_what_is_made_of_it(tmp_path: Path, all_changes: Path) -> None:
    source = save_state(tmp_path / "a", stored(), SPECS["rows"])
    file = sorted(source.glob("rank*"))[-1]
    data = bytearray(file.read_bytes())
    data[-3] ^= 4
    file.write_bytes(data)
    with pytest.raises(CheckpointError, match="are damaged: their checksum differs"):
        reshard(source, tmp_path / "b", names=all_changes)


FLOATS = ("float64", "float32", "float16", "bfloat16")


@pytest.mark.parametrize("wanted", FLOATS)
def test_elements_are_converted_as_torch_does(tmp_path: Path, wanted: str) -> None:
    generator = torch.Generator().manual_seed(1)
    some = torch.randn(1000, generator=generator, dtype=torch.float64) * 10.0 ** torch.arange(-10, 10).repeat(50)
    odd = torch.tensor(
        [0.0, -0.0, float("inf"), -float("inf"), float("nan"), 65519.99, 65520.0, 1e-8, 1.00390625, 1.01171875]
    )
    state = {name: torch.cat([some, odd.double()]).to(getattr(torch, name)) for name in FLOATS}
    others = {
        "i": torch.arange(3),
        "b": torch.tensor([True]),
        "c": torch.ones(2, dtype=torch.complex64),
        "e": torch.zeros(0, 3),
    }
    shardwise.save({**state, **others, "f8": torch.ones(3).to(torch.float8_e4m3fn)}, tmp_path / "a")
    report = reshard(tmp_path / "a", tmp_path / "b", dtype=wanted)
    found = read_all(tmp_path / "b")
    for name, tensor in state.items():
        assert found[name].dtype == getattr(torch, wanted)
        assert torch.equal(found[name].isnan(), tensor.isnan()), name
        assert torch.equal(found[name].nan_to_num(nan=7.0), tensor.to(getattr(torch, wanted)).nan_to_num(nan=7.0)), name
    assert [found[name].dtype for name in ("i", "b", "c", "f8")] == [
        torch.int64,
        torch.bool,
        torch.complex64,
        torch.float8_e4m3fn,
    ]
    assert report.bytes == sum(tensor.nbytes for tensor in found.values())


def training_state() -> dict[str, Any]:
    weights = {"model.w": numbers(4, 6), "lm_head.weight": numbers(2, 6, start=100)}
    moments = {name: {"exp_avg": tensor * 2, "step": torch.tensor(3.0)} for name, tensor in weights.items()}
    return {"model": weights, "optim": {"state": moments, "param_groups": [{"lr": 0.1}]}, "step": 7}


@pytest.mark.parametrize("format", ["shardwise", "dcp"])
def test_hugging_face_gets_the_model_alone_and_its_configuration(tmp_path: Path, format: str) -> None:
    source = save_state(tmp_path / "a", training_state(), SPECS["rows"], format)
    (tmp_path / "base").mkdir()
    (tmp_path / "base" / "config.json").write_text(json.dumps({"model_type": "llama", "dtype": "float32"}))
    (tmp_path / "base" / "tokenizer.json").write_text("{}")
    (tmp_path / "base" / "model.safetensors").write_text("not copied")
    report = reshard(source, tmp_path / "hf", format="hf", config=tmp_path / "base", dtype="bf16")
    names = sorted(path.name for path in (tmp_path / "hf").iterdir())
    assert names == ["config.json", "model.safetensors", "tokenizer.json"] and report.copied == (
        "config.json",
        "tokenizer.json",
    )
    assert json.loads((tmp_path / "hf" / "config.json").read_text()) == {"model_type": "llama", "dtype": "bfloat16"}
    check_equal(read_all(tmp_path / "hf"), {name: t.bfloat16() for name, t in training_state()["model"].items()})
    assert {"optim.state.model.w.exp_avg", "step"} <= set(report.left_out)
    reshard(source, tmp_path / "map", format="hf", names={"lm_head.*": "head.*"})
    assert sorted(read_all(tmp_path / "map")) == ["head.weight", "model.w"], "a map sees the names of the state dict"
    again = reshard(tmp_path / "hf", tmp_path / "hf2", format="hf")
    assert again.copied == ("config.json", "tokenizer.json"), "the source has them itself"
    assert reshard(source, tmp_path / "hf", format="hf", config=tmp_path / "base", overwrite=True).copied
    with pytest.raises(CheckpointError, match=r"things other than a checkpoint \(config.json, tokenizer.json\)"):
        reshard(source, tmp_path / "hf", format="hf", overwrite=True)
    with pytest.raises(CheckpointError, match=r"a: it has no config.json; pass the folder that has the model's"):
        reshard(source, tmp_path / "hf3", format="hf", config=source)
    with pytest.raises(CheckpointError, match="format 'dcp' has no configuration beside it; omit config"):
        reshard(source, tmp_path / "hf3", format="dcp", config=tmp_path / "base")


@pytest.mark.parametrize(
    ("state", "names"),
    [
        ({"app": {"model": {"a.b": 1}, "optim": {"x": 1}}}, ["a.b"]),
        ({"model": {"a": 1}, "ema": {"a": 1}, "optimizer": {"a": 1}}, ["ema.a", "model.a"]),
        ({"model": 1, "optim": 1}, ["model", "optim"]),
        ({"a.optim": 1, "scaler": 1}, ["a.optim", "scaler"]),
        ({"model": {"scaler": 1, "b": 1}, "scaler": 1}, ["b", "scaler"]),
    ],
)
def test_what_counts_as_the_model(tmp_path: Path, state: Any, names: list[str]) -> None:
    def fill(node: Any) -> Any:
        return {key: fill(child) for key, child in node.items()} if isinstance(node, dict) else torch.ones(2, 2)

    shardwise.save(fill(state), tmp_path / "a")
    reshard(tmp_path / "a", tmp_path / "hf", format="hf")
    assert sorted(read_all(tmp_path / "hf")) == names


def test_filters_choose_by_stored_names(tmp_path: Path) -> None:
    source = save_state(tmp_path / "a", training_state(), SPECS["rows"])
    reshard(source, tmp_path / "b", only=["model.*", "step"], exclude=["*.lm_head.*"], names={"model.**": "**"})
    with shardwise.open(tmp_path / "b") as opened:
        assert opened.names() == ["model.w"] and opened.values() == {"step": 7}
    reshard(source, tmp_path / "c", exclude=["optim.state.*"])
    with shardwise.open(tmp_path / "c") as opened:
        assert opened.names() == ["model.model.w", "model.lm_head.weight"]
        assert opened.state()["optim"] == {"param_groups": [{"lr": 0.1}]} and opened.state()["step"] == 7


CHANGE = {"to": "x.*", "dim": 0}
MISTAKES: list[tuple[dict[str, Any], str]] = [
    ({"only": ["modle.*"]}, r"the filter 'modle\.\*' matches no name; near it: layers"),
    ({"exclude": ["optim.*"]}, r"the filter 'optim\.\*' matches no name"),
    ({"only": ["layers.*"], "exclude": ["*"]}, "nothing is left to write"),
    ({"names": {"layer.*.norm": "n.*"}}, r"the pattern 'layer\.\*\.norm' matches no name; near it: layers.0.norm"),
    ({"names": {"layers.*.norm": "n"}}, "are not those of 'layers.*.norm'; write the same stars"),
    ({"names": {"layers.{i}.norm": "n"}}, "layers.0.norm and layers.1.norm would both be called n"),
    ({"names": {"layers.0.norm": "layers.1.norm"}}, "would be called layers.1.norm, which another tensor is called"),
    ({"names": {"layers.*.norm": "a.*", "layers.0.**": "b.**"}}, "layers.0.norm fits 'layers.*.norm' and 'layers.0.*"),
    ({"names": {"{a}.{a}.b": "c"}}, "has a named part twice"),
    ({"names": {"{a b}.c": "c"}}, "is not a pattern of names"),
    (
        {"names": {"change": [{"split": "layers.*.norm", "to": ["a.*", "b.*"], "sizes": [1, 2]}]}},
        r"dim 0 has 6 indices, the sizes are \[1, 2\]",
    ),
    (
        {"names": {"change": [{"split": "layers.*.norm", "to": ["a.*", "b.*"], "sizes": [1, 2, 3]}]}},
        "3 sizes for 2 names",
    ),
    (
        {"names": {"change": [{"split": "layers.*.norm", "to": ["a.*", "b.*"], "sizes": ["q", 3]}]}},
        r"names of lengths \(none\)",
    ),
    ({"names": {"change": [{"split": "layers.*.norm", "to": ["a.*", "b.*"], "dim": 4}]}}, "has no dim 4"),
    ({"names": {"change": [{"split": "layers.*.norm", "to": ["a.*", "b.*"], "groups": 4}]}}, "multiple of 4 groups"),
    (
        {"names": {"change": [{"fuse": ["layers.*.norm", "layers.*.nrom"], "to": "x.*"}]}},
        "layers.0.norm is there but layers.0.nrom is not",
    ),
    (
        {"names": {"change": [{"fuse": ["layers.*.norm", "layers.*.stacked"], "to": "x.*"}]}},
        "one dtype and the same lengths",
    ),
    ({"names": {"change": [{"stack": "layers.*.experts.{e}.w1", "to": "layers.*.{e}"}]}}, "needs one named part that"),
    (
        {"only": ["*.experts.[02].w1"], "names": {"change": [{"stack": "layers.*.experts.{e}.w1", "to": "x.*"}]}},
        "they have to be 0 to 1",
    ),
    (
        {"names": {"change": [{"transpose": "layers.*.stacked", "dims": [0, 1]}]}},
        r"it has 3 dims, the order of dims is \[0, 1\]",
    ),
    ({"names": {"change": [{"turn": "a"}]}}, "a change has one of rename, split, fuse"),
    ({"names": {"change": [{"stack": "a.{e}", "to": "a", "groups": 2}]}}, "stack has the fields to, dim; got 'groups'"),
    (
        {"names": {"renames": {"a": "b"}, "change": []}},
        "no table 'renames'; a map of names has lengths, rename, change",
    ),
    ({"names": {"change": []}}, "it has no rename and no change"),
    ({"dtype": "int8"}, "elements are not converted to i8; pass one of f64, f32, f16, bf16"),
    ({"dtype": "bf61"}, "unknown dtype 'bf61'; did you mean bf16"),
    ({"layout": "S(7)", "ranks": 2}, r"the layout S\(7\) fits none of the 24 tensors, which have up to 3 dims"),
]


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_state(tmp_path_factory.mktemp("source") / "a", stored(), SPECS["rows"])


@pytest.mark.parametrize(("options", "message"), MISTAKES)
def test_mistakes_are_told_and_leave_nothing(
    source: Path, tmp_path: Path, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(CheckpointError, match=message):
        reshard(source, tmp_path / "b", **options)
    assert list(tmp_path.iterdir()) == []


def test_a_map_file_that_is_none_is_told(source: Path, tmp_path: Path) -> None:
    (tmp_path / "map.toml").write_text("[rename\n")
    with pytest.raises(CheckpointError, match=r"map\.toml is not valid TOML"):
        reshard(source, tmp_path / "b", names=tmp_path / "map.toml")
    with pytest.raises(FileNotFoundError, match=r"none\.toml"):
        reshard(source, tmp_path / "b", names=tmp_path / "none.toml")


@pytest.fixture
def toy() -> Iterator[None]:
    FORMATS.append(ToyFormat())
    yield
    FORMATS.pop()


@pytest.mark.usefixtures("toy")
def test_workers_say_that_they_do_not_know_a_format_that_was_added(tmp_path: Path) -> None:
    shardwise.save({"w": numbers(4, 6)}, tmp_path / "a", format="toy")
    with pytest.raises(CheckpointError, match="format 'toy', which was added in this process: worker"):
        reshard(tmp_path / "a", tmp_path / "b", workers=2)
    assert reshard(tmp_path / "a", tmp_path / "b").workers == 1


def run(*arguments: object) -> Result:
    return CliRunner().invoke(app, ["reshard", *map(str, arguments)])


def test_the_command(source: Path, tmp_path: Path, all_changes: Path) -> None:
    done = run(source, tmp_path / "b", "--names", all_changes, "--dtype", "bf16", "--only", "layers.*", "--json")
    assert done.exit_code == 0, done.output
    check_equal(read_all(tmp_path / "b"), {n: t.bfloat16() for n, t in expected_after_all(stored()).items()})
    done = run(source, tmp_path / "c", "--only", "*.norm", "--except", "layers.0.*")
    assert done.exit_code == 0 and sorted(read_all(tmp_path / "c")) == ["layers.1.norm"]
    for arguments, message in (
        (("--only", "nothing"), "the filter 'nothing' matches no name"),
        (("--names", tmp_path / "none.toml"), "none.toml: No such file"),
        (("--dtype", "i8"), "elements are not converted to i8"),
        (("--layout", "S(7)", "--ranks", 2), "fits none of the 24 tensors"),
        (("--format", "hf", "--config", tmp_path / "none"), "none: cannot be read"),
    ):
        failed = run(source, tmp_path / "d", *arguments)
        assert failed.exit_code == 2 and message in failed.output and "Traceback" not in failed.output, failed.output


def test_the_help_fits_80_columns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    shown = CliRunner().invoke(app, ["reshard", "--help"], terminal_width=80).stdout
    assert max(map(len, shown.splitlines())) <= 80
    for option in ("--only GLOB", "--except GLOB", "--names FILE", "--dtype TYPE", "--config FOLDER"):
        assert option in shown
