"""What an evaluation found a drafter to be worth, on disk: what a backend with `require_eval` asks before it drafts.

Kept beside the calibrations, for one machine, backend, model (its weights and settings) and drafter with its options; another
model, or the same drafter with other options, has to be evaluated itself.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cachespec.engine.costs import CalibrationStore
from cachespec.engine.speculation import Choice, Step

_KIND = "evaluation"


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """A drafter's acceptance, accepted / (accepted + rejected), with its 95 % interval, over so many requests and tokens."""

    acceptance: float
    low: float
    high: float
    requests: int
    scored: int


def load_evidence(store: CalibrationStore, fingerprint: bytes, backend: str, draft: Mapping[str, Any]) -> Evidence | None:
    """What `save_evidence` kept for this; None: nothing, or nothing that is right."""
    saved = store.read(fingerprint, _settings(backend, draft))
    try:
        found = None if saved is None else Evidence(**saved["evidence"])
    except (TypeError, KeyError):
        return None
    if found is None or not all(isinstance(v, int | float) and v >= 0 for v in asdict(found).values()):
        return None
    return found if found.acceptance <= 1 else None


def save_evidence(
    store: CalibrationStore, fingerprint: bytes, backend: str, draft: Mapping[str, Any], evidence: Evidence
) -> bool:
    """Keep it instead of what was there. False: the folder cannot be written."""
    return store.write(fingerprint, _settings(backend, draft), {"evidence": asdict(evidence)})


def _settings(backend: str, draft: Mapping[str, Any]) -> dict[str, Any]:
    return {"kind": _KIND, "backend": backend, "draft": dict(draft)}


@dataclass(frozen=True, slots=True)
class Withheld:
    """The acceptance policy of a backend that has no such evidence: plain decoding, and the reason says why."""

    @property
    def max_length(self) -> int:
        return 0

    def choose(self, step: Step) -> Sequence[Choice]:
        return [Choice(length=0, reason="eval_required", gain=1.0) for _ in step.candidates]
