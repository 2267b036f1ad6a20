"""The llama.cpp runtime against its contract, on the real small model at one thread."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.scripted import ScriptedRuntime
from tests.engine.tiny_models import llama

from cachespec.engine.invariance import invariant_width, search
from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Interrupted, Span
from cachespec.engine.runtimes.llamacpp import LlamaCppRuntime
from cachespec.engine.sampling import Sampling, draw
from cachespec.errors import ConfigError, OutOfPagesError

pytestmark = pytest.mark.model
TEXT = "The quick brown fox jumps over the lazy dog, and then it sleeps until the sun is up again."


def load(**more: object) -> LlamaCppRuntime:
    pytest.importorskip("llama_cpp")
    try:
        path = find_model("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))
    return LlamaCppRuntime(path, threads=1, **{"context": 256, "width": 128, **more})  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def loaded() -> Iterator[LlamaCppRuntime]:
    runtime = load(sequences=2, flash_attention=True)
    yield runtime
    runtime.close()


@pytest.fixture
def runtime(loaded: LlamaCppRuntime) -> LlamaCppRuntime:
    loaded.resume()
    for sequence in range(loaded.sequences):
        loaded.free(sequence)
    return loaded


def put(runtime: LlamaCppRuntime, tokens: list[int], sequence: int = 0, rows: int = 1) -> NDArray[np.float32]:
    start = runtime.length(sequence)
    return runtime.rows(runtime.evaluate([Span(sequence=sequence, start=start, tokens=tokens, rows=rows)]))


def test_facts(runtime: LlamaCppRuntime) -> None:
    facts = runtime.info
    assert (facts.architecture, facts.vocab, facts.trained_context, facts.context) == ("llama", 49152, 8192, 256)
    assert facts.parameters == 134515008
    assert facts.controls["<|im_start|>"] == 1
    assert facts.eos == "<|im_end|>"
    assert not facts.add_bos
    assert facts.chat_template is not None
    assert "<|im_start|>" in facts.chat_template
    assert len(facts.fingerprint) == 16
    assert runtime.facts()["threads"] == 1


def test_a_long_piece(runtime: LlamaCppRuntime) -> None:
    assert len(runtime.piece(46778)) == 81


@pytest.mark.parametrize("text", ["", "Hello", "Grüße 👍🏽 終", "a\u0000b", "<|im_end|>", " " * 500, "\ud800"])
def test_tokens_and_pieces_are_inverse(runtime: LlamaCppRuntime, text: str) -> None:
    tokens = runtime.tokenize(text, special=False)
    assert b"".join(map(runtime.piece, tokens)) == text.encode("utf-8", "replace")


def test_control_tokens_only_where_allowed(runtime: LlamaCppRuntime) -> None:
    assert runtime.tokenize("<|im_end|>", special=True) == [2]
    assert 2 not in runtime.tokenize("<|im_end|>", special=False)
    assert runtime.piece(2) == b""
    assert runtime.is_end(2)
    assert not runtime.is_end(500)


def test_rows_are_those_that_were_asked_for(runtime: LlamaCppRuntime) -> None:
    tokens = runtime.tokenize(TEXT, special=False)
    handles = runtime.evaluate([Span(sequence=0, start=0, tokens=tokens, rows=3)])
    assert len(handles) == 3
    rows = runtime.rows(handles)
    sampling = Sampling(seed=5, temperature=0.8)
    assert runtime.draw(handles, [sampling] * 3, [7, 8, 9]) == [draw(rows[i], sampling, 7 + i) for i in range(3)]
    assert runtime.evaluate([Span(sequence=0, start=len(tokens), tokens=[500])]) == []


def test_cut_and_go_on_is_as_if_nothing_had_been_there(runtime: LlamaCppRuntime) -> None:
    tokens = runtime.tokenize(TEXT, special=False)
    expected = put(runtime, tokens)
    assert runtime.truncate(0, 5)
    assert runtime.length(0) == 5
    put(runtime, [600, 601, 602])
    assert runtime.truncate(0, 5)
    assert (put(runtime, tokens[5:]) == expected).all()
    assert runtime.truncate(0, 100)  # longer than it is: nothing to do
    assert runtime.length(0) == len(tokens)
    runtime.free(0)
    runtime.free(0)
    assert runtime.length(0) == 0


def test_a_fork_shares_the_prefix(runtime: LlamaCppRuntime) -> None:
    tokens = runtime.tokenize(TEXT, special=False)
    expected = put(runtime, tokens)
    assert runtime.fork(0, 1, 7)
    assert (put(runtime, tokens[7:], sequence=1) == expected).all()
    assert runtime.length(0) == len(tokens)
    with pytest.raises(ValueError, match="fork"):
        runtime.fork(0, 1, 3)


def test_two_sequences_in_one_call(runtime: LlamaCppRuntime) -> None:
    tokens = runtime.tokenize(TEXT, special=False)
    expected = put(runtime, tokens)
    runtime.free(0)
    spans = [Span(sequence=0, start=0, tokens=tokens[:9]), Span(sequence=1, start=0, tokens=tokens, rows=1)]
    row = runtime.rows(runtime.evaluate(spans))
    assert np.abs(row - expected).max() < 0.05
    assert (runtime.length(0), runtime.length(1)) == (9, len(tokens))


def test_exported_state_comes_back(runtime: LlamaCppRuntime) -> None:
    tokens = runtime.tokenize(TEXT, special=False)
    expected = put(runtime, tokens)
    runtime.truncate(0, 8)
    data = runtime.export_state(0)
    assert runtime.import_state(1, data)
    assert runtime.length(1) == 8
    assert (put(runtime, tokens[8:], sequence=1) == expected).all()
    runtime.free(1)
    assert not runtime.import_state(1, b"x" * len(data))
    assert not runtime.import_state(1, b"")
    assert not runtime.import_state(1, data[:200])
    assert runtime.length(1) == 0


def test_spans_that_break_the_rules(runtime: LlamaCppRuntime) -> None:
    for span in (
        Span(sequence=0, start=1, tokens=[5]),
        Span(sequence=0, start=0, tokens=[]),
        Span(sequence=0, start=0, tokens=[5], rows=2),
        Span(sequence=0, start=0, tokens=[runtime.info.vocab]),
        Span(sequence=0, start=0, tokens=[-1]),
        Span(sequence=0, start=0, tokens=[5] * 129),
    ):
        with pytest.raises(ValueError):
            runtime.evaluate([span])
    assert runtime.length(0) == 0


def test_no_room_changes_nothing(runtime: LlamaCppRuntime) -> None:
    for _ in range(2):
        put(runtime, [500] * 128)
    assert runtime.length(0) == 256
    with pytest.raises(OutOfPagesError):
        runtime.evaluate([Span(sequence=0, start=256, tokens=[500])])
    assert runtime.length(0) == 256


@pytest.mark.parametrize("code", [-1, -3])
def test_a_failing_library_is_an_error_and_the_kv_is_as_before(
    runtime: LlamaCppRuntime, monkeypatch: pytest.MonkeyPatch, code: int
) -> None:
    put(runtime, [500, 501])
    monkeypatch.setattr(runtime._c, "llama_decode", lambda context, batch: code)
    with pytest.raises(RuntimeError, match="llama_decode"):
        put(runtime, [600, 601])
    assert runtime.length(0) == 2


def test_what_cannot_be_cut_is_emptied_when_a_call_fails(runtime: LlamaCppRuntime, monkeypatch: pytest.MonkeyPatch) -> None:
    put(runtime, [500, 501])

    def half(context: object, batch: object) -> int:
        monkeypatch.undo()
        put(runtime, [700])  # some of it was done
        monkeypatch.setattr(runtime._c, "llama_memory_seq_rm", lambda m, s, a, b: a < 0 and real(m, s, a, b))
        return 2

    real = runtime._c.llama_memory_seq_rm
    monkeypatch.setattr(runtime._c, "llama_decode", half)
    with pytest.raises(Interrupted):
        put(runtime, [600, 601])
    assert runtime.length(0) == 0
    assert put(runtime, [500]) is not None  # and it can be used again


def test_a_row_that_was_not_asked_for_is_an_error(runtime: LlamaCppRuntime) -> None:
    runtime.evaluate([Span(sequence=0, start=0, tokens=[5, 6], rows=1)])
    with pytest.raises(RuntimeError, match="row 0"):
        runtime.rows([0])


def test_an_interrupt_rolls_back_and_is_quick(runtime: LlamaCppRuntime) -> None:
    put(runtime, [500, 501])
    stopped_at: list[float] = []

    def stop() -> None:
        time.sleep(0.1)
        stopped_at.append(time.monotonic())
        runtime.interrupt()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted):
        for _ in range(100):
            runtime.evaluate([Span(sequence=0, start=2, tokens=[600] * 128)])
            runtime.truncate(0, 2)
    late = time.monotonic() - stopped_at[0]
    thread.join()
    assert late < 0.5  # a chunk takes about as long; as a rule this is under 10 ms
    assert runtime.length(0) == 2
    with pytest.raises(Interrupted):
        put(runtime, [5])
    runtime.resume()
    put(runtime, [5])
    assert runtime.length(0) == 3


def test_within_the_invariant_width_rows_are_bit_equal(runtime: LlamaCppRuntime) -> None:
    width = invariant_width(runtime)
    assert runtime.length(0) == 0
    assert 1 <= width <= 128
    tokens = (runtime.tokenize(TEXT, special=False) * 8)[: 3 + width]
    singly = [put(runtime, [t])[0] for t in tokens]
    runtime.free(0)
    put(runtime, tokens[:3])
    assert (put(runtime, tokens[3:], rows=width) == np.stack(singly[3:])).all()


def test_a_model_with_one_type_for_keys_and_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Models with one tensor for both refuse two types: isolated sequences then have the one that works."""
    bindings = pytest.importorskip("llama_cpp").llama_cpp
    opened, kinds = bindings.llama_init_from_model, []

    def refuses(model: Any, params: Any) -> Any:
        kinds.append((params.type_k, params.type_v))
        return opened(model, params) if params.type_k == params.type_v else None

    monkeypatch.setattr(bindings, "llama_init_from_model", refuses)
    path = llama(tmp_path / "tiny.gguf")
    runtime = LlamaCppRuntime(path, context=600, threads=1, sequences=2, isolated=True, width=64, flash_attention=True)
    assert search(runtime, seconds=120) == (64, True)
    runtime.close()
    assert len(kinds) == 2
    plain = LlamaCppRuntime(path, context=600, threads=1, sequences=2, width=64, flash_attention=True)
    assert plain.info.fingerprint != runtime.info.fingerprint, "neither can take in what the other exported"
    plain.close()
    assert len(kinds) == 3


