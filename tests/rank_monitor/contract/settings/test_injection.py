"""The text of a fault on purpose: what it means, and one message for each thing that can be wrong."""

from __future__ import annotations

import dataclasses

import pytest

from rank_monitor.contract.errors import ConfigError, ProtocolError
from rank_monitor.contract.settings import injection
from rank_monitor.contract.settings.config import StartSettings
from rank_monitor.contract.settings.declaration import parse as parse_setting
from rank_monitor.contract.settings.injection import Injection, InjectionReport, parse, parse_all

MEANINGS = [
    ("kind:sigkill", {}),
    ("rank:2,kind:sigkill,step:12", {"rank": 2, "step": 12}),
    (" RANK:All , KIND:SIGKILL ,", {"rank": "all"}),
    ("rank:random,kind:sigkill,cycle:any,seed:7", {"rank": "random", "cycle": "any", "seed": "7"}),
    ("node:1,kind:sigkill,delay:1.5,cycle:2", {"node": 1, "delay_s": 1.5, "cycle": 2}),
    ("kind:sigkill,mtbf:600,section:a:b", {"mtbf_s": 600.0, "section": "a:b"}),
    ("kind:sigkill,p:0.01", {"probability": 0.01}),
    ("kind:exit,code:3", {"kind": "exit", "code": 3}),
    ("kind:straggle,factor:2,for:9", {"kind": "straggle", "factor": 2.0, "for_s": 9.0}),
    ("kind:cut_network,interface:eth0", {"kind": "cut_network", "interface": "eth0"}),
]


@pytest.mark.parametrize(("text", "meaning"), MEANINGS)
def test_a_text_means(text: str, meaning: dict[str, object]) -> None:
    fault = parse(text)
    wanted = {"kind": "sigkill", **meaning}
    of_parts = {field.name: getattr(fault, field.name) for field in dataclasses.fields(Injection)}
    defaults = {field.name: field.default for field in dataclasses.fields(Injection)}
    assert {name: of_parts[name] for name in wanted} == wanted
    assert all(of_parts[name] == defaults[name] for name in set(of_parts) - set(wanted) - {"kind", "name", "text"})
    assert parse(str(fault)) == fault


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        *((kind, kind) for kind in injection.KINDS),
        *injection.OTHER_NAMES.items(),
        ("SIGKILL", "sigkill"),
        ("base exception", "base_exception"),
        ("kill-monitor", "kill_monitor"),
        ("random", "random"),
    ],
)
def test_names_of_kinds(name: str, kind: str) -> None:
    assert injection.kind_of(name) == kind


WRONG = [
    ("step:3", "kind is missing; kinds: sigkill, "),
    ("kind:sigkil", "no kind is named 'sigkil' (did you mean sigkill?); kinds: sigkill, "),
    ("kind:sigkill,stepp:3", "there is no part 'stepp' (did you mean step?); parts: kind, rank, "),
    ("kind:sigkill,step", "'step' is not PART:VALUE"),
    ("kind:sigkill,step:", "'step:' is not PART:VALUE"),
    ("kind:sigkill,step:1,step:2", "step is given twice"),
    ("kind:sigkill,step:-1", "step:-1 is not a valid step: a whole number"),
    ("kind:sigkill,step:1.5", "step:1.5 is not a valid step: a whole number"),
    ("kind:sigkill,rank:x", "rank:x is not a valid rank: a number, random or all"),
    ("kind:sigkill,cycle:all", "cycle:all is not a valid cycle: a number or any"),
    ("kind:sigkill,node:any", "node:any is not a valid node: a number"),
    ("kind:sigkill,delay:soon", "delay:soon is not a valid time in seconds"),
    ("kind:sigkill,delay:nan", "delay:nan is not a valid time in seconds"),
    ("kind:sigkill,mtbf:0", "mtbf:0 is not a valid time in seconds above 0"),
    ("kind:sigkill,p:0", "p:0 is not a valid probability above 0 and up to 1"),
    ("kind:sigkill,p:1.1", "p:1.1 is not a valid probability above 0 and up to 1"),
    ("kind:sigkill,delay:1,mtbf:2", "delay and mtbf exclude each other"),
    ("kind:sigkill,rank:1,node:2", "rank and node exclude each other"),
    ("kind:exit", "kind exit needs code:VALUE"),
    ("kind:exit,code:256", "code:256 is not a valid exit code from 0 to 255"),
    ("kind:sleep,code:3", "code is for kind exit, not sleep"),
    ("kind:straggle", "kind straggle needs factor:VALUE"),
    ("kind:straggle,factor:0.5", "factor:0.5 is not a valid number of at least 1"),
    ("kind:cut_network", "kind cut_network needs interface:VALUE"),
    ("kind:sigkill,for:3", "for is for kind sleep or gil_sleep or livelock or straggle, not sigkill"),
    ("kind:sleep,for:0", "for:0 is not a valid time in seconds above 0"),
]


@pytest.mark.parametrize(("text", "problem"), WRONG)
def test_what_is_wrong_is_said(text: str, problem: str) -> None:
    with pytest.raises(ValueError) as caught:
        parse(text)
    assert str(caught.value).startswith(problem)


def test_of_several_the_wrong_one_is_named() -> None:
    with pytest.raises(ValueError, match=r"^kind:sigkil: no kind is named"):
        parse_all("kind:sleep; kind:sigkil")


@pytest.mark.parametrize(
    ("raw", "read"),
    [
        (None, ()),
        ("none", ()),
        ("kind:sleep ; ;kind:nan,p:1", ("kind:sleep", "kind:nan,p:1")),
        (["kind:sleep", "kind:nan;kind:oom"], ("kind:sleep", "kind:nan", "kind:oom")),
    ],
)
def test_as_a_setting(raw: object, read: tuple[str, ...]) -> None:
    assert parse_setting(StartSettings, "inject", raw, "a test") == read


def test_a_wrong_setting_names_its_source_and_the_form() -> None:
    with pytest.raises(ConfigError, match=r"inject='kind:x' \(from FT_INJECT\): no kind .*Expected: kind:KIND,PART"):
        parse_setting(StartSettings, "inject", "kind:x", "FT_INJECT")


def test_what_a_rank_tells_arrives() -> None:
    told = InjectionReport("kind:sleep", 3, 1, "at step 2")
    assert InjectionReport.decode(told.encode()) == told


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"\xff",
        b"[1]",
        b'{"rank": 1}',
        b'{"more": 1}',
        b'{"fault": "kind:sleep", "rank": 0, "local_rank": "1", "at": ""}',
        b'{"fault": "kind:sleep", "rank": 0, "local_rank": 1.0, "at": ""}',
        b'{"fault": "kind:sleep", "rank": 0, "local_rank": true, "at": ""}',
        b'{"fault": "kind:sleep", "rank": 0, "local_rank": 1, "at": ' + b"[" * 5000 + b"]" * 5000 + b"}",
    ],
)
def test_what_is_nothing_told(data: bytes) -> None:
    with pytest.raises(ProtocolError):
        InjectionReport.decode(data)
