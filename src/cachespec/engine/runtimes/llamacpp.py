"""The llama.cpp runtime: the low-level API of llama-cpp-python, and the only place that imports it.

Logits cost memory only for rows that are asked for, KV rows are shared between sequences (unified KV), and a running call
can be interrupted after any node of its graph.

Unified KV has one weakness: a token's cell is wherever there is a gap, attention sums in the order of cells, and so rounding
depends on what other sequences held before. `isolated` gives each sequence cells of its own, in the order of its positions:
its rows are then, bit for bit, those it has alone. That takes room for `context` tokens a sequence, and forks copy.

On a CPU there is another: for keys and values in F16, flash attention has three kernels. A lone token behind more than 256
others has its sum split over the threads, 64 tokens and more are computed in tiles, all else goes key by key (``ops.cpp`` of
ggml: ``use_split_kv_path``, ``use_tiled``). With keys in BF16 there is only the last, so `isolated` has those: attention
gives a row the same bits in any call, at any length, with any number of threads. They take as much room.
"""

from __future__ import annotations

import ctypes
import functools
import math
import os
import threading
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cachespec.engine.runtimes.base import Interrupted, ModelInfo, Span
from cachespec.engine.sampling import Sampling, draw
from cachespec.errors import ConfigError, MissingDependencyError, OutOfPagesError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

_LOG_WARN, _LOG_ERROR = 3, 4  # ggml_log_level
_NO_ROOM, _ABORTED, _BAD_INPUT = 1, 2, -1  # llama_decode's return codes that leave the context usable
_MAGIC = b"GGUF"
_BF16 = 30  # ggml_type; the bindings have no name for it
_PAD = 256
_POSITIONS = 2**31
_GPUS = 16  # graphics cards may have so many times the memory of their host, and no more


class _Library:
    """The bindings, with what must live as long as the process: the log callback, which C keeps a pointer to."""

    def __init__(self) -> None:
        try:
            from llama_cpp import __version__
            from llama_cpp import llama_cpp as bindings
        except ImportError as error:
            raise MissingDependencyError("the llama.cpp backend needs llama-cpp-python", extra="llamacpp") from error
        except (OSError, RuntimeError) as error:  # installed, but its shared library does not load
            raise ConfigError(f"llama-cpp-python is installed but does not load: {error}") from error
        self.c: Any = bindings
        self.complaints: deque[str] = deque(maxlen=4)

        def log(level: int, text: bytes, _: Any) -> None:
            if level in (_LOG_WARN, _LOG_ERROR):
                self.complaints.append(text.decode("utf-8", "replace").strip())

        self._log = bindings.llama_log_callback(log)
        bindings.llama_log_set(self._log, ctypes.c_void_p(0))
        bindings.llama_backend_init()
        self.version = f"llama-cpp-python {__version__}, {bindings.llama_print_system_info().decode().strip(' |')}"


@functools.cache
def library() -> _Library:
    """Load the bindings once a process and silence their log. Raises MissingDependencyError, ConfigError."""
    return _Library()


