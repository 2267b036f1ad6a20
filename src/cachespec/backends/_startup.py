"""From a loaded runtime to a running engine: the invariant width, measured costs, the drafter, the vocabulary for grammars.

All of it runs in a worker thread and takes a few seconds at most; what was measured once on a machine is kept.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib.util import find_spec
from math import inf
from typing import TYPE_CHECKING, Any, TypeVar

from cachespec import plugins
from cachespec.annotations import Where
from cachespec.durations import LONGEST_S
from cachespec.engine.control import SpeculationControl
from cachespec.engine.costs import BATCHES, CalibrationStore, CostModel, calibrate
from cachespec.engine.evidence import Withheld, load_evidence
from cachespec.engine.invariance import kept_width
from cachespec.engine.loop import Engine
from cachespec.engine.runtimes.base import Runtime
from cachespec.engine.structured import Vocabulary
from cachespec.errors import ConfigError, InputError
from cachespec.options import Problem
from cachespec.shown import shown

if TYPE_CHECKING:
    from cachespec.engine.drafters.base import Drafter
    from cachespec.engine.drafters.factories import Load
    from cachespec.engine.speculation import AcceptancePolicy, CostTable

WIDEST = 512
"""Tokens a call; more would make prefill hard to cancel on a slow machine."""
DRAFTED = 16
"""Drafted tokens a sequence that a call has room for when all of them draft."""
SPARE_SLOTS = 2
"""Sequences beside those that run, where each has its own KV: for prefixes that are kept."""
_KEPT_SLOTS = 4  # sequences for each that runs, where forks share
_WIDTHS = (1, 2, 3, 4, 5, 6, 8, 12, 16, 17, 24)  # tokens a sequence that are measured
_FIRST_S, _LATER_S = 3.0, 1.0  # for measuring: until then all is assumed; later only what is rarely needed
_MB = 1 << 20
_POSITIONS = 2**31 - 1  # a token's place in a sequence is a number of 32 bits
_MOST_THREADS = 512
_GOODPUT = {"use": "goodput"}
T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class EngineSettings:
    """What a local backend's options say of its engine. Raises ConfigError, naming the key; UnknownPluginError."""

    name: str
    context: int
    parallel: int
    prefill_chunk: int
    max_gap: float
    kv_tokens: int | None
    host_cache_mb: int
    keep_warm: float
    deterministic: bool
    draft: Mapping[str, Any] | None
    acceptance: Mapping[str, Any] | AcceptancePolicy | None
    require_eval: float | None = None

    def __post_init__(self) -> None:
        whole(self.context, "context", least=2, most=_POSITIONS)
        whole(self.parallel, "parallel", least=1, most=64)
        whole(self.prefill_chunk, "prefill_chunk", least=1, most=WIDEST)
        whole(self.host_cache_mb, "host_cache_mb", least=0)
        number(self.max_gap, "max_gap", least=1)
        number(self.keep_warm, "keep_warm", least=0, most=LONGEST_S)
        if self.kv_tokens is not None:
            whole(self.kv_tokens, "kv_tokens", least=1, most=_POSITIONS)
            if self.kv_tokens < self.context:
                raise ConfigError(f"must be at least the context, {self.context}, not {self.kv_tokens}", key="kv_tokens")
        if self.require_eval is not None:
            number(self.require_eval, "require_eval", least=0, most=1)
            if self.draft is None:
                raise ConfigError("there is no drafter that evidence could be about", key="require_eval", hint="add draft")
        if self.draft is not None:
            _checked(lambda: plugins.nested("drafters", _table(self.draft, "draft"), ("draft",)))

    @property
    def width(self) -> int:
        """Tokens that a call must have room for."""
        return min(WIDEST, max(self.prefill_chunk, self.parallel * (1 + DRAFTED)))

    @property
    def room(self) -> int:
        """Tokens that all sequences together have KV for, where they share it."""
        return 2 * self.context if self.kv_tokens is None else self.kv_tokens

    @property
    def shared_slots(self) -> int:
        return max(8, _KEPT_SLOTS * self.parallel)

    def policy(self) -> AcceptancePolicy:
        """The acceptance policy, made. Goodput, where nothing else is said."""
        chosen, where = self.acceptance, ("acceptance",)
        if not isinstance(chosen, Mapping | str | None):
            offered: AcceptancePolicy = _checked(lambda: plugins.offers("acceptance", chosen, where))
            return offered
        use, options = _checked(lambda: plugins.split_use(_table(chosen or _GOODPUT, "acceptance"), where))
        made: AcceptancePolicy = _checked(lambda: plugins.make("acceptance", use, options, where, {}, None))
        return made


@dataclass(frozen=True, slots=True)
class Started:
    """A running engine. `control` None: it does not speculate, for `reason`. `vocabulary` None: no grammars here.

    `withheld`: what is missing of the evidence that drafting asks for, in a sentence; None: nothing.
    """

    engine: Engine
    control: SpeculationControl | None
    reason: str | None
    vocabulary: Vocabulary | None
    withheld: str | None = None


