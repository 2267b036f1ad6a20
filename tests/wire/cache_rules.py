"""The vendors' cache rules, applied to the bodies that arrive: a plain second reading of their guides, for `WireServer.counts`.

Nothing here is shared with the package. Tokens are characters: a quarter of a block's JSON, rounded up, and two. Entries are
kept for each account (API key), are readable `ready_s` after their request, live from its start, and are renewed with every
shallower live one when they are read. What a vendor answers with 400 is returned as a text.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from hashlib import sha256
from itertools import pairwise
from typing import Any

_SECONDS = {"5m": 300.0, "1h": 3600.0, "30m": 1800.0, "12h": 43200.0, "in_memory": 300.0, "24h": 86400.0}
_MARKS = ("cache_control", "prompt_cache_breakpoint")


@dataclass
class Block:
    """A piece of the prompt: what a model reads, the mark on it, what it is, and whether an implicit boundary may follow."""

    text: str
    kind: str
    mark: dict[str, Any] | None = None
    eligible: bool = False
    digest: str = ""
    tokens: int = 0
    position: int = 0


@dataclass
class CacheRules:
    """Set as a `WireServer.counts`. `now` is the vendor's clock; `log` has (model, read, {ttl: written}, input) per request."""

    now: Callable[[], float]
    minimum: int = 1024
    ready_s: float = 0.0
    entries: dict[tuple[str, str], tuple[float, float, str]] = field(default_factory=dict)  # readable from, dies at, lifetime
    log: list[tuple[str, int, dict[str, int], int]] = field(default_factory=list)

    def __call__(self, api: str, body: dict[str, Any], headers: dict[str, str]) -> Callable[[int], dict[str, Any]] | str:
        account = headers.get("authorization") or headers.get("x-api-key") or ""
        if api == "messages":
            return self._anthropic(body, account)
        return self._openai(api, body, account)

    # -- Anthropic

    def _anthropic(self, body: dict[str, Any], account: str) -> Callable[[int], dict[str, Any]] | str:
        blocks = list(_messages_blocks(body))
        top = body.get("cache_control")
        if top is not None:
            last = next((b for b in reversed(blocks) if _cacheable(b)), None)
            if last is None:
                return "nothing to cache"
            if last.mark is not None and _ttl(last.mark) != _ttl(top):
                return "automatic caching contradicts the last block's ttl"
            if last.mark is None:
                last.mark = top
        marked = [b for b in blocks if b.mark is not None]
        if len(marked) > 4:
            return f"a maximum of 4 blocks with cache_control may be provided, found {len(marked)}"
        if any(not _cacheable(b) for b in marked):
            return "cache_control cannot be set for empty text or thinking blocks"
        for earlier, later in pairwise(marked):
            if _SECONDS[_ttl(earlier.mark)] < _SECONDS[_ttl(later.mark)]:
                return "a ttl=1h cache_control block must not come after a ttl=5m cache_control block"
        late = [body.get(k) for k in ("tool_choice", "thinking", "output_config")]
        _chain(blocks, [body["model"], body.get("speed")], [*late, any('"type": "image"' in b.text for b in blocks)])
        found = -1
        for i, block in enumerate(blocks):
            if block.mark is not None:
                for j in range(i, -1, -1):
                    if block.position - blocks[j].position >= 20:
                        break
                    if j > found and self._readable(account, blocks[j]):
                        found = j
                        break
        read, writes = self._settle(account, blocks, found, [(b, _ttl(b.mark)) for b in marked])
        total = blocks[-1].tokens
        self.log.append((body["model"], read, writes, total))
        return lambda output: {
            "input_tokens": total - read - sum(writes.values()),
            "cache_creation_input_tokens": sum(writes.values()),
            "cache_read_input_tokens": read,
            "cache_creation": {
                "ephemeral_5m_input_tokens": writes.get("5m", 0),
                "ephemeral_1h_input_tokens": writes.get("1h", 0),
            },
            "output_tokens": output,
            "service_tier": "standard",
        }

    # -- OpenAI

    def _openai(self, api: str, body: dict[str, Any], account: str) -> Callable[[int], dict[str, Any]] | str:
        blocks = list(_chat_blocks(body) if api == "chat" else _responses_blocks(body))
        new = _version(body["model"]) >= (5, 6)
        options = body.get("prompt_cache_options")
        if options is not None and body.get("prompt_cache_retention") is not None:
            return "prompt_cache_retention and prompt_cache_options must not be used together"
        if not new and (options is not None or any(b.mark is not None for b in blocks)):
            return "prompt_cache_options is not supported with this model"
        if any(b.mark is not None and b.kind == "fixed" for b in blocks):
            return "unknown parameter: prompt_cache_breakpoint"
        parameters = [
            body.get(k) for k in ("model", "parallel_tool_calls", "text", "response_format", "reasoning", "verbosity")
        ]
        _chain(blocks, [*parameters, body.get("reasoning_effort")], [])
        key = f"{account}/{body.get('prompt_cache_key')}"
        read, writes = (self._marked if new else self._by_itself)(key, blocks, body)
        total = blocks[-1].tokens
        self.log.append((body["model"], read, writes, total))
        cached: dict[str, Any] = {"cached_tokens": read}
        if new:
            cached["cache_write_tokens"] = sum(writes.values())
        names = ("prompt_tokens", "completion_tokens") if api == "chat" else ("input_tokens", "output_tokens")

        def usage(output: int) -> dict[str, Any]:
            counts: dict[str, Any] = {names[0]: total, names[1]: output, "total_tokens": total + output}
            counts[f"{names[0]}_details"] = cached
            return counts if api == "chat" else {**counts, "output_tokens_details": {"reasoning_tokens": 0}}

        return usage

    def _marked(self, key: str, blocks: list[Block], body: dict[str, Any]) -> tuple[int, dict[str, int]]:
        """From 5.6 on: entries at breakpoints, exact; without explicit mode one at the end of the latest eligible message."""
        options = body.get("prompt_cache_options") or {}
        explicit = [i for i, b in enumerate(blocks) if b.mark is not None and b.kind != "deaf"]
        marks = [(blocks[i], str((blocks[i].mark or {}).get("ttl") or options.get("ttl") or "30m")) for i in explicit]
        looked = explicit[:2] + explicit[-50:]
        if options.get("mode", "implicit") == "implicit":
            eligible = [i for i, b in enumerate(blocks) if b.eligible]
            looked += eligible[-21:]
            if eligible and eligible[-1] not in explicit:
                marks = [*marks, (blocks[eligible[-1]], options.get("ttl") or "30m")]
        found = max((i for i in looked if self._readable(key, blocks[i])), default=-1)
        marks.sort(key=lambda pair: pair[0].tokens)
        return self._settle(key, blocks, found, marks[-4:])

    def _by_itself(self, key: str, blocks: list[Block], body: dict[str, Any]) -> tuple[int, dict[str, int]]:
        """Before 5.6: any prefix, on the machine that the key leads to; counts in whole steps of 128, writes not told."""
        found = max((i for i, b in enumerate(blocks) if self._readable(key, b)), default=-1)
        ttl = body.get("prompt_cache_retention") or "in_memory"
        read, _ = self._settle(key, blocks, found, [(b, ttl) for b in blocks])
        return read // 128 * 128, {}

    # -- entries

    def _readable(self, account: str, block: Block) -> bool:
        entry = self.entries.get((account, block.digest))
        return entry is not None and entry[0] <= self.now() < entry[1]

    def _settle(
        self, account: str, blocks: list[Block], found: int, marks: list[tuple[Block, str]]
    ) -> tuple[int, dict[str, int]]:
        """Renew what is read, write at the marks beyond it; the tokens read, and written by lifetime."""
        now, upto = self.now(), blocks[found].tokens if found >= 0 else 0
        read = upto
        for block in blocks[: found + 1]:
            if self._readable(account, block):
                start, _, ttl = self.entries[account, block.digest]
                self.entries[account, block.digest] = (start, now + _SECONDS[ttl], ttl)
        writes: dict[str, int] = {}
        for block, ttl in marks:
            if block.tokens > upto and block.tokens >= self.minimum:
                writes[ttl] = writes.get(ttl, 0) + block.tokens - upto
                upto = block.tokens
                self.entries[account, block.digest] = (now + self.ready_s, now + _SECONDS[ttl], ttl)
        return read, writes


