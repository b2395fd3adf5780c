"""What travels into a cell and what comes back: the rules, one case each, in a real shell."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Iterator
from dataclasses import dataclass

import pytest

from tests.notebook.terminal import Terminal

# Makes notebook and ranks forget what an earlier case has left, and defines how values are told.
FRESH = """
for _name in [n for n in list(globals()) if not n.startswith('_') and n not in __keep]:
    del globals()[_name]
from gpupool.pool.variables.composite import Composite as _C
def __tell(value):
    return f'Composite {value.gather()}' if isinstance(value, _C) else repr(value)
__tell.__globals__['_C'] = _C
"""
FRESH_RANKS = """%%spmd --isolate --view quiet
for _name in [n for n in list(globals()) if not n.startswith('_') and n not in {
        'rank', 'world_size', 'local_rank', 'device', 'torch', 'dist', 'In', 'Out', 'exit', 'quit',
        'get_ipython', 'open'}]:
    del globals()[_name]
"""


@dataclass(frozen=True)
class Case:
    """`notebook` cells (split by a line of dashes) run, then `ask` is evaluated in the notebook."""

    name: str
    cells: str
    ask: str
    expected: str


READ = [
    Case("int", "x = 3\n---\n%%spmd -o r\nx * 2 + rank", "r[0], r[1]", "(6, 7)"),
    Case("string", "x = 'a'\n---\n%%spmd -o r\nx + str(rank)", "r[1]", "'a1'"),
    Case("none", "x = None\n---\n%%spmd -o r\nx is None", "r[1]", "True"),
    Case("nested list", "x = [1, [2]]\n---\n%%spmd -o r\nx[1][0]", "r[0]", "2"),
    Case(
        "array", "import numpy as np\nx = np.arange(3)\n---\n%%spmd -o r\nint(x.sum())", "r[1]", "3"
    ),
    Case(
        "tensor", "import torch\nx = torch.arange(3)\n---\n%%spmd -o r\nint(x.sum())", "r[1]", "3"
    ),
    Case(
        "array is the rank's to write",
        "import numpy as np\nx = np.zeros(2)\n---\n%%spmd -o r\nx[0] = 5 + rank\nfloat(x[0])",
        "r[0], r[1], x.tolist()",
        "(5.0, 6.0, [0.0, 0.0])",
    ),
    Case(
        "a read-only array stays one",
        "import numpy as np\nx = np.zeros(2)\nx.flags.writeable = False\n---\n"
        "%%spmd -o r\nx.flags.writeable",
        "r[0]",
        "False",
    ),
    Case(
        "None where a tensor was",
        "import torch\nx = torch.zeros(3)\n---\n%%spmd\nx\n---\nx = None\n---\n"
        "%%spmd -o r\nx is None",
        "r[1]",
        "True",
    ),
    Case(
        "open of another library",
        "def open(path): return 'mine'\n---\n%%spmd -o r\nopen('p')\n---\ndel open",
        "r[1]",
        "'mine'",
    ),
    Case(
        "cached_property and singledispatch",
        "import functools\nn = 3\nclass A:\n    @functools.cached_property\n"
        "    def v(self): return n\n"
        "@functools.singledispatch\ndef kind(x): return 'any'\n"
        "@kind.register\ndef of_int(x: int): return 'int'\nkind(1)\n---\n"
        "%%spmd -o r\nA().v, kind(rank), kind('')",
        "r[1]",
        "(3, 'int', 'any')",
    ),
    Case("module by name", "import math as m\n---\n%%spmd -o r\nm.floor(2.5)", "r[1]", "2"),
    Case(
        "submodule",
        "import os.path\n---\n%%spmd -o r\nos.path.basename('a/b')",
        "r[1]",
        "'b'",
    ),
    Case(
        "module of a folder that the notebook has added since",
        "import sys, tempfile, pathlib\nfolder = tempfile.mkdtemp()\nsys.path.insert(0, folder)\n"
        "pathlib.Path(folder, 'added_here.py').write_text('value = 8')\nimport added_here\n---\n"
        "%%spmd -o r\nadded_here.value",
        "r[1]",
        "8",
    ),
    Case(
        "the notebook's folder",
        "import os, tempfile\nold, new = os.getcwd(), tempfile.mkdtemp()\nos.chdir(new)\n---\n"
        "%%spmd -o r\nimport os\nos.getcwd()\n---\nos.chdir(old)\n---\n%%spmd -o s\nos.getcwd()",
        "r[1] == new, s[0] == old",
        "(True, True)",
    ),
    Case("function", "def f(x): return x + 1\n---\n%%spmd -o r\nf(rank)", "r[1]", "2"),
    Case("lambda", "f = lambda x: x * 3\n---\n%%spmd -o r\nf(rank)", "r[1]", "3"),
    Case(
        "closure",
        "def make(n):\n    def add(x): return x + n\n    return add\nadd5 = make(5)\n---\n"
        "%%spmd -o r\nadd5(rank)",
        "r[1]",
        "6",
    ),
    Case(
        "function reads a global, transitively",
        "n = 10\ndef g(x): return x + n\ndef f(x): return g(x) * 2\n---\n%%spmd -o r\nf(rank)",
        "r[1]",
        "22",
    ),
    Case(
        "a later change of that global is seen",
        "n = 10\ndef f(x): return x + n\n---\n%%spmd\nf(1)\n---\nn = 20\n---\n%%spmd -o r\nf(rank)",
        "r[1]",
        "21",
    ),
    Case(
        "a redefined function is sent again",
        "def f(): return 1\n---\n%%spmd\nf()\n---\ndef f(): return 2\n---\n%%spmd -o r\nf()",
        "r[0]",
        "2",
    ),
    Case(
        "recursive function",
        "def fact(n): return 1 if n < 2 else n * fact(n - 1)\n---\n%%spmd -o r\nfact(5)",
        "r[1]",
        "120",
    ),
    Case(
        "defaults, keyword-only defaults and annotations",
        "def f(a, b=2, *, c=3) -> int: return a + b + c\n---\n%%spmd -o r\nf(1), f.__annotations__",
        "r[1]",
        "(6, {'return': <class 'int'>})",
    ),
    Case(
        "class with method that reads a global",
        "k = 7\nclass P:\n    def v(self): return k\n---\n%%spmd -o r\nP().v()",
        "r[1]",
        "7",
    ),
    Case(
        "instance of a notebook class",
        "class P:\n    def __init__(s, v): s.v = v\np = P(4)\n---\n%%spmd -o r\np.v, type(p) is P",
        "r[1]",
        "(4, True)",
    ),
    Case(
        "subclass with super()",
        "class A:\n    def f(s): return 1\nclass B(A):\n    def f(s): return super().f() + 1\n---\n"
        "%%spmd -o r\nB().f(), isinstance(B(), A)",
        "r[0]",
        "(2, True)",
    ),
    Case(
        "dataclass and enum",
        "from dataclasses import dataclass\nfrom enum import Enum\nclass E(Enum):\n    A = 1\n"
        "@dataclass\nclass D:\n    e: E\nd = D(E.A)\n---\n%%spmd -o r\nd.e is E.A, d == D(E.A)",
        "r[1]",
        "(True, True)",
    ),
    Case(
        "decorated function",
        "import functools\ndef twice(f):\n    @functools.wraps(f)\n"
        "    def g(*a): return f(*a) * 2\n"
        "    return g\n@twice\ndef h(x): return x + 1\n---\n%%spmd -o r\nh(rank), h.__name__",
        "r[1]",
        "(4, 'h')",
    ),
    Case(
        "generator function",
        "def g():\n    yield from (1, 2)\n---\n%%spmd -o r\nsum(g())",
        "r[0]",
        "3",
    ),
    Case(
        "async function and top-level await",
        "import asyncio\nasync def f(): return 5\n---\n%%spmd -o r\nawait f()",
        "r[1]",
        "5",
    ),
    Case(
        "comprehension",
        "xs = [1, 2]\nk = 3\n---\n%%spmd -o r\n[x * k for x in xs]",
        "r[1]",
        "[3, 6]",
    ),
    Case("f-string", "w = 4\nx = 1.5\n---\n%%spmd -o r\nf'{x:{w}.1f}'", "r[1]", "' 1.5'"),
    Case("%time", "x = 2\n---\n%%spmd -o r\n%time y = x + rank\ny", "r[1]", "3"),
    Case(
        "%%time", "x = 2\n---\n%%spmd -o r\n%%time\nz = x * 2\nz", "__tell(z)", "'Composite [4, 4]'"
    ),
    Case(
        "!command",
        "word = 'hi'\n---\n%%spmd -o r\nout = !echo {word} $word\nout[0]",
        "r[1]",
        "'hi hi'",
    ),
    Case(
        "in a function of the cell",
        "k = 2\n---\n%%spmd -o r\ndef f(x):\n    return x * k\nf(4)",
        "r[1]",
        "8",
    ),
    Case(
        "bound methods and partials",
        "import functools\nclass A:\n    def f(s, x): return x\na = A()\nm = a.f\n"
        "p = functools.partial(m, 9)\n---\n%%spmd -o r\nm(1), p()",
        "r[1]",
        "(1, 9)",
    ),
    Case(
        "a rank's name wins over the notebook's",
        "rank = 77\n---\n%%spmd -o r\nrank",
        "r[0], r[1], rank",
        "(0, 1, 77)",
    ),
    Case(
        "a name that the notebook does not know is the rank's own",
        "%%spmd --isolate\nown = rank * 5\n---\n%%spmd -o r\nown",
        "r[1], 'own' in globals()",
        "(5, False)",
    ),
    Case(
        "not read where the cell binds it first",
        "import threading\nx = threading.Lock()\n---\n%%spmd\nx = rank\nprint(x)",
        "__tell(x)",
        "'Composite [0, 1]'",
    ),
]

# What runs when a value is made again on a rank: methods that read names of the notebook.
UNPICKLED = [
    Case(
        "__setstate__ reads a module and a constant",
        "import threading\nVERSION = 2\nclass H:\n    def __init__(s, v): s.v = v\n"
        "    def __getstate__(s): return {'v': s.v}\n"
        "    def __setstate__(s, d): s.v, s.lock, s.of = d['v'], threading.Lock(), VERSION\n"
        "h = H(3)\n---\n%%spmd -o r\nh.v, h.lock.acquire(), h.of, type(h) is H\n---\n"
        "VERSION = 3\nh = H(4)\n---\n%%spmd -o s\nh.v, h.of",
        "r[1], s[0]",
        "((3, True, 2, True), (4, 3))",
    ),
    Case(
        "__reduce__ gives a function that reads the class",
        "def build(a): return Thing(a)\nclass Thing:\n    def __init__(s, a): s.a = a\n"
        "    def __reduce__(s): return build, (s.a,)\nthing = Thing(4)\n---\n"
        "%%spmd -o r\nthing.a, type(thing) is Thing",
        "r[1]",
        "(4, True)",
    ),
    Case(
        "__new__ and __array_finalize__ read a module",
        "import numpy as np\nclass Vec(np.ndarray):\n"
        "    def __new__(cls, *v): return np.asarray(v).view(cls)\n"
        "    def __array_finalize__(s, o): s.tag = getattr(o, 'tag', np.float32(3))\n"
        "v = Vec(1, 2)\n---\n%%spmd -o r\nint(v.sum()), float(v.tag), type(v) is Vec",
        "r[1]",
        "(3, 3.0, True)",
    ),
    Case(
        "__hash__ reads a constant",
        "salt = 7\nclass Key:\n    def __init__(s, n): s.n = n\n"
        "    def __hash__(s): return hash((s.n, salt))\n    def __eq__(s, o): return s.n == o.n\n"
        "table = {Key(1): 'one'}\nboth = {Key(2), Key(3)}\n---\n"
        "%%spmd -o r\ntable[Key(1)], Key(3) in both",
        "r[1]",
        "('one', True)",
    ),
    Case(
        "through functions, whatever comes first in the alphabet",
        "class A:\n    def __setstate__(s, d): s.of = z()\n    def names(s): return b\n"
        "class B:\n    def __setstate__(s, d): s.of = limit\n    def names(s): return a\n"
        "def z(): return b.of\nlimit = 9\na, b = A(), B()\na.v = b.v = 1\n---\n"
        "%%spmd -o r\na.of, b.of, a.names() is b",
        "r[1]",
        "(9, 9, True)",
    ),
    Case(
        "a metaclass has seen the class already",
        "class Meta(type):\n    made = []\n    def __new__(m, name, bases, ns, **options):\n"
        "        c = super().__new__(m, name, bases, ns)\n        Meta.made.append(name)\n"
        "        return c\nclass WithMeta(metaclass=Meta, option=1): pass\n---\n"
        "%%spmd -o r\nclass Own(WithMeta): pass\nMeta.made, type(Own) is Meta",
        "r[1]",
        "(['WithMeta', 'Own'], True)",
    ),
    Case(
        "__init_subclass__ has seen the class already",
        "registry = {}\nclass Base:\n    def __init_subclass__(cls, *, key):\n"
        "        registry[key] = cls\nclass One(Base, key='one'): pass\none = One()\n---\n"
        "%%spmd -o r\nclass Two(Base, key='two'): pass\n"
        "type(one) is One, registry == {'one': One, 'two': Two}",
        "r[1]",
        "(True, True)",
    ),
    Case(
        "what a rank's own value takes part in",
        "%%spmd\nx = [rank]\n---\ny = x\nx = 5\nclass A:\n"
        "    def __setstate__(s, d): s.x = x, d['y']\na = A()\na.y = y\n---\n"
        "%%spmd -o r\na.x",
        "r[1]",
        "(5, [1])",
    ),
    Case(
        "a constant",
        "import gpupool\npool = gpupool.current_pool()\nscale = 3\nclass H:\n    v = 2\n"
        "    def __setstate__(s, d): s.of = scale\n    def times(s): return s.v * scale\n"
        "h = H()\nh.w = 1\nbig = pool.put(h)\n---\nscale = 4\n---\n"
        "%%spmd -o r\nbig.of, big.times()",
        "r[1]",
        "(3, 8)",
    ),
]

SENT = [
    Case(
        "cached functions",
        "import functools\n@functools.cache\ndef load(n): return [n] * 2\nload(1)\n"
        "@functools.lru_cache(maxsize=None)\n"
        "def fib(n): return n if n < 2 else fib(n - 1) + fib(n - 2)\n"
        "class T:\n    @functools.lru_cache(8)\n    def big(self, n): return n * 2\n"
        "t = T()\nhelper = functools.cache(lambda x: x + 1)\n---\n"
        "%%spmd -o r\nload(3) is load(3), fib(30), fib.cache_info().hits > 0, t.big(2), "
        "helper(1), load.__name__\n---\n%%spmd -o s\nload.cache_info().currsize",
        "r[1], s[1]",
        "((True, 832040, True, 4, 2, 'load'), 1)",
    ),
    Case(
        "submodules",
        "import xml.dom.minidom, concurrent.futures\n---\n"
        "%%spmd -o r\nd = xml.dom\nd.minidom.parseString('<a/>').documentElement.tagName",
        "r[1]",
        "'a'",
    ),
    Case(
        "a submodule of the rank's torch",
        "import torch.utils.model_zoo\n---\n%%spmd -o r\ntorch.utils.model_zoo.__name__",
        "r[1]",
        "'torch.utils.model_zoo'",
    ),
    Case(
        "a submodule of a package beside the notebook",
        "import sys, tempfile, pathlib\nfolder = pathlib.Path(tempfile.mkdtemp(), 'beside')\n"
        "folder.mkdir()\n(folder / '__init__.py').touch()\n"
        "(folder / 'other.py').write_text('name = 8')\nsys.path.insert(0, str(folder.parent))\n"
        "import beside.other\n---\n%%spmd -o r\nbeside.other.name",
        "r[1]",
        "8",
    ),
    Case(
        "pickled again on a rank",
        "class A:\n    class Inner:\n        def __init__(s, v): s.v = v\n"
        "    def __init__(s, v): s.v, s.i = v, A.Inner(v)\ndef f(x): return x + 1\na = A(3)\n---\n"
        "%%spmd -o r\nimport pickle\nb = pickle.loads(pickle.dumps(a))\n"
        "b.v, b.i.v, type(b) is type(a), type(b.i) is A.Inner, pickle.loads(pickle.dumps(f))(1)",
        "r[1]",
        "(3, 3, True, True, 2)",
    ),
    Case(
        "an instance alone is pickled again",
        "class P:\n    v = 5\np = P()\n---\n"
        "%%spmd -o r\nimport pickle\npickle.loads(pickle.dumps(p)).v",
        "r[1]",
        "5",
    ),
    Case(
        "a parametrized module",
        "import torch\nfrom torch.nn.utils import parametrizations\n"
        "net = parametrizations.weight_norm(torch.nn.Linear(2, 2))\nw = net.weight.detach()\n---\n"
        "%%spmd -o r\nsame = torch.equal(net.weight, w)\nnet(torch.ones(1, 2)).sum().backward()\n"
        "same, torch.nn.utils.parametrize.is_parametrized(net), "
        "net.parametrizations.weight.original1.grad is not None",
        "r[1]",
        "(True, True, True)",
    ),
    Case(
        "a memoryview",
        "import numpy as np\nv = memoryview(bytearray(b'abc'))\n"
        "w = memoryview(np.arange(6).reshape(2, 3))\n---\n"
        "%%spmd -o r\nv[rank] = 0\ntype(v), bytes(v), w.tolist()",
        "r[1], bytes(v)",
        "((<class 'memoryview'>, b'a\\x00c', [[0, 1, 2], [3, 4, 5]]), b'abc')",
    ),
    Case(
        "a compiled function",
        "import torch\nk = 2\n@torch.compile(backend='eager', dynamic=False, fullgraph=True)\n"
        "def scaled(x): return x * k\n---\n"
        "%%spmd -o r\nscaled(torch.ones(2)).tolist(), hasattr(scaled, 'get_compiler_config')",
        "r[1]",
        "([2.0, 2.0], True)",
    ),
]

SAME = [
    Case(
        "two names of one tensor",
        "import torch\nx = torch.zeros(1)\ny = x\n---\n%%spmd -o r\nx += 1\ny.item(), x is y",
        "r[1]",
        "(1.0, True)",
    ),
    Case(
        "two names of one list",
        "x = []\ny = x\n---\n%%spmd -o r\nx.append(rank)\ny, x is y",
        "r[1]",
        "([1], True)",
    ),
    Case(
        "optimizer and model of one cell",
        "import torch\nmodel = torch.nn.Linear(1, 1)\n"
        "adam = torch.optim.Adam(model.parameters())\n---\n"
        "%%spmd -o r\nadam.param_groups[0]['params'][0] is model.weight",
        "r[1]",
        "True",
    ),
    Case(
        "optimizer that comes a cell later",
        "import torch\nmodel = torch.nn.Linear(1, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), 1.0)\n"
        "---\n%%spmd\nwith torch.no_grad():\n    model.weight.fill_(5)\n---\n"
        "%%spmd -o r\nmodel(torch.ones(1, 1)).sum().backward()\nopt.step()\nmodel.weight.item()",
        "r[1]",
        "4.0",
    ),
    Case(
        "optimizer of a model that is the ranks' own by now",
        "import torch\nmodel = torch.nn.Linear(1, 1)\n"
        "opt = torch.optim.SGD(model.parameters(), 1.0)\n"
        "---\n%%spmd\nopt.zero_grad()\nmodel = torch.nn.Sequential(model)\n---\n%%spmd -o r\n"
        "opt.param_groups[0]['params'][0] is model[0].weight",
        "r[1]",
        "True",
    ),
    Case(
        "tied weights and views",
        "import torch\na = torch.nn.Linear(2, 2)\nb = torch.nn.Linear(2, 2)\nb.weight = a.weight\n"
        "net = torch.nn.Sequential(a, b)\nt = torch.zeros(4)\npair = (t, t[:2])\n---\n"
        "%%spmd -o r\npair[0][0] = 1\nnet[0].weight is net[1].weight, pair[1][0].item()",
        "r[1]",
        "(True, 1.0)",
    ),
    Case(
        "what a rank did to an unchanged value stays",
        "x = [1]\n---\n%%spmd\nx.append(rank)\n---\n%%spmd -o r\nx",
        "r[0], r[1], x",
        "([1, 0], [1, 1], [1])",
    ),
    Case(
        "a value changed in place in the notebook is sent again",
        "x = [1]\n---\n%%spmd\nx.append(9)\n---\nx.append(2)\n---\n%%spmd -o r\nx",
        "r[1]",
        "[1, 2]",
    ),
    Case(
        "one element of an array",
        "import numpy as np\nx = np.zeros(100_000)\n---\n%%spmd\nx.sum()\n---\nx[77_777] = 1\n---\n"
        "%%spmd -o r\nfloat(x.sum())",
        "r[1]",
        "1.0",
    ),
    Case(
        "a changed learning rate leaves the trained model alone",
        "import torch\nlr = 0.1\nmodel = torch.nn.Linear(1, 1)\n---\n"
        "%%spmd\nlr\nwith torch.no_grad():\n    model.weight.fill_(5)\n---\nlr = 0.2\n---\n"
        "%%spmd -o r\nlr, model.weight.item()",
        "r[1]",
        "(0.2, 5.0)",
    ),
    Case(
        "the notebook's binding comes back where code hid a change",
        "x = 1\n---\n%%spmd\nx\nexec('x = 99')\n---\n%%spmd -o r\nx",
        "r[1], x",
        "(1, 1)",
    ),
    Case(
        "the same class on the ranks after a second transfer",
        "class P: pass\np = P()\n---\n%%spmd\nmine = P()\n---\nq = P()\n---\n"
        "%%spmd -o r\nisinstance(mine, type(q))",
        "r[1]",
        "True",
    ),
]

BACK = [
    Case("=", "%%spmd\nx = rank", "__tell(x)", "'Composite [0, 1]'"),
    Case(
        "+= of the notebook's",
        "x = 10\n---\n%%spmd\nx += rank",
        "__tell(x)",
        "'Composite [10, 11]'",
    ),
    Case("unpacking", "%%spmd\na, *b = rank, 1, 2", "__tell(b)", "'Composite [[1, 2], [1, 2]]'"),
    Case("walrus", "%%spmd\nprint(y := rank + 1)", "__tell(y)", "'Composite [1, 2]'"),
    Case("for", "%%spmd\nfor i in range(3): pass", "__tell(i)", "'Composite [2, 2]'"),
    Case(
        "with",
        "%%spmd\nimport contextlib\nwith contextlib.nullcontext(rank) as w: pass",
        "__tell(w)",
        "'Composite [0, 1]'",
    ),
    Case("def", "%%spmd\ndef f(): return rank\n---\n%%spmd -o r\nf()", "r[1]", "1"),
    Case("class", "%%spmd\nclass K:\n    v = rank\n---\n%%spmd -o r\nK.v", "r[1]", "1"),
    Case(
        "global in a function of the cell",
        "%%spmd\ndef f():\n    global g\n    g = rank\nf()",
        "__tell(g)",
        "'Composite [0, 1]'",
    ),
    Case(
        "global in a function of the notebook",
        "count = 0\ndef f():\n    global count\n    count += 1 + rank\n---\n%%spmd\nf()",
        "__tell(count)",
        "'Composite [1, 2]'",
    ),
    Case(
        "import leaves the notebook's name alone",
        "json = 5\n---\n%%spmd\nimport json\nfrom math import *\nx = json.dumps(1)",
        "json, 'pi' in globals()",
        "(5, False)",
    ),
    Case(
        "_ is nobody's",
        "5\n---\n%%spmd\nfor _ in range(3): pass\n__x = _",
        "'__x' in globals()",
        "False",
    ),
    Case("not bound on any rank", "%%spmd\nif rank > 5: x = 1", "'x' in globals()", "False"),
    Case(
        "bound on one rank",
        "%%spmd\nif rank == 1: x = 1",
        "sorted(x.info), x[1]",
        "([1], 1)",
    ),
    Case("del of what the notebook has", "x = 1\n---\n%%spmd\ndel x", "x", "1"),
    Case("del of a Composite", "%%spmd\nx = 1\n---\n%%spmd\ndel x", "'x' in globals()", "False"),
    Case(
        "a Composite means each rank's own",
        "%%spmd\nx = rank * 10\n---\n%%spmd\nx += 1",
        "__tell(x)",
        "'Composite [1, 11]'",
    ),
    Case("previous", "x = 'mine'\n---\n%%spmd\nx = 1\n---\n%%spmd\nx = 2", "x.previous", "'mine'"),
    Case("another name for it", "%%spmd\nx = rank\n---\ny = x\n---\n%%spmd -o r\ny", "r[1]", "1"),
    Case(
        "inside a value",
        "%%spmd\nx = [rank]\n---\nd = {'mine': x}\n---\n%%spmd -o r\nd['mine'], d['mine'] is x",
        "r[1]",
        "([1], True)",
    ),
    Case(
        "an attribute of it",
        "%%spmd\nx = torch.ones(2, 3 + rank)\n---\ns = x.shape\n---\n%%spmd -o r\ns[1]",
        "r[0], r[1], s[1]",
        "(3, 4, torch.Size([2, 4]))",
    ),
    Case(
        "info without fetching",
        "%%spmd\nx = torch.ones(2, 3)",
        "str(x.info[1]), x.info[0].shape",
        "('Tensor 2x3 float32 cpu', (2, 3))",
    ),
    Case(
        "a notebook value takes its place",
        "%%spmd\nx = 1\n---\nx = 5\n---\n%%spmd -o r\nx",
        "r[1]",
        "5",
    ),
    Case(
        "of a function of the ranks the globals are seen",
        "n = 1\n---\n%%spmd\ndef f(): return n\n---\nn = 2\n---\n%%spmd -o r\nf()",
        "r[1]",
        "2",
    ),
    Case(
        "of a decorated function, a property and an instance of the ranks too",
        "n = 1\n---\n%%spmd\nimport functools\n"
        "def same(f):\n    @functools.wraps(f)\n    def g(*args): return f(*args)\n    return g\n"
        "@same\ndef f(): return n\n"
        "class A:\n    @property\n    def v(self): return n\n    @classmethod\n"
        "    def w(cls): return n\n"
        "a = A()\n---\nn = 2\n---\n%%spmd -o r\nf()\n---\nn = 3\n---\n"
        "%%spmd -o s\na.v, a.w()",
        "r[1], s[1]",
        "(2, (3, 3))",
    ),
    Case(
        "two handles change names",
        "%%spmd\na = 'a', rank\nb = 'b', rank\n---\na, b = b, a\n---\n%%spmd -o r\na, b\n---\n"
        "%%spmd -o s\na, b",
        "r[1] == s[1], r[1], a[0], b[0]",
        "(True, (('b', 1), ('a', 1)), ('b', 0), ('a', 0))",
    ),
    Case(
        "a handle by another name while a notebook value takes its place",
        "%%spmd\nx = rank * 10\n---\ny = x\nx = 5\n---\n%%spmd -o r\nx, y",
        "r[1], y[1], x",
        "((5, 10), 10, 5)",
    ),
    Case("some ranks", "%%spmd -t 1\nx = rank", "sorted(x.info), x[1]", "([1], 1)"),
    Case("--isolate, in", "x = 5\n---\n%%spmd --isolate -o r\n'x' in globals()", "r[1]", "False"),
    Case("--isolate, out", "%%spmd --isolate\nx = 5", "'x' in globals()", "False"),
    Case(
        "--nowait", "%%spmd --nowait\nx = rank\n---\n_.result()", "__tell(x)", "'Composite [0, 1]'"
    ),
    Case(
        "--nowait leaves alone what the notebook has assigned since",
        "%%spmd --nowait -o h\nimport time\ntime.sleep(0.2)\nx = y = rank\n---\nx = 5\n---\n"
        "h.result()",
        "x, __tell(y)",
        "(5, 'Composite [0, 1]')",
    ),
    Case(
        "--nowait that fails before it assigns",
        "x = 'mine'\n---\n%%spmd --nowait -o h\n1 / 0\nx = 1\n---\nh.result()",
        "x",
        "'mine'",
    ),
    Case("%spmd", "x = 4\n---\nr = %spmd x + rank", "r[1]", "5"),
    Case(
        "a failed cell: what it has bound counts",
        "a = 1\nb = 2\n---\n%%spmd\na = 10 + rank\n1 / 0\nb = 20",
        "__tell(a), b",
        "('Composite [10, 11]', 2)",
    ),
    Case(
        "instances come back as the notebook's class",
        "class P:\n    def __init__(s, v): s.v = v\n---\n%%spmd\np = P(rank)",
        "type(p[1]) is P, p[1].v",
        "(True, 1)",
    ),
    Case(
        "pool[name] and back",
        "import gpupool\npool = gpupool.current_pool()\npool['x'] = [1]\n---\n%%spmd -o r\nx",
        "r[1], pool['x'][0], 'x' in globals()",
        "([1], [1], False)",
    ),
    Case(
        "pool[name] and pool.run leave alone what the ranks did to other values",
        "import gpupool\npool = gpupool.current_pool()\nx = [1]\n---\n%%spmd\nx.append(2)\n---\n"
        "pool['other'] = 5\nlen(pool.run(len, [1]))\n---\n%%spmd -o r\nx",
        "r[1]",
        "[1, 2]",
    ),
    Case(
        "pool.put",
        "import gpupool, numpy as np\npool = gpupool.current_pool()\n"
        "big = pool.put(np.ones(1000))\n"
        "---\n%%spmd -o r\nfloat(big.sum()) + rank",
        "r[1]",
        "1001.0",
    ),
    Case(
        "pool.run with a function of the notebook",
        "import gpupool\npool = gpupool.current_pool()\nn = 3\ndef f(x): return x + n + rank\n"
        "r = pool.run(f, 10)\n---\nn = 4",
        "r[0], r[1], pool.run(f, 10)[1]",
        "(13, 14, 15)",
    ),
]

REFUSED = [
    Case(
        "lock",
        "import threading\nx = threading.Lock()\n---\n%%spmd\nran = 1\nx",
        "",
        "x: TypeError",
    ),
    Case(
        "lock inside",
        "import threading\nx = {'a': [threading.Lock()]}\n---\n%%spmd\nran = 1\nx",
        "",
        "(x['a'][0])",
    ),
    Case(
        "too large",
        "import numpy as np\nx = np.zeros(257 << 20, np.uint8)\n---\n%%spmd\nran = 1\nx",
        "",
        "x: it takes 257 MiB or more; a cell sends up to 256 MiB. Load it in the cell, or bring it "
        "to the ranks once: `x = pool.put(x)`.",
    ),
    Case(
        "a small view of a large tensor",
        "import torch\nx = torch.zeros(257 << 20, dtype=torch.uint8)[:2]\n---\n%%spmd\nran = 1\nx",
        "",
        "Send a copy: `x = x.clone()`.",
    ),
    Case(
        "a lock beside a constant",
        "import gpupool, threading\nx = [gpupool.current_pool().put(1), threading.Lock()]\n---\n"
        "%%spmd\nran = 1\nx",
        "",
        "(x[1])",
    ),
    Case(
        "what a function closes over",
        "import threading\ndef make(lock):\n    return lambda: lock\n"
        "f = make(threading.Lock())\n---\n"
        "%%spmd\nran = 1\nf",
        "",
        "(f, which closes over lock)",
    ),
    Case(
        "what a function reads",
        "import threading\nlock = threading.Lock()\ndef f():\n    with lock: pass\n---\n"
        "%%spmd\nran = 1\nf()",
        "",
        "  lock: TypeError",
    ),
    Case(
        "on a rank",
        "class Odd:\n    def __reduce__(self): return print, (), {'no': 'state'}\nx = Odd()\n---\n"
        "%%spmd\nran = 1\nx",
        "",
        "x: on rank 0: AttributeError",
    ),
    Case(
        "a memoryview of a format that cannot be made again",
        "import ctypes\nx = memoryview(ctypes.c_int(3))\n---\n%%spmd\nran = 1\nx",
        "",
        "x: ValueError: memoryview: destination format",
    ),
    Case(
        "a pool",
        "import gpupool\npool = gpupool.current_pool()\n---\n%%spmd\nran = 1\npool",
        "",
        "pool:",
    ),
]


@pytest.fixture(scope="module")
def shell(clean_terminal: Terminal) -> Terminal:
    """A shell with a pool of two ranks."""
    assert clean_terminal.run("%load_ext gpupool\n%gpupool start --cpu -n 2").success
    assert clean_terminal.run("__keep = {*globals(), '__keep', 'In', 'Out'}").success
    return clean_terminal


@pytest.fixture
def run(shell: Terminal) -> Iterator[object]:
    """Runs the cells of a case one after the other; gives what the last one printed."""

    def run(cells: str) -> object:
        for cell in textwrap.dedent(cells).split("\n---\n"):
            shown = shell.run(cell)
        return shown

    assert shell.run(FRESH).success
    assert shell.run(FRESH_RANKS).success
    return run  # type: ignore[return-value]


@pytest.mark.parametrize(
    "case", [*READ, *UNPICKLED, *SENT, *SAME, *BACK], ids=lambda case: case.name
)
def test_what_travels_and_what_comes_back(run, shell: Terminal, case: Case) -> None:  # type: ignore[no-untyped-def]
    run(case.cells)
    shown = shell.run(f"print(repr(({case.ask})))")
    assert shown.stdout == case.expected + "\n"


@pytest.mark.parametrize("case", REFUSED, ids=lambda case: case.name)
def test_what_cannot_be_sent_is_named_and_no_rank_runs(run, shell: Terminal, case: Case) -> None:  # type: ignore[no-untyped-def]
    shown = run(case.cells)
    assert not shown.success
    assert "TransferError: The cell was not run: " in shown.stdout
    assert case.expected in shown.stdout
    ran = shell.run_briefly("%%spmd --isolate\nprint('ran' in globals())")
    assert ran.stdout == "[0, 1] False\n"
    assert shell.run_briefly("%%spmd\nprint('goes on')").stdout == "[0, 1] goes on\n"


def test_an_error_in_a_function_of_the_notebook_names_its_cell_and_line(shell: Terminal) -> None:
    shell.run("print('the cell before')")
    shell.run("# a cell of the notebook\ndef broken(x):\n    y = x\n    return 1 / y")
    shown = shell.run("%%spmd\n\nbroken(0)")
    first, second = re.findall(r"Cell In\[(\d+)\], line (\d+)", shown.stdout)[-2:]
    assert (first[1], second) == ("3", (str(int(first[0]) - 1), "4"))
    assert "----> 4     return 1 / y" in shown.stdout