def start_engine(
    runtime: Runtime,
    settings: EngineSettings,
    load_draft: Load,
    *,
    fits: Fits | None = None,
    store: CalibrationStore | None = None,
) -> Started:
    """Measure what has to be measured, and start. The runtime is the engine's afterwards; on an error it is the caller's.

    `fits` tells whether a draft model will have room. Raises what making the drafter does.
    """
    store = store or CalibrationStore()
    width = kept_width(runtime, store) if settings.deterministic else runtime.width
    policy = settings.policy()
    drafter: Drafter[Any] | None = None
    costs, control, reason, withheld = None, None, None, None
    if settings.draft is not None and not runtime.info.rewinds:
        reason = "capability"
    elif settings.draft is not None:
        withheld = _withheld(runtime, settings, settings.draft, store)
        room = has_room(settings.draft, fits) if withheld is None else None
        makes = withheld is None and room is not False
        drafter = make_drafter(settings, settings.draft, runtime, load_draft) if makes else None
        try:
            costs = CostModel(measured_costs(runtime, settings, width, store))
            policy = policy if withheld is None else Withheld()
            control = SpeculationControl(policy, drafter, costs=costs, max_tokens=width, fits=room)
        except BaseException:
            if drafter is not None:
                drafter.stop()
            raise
    vocabulary = _vocabulary(runtime)
    engine = Engine(
        runtime,
        name=settings.name,
        parallel=settings.parallel,
        prefill_chunk=settings.prefill_chunk,
        width=width,
        max_gap=settings.max_gap,
        host_bytes=settings.host_cache_mb * _MB,
        control=control,
        costs=costs,
    )
    if costs is not None:  # a forecast before anything ran
        table = costs.table
        widest = max(table.points[1])
        engine.decode_speed.add(1, table.seconds(1, 1))
        engine.prefill_speed.add(widest, table.seconds(1, widest))
    engine.start()
    return Started(engine, control, reason, vocabulary, withheld)


def _withheld(runtime: Runtime, settings: EngineSettings, draft: Mapping[str, Any], store: CalibrationStore) -> str | None:
    """What is missing of the evidence for the drafter that the backend asks for; None: nothing. Read at each start."""
    least = settings.require_eval
    if least is None:
        return None
    found = load_evidence(store, runtime.info.fingerprint, settings.name, draft)
    if found is None:
        asked = f"require_eval asks for an acceptance of {least:g}, and none was measured of this model with this drafter"
        return f"{asked}; cachespec eval SLICE --backend {settings.name} does"
    if found.acceptance >= least:
        return None
    measured = f"cachespec eval found an acceptance of {found.acceptance:.3f} in {found.requests} requests"
    return f"{measured}, and require_eval asks for {least:g}"


def measured_costs(runtime: Runtime, settings: EngineSettings, width: int, store: CalibrationStore) -> CostTable:
    """What was measured at earlier starts, and what is still missing as far as there is time for it: one point at least.

    So every start is nearer to a whole table, on a machine however busy, and none after that measures anything.
    """
    identity = {**runtime.facts(), "parallel": settings.parallel, "invariant": width}
    known = store.load(runtime.info.fingerprint, identity)
    batches = [batch for batch in BATCHES if batch <= settings.parallel]
    seconds = _FIRST_S if known is None else _LATER_S
    costs = calibrate(runtime, widths=[n for n in _WIDTHS if n <= width], batches=batches, seconds=seconds, known=known)
    if known is None or costs.measured != known.points:
        store.save(runtime.info.fingerprint, identity, costs)
    return costs


def make_drafter(settings: EngineSettings, draft: Mapping[str, Any], runtime: Runtime, load: Load) -> Drafter[Any]:
    """The drafter of a `draft` table. Raises ConfigError and what loading its model does."""
    where: Where = ("draft",)
    use, options = _checked(lambda: plugins.split_use(draft, where))
    made: Drafter[Any] = _checked(
        lambda: plugins.make("drafters", use, options, where, {"target": runtime, "load": load}, None)
    )
    return made


def has_room(draft: Mapping[str, Any], fits: Fits | None) -> bool | None:
    """Whether the model of a `draft` table has room; None where there is none, or nobody can tell."""
    model, runtime = draft.get("model"), draft.get("runtime")
    if fits is None or not isinstance(model, str) or not (runtime is None or isinstance(runtime, str)):
        return None  # there is no model, or loading it says what is wrong
    return fits(model, runtime)


def _vocabulary(runtime: Runtime) -> Vocabulary | None:
    if find_spec("llguidance") is None:
        return None
    try:
        return Vocabulary(runtime)
    except InputError:  # no token ends an answer
        return None


def _checked(check: Callable[[], T]) -> T:
    """What a check of a plug-in's table gives. A `Problem` becomes the error it stands for, its key within the backend."""
    try:
        return check()
    except Problem as problem:
        raise problem.error() from problem.__cause__


def _table(value: object, key: str) -> Mapping[str, Any]:
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a table, not {shown(value)}", key=key, hint='such as {"use": "..."}')
    return value


def whole(value: object, key: str, *, least: int, most: int | None = None) -> None:
    """A whole number from `least` to `most`. Raises ConfigError, naming the key."""
    if type(value) is not int:
        raise ConfigError(f"must be a whole number, not {shown(value)}", key=key)
    number(value, key, least=least, most=most)


def number(value: object, key: str, *, least: float, most: float | None = None) -> None:
    """A finite number from `least` to `most`. Raises ConfigError, naming the key."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise ConfigError(f"must be a number, not {shown(value)}", key=key)
    if not value >= least:
        raise ConfigError(f"must be at least {least}, not {shown(value)}", key=key)
    if value > (inf if most is None else most) or value == inf:
        raise ConfigError(f"must be {'finite' if most is None else f'at most {most}'}, not {shown(value)}", key=key)


def thread_count(value: object) -> None:
    """A number of threads, or None for a choice of ours. Raises ConfigError: beyond some hundred, libraries fail hard."""
    if value is not None:
        whole(value, "threads", least=1, most=_MOST_THREADS)


Fits = Callable[[str, str | None], bool | None]
"""Whether a draft model, by its name and runtime (None: that of the target), has room; None where nobody can tell."""
Progress = Callable[[float], bool]
