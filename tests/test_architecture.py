"""The rules between packages and rooms, read from the syntax of every file: who imports whom, what stands where."""

from __future__ import annotations

import ast
import re
import sys
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass, fields
from pathlib import Path

import pytest

from rank_monitor import stacks
from rank_monitor.contract.settings import config
from tests.program import run

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = {"ft_launcher": "ft_launcher", "rank_monitor": "rank_monitor", "ft_client": "client/ft_client"}

CONTRACT = "rank_monitor.contract"
LAUNCHER = {"ft_launcher", CONTRACT, "torch", "numpy", "click", "yaml", "psutil"}
CLIENT = {"ft_client", CONTRACT, "torch", "numpy"}
MAY_IMPORT = {
    CONTRACT: {CONTRACT},
    "rank_monitor": {"rank_monitor"},
    "ft_launcher": LAUNCHER,
    "ft_launcher.job.store.etcd_gateway": LAUNCHER | {"etcd3gw"},
    "ft_launcher.settings.line_pattern": LAUNCHER | {"re2"},
    "ft_launcher.node.health.gpu": LAUNCHER | {"pynvml"},
    "ft_launcher.node.health.endpoint": LAUNCHER | {"grpc"},
    "ft_launcher.tools.commands.live_view": LAUNCHER | {"rich"},
    "ft_launcher.tools.report.picture": LAUNCHER | {"matplotlib"},
    "ft_launcher.tools.status.metrics": LAUNCHER | {"prometheus_client"},
    "ft_launcher.tools.status.trace_export": LAUNCHER | {"opentelemetry"},
    "ft_client": CLIENT,
    "ft_client.memory.checksum": CLIENT | {"isal"},
    "ft_client.integrations": CLIENT | {"lightning"},
    "ft_client.integrations.transformers": CLIENT | {"transformers"},
    "ft_client.integrations.torchtitan": CLIENT | {"torchtitan"},
    "ft_client.integrations.nvrx_alias": CLIENT | {"yaml"},
}
"""Package or module -> what it may import beside the standard library; the longest name that fits counts. The one
module that needs an optional dependency gets a line of its own."""

EXCEPTIONS = {
    ("ft_launcher.node.zygote.fork_server", "ft_client.bootstrap"),
    ("ft_launcher.node.ranks.function_rank", "ft_client.bootstrap"),
    ("ft_client.inprocess.standalone.launcher_parts", "ft_launcher"),
    ("ft_client.integrations.nvrx_alias.peer.fault_tolerance.launcher", "ft_launcher.settings.command_line"),
}
"""The bootstrap of a rank is called in the child that was forked for it. `launcher_parts` names what runs in processes
that the client makes for standalone agents. NVIDIA's name for its launcher stands for ours."""

WINGS: dict[str, set[str]] = {
    "decide": set(),
    "settings": {"decide"},
    "record": {"decide"},
    "job": {"decide"},
    "node": {"decide", "record", "settings"},
    "agent": {"decide", "job", "node", "record", "settings"},
    "tools": {"agent", "decide", "job", "node", "record", "settings"},
}
"""Wing of the launcher -> the wings below it, which alone it may import.

`job` and `node` do not know each other. All but `tools` are the core. The files directly in `ft_launcher/` are entries:
these may import every wing, and no wing imports one of them.
"""

