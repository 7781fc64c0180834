"""Does the source keep its shape: imports that point down, a core without torch, few files that are topics?

1. Every import of the package is found by parsing, also those inside functions and under TYPE_CHECKING.
2. A module's layer is that of its top folder; it may import its own layer and those below.
3. What must load without torch is loaded in a fresh interpreter, which reports the modules it holds.
4. Constants that start with MOST say how much there is today. They are lowered with every step that makes it less, and
   never raised: a new case changes a mechanism, it does not stand beside it.
"""

import ast
import graphlib
import re
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

SRC = Path(__file__).parents[2] / "src"
LAYERS = {
    "geometry": 0,
    "transfer": 1,
    "comm": 2,
    "tensor": 3,
    "ops": 3,
    "compiler": 4,
    "nn": 4,
    "checkpoint": 4,
    "compat": 4,
    "sync": 4,
    "tracing": 4,
    "hf": 5,
    "planner": 5,
    "view": 5,
    "page": 5,
    "cli": 6,
    "testing": 7,
    "__main__": 7,
}
LEAF, TOP = -1, 7
PURE = ("geometry", "transfer")
LAZY = ("shardwise", "shardwise.cli", "shardwise.testing")  # may import inside functions: start-up must not load torch
MAX_FILE_LINES, MAX_FUNCTION_LINES = 900, 70
MOST_FILES = 192  # modules of the package; the aim is 170
MOST_FILES_IN_A_FOLDER = 16
MOST_SINGLE_IMPORTERS = 27  # modules that one other module imports; the aim is 25
MOST_OWN_CACHES = 20  # modules that take a cache from functools instead of `_cache.py`
MOST_DIALECT = 0  # names with a word of DIALECT, counted once for each module
# PyTorch, JAX and MPI have other words: received, placement, owner, register, handshake, irregular, prefetch.
DIALECT = """told homes home belongs teach door cards knocked stands_for make_again travels_early two_step torch_words
 in_pieces"""
NAMED_TWICE = {"Shard"}  # the placement, and the local shard of torch's old API: both are public
IMPORT_CALLS = {"importlib.import_module", "import_module", "__import__"}
FACTORIES = {"arange", "as_tensor", "empty", "empty_strided", "eye", "full", "linspace", "ones", "tensor", "zeros"}
FACTORIES |= {"rand", "randint", "randn", "randperm"}
DEFAULT_DEVICE_USERS = ("shardwise.cli.demo", "shardwise.comm.local")  # a user's program; asks which device it is
TEXT_SUFFIXES = {".py", ".js", ".html", ".css"}


@dataclass(frozen=True)
class Import:
    """One imported name, where it stands, and whether it runs when the module is loaded."""

    target: str
    line: int
    in_function: bool
    only_for_types: bool


@cache
def tree_of(path: Path) -> ast.Module:
    """The syntax tree of a file; each check walks the same ones."""
    return ast.parse(path.read_text())


def modules(root: Path = SRC) -> dict[str, Path]:
    """All modules under root by dotted name."""
    paths = sorted(root.rglob("*.py"))
    return {".".join(p.relative_to(root).with_suffix("").parts).removesuffix(".__init__"): p for p in paths}


