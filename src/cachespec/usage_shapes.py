"""One conversion per vendor shape of a usage object, in both directions.

Every vendor counts differently. Chat, Responses and Gemini report an input total that *includes* what was read from and
written to a cache; Messages and Converse report only what lies beside the cache; Cohere reports what it bills. Here, and
nowhere else, each becomes the disjoint buckets of `Usage`:

=========  ====================  ==========================  ====================================================
api        input total           reads                       writes
=========  ====================  ==========================  ====================================================
chat       prompt_tokens         part of it                  part of it, ``"30m"``; None when not reported
responses  input_tokens          part of it                  part of it, by lifetime; without a split ``"30m"``
messages   sum of three counts   beside it                   beside it, 5m and 1h; without a split ``"unspecified"``
converse   sum of three counts   beside it                   beside it, by ``cacheDetails``; else ``"unspecified"``
gemini     prompt + tool prompt  part of it, absent on miss  not reported
cohere     billed_units          not reported                not reported
=========  ====================  ==========================  ====================================================

A count that is absent or null is None, never 0. A count that is no whole number from 0 to 2^53 - 1, a part that is larger
than its total, and parts without their total are an `InputError` that names the field. What lies beside the totals (searches,
media, `iterations`) and makes no sense is left out instead, and `Usage.unread` says so. Everything else in the object (a
vendor's own `cost`, its grand total) is passed over.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

from cachespec._counts import Fields, added, apart_of, exclusive, first, inclusive, media_of, named, part_of
from cachespec.errors import InputError
from cachespec.usage import MEDIA, WEB_SEARCH, Made, Usage

_Convert = TypeVar("_Convert", Callable[[Fields], Usage], Callable[[Usage], dict[str, Any]])
APIS = ("chat", "responses", "messages", "converse", "gemini", "cohere")
BILLING = ("service_tier", "speed", "inference_geo")
"""What a price depends on beside the counts, as a request asks for it, and an answer says it was served."""


def usage_from(api: str, payload: Mapping[str, Any]) -> Usage:
    """Convert a vendor's usage object; `api` is one of `APIS`. Raises InputError naming the field."""
    fields = Fields(payload)
    usage = _pick(_FROM, api)(fields)
    return replace(usage, unread=True) if fields.unread else usage


def usage_to(api: str, usage: Usage) -> dict[str, Any]:
    """The usage object that a vendor would send for `usage`: the inverse of `usage_from`.

    ``usage_from(api, usage_to(api, u)) == u`` for every `u` the shape can express. Input and output totals are always
    kept. None of the shapes has drafted and accepted tokens. Besides, what a shape cannot express:

    - chat: a lifetime other than ``"30m"`` (writes come back as that).
    - gemini: searches; messages, responses: media; converse, cohere: all that is `apart`. Nobody: `requests`.
    - responses: a lifetime other than ``"30m"`` and ``"12h"`` (comes back as ``"30m"``).
    - messages, converse: a lifetime other than ``"5m"`` and ``"1h"`` (comes back as ``"unspecified"``); converse: reasoning.
    - gemini: writes (they come back as uncached). cohere: reads, writes (both come back as uncached) and reasoning.
    - reads, writes or reasoning where the total they belong to is not known are left out.
    """
    return _pick(_TO, api)(usage)


def billing_from(api: str, payload: Mapping[str, Any]) -> dict[str, str]:
    """What a usage object says of the price beside its counts (`BILLING`).

    OpenAI says its tier elsewhere in the response. Raises InputError for what is no string.
    """
    fields = Fields(payload)
    names = {"messages": BILLING, "gemini": ("serviceTier",)}.get(api, ())
    found = {name: fields.text(name) for name in names}
    return {name.replace("serviceTier", "service_tier"): value for name, value in found.items() if value is not None}


def _pick(table: Mapping[str, _Convert], api: str) -> _Convert:
    if api not in table:
        raise InputError(f"unknown usage shape {api!r}; known: {', '.join(APIS)}", field="api")
    return table[api]