ROOMS: dict[str, set[str]] = {
    # The launcher, from what knows least to what puts all together.
    "ft_launcher.decide.attribution": set(),
    "ft_launcher.decide.health": {"decide.attribution"},
    "ft_launcher.decide.policy": {"decide.attribution"},
    "ft_launcher.settings": {"decide.policy"},
    "ft_launcher.record.events": set(),
    "ft_launcher.record.ledger": set(),
    "ft_launcher.record.journal_reader": {"record.events"},
    "ft_launcher.record.journal": {"record.events"},
    "ft_launcher.record.console": {"decide.attribution", "decide.policy"},
    "ft_launcher.record.logs": {"record.console", "record.journal"},
    "ft_launcher.record": {
        *("decide.attribution", "decide.health", "decide.policy", "record.console", "record.events", "record.journal"),
        *("record.ledger", "record.logs"),
    },
    "ft_launcher.job.store": set(),
    "ft_launcher.job.coordinator": {"decide.policy"},
    "ft_launcher.job.link": {"decide.policy", "job.coordinator", "job.store"},
    "ft_launcher.job.rendezvous": {"decide.policy", "job.coordinator", "job.link", "job.store"},
    "ft_launcher.node.processes": {"record"},
    "ft_launcher.node.zygote": {"node.processes", "settings"},
    "ft_launcher.node.ranks": {
        *("node.processes", "node.zygote", "record", "record.journal", "record.logs", "settings"),
    },
    "ft_launcher.node.monitors": {"node.ranks"},
    "ft_launcher.node.memory_files": {"node.processes"},
    "ft_launcher.node.health": {"decide.health", "node.processes", "settings"},
    "ft_launcher.agent.cycle": {
        *("decide.attribution", "job.coordinator", "node.monitors", "node.processes", "node.ranks", "node.zygote"),
        *("record", "record.journal"),
    },
    "ft_launcher.agent.in_process": {
        *("agent.cycle", "decide.attribution", "decide.policy", "job.rendezvous", "node.monitors", "node.processes"),
        *("node.ranks", "node.zygote", "record", "record.journal"),
    },
    "ft_launcher.agent": {
        *("agent.cycle", "agent.in_process", "decide.attribution", "decide.health", "decide.policy"),
        *("job.coordinator", "job.link", "job.rendezvous", "node.health", "node.memory_files", "node.monitors"),
        *("node.processes", "node.ranks", "node.zygote", "record", "record.events", "record.journal", "record.ledger"),
        *("record.logs", "settings"),
    },
    "ft_launcher.tools.report": {
        *("record", "record.console", "record.events", "record.journal", "record.journal_reader", "record.ledger"),
    },
    "ft_launcher.tools.status": {
        *("agent", "agent.cycle", "decide.attribution", "job.link", "job.rendezvous"),
        *("record.events", "record.journal", "record.ledger"),
    },
    "ft_launcher.tools.bundle": {"record", "record.events", "tools.status"},
    "ft_launcher.tools.training_log": {
        *("agent", "agent.cycle", "decide.attribution", "record.journal", "record.logs", "settings"),
    },
    "ft_launcher.tools.replay": {
        *("agent.in_process", "decide.attribution", "decide.health", "decide.policy", "node.memory_files"),
        *("record.events", "record.journal_reader"),
    },
    "ft_launcher.tools.commands": {
        *("node.ranks", "record.console", "record.events", "record.journal_reader", "settings", "tools.bundle"),
        *("tools.replay", "tools.report", "tools.status"),
    },
    "ft_launcher": {
        *("agent", "agent.cycle", "decide.policy", "job.rendezvous", "node.health", "node.memory_files"),
        *(
            "node.processes",
            "node.ranks",
            "node.zygote",
            "record",
            "record.console",
            "record.journal",
            "record.logs",
            "settings",
            "tools.commands",
        ),
        *("tools.report", "tools.status", "tools.training_log"),
    },
    # The client.
    "ft_client.errors": set(),
    "ft_client.rank.lazy_names": set(),
    "ft_client.rank.argument_checks": set(),
    "ft_client.rank.agreement": set(),
    "ft_client.rank.rng": set(),
    "ft_client.rank.start": set(),
    "ft_client.control": set(),
    "ft_client.rank.monitoring": {"rank.agreement", "errors"},
    "ft_client.rank.saving": {"rank.agreement"},
    "ft_client.rank_monitor_client": {"control", "errors", "rank.monitoring", "rank.saving"},
    "ft_client.short_forms": {"rank.monitoring", "rank_monitor_client"},
    "ft_client.memory": {"rank.agreement", "rank.monitoring", "rank.rng"},
    "ft_client.rerun": {"rank.agreement", "rank.argument_checks", "rank.lazy_names", "rank.monitoring", "rank.rng"},
    "ft_client.straggler": {"rank.agreement", "rank.argument_checks", "rank.lazy_names", "rank.monitoring"},
    "ft_client.inject": {"rank.lazy_names", "rank.monitoring", "rerun", "rank.start"},
    "ft_client.inprocess.exception": set(),
    "ft_client.inprocess.state": set(),
    "ft_client.inprocess.assignment": {"inprocess.exception", "inprocess.state"},
    "ft_client.inprocess.rank_assignment": {"inprocess.assignment", "inprocess.exception", "inprocess.state"},
    "ft_client.inprocess.rank_filter": {"inprocess.rank_assignment", "inprocess.state"},
    "ft_client.inprocess": {
        *("inprocess.exception", "inprocess.rank_assignment", "inprocess.rank_filter", "inprocess.state"),
    },
    "ft_client.inprocess.standalone": {"inprocess", "inprocess.exception", "rank.lazy_names", "rank.monitoring"},
    "ft_client.inprocess.restart": {
        *("inprocess", "inprocess.assignment", "inprocess.exception", "inprocess.rank_assignment"),
        *("inprocess.standalone", "inprocess.state", "rank.monitoring", "rank_monitor_client"),
    },
    "ft_client.inprocess.wrapper": {"inprocess", "inprocess.exception", "inprocess.restart", "inprocess.state"},
    "ft_client.inprocess.restart_config": {
        *("inprocess", "inprocess.rank_assignment", "inprocess.state", "inprocess.wrapper"),
    },
    "ft_client": {"rank.agreement", "rank.argument_checks", "rank_monitor_client"},
    "ft_client.integrations.lightning": {
        *("rank.agreement", "control", "errors", "inject", "memory", "rank.lazy_names", "rank.monitoring"),
        *("rank_monitor_client", "straggler"),
    },
    "ft_client.integrations.local_checkpoints": {"memory", "rank.agreement"},
    "ft_client.integrations.transformers": {"memory"},
    "ft_client.integrations.torchtitan": {"memory"},
    "ft_client.integrations.nvrx_alias": {"inject", "inprocess.standalone"},
    "ft_client.integrations.nvrx_alias.peer": {
        *("errors", "integrations.nvrx_alias", "rank.monitoring", "rank_monitor_client", "control"),
    },
    "ft_client.bootstrap": {"inject", "integrations.nvrx_alias", "rank.monitoring", "short_forms", "rank.start"},
    # The contract between the three, and the monitor.
    "rank_monitor.contract": set(),
    "rank_monitor.contract.wire": {"contract"},
    "rank_monitor.contract.restart_history": {"contract", "contract.wire"},
    "rank_monitor.contract.rounds": {"contract", "contract.restart_history", "contract.wire"},
    "rank_monitor.contract.settings": {"contract", "contract.rounds", "contract.wire"},
    "rank_monitor.contract.processes": {"contract", "contract.settings", "contract.wire"},
    "rank_monitor": {"contract", "contract.processes", "contract.settings", "contract.wire"},
}
"""Room, or a single module beside rooms -> the rooms of its package that it may import.

A module belongs to the longest name that fits. Each line names only rooms that stand above it, so that no circle can
be. The launcher and the client may import all of the contract, which `MAY_IMPORT` says.
"""