def imports_of(name: str, path: Path) -> list[Import]:
    """Every import statement of a module, relative ones made absolute; `from a import b` gives `a.b`."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    return list(_walk(tree_of(path), package, False, False))


def _walk(node: ast.AST, package: str, in_function: bool, only_for_types: bool) -> Iterator[Import]:
    for child in ast.iter_child_nodes(node):
        for target in _targets(child, package):
            yield Import(target, getattr(child, "lineno", 0), in_function, only_for_types)
        called = in_function or isinstance(child, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
        typing = only_for_types or (isinstance(child, ast.If) and "TYPE_CHECKING" in ast.unparse(child.test))
        yield from _walk(child, package, called, typing)


def _targets(node: ast.AST, package: str) -> list[str]:
    if isinstance(node, ast.Import):
        return [alias.name for alias in node.names]
    if isinstance(node, ast.ImportFrom):
        up = package.split(".")[: len(package.split(".")) - node.level + 1] if node.level else []
        base = ".".join([*up, *([node.module] if node.module else [])])
        return [f"{base}.{alias.name}" for alias in node.names]
    if isinstance(node, ast.Call) and ast.unparse(node.func) in IMPORT_CALLS:
        return [arg.value for arg in node.args[:1] if isinstance(arg, ast.Constant) and isinstance(arg.value, str)]
    return []


def layer_of(name: str) -> int:
    """The layer of a dotted name of the package; a root module whose name starts with one underscore is a leaf."""
    parts = name.split(".")
    if len(parts) == 1:
        return TOP
    if parts[1] in LAYERS:
        return LAYERS[parts[1]]
    return LEAF if parts[1].startswith("_") and not parts[1].startswith("__") else TOP


def inside(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def upward_imports(root: Path) -> list[str]:
    """Imports of a higher layer, one line each."""
    return [
        f"{name}:{item.line} (L{layer_of(name)}) imports {item.target} (L{layer_of(item.target)})"
        for name, path in modules(root).items()
        for item in imports_of(name, path)
        if inside(item.target, "shardwise") and layer_of(item.target) > layer_of(name)
    ]


def load_time_graph(root: Path) -> dict[str, set[str]]:
    """Which modules of the package each module imports when it is loaded."""
    known = modules(root)
    graph: dict[str, set[str]] = {}
    for name, path in known.items():
        wanted = [i.target for i in imports_of(name, path) if not i.in_function and not i.only_for_types]
        found = {t if t in known else t.rpartition(".")[0] for t in wanted}
        graph[name] = {t for t in found if t in known}
    return graph


def imports_in_functions(root: Path) -> list[str]:
    """Imports of the package inside functions, where the module is not one that loads names on first use."""
    return [
        f"{name}:{item.line} imports {item.target} inside a function"
        for name, path in modules(root).items()
        if name != LAZY[0] and not any(inside(name, lazy) for lazy in LAZY[1:])
        for item in imports_of(name, path)
        if item.in_function and inside(item.target, "shardwise")
    ]


def imports_matching(root: Path, target: str, packages: tuple[str, ...] = ()) -> list[str]:
    """Imports of a package called target in the modules of the given top folders (all when none is given)."""
    return [
        f"{name}:{item.line} imports {item.target}"
        for name, path in modules(root).items()
        if not packages or any(inside(name, f"shardwise.{p}") for p in packages)
        for item in imports_of(name, path)
        if inside(item.target, target)
    ]


def torch_modules_after(statement: str) -> list[str]:
    """The modules of torch that a fresh interpreter holds after running a statement."""
    report = "import sys; print(*sorted(m for m in sys.modules if m.split('.')[0] == 'torch'))"
    command = [sys.executable, "-c", f"{statement}\n{report}"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout.split()


def too_long(root: Path) -> list[str]:
    """Files and functions over the limits, one line each."""
    files = [p for p in sorted(root.rglob("*")) if p.suffix in TEXT_SUFFIXES]
    lengths = {p: len(p.read_text().splitlines()) for p in files}
    found = [f"{p.relative_to(root)}: {n} lines" for p, n in lengths.items() if n > MAX_FILE_LINES]
    for path in (p for p in files if p.suffix == ".py"):
        for node in ast.walk(tree_of(path)):
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                length = (node.end_lineno or node.lineno) - node.lineno + 1
                if length > MAX_FUNCTION_LINES:
                    found.append(f"{path.relative_to(root)}:{node.lineno} {node.name}: {length} lines")
    return found


def find_unnamed_devices(root: Path) -> list[str]:
    """Calls such as `torch.zeros(2)`: their tensors would be on whichever device a user has made torch's default."""
    found = []
    for name, path in modules(root).items():
        if not name.startswith(DEFAULT_DEVICE_USERS):
            calls = [node for node in ast.walk(tree_of(path)) if isinstance(node, ast.Call)]
            found += [f"{name}:{c.lineno}: {ast.unparse(c)}" for c in calls if _makes_tensor_anywhere(c)]
    return found


