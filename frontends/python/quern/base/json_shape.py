"""JSON and TOML that others wrote: parsed without surprises, and JSON checked against a shape before anything uses it.

A shape is a Kind, a list of one shape, or a dict: key -> shape, "key?" for one that may be missing, "*" for all others,
which are left out where it is not there.
"""

import collections
import json
import math
import tomllib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeAlias

from quern.base.fault import Fault
from quern.base.files import refuse_pointer

INT64 = 1 << 63
Place: TypeAlias = str | Path  # of the text, for messages


@dataclass(frozen=True)
class Kind:
    expected: str
    accepts: Callable[[Any], bool]


Shape: TypeAlias = "Kind | list[Shape] | dict[str, Shape]"


def is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and -INT64 <= value < INT64


def is_number(value: object) -> bool:
    return value is None or is_integer(value) or isinstance(value, float) and math.isfinite(value)


TEXT = Kind("a text", lambda value: isinstance(value, str))
INTEGER = Kind("an integer of 64 bits", is_integer)
TOKEN = Kind("a token id", lambda value: is_integer(value) and 0 <= value < 1 << 31)
COUNT = Kind("an integer of at least 0", lambda value: is_integer(value) and value >= 0)
NUMBER = Kind("a finite number, or null for one that is not", is_number)
SCALAR = Kind("a number, a text or null", lambda value: is_number(value) or isinstance(value, str))


def choice(*words: str) -> Kind:
    return Kind("one of " + ", ".join(words), lambda value: isinstance(value, str) and value in words)


def with_each_key_once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    value = dict(pairs)
    if len(value) != len(pairs):
        counts = collections.Counter(key for key, _ in pairs)
        raise ValueError(f"the key {json.dumps(counts.most_common(1)[0][0])[:100]} twice in one object")
    return value


def parse(data: bytes, where: Place) -> Any:
    """The value of JSON in bytes of UTF-8. Of a key that an object has twice, one value would be lost."""
    refuse_pointer(where, data)
    try:
        return json.loads(data.decode("utf-8-sig"), object_pairs_hook=with_each_key_once)
    except UnicodeDecodeError as error:
        raise Fault(where, "not UTF-8", error.reason) from None
    except ValueError as error:
        raise Fault(where, "not JSON", str(error).partition(";")[0]) from None
    except RecursionError:
        raise Fault(where, "not usable JSON", "too many levels") from None


def parse_toml(text: str) -> dict[str, Any]:
    """The tables of a TOML text. Raises ValueError alone: for many levels tomllib raises another."""
    try:
        return tomllib.loads(text)
    except RecursionError:
        raise ValueError("too many levels") from None
    except ValueError as error:
        raise ValueError(str(error).partition(";")[0]) from None


def whole_characters(text: str) -> str:
    """A JSON escape can make half a character, which no encoding takes."""
    return text.encode("utf-8", "replace").decode()


def found(value: object) -> str:
    if isinstance(value, dict | list):
        return "an object" if isinstance(value, dict) else "a list"
    return "a long number" if isinstance(value, int) and abs(value) >= INT64 else json.dumps(value)


def checked(value: Any, shape: Shape, where: Place, key: str = "") -> Any:
    """The value as its shape has it."""
    if isinstance(shape, Kind):
        if not shape.accepts(value):
            raise Fault(where, key or "value", found(value), shape.expected)
        return whole_characters(value) if isinstance(value, str) else value
    expected: type[Any] = type(shape)
    if not isinstance(value, expected):
        raise Fault(where, key or "value", found(value), "an object" if isinstance(shape, dict) else "a list")
    if not isinstance(shape, dict):
        return [checked(item, shape[0], where, f"{key}[{index}]") for index, item in enumerate(value)]
    result: dict[str, Any] = {}
    prefix = f"{key}." if key else ""
    for name, part in shape.items():
        plain = name.removesuffix("?")
        if plain in value:
            result[plain] = checked(value[plain], part, where, prefix + plain)
        elif name == plain != "*":
            raise Fault(where, prefix + name, "nothing", getattr(part, "expected", "a value"))
    if "*" in shape:
        rest = {name: item for name, item in value.items() if name not in result}
        for name, item in rest.items():
            result[whole_characters(name)] = checked(item, shape["*"], where, prefix + name)
    return result
