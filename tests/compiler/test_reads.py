"""What programs read from outside: one table of small programs, each beside itself without `shardwise.compile`.

A row is what is there before, the body of `f(x)`, and changes: `f` is called twice, and twice more after each change.
Rows of `GRAPH` stay compiled; those of `PLAIN` read what cannot be compared, so they run without a graph.
"""

from __future__ import annotations

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import textwrap
import types
import warnings
import weakref
from collections.abc import Callable, Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
import typing_extensions

import shardwise
from shardwise import ChunkSpec, Mesh, ModelPlan, ShardedTensor, run_local, shard, shard_module
from shardwise.compiler import admission

Row = tuple[str, ...]
HOLDER = "class A:\n  k = 2.0\n  def __init__(self): self.v = 3.0\na = A()"

GRAPH: dict[str, Row] = {
    # By source.
    "global": ("k = 2.0", "return x * k", "k = 3.0"),
    "global that is deleted": ("k = 2.0", "try: return x * k\nexcept NameError: return x", "del k", "k = 5.0"),
    "global that hides a builtin": ("", "return x * abs(-2.0)", "abs = lambda v: 7.0"),
    "global of a helper": ("k = 2.0\ndef g(x): return x * k", "return g(x)", "k = 3.0"),
    "closure": (
        "def make():\n  k = 2.0\n  def g(x): return x * k\n  return g\ng = make()",
        "return g(x)",
        "g.__closure__[0].cell_contents = 4.0",
    ),
    "closure of a closure": (
        "def make(k):\n  def g(x):\n    def h(): return x * k\n    return h()\n  return g\ng = make(2.0)",
        "return g(x)",
        "g = make(3.0)",
    ),
    "list comprehension": ("ks = [1.0, 2.0]", "return sum([x * k for k in ks])", "ks.append(3.0)"),
    "generator of its own": ("ks = [1.0, 2.0]", "return sum(x * k for k in ks)", "ks[0] = 4.0"),
    "default value": ("def g(x, k=2.0): return x * k", "return g(x)", "g.__defaults__ = (3.0,)"),
    "keyword default": ("def g(x, *, k=2.0): return x * k", "return g(x)", "g.__kwdefaults__['k'] = 3.0"),
    "default list": ("def g(x, ks=[2.0]): return x * ks[0]", "return g(x)", "g.__defaults__[0][0] = 3.0"),
    "code of a function": ("def g(x): return x * 2\ndef h(x): return x * 3", "return g(x)", "g.__code__ = h.__code__"),
    "function that is replaced": ("def g(x): return x * 2", "return g(x)", "def g(x): return x * 5"),
    "lambda in a dict": ("table = {'g': lambda x: x * 2}", "return table['g'](x)", "table['g'] = lambda x: x * 3"),
    "function attribute": ("def g(): pass\ng.k = 2.0", "return x * g.k", "g.k = 3.0", "g.k = 3"),
    "function attribute by getattr": ("def g(): pass\ng.k = 2.0", "return x * getattr(g, 'k')", "g.k = 3.0"),
    "function attribute that is missing": ("def g(): pass\ng.z = 1", "return x * getattr(g, 'k', 2.0)", "g.k = 3.0"),
    "partial": (
        "from functools import partial\ndef g(x, k): return x * k\nh = partial(g, k=2.0)",
        "return h(x)",
        "h = partial(g, k=3.0)",
    ),
    "partial of a list": (
        "from functools import partial\nks = [2.0]\ndef g(ks, x): return x * ks[0]\nh = partial(g, ks)",
        "return h(x)",
        "ks[0] = 3.0",
    ),
    "instance attribute": (HOLDER, "return x * a.v", "a.v = 4.0"),
    "class attribute by class": (HOLDER, "return x * A.k", "A.k = 4.0"),
    "class attribute by instance": (HOLDER, "return x * a.k", "A.k = 4.0"),
    "class attribute of a base": (HOLDER + "\nclass B(A): pass\nb = B()", "return x * b.k", "A.k = 4.0"),
    "class attribute that is shadowed by a subclass": (
        HOLDER + "\nclass B(A): pass\nb = B()",
        "return x * b.k",
        "B.k = 4.0",
    ),
    "class attribute that is shadowed by the instance": (HOLDER, "return x * a.k", "a.k = 4.0", "del a.k"),
    "class attribute by super": (
        HOLDER + "\nclass B(A):\n  k = 9.0\n  def g(self, x): return x * super().k\nb = B()",
        "return b.g(x)",
        "A.k = 4.0",
    ),
    "class attribute of type(self)": (HOLDER, "return x * type(a).k", "A.k = 5.0"),
    "class attribute of a new object": (HOLDER, "return x * A().k", "A.k = 5.0"),
    "class attribute by classmethod": (
        "class A:\n  k = 2.0\n  @classmethod\n  def g(cls, x): return x * cls.k",
        "return A.g(x)",
        "A.k = 3.0",
    ),
    "static method": (
        "class A:\n  @staticmethod\n  def g(x): return x * 2",
        "return A.g(x)",
        "A.g = staticmethod(lambda x: x * 3)",
    ),
    "metaclass attribute": ("class M(type):\n  k = 2.0\nclass A(metaclass=M): pass", "return x * A.k", "M.k = 3.0"),
    "class of an object": (HOLDER + "\nclass B(A):\n  k = 8.0", "return x * a.k", "a.__class__ = B"),
    "dict of an object": (HOLDER, "return x * a.v", "a.__dict__ = {'v': 8.0}"),
    "entry of __dict__": (HOLDER, "return x * a.__dict__['v']", "a.v = 8.0"),
    "vars": (HOLDER, "return x * sum(vars(a).values())", "a.w = 8.0"),
    "getattr with a computed name": (HOLDER, "return x * getattr(a, 'v' + '')", "a.v = 5.0"),
    "getattr with a default": (HOLDER, "return x * getattr(a, 'w', 1.0)", "a.w = 5.0"),
    "hasattr": (HOLDER, "return x * 2 if hasattr(a, 'w') else x", "a.w = 5.0", "del a.w"),
    "attrgetter": (
        HOLDER + "\nfrom operator import attrgetter\nget = attrgetter('v')",
        "return x * get(a)",
        "a.v = 5.0",
    ),
    "format": (HOLDER, "return x * float('{0.v}'.format(a))", "a.v = 5.0"),
    "attribute of an attribute": (HOLDER + "\nb = A()\nb.a = a", "return x * b.a.v", "a.v = 5.0", "b.a = A()"),
    "object in a list": (HOLDER + "\nxs = [a]", "return x * xs[0].v", "a.v = 5.0"),
    "slot": ("class A:\n  __slots__ = ('v',)\na = A()\na.v = 2.0", "return x * a.v", "a.v = 3.0"),
    "slot that is not set": (
        "class A:\n  __slots__ = ('v',)\na = A()",
        "try: return x * a.v\nexcept AttributeError: return x",
        "a.v = 3.0",
    ),
    "slot of a base": (
        "class A:\n  __slots__ = ('v',)\nclass B(A): __slots__ = ()\na = B()\na.v = 2.0",
        "return x * a.v",
        "a.v = 3.0",
    ),
    "property": (
        "class A:\n  v = 2.0\n  @property\n  def k(self): return self.v\na = A()",
        "return x * a.k",
        "a.v = 3.0",
        "A.k = property(lambda self: 9.0)",
    ),
    "descriptor": (
        "class D:\n  v = 2.0\n  def __get__(self, o, t): return self.v\nclass A: k = D()\na = A()",
        "return x * a.k",
        "A.__dict__['k'].v = 3.0",
        "D.v = 7.0",
    ),
    "__getattr__": (
        "class A:\n  def __init__(self): self.d = {'k': 2.0}\n  def __getattr__(self, n): return self.d[n]\na = A()",
        "return x * a.k",
        "a.d['k'] = 3.0",
        "a.k = 4.0",
    ),
    "__getattribute__": (
        "class A:\n  k = 2.0\n  def __getattribute__(self, n): return object.__getattribute__(self, n)\na = A()",
        "return x * a.k",
        "A.k = 3.0",
    ),
    "__call__": (
        "class A:\n  def __call__(self, x): return x * 2\na = A()",
        "return a(x)",
        "A.__call__ = lambda s, x: x * 3",
    ),
    "__mul__": (
        "class A:\n  v = 2.0\n  def __rmul__(self, x): return x * self.v\na = A()",
        "return a.__rmul__(x)",
        "a.v = 3.0",
    ),
    "__getitem__": (
        "class A:\n  v = 2.0\n  def __getitem__(self, i): return self.v\na = A()",
        "return x * a[0]",
        "a.v = 3.0",
        "A.__getitem__ = lambda s, i: 6.0",
    ),
    "__len__": ("class A:\n  n = 2\n  def __len__(self): return self.n\na = A()", "return x * len(a)", "a.n = 3"),
    "__iter__": (
        "class A:\n  def __init__(self): self.ks = [1.0, 2.0]\n  def __iter__(self): return iter(self.ks)\na = A()",
        "return sum(x * k for k in a)",
        "a.ks.append(3.0)",
    ),
    "__enter__": (
        "class A:\n  v = 2.0\n  def __enter__(self): return self.v\n  def __exit__(self, *e): pass\na = A()",
        "with a as k: return x * k",
        "a.v = 3.0",
    ),
    "method that is patched": (
        "class A:\n  def g(self, x): return x * 2\na = A()",
        "return a.g(x)",
        "A.g = lambda s, x: x * 3",
    ),
    "method that is patched on a base": (
        "class A:\n  def g(self, x): return x * 2\nclass B(A): pass\na = B()",
        "return a.g(x)",
        "A.g = lambda s, x: x * 3",
    ),
    "method that is patched on the instance": (
        "class A:\n  def g(self, x): return x * 2\na = A()",
        "return a.g(x)",
        "a.g = lambda x: x * 3",
    ),
    "bound method": (
        HOLDER.replace("def __init__", "def g(self, x): return x * self.v\n  def __init__") + "\ng = a.g",
        "return g(x)",
        "a.v = 6.0",
    ),
    "dataclass": (
        "from dataclasses import dataclass\n@dataclass\nclass A:\n  v: float = 2.0\na = A()",
        "return x * a.v",
        "a.v = 3.0",
        "a = A(5.0)",
    ),
    "frozen dataclass": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass A:\n  v: float = 2.0\na = A()",
        "return x * a.v",
        "a = A(5.0)",
    ),
    "asdict": (
        "from dataclasses import asdict, dataclass\n@dataclass\nclass A:\n  v: float = 2.0\na = A()",
        "return x * asdict(a)['v']",
        "a.v = 3.0",
    ),
    "replace": (
        "from dataclasses import dataclass, replace\n@dataclass\nclass A:\n  v: float = 2.0\n  w: float = 1.0\na = A()",
        "return x * replace(a, w=3.0).v",
        "a.v = 3.0",
    ),
    "copy": (HOLDER + "\nimport copy", "return x * copy.copy(a).v", "a.v = 7.0"),
    "match": (
        "class A:\n  __match_args__ = ('v',)\n  v = 2.0\na = A()",
        "match a:\n  case A(k): return x * k",
        "a.v = 3.0",
    ),
    "enum": ("from enum import Enum\nclass E(Enum):\n  A = 2\n  B = 3\ne = E.A", "return x * e.value", "e = E.B"),
    "enum by class": ("from enum import Enum\nclass E(Enum):\n  A = 2", "return x * E.A.value", "E.A._value_ = 7"),
    "int enum": ("from enum import IntEnum\nclass E(IntEnum):\n  A = 2\n  B = 3\ne = E.A", "return x * e", "e = E.B"),
    "named tuple": (
        "from collections import namedtuple\nT = namedtuple('T', 'a b')\nt = T(1.0, 2.0)",
        "return x * t.b",
        "t = T(1.0, 4.0)",
    ),
    "simple namespace": (
        "from types import SimpleNamespace\na = SimpleNamespace(v=2.0)",
        "return x * a.v",
        "a.v = 3.0",
    ),
    "attribute of a Python module": ("import rows_config as config", "return x * config.scale", "config.scale = 3.0"),
    "attribute that a module gets": (
        "import rows_config as config",
        "return x * getattr(config, 'late', 1.0)",
        "config.late = 3.0",
        "del config.late",
    ),
    "function of a module": (
        "import rows_config as config",
        "return config.double(x)",
        "config.scale = 5.0",
        "config.double = lambda x: x * 9",
    ),
    "import inside": (
        "",
        "import rows_config\nreturn x * rows_config.scale",
        "import rows_config\nrows_config.scale = 4.0",
    ),
    "import from inside": (
        "",
        "from rows_config import scale\nreturn x * scale",
        "import rows_config\nrows_config.scale = 4.0",
    ),
    "module that is replaced": (
        "import sys",
        "import rows_config\nreturn x * rows_config.scale",
        "import types\nm = types.ModuleType('rows_config')\nm.scale = 8.0\nsys.modules['rows_config'] = m",
    ),
    "builtin of one's own": (
        "import builtins\nbuiltins.rows_k = 2.0",
        "return x * rows_k",
        "builtins.rows_k = 3.0",
        "del builtins.rows_k\nrows_k = 6.0",
    ),
    "math": ("import math", "return x * math.pi", ""),
    "list": ("ks = [2.0]", "return x * ks[0]", "ks[0] = 3.0"),
    "list that is replaced": ("ks = [2.0]", "return x * ks[0]", "ks = [3.0]"),
    "length of a list": ("ks = [2.0]", "return x * len(ks)", "ks.append(3.0)", "ks.clear()"),
    "tuple": ("ks = (2.0, 3.0)", "return x * ks[0]", "ks = (4.0, 3.0)"),
    "list in a tuple": ("ks = ([2.0],)", "return x * ks[0][0]", "ks[0][0] = 3.0"),
    "dict": ("ks = {'a': 2.0}", "return x * ks['a']", "ks['a'] = 3.0"),
    "dict.get": ("ks = {}", "return x * ks.get('a', 2.0)", "ks['a'] = 3.0"),
    "key in a dict": ("ks = {}", "return x * 2 if 'a' in ks else x", "ks['a'] = 3.0"),
    "order of a dict": ("ks = {'a': 1.0, 'b': 2.0}", "return x * next(iter(ks.values()))", "ks['a'] = ks.pop('a')"),
    "order of an ordered dict": (
        "from collections import OrderedDict\nks = OrderedDict(a=1.0, b=2.0)",
        "return x * next(iter(ks.values()))",
        "ks.move_to_end('a')",
    ),
    "default dict": (
        "from collections import defaultdict\nks = defaultdict(float, a=2.0)",
        "return x * ks['a']",
        "ks['a'] = 3.0",
    ),
    "counter": ("from collections import Counter\nks = Counter('aab')", "return x * ks['a']", "ks['a'] += 1"),
    "chain map": (
        "from collections import ChainMap\nd = {'a': 2.0}\nks = ChainMap({}, d)",
        "return x * ks['a']",
        "d['a'] = 3.0",
    ),
    "user dict": ("from collections import UserDict\nks = UserDict(a=2.0)", "return x * ks['a']", "ks['a'] = 3.0"),
    "set": ("ks = {1}", "return x * 2 if 2 in ks else x", "ks.add(2)"),
    "frozen set": ("ks = frozenset({1})", "return x * 2 if 2 in ks else x", "ks = frozenset({2})"),
    "deque": ("from collections import deque\nks = deque([2.0])", "return x * ks[-1]", "ks.append(3.0)"),
    "subclass of dict": (
        "class D(dict): k = 2.0\nks = D(a=3.0)",
        "return x * ks['a'] * ks.k",
        "ks['a'] = 4.0",
        "ks.k = 5.0",
    ),
    "subclass of list": ("class L(list): pass\nks = L([3.0])", "return x * ks[0]", "ks[0] = 4.0"),
    "mapping proxy": (
        "import types\nd = {'a': 2.0}\nks = types.MappingProxyType(d)",
        "return x * ks['a']",
        "d['a'] = 3.0",
    ),
    "range": ("ks = range(3)", "return x * len(ks)", "ks = range(4)"),
    "slice": ("s = slice(0, 2)", "return x[s] * 2", "s = slice(1, 2)"),
    "257 entries": ("ks = [0.0] * 257", "return x * ks[256]", "ks[256] = 3.0"),
    "5000 entries": ("ks = dict.fromkeys(range(5000), 1.0)", "return x * ks[4999]", "ks[4999] = 3.0"),
    "depth 7": (
        "inner = [2.0]\nks = inner\nfor _ in range(7): ks = [ks]",
        "v = ks\nwhile isinstance(v, list): v = v[0]\nreturn x * v",
        "inner[0] = 3.0",
    ),
    "depth 40": (
        "inner = [2.0]\nks = inner\nfor _ in range(40): ks = {0: ks}",
        "v = ks\nfor _ in range(40): v = v[0]\nreturn x * v[0]",
        "inner[0] = 3.0",
    ),
    "objects of depth 12": (
        HOLDER + "\ninner = a\nfor _ in range(12):\n  b = A()\n  b.a = a\n  a = b",
        "v = a\nwhile hasattr(v, 'a'): v = v.a\nreturn x * v.v",
        "inner.v = 9.0",
    ),
    "list in itself": ("ks = [2.0]\nks.append(ks)", "return x * ks[1][0]", "ks[0] = 3.0"),
    "os.environ": (
        "import os\nos.environ['ROWS_K'] = '2'",
        "return x * float(os.environ['ROWS_K'])",
        "os.environ['ROWS_K'] = '3'",
    ),
    "os.getenv": (
        "import os\nos.environ['ROWS_K'] = '2'",
        "return x * float(os.getenv('ROWS_K', '1'))",
        "os.environ['ROWS_K'] = '3'",
        "del os.environ['ROWS_K']",
    ),
    "context variable": (
        "from contextvars import ContextVar\nv = ContextVar('v', default=2.0)",
        "return x * v.get()",
        "v.set(3.0)",
    ),
    "lru_cache": ("from functools import lru_cache\n@lru_cache\ndef g(n): return n * 2.0\ng(3)", "return x * g(3)", ""),
    "cached property that is there": (
        "from functools import cached_property\nclass A:\n  @cached_property\n  def k(self): return 2.0\na = A()\na.k",
        "return x * a.k",
        "a.__dict__['k'] = 7.0",
    ),
    "NumPy array": ("import numpy as np\nk = np.array([2.0])", "return x * float(k[0])", "k[0] = 3.0"),
    "NumPy array without dims": ("import numpy as np\nk = np.array(2.0)", "return x * float(k)", "k[...] = 3.0"),
    "view of a NumPy array": ("import numpy as np\nb = np.ones(4)\nk = b[1:]", "return x * float(k[0])", "b[1] = 3.0"),
    "NumPy scalar": ("import numpy as np\nk = np.float64(2.0)", "return x * float(k)", "k = np.float64(3.0)"),
    "array.array": ("import array\nk = array.array('d', [2.0])", "return x * k[0]", "k[0] = 3.0"),
    "bytearray": ("k = bytearray([2])", "return x * k[0]", "k[0] = 3"),
    "fraction": ("from fractions import Fraction\nk = Fraction(1, 2)", "return x * float(k)", "k = Fraction(3, 2)"),
    "decorated function": (
        "import functools\nk = 2.0\ndef twice(f):\n  @functools.wraps(f)\n  def g(x): return f(x) * k\n  return g\n"
        "@twice\ndef h(x): return x + 1",
        "return h(x)",
        "k = 3.0",
    ),
    "function under no_grad": ("k = 2.0\n@torch.no_grad()\ndef h(x): return x * k", "return h(x)", "k = 3.0"),
    "context manager of one's own": (
        "import contextlib\nk = 2.0\n@contextlib.contextmanager\ndef c(): yield k",
        "with c() as v: return x * v",
        "k = 3.0",
    ),
    "callback of torch": (
        "k = 2.0\ndef g(v): return v * k",
        "return torch.utils.checkpoint.checkpoint(g, x, use_reentrant=False)",
        "k = 3.0",
    ),
    "autograd function": (
        "k = 2.0\nclass F(torch.autograd.Function):\n  @staticmethod\n  def forward(c, v): return v * k\n"
        "  @staticmethod\n  def backward(c, g): return g * k",
        "return x * 2 + k",
        "k = 3.0",
    ),
    "map": ("k = 2.0\ndef g(v): return v * k", "return sum(map(g, [x, x]))", "k = 3.0"),
    "sorted by a key": (
        "ks = [3.0, 2.0]\nsign = 1\ndef key(v): return sign * v",
        "return x * sorted(ks, key=key)[0]",
        "sign = -1",
    ),
    "exception of one's own": (
        HOLDER + "\nclass E(Exception):\n  k = 2.0",
        "try: raise E(1)\nexcept E as e: return x * e.k",
        "E.k = 3.0",
    ),
    "module": (
        "class N(torch.nn.Module):\n  k = 2.0\n  def forward(self, v): return v * self.k\nn = N()",
        "return n(x)",
        "n.k = 3.0",
        "del n.k",
        "N.k = 5.0",
    ),
    "forward that is patched": (
        "class N(torch.nn.Module):\n  def forward(self, v): return v * 2\nn = N()",
        "return n(x)",
        "N.forward = lambda s, v: v * 3",
        "n.forward = lambda v: v * 4",
    ),
    "training flag": ("n = torch.nn.Module()", "return x * 2 if n.training else x", "n.eval()", "n.train()"),
    "hook that is added": (
        "n = torch.nn.Identity()",
        "return n(x)",
        "h = n.register_forward_hook(lambda m, a, o: o * 2)",
        "h.remove()",
    ),
    "hook that reads": (
        "k = 2.0\nn = torch.nn.Identity()\nn.register_forward_hook(lambda m, a, o: o * k)",
        "return n(x)",
        "k = 3.0",
    ),
    "pre-hook of all modules": (
        "n = torch.nn.Identity()",
        "return n(x)",
        "h = torch.nn.modules.module.register_module_forward_hook(lambda m, a, o: o * 2)",
        "h.remove()",
    ),
    "list of a module": (
        "class N(torch.nn.Module):\n  def __init__(self):\n    super().__init__()\n    self.ks = [2.0]\n"
        "  def forward(self, v): return v * self.ks[0]\nn = N()",
        "return n(x)",
        "n.ks[0] = 3.0",
        "n.ks = [3]",
    ),
    "config of a module": (
        HOLDER + "\nclass N(torch.nn.Module):\n  def forward(self, v): return v * self.config.v\nn = N()\nn.config = a",
        "return n(x)",
        "a.v = 8.0",
    ),
    "grad mode": (
        "",
        "return x * 2 if torch.is_grad_enabled() else x",
        "torch.set_grad_enabled(False)",
        "torch.set_grad_enabled(True)",
    ),
    "autocast": ("", "return x * 2 if torch.is_autocast_enabled('cpu') else x", ""),
    "default dtype": (
        "",
        "return x * (2 if torch.get_default_dtype() is torch.float64 else 1)",
        "torch.set_default_dtype(torch.float64)",
        "torch.set_default_dtype(torch.float32)",
    ),
    "autocast inside": (
        "on = True",
        "with torch.autocast('cpu', torch.bfloat16, enabled=on): return x * 2",
        "on = False",
    ),
    "function of torch that is replaced": (
        "old = torch.relu\ndef g(v): return old(v) * 2",
        "return torch.relu(x)",
        "torch.relu = g",
        "torch.relu = old",
    ),
    "forward of torch that is replaced": (
        "n = torch.nn.Identity()\nold = torch.nn.Identity.forward",
        "return n(x)",
        "torch.nn.Identity.forward = lambda s, v: v * 5",
        "torch.nn.Identity.forward = old",
    ),
    "cache that is cleared": (
        "from functools import lru_cache\nk = 2.0\n@lru_cache\ndef g(n): return n * k",
        "return x * g(3)",
        "k = 5.0",
        "g.cache_clear()",
    ),
    "class that is registered": (
        "from abc import ABC\nclass I(ABC): pass\nclass B: pass\nb = B()",
        "return x * 2 if isinstance(b, I) else x",
        "I.register(B)",
    ),
    "closures of one code": (
        "def make(ks):\n  def g(x): return x * ks[0]\n  return g\n"
        "one, other = [2.0], [3.0]\ng, h = make(one), make(other)",
        "return g(x) + h(x)",
        "other[0] = 5.0",
        "one[0] = 7.0",
    ),
    "post init": (
        "from dataclasses import dataclass\nk = 2.0\n@dataclass\nclass D:\n  a: float = 1.0\n"
        "  def __post_init__(self): self.a *= k",
        "return x * D().a",
        "k = 3.0",
        "D.__init__.__defaults__ = (7.0,)",
    ),
    "comparison of one's own": (
        "class E:\n  n = 1\n  def __eq__(s, o): return s.n == o\n  __hash__ = None\ne = E()",
        "return x * 2 if e == 1 else x",
        "E.n = 2",
    ),
    "conversion of one's own": (
        "class E:\n  v = 2.0\n  def __float__(s): return s.v\ne = E()",
        "return x * float(e)",
        "E.v = 3.0",
    ),
    "branch that is not taken": ("import time\nslow = False", "if slow: time.time()\nreturn x * 2", ""),
    # By change.
    "1 to 1.0": ("k = 1", "return x * (2 if type(k) is int else 3)", "k = 1.0", "k = True"),
    "1 to 1.0 in a list": ("ks = [1]", "return x * (2 if type(ks[0]) is int else 3)", "ks[0] = 1.0", "ks[0] = True"),
    "1 to 1.0 in an object": (HOLDER + "\na.v = 1", "return x * (2 if type(a.v) is int else 3)", "a.v = 1.0"),
    "1 to 1.0 in a module": (
        "n = torch.nn.Module()\nn.v = 1",
        "return x * (2 if type(n.v) is int else 3)",
        "n.v = 1.0",
    ),
    "0.0 to -0.0": ("k = 0.0", "import math\nreturn x * math.copysign(2.0, k)", "k = -0.0"),
    "0.0 to -0.0 in a tuple": ("k = (0.0,)", "import math\nreturn x * math.copysign(2.0, k[0])", "k = (-0.0,)"),
    "complex": ("k = 0j", "import math\nreturn x * math.copysign(2.0, k.imag)", "k = complex(0.0, -0.0)"),
    "nan to 1": ("k = float('nan')", "return x * 2 if k != k else x", "k = float('nan')", "k = 1.0"),
    "string": ("k = 'a'", "return x * 2 if k == 'a' else x", "k = 'b'", "k = ''.join(['a'])"),
    "None": ("k = None", "return x * 2 if k is None else x * k", "k = 3.0"),
    "dtype": ("k = torch.float32", "return x.to(k)", "k = torch.float64"),
}