def find_gathers(root: Path) -> list[str]:
    """Calls of `all_gather_bytes` outside of comm, whose `agree.py` asks all small questions to all ranks."""
    return [
        f"{name}:{node.lineno}"
        for name, path in modules(root).items()
        if not inside(name, "shardwise.comm") and not inside(name, "shardwise.testing")
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call) and ast.unparse(node.func).endswith(".all_gather_bytes")
    ]


def find_crowded_folders(root: Path) -> list[str]:
    """Folders with more modules than a folder may have."""
    counts = Counter(path.parent for path in modules(root).values())
    return [f"{d.relative_to(root)}: {n} files" for d, n in counts.items() if n > MOST_FILES_IN_A_FOLDER]


def find_single_importers(root: Path) -> list[str]:
    """Modules that one other module imports when it is loaded: such a file is often a part of that one."""
    known = modules(root)
    importers = Counter(target for targets in load_time_graph(root).values() for target in targets)
    return [name for name, count in importers.items() if count == 1 and known[name].name != "__init__.py"]


def find_classes_named_twice(root: Path) -> list[str]:
    """Names of classes that several modules define."""
    nodes = (node for path in modules(root).values() for node in ast.walk(tree_of(path)))
    counts = Counter(node.name for node in nodes if isinstance(node, ast.ClassDef))
    return [name for name, count in counts.items() if count > 1 and name not in NAMED_TWICE]


def find_probes_of_comms(root: Path) -> list[str]:
    """Calls that ask a comm for an attribute by name: what a transport can do is a value, `Capabilities`."""
    return [
        f"{name}:{node.lineno}: {ast.unparse(node)}"
        for name, path in modules(root).items()
        for node in ast.walk(tree_of(path))
        if isinstance(node, ast.Call)
        and ast.unparse(node.func) in ("hasattr", "getattr")
        and ast.unparse(node.args[0]).split(".")[-1].lstrip("_") in ("comm", "engine", "transport")
    ]


def find_own_caches(root: Path) -> list[str]:
    """Modules that import a cache of functools, which no other file can clear or bound."""
    wanted = {"functools.cache", "functools.lru_cache"}
    return [
        name
        for name, path in modules(root).items()
        if name != "shardwise._cache" and wanted & {item.target for item in imports_of(name, path)}
    ]


def find_dialect(root: Path) -> list[str]:
    """Names of functions, classes, variables and attributes with a word of DIALECT in them."""
    found = set()
    for name, path in modules(root).items():
        for node in ast.walk(tree_of(path)):
            for used in (getattr(node, field, None) for field in ("name", "id", "arg", "attr")):
                if isinstance(used, str):
                    words = "_" + re.sub(r"(?<=[a-z0-9])([A-Z])", r"_\1", used).lower() + "_"
                    found |= {f"{name}: {used}" for word in DIALECT.split() if f"_{word}_" in words}
    return sorted(found)


def _makes_tensor_anywhere(call: ast.Call) -> bool:
    made = (
        isinstance(call.func, ast.Attribute) and ast.unparse(call.func.value) == "torch" and call.func.attr in FACTORIES
    )
    return made and not any(k.arg in ("device", None) for k in call.keywords)


def test_every_top_module_has_a_layer() -> None:
    tops = {name.split(".")[1] for name in modules() if "." in name}
    unknown = {t for t in tops if t not in LAYERS and (not t.startswith("_") or t.startswith("__"))}
    assert not unknown, f"add {sorted(unknown)} to LAYERS"


def test_imports_point_down() -> None:
    assert upward_imports(SRC) == []