IMPURE = {
    *("asyncio", "concurrent", "ctypes", "fcntl", "mmap", "multiprocessing", "psutil", "queue", "resource", "select"),
    *("selectors", "shutil", "socket", "subprocess", "tempfile", "threading", "time", "torch", "urllib"),
}
"""What a file that says it is pure imports nothing of: each of these has to do with a clock, a process or a file."""

IMPURE_CALLS = {
    *("now", "today", "utcnow", "open", "read_text", "read_bytes", "write_text", "write_bytes", "exists", "is_file"),
    *("is_dir", "iterdir", "glob", "rglob", "stat", "mkdir", "unlink", "getpid", "kill", "getenv", "gethostname"),
}

ADAPT_TORCH = {
    "ft_client.rank.agreement.roll_call",
    "ft_client.straggler.kernels",
    "ft_client.inprocess.abort",
    "ft_launcher.agent.node_agent",
    "ft_launcher.node.ranks.function_context",
    "ft_launcher.node.ranks.function_rank",
    "ft_launcher.python_api",
    "ft_launcher.record.logs.log_pump",
    "ft_launcher.job.store.store_connection",
    "ft_launcher.node.ranks.rank_context",
    "ft_launcher.settings.rendezvous_check",
    "ft_launcher.agent.torch_launch",
    "ft_launcher.settings.job_settings",
}
"""The modules that may use underscored names of torch: they break when torch changes, and nothing else does."""

SETS_IN_TORCH = {"ft_client.inprocess.abort": ["dist.distributed_c10d._world.group_count"]}
"""Module -> what of torch it sets: a number that torch counts on, from which the names of new groups are made. After an
abort it must be the same on all ranks, and torch has no call for that."""

