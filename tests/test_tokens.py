"""Token estimates: learned from reports, exact for nobody, never far off for long."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path
from typing import Any

import pytest

from cachespec.bodies import request_from_body
from cachespec.engine.models import find_model
from cachespec.prompt import Prompt, build_prompt
from cachespec.request import build_request
from cachespec.tokens import IMAGE_TOKENS, PRIOR, Sizes, TokenModel, sizes_of

TEXT = "the cache holds what was read before and nobody pays for it twice unless somebody moved a clock into it"
WORDS = TEXT.split(" ")
TOOL: dict[str, Any] = {
    "type": "function",
    "function": {"name": "look", "description": "Looks.", "parameters": {"type": "object", "properties": {}}},
}


def prompt(words: int, tools: int = 0, wide: int = 0) -> Prompt:
    chosen = random.Random(words * 1000 + tools).choices(WORDS, k=words)
    made = [{**TOOL, "function": {**TOOL["function"], "name": f"look_{i}"}} for i in range(tools)]
    return build_prompt(build_request(" ".join(chosen) + "言" * wide, system="Be brief.", tools=made or None))


def truth(sizes: Sizes) -> int:
    """A vendor whose tokenizer is unlike the prior in every way."""
    return round(0.19 * sizes.text + 0.5 * sizes.wide + 0.35 * sizes.tools + 0.2 * sizes.json + 7 * sizes.pieces)


def test_sizes_tell_text_other_scripts_and_json_apart() -> None:
    sizes = sizes_of(prompt(10, tools=2, wide=5).segments)
    assert sizes.pieces == 4  # two tools, the system text, one message: parameters are read by no model
    assert sizes.wide == 10
    assert sizes.tools > 0
    assert sizes.json == 0
    called = {
        "role": "assistant",
        "tool_calls": [{"id": "1", "type": "function", "function": {"name": "f", "arguments": "{}"}}],
    }
    answered = {"role": "tool", "tool_call_id": "1", "content": "yes"}
    request = build_request(messages=[{"role": "user", "content": "Hi"}, called, answered])
    assert sizes_of(build_prompt(request).segments).json > 0
    half, rest = build_prompt(request).segments[:2], build_prompt(request).segments[2:]
    assert sizes_of(half) + sizes_of(rest) == sizes_of(build_prompt(request).segments)


def test_a_new_tokenizer_is_learned_and_the_error_is_told() -> None:
    model = TokenModel()
    assert TokenModel().error is None
    draw = random.Random(7)
    misses = []
    for i in range(200):
        sizes = sizes_of(prompt(draw.randint(20, 3000), tools=draw.choice([0, 0, 20]), wide=draw.choice([0, 100])).segments)
        misses.append(abs(model.tokens(sizes) - truth(sizes)) / truth(sizes))
        model.learn(sizes, truth(sizes))
        assert model.seen == i + 1
    assert max(misses[100:]) < 0.03
    assert max(misses[100:]) < sum(misses[:5]) / 5
    assert model.error is not None
    assert model.error < 0.02


def test_a_change_of_tokenizer_is_followed() -> None:
    model = TokenModel()
    sizes = sizes_of(prompt(500).segments)
    for _ in range(200):
        model.learn(sizes, 700)
    for _ in range(80):
        model.learn(sizes, 1000)
    assert abs(model.tokens(sizes) - 1000) < 50


def test_what_teaches_nothing_changes_nothing() -> None:
    model = TokenModel()
    for sizes, reported in ((Sizes(text=10, pieces=1), 0), (Sizes(), 10), (Sizes(text=10, pieces=1, images=1), 900)):
        model.learn(sizes, reported)
    assert model == TokenModel()
    assert model.tokens(Sizes()) == 0
    assert model.tokens(Sizes(pieces=1, images=2)) == 2 * IMAGE_TOKENS + round(PRIOR[4])


def test_absurd_reports_do_not_break_it() -> None:
    model = TokenModel()
    draw = random.Random(3)
    for _ in range(500):
        text, wide, tools = draw.randint(0, 10**7), draw.randint(0, 10**5), draw.randint(0, 10**6)
        sizes = Sizes(text=text, wide=wide, tools=tools, pieces=draw.randint(1, 999))
        model.learn(sizes, draw.choice([1, 10**9, 5_000]))
        assert all(0 <= w < 1e9 for w in model.weights)
    assert model.tokens(Sizes(text=100, pieces=1)) >= 1


def test_what_was_learned_survives_a_restart_and_garbage_does_not() -> None:
    model = TokenModel()
    model.learn(sizes_of(prompt(500).segments), 700)
    again = TokenModel.from_dict(json.loads(json.dumps(model.to_dict())))
    assert again == model
    good = model.to_dict()
    wrong = ({"weights": [1]}, {"spread": [[float("nan")] * 5] * 5}, {"weights": [-1.0] * 5})
    garbage: list[Any] = [None, {}, [], *({**good, **part} for part in wrong)]
    for bad in garbage:
        assert TokenModel.from_dict(bad) == TokenModel()


def test_a_count_that_cannot_be_teaches_nothing_and_neither_does_what_was_saved_of_it() -> None:
    sizes, model = sizes_of(prompt(500).segments), TokenModel()
    model.learn(sizes, 700)
    before = model.to_dict()["weights"][:], model.seen
    for absurd in (10**12, 2**53 - 1, 0, -5):
        model.learn(sizes, absurd)
    assert (model.weights, model.seen) == before
    good = TokenModel().to_dict()
    bad: tuple[dict[str, Any], ...] = (
        {"weights": [1e308] * 5},
        {"spread": [[1e308] * 5] * 5},
        {"seen": 10**400},
        {"seen": -1},
        {"error": 1e300},
        {"error": -1.0},
    )
    for part in bad:
        assert TokenModel.from_dict({**good, **part}) == TokenModel()
    crooked = TokenModel.from_dict({**good, "spread": [[0.001 if i == j else -99.0 for j in range(5)] for i in range(5)]})
    for _ in range(20):
        crooked.learn(sizes, 700)
    assert abs(crooked.tokens(sizes) - 700) < 70


@pytest.mark.shared
@pytest.mark.model
def test_real_prompts_against_a_real_tokenizer(shared_data: Path) -> None:
    """Agent requests, counted by the small model's own tokenizer, with what a chat template puts around each piece."""
    pytest.importorskip("tokenizers")
    from cachespec.engine.runtimes.torch.gguf_file import GGUFCheckpoint

    vocabulary = GGUFCheckpoint(find_model("smollm2")).vocabulary()
    model = TokenModel()
    misses = []
    for turn in ("01", "05", "10", "20", "29"):
        body = json.loads(gzip.decompress((shared_data / f"agents/agentic_code_{turn}.json.gz").read_bytes()))
        made = build_prompt(request_from_body({k: v for k, v in body.items() if k in ("messages", "tools", "model")}))
        sizes = sizes_of(made.segments)
        real = sum(len(vocabulary.encode(s.text, special=False)) + 4 for s in made.segments if s.kind != "params")
        misses.append(abs(model.tokens(sizes) - real) / real)
        model.learn(sizes, real)
    assert misses[0] < 0.35
    assert max(misses[2:]) < 0.10