PLAIN: dict[str, Row] = {
    "iterator": ("it = iter([1.0, 2.0, 3.0, 4.0, 5.0])", "return x * next(it)"),
    "iterator in a loop": ("it = iter([1.0, 2.0, 3.0])", "for k in it: return x * k\nreturn x"),
    "iterator in a list": ("it = iter([1.0, 2.0, 3.0])", "return x * sum(it)"),
    "iterator in a star": ("it = iter([1.0, 2.0, 3.0])", "return x * sum([0.0, *it])"),
    "iterator through zip": ("it = iter([1.0, 2.0, 3.0, 4.0])", "for k, _ in zip(it, [0]): return x * k"),
    "iterator of an object": (HOLDER + "\na.it = iter([1.0, 2.0, 3.0, 4.0])", "return x * next(a.it)"),
    "iterator in a dict": ("d = {'it': iter([1.0, 2.0, 3.0, 4.0])}", "return x * next(d['it'])"),
    "iterator in a closure": (
        "def make():\n  it = iter([1.0, 2.0, 3.0, 4.0])\n  return lambda x: x * next(it)\ng = make()",
        "return g(x)",
    ),
    "iterator in a default": ("def g(x, it=iter([1.0, 2.0, 3.0, 4.0])): return x * next(it)", "return g(x)"),
    "iterator through map": ("it = iter([1.0, 2.0, 3.0, 4.0])", "return x * list(map(next, [it]))[0]"),
    "iterator through a method": ("step = iter([1.0, 2.0, 3.0, 4.0]).__next__", "return x * step()"),
    "iterator of a partial": (
        "from functools import partial\nstep = partial(next, iter([1.0, 2.0, 3.0, 4.0]))",
        "return x * step()",
    ),
    "generator": ("def g():\n  k = 1.0\n  while True:\n    yield k\n    k += 1\nit = g()", "return x * next(it)"),
    "generator that is sent to": (
        "def g():\n  k = 1.0\n  while True: k += yield k\nit = g()\nnext(it)",
        "return x * it.send(2.0)",
    ),
    "count": ("import itertools\nc = itertools.count(1)", "return x * next(c)"),
    "cycle": ("import itertools\nc = itertools.cycle([1.0, 2.0, 3.0])", "return x * next(c)"),
    "iterator in Python": (
        "class I:\n  n = 0\n  def __iter__(self): return self\n"
        "  def __next__(self):\n    self.n += 1\n    return self.n\nit = I()",
        "return x * next(it)",
    ),
    "data loader": (
        "from torch.utils.data import DataLoader\nl = iter(DataLoader([1.0, 2.0, 3.0, 4.0]))",
        "return x * float(next(l)[0])",
    ),
    "enumerate": ("e = enumerate('abcdef', 1)", "return x * next(e)[0]"),
    "reversed": ("e = reversed([1.0, 2.0, 3.0, 4.0])", "return x * next(e)"),
    "file": ("import io\nstream = io.StringIO('1\\n2\\n3\\n4\\n')", "return x * float(stream.readline())"),
    "random": ("import random\nrandom.seed(0)", "return x * random.random()"),
    "random.random by name": ("from random import random, seed\nseed(0)", "return x * random()"),
    "random.choice": ("import random\nrandom.seed(0)", "return x * random.choice([1.0, 2.0, 3.0, 4.0])"),
    "random.Random": ("import random\nr = random.Random(0)", "return x * r.random()"),
    "random import inside": ("import random\nrandom.seed(0)", "import random\nreturn x * random.random()"),
    "random through a partial": (
        "import random\nfrom functools import partial\nrandom.seed(0)\nr = partial(random.uniform, 0.0, 1.0)",
        "return x * r()",
    ),
    "random through a helper": ("import random\nrandom.seed(0)\ndef g(): return random.random()", "return x * g()"),
    "layer drop": (
        "import random\nrandom.seed(0)\nclass N(torch.nn.Module):\n  def forward(self, v):\n"
        "    return v if self.training and random.random() < 0.5 else v * 2\nn = N()",
        "return n(x)",
    ),
    "NumPy random": ("import numpy as np\nnp.random.seed(0)", "return x * float(np.random.rand())"),
    "NumPy random by name": ("from numpy import random as r\nr.seed(0)", "return x * float(r.uniform())"),
    "NumPy random function": ("from numpy.random import rand, seed\nseed(0)", "return x * float(rand())"),
    "NumPy generator": ("import numpy as np\nr = np.random.default_rng(0)", "return x * float(r.random())"),
    "clock": ("import time\nt = [0.0]\ntime_of = time.perf_counter_ns", "return x * (time_of() * 0 + 1)"),
    "clock of a module": ("import time", "return x * (time.time() * 0 + 1)"),
    "date": ("import datetime", "return x * (datetime.datetime.now().year * 0 + 1)"),
    "uuid": ("import uuid", "return x * (uuid.uuid4().int * 0 + 1)"),
    "secrets": ("import secrets", "return x * (secrets.randbelow(5) * 0 + 1)"),
    "seed": ("", "torch.manual_seed(3)\nreturn x * 2"),
    "weak reference": (HOLDER + "\nimport weakref\nr = weakref.ref(a)", "return x * r().v", "a.v = 4.0"),
    "weak dictionary": (
        HOLDER + "\nimport weakref\nr = weakref.WeakValueDictionary(a=a)",
        "return x * r['a'].v",
        "a.v = 4.0",
    ),
    "thread local": ("import threading\nl = threading.local()\nl.v = 2.0", "return x * l.v", "l.v = 3.0"),
    "lock": ("import threading\nlock = threading.Lock()", "with lock: return x * 2"),
    "ctypes": ("import ctypes\nk = ctypes.c_double(2.0)", "return x * k.value", "k.value = 3.0"),
    "memory view": ("b = bytearray([2])\nk = memoryview(b)", "return x * k[0]", "b[0] = 3"),
    "20000 entries": ("ks = [1.0] * 20000", "return x * ks[19999]", "ks[19999] = 3.0"),
    "large NumPy array": ("import numpy as np\nk = np.ones(20000)", "return x * float(k[0])", "k[0] = 3.0"),
    "plain tensor": ("k = torch.ones(())", "return x * float(k)", "k.fill_(3.0)"),
    "plain tensor as NumPy": ("k = torch.ones(1)", "return x * float(k.numpy()[0])", "k.fill_(3.0)"),
    "plain tensor as an array": (
        "import numpy as np\nk = torch.ones(1)",
        "return x * float(np.asarray(k)[0])",
        "k.fill_(3.0)",
    ),
    "plain tensor as a list": ("k = torch.ones(1)", "return x * k.tolist()[0]", "k.fill_(3.0)"),
    "plain tensor as a condition": ("k = torch.ones(1)", "return x * 2 if k else x", "k.fill_(0.0)"),
    "plain tensor that is written to": ("k = torch.ones(1)", "k.add_(1)\nreturn x * 2"),
    "plain tensor in a loop": ("k = torch.ones(2)", "return sum(x * float(v) for v in k)", "k.fill_(0.0)"),
    "plain tensor by index": ("k = torch.ones(2)", "return x * k[0].item()", "k.fill_(3.0)"),
    "plain tensor in place of a number": ("k = torch.ones(())", "return x * k", "k.fill_(3.0)"),
    "plain tensor as an index": (
        "k = torch.ones((), dtype=torch.int64)",
        "return x * [1.0, 2.0, 3.0][k]",
        "k.fill_(2)",
    ),
    "file that is opened": (
        "import tempfile\np = tempfile.mktemp()\nopen(p, 'w').close()",
        "with open(p) as stream: return x * (len(stream.read()) + 1)",
    ),
    "garbage collector": (HOLDER + "\nimport gc", "return x * [o for o in gc.get_objects() if type(o) is A][0].v"),
    "thread": (
        "import threading\nout = []",
        "t = threading.Thread(target=out.append, args=(1,))\nt.start()\nt.join()\nreturn x * len(out)",
    ),
    "eval": ("k = 2.0", "return x * eval('k')", "k = 3.0"),
    "globals()": ("k = 2.0", "return x * globals()['k']", "k = 3.0"),
    "__globals__": ("k = 2.0\ndef g(): pass", "return x * g.__globals__['k']", "k = 3.0"),
    "cell contents": (
        "def make():\n  k = 2.0\n  return lambda: k\ng = make()",
        "return x * g.__closure__[0].cell_contents",
    ),
    "frame": ("import sys\nk = 2.0", "return x * sys._getframe().f_globals['k']", "k = 3.0"),
    # By effect.
    "append": ("seen = []", "seen.append(1)\nreturn x * len(seen)"),
    "append by a method": ("seen = []\nadd = seen.append", "add(1)\nreturn x * 2"),
    "pop": ("ks = [4.0, 3.0, 2.0, 1.0, 0.5]", "return x * ks.pop()"),
    "entry that is set": ("d = {'n': 0}", "d['n'] += 1\nreturn x * d['n']"),
    "attribute that is set": (HOLDER, "a.v += 1\nreturn x * a.v"),
    "attribute by setattr": (HOLDER, "setattr(a, 'n' + '', 1)\nreturn x * 2"),
    "class attribute that is set": (HOLDER, "A.k += 1\nreturn x * A.k"),
    "slot that is set": ("class A:\n  __slots__ = ('v',)\na = A()\na.v = 1.0", "a.v += 1\nreturn x * a.v"),
    "global that is set": ("n = 0", "global n\nn += 1\nreturn x * n"),
    "nonlocal": (
        "def make():\n  n = 0\n  def g(x):\n    nonlocal n\n    n += 1\n    return x * n\n  return g\ng = make()",
        "return g(x)",
    ),
    "deque that rotates": ("from collections import deque\nd = deque([1.0, 2.0, 3.0])", "d.rotate(1)\nreturn x * d[0]"),
    "set that grows": ("s = set()", "s.add(len(s))\nreturn x * len(s)"),
    "array that is set": ("import numpy as np\nk = np.zeros(1)", "k[0] += 1\nreturn x * float(k[0])"),
    "function attribute that is set": ("def g(): pass\ng.n = 0", "g.n += 1\nreturn x * g.n"),
    "default list that grows": ("def g(x, seen=[]):\n  seen.append(1)\n  return x * len(seen)", "return g(x)"),
    "module attribute that is set": ("import rows_config as config", "config.scale += 1\nreturn x * config.scale"),
    "environment that is set": (
        "import os\nos.environ['ROWS_N'] = '1'",
        "os.environ['ROWS_N'] += '1'\nreturn x * float(os.environ['ROWS_N'])",
    ),
    "context variable that is set": (
        "from contextvars import ContextVar\nv = ContextVar('v', default=1.0)",
        "v.set(v.get() + 1)\nreturn x * v.get()",
    ),
    "print": ("", "print(end='')\nreturn x * 2"),
    "refusal that is caught": (
        "it = iter([1.0, 2.0, 3.0, 4.0, 5.0])\ndef g(): return next(it)",
        "try: return x * g()\nexcept BaseException: return x * 99",
    ),
}