def test_modules_load_without_cycles() -> None:
    try:
        graphlib.TopologicalSorter(load_time_graph(SRC)).prepare()
    except graphlib.CycleError as error:
        pytest.fail("import cycle: " + " <- ".join(error.args[1]))


def test_no_import_hides_in_a_function() -> None:
    assert imports_in_functions(SRC) == []


def test_core_never_names_torch() -> None:
    assert imports_matching(SRC, "torch", PURE) == []


def test_torchs_own_shard_package_is_never_imported() -> None:
    assert imports_matching(SRC, "torch.distributed._shard") == []


def test_nothing_imports_the_drop_in_package() -> None:
    assert [line for line in imports_matching(SRC, "shardwise.compat") if not line.startswith("shardwise.compat")] == []


def test_core_loads_without_torch() -> None:
    core = [name for name in modules() if any(inside(name, f"shardwise.{p}") for p in PURE)]
    assert {name.split(".")[1] for name in core} == set(PURE)
    assert torch_modules_after("import " + ", ".join(core)) == []


@pytest.mark.parametrize("name", ["shardwise", "shardwise.cli.main", "shardwise.checkpoint.store"])
def test_entrances_load_without_torch(name: str) -> None:
    assert torch_modules_after(f"import {name}") == []


def test_files_and_functions_are_small() -> None:
    assert too_long(SRC) == []


def test_files_are_few() -> None:
    assert len(modules()) <= MOST_FILES, "join the new file with the topic it belongs to"


def test_folders_are_not_crowded() -> None:
    assert find_crowded_folders(SRC) == []


def test_modules_with_one_importer_are_few() -> None:
    found = find_single_importers(SRC)
    assert len(found) <= MOST_SINGLE_IMPORTERS, found


def test_a_class_name_exists_once() -> None:
    assert find_classes_named_twice(SRC) == []


def test_comms_are_not_probed() -> None:
    assert find_probes_of_comms(SRC) == []


def test_caches_come_from_one_file() -> None:
    found = find_own_caches(SRC)
    assert len(found) <= MOST_OWN_CACHES, found


def test_names_are_of_plain_words() -> None:
    found = find_dialect(SRC)
    assert len(found) <= MOST_DIALECT, found


# Each check above is shown to fail on a package that breaks its rule.


def write_package(root: Path, **sources: str) -> Path:
    for dotted, source in sources.items():
        path = root / "shardwise" / (dotted.replace("__", "/") + ".py")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(source)
    return root


def test_tensors_name_their_device() -> None:
    assert find_unnamed_devices(SRC) == []


def test_questions_to_all_ranks_go_through_agree() -> None:
    assert find_gathers(SRC) == []


def test_loaded_torch_is_reported() -> None:
    assert "torch" in torch_modules_after("import torch")


@pytest.mark.parametrize(
    "source",
    [
        "from shardwise.tensor import api\n",
        "from ..tensor import api\n",
        "def f():\n    import shardwise.tensor.api\n",
        "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from shardwise.tensor.api import X\n",
        "import importlib\nx = importlib.import_module('shardwise.tensor.api')\n",
        "from shardwise import Box\n",
    ],
)
def test_upward_import_is_reported(tmp_path: Path, source: str) -> None:
    root = write_package(tmp_path, geometry__box=source, tensor__api="")
    assert len(upward_imports(root)) == 1
    assert upward_imports(root)[0].startswith("shardwise.geometry.box:")


def test_downward_import_is_accepted(tmp_path: Path) -> None:
    root = write_package(tmp_path, geometry__box="", tensor__api="from ..geometry.box import Box\n", _version="")
    assert upward_imports(root) == []


def test_cycle_is_reported(tmp_path: Path) -> None:
    root = write_package(tmp_path, geometry__a="from shardwise.geometry import b\n", geometry__b="from . import a\n")
    with pytest.raises(graphlib.CycleError):
        graphlib.TopologicalSorter(load_time_graph(root)).prepare()


