"""The real small model beside transformers: logits, perplexity, text; 16-bit and 8-bit weights beside 32-bit ones."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from tests.engine.torch.support import expected, load, put, torch, transformers

from cachespec.engine.models import find_model
from cachespec.engine.runtimes.base import Span
from cachespec.engine.runtimes.torch import TorchRuntime
from cachespec.engine.sampling import Sampling
from cachespec.errors import ConfigError

pytestmark = pytest.mark.model
GREEDY = Sampling(seed=0, temperature=0.0)
TEXT = """The lighthouse on the northern point had been dark for eleven years when the two sisters bought it. Nobody in the
village believed that they would stay through the first winter. The road was washed out twice before October, the roof
leaked over the stairs, and the only telephone that worked stood in the post office, four miles away. But the sisters
had grown up on boats, and they were used to patience. In the mornings they scraped old paint from the railings; in the
afternoons they read the log books that the last keeper had left behind, page after page of wind directions, passing
ships and the prices of lamp oil.

One entry was different from the others. On the third of March 1951 the keeper had written only a single line: "It
answered." Below it he had drawn a small map of the rocks, with a cross where the seals used to sleep. The younger
sister copied the map. She asked the fishermen about it, and each of them told her something else: a wreck, a well, a
grave, a joke. At last, on a still evening, they took the small boat and rowed out. The water was as clear as glass.
Under the keel, in the green light, they saw steps cut into the stone, going down, and at the bottom of the steps a door
of black iron that was standing open."""


@pytest.fixture(scope="module")
def file() -> Path:
    try:
        return find_model("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))


@pytest.fixture(scope="module")
def oracle(file: Path) -> Any:
    """transformers' float32 model, of dense weights."""
    torch.set_num_threads(1)
    return transformers.AutoModelForCausalLM.from_pretrained(file.parent, gguf_file=file.name, dtype=torch.float32).eval()


@pytest.fixture(scope="module")
def runtime(file: Path) -> Iterator[TorchRuntime]:
    runtime = load(file, context=512)
    yield runtime
    runtime.close()


@pytest.fixture(scope="module")
def tokens(runtime: TorchRuntime) -> list[int]:
    return runtime.tokenize(TEXT, special=False)[:300]


@pytest.fixture(scope="module")
def logits(runtime: TorchRuntime, tokens: list[int]) -> NDArray[np.float32]:
    runtime.free(0)
    return put(runtime, tokens)


@pytest.fixture(scope="module")
def wanted(oracle: Any, tokens: list[int]) -> NDArray[np.float32]:
    return expected(oracle, tokens)


def log_probs(logits: NDArray[np.float32]) -> NDArray[np.float64]:
    exact = logits.astype(np.float64)
    exact -= exact.max(axis=1, keepdims=True)
    found: NDArray[np.float64] = exact - np.log(np.exp(exact).sum(axis=1, keepdims=True))
    return found


def perplexity(logits: NDArray[np.float32], tokens: list[int]) -> float:
    return float(np.exp(-log_probs(logits)[np.arange(len(tokens) - 1), tokens[1:]].mean()))


def divergence(logits: NDArray[np.float32], wanted: NDArray[np.float32]) -> float:
    """Mean Kullback-Leibler divergence in nats."""
    exact = log_probs(wanted)
    return float((np.exp(exact) * (exact - log_probs(logits))).sum(axis=1).mean())


def test_logits(logits: NDArray[np.float32], wanted: NDArray[np.float32]) -> None:
    assert np.abs(logits - wanted).max() <= 1e-3
    assert (logits.argmax(axis=1) == wanted.argmax(axis=1)).all()


def test_perplexity(logits: NDArray[np.float32], wanted: NDArray[np.float32], tokens: list[int]) -> None:
    assert perplexity(logits, tokens) == pytest.approx(perplexity(wanted, tokens), rel=5e-4)


def test_rows_of_a_batch_are_those_of_single_sequences(
    runtime: TorchRuntime, logits: NDArray[np.float32], tokens: list[int]
) -> None:
    """Three at different places, one verifying, one decoding, one in the middle of its prompt: equal to the bit."""
    starts, counts = (200, 70, 120), (5, 1, 60)
    for sequence, start in enumerate(starts):
        runtime.free(sequence)
        put(runtime, tokens[:start], sequence, rows=0)
    spans = [
        Span(sequence=i, start=start, tokens=tokens[start : start + count], rows=count)
        for i, (start, count) in enumerate(zip(starts, counts, strict=True))
    ]
    found = runtime.rows(runtime.evaluate(spans))
    wanted = [logits[start : start + count] for start, count in zip(starts, counts, strict=True)]
    assert np.array_equal(found, np.concatenate(wanted))


def test_greedy_text(oracle: Any, runtime: TorchRuntime, tokens: list[int]) -> None:
    prompt, count = tokens[:60], 20
    with torch.inference_mode():
        ids = torch.tensor([prompt])
        theirs = oracle.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            do_sample=False,
            max_new_tokens=count,
            min_new_tokens=count,
            pad_token_id=0,
        )
    runtime.free(1)
    row = runtime.evaluate([Span(sequence=1, start=0, tokens=prompt, rows=1)])
    made = runtime.draw(row, [GREEDY], [60])
    while len(made) < count:
        row = runtime.evaluate([Span(sequence=1, start=60 + len(made) - 1, tokens=made[-1:], rows=1)])
        made += runtime.draw(row, [GREEDY], [60 + len(made)])
    assert made == theirs[0, 60:].tolist()


@pytest.mark.parametrize(("dtype", "limit", "agreement"), [("bfloat16", 1e-3, 0.97), ("int8", 1.5e-2, 0.9)])
def test_fewer_bits_say_nearly_the_same(
    file: Path, wanted: NDArray[np.float32], tokens: list[int], dtype: str, limit: float, agreement: float
) -> None:
    runtime = load(file, context=512, dtype=dtype)
    found = put(runtime, tokens)
    assert divergence(found, wanted) < limit
    assert (found.argmax(axis=1) == wanted.argmax(axis=1)).mean() > agreement
    assert perplexity(found, tokens) == pytest.approx(perplexity(wanted, tokens), rel=0.02)
    runtime.close()


def test_a_saved_checkpoint_is_the_same_model(
    oracle: Any, file: Path, runtime: TorchRuntime, logits: NDArray[np.float32], tokens: list[int], tmp_path: Path
) -> None:
    config = oracle.config.to_dict()
    config.pop("quantization_config", None)
    plain = type(oracle)(type(oracle.config)(**config))
    plain.load_state_dict(oracle.state_dict())
    plain.save_pretrained(tmp_path)
    transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name).save_pretrained(tmp_path)
    other = load(tmp_path, context=512)
    assert other.tokenize("Hello there<|im_end|>", special=True) == runtime.tokenize("Hello there<|im_end|>", special=True)
    assert np.array_equal(put(other, tokens[:200]), logits[:200])
    assert other.info.chat_template == runtime.info.chat_template
    assert (other.info.eos, other.info.bos, other.info.controls) == (runtime.info.eos, runtime.info.bos, runtime.info.controls)
    other.close()
