"""Callables of every kind are wrapped, behave as before, and are themselves again."""

from __future__ import annotations

import inspect
import types
from typing import Any

import pytest
import torch

from ft_client.straggler import CallableId, Detector, Statistic


class Base:
    def inherited(self) -> str:
        return "inherited"


class Model(Base):
    def forward(self, x: int) -> int:
        """The model."""
        return x + 1

    def countdown(self, x: int) -> int:
        return self.countdown(x - 1) if x else 0

    @classmethod
    def make(cls) -> Model:
        return cls()

    @staticmethod
    def double(x: int) -> int:
        return 2 * x

    word = "not callable"


def timed(*wanted: CallableId) -> None:
    Detector.initialize(scores_to_compute="individual_perf_scores", gather_on_rank0=False)
    Detector.wrap_callables(list(wanted))


def counts() -> dict[str, float]:
    report = Detector.generate_report()
    assert report is not None
    return {name: of[Statistic.NUM] for name, of in report.local_section_summaries.items()}


def test_all_kinds_of_callables() -> None:
    before = {name: inspect.getattr_static(Model, name) for name in ("forward", "make", "double", "inherited")}
    timed(*(CallableId(Model, name) for name in before))
    assert (Model.make().forward(1), Model.double(4), Model().double(5), Model().inherited()) == (2, 8, 10, "inherited")
    assert isinstance(Model.make(), Model)
    assert Model.forward.__doc__ == "The model."
    assert counts() == {"Model.forward": 1, "Model.make": 2, "Model.double": 2, "Model.inherited": 1}
    Detector.restore_original_callables()
    assert {name: inspect.getattr_static(Model, name) for name in before} == before
    assert "inherited" not in vars(Model)
    Model().forward(1)
    assert counts() == {}


def test_objects_modules_and_torch() -> None:
    module = types.ModuleType("user")
    module.step = lambda x: -x  # type: ignore[attr-defined]
    own, model, layer = module.step, Model(), torch.nn.Linear(2, 2)
    timed(CallableId(module, "step"), CallableId(model, "forward"), CallableId(layer, "forward"))
    assert (module.step(3), model.forward(3), Model().forward(3)) == (-3, 4, 4)
    assert layer(torch.ones(2)).shape == (2,)
    assert counts() == {"user.step": 1, "Model.forward": 1, "Linear.forward": 1}
    Detector.shutdown()
    assert module.step is own
    assert vars(model) == {} and "forward" not in vars(layer)


def test_a_call_inside_another_is_not_timed_and_no_error() -> None:
    timed(CallableId(Model, "countdown"))
    assert Model().countdown(5) == 0
    assert counts() == {"Model.countdown": 1}


def test_a_raising_call_is_not_recorded() -> None:
    timed(CallableId(Model, "forward"))
    with pytest.raises(TypeError):
        Model().forward("text")  # type: ignore[arg-type]
    assert counts() == {}
    assert Model().forward(1) == 2
    assert counts() == {"Model.forward": 1}


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        (CallableId(Model, "nothing"), "Model.nothing: .* has no callable 'nothing'"),
        (CallableId(Model, "word"), "Model.word: .* has no callable 'word'"),
        ((Model, "forward"), "is not a CallableId"),
        (CallableId(Model, "forward"), "Model.forward is wrapped already"),
        (CallableId(list, "append"), "list.append cannot be wrapped"),
    ],
)
def test_what_cannot_be_wrapped_is_named(wrong: Any, words: str) -> None:
    forward = Model.forward
    Detector.initialize()
    with pytest.raises(ValueError, match=f"^callable_ids: .*{words}"):
        Detector.wrap_callables([CallableId(Model, "forward"), wrong])
    Detector.restore_original_callables()
    assert Model.forward is forward
