"""Whether two models have the same tokens, so that one may draft for the other."""

from __future__ import annotations

from cachespec.engine.runtimes.base import Runtime
from cachespec.errors import ConfigError

_SLACK = 1024
"""Ids that one model may have more than the other: padding of the embedding to a multiple of some width."""


def common_vocabulary(target: Runtime, draft: Runtime) -> int:
    """How many ids, from 0 on, mean the same for both. Ids beyond are padding of the longer one, and never drafted.

    Compares the bytes of every token, and which tokens are control tokens and by what name: models whose vocabularies have
    the same size may still differ (llama.cpp#3812, vllm#10913). Which tokens end an answer is the target's affair, and runtimes
    may see that differently for one file. Some tenths of a second.

    Raises ConfigError that names the first difference.
    """
    sizes = target.info.vocab, draft.info.vocab
    if abs(sizes[0] - sizes[1]) > _SLACK:
        raise _differ(f"the target has {sizes[0]} tokens, the draft model {sizes[1]}")
    ours, theirs = _names(target), _names(draft)
    common = min(sizes)
    for token in range(common):
        a, b = (ours.get(token), target.piece(token)), (theirs.get(token), draft.piece(token))
        if a != b:
            raise _differ(f"token {token} is {_text(a)} for the target and {_text(b)} for the draft model")
    longer, names = (target, ours) if sizes[0] > common else (draft, theirs)
    for token in range(common, max(sizes)):
        if token in names or longer.is_end(token) or not _is_padding(longer.piece(token)):
            raise _differ(f"only one of them has token {token}, {longer.piece(token)!r}")
    return common


def _is_padding(piece: bytes) -> bool:
    """Padding has no bytes, or a made-up name such as ``[PAD151936]``."""
    return not piece or (piece.startswith((b"[PAD", b"<pad", b"[unused", b"<unused")) and piece.endswith((b"]", b">")))


def _names(runtime: Runtime) -> dict[int, str]:
    return {token: text for text, token in runtime.info.controls.items()}


def _text(facts: tuple[str | None, bytes]) -> str:
    name, piece = facts
    return repr(piece) if name is None else f"the control token {name!r}"


def _differ(detail: str) -> ConfigError:
    return ConfigError(f"the draft model's vocabulary is not the target's: {detail}", key="model")
