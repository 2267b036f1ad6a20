"""Which tool call a streamed delta belongs to (contract S4), decided in one place for every protocol and server.

Calls are keyed by (index, id): a new id on an index in use is a new call, and a delta without an id goes on with the call of
its index. Some servers send no ids, or send them late, or give every call the same index. There the name tells: before any
argument text it is the next piece of the call's name (or all of it so far, again); after some, another name begins another
call, and the same name does where the arguments are whole and new ones follow. Whoever knows the request's tools can also tell
a name that is another tool's from a piece: `Calls.another`.
"""

from __future__ import annotations

from collections.abc import Collection


class CallSoFar:
    """One call as far as it has come.

    Attributes:
        id: what it goes by; one of ours where its name came without one, and then it stays that.
        said: whether the server gave it an id.
        begun: whether argument text has come.
        texts: the pieces of its arguments' text.
    """

    __slots__ = ("_again", "_depth", "_escaped", "_opened", "_quoted", "_read", "begun", "id", "name", "said", "texts")

    def __init__(self) -> None:
        self.id = self.name = ""
        self.said = self.begun = self._again = False
        self.texts: list[str] = []
        self._read = self._depth = 0
        self._quoted = self._escaped = self._opened = False

    def ends_before(self, name: str, arguments: str) -> bool:
        """Whether a delta with this name, on this call's index and with no id that says otherwise, begins another call."""
        if not self.name or not self.begun:
            return False
        if name and name != self.name:
            return True
        self._again = self._again or (bool(name) and self._whole())
        return self._again and bool(arguments.strip())

    def next_name(self, name: str) -> str:
        """The name of the call that a delta with this name begins on this one's index: it may have come before its id."""
        return name or (self.name if self._again else "")

    def add(self, name: str, arguments: str) -> None:
        if name and not (self.begun and self.name):
            self.name = name if name.startswith(self.name) else self.name + name
        self.begun = self.begun or bool(arguments)
        self.texts.append(arguments)

    def _whole(self) -> bool:
        """Whether the arguments are a JSON object (or list) that is closed. Every piece is read once, and only if asked."""
        for text in self.texts[self._read :]:
            for letter in text:
                if self._quoted:
                    self._quoted = self._escaped or letter != '"'
                    self._escaped = letter == "\\" and not self._escaped
                elif letter == '"':
                    self._quoted = True
                elif letter in "{[":
                    self._depth += 1
                    self._opened = True
                elif letter in "}]":
                    self._depth -= 1
        self._read = len(self.texts)
        return self._opened and self._depth <= 0


class Calls:
    """The calls of one answer, in the order in which they began."""

    __slots__ = ("_current", "_keyed", "all")

    def __init__(self) -> None:
        self.all: list[CallSoFar] = []
        self._keyed: dict[tuple[int, str], CallSoFar] = {}
        self._current: dict[int, CallSoFar] = {}

    def another(self, index: int, call_id: str, name: str, tools: Collection[str]) -> bool:
        """Whether a name that could be the next piece of the one before it, on this index, is another of these tools' instead.

        That is so where the one before is a tool's, this is (the beginning of) a tool's, and together they are of none.
        """
        before = self._current.get(index)
        if before is None or before.begun or not name or name.startswith(before.name) or before.name not in tools:
            return False
        if call_id and (before.said or (index, call_id) in self._keyed):  # the id tells
            return False
        whole = before.name + name
        return any(tool.startswith(name) for tool in tools) and not any(tool.startswith(whole) for tool in tools)

    def take(self, index: int, call_id: str, name: str, arguments: str) -> CallSoFar:
        """Add a delta to its call, and return that; `call_id` and `name` are empty where it has none."""
        call = self._keyed.get((index, call_id)) if call_id else None
        if call is None:
            before = self._current.get(index)
            if before is not None and not before.ends_before(name, arguments) and not (call_id and before.said):
                call = before
            else:
                call = CallSoFar()
                self.all.append(call)
                name = name if before is None else before.next_name(name)
            if call_id:
                self._keyed[index, call_id] = call
                call.said = True
                call.id = call.id or call_id
        if name and not call.id:  # a server that never says ids still gets some that are the same in every run
            call.id = f"call_{len(self.all) - 1}"
        self._current[index] = call
        call.add(name, arguments)
        return call
