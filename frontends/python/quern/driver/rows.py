"""Rows of tokens from a Python iterable, as the training data of a run."""

import ctypes
import difflib
import json
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

import numpy as np
from numpy.typing import NDArray

Ints = NDArray[np.int32]
PARTS = ("tokens", "mask", "documents")


class Rows:
    """The rows of an iterable in order, again from its beginning after its end; where it stands can be saved.

    An item is an array of `sequence` + 1 tokens, or a mapping with

        tokens      the same
        mask        as long; True: the token counts as a target. Default: all do
        documents   starts of documents in the row, ascending from 0; used with data.documents = "masked". Default: [0]

    Resuming skips the rows that were taken, unless the iterable has state_dict() and load_state_dict(), whose state is
    JSON and is kept in checkpoints.
    """

    def __init__(self, rows: Iterable[Any]) -> None:
        self._rows = rows
        self._iterator: Iterator[Any] | None = None
        self._taken = 0  # since the beginning of the first pass

    def length(self) -> str:
        """Rows of a pass; "" when unknown."""
        return str(len(self._rows)) if isinstance(self._rows, Sized) else ""

    def save_state(self) -> str:
        state: dict[str, Any] = {"rows": self._taken}
        if hasattr(self._rows, "state_dict"):
            state["state"] = self._rows.state_dict()
        return json.dumps(state)

    def load_state(self, text: str) -> None:
        try:
            state = json.loads(text)
            state["rows"] += 0
        except (ValueError, TypeError, KeyError):
            raise ValueError("the checkpoint is of a run whose data were not rows of a program; continue it without `data`, "
                             "or begin another with checkpoint.from and checkpoint.from_data = \"restart\"") from None
        if "state" in state and hasattr(self._rows, "load_state_dict"):
            self._rows.load_state_dict(state["state"])
            self._iterator, self._taken = None, state["rows"]
            return
        if state["rows"] < self._taken:
            if self._rows is self._iterator:
                raise ValueError("an iterator cannot go back; give an iterable such as a list, or one with load_state_dict")
            self._iterator, self._taken = None, 0
        while self._taken < state["rows"]:
            self._next_item()

    def fill(self, request: dict[str, Any]) -> None:
        """The next rows into the arrays (rows, sequence) that the request has the addresses of."""
        rows, sequence = request["rows"], request["sequence"]
        tokens, targets, positions = (array_at(request[name], rows, sequence)
                                      for name in ("tokens", "targets", "positions"))
        for row in range(rows):
            item = self._next_item()
            parts = item if isinstance(item, Mapping) else {"tokens": item}
            for name in parts:
                if name not in PARTS:
                    nearest = difflib.get_close_matches(str(name), PARTS, 1)
                    raise ValueError(f"a row: unknown part: found {str(name)!r}, expected one of {', '.join(PARTS)}"
                                     + (f"; nearest name `{nearest[0]}`" if nearest else ""))
            if "tokens" not in parts:
                raise ValueError("a row: no tokens: expected an array, or a mapping that has `tokens`")
            values = checked_tokens(parts["tokens"], sequence + 1, request["vocabulary"])
            tokens[row], targets[row] = values[:-1], values[1:]
            positions[row] = np.arange(sequence)
            if (mask := parts.get("mask")) is not None:
                targets[row, ~checked_mask(mask, sequence + 1)[1:]] = -1
            if request["documents"] and (starts := parts.get("documents")) is not None:
                for start in checked_starts(starts, sequence)[1:]:
                    positions[row, start:] = np.arange(sequence - start)
                    targets[row, start - 1] = -1  # in another document than its token

    def _next_item(self) -> Any:
        for _ in range(2):
            if self._iterator is None:
                self._iterator = iter(self._rows)
            for item in self._iterator:
                self._taken += 1
                return item
            if self._iterator is self._rows:
                raise ValueError(f"the iterator ended after {self._taken} rows; give more, or an iterable such as a list")
            self._iterator = None
        raise ValueError("the iterable has no rows")


def array_at(address: int, rows: int, sequence: int) -> Ints:
    return np.ctypeslib.as_array((ctypes.c_int32 * (rows * sequence)).from_address(address)).reshape(rows, sequence)


def checked_tokens(tokens: Any, length: int, vocabulary: int) -> NDArray[Any]:
    values = np.asarray(tokens)
    if values.shape != (length,) or values.dtype.kind not in "iu":
        raise ValueError(f"tokens of a row: found {values.dtype} {values.shape}, expected integers ({length},), which is "
                         "train.sequence + 1")
    if values.min() < 0 or (vocabulary and values.max() >= vocabulary):
        raise ValueError(f"tokens of a row: found {values.min()} to {values.max()}, expected 0 to {vocabulary - 1}")
    return values


def checked_mask(mask: Any, length: int) -> NDArray[np.bool_]:
    values = np.asarray(mask)
    if values.shape != (length,):
        raise ValueError(f"mask of a row: found the shape {values.shape}, expected ({length},), as its tokens")
    if values.dtype.kind not in "biu":
        raise ValueError(f"mask of a row: found {values.dtype}, expected booleans or integers")
    return values.astype(bool)


def checked_starts(starts: Any, sequence: int) -> list[int]:
    values = [int(start) for start in starts]
    if values[:1] != [0] or sorted(set(values)) != values or values[-1] >= sequence:
        raise ValueError(f"documents of a row: found {values}, expected ascending starts from 0, below {sequence}")
    return values
