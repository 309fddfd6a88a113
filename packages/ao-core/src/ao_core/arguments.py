"""Argument types of public functions, checked against their annotations.

A function is `@checked`; a dataclass calls `check_fields(self)`, which every `Config` does. Annotations are
compiled once, at the first call. What Python cannot tell by looking at a value is not checked: names that
only exist for type checkers, type variables without a bound, `Any`.
"""

from __future__ import annotations

import builtins
import inspect
import os
import reprlib
import sys
import types
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields
from functools import cache, wraps
from numbers import Integral, Real
from typing import (
    Any,
    ForwardRef,
    Literal,
    NamedTuple,
    ParamSpec,
    TypeVar,
    Union,
    get_args,
    get_origin,
)

import torch

from ao_core.errors import ConfigError

__all__ = ["check_device", "check_fields", "checked", "checked_but", "shown"]

P = ParamSpec("P")
R = TypeVar("R")

#: how simple types are called in errors
_WORDS: dict[Any, str] = {
    type(None): "None",
    bool: "True or False",
    int: "an integer",
    float: "a number",
    str: "a string",
    torch.device: "a device",
    torch.dtype: "a torch.dtype",
    torch.Tensor: "a Tensor",
    torch.nn.Module: "a torch.nn.Module",
}


class _Type(NamedTuple):
    """An annotation: whether a value is of it, and its name in an error."""

    admits: Callable[[Any], bool]
    text: str
    #: of sequences and mappings: the type of their items
    items: _Type | None = None


#: `str | os.PathLike[str]`: the empty one would be the current directory, and is a mistake
_PATH = _Type(
    lambda value: isinstance(value, (str, os.PathLike)) and value != "",
    'a path ("." is the current directory)',
)


def checked(function: Callable[P, R]) -> Callable[P, R]:
    """A function whose arguments are checked, before it runs, against its annotations.

    Outermost among decorators, so that a context manager too refuses at the call. Code that is traced by
    `torch.compile` is not checked.

    Raises:
        ConfigError: out of a call with an argument of another type; names function, parameter and value.
    """
    return checked_but()(function)


