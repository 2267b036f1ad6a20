"""Values of a file against annotations of code: one mechanism for the config's own tables and for plug-in options.

A table is described by a signature (a function, a class, a frozen dataclass): its keyword arguments are the keys, its
annotations the types, its defaults what may be left out. So a plug-in's author writes a constructor and nothing else.
What each annotation takes is told in `annotations.py`.
"""

from __future__ import annotations

import inspect
import math
import re
import types
import typing
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, is_dataclass, replace
from decimal import Decimal
from pathlib import Path
from typing import Annotated, Any, Literal, ParamSpec, Union, get_args, get_origin

from cachespec.annotations import (
    COLLECTIONS,
    MONEY,
    NAMES,
    NOT_IN_A_FILE,
    EnvRef,
    Example,
    PluginOf,
    Unexpressible,
    Where,
    Within,
    describe,
    dotted,
    is_secret_name,
    members,
    show,
    suggestion,
    typed_dict_fields,
)
from cachespec.durations import parse_duration
from cachespec.errors import CachespecError, ConfigError, InputError, UnknownPluginError
from cachespec.forms import form_hint

P = ParamSpec("P")


@dataclass(frozen=True, slots=True, kw_only=True)
class Option:
    """One keyword argument of a factory. `annotation` is `Unexpressible` where it cannot be resolved."""

    name: str
    annotation: Any
    required: bool
    default: Any = None


class Problem(Exception):
    """What is wrong, and where in the tree; `more` are further ones found in the same pass."""

    def __init__(self, where: Where, message: str, *, hint: str | None = None, raised: CachespecError | None = None) -> None:
        super().__init__(message)
        self.where, self.message, self.hint, self.raised = where, message, hint, raised
        self.more: list[Problem] = []

    def error(self, path: str | None = None, line: int | None = None) -> CachespecError:
        """What to raise: a ConfigError, or of the kind that was `raised` already."""
        error = ConfigError(self.message, path=path, line=line, key=dotted(self.where) or None, hint=self.hint)
        if isinstance(self.raised, UnknownPluginError):
            return UnknownPluginError(str(error))
        return self.raised or error


