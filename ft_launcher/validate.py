"""`ft_launcher validate`: the settings that hold, with the source of each, as YAML that --ft-cfg-path takes back."""

from __future__ import annotations

import os
import sys

import click
import yaml

from ft_launcher import command_line, options, torch_config
from ft_launcher.config import Resolved, resolve
from ft_launcher.prescan import Scan
from ft_launcher.yaml_source import SECTION
from rank_monitor.contract import config, kinds
from rank_monitor.contract.config import SourceSettings
from rank_monitor.contract.settings import to_json

_NO_SCRIPT = "(no script)"


@click.command(
    context_settings={"ignore_unknown_options": True, "allow_extra_args": True},
    help="Prints the settings that hold, and where each comes from. Takes the same options as a job, with or without "
    "its script; exits 2 when something is wrong.",
)
@click.argument("arguments", nargs=-1, type=click.UNPROCESSED)
def validate(arguments: tuple[str, ...]) -> None:
    """Reads the options as a job would; prints what holds to stdout and warnings to stderr.

    Raises:
        ConfigError: something is wrong.
    """
    parsed = command_line.parse(arguments, script_if_none=_NO_SCRIPT)
    resolved = resolve(parsed, os.environ)
    warnings = resolved.warnings
    if parsed.namespace.training_script != _NO_SCRIPT:
        warnings = torch_config.make_job(parsed, resolved, Scan(None, starts_ranks=False), os.environ).warnings
    for warning in warnings:
        print(f"ft_launcher: {warning}", file=sys.stderr)
    print(as_yaml(resolved))


def as_yaml(resolved: Resolved) -> str:
    """All settings under `fault_tolerance:`, each with its source in a comment."""
    lines = [f"{SECTION}:"]
    for attribute, group in config.GROUPS.items():
        if group is SourceSettings:
            continue
        lines.append(f"  # {attribute}")
        for key, value in to_json(getattr(resolved.settings, attribute)).items():
            lines.append(f"  {f'{key}: {_yaml_value(key, value)}':<60} # {resolved.sources[key]}")
    return "\n".join(lines)


def _yaml_value(key: str, value: object) -> str:
    if options.declaration_of(key).kind is kinds.SIGNAL and isinstance(value, int):
        return kinds.signal_name(value)
    return yaml.safe_dump(value, default_flow_style=True, width=sys.maxsize).removesuffix("...\n").strip()
