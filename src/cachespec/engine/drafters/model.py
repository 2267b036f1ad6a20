"""A draft model: a smaller model of the same vocabulary, on any runtime.

It draws with the request's own sampling and seed, so with the noise that the target will use at the same positions: where
the two laws are close, both draw the same token (P >= (1 - TV) / (1 + TV); arXiv 2408.07978). That is what keeps acceptance
high at temperatures above 0; a draft model that is greedy, or draws independently, loses most of it.

Its KV is its own affair. A sequence holds the tokens that were evaluated, right or wrong; before drafting it is cut to
what agrees with the committed tokens, and what is missing is evaluated, at most one call of it a step. When a request
ends its sequence stays, and a later request of the namespace takes over the one that shares most.
"""

from __future__ import annotations

from collections.abc import Sequence

from cachespec.engine.drafters.base import Draft
from cachespec.engine.drafters.limits import check_option
from cachespec.engine.drafters.vocabulary import common_vocabulary
from cachespec.engine.runtimes.base import Interrupted, Runtime, Span
from cachespec.engine.sampling import Sampling
from cachespec.errors import OutOfPagesError


class _Slot:
    """A sequence of the draft runtime, and the tokens whose KV it holds."""

    __slots__ = ("held", "namespace", "number")

    def __init__(self, number: int) -> None:
        self.number = number
        self.held: list[int] = []
        self.namespace: bytes | None = None


class ModelTrack:
    """One request: its committed tokens, and how many of those its slot agrees with."""

    __slots__ = ("agreed", "sampling", "slot", "tokens")

    def __init__(self, prompt: Sequence[int], sampling: Sampling, slot: _Slot | None) -> None:
        self.tokens, self.sampling, self.slot = list(prompt), sampling, slot
        self.agreed = 0


