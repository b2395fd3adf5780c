"""The sentences that users can meet, collected from the source; tests/messages/ keeps them."""

from __future__ import annotations

import ast
import copy
import html
import re
from collections.abc import Iterator
from pathlib import Path

import gpupool

PACKAGE = Path(gpupool.__file__).parent
KEPT = Path(__file__).parents[1] / "messages"
_LOGS = {"debug", "info"}  # methods of loggers: our own log, which users are not shown
_PATTERNS = {"compile", "search", "match", "fullmatch", "split", "sub", "findall", "startswith"}
_HOLE = re.compile("[\ue000-\uf8ff]")  # stands for an expression; no text of ours has one
_TAG = re.compile(r"</?[a-z][a-z0-9]*(?:\s[^<>\"']*=(?:[^<>\"']|\"[^\"]*\"|'[^']*')*)?/?>")
_SHOWN_ATTRIBUTE = re.compile(r"\b(?:title|alt|aria-label|placeholder)=\"([^\"]*)\"")
_STYLE = re.compile(r"[a-z-]+:[^\s;]+;[a-z\s}]|(?:style|class|role|scope)=\"|\{[a-z-]+:")
_CODE = re.compile(r"\\[a-zA-Z(.\[]|\|[a-z]+\||^<\w+ \w+>$|^PRAGMA |^\w+ \| ")
_BEFORE, _AFTER = "\\s(\\[\"'`\ue000-\uf8ff", "\\s)\\]\"'`.,:;!?\ue000-\uf8ff"
_WORD = re.compile(rf"(?<![^{_BEFORE}])[A-Za-z][A-Za-z_]*(?:['’-][a-z]+)*(?![^{_AFTER}])")
_EMBEDDED = re.compile(r"\$\{(?:[^{}]|\{[^{}]*\})*\}")  # an expression in a script's text
# strings, and what could be taken for one: comments
_SCRIPT = re.compile(
    r"//[^\n]*|/\*.*?\*/|\"(?:\\.|[^\"\\\n])*\"|'(?:\\.|[^'\\\n])*'|`(?:\\.|[^`\\])*`", re.DOTALL
)


def collect() -> dict[str, str]:
    """Name of a snapshot, which is that of a room, -> its text: files, functions, sentences."""
    rooms: dict[str, list[str]] = {}
    for path in sorted([*PACKAGE.rglob("*.py"), *PACKAGE.rglob("*.js")]):
        source = path.read_text()
        read = _of_python if path.suffix == ".py" else _of_script
        lines, last = [f"# {path.relative_to(PACKAGE).as_posix()}"], ""
        for place, sentence in read(source):
            if place != last:
                lines += ["", place]
                last = place
            lines.append("    " + sentence.replace("\n", "\n      "))
        if len(lines) > 1:
            room = ".".join(path.parent.relative_to(PACKAGE).parts) or "gpupool"
            rooms.setdefault(room, []).append("\n".join(line.rstrip() for line in lines) + "\n")
    return {f"{room}.txt": "\n\n".join(texts) for room, texts in rooms.items()}


def kept() -> dict[str, str]:
    """What `collect` gave when it was last accepted."""
    return {path.name: path.read_text() for path in KEPT.glob("*.txt")}


def rewrite() -> None:
    """Accept what `collect` gives now."""
    found = collect()
    KEPT.mkdir(exist_ok=True)
    for name in kept().keys() - found.keys():
        (KEPT / name).unlink()
    for name, text in found.items():
        (KEPT / name).write_text(text)


def _of_python(source: str) -> Iterator[tuple[str, str]]:
    yield from _walk(ast.parse(source), ())


def _walk(node: ast.AST, place: tuple[str, ...]) -> Iterator[tuple[str, str]]:
    """Places and sentences in the order of the source."""
    if isinstance(node, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
        place = (*place, node.name)
    if isinstance(node, ast.Expr) and isinstance(node.value, ast.Constant):
        return  # a docstring, of a module, class, function or attribute
    if isinstance(node, ast.Compare | ast.Assert):
        return  # what is looked for in the words of others
    if isinstance(node, ast.Call) and _name(node.func) in _LOGS | _PATTERNS:
        return
    holes: list[str] = []
    text = _text(node, holes)
    if text is not None and (found := list(_sentences(text))):
        for sentence in found:
            yield ".".join(place) or "(module)", _filled(sentence, holes)
        return
    for child in ast.iter_child_nodes(node):
        yield from _walk(child, place)


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else ""


def _text(node: ast.AST, holes: list[str]) -> str | None:
    """A string with a sign for each expression in it, whose source goes to `holes`."""
    if isinstance(node, ast.Constant):
        return node.value if isinstance(node.value, str) else None
    if isinstance(node, ast.JoinedStr):
        return "".join(_text(value, holes) or "" for value in node.values)
    if isinstance(node, ast.FormattedValue):
        conversion = "" if node.conversion == -1 else f"!{chr(node.conversion)}"
        inner: list[str] = []
        form = _text(node.format_spec, inner) or "" if node.format_spec else ""
        form = _filled(form, inner)
        return _hole(f"{_source(node.value)}{conversion}{':' if form else ''}{form}", holes)
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
        sides = [_text(side, holes) for side in (node.left, node.right)]
        if sides == [None, None]:
            return None
        left, right = (
            _hole(_source(each), holes) if text is None else text
            for text, each in zip(sides, (node.left, node.right), strict=True)
        )
        return left + right
    return None


def _source(node: ast.AST) -> str:
    """An expression's source, the same with every version of Python."""
    return ast.unparse(_Spelled().visit(copy.deepcopy(node)))


class _Spelled(ast.NodeTransformer):
    """Spells f-strings within others out, whose quotes `ast.unparse` chooses as it likes."""

    def visit_JoinedStr(self, node: ast.JoinedStr) -> ast.AST:
        holes: list[str] = []
        text = _text(node, holes) or ""
        return ast.Name("f" + repr(_filled(text, holes)))


def _hole(source: str, holes: list[str]) -> str:
    holes.append(source)
    return chr(0xE000 + len(holes) - 1)


def _filled(text: str, holes: list[str]) -> str:
    return _HOLE.sub(lambda hole: f"{{{holes[ord(hole[0]) - 0xE000]}}}", text)


def _of_script(source: str) -> Iterator[tuple[str, str]]:
    for found in _SCRIPT.finditer(source):
        if not found[0].startswith("/"):
            text, *holes = _unfilled(found[0][1:-1])
            for sentence in _sentences(text):
                yield "(script)", _filled(sentence, holes)


def _unfilled(template: str) -> list[str]:
    """The text of a script's string, and the expressions in it."""
    holes: list[str] = []
    text = _EMBEDDED.sub(lambda e: _hole(e[0][2:-1], holes), template)
    return [text, *holes]


def _sentences(text: str) -> Iterator[str]:
    """The text itself, or what a page shows of it, if it reads as a sentence or a part of one."""
    shown = [text]
    if _TAG.search(text):
        shown = [*_SHOWN_ATTRIBUTE.findall(text), *_TAG.sub("\n", text).split("\n")]
        shown = [html.unescape(part).strip() for part in shown]
    for part in shown:
        words = _WORD.findall(part)
        is_filled = _HOLE.search(part) and sum(len(word) > 2 for word in words) > 1
        least = 2 if is_filled or part.endswith(".") else 3
        is_code = " " not in part or _STYLE.search(part) or _CODE.search(part)
        if len(words) >= least and not is_code:
            yield part
