"""Whose doing a failed attempt was: the backend's, or the request's own, which says nothing of the backend.

Without this one caller could take a healthy backend out for everybody (`health`): by a wrong id, or by little patience. Pure.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from cachespec.decision import Latency
from cachespec.errors import (
    BackendError,
    NotFoundError,
    PermissionDeniedError,
    RequestTimeoutError,
    ServerError,
)
from cachespec.health import NOT_ITS_FAULT
from cachespec.messages import OpaquePart, Part, ReasoningPart, ToolResultPart
from cachespec.request import Request

UNMEASURED_S = 10.0
"""What a backend is given to the first token where its time was not measured yet; a longer estimate of its own stands."""
LEFT_TO_OTHERS_S = 10.0
"""What is left of a long time for others, to be asked in place of one that has begun and brings no content."""
AT_DEADLINE_S = 0.1
"""What ends this near a deadline was ended by it. Later than that nobody waited: the reader did something else meanwhile."""
_OF_THE_ACCOUNT = (402, 429)  # statuses of a refusal for money, whatever the request names


def of_request(error: BackendError, request: Request, backend: str) -> bool:
    """Whether a refusal may be about what the request itself names at that backend, not about its model or our key.

    What is not there (404), or not ours (403), is the model or the endpoint where a request names nothing else. Where it has
    fields of its own for this vendor, or holds objects of a vendor (files, stored answers, reasoning), it may be any of those.
    """
    if not isinstance(error, NotFoundError | PermissionDeniedError) or error.status in _OF_THE_ACCOUNT:
        return False
    own = request.extra.get(backend) or any(request.passthrough.values()) or any(tool.raw for tool in request.tools)
    return bool(own) or any(isinstance(part, OpaquePart | ReasoningPart) for part in _parts(request))


def of_data(error: BackendError, *, local: bool) -> bool:
    """Whether an attempt failed by what the request holds: refused content, or, in an engine of our own, a computation that its
    parameters spoil. What would fail again elsewhere, or at the next try, is no reason to keep others away."""
    spoiled = local and isinstance(error, ServerError) and not error.retryable
    return spoiled or isinstance(error, NOT_ITS_FAULT)


def of_deadline(error: BackendError, *, latency: Latency, waited_s: float, left_s: float | None) -> bool:
    """Whether the request's own deadline, `left_s` from now, ended an attempt that gave nothing yet, before it had a fair time.

    Fair is what 95 of 100 answers keep to their first token. `waited_s` is how long ago the attempt began.
    """
    if left_s is None or left_s > AT_DEADLINE_S or not isinstance(error, RequestTimeoutError):
        return False
    if left_s < -AT_DEADLINE_S:
        return True
    usual = _usual_s(latency)
    return waited_s < (usual if latency.evidence == "measured" and usual is not None else max(usual or 0.0, UNMEASURED_S))


def patience_s(latency: Latency, others: Sequence[Latency], left_s: float | None) -> tuple[float, float]:
    """How long an attempt may stay without content while `others` can still be asked: without a word, and once it has begun.

    A silent one has half of what is left of the deadline, or twice what the backend usually takes, if that is longer. One that
    has begun works, and may think: it has three quarters, and of a long time all but ten seconds, unless the fastest of the
    others needs more. Infinite where no other would have time.
    """
    needs = [usual or 0.0 for usual in map(_usual_s, others)]
    if left_s is None or not needs or min(needs) >= left_s / 2:
        return math.inf, math.inf
    silent = max(left_s / 2, 2 * (_usual_s(latency) or 0.0))
    if silent >= left_s:
        return math.inf, math.inf
    return silent, max(silent, left_s - max(min(LEFT_TO_OTHERS_S, left_s / 4), 2 * min(needs)))


def _usual_s(latency: Latency) -> float | None:
    """Seconds that 95 of 100 answers keep to their first token, as far as is known."""
    usual = latency.ttft_ms if latency.ttft_high_ms is None else latency.ttft_high_ms
    return None if usual is None else usual / 1000


def _parts(request: Request) -> Iterator[Part]:
    for message in request.messages:
        for part in message.parts:
            yield part
            if isinstance(part, ToolResultPart):
                yield from part.content
