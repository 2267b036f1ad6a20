"""Prefix sharing: what repeats, within which lifetime, whose."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from cachespec.evaluation.sharing import Asked, Prefixes, shared, text_pages, token_pages
from cachespec.prompt import build_prompt
from cachespec.request import build_request


def of(*requests: tuple[float | None, list[int], str | None]) -> Prefixes:
    return shared(Asked(t=t, tokens=len(tokens), pages=token_pages(tokens, tenant)) for t, tokens, tenant in requests)


FIRST = list(range(40))


def test_pages_are_shared_by_lifetime_since_they_were_last_asked() -> None:
    found = of((0, FIRST, None), (200, [*FIRST, 1], None), (450, FIRST, None), (2000, FIRST, None), (9000, FIRST, None))
    assert found.total_tokens == 201
    assert found.shared_tokens == 4 * 32
    assert found.by_lifetime == {"5m": 2 * 32, "1h": 3 * 32, "any": 4 * 32}
    assert found.to_dict() == {"shared_tokens": 128, "total_tokens": 201, "by_lifetime": found.by_lifetime}


def test_without_times_only_the_order_counts() -> None:
    found = of((None, FIRST, None), (None, FIRST, None))
    assert found.by_lifetime == {"5m": None, "1h": None, "any": 32}


def test_tenants_share_nothing_and_a_page_counts_only_after_the_same_pages() -> None:
    assert of((0, FIRST, "a"), (1, FIRST, "b"), (2, FIRST, None)).shared_tokens == 0
    moved = [99, *FIRST]
    assert of((0, FIRST, None), (1, moved, None)).shared_tokens == 0


@given(st.lists(st.lists(st.integers(0, 2), max_size=80), max_size=8))
def test_it_agrees_with_comparing_all_pairs(prompts: list[list[int]]) -> None:
    expected = 0
    for i, prompt in enumerate(prompts):
        common = 0
        for before in prompts[:i]:
            same = next(
                (k for k, (a, b) in enumerate(zip(prompt, before, strict=False)) if a != b), min(len(prompt), len(before))
            )
            common = max(common, same // 16 * 16)
        expected += common
    assert of(*((float(i), prompt, None) for i, prompt in enumerate(prompts))).shared_tokens == expected


def test_texts_share_about_what_they_have_in_common() -> None:
    system = "You are a careful assistant. " * 40
    pages = []
    for text in ("What is new?", "What is old?"):
        prompt = build_prompt(build_request(text, system=system))
        pages.append(Asked(t=None, tokens=300, pages=text_pages(prompt, 300)))
    found = shared(pages)
    assert 0.9 * 300 < found.shared_tokens < 300