def usage_from_chat(fields: Fields) -> Usage:
    """Chat Completions, and servers that speak it (DeepSeek's hit and miss counts, a bare ``cached_tokens``).

    Searches are Perplexity's queries, or xAI's sources.

    Two habits of such servers: reasoning left out of `completion_tokens` but not of `total_tokens` (xAI) is added to the
    output; tokens counted as read *and* as written (OpenRouter for Gemini, where one request does both) count once, as
    written, which is the dearer.
    """
    details = fields.inside("prompt_tokens_details")
    hit, miss = fields.count("prompt_cache_hit_tokens"), fields.count("prompt_cache_miss_tokens")
    total = first(fields.count("prompt_tokens"), None if hit is None or miss is None else hit + miss)
    read = first(details.count("cached_tokens"), hit, fields.count("cached_tokens"))
    written = details.count("cache_write_tokens")
    if read and written and total is not None and max(read, written) <= total < read + written:
        read = max(read - written, 0)
    cached_field = "prompt_tokens_details.cached_tokens" if hit is None else "prompt_cache_hit_tokens"
    uncached, read, writes = inclusive(
        total,
        read,
        None if written is None else named({"30m": written}),
        total_field="prompt_tokens",
        part_field=cached_field if not written else "prompt_tokens_details",
    )
    output = fields.count("completion_tokens")
    reasoning = fields.inside("completion_tokens_details").count("reasoning_tokens")
    everything = fields.count("total_tokens")
    if reasoning and output is not None and total is not None and everything == total + output + reasoning:
        output += reasoning
    part_of(reasoning, output, part_field="completion_tokens_details.reasoning_tokens", total_field="completion_tokens")
    searches = fields.aside(lambda: first(fields.count("num_search_queries"), fields.count("num_sources_used")))
    apart = apart_of(searches, input=media_of(details), output=media_of(fields.inside("completion_tokens_details")))
    return Usage(uncached=uncached, cache_read=read, cache_write=writes, output=output, reasoning=reasoning, apart=apart)


def usage_to_chat(usage: Usage) -> dict[str, Any]:
    """The inverse of `usage_from_chat`; see `usage_to` for what is lost."""
    details = {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.written}
    names = ("prompt_tokens", "prompt_tokens_details", "completion_tokens", "completion_tokens_details")
    result = _inclusive_object(usage, details, names)
    for side, total, inside in (("input", *names[:2]), ("output", *names[2:])):
        media = {f"{medium}_tokens": n for medium in MEDIA if (n := (usage.apart or {}).get(f"{side}_{medium}"))}
        if media and total in result:
            result[inside] = {**result.get(inside, {}), **media}
    return _with_searches(result, usage, "num_search_queries")


def usage_from_responses(fields: Fields) -> Usage:
    """OpenAI Responses. Written tokens that the lifetime split does not cover are ``"30m"``.

    The response's `tool_usage` may be in it, from beside it: there are the searches.
    """
    details = fields.inside("input_tokens_details")
    split = details.inside("cache_write_tokens_details")
    short, long = split.count("ttl_30m_tokens"), split.count("ttl_12h_tokens")
    written = first(details.count("cache_write_tokens"), added(short, long))
    if written is not None and (short or 0) + (long or 0) > written:
        raise InputError(
            f"the split ({(short or 0) + (long or 0)}) exceeds cache_write_tokens ({written})",
            field="input_tokens_details.cache_write_tokens_details",
        )
    uncached, read, writes = inclusive(
        fields.count("input_tokens"),
        details.count("cached_tokens"),
        None if written is None else named({"30m": written - (long or 0), "12h": long}),
        total_field="input_tokens",
        part_field="input_tokens_details",
    )
    output = fields.count("output_tokens")
    reasoning = fields.inside("output_tokens_details").count("reasoning_tokens")
    part_of(reasoning, output, part_field="output_tokens_details.reasoning_tokens", total_field="output_tokens")
    apart = apart_of(fields.aside(lambda: fields.inside("tool_usage").inside("web_search").count("num_requests")))
    return Usage(uncached=uncached, cache_read=read, cache_write=writes, output=output, reasoning=reasoning, apart=apart)