class LlamaCppRuntime:
    """A GGUF model in memory. The contract is `runtimes.base.Runtime`.

    Loading takes time and must not run on an event loop's thread. `progress` gets the loaded part, 0 to 1, and stops
    loading by returning False (then `Interrupted` is raised). `gpu_layers` None leaves the choice to the library. `room` is
    for how many tokens of all sequences together, at least `context`; it means nothing where they are `isolated`. There are
    fewer `sequences` where `room` or `width` has no token for each.

    Raises: ConfigError (no such file, no GGUF, damaged, too new, no room for the context); MissingDependencyError.
    """

    def __init__(
        self,
        path: Path,
        *,
        context: int,
        threads: int,
        sequences: int = 1,
        room: int | None = None,
        isolated: bool = False,
        width: int = 128,
        gpu_layers: int | None = None,
        flash_attention: bool | None = None,
        progress: Callable[[float], bool] | None = None,
    ) -> None:
        _require_gguf(path)
        lib = library()
        self._c = c = lib.c
        self._lock = threading.Lock()  # guards the vocabulary against `close` from another thread
        self._model: Any = None
        self._ctx: Any = None
        self._batch: Any = None
        self._threads, self._gpu_layers = threads, gpu_layers
        self._isolated = isolated and sequences > 1
        # Graphics cards have kernels of their own, and may have none for BF16.
        on_cpu = gpu_layers == 0 or not c.llama_supports_gpu_offload()
        self._one_kernel = isolated and on_cpu and flash_attention is True
        self._room = None if self._isolated else max(context, room or 0)
        # The library stops the process where there are more sequences than tokens in a call, or in all of its KV.
        self.sequences, self.width = min(sequences, width, self._room or sequences), width
        # The abort callback runs after every node of the graph. `strlen` of a one-byte string is it: 0 or 1 without
        # Python's interpreter lock, which a busy event loop would make each of a thousand calls wait for.
        self._flag = ctypes.create_string_buffer(2)
        self._abort = c.ggml_abort_callback(ctypes.cast(ctypes.CDLL(None).strlen, ctypes.c_void_p).value)
        try:
            self._load(lib, path, gpu_layers, progress)
            self._open(lib, path, context, flash_attention)
            self.info = self._read_info(path, context)
        except BaseException:
            self.close()
            raise

    def _load(self, lib: _Library, path: Path, gpu_layers: int | None, progress: Callable[[float], bool] | None) -> None:
        c = self._c
        params = c.llama_model_default_params()
        if gpu_layers is not None:
            if gpu_layers != 0 and not c.llama_supports_gpu_offload():
                raise ConfigError("this build of llama-cpp-python has no GPU support", key="gpu_layers")
            params.n_gpu_layers = gpu_layers
        stopped = False

        def report(part: float, _: Any) -> bool:
            nonlocal stopped
            stopped = progress is not None and not progress(part)
            return not stopped

        callback = c.llama_progress_callback(report)
        params.progress_callback = callback
        lib.complaints.clear()
        self._model = c.llama_model_load_from_file(str(path).encode(), params)
        if stopped:
            raise Interrupted
        if not self._model:
            why = "; ".join(lib.complaints) or "no reason given"
            raise ConfigError(f"{path}: llama.cpp cannot load it: {why}", key="model")
        if c.llama_model_has_encoder(self._model) or not c.llama_model_has_decoder(self._model):
            raise ConfigError(f"{path}: not a model that generates text from text alone", key="model")

    def _open(self, lib: _Library, path: Path, context: int, flash_attention: bool | None) -> None:
        c = self._c
        trained = c.llama_model_n_ctx_train(self._model)
        if 0 < trained < context:
            raise ConfigError(f"{context} is more than the {trained} tokens that {path.name} was trained for", key="context")
        params = c.llama_context_default_params()
        # Each sequence's part is rounded up by the library, so that the whole must be a multiple of it.
        tokens = -(-context // _PAD) * _PAD * self.sequences if self._room is None else self._room
        self._check_room(tokens, path, "kv_tokens" if tokens > 2 * context and self._room else "context")
        params.n_ctx = tokens
        params.n_seq_max = self.sequences
        params.n_batch = params.n_ubatch = self.width
        params.n_threads = params.n_threads_batch = self._threads
        params.kv_unified = not self._isolated
        params.swa_full = True  # sliding-window layers keep everything, so that a sequence can be cut anywhere
        params.no_perf = True
        params.abort_callback = self._abort
        params.abort_callback_data = ctypes.cast(self._flag, ctypes.c_void_p)
        if flash_attention is not None:
            params.flash_attn_type = c.LLAMA_FLASH_ATTN_TYPE_ENABLED if flash_attention else c.LLAMA_FLASH_ATTN_TYPE_DISABLED
        lib.complaints.clear()
        kinds = [(params.type_k, params.type_v)]
        if self._one_kernel:  # the second for models that have one tensor for both (MLA)
            kinds = [(_BF16, params.type_v), (_BF16, _BF16)]
        for params.type_k, params.type_v in kinds:
            self._ctx = c.llama_init_from_model(self._model, params)
            if self._ctx:
                break
        else:
            why = "; ".join(lib.complaints) or "out of memory"
            raise ConfigError(f"no room for a context of {params.n_ctx} tokens of {path.name}: {why}", key="context")
        self._memory = c.llama_get_memory(self._ctx)
        self._batch = c.llama_batch_init(self.width, 0, 1)
        self._flash_attention = flash_attention

    def _check_room(self, tokens: int, path: Path, key: str) -> None:
        """Refuse KV that no memory holds: the library would count it in 32 bits, or fill memory until the system stops it."""
        need, most = tokens * self._kv_bytes(), _memory()
        if self._c.llama_supports_gpu_offload():
            most *= _GPUS
        if tokens >= _POSITIONS or need > most:
            size = f"{need / 1e9:.0f} GB" if need else "more than can be counted"
            raise ConfigError(f"no room for {tokens} tokens of {path.name}: their keys and values take {size}", key=key)

    def _read_info(self, path: Path, context: int) -> ModelInfo:
        c, model = self._c, self._model
        self._vocab = vocab = c.llama_model_get_vocab(model)
        count = int(c.llama_vocab_n_tokens(vocab))
        self._trained = int(c.llama_model_n_ctx_train(model))
        special = {i: c.llama_vocab_get_text(vocab, i) for i in range(count) if c.llama_vocab_is_control(vocab, i)}
        controls = {text.decode("utf-8", "replace"): i for i, text in special.items() if text}
        names = {i: text for text, i in controls.items()}
        self._padding = self._padded(count)
        metadata = self._metadata()
        template = c.llama_model_chat_template(model, None)
        description = ctypes.create_string_buffer(256)
        c.llama_model_desc(model, description, len(description))
        identity = [*sorted(metadata.items()), path.stat().st_size, context, count, *(["bf16"] if self._one_kernel else [])]
        return ModelInfo(
            architecture=metadata.get("general.architecture", "unknown"),
            description=description.value.decode("utf-8", "replace"),
            context=context,
            trained_context=self._trained or None,
            vocab=count,
            parameters=int(c.llama_model_n_params(model)),
            size=int(c.llama_model_size(model)),
            chat_template=None if template is None else template.decode("utf-8", "replace"),
            bos=names.get(c.llama_vocab_bos(vocab), ""),
            eos=names.get(c.llama_vocab_eos(vocab), ""),
            add_bos=bool(c.llama_vocab_get_add_bos(vocab)),
            controls=controls,
            fingerprint=blake2b(repr(identity).encode(), digest_size=16).digest(),
            room=self._room,
            shares=not self._isolated,
            rewinds=not (c.llama_model_is_recurrent(model) or c.llama_model_is_hybrid(model)),
            kv_bytes=self._kv_bytes(),
        )

    def _padded(self, count: int) -> NDArray[np.int64]:
        """Ids that only fill the matrix up to a round number: converters call them [PAD...]. Nothing may ever draw them."""
        import numpy as np

        c, vocab = self._c, self._vocab
        unused = [i for i in range(count) if c.llama_vocab_get_attr(vocab, i) & c.LLAMA_TOKEN_ATTR_UNUSED]
        return np.array([i for i in unused if c.llama_vocab_get_text(vocab, i).startswith(b"[PAD")], np.int64)

    def _kv_bytes(self) -> int:
        """Of one token, in 16-bit keys and values of every layer; an estimate where layers differ."""
        c, model = self._c, self._model
        heads = max(1, int(c.llama_model_n_head(model)))
        return 4 * int(c.llama_model_n_layer(model) * c.llama_model_n_head_kv(model) * c.llama_model_n_embd(model)) // heads

    def _metadata(self) -> dict[str, str]:
        c, found = self._c, {}
        buffer = ctypes.create_string_buffer(4096)
        for i in range(c.llama_model_meta_count(self._model)):
            c.llama_model_meta_key_by_index(self._model, i, buffer, len(buffer))
            name = buffer.value.decode("utf-8", "replace")
            c.llama_model_meta_val_str_by_index(self._model, i, buffer, len(buffer))  # long values are cut
            found[name] = buffer.value.decode("utf-8", "replace")
        return found

    def tokenize(self, text: str, *, special: bool) -> list[int]:
        data = text.encode("utf-8", "replace")  # a lone surrogate cannot be in UTF-8
        size = len(data) + 8  # a token is at least one byte; a vocabulary may put a space before the text
        buffer = (self._c.llama_token * size)()
        with self._lock:
            self._alive()
            count = self._c.llama_tokenize(self._vocab, data, len(data), buffer, size, False, special)
        if count < 0:
            raise RuntimeError(f"llama_tokenize failed with {count}")
        return buffer[:count]  # type: ignore[no-any-return]

    def piece(self, token: int) -> bytes:
        size = 32
        with self._lock:
            self._alive()
            while True:
                buffer = ctypes.create_string_buffer(size)
                count = self._c.llama_token_to_piece(self._vocab, token, buffer, size, 0, False)
                if count >= 0:
                    return buffer.raw[:count]
                if -count <= size:
                    raise RuntimeError(f"llama_token_to_piece failed with {count}")
                size = -count

    def is_end(self, token: int) -> bool:
        with self._lock:
            self._alive()
            return bool(self._c.llama_vocab_is_eog(self._vocab, token))

    def evaluate(self, spans: Sequence[Span]) -> list[int]:
        self._alive()
        self._check(spans)
        batch, wanted = self._batch, []
        count = 0
        for span in spans:
            first = len(span.tokens) - span.rows
            for j, token in enumerate(span.tokens):
                batch.token[count], batch.pos[count] = token, span.start + j
                batch.n_seq_id[count], batch.seq_id[count][0] = 1, span.sequence
                batch.logits[count] = j >= first
                if j >= first:
                    wanted.append(count)
                count += 1
        batch.n_tokens = count
        code = self._c.llama_decode(self._ctx, batch)
        if code == 0:
            return wanted
        for span in spans:
            if not self.truncate(span.sequence, span.start):
                self.free(span.sequence)
        if code == _ABORTED:
            raise Interrupted
        if code == _NO_ROOM:
            raise OutOfPagesError(f"no room for {count} more tokens in a context of {self.info.context}")
        if code == _BAD_INPUT:
            raise RuntimeError(f"llama_decode refused a batch of {count} tokens")
        raise RuntimeError(f"llama_decode failed with {code}")

    def _check(self, spans: Sequence[Span]) -> None:
        total = sum(len(span.tokens) for span in spans)
        if not 0 < total <= self.width:
            raise ValueError(f"{total} tokens in a call that takes 1 to {self.width}")
        for span in spans:
            if span.start != self.length(span.sequence) or not 0 <= span.rows <= len(span.tokens):
                raise ValueError(f"{span} does not start where its sequence ends, or wants rows it does not have")
            if not all(0 <= token < self.info.vocab for token in span.tokens):
                raise ValueError(f"token ids of {span} are outside the vocabulary")

    def draw(self, rows: Sequence[int], sampling: Sequence[Sampling], positions: Sequence[int]) -> list[int]:
        self._alive()
        triples = zip(rows, sampling, positions, strict=True)
        return [draw(self._row(row), how, position) for row, how, position in triples]

    def rows(self, rows: Sequence[int]) -> NDArray[np.float32]:
        import numpy as np

        self._alive()
        return np.stack([self._row(row) for row in rows])

    def _row(self, row: int) -> NDArray[np.float32]:
        """A view into the library's buffer, valid until the next `evaluate`."""
        import numpy as np

        pointer = self._c.llama_get_logits_ith(self._ctx, row)
        if not pointer:
            raise RuntimeError(f"llama.cpp has no logits for row {row}")
        logits: NDArray[np.float32] = np.ctypeslib.as_array(pointer, shape=(self.info.vocab,))
        logits[self._padding] = -np.inf
        return logits

    def length(self, sequence: int) -> int:
        self._alive()
        return int(self._c.llama_memory_seq_pos_max(self._memory, sequence)) + 1

    def truncate(self, sequence: int, length: int) -> bool:
        self._alive()
        if self.length(sequence) <= length:
            return True
        c = self._c
        if not c.llama_memory_seq_rm(self._memory, sequence, length, -1):
            return False
        # A window that slid, or a recurrent state, may agree and still not hold what stood before `length`.
        first = c.llama_memory_seq_pos_min(self._memory, sequence)
        return self.length(sequence) == length and (length == 0 or first == 0)

    def fork(self, source: int, target: int, length: int) -> bool:
        self._alive()
        if self.length(target) or not 0 < length <= self.length(source):
            raise ValueError(f"cannot fork {length} tokens of sequence {source} into {target}")
        if self._isolated:  # between parts of the KV, a sequence is copied whole
            self._c.llama_memory_seq_cp(self._memory, source, target, -1, -1)
        else:
            self._c.llama_memory_seq_cp(self._memory, source, target, 0, length)
        if self.truncate(target, length) and self.length(target) == length:
            return True
        self.free(target)
        return False

    def free(self, sequence: int) -> None:
        self._alive()
        self._c.llama_memory_seq_rm(self._memory, sequence, -1, -1)

    def export_state(self, sequence: int) -> bytes:
        self._alive()
        size = self._c.llama_state_seq_get_size(self._ctx, sequence)
        buffer = (ctypes.c_uint8 * size)()
        written = self._c.llama_state_seq_get_data(self._ctx, buffer, size, sequence)
        return self.info.fingerprint + bytes(memoryview(buffer)[:written])

    def import_state(self, sequence: int, data: bytes) -> bool:
        self._alive()
        mark = len(self.info.fingerprint)
        if data[:mark] != self.info.fingerprint or len(data) <= mark:
            return False
        raw = (ctypes.c_uint8 * (len(data) - mark)).from_buffer_copy(data, mark)
        if self._c.llama_state_seq_set_data(self._ctx, raw, len(raw), sequence):
            return True
        self.free(sequence)
        return False

    def interrupt(self) -> None:
        self._flag[0] = b"\x01"

    def resume(self) -> None:
        self._flag[0] = b"\x00"

    def close(self) -> None:
        with self._lock:
            if self._batch is not None:
                self._c.llama_batch_free(self._batch)
            if self._ctx:
                self._c.llama_free(self._ctx)
            if self._model:
                self._c.llama_model_free(self._model)
            self._model = self._ctx = self._batch = None

    def facts(self) -> Mapping[str, Any]:
        attention = {None: "auto", True: "on", False: "off"}[self._flash_attention]
        return {
            "threads": self._threads,
            "gpu_layers": self._gpu_layers,
            "flash_attention": attention,
            "width": self.width,
            "kv": ("isolated" if self._isolated else "unified") + (", bf16" if self._one_kernel else ""),
            "library": library().version,
        }

    def _alive(self) -> None:
        if not self._model:
            raise RuntimeError("the runtime is closed")


def _memory() -> float:
    """Bytes of this machine's memory; infinite where the system does not say."""
    try:
        return float(os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"))
    except (AttributeError, ValueError, OSError):  # Windows
        return math.inf


def _require_gguf(path: Path) -> None:
    try:
        with path.open("rb") as file:
            magic = file.read(len(_MAGIC))
    except FileNotFoundError as error:
        raise ConfigError(f"{path}: no such file", key="model") from error
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror or error}", key="model") from error
    if magic != _MAGIC:
        raise ConfigError(f"{path}: not a GGUF file", key="model")
