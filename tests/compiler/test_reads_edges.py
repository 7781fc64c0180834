"""What programs read that is seldom read: names, bases, caches, contexts of libraries; and what arguments are.

Rows of the first two tables are those of `test_reads`. A row of `CALLS` is what is there before, with `f`, and calls of
`f` one after the other, each beside the same call without `shardwise.compile`.
"""

from __future__ import annotations

import sys
import types
import warnings
from typing import Any

import pytest
import torch

import shardwise
from shardwise import ShardedTensor, run_local
from tests.compiler.test_reads import Row, run_row

PLAIN_MODULE = (
    "class N(torch.nn.Module):\n  def __init__(s):\n    super().__init__()\n    s.w = torch.nn.Parameter(torch.ones(4))"
    "\n  def forward(s, v): return v * 2\nn = N()"
)
GRAPH: dict[str, Row] = {
    "constants of a function's code": (
        "def g(): return 2.0\ndef h(): return 5.0",
        "return x * g.__code__.co_consts[1]",
        "g.__code__ = h.__code__",
    ),
    "code of a method": (
        "class C:\n  def g(s, a): pass\nc = C()\ndef h(s, a, b): pass",
        "return x * c.g.__code__.co_argcount",
        "C.g.__code__ = h.__code__",
        "c.g = h",
    ),
    "code of what a decorator wraps": (
        "from functools import wraps\ndef mark(g):\n  @wraps(g)\n  def w(x, **k):\n"
        "    return g(x, **({'k': 3.0} if 'k' in g.__code__.co_varnames else {}))\n  return w\n"
        "@mark\ndef m(x): return x * 2\ndef h(x, k): return x * k",
        "return m(x)",
        "m.__wrapped__.__code__ = h.__code__",
    ),
    "code of a function in a list": (
        "def g(): pass\ngs = [lambda a: 0]",
        "return x * sum(g.__code__.co_argcount for g in gs)",
        "gs[0].__code__ = (lambda a, b: 0).__code__",
        "gs[0] = lambda a, b, c: 0",
    ),
    "name of a function": ("def g(): pass", "return x * len(g.__name__)", "g.__name__ = 'abc'"),
    "text of a function": ("def g():\n  'ab'", "return x * len(g.__doc__)", "g.__doc__ = 'abc'"),
    "annotations": ("def g(a: float): pass", "return x * len(g.__annotations__)", "g.__annotations__['b'] = int"),
    "name of a class": ("class C: pass", "return x * len(C.__qualname__)", "C.__qualname__ = 'abcd'"),
    "name of an object's class": (
        "class A: pass\nclass BB: pass\na = A()",
        "return x * len(type(a).__name__)",
        "a.__class__ = BB",
        "BB.__name__ = 'abcde'",
    ),
    "bases": ("class P: k = 2.0\nclass Q: k = 3.0\nclass C(P): pass\nc = C()", "return x * c.k", "C.__bases__ = (Q,)"),
    "method of another base": (
        "class P:\n  def g(s, x): return x * 2\nclass Q:\n  def g(s, x): return x * 3\nclass C(P): pass\nc = C()",
        "return c.g(x)",
        "C.__bases__ = (Q,)",
    ),
    "attribute of a partial": (
        "from functools import partial\ndef g(x): return x * h.s\nh = partial(g)\nh.s = 2.0",
        "return h(x)",
        "h.s = 5.0",
    ),
    "keyword of a partial": (
        "from functools import partial\ndef g(x, k): return x * k\nh = partial(g, k=2.0)",
        "return h(x)",
        "h.keywords['k'] = 5.0",
    ),
    "function of a partial": (
        "from functools import partial\ndef g(x, k): return x * k\ndef j(x, k): return x + k\nh = partial(g, k=2.0)",
        "return h(x)",
        "h.__setstate__((j, (), {'k': 2.0}, {}))",
    ),
    "single dispatch": (
        "from functools import singledispatch\n@singledispatch\ndef g(k, x): return x\n"
        "g.register(float)(lambda k, x: x * k)",
        "return g(2.0, x)",
        "g.register(float)(lambda k, x: x * k * 5)",
    ),
    "small cache that takes another entry": (
        "from functools import lru_cache\nks = [1.0]\n@lru_cache(1)\ndef g(n): return n * ks[0]",
        "return x * g(3)",
        "ks[0] = 4.0",
        "g(4)",
    ),
    "defaults of a named tuple": (
        "from typing import NamedTuple\nclass T(NamedTuple):\n  a: float = 2.0",
        "return x * T().a",
        "T.__new__.__defaults__ = (3.0,)",
    ),
    "nan in a set": ("k = float('nan')\ns = {k}", "return x * 2 if k in s else x", "k = float('nan')"),
    "nan in a list": ("k = float('nan')\nl = [k]", "return x * 2 if k in l else x", "k = float('nan')"),
    "context of decimal numbers": (
        "import decimal\ndecimal.getcontext().prec = 28\nk = decimal.Decimal(1)",
        "return x * float(k / 3)",
        "decimal.getcontext().prec = 2",
        "decimal.getcontext().prec = 28",
    ),
    "builtin that is replaced": (
        "import builtins\nold = builtins.divmod",
        "return x * divmod(7, 2)[0]",
        "builtins.divmod = lambda v, w: (7,)",
        "builtins.divmod = old",
    ),
    "function of the standard library that is replaced": (
        "import statistics\nold = statistics.fsum",
        "return x * statistics.fmean([1.0, 3.0])",
        "statistics.fsum = lambda v: 10.0",
        "statistics.fsum = old",
    ),
    "weak keys of a descriptor": (
        "class D:\n  def __init__(s): s.d = {}\n  def __get__(s, o, t): return s.d.get(id(o), 2.0)\n"
        "  def __set__(s, o, v): s.d[id(o)] = v\nclass B: k = D()\nb = B()",
        "return x * b.k",
        "b.k = 5.0",
    ),
    "singleton by __new__": (
        "class C:\n  one = None\n  def __new__(c):\n    if c.one is None:\n      c.one = object.__new__(c)\n"
        "      c.one.n = 2.0\n    return c.one\nC()",
        "return x * C().n",
        "C().n = 5.0",
    ),
    "classes that register themselves": (
        "found = {}\nclass B:\n  def __init_subclass__(c): found[c.__name__] = c\nclass D(B): k = 2.0",
        "return x * sum(c.k for c in found.values())",
        "class E(B): k = 5.0",
    ),
    "protocol": (
        "import typing\n@typing.runtime_checkable\nclass P(typing.Protocol):\n  k: float\nclass C: pass\nc = C()",
        "return x * 2 if isinstance(c, P) else x",
        "c.k = 1.0",
    ),
    "getattr with a name in a local": (
        "class C:\n  k = 2.0\nc = C()\nc.v = 1.0",
        "for name in ('k', 'v', 'w'): x = x * getattr(c, name, 3.0)\nreturn x",
        "C.k = 4.0",
        "c.w = 5.0",
        "c.v = 6.0",
    ),
    "getattr with a name in a global": (
        "class C:\n  k, j = 2.0, 7.0\nn = 'k'",
        "return x * getattr(C, n)",
        "C.k = 4.0",
        "n = 'j'",
    ),
    "getattr with a name that is computed, of a local": (
        "class B: j = 2.0\nclass C(B): k = 2.0\nc = C()\nc.v = 1.0",
        "o = c\nreturn x * getattr(o, 'jkv'[0] + '') * getattr(o, 'jkv'[2] + '')",
        "B.j = 4.0",
        "c.v = 5.0",
    ),
    "own __dict__": (
        "class C:\n  def g(s, n): return s.__dict__.get(n, 9.0)\nc = C()\nc.v = 2.0",
        "return x * c.g('v') * c.g('w')",
        "c.v = 4.0",
        "c.w = 5.0",
    ),
    "own __getattribute__ with other names": (
        "class C:\n  names = {'a': 'b'}\n  def __getattribute__(s, n):\n"
        "    names = super().__getattribute__('names')\n    return super().__getattribute__(names.get(n, n))\n"
        "c = C()\nc.b = 2.0",
        "return x * c.a",
        "c.b = 4.0",
        "C.names['a'] = 'd'; c.d = 7.0",
    ),
    "import in a branch that does not run": (
        "",
        "if x.shape[0] > 99: import rows_not_there\nreturn x * 2",
        "",
    ),
    "fields of a dataclass": (
        "from dataclasses import dataclass, field, fields\nm = {'s': 2.0}\n@dataclass\nclass C:\n"
        "  v: float = field(default=1.0, metadata=m)\nc = C()",
        "return x * fields(c)[0].metadata['s']",
        "m['s'] = 4.0",
    ),
    "special method of a subclass": (
        "class B:\n  def __getattr__(s, n): return 2.0\nclass A(B): pass\na = A()",
        "return x * a.k",
        "B.__getattr__ = lambda s, n: 9.0",
        "A.__getattr__ = lambda s, n: 4.0",
        "a.k = 1.5",
    ),
    "truth of an object": ("class A: pass\na = A()", "return x * 2 if a else x", "A.__len__ = lambda s: 0"),
    "list that a cache has": (
        "from functools import lru_cache\n@lru_cache\ndef g(): return [2.0]\ng()",
        "return x * g()[0]",
        "g()[0] = 5.0",
    ),
    "dict that an endless cache has": (
        "from functools import cache\n@cache\ndef g(): return {'k': 2.0}\ng()",
        "return x * g()['k']",
        "g()['k'] = 5.0",
    ),
    "list of a context variable": (
        "from contextvars import ContextVar\nv = ContextVar('v', default=[2.0])",
        "return x * v.get()[0]",
        "v.get()[0] = 5.0",
    ),
    "attribute that a class gets, by a name that is computed": (
        "class A: pass\na = A()",
        "return x * getattr(a, 'j' + 'k', 1.0)",
        "A.jk = 5.0",
        "a.jk = 4.0",
    ),
    "attribute that a module gets, by a name that is computed": (
        "import rows_config as config",
        "return x * getattr(config, 'la' + 'te', 1.0)",
        "config.late = 3.0",
    ),
    "dir": (
        "class A: k = 2.0\na = A()",
        "return x * len([n for n in dir(a) if n[0] != '_'])",
        "a.q = 1",
        "A.z = 1",
    ),
    "attribute of a plain tensor": ("k = torch.ones(4)\nk.s = 2.0", "return x * k.s", "k.s = 4.0"),
    "gradient of a plain tensor": (
        "k = torch.ones(4, requires_grad=True)",
        "return x * 2 if k.grad is None else x * 3",
        "k.grad = torch.ones(4)",
        "k.grad = None",
    ),
    "attribute of a plain parameter": (PLAIN_MODULE, "return n(x) * getattr(n.w, 's', 1.0)", "n.w.s = 4.0"),
    "filters of warnings": (
        "import warnings",
        "try: warnings.warn('k')\nexcept UserWarning: return x * 5\nreturn x",
        "old = warnings.filters[:]\nwarnings.simplefilter('error')",
        "warnings.filters[:] = old",
    ),
    "dtype of autocast": (
        "",
        "return x * 2 if torch.get_autocast_dtype('cpu') is torch.float16 else x",
        "torch.set_autocast_dtype('cpu', torch.float16)",
        "torch.set_autocast_dtype('cpu', torch.bfloat16)",
    ),
    "flag of torch": (
        "",
        "return x * 2 if torch.is_warn_always_enabled() else x",
        "torch.set_warn_always(True)",
        "torch.set_warn_always(False)",
    ),
    "flag of torch in C": (
        "",
        "return x * 2 if torch._C._get_warnAlways() else x",
        "torch.set_warn_always(True)",
        "torch.set_warn_always(False)",
    ),
}

