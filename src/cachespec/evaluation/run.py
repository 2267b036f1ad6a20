"""An evaluation from a slice and a configuration: of a local backend by its real engine, of a hosted one without sending."""

from __future__ import annotations

from cachespec.annotations import suggestion
from cachespec.backends._local import LocalBackend
from cachespec.config import Config
from cachespec.engine.costs import CalibrationStore
from cachespec.errors import InputError
from cachespec.evaluation.hosted import evaluate_hosted
from cachespec.evaluation.local import LocalEvaluation
from cachespec.evaluation.prompts import Slice
from cachespec.evaluation.result import Evaluated, Progress
from cachespec.evaluation.spending import anything
from cachespec.registry import build_backend


async def evaluate(
    prompts: Slice,
    config: Config,
    name: str,
    *,
    progress: Progress,
    limit: int | None = 4,
    max_output_tokens: int = 128,
    temperature: float | None = None,
    measure_s: float = 6.0,
    store: CalibrationStore | None = None,
) -> Evaluated:
    """Evaluate backend `name`. What a local one's drafters are worth is kept as evidence for `require_eval`.

    Args:
        limit: lines of each category at most, of a local backend (None: all); a hosted one takes no time.
        max_output_tokens: of an answer that is generated.
        temperature: where a line names none; None: what the backend would take, 1, and 0 for lines with `turns`.
        measure_s: seconds for measuring what calls of several tokens take, beside the calibration that is kept.
        store: where calibrations and evidence are kept; None: the user's cache folder.

    Raises InputError for a backend that there is not, and for a slice of which it can answer nothing; and what loading a model
    raises.
    """
    if name not in config.backends:
        raise InputError(f"no backend is called {name!r}; {suggestion(name, config.backends)}", field="--backend")
    backend = build_backend(config, name, anything(config))
    if not isinstance(backend, LocalBackend):
        return evaluate_hosted(config, backend, prompts, progress)
    local = LocalEvaluation(
        config,
        backend,
        prompts.limited(limit),
        progress=progress,
        max_output_tokens=max_output_tokens,
        temperature=temperature,
        measure_s=measure_s,
        store=store or CalibrationStore(),
    )
    return await local.evaluated()
