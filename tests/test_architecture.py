"""The rules between the packages, read from the syntax of every file: who imports whom, what stands only where."""

from __future__ import annotations

import ast
import re
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from rank_monitor.contract import config

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"ft_launcher": "ft_launcher", "rank_monitor": "rank_monitor", "ft_client": "client/ft_client"}

CONTRACT = "rank_monitor.contract"
LAUNCHER = {"ft_launcher", CONTRACT, "torch", "numpy", "click", "yaml", "psutil"}
CLIENT = {"ft_client", CONTRACT, "torch", "numpy"}
MAY_IMPORT = {
    CONTRACT: {CONTRACT},
    "rank_monitor": {"rank_monitor"},
    "ft_launcher": LAUNCHER,
    "ft_launcher.etcd_gateway": LAUNCHER | {"etcd3gw"},
    "ft_launcher.health.nvml": LAUNCHER | {"pynvml"},
    "ft_launcher.health.endpoint": LAUNCHER | {"grpc"},
    "ft_client": CLIENT,
    "ft_client.integrations": CLIENT | {"lightning"},
    "ft_client.integrations.nvrx_alias": CLIENT | {"yaml"},
}
"""Package or module -> what it may import beside the standard library; the longest name that fits counts. The one
module that needs an optional dependency gets a line of its own."""

EXCEPTIONS = {
    ("ft_launcher.zygote", "ft_client.bootstrap"),
    ("ft_launcher.function_rank", "ft_client.bootstrap"),
    ("ft_launcher.etcd_v2", "etcd"),
}
"""The bootstrap of a rank is called in the child that was forked for it. An extra is imported where it is used."""

ADAPT_TORCH = {
    "ft_client.straggler.kernels",
    "ft_client.inprocess.abort",
    "ft_launcher.agent",
    "ft_launcher.function_context",
    "ft_launcher.function_rank",
    "ft_launcher.launch_config",
    "ft_launcher.log_pump",
    "ft_launcher.member_agent",
    "ft_launcher.nodes.store_connection",
    "ft_launcher.rank_agent",
    "ft_launcher.rank_context",
    "ft_launcher.rendezvous_check",
    "ft_launcher.several_nodes",
    "ft_launcher.torch_config",
    "ft_launcher.torch_log",
}
"""The modules that may use underscored names of torch: they break when torch changes, and nothing else does."""

OUR_VARIABLE = re.compile(r"((PET_)?FT|FAULT_TOL)_([A-Z]|$)")
SPELLS_VARIABLES = "rank_monitor.contract.env"
HOLDS_DEFAULTS = "rank_monitor.contract.config"