@pytest.fixture(autouse=True)
def own_modules() -> Any:
    """A Python module that rows read, and modes that they set."""
    yield
    sys.modules.pop("rows_config", None)
    torch.set_grad_enabled(True)
    torch.set_default_dtype(torch.float32)


def make_config() -> None:
    config: Any = types.ModuleType("rows_config")
    exec("scale = 2.0\ndef double(x): return x * scale", config.__dict__)  # as a file of the user's
    sys.modules["rows_config"] = config


def tell(row: Row, wrap: Callable[[Any], Any]) -> tuple[list[Any], Any]:
    """What the calls of a row give, and the program."""
    make_config()
    setup, body, *changes = row
    module = sys.modules["rows"] = types.ModuleType("rows")
    names = module.__dict__
    exec(f"import torch\n{setup}", names)
    exec(f"def f(x):\n{textwrap.indent(body, '  ')}", names)
    program, found = wrap(names["f"]), []
    x = shard(torch.arange(1.0, 5.0), ChunkSpec(0, ranks=1))
    for change in ("", *changes):
        exec(change, names)
        for _ in range(2):
            result = program(x)
            found.append(result.full().clone() if isinstance(result, ShardedTensor) else result)
    return found, program


def run_row(row: Row) -> tuple[list[Any], list[Any], Any]:
    def body(_: Any) -> tuple[list[Any], list[Any], Any]:
        found, program = tell(row, lambda f: shardwise.compile(f, backend="eager"))
        return found, tell(row, lambda f: f)[0], program

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        (result,) = run_local(body, 1, timeout=60.0)
    return result


