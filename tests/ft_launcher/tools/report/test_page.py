"""The page: complete, well-formed, and safe with texts that ranks chose."""

from __future__ import annotations

from html.parser import HTMLParser
from pathlib import Path

from ft_launcher.record.ledger.palette import look_of
from ft_launcher.tools.report.advice import Advice
from ft_launcher.tools.report.page import as_html
from tests.browser import chromium, needs_chromium
from tests.ft_launcher.tools.report.lines import (
    NODE_A,
    NODE_B,
    begins,
    durations,
    end,
    fault,
    found,
    limits,
    part,
    start,
)

_VOID = {"meta"}


class Page(HTMLParser):
    """The elements of a page. Fails where they do not nest."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in _VOID:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def of(self, tag: str) -> list[dict[str, str | None]]:
        return [facts for name, facts in self.elements if name == tag]


def test_it_asks_nobody_for_anything() -> None:
    text = as_html(found(NODE_A, NODE_B), [Advice("a", "b")])
    page = Page(text)
    assert {name for name, _ in page.elements} == {
        *("html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "table", "tr", "th", "td", "svg", "rect"),
        *("div", "span"),
    }
    (policy,) = [facts["content"] for facts in page.of("meta") if "http-equiv" in facts]
    assert policy is not None and policy.startswith("default-src 'none'; style-src 'unsafe-inline';")
    assert "://" not in text and "url(" not in text and "@import" not in text
    assert "prefers-color-scheme: dark" in text


def pieces_of(page: Page) -> list[dict[str, str | None]]:
    """The pieces of the bar of the time."""
    return [facts for facts in page.of("span") if "style" in facts]


def test_the_bar_is_as_long_as_the_job() -> None:
    widths = [str(piece["style"]) for piece in pieces_of(Page(as_html(found(NODE_A, NODE_B), ())))]
    assert abs(sum(float(width.removeprefix("width: ").removesuffix("%")) for width in widths) - 100) < 0.01


def test_each_category_has_the_look_that_it_has_in_the_bar() -> None:
    findings = found(NODE_A, NODE_B)
    page = Page(as_html(findings, ()))
    keys = [facts["class"] for facts in page.of("span") if "style" not in facts]
    assert keys == [f"key {piece['class']}" for piece in pieces_of(page)]
    assert keys == [f"key {look_of(name).classes}" for name, _, _ in findings.shares()]


def test_cycles_and_faults_on_a_line_of_time() -> None:
    page = Page(as_html(found(NODE_A, NODE_B), ()))
    pieces = page.of("rect")[-5:]
    # 131 s are 1000 units; cycles of 5 to 30 s, 35 to 61 s and, in the second attempt, 105 to 131 s.
    assert [(piece["class"], piece["x"], piece["width"]) for piece in pieces] == [
        ("start", "38.17", "190.84"),
        ("start", "267.18", "198.47"),
        ("start", "801.53", "198.47"),
        ("bad", "228.01", "2"),
        ("bad", "449.38", "2"),
    ]


def test_sections_beside_their_limits() -> None:
    seen = {"step": durations(41000, 2.4)}
    text = as_html(found([start(0), begins(1, 0), limits(2, step=60.0), part(0, 0, 10, durations=seen)]), ())
    assert (
        '<td>step</td><td class="number">41,000</td><td class="number">1.0 s</td><td class="number">2.4 s</td>' in text
    )
    assert "<td>1 min</td><td>long</td>" in text


def test_texts_of_ranks_are_texts() -> None:
    hostile = "<script>alert(1)</script>\"'><img src=x onerror=alert(1)>&"
    lines = [
        start(0, hostile, hostile),
        begins(1, 0),
        fault(5, 0, what=hostile, kind=hostile, fault_class=hostile, detail=[hostile], others=[hostile]),
        limits(6) | {"sections": {hostile: 5.0}},
        part(0, 0, 20, seconds={f"custom:{hostile}": 5.0}, durations={hostile: durations(500, 9.0)}),
        end(20, 80) | {"reason": hostile},
    ]
    text = as_html(found(lines), [Advice(hostile, hostile)])
    page = Page(text)
    assert page.of("script") == [] and page.of("img") == []
    assert "&lt;script&gt;" in text
    assert not any(name.startswith("on") for _, facts in page.elements for name in facts)


def test_on_a_narrow_screen_no_table_is_wider_than_the_page(tmp_path: Path) -> None:
    needs_chromium()
    long_name = "a_section_of_a_training_that_has_a_long_name"
    ledger = part(0, 0, 100, seconds={"step": 63.0}, durations={long_name: durations(2000, 7.0)})
    text = as_html(found([start(0), limits(1, **{long_name: 30.0}), begins(1, 0), ledger, end(100)]), [])
    (tmp_path / "report.html").write_text(text)
    with chromium(tmp_path) as browser:
        browser.resize(500, 800)
        browser.open((tmp_path / "report.html").as_uri())
        assert long_name in browser.text("body")
        assert browser.script("return document.documentElement.scrollWidth") <= 500