@dataclass(frozen=True)
class Module:
    """A file of ours: its dotted name and its syntax."""

    name: str
    path: Path
    tree: ast.Module

    def __str__(self) -> str:
        return self.name

    def at(self, node: ast.AST) -> str:
        return f"{self.path.relative_to(ROOT)}:{getattr(node, 'lineno', 0)}"

    def imports(self) -> Iterator[tuple[ast.AST, str]]:
        """Every import at any depth, with its absolute target: `a.b` for `from a import b` too."""
        package = self.name.split(".") if self.path.name == "__init__.py" else self.name.split(".")[:-1]
        for node in ast.walk(self.tree):
            if isinstance(node, ast.Import):
                yield from ((node, alias.name) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                above = package[: len(package) - node.level + 1] if node.level else []
                source = ".".join([*above, node.module] if node.module else above)
                yield from ((node, f"{source}.{alias.name}") for alias in node.names)
            elif isinstance(node, ast.Call) and called(node) in {"import_module", "__import__", "run_module"}:
                yield from ((node, text) for word in node.args[:1] if (text := text_of(word)))


def load(folder: str, package: str) -> Iterator[Module]:
    for path in sorted((ROOT / folder).rglob("*.py")):
        words = path.relative_to(ROOT / folder).with_suffix("").parts
        name = ".".join([package, *(word for word in words if word != "__init__")])
        yield Module(name, path, ast.parse(path.read_text()))


MODULES = [module for package, folder in FOLDERS.items() for module in load(folder, package)]
every_module = pytest.mark.parametrize("module", MODULES, ids=str)


def called(node: ast.Call) -> str:
    """The last word of what is called: `b` for `a.b()`."""
    return node.func.attr if isinstance(node.func, ast.Attribute) else getattr(node.func, "id", "")


def text_of(node: ast.AST) -> str:
    """A literal of text or bytes as text; empty for anything else."""
    value = node.value if isinstance(node, ast.Constant) else None
    return value.decode("latin-1") if isinstance(value, bytes) else value if isinstance(value, str) else ""


def within(name: str, package: str) -> bool:
    return name == package or name.startswith(package + ".")


def test_every_package_is_found() -> None:
    assert {module.name.split(".")[0] for module in MODULES} == set(FOLDERS)


@every_module
def test_imports_point_one_way(module: Module) -> None:
    allowed = MAY_IMPORT[max((name for name in MAY_IMPORT if within(module.name, name)), key=len)]
    wrong = [
        f"{module.at(node)} imports {target}"
        for node, target in module.imports()
        if target.split(".")[0] not in sys.stdlib_module_names
        and not any(within(target, name) for name in allowed)
        and not any(module.name == who and within(target, what) for who, what in EXCEPTIONS)
    ]
    assert not wrong, "\n".join(wrong)


def is_underscored(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def underscored_torch_names(module: Module) -> list[str]:
    """Where underscored names are imported from torch, read off what was imported from it, or off `super()`."""
    of_torch = [(node, target) for node, target in module.imports() if within(target, "torch")]
    found = [f"{module.at(node)}: {name}" for node, name in of_torch if any(map(is_underscored, name.split(".")))]
    bound = {"super"} if of_torch else set()
    for node, _ in of_torch:
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            bound |= {alias.asname or alias.name.split(".")[0] for alias in node.names}
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_underscored(node.attr):
            root: ast.AST = node.value
            while isinstance(root, (ast.Attribute, ast.Call)):
                root = root.value if isinstance(root, ast.Attribute) else root.func
            if isinstance(root, ast.Name) and root.id in bound:
                found.append(f"{module.at(node)}: {ast.unparse(node)}")
    return found


@every_module
def test_underscored_names_of_torch_stay_where_torch_is_adapted(module: Module) -> None:
    found = underscored_torch_names(module)
    assert module.name in ADAPT_TORCH or not found, "\n".join(found)


@every_module
def test_one_file_spells_our_environment_variables(module: Module) -> None:
    if module.name == SPELLS_VARIABLES:
        return
    prose = {id(node.value) for node in ast.walk(module.tree) if isinstance(node, ast.Expr)}
    spelled = [
        f"{module.at(node)}: {text_of(node)}"
        for node in ast.walk(module.tree)
        if OUR_VARIABLE.match(text_of(node)) and id(node) not in prose
    ]
    assert not spelled, "\n".join(spelled)


NUMBERS = {
    field.name
    for group in config.GROUPS.values()
    for field in fields(group)
    if isinstance(field.default, (int, float)) and not isinstance(field.default, bool)
}
"""The settings whose default is a number."""


def named_defaults(tree: ast.Module) -> Iterator[tuple[ast.AST, str, ast.expr]]:
    """Each value given to a name by a signature, or by an assignment in a module or class: place, name, value."""
    for node in ast.walk(tree):
        if isinstance(node, ast.arguments):
            plain = [*node.posonlyargs, *node.args]
            yield from ((arg, arg.arg, value) for arg, value in zip(plain[::-1], node.defaults[::-1], strict=False))
            yield from (
                (arg, arg.arg, value) for arg, value in zip(node.kwonlyargs, node.kw_defaults, strict=True) if value
            )
        elif isinstance(node, (ast.Module, ast.ClassDef)):
            for line in node.body:
                if isinstance(line, (ast.Assign, ast.AnnAssign)) and line.value:
                    targets = line.targets if isinstance(line, ast.Assign) else [line.target]
                    yield from ((line, target.id, line.value) for target in targets if isinstance(target, ast.Name))


@every_module
def test_one_file_holds_defaults_of_settings(module: Module) -> None:
    repeated = [
        f"{module.at(node)}: {name}"
        for node, name, value in named_defaults(module.tree)
        if name.lower() in NUMBERS and isinstance(value, ast.Constant) and isinstance(value.value, (int, float))
    ]
    assert module.name == HOLDS_DEFAULTS or not repeated, "\n".join(repeated)


def test_the_monitor_runs_on_a_bare_interpreter() -> None:
    """Without site-packages, and so without torch, every module of it can be imported."""
    names = [module.name for module in MODULES if within(module.name, "rank_monitor") and "__main__" not in module.name]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + "".join(f"import {name}\n" for name in names)
    code += "assert not {'torch', 'numpy'} & set(sys.modules)"
    subprocess.run([sys.executable, "-I", "-S", "-c", code], check=True, timeout=60)