class ModelDrafter:
    """See the module's docstring. Owns the draft runtime and closes it; requests beyond its sequences get no drafts.

    Args:
        target: only its vocabulary is looked at, here and now.
        min_probability: drafting stops after a token that the draft model itself gives less. 0 looks at no probability.

    Raises ConfigError: the vocabularies differ.
    """

    def __init__(self, runtime: Runtime, target: Runtime, *, min_probability: float = 0.2, name: str = "model") -> None:
        check_option("min_probability", min_probability, least=0, most=1)
        self._vocab = common_vocabulary(target, runtime)
        self.name = name
        self.sources: tuple[str, ...] = (name,)
        self._runtime, self._floor = runtime, min_probability
        self._free = [_Slot(number) for number in range(runtime.sequences)]
        self._tracks = 0

    def open(self, prompt: Sequence[int], *, sampling: Sampling, namespace: bytes | None) -> ModelTrack:
        self._tracks += 1
        if not self._free:
            return ModelTrack(prompt, sampling, None)
        alike = {s.number: _common(s.held, prompt) if s.namespace == namespace is not None else -1 for s in self._free}
        slot = max(self._free, key=lambda s: (alike[s.number], -len(s.held)))
        self._free.remove(slot)
        if alike[slot.number] < 0:
            self._cut(slot, 0)
        slot.namespace = namespace
        track = ModelTrack(prompt, sampling, slot)
        track.agreed = max(0, alike[slot.number])
        return track

    def prospects(self, tracks: Sequence[ModelTrack], limit: int) -> list[Draft]:
        return [
            Draft(source=self.name, pending=track.slot is not None and limit > 0, behind=_behind(track)) for track in tracks
        ]

    def propose(self, tracks: Sequence[ModelTrack], lengths: Sequence[int]) -> list[Draft]:
        drafts: list[tuple[list[int], list[float]]] = [([], []) for _ in tracks]
        wanted = [i for i, length in enumerate(lengths) if length > 0 and tracks[i].slot is not None]
        try:
            active = self._catch_up([tracks[i] for i in wanted], wanted)
            while active:
                active = self._extend(tracks, lengths, active, drafts)
        except OutOfPagesError:  # what was drafted until then is as good as any; there is room again next time
            for slot in self._free:
                self._cut(slot, 0)
        except ArithmeticError:  # the draft model's row is no law, for this prompt: it says nothing of others
            for track in (tracks[i] for i in wanted):
                if (held := track.slot) is not None:
                    self._cut(held, 0)
                    self._free.append(held)
                    track.slot = None
        return [Draft(source=self.name, tokens=tuple(t), confidence=tuple(c)) for t, c in drafts]

    def _catch_up(self, tracks: Sequence[ModelTrack], numbers: Sequence[int]) -> dict[int, list[int]]:
        """Bring slots up to all committed tokens but some; what is to be evaluated next of those that are ready."""
        ready, spans, room = {}, [], self._runtime.width
        for number, track in zip(numbers, tracks, strict=True):
            slot = track.slot
            if slot is None:
                continue
            self._cut(slot, min(track.agreed, len(track.tokens) - 1))
            missing = track.tokens[len(slot.held) :]
            if len(missing) <= room:
                ready[number] = missing
                room -= len(missing)
            elif room > 0:
                spans.append((slot, missing[:room]))
                track.agreed += room
                room = 0
        if spans:
            self._evaluate(spans, rows=0)
        return ready

    def _extend(
        self,
        tracks: Sequence[ModelTrack],
        lengths: Sequence[int],
        active: dict[int, list[int]],
        drafts: list[tuple[list[int], list[float]]],
    ) -> dict[int, list[int]]:
        """One token more for each; what is to be evaluated for those that go on."""
        slots = [slot for slot in (tracks[i].slot for i in active) if slot is not None]
        rows = self._evaluate(list(zip(slots, active.values(), strict=True)), rows=1)
        for i in active:
            tracks[i].agreed = max(tracks[i].agreed, len(tracks[i].tokens))
        positions = [len(slot.held) for slot in slots]
        drawn = self._runtime.draw(rows, [tracks[i].sampling for i in active], positions)
        sure = self._confidence(rows, drawn, [tracks[i].sampling for i in active])
        following = {}
        for i, token, probability in zip(active, drawn, sure, strict=True):
            if token >= self._vocab or probability < self._floor:
                continue
            drafts[i][0].append(token)
            drafts[i][1].append(probability)
            if len(drafts[i][0]) < lengths[i] and not self._runtime.is_end(token):
                following[i] = [token]
        return following

    def _evaluate(self, spans: Sequence[tuple[_Slot, list[int]]], *, rows: int) -> list[int]:
        try:
            handles = self._runtime.evaluate(
                [Span(sequence=s.number, start=len(s.held), tokens=tokens, rows=rows) for s, tokens in spans]
            )
        except (Interrupted, OutOfPagesError):
            for slot, _ in spans:
                del slot.held[self._runtime.length(slot.number) :]
            raise
        for slot, tokens in spans:
            slot.held += tokens
        return handles

    def _confidence(self, rows: Sequence[int], drawn: Sequence[int], sampling: Sequence[Sampling]) -> list[float]:
        """The probability of what was drawn, at the temperature it was drawn at (1 where that is 0)."""
        import numpy as np

        if not self._floor:
            return [1.0] * len(drawn)
        result = []
        for row, token, how in zip(self._runtime.rows(rows), drawn, sampling, strict=True):
            with np.errstate(over="ignore"):  # at the coldest temperatures all but the best are infinitely far away
                logits = (row.astype(np.float64) - float(row.max())) / (how.temperature or 1.0)
            result.append(float(np.exp(logits[token]) / np.exp(logits).sum()))
        return result

    def _cut(self, slot: _Slot, length: int) -> None:
        """Keep the first `length` tokens of a slot; where the model cannot go back, none."""
        if length < len(slot.held):
            if not length or not self._runtime.truncate(slot.number, length):
                self._runtime.free(slot.number)
                length = 0
            del slot.held[length:]

    def accept(self, track: ModelTrack, tokens: Sequence[int]) -> None:
        if track.slot is not None:
            held, at = track.slot.held, len(track.tokens)
            if track.agreed == at:
                track.agreed += _common(held[at : at + len(tokens)], tokens)
        track.tokens += tokens

    def close(self, track: ModelTrack, *, learn: bool) -> None:
        self._tracks -= 1
        if track.slot is not None:
            self._cut(track.slot, min(track.agreed, len(track.tokens)))
            self._free.append(track.slot)
            track.slot = None

    def stats(self) -> dict[str, int]:
        return {"tracks": self._tracks, "free": len(self._free), "bytes": self._runtime.info.size}

    def stop(self) -> None:
        self._runtime.close()


def _behind(track: ModelTrack) -> int:
    """Tokens to be evaluated but for the last, which the next draft follows."""
    return 0 if track.slot is None else max(0, len(track.tokens) - 1 - min(track.agreed, len(track.slot.held)))


def _common(a: Sequence[int], b: Sequence[int]) -> int:
    """How many leading tokens agree."""
    size = min(len(a), len(b))
    return next((i for i in range(size) if a[i] != b[i]), size)
