"""The names of a cell, by example: this table is the specification."""

from __future__ import annotations

import json
import sys
import types
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from gpupool.core.wire.global_names import names_in_code
from gpupool.spmd.capture.capture import CellNames, names_in_cell
from tests.notebook.terminal import Terminal

# cell -> what it reads, assigns, imports, deletes (what follows is empty if left out)
Table = dict[str, tuple[str, ...]]

ASSIGNMENTS: Table = {
    "x": ("x",),
    "x = 1": ("", "x"),
    "x = load(); print(x)": ("load print", "x"),
    "x += 1": ("x", "x"),
    "x = 0; x += y": ("y", "x"),
    "a, (b, *c) = [d] = xs": ("xs", "a b c d"),
    "x[0] = 1": ("x",),
    "x[i] += 1": ("x i",),
    "x, x[0] = y, 1": ("y", "x"),
    "x: int = 1": ("int", "x"),
    "x: int": ("int",),
    "from __future__ import annotations\nx: y = 1": ("", "x", "annotations"),
    "print(y := f(x), y)": ("f x print", "y"),
    "global x\nx = 1": ("", "x"),
    "": ("",),
}

DELETIONS: Table = {
    "del x": ("x", "", "", "x"),
    "x = 1; del x": ("", "x", "", "x"),
    "del x; print(x)": ("x print", "", "", "x"),
    "def f():\n    global x\n    del x": ("x", "f", "", "x"),
}

IMPORTS: Table = {
    "import a": ("", "", "a"),
    "import a.b": ("", "", "a"),
    "from a import b, c as d": ("", "", "b d"),
    "from a import *\nprint(x)": ("print x",),
    "if x:\n    import a\na.b": ("x a", "", "a"),
    "try:\n    import a\nexcept ImportError:\n    a = None": ("ImportError", "a", "a"),
    "def f():\n    import a\n    return a": ("", "f"),
}

WAYS: Table = {
    "if rank == 0: x = 5": ("rank", "x"),
    "if rank == 0: x = 5\nprint(x)": ("rank x print", "x"),
    "if a: x = 1\nelse: x = 2\nx": ("a", "x"),
    "if a: x = 1\nelse: raise E\nx": ("a E", "x"),
    "a and (x := b); x": ("a b x", "x"),
    "while True:\n    x = f()\n    if x: break\nx": ("f", "x"),
    "while True:\n    if a: break\n    x = 1\nx": ("a x", "x"),
    "for i in i: pass": ("i", "i"),
    "for i in xs: pass\ni": ("xs i", "i"),
    "for i in xs:\n    if i: y\n    y = i": ("xs y", "i y"),
    "for x[0], y.a in z: pass": ("x y z",),
    "try: x = f()\nexcept E: x = None\nx": ("f E", "x"),
    "try: x = f()\nexcept E: pass\nx": ("f E x", "x"),
    "try: f()\nexcept E as e: pass\ne": ("f E e",),
    "try: f()\nexcept* E as e: x = e": ("f E", "x"),
    "try: f()\nexcept E: pass\nelse: x = 1\nx": ("f E x", "x"),
    "with a as b, c(b): x = 1\nx, b": ("a c", "b x"),
    "with suppress(E): x = f()\nx": ("suppress E f x", "x"),
    "assert x, y": ("x y",),
    "raise E\nx": ("E",),
    "match x:\n    case 0: y = 1\n    case _: y = 2\ny": ("x", "y"),
    "match x:\n    case [a, *b] if b: a": ("x", "a b"),
    "match x:\n    case P(q=a) | (R.S as a): a": ("x P R", "a"),
}

