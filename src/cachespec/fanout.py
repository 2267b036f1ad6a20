"""Holds back a cold fan-out (contract P5): of many requests with one cold prefix one goes first, and the others read it.

An entry can be read once the response of the request that writes it begins (vendors' guides); until then every other request
with the same prefix would pay for writing it, too. So whoever finds that a prefix it wants to write is being written already
waits until that response begins, or fails, or the wait has lasted long enough; then it decides again.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable

import anyio

LONGEST_S = 10.0
"""Seconds that a request waits at most, and never more than half of what is left of its deadline: past that, paying for a
second write is better than making somebody wait."""


class Lead:
    """The prefixes that one request is the first to write. `release` when its response begins, or when it is over."""

    def __init__(self, fanout: Fanout, keys: tuple[Hashable, ...]) -> None:
        self._fanout, self.keys = fanout, keys
        self._begun = anyio.Event()

    def release(self) -> None:
        """Let the others go. Idempotent."""
        if not self._begun.is_set():
            self._fanout.forget(self)
            self._begun.set()

    async def begun(self, *, at_most_s: float) -> bool:
        """Wait until it is released; False: it took longer."""
        with anyio.move_on_after(at_most_s):
            await self._begun.wait()
        return self._begun.is_set()


class Fanout:
    """Who writes what at this moment. Used by the tasks of one event loop."""

    def __init__(self) -> None:
        self._leads: dict[Hashable, Lead] = {}

    def ahead(self, keys: Iterable[Hashable]) -> Lead | None:
        """The request that writes the deepest of these prefixes now; `keys` are shortest prefix first."""
        return next((lead for key in reversed(tuple(keys)) if (lead := self._leads.get(key)) is not None), None)

    def lead(self, keys: Iterable[Hashable]) -> Lead:
        """Go first with these prefixes, as far as nobody does yet."""
        lead = Lead(self, tuple(key for key in keys if key not in self._leads))
        self._leads.update(dict.fromkeys(lead.keys, lead))
        return lead

    def forget(self, lead: Lead) -> None:
        for key in lead.keys:
            if self._leads.get(key) is lead:
                del self._leads[key]

    def __len__(self) -> int:
        return len(self._leads)
