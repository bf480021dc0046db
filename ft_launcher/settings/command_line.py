"""Parses a command line: cuts it where the script begins, then has torch's own parser read torch's options and ours.

`cli.py` calls `parse` for a job and for `validate`; `prescan.py` calls `cut` before torch is imported. Only arguments
before the script are read here; the script's own arguments are never looked at.

A command line is read in two steps, since argparse alone cannot do it. `cut` finds the script: the first argument that
is neither an option nor the value of one. It also brings our options to one spelling each (`--ft-key=value`), so that
torch's abbreviations keep their meaning beside ours. Then argparse reads the options, and the script with numbers in
place of its arguments.

No public API of argparse tells which options take a value, so this file uses its underscored table of options.
"""

from __future__ import annotations

import os
import re
from argparse import Action, ArgumentParser, Namespace
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

from ft_launcher.settings import options
from ft_launcher.settings.options import UsageError
from rank_monitor.contract.errors import ConfigError, one_line
from rank_monitor.contract.settings import kinds

_TORCH_VARIABLE = "PET_{}"
"""The variable from which torch takes the default of an option."""
_T = TypeVar("_T")


@dataclass(frozen=True)
class SplitCommandLine:
    """A command line, cut where the script begins.

    Attributes:
        options: the arguments before the script, with each of our options as `--ft-key=value`. Our options without an
            effect here are left out.
        command: the script (or `--`) and all that follows, unchanged.
        spelled: key of our option -> the user's last spelling, also of those without an effect here.
    """

    options: tuple[str, ...]
    command: tuple[str, ...]
    spelled: Mapping[str, str]


@dataclass(frozen=True)
class Parsed:
    """A parsed command line.

    Attributes:
        namespace: torch's options, and the script with its arguments, as argparse returns them.
        texts: key of our option -> its value as text. Options without an effect here are not in it.
        spelled: key of our option -> the user's spelling, which names the option in messages.
        from_user: torch's options that the user gave, by their names in the namespace.
    """

    namespace: Namespace
    texts: Mapping[str, str]
    spelled: Mapping[str, str]
    from_user: frozenset[str]

    def source_of(self, dest: str) -> str:
        """Returns where the value of an option of torch comes from: its flag, or its PET_ variable. For messages."""
        variable = _TORCH_VARIABLE.format(dest.upper())
        if dest not in self.from_user and variable in os.environ:
            return variable
        return "--" + dest.replace("_", "-")

    def is_from_user(self, dest: str) -> bool:
        """Whether the user gave an option of torch, on the command line or by its variable."""
        return dest in self.from_user or _TORCH_VARIABLE.format(dest.upper()) in os.environ

    def script_arguments(self) -> list[str]:
        """Returns `[-m] SCRIPT ARGS` as they follow `python -u`; empty where the ranks run another program."""
        asked = self.namespace
        if asked.no_python:
            return []
        arguments = [asked.training_script, *asked.training_script_args]
        if asked.module:
            arguments.insert(0, "-m")
        return arguments

    def error(self, dest: str, problem: str, hint: str = "See ft_launcher --help") -> ConfigError:
        """Returns the error about the value of an option of torch. The caller raises it."""
        value = getattr(self.namespace, dest)
        return ConfigError(dest, value, self.source_of(dest), problem.removesuffix("."), hint)

    def read(self, dest: str, reader: Callable[[Any], _T]) -> _T:
        """Returns what `reader` makes of the value of an option of torch.

        Raises:
            ConfigError: the reader refuses the value.
        """
        with self.errors_of(dest):
            return reader(getattr(self.namespace, dest))

    @contextmanager
    def errors_of(self, dest: str) -> Iterator[None]:
        """Context in which an error of torch is reported as one about the value of this option, with its name and
        source."""
        try:
            yield
        except (ValueError, RuntimeError, AssertionError) as error:
            raise self.error(dest, one_line(error)) from None


