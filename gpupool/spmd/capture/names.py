"""Notes the names of a cell while it is walked through. Runs on the client.

Private to `capture`. The state that is carried along is the set of names whose former binding can
no longer be seen, because on every way to this point they were bound (or deleted).
"""

from __future__ import annotations

import ast
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

from gpupool.spmd.capture.ipython_syntax import Transform
from gpupool.spmd.capture.scopes import Key, Scope, Walker, body_scope, function_scope, type_scope

# Names that are surely bound; None: this point is never reached.
State: TypeAlias = "frozenset[Key] | None"


def join(*states: State) -> State:
    """The state where ways meet: what is bound on all that get here."""
    reached = [state for state in states if state is not None]
    return frozenset.intersection(*reached) if reached else None


class Names(Walker):
    """What binds and looks up names, and what runs later; `capture_flow` adds the rest."""

    def __init__(self, transform: Transform) -> None:
        self.reads: set[str] = set()
        self.assigns: set[str] = set()
        self.imports: set[str] = set()
        self.deletes: set[str] = set()
        self.attributes: set[str] = set()
        self.statements: dict[str, dict[str, None]] = {}  # imported name -> its statements
        self._choice = ""  # the `try` around an import that has another one in its place
        self._transform = transform
        self._scope = Scope("module")
        self._bound: State = frozenset()
        self._exits: list[State] = []  # where the cell raises
        self._loops: list[tuple[list[State], list[State]]] = []  # states at break, at continue
        self._later: set[str] | None = None  # in a function: what its body reads when it is called
        self._functions: dict[Key, list[frozenset[str]]] = {}  # and what those of the cell read
        self._num_functions = 0
        self._active: set[Key] = set()
        self._num_inside = 0  # in how many bodies that may run again later
        self._mentioned_inside: set[Key] = set()
        self._lazy_annotations = False

    # --- names

    def _use(self, name: str) -> None:
        """A global is looked up."""
        if self._bound is None:
            return
        # In the body of a function: it is read when that is called, not here.
        if self._later is not None:
            if name not in self._bound:
                self._later.add(name)
            return
        if name not in self._bound:
            self.reads.add(name)
        self._mention(name)

    def _mention(self, key: Key) -> None:
        """A function or class of the cell may be called from here on: it reads what it reads."""
        if self._num_inside:
            self._mentioned_inside.add(key)
        if key in self._active or key not in self._functions:
            return  # functions may call each other in a circle
        self._active.add(key)
        with self._inside():
            for reads in self._functions[key]:
                self._use_all(reads)
        self._active.discard(key)

    def _use_all(self, names: Iterable[str]) -> None:
        for name in names:
            self._use(name)

    def _load(self, name: str) -> None:
        key = self._scope.key(name)
        if isinstance(key, tuple):
            self._mention(key)
            if self._bound is None or (key in self._bound and name not in key[0].unsure):
                return
            key = self._scope.global_name(name)
        if key is not None and key != "get_ipython":
            self._use(key)

    def _store(self, name: str, into: set[str] | None = None) -> None:
        """A name is bound; a global one is noted in `into`."""
        key = self._scope.key(name)
        if isinstance(key, str) and into is not None:
            into.add(key)
        self._mark_bound(key)

    def _mark_bound(self, key: Key | None) -> None:
        if key is not None and self._bound is not None:
            self._bound |= {key}

    def _delete(self, name: str) -> None:
        key = self._scope.key(name)
        if isinstance(key, str):
            # `del x` raises NameError unless x is there, so it looks at the notebook's value.
            if self._bound is not None and key not in self._bound:
                (self.reads if self._later is None else self._later).add(key)
            self.deletes.add(key)
            self._mark_bound(key)

    def on_name(self, node: ast.Name) -> None:
        if isinstance(node.ctx, ast.Load):
            self._load(node.id)
        elif isinstance(node.ctx, ast.Store):
            self._store(node.id, self.assigns)
        else:
            self._delete(node.id)

    def on_attribute(self, node: ast.Attribute) -> None:
        self.attributes.add(node.attr)
        self.visit(node.value)

    @contextmanager
    def _maybe(self) -> Iterator[None]:
        """What stands in this block may not be run: what it binds is not sure."""
        before = self._bound
        yield
        self._bound = before

    # --- functions and classes

    @contextmanager
    def _in(self, scope: Scope) -> Iterator[None]:
        outer, self._scope = self._scope, scope
        yield
        self._scope = outer

    @contextmanager
    def _inside(self) -> Iterator[None]:
        self._num_inside += 1
        yield
        self._num_inside -= 1

    def _reads_later(self, scope: Scope, visit: Callable[[], None]) -> frozenset[str]:
        """What a body reads when it is called, whenever that is."""
        outer = self._bound, self._later, self._loops
        # Nobody knows what is bound when it is called.
        self._bound, self._later, self._loops = frozenset(), set(), []
        with self._in(scope):
            visit()
        reads = frozenset(self._later)
        self._bound, self._later, self._loops = outer
        return reads

    def _define(self, name: str, reads: frozenset[str], *, now: bool) -> None:
        """A name is bound to something that reads globals later, or may do so now."""
        self._store(name, self.assigns)
        key = self._scope.key(name)
        # It may be called here, by a decorator or by what was defined before and has named it.
        if now or key is None or self._later is not None or key in self._mentioned_inside:
            with self._inside():
                self._use_all(reads)
        if key is not None and self._later is None:
            self._functions.setdefault(key, []).append(reads)
            self._num_functions += 1

    def on_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.visit_all(node.decorator_list)
        self._visit_defaults(node.args)
        with self._in(type_scope(node, self._scope)):
            self.visit_all(getattr(node, "type_params", ()))
            if not self._lazy_annotations:
                self._visit_annotations(node)
            scope = function_scope(node, self._scope)
            reads = self._reads_later(scope, lambda: self.visit_all(node.body))
        self._define(node.name, reads, now=bool(node.decorator_list))

    on_asyncfunctiondef = on_functiondef

    def on_lambda(self, node: ast.Lambda) -> None:
        self._visit_defaults(node.args)
        # A lambda may be called at once, and it may never be.
        with self._inside(), self._in(function_scope(node, self._scope)), self._maybe():
            self.visit(node.body)

    def _visit_defaults(self, args: ast.arguments) -> None:
        self.visit_all([*args.defaults, *filter(None, args.kw_defaults)])

    def _visit_annotations(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        args = node.args
        for arg in (*args.posonlyargs, *args.args, args.vararg, *args.kwonlyargs, args.kwarg):
            if arg is not None and arg.annotation is not None:
                self.visit(arg.annotation)
        if node.returns is not None:
            self.visit(node.returns)

    def on_classdef(self, node: ast.ClassDef) -> None:
        self.visit_all(node.decorator_list)
        with self._in(type_scope(node, self._scope)):
            self.visit_all(getattr(node, "type_params", ()))
            self.visit_all([*node.bases, *node.keywords])
            scope = body_scope("class", node.body, self._scope, class_name=node.name)
            with self._in(scope):
                self.visit_all(node.body)
        # The body has run now; its methods run when somebody has the class.
        methods = [key for key in self._functions if isinstance(key, tuple) and key[0] is scope]
        reads = [read for key in methods for read in self._functions.pop(key)]
        self._define(node.name, frozenset().union(*reads), now=bool(node.decorator_list))

    def on_typealias(self, node: ast.AST) -> None:
        name, value = node.name, node.value  # type: ignore[attr-defined]
        scope = type_scope(node, self._scope)
        with self._in(scope):
            self.visit_all(node.type_params)  # type: ignore[attr-defined]
            reads = self._reads_later(scope, lambda: self.visit(value))
        self._define(name.id, reads, now=False)
