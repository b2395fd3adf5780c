"""Walks through a cell as it would run, and notes which globals it may see. Client, pure.

Private to `capture`.
"""

from __future__ import annotations

import ast
from collections.abc import Callable

from gpupool.spmd.capture.ipython_syntax import pieces_of_call
from gpupool.spmd.capture.names import Names, State, join
from gpupool.spmd.capture.scopes import body_scope, bound_by, comprehension_scope


class Flow(Names):
    """One cell. `run` once, then look at the sets."""

    def run(self, body: list[ast.stmt]) -> None:
        """Walk through the statements of a cell."""
        self._lazy_annotations = any(
            isinstance(node, ast.ImportFrom)
            and node.module == "__future__"
            and any(alias.name == "annotations" for alias in node.names)
            for node in body
        )
        self.visit_all(body)
        # Every way ends in a `raise`: what was bound until there is what later cells meet.
        if self._bound is None:
            self._bound = join(*self._exits)
        for key in list(self._functions):  # a later cell may call them
            self._mention(key)

    # --- expressions

    def _test(self, node: ast.expr) -> tuple[State, State]:
        """The states after a condition that is true and one that is false."""
        # `while True:` has no way out but `break`; None says that a point is never reached.
        if isinstance(node, ast.Constant):
            return (self._bound, None) if node.value else (None, self._bound)
        if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.Not):
            return self._test(node.operand)[::-1]
        if isinstance(node, ast.BoolOp):
            goes_on = 0 if isinstance(node.op, ast.And) else 1
            left: list[State] = []
            for value in node.values:
                states = self._test(value)
                self._bound = states[goes_on]
                left.append(states[1 - goes_on])
            end = join(*left)
            return (self._bound, end) if goes_on == 0 else (end, self._bound)
        self.visit(node)
        return self._bound, self._bound

    def on_boolop(self, node: ast.BoolOp) -> None:
        self._bound = join(*self._test(node))

    def on_ifexp(self, node: ast.IfExp) -> None:
        true, false = self._test(node.test)
        self._bound = true
        self.visit(node.body)
        true, self._bound = self._bound, false
        self.visit(node.orelse)
        self._bound = join(true, self._bound)

    def on_compare(self, node: ast.Compare) -> None:
        self.visit_all([node.left, node.comparators[0]])
        with self._maybe():  # `a < b < c` looks at `c` only if `a < b`
            self.visit_all(node.comparators[1:])

    def on_namedexpr(self, node: ast.NamedExpr) -> None:
        self.visit(node.value)
        with self._in(self._scope.of_walrus()):
            self._store(node.target.id, self.assigns)

    def on_dict(self, node: ast.Dict) -> None:
        # In the order of evaluation; the tree lists all keys first. `**value` has no key.
        for key, value in zip(node.keys, node.values, strict=True):
            self.visit_all([value] if key is None else [key, value])

    def on_listcomp(self, node: ast.ListComp | ast.SetComp | ast.GeneratorExp) -> None:
        self._comprehension(node.generators, node.elt)

    on_setcomp = on_generatorexp = on_listcomp

    def on_dictcomp(self, node: ast.DictComp) -> None:
        self._comprehension(node.generators, node.key, node.value)

    def _comprehension(self, generators: list[ast.comprehension], *elements: ast.expr) -> None:
        self.visit(generators[0].iter)  # evaluated outside, before anything else
        scope = comprehension_scope(generators, self._scope)
        # There may be nothing to walk through: what `:=` binds in it is not sure.
        with self._inside(), self._in(scope), self._maybe():
            for number, generator in enumerate(generators):
                self.visit_all([generator.iter] if number else [])
                self.visit(generator.target)
                for condition in generator.ifs:
                    self._bound, _ = self._test(condition)
            self.visit_all(elements)

    def on_call(self, node: ast.Call) -> None:
        pieces = pieces_of_call(node, self._transform)
        if pieces is None:
            self.children(node)
            return
        for piece in pieces:
            before = self._bound
            if piece.how == "inside":  # %timeit makes a function of it
                with self._in(body_scope("function", piece.body, self._scope)):
                    self.visit_all(piece.body)
            elif self._scope.kind == "module":
                self.visit_all(piece.body)
            else:  # IPython runs it with the function's variables, as exec does
                with self._in(body_scope("class", piece.body, self._scope)):
                    self.visit_all(piece.body)
            if piece.how != "here":
                self._bound = before

    # --- statements: those that bind

    def on_assign(self, node: ast.Assign) -> None:
        self.visit_all([node.value, *node.targets])  # in the order of evaluation

    def on_augassign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name):
            # The tree has the target as a store alone, and `x += 1` reads it first.
            self._load(node.target.id)
            self.visit(node.value)
            self._store(node.target.id, self.assigns)
        else:
            self.visit_all([node.target, node.value])

    def on_annassign(self, node: ast.AnnAssign) -> None:
        if node.value is not None:
            self.visit(node.value)
        if node.value is not None or not isinstance(node.target, ast.Name):
            self.visit(node.target)
        # Python evaluates no annotation of a function's own variable.
        if self._scope.kind != "function" and not self._lazy_annotations:
            self.visit(node.annotation)

    def on_import(self, node: ast.Import | ast.ImportFrom) -> None:
        for alias in node.names:
            if alias.name != "*":
                name = bound_by(alias)
                self._store(name, self.imports)
                if self._scope.kind == "module":
                    alone = type(node)(**{**vars(node), "names": [alias]})
                    line = self._choice or ast.unparse(alone)
                    self.statements.setdefault(name, {})[line] = None

    on_importfrom = on_import

    # --- statements: ways that part and meet

    def on_if(self, node: ast.If) -> None:
        self._bound, false = self._test(node.test)
        self.visit_all(node.body)
        true, self._bound = self._bound, false
        self.visit_all(node.orelse)
        self._bound = join(true, self._bound)

    def on_for(self, node: ast.For | ast.AsyncFor) -> None:
        def begin_round() -> State:
            over = self._bound
            self.visit(node.target)
            return over

        self.visit(node.iter)
        self._loop(node, begin_round)

    on_asyncfor = on_for

    def on_while(self, node: ast.While) -> None:
        def begin_round() -> State:
            self._bound, over = self._test(node.test)
            return over

        self._loop(node, begin_round)

    def _loop(
        self, node: ast.For | ast.AsyncFor | ast.While, begin_round: Callable[[], State]
    ) -> None:
        """`begin_round` goes into the body and returns the state at the end of the loop."""
        ends: list[State] = []
        breaks: list[State] = []
        # Not a real number of functions: the first round is always walked.
        num_functions = -1
        # A second round sees the functions that the first has defined.
        while len(ends) < 2 and num_functions != self._num_functions:
            num_functions = self._num_functions
            left: tuple[list[State], list[State]] = [], []
            self._loops.append(left)
            ends.append(begin_round())
            self.visit_all(node.body)
            self._loops.pop()
            breaks += left[0]
            self._bound = join(self._bound, *left[1])
        self._bound = join(*ends)
        self.visit_all(node.orelse)
        self._bound = join(self._bound, *breaks)

    def on_break(self, _node: ast.Break) -> None:
        self._loops[-1][0].append(self._bound)
        self._bound = None

    def on_continue(self, _node: ast.Continue) -> None:
        self._loops[-1][1].append(self._bound)
        self._bound = None

    def on_return(self, node: ast.Return) -> None:
        self.children(node)
        self._bound = None

    def on_raise(self, node: ast.Raise) -> None:
        self.children(node)
        # Within a function it is the call that ends, and not the cell.
        if self._later is None:
            self._exits.append(self._bound)
        self._bound = None

    def on_assert(self, node: ast.Assert) -> None:
        true, self._bound = self._test(node.test)
        if node.msg is not None:
            self.visit(node.msg)
        self._bound = true

    def on_try(self, node: ast.Try | ast.TryStar) -> None:
        start, outer = self._bound, self._choice
        self._choice = outer or (ast.unparse(node) if _only_imports(node) else "")
        self.visit_all(node.body)
        self.visit_all(node.orelse)
        ends = [self._bound]
        for handler in node.handlers:
            self._bound = start  # the exception may have come at once
            self.visit(handler)
            ends.append(self._bound)
        # `finally` may begin at any point of the others, but what it binds is bound after all.
        end, self._bound = join(*ends), start
        self.visit_all(node.finalbody)
        self._choice = outer
        reached = end is not None and self._bound is not None
        self._bound = end | self._bound if reached else None  # type: ignore[operator]

    on_trystar = on_try

    def on_excepthandler(self, node: ast.ExceptHandler) -> None:
        if node.type is not None:
            self.visit(node.type)
        if node.name:
            self._store(node.name)  # and unbound at the end: not an assignment of the cell
        self.visit_all(node.body)

    def on_with(self, node: ast.With | ast.AsyncWith) -> None:
        before = self._bound
        for item in node.items:
            self.visit(item.context_expr)
            if item.optional_vars is not None:
                self.visit(item.optional_vars)
        self.visit_all(node.body)
        # After a `raise` the way continues only if the exception is swallowed.
        if self._bound is None or any(_swallows(item.context_expr) for item in node.items):
            self._bound = before

    on_asyncwith = on_with

    def on_match(self, node: ast.Match) -> None:
        self.visit(node.subject)
        ends: list[State] = []
        for case in node.cases:
            before = self._bound  # a pattern that fails may have bound names, or not
            self.visit(case.pattern)
            if case.guard is not None:
                self._bound, _ = self._test(case.guard)
            self.visit_all(case.body)
            ends.append(self._bound)
            always = case.guard is None and _always_matches(case.pattern)
            self._bound = None if always else before
        self._bound = join(self._bound, *ends)

    def on_matchas(self, node: ast.MatchAs | ast.MatchStar) -> None:
        self.children(node)
        if node.name:
            self._store(node.name, self.assigns)

    on_matchstar = on_matchas

    def on_matchmapping(self, node: ast.MatchMapping) -> None:
        self.children(node)
        if node.rest:
            self._store(node.rest, self.assigns)


def _only_imports(node: ast.Try | ast.TryStar) -> bool:
    """Whether it does nothing else, so that all of it can be repeated on a rank that is new."""
    statements = (one for one in ast.walk(node) if isinstance(one, ast.stmt))
    return all(
        isinstance(one, (ast.Import, ast.ImportFrom, ast.Pass, ast.Try)) for one in statements
    )


def _swallows(context: ast.expr) -> bool:
    """Whether this is `suppress(...)`, or another whose name says the same."""
    function = context.func if isinstance(context, ast.Call) else context
    name = getattr(function, "attr", getattr(function, "id", ""))
    # `contextlib.suppress` and `pytest.raises`.
    return "suppress" in name.lower() or "raises" in name.lower()


def _always_matches(pattern: ast.pattern) -> bool:
    if isinstance(pattern, ast.MatchOr):
        return any(map(_always_matches, pattern.patterns))
    if isinstance(pattern, ast.MatchAs):
        return pattern.pattern is None or _always_matches(pattern.pattern)
    return False
