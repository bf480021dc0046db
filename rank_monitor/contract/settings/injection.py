"""A fault on purpose, as text and as a value: what happens, to which rank, and when. Pure.

Example: `rank:2,kind:sigkill,step:12`; several faults are separated by `;`. Each fault has a `kind` and further parts:
which rank (`rank`, `node`), when (`step`, `section`, `delay`, `mtbf`, `p`, `cycle`), and how (`code`, `factor`, `for`,
`interface`). Launcher and client read the same text. The client carries a fault out in the rank; the faults of
`OF_SYSTEM` are carried out by the launcher of the rank's node, which the rank tells when it is time
(`InjectionReport`).
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from rank_monitor.contract.errors import nearest
from rank_monitor.contract.settings import kinds
from rank_monitor.contract.wire.json_record import read_record

IN_MAIN_THREAD = ("exception", "base_exception", "sleep", "livelock", "oom", "device_error")
"""Kinds that happen in the training's own code, in the main thread."""
SIGNALS = ("sigkill", "sigterm", "sigint", "sigsegv", "sigabrt", "sigstop")
OF_SYSTEM = ("kill_monitor", "kill_zygote", "kill_agent", "cut_network")
"""Kinds that the launcher carries out, on the node of the rank."""
KINDS = (*SIGNALS, "exit", *IN_MAIN_THREAD, "gil_sleep", "straggle", "nan", *OF_SYSTEM)
RANDOM, ALL, ANY = "random", "all", "any"

OTHER_NAMES = {
    "rank_killed": "sigkill",
    "rank_hung": "sigstop",
    "baseexception": "base_exception",
    "exit_code": "exit",
    "workload_exc": "exception",
    "os_abort": "sigabrt",
    "segfault": "sigsegv",
    "lock_gil": "gil_sleep",
    "gpu_error": "device_error",
    "gpu_sleep": "sleep",
    "async_exc": "exception",
    "signal_exc": "exception",
}
"""Other spellings, and the names in the tools of other packages -> kind."""
OF_RANDOM = ("rank_killed", "rank_hung")
"""The kinds from which `random` draws."""

_ONLY_FOR = {
    "code": ("exit",),
    "factor": ("straggle",),
    "interface": ("cut_network",),
    "for": ("sleep", "gil_sleep", "livelock", "straggle"),
}
"""Part -> the only kinds that it may be given with."""
_NEEDED = {"exit": "code", "straggle": "factor", "cut_network": "interface"}
"""Kind -> the part that it must have."""
_FORM = "kind:KIND,PART:VALUE,... as in kind:sigkill,rank:2,step:12"


@dataclass(frozen=True)
class Injection:
    """A fault on purpose. Parts that the text does not have are None, or have their default.

    Attributes:
        kind: one of `KINDS`, or `random`.
        name: the user's word for the kind.
        text: the whole text of the fault.
        rank: a number, `random` or `all`.
        node: the fault is that node's first rank's; None: `rank` says whose.
        delay_s: seconds after the start of the rank.
        step: the training's iteration.
        section: the section that must be open.
        probability: of the fault at each step, above 0 and up to 1.
        mtbf_s: mean seconds between faults, drawn at random.
        seed: of what is drawn.
        cycle: the number of the cycle, or `any`.
        code: the exit code, of kind `exit`.
        factor: how much slower, of kind `straggle`.
        interface: the network interface, of kind `cut_network`.
        for_s: how many seconds the fault lasts; None: without end.
    """

    kind: str
    name: str
    text: str
    rank: int | str = RANDOM
    node: int | None = None
    delay_s: float | None = None
    step: int | None = None
    section: str | None = None
    probability: float | None = None
    mtbf_s: float | None = None
    seed: str | None = None
    cycle: int | str = 0
    code: int = 1
    factor: float = 1.0
    interface: str = ""
    for_s: float | None = None

    def __str__(self) -> str:
        return self.text

    def name_of(self, kind: str) -> str:
        """Returns the name of `kind` for the log line: the user's own word for it, or that of `OF_RANDOM` where the
        user asked for `random`."""
        if self.kind == kind:
            return self.name
        return next(name for name in OF_RANDOM if OTHER_NAMES[name] == kind)


def parse_all(text: str) -> tuple[Injection, ...]:
    """Reads the faults in a text, separated by `;`.

    Raises:
        ValueError: a fault is invalid; the text names it and the reason.
    """
    parts = [part for part in text.split(";") if not kinds.means_none(part)]
    found = []
    for part in parts:
        try:
            found.append(parse(part))
        except ValueError as problem:
            if len(parts) == 1:
                raise
            raise ValueError(f"{part.strip()}: {problem}") from None
    return tuple(found)