def test_import_in_function_is_reported(tmp_path: Path) -> None:
    root = write_package(tmp_path, ops__a="def f():\n    from shardwise.tensor import b\n", cli__main="")
    assert imports_in_functions(root) == ["shardwise.ops.a:2 imports shardwise.tensor.b inside a function"]


@pytest.mark.parametrize("source", ["import torch\n", "def f():\n    from torch import nn\n"])
def test_torch_in_the_core_is_reported(tmp_path: Path, source: str) -> None:
    root = write_package(tmp_path, transfer__plan=source)
    assert len(imports_matching(root, "torch", PURE)) == 1


def test_import_of_torchs_shard_package_is_reported(tmp_path: Path) -> None:
    root = write_package(tmp_path, compat__x="from torch.distributed import _shard\n")
    assert imports_matching(root, "torch.distributed._shard") == [
        "shardwise.compat.x:1 imports torch.distributed._shard"
    ]


def test_long_file_and_function_are_reported(tmp_path: Path) -> None:
    root = write_package(tmp_path, a="x = 1\n" * 901, b="def f():\n" + "    x = 1\n" * 70)
    assert too_long(root) == ["shardwise/a.py: 901 lines", "shardwise/b.py:1 f: 71 lines"]


def test_tensor_on_the_default_device_is_reported(tmp_path: Path) -> None:
    root = write_package(tmp_path, nn__a="torch.zeros(2)\ntorch.ones(2, device='cpu')\ntorch.zeros(2, **options)\n")
    assert find_unnamed_devices(root) == ["shardwise.nn.a:1: torch.zeros(2)"]


def test_question_that_does_not_go_through_agree_is_reported(tmp_path: Path) -> None:
    root = write_package(tmp_path, nn="def f(comm):\n    comm.all_gather_bytes(b'', label='x')\n")
    assert find_gathers(root) == ["shardwise.nn:2"]


def test_crowded_folder_is_reported(tmp_path: Path) -> None:
    files = {f"nn__m{number}": "" for number in range(MOST_FILES_IN_A_FOLDER + 1)}
    root = write_package(tmp_path, **files)
    assert find_crowded_folders(root) == [f"shardwise/nn: {len(files)} files"] and len(modules(root)) == len(files)


def test_module_with_one_importer_is_reported(tmp_path: Path) -> None:
    two = "from shardwise.nn import a, b\n"
    root = write_package(tmp_path, nn__a="", nn__b="", nn__c=two, nn__d="from shardwise.nn import a\n")
    assert find_single_importers(root) == ["shardwise.nn.b"]


def test_class_that_is_named_twice_is_reported(tmp_path: Path) -> None:
    source = "class Move: ...\nclass Shard: ...\n"
    root = write_package(tmp_path, nn__a=source, nn__b=source)
    assert find_classes_named_twice(root) == ["Move"]


def test_probe_of_a_comm_is_reported(tmp_path: Path) -> None:
    source = "hasattr(comm, 'lend')\ngetattr(self._comm, 'x', None)\nhasattr(module, 'x')\n"
    root = write_package(tmp_path, nn__a=source)
    assert [line.partition(": ")[0] for line in find_probes_of_comms(root)] == ["shardwise.nn.a:1", "shardwise.nn.a:2"]


def test_cache_of_its_own_is_reported(tmp_path: Path) -> None:
    caches = {"nn__a": "from functools import lru_cache\n", "nn__b": "from functools import partial\n"}
    root = write_package(tmp_path, _cache="from functools import lru_cache\n", **caches)
    assert find_own_caches(root) == ["shardwise.nn.a"]


def test_word_of_the_dialect_is_reported(tmp_path: Path) -> None:
    source = "def _bring_home(x): ...\nclass TwoStep: ...\nhomeland = told\nx.belongs\n"
    root = write_package(tmp_path, nn=source)
    assert [line.partition(": ")[2] for line in find_dialect(root)] == ["TwoStep", "_bring_home", "belongs", "told"]