OUR_VARIABLE = re.compile(r"((PET_)?FT|FAULT_TOL)_([A-Z]|$)")
SPELLS_VARIABLES = "rank_monitor.contract.env"
HOLDS_DEFAULTS = "rank_monitor.contract.settings.config"


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


def room_of(name: str) -> str:
    return max((room for room in ROOMS if within(name, room)), key=len)


def is_face(module: Module) -> bool:
    """Whether it is the `__init__.py` of a package, which names what users import from it."""
    return module.path.name == "__init__.py" and not module.name.startswith("rank_monitor")


def known_part(target: str) -> str:
    """The module of ours that a dotted name lies in; empty: it is not ours."""
    while target and target not in NAMES:
        target = target.rpartition(".")[0]
    return target


NAMES = {module.name for module in MODULES}


def imported_rooms(module: Module) -> Iterator[tuple[ast.AST, str]]:
    """The other rooms of its own package that a module imports from."""
    for node, name in module.imports():
        target = known_part(name)
        here, there = room_of(module.name), room_of(target) if target else ""
        if there and here != there and target.split(".")[0] == module.name.split(".")[0] and target != "ft_launcher":
            yield node, there


@every_module
def test_a_room_imports_only_the_rooms_that_it_may(module: Module) -> None:
    package = module.name.split(".")[0]
    allowed = {f"{package}.{room}" for room in ROOMS[room_of(module.name)]}
    wrong = [f"{module.at(node)} imports {there}" for node, there in imported_rooms(module) if there not in allowed]
    assert is_face(module) or not wrong, "\n".join(wrong)


def wing_of(name: str) -> str:
    """The wing of the launcher that a dotted name lies in; empty: it lies in none."""
    wing = [*name.split("."), ""][1]
    return wing if within(name, "ft_launcher") and wing in WINGS else ""


@every_module
def test_a_wing_imports_only_the_wings_below_it(module: Module) -> None:
    """So no file of the core imports `tools`, and none of `job` and `node` the other."""
    here = wing_of(module.name)
    targets = [(node, wing_of(name)) for node, name in module.imports()]
    wrong = [f"{module.at(node)} imports {there}" for node, there in targets if there and there != here]
    wrong = [line for line in wrong if here and line.rpartition(" ")[2] not in WINGS[here]]
    assert not wrong, "\n".join(wrong)


def test_no_file_of_the_core_knows_the_tools() -> None:
    core = [module for module in MODULES if wing_of(module.name) not in ("", "tools")]
    assert len(core) > 150
    names = [(module, name) for module in core for _, name in module.imports()]
    assert [f"{module}: {name}" for module, name in names if within(name, "ft_launcher.tools")] == []


def test_the_rooms_have_an_order() -> None:
    """Each may import only rooms that the table names above it; so there is no circle."""
    seen: set[str] = set()
    for room, others in ROOMS.items():
        package = room.split(".")[0]
        below = {f"{package}.{other}" for other in others} - seen
        assert not below, f"{room} may import {sorted(below)}, which stand below it"
        seen.add(room)


def test_every_room_makes_use_of_what_it_may_import() -> None:
    used: set[tuple[str, str]] = set()
    for module in MODULES:
        used |= {(room_of(module.name), there) for _, there in imported_rooms(module)}
    allowed = {(room, f"{room.split('.')[0]}.{other}") for room, others in ROOMS.items() for other in others}
    assert sorted(allowed - used) == []


def says_pure(module: Module) -> bool:
    return bool(re.search(r"\bPure[.;:]", ast.get_docstring(module.tree) or "")) and not is_face(module)


@pytest.mark.parametrize("module", [module for module in MODULES if says_pure(module)], ids=str)
def test_a_file_that_says_it_is_pure_is(module: Module) -> None:
    wrong = [f"{module.at(node)} imports {name}" for node, name in module.imports() if name.split(".")[0] in IMPURE]
    wrong += [
        f"{module.at(node)} calls {called(node)}()"
        for node in ast.walk(module.tree)
        if isinstance(node, ast.Call) and called(node) in IMPURE_CALLS
    ]
    assert not wrong, "\n".join(wrong)


OUR_DOTTED_NAME = re.compile(r"(?<![\w./@-])(?:ft_launcher|ft_client|rank_monitor)(?:\.[a-z_]\w*)+")