def parse(text: str) -> Injection:
    """Reads one fault.

    Raises:
        ValueError: a part is invalid; the text names it and the known ones.
    """
    parts = _parts(text)
    if "kind" not in parts:
        raise ValueError(f"kind is missing; kinds: {', '.join(KINDS)}")
    kind = kind_of(parts["kind"])
    for part, fitting in _ONLY_FOR.items():
        if part in parts and kind not in fitting:
            raise ValueError(f"{part} is for kind {' or '.join(fitting)}, not {kind}")
    needed = _NEEDED.get(kind)
    if needed and needed not in parts:
        raise ValueError(f"kind {kind} needs {needed}:VALUE")
    for first, second in (("delay", "mtbf"), ("rank", "node")):
        if first in parts and second in parts:
            raise ValueError(f"{first} and {second} exclude each other")
    values: dict[str, object] = {}
    for part, value in parts.items():
        field, reader, form = _READERS[part]
        try:
            values[field] = reader(value)
        except ValueError:
            raise ValueError(f"{part}:{value} is not a valid {form}") from None
    return Injection(name=parts["kind"], text=text.strip(), **values)  # type: ignore[arg-type]


def kind_of(name: str) -> str:
    """Returns the kind with this name, in upper or lower case, with `-`, `_` or a space between words.

    Raises:
        ValueError: no kind has this name; the text names the known kinds.
    """
    normalized = "_".join(name.lower().replace("-", " ").replace("_", " ").split())
    kind = OTHER_NAMES.get(normalized, normalized)
    if kind not in (*KINDS, RANDOM):
        known = (*KINDS, RANDOM, *OTHER_NAMES)
        raise ValueError(f"no kind is named {name!r}{nearest(normalized, known)}; kinds: {', '.join(known)}")
    return kind


def _parts(text: str) -> dict[str, str]:
    """Returns the parts of a fault by name. Raises ValueError: one has no value, is unknown, or is given twice."""
    found: dict[str, str] = {}
    for part in (part for part in text.split(",") if part.strip()):
        name, colon, value = (piece.strip() for piece in part.partition(":"))
        name = name.lower()
        if not colon or not value:
            raise ValueError(f"{part.strip()!r} is not PART:VALUE")
        if name not in _READERS:
            raise ValueError(f"there is no part {name!r}{nearest(name, _READERS)}; parts: {', '.join(_READERS)}")
        if name in found:
            raise ValueError(f"{name} is given twice")
        found[name] = value
    return found


def _count_or(*names: str) -> Callable[[str], object]:
    """Returns a reader of a whole number or one of these words."""

    def read(value: str) -> object:
        if value.lower() in names:
            return value.lower()
        return kinds.COUNT.read(value)

    return read


def _probability(value: str) -> object:
    number = kinds.SECONDS_ABOVE_ZERO.read(value)
    if float(value) > 1:
        raise ValueError
    return number


_READERS: dict[str, tuple[str, Callable[[str], object], str]] = {
    "kind": ("kind", kind_of, ""),
    "rank": ("rank", _count_or(RANDOM, ALL), "rank: a number, random or all"),
    "node": ("node", kinds.COUNT.read, "node: a number"),
    "step": ("step", kinds.COUNT.read, "step: a whole number"),
    "section": ("section", str, ""),
    "delay": ("delay_s", kinds.SECONDS.read, "time in seconds"),
    "mtbf": ("mtbf_s", kinds.SECONDS_ABOVE_ZERO.read, "time in seconds above 0"),
    "p": ("probability", _probability, "probability above 0 and up to 1"),
    "seed": ("seed", str, ""),
    "cycle": ("cycle", _count_or(ANY), "cycle: a number or any"),
    "code": ("code", kinds.EXIT_CODE.read, "exit code from 0 to 255"),
    "factor": ("factor", kinds.FACTOR.read, "number of at least 1"),
    "for": ("for_s", kinds.SECONDS_ABOVE_ZERO.read, "time in seconds above 0"),
    "interface": ("interface", str, ""),
}
"""Part -> field, reader, and the description of its value for an error."""


def _read(raw: object) -> tuple[str, ...]:
    if isinstance(raw, (list, tuple)):
        texts = raw
    else:
        texts = [raw]
    written = [str(text) for text in texts if text is not None]
    return tuple(map(str, parse_all(";".join(written))))


SETTING = kinds.Kind(_FORM, _read)
"""The kind of the setting: one text or several, each with one or several faults. The value has one text per fault."""


# A rank reports a fault to its launcher before the fault happens, by one datagram to a socket beside that of its
# monitor: a process that dies of SIGKILL reports nothing afterwards.


def socket_beside(monitor_socket: Path) -> Path:
    """Returns the path of the socket at which the launcher of a node receives reports of faults on purpose."""
    return monitor_socket.with_name("inject")


@dataclass(frozen=True)
class InjectionReport:
    """The report that a fault happens now on this rank. The launcher records it, and carries out those of the system.

    Attributes:
        fault: the text of the fault.
        rank, local_rank: of the sender.
        at: where the training is, in words.
    """

    fault: str
    rank: int
    local_rank: int
    at: str

    def encode(self) -> bytes:
        """Returns the report as one datagram."""
        return json.dumps(vars(self)).encode()

    @classmethod
    def decode(cls, data: bytes) -> InjectionReport:
        """Reads the datagram that `encode` made.

        Raises:
            ProtocolError: the bytes are no such datagram.
        """
        return read_record(cls, data)
