"""One generation of a configuration, as a client uses it, and how the next one takes its place.

A reload is validate-then-swap: the new file is read and checked, what is new in it is made and started, and only then does the
client answer by it; whatever fails leaves everything as it was. What both have in common is kept: a backend whose table did
not change goes on with its connections, its loaded model and its KV; a policy keeps what it learned; the ledger keeps its
counters, so that a new limit holds for what was spent under the old one. What was learned of a backend holds where its name
stands for the same model, server and account, before a reload or a restart as after it. A request ends under the generation it
began with.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path
from typing import TYPE_CHECKING

from cachespec.backends.base import Backend
from cachespec.background import Background
from cachespec.cache_learning import Caching
from cachespec.clock import Clock
from cachespec.config import Config, PluginSpec, load_config
from cachespec.decide import Decider, Settings
from cachespec.errors import ConfigError, InputError
from cachespec.finishing import to_the_end
from cachespec.learned import Learned
from cachespec.telemetry import Telemetry
from cachespec.toml_source import read_text

if TYPE_CHECKING:
    from cachespec.registry import Wired

RETIRE_S = 0.5
"""Seconds between two looks at whether a backend that was taken out is still in use."""
_PRICES = ("prices", "cost")


@dataclass(frozen=True, slots=True, kw_only=True)
class Generation:
    """Everything that a configuration decides. A request holds on to the one it began with."""

    wired: Wired
    decider: Decider
    caching: Caching
    targets: Mapping[str, str]
    """What each name stands for, and what names that are gone stood for last (`target_of`)."""

    @property
    def config(self) -> Config:
        return self.wired.config

    @property
    def backends(self) -> Mapping[str, Backend]:
        return self.wired.backends


def generation(
    wired: Wired,
    *,
    learned: Learned,
    telemetry: Telemetry,
    background: Background | None = None,
    before: Generation | None = None,
) -> Generation:
    """What is wired, ready to decide; `background` is that of the one `before`, where there is one.

    Raises ConfigError for a backend that goes by another name.
    """
    config = wired.config
    targets = {name: target_of(spec, wired.backends[name]) for name, spec in config.backends.items()}
    settings = Settings(
        models=config.models,
        default_model=config.default_model,
        max_output_tokens=config.max_output_tokens,
        drop_unsupported=config.on_unsupported == "drop",
        rules=config.rules,
        budgets=config.budgets,
        generation=config.generation,
        targets=targets,
    )
    for name, backend in wired.backends.items():
        if backend.name != name:
            raise ConfigError(f"this backend calls itself {backend.name!r}; give both one name", key=f"backends.{name}")
    if before is not None and before.caching.policy is wired.caching and before.wired.secret == wired.secret:
        caching = before.caching
    else:
        former = None if before is None else before.caching
        caching = Caching(wired.caching, telemetry, learned, background=background, secret=wired.secret, before=former)
    decider = Decider(wired.backends, wired.routing, wired.ledger, settings, caching.planner, learned)
    return Generation(
        wired=wired, decider=decider, caching=caching, targets=targets if before is None else {**before.targets, **targets}
    )


def target_of(spec: PluginSpec, backend: Backend) -> str:
    """What a backend's name stands for, in 32 hexadecimal digits: all that its table says but what it costs, its model, and its
    server, which may be named elsewhere.

    The same in every process, so that what was learned of one target is never taken for what another does.
    """
    options = {key: value for key, value in spec.options.items() if key not in _PRICES}
    server = getattr(backend, "base_url", None)
    text = json.dumps([spec.use, options, backend.model, server], sort_keys=True, default=str)
    return blake2b(text.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def replaced(now: Generation, before: Generation) -> list[str]:
    """The names that stand for something else than they did when they were last used."""
    return [name for name in now.backends if before.targets.get(name, now.targets[name]) != now.targets[name]]


async def start_backend(now: Generation, name: str) -> None:
    """Start a backend; what is wrong with it is told with file and line."""
    try:
        await now.backends[name].start()
    except ConfigError as error:
        raise now.config.place(error, ("backends", name)) from error


async def close_backend(backend: Backend) -> None:
    """Close a backend to the end, whoever cancels. One that fails to close is logged: it must not keep the others open."""
    try:
        await to_the_end(backend.aclose)
    except Exception:
        logging.getLogger("cachespec").exception("backend %s could not be closed", backend.name)


def read_again(path: str | None, generation: int) -> Config:
    """The configuration that a file holds now. Raises as `load_config`, ConfigError for what may never end (a pipe), and
    InputError where there is no file."""
    if path is None:
        raise InputError("this client was not made from a file: hand the configuration over", field="config")
    found = Path(path)
    if found.exists() and not (found.is_file() or found.is_dir()):
        raise ConfigError("is no regular file, and is not read again", path=path)
    return load_config(path, generation=generation)


class Retired:
    """Backends of earlier generations, until the streams that were open when they were taken out have ended.

    `streams` are those that are open now.
    """

    def __init__(self, background: Background, clock: Clock, streams: AbstractSet[object]) -> None:
        self._background, self._clock, self._streams = background, clock, streams
        self.backends: list[Backend] = []

    def add(self, gone: Sequence[Backend]) -> None:
        """Close them, in the background, once the streams that are open now have ended."""
        if gone:
            self.backends += gone
            self._later(gone, set(self._streams))

    def _later(self, gone: Sequence[Backend], streams: AbstractSet[object]) -> None:
        async def close() -> None:
            if streams & self._streams:
                self._later(gone, streams)
                return
            for backend in gone:
                self.backends.remove(backend)
                await close_backend(backend)

        self._background.at(self._clock.time() + RETIRE_S, ("retire", id(gone)), close)


class FileWatch:
    """Whether a file changed since it was read, and then since it was last looked at.

    `text` is what was read. Only at first are contents compared: later, saving it anew is asking for it.
    """

    def __init__(self, path: str, text: str | None) -> None:
        self.path = path
        self._text = text
        self._seen: tuple[int, int, int] | None = None

    def changed(self) -> bool:
        """Look again. A file that is gone for a moment, as while an editor saves it, has not changed."""
        now = self._look()
        if now is None or now == self._seen:
            return False
        read, self._text, self._seen = self._text, None, now
        return read is None or read != self._content()

    def _content(self) -> str | None:
        try:
            return read_text(self.path) if Path(self.path).is_file() else None
        except ConfigError:
            return None

    def _look(self) -> tuple[int, int, int] | None:
        try:
            found = Path(self.path).stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size, found.st_ino
