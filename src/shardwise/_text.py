"""Texts: loggers, tracebacks, drawings for notebooks, TOML of plans, and JSON that somebody else wrote.

Loggers: one for each package, all below "shardwise", quiet until an application asks for them.

Tracebacks: errors that reach a caller show the caller's lines, and of ours the public call and where it was raised. A
public call that stumbles over an argument of another type than its signature says names that argument.

Pictures of values in notebooks: classes of all layers have one, and `shardwise.view`, above them, draws it.

A notebook asks a value for its picture long after everything is loaded, so the drawing code is found by name then.
"""

from __future__ import annotations

import dis
import importlib.util
import json
import logging
import os
from collections.abc import Callable, Mapping
from functools import wraps
from inspect import Parameter, signature
from pathlib import Path
from pkgutil import resolve_name
from types import TracebackType, UnionType
from typing import Any, ForwardRef, Literal, TypeVar, Union, cast, get_args, get_origin

logging.getLogger("shardwise").addHandler(logging.NullHandler())  # without it Python prints warnings by itself


def package_logger(module: str) -> logging.Logger:
    """The logger of the package that a module belongs to.

    >>> package_logger("shardwise.comm.transports.backends").name
    'shardwise.comm'
    """
    return logging.getLogger(".".join(module.split(".")[:2]))


def to_toml(data: Mapping[str, Any]) -> str:
    """TOML of strings, numbers and tables of them; JSON's quoted strings are valid TOML.

    >>> print(to_toml({"mesh": "tp=2", "parameters": {"up.weight": "S(0)"}}), end="")
    mesh = "tp=2"
    <BLANKLINE>
    [parameters]
    "up.weight" = "S(0)"
    """
    lines = [f"{key} = {_quote_toml(value)}" for key, value in data.items() if not isinstance(value, dict)]
    for key, table in data.items():
        if isinstance(table, dict):
            lines += ["", f"[{key}]", *(f"{_quote_toml(name)} = {_quote_toml(v)}" for name, v in table.items())]
    return "\n".join(lines) + "\n"


def _quote_toml(value: str | float | list[str]) -> str:
    return json.dumps(value, ensure_ascii=False)


def count_of(number: int, noun: str, plural: str = "") -> str:
    """A number of things, in words.

    >>> count_of(1, "round"), count_of(3, "round"), count_of(2, "axis", "axes")
    ('1 round', '3 rounds', '2 axes')
    """
    return f"{number} {noun if number == 1 else plural or noun + 's'}"


E = TypeVar("E", bound=BaseException)
_torch = importlib.util.find_spec("torch")
_INTERNAL = (str(Path(__file__).parent), *((_torch and _torch.submodule_search_locations) or ()))
FULL_TRACEBACKS = "SHARDWISE_FULL_TRACEBACKS"  # an environment variable: set it to see all frames


def shorten_traceback(error: E, *, outermost: bool = True) -> E:
    """The same error without our frames and torch's below the present one, apart from the last; others' frames stay.

    The outermost call leaves a cause out that says nothing more: its text is in the message, its frames are ours.

    >>> def outer():
    ...     try:
    ...         package_logger(None)
    ...     except AttributeError as error:
    ...         raise shorten_traceback(error)
    >>> outer()
    Traceback (most recent call last):
    ...
    AttributeError: 'NoneType' object has no attribute 'split'
    """
    below = error.__traceback__ and error.__traceback__.tb_next
    if os.environ.get(FULL_TRACEBACKS):
        return error.with_traceback(below)
    frames: list[TracebackType] = []
    while below is not None:
        frames.append(below)
        below = below.tb_next
    kept = None
    for at, frame in reversed(list(enumerate(frames, 1))):
        if at == len(frames) or not frame.tb_frame.f_code.co_filename.startswith(_INTERNAL):
            kept = TracebackType(kept, frame.tb_frame, frame.tb_lasti, frame.tb_lineno)
    cause = error.__cause__
    if outermost and cause is not None and str(cause) in str(error) and not _has_frames_of_others(cause.__traceback__):
        error.__cause__, error.__suppress_context__ = None, True
    return error.with_traceback(kept)


_LIBRARY = str(Path(os.__file__).parent)


def _has_frames_of_others(at: TracebackType | None) -> bool:
    while at is not None:
        file = at.tb_frame.f_code.co_filename
        own = file.startswith((*_INTERNAL, "<frozen")) or (file.startswith(_LIBRARY) and "site-packages" not in file)
        if not own:
            return True
        at = at.tb_next
    return False


def is_raised_here(error: BaseException) -> bool:
    """Whether an error comes from a `raise` of ours, so that its text is for users; not from what our code called.

    >>> try:
    ...     package_logger(None)
    ... except AttributeError as error:
    ...     is_raised_here(error)
    False
    """
    last = error.__traceback__
    while last is not None and last.tb_next is not None:
        last = last.tb_next
    if last is None:
        return False
    code = last.tb_frame.f_code
    return code.co_filename.startswith(_INTERNAL[0]) and code.co_code[last.tb_lasti] in _RAISING


_RAISING = {number for name, number in dis.opmap.items() if name in ("RAISE_VARARGS", "RERAISE")}
_STUMBLES = (AttributeError, IndexError, KeyError, TypeError, ValueError, RuntimeError)  # exactly: not their children
C = TypeVar("C", bound=Callable[..., Any])


