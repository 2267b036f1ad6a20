"""Sample-and-match: how drafts are verified, for every runtime, drafter and temperature (contracts E2, E3).

A draft is right when it equals the token that the rule of `engine.sampling` draws at its position, from the target's own
law there. So every emitted token is drawn from the target's law whatever was proposed: the law of the answer is exact for
any drafter, and with counter-based noise the answer itself is the same. No ratio of probabilities is ever formed.

A step for one sequence: the KV holds all committed tokens but the last (`pending`). `clip` the drafts, evaluate
``[pending, *drafts]`` with a row for each, `verify`, then `settle`. Afterwards the KV is cut to the committed tokens but
the last, that is, lengthened by one and the accepted drafts::

    held    = length of the KV before the step
    drawn   = accepted drafts, and one token more from the row after them
    length  = held + 1 + settled.accepted
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from cachespec.engine.processors import Adjust
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.sampling import Sampling, draw


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """One sequence's part in a step.

    Attributes:
        position: of the token that the first row draws.
        drafts: at positions `position`, `position` + 1...; may be empty.
        rows: handles of the runtime, one more than drafts.
        adjusts: what to do to each row first; empty for nothing at all.
    """

    position: int
    drafts: Sequence[int]
    rows: Sequence[int]
    sampling: Sampling
    adjusts: Sequence[Adjust | None] = ()

    def __post_init__(self) -> None:
        if len(self.rows) != len(self.drafts) + 1 or len(self.adjusts) not in (0, len(self.rows)):
            raise ValueError(f"{len(self.drafts)} drafts, {len(self.rows)} rows and {len(self.adjusts)} adjustments")


def clip(drafts: Sequence[int], *, room: int, left: int, is_end: Callable[[int], bool]) -> Sequence[int]:
    """The drafts worth verifying: such that nothing passes the end of the context or of the answer.

    A token more than the drafts is evaluated (the pending one) and a token more is emitted (the one drawn last). What
    follows an end token can never be right, and the end token itself needs no KV: it is drawn, not verified.

    Args:
        room: tokens that the KV has room for after what it holds.
        left: tokens that the answer may still have; at least one.
    """
    limit = max(0, min(len(drafts), room - 1, left - 1))
    return drafts[: next((i for i in range(limit) if is_end(drafts[i])), limit)]


def verify(runtime: Runtime, proposals: Sequence[Proposal], *, together: bool = False) -> list[list[int]]:
    """For each sequence the tokens drawn: the drafts that are right, up to the first that is not, and one token more.

    Args:
        together: draw all rows in one call, the useless ones after a wrong draft too. Right where a draw costs little
            beside a call (on a device); else rows are drawn one by one, as far as they are needed.

    Raises: what `Runtime.draw` does.
    """
    if together:
        drawn = _draw_all(runtime, proposals)
        return [tokens[: _right(p.drafts, tokens) + 1] for p, tokens in zip(proposals, drawn, strict=True)]
    result = []
    for proposal in proposals:
        tokens: list[int] = []
        for i in range(len(proposal.rows)):
            tokens.append(_draw(runtime, proposal, i))
            if i < len(proposal.drafts) and tokens[i] != proposal.drafts[i]:
                break
        result.append(tokens)
    return result


def _draw(runtime: Runtime, proposal: Proposal, i: int) -> int:
    adjust = proposal.adjusts[i] if proposal.adjusts else None
    handle, position = proposal.rows[i], proposal.position + i
    if adjust is None:
        return runtime.draw([handle], [proposal.sampling], [position])[0]
    return draw(adjust.apply(runtime.rows([handle])[0]), proposal.sampling, position)


def _draw_all(runtime: Runtime, proposals: Sequence[Proposal]) -> list[list[int]]:
    """All rows of all proposals: those that the runtime can draw by itself in one call, the others copied in one."""
    plain = [(p, i) for p in proposals for i in range(len(p.rows)) if not p.adjusts or p.adjusts[i] is None]
    rows, how = [p.rows[i] for p, i in plain], [p.sampling for p, _ in plain]
    found = iter(runtime.draw(rows, how, [p.position + i for p, i in plain]) if plain else ())
    others = [(p, i, a) for p in proposals for i, a in enumerate(p.adjusts) if a is not None]
    changed = iter(_draw_on_host(runtime, others))
    return [
        [next(found) if not p.adjusts or p.adjusts[i] is None else next(changed) for i in range(len(p.rows))] for p in proposals
    ]


def _draw_on_host(runtime: Runtime, places: Sequence[tuple[Proposal, int, Adjust]]) -> list[int]:
    """Rows that are adjusted first, copied to the host in one go."""
    rows = runtime.rows([p.rows[i] for p, i, _ in places]) if places else ()
    return [draw(adjust.apply(row), p.sampling, p.position + i) for row, (p, i, adjust) in zip(rows, places, strict=True)]


def _right(drafts: Sequence[int], tokens: Sequence[int]) -> int:
    """How many leading drafts equal what was drawn."""
    return next((i for i, draft in enumerate(drafts) if draft != tokens[i]), len(drafts))


@dataclass(frozen=True, slots=True)
class Settled:
    """What became of a step: `taken` of the drawn tokens were looked at, `accepted` of them were drafts.

    `reason` is why the answer ended with the last of them; None: it goes on.
    """

    taken: int
    accepted: int
    reason: str | None


def settle(drawn: Sequence[int], take: Callable[[int], str | None]) -> Settled:
    """Hand the drawn tokens to `take` one by one until it says why the answer ends.

    What comes after that token was never emitted, is not counted, and its KV is cut away.
    """
    for i, token in enumerate(drawn):
        reason = take(token)
        if reason is not None:
            return Settled(i + 1, min(i + 1, len(drawn) - 1), reason)
    return Settled(len(drawn), len(drawn) - 1, None)
