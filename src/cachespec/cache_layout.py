"""The places of a prompt where a cache mark may stand, as a caching policy sees them.

A place is the end of a piece that a mark can sit on in the protocol at hand: the last tool, each part of the system prompt, the
last such piece of each message, and the larger pieces that begin a message (documents). What stands before a message's end
does not change when the conversation goes on, so the places of a prefix are worked out once and found again by its digest,
in whatever copy of the conversation it comes back.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from operator import attrgetter
from typing import Literal, TypeAlias

from cachespec.caching import Prefix, PrefixKind
from cachespec.messages import ImagePart, Message, OpaquePart, TextPart, ToolCallPart, ToolResultPart
from cachespec.prompt import Prompt, Segment
from cachespec.recall import Seen, trace
from cachespec.tokens import IMAGE_TOKENS, Sizes
from cachespec.values import quick

Api = Literal["messages", "responses", "chat"]
Weights: TypeAlias = tuple[float, ...]
"""Tokens for what a prompt is made of, as of `cachespec.tokens.PRIOR`."""
_State: TypeAlias = tuple[Sizes, int, str, int]
"""Between two messages: sizes, position and run as in `Layout`, and the index of the next segment."""
_KEY = attrgetter("key")
_DOCUMENT = 2_048
"""Bytes from which on a piece within a message is a place of its own."""
_REMEMBERED = 512
_MARKABLE_BLOCKS = ("document", "search_result", "image", "text", "tool_result")
"""Blocks of Anthropic's own that take a mark for certain; those of its server tools do not all."""
_RESULTS = ("function_call_output", "custom_tool_call_output")
"""Items of OpenAI's own whose output's end takes one."""
_SYSTEM = ("system", "developer")


@quick
@dataclass(frozen=True, slots=True)
class Layout:
    """The places of a prefix. `keys` are their digests, `at` the index of each one's segment, `head` how many of them stand
    before the messages. `tokens`, `segments` and `messages` say how far it goes, `sizes` what it is made of, `position` and
    `run` how many blocks that is and of which kind the last is. `before` is the tokens before the messages."""

    prefixes: tuple[Prefix, ...]
    keys: tuple[bytes, ...]
    at: tuple[int, ...]
    head: int
    tokens: int
    sizes: Sizes
    segments: int
    messages: int
    position: int
    run: str
    before: int = 0


def tokens_of(sizes: Sizes, weights: Weights) -> int:
    """Tokens of what is made of `sizes`."""
    text, wide, tools, other, piece = weights
    linear = text * sizes.text + wide * sizes.wide + tools * sizes.tools + other * sizes.json + piece * sizes.pieces
    return round(linear) + IMAGE_TOKENS * sizes.images


class Layouts:
    """Works layouts out, and remembers the latest. One event loop uses it."""

    def __init__(self, *, most: int = _REMEMBERED) -> None:
        self._most = most
        self._known: OrderedDict[tuple[bytes, Api, Weights], Layout] = OrderedDict()

    def of(self, prompt: Prompt, api: Api, weights: Weights) -> Layout:
        """The layout of a whole prompt for a protocol and a model's densities."""
        if api == "responses":
            api = "chat"  # nothing here tells OpenAI's two apart, so one walk serves both
        segments, messages = prompt.segments, prompt.request.messages
        known = self._known
        end = len(segments)
        if isinstance(messages, Seen):
            found = known.get((prompt.digest, api, weights))
            if found is None or (found.segments, found.messages) != (end, len(messages)):
                found = _along(self._beginning(prompt, api, weights), prompt, api, weights)
                self._keep(found, segments, api, weights)
            return found
        boundary = end
        for number in range(len(messages), -1, -1):
            found = known.get((segments[boundary - 1].digest, api, weights))
            if found is not None and found.segments == boundary and found.messages == number:
                known.move_to_end((segments[boundary - 1].digest, api, weights))
                break
            if number:
                boundary -= len(messages[number - 1].parts) or 1
        else:
            found = _head(prompt, api, weights)
            self._keep(found, segments, api, weights)
        if found.segments < end:
            found = _extended(found, prompt, api, weights)
            self._keep(found, segments, api, weights)
        return found

    def _beginning(self, prompt: Prompt, api: Api, weights: Weights) -> Layout:
        """The layout of what stands before the messages."""
        end = 1 + len(prompt.request.tools) + len(prompt.request.system)
        found = self._known.get((prompt.segments[end - 1].digest, api, weights))
        if found is None or (found.segments, found.messages) != (end, 0):
            found = _head(prompt, api, weights)
            self._keep(found, prompt.segments, api, weights)
        else:
            self._known.move_to_end((prompt.segments[end - 1].digest, api, weights))
        return found

    def _keep(self, layout: Layout, segments: Sequence[Segment], api: Api, weights: Weights) -> None:
        self._known[segments[layout.segments - 1].digest, api, weights] = layout
        while len(self._known) > self._most:
            self._known.popitem(last=False)