def test_the_width_of_a_runtime_that_never_rounds_is_all_of_it() -> None:
    assert invariant_width(ScriptedRuntime(width=128)) == 128
    assert invariant_width(ScriptedRuntime(width=128, forgets=True)) == 128
    assert invariant_width(ScriptedRuntime(width=1)) == 1
    assert invariant_width(ScriptedRuntime(width=128, context=4)) == 1


def test_a_closed_runtime_says_so(tmp_path: Path) -> None:
    runtime = load(context=64)
    runtime.close()
    runtime.close()
    runtime.interrupt()
    for use in (
        lambda: runtime.tokenize("x", special=False),
        lambda: runtime.piece(5),
        lambda: runtime.is_end(5),
        lambda: runtime.length(0),
        lambda: runtime.evaluate([Span(sequence=0, start=0, tokens=[5])]),
    ):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_files_that_are_no_model(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    for name, content, said in [
        ("text.gguf", b"hello", "not a GGUF"),
        ("empty.gguf", b"", "not a GGUF"),
        ("cut.gguf", b"GGUF\x03\x00\x00\x00", "cannot load"),
        ("noise.gguf", b"GGUF\x03\x00\x00\x00" + bytes(range(256)), "cannot load"),
    ]:
        path = tmp_path / name
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=said) as caught:
            LlamaCppRuntime(path, context=64, threads=1)
        assert str(path) in str(caught.value)
        assert caught.value.key == "model"
    for path, said in [(tmp_path / "none.gguf", "no such file"), (tmp_path, "cannot be read")]:
        with pytest.raises(ConfigError, match=said):
            LlamaCppRuntime(path, context=64, threads=1)


