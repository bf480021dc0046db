"""Merges the settings of a job: defaults < YAML < environment < command line, with the source of each.

`cli.py` and `python_api.py` call `resolve`. The contract declares which settings exist and how a value is read;
`options.py` has their names; `command_line.py` has parsed the command line. Each value keeps its source, so that an
error or a warning can say where to change it.

All wrong values of all sources are reported at once, overridden ones included: a user who corrects one after the other
would wait for each launch.

Of a YAML file one mapping is ours, at any depth. Programs around the launcher read other parts of the same file.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import yaml

from ft_launcher.settings import options
from ft_launcher.settings.command_line import Parsed
from rank_monitor.contract import env
from rank_monitor.contract.errors import ConfigError, nearest, one_line
from rank_monitor.contract.settings import config, kinds
from rank_monitor.contract.settings.config import Settings, SourceSettings
from rank_monitor.contract.settings.declaration import parse
from rank_monitor.contract.wire.foreign import MAX_USER_FILE_BYTES, read_file

DEFAULT = "default"
"""The source of a value that nobody set."""
SECTION = "fault_tolerance"
"""The name of our mapping in a YAML file."""
_STOP_VARIABLE = "TORCH_ELASTIC_SHUTDOWN_TIMEOUT"
"""torch's variable for `--shutdown-timeout`."""
_MISTYPED = 0.85
"""The similarity from which on a variable is taken for a mistyped name of a setting: one or two letters differ. Other
programs have variables with our prefix, and a lower value would warn about these."""


@dataclass(frozen=True)
class RawSetting:
    """One setting as its source has it: text, or an object from YAML."""

    key: str
    raw: object
    source: str


@dataclass(frozen=True)
class Resolved:
    """The merged settings.

    Attributes:
        settings: the values.
        sources: key -> where its value is from: an option, a variable, a file, or `default`.
        warnings: lines about settings without effect.
    """

    settings: Settings
    sources: Mapping[str, str]
    warnings: tuple[str, ...]


def keys_set(sources: Mapping[str, str]) -> set[str]:
    """Returns the keys of the settings that somebody set: those whose source is not the default."""
    return {key for key, source in sources.items() if source != DEFAULT}


class SeveralErrors(ConfigError):
    """More than one value is wrong. The message has a line for each."""

    def __init__(self, errors: Sequence[ConfigError]) -> None:
        first = errors[0]
        super().__init__(first.key, first.value, first.source, first.problem, first.hint)
        self.args = ("\n".join(["several values are wrong:", *(f"  {error}" for error in errors)]),)


class NoSuchFile(ConfigError):
    """The YAML file does not exist."""


def resolve(parsed: Parsed, environ: Mapping[str, str], notes: Sequence[str] = ()) -> Resolved:
    """Merges all sources.

    Args:
        parsed: the command line, or the keywords of `LaunchConfig` in that form.
        environ: the environment.
        notes: warnings that come first.

    Raises:
        ConfigError: names every wrong value of any source, also of one that another source overrides.
    """
    command_line = [RawSetting(key, text, parsed.spelled[key]) for key, text in parsed.texts.items()]
    environment, warnings = from_environment(environ)
    without_effect = [(flag, key) for key, flag in parsed.spelled.items() if key not in parsed.texts]
    warnings = [*notes, *(options.about_accepted(*option) for option in without_effect), *warnings]
    # The settings that name the YAML file are read first. They come from environment and command line only.
    where, _ = _read_all(
        setting for setting in (*environment, *command_line) if options.GROUP_OF[setting.key] is SourceSettings
    )
    has_others = any(options.GROUP_OF[setting.key] is not SourceSettings for setting in (*environment, *command_line))
    from_yaml, more_warnings, errors = _from_yaml(where, has_others)
    layers = [*_stop_timeouts(parsed, environ), *from_yaml, *environment, *command_line]
    found, more_errors = _read_all(layers)
    errors = [*errors, *more_errors]
    if len(errors) == 1:
        raise errors[0]
    if errors:
        raise SeveralErrors(errors)
    warnings += [*more_warnings, *_about_values(layers, found)]
    found = {**_implied(found), **found}
    sources = {key: DEFAULT for key in options.GROUP_OF} | {key: source for key, (_, source) in found.items()}
    settings = _build({key: value for key, (value, _) in found.items()}, sources)
    return Resolved(settings, sources, tuple(warnings))


