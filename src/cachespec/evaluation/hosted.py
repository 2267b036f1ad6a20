"""A hosted backend: prefix sharing, and what policies would have cost. Nothing is sent, and nothing is speculated here."""

from __future__ import annotations

from cachespec.backends.base import Backend
from cachespec.cache_layout import tokens_of
from cachespec.config import Config
from cachespec.evaluation.prompts import Line, Slice, in_time
from cachespec.evaluation.result import ALL, Evaluated, Evaluation, Group, Progress, hosted_words
from cachespec.evaluation.sharing import Asked, shared, text_pages
from cachespec.evaluation.spending import Spent, caching_costs, rivals, routing_costs
from cachespec.prompt import build_prompt
from cachespec.request import Request
from cachespec.tokens import PRIOR, Sizes, sizes_of


def evaluate_hosted(config: Config, backend: Backend, prompts: Slice, progress: Progress) -> Evaluated:
    """Evaluate it from the requests alone."""
    pairs: list[tuple[Line, Request, int | None]] = []
    for number, line in enumerate(prompts.lines, start=1):
        request = line.request
        for turn, answer in enumerate(line.answers):
            pairs.append((line, request, None if answer is None else _tokens(answer)))
            if answer is None or turn == len(line.turns):
                break
            request = line.next(request, answer, turn + 1)
        progress("reading", number, len(prompts.lines))
    order = in_time([line for line, _, _ in pairs])
    asked = []
    for i in order:
        prompt = build_prompt(pairs[i][1])
        tokens = tokens_of(sizes_of(prompt.segments), PRIOR)
        asked.append(Asked(t=pairs[i][0].t, tokens=tokens, pages=text_pages(prompt, tokens)))
    prefix = shared(asked)
    spent = [Spent(request=pairs[i][1], t=pairs[i][0].t, output=pairs[i][2]) for i in order]
    caching = caching_costs(config, backend, spent, progress)
    routing = routing_costs(config, spent, lambda: rivals(config, backend.name, lambda each: each), progress)
    known = {name: cost for name, cost in caching.items() if cost is not None}
    best = min(known, key=lambda name: (known[name], name != config.caching.use)) if known else None
    groups = tuple(
        Group(
            category=category,
            requests=len(mine),
            tokens=sum(output or 0 for _, _, output in mine),
            drafters={},
            recommended="vendor_optimises",
        )
        for category in prompts.categories
        if (mine := [pair for pair in pairs if pair[0].category == category])
    )
    notes = []
    cut = sum(len(line.answers) for line in prompts.lines) - len(pairs)
    if cut:
        notes.append(f"{cut} later turns left out: they need the answers before them, which are not recorded")
    evaluation = Evaluation(
        backend=backend.name,
        groups=groups,
        overall=Group(
            category=ALL,
            requests=len(pairs),
            tokens=sum(group.tokens for group in groups),
            drafters={},
            recommended="vendor_optimises",
        ),
        prefix=prefix,
        policies={**caching, **routing},
        recommendation=hosted_words(backend.name, prefix, caching, best, routing),
        notes=tuple(notes),
    )
    return Evaluated(evaluation=evaluation, draft=None, caching=best)


def _tokens(text: str) -> int:
    """About how many tokens an answer has."""
    wide = len(text.encode("utf-8", "surrogatepass")) - len(text)
    return max(1, tokens_of(Sizes(text=len(text), wide=wide), PRIOR))