def cut(arguments: Sequence[str], value_follows: Callable[[str], bool]) -> SplitCommandLine:
    """Cuts a command line where the script begins, and brings our options to one spelling.

    Args:
        arguments: without the program's name.
        value_follows: returns whether the argument after an option of torch is the value of that option.

    Raises:
        UsageError: an option has our prefix and does not exist, or has no value.
    """
    found: list[str] = []
    spelled: dict[str, str] = {}
    at = 0
    while at < len(arguments) and arguments[at].startswith("-") and arguments[at] not in ("-", "--"):
        argument = arguments[at]
        flag, joined, value = argument.partition("=")
        key = options.key_of(flag)
        at += 1
        # An option of torch. The argument after it is its value, or the script.
        if key is None:
            found.append(argument)
            if value_follows(argument):
                found += arguments[at : at + 1]
                at += 1
            continue
        if not joined:
            value, taken = _value(key, flag, arguments[at:])
            at += taken
        spelled[key] = flag
        if key not in options.DONE_INSTEAD:
            found.append(f"{options.flag_of(key)}={value}")
    return SplitCommandLine(tuple(found), tuple(arguments[at:]), spelled)


def _value(key: str, flag: str, following: Sequence[str]) -> tuple[str, int]:
    """Returns the value of our option `flag` from the arguments after it, and how many arguments it took.

    The value of a switch may be left out. So `true`, `no` and so on are its value only where another argument follows,
    which can be the script: in `--ft-dry-run no train.py` the switch is off, and in `--ft-dry-run no` the script is
    named `no`.

    Raises:
        UsageError: there is no value.
    """
    if options.is_switch(key):
        if len(following) > 1 and following[0].strip().lower() in kinds.BOOLEAN_TEXTS:
            return following[0], 1
        return "true", 0
    if not following or (following[0].startswith("-") and not _is_number(following[0])):
        raise UsageError(f"{flag} needs a value", f"Write {flag}=VALUE")
    return following[0], 1


def _is_number(text: str) -> bool:
    """Returns whether a text is a number: `-1` is a value, and no option."""
    try:
        float(text)
    except ValueError:
        return False
    return True


class _Parser(ArgumentParser):
    """argparse's parser, with errors raised instead of printed."""

    # torch's --print-completion sets the name of its own program, and the completion would be for that command.
    prog = property(lambda self: "ft_launcher", lambda self, name: None)

    def error(self, message: str) -> NoReturn:
        """Raises the error that argparse would print before it exits with code 2."""
        raise UsageError(message)


def make_parser() -> ArgumentParser:
    """Returns torch's parser with our group of options. Imports torch.

    Raises:
        UsageError: a PET_ variable that torch reads as a flag is not a number.
    """
    from torch.distributed.run import get_args_parser

    try:
        torch_parser = get_args_parser()
    except ValueError as error:
        flags = sorted(f"{name}={value}" for name, value in os.environ.items() if name.startswith("PET_"))
        raise UsageError(f"a PET_ variable of a flag must be 0 or 1 ({error})", f"Look at {', '.join(flags)}") from None
    parser = _Parser(
        usage="ft_launcher [options] script.py [arguments of the script]\n"
        "       ft_launcher validate [options]    prints the settings and where each comes from\n"
        "       ft_launcher report JOURNAL...     says what the time of a job went to, and what its faults cost\n"
        "       ft_launcher status|stacks [RUN]   says what a job on this host does, and where its ranks are\n"
        "       ft_launcher top [RUN]             shows both live",
        description="torchrun's command line; ranks are watched, and restarted when they fail or hang.",
        parents=[torch_parser],
        add_help=False,
    )
    options.add_group(parser)
    return parser


def parse(arguments: Sequence[str], script_if_none: str | None = None) -> Parsed:
    """Parses a command line. Imports torch.

    Args:
        arguments: without the program's name.
        script_if_none: the script where the command line has none; None: a script is needed.

    Raises:
        ConfigError: the command line is wrong.
        SystemExit: the user asked for help, which was printed.

    Example:
        `parse(["--nproc-per-node=2", "--ft-restart-policy", "min-healthy", "train.py", "--lr", "0.1"])`: `namespace`
        has `training_script` "train.py" and `training_script_args` ["--lr", "0.1"]; `texts` is {"restart_policy":
        "min-healthy"}.
    """
    parser = make_parser()
    table = parser._option_string_actions
    halves = cut(arguments, lambda argument: _value_follows(table, argument))
    command = halves.command
    if not command and script_if_none is not None:
        command = (script_if_none,)
    namespace = _read(parser, halves.options, command)
    if getattr(namespace, "run_path", False):  # --run-path wins over --no-python and -m, as in torch
        namespace.no_python = namespace.module = False
    return Parsed(
        namespace=namespace,
        texts={key: _text(vars(namespace)[f"ft_{key}"]) for key in halves.spelled if key in options.GROUP_OF},
        spelled=halves.spelled,
        from_user=frozenset(_dests(table, halves.options)),
    )