class _Walk:
    """Places as they are found, from where a layout ends."""

    def __init__(self, base: Layout | None, weights: Weights) -> None:
        self.weights = weights
        self.prefixes: list[Prefix] = [] if base is None else list(base.prefixes)
        self.keys: list[bytes] = [] if base is None else list(base.keys)
        self.at: list[int] = [] if base is None else list(base.at)
        self.sizes = _Sums() if base is None else _Sums.of(base.sizes)
        self.position = 0 if base is None else base.position
        self.run = "" if base is None else base.run

    def block(self, segment: Segment, run: str, part: object) -> None:
        """Count a block; calls, and results, that stand together count as one for a lookup."""
        self.sizes.add(segment, part)
        self.position += not (run and run == self.run)
        self.run = run

    def place(self, index: int, segment: Segment, kind: PrefixKind) -> None:
        tokens = tokens_of(self.sizes.sizes(), self.weights)
        self.prefixes.append(Prefix(key=segment.digest, at=segment.name, kind=kind, tokens=tokens, position=self.position))
        self.keys.append(segment.digest)
        self.at.append(index)

    def message(self, message: Message, segments: Sequence[Segment], index: int, api: Api) -> int:
        """Walk a message whose segments begin at `index`; returns where the next one's do."""
        count = len(message.parts)
        able = [_takes_mark(message, part, api) for part in message.parts]
        last = max((i for i, ok in enumerate(able) if ok), default=-1)
        if not count:
            self.block(segments[index], "", None)
        for i, part in enumerate(message.parts):
            segment = segments[index + i]
            run = "call" if isinstance(part, ToolCallPart) else "result" if isinstance(part, ToolResultPart) else ""
            self.block(segment, run, part)
            if i == last:
                self.place(index + i, segment, "system" if message.role in _SYSTEM else "turn")
            elif able[i] and segment.size >= _DOCUMENT and message.role == "user":
                self.place(index + i, segment, "document")
        return index + (count or 1)

    def layout(self, *, beginning: Layout | None, segments: int, messages: int) -> Layout:
        tokens = tokens_of(self.sizes.sizes(), self.weights)
        return Layout(
            prefixes=tuple(self.prefixes),
            keys=tuple(self.keys),
            at=tuple(self.at),
            head=len(self.keys) if beginning is None else beginning.head,
            tokens=tokens,
            sizes=self.sizes.sizes(),
            segments=segments,
            messages=messages,
            position=self.position,
            run=self.run,
            before=tokens if beginning is None else beginning.before,
        )


def _head(prompt: Prompt, api: Api, weights: Weights) -> Layout:
    """Parameters, tools and the system prompt."""
    request, segments = prompt.request, prompt.segments
    walk = _Walk(None, weights)
    last = -1
    if api == "messages":  # elsewhere no tool takes a mark; here one that is loaded later does not
        later = [bool((tool.raw or tool.extra or {}).get("defer_loading")) for tool in request.tools]
        last = max((i for i, deferred in enumerate(later) if not deferred), default=-1)
    index = 1
    for i, tool in enumerate(request.tools):
        walk.block(segments[index], "", tool)
        if i == last:
            walk.place(index, segments[index], "tools")
        index += 1
    for said in request.system:
        walk.block(segments[index], "", said)
        if said.text.strip():
            walk.place(index, segments[index], "system")
        index += 1
    return walk.layout(beginning=None, segments=index, messages=0)


def _extended(base: Layout, prompt: Prompt, api: Api, weights: Weights) -> Layout:
    request = prompt.request
    walk, index = _Walk(base, weights), base.segments
    for message in request.messages[base.messages :]:
        index = walk.message(message, prompt.segments, index, api)
    return walk.layout(beginning=base, segments=index, messages=len(request.messages))


