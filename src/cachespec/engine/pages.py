"""The pages of the prefix index: which sixteen tokens follow which, and how many holders cover each.

A page's key is its parent and its tokens themselves, in a dict: the chain of parents stands for everything before it, the
hash is the interpreter's keyed SipHash, and a hit compares parent and tokens for equality. So a collision, crafted or not,
is a miss (vLLM's GHSA-rm76-4mrf-v9r8 cannot happen), and no page matches without every token before it. The parent of a
first page is its namespace.

Everything else about a page is a number in a flat array, which keeps a page near 270 bytes. A page lives as long as a holder
covers it; when the last one goes, its key is dropped in the same moment, before the number can be given to another page.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterable, Mapping, Sequence
from hashlib import blake2b
from typing import TYPE_CHECKING, Final, Literal, TypeAlias

from cachespec.errors import InputError

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray

PAGE: Final = 16
"""Tokens a page holds. Small, so that little of a tail is lost."""
PAGE_BYTES: Final = 4 * PAGE

Tier: TypeAlias = Literal["device", "host"]
Tokens: TypeAlias = "Sequence[int] | NDArray[np.integer]"


def namespace(
    *,
    model: bytes,
    dtype: str,
    adapter: bytes | None = None,
    images: Sequence[tuple[int, bytes]] = (),
    salt: bytes | None = None,
) -> bytes | None:
    """Sixteen bytes within which KV may be shared. None: it may not be shared at all.

    Every field is tagged and carries its length, so that none can pass for another (vllm#51899).

    Args:
        model: the fingerprint of model, quantisation and KV type (`ModelInfo.fingerprint`); empty when it is not known.
        dtype: of weights, KV and computation, as text.
        adapter: a digest of its content, or of name and load generation, never the name alone; empty when not known.
        images: for each its offset in tokens and a digest of its content.
        salt: of the tenant, from the application's own secret, never from a request.
    """
    if not model or adapter == b"" or any(offset < 0 or not content for offset, content in images):
        return None
    fields = [(b"model", model), (b"dtype", dtype.encode())]
    fields += [] if adapter is None else [(b"adapter", adapter)]
    for offset, content in images:
        fields += [(b"image-at", offset.to_bytes(8, "little")), (b"image", content)]
    fields += [] if salt is None else [(b"salt", salt)]
    digest = blake2b(digest_size=16, person=b"cachespec-kv")
    for tag, value in fields:
        digest.update(len(tag).to_bytes(8, "little") + tag + len(value).to_bytes(8, "little") + value)
    return digest.digest()


def packed(tokens: Tokens) -> bytes:
    """Token ids as native 32-bit integers; an int32 array costs one copy. InputError for what is no token id."""
    dtype = getattr(tokens, "dtype", None)
    if dtype is not None and dtype.kind == "i" and dtype.itemsize == 4:
        return bytes(tokens.tobytes())  # type: ignore[union-attr]
    if isinstance(tokens, array) and tokens.typecode == "i":
        return tokens.tobytes()
    try:
        return array("i", tokens).tobytes()
    except (TypeError, OverflowError) as error:
        raise InputError("token ids must be integers of 32 bits", field="tokens") from error


def agreement(a: bytes, b: bytes) -> int:
    """How many leading tokens two packed runs have in common."""
    size = min(len(a), len(b))
    if a[:size] == b[:size]:
        return size // 4
    return next(i // 4 for i in range(0, size, 4) if a[i : i + 4] != b[i : i + 4])


class PageTable:
    """Pages by number. Paths are lists of page numbers from a first page on.

    `count` is the number of live pages, `on` that of pages covered in each tier. Nothing here may be called from two
    threads at once, except `walk` and `covered`, which may then be out of date by a step.
    """

    def __init__(self) -> None:
        self._ids: dict[tuple[bytes | int, bytes], int] = {}
        self._keys: list[tuple[bytes | int, bytes] | None] = []
        self._covers: dict[Tier, array[int]] = {"device": array("H"), "host": array("H")}
        self._used = array("q")
        self._spare: list[int] = []
        self.on: dict[Tier, int] = {"device": 0, "host": 0}

    @property
    def count(self) -> int:
        return len(self._ids)

    def walk(self, namespace: bytes, data: bytes, pages: int) -> list[int]:
        """The path of the longest run of known pages at the start of `data`, at most `pages` of them."""
        path: list[int] = []
        parent: bytes | int = namespace
        get, add = self._ids.get, path.append
        for at in range(0, pages * PAGE_BYTES, PAGE_BYTES):
            page = get((parent, data[at : at + PAGE_BYTES]))
            if page is None:
                break
            add(page)
            parent = page
        return path

    def grow(self, namespace: bytes, data: bytes, pages: int) -> list[int]:
        """The path of the first `pages` pages of `data`; those that are missing are made, covered by nobody yet."""
        path = self.walk(namespace, data, pages)
        for at in range(len(path) * PAGE_BYTES, pages * PAGE_BYTES, PAGE_BYTES):
            key = (path[-1] if path else namespace, data[at : at + PAGE_BYTES])
            if self._spare:
                page = self._spare.pop()
                self._keys[page], self._used[page] = key, 0
            else:
                page = len(self._keys)
                self._keys.append(key)
                self._used.append(0)
                self._covers["device"].append(0)
                self._covers["host"].append(0)
            self._ids[key] = page
            path.append(page)
        return path

    def tokens(self, page: int) -> bytes:
        """The page's tokens, packed."""
        key = self._keys[page]
        if key is None:
            raise KeyError(page)
        return key[1]

    def covers(self, page: int, tier: Tier) -> int:
        """How many holders of the tier cover the page."""
        return self._covers[tier][page]

    def covered(self, path: Sequence[int], tier: Tier) -> int:
        """How many leading pages of a path the tier covers. Coverage never grows along a path."""
        counts, low, high = self._covers[tier], 0, len(path)
        while low < high:
            middle = (low + high) // 2
            low, high = (middle + 1, high) if counts[path[middle]] else (low, middle)
        return low

    def cover(self, pages: Iterable[int], tier: Tier) -> None:
        """One more holder covers these pages."""
        counts = self._covers[tier]
        for page in pages:
            self.on[tier] += counts[page] == 0
            counts[page] += 1

    def uncover(self, pages: Sequence[int], tier: Tier) -> list[int]:
        """One holder less covers these pages, a path's end. The pages that nobody covers any more, which are now gone."""
        counts, other = self._covers[tier], self._covers["host" if tier == "device" else "device"]
        gone = []
        for page in reversed(pages):  # the tail first: no page outlives its parent
            counts[page] -= 1
            if not counts[page]:
                self.on[tier] -= 1
                if not other[page]:
                    gone.append(page)
                    self._drop(page)
        return gone

    def _drop(self, page: int) -> None:
        key = self._keys[page]
        if key is not None:
            del self._ids[key]
        self._keys[page] = None
        self._spare.append(page)

    def used(self, page: int) -> int:
        """When the page, or one that came after it and is gone, was last used."""
        return self._used[page]

    def touch(self, page: int, tick: int) -> None:
        """Note a use. Uses are noted at the end of a path only: nothing before it can be evicted first."""
        self._used[page] = max(self._used[page], tick)

    def problems(self, paths: Mapping[Tier, Sequence[tuple[bytes, Sequence[int]]]]) -> list[str]:
        """What is wrong with the table, if these are the paths of all holders. For tests."""
        found = []
        for tier, counts in self._covers.items():
            expected = [0] * len(self._keys)
            for namespace, path in paths[tier]:
                for i, page in enumerate(path):
                    expected[page] += 1
                    key = self._keys[page]
                    if key is None or key[0] != (path[i - 1] if i else namespace) or len(key[1]) != PAGE_BYTES:
                        found.append(f"page {page} on a path of the {tier} tier is not a page that follows the one before it")
            if expected != counts.tolist():
                found.append(f"covers of the {tier} tier do not add up")
            if self.on[tier] != sum(map(bool, expected)):
                found.append(f"{self.on[tier]} pages counted on the {tier} tier, there are {sum(map(bool, expected))}")
        live = {page for page, key in enumerate(self._keys) if key is not None}
        if live != set(self._ids.values()) or any(self._keys[page] != key for key, page in self._ids.items()):
            found.append("keys and pages are not the inverse of each other")
        if sorted(self._spare) != sorted(set(range(len(self._keys))) - live):
            found.append("spare numbers and live pages do not make up all numbers")
        if any(not self._covers["device"][page] and not self._covers["host"][page] for page in live):
            found.append("a page that nobody covers is still there")
        return found
