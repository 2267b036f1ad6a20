"""What calls cost that nobody measured: assumed from those that were, said to be so, and learned from real steps.

Measuring every call of a large model on a busy machine takes longer than a start may. What is missing is assumed to cost what
another batch size pays for as many tokens in all, and beyond everything measured in proportion to the tokens: too much rather
than too little, so that no draft is made on a guess that it is free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from cachespec.engine.speculation import CostTable

Rows = Mapping[int, Mapping[int, float]]


def completed(measured: Rows, calls: Iterable[tuple[int, int]]) -> CostTable:
    """The table of what was measured, with these further calls (sequences, tokens) assumed where they are not in it."""
    rows = {batch: dict(row) for batch, row in measured.items()}
    assumed = [(batch, tokens) for batch, tokens in calls if tokens not in measured.get(batch, {})]
    for batch, tokens in assumed:
        rows.setdefault(batch, {})[tokens] = _assumed(measured, batch, tokens)
    return CostTable(rows, assumed=assumed)


def _assumed(measured: Rows, batch: int, tokens: int) -> float:
    own = measured.get(batch, {})
    other = _by_total(measured, batch, tokens)
    if not own:
        return other
    around = [n for n in own if n < tokens][-1:] + [n for n in own if n > tokens][:1]
    if len(around) == 2:
        return _between(own, around, tokens)
    # Only on one side: what it costs more or less there than the other batch sizes, it does here.
    nearest = around[0]
    return other * own[nearest] / _by_total(measured, batch, nearest)


def _by_total(measured: Rows, batch: int, tokens: int) -> float:
    """What another batch size pays for as many tokens; of those that reach so far the nearest, else the farthest reaching."""
    others = sorted((b for b in measured if b != batch), key=lambda b: abs(b - batch)) or [batch]
    reaching = [b for b in others if min(measured[b]) <= tokens <= max(measured[b])]
    row = measured[reaching[0] if reaching else max(others, key=lambda b: max(measured[b]))]
    known = sorted(row)
    if tokens >= known[-1]:
        return row[known[-1]] * tokens / known[-1]
    around = [n for n in known if n <= tokens][-1:] + [n for n in known if n > tokens][:1]
    return _between(row, around, tokens)


def _between(row: Mapping[int, float], around: Sequence[int], tokens: int) -> float:
    if len(around) < 2:
        return row[around[0]]
    low, high = around
    return row[low] + (row[high] - row[low]) * (tokens - low) / (high - low)