def _ttl(mark: dict[str, Any] | None) -> str:
    return str((mark or {}).get("ttl") or "5m")


def _version(model: str) -> tuple[int, int]:
    found = re.match(r"gpt-(\d+)(?:\.(\d+))?", model)
    return (int(found[1]), int(found[2] or 0)) if found else (0, 0)


def _cacheable(block: Block) -> bool:
    return block.kind not in ("thinking", "redacted_thinking", "empty")


def _plain(value: Any) -> Any:
    """A block without marks, however deep."""
    if isinstance(value, dict):
        return {k: _plain(v) for k, v in value.items() if k not in _MARKS}
    return [_plain(v) for v in value] if isinstance(value, list) else value


def _chain(blocks: list[Block], first: list[Any], late: list[Any]) -> None:
    """Digests of all prefixes, their tokens, and positions, where calls or results that stand together count once."""
    digest, tokens, position, before = json.dumps(first, sort_keys=True), 0, 0, ""
    turned = False
    for block in blocks:
        if block.kind not in ("tool", "system") and not turned:
            turned = True
            digest += json.dumps(late, sort_keys=True)
        digest = block.digest = sha256((digest + "\0" + block.text).encode()).hexdigest()
        tokens += -(-len(block.text) // 4) + 2
        position += not (block.kind in ("tool_use", "tool_result") and block.kind == before)
        block.tokens, block.position, before = tokens, position, block.kind


def _block(value: Any, kind: str, role: str, mark: str, *, eligible: bool = False) -> Block:
    if isinstance(value, str):
        value = {"type": "text", "text": value}
    plain = _plain(value)
    if plain.get("type") in ("text", "input_text", "output_text"):
        plain = {"text": plain.get("text")}
        if not str(plain["text"]).strip() and kind == "text":
            kind = "empty"
    return Block(f"{role}:{json.dumps(plain, ensure_ascii=False)}", kind, value.get(mark), eligible)


def _messages_blocks(body: dict[str, Any]) -> Iterator[Block]:
    mark = "cache_control"
    for tool in body.get("tools") or ():
        yield _block(tool, "tool", "tools", mark)
    system = body.get("system") or ()
    for part in [system] if isinstance(system, str) else system:
        block = _block(part, "text", "system", mark)
        block.kind = "system" if block.kind == "text" else block.kind
        yield block
    for message in body["messages"]:
        content = message["content"]
        for part in [content] if isinstance(content, str) else content:
            kind = "text" if isinstance(part, str) else part["type"]
            inner = [] if isinstance(part, str) else part.get("content")
            block = _block(part, kind, message["role"], mark)
            if isinstance(inner, list) and block.mark is None:
                block.mark = next((p[mark] for p in inner if isinstance(p, dict) and mark in p), None)
            yield block


def _chat_blocks(body: dict[str, Any]) -> Iterator[Block]:
    mark = "prompt_cache_breakpoint"
    if body.get("tools"):
        yield Block(json.dumps(body["tools"]), "fixed", {} if mark in json.dumps(body["tools"]) else None)
    messages = body["messages"]
    for i, message in enumerate(messages):
        role = message["role"]
        following = messages[i + 1]["role"] if i + 1 < len(messages) else ""
        ends = role == "user" or (role == "tool" and following != "tool")
        ends = ends or (role in ("developer", "system") and following not in ("developer", "system") and i < 2)
        content = message.get("content")
        parts = [content] if isinstance(content, str) else list(content or ())
        for j, part in enumerate(parts):
            kind = "deaf" if role == "assistant" else "text"
            yield _block(part, kind, role, mark, eligible=ends and j == len(parts) - 1)
        if message.get("tool_calls"):
            yield Block(json.dumps(message["tool_calls"]), "call")


def _responses_blocks(body: dict[str, Any]) -> Iterator[Block]:
    mark = "prompt_cache_breakpoint"
    if body.get("tools"):
        yield Block(json.dumps(body["tools"]), "fixed", {} if mark in json.dumps(body["tools"]) else None)
    if body.get("instructions"):
        yield _block(body["instructions"], "fixed", "developer", mark)
    items = body["input"] if isinstance(body["input"], list) else [{"role": "user", "content": body["input"]}]
    for i, item in enumerate(items):
        kind = item.get("type", "message")
        following = items[i + 1] if i + 1 < len(items) else {}
        if kind == "function_call_output":
            output = item["output"]
            parts = [output] if isinstance(output, str) else output
            ends = following.get("type") != "function_call_output"
            for j, part in enumerate(parts):
                yield _block(part, "text", f"tool {item['call_id']}", mark, eligible=ends and j == len(parts) - 1)
        elif kind == "message":
            role, content = item["role"], item["content"]
            parts = [content] if isinstance(content, str) else content
            ends = role == "user" or (role == "developer" and i == 0)
            for j, part in enumerate(parts):
                spoken = not isinstance(part, str) and part.get("type") == "output_text"
                yield _block(part, "fixed" if spoken else "text", role, mark, eligible=ends and j == len(parts) - 1)
        else:
            yield Block(json.dumps(_plain(item)), "fixed", item.get(mark))
