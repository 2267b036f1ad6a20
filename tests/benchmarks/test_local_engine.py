"""The scripts that measure the local engine, at the smallest sizes: what they say is true, how fast it was does not matter."""

from __future__ import annotations

import re
import sys
from pathlib import Path

import pytest
from benchmarks import batching, identity, llamacpp_generate, prefill_beside, prefix_reuse
from benchmarks._local import machine, middle, prompts, quantile
from benchmarks._streams import Times, together
from benchmarks._widths import width_effect

from cachespec.engine.models import find_model
from cachespec.errors import ConfigError

pytestmark = [pytest.mark.model, pytest.mark.timeout(300)]


@pytest.fixture(autouse=True, scope="module")
def _model() -> None:
    pytest.importorskip("llama_cpp")
    try:
        find_model("smollm2")
    except ConfigError as error:
        pytest.skip(str(error))


def test_identity_goes_on_where_it_stopped_and_tells_what_differs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(identity, "TEMPERATURES", (0.7,))
    monkeypatch.setattr(identity, "width_effect", lambda runtime, texts: width_effect(runtime, [text[:9] for text in texts]))
    save = tmp_path / "answers.jsonl"
    sizes = ["--save", str(save), "--modes", "llamacpp-deterministic", "--prompts", "2", "--tokens", "4", "--cut", "24"]
    sizes += ["--file", str(tmp_path / "absent")]
    drafters = ["--drafters", "suffix", "model", "adversarial"]
    assert identity.main([*sizes, *drafters, "--minutes", "0"]) == 3
    assert identity.main([*sizes, *drafters]) == 0
    said = capsys.readouterr().out
    assert "equal: 30 of 30 (100.00%)" in said
    assert "warm answers that reused KV: 16 of 16" in said
    spoilt = save.read_text().replace('"tokens": [', '"tokens": [7, ', 1).splitlines()
    save.write_text("\n".join(spoilt) + "\n")
    assert identity.main([*sizes, *drafters]) == 1  # the first answer is what all others are compared with
    assert re.search(r"equal: \d+ of 30 \([0-9.]+%\)\n.*\n- of \d+ that differ, ", capsys.readouterr().out)
    with pytest.raises(SystemExit):
        identity.main([*sizes[:-6], "--tokens", "5"])


def test_the_adversary_is_right_wrong_and_right_again() -> None:
    drafts = [identity.almost_right([5, 6, 7, 8, 9], [5] * made, 4, 100) for made in range(3)]
    assert {len(draft) for draft in drafts} == {4}
    wrong = [sum(a != b for a, b in zip(draft, [5, 6, 7, 8, 9, 5, 6][i:], strict=False)) for i, draft in enumerate(drafts)]
    assert set(wrong) <= {0, 1}
    assert 1 in wrong


def test_generate_gives_the_same_tokens_as_the_runtime_and_the_engine(capsys: pytest.CaptureFixture[str]) -> None:
    assert llamacpp_generate.main(["--tokens", "6", "--rounds", "1"]) == 0
    assert "the same tokens from all: True" in capsys.readouterr().out


def test_prefix_reuse_finds_what_the_turns_share(capsys: pytest.CaptureFixture[str]) -> None:
    assert prefix_reuse.main(["llamacpp", "--shared", "64", "--rounds", "1"]) == 0
    found = re.search(r"common prefix (\d+) to \d+ tokens, hits (\d+) to", capsys.readouterr().out)
    assert found is not None
    common, hits = map(int, found.groups())
    assert common >= 64
    assert common - 16 <= hits <= common


def test_batching_beside_the_server(capsys: pytest.CaptureFixture[str]) -> None:
    pytest.importorskip("xllamacpp")
    arguments = ["llamacpp", "--streams", "2", "--tokens", "6", "--rounds", "1", "--server", "--peer-python", sys.executable]
    assert batching.main(arguments) == 0
    said = capsys.readouterr().out
    assert "| llama.cpp server |" in said
    assert "engine's scale / the server's" in said


def test_a_prefill_beside_streams(capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["llamacpp", "--streams", "2", "--prompt", "100", "--quiet", "3", "--chunk", "32", "--max-gap", "2", "8"]
    assert prefill_beside.main(sizes) == 0
    assert re.search(r"\n\| 2 \|.*\n\| 8 \|", capsys.readouterr().out)


def test_summaries(tmp_path: Path) -> None:
    assert middle([0.001, 0.003, 0.002], 1000, 1) == "2.0 [1.0, 3.0]"
    assert [quantile([3.0, 1.0, 2.0, 4.0], q) for q in (0.0, 0.5, 0.75, 0.99, 1.0)] == [1.0, 2.0, 3.0, 4.0, 4.0]
    assert len(prompts(20, tmp_path / "absent")) == 20
    assert "cores of" in machine()
    one, two = Times(began=0.0, at=[1.0, 2.0, 3.0], count=[1, 2, 3]), Times(began=0.0, at=[2.0, 2.5, 4.0], count=[1, 5, 6])
    assert together([one, two]) == pytest.approx((3 - 2 + 5 - 1) / 1.0)
    assert two.gaps(2.0, 3.0) == [0.5, 1.5]