@every_module
def test_modules_that_are_named_in_texts_exist(module: Module) -> None:
    """Texts that are run as programs, tables of lazy names, and docstrings."""
    texts = [(node, text_of(node)) for node in ast.walk(module.tree) if text_of(node)]
    names = [(node, name) for node, text in texts for name in OUR_DOTTED_NAME.findall(text)]
    wrong = [f"{module.at(node)}: {name}" for node, name in names if not exists(name) and not name.endswith(".py")]
    assert not wrong, "\n".join(wrong)


def exists(name: str) -> bool:
    """Whether it is a module, or a name that a module of ours binds."""
    part = known_part(name)
    if part == name or not part:
        return part == name
    (module,) = (module for module in MODULES if module.name == part)
    return re.search(rf"\b{name[len(part) + 1 :].split('.', maxsplit=1)[0]}\b", module.path.read_text()) is not None


def test_stacks_tell_frames_that_started_a_rank_from_frames_of_its_program() -> None:
    """Which files these are is told by their places, since a dump of stacks holds nothing else."""
    started_by = {
        *(
            "ft_client.bootstrap",
            "ft_client.rank.start.script",
            "ft_client.rank.start.function",
            "ft_launcher.__main__",
        ),
        *("ft_launcher.cli", "ft_launcher.node.zygote.fork_server", "ft_launcher.node.zygote.pool"),
        *(
            "ft_launcher.node.zygote.client",
            "ft_launcher.node.zygote.forked_rank",
            "ft_launcher.node.ranks.function_rank",
        ),
        "ft_client.rank.monitoring.stack_writer",  # of the thread that writes the dump
    }
    dump = 'Current thread 0x1 (most recent call first):\n  File "{}", line 1 in main\n'
    assert {module.name for module in MODULES if not stacks.read(dump.format(module.path)).frames} == started_by


SAME_THING = (
    "rank_monitor.contract.wire",
    "ft_launcher.job.coordinator.node_messages",
    "ft_launcher.tools.commands",
    "ft_client.integrations.nvrx_alias",
    "ft_client.integrations.lightning.memory_state",
    "ft_client.integrations.transformers",
    "ft_client.inprocess.rank_filter",
    "ft_client.preemption",
    "ft_client.errors",
)
"""Names here are those of what a record, a message or a command is about, or are another package's, or public ones."""


def test_no_name_of_a_class_or_a_file_has_two_meanings() -> None:
    """A reader who searches for a name finds one place, apart from what sends or offers the same thing.

    The files of the journal's events are named by what the events are about.
    """
    places = defaultdict(list)
    for module in MODULES:
        if not any(within(module.name, name) for name in SAME_THING):
            if module.path.name != "__init__.py" and not within(module.name, "ft_launcher.record.events"):
                places[module.path.name].append(module.name)
            for node in ast.walk(module.tree):
                if isinstance(node, ast.ClassDef):
                    places[node.name].append(module.at(node))
    wrong = [f"{name}: {', '.join(where)}" for name, where in places.items() if len(where) > 1]
    assert not wrong, "\n".join(wrong)


@every_module
def test_a_bound_is_named_max(module: Module) -> None:
    """A reader who looks for the bounds of a file searches for one word: `MAX_`."""
    names = [node.id for node in ast.walk(module.tree) if isinstance(node, ast.Name)]
    assert not [name for name in names if name.lstrip("_").startswith("MOST_")]


def is_underscored(name: str) -> bool:
    return name.startswith("_") and not name.endswith("__")


def names_of_torch(module: Module) -> set[str]:
    """The names that a module binds by its imports of torch."""
    imports = [node for node, target in module.imports() if within(target, "torch")]
    return {
        alias.asname or alias.name.split(".")[0]
        for node in imports
        if isinstance(node, (ast.Import, ast.ImportFrom))
        for alias in node.names
    }


def root_of(node: ast.AST) -> str:
    """The name at the beginning of `name.a[0].b().c`; empty: there is none."""
    while isinstance(node, (ast.Attribute, ast.Subscript, ast.Call)):
        node = node.func if isinstance(node, ast.Call) else node.value
    return node.id if isinstance(node, ast.Name) else ""


def underscored_torch_names(module: Module) -> list[str]:
    """Where underscored names are imported from torch, read off what was imported from it, or off `super()`."""
    of_torch = [(node, target) for node, target in module.imports() if within(target, "torch")]
    found = [f"{module.at(node)}: {name}" for node, name in of_torch if any(map(is_underscored, name.split(".")))]
    bound = names_of_torch(module) | ({"super"} if of_torch else set())
    for node in ast.walk(module.tree):
        if isinstance(node, ast.Attribute) and is_underscored(node.attr) and root_of(node.value) in bound:
            found.append(f"{module.at(node)}: {ast.unparse(node)}")
    return found


