"""The torch runtime against its contract, with a small random model."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
from tests.engine.torch.support import SPECIALS, WORDS, load, model, numbers, put, save, torch

from cachespec.engine.costs import CalibrationStore
from cachespec.engine.invariance import invariant_width
from cachespec.engine.runtimes.base import Interrupted, Runtime, Span
from cachespec.engine.runtimes.torch import TorchRuntime, devices
from cachespec.engine.sampling import Sampling, draw
from cachespec.errors import ConfigError, OutOfPagesError

PRECISIONS = ("float32", "bfloat16", "int8")
GREEDY = Sampling(seed=0, temperature=0.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save(model("qwen3", head_dim=32, num_attention_heads=6, hidden_size=96), tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="module")
def loaded(folder: Path) -> Iterator[dict[str, TorchRuntime]]:
    runtimes = {name: load(folder, dtype=name, context=200, sequences=3) for name in PRECISIONS}
    yield runtimes
    for runtime in runtimes.values():
        runtime.close()


@pytest.fixture(params=PRECISIONS)
def each(loaded: dict[str, TorchRuntime], request: pytest.FixtureRequest) -> TorchRuntime:
    return fresh(loaded[request.param])


@pytest.fixture
def runtime(loaded: dict[str, TorchRuntime]) -> TorchRuntime:
    return fresh(loaded["float32"])


def fresh(runtime: TorchRuntime) -> TorchRuntime:
    runtime.resume()
    for sequence in range(runtime.sequences):
        runtime.free(sequence)
    return runtime


def test_facts(loaded: dict[str, TorchRuntime]) -> None:
    runtime: Runtime = loaded["int8"]  # a runtime by its type too
    info = runtime.info
    assert (info.architecture, info.context, info.trained_context, info.vocab) == ("qwen3", 200, 512, WORDS)
    assert (info.bos, info.eos, info.add_bos) == ("<|im_start|>", "", False)
    assert info.controls == {text: 256 + i for i, text in enumerate(SPECIALS)}
    assert info.description.endswith(", int8")
    kv_dtype = runtime.facts()["kv_dtype"]
    assert kv_dtype in ("float32", "bfloat16")  # by the processor
    assert runtime.facts() == {
        "device": "cpu", "dtype": "int8", "kv_dtype": kv_dtype, "attention": "sdpa", "threads": 1, "width": 512,
        "library": f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}",
    }  # fmt: skip
    assert info.kv_bytes == 3 * 2 * 2 * 32 * {"float32": 4, "bfloat16": 2}[kv_dtype]
    assert (info.room, info.shares, info.rewinds) == (None, False, True)
    assert runtime.is_end(257)
    assert not runtime.is_end(65)
    assert len({r.info.fingerprint for r in loaded.values()}) == 3
    assert len({r.info.size for r in loaded.values()}) == 3


def test_text_and_tokens(runtime: TorchRuntime) -> None:
    text = "Grüße <|im_end|> 🦊"
    plain = runtime.tokenize(text, special=False)
    assert plain == list(text.encode())
    assert 257 in runtime.tokenize(text, special=True)
    assert b"".join(map(runtime.piece, plain)) == text.encode()
    assert runtime.piece(257) == b""
    assert runtime.piece(WORDS) == b""
    assert runtime.tokenize("a\ud800b", special=True) == list(b"a?b")


def test_a_batch_gives_what_each_gives_alone(each: TorchRuntime) -> None:
    """To the bit, int8 in calls of up to four tokens: prefill, verify and decode in one call, ragged."""
    limit = 4 if each.info.description.endswith("int8") else 200
    parts = [numbers(70, 1), numbers(5, 2), numbers(33, 3)]
    alone = []
    for tokens in parts:
        alone.append([put(each, tokens[at : at + 1], 0)[0] for at in range(len(tokens))])
        each.free(0)
    heads, tails = (
        [tokens[: len(tokens) - size] for tokens, size in zip(parts, sizes, strict=True)] for sizes in [(2, 1, 1)] * 2
    )
    tails = [tokens[len(head) :] for tokens, head in zip(parts, heads, strict=True)]
    for sequence, head in enumerate(heads):
        for at in range(0, len(head), limit):
            put(each, head[at : at + limit], sequence)
    spans = [
        Span(sequence=i, start=len(head), tokens=tail, rows=len(tail))
        for i, (head, tail) in enumerate(zip(heads, tails, strict=True))
    ]
    found = each.rows(each.evaluate(spans))
    wanted = [row for rows, head in zip(alone, heads, strict=True) for row in rows[len(head) :]]
    assert np.array_equal(found, np.stack(wanted))


def test_prompts_may_come_in_chunks(each: TorchRuntime) -> None:
    tokens = numbers(150)
    whole = put(each, tokens, 0)
    sizes = [1, 2, 61, 3, 64, 5, 14]
    found = [put(each, tokens[sum(sizes[:i]) : sum(sizes[: i + 1])], 1) for i in range(len(sizes))]
    if each.info.description.endswith("int8"):  # two kernels, by the number of tokens
        assert np.abs(np.concatenate(found) - whole).max() < 0.05 * np.abs(whole).max()
    else:
        assert np.array_equal(np.concatenate(found), whole)


def test_every_width_is_invariant(loaded: dict[str, TorchRuntime]) -> None:
    """What makes a text independent of drafts and of the batch, at no price (contract E2)."""
    every = 200 - 11  # of the context, what is left after the start of the sequence that is measured
    assert [invariant_width(fresh(loaded[name])) for name in PRECISIONS] == [every, every, 4]


def test_only_wanted_rows_come_back(runtime: TorchRuntime) -> None:
    tokens = numbers(20)
    every = put(runtime, tokens)
    runtime.free(0)
    spans = [Span(sequence=0, start=0, tokens=tokens, rows=3), Span(sequence=1, start=0, tokens=tokens[:4])]
    handles = runtime.evaluate([*spans, Span(sequence=2, start=0, tokens=tokens[:7], rows=1)])
    assert len(handles) == 4
    assert np.array_equal(runtime.rows(handles[:3]), every[17:])
    assert np.array_equal(runtime.rows([handles[3]])[0], every[6])
    runtime.free(0)
    assert runtime.evaluate([Span(sequence=0, start=0, tokens=tokens)]) == []
    assert runtime.rows([]).shape == (0, WORDS)


def test_truncated_tokens_leave_no_trace(runtime: TorchRuntime) -> None:
    tokens = numbers(140)
    wanted = put(runtime, tokens)
    runtime.free(0)
    put(runtime, numbers(130, 5))
    for length in (64, 30, 0):
        assert runtime.truncate(0, length)
        assert runtime.length(0) == length
    put(runtime, tokens[:90])
    put(runtime, numbers(20, 6))
    runtime.truncate(0, 90)
    runtime.truncate(0, 500)
    assert runtime.length(0) == 90
    assert np.array_equal(put(runtime, tokens[90:]), wanted[90:])


def test_a_fork_goes_on_by_itself(runtime: TorchRuntime) -> None:
    tokens = numbers(100)
    wanted = put(runtime, tokens)
    assert runtime.fork(0, 1, 40)
    assert (runtime.length(0), runtime.length(1)) == (100, 40)
    runtime.truncate(0, 10)
    put(runtime, numbers(60, 9), 0)
    assert np.array_equal(put(runtime, tokens[40:], 1), wanted[40:])
    with pytest.raises(ValueError, match="cannot fork"):
        runtime.fork(0, 1, 5)
    with pytest.raises(ValueError, match="cannot fork"):
        runtime.fork(2, 2, 1)


def test_state_may_leave_and_return(each: TorchRuntime, loaded: dict[str, TorchRuntime]) -> None:
    tokens = numbers(70)
    put(each, tokens)
    data = each.export_state(0)
    assert len(data) == 20 + 70 * each.info.kv_bytes
    wanted = put(each, [7])
    put(each, numbers(100, 4), 1)  # what stood in the slot before does not matter
    each.free(1)
    assert each.import_state(1, data)
    assert each.length(1) == 70
    assert np.array_equal(put(each, [7], 1), wanted)
    with pytest.raises(ValueError, match="not empty"):
        each.import_state(1, data)
    for bad in (b"", data[:-4], data + b"0000", b"x" * 16 + data[16:], data[:16] + b"\0\0\0\0", data[:19]):
        assert not each.import_state(2, bad)
        assert each.length(2) == 0
    other = next(r for r in loaded.values() if r is not each)
    other.free(0)
    assert not other.import_state(0, data)


def test_what_a_slot_held_cannot_spoil_the_next(runtime: TorchRuntime) -> None:
    """Masked positions are read; were they not numbers, the sum would be none."""
    tokens = numbers(70)
    wanted = put(runtime, tokens)
    runtime.free(0)
    with torch.inference_mode():
        runtime._slab.cells.fill_(float("nan"))
    assert np.array_equal(put(runtime, tokens), wanted)
    runtime.fork(0, 1, 33)
    runtime.import_state(2, runtime.export_state(1))
    assert np.array_equal(put(runtime, tokens[33:], 2), wanted[33:])


def test_draws_are_the_rule_on_its_rows(each: TorchRuntime) -> None:
    handles = each.evaluate([Span(sequence=0, start=0, tokens=numbers(9), rows=3)])
    rows = each.rows(handles)
    ways = [GREEDY, Sampling(seed=5, temperature=0.9, top_p=0.8), Sampling(seed=6, top_k=20, min_p=0.01)]
    found = each.draw(handles, ways, [7, 8, 9])
    assert found == [draw(row, how, at) for row, how, at in zip(rows, ways, (7, 8, 9), strict=True)]
    assert each.draw(handles, ways, [7, 8, 9]) == found
    assert each.draw([handles[2]], [ways[2]], [9]) == found[2:]
    with pytest.raises(ValueError, match="differ in number"):
        each.draw(handles, ways, [7])


def test_wrong_calls_change_nothing(runtime: TorchRuntime) -> None:
    put(runtime, [1, 2, 3])
    spans: list[list[Span]] = [
        [],
        [Span(sequence=0, start=2, tokens=[1])],
        [Span(sequence=0, start=3, tokens=[1], rows=2)],
        [Span(sequence=0, start=3, tokens=[WORDS])],
        [Span(sequence=0, start=3, tokens=[-1])],
        [Span(sequence=0, start=3, tokens=[1]), Span(sequence=1, start=0, tokens=[])],
        [Span(sequence=1, start=0, tokens=[1]), Span(sequence=1, start=0, tokens=[1])],
        [Span(sequence=3, start=0, tokens=[1])],
        [Span(sequence=0, start=3, tokens=[1] * 513)],
    ]
    for wrong in spans:
        with pytest.raises(ValueError, match=r"tokens|sequence|span|rows"):
            runtime.evaluate(wrong)
    with pytest.raises(OutOfPagesError, match="200 tokens"):
        runtime.evaluate([Span(sequence=1, start=0, tokens=[1]), Span(sequence=0, start=3, tokens=[1] * 198)])
    assert [runtime.length(i) for i in range(3)] == [3, 0, 0]
    runtime.evaluate([Span(sequence=0, start=3, tokens=[1] * 197)])
    with pytest.raises(ValueError, match="cannot truncate"):
        runtime.truncate(0, -1)


def test_interrupted_calls_change_nothing(runtime: TorchRuntime) -> None:
    tokens = numbers(60)
    put(runtime, tokens)
    runtime.interrupt()
    with pytest.raises(Interrupted):
        put(runtime, tokens)
    runtime.resume()
    assert runtime.length(0) == 60
    wanted = put(runtime, [5])
    runtime.free(0)
    put(runtime, tokens)
    assert np.array_equal(put(runtime, [5]), wanted)


def test_a_running_prefill_stops_at_once(tmp_path: Path) -> None:
    big = model("llama", hidden_size=256, intermediate_size=1024, num_hidden_layers=24, max_position_embeddings=4096)
    runtime = load(save(big, tmp_path), context=4096, sequences=1, width=2048)
    tokens = numbers(2048)
    start = time.perf_counter()
    put(runtime, tokens, rows=0)
    whole = time.perf_counter() - start
    runtime.free(0)
    stopped: list[float] = []

    def stop() -> None:
        time.sleep(whole / 4)
        stopped.append(time.perf_counter())
        runtime.interrupt()

    thread = threading.Thread(target=stop)
    thread.start()
    with pytest.raises(Interrupted):
        put(runtime, tokens, rows=0)
    late = time.perf_counter()
    thread.join()
    assert late - stopped[0] < max(0.05, whole / 8)
    assert runtime.length(0) == 0
    runtime.close()


def test_nan_is_reported_not_drawn(folder: Path) -> None:
    runtime = load(folder)
    with torch.inference_mode():
        runtime._decoder.embed.fill_(float("nan"))
    handles = runtime.evaluate([Span(sequence=0, start=0, tokens=[1], rows=1)])
    for how in (GREEDY, Sampling(seed=1)):
        with pytest.raises(ArithmeticError):
            runtime.draw(handles, [how], [1])


def test_closing_frees_the_model_and_ends_all_use(folder: Path) -> None:
    import gc
    import weakref

    runtime = load(folder)
    put(runtime, [1, 2])
    gone = weakref.ref(runtime._decoder)
    runtime.close()
    runtime.close()
    gc.collect()
    assert gone() is None
    runtime.interrupt()
    runtime.resume()
    for use in (
        lambda: runtime.tokenize("a", special=False),
        lambda: runtime.piece(1),
        lambda: runtime.is_end(1),
        lambda: runtime.length(0),
        lambda: runtime.evaluate([]),
        lambda: runtime.rows([0]),
        lambda: runtime.export_state(0),
        runtime.facts,
    ):
        with pytest.raises(RuntimeError, match="closed"):
            use()


def test_loading_reports_and_can_be_stopped(folder: Path) -> None:
    seen: list[float] = []
    load(folder, progress=lambda part: seen.append(part) or True).close()  # type: ignore[func-returns-value]
    assert seen == sorted(seen)
    assert seen[-1] == 1.0
    with pytest.raises(Interrupted):
        load(folder, progress=lambda part: part < 0.5)


def test_devices_and_precisions_that_do_not_exist(folder: Path) -> None:
    for options, message in (
        ({"device": "nonsense"}, "is no device"),
        ({"device": "meta"}, "only cpu and cuda"),
        ({"device": "cuda:99"}, "there is no cuda:99"),
        ({"dtype": "int4"}, "must be one of"),
    ):
        with pytest.raises(ConfigError, match=message):
            load(folder, **options)


def test_threads_are_measured_when_not_given(folder: Path) -> None:
    before = torch.get_num_threads()
    try:
        runtime = load(folder, threads=None, device="auto", dtype="auto") if not torch.cuda.is_available() else load(folder)
        assert 1 <= runtime.facts()["threads"] <= 512
        assert runtime.length(0) == 0
    finally:
        torch.set_num_threads(before)


def test_what_was_measured_is_kept(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before, tried = torch.get_num_threads(), []
    store = CalibrationStore(tmp_path)

    def measure(threads: devices.Threads, work: Callable[[], None]) -> int:
        tried.append(threads.count)
        threads.change(1)
        return 1

    monkeypatch.setattr("cachespec.engine.runtimes.torch.runtime.fastest", measure)
    try:
        for _ in range(2):
            runtime = load(folder, threads=None, store=store)
            assert runtime.facts()["threads"] == 1
        assert len(tried) == 1
        (file,) = tmp_path.iterdir()
        file.write_text(json.dumps(json.loads(file.read_text()) | {"threads": 100_000}))
        assert load(folder, threads=None, store=store).facts()["threads"] == 1
        assert len(tried) == 2
        load(folder, threads=None, dtype="bfloat16", store=store)
        load(folder, threads=None)
        assert len(tried) == 4
    finally:
        torch.set_num_threads(before)


@pytest.mark.parametrize(("seconds", "tries", "best"), [(1000.0, 5 * 4, 4), (11.0, 2, 4), (0.0, 1, 8)])
def test_the_fastest_number_of_threads(monkeypatch: pytest.MonkeyPatch, seconds: float, tries: int, best: int) -> None:
    """Of 8, 4, 2 and 1 threads: by a clock that the work moves. Without time, what was tried is what there is."""
    now, took = 0.0, {8: 5.0, 4: 4.0, 2: 7.0, 1: 13.0}
    set_to: list[int] = []
    monkeypatch.setattr(devices, "candidates", lambda: [8, 4, 2, 1])
    monkeypatch.setattr(torch, "set_num_threads", set_to.append)

    def work() -> None:
        nonlocal now
        now += took[set_to[-1]]

    threads = devices.Threads(1)
    found = devices.fastest(threads, work, seconds=seconds, clock=lambda: now)
    assert found == threads.count == set_to[-1] == best
    assert len(set_to) - 1 == tries


def test_another_thread_computes_with_as_many_threads(runtime: TorchRuntime) -> None:
    seen: list[int] = []

    def work() -> None:
        torch.set_num_threads(2)
        put(runtime, [1])
        seen.append(torch.get_num_threads())

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    torch.set_num_threads(1)
    assert seen == [1]