def public(function: C) -> C:
    """Decorate a public function (or `__init__`): its errors are short, and name an argument of a wrong type.

    >>> @public
    ... def lengths(shape: tuple[int, ...], unit: int = 1) -> list[int]:
    ...     return [n // unit for n in shape]
    >>> lengths((4, 2)), lengths.__name__
    ([4, 2], 'lengths')
    >>> lengths(4)
    Traceback (most recent call last):
    ...
    TypeError: lengths takes a tuple of int as 'shape', got int: 4; the call is lengths(shape, unit=1)
    """

    @wraps(function)
    def call(*args: Any, **kwargs: Any) -> Any:
        try:
            return function(*args, **kwargs)
        except Exception as error:
            problem = None
            named = error.__dict__.get("_names_argument", False)  # of a public function that this one called
            if named or (type(error) in _STUMBLES and not is_raised_here(error)):
                problem = _wrong_argument(function, args, kwargs, error)
            if problem is not None:
                found = TypeError(problem)
                found.__dict__["_names_argument"] = True
                raise found from None
            raise shorten_traceback(error) from error.__cause__

    return cast(C, call)


def _wrong_argument(
    function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], error: Exception
) -> str | None:
    """What to say of arguments that do not fit the call, or of the first one whose type is not that of its annotation.

    None if there is none.
    """
    known = signature(function)
    name = function.__qualname__.removesuffix(".__init__").removesuffix(".__new__")
    words = ", ".join(_show_parameter(p) for p in known.parameters.values() if p.name not in ("self", "cls"))
    try:
        passed = known.bind(*args, **kwargs).arguments
    except TypeError:
        return f"{error}; the call is {name}({words})"
    for word, value in passed.items():
        parameter = known.parameters[word]
        several = parameter.kind is Parameter.VAR_POSITIONAL
        try:
            wanted = eval(str(parameter.annotation), function.__globals__)
        except Exception:  # a name that only type checkers import, or no annotation
            continue
        for one in value if several else [value]:
            if parameter.kind is not Parameter.VAR_KEYWORD and not _has_type(one, wanted):
                shown = repr(one) if isinstance(one, str | int | float | complex) else ""
                shown = f"({', '.join(type(v).__name__ for v in one[:4])})" if isinstance(one, list | tuple) else shown
                got = f"got {type(one).__name__}{shown and ': '}{shown}"
                return f"{name} takes {_say_type(wanted)} as {word!r}, {got}; the call is {name}({words})"
    return None


def _has_type(value: object, wanted: Any) -> bool:
    """Whether a value may have a type; in lists and tuples of one type each element is looked at."""
    if get_origin(wanted) in (Union, UnionType):
        return any(_has_type(value, one) for one in get_args(wanted))
    if get_origin(wanted) is Literal:
        return value in get_args(wanted)
    kind = get_origin(wanted) or getattr(wanted, "__bound__", None) or wanted
    if isinstance(kind, ForwardRef | str):
        return True
    if kind is None:
        return value is None
    if not isinstance(kind, type):
        return True  # Any, a type variable, a protocol that is not checked at run time
    if kind in (float, complex) and isinstance(value, int | float):
        return True
    try:
        if not isinstance(value, kind):
            return False
    except TypeError:
        return True
    elements = get_args(wanted)
    alike = len(elements) == 1 or (len(elements) == 2 and elements[1] is ...)
    return not (isinstance(value, list | tuple) and alike) or all(_has_type(one, elements[0]) for one in value)


def _say_type(wanted: Any) -> str:
    """A type in words, such as "a Mesh or a str"."""
    if get_origin(wanted) in (Union, UnionType):
        return " or ".join(dict.fromkeys(_say_type(one) for one in get_args(wanted)))
    if wanted is None or wanted is type(None):
        return "None"
    if get_origin(wanted) is Literal:
        return " or ".join(map(repr, get_args(wanted)))
    wanted = getattr(wanted, "__bound__", None) or wanted
    name = getattr(get_origin(wanted) or wanted, "__name__", str(wanted))
    of = "".join(f" of {_say_type(one).partition(' ')[2]}" for one in get_args(wanted)[:1] if name in _LISTS)
    return f"{'an' if name[0] in 'AEIOaeio' else 'a'} {name}{of}"


_LISTS = ("list", "tuple", "Sequence")


def _show_parameter(parameter: Parameter) -> str:
    stars = {Parameter.VAR_POSITIONAL.name: "*", Parameter.VAR_KEYWORD.name: "**"}.get(parameter.kind.name, "")
    default = "" if parameter.default is Parameter.empty else f"={parameter.default!r}"
    default = default if len(default) < 30 else "=..."
    return f"{stars}{parameter.name}{default}"


def draw_html(drawing: str, *args: Any) -> str:
    """The HTML that a function of `shardwise.view` makes.

    >>> draw_html("table_html", "sizes", ("name", "bytes"), [("w", "96 B")])[:5]
    '<div>'
    """
    made: str = resolve_name(f"shardwise.view:{drawing}")(*args)
    return made


def parse_text(parse: Callable[[str], Any], text: str) -> Any:
    """What a parser makes of a text; one that is nested too deeply for it is a ValueError, as other mistakes are.

    >>> parse_text(json.loads, "[" * 100_000)
    Traceback (most recent call last):
    ...
    ValueError: it is nested too deeply
    """
    try:
        return parse(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None


def parse_json(text: str, unique_keys: bool = False) -> Any:
    """What a JSON text says; a ValueError says what is wrong with it. With `unique_keys`, also a key that comes twice.

    >>> parse_json('{"dp": 2, "dp": 4}', unique_keys=True)
    Traceback (most recent call last):
    ...
    ValueError: the key 'dp' appears twice
    """
    hook = _make_dict if unique_keys else None
    return parse_text(lambda given: json.loads(given, object_pairs_hook=hook), text)


def _make_dict(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    made = dict(pairs)
    if len(made) < len(pairs):
        keys = [key for key, _ in pairs]
        raise ValueError(f"the key {next(key for key in keys if keys.count(key) > 1)[:100]!r} appears twice")
    return made