@every_module
def test_underscored_names_of_torch_stay_where_torch_is_adapted(module: Module) -> None:
    found = underscored_torch_names(module)
    assert module.name in ADAPT_TORCH or not found, "\n".join(found)


def rebound_in_torch(module: Module) -> list[str]:
    """Where something of torch is set, deleted or replaced, also by a name that was read off torch before."""
    bound = names_of_torch(module)
    for node in ast.walk(module.tree):
        if isinstance(node, (ast.Assign, ast.AnnAssign)) and isinstance(node.value, ast.Attribute):
            targets = node.targets if isinstance(node, ast.Assign) else [node.target]
            if root_of(node.value) in bound:
                bound |= {target.id for target in targets if isinstance(target, ast.Name)}
    found = []
    for node in ast.walk(module.tree):
        is_set = isinstance(node, (ast.Attribute, ast.Subscript)) and not isinstance(node.ctx, ast.Load)
        is_call = (
            isinstance(node, ast.Call) and called(node) in {"setattr", "delattr"} and root_of(node.args[0]) in bound
        )
        if is_call or (is_set and root_of(node) in bound):
            found.append(f"{module.at(node)}: {ast.unparse(node)}")
    return found


@every_module
def test_no_name_of_torch_is_rebound(module: Module) -> None:
    """Another program's name may be gone, or be called otherwise, in the next release. A test may rebind one."""
    found = [line.rpartition(": ")[2] for line in rebound_in_torch(module)]
    assert found == SETS_IN_TORCH.get(module.name, [])


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


MAX_PRIVATE_USES = 46
"""Uses of private names of ours in tests. The number may only become less: most of what is left shortens a limit, or
breaks a part that no public name reaches."""
OF_TORCHS_AGENT = {"_assign_worker_ranks", "_pcontext", "_remaining_restarts", "_shutdown", "_start_workers"}
"""Private names of torch's agent that ours overrides or sets."""


def private_names_of_ours() -> set[str]:
    """The underscored names that our packages bind: functions, classes, variables and attributes."""
    bound: set[str] = set()
    for module in MODULES:
        for node in ast.walk(module.tree):
            if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
                bound.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bound.add(node.id)
            elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                bound.add(node.attr)
    return set(filter(is_underscored, bound)) - OF_TORCHS_AGENT


def names_in_use(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Lines and names: attributes (but those of `self`, `os` and `torch`), what is set by a name in a text, and imports
    from our packages."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and root_of(node.value) not in {"self", "cls", "super", "os", "torch"}:
            yield node.lineno, node.attr
        elif isinstance(node, ast.Call) and called(node) in {"setattr", "delattr"}:
            yield from ((node.lineno, text_of(given).rpartition(".")[2]) for given in node.args[:2])
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] in FOLDERS:
            yield from ((node.lineno, alias.name) for alias in node.names)


def test_tests_use_no_more_private_names_than_before() -> None:
    """A test that holds a private name breaks when the inside changes, though no user would notice."""
    ours = private_names_of_ours()
    uses = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in sorted((ROOT / "tests").rglob("*.py"))
        for line, name in names_in_use(ast.parse(path.read_text()))
        if name in ours
    ]
    advice = (
        "check what a caller sees: a result, a public method, a message on the wire, a file. Give a part or a limit to"
        " what needs it as an argument, or replace a public name. An attribute that others may read gets a public name."
    )
    assert len(uses) <= MAX_PRIVATE_USES, "\n".join([advice, *uses])


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
    names = [module.name for module in MODULES if within(module.name, "rank_monitor")]
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\n" + "".join(f"import {name}\n" for name in names)
    code += "assert not {'torch', 'numpy'} & set(sys.modules)"
    run([sys.executable, "-I", "-S", "-c", code], check=True)


def test_what_forks_monitors_loads_no_large_library() -> None:
    """OpenSSL alone is a tenth of a monitor's memory."""
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r})\nimport rank_monitor.template\n"
    code += "assert not {'hashlib', '_hashlib', '_ssl', 'asyncio', 'multiprocessing'} & set(sys.modules)"
    run([sys.executable, "-I", "-S", "-c", code], check=True)