def usage_to_responses(usage: Usage) -> dict[str, Any]:
    """The inverse of `usage_from_responses`; see `usage_to` for what is lost."""
    details: dict[str, Any] = {"cached_tokens": usage.cache_read, "cache_write_tokens": usage.written}
    if usage.written:
        long = (usage.cache_write or {}).get("12h", 0)
        details["cache_write_tokens_details"] = {"ttl_30m_tokens": usage.written - long, "ttl_12h_tokens": long}
    names = ("input_tokens", "input_tokens_details", "output_tokens", "output_tokens_details")
    result = _inclusive_object(usage, details, names)
    return _with_searches(result, usage, "tool_usage", "web_search", "num_requests")


def _with_searches(result: dict[str, Any], usage: Usage, *path: str) -> dict[str, Any]:
    """A vendor's object with its count of searches, at this place, where there were any."""
    count: Any = (usage.apart or {}).get(WEB_SEARCH)
    for key in reversed(path[1:]):
        count = {key: count} if count else None
    return {**result, path[0]: count} if count else result


def _inclusive_object(usage: Usage, details: Mapping[str, Any], names: tuple[str, str, str, str]) -> dict[str, Any]:
    input_key, input_details, output_key, output_details = names
    result: dict[str, Any] = {}
    if usage.input_tokens is not None:
        result[input_key] = usage.input_tokens
        known = {key: value for key, value in details.items() if value is not None}
        if known:
            result[input_details] = known
    if usage.output is not None:
        result[output_key] = usage.output
        if usage.reasoning is not None:
            result[output_details] = {"reasoning_tokens": usage.reasoning}
    if usage.input_tokens is not None and usage.output is not None:
        result["total_tokens"] = usage.input_tokens + usage.output
    return result


def usage_from_messages(fields: Fields) -> Usage:
    """Anthropic Messages (beta iterations too): `input_tokens` lies beside reads and writes.

    Entries under `iterations` whose type is not ``message`` (a compaction) lie outside the top-level totals, are billed,
    and are added here. Those that are messages are the requests which the totals add up, where they do. What cannot be told
    request by request, for one lacks a count, is told as a sum.
    """
    searches = fields.aside(lambda: fields.inside("server_tool_use").count("web_search_requests"))
    top = replace(_messages_part(fields), apart=apart_of(searches))
    inside: list[Made] = []
    outside: list[Made] = []
    for entry in fields.aside(lambda: fields.items("iterations")) or ():
        if read := entry.aside(partial(_iteration, entry)):
            kind, made = read
            (inside if kind == "message" else outside).append(made)
    whole = _sum([top, *(made.usage for made in outside)])
    if inside and all(map(_told, inside)) and _counts(_sum(made.usage for made in inside)) == _counts(top):
        inside[0] = replace(inside[0], usage=replace(inside[0].usage, apart=top.apart))
    else:
        inside = [Made(usage=top)]
    told, made_for_it = all(map(_told, outside)), (*inside, *outside)
    # Where the answer itself lacks a count, no sum stands for it: there is no cost.
    requests = made_for_it if len(made_for_it) > 1 and (told or not _told(Made(usage=top))) else ()
    return replace(whole, apart=top.apart, requests=requests, unread=not told)


def _iteration(entry: Fields) -> tuple[str | None, Made]:
    return entry.text("type"), Made(usage=_messages_part(entry), model=entry.aside(lambda: entry.text("model")))


def _told(made: Made) -> bool:
    """Whether both of its sides are counted."""
    return made.usage.uncached is not None and made.usage.output is not None


def _sum(parts: Iterable[Usage]) -> Usage:
    """The counts of several requests; what some did not report is what the others did."""
    usages = list(parts)
    writes = [part.cache_write for part in usages if part.cache_write is not None]
    ttls = dict.fromkeys(ttl for each in writes for ttl in each)
    return Usage(
        uncached=added(*(part.uncached for part in usages)),
        cache_read=added(*(part.cache_read for part in usages)),
        cache_write={ttl: sum(each.get(ttl, 0) for each in writes) for ttl in ttls} if writes else None,
        output=added(*(part.output for part in usages)),
        reasoning=added(*(part.reasoning for part in usages)),
    )


def _counts(usage: Usage) -> tuple[object, ...]:
    return usage.uncached, usage.cache_read or 0, usage.cache_write or {}, usage.output


