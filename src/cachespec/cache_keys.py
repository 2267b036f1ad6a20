"""Cache keys: one for each tenant where a key parts caches, one for each shared prefix where it says which machine.

Both are keyed hashes with a secret of the application's, so that nobody can guess another tenant's key, or learn from a key
whether two prompts are alike (DESIGN section 7). Without a tenant there is one shared namespace and nothing to keep from
anybody: such keys need no secret and are the same in every process.

A routed key takes some 15 requests a minute before the vendor spills it over to machines that have nothing cached (OpenAI's
guide). A busier prefix gets a power of two of keys, and each conversation keeps to one of them.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from hashlib import blake2b

PER_MINUTE = 15.0
_REMEMBERED = 10_000
_KEEP_SHARDS_S = 1_800.0


@dataclass(slots=True)
class _Traffic:
    """Requests of one prefix: in the minute `minute` and the one before it; `shards` until when."""

    minute: int = 0
    now: int = 0
    before: int = 0
    shards: int = 1
    until: float = 0.0


class CacheKeys:
    """Makes the keys, and counts what goes out under them. `secret` is set once it was read from the ledger."""

    def __init__(self) -> None:
        self.secret: bytes | None = None
        self._traffic: OrderedDict[bytes, _Traffic] = OrderedDict()

    def partition(self, tenant: str | None) -> str | None:
        """The key of a tenant's own cache; None for the shared one, and while the secret is not known."""
        return None if tenant is None or self.secret is None else self._hash(tenant, b"partition")

    def route(self, tenant: str | None, prefix: bytes, spread: bytes, now: float) -> str | None:
        """The key of a shared prefix. `spread` names the conversation: equal ones get equal keys."""
        if tenant is not None and self.secret is None:
            return None
        key, traffic = self._hash(tenant, prefix), self._traffic.get(self._place(tenant, prefix))
        shards = 1 if traffic is None or now >= traffic.until else traffic.shards
        if shards == 1:
            return key
        return f"{key}-{int.from_bytes(blake2b(spread, digest_size=4).digest(), 'big') % shards}"

    def sent(self, tenant: str | None, prefix: bytes, now: float) -> None:
        """A request of this prefix went out."""
        place = self._place(tenant, prefix)
        traffic = self._traffic.pop(place, None) or _Traffic()
        self._traffic[place] = traffic
        minute = int(now // 60)
        if minute != traffic.minute:
            traffic.before = traffic.now if minute == traffic.minute + 1 else 0
            traffic.minute, traffic.now = minute, 0
        traffic.now += 1
        rate = max(float(traffic.now), traffic.now + traffic.before * (1 - now % 60 / 60))
        shards = 1
        while shards * PER_MINUTE + 1 < rate:  # a minute may hold one more than its share
            shards *= 2
        if shards >= traffic.shards or now >= traffic.until:
            traffic.shards, traffic.until = shards, now + _KEEP_SHARDS_S
        while len(self._traffic) > _REMEMBERED:
            self._traffic.popitem(last=False)

    def _place(self, tenant: str | None, prefix: bytes) -> bytes:
        return prefix + b"\0" + (tenant or "").encode("utf-8", "surrogatepass")

    def _hash(self, tenant: str | None, what: bytes) -> str:
        name = b"" if tenant is None else b"\1" + tenant.encode("utf-8", "surrogatepass")
        secret = b"" if tenant is None else self.secret or b""
        framed = b"%d:%b%b" % (len(name), name, what)
        return f"cs-{blake2b(framed, key=secret, digest_size=15, person=b'cachespec key').hexdigest()}"
