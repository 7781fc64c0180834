"""Which code computes from its arguments alone, and which names does code read?

1. Code is of one of three origins. That of torch, of this package and of a few libraries is trusted; that of Python's
   standard library is allowed for some modules; all other code is the user's, and what it reads is noted.
2. C functions are allowed by list. One that is not known reads something else in each call, until somebody has looked.
3. What code may read is taken from its names. Where a name is computed (`getattr(x, name)`), all attributes may be
   read. In a Python that is not known nothing is traced.
"""

from __future__ import annotations

import builtins
import dis
import functools
import sys
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import BuiltinFunctionType, CodeType, MethodDescriptorType, ModuleType, WrapperDescriptorType
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

KNOWN_PYTHONS = ((3, 11), (3, 12), (3, 13))


def words(text: str) -> frozenset[str]:
    """The words of a text, as a set."""
    return frozenset(text.split())


Origin: TypeAlias = Literal["user", "stdlib", "trusted"]
_PACKAGE = str(Path(__file__).parents[1])
_PATHS = sysconfig.get_paths()
_SITES = tuple({_PATHS["purelib"], _PATHS["platlib"]})
_STDLIB = tuple({_PATHS["stdlib"], _PATHS["platstdlib"]})
_TRUSTED_PACKAGES = words(  # torch, and what it calls itself
    """
    torch functorch torchgen numpy sympy mpmath networkx optree triton filelock fsspec jinja2 markupsafe
    packaging psutil setuptools yaml _distutils_hack _pytest pytest
    """
)
_TRUSTED = (
    f"{_PACKAGE}/",
    f"{Path(torch.__file__).parent}/",
    *(f"{site}/{name}{end}" for site in _SITES for name in _TRUSTED_PACKAGES for end in ("/", ".py")),
    *(f"{site}/typing_extensions.py" for site in _SITES),
)
PURE_STDLIB = words(
    """
    _collections_abc _weakrefset abc base64 bisect collections colorsys contextlib copy copyreg dataclasses enum
    fractions functools heapq importlib inspect itertools json keyword linecache logging math numbers operator
    os re reprlib statistics string textwrap tokenize traceback types typing warnings weakref
    """
)
OPAQUE_STDLIB = words("logging typing abc re warnings inspect weakref")
_IMPURE_STDLIB_CODE = words("currentframe stack getouterframes getinnerframes getmembers trace import_module reload")
_OS_CODE = words("getenv __getitem__ encode decode fspath get __contains__ __iter__ __len__ encodekey check_str")
_PURE_C_MODULES = words(
    """
    builtins math cmath _operator operator itertools _functools functools _collections collections _struct
    _bisect _heapq _abc _json _sre re _typing _warnings torch shardwise numpy _contextvars
    """
)
IMPURE_BUILTINS = words("input open exec eval compile globals locals print breakpoint __import__")
REFUSED_BUILTINS = IMPURE_BUILTINS - {"print", "breakpoint", "__import__", "globals", "locals"}
IMPURE_TRUSTED = words(
    """
    manual_seed seed initial_seed load save fork_rng get_rng_state set_rng_state set_default_dtype
    set_default_device set_default_tensor_type __array__ __dlpack__ storage untyped_storage typed_storage
    share_memory_ use_deterministic_algorithms set_printoptions
    """
)
_IMPURE_TORCH = words(
    """
    seed initial_seed manual_seed load save get_rng_state set_rng_state from_file _cuda_getCurrentRawStream
    synchronize memory_allocated
    """
)
_PLAIN_TYPES = (int, float, complex, str, bytes, list, tuple, dict, set, frozenset, bool, range, slice, type(None))
_READS_VALUES = words("numpy tolist data_ptr __array__ __dlpack__ untyped_storage __reduce_ex__")
PRISTINE = dict(vars(builtins))
_BY_NAME = words("getattr hasattr setattr delattr")
_COMPUTED = _BY_NAME | words(
    "vars dir __dict__ __getattribute__ attrgetter methodcaller format format_map __getstate__"
)
_REFLECTIVE = words("__globals__ __closure__ cell_contents f_globals f_locals f_back gi_frame __subclasses__")
_LOADS_ONE = words("LOAD_FAST LOAD_FAST_CHECK LOAD_DEREF LOAD_GLOBAL LOAD_NAME LOAD_CONST")


@lru_cache(maxsize=4096)
def origin_of(filename: str) -> Origin:
    """Whose code a file has.

    >>> origin_of(torch.__file__), origin_of(functools.__file__), origin_of("train.py")
    ('trusted', 'stdlib', 'user')
    """
    if filename.startswith(_TRUSTED):
        return "trusted"
    if filename.startswith(_SITES):
        return "user"
    return "stdlib" if filename.startswith((*_STDLIB, "<frozen ")) else "user"


def origin_of_module(name: object) -> Origin:
    """Whose code a Python module has."""
    if not isinstance(name, str):  # a class whose `__module__` is a descriptor
        return "user"
    root, filename = name.partition(".")[0], getattr(sys.modules.get(name), "__file__", None)
    if filename is not None:
        return origin_of(filename)
    if root.startswith("namedtuple_") or root in (*_TRUSTED_PACKAGES, "shardwise"):
        return "trusted"
    return "stdlib" if root in sys.stdlib_module_names else "user"


def origin_of_code(code: CodeType, module: str) -> Origin:
    """Whose code this is; that of no file, as dataclasses and torch make it, is that of its module."""
    filename = code.co_filename
    if filename.startswith("<") and not filename.startswith("<frozen "):
        return "trusted" if filename.startswith("<eval_with_key>") else origin_of_module(module)
    return origin_of(filename)


