"""Does the package say what is wrong with a torch that it does not fit, and do without operators that torch removed?"""

from __future__ import annotations

import builtins
import re
import subprocess
import sys
import tomllib
from importlib import import_module
from pathlib import Path

import pytest
import torch

from shardwise._lazy import read_stub
from shardwise._torch import MissingOp, OpNamespace, present_ops
from shardwise._version import SUPPORTED_TORCH

ROOT = Path(__file__).parents[2]
SRC = ROOT / "src" / "shardwise"
PINNED = re.search(r"^torch==(\S+)$", (ROOT / "constraints.txt").read_text(), re.M)

# Hides operators of torch, as if a release had removed them, before the package is imported.
HIDE = """
import torch, torch._decomp, torch.distributed.tensor
hidden, namespace = {hidden!r}, type(torch.ops.aten)
find = namespace.__getattr__
def find_unless_hidden(self, name):
    if name in hidden:
        raise AttributeError(f"no operator {{name}}")
    return find(self, name)
namespace.__getattr__ = find_unless_hidden
for name in hidden:
    torch.ops.aten.__dict__.pop(name, None)
"""
USE = """
print([name for name in hidden if hasattr(torch.ops.aten, name)])
from shardwise import ChunkSpec, run_local, shard
print(run_local(lambda comm: (shard(torch.arange(8.0), ChunkSpec(0, 2)) + 1).sum().full().item(), 2))
"""


def run_python(source: str) -> subprocess.CompletedProcess[str]:
    environment = {"PYTHONPATH": str(SRC.parent), "PATH": "/usr/bin:/bin"}
    command = [sys.executable, "-W", "error", "-c", source]
    return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environment)


def test_rules_of_missing_operators_are_skipped() -> None:
    hidden = ("cholesky", "linalg_qr", "histc", "upsample_linear1d", "_fft_r2c", "complex", "uniform_", "alias")
    done = run_python(HIDE.format(hidden=hidden) + USE)
    assert done.stdout == "[]\n[36.0, 36.0]\n", done.stderr


def test_a_missing_operator_is_named_when_it_is_called() -> None:
    missing = OpNamespace("aten", torch.ops.aten).gone.default
    assert isinstance(missing, MissingOp)
    with pytest.raises(NotImplementedError, match=r"torch \S+ has no operator aten\.gone\.default"):
        missing(torch.ones(2))


def test_a_missing_overload_is_a_missing_operator() -> None:
    namespace = OpNamespace("aten", torch.ops.aten)
    assert present_ops([namespace.relu.gone, namespace.gone.default, namespace.relu.default]) == [
        torch.ops.aten.relu.default
    ]


@pytest.mark.skipif(torch.__version__.split("+")[0] != (PINNED and PINNED[1]), reason="other versions lack some")
def test_the_pinned_torch_has_every_operator_that_the_source_names() -> None:
    named = {n for p in SRC.rglob("*.py") for n in re.findall(r"\baten\.([A-Za-z_]\w*)\.([A-Za-z_]\w*)", p.read_text())}
    known = {(packet, overload) for packet, overload in named if hasattr(torch.ops.aten, packet)}
    examples = {("no_such_operator", "default"), ("relu", "no_such_overload")}  # of a doctest
    assert len(known) > 200
    assert {f"{p}.{o}" for p, o in named - known - examples} == set()
    assert {f"{p}.{o}" for p, o in known - examples if not hasattr(getattr(torch.ops.aten, p), o)} == set()


def test_a_missing_private_name_is_one_sentence() -> None:
    done = run_python("import torch; del torch._C._ForceDispatchKeyGuard\nfrom shardwise import run_local")
    last = done.stderr.splitlines()[-1]
    assert last.startswith("ImportError: shardwise uses torch._C._ForceDispatchKeyGuard, which torch ")
    assert last.endswith(f"does not have; it supports {SUPPORTED_TORCH}")


def test_a_lazy_name_shows_the_real_error() -> None:
    """`from shardwise import x` would turn an AttributeError inside of the package into "cannot import name"."""
    removal = "import torch.nn.init as init; del init.uniform_\n"
    done = run_python(removal + "from shardwise import run_local")
    reason = "module 'torch.nn.init' has no attribute 'uniform_'"
    assert f"\nAttributeError: {reason}" in done.stderr
    last = done.stderr.splitlines()[-1]
    assert last.startswith(f"ImportError: shardwise.run_local cannot be loaded: {reason}"), done.stderr
    assert last.endswith(f"shardwise supports {SUPPORTED_TORCH}")


@pytest.mark.parametrize("package", ["shardwise", "shardwise.checkpoint", "shardwise.compat"])
def test_the_stub_lists_the_names(package: str) -> None:
    path = SRC.parent / package.replace(".", "/")
    origins, loaded = read_stub(path / "__init__.pyi", package), import_module(package)
    assert list(origins) == dir(loaded)
    own_names = [name for name, (_, own) in origins.items() if own is not None]
    assert [name for name in own_names if not hasattr(builtins, name)] == loaded.__all__
    assert all(f" as {name}" in (path / "__init__.pyi").read_text() for name in origins)


def test_supported_versions_are_the_bounds_of_the_project() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    first, last = re.findall(r"\d+\.(\d+)", SUPPORTED_TORCH)
    assert f"torch>=2.{first},<2.{int(last) + 1}" in project["dependencies"]
