"""The HTML page of ``cachespec eval``."""

from __future__ import annotations

from cachespec.evaluation.result import Evaluation, Group
from cachespec.report import bars, page, paragraph, section, table
from cachespec.usage import money_text


def html(found: Evaluation, slice_name: str) -> str:
    """The whole page."""
    groups = (*found.groups, found.overall) if len(found.groups) > 1 else found.groups
    parts = [section("Recommendation", paragraph(found.recommendation))]
    if found.failed:
        failed = table(("drafter", "error"), list(found.failed.items()))
        parts.append(section("Drafters that failed", failed, note="There are no figures of these."))
    names = list(dict.fromkeys(name for group in groups for name in group.drafters))
    for name in names:
        speeds = {group.category: group.drafters[name].predicted_speedup for group in groups if name in group.drafters}
        rates = {
            group.category: rate.rate
            for group in groups
            if name in group.drafters and (rate := group.drafters[name].acceptance) is not None
        }
        parts.append(
            section(
                f"{name}: predicted speed-up",
                bars(speeds, guides={"plain decoding": 1.0}),
                note="Tokens a second over those of plain decoding, one request at a time, by measured costs of calls.",
            )
        )
        parts.append(
            section(f"{name}: acceptance", bars(rates), note="Accepted / (accepted + rejected); intervals are in the table.")
        )
    if names:
        parts.append(section("Drafters by category", table(HEADER, [row for group in groups for row in rows(group)])))
    total = max(1, found.prefix.total_tokens)
    kept = {name: count / total for name, count in found.prefix.by_lifetime.items() if count is not None}
    parts.append(
        section(
            "Prefix sharing",
            bars({("ever" if name == "any" else f"within {name}"): share for name, share in kept.items()}),
            note=f"Share of {found.prefix.total_tokens:,} prompt tokens that repeat the beginning of an earlier prompt.",
        )
    )
    costs = {name: float(cost) for name, cost in found.policies.items() if cost is not None}
    if costs:
        dearest = max(costs.values()) or 1.0
        parts.append(
            section(
                "What it would have cost",
                bars({name: cost / dearest for name, cost in sorted(costs.items(), key=lambda item: item[1])}),
                table(("policy", "USD"), [(name, money_text(cost) or "not known") for name, cost in found.policies.items()]),
                note="Relative to the dearest.",
            )
        )
    if found.notes:
        parts.append(section("Notes", *(paragraph(note) for note in found.notes)))
    return page(f"{found.backend} on {slice_name.rsplit('/', 1)[-1]}", parts)


HEADER = ("category", "requests", "tokens", "drafter", "acceptance", "95 %", "tokens a pass", "speed-up", "recommended")


def rows(group: Group) -> list[tuple[str, ...]]:
    """A group's rows for a person, one for each drafter."""
    found: list[tuple[str, ...]] = []
    head = (group.category, f"{group.requests:,}", f"{group.tokens:,}")
    for name, score in group.drafters.items():
        rate = score.acceptance
        found.append(
            (
                *(head if not found else ("", "", "")),
                name,
                "-" if rate is None else f"{rate.rate:.2f}",
                "-" if rate is None else f"{rate.low:.2f}-{rate.high:.2f}",
                f"{score.tokens_per_pass:.2f}",
                f"{score.predicted_speedup:.2f}",
                group.recommended if not found else "",
            )
        )
    return found or [(*head, "", "", "", "", "", group.recommended)]