def is_allowed_stdlib(module: str, code: CodeType) -> bool:
    """Whether some code of the standard library computes from its arguments alone."""
    root = module.partition(".")[0]
    if root == "os":
        return code.co_name in _OS_CODE
    return root in PURE_STDLIB and code.co_name not in _IMPURE_STDLIB_CODE


def is_pure_builtin(function: Any) -> bool:
    """Whether a C function, or a method of a C object, computes from its arguments alone."""
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if owner is None and (kind := getattr(function, "__objclass__", None)) is not None:
        owner = kind
    if owner is None or isinstance(owner, ModuleType):
        module = getattr(function, "__module__", None) or getattr(owner, "__name__", "")
        root = str(module).partition(".")[0]
        if root == "builtins":
            return name not in IMPURE_BUILTINS
        if root == "sys":
            return name in ("exc_info", "getsizeof", "intern")
        is_impure = name == "copy_context" or (root == "torch" and name in _IMPURE_TORCH) or ".random" in str(module)
        return root in _PURE_C_MODULES and not is_impure
    if isinstance(owner, Tensor):
        return name not in _READS_VALUES
    lookup = owner.__mro__ if isinstance(owner, type) else type(owner).__mro__
    module = next((kind.__module__ for kind in lookup if name in vars(kind)), type(owner).__module__)
    is_random = ".random" in module or isinstance(owner, torch.Generator)
    return module.partition(".")[0] in _PURE_C_MODULES and not is_random and name not in _IMPURE_TORCH


def is_python_class(kind: type) -> bool:
    """Whether a class is made by a `class` statement, not in C: a class made in C has methods or a `__new__` in C."""
    for value in vars(kind).values():
        if isinstance(value, MethodDescriptorType | WrapperDescriptorType) and value.__objclass__ is kind:
            return False
        if isinstance(value, BuiltinFunctionType) and value.__self__ is kind:
            return False
    return True


@dataclass(frozen=True)
class CodeNames:
    """What some code may read by name."""

    globals: frozenset[str]
    attributes: frozenset[str]
    loaded: frozenset[str]  # attributes that it may take without calling them at once
    imports: tuple[tuple[str, int], ...]
    nested: tuple[CodeType, ...]
    reads_all: bool  # whether it may read attributes by names that are not in it
    reflective: str | None


@lru_cache(maxsize=8192)
def names_in(code: CodeType) -> CodeNames:
    """The names in some code; not those of functions inside it."""
    instructions = [*dis.get_instructions(code)]
    used, loaded = set[str](), set[str]()
    imports: list[tuple[str, int]] = []
    reads_all = any(i.opname == "MATCH_CLASS" for i in instructions)
    constants = set[str | None]()
    for at, each in enumerate(instructions):
        name = each.argval
        if each.opname in ("LOAD_GLOBAL", "LOAD_NAME", "STORE_GLOBAL", "STORE_NAME", "DELETE_GLOBAL", "DELETE_NAME"):
            used.add(name)
            if name in _BY_NAME:
                constant = _constant_name(instructions[at + 1 :])
                reads_all |= constant is None
                constants.add(constant)
        elif each.opcode in dis.hasname and each.opname.startswith("LOAD_"):
            if each.opname.startswith(("LOAD_FROM_DICT", "LOAD_CLASS")):
                used.add(name)
            if not _is_method_load(each):
                loaded.add(name)
        elif each.opname == "IMPORT_NAME":
            level = instructions[at - 2].argval if at >= 2 and isinstance(instructions[at - 2].argval, int) else 0
            imports.append((str(name), level))
    mentioned = frozenset(code.co_names)
    return CodeNames(
        frozenset(used),
        mentioned | {name for name in constants if name is not None},
        frozenset(loaded),
        tuple(imports),
        tuple(constant for constant in code.co_consts if isinstance(constant, CodeType)),
        reads_all or bool(mentioned & (_COMPUTED - _BY_NAME)) or bool((mentioned - used) & _BY_NAME),
        next(iter(sorted(mentioned & _REFLECTIVE)), None),
    )


def _is_method_load(instruction: dis.Instruction) -> bool:
    """Whether an attribute is taken to be called at once."""
    if instruction.opname == "LOAD_METHOD":
        return True
    is_flagged = sys.version_info >= (3, 12) and instruction.opname == "LOAD_ATTR" and instruction.arg is not None
    return is_flagged and bool((instruction.arg or 0) & 1)


def _constant_name(after: list[dis.Instruction]) -> str | None:
    """The second argument of `getattr(x.y, "name")`, as it follows the name `getattr`; None for all else."""
    found: Iterator[dis.Instruction] = (i for i in after if i.opname not in ("PUSH_NULL", "EXTENDED_ARG"))
    first = next(found, None)
    if first is None or first.opname not in _LOADS_ONE:
        return None
    second = next((i for i in found if i.opname != "LOAD_ATTR"), None)
    is_constant = second is not None and second.opname == "LOAD_CONST" and isinstance(second.argval, str)
    return second.argval if is_constant and second is not None else None


def line_of(code: CodeType, names: set[str]) -> int:
    """The line on which some code mentions one of these names, or its first."""
    line = code.co_firstlineno
    for instruction in dis.get_instructions(code):
        if instruction.positions is not None and instruction.positions.lineno is not None:
            line = instruction.positions.lineno
        if instruction.argval in names and isinstance(instruction.argval, str):
            return line
    return code.co_firstlineno


NUMPY_READERS = ("random", "load", "loadtxt", "genfromtxt", "fromfile", "memmap", "save", "savez")
LRU_CACHE: Any = functools._lru_cache_wrapper
PLAIN_TYPES = _PLAIN_TYPES