PLAIN: dict[str, Row] = {
    "hits of a cache": (
        "from functools import lru_cache\n@lru_cache\ndef g(n): return n",
        "g(1)\nreturn x * g.cache_info().hits",
    ),
    "handler of a logger that begins to write": (
        "import logging\nlog, seen = logging.getLogger('rows_edges'), []\nclass K(logging.Handler):\n"
        "  def emit(s, r): seen.append(1)\nlog.addHandler(K())\nlog.propagate = False\nlog.setLevel(40)",
        "log.info('a')\nreturn x * (len(seen) + 1)",
        "log.setLevel(10)",
    ),
    "text of a tensor": (
        "",
        "return x * len(str(torch.tensor(1 / 3)))",
        "torch.set_printoptions(precision=8)",
        "torch.set_printoptions(profile='default')",
    ),
    "finalizer": (
        "import weakref\nclass A: pass\na = A()\nend = weakref.finalize(a, print)",
        "return x * 2 if end.alive else x",
        "end.detach()",
    ),
    "attribute that is set on an argument": ("", "x.n = getattr(x, 'n', 0) + 1\nreturn x * x.n"),
    "attribute that is set on a parameter": (PLAIN_MODULE, "n.w.c = getattr(n.w, 'c', 0) + 1\nreturn n(x) * n.w.c"),
    "gradient of a parameter": (
        PLAIN_MODULE + "\nn.w.grad = torch.ones(4)",
        "return n(x) * (2 if n.w.grad is None else 3)",
        "n.w.grad = None",
    ),
    # What a second run of a trace would set as it was before.
    "entries that swap": ("ks = [1.0, 2.0]", "ks[0], ks[1] = ks[1], ks[0]\nreturn x * ks[0]"),
    "attribute that is deleted and set": (
        "class C: pass\nc = C()\nc.v = 1.0",
        "try:\n  del c.v\n  return x * 2\nexcept AttributeError:\n  c.v = 1.0\n  return x * 3",
    ),
    "flag that turns": ("on = True", "global on\non = not on\nreturn x * 2 if on else x"),
    "deque that rotates by half": (
        "from collections import deque\nd = deque([1.0, 2.0])",
        "d.rotate(1)\nreturn x * d[0]",
    ),
    "keys that come and go": (
        "d = {}",
        "x = x * (2 if 'k' in d else 3)\nd.pop('k') if 'k' in d else d.update(k=1)\nreturn x",
    ),
    "class of a Python module": (
        "import types\nimport rows_config as c\nclass M(types.ModuleType):\n  def __getattribute__(s, n):\n"
        "    return 9.0 if n == 'scale' else super().__getattribute__(n)",
        "return x * c.scale",
        "c.__class__ = M",
    ),
    "__getattr__ of a Python module": (
        "import rows_config as c\nc.__getattr__ = lambda n: 4.0",
        "return x * c.other",
        "c.__getattr__ = lambda n: 5.0",
        "c.other = 6.0",
    ),
    "cached property that is deleted": (
        "from functools import cached_property\nclass C:\n  k = 2.0\n  @cached_property\n  def p(s): return s.k\n"
        "c = C()\nc.p",
        "return x * c.p",
        "c.k = 5.0",
        "del c.p",
    ),
    "level of a logger": (
        "import logging\nlog = logging.getLogger('rows')\nlog.setLevel(10)",
        "return x * 2 if log.isEnabledFor(20) else x",
        "log.setLevel(40)",
    ),
    "signature": (
        "import inspect\ndef g(a): pass",
        "return x * len(inspect.signature(g).parameters)",
        "def g(a, b): pass",
        "g.__signature__ = inspect.signature(lambda a, b, c: 0)",
    ),
    "hints of types": (
        "import typing\nclass C:\n  a: float",
        "return x * len(typing.get_type_hints(C))",
        "C.__annotations__['b'] = int",
    ),
    "function that NumPy calls": (
        "import numpy as np\nk = 2.0\ng = np.vectorize(lambda v: v * k)",
        "return x * float(g(1.0))",
        "k = 4.0",
    ),
    "polynomial of NumPy": (
        "import numpy as np\np = np.poly1d([2.0, 1.0])",
        "return x * float(p(1.0))",
        "p.coeffs[0] = 5.0",
    ),
    "errors of NumPy": (
        "import numpy as np",
        "return x * (2 if np.geterr()['divide'] == 'ignore' else 1)",
        "old = np.seterr(divide='ignore')",
        "np.seterr(**old)",
    ),
}