FUNCTIONS: Table = {
    "def f(): return y": ("y", "f"),
    "def f(): return y\ny = 1": ("", "f y"),
    "def f(): return y\ny = 1\nf()": ("", "f y"),
    "def f(): return y\nf()\ny = 1": ("y", "f y"),
    "def f(): return f()": ("", "f"),
    "def f(): return g()\ndef g(): return y\ny = 1\nf()": ("", "f g y"),
    "def f(): return g()\nf()\ndef g(): return y": ("g y", "f g"),
    "if a:\n    y = 1\n    def f(): return y\nf()": ("a f y", "f y"),
    "g = lambda: f()\ndef f(): return y\ng()\ny = 1": ("f y", "f g y"),
    "def f(): return y\nif a: raise E\ny = 1": ("a E", "f y"),
    "def f(x, *a, k=d, **o): return x, a, k, o": ("d", "f"),
    "def f(x: t = d) -> r: pass": ("t d r", "f"),
    "from __future__ import annotations\ndef f(x: t): pass": ("", "f", "annotations"),
    "@dec(a)\ndef f(): return y\ny = 1": ("dec a y", "f y"),
    "lambda x: x + y": ("y",),
    "f = lambda: y\ny = 1": ("y", "f y"),
    "def f():\n    x = 1\n    def g(): return x, y\n    return g": ("y", "f"),
    "def f():\n    global x\n    x = 1": ("", "f x"),
    "def f():\n    global x\n    x += 1": ("x", "f x"),
    "def f():\n    global x\n    x = 1\nf()\nx": ("x", "f x"),
    "def f():\n    if (y := g()): return [z for _ in y]": ("g z", "f"),
    "async def f():\n    async for i in a: await i\n    async with b as c: c": ("a b", "f"),
    "def f():\n    print(x)\n    x = 1": ("print", "f"),  # an UnboundLocalError
}

CLASSES: Table = {
    "class A(B, metaclass=M): pass": ("B M", "A"),
    "class A:\n    x = x": ("x", "A"),
    "class A:\n    x = 1\n    def m(self): return x": ("x", "A"),
    "class A:\n    def m(self): return y\ny = 1\nA()": ("", "A y"),
    "class A:\n    def m(self): return y\nA().m()\ny = 1": ("y", "A y"),
    "@dec\nclass A:\n    def m(self): return y, A\ny = 1": ("dec y", "A y"),
    "class A:\n    n = 2\n    xs = [n for _ in range(n)]": ("range n", "A"),
    "class A:\n    if a: x = 1\n    y = x": ("a x", "A"),
    "class A:\n    def m(self): return __f(1)": ("_A__f", "A"),
    "def f(x):\n    class A:\n        y = x\n        x = x\n": ("x", "f"),
}

COMPREHENSIONS: Table = {
    "[x for x in xs]": ("xs",),
    "[i + j + k for i in a for j in i if j < b]": ("a b k",),
    "sum(x * w for x in xs)": ("sum w xs",),
    "g = (y for _ in xs)\ny = 1\nlist(g)": ("xs y list", "g y"),
    "[y := f(x) for x in xs]\ny": ("f xs y", "y"),
    "def f(): return [y := x for x in xs], y": ("xs", "f"),
    "[[y for y in x] for x in xs]": ("xs",),
    "[x async for x in xs]": ("xs",),
}

TEXTS: Table = {
    "f'{x!r:>{w}} {y=}'": ("x w y",),
    "f'{(z := x)} {z}'": ("x", "z"),
    "'{x}'": ("",),
}

TOP_LEVEL_AWAIT: Table = {
    "x = await f(y)": ("f y", "x"),
    "async for i in a: i": ("a", "i"),
    "async with a as b: b": ("a", "b"),
}

IPYTHON: Table = {
    "!ls": ("",),
    "!ls {x} $y ${z.a} {w!r} {v[1:n]}": ("x y z w v n",),
    "!awk '{print $1}' /dev/null": ("",),
    "!echo $HOME": ("HOME",),
    "files = !ls {d}\nfiles": ("d", "files"),
    "x = 1\n!echo {x}": ("", "x"),
    "%%!\nls $x": ("x",),
    "%%sx --out=o\nls": ("", "o"),
    "%cd {d}": ("d",),
    "x?": ("x",),
    "%time x = f(a)": ("f a", "x"),
    "%time x = f(a)\nx": ("f a", "x"),
    "%timeit -n 1 -r3 -q f(a)": ("f a",),
    "r = %timeit -n1 -o f(a)": ("f a", "r"),
    "%timeit -n1 -qo -v r f(a)": ("f a", "r"),
    "%memit x = f(a)": ("f a", "x"),
    "%lprun -f g.h -f k f(a)": ("g k f a",),
    "%xdel x": ("x", "", "", "x"),
    "def f():\n    y = 1\n    %time z = y + w\n": ("w", "f"),
    "def g(): return y\n%timeit -n1 g()\ny = 1": ("y", "g y"),
    "for i in xs:\n    !echo {i} {j}": ("xs j", "i"),
    "%%time\nx = f(a)\nprint(x)": ("f a print", "x"),
    "%%time\n%%capture out\nx = f(a)\n!ls {b}": ("f a b", "x out"),
    "%%timeit -n1 s = g()\nf(s)": ("g f",),
    "%%timeit -n 3\nx = f(x)": ("f",),  # an UnboundLocalError
    "%%capture out --no-stderr\nprint(x)": ("print x", "out"),
    "%%bash\necho $x": ("",),
    "%%bash -s {x} --out o\necho $1": ("x", "o"),
    "%%writefile {p}\nx": ("p",),
    "%%unheard_of\nx": ("",),
    "%%spmd -t {r}\nx": ("r",),
    "get_ipython().run_line_magic('time', 'x')": ("x",),
    "ip = get_ipython()": ("", "ip"),
}