@pytest.mark.parametrize("name", GRAPH)
def test_what_can_be_compared_stays_compiled(name: str) -> None:
    found, expected, program = run_row(GRAPH[name])
    assert list(map(str, found)) == list(map(str, expected))
    assert "without a graph" not in program.explain(), program.explain()


@pytest.mark.parametrize("name", PLAIN)
def test_what_cannot_be_compared_runs_without_a_graph(name: str) -> None:
    found, expected, program = run_row(PLAIN[name])
    assert list(map(str, found)) == list(map(str, expected))
    assert "without a graph" in program.explain()


def test_a_warning_names_what_is_read_and_its_line() -> None:
    batches = iter([1.0, 2.0, 3.0])

    def step(x: Any) -> Any:
        return x * next(batches)  # the line that is named

    def body(_: Any) -> list[float]:
        program = shardwise.compile(step, backend="eager")
        x = shard(torch.ones(2), ChunkSpec(0, ranks=1))
        return [program(x).full()[0].item() for _ in range(3)]

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        assert run_local(body, 1, timeout=60.0) == [[1.0, 2.0, 3.0]]
    (text,) = [str(w.message) for w in caught if "without a graph" in str(w.message)]
    line = next(
        i
        for i, line in enumerate(Path(__file__).read_text().splitlines(), 1)
        if line.endswith("# the line that is named")
    )
    assert (
        f"it uses batches, a list_iterator, which cannot be compared between calls (at test_reads.py:{line}, " in text
    )


