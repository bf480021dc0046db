"""Whether ranks may start as forks of one import of torch, and if not, why: in words for the log. Knows no process.

A fork has what its zygote had when it imported torch. So it must not happen where a rank would have imported it under
other conditions: each reason below is one of these.
"""

from __future__ import annotations

import ast
import os
import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from itertools import takewhile
from pathlib import Path

from rank_monitor.contract import env

_LATE = (env.SETTING_PREFIX, "TORCHELASTIC_", "TORCH_NCCL_", "NCCL_", "CUDA_", "HIP_", "ROCR_")
_LATE_NAMES = frozenset(
    {
        "GROUP_RANK",
        "GROUP_WORLD_SIZE",
        "LOCAL_RANK",
        "LOCAL_WORLD_SIZE",
        "MASTER_ADDR",
        "MASTER_PORT",
        "RANK",
        "RES_OPTIONS",
        "ROLE_NAME",
        "ROLE_RANK",
        "ROLE_WORLD_SIZE",
        "WORLD_SIZE",
        env.CURRENT_CYCLE_INFO,
        env.NCCL_COLLECTIVE_TIMEOUT,
    }
)
"""Variables that nothing reads while torch is imported: the only ones in which a rank may differ from its zygote."""

_OURS = {"ft_launcher", "ft_client", "rank_monitor", "__main__"}

_PROFILERS = {
    "NSYS_PROFILING_SESSION_ID": "nsys",
    "NV_TPS_LAUNCH_TOKEN": "ncu",
    "NV_NSIGHT_INJECTION_TRANSPORT_TYPE": "ncu",
    "CUDA_INJECTION64_PATH": "a CUDA profiler",
    "NVTX_INJECTION64_PATH": "a CUDA profiler",
}


def against_command(words: Sequence[str], environ: Mapping[str, str], orig_argv: Sequence[str]) -> str:
    """Why ranks of this command cannot be forks; empty when they can.

    Args:
        words: `[-m] SCRIPT ARGS`; empty when Python does not run them.
        orig_argv: how this interpreter was started.
    """
    if not words:
        return "--no-python: the ranks are no Python scripts"
    if environ.get("PYTHON_EXEC"):
        return "PYTHON_EXEC names another interpreter"
    if words[0] == "-":
        return "the script is read from stdin"
    for name, tool in _PROFILERS.items():
        if name in environ:
            return f"{tool} wraps the job ({name} is set): a profiler sees ranks only from their start"
    own = takewhile(lambda word: word.startswith("-") and word not in ("-m", "-c", "-"), orig_argv[1:])
    if options := [word for word in own if word != "-u"]:
        return f"the launcher's interpreter was started with {' '.join(options)}, which ranks are not"
    return ""


def against_process(threads: int, cuda: bool, device_files: Collection[str]) -> str:
    """Why a process of this state cannot be forked; empty when it can."""
    if cuda or device_files:
        return "CUDA was initialised by an import (a preloaded module?)"
    if threads > 1:
        return f"an import started {threads - 1} thread{'s' if threads > 2 else ''} (a preloaded module?)"
    return ""


def against_environment(ranks: Mapping[str, str], zygote: Mapping[str, str]) -> str:
    """Why ranks with one environment cannot be forks of a zygote that imported torch with another."""
    differing = sorted(
        name
        for name in ranks.keys() | zygote.keys()
        if ranks.get(name) != zygote.get(name) and name not in _LATE_NAMES and not name.startswith(_LATE)
    )
    return f"{', '.join(differing)}: not the same as when torch was imported" if differing else ""


class ScriptLook:
    """A look at the script, anew whenever its file has changed."""

    def __init__(self, words: Sequence[str], path: Sequence[str]) -> None:
        self._file = _file_of(words, path)
        folder = Path.cwd() if words[0] == "-m" else Path(words[0]).resolve().parent
        self._folder = Path(words[0]) if Path(words[0]).is_dir() else folder
        self._seen: tuple[int, int] | None = None
        self._reason = ""

    def against_source(self) -> str:
        """Why this script must start in an interpreter of its own, by what it says; empty when it need not."""
        if self._file is None:
            return ""
        try:
            status = self._file.stat()
            if (seen := (status.st_mtime_ns, status.st_size)) != self._seen:
                line = writes_environment_first(self._file.read_bytes())
                reason = f"line {line} of {self._file.name} sets a variable before torch is imported"
                self._reason, self._seen = reason if line else "", seen
        except OSError:
            return ""
        return self._reason

    def against_folder(self, loaded: Mapping[str, str | None]) -> str:
        """Why a script with this folder cannot be forked: a module beside it hides one that is loaded.

        Args:
            loaded: the modules of the zygote that are in no package, with their files.
        """
        try:
            with os.scandir(self._folder) as entries:
                modules = (entry for entry in entries if entry.name.endswith(".py") or entry.is_dir())
                names = {module.name.removesuffix(".py") for module in modules}
        except OSError:
            return ""
        hidden = sorted(name for name in names & loaded.keys() - _OURS if not self._is_there(name, loaded[name]))
        return f"{self._folder} has a {hidden[0]} of its own" if hidden else ""

    def _is_there(self, name: str, file: str | None) -> bool:
        """Whether the loaded module is the one in the folder, or the folder's is only a folder."""
        own = [self._folder / f"{name}.py", self._folder / name / "__init__.py"]
        return not any(path.exists() for path in own) or any(file and path == Path(file) for path in own)


def _file_of(words: Sequence[str], path: Sequence[str]) -> Path | None:
    """The source that will be run, as well as it can be found without importing anything."""
    if words[0] != "-m":
        script = Path(words[0])
        return script / "__main__.py" if script.is_dir() else script
    parts = words[1].split(".") if len(words) > 1 else [""]
    for folder in (str(Path.cwd()), *path):
        stem = Path(folder, *parts)
        for file in (stem.with_name(stem.name + ".py"), stem / "__main__.py"):
            if file.is_file():
                return file
    return None


def writes_environment_first(source: bytes) -> int:
    """The first line that writes the environment and comes before an import that may be torch's first; 0: none."""
    try:
        tree = ast.parse(source)
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return 0  # it will be told by the one who runs it
    imports = sorted(_imports(tree))
    first = min((line for line, name in imports if name == "torch"), default=sys.maxsize)
    foreign = max((line for line, name in imports if name not in sys.stdlib_module_names and line <= first), default=0)
    return min((line for line in _writes(tree) if line < foreign), default=0)


def _imports(tree: ast.AST) -> Iterator[tuple[int, str]]:
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name.partition(".")[0]) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            yield node.lineno, "" if node.level else (node.module or "").partition(".")[0]


def _writes(tree: ast.AST) -> Iterator[int]:
    for node in ast.walk(tree):
        match node:
            case ast.Call(func=ast.Attribute(attr="putenv" | "unsetenv")):
                yield node.lineno
            case (
                ast.Subscript(value=changed, ctx=ast.Store() | ast.Del())
                | ast.Call(
                    func=ast.Attribute(value=changed, attr="setdefault" | "update" | "pop" | "clear" | "popitem")
                )
            ) if _is_environ(changed):
                yield node.lineno


def _is_environ(node: ast.expr) -> bool:
    match node:
        case ast.Attribute(attr=name) | ast.Name(id=name):
            return name in {"environ", "environb"}
    return False
