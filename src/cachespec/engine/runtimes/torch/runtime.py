"""The torch runtime: ties weights, tokenizer, KV and forward pass together to the contract of `runtimes.base`."""

from __future__ import annotations

import threading
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import torch

from cachespec.engine.runtimes.base import Interrupted, Span
from cachespec.engine.runtimes.torch.attention import Piece
from cachespec.engine.runtimes.torch.checkpoint import Checkpoint
from cachespec.engine.runtimes.torch.devices import (
    Precision,
    Threads,
    candidates,
    fastest,
    library,
    pick_device,
    pick_precision,
)
from cachespec.engine.runtimes.torch.loading import Parts, load_parts, open_checkpoint
from cachespec.engine.sampling import Sampling
from cachespec.errors import OutOfPagesError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

    from cachespec.engine.costs import CalibrationStore

_WIDTH: Final = 512


class TorchRuntime:
    """A model in memory. The contract is `runtimes.base.Runtime`; `load` makes one.

    Each sequence has room for `info.context` tokens of its own. The number of threads is torch's and holds for the process.
    """

    def __init__(self, parts: Parts, *, width: int, threads: Threads) -> None:
        self.info, self.sequences, self.width = parts.info, len(parts.slab.lengths), width
        self._decoder, self._vocabulary, self._slab, self._step = parts.decoder, parts.vocabulary, parts.slab, parts.step
        self._switch, self._threads = parts.switch, threads
        self._logits = torch.empty(0, self.info.vocab)
        self._lock = threading.Lock()  # guards the vocabulary against `close` from another thread
        self._closed = False

    @classmethod
    def load(
        cls,
        model: Path | str | Checkpoint,
        *,
        context: int,
        sequences: int,
        device: str = "auto",
        dtype: Precision = "auto",
        threads: int | None = None,
        progress: Callable[[float], bool] | None = None,
        width: int = _WIDTH,
        store: CalibrationStore | None = None,
    ) -> TorchRuntime:
        """Load a Hugging Face directory or a GGUF file. Takes seconds; not for an event loop's thread.

        Args:
            model: its path, or any other open checkpoint.
            context: tokens that each of the `sequences` has room for.
            device: ``auto``, ``cpu``, ``cuda`` or ``cuda:1``.
            dtype: ``float32``, ``bfloat16``, ``int8`` (weights only), or ``auto``: bfloat16 where the hardware has it.
            threads: None measures which number decodes fastest. Nothing to do with a GPU.
            progress: gets the loaded part, 0 to 1; stops loading by returning False, and `Interrupted` is raised.
            width: the most tokens a call takes.
            store: where the number of threads that was measured is kept; None measures it at every load.

        Raises: ConfigError (no model, unsupported, damaged, context beyond what it was trained for, no such device,
        no room); MissingDependencyError.
        """

        def report(part: float) -> None:
            if progress is not None and not progress(part):
                raise Interrupted

        where = pick_device(device)
        precision, int8 = pick_precision(dtype, where)
        team = Threads(threads or torch.get_num_threads())
        team.use()
        parts = load_parts(
            open_checkpoint(Path(model)) if isinstance(model, (str, Path)) else model,
            context=context,
            sequences=sequences,
            device=where,
            dtype=precision,
            int8=int8,
            report=report,
        )
        runtime = cls(parts, width=width, threads=team)
        if threads is None and where.type == "cpu":
            runtime._choose_threads(store)
        report(1.0)
        return runtime

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        with self._lock:
            self._alive()
            return self._vocabulary.encode(text, special=special)

    def piece(self, token: int) -> bytes:
        self._alive()
        return self._vocabulary.piece(token)

    def is_end(self, token: int) -> bool:
        self._alive()
        return token in self._vocabulary.ends

    def evaluate(self, spans: Sequence[Span]) -> list[int]:
        self._alive()
        self._check(spans)
        self._threads.use()
        tokens: list[int] = []
        pieces: list[Piece] = []
        wanted: list[int] = []
        for span in spans:
            pieces.append(Piece(span.sequence, len(tokens), len(span.tokens), span.start))
            tokens += span.tokens
            wanted += range(len(tokens) - span.rows, len(tokens))
        with torch.inference_mode():
            self._logits = self._step.run(tokens, pieces, wanted)
        for piece in pieces:
            self._slab.lengths[piece.slot] = piece.start + piece.count
        return list(range(len(wanted)))

    def _check(self, spans: Sequence[Span]) -> None:
        total = sum(len(span.tokens) for span in spans)
        if not 0 < total <= self.width:
            raise ValueError(f"{total} tokens in a call that takes 1 to {self.width}")
        if len({span.sequence for span in spans}) != len(spans):
            raise ValueError("a sequence stands twice in one call")
        for span in spans:
            if not span.tokens or span.start != self.length(span.sequence) or not 0 <= span.rows <= len(span.tokens):
                raise ValueError(f"{span} does not start where its sequence ends, or wants rows it does not have")
            if not all(0 <= token < self.info.vocab for token in span.tokens):
                raise ValueError(f"token ids of {span} are outside the vocabulary")
        if any(span.start + len(span.tokens) > self.info.context for span in spans):
            raise OutOfPagesError(f"no room for more than {self.info.context} tokens in a sequence")

    def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        self._alive()
        self._threads.use()
        if not len(rows) == len(sampling) == len(positions):
            raise ValueError("rows, sampling and positions differ in number")
        with torch.inference_mode():
            return self._step.draw(self._logits, rows, sampling, positions)

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        self._alive()
        with torch.inference_mode():
            found: NDArray[np.float32] = self._logits[list(rows)].cpu().numpy()
        return found

    def length(self, sequence: int) -> int:
        self._alive()
        if not 0 <= sequence < self.sequences:
            raise ValueError(f"there is no sequence {sequence}, only {self.sequences}")
        return self._slab.lengths[sequence]

    def truncate(self, sequence: int, length: int) -> bool:
        if length < 0:
            raise ValueError(f"cannot truncate to {length} tokens")
        self._slab.lengths[sequence] = min(self.length(sequence), length)
        return True

    def fork(self, source: int, target: int, length: int) -> bool:
        if self.length(target) or not 0 < length <= self.length(source):
            raise ValueError(f"cannot fork {length} tokens of sequence {source} into {target}")
        self._threads.use()
        with torch.inference_mode():
            self._slab.fork(source, target, length)
        return True

    def free(self, sequence: int) -> None:
        self.truncate(sequence, 0)

    def export_state(self, sequence: int) -> bytes:
        self.length(sequence)
        with torch.inference_mode():
            return self._slab.export(sequence, self.info.fingerprint)

    def import_state(self, sequence: int, data: bytes) -> bool:
        if self.length(sequence):
            raise ValueError(f"sequence {sequence} is not empty")
        with torch.inference_mode():
            return self._slab.import_(sequence, data, self.info.fingerprint)

    def interrupt(self) -> None:
        self._switch.on = True

    def resume(self) -> None:
        self._switch.on = False

    def close(self) -> None:
        with self._lock:
            self._closed = True
            empty = torch.empty(0)
            self._logits = empty
            for name in ("_decoder", "_step", "_slab"):  # the memory goes with the last reference to them
                self.__dict__.pop(name, None)

    def facts(self) -> Mapping[str, Any]:
        self._alive()
        return {
            "device": str(self._decoder.device),
            "dtype": self.info.description.rsplit(" ", 1)[-1],
            "kv_dtype": str(self._slab.dtype).removeprefix("torch."),
            "attention": self._step.kernel,
            "threads": self._threads.count if self._decoder.device.type == "cpu" else None,
            "width": self.width,
            "library": library(self._decoder.device),
        }

    def _alive(self) -> None:
        if self._closed:
            raise RuntimeError("the runtime is closed")

    def _choose_threads(self, store: CalibrationStore | None) -> None:
        """The number with which decoding is fastest, measured once: rounding may depend on it, and so a seed's text."""
        counts, mark = candidates(), self.info.fingerprint
        identity = {"measured": "threads", "library": library(self._decoder.device), "counts": counts}
        saved = {} if store is None else store.read(mark, identity) or {}
        count = saved.get("threads")
        if isinstance(count, int) and count in counts:
            self._threads.change(count)
            return
        found = fastest(self._threads, self._decode_once)
        if store is not None:
            store.write(mark, identity, {"threads": found})

    def _decode_once(self) -> None:
        self.evaluate([Span(sequence=0, start=0, tokens=[0], rows=1)])
        self.free(0)
