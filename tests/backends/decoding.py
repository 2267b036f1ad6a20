"""Helpers of the decoder tests: recordings, framings, and one way to run a decoder over pieces of bytes."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from cachespec.backends._decode import EventDecoder
from cachespec.backends._decode_chat import ChatDecoder
from cachespec.backends._decode_messages import MessagesDecoder
from cachespec.backends._decode_responses import ResponsesDecoder
from cachespec.errors import BackendError
from cachespec.events import Event, ReasoningDelta, TextDelta

DECODERS: dict[str, type[EventDecoder]] = {"chat": ChatDecoder, "responses": ResponsesDecoder, "messages": MessagesDecoder}
RECORDED = {path.stem: path.read_bytes() for path in sorted((Path(__file__).parent / "recorded").glob("*.sse"))}


def decoder(api: str) -> EventDecoder:
    return DECODERS[api](backend="b", model="asked")


def api_of(recording: str) -> str:
    return recording.partition("_")[0]


def run(api: str, pieces: Iterable[bytes]) -> tuple[list[Event], BackendError | None]:
    """All events, and the error that ended them."""
    d, events = decoder(api), []
    try:
        for piece in pieces:
            events += d.feed(piece)
        events += d.close()
        if d.error is not None:
            d.close()
    except BackendError as error:
        return events, error
    return events, None


def say(*payloads: Any, named: bool = False) -> bytes:
    """Payloads as a stream; `named` adds the ``event:`` line that Responses and Messages have."""
    out = b""
    for payload in payloads:
        if named and isinstance(payload, dict) and "type" in payload:
            out += f"event: {payload['type']}\n".encode()
        out += b"data: %b\n\n" % (payload if isinstance(payload, str) else json.dumps(payload)).encode()
    return out


def decode(api: str, *payloads: Any) -> list[Event]:
    """The events of payloads that hold no error; the same with and without event names."""
    events, error = run(api, [say(*payloads)])
    assert error is None, error
    assert run(api, [say(*payloads, named=True)]) == (events, None)
    return events


def fails(api: str, *payloads: Any) -> tuple[list[Event], BackendError]:
    events, error = run(api, [say(*payloads)])
    assert error is not None
    assert error.backend == "b"
    assert error.model == "asked"
    return events, error


def framings(body: bytes) -> dict[str, bytes]:
    """The same events in other legal framings."""
    lines = body.decode().split("\n")
    multiline = []
    for line in lines:
        if line.startswith("data: {"):
            pretty = json.dumps(json.loads(line[6:]), indent=0, ensure_ascii=False)
            multiline += [f"data: {part}" for part in pretty.split("\n")]
        else:
            multiline.append(line)
    return {
        "lf": body,
        "crlf": body.replace(b"\n", b"\r\n"),
        "cr": body.replace(b"\n", b"\r"),
        "no-space": body.replace(b"data: ", b"data:").replace(b"event: ", b"event:"),
        "comments": b": ping\n\n" + body.replace(b"data: ", b": between\nid: 1\nretry: 5\ndata: "),
        "bom": b"\xef\xbb\xbf" + body,
        "multi-line": "\n".join(multiline).encode(),
        "unterminated": body.rstrip(b"\n"),
        "data-only": b"\n".join(line for line in body.split(b"\n") if not line.startswith(b"event:")),
        "events without data": body.replace(b"data: ", b"\nevent: ping\n\nid: 3\n\ndata: "),
    }


def text(events: Iterable[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, TextDelta))


def thoughts(events: Iterable[Event]) -> str:
    return "".join(e.text for e in events if isinstance(e, ReasoningDelta))