def test_a_damaged_copy_of_a_model(tmp_path: Path) -> None:
    pytest.importorskip("llama_cpp")
    short = tmp_path / "short.gguf"
    with find_model("smollm2").open("rb") as file:
        short.write_bytes(file.read(4_000_000))
    with pytest.raises(ConfigError, match="cannot load"):
        LlamaCppRuntime(short, context=64, threads=1)


def test_settings_that_cannot_be_had() -> None:
    with pytest.raises(ConfigError, match="8192") as caught:
        load(context=9000)
    assert caught.value.key == "context"


def test_a_gpu_that_the_library_cannot_use() -> None:
    from llama_cpp import llama_cpp

    if llama_cpp.llama_supports_gpu_offload():
        pytest.skip("this build can use a GPU")
    with pytest.raises(ConfigError, match="no GPU support") as caught:
        load(gpu_layers=1)
    assert caught.value.key == "gpu_layers"
    load(context=64, gpu_layers=0, flash_attention=False).close()


def test_no_memory_for_the_context(monkeypatch: pytest.MonkeyPatch) -> None:
    from llama_cpp import llama_cpp

    monkeypatch.setattr(llama_cpp, "llama_init_from_model", lambda model, params: None)
    with pytest.raises(ConfigError, match="no room for a context of 64"):
        load(context=64)


def test_loading_can_be_stopped_and_reports() -> None:
    seen: list[float] = []

    def report(part: float) -> bool:
        seen.append(part)
        return True

    load(context=64, progress=report).close()
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    with pytest.raises(Interrupted):
        load(context=64, progress=lambda _: False)