def checked_but(*own: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """`checked`, except for the named parameters, which the function checks itself with a better error."""

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        inner = inspect.unwrap(function)
        owner = inner.__qualname__.removesuffix(".__init__")

        def check(name: str, value: Any, types: dict[str, _Type]) -> None:
            rule = types.get(name)
            if rule is not None and not rule.admits(value) and name not in own:
                _refuse(owner, name, value, rule)

        @wraps(function)
        def call(*args: P.args, **kwargs: P.kwargs) -> R:
            if not torch.compiler.is_compiling():
                places, rest, types = _signature(inner)
                for place, value in enumerate(args):
                    check(places[place] if place < len(places) else rest, value, types)
                for name, value in kwargs.items():
                    check(name, value, types)
            return function(*args, **kwargs)

        return call

    return decorate


def check_fields(record: Any) -> None:
    """Check the fields of a dataclass against its annotations.

    Raises:
        ConfigError: one holds a value of another type; names class, field and value.
    """
    if torch.compiler.is_compiling():
        return
    for name, rule in _fields(type(record)).items():  # type: ignore[arg-type]
        if not rule.admits(value := getattr(record, name)):
            _refuse(type(record).__name__, name, value, rule)


def check_device(name: str, device: torch.device | str | int | None) -> None:
    """Raise `ConfigError` for a device that tensors with values cannot be moved to; None is none."""
    if device is None:
        return
    reason = ""
    try:
        if torch.empty(0, device=device).is_meta:
            reason = "tensors there have no values"
    except (RuntimeError, AssertionError, NotImplementedError) as error:
        reason = str(error).splitlines()[0]
    if reason:
        raise ConfigError(
            f"{name}={device!r} cannot be used: {reason}; use 'cpu' or a device of this machine"
        )


def shown(value: Any) -> str:
    """A value in an error: short, and with its type."""
    text = " ".join(_REPR.repr(value).split())
    return (
        f"{text}"
        if value is None or isinstance(value, type)
        else f"{text} ({type(value).__name__})"
    )


class _Repr(reprlib.Repr):
    """Short texts; never the values of a tensor or the layers of a model."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = 60

    def repr_instance(self, x: Any, level: int) -> str:
        if isinstance(x, torch.Tensor):
            return f"<{type(x).__name__} {tuple(x.shape)} of {x.dtype}>"
        if isinstance(x, (torch.nn.Module, torch.optim.Optimizer)):
            return f"<{type(x).__name__}>"
        return super().repr_instance(x, level)

    def repr1(self, x: Any, level: int) -> str:
        known = type(x).__module__ == "builtins"
        return super().repr1(x, level) if known else self.repr_instance(x, level)


_REPR = _Repr()


def _refuse(owner: str, name: str, value: Any, rule: _Type) -> None:
    """Raise for a value, or for the first of its items that is to blame."""
    if rule.items is not None and isinstance(value, Collection) and not isinstance(value, str):
        pairs = value.items() if isinstance(value, Mapping) else enumerate(value)
        for key, item in pairs:
            if not rule.items.admits(item):
                _refuse(owner, f"{name}[{key!r}]", item, rule.items)
    hint = " (a class: call it to make one)" if isinstance(value, type) else ""
    raise ConfigError(f"{name}={shown(value)}{hint} cannot work: {owner} takes {rule.text}")


@cache
def _signature(function: Callable[..., Any]) -> tuple[tuple[str, ...], str, dict[str, _Type]]:
    """Names of the positional parameters, of what takes the rest of them, and the types by name."""
    parameters = inspect.signature(function).parameters.values()
    places = tuple(
        p.name for p in parameters if p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    )
    rest = next((p.name for p in parameters if p.kind is p.VAR_POSITIONAL), "")
    space = vars(sys.modules[function.__module__])
    known = {p.name: _compiled(p.annotation, space) for p in parameters}
    return places, rest, {name: rule for name, rule in known.items() if rule is not None}


@cache
def _fields(cls: type) -> dict[str, _Type]:
    types: dict[str, _Type] = {}
    for field in fields(cls):
        owner = next(c for c in cls.__mro__ if field.name in inspect.get_annotations(c))
        rule = _compiled(field.type, vars(sys.modules[owner.__module__]))
        if rule is not None:
            types[field.name] = rule
    return types


def _compiled(hint: Any, space: dict[str, Any]) -> _Type | None:
    """What an annotation says, or None where that is nothing, or nothing that a value shows."""
    if hint is inspect.Parameter.empty:
        return None
    if isinstance(hint, str):
        try:
            return _compiled(eval(hint, space), space)
        except NameError:  # imported for type checkers only
            pass
        try:
            return _compiled(eval(hint, space, _Public(space)), space)
        except (NameError, TypeError, AttributeError):
            pass
        try:  # a function is one whatever it takes
            return _compiled(eval(hint, space, _Anything(space)), space)
        except (NameError, TypeError, AttributeError):
            return None
    if isinstance(hint, TypeVar):
        return None if hint.__bound__ is None else _compiled(_named(hint.__bound__), space)
    origin, args = get_origin(hint), get_args(hint)
    if hint is None or hint is type(None):
        return _Type(lambda value: value is None, "None")
    if origin is Literal:
        return _Type(lambda value: value in args, "one of " + ", ".join(map(repr, args)))
    if origin in (Union, types.UnionType):
        if str in args and any(get_origin(arg) is os.PathLike for arg in args):
            rest = [arg for arg in args if arg is not str and get_origin(arg) is not os.PathLike]
            return _union([*(_compiled(arg, space) for arg in rest), _PATH]) if rest else _PATH
        return _union([_compiled(arg, space) for arg in args])
    if origin is type and isinstance(args[0], type):
        base = args[0]
        return _Type(
            lambda value: isinstance(value, type) and issubclass(value, base),
            f"a subclass of {base.__name__}",
        )
    if hint is Callable or origin is Callable:
        return _Type(callable, "a function" + _of_arguments(args))
    if isinstance(origin, type):
        return _container(origin, [_compiled(arg, space) for arg in args], args)
    return _plain(hint) if isinstance(hint, type) and hint is not object else None


def _named(bound: Any) -> Any:
    """A bound as an annotation, also one that was written as a string."""
    return bound.__forward_arg__ if isinstance(bound, ForwardRef) else bound


class _Anything(dict[str, Any]):
    """Names of a module; one that is there for type checkers only stands for any type."""

    def __missing__(self, name: str) -> Any:
        if hasattr(builtins, name):
            raise KeyError(name)
        return Any


class _Public(dict[str, Any]):
    """The public names of ao_core, for modules below those that define them."""

    def __init__(self, space: dict[str, Any]) -> None:
        super().__init__()
        self._space = space

    def __missing__(self, name: str) -> Any:
        if name in self._space or hasattr(builtins, name):
            raise KeyError(name)
        try:
            return getattr(sys.modules["ao_core"], name)
        except AttributeError:
            raise KeyError(name) from None


def _plain(cls: type) -> _Type | None:
    word = _WORDS.get(cls, _with_article(cls.__name__))
    if cls is bool:
        return _Type(lambda value: isinstance(value, bool), word)
    if cls in (int, float):
        kind = Integral if cls is int else Real  # of numpy too; asking is slow
        return _Type(
            lambda value: (
                type(value) is cls or (isinstance(value, kind) and not isinstance(value, bool))
            ),
            word,
        )
    if cls is torch.device:  # the index of an accelerator is one too
        return _Type(
            lambda value: isinstance(value, (torch.device, int)) and not isinstance(value, bool),
            word,
        )
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):  # checked by who takes the fields
        return _Type(lambda value: isinstance(value, tuple), word)
    try:
        isinstance(None, cls)
    except TypeError:  # a protocol that cannot be asked
        return None
    return _Type(lambda value: isinstance(value, cls), word)


def _union(members: list[_Type | None]) -> _Type | None:
    known = [member for member in members if member is not None]
    if len(known) < len(members):
        return None
    tests = tuple(member.admits for member in known)
    *most, last = [member.text for member in known]
    items = next((member.items for member in known if member.items is not None), None)
    return _Type(
        lambda value: any(test(value) for test in tests), f"{', '.join(most)} or {last}", items
    )


def _container(origin: type, items: list[_Type | None], args: tuple[Any, ...]) -> _Type:
    """A sequence or a mapping of items; a string is not a sequence of letters."""
    if issubclass(origin, tuple) and Ellipsis not in args:
        return _Type(
            lambda value: (
                isinstance(value, tuple)
                and len(value) == len(items)
                and all(i is None or i.admits(v) for i, v in zip(items, value, strict=True))
            ),
            "a tuple of " + ", ".join("any" if item is None else item.text for item in items),
        )
    if issubclass(origin, Mapping):
        key, item = items if len(items) == 2 else (None, None)

        def admits(value: Any) -> bool:
            return (
                isinstance(value, origin)
                and (key is None or all(map(key.admits, value)))
                and (item is None or all(map(item.admits, value.values())))
            )

        name = "a dictionary"
    else:
        item = items[0] if items else None
        sized = issubclass(origin, Collection)

        def admits(value: Any) -> bool:
            each: Any = value  # which `isinstance` makes an object
            return (
                isinstance(value, origin)
                and not isinstance(value, (str, bytes))
                # what can be gone through once only is left to the function
                and (item is None or not sized or all(item.admits(inner) for inner in each))
            )

        listed = "tuple" if issubclass(origin, tuple) else "list" if sized else origin.__name__
        name = _with_article(listed)
    return _Type(
        admits, name + ("" if item is None else f" whose items are each {item.text}"), item
    )


def _with_article(name: str) -> str:
    return f"{'an' if name[0] in 'AEIOU' else 'a'} {name}"


def _of_arguments(args: tuple[Any, ...]) -> str:
    if not args or not isinstance(args[0], list):
        return ""
    names = (getattr(arg, "__name__", str(arg)) for arg in args[0])
    return f" of ({', '.join(names)})"
