"""The contract of policies: small pure functions from frozen values to a choice. No I/O and no clock of their own.

A routing policy is ``rank(ask, offers) -> offers``: the eligible offers in the order they should be tried. It may leave
some out; it may add reasons (`dataclasses.replace`); it may not invent one.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from cachespec.decision import Ask, Offer


class RoutingPolicy(Protocol):
    """Orders offers. Called for every request; must take well under 0.1 ms for ten offers."""

    def rank(self, ask: Ask, offers: Sequence[Offer]) -> Sequence[Offer]:
        """The offers to try, best first; all of them from `offers`."""
