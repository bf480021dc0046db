"""`ft_launcher validate`: prints the merged settings, with the source of each, as YAML that --ft-cfg-path accepts.

`cli.py` runs it. It starts no training and asks no other node. Look-ups of names that each restart would wait for are
warnings (`look_ups.py`).

The settings are merged by the same function as for a job (`settings/sources.py: resolve`), so an option that is wrong
here is wrong there, with the same message and the exit code 2. With a script, what depends on the script is checked as
well: whether its ranks can be forks.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import click
import yaml

from ft_launcher.settings import command_line, job_settings, options, prescan
from ft_launcher.settings.prescan import Scan
from ft_launcher.settings.sources import SECTION, Resolved, resolve
from ft_launcher.tools.commands import look_ups
from rank_monitor.contract.settings import config, kinds
from rank_monitor.contract.settings.config import SourceSettings, StartSettings
from rank_monitor.contract.settings.declaration import to_json

_NO_SCRIPT = "(no script)"
"""Stands for the script where the command line has none."""


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    help="Prints the settings that hold, and where each comes from. Takes the same options as a job, with or without "
    "its script; exits 2 when something is wrong.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def validate(arguments: tuple[str, ...]) -> None:
    """Reads the options as a job does. Prints the settings to stdout, and warnings to stderr.

    Raises:
        ConfigError: an option or setting is wrong.
    """
    parsed = command_line.parse(arguments, script_if_none=_NO_SCRIPT)
    resolved = resolve(parsed, os.environ)
    warnings = resolved.warnings
    if parsed.namespace.training_script != _NO_SCRIPT:
        warnings = job_settings.make_job(parsed, resolved, Scan(None, starts_ranks=False), os.environ).warnings
    for warning in (*warnings, *look_ups.findings(os.environ)):
        print(f"ft_launcher: {warning}", file=sys.stderr)
    against_forks = ""
    if parsed.namespace.training_script != _NO_SCRIPT:
        against_forks = prescan.scan(arguments, os.environ).against_forks
    note = preloading(resolved.settings.start, against_forks, parsed.namespace.max_restarts)
    print(as_yaml(resolved, {"preload": note}))


def preloading(start: StartSettings, against_forks: str, restarts: int) -> str:
    """Returns what the setting `preload` will do, in words, as far as that is known before a run.

    Args:
        against_forks: why ranks cannot be forked; empty: they can, as far as that is known.
        restarts: how many restarts the job may make.
    """
    if start.warm_start == "off":
        against_forks = "--ft-warm-start=off"
    if against_forks:
        return f"nothing is imported before ranks start, since they start by exec: {against_forks}"
    named = f"imported before ranks are forked: {', '.join(('torch', *start.preloaded))}"
    if not start.learns_modules:
        return named
    if restarts == 0:
        return f"{named}; no more is learned, since there are no restarts"
    return f"{named}; from the second cycle on also what the ranks of the first one import after torch"


def as_yaml(resolved: Resolved, notes: Mapping[str, str]) -> str:
    """Returns all settings under `fault_tolerance:`, each with its source in a comment.

    Args:
        notes: setting -> what follows from it, for a comment below the setting.
    """
    lines = [f"{SECTION}:"]
    for attribute, group in config.GROUPS.items():
        if group is SourceSettings:
            continue
        lines.append(f"  # {attribute}")
        for key, value in to_json(getattr(resolved.settings, attribute)).items():
            lines.append(f"  {f'{key}: {_yaml_value(key, value)}':<60} # {resolved.sources[key]}")
            if key in notes:
                lines.append(f"  # {key}: {notes[key]}")
    return "\n".join(lines)


def _yaml_value(key: str, value: object) -> str:
    """Returns a value in YAML, on one line."""
    if options.declaration_of(key).kind is kinds.SIGNAL and isinstance(value, int):
        return kinds.signal_name(value)
    # One line, since the source follows on it. YAML ends a lone scalar with its end-of-document mark, which is removed.
    return yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("...\n").strip()
