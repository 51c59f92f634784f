"""Files that appear under their names only when they are whole."""

import contextlib
import fcntl
import glob
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from quern.base.fault import RESOURCES, Fault, writing


POINTER = b"version https://git-lfs.github.com/spec/"


def refuse_pointer(where: Path | str, data: bytes) -> None:
    """What `git clone` leaves of a large file on a machine without git-lfs; `data`: its beginning."""
    if data.startswith(POINTER):
        raise Fault(where, "a git-lfs pointer, not the file itself", advice="fetch the file with `git lfs pull`")


def partial_of(path: Path) -> Path:
    return path.with_name(f".{path.name}.partial-{os.getpid()}")


def lock(descriptor: int) -> None:
    with contextlib.suppress(OSError):  # a file system without locks
        fcntl.flock(descriptor, fcntl.LOCK_EX)  # waits for who only looks whether it is locked


def is_locked(path: Path) -> bool:
    """Whether a file or folder that is there is locked by somebody; True also where the file system cannot say."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False


def open_partial(path: Path) -> BinaryIO:
    """The file that will become `path`, locked while it is written, so that nobody takes it for abandoned."""
    remove_abandoned(path)
    file = open(partial_of(path), "wb")
    lock(file.fileno())
    return file


@contextlib.contextmanager
def partial_folder(path: Path) -> Iterator[Path]:
    """A folder beside `path`, locked too, for what `path` is made of; it is removed at the end."""
    remove_abandoned(path)
    folder = Path(f"{partial_of(path)}-folder")
    folder.mkdir()
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        lock(descriptor)
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)
        os.close(descriptor)


def remove_abandoned(path: Path) -> None:
    """Removes what a process that was killed left of `path`."""
    for name in glob.glob(f".{glob.escape(path.name)}.partial-*", root_dir=path.parent):
        with contextlib.suppress(OSError):
            left = path.with_name(name)
            if is_locked(left):
                continue
            if left.is_dir():
                shutil.rmtree(left)
            else:
                left.unlink()


def replace_file(path: Path, data: bytes) -> None:
    """Puts bytes under a name in one step; a fault leaves what was there."""
    partial = partial_of(path)
    with writing(path):
        try:
            with open_partial(path) as file:
                file.write(data)
                file.flush()
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