def _text(value: str | list[str]) -> str:
    """Returns the value of an option as text. The values of an option that can be repeated are joined by semicolons."""
    if isinstance(value, str):
        return value
    return ";".join(value)


def _read(parser: ArgumentParser, before: Sequence[str], command: Sequence[str]) -> Namespace:
    """Has argparse read the options and the script. Returns its namespace.

    argparse gets a number in place of each argument of the script, and the arguments are put back afterwards: argparse
    would refuse an argument that looks like an ambiguous abbreviation, although it belongs to the script. A bare `--`
    stays, since argparse gives it a meaning.
    """
    if command[:1] == ("--",):
        place_of_arguments = 2
    else:
        place_of_arguments = 1
    script, arguments = command[:place_of_arguments], command[place_of_arguments:]
    stand_ins = [argument if argument == "--" else str(number) for number, argument in enumerate(arguments)]
    try:
        namespace = parser.parse_args([*before, *script, *stand_ins])
    except UsageError as error:
        raise _explained(error, parser, before, bool(script) and script != ("--",)) from None
    returned = namespace.training_script_args
    namespace.training_script_args = [
        argument if argument == "--" else arguments[int(argument)] for argument in returned
    ]
    return namespace


def _explained(error: UsageError, parser: ArgumentParser, before: Sequence[str], has_script: bool) -> ConfigError:
    """Returns the parser's error in the user's terms: with the source of a value, and without words of argparse."""
    table = parser._option_string_actions
    about = re.match(r"argument (\S+): (.*)", error.problem, re.DOTALL)
    if about:
        action = table.get(about[1].split("/")[0])
    else:
        action = None
    if about and action:
        variable = _TORCH_VARIABLE.format(action.dest.upper())
        if action.dest not in _dests(table, before) and variable in os.environ:
            return ConfigError(action.dest, os.environ[variable], variable, about[2], "Change or unset it")
        return UsageError(f"{about[1]}: {about[2]}")
    if not has_script and "required" in error.problem:
        return UsageError("no script given", "Usage: ft_launcher [options] script.py [arguments]")
    return error


def _matches(table: Mapping[str, Action], argument: str) -> list[Action]:
    """Returns the options of torch that argparse may take an argument for: exact, abbreviated, or joined like `-r3`."""
    flag = argument.partition("=")[0]
    if not argument.startswith("--"):
        if argument[:2] in table:
            return [table[argument[:2]]]
        return []
    if flag in table:
        return [table[flag]]
    return [action for name, action in table.items() if name.startswith(flag) and options.key_of(name) is None]


def _value_follows(table: Mapping[str, Action], argument: str) -> bool:
    """Returns whether the argument after an option of torch is the value of that option.

    Raises:
        UsageError: there is no such option.
    """
    matches = _matches(table, argument)
    if not matches:
        raise options.unknown_option(argument.partition("=")[0], (name for name in table if name.startswith("--")))
    if argument.startswith("--"):
        return "=" not in argument and any(action.nargs != 0 for action in matches)
    # Joined short options, as in `-mr 3`: only the last one may take its value from the next argument.
    for place, letter in enumerate(argument[1:], start=2):
        action = table.get("-" + letter)
        if action is None or action.nargs != 0:
            return action is not None and place == len(argument)
    return False


def _dests(table: Mapping[str, Action], arguments: Sequence[str]) -> set[str]:
    """Returns the options of torch among these arguments, by their names in the namespace."""
    return {
        action.dest
        for argument in arguments
        if argument.startswith("-") and len(argument) > 1 and not argument.startswith("--ft-")
        for action in _matches(table, argument)
    }
