"""Which scope of Python source a name belongs to, read off the syntax tree. Runs on the client."""

from __future__ import annotations

import ast
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, TypeAlias

# A global name, or a name in the namespace of a class body.
Key: TypeAlias = "str | tuple[Scope, str]"

FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)


@dataclass(slots=True, eq=False)
class Scope:
    """A module, a function (also a lambda or comprehension) or a class body."""

    kind: Literal["module", "function", "class"]
    parent: Scope | None = None
    names: frozenset[str] = frozenset()
    """What it binds itself."""
    globals: frozenset[str] = frozenset()
    """What it declares as global."""
    unsure: frozenset[str] = frozenset()
    """What may be unbound again: in a class body the global of that name shows then."""
    class_name: str = ""
    is_comprehension: bool = False
    is_transparent: bool = False
    """The scope of type parameters: what is directly in it sees the class around it."""

    def key(self, name: str) -> Key | None:
        """Where a name is looked up from here; None: in a function, which nobody else sees."""
        # Code directly in a class body sees its names; methods and comprehensions in it do not.
        scope, sees_class = self, True
        while scope.parent is not None:
            if scope.kind == "class":
                if sees_class and name in scope.globals:
                    break
                if sees_class and name in scope.names:
                    return scope, name
            elif name in scope.globals:
                break
            elif name in scope.names:
                return None
            sees_class = sees_class and scope.is_transparent
            scope = scope.parent
        return self.global_name(name)

    def global_name(self, name: str) -> str:
        """The name as the compiler writes it: `__private` inside a class has the class's name."""
        scope: Scope | None = self
        while scope is not None and scope.kind != "class":
            scope = scope.parent
        if scope is None or not name.startswith("__") or name.endswith("__"):
            return name
        class_name = scope.class_name.lstrip("_")
        return f"_{class_name}{name}" if class_name else name

    def of_walrus(self) -> Scope:
        """The scope in which `:=` binds: not that of a comprehension."""
        scope = self
        while scope.is_comprehension and scope.parent is not None:
            scope = scope.parent
        return scope


def function_scope(node: ast.AST, parent: Scope) -> Scope:
    """The scope of a function's or lambda's body."""
    args = node.args  # type: ignore[attr-defined]
    arguments = [*args.posonlyargs, *args.args, *args.kwonlyargs, args.vararg, args.kwarg]
    names = {arg.arg for arg in arguments if arg is not None}
    body = node.body if isinstance(node, FUNCTIONS) else [node.body]  # type: ignore[attr-defined]
    return body_scope("function", body, parent, names)


def body_scope(
    kind: Literal["function", "class"],
    body: Iterable[ast.AST],
    parent: Scope,
    names: Iterable[str] = (),
    class_name: str = "",
) -> Scope:
    """The scope of statements, or of expressions, that bind `names` besides."""
    found = _Bindings()
    found.visit_all(body)
    # `global x` and `nonlocal x` count for the whole body, wherever they stand in it.
    bound = (found.names | set(names)) - found.globals - found.nonlocals
    return Scope(
        kind,
        parent,
        frozenset(bound),
        frozenset(found.globals),
        frozenset(found.unbound),
        class_name,
    )


def comprehension_scope(generators: Iterable[ast.comprehension], parent: Scope) -> Scope:
    """The scope of a comprehension: its targets."""
    nodes = (node for generator in generators for node in ast.walk(generator.target))
    targets = {
        node.id for node in nodes if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    return Scope("function", parent, frozenset(targets), is_comprehension=True)


def type_scope(node: ast.AST, parent: Scope) -> Scope:
    """The scope of `[T]` behind a function, a class or a type's name; without any, `parent`."""
    parameters = getattr(node, "type_params", ())  # since Python 3.12
    if not parameters:
        return parent
    names = frozenset(parameter.name for parameter in parameters)
    return Scope("function", parent, names, is_transparent=True)


class Walker:
    """Visits syntax trees: a node of type `ast.X` by the method `on_x`, else what is in it."""

    def visit(self, node: ast.AST) -> None:
        """Visit a node."""
        visit = getattr(self, f"on_{type(node).__name__.lower()}", None)
        if visit is None:
            self.children(node)
        else:
            visit(node)

    def visit_all(self, nodes: Iterable[ast.AST]) -> None:
        """Visit nodes in turn."""
        for node in nodes:
            self.visit(node)

    def children(self, node: ast.AST) -> None:
        """Visit what is in a node, in the order of its fields."""
        for child in ast.iter_child_nodes(node):
            # They bind and read nothing.
            if not isinstance(child, ast.Constant | ast.expr_context | ast.operator):
                self.visit(child)


class _Bindings(Walker):
    """The names that statements bind in the scope they stand in."""

    def __init__(self) -> None:
        self.names: set[str] = set()
        self.globals: set[str] = set()
        self.nonlocals: set[str] = set()
        self.unbound: set[str] = set()

    def on_name(self, node: ast.Name) -> None:
        if not isinstance(node.ctx, ast.Load):
            self.names.add(node.id)
        if isinstance(node.ctx, ast.Del):
            self.unbound.add(node.id)

    def on_global(self, node: ast.Global) -> None:
        self.globals.update(node.names)

    def on_nonlocal(self, node: ast.Nonlocal) -> None:
        self.nonlocals.update(node.names)

    def on_alias(self, node: ast.alias) -> None:
        self.names.add(bound_by(node))

    def on_annassign(self, node: ast.AnnAssign) -> None:
        if node.simple or node.value is not None:  # `(x): int` alone says nothing about x
            self.visit(node.target)
        if node.value is not None:
            self.visit(node.value)

    def on_excepthandler(self, node: ast.ExceptHandler) -> None:
        if node.name:
            self.names.add(node.name)
            self.unbound.add(node.name)
        self.children(node)

    def on_matchas(self, node: ast.MatchAs | ast.MatchStar) -> None:
        if node.name:
            self.names.add(node.name)
        self.children(node)

    on_matchstar = on_matchas

    def on_matchmapping(self, node: ast.MatchMapping) -> None:
        if node.rest:
            self.names.add(node.rest)
        self.children(node)

    # What follows has a scope of its own; in this one are its name and what stands outside.

    def on_functiondef(self, node: ast.FunctionDef | ast.AsyncFunctionDef) -> None:
        self.names.add(node.name)
        self.visit_all([*node.decorator_list, node.args])

    on_asyncfunctiondef = on_functiondef

    def on_classdef(self, node: ast.ClassDef) -> None:
        self.names.add(node.name)
        self.visit_all([*node.decorator_list, *node.bases, *node.keywords])

    def on_lambda(self, node: ast.Lambda) -> None:
        self.visit(node.args)

    def on_typealias(self, node: ast.AST) -> None:
        self.visit(node.name)  # type: ignore[attr-defined]

    def on_comprehension(self, node: ast.comprehension) -> None:
        self.visit_all([node.iter, *node.ifs])  # the target is the comprehension's own


def bound_by(alias: ast.alias) -> str:
    """The name that one part of an import binds: `a` for `import a.b`."""
    return alias.asname or alias.name.split(".")[0]
