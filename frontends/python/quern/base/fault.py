"""How tools fail: one line on standard error, `place: what: found F, expected E; next step`, and quern's exit code.

end_of_main.py prints it. Nothing else prints a fault or ends the program.
"""

import contextlib
import errno
import signal
import sys
from collections.abc import Callable, Iterator

INTERNAL, CONFIG, INPUT, RESOURCES = 1, 2, 3, 4
INTERRUPTED, CLOSED_OUTPUT = 130, 141  # as a shell tells SIGINT and SIGPIPE
LONGEST = 300  # characters of each part of a message
RESOURCE_ERRORS = {
    errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EFBIG, errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EAGAIN,
    errno.EIO,
}


def printable(text: object, longest: int = LONGEST) -> str:
    """One line of bounded length, whatever others wrote into the text."""
    shown = "".join(character if character.isprintable() else "?" for character in str(text)[: longest + 1])
    return shown if len(shown) <= longest else shown[:longest] + "..."


class Fault(Exception):
    """Something the user can act on."""

    def __init__(
        self, where: object, what: object, found: object = "", expected: object = "", advice: object = "",
        code: int = INPUT,
    ) -> None:
        place, problem, there, wanted, next_step = map(printable, (where, what, found, expected, advice))
        text = ": ".join(part for part in (place, problem) if part)
        text += f": found {there}" if there else ""
        text += f"{',' if there else ':'} expected {wanted}" if wanted else ""
        super().__init__(text + (f"; {next_step}" if next_step else ""))
        self.code = code

    def __reduce__(self) -> tuple[Callable[[str, int], "Fault"], tuple[str, int]]:  # from a worker process
        return _fault_of_text, (str(self), self.code)


def _fault_of_text(text: str, code: int) -> Fault:
    fault = Fault("", "", code=code)
    fault.args = (text,)
    return fault


def reason_of(error: BaseException) -> str:
    return getattr(error, "strerror", None) or str(error)


def code_of(error: BaseException) -> int:
    return RESOURCES if getattr(error, "errno", None) in RESOURCE_ERRORS else INPUT


def is_panic(error: BaseException) -> bool:
    """Of tokenizers, which is written in Rust; not an Exception."""
    return type(error).__module__ == "pyo3_runtime"


@contextlib.contextmanager
def reading(path: object) -> Iterator[None]:
    """A fault of reading `path` inside names it."""
    try:
        yield
    except UnicodeDecodeError as error:
        raise Fault(path, "not UTF-8", error.reason, "text in UTF-8", "convert it with iconv") from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the path
        advice = "check the path and its permissions"
        raise Fault(path, "cannot be read", reason_of(error), "", advice, code_of(error)) from None


@contextlib.contextmanager
def writing(path: object) -> Iterator[None]:
    """A fault of writing `path` inside names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        advice = "free space there, or choose another place"
        raise Fault(path, "cannot be written", reason_of(error), "", advice, RESOURCES) from None


@contextlib.contextmanager
def starting(program: object) -> Iterator[None]:
    """A fault of starting `program` inside names it."""
    try:
        yield
    except (OSError, ValueError) as error:
        raise Fault(program, "cannot be started", reason_of(error), code=code_of(error)) from None


def not_installed(package: str | None, wanted: object = None) -> Fault:
    """A Python package that is not there, and how this Python gets it, or `wanted`, of which it is a part."""
    advice = f"install it with: {sys.executable} -m pip install {wanted or package}"
    return Fault(package, f"not installed for {sys.executable}", advice=advice)


@contextlib.contextmanager
def signals_waiting() -> Iterator[None]:
    """For imports: a module may swallow the exception that a signal raises, or take it for a fault of its own."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT, signal.SIGTERM, signal.SIGHUP})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextlib.contextmanager
def importing(package: str) -> Iterator[None]:
    """An import inside that fails says how to install `package`."""
    try:
        with signals_waiting():
            yield
    except ImportError:
        raise not_installed(package) from None
