"""The names of a cell, by example: this table is the specification."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from IPython.core.inputtransformer2 import TransformerManager

from gpupool.spmd.capture import CellNames, names_in_cell

# cell -> what it reads for certain, assigns, imports, deletes (what follows is empty if left out)
Table = dict[str, tuple[str, ...]]

PYTHON: Table = {
    "": ("",),
    "x": ("x",),
    "x += 1": ("x", "x"),
    "a, (b, *c) = [d] = xs": ("xs", "a b c d"),
    "x[i] += 1": ("x i",),
    "print(y := f(x), y)": ("f x print", "y"),
    "global x\nx = 1": ("", "x"),
    "from __future__ import annotations\nx: y = 1": ("", "x", "annotations"),
    "del x": ("x", "", "", "x"),
    "def f():\n    global x\n    del x": ("x", "f", "", "x"),
    "import a.b as c": ("", "", "c"),
    "from a import b, c as d": ("", "", "b d"),
    "from a import *\nprint(x)": ("print x",),
    "try:\n    import a\nexcept ImportError:\n    a = None": ("ImportError", "a", "a"),
    "if rank == 0: x = 5\nprint(x)": ("rank x print", "x"),
    "for i in xs:\n    if i: y\n    y = i": ("xs y", "i y"),
    "try: f()\nexcept* E as e: x = e": ("f E e", "x", "", "e"),
    "with a as b, c(b): x = 1\nx, b": ("a c x", "b x"),
    "match x:\n    case [a, *b] if b: a": ("x", "a b"),
    "match x:\n    case P(q=a) | (R.S as a): a": ("x P R", "a"),
    "def f(): return y\nf()\ny = 1": ("y", "f y"),
    "def f(x, *a, k=d, **o): return x, a, k, o": ("d", "f"),
    "@dec(a)\ndef f(): return y": ("dec a y", "f"),
    "def f():\n    x = 1\n    def g(): return x, y\n    return g": ("y", "f"),
    "def f():\n    global x\n    x += 1": ("x", "f x"),
    "def f():\n    print(x)\n    x = 1": ("print", "f"),  # an UnboundLocalError
    "async def f():\n    async for i in a: await i\n    async with b as c: c": ("a b", "f"),
    "class A:\n    x = x": ("x", "A"),
    "class A:\n    n = 2\n    xs = [n for _ in range(n)]": ("range n", "A"),
    "class A:\n    def m(self): return __f(1)": ("_A__f", "A"),
    "[i + j + k for i in a for j in i if j < b]": ("a b k",),
    "[y := f(x) for x in xs]\ny": ("f xs y", "y"),
    "f'{x!r:>{w}} {y=}'": ("x w y",),
    "async for i in a: i": ("a", "i"),
}

IPYTHON: Table = {
    "!ls": ("",),
    "!ls {x} $y ${z.a} {w!r} {v[1:n]}": ("x y z w v n",),
    "!awk '{print $1}' /dev/null": ("",),
    "x?": ("x",),
    "%time x = f(a)\nx": ("f a", "x"),
    "%time --no-raise-error x = f(a)": ("f a", "x"),
    "r = %timeit -n1 -o f(a)": ("f a", "r"),
    "def f():\n    y = 1\n    %time z = y + w\n": ("w", "f"),
    "for i in xs:\n    !echo {i} {j}": ("xs j", "i"),
    "%%time\n%%capture out\nx = f(a)\n!ls {b}": ("f a b", "x out"),
    "%%timeit -n 3\ny = f(x)": ("f x", "y"),  # which is not there afterwards
    "%%bash -s {x}\necho $1": ("x",),
    "%%writefile {p}\nx": ("p",),
    "%%unheard_of\nx": ("",),
    "get_ipython().run_line_magic('time', 'x')": ("x",),
}

SINCE_3_12: Table = {
    "type X = y": ("y", "X"),
    "def f[T: B](x: T) -> T: return T, y": ("B y", "f"),
    "class A[T](B[T]):\n    x: T\n    def m(self): return T": ("B", "A"),
}

TABLES = [PYTHON, IPYTHON, SINCE_3_12 if sys.version_info >= (3, 12) else {}]


@pytest.fixture(scope="module")
def transform() -> Callable[[str], str]:
    return TransformerManager().transform_cell


@pytest.mark.parametrize(
    ("cell", "expected"), [row for table in TABLES for row in table.items()], ids=repr
)
def test_names(cell: str, expected: tuple[str, ...], transform: Callable[[str], str]) -> None:
    names = names_in_cell(cell, transform)
    reads, *bound = (set(words.split()) for words in (*expected, "", "", "")[:4])
    assert [names.assigns, names.deletes] == bound[::2]
    assert names.binds == set().union(*bound)
    # more of what the cell binds itself does no harm, nor does Python's own `__name__`
    more = {name for name in names.reads - names.binds if not name.startswith("__")}
    assert more <= reads <= names.reads


@pytest.mark.parametrize("cell", ["x = = 1", "return x", "f(", "x\0", "a: b: c", "break"])
def test_a_cell_that_does_not_compile_has_no_names(
    cell: str, transform: Callable[[str], str]
) -> None:
    assert names_in_cell(cell, transform) == CellNames()


def test_a_warning_of_the_compiler_is_the_ranks_to_show(transform: Callable[[str], str]) -> None:
    # warnings are errors here
    assert names_in_cell("x is 'a'; y = '\\d'", transform).binds == {"y"}


# cell -> the imports that a new rank repeats, by name
STATEMENTS: dict[str, dict[str, tuple[str, ...]]] = {
    "import a, b.c, b.d, e.f as g": {
        "a": ("import a",),
        "b": ("import b.c", "import b.d"),
        "g": ("import e.f as g",),
    },
    "%time from a import b, c as d": {"b": ("from a import b",), "d": ("from a import c as d",)},
    "def f():\n    import a\nclass A:\n    import b\nfrom c import *": {},
    "try:\n    import a as x\nexcept ImportError:\n    import b as x": {},
    "if y:\n    import c as x\nelse:\n    import d as x": {},
    "import a\ndel a": {"a": ()},
}


@pytest.mark.parametrize("cell", STATEMENTS)
def test_imports_that_mean_one_thing_are_repeated(cell: str) -> None:
    transform = TransformerManager().transform_cell
    assert names_in_cell(cell, transform).statements == STATEMENTS[cell]


PIECES = ["x", "=", " ", "\n", "\n    ", "%", "%%", "!", "?", "'", "(", "{", "}", "$", "\\", "\0"]
PIECES += ["time", "timeit", "capture", "bash", "sx", "-n", "-v", "-f", "--out", "def f():"]


@given(st.lists(st.sampled_from(PIECES)).map("".join))
def test_any_text_has_names_or_none(text: str) -> None:
    for source in (text, f"%time {text}", f"%timeit {text}", f"%%capture {text}", f"!{text}"):
        names_in_cell(source, TransformerManager().transform_cell)