def _stop_timeouts(parsed: Parsed, environ: Mapping[str, str]) -> list[RawSetting]:
    """Returns torch's `--shutdown-timeout` and its variable, as the lowest sources of our `workers_stop_timeout`."""
    option = getattr(parsed.namespace, "shutdown_timeout", None), parsed.source_of("shutdown_timeout")
    asked = ((environ.get(_STOP_VARIABLE), _STOP_VARIABLE), option)
    return [RawSetting("workers_stop_timeout", raw, source) for raw, source in asked if raw is not None]


def _read_all(layers: Iterable[RawSetting]) -> tuple[dict[str, tuple[Any, str]], list[ConfigError]]:
    """Returns key -> value and source, where the last layer wins, and an error for each value that cannot be read."""
    found: dict[str, tuple[Any, str]] = {}
    errors = []
    for setting in layers:
        try:
            value = parse(options.GROUP_OF[setting.key], setting.key, setting.raw, setting.source)
        except ConfigError as error:
            errors.append(error)
        else:
            found[setting.key] = (value, setting.source)
    return found, errors


def from_environment(environ: Mapping[str, str]) -> tuple[list[RawSetting], list[str]]:
    """Returns the values of `FT_<KEY>` variables, and warnings about variables that have no effect."""
    found: list[RawSetting] = []
    warnings = []
    for name, text in environ.items():
        if not name.startswith(env.SETTING_PREFIX) or name in env.NOT_SETTINGS:
            continue
        key = options.canonical(name.removeprefix(env.SETTING_PREFIX))
        if key is None:
            known = map(env.of_setting, (*options.GROUP_OF, *options.ALIASES, *options.DONE_INSTEAD))
            meant = nearest(name.upper(), known, _MISTYPED)
            if meant:  # else it is probably another program's, such as FT_HOME
                warnings.append(f"the variable {name} is not a setting and does nothing{meant}")
        elif key in options.DONE_INSTEAD:
            warnings.append(options.about_accepted(name, key))
        else:
            found.append(RawSetting(key, text, name))
    paths = [RawSetting("cfg_path", environ[name], name) for name in env.CFG_PATH_SPELLINGS if environ.get(name)]
    return [*reversed(paths), *found], warnings


def _from_yaml(
    where: Mapping[str, tuple[Any, str]], has_others: bool
) -> tuple[list[RawSetting], list[str], list[ConfigError]]:
    """Returns the values in the YAML file that `where` names, with warnings and errors.

    Args:
        where: the settings that name the file, with their sources.
        has_others: whether options or variables set something as well. Then the file may be empty: some batch scripts
            have all settings in variables, and must name a file.
    """
    source = SourceSettings(**{key: value for key, (value, _) in where.items()})
    if source.cfg_path is None:
        return [], [], []
    named_by = where["cfg_path"][1]
    try:
        mapping = yaml_section(source.cfg_path, named_by, source.ignore_missing_cfg, may_be_empty=has_others)
    except NoSuchFile as missing:
        if named_by in env.CFG_PATH_SPELLINGS:  # NeMo-Run's batch scripts name a file that nothing writes
            return [], [f"{missing.problem}: {source.cfg_path}, named by {named_by}; it is left out"], []
        return [], [], [missing]
    except ConfigError as error:
        return [], [], [error]
    tolerant = source.allow_unknown_keys or mapping.get("allow_unknown_keys") is True
    found: list[RawSetting] = []
    warnings: list[str] = []
    errors: list[ConfigError] = []
    for name, value in mapping.items():
        key = options.canonical(str(name), in_yaml=True)
        if key is None or key == "cfg_path":
            problem = f"is not a setting{nearest(str(name), options.GROUP_OF)}"
            hint = "Remove it; --ft-allow-unknown-keys makes this a warning"
            if tolerant:
                warnings.append(f"{name} in {source.cfg_path} {problem}")
            else:
                errors.append(ConfigError(str(name), value, source.cfg_path, problem, hint))
        elif key not in options.GROUP_OF:
            warnings.append(options.about_accepted(f"{name} in {source.cfg_path}", key))
        else:
            found.append(RawSetting(key, value, source.cfg_path))
    return found, warnings, errors


