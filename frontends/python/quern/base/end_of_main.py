"""How a program ends: with a code, and at most one line on standard error; never in a traceback."""

import contextlib
import functools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NoReturn

from quern.base.fault import (
    CLOSED_OUTPUT, INTERNAL, INTERRUPTED, RESOURCES, Fault, code_of, is_panic, not_installed, reason_of,
)


def _hold_standard_streams() -> None:
    """Opens standard streams that were closed at the start, so that no file gets the number of a standard stream."""
    for number, name, mode in ((0, "stdin", "r"), (1, "stdout", "w"), (2, "stderr", "w")):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
        if getattr(sys, name) is None:
            setattr(sys, name, open(number, mode, encoding="utf-8", closefd=False))
    for stream in (sys.stdout, sys.stderr):  # a name that the terminal cannot show is no reason to fail
        if hasattr(stream, "reconfigure"):
            stream.reconfigure(errors="backslashreplace")


def _drop_standard_output() -> None:
    """Drops buffered output, which would fail again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fault_of(error: BaseException, name: str) -> Fault:
    """The fault that an exception amounts to."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, ImportError):
        package = Path(__file__).resolve().parents[2]
        return not_installed(error.name, package if (package / "pyproject.toml").is_file() else None)
    if isinstance(error, MemoryError):
        return Fault(name, "not enough memory", advice="give it less to do, or more memory", code=RESOURCES)
    if isinstance(error, OSError):  # files are read and written under reading() and writing()
        if error.filename is None:
            return Fault("standard output", reason_of(error), code=RESOURCES)
        return Fault(error.filename, reason_of(error), code=code_of(error))
    if is_panic(error):
        return Fault(name, "the tokenizers library failed", error, "", "check tokenizer.json, or use another")
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Fault(name, "a fault of this program", f"{type(error).__name__}: {error}",
                 advice=f"{Path(place.filename).name}:{place.lineno}; please report it", code=INTERNAL)


def _guarded(action: Callable[[], int | None], name: str) -> int:
    """The exit code that an action ends with; what is wrong is said."""
    try:
        return action() or 0
    except SystemExit as end:  # argparse after --help, or the code of a program that was run
        return end.code if isinstance(end.code, int) else 0 if end.code is None else INTERNAL
    except KeyboardInterrupt:
        return INTERRUPTED
    except BaseException as error:
        if isinstance(error, OSError):
            _drop_standard_output()
        if isinstance(error, BrokenPipeError):
            return CLOSED_OUTPUT
        fault = _fault_of(error, name)
        with contextlib.suppress(OSError, ValueError):
            print(f"{name}: error: {fault}", file=sys.stderr, flush=True)
        return fault.code


def _end(number: int, _: object) -> NoReturn:
    raise SystemExit(128 + number)


def run_to_the_end(name: str, action: Callable[[], int | None]) -> int:
    """Runs what a program called `name` does, and returns its exit code, whatever its input or the machine's state."""
    _hold_standard_streams()
    if threading.current_thread() is threading.main_thread():
        for number in (signal.SIGTERM, signal.SIGHUP):  # unfinished files are removed, as on an exception
            if signal.getsignal(number) is signal.SIG_DFL:
                signal.signal(number, _end)
    code = _guarded(action, name)
    return _guarded(sys.stdout.flush, name) or code


def script(main: Callable[[Sequence[str] | None], int | None]) -> Callable[..., int]:
    """Makes main(arguments) of a script end so too; without arguments they are the command line's."""
    name = Path(main.__code__.co_filename).name

    @functools.wraps(main)
    def run(arguments: Sequence[str] | None = None) -> int:
        return run_to_the_end(name, lambda: main(arguments))

    return run
