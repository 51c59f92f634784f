"""How scripts fail: one line on standard error, `place: what: found F, expected E; next step`, and quern's exit code.

@script wraps a main(): whatever its input or the state of the machine, it ends with a code and never in a traceback.
"""

import argparse
import contextlib
import errno
import functools
import os
import sys
import traceback
from pathlib import Path

INTERNAL, CONFIG, INPUT, RESOURCES = 1, 2, 3, 4
INTERRUPTED, CLOSED_OUTPUT = 130, 141  # as a shell tells SIGINT and SIGPIPE
LONGEST = 300  # characters of each part of a message
RESOURCE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    errno.EIO,
}


def printable(text, longest=LONGEST):
    """One line of bounded length, whatever others wrote into the text."""
    text = "".join(character if character.isprintable() else "?" for character in str(text)[: longest + 1])
    return text if len(text) <= longest else text[:longest] + "..."


class Fault(Exception):
    """Something the user can act on."""

    def __init__(self, where, what, found="", expected="", advice="", code=INPUT):
        where, what, found, expected, advice = map(printable, (where, what, found, expected, advice))
        text = ": ".join(part for part in (where, what) if part)
        text += f": found {found}" if found else ""
        text += f"{',' if found else ':'} expected {expected}" if expected else ""
        super().__init__(text + (f"; {advice}" if advice else ""))
        self.code = code

    def __reduce__(self):  # from a worker process
        return _fault_of_text, (str(self), self.code)


def _fault_of_text(text, code):
    fault = Fault("", "", code=code)
    fault.args = (text,)
    return fault


def reason_of(error):
    return getattr(error, "strerror", None) or str(error)


@contextlib.contextmanager
def reading(path):
    """A fault of reading `path` inside names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise Fault(path, "not UTF-8", error.reason, "text in UTF-8", "convert it with iconv") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        code = RESOURCES if getattr(error, "errno", None) in RESOURCE_ERRORS else INPUT
        raise Fault(path, "cannot be read", reason_of(error), "", "check the path and its permissions", code) from None


@contextlib.contextmanager
def writing(path):
    """A fault of writing `path` inside names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        advice = "free space there, or choose another place"
        raise Fault(path, "cannot be written", reason_of(error), "", advice, RESOURCES) from None


@contextlib.contextmanager
def starting(program):
    """A fault of starting `program` inside names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        code = RESOURCES if getattr(error, "errno", None) in RESOURCE_ERRORS else INPUT
        raise Fault(program, "cannot be started", reason_of(error), code=code) from None


def is_panic(error):
    """Of tokenizers, which is written in Rust; not an Exception."""
    return type(error).__module__ == "pyo3_runtime"


def write_file(path, data):
    """Puts bytes under a name in one step. A file of another kind, by its first bytes, is not replaced."""
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
        partial = path.with_name(f".{path.name}.partial-{os.getpid()}")
        try:
            partial.write_bytes(data)
            partial.replace(path)
        finally:
            with contextlib.suppress(OSError):
                partial.unlink(missing_ok=True)


def path_argument(text):
    if not text:
        raise argparse.ArgumentTypeError("found an empty path, expected a name")
    return Path(text)


def argument_parser(description):
    return argparse.ArgumentParser(
        description=description, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )


def _hold_standard_streams():
    """Opens what was closed at the start, so that no file gets the number of a standard stream."""
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


def _drop_standard_output():
    """What is still buffered goes nowhere, rather than fail again when the interpreter ends."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _fault_of(error, name):
    """The fault that an exception amounts to."""
    if isinstance(error, Fault):
        return error
    if isinstance(error, ImportError):
        advice = "install it into .venv, which scripts/setup.sh python makes with what most scripts need"
        return Fault(name, f"{error.name} is not installed here", advice=advice)
    if isinstance(error, MemoryError):
        return Fault(name, "not enough memory", advice="give it less to do, or more memory", code=RESOURCES)
    if isinstance(error, OSError):  # files are read and written under reading() and writing()
        where = error.filename if error.filename is not None else "standard output"
        known = error.filename is None or error.errno in RESOURCE_ERRORS
        return Fault(where, reason_of(error), code=RESOURCES if known else INPUT)
    if is_panic(error):
        return Fault(name, "the tokenizers library failed", error, "", "check tokenizer.json, or use another")
    place = traceback.extract_tb(error.__traceback__)[-1]
    return Fault(name, "a fault of this script", f"{type(error).__name__}: {error}",
                 advice=f"{Path(place.filename).name}:{place.lineno}; please report it", code=INTERNAL)


def _guarded(action, name):
    """The exit code that an action ends with; what is wrong is said."""
    try:
        return action() or 0
    except SystemExit as end:  # argparse, which has said why
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
            print(f"{name}: {fault}", file=sys.stderr, flush=True)
        return fault.code


def script(main):
    """main(arguments) -> None or an exit code, as a script's."""
    name = Path(main.__code__.co_filename).name

    @functools.wraps(main)
    def run(arguments=None):
        _hold_standard_streams()
        code = _guarded(lambda: main(arguments), name)
        return _guarded(lambda: sys.stdout.flush(), name) or code

    return run