def test_torch_compile_of_a_sharded_module_reads_the_same_way() -> None:
    class Scaled(torch.nn.Module):
        k = 2.0
        it: Any

        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(2, 2)

        def forward(self, x: Any) -> Any:
            return self.layer(x) * self.k * next(self.it)

    def body(_: Any) -> tuple[list[float], str]:
        model: Any = Scaled()
        torch.nn.init.ones_(model.layer.weight)
        torch.nn.init.zeros_(model.layer.bias)
        model.it = iter([1.0, 2.0, 3.0])
        plan = ModelPlan(Mesh.of(tp=1), {"layer.weight": "S(0)"}, axis="tp", input_plan="replicated")
        shard_module(model, plan)
        compiled: Any = torch.compile(model, backend="eager")
        found = [compiled(torch.ones(1, 2)).full()[0, 0].item() for _ in range(2)]
        Scaled.k = 3.0
        found.append(compiled(torch.ones(1, 2)).full()[0, 0].item())
        return found, compiled.forward.explain()

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        ((found, text),) = run_local(body, 1, timeout=60.0)
    assert found == [4.0, 8.0, 18.0] and "it uses Scaled.it, a list_iterator" in text


def test_a_profiler_of_ones_own_is_put_back() -> None:
    def profile(*_: Any) -> None:
        return None

    def body(_: Any) -> bool:
        sys.setprofile(profile)
        try:
            shardwise.compile(lambda x: x * 2, backend="eager")(shard(torch.ones(2), ChunkSpec(0, ranks=1)))
            return sys.getprofile() is profile
        finally:
            sys.setprofile(None)

    assert run_local(body, 1, timeout=60.0) == [True]


