"""The finished text as `response_format` wants it."""

from __future__ import annotations

import json
from typing import Any, NoReturn

from cachespec.request import Request


def parse_answer(request: Request, text: str) -> tuple[Any, str | None]:
    """The value, and a warning where the text is not what was asked for (then the value is None).

    A pydantic model gives an instance, ``json`` and a schema what `json.loads` gives; no format, or ``text``, gives
    ``(None, None)``. Never raises: an answer that does not parse has still been paid for.
    """
    wanted = request.response_format
    if wanted is None or wanted.kind == "text":
        return None, None
    try:
        if wanted.model is not None:
            return wanted.model.model_validate_json(text), None
        value = json.loads(text, parse_constant=_no_constant)
    except Exception as error:  # noqa: BLE001 - a model's validators are the caller's code and may raise anything
        problem = " ".join(str(error).split())
        return None, f"the answer does not parse as {wanted.name if wanted.model else 'JSON'}: {problem[:300]}"
    if wanted.kind == "json" and not isinstance(value, dict):
        return None, "the answer is JSON, but not an object"
    return value, None


def _no_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is not JSON")
