"""quern.Config: the config of a run, from a TOML file, a text or a dict."""

import ctypes
import json
import numbers
import os
import tomllib
from collections.abc import Iterator, Mapping
from typing import Any

from quern.driver.error import WrongType, refused
from quern.driver.library import Callback, check, library, take_text


class Config:
    """A run's config: TOML, and values that are laid over it. Immutable: `set` returns another one.

    Config.load("run.toml")             a file, read when the config is used
    Config.from_dict({"train": {...}})  tables of values
    Config.from_text(toml)
    """

    def __init__(self, file: str, text: str | None = None, overrides: tuple[str, ...] = ()) -> None:
        """`text` is TOML that messages call `file`; None: the file itself. `overrides`: "train.steps=8"."""
        self.file, self.text, self.overrides = file, text, overrides

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> "Config":
        return cls(path_text("Config.load", path))

    @classmethod
    def from_text(cls, toml: str, name: str = "config") -> "Config":
        """`name` is what messages call the text."""
        if not isinstance(toml, str):
            raise refused(WrongType, "Config.from_text", "not TOML", type(toml).__name__, "a text")
        return cls(name, toml)

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "Config":
        """Keys may be nested, {"train": {"steps": 8}}, or have dots, {"train.steps": 8}."""
        if not isinstance(values, Mapping):
            raise refused(WrongType, "Config.from_dict", "not tables", type(values).__name__, "a dict")
        return cls("a dict", "", tuple(assignments(values)))

    def set(self, key: str, value: Any) -> "Config":
        """This config with another value: a bool, a number, a text, or a list of these or of dicts, as
        train.groups has them; a dict sets a table's keys. `key` has dots: "train.steps". It is checked when the config is used."""
        if not isinstance(key, str):
            raise refused(WrongType, "Config.set", "not a key", type(key).__name__, "a text such as \"train.steps\"")
        return Config(self.file, self.text, (*self.overrides, *assignments({key: value})))

    def resolve(self) -> "Config":
        """With every default filled in. Raises quern.Error with all faults (`findings`)."""
        return resolved(self)

    def check(self) -> None:
        """Raises quern.Error with all faults (`findings`), as `quern config check` prints them."""
        self.resolve()

    def to_toml(self) -> str:
        """The resolved config, as `quern config show` prints it."""
        return self.resolve().text or ""

    def to_dict(self) -> dict[str, Any]:
        """The resolved config as tables."""
        return tomllib.loads(self.to_toml())

    def as_json(self) -> bytes:
        """For the library."""
        return json.dumps({"file": self.file, "text": self.text, "overrides": self.overrides}).encode()

    def __repr__(self) -> str:
        return f"quern.Config({self.file!r}{''.join(f', {text}' for text in self.overrides)})"


def path_text(name: str, path: Any) -> str:
    if isinstance(path, (str, os.PathLike)) and isinstance(text := os.fspath(path), str):
        return text
    raise refused(WrongType, name, "not a path", type(path).__name__, "a text or a path")


def resolved(config: Config, callback: Callback | None = None) -> Config:
    """With the callback, the config may select what it stands for."""
    toml = ctypes.c_void_p()
    check(library().quern_resolve(config.as_json(), callback.pointer if callback else None, ctypes.byref(toml)))
    return Config(config.file, take_text(toml))


def assignments(values: Mapping[str, Any], table: str = "") -> Iterator[str]:
    """"train.steps=8" for each value."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from assignments(value, f"{table}{key}.")
        else:
            yield f"{table}{key}={toml_value(value, f'{table}{key}')}"


def toml_value(value: Any, key: str) -> str:
    if isinstance(value, bool) or type(value).__name__ == "bool":  # numpy's is no number
        return "true" if value else "false"
    if isinstance(value, numbers.Integral):
        return str(int(value))
    if isinstance(value, numbers.Real):
        return repr(float(value))
    if isinstance(value, (str, os.PathLike)):
        return json.dumps(os.fspath(value), ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return "[" + ", ".join(toml_value(item, key) for item in value) + "]"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{toml_value(str(name), key)} = {toml_value(item, key)}" for name, item in value.items()) + "}"
    raise refused(WrongType, key, "a config has no such values", type(value).__name__,
                  "a bool, a number, a text, or a list or dict of these")