SINCE_3_12: Table = {
    "type X = y": ("y", "X"),
    "type X = y\ny = 1\nX.__value__": ("", "X y"),
    "def f[T: B](x: T) -> T: return T, y": ("B y", "f"),
    "class A[T](B[T]):\n    x: T\n    def m(self): return T": ("B", "A"),
    "f'{f'{x}'}'": ("x",),
}

DO_NOT_COMPILE = ["x = = 1", "return x", "x = 1\n  y", "f(", "x\0", "a: b: c", "break"]

TABLES = [
    *(ASSIGNMENTS, DELETIONS, IMPORTS, WAYS, FUNCTIONS, CLASSES, COMPREHENSIONS, TEXTS),
    *(TOP_LEVEL_AWAIT, IPYTHON, SINCE_3_12 if sys.version_info >= (3, 12) else {}),
]


@pytest.fixture(scope="module")
def transform() -> Callable[[str], str]:
    """What IPython does to a cell before it compiles it."""
    return TransformerManager().transform_cell


def cell_names(*sets: str) -> CellNames:
    return CellNames(*(frozenset(names.split()) for names in sets))


TRY = "try:\n    import a as x\nexcept ImportError:\n    import b as x"
# cell -> the imports that a new rank repeats, by name
STATEMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "import a, b.c, b.d, e.f as g": {
        "a": ("import a",),
        "b": ("import b.c", "import b.d"),
        "g": ("import e.f as g",),
    },
    "from a import b, c as d": {"b": ("from a import b",), "d": ("from a import c as d",)},
    "for i in xs:\n    import a": {"a": ("import a",)},
    "%time import a": {"a": ("import a",)},
    "def f():\n    import a\nclass A:\n    import b\nfrom c import *": {},
    TRY: {"x": (TRY,)},
    "if y:\n    import c as x\nelse:\n    import d as x": {"x": ()},
    "try:\n    import a\nexcept ImportError:\n    a = None": {"a": ()},
    "import a\ndel a": {"a": ()},
}


@pytest.mark.parametrize("cell", STATEMENTS)
def test_imports_that_mean_one_thing_are_repeated(cell: str) -> None:
    transform = TransformerManager().transform_cell
    assert names_in_cell(cell, transform).statements == STATEMENTS[cell]


def test_what_stands_behind_a_dot_is_noted() -> None:
    cell = "x.a.b = c\ndef f():\n    return y.d\n%time z.e"
    names = names_in_cell(cell, TransformerManager().transform_cell)
    assert names.attributes == {"a", "b", "d", "e"}


@pytest.mark.parametrize(
    ("cell", "expected"), [row for table in TABLES for row in table.items()], ids=repr
)
def test_names(cell: str, expected: tuple[str, ...], transform: Callable[[str], str]) -> None:
    assert names_in_cell(cell, transform) == cell_names(*expected)


@pytest.mark.parametrize("cell", DO_NOT_COMPILE)
def test_a_cell_that_does_not_compile_has_no_names(
    cell: str, transform: Callable[[str], str]
) -> None:
    assert names_in_cell(cell, transform) == CellNames()


def test_a_transformation_that_fails_is_the_ranks_to_report() -> None:
    def transform(source: str) -> str:
        raise RuntimeError(source)

    assert names_in_cell("x", transform) == CellNames()


def test_a_warning_of_the_compiler_is_the_ranks_to_show(transform: Callable[[str], str]) -> None:
    # warnings are errors here
    assert names_in_cell("x is 'a'; y = '\\d'", transform) == cell_names("x", "y")


def test_expressions_nested_too_deeply_to_walk_through_still_have_names() -> None:
    deep = "import a\ny = " + " + ".join(["x"] * 900) + "\ndel z"
    assert names_in_cell(deep, str) == cell_names("x", "y", "a", "z")


