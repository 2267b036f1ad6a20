"""Decodes on request, in an environment of its own: transformers with and without prompt lookup, economize with lookup.

    python3.11 -m venv PEERS && PEERS/bin/pip install torch==2.13.0 transformers==5.24.0 economize==0.3.2
    PEERS/bin/python decode_worker.py MODEL_DIR DTYPE THREADS

A line of JSON asks, a line of JSON answers: ``{"method": ..., "prompt": [ids], "tokens": n}`` and ``{"seconds": s, "cpu": s,
"tokens": [ids]}``. Seconds are of the whole call, prompt included. `speculation_peers.py` starts it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from time import perf_counter, process_time
from typing import Any

import torch
from transformers import AutoModelForCausalLM
from transformers.utils import logging

Method = Callable[[torch.Tensor, int], list[int]]


def methods(folder: str, dtype: str) -> dict[str, Method]:
    import economize  # type: ignore[import-not-found]
    from economize.techniques.lookup import LookupConfig  # type: ignore[import-not-found]

    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype)).eval()
    ends = model.generation_config.eos_token_id
    ends = ends if isinstance(ends, list) else [ends]

    def generate(prompt: torch.Tensor, tokens: int, **more: int) -> list[int]:
        mask = torch.ones_like(prompt)
        out = model.generate(prompt, attention_mask=mask, do_sample=False, max_new_tokens=tokens, pad_token_id=0, **more)
        return list(out[0, prompt.shape[1] :].tolist())

    def lookup(prompt: torch.Tensor, tokens: int) -> list[int]:
        return generate(prompt, tokens, prompt_lookup_num_tokens=10, max_matching_ngram_size=3)

    wrapped = economize.apply(model, LookupConfig())

    def cycles(length: int) -> Method:
        how = economize.DecodeConfig(cycle_length=length)
        return lambda prompt, tokens: list(wrapped.decode(prompt, tokens, decoding=how, stop=ends).tokens.tolist())

    found = {"transformers": generate, "transformers lookup": lookup, "economize": cycles(1), "economize lookup": cycles(8)}
    return {name: without_end(method, ends) for name, method in found.items()}


def without_end(method: Method, ends: list[int]) -> Method:
    """An end token belongs to no answer."""

    def run(prompt: torch.Tensor, tokens: int) -> list[int]:
        answer = method(prompt, tokens)
        return answer[:-1] if answer and answer[-1] in ends else answer

    return run


def main() -> None:
    folder, dtype, threads = sys.argv[1:4]
    torch.set_num_threads(int(threads))
    logging.set_verbosity_error()
    logging.disable_progress_bar()
    known = methods(folder, dtype)
    print(json.dumps({"methods": list(known)}), flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        prompt = torch.tensor([asked["prompt"]])
        with torch.inference_mode():
            began, cpu = perf_counter(), process_time()
            tokens = known[asked["method"]](prompt, asked["tokens"])
            seconds, cpu = perf_counter() - began, process_time() - cpu
        print(json.dumps({"seconds": seconds, "cpu": cpu, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
