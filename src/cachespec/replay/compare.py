"""Several policies over one trace, beside the fixed ones and the bound: the report of ``cachespec replay``."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from cachespec.annotations import nearest
from cachespec.caching import CacheTerms, CachingPolicy
from cachespec.errors import UnknownPluginError
from cachespec.plugins import create, installed
from cachespec.replay.bound import Bounds, bounds
from cachespec.replay.fixed import BASELINES, FAMILIES, fixed_policies
from cachespec.replay.result import Result
from cachespec.replay.simulate import Line, simulate
from cachespec.replay.traces import Trace

Progress = Callable[[str, int], None]
"""Told what is going on, and how many requests of the trace it has done."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """What the policies cost. `results` are those asked for, `fixed` all fixed ones, both by name."""

    trace: Trace
    results: Mapping[str, Result]
    fixed: Mapping[str, Result]
    bounds: Bounds

    @property
    def best_fixed(self) -> Result:
        return min(self.fixed.values(), key=lambda result: result.cost)

    def to_dict(self) -> dict[str, Any]:
        """The report (the format ``replay``)."""
        best = self.best_fixed
        return {
            "requests": self.trace.requests,
            "input_tokens": self.trace.input_tokens,
            "relative_cost": {name: result.relative for name, result in self.results.items()},
            "best_fixed": {"policy": best.policy, "cost": best.relative},
            "bound": self.bounds.without_pings,
            "bound_with_pings": self.bounds.with_pings,
        }


def policies(names: Sequence[str], terms: CacheTerms) -> dict[str, CachingPolicy]:
    """The policies of these names: fixed ones, installed ones, ``module:attribute``. All fixed and installed ones for none.

    Raises UnknownPluginError, and what `cachespec.plugins.create` raises.
    """
    fixed = fixed_policies(terms)
    wanted = names or (*(name for name in installed("caching") if name not in BASELINES), *fixed)
    return {name: fixed[name] if name in fixed else _made(name, fixed) for name in wanted}


def _made(name: str, fixed: Iterable[str]) -> CachingPolicy:
    close = nearest(name, fixed)
    if close is not None and name.partition(":")[0] in FAMILIES:  # a lifetime that this vendor does not have
        raise UnknownPluginError(f"there is no fixed policy {name!r} (there is: {', '.join(fixed)})")
    try:
        return cast("CachingPolicy", create("caching", name, {}, where="--policy"))
    except UnknownPluginError as error:
        hint = f"; or do you mean the fixed policy {close!r}?" if close else ""
        raise UnknownPluginError(f"{error}{hint}") from error.__cause__


def compare(
    trace: Trace,
    wanted: Mapping[str, CachingPolicy],
    terms: CacheTerms,
    *,
    decided: Callable[[Line], None] | None = None,
    progress: Progress = lambda what, done: None,
) -> Comparison:
    """Run a trace through policies, the fixed ones and the bound. `decided` is told the decisions of the policies wanted."""

    def run(name: str, policy: CachingPolicy) -> Result:
        return simulate(
            trace,
            policy,
            terms,
            name=name,
            decided=decided if name in wanted else None,
            progress=lambda done: progress(name, done),
        )

    results = {name: run(name, policy) for name, policy in wanted.items()}
    fixed = {name: results.get(name) or run(name, policy) for name, policy in fixed_policies(terms).items()}
    least = bounds(trace, terms, lambda done: progress("bound", done))
    return Comparison(trace=trace, results=results, fixed=fixed, bounds=least)