class WrongForm(Problem):
    """A value of another form than is wanted: a table for text, say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Context:
    """What reading needs besides: what to make of a plug-in's table, and the environment to take references from.

    `references` lets text be ``{ env = "NAME" }``, as plug-in options may. Without `environ` a reference stays an `EnvRef`:
    nothing secret is read to check a file. `names` holds what there is of each kind of `NAMES`; other kinds are not checked.
    `hints`: whether a value of the wrong form is told the right one.
    """

    plugin: Callable[[str, Mapping[str, Any], Where], Any] | None = None
    environ: Mapping[str, str] | None = None
    references: bool = False
    names: Mapping[str, Collection[str]] = field(default_factory=dict)
    hints: bool = True


_PLAIN = Context()


def options_of(factory: Callable[..., Any]) -> tuple[dict[str, Option], bool]:
    """The keyword arguments of a factory, and whether it takes any others besides."""
    target = factory.__init__ if inspect.isclass(factory) else factory
    scope = getattr(inspect.unwrap(target), "__globals__", None)
    if scope is None:
        scope = getattr(inspect.unwrap(type(target).__call__), "__globals__", {})
    options: dict[str, Option] = {}
    more = False
    for name, parameter in inspect.signature(factory).parameters.items():
        if parameter.kind is parameter.VAR_KEYWORD:
            more = True
        elif parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            required = parameter.default is parameter.empty
            annotation = Any if parameter.annotation is parameter.empty else _resolve(parameter.annotation, scope)
            options[name] = Option(
                name=name, annotation=annotation, required=required, default=None if required else parameter.default
            )
    return options, more


def _resolve(annotation: Any, scope: Mapping[str, Any]) -> Any:
    holder = types.SimpleNamespace(__annotations__={"x": annotation})
    try:
        return typing.get_type_hints(holder, globalns=dict(scope), include_extras=True)["x"]
    except Exception:  # noqa: BLE001 - an annotation may name what only a type checker can see, and fail in any way
        return Unexpressible


def read_table(
    factory: Callable[..., Any], table: Any, where: Where, *, context: Context = _PLAIN, given: Iterable[str] = ()
) -> dict[str, Any]:
    """The keyword arguments that `table` gives to `factory`, checked and converted; all problems in one pass.

    `given` are arguments that the caller supplies itself: a table may not set them. Raises `Problem`.
    """
    if not isinstance(table, Mapping):
        raise WrongForm(where, f"must be a table, not {show(table)}")
    options, more = options_of(factory)
    for name in given:
        options.pop(name, None)
    values: dict[str, Any] = {}
    problems: list[Problem] = []
    for key, value in table.items():
        try:
            if key in options:
                values[key] = read(value, options[key].annotation, (*where, key), context=context)
            elif more:
                values[key] = value
            else:
                raise Problem((*where, key), "unknown key", hint=suggestion(key, _settable(options)))
        except Problem as problem:
            problems += [problem, *problem.more]
    for name, option in options.items():
        if option.required and name not in table:
            problems.append(Problem(where, f"{name!r} is missing", hint=f"expected {describe(option.annotation)}"))
    raise_all(problems)
    return values


def _settable(options: Mapping[str, Option]) -> list[str]:
    return [name for name, option in options.items() if describe(option.annotation) != NOT_IN_A_FILE]


def raise_all(problems: Sequence[Problem]) -> None:
    """Raise the first with the others as its `more`; nothing when there are none."""
    if problems:
        first = problems[0]
        first.more = list(problems[1:])
        raise first


def problems_of(check: Callable[P, Any], *args: P.args, **kwargs: P.kwargs) -> list[Problem]:
    """What a check finds, as a list: so that one that fails hides no other."""
    try:
        check(*args, **kwargs)
    except Problem as problem:
        return [problem, *problem.more]
    return []


def read(value: Any, annotation: Any, where: Where, *, context: Context = _PLAIN) -> Any:
    """One value as its annotation wants it. Raises `Problem`; one of the wrong form says what the right one is."""
    try:
        return _read(value, annotation, where, context)
    except WrongForm as problem:
        if context.hints and problem.hint is None and problem.where == where:
            problem.hint = form_hint(value, annotation, where, lambda v, a: _fits(v, a, where, context))
        raise


def _fits(value: Any, annotation: Any, where: Where, context: Context) -> bool:
    try:
        _read(value, annotation, where, replace(context, hints=False))
    except (Problem, CachespecError):
        return False
    return True


def _read(value: Any, annotation: Any, where: Where, context: Context) -> Any:
    origin = get_origin(annotation)
    if origin is Annotated:
        return _read_annotated(value, annotation, where, context)
    if origin is Union or origin is types.UnionType:
        return _read_union(value, annotation, where, context)
    if (
        isinstance(annotation, type)
        and (annotation in (Decimal, Path) or is_dataclass(annotation))
        and isinstance(value, annotation)
    ):
        check_names(value, annotation, where, context.names)
        return value  # from code, not from a file: made already
    if isinstance(annotation, typing.NewType):
        return read(value, annotation.__supertype__, where, context=context)
    if annotation is EnvRef or (annotation is str and _wants_reference(value, where, context)):
        return _read_reference(value, annotation, where, context)
    if annotation in (Any, object):
        return value
    if annotation is float and isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
        return float(value)
    if annotation in (str, int, bool) and type(value) is annotation:
        return value
    if annotation is Decimal and isinstance(value, str) and re.fullmatch(MONEY, value):
        return Decimal(value)
    if annotation is Path and isinstance(value, str):
        return Path(value)
    if origin is Literal and any(value == item and type(value) is type(item) for item in get_args(annotation)):
        return value
    base = origin or annotation
    if base in COLLECTIONS:
        return _read_items(value, annotation, base, where, context)
    if base in (dict, Mapping) and isinstance(value, Mapping):
        kind = (get_args(annotation) or (str, Any))[1]
        return _each(value.items(), dict, lambda key, item: (key, read(item, kind, (*where, key), context=context)))
    if isinstance(annotation, type) and is_dataclass(annotation):
        values = read_table(annotation, value, where, context=context)
        return call(annotation, values, where)
    if typing.is_typeddict(annotation):
        return _read_typed_dict(value, annotation, where, context)
    raise WrongForm(where, _mismatch(value, annotation))


def call(factory: Callable[..., Any], values: Mapping[str, Any], where: Where) -> Any:
    """Call a factory with checked values; what it refuses becomes a `Problem` at the field it names."""
    try:
        return factory(**values)
    except ConfigError as error:
        if error.path is not None:
            raise
        inner: Where = (*where, *error.key.split(".")) if error.key else where
        raise Problem(inner, error.message, hint=error.hint) from error
    except InputError as error:
        inner = (*where, error.field) if error.field else where
        raise Problem(inner, str(error).removeprefix(f"{error.field}: ")) from error
    except CachespecError:
        raise
    except (TypeError, ValueError) as error:
        raise Problem(where, str(error)) from error


def _read_annotated(value: Any, annotation: Any, where: Where, context: Context) -> Any:
    inner, *marks = get_args(annotation)
    for mark in marks:
        if isinstance(mark, PluginOf) and context.plugin is not None:
            if isinstance(value, Mapping):
                return context.plugin(mark.family, value, where)
            if not any(isinstance(member, type) and isinstance(value, member) for member in members(inner)):
                raise WrongForm(where, f"must be a table, not {show(value)}")
        if mark == "duration":
            try:
                return parse_duration(value)
            except ValueError as error:
                raise WrongForm(where, str(error)) from None
        if mark == "positive" and (type(value) is not int or value < 1):
            raise WrongForm(where, f"must be a whole number above 0, not {show(value)}")
    told = any(isinstance(mark, Example) for mark in marks)  # and then there is nothing to guess
    found = read(value, inner, where, context=replace(context, hints=False) if told else context)
    for mark in marks:
        if isinstance(mark, Within) and not mark.least <= found <= (math.inf if mark.most is None else mark.most):
            raise Problem(where, f"must be {mark}, not {show(value)}")
    check_names(found, annotation, where, context.names)
    return found


def check_names(value: Any, annotation: Any, where: Where, names: Mapping[str, Collection[str]]) -> None:
    """Hold every `BackendName` and `ModelName` in a value that was read or made already against what there is.

    Raises `Problem` with the nearest name.
    """
    origin = get_origin(annotation)
    if origin is Annotated:
        inner, *marks = get_args(annotation)
        kind = next((mark for mark in marks if mark in NAMES and mark in names), None)
        if kind is None or not isinstance(value, str):
            return check_names(value, inner, where, names)
        known = names[kind]
        # "provider:model" is a name too; which there are is known once the backends are made.
        if value not in known and not (kind == "model" and ":" in value):
            hint = suggestion(value, known, label="configured")
            raise Problem(where, f"{NAMES[kind]} is called {value!r}", hint=hint)
    elif origin is Union or origin is types.UnionType:
        for member in get_args(annotation):
            check_names(value, member, where, names)
    elif (origin or annotation) in COLLECTIONS and isinstance(value, tuple(COLLECTIONS)):
        for i, item in enumerate(typing.cast("Iterable[Any]", value)):
            check_names(item, (get_args(annotation) or (Any,))[0], (*where, i), names)
    elif isinstance(annotation, type) and is_dataclass(annotation) and isinstance(value, annotation):
        for name, option in options_of(annotation)[0].items():
            check_names(getattr(value, name, None), option.annotation, (*where, name), names)
    return None


def _read_union(value: Any, annotation: Any, where: Where, context: Context) -> Any:
    choices = [member for member in get_args(annotation) if member is not type(None)]
    tables = any((get_origin(m) or m) in (dict, Mapping) or is_dataclass(m) or typing.is_typeddict(m) for m in choices)
    if str in choices and not tables and _wants_reference(value, where, context):
        return _read_reference(value, annotation, where, context)
    if value is None and type(None) in get_args(annotation):
        return None  # only code can say so: TOML has no null
    deepest: Problem | None = None
    for member in sorted(choices, key=lambda m: m is float):  # a whole number stays one where both are taken
        try:
            return read(value, member, where, context=context)
        except Problem as problem:
            deepest = max(deepest or problem, problem, key=lambda p: len(p.where))
    if deepest is not None and (len(choices) == 1 or len(deepest.where) > len(where)):
        raise deepest
    raise WrongForm(where, _mismatch(value, annotation))


def _read_reference(value: Any, annotation: Any, where: Where, context: Context) -> EnvRef | str:
    if not _is_reference(value):
        unknown = next((key for key in value if key != "env"), None) if isinstance(value, Mapping) else None
        if unknown is not None:
            hint = suggestion(unknown, ["env"]) if isinstance(unknown, str) else None
            raise Problem((*where, unknown), "unknown key of a reference", hint=hint)
        said = (
            "a secret is not written into a file" if isinstance(value, str) else f"must name a variable, not be {show(value)}"
        )
        raise Problem(where, said, hint=f'name an environment variable that holds it: {where[-1]} = {{ env = "NAME" }}')
    if context.environ is None or annotation is EnvRef:
        return EnvRef(env=value["env"])
    secret = context.environ.get(value["env"], "")
    if not secret:
        raise Problem(where, f"the environment variable {value['env']} is not set")
    return secret


def _read_items(value: Any, annotation: Any, base: Any, where: Where, context: Context) -> Any:
    kinds = get_args(annotation) or (Any,)
    if base in (set, frozenset) and isinstance(value, str):
        value = [value]
    if not isinstance(value, list | tuple):
        raise WrongForm(where, _mismatch(value, annotation))
    return _each(enumerate(value), COLLECTIONS[base], lambda i, item: read(item, kinds[0], (*where, i), context=context))


def _read_typed_dict(value: Any, annotation: Any, where: Where, context: Context) -> dict[str, Any]:
    if not isinstance(value, Mapping):
        raise WrongForm(where, f"must be a table, not {show(value)}")
    fields = typed_dict_fields(annotation)
    missing = [name for name, (_, required) in fields.items() if required and name not in value]
    if missing:
        raise Problem(where, f"{missing[0]!r} is missing", hint=f"expected {describe(fields[missing[0]][0])}")

    def item(key: str, given: Any) -> tuple[str, Any]:
        if key not in fields:
            raise Problem((*where, key), "unknown key", hint=suggestion(key, fields))
        return key, read(given, fields[key][0], (*where, key), context=context)

    return typing.cast("dict[str, Any]", _each(value.items(), dict, item))


def _each(pairs: Iterable[tuple[Any, Any]], build: Callable[[Iterable[Any]], Any], convert: Callable[[Any, Any], Any]) -> Any:
    found, problems = [], []
    for key, item in pairs:
        try:
            found.append(convert(key, item))
        except Problem as problem:
            problems += [problem, *problem.more]
    raise_all(problems)
    return build(found)


def _is_reference(value: Any) -> bool:
    return isinstance(value, Mapping) and set(value) == {"env"} and isinstance(value["env"], str) and value["env"] != ""


def _wants_reference(value: Any, where: Where, context: Context) -> bool:
    last = where[-1] if where else None
    return context.references and (isinstance(value, Mapping) or (isinstance(last, str) and is_secret_name(last)))


def _mismatch(value: Any, annotation: Any) -> str:
    wanted = describe(annotation)
    if wanted == NOT_IN_A_FILE:
        return "cannot be set in a file, only from code"
    return f"must be {wanted}, not {show(value)}"
