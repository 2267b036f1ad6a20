"""The HTML page of ``cachespec replay``."""

from __future__ import annotations

from collections.abc import Mapping

from cachespec.replay.compare import Comparison
from cachespec.replay.result import Result
from cachespec.report import bars, lines, page, section, stacked, table

DRAWN_AT_MOST = 5
"""Lines in one plot that can be told apart."""


def html(comparison: Comparison, vendor: str) -> str:
    """The whole page."""
    trace, best = comparison.trace, comparison.best_fixed
    shown = {**comparison.results, best.policy: best}
    ordered = dict(sorted(shown.items(), key=lambda item: item[1].cost))
    guides = {"bound": comparison.bounds.without_pings, "bound with keep-alives": comparison.bounds.with_pings}
    size = f"{trace.requests:,} requests, {trace.input_tokens:,} input tokens, {len(trace.sessions):,} sessions"
    return page(
        f"Prompt caching policies on {trace.name.rsplit('/', 1)[-1]}",
        [
            section(
                "Cost by policy",
                bars({name: result.relative for name, result in ordered.items()}, guides=guides),
                note=f"{size}; rules of {vendor}. Input cost relative to no caching. No policy can be below the bound.",
            ),
            section(
                "Where the money went",
                stacked({name: _shares(result) for name, result in ordered.items()}),
                note="Parts of the same cost: tokens paid in full, written for a lifetime, read, and kept alive.",
            ),
            section(
                "Hit ratio over time",
                lines(_ratios(ordered), x="requests", y="input tokens read from the cache", top=1.0),
                note=f"Share of input tokens, at most {DRAWN_AT_MOST} policies, the cheapest first.",
            ),
            section("Numbers", table(*_rows(ordered))),
        ],
    )


def _shares(result: Result) -> dict[str, float]:
    return {part: cost / max(1, result.input_tokens) for part, cost in result.parts.items()}


def _ratios(results: Mapping[str, Result]) -> dict[str, list[tuple[float, float]]]:
    return {
        name: [(done, read / tokens) for done, tokens, read in result.curve if tokens]
        for name, result in list(results.items())[:DRAWN_AT_MOST]
    }


def _rows(results: Mapping[str, Result]) -> tuple[tuple[str, ...], list[tuple[str, ...]]]:
    header = ("policy", "cost", "read", "written", "uncached", "keep-alives")
    rows: list[tuple[str, ...]] = [
        (name, f"{r.relative:.4f}", f"{r.read:,}", f"{sum(r.writes.values()):,}", f"{r.uncached:,}", f"{r.pings:,}")
        for name, r in results.items()
    ]
    return header, rows