def yaml_section(path: str, named_by: str, ignore_missing: bool, may_be_empty: bool = False) -> Mapping[Any, Any]:
    """Returns the first mapping named `fault_tolerance` in a file, at any depth, in the order of the file.

    Args:
        path: the file.
        named_by: the option or variable that names it, for errors.
        ignore_missing: whether a missing file or mapping counts as empty.
        may_be_empty: whether a file with nothing but comments counts as empty.

    Raises:
        NoSuchFile: the file does not exist.
        ConfigError: the file cannot be read, is not YAML, is not a mapping, or has no such mapping.
    """
    try:
        document = yaml.safe_load(read_file(path, MAX_USER_FILE_BYTES, follow_link=True).decode("utf-8"))
    except (FileNotFoundError, NotADirectoryError):
        if ignore_missing:
            return {}
        hint = "Check the path, or add --ft-ignore-missing-cfg"
        raise NoSuchFile("cfg_path", path, named_by, "there is no such file", hint) from None
    except OSError as error:
        hint = "Name a regular file that this user can read"
        raise ConfigError("cfg_path", path, named_by, f"cannot be read: {error.strerror or error}", hint) from None
    except (yaml.YAMLError, UnicodeDecodeError, RecursionError, ValueError) as error:
        hint = "Correct the file"
        raise ConfigError("cfg_path", path, named_by, f"is not YAML: {_yaml_problem(error)}", hint) from None
    return _find_section(document, path, named_by, ignore_missing or (may_be_empty and document is None))


def _find_section(document: Any, path: str, named_by: str, ignore_missing: bool) -> Mapping[Any, Any]:
    """Returns our mapping in a document.

    Raises:
        ConfigError: the document is not a mapping, or has no mapping of our name.
    """
    hint = f"Put the settings under `{SECTION}:`"
    if isinstance(document, list):
        raise ConfigError("cfg_path", path, named_by, "is a list, not a mapping", hint)
    if document is not None and not isinstance(document, Mapping):
        raise ConfigError("cfg_path", path, named_by, "is a single value, not a mapping", hint)
    found = list(_all_sections(document, set()))
    for ours in found:
        if isinstance(ours, Mapping):
            return ours
    if found and found[0] is not None:
        raise ConfigError("cfg_path", path, named_by, f"`{SECTION}` in it is not a mapping of keys to values", hint)
    if found or ignore_missing:
        return {}
    raise ConfigError("cfg_path", path, named_by, f"has no mapping named `{SECTION}`", hint)


def _all_sections(node: Any, seen: set[int]) -> Iterator[Any]:
    """Yields everything that has our name. `seen` has the nodes on the way: by an anchor a mapping of YAML can contain
    itself."""
    if not isinstance(node, (Mapping, list)) or id(node) in seen:
        return
    seen.add(id(node))
    inner = node
    if isinstance(node, Mapping):
        inner = list(node.values())
        if SECTION in node:
            yield node[SECTION]
    for part in inner:
        yield from _all_sections(part, seen)


def _yaml_problem(error: Exception) -> str:
    """Returns what YAML says of an error, in one line, with the number of the line."""
    if isinstance(error, yaml.MarkedYAMLError) and error.problem_mark:
        return f"{error.problem} in line {error.problem_mark.line + 1}"
    return one_line(error)


def _implied(found: Mapping[str, tuple[Any, str]]) -> dict[str, tuple[Any, str]]:
    """Returns defaults that depend on another setting, as key -> value and source."""
    alias, source = found.get("alias_nvrx", (False, ""))
    if alias:
        source = f"default with alias of {source}"
        return {
            "preempted_exit_code": (config.PREEMPTED_UNDER_ALIAS, source),
            "preload": (config.PRELOAD_UNDER_ALIAS, source),
        }
    return {}


def _build(values: Mapping[str, Any], sources: Mapping[str, str]) -> Settings:
    """Returns the settings. Groups are built last, since a group checks its values against each other.

    Raises:
        ConfigError: two values do not go together; with the source of one.
    """
    groups = {
        attribute: group(**{key: value for key, value in values.items() if options.GROUP_OF[key] is group})
        for attribute, group in config.GROUPS.items()
    }
    try:
        return Settings(**groups)
    except ConfigError as error:
        raise ConfigError(error.key, error.value, sources[error.key], error.problem, error.hint) from None


def _about_values(layers: Iterable[RawSetting], found: Mapping[str, tuple[Any, str]]) -> list[str]:
    """Returns warnings about settings without effect, and about `none` where that is not a value."""
    winners = {setting.key: setting.raw for setting in layers}
    warnings = []
    for key, (value, source) in found.items():
        instead = options.declaration_of(key).instead
        if instead:
            warnings.append(f"{key} (from {source}) is accepted and does nothing here: {instead}")
        elif kinds.means_none(winners[key]) and value not in (None, (), {}, (kinds.NONE,)):
            warnings.append(f"{key} (from {source}) cannot be none; its default {value} holds")
    return warnings