class Left:
    """Something that is left to the garbage collector, with a finalizer, weak references and a cycle."""

    def __init__(self, found: list[str]) -> None:
        self.me, self.found = self, found
        weakref.finalize(self, note, found, "finalize")
        self.reference = weakref.ref(self, lambda _: note(found, "callback"))

    def __del__(self) -> None:
        note(self.found, "del")


def note(found: list[str], text: str) -> None:
    found.append(text)


@pytest.fixture
def collected() -> Iterator[list[str]]:
    """What callbacks of the garbage collector note, which runs after every ten allocations."""
    found: list[str] = []

    def callback(phase: str, _: Any) -> None:
        note(found, phase)

    before = gc.get_threshold()
    gc.callbacks.append(callback)
    gc.set_threshold(10, 2, 2)
    yield found
    gc.set_threshold(*before)
    gc.callbacks.remove(callback)


def test_garbage_is_collected_after_a_trace_and_what_its_callbacks_do_is_no_part_of_it(collected: list[str]) -> None:
    x = shard(torch.ones(2), ChunkSpec(0, ranks=1))
    for _ in range(3):
        for _ in range(10):
            Left(collected)
        program = shardwise.compile(lambda x: (x * 2).sum(), backend="eager")
        assert program(x).item() == 4.0 and "without a graph" not in program.explain(), program.explain()
        assert gc.isenabled()
    assert {"start", "stop", "finalize", "del"} <= {*collected}
    gc.disable()
    assert shardwise.compile(lambda x: x * 3, backend="eager")(x).full().tolist() == [3.0, 3.0] and not gc.isenabled()
    gc.enable()