def _messages_part(fields: Fields) -> Usage:
    split = fields.inside("cache_creation")
    uncached, read, writes = exclusive(
        fields,
        fields.count("input_tokens"),
        fields.count("cache_read_input_tokens"),
        fields.count("cache_creation_input_tokens"),
        {"5m": split.count("ephemeral_5m_input_tokens"), "1h": split.count("ephemeral_1h_input_tokens")},
        names=("input_tokens", "cache_creation_input_tokens", "cache_creation"),
    )
    output = fields.count("output_tokens")
    reasoning = part_of(
        fields.inside("output_tokens_details").count("thinking_tokens"),
        output,
        part_field=fields.name("output_tokens_details.thinking_tokens"),
        total_field=fields.name("output_tokens"),
    )
    return Usage(uncached=uncached, cache_read=read, cache_write=writes, output=output, reasoning=reasoning)


def usage_to_messages(usage: Usage) -> dict[str, Any]:
    """The inverse of `usage_from_messages`; see `usage_to` for what is lost."""
    result: dict[str, Any] = {}
    if usage.uncached is not None:
        result["input_tokens"] = usage.uncached
        if usage.cache_read is not None:
            result["cache_read_input_tokens"] = usage.cache_read
        if usage.cache_write is not None:
            writes = usage.cache_write
            result["cache_creation_input_tokens"] = usage.written
            if set(named(writes)) <= {"5m", "1h"}:
                result["cache_creation"] = {
                    "ephemeral_5m_input_tokens": writes.get("5m", 0),
                    "ephemeral_1h_input_tokens": writes.get("1h", 0),
                }
            elif writes.get("5m") or writes.get("1h"):
                result["cache_creation"] = {
                    f"ephemeral_{ttl}_input_tokens": writes[ttl] for ttl in ("5m", "1h") if writes.get(ttl)
                }
    if usage.output is not None:
        result["output_tokens"] = usage.output
        if usage.reasoning is not None:
            result["output_tokens_details"] = {"thinking_tokens": usage.reasoning}
    return _with_searches(result, usage, "server_tool_use", "web_search_requests")


def usage_from_converse(fields: Fields) -> Usage:
    """Bedrock Converse: `inputTokens` lies beside reads and writes."""
    split: dict[str, int | None] = {}
    for entry in fields.items("cacheDetails"):
        ttl, count = entry.text("ttl"), entry.count("inputTokens")
        if ttl in ("5m", "1h"):
            split[ttl] = added(split.get(ttl), count)
    uncached, read, writes = exclusive(
        fields,
        fields.count("inputTokens"),
        fields.count("cacheReadInputTokens"),
        fields.count("cacheWriteInputTokens"),
        split,
        names=("inputTokens", "cacheWriteInputTokens", "cacheDetails"),
    )
    return Usage(uncached=uncached, cache_read=read, cache_write=writes, output=fields.count("outputTokens"))


def usage_to_converse(usage: Usage) -> dict[str, Any]:
    """The inverse of `usage_from_converse`; see `usage_to` for what is lost."""
    result: dict[str, Any] = {}
    if usage.uncached is not None:
        result["inputTokens"] = usage.uncached
        if usage.cache_read is not None:
            result["cacheReadInputTokens"] = usage.cache_read
        if usage.cache_write is not None:
            result["cacheWriteInputTokens"] = usage.written
            details = [{"ttl": ttl, "inputTokens": n} for ttl, n in usage.cache_write.items() if n and ttl in ("5m", "1h")]
            if details:
                result["cacheDetails"] = details
    if usage.output is not None:
        result["outputTokens"] = usage.output
    if usage.input_tokens is not None and usage.output is not None:
        result["totalTokens"] = usage.input_tokens + usage.output
    return result


