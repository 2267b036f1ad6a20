"""Self-contained HTML pages with plots: inline SVG and CSS, no script, nothing fetched. It knows shapes, not subjects.

Every function returns HTML; texts are escaped here, so callers pass plain ones. Pages follow the reader's light or dark
setting, and each drawn value says itself on hover (an SVG ``<title>``).
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from html import escape

WIDTH, LABEL, ROW = 760, 190, 24
COLOURS = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#b8a900", "#7f7f7f")
"""Told apart by most colour-blind readers (Okabe and Ito), on light and dark."""

_STYLE = """
:root { color-scheme: light dark; --ink: #1b1f24; --soft: #6a737d; --rule: #d7dce1; --paper: #fff }
@media (prefers-color-scheme: dark) { :root { --ink: #e6e9ec; --soft: #9aa4ae; --rule: #3a4149; --paper: #15181c } }
body { font: 15px/1.5 system-ui, sans-serif; color: var(--ink); background: var(--paper); max-width: 820px;
  margin: 2.5em auto; padding: 0 1.2em }
h1 { font-size: 1.5em; margin-bottom: .2em } h2 { font-size: 1.15em; margin: 2em 0 .4em } p { margin: .4em 0 }
.note { color: var(--soft); font-size: .9em }
table { border-collapse: collapse; font-variant-numeric: tabular-nums }
td, th { padding: .2em .9em .2em 0; text-align: right; font-weight: normal }
td:first-child, th:first-child { text-align: left } thead { color: var(--soft); border-bottom: 1px solid var(--rule) }
svg { width: 100%; height: auto; font: 12px system-ui, sans-serif } text { fill: var(--ink) } text.soft { fill: var(--soft) }
.rule { stroke: var(--rule) } .guide { stroke: var(--ink); stroke-dasharray: 4 3 }
.key { display: inline-block; width: .8em; height: .8em; margin: 0 .35em 0 1em }
"""


def page(title: str, parts: Iterable[str]) -> str:
    """A whole document."""
    heading = escape(title)
    head = f'<meta charset="utf-8"><meta name="viewport" content="width=device-width"><title>{heading}</title>'
    body = "\n".join((f"<h1>{heading}</h1>", *parts))
    return f'<!doctype html>\n<html lang="en"><head>{head}<style>{_STYLE}</style></head>\n<body>{body}\n</body></html>\n'


def section(title: str, *parts: str, note: str = "") -> str:
    """A heading, what stands below it, and a remark in small print."""
    small = f'<p class="note">{escape(note)}</p>' if note else ""
    return f"<section><h2>{escape(title)}</h2>{small}{''.join(parts)}</section>"


def paragraph(text: str) -> str:
    return f"<p>{escape(text)}</p>"


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """Rows of texts; the first column is to the left, the others are numbers."""
    head = "".join(f"<th>{escape(name)}</th>" for name in header)
    body = "".join("<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<table><thead><tr>{head}</tr></thead><tbody>{body}</tbody></table>"


def bars(values: Mapping[str, float], *, guides: Mapping[str, float] | None = None) -> str:
    """A horizontal bar for each value, and dashed lines at the guides."""
    return stacked({name: {name: value} for name, value in values.items()}, guides=guides, key=False)


def stacked(rows: Mapping[str, Mapping[str, float]], *, guides: Mapping[str, float] | None = None, key: bool = True) -> str:
    """A horizontal bar for each row, made of named parts (0 or more); the sum stands at its end."""
    names = list(dict.fromkeys(name for parts in rows.values() for name in parts)) if key else []
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(names)}
    sums = {row: sum(parts.values()) for row, parts in rows.items()}
    scale = _Scale(0.0, max([*sums.values(), *(guides or {}).values()], default=0.0), LABEL, WIDTH - 60)
    drawn: list[str] = []
    for number, (row, parts) in enumerate(rows.items()):
        y, at = number * ROW + 4, 0.0
        drawn.append(f'<text x="{LABEL - 8}" y="{y + 13}" text-anchor="end">{escape(row)}</text>')
        for name, value in parts.items():
            x, width = scale(at), scale(at + value) - scale(at)
            told = escape(row if not key else f"{row}: {name}")
            drawn.append(
                f'<rect x="{x:.1f}" y="{y}" width="{max(width, 0):.1f}" height="{ROW - 7}" '
                f'fill="{colours.get(name, COLOURS[0])}"><title>{told} {value:.4g}</title></rect>'
            )
            at += value
        drawn.append(f'<text class="soft" x="{scale(at) + 6:.1f}" y="{y + 13}">{sums[row]:.3f}</text>')
    height = len(rows) * ROW + 4
    for number, (name, value) in enumerate((guides or {}).items()):
        x, below = scale(value), height + 14 * (number + 1)
        drawn.append(f'<line class="guide" x1="{x:.1f}" y1="0" x2="{x:.1f}" y2="{height}"/>')
        drawn.append(f'<text class="soft" x="{x:.1f}" y="{below}" text-anchor="middle">{escape(name)} {value:.3f}</text>')
    return _svg(height + 14 * len(guides or {}) + 4, drawn) + (_legend(colours) if key else "")


def lines(series: Mapping[str, Sequence[tuple[float, float]]], *, x: str, y: str, top: float | None = None) -> str:
    """A line for each series of points, with axes from 0; `x` and `y` say what they count. `top` is the end of the y axis."""
    points = [point for line in series.values() for point in line]
    height = 260
    across = _Scale(0.0, max((px for px, _ in points), default=1.0), 52, WIDTH - 12)
    up = _Scale(0.0, top or max((py for _, py in points), default=1.0), height - 34, 24)
    drawn = [_axis_y(tick, up(tick)) for tick in up.ticks()]
    drawn += [
        f'<text class="soft" x="{across(t):.1f}" y="{height - 18}" text-anchor="middle">{t:,g}</text>' for t in across.ticks()
    ]
    drawn.append(f'<text class="soft" x="{WIDTH - 12}" y="{height - 3}" text-anchor="end">{escape(x)}</text>')
    drawn.append(f'<text class="soft" x="12" y="12">{escape(y)}</text>')
    colours = {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(series)}
    for name, line in series.items():
        path = " ".join(f"{across(px):.1f},{up(py):.1f}" for px, py in line)
        drawn.append(
            f'<polyline points="{path}" fill="none" stroke="{colours[name]}" stroke-width="1.8">'
            f"<title>{escape(name)}</title></polyline>"
        )
    return _svg(height, drawn) + _legend(colours)


class _Scale:
    """Values to pixels, linearly."""

    def __init__(self, low: float, high: float, start: float, end: float) -> None:
        self.low, self.high, self.start, self.end = low, high if high > low else low + 1.0, start, end

    def __call__(self, value: float) -> float:
        return self.start + (self.end - self.start) * (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[float]:
        """Some four round values."""
        step = 10.0 ** math.floor(math.log10((self.high - self.low) / 4))
        step = next(step * factor for factor in (1, 2, 5, 10) if (self.high - self.low) / (step * factor) <= 6)
        return [self.low + i * step for i in range(int((self.high - self.low) / step + 1e-9) + 1)]


def _axis_y(value: float, at: float) -> str:
    rule = f'<line class="rule" x1="52" y1="{at:.1f}" x2="{WIDTH - 12}" y2="{at:.1f}"/>'
    return rule + f'<text class="soft" x="46" y="{at + 4:.1f}" text-anchor="end">{value:,.3g}</text>'


def _legend(colours: Mapping[str, str]) -> str:
    keys = "".join(f'<span class="key" style="background:{colour}"></span>{escape(name)}' for name, colour in colours.items())
    return f'<p class="note">{keys}</p>'


def _svg(height: float, drawn: Iterable[str]) -> str:
    return f'<svg viewBox="0 0 {WIDTH} {height:g}" role="img">{"".join(drawn)}</svg>'