def test_handlers_of_signals_and_of_logs_run_as_they_are() -> None:
    found: list[str] = []
    log = logging.getLogger("test_reads")

    class Handler(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            note(found, record.getMessage())

    def handle(number: int, frame: Any) -> None:
        note(found, "signal")

    def step(x: Any) -> Any:
        log.error("a step")
        warnings.warn("of the step", stacklevel=1)
        for _ in range(40):
            x = x * 2 - x
        return x

    handler, before = Handler(), signal.signal(signal.SIGVTALRM, handle)
    log.addHandler(handler)
    log.propagate = False
    try:
        program = shardwise.compile(step, backend="eager")
        x = shard(torch.ones(2), ChunkSpec(0, ranks=1))
        signal.setitimer(signal.ITIMER_VIRTUAL, 0.005, 0.005)
        with pytest.warns(UserWarning, match="^of the step$"):
            assert program(x).full().tolist() == [1.0, 1.0]
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)
        log.removeHandler(handler)
    assert "without a graph" not in program.explain(), program.explain()
    assert {*found} == {"signal", "a step"}


def test_a_cache_that_a_trace_fills_is_filled_by_a_call_and_then_compiled() -> None:
    @lru_cache
    def factor(n: int) -> float:
        return n * 2.0

    def body(_: Any) -> tuple[list[float], str]:
        program = shardwise.compile(lambda x: x * factor(3), backend="eager")
        x = shard(torch.ones(2), ChunkSpec(0, ranks=1))
        return [program(x).full()[0].item() for _ in range(3)], program.explain()

    ((found, text),) = run_local(body, 1, timeout=60.0)
    assert found == [6.0] * 3 and "kind 0, 2 calls" in text and "without a graph" not in text


def test_a_python_that_is_not_known_runs_without_a_graph(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(admission, "KNOWN_PYTHONS", ())
    found, expected, program = run_row(GRAPH["global"])
    assert list(map(str, found)) == list(map(str, expected))
    assert "what code reads is not known for Python" in program.explain()


def test_packages_of_torch_are_trusted_wherever_it_finds_them(tmp_path: Path) -> None:
    """On Python 3.12 typing_extensions replaces functions of typing; it may lie outside of the site packages."""
    shutil.copy(typing_extensions.__file__, tmp_path)
    program = "from shardwise.compiler.reads import origin_of; import typing_extensions as t; print(t.__file__)"
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])}
    command = [sys.executable, "-c", f"{program}; print(origin_of(t.__file__), origin_of(t.__file__[:-3] + 'x.py'))"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=True, env=environment)
    place, origins = done.stdout.splitlines()
    assert Path(place).parent == tmp_path and origins == "trusted user", done.stdout
