"""The events of the journal: one frozen dataclass each, by whom they are about. Pure.

docs/journal.md is made of them by `make docs`. Each event is named once, in its module; all of them are names of this
package, too.
"""
# ruff: noqa: F403

from ft_launcher.record.events.cycle import *
from ft_launcher.record.events.event import *
from ft_launcher.record.events.in_process import *
from ft_launcher.record.events.job import *
from ft_launcher.record.events.memory import *
from ft_launcher.record.events.rank import *
