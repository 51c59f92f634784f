"""libquern_python.so, through ctypes: frontends/python/binding/binding.cpp says what its functions do."""

import ctypes
import functools
import json
import math
import weakref
from collections.abc import Callable
from typing import Any, TypeAlias

from quern.base.installation import installed_file
from quern.driver.error import Error

NAME = "lib/libquern_python.so"
CALLBACK = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_char_p, ctypes.c_char_p, ctypes.c_void_p)
FLOATS = ctypes.POINTER(ctypes.c_float)
Handler: TypeAlias = Callable[[str, dict[str, Any]], str]
SIGNATURES: dict[str, list[Any]] = {
    "quern_answer": [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_size_t],
    "quern_free": [ctypes.c_void_p],
    "quern_resolve": [ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)],
    "quern_make": [ctypes.c_char_p, ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)],
    "quern_start_ranks": [ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_int)],
    "quern_close": [ctypes.c_void_p],
    "quern_forked": [],
    "quern_call": [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_char_p, ctypes.POINTER(ctypes.c_void_p)],
    "quern_read": [ctypes.c_void_p, ctypes.c_char_p, FLOATS, ctypes.c_size_t],
    "quern_write": [ctypes.c_void_p, ctypes.c_char_p, FLOATS, ctypes.c_size_t],
}


@functools.cache
def library() -> ctypes.CDLL:
    path = installed_file(NAME)
    if path is None:
        raise ImportError(f"{NAME} was not found; install the wheel of quern, build the target quern_python, or set "
                          "QUERN_PREFIX to an installation or a build folder")
    loaded = ctypes.CDLL(str(path))
    for name, arguments in SIGNATURES.items():
        getattr(loaded, name).argtypes = arguments
    loaded.quern_answer.restype = loaded.quern_free.restype = loaded.quern_forked.restype = None
    loaded.quern_error.restype = ctypes.c_char_p
    return loaded


def check(code: int) -> None:
    """Raises the error of this thread's last call."""
    if code:
        detail = json.loads(library().quern_error())
        raise Error(detail["message"], detail)


def take_text(pointer: ctypes.c_void_p) -> str:
    """The text at `pointer`, which is freed."""
    try:
        return ctypes.string_at(pointer.value or 0).decode(errors="replace")
    finally:
        library().quern_free(pointer)


def number(value: Any) -> Any:
    """JSON has no NaN."""
    return math.nan if value is None else value


class Callback:
    """A Python function that the library calls, from any thread. What it raises last is kept, as the cause of the error
    that the library makes of it."""

    def __init__(self, handler: Handler) -> None:
        self.raised: BaseException | None = None
        self._handler = handler
        self.thunk = thunk_of(self)  # has to live as long as the library may call it
        self.pointer = ctypes.cast(self.thunk, ctypes.c_void_p)

    def answer(self, method: bytes, arguments: bytes) -> tuple[str, int]:
        try:
            return self._handler(method.decode(), json.loads(arguments)), 0
        except BaseException as error:  # nothing may pass through the library
            self.raised = error
            return f"{type(error).__name__}: {error}", 1


def thunk_of(callback: Callback) -> Any:
    """The function for C. It does not keep the callback, which the program's Run does."""
    reference = weakref.ref(callback)

    def call(method: bytes, arguments: bytes, answer: int) -> int:
        known = reference()
        text, code = known.answer(method, arguments) if known else ("the run is gone", 1)
        data = text.encode(errors="replace")
        library().quern_answer(answer, data, len(data))
        return code

    return CALLBACK(call)