MADE = "def S(t, layout='on tp=2: S(0)'): return shard(t, layout)\nA = torch.arange(8.0).reshape(4, 2)\n"
MODEL = """
class N(torch.nn.Module):
  def __init__(s):
    super().__init__()
    s.l, s.k = torch.nn.Linear(4, 4), 2.0
    s.register_buffer('b', torch.ones(4))
  def forward(s, x): return s.l(x) * s.b * s.k
n = N()
for p in n.parameters(): p.data = torch.arange(p.numel(), dtype=torch.float32).reshape(p.shape) / 8 - 1
shard_module(n, ModelPlan(Mesh.of(tp=2), {'l.weight': 'S(0)'}, axis='tp', input_plan='replicated'))
f, X = n, torch.arange(8.0).reshape(2, 4)
"""
STEP = """
opt = torch.optim.SGD(n.parameters(), lr=0.25)
def f(x):
  opt.zero_grad()
  loss = n(x).square().mean()
  loss.backward()
  opt.step()
  return loss
"""
SIGNED = "import math\ndef f(x, k): return x * math.copysign(2.0, k{})"
CALLS: dict[str, tuple[str, ...]] = {
    "keys that are equal": (
        "def f(d): return sum(v * (2 if type(k) is int else 3 if type(k) is bool else 5) for k, v in d.items())",
        "f({1: S(A)})",
        "f({1.0: S(A)})",
        "f({True: S(A)})",
    ),
    "order of keys": (
        "def f(d): return sum((i + 1) * v for i, v in enumerate(d.values()))",
        "f({'a': S(A), 'b': S(A * 2)})",
        "f({'b': S(A), 'a': S(A * 2)})",
    ),
    "order of keywords": (
        "def f(x, **k): return x * sum((i + 1) * v for i, v in enumerate(k.values()))",
        "f(S(A), a=1.0, b=2.0)",
        "f(S(A), b=2.0, a=1.0)",
        "f(S(A), a=2.0, b=1.0)",
    ),
    "zeros": (SIGNED.format(""), "f(S(A), 0.0)", "f(S(A), -0.0)", "f(S(A), 0)"),
    "zeros in a tuple": (SIGNED.format("[0]"), "f(S(A), (0.0,))", "f(S(A), (-0.0,))", "f(S(A), [0.0])"),
    "complex zeros": (SIGNED.format(".imag"), "f(S(A), complex(1, 0.0))", "f(S(A), complex(1, -0.0))"),
    "zeros of a frozen set": (SIGNED.format(".pop()"), "f(S(A), {0.0})", "f(S(A), {-0.0})"),
    "zeros of a frozen dataclass": (
        "from dataclasses import dataclass\n@dataclass(frozen=True)\nclass C:\n  k: object\n"
        "def f(x, c): return x * (c.k if type(c.k) is float else 7 * c.k)",
        "f(S(A), C(2.0))",
        "f(S(A), C(2))",
        "f(S(A), C(True))",
    ),
    "objects that are equal": (
        "class C:\n  def __init__(s, k): s.k = k\n  def __eq__(s, o): return True\n  def __hash__(s): return 1\n"
        "def f(x, c): return x * c.k",
        "f(S(A), C(2.0))",
        "f(S(A), C(3.0))",
    ),
    "numbers of NumPy": (
        "import numpy as np\nimport math\ndef f(x, k): return x * math.copysign(2.0, k)",
        "f(S(A), np.float32(0.0))",
        "f(S(A), np.float32(-0.0))",
    ),
    "one tensor twice": (
        "def f(x, y): return x * 2 if x is y else x * 3",
        "(lambda a: f(a, a))(S(A))",
        "f(S(A), S(A))",
        "(lambda a: f(a, a))(S(A))",
    ),
    "one tensor twice, written to": (
        "def f(x, y):\n  x.add_(1)\n  return x * y",
        "(lambda a: f(a, a))(S(A))",
        "f(S(A), S(A))",
    ),
    "a tensor of the closure": ("k = S(A)\ndef f(x): return x * 2 if x is k else x * k", "f(k)", "f(S(A))", "f(k)"),
    "leaf of the tape": (
        "def f(x): return x * 2 if x.is_leaf else x * 3",
        "f(S(A).requires_grad_())",
        "f(S(A).requires_grad_() * 1)",
    ),
    "gradient of an argument": (
        "a = S(A).requires_grad_()\ndef f(x): return x * 2 if x.grad is None else x * x.grad",
        "f(a)",
        "((a * 3).sum().backward(), f(a))[1]",
    ),
    "attribute of an argument": (
        "a = S(A)\ndef f(x): return x * getattr(x, 'scale', 1.0)",
        "f(a)",
        "(setattr(a, 'scale', 3.0), f(a))[1]",
        "(setattr(a, 'scale', 4.0), f(a))[1]",
    ),
    "module in evaluation": (MODEL, "f(X)", "(n.eval(), f(X))[1]"),
    "trained parameters": (
        MODEL,
        "(f(X).sum().backward(), n.l.weight.grad)[1]",
        "(n.zero_grad(), n.l.weight.requires_grad_(False), f(X).sum().backward(), n.l.bias.grad)[-1]",
        "(n.zero_grad(), n.l.weight.requires_grad_(True), f(X).sum().backward(), n.l.weight.grad)[-1]",
    ),
    "buffer that is replaced": (
        MODEL,
        "f(X)",
        "(setattr(n, 'b', n.b * 3), f(X))[1]",
        "(n.b.mul_(2), f(X))[1]",
    ),
    "hook of a gradient": (
        MODEL,
        "(f(X).sum().backward(), n.l.weight.grad)[1]",
        "(n.zero_grad(), n.l.weight.register_hook(lambda g: g * 3), f(X).sum().backward(), n.l.weight.grad)[-1]",
    ),
    "hook that a gradient gets between steps": (
        MODEL + STEP,
        "f(X)",
        "f(X)",
        "(n.l.bias.register_hook(lambda g: g * 0), f(X), n.l.bias.detach())[2]",
    ),
    "arguments and results that are returned": (
        "a = S(A)\ndef f(x):\n  y = x * 2\n  return x, y, y, {'x': x}",
        "f(a)[1]",
        "float(f(a)[0] is a) + float(f(a)[1] is f(a)[2])",
        "float((lambda r: r[1] is r[2] and r[3]['x'] is r[0])(f(a)))",
    ),
    "an argument that is returned after a write": (
        "a = S(A)\ndef f(x):\n  x.add_(1)\n  return x",
        "f(a)",
        "float(f(a) is a)",
        "a",
    ),
    "parameters and tensors": (
        "def f(p): return p * (2 if isinstance(p, torch.nn.Parameter) else 3)",
        "f(torch.nn.Parameter(A))",
        "f(A)",
    ),
    "attribute that is set on a split parameter": (
        MODEL.replace("return s.l(x)", "s.l.weight.c = getattr(s.l.weight, 'c', 0) + 1; return s.l.weight.c * s.l(x)"),
        "f(X)",
        "f(X)",
    ),
    "attribute that a split parameter gets": (
        MODEL.replace("return s.l(x)", "return sum(getattr(p, 'c', 1.0) for p in s.parameters()) * s.l(x)"),
        "f(X)",
        "(setattr(n.l.weight, 'c', 3.0), f(X))[1]",
        "(setattr(n.l.weight, 'c', 4.0), f(X))[1]",
        "(delattr(n.l.weight, 'c'), f(X))[1]",
    ),
    "class of a tensor": (
        "def f(p): return p * (2 if type(p) is torch.Tensor else 3)",
        "f(A)",
        "f(A * 2)",
    ),
    "hook of a step": (
        MODEL + STEP,
        "f(X)",
        "f(X)",
        "(opt.register_step_post_hook(lambda *a: n.l.bias.data.zero_()), f(X), n.l.bias.detach())[-1]",
        "f(X)",
    ),
    "options of an optimizer": (
        MODEL + STEP,
        "f(X)",
        "f(X)",
        "(opt.param_groups[0].update(weight_decay=0.5), f(X))[1]",
        "(opt.param_groups[0].update(maximize=True), f(X), n.l.weight.detach())[-1]",
    ),
}