FRAGMENTS = ["x", "=", " ", "\n", "\n    ", "%", "%%", "!", "?", "'", '"', "(", "{", "}", "$", "\\"]
FRAGMENTS += [
    "time",
    "timeit",
    "capture",
    "bash",
    "sx",
    "-n",
    "-v",
    "-f",
    "--out",
    "def f():",
    "\0",
]


@given(st.lists(st.sampled_from(FRAGMENTS)).map("".join))
def test_any_text_has_names_or_none(text: str) -> None:
    for source in (text, f"%time {text}", f"%timeit {text}", f"%%capture {text}", f"!{text}"):
        names_in_cell(source, TransformerManager().transform_cell)


RUN_EACH = """
class Value:
    def __call__(self, *args): return Value()
    def __getattr__(self, name):
        if name.startswith("_"): raise AttributeError(name)
        return Value()
    def __getitem__(self, index): return Value()
    def __iter__(self): return iter((1, 2))
    def __index__(self): return 1

def run_each(cells):
    ip = get_ipython()
    for cell, reads in cells:
        before = set(ip.user_ns)
        ip.user_ns.update({name: Value() for name in reads})
        error = ip.run_cell(cell).error_in_exec
        bound = [name for name in set(ip.user_ns) - before - set(reads) if name[0] != "_"]
        for name in {*bound, *reads} & set(ip.user_ns):
            del ip.user_ns[name]
        yield sorted(bound), repr(error)
"""


def test_ipython_binds_what_the_table_says_and_needs_no_other_names() -> None:
    # these are not installed, ask for input, write, or take seconds
    absent = ("%memit", "%lprun", "%matplotlib", "%%unheard_of", "%%spmd", "%debug", "%%writefile")
    slow = ("%timeit f(a)",)
    cells = {cell: row for cell, row in IPYTHON.items() if not cell.startswith(absent + slow)}
    asked = [(cell, row[0].split()) for cell, row in cells.items()]
    with Terminal() as terminal:
        assert terminal.run(f"{RUN_EACH}\nfound = list(run_each({asked}))").success
        found = json.loads(terminal.run("import json; print(json.dumps(found))").stdout)
    for (cell, row), (bound, error) in zip(cells.items(), found, strict=True):
        assert "NameError" not in error, cell
        if error == "None":
            expected = cell_names(*row)
            assert set(bound) == (expected.assigns | expected.imports) - expected.reads, cell
    assert sum(error == "None" for _, error in found) > 20


# the source of a function or class -> the globals it reads, and binds through `global`
CODE: Table = {
    "def f(): return x": ("x",),
    "def f(x): return x.y": ("",),
    "def f(x=y): return x": ("",),  # defaults are evaluated outside
    "def f():\n    global x\n    x = y": ("y", "x"),
    "def f():\n    global x\n    x += 1": ("x", "x"),
    "def f():\n    import a.b\n    from c import d": ("",),
    "def f(x):\n    return [x + y + z for y in w]": ("z w",),
    "def f():\n    def g(): return lambda: x\n    return g": ("x",),
    "def f(x):\n    def g():\n        nonlocal x\n        x = y": ("y",),
    "def f():\n    y = 1\n    class A(B):\n        a = x\n        def m(self): return a, y\n": (
        "B x a __name__",
    ),
    "def f():\n    class A:\n        a = 1\n        b = a\n": ("__name__",),
    "def f():\n    class A:\n        if x: a = 1\n        b = a\n": ("x a __name__",),
    "def f():\n    class A:\n        try: a = x\n        except E: pass\n        b = a\n": (
        "x E a __name__",
    ),
    "def f():\n    class A:\n        a = 1\n        del a\n        b = a\n": ("a __name__",),
    "async def f():\n    async with a as b: return [c async for c in b]": ("a",),
}


@pytest.mark.parametrize(("source", "expected"), list(CODE.items()), ids=repr)
def test_names_in_code(source: str, expected: tuple[str, ...]) -> None:
    (code,) = (
        constant
        for constant in compile(source, "<function>", "exec", dont_inherit=True).co_consts
        if isinstance(constant, types.CodeType)
    )
    names = cell_names(*expected)
    assert names_in_code(code) == (names.reads, names.assigns)


@pytest.mark.skipif(sys.version_info < (3, 12), reason="the syntax is of Python 3.12")
def test_names_in_generic_code() -> None:
    space: dict[str, types.FunctionType] = {}
    source = "def f():\n    def g[T: B](x: T) -> C: return y\n    type X = z"
    exec(compile(source, "<function>", "exec", dont_inherit=True), space)
    assert names_in_code(space["f"].__code__) == (frozenset("BCyz"), frozenset())
