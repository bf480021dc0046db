"""Whether a line of a program certainly waits for a lock that only threads of its own process can release. Pure.

A stack shows the line of `lock.acquire()` as it shows that of torch's `work.wait()`: both are calls of C code without a
frame. So the text of the program decides, and only where it leaves no doubt: the statement must be nothing but
`NAME.acquire()` or `with NAME:`, and everywhere in the file the name must be that of a `threading.Lock()` or `RLock()`
that is never passed on. A lock between processes, or one that another function releases, may wait for a rank.
`agent/cycle/evidence.py` reads the text.
"""

from __future__ import annotations

import ast
import re
import warnings
from collections.abc import Iterator

_KINDS = ("Lock", "RLock")
_CALLS = ("acquire", "release", "locked")
_FRAME = re.compile(r"[^:]{1,300}:(\d{1,9}) in (\w+|<module>)")
_Scope = ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda | ast.Module


def waits_in_own_lock(source: str, frame: str) -> bool:
    """Returns whether a thread that sleeps at a frame waits for such a lock; False where that is not certain.

    Args:
        source: the text of the file.
        frame: `train.py:42 in step`.
    """
    found = _FRAME.fullmatch(frame)
    if found is None:
        return False
    number, function = int(found[1]), found[2]
    lines = source.encode(errors="replace").splitlines()  # columns are those of UTF-8
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of the program's escapes
            program = _Program(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not 0 < number <= len(lines):
        return False
    locks = program.taken_at(number, lines[number - 1], function)
    return bool(locks) and all(program.is_lock_of_this_file(_name(lock)) for lock in locks)


class _Program:
    """The tree of a file, in which each node's parent can be found."""

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._imported = set(self._imports())
        self._bound = set(self._bindings())

    def taken_at(self, number: int, line: bytes, function: str) -> list[ast.expr]:
        """The locks that the statement takes that fills line `number`; empty if it is any other one, or in another
        function: then this is not the text that runs."""
        for node in self._nodes:
            if isinstance(node, ast.stmt) and node.lineno == number and not line[: node.col_offset].strip():
                locks = _taken(node, line)
                if all(map(_is_plain, locks)) and self._function(node) == function:
                    return locks
        return []

    def is_lock_of_this_file(self, name: str) -> bool:
        """Whether each variable and attribute of a name is a lock that nothing outside of this file has."""
        proper = {use for node in self._nodes for use in self._proper_uses(node)}
        uses = [node for node in self._nodes if isinstance(node, ast.Name | ast.Attribute) and _name(node) == name]
        if any(self._is_suspended(self._scope(use)) for use in uses):
            return False
        taken = {self._scope(use) for use in uses if self._is_taken(use)}
        released = {self._scope(use) for use in uses if self._is_base_of(use, "release")}
        is_made = any(isinstance(use.ctx, ast.Store) for use in uses)
        is_rebound = name in self._bound or any(name == bound for bound, _ in self._imported)
        # One that is released where it was not taken is a sign to another thread, and a rank may be the cause of it. So
        # may one be that is only released elsewhere, or held by a coroutine, which has no frame while it waits.
        is_let_go = bool(released) or any(isinstance(self._parents[use], ast.withitem) for use in uses)
        return is_made and is_let_go and not is_rebound and proper.issuperset(uses) and released <= taken

    def _proper_uses(self, node: ast.AST) -> Iterator[ast.expr]:
        match node:
            case ast.Assign(targets=[target], value=value) if self._makes_lock(value):
                yield target
            case ast.AnnAssign(target=target, value=ast.expr() as value) if self._makes_lock(value):
                yield target
            case ast.With(items=items):
                yield from (item.context_expr for item in items if item.optional_vars is None)
            case ast.Call(func=ast.Attribute(value=value, attr=attr)) if attr in _CALLS:
                yield value

    def _makes_lock(self, value: ast.expr) -> bool:
        match value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="threading"), attr=kind), args=[], keywords=[]):
                return kind in _KINDS and self._is_only("threading", "threading")
            case ast.Call(func=ast.Name(id=kind), args=[], keywords=[]):
                return kind in _KINDS and self._is_only(kind, f"threading.{kind}")
        return False

    def _is_only(self, name: str, origin: str) -> bool:
        """Whether a name is bound by this import alone, wherever it is bound."""
        origins = {found for bound, found in self._imported if bound in (name, "*")}
        stored = any(isinstance(node, ast.Name) and node.id == name for node in self._nodes if _is_stored(node))
        return origins == {origin} and not stored and name not in self._bound

    def _imports(self) -> Iterator[tuple[str, str]]:
        """Each name that an import binds, and what it is the name of; `*`: any name."""
        for node in self._nodes:
            match node:
                case ast.Import(names=names):
                    yield from ((alias.asname or alias.name.partition(".")[0], alias.name) for alias in names)
                case ast.ImportFrom(module=module, names=names, level=level):
                    origin = "." * level + (module or "")
                    yield from ((alias.asname or alias.name, f"{origin}.{alias.name}") for alias in names)

    def _bindings(self) -> Iterator[str]:
        """Each name that is bound neither by an assignment nor by an import."""
        for node in self._nodes:
            match node:
                case ast.arg(arg=name) | ast.MatchMapping(rest=str(name)):
                    yield name
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name
                case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    yield name

    def _is_suspended(self, scope: ast.AST) -> bool:
        """Whether a function may wait without a frame: it is a coroutine or a generator."""
        waits = (ast.Await, ast.Yield, ast.YieldFrom)
        has_await = any(isinstance(node, waits) and self._scope(node) is scope for node in self._nodes)
        return isinstance(scope, ast.AsyncFunctionDef) or has_await

    def _is_taken(self, use: ast.expr) -> bool:
        return isinstance(self._parents[use], ast.withitem) or self._is_base_of(use, "acquire")

    def _is_base_of(self, use: ast.expr, attribute: str) -> bool:
        parent = self._parents[use]
        return isinstance(parent, ast.Attribute) and parent.attr == attribute

    def _scope(self, node: ast.AST) -> ast.AST:
        while not isinstance(node, _Scope):
            node = self._parents[node]
        return node

    def _function(self, node: ast.stmt) -> str:
        """The name that a stack shows for a statement; empty: it is in a class or a coroutine."""
        parent = self._parents[node]
        while not isinstance(parent, ast.ClassDef | _Scope):
            parent = self._parents[parent]
        match parent:
            case ast.FunctionDef(name=name):
                return name
            case ast.Module():
                return "<module>"
        return ""


def _taken(node: ast.stmt, line: bytes) -> list[ast.expr]:
    """The locks that a statement waits for, if it does nothing else before it has them, and the line ends with it."""
    end: ast.stmt | ast.expr
    match node:
        case ast.Expr(value=ast.Call(func=ast.Attribute(value=lock, attr="acquire"), args=[], keywords=[])):
            locks, end, rest = [lock], node, b""
        case ast.With(items=[*_, last] as items) if all(item.optional_vars is None for item in items):
            locks, end, rest = [item.context_expr for item in items], last.context_expr, b":"
        case _:
            return []
    is_one_line = end.end_lineno == node.lineno
    if is_one_line and line[end.end_col_offset or 0 :].partition(b"#")[0].strip() == rest:
        return locks
    return []


def _is_plain(node: ast.expr) -> bool:
    """Whether it is a variable, or an attribute of one, so that nothing is called to get it."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)


def _name(node: ast.expr) -> str:
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
