"""The order in which medians travel: the same on every rank, and bounded."""

from __future__ import annotations

from ft_client.straggler.exchange import AgreedNames, digest
from ft_client.straggler.kernels import MAX_KERNELS


def agree(ranks: list[AgreedNames], kernels: list[list[str]], sections: list[list[str]]) -> list[str]:
    """What the ranks do when one of them has something new; the texts that were sent."""
    texts = [names.new(k, s) for names, k, s in zip(ranks, kernels, sections, strict=True)]
    union = sorted({text for sent in texts for text in sent})
    for names in ranks:
        names.learn(union)
    return union


def test_ranks_agree_on_one_order_and_names_travel_once() -> None:
    ranks = [AgreedNames(0, "a:b"), AgreedNames(1, "c")]
    agree(ranks, [["k2"], ["k1"]], [["s2", "s1"], ["s1"]])
    agree(ranks, [["k0"], []], [[], ["s0"]])
    assert [list(names.kernels) for names in ranks] == [["k1", "k2", "k0"]] * 2
    assert [list(names.sections) for names in ranks] == [["s1", "s2", "s0"]] * 2
    assert ranks[1].nodes == {0: "a:b", 1: "c"}
    assert agree(ranks, [["k0"], ["k1"]], [["s0"], ["s1"]]) == []


def test_a_row_is_in_that_order() -> None:
    names = AgreedNames(0, "n")
    names.learn(["ka", "kb", "sx", "sy"])
    assert names.row({"b": 2.0, "beyond": 9.0}, {"x": 3.0}, (-1.0, 0.5)) == [-1.0, 2.0, 3.0, 0.5]


def test_kernels_are_bounded_and_those_beyond_are_not_announced_for_ever() -> None:
    names = AgreedNames(0, "n")
    names.learn(names.new([f"{index:04d}" for index in range(MAX_KERNELS + 9)], ["s"]))
    assert len(names.kernels) == MAX_KERNELS
    assert names.new(["another"], ["s"]) == []


def test_a_digest_is_short_and_always_the_same() -> None:
    assert digest("k" * 5000) == digest("k" * 5000) != digest("k")
    assert len(digest("k" * 5000)) == 16
