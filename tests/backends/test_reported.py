"""Faults that were reported of other engines, asked of both local backends from outside. Others stand with what they test."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import anyio
import numpy as np
import pytest
from tests.backends.test_llamacpp import ask, available, engine, run, text, usage
from tests.backends.test_local import Toy, toy
from tests.backends.test_local import ask as ask_toy
from tests.backends.test_local import read as read_toy
from tests.engine.scripted import says

from cachespec.backends._local import LocalBackend
from cachespec.backends.llamacpp import LlamaCppBackend
from cachespec.backends.torch import TorchBackend
from cachespec.decision import Plan
from cachespec.engine.models import find_model
from cachespec.errors import ConfigError, InputError
from cachespec.events import DraftVerified
from cachespec.messages import Message, TextPart
from cachespec.prompt import build_prompt
from cachespec.registry import wire
from cachespec.request import Request

pytestmark = pytest.mark.anyio
model = pytest.mark.model
one_loop = pytest.mark.parametrize("anyio_backend", ["asyncio"])
both = pytest.mark.parametrize("kind", ["llamacpp", "torch"])


def make(kind: str, **more: Any) -> LocalBackend:
    options: dict[str, Any] = {"name": "laptop", "model": "smollm2", "context": 512, "threads": 1, "parallel": 1, **more}
    if kind == "torch":
        pytest.importorskip("torch")
        return TorchBackend(**options, device="cpu", dtype="float32")
    return LlamaCppBackend(**options)


@both
@model
@one_loop
async def test_a_prompt_longer_than_a_call_with_a_draft_model(kind: str) -> None:
    """llama-cpp-python crashes when a prompt passes `n_batch` (case 53): here one of some 200 tokens meets calls of 33."""
    available()
    request = ask("one two three four five six seven. " * 24 + "Say it once more.", max_output_tokens=12)
    plain = make(kind)
    await plain.start()
    expected = text(await run(plain, request))
    await plain.aclose()
    path = str(find_model("smollm2"))
    for draft in ({"use": "suffix"}, {"use": "model", "model": path, "runtime": "llamacpp"}):
        always = {"use": "fixed", "draft_length": 15}
        backend = make(kind, draft=draft, acceptance=always, prefill_chunk=33)
        await backend.start()
        try:
            assert engine(backend)._runtime.width == 33
            events = await run(backend, request)
            assert (usage(events).input_tokens or 0) > 150
            assert any(e.drafted > 3 for e in events if isinstance(e, DraftVerified))
            assert text(events)[:20] == expected[:20]  # on llama.cpp wide calls round differently, later it may show
            engine(backend)._slots.check()
        finally:
            await backend.aclose()


THINKS = (
    "{% for m in messages %}[{{ m.role }}]{{ m.content.split('</think>')[-1] if m.role == 'assistant' else m.content }}"
    "{% endfor %}>"
)


async def test_a_template_that_drops_thinking_is_read_up_to_the_cut_and_the_place_is_named() -> None:
    """Case 48: what was thought is not in the next prompt, which shares what stands before it, and the decision says so."""
    question = "What is a tide? " * 8
    said = "<think>the moon, I suppose</think>The sea rises and falls."
    backend = toy(says(said, after=len(f"[user]{question}>")), template=THINKS)
    await backend.start()
    try:
        first = ask_toy(question)
        answer = text(await read_toy(await backend.open(first, Plan(backend="toy"), timeout=60)))
        assert answer == said
        thought = Message(role="assistant", parts=(TextPart(text=answer),))
        again = Message(role="user", parts=(TextPart(text="And at night?"),))
        following = Request(messages=(*first.messages, thought, again), temperature=0, max_output_tokens=5)
        belief = backend.estimate(build_prompt(following)).belief
        shared = len(f"[user]{question}")
        assert (belief.tokens or 0) > shared - 16
        assert f"at token {shared} it holds '>' where the prompt has '['" in belief.evidence
        backend.runtime.following = says("", after=0)
        events = await read_toy(await backend.open(following, Plan(backend="toy"), timeout=60))
        assert usage(events).cache_read == belief.tokens
    finally:
        await backend.aclose()


def adapter(folder: Path) -> list[Path]:
    """A LoRA adapter as a GGUF file and as a folder: each is no model."""
    gguf = pytest.importorskip("gguf")
    file = folder / "adapter.gguf"
    writer = gguf.GGUFWriter(file, "llama")
    writer.add_type("adapter")
    writer.add_string("adapter.type", "lora")
    writer.add_tensor("blk.0.attn_q.weight.lora_a", np.zeros((4, 64), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    (folder / "adapter_config.json").write_text(json.dumps({"peft_type": "LORA"}))
    return [file, folder]


@both
@one_loop
async def test_adapters_are_refused_wherever_they_come(kind: str, tmp_path: Path) -> None:
    """Cases 3 to 5: the product has none, so none may be taken for something else."""
    pytest.importorskip("llama_cpp" if kind == "llamacpp" else "torch")
    for path in adapter(tmp_path):
        backend = make(kind, model=str(path))
        with pytest.raises(ConfigError, match="adapter") as caught:
            await backend.start()
        assert caught.value.key == "model"
        await backend.aclose()
    with pytest.raises(ConfigError) as refused:
        wire(backends={"laptop": {"use": kind, "model": "smollm2", "lora": "adapter.gguf"}})
    assert "lora" in str(refused.value)
    with pytest.raises(InputError) as unknown:
        make(kind).check(ask("x", extra={"laptop": {"lora": "adapter.gguf"}}))
    assert unknown.value.field == "extra.laptop.lora"


async def test_the_salt_is_not_the_caller_s_to_choose() -> None:
    """Case 9: only the tenant tells namespaces apart; fields of a body that name a cache do not."""
    backend = toy(says("", after=0))
    await backend.start()
    try:
        secret = "secret " * 10
        await read_toy(await backend.open(ask_toy(secret, tenant="a"), Plan(backend="toy"), timeout=60))

        async def reads(**more: Any) -> int | None:
            attempt = await backend.open(ask_toy(secret, **more), Plan(backend="toy"), timeout=60)
            return usage(await read_toy(attempt)).cache_read

        for salt in ({}, {"openai": {"prompt_cache_key": "a"}}):
            assert await reads(tenant="b", cache="no-write", passthrough=salt) == 0
            assert (await reads(tenant="a", passthrough=salt) or 0) > 48
        with pytest.raises(InputError, match=r"extra\.toy\.cache_salt"):
            await reads(tenant="b", extra={"toy": {"cache_salt": "a"}})
    finally:
        await backend.aclose()


async def test_one_thread_uses_the_context_however_many_ask() -> None:
    """Case 49: the scripted runtime fails when a second thread touches it."""
    backend = toy(says("", after=0))
    await backend.start()
    try:
        async with anyio.create_task_group() as group:
            for i in range(8):
                group.start_soon(_ask, backend, f"question {i}")
        assert engine(backend).failure is None
    finally:
        await backend.aclose()


async def _ask(backend: Toy, question: str) -> None:
    await read_toy(await backend.open(ask_toy(question), Plan(backend="toy"), timeout=60))
