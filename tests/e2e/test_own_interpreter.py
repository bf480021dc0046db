"""A rank has no modules of the launcher, no name of ours in the way of the user's, and hardly a frame of ours."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.program import output_of

PROBE = """
import sys
modules = sorted(sys.modules)
import inspect, json, logging, os
loggers = sorted(logging.root.manager.loggerDict)
frames = [[frame.filename, frame.function] for frame in inspect.stack()]
sys.path.insert(0, "vendor")
import click, ft_client.rank.monitoring.link, ft_launcher.cli, psutil, rank_monitor.contract, yaml
from ft_client.rank.monitoring import link
found = [click, ft_client, ft_client.rank.monitoring.link, link, ft_launcher.cli, psutil]
found += [rank_monitor, rank_monitor.contract, yaml]
result = {"modules": modules, "loggers": loggers, "frames": frames, "found": [module.__file__ for module in found]}
result["resolver"] = os.environ.get("RES_OPTIONS")
json.dump(result, open(sys.argv[1], "w"))
"""
VENDORED = (
    *(
        "click/__init__.py",
        "ft_client/__init__.py",
        "ft_client/rank/monitoring/__init__.py",
        "ft_client/rank/monitoring/link.py",
    ),
    *("ft_launcher/__init__.py", "ft_launcher/cli.py", "psutil.py"),
    *("rank_monitor/__init__.py", "rank_monitor/contract.py", "yaml.py"),
)
BY_API = """
import sys
from ft_launcher import LaunchConfig, launch

if __name__ == "__main__":
    launch("probe.py", LaunchConfig(nproc_per_node=1, warm_start="on"))("found")
"""
LAUNCHER = ("-m", "ft_launcher", "--ft-preload=colorsys")
WAYS = {
    "forked": (*LAUNCHER, "--ft-warm-start=on", "probe.py", "found"),
    "forked, a module": (*LAUNCHER, "--ft-warm-start=on", "-m", "probe", "found"),
    "exec": (*LAUNCHER, "--ft-warm-start=off", "probe.py", "found"),
    "exec, a module": (*LAUNCHER, "--ft-warm-start=off", "-m", "probe", "found"),
    "forked by a zygote that is a program": ("program.py",),
}
GIVEN = "timeout:9"


@pytest.fixture(scope="module")
def with_torch(tmp_path_factory: pytest.TempPathFactory) -> set[str]:
    """The modules of a fresh interpreter that has imported torch."""
    code = "import torch, sys, json; print(json.dumps(list(sys.modules)))"
    return set(json.loads(output_of([sys.executable, "-c", code], tmp_path_factory.mktemp("plain"))))


@pytest.mark.parametrize("way", WAYS)
def test_what_a_script_finds_of_ours(tmp_path: Path, with_torch: set[str], way: str) -> None:
    (tmp_path / "probe.py").write_text(PROBE)
    (tmp_path / "program.py").write_text(BY_API)
    for name in VENDORED:
        file = tmp_path / "vendor" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text("")
    is_module = way.endswith("module")
    given = {"RES_OPTIONS": GIVEN} if is_module else {}
    output_of([sys.executable, *WAYS[way]], tmp_path, **given)
    found: dict[str, Any] = json.loads((tmp_path / "found").read_text())

    assert all(Path(file).is_relative_to(tmp_path / "vendor") for file in found["found"]), found["found"]

    told = found["resolver"]
    assert told == given.get("RES_OPTIONS"), "the bound on the launcher's own look-ups must not reach the ranks"

    by_python = {"runpy", "pkgutil"} | ({"probe"} if is_module else set())
    beyond = set(found["modules"]) - with_torch - by_python
    preloaded = {"colorsys"} if way.startswith("forked") and "program" not in way else set()
    assert beyond == {"faulthandler"} | preloaded, "the client dumps stacks; everything else is the launcher's"

    assert not [name for name in found["loggers"] if name.startswith("ft_launcher")], found["loggers"]

    files = [Path(file).name for file, function in found["frames"] if function == "<module>"]
    assert files[0] == "probe.py"
    assert len(found["frames"]) - 1 - (2 if is_module else 0) <= 3, found["frames"]
