"""What `torch.compile` does with ShardedTensors: whatever touches them runs as it is, with one warning.

Dynamo, the tracer of `torch.compile`, follows Python code. It would follow ours into rules and layouts, which work with
NumPy and tables, and fail there. So when it is loaded it learns to leave the code of this package alone, and all that
this code calls. The program is then compiled around its ShardedTensors; `shardwise.compile` compiles all of it.
"""

from __future__ import annotations

import sys
import types
import warnings
from collections.abc import Iterator, Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import find_spec
from typing import Any

from shardwise._torch import TORCH_RELEASE
from shardwise._torch_graphs import is_called_by_compiled_code, is_dynamo_at_work, skip_package, skip_recursively
from shardwise.comm.traced import is_tracing
from shardwise.tensor.sharded_tensor import ShardedTensor

DYNAMO = "torch._dynamo"
_PACKAGE = "shardwise"
_warned: list[bool] = []
_MAY_SEE_NOTHING = TORCH_RELEASE < (2, 12)  # it does not follow the forward of torch's own modules after a hook of ours


def watch_for_dynamo() -> None:
    """Prepare dynamo for ShardedTensors, now or when it is loaded: loading it takes long, so it is not done here."""
    if DYNAMO in sys.modules:
        _prepare()
    else:
        sys.meta_path.insert(0, _DynamoFinder())


class _DynamoFinder(MetaPathFinder):
    """Finds dynamo as the others do, and has something done after it is loaded."""

    def find_spec(self, fullname: str, path: Sequence[str] | None, target: Any = None) -> ModuleSpec | None:
        if fullname != DYNAMO:
            return None
        sys.meta_path.remove(self)
        spec = find_spec(fullname)
        if spec is not None and spec.loader is not None:
            spec.loader = _LoaderWithEnd(spec.loader)
        return spec


class _LoaderWithEnd(Loader):
    def __init__(self, loader: Loader) -> None:
        self._loader = loader

    def create_module(self, spec: ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        self._loader.exec_module(module)
        _prepare()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)


def _prepare() -> None:
    skip_package(_PACKAGE)
    for code in _all_code():
        skip_recursively(code)
    ShardedTensor.__tensor_flatten__ = property(_warn_once)  # type: ignore[attr-defined]  # what dynamo asks for


def _warn_once(tensor: ShardedTensor) -> Any:
    """Say that we are not a tensor subclass that dynamo can follow, and warn if it is dynamo that asks."""
    if not _warned and is_dynamo_at_work() and not is_tracing():
        _warn()
    raise AttributeError("a ShardedTensor cannot be taken apart: its layout is not a constant of a graph")


def warn_compiled_callers() -> None:
    """Warn where a sharded module is called by compiled code: dynamo before torch 2.12 may never see its tensors."""
    if _MAY_SEE_NOTHING and not _warned and DYNAMO in sys.modules and not is_tracing() and is_called_by_compiled_code():
        _warn()


def _warn() -> None:
    _warned.append(True)
    warnings.warn(
        "torch.compile runs what touches ShardedTensors without compiling it; use shardwise.compile(model), which "
        "compiles all of it",
        stacklevel=3,
    )


def _all_code() -> Iterator[types.CodeType]:
    """The code of all functions of the package that are loaded, those inside of others too."""
    for name, module in list(sys.modules.items()):
        if name.partition(".")[0] == _PACKAGE:
            for value in list(vars(module).values()):
                yield from _code_of(value, module.__name__)


def _code_of(value: Any, module: str) -> Iterator[types.CodeType]:
    inner = getattr(value, "__func__", None) or getattr(value, "fget", None) or getattr(value, "__wrapped__", None)
    if isinstance(value, types.FunctionType):
        yield from _nested(value.__code__)
    elif isinstance(value, type) and value.__module__ == module:
        for part in vars(value).values():
            if not isinstance(part, type):
                yield from _code_of(part, module)
    if isinstance(inner, types.FunctionType):
        yield from _nested(inner.__code__)


def _nested(code: types.CodeType) -> Iterator[types.CodeType]:
    yield code
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            yield from _nested(constant)