@pytest.fixture(autouse=True)
def own_modules() -> Any:
    """What rows set is put back."""
    yield
    sys.modules.pop("rows_config", None)


@pytest.mark.parametrize("name", GRAPH)
def test_what_is_seldom_read_and_can_be_compared(name: str) -> None:
    found, expected, program = run_row(GRAPH[name])
    assert list(map(str, found)) == list(map(str, expected))
    assert "without a graph" not in program.explain(), program.explain()


@pytest.mark.parametrize("name", PLAIN)
def test_what_is_seldom_read_and_cannot_be_compared(name: str) -> None:
    found, expected, program = run_row(PLAIN[name])
    assert list(map(str, found)) == list(map(str, expected))
    assert "without a graph" in program.explain()


def tell(row: tuple[str, ...], compiled: bool) -> list[Any]:
    """What the calls of a row give on this rank."""
    setup, *calls = row
    names = types.ModuleType("rows").__dict__
    exec(f"import torch\nfrom shardwise import *\n{MADE}{setup}", names)
    if compiled:
        names["f"] = shardwise.compile(names["f"], backend="eager")
    found = []
    for call in calls:
        result = eval(call, names)
        found.append(result.full().detach() if isinstance(result, ShardedTensor) else result)
    return found


@pytest.mark.parametrize("name", CALLS)
def test_calls_are_those_without_a_graph(name: str) -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        compiled, plain = (run_local(lambda _, c=c: tell(CALLS[name], c), 2, timeout=60.0) for c in (True, False))
    for one, other in zip(compiled, plain, strict=True):
        torch.testing.assert_close(one, other)
