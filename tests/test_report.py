"""Drawing: what is escaped, what has a legend, and values that are hard to draw."""

from __future__ import annotations

import re
from xml.etree import ElementTree

import pytest

from cachespec.report import bars, lines, page, paragraph, section, stacked, table


def texts(html: str) -> list[str]:
    """The texts of a piece, which is well formed."""
    return [text for element in ElementTree.fromstring(f"<div>{html}</div>").iter() if (text := element.text)]  # noqa: S314


def test_texts_are_escaped() -> None:
    evil = "<b>&'\""
    parts = [
        section(evil, paragraph(evil), note=evil),
        table([evil], [[evil]]),
        stacked({evil: {evil: 1.0}}, guides={evil: 0.5}),
        lines({evil: [(0, 1), (1, 2)]}, x=evil, y=evil),
    ]
    for part in parts:
        assert any(evil in text for text in texts(part))
    assert "<b>" not in page(evil, parts)


def test_bars_are_as_long_as_they_should_be() -> None:
    drawn = bars({"a": 1.0, "b": 0.25, "c": 0.0}, guides={"limit": 0.5})
    widths = [float(width) for width in re.findall(r'<rect [^>]*?width="([\d.]+)"', drawn)]
    assert widths[0] == pytest.approx(4 * widths[1], abs=0.2)
    assert widths[2] == 0
    assert {"1.000", "0.250", "limit 0.500"} <= set(texts(drawn))
    assert "key" not in drawn


def test_parts_keep_their_colour_and_stand_in_the_legend() -> None:
    drawn = stacked({"a": {"x": 1.0, "y": 2.0}, "b": {"y": 1.0}})
    colours = re.findall(r'fill="(#\w+)"', drawn)
    assert colours[1] == colours[2] != colours[0]
    assert drawn.count('class="key"') == 2


@pytest.mark.parametrize("points", [[], [(0.0, 0.0)], [(1.0, 5.0), (30_000.0, 0.001)], [(0.0, 1e-9), (1e9, 2e-9)]])
def test_lines_of_any_size(points: list[tuple[float, float]]) -> None:
    drawn = lines({"a": points}, x="requests", y="share")
    assert {"requests", "share"} <= set(texts(drawn))
    for x, y in re.findall(r"([\d.-]+),([\d.-]+)(?= |\")", "".join(re.findall(r'points="[^"]*"', drawn))):
        assert 0 <= float(x) <= 760
        assert 0 <= float(y) <= 260


def test_nothing_to_draw() -> None:
    assert texts(bars({})) == texts(stacked({})) == []