def _along(head: Layout, prompt: Prompt, api: Api, weights: Weights) -> Layout:
    """The same for messages that are remembered, in whatever conversation: only what is new is walked."""
    messages, segments = prompt.request.messages, prompt.segments
    start = head.sizes, head.position, head.run, head.segments
    name = segments[head.segments - 1].digest, api, weights
    (sizes, position, run, _), places = trace(messages, _step, start, name, segments, api, weights)
    prefixes, at = zip(*places, strict=True) if places else ((), ())
    return Layout(
        prefixes=(*head.prefixes, *prefixes),
        keys=(*head.keys, *map(_KEY, prefixes)),
        at=(*head.at, *at),
        head=head.head,
        tokens=tokens_of(sizes, weights),
        sizes=sizes,
        segments=len(segments),
        messages=len(messages),
        position=position,
        run=run,
        before=head.tokens,
    )


def _step(
    state: _State, message: Message, segments: Sequence[Segment], api: Api, weights: Weights
) -> tuple[_State, list[tuple[Prefix, int]]]:
    walk = _Walk(None, weights)
    sizes, walk.position, walk.run, index = state
    walk.sizes = _Sums.of(sizes)
    index = walk.message(message, segments, index, api)
    return (walk.sizes.sizes(), walk.position, walk.run, index), list(zip(walk.prefixes, walk.at, strict=True))


def tokens_to(prompt: Prompt, weights: Weights, index: int) -> int:
    """Tokens up to the end of segment `index`, whatever it is."""
    request, sums = prompt.request, _Sums()
    pieces: list[object] = [*request.tools, *request.system]
    for message in request.messages:
        pieces += message.parts or (None,)
    for segment, part in zip(prompt.segments[1 : index + 1], pieces, strict=False):
        sums.add(segment, part)
    return tokens_of(sums.sizes(), weights)


def _takes_mark(message: Message, part: object, api: Api) -> bool:
    """Whether a planned mark can sit on a part in this protocol: never on what is empty, on reasoning, or where it is refused
    or goes unheard (OpenAI: what an assistant said)."""
    if api == "messages":
        if message.role in _SYSTEM:
            return False  # a system message in the middle of a conversation: not known to take one
        if isinstance(part, ToolCallPart | ImagePart):
            return True
    elif message.role == "assistant" or isinstance(part, ToolCallPart):
        return False
    if isinstance(part, TextPart):
        return bool(part.text.strip())
    if isinstance(part, ToolResultPart):
        if api == "messages":
            return True
        return bool(part.content) and _says_something(part.content[-1])
    if isinstance(part, ImagePart):
        return True
    if isinstance(part, OpaquePart):
        if api == "messages":
            text = part.raw.get("text")
            return part.raw.get("type") in _MARKABLE_BLOCKS and (text is None or bool(str(text).strip()))
        if part.raw.get("type") in _RESULTS:  # a mark on the result is a mark on its end
            output = part.raw.get("output")
            if isinstance(output, list):
                return bool(output) and isinstance(output[-1], dict) and bool(str(output[-1].get("text", "-")).strip())
            return isinstance(output, str) and bool(output.strip())
        return part.raw.get("type") in ("input_file", "file", "input_audio")
    return False


def _says_something(part: TextPart | ImagePart) -> bool:
    return isinstance(part, ImagePart) or bool(part.text.strip())


class _Sums:
    """Sizes while they grow (`cachespec.tokens.sizes_of`, a segment at a time, and with images taken out)."""

    __slots__ = ("images", "json", "pieces", "text", "tools", "wide")

    def __init__(self) -> None:
        self.text = self.wide = self.tools = self.json = self.pieces = self.images = 0

    @classmethod
    def of(cls, sizes: Sizes) -> _Sums:
        sums = cls()
        sums.text, sums.wide, sums.tools = sizes.text, sizes.wide, sizes.tools
        sums.json, sums.pieces, sums.images = sizes.json, sizes.pieces, sizes.images
        return sums

    def add(self, segment: Segment, part: object) -> None:
        self.pieces += 1
        value = segment.value
        if isinstance(value, str):
            self.text += len(value)
            self.wide += max(segment.size - len(value), 0)
        elif segment.kind == "tools":
            self.tools += segment.size
        else:
            images = _images(part)
            self.json += segment.size - sum(len(image.data) for image in images if image.data is not None)
            self.images += len(images)

    def sizes(self) -> Sizes:
        return Sizes(self.text, self.wide, self.tools, self.json, self.pieces, self.images)


def _images(part: object) -> Sequence[ImagePart]:
    if isinstance(part, ImagePart):
        return (part,)
    if isinstance(part, ToolResultPart):
        return [inner for inner in part.content if isinstance(inner, ImagePart)]
    return ()
