"""Decides whether a source line certainly waits for a lock that only threads of its own process can release. Pure.

A stack shows `lock.acquire()` exactly as it shows torch's `work.wait()`: a line of the program that sleeps in C code,
without a frame below. The first makes the rank the cause of the hang, the second its victim. So the program's text
decides, and only where it leaves no doubt. All of these must hold for the name of the lock, anywhere in the file:

- The statement is nothing but `NAME.acquire()` or `with NAME:`.
- The name is only ever bound to `threading.Lock()` or `threading.RLock()`.
- The lock is never passed on: no use but in a `with` statement, or with `.acquire`, `.release`, `.locked`.
- Each function that releases the lock also takes it, and none of them is a coroutine or a generator.

A lock between processes, or one that another function releases as a signal, may in fact wait for a rank.
`agent/cycle/evidence.py` reads the file and asks `waits_in_own_lock`; the answer becomes `Scene.in_own_lock`.

    with lock:         # True, if `lock = threading.Lock()` above and the rest of the conditions hold
    queue.get()        # False: not a lock
    work.wait()        # False: not a lock
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
        source: the text of the file, as it was when the ranks were started. It need not be valid Python.
        frame: the innermost frame, for instance `train.py:42 in step`.
    """
    found = _FRAME.fullmatch(frame)
    if found is None:
        return False
    number, function = int(found[1]), found[2]
    lines = source.encode(errors="replace").splitlines()  # `ast` counts columns in bytes of UTF-8
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # SyntaxWarning about the program's own escapes is not ours to print
            program = _Program(ast.parse(source))
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    if not 0 < number <= len(lines):
        return False
    locks = program.locks_taken_at(number, lines[number - 1], function)
    return bool(locks) and all(program.is_lock_of_this_file(_name(lock)) for lock in locks)


class _Program:
    """The syntax tree of a file, with the parent of each node and the names that imports and definitions bind."""

    def __init__(self, tree: ast.Module) -> None:
        self._nodes = list(ast.walk(tree))
        self._parents = {child: node for node in self._nodes for child in ast.iter_child_nodes(node)}
        self._imported = set(self._imports())
        self._bound = set(self._bindings())

    def locks_taken_at(self, number: int, line: bytes, function: str) -> list[ast.expr]:
        """Returns the locks that the statement on line `number` takes; empty for any other statement.

        Args:
            line: the text of that line.
            function: the name of the function in the frame. A statement in another function shows that the file is not
                the text that runs.
        """
        for node in self._nodes:
            if isinstance(node, ast.stmt) and node.lineno == number and not line[: node.col_offset].strip():
                locks = _locks_taken_by(node, line)
                if all(map(_is_plain, locks)) and self._function(node) == function:
                    return locks
        return []

    def is_lock_of_this_file(self, name: str) -> bool:
        """Returns whether each variable and attribute of this name is a lock that nothing outside of the file has.

        Names are compared without their objects: `a.lock` and `b.lock` count as one.
        """
        proper = {use for node in self._nodes for use in self._proper_uses(node)}
        uses = [node for node in self._nodes if isinstance(node, ast.Name | ast.Attribute) and _name(node) == name]
        if any(self._is_suspended(self._scope(use)) for use in uses):
            return False
        taken = {self._scope(use) for use in uses if self._is_taken(use)}
        released = {self._scope(use) for use in uses if self._is_base_of(use, "release")}
        is_made = any(isinstance(use.ctx, ast.Store) for use in uses)
        is_rebound = name in self._bound or any(name == bound for bound, _ in self._imported)
        # A lock that is released where it was not taken is a signal to another thread, and that thread may wait for a
        # rank. The same holds for a lock that nothing in this file releases.
        is_let_go = bool(released) or any(isinstance(self._parents[use], ast.withitem) for use in uses)
        return is_made and is_let_go and not is_rebound and proper.issuperset(uses) and released <= taken

    def _proper_uses(self, node: ast.AST) -> Iterator[ast.expr]:
        """Yields the names in a statement or call that are used as such a lock may be: made, in a `with`, or called."""
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
        """Returns whether an expression is `threading.Lock()` or `RLock()`, under whichever name it was imported."""
        match value:
            case ast.Call(func=ast.Attribute(value=ast.Name(id="threading"), attr=kind), args=[], keywords=[]):
                return kind in _KINDS and self._is_only("threading", "threading")
            case ast.Call(func=ast.Name(id=kind), args=[], keywords=[]):
                return kind in _KINDS and self._is_only(kind, f"threading.{kind}")
        return False

    def _is_only(self, name: str, origin: str) -> bool:
        """Returns whether a name is bound only by the import of `origin`, and by nothing else in the file."""
        origins = {found for bound, found in self._imported if bound in (name, "*")}
        stored = any(isinstance(node, ast.Name) and node.id == name for node in self._nodes if _is_stored(node))
        return origins == {origin} and not stored and name not in self._bound

    def _imports(self) -> Iterator[tuple[str, str]]:
        """Yields each name that an import binds, with the full name of what it imports. `*` stands for any name."""
        for node in self._nodes:
            match node:
                case ast.Import(names=names):
                    yield from ((alias.asname or alias.name.partition(".")[0], alias.name) for alias in names)
                case ast.ImportFrom(module=module, names=names, level=level):
                    origin = "." * level + (module or "")
                    yield from ((alias.asname or alias.name, f"{origin}.{alias.name}") for alias in names)

    def _bindings(self) -> Iterator[str]:
        """Yields each name that is bound in another way than by an assignment or an import: a parameter, a function, a
        class, a caught exception, a pattern."""
        for node in self._nodes:
            match node:
                case ast.arg(arg=name) | ast.MatchMapping(rest=str(name)):
                    yield name
                case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name) | ast.ClassDef(name=name):
                    yield name
                case ast.ExceptHandler(name=str(name)) | ast.MatchAs(name=str(name)) | ast.MatchStar(name=str(name)):
                    yield name

    def _is_suspended(self, scope: ast.AST) -> bool:
        """Returns whether a function may be suspended while it holds a lock: it is a coroutine or a generator. Such a
        function has no frame while it waits, so no stack shows who holds the lock."""
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
        """Returns the name that a stack shows for a statement; empty for a statement in a class body or a coroutine."""
        parent = self._parents[node]
        while not isinstance(parent, ast.ClassDef | _Scope):
            parent = self._parents[parent]
        match parent:
            case ast.FunctionDef(name=name):
                return name
            case ast.Module():
                return "<module>"
        return ""


def _locks_taken_by(node: ast.stmt, line: bytes) -> list[ast.expr]:
    """Returns the locks that a statement waits for, if it does nothing else before it has them, and nothing follows on
    its line; else nothing.

    Args:
        line: the text of the line, as bytes of UTF-8.
    """
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
    """Returns whether an expression is a variable, or an attribute of one: nothing is called to get its value."""
    while isinstance(node, ast.Attribute):
        node = node.value
    return isinstance(node, ast.Name)


def _is_stored(node: ast.AST) -> bool:
    return isinstance(getattr(node, "ctx", None), ast.Store | ast.Del)


def _name(node: ast.expr) -> str:
    """Returns the last part of a name: `lock` for `lock` and for `self.lock`; empty for any other expression."""
    match node:
        case ast.Name(id=name) | ast.Attribute(attr=name):
            return name
    return ""