def usage_from_gemini(fields: Fields) -> Usage:
    """Gemini `usageMetadata`. Tool-use prompt tokens lie beside `promptTokenCount`; thoughts beside the candidates.

    The vendor leaves zero counts out, so an absent candidate count is taken from `totalTokenCount` where there is one.
    """
    prompt, tools = fields.count("promptTokenCount"), fields.count("toolUsePromptTokenCount")
    if prompt is None and tools is not None:
        raise InputError("missing, though toolUsePromptTokenCount is reported", field="promptTokenCount")
    total = added(prompt, tools)
    uncached, read, _ = inclusive(
        total,
        fields.count("cachedContentTokenCount"),
        None,
        total_field="promptTokenCount",
        part_field="cachedContentTokenCount",
    )
    answer, thoughts = fields.count("candidatesTokenCount"), fields.count("thoughtsTokenCount")
    everything = fields.count("totalTokenCount")
    if answer is None and everything is not None and total is not None and everything >= total + (thoughts or 0):
        answer = everything - total - (thoughts or 0)
    apart = apart_of(
        None,
        input=_modalities(fields, "promptTokensDetails", "toolUsePromptTokensDetails"),
        output=_modalities(fields, "candidatesTokensDetails"),
    )
    output = added(answer, thoughts)
    return Usage(uncached=uncached, cache_read=read, cache_write=None, output=output, reasoning=thoughts, apart=apart)


def _modalities(fields: Fields, *keys: str) -> Mapping[str, int | None]:
    """Gemini's tokens by modality, those that are no text. A document is read as its pages' images."""
    found: dict[str, int | None] = {}
    lists = [fields.aside(partial(fields.items, key)) or () for key in keys]
    for entry in (entry for entries in lists for entry in entries):
        kind = (entry.aside(partial(entry.text, "modality")) or "").lower()
        medium = "image" if kind == "document" else kind
        if medium in MEDIA:
            found[medium] = added(found.get(medium), entry.aside(partial(entry.count, "tokenCount")))
    return found


def usage_to_gemini(usage: Usage) -> dict[str, Any]:
    """The inverse of `usage_from_gemini`; see `usage_to` for what is lost."""
    result: dict[str, Any] = {}
    if usage.input_tokens is not None:
        result["promptTokenCount"] = usage.input_tokens
        if usage.cache_read is not None:
            result["cachedContentTokenCount"] = usage.cache_read
    if usage.output is not None:
        result["candidatesTokenCount"] = usage.output - (usage.reasoning or 0)
        if usage.reasoning is not None:
            result["thoughtsTokenCount"] = usage.reasoning
        if usage.input_tokens is not None:
            result["totalTokenCount"] = usage.input_tokens + usage.output
    for side, key in (("input", "promptTokensDetails"), ("output", "candidatesTokensDetails")):
        counts = {medium: (usage.apart or {}).get(f"{side}_{medium}") for medium in MEDIA}
        media = [{"modality": medium.upper(), "tokenCount": n} for medium, n in counts.items() if n]
        if media:
            result[key] = media
    return result


def usage_from_cohere(fields: Fields) -> Usage:
    """Cohere: `billed_units` are what is billed. Its `tokens` and `cached_tokens` count the whole rendered prompt.

    The vendor's schema has numbers, so ``12.0`` is taken as 12.
    """
    billed = fields.inside("billed_units")
    return Usage(
        uncached=billed.count("input_tokens", integral_float=True),
        cache_read=None,
        cache_write=None,
        output=billed.count("output_tokens", integral_float=True),
    )


def usage_to_cohere(usage: Usage) -> dict[str, Any]:
    """The inverse of `usage_from_cohere`; see `usage_to` for what is lost."""
    counts = {"input_tokens": usage.input_tokens, "output_tokens": usage.output}
    known = {key: value for key, value in counts.items() if value is not None}
    return {"billed_units": known} if known else {}


_FROM: Mapping[str, Callable[[Fields], Usage]] = {
    "chat": usage_from_chat,
    "responses": usage_from_responses,
    "messages": usage_from_messages,
    "converse": usage_from_converse,
    "gemini": usage_from_gemini,
    "cohere": usage_from_cohere,
}
_TO: Mapping[str, Callable[[Usage], dict[str, Any]]] = {
    "chat": usage_to_chat,
    "responses": usage_to_responses,
    "messages": usage_to_messages,
    "converse": usage_to_converse,
    "gemini": usage_to_gemini,
    "cohere": usage_to_cohere,
}
