"""Files that appear under their names only when they are whole."""

import contextlib
import os
from pathlib import Path

from quern.base.fault import RESOURCES, Fault, writing


def replace_file(path: Path, data: bytes) -> None:
    """Puts bytes under a name in one step; a fault leaves what was there."""
    partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
    with writing(path):
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def write_file(path: Path, data: bytes) -> None:
    """As replace_file, but a file of another kind, by its first bytes, is not replaced; a device gets the bytes."""
    path = Path(os.path.realpath(path))
    with writing(path):
        if path.exists() and not path.is_file():  # a device or a pipe takes them as they come
            path.write_bytes(data)
            return
        if path.exists():
            with open(path, "rb") as file:
                begin = file.read(4)
            if begin and begin != data[:4]:
                raise Fault(path, "a file of another kind is there", repr(begin), repr(data[:4]) + " at its start",
                            "choose another name, or remove it", RESOURCES)
    replace_file(path, data)
