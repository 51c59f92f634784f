"""Writes and reads quern's token files, the input of training.

The format is docs/token-files.md; this is its Python half, the C++ reader is the other. The writer
streams, so a corpus need not fit in memory (a loss mask costs one bit a token), and a file appears
under its name only when it is whole. The reader maps the file and trusts nothing in it.
"""

import contextlib
import os
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Any, BinaryIO, TypeAlias

import numpy as np
import numpy.typing as npt
import xxhash

from quern.base.fault import Fault, reading, writing
from quern.base.files import open_partial, partial_of

Array: TypeAlias = npt.NDArray[Any]

MAGIC = b"QUERNTOK"
VERSION = 1
FLAG_LOSS_MASK = 1
HEADER = struct.Struct("<8sIIQIIQi20x")  # magic, version, flags, count, vocab, width, checksum, separator
NO_SEPARATOR = -1
MAX_VOCABULARY = (1 << 31) - 1  # token ids are signed 32-bit integers in training
CHUNK_BYTES = 16 << 20


class TokenFileError(Fault):
    """A token file that cannot be used; the message says which, what is wrong and what to do."""

    def __init__(self, path: Path, problem: str) -> None:
        super().__init__(path, problem, advice="write it again with quern-tools tokenize")


def token_dtype(vocab_size: int) -> np.dtype[Any]:
    return np.dtype("<u2" if vocab_size <= 65536 else "<u4")


def padding(size: int) -> int:
    """Bytes that bring `size` up to a multiple of 8."""
    return -size % 8


def payload_sizes(count: int, token_bytes: int, has_mask: bool) -> tuple[int, int]:
    """(tokens, loss mask) in bytes, each with its padding."""
    tokens = count * token_bytes
    mask = (count + 7) // 8 if has_mask else 0
    return tokens + padding(tokens), mask + padding(mask)


class TokenWriter:
    """Appends tokens to `path`; a context manager, and the file exists only if the block succeeds.

    with_mask: every append then brings a mask, one truth value a token, true where that token counts
    as a target.
    """

    def __init__(
        self, path: str | Path, vocab_size: int, separator_token: int = NO_SEPARATOR, with_mask: bool = False
    ) -> None:
        if not 1 <= vocab_size <= MAX_VOCABULARY:
            raise ValueError(f"{path}: vocabulary size {vocab_size}, expected 1 to {MAX_VOCABULARY}")
        if not NO_SEPARATOR <= separator_token < vocab_size:
            raise ValueError(f"{path}: separator {separator_token}, expected -1 (none) to {vocab_size - 1}")
        self.path = Path(path)
        self.vocab_size = vocab_size
        self.separator_token = separator_token
        self.count = 0
        self._dtype = token_dtype(vocab_size)
        self._hash = xxhash.xxh3_64()
        self._mask = bytearray() if with_mask else None
        self._mask_tail: Array = np.zeros(0, bool)  # fewer than 8 values, waiting to fill a byte
        self._partial = partial_of(self.path)

    def __enter__(self) -> "TokenWriter":
        with writing(self.path):
            self.path.parent.mkdir(parents=True, exist_ok=True)
            self._file: BinaryIO = open_partial(self.path)
        self._write_bytes(bytes(HEADER.size))
        return self

    def __exit__(
        self, error_type: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            if error_type is None:
                self._finish()
        finally:
            with contextlib.suppress(OSError):  # buffered bytes are of no use
                self._file.close()
            with contextlib.suppress(OSError):
                self._partial.unlink(missing_ok=True)

    def append(self, tokens: Array | Sequence[int], mask: Array | Sequence[bool] | None = None) -> None:
        tokens = np.asarray(tokens)
        if tokens.size == 0:
            tokens = tokens.astype(self._dtype)
        if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
            raise ValueError(f"{self.path}: tokens of shape {tokens.shape} {tokens.dtype}, expected integers in a row")
        if tokens.size and not (0 <= tokens.min() and tokens.max() < self.vocab_size):
            raise ValueError(
                f"{self.path}: tokens from {tokens.min()} to {tokens.max()}, expected 0 to {self.vocab_size - 1}"
            )
        if (mask is None) != (self._mask is None):
            raise ValueError(f"{self.path}: a loss mask comes with every append or with none")
        if mask is not None and self._mask is not None:
            mask = np.asarray(mask, bool)
            if mask.shape != tokens.shape:
                raise ValueError(f"{self.path}: mask of shape {mask.shape}, expected {tokens.shape}")
            bits = np.concatenate([self._mask_tail, mask])
            whole = bits.size // 8 * 8
            self._mask += np.packbits(bits[:whole], bitorder="little").tobytes()
            self._mask_tail = bits[whole:]
        self._write(tokens.astype(self._dtype).tobytes())
        self.count += tokens.size

    def _write(self, data: bytes) -> None:
        self._hash.update(data)
        self._write_bytes(data)

    def _write_bytes(self, data: bytes) -> None:
        with writing(self.path):
            self._file.write(data)

    def _finish(self) -> None:
        if self.count == 0:
            raise ValueError(f"{self.path}: no tokens to write, expected at least one")
        self._write(bytes(padding(self.count * self._dtype.itemsize)))
        if self._mask is not None:
            mask = self._mask + np.packbits(self._mask_tail, bitorder="little").tobytes()
            self._write(bytes(mask) + bytes(padding(len(mask))))
        flags = 0 if self._mask is None else FLAG_LOSS_MASK
        header = HEADER.pack(
            MAGIC, VERSION, flags, self.count, self.vocab_size, self._dtype.itemsize,
            self._hash.intdigest(), self.separator_token,
        )
        with writing(self.path):
            self._file.flush()
            os.fsync(self._file.fileno())  # payload before header: a crash leaves no valid header on bad data
            self._file.seek(0)
            self._file.write(header)
            self._file.flush()
            os.fsync(self._file.fileno())
            os.replace(self._partial, self.path)
            folder = os.open(self.path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)


@dataclass(frozen=True)
class TokenFile:
    tokens: Array  # (token_count,) u16 or u32, mapped from the file
    loss_mask: Array | None  # (token_count,) bool
    vocab_size: int
    separator_token: int  # NO_SEPARATOR if there is none


def first_tokens(path: str | Path, count: int) -> list[int]:
    """Up to `count` tokens at the beginning of a token file, of which nothing else is checked."""
    with reading(path), open(path, "rb") as file:
        header = file.read(HEADER.size)
        if len(header) < HEADER.size or not header.startswith(MAGIC):
            raise TokenFileError(Path(path), "not a token file")
        width = HEADER.unpack(header)[5]
        data = file.read(count * width) if width in (2, 4) else b""
    return np.frombuffer(data[: len(data) // width * width], f"<u{width}").tolist() if data else []


def read_token_file(path: str | Path) -> TokenFile:
    """Maps a token file after checking its header, size, checksum, padding and token range."""
    path = Path(path)
    with reading(path):
        size = path.stat().st_size
        if size < HEADER.size:
            raise TokenFileError(path, f"{size} bytes, expected a header of {HEADER.size}")
        data = np.memmap(path, np.uint8, mode="r")
    magic, version, flags, count, vocab_size, token_bytes, checksum, separator = HEADER.unpack(bytes(data[: HEADER.size]))
    reserved = bytes(data[HEADER.size - 20 : HEADER.size])
    if magic != MAGIC:
        raise TokenFileError(path, f"starts with {magic!r}, expected {MAGIC!r}: not a token file")
    if version != VERSION:
        raise TokenFileError(path, f"version {version}, expected {VERSION}")

    problems = []  # all at once
    if flags & ~FLAG_LOSS_MASK or any(reserved):
        problems.append(f"flags {flags:#x} or reserved bytes {reserved.hex()} this version does not know")
    if count == 0:
        problems.append("0 tokens, expected at least one")
    if not 1 <= vocab_size <= MAX_VOCABULARY:
        problems.append(f"vocabulary size {vocab_size}, expected 1 to {MAX_VOCABULARY}")
    if token_bytes not in (2, 4):
        problems.append(f"{token_bytes} bytes a token, expected 2 or 4")
    if not NO_SEPARATOR <= separator < max(vocab_size, 1):
        problems.append(f"separator token {separator}, expected -1 (none) to {vocab_size - 1}")
    if problems:
        raise TokenFileError(path, "; ".join(problems))

    token_area, mask_area = payload_sizes(count, token_bytes, bool(flags & FLAG_LOSS_MASK))
    if size != HEADER.size + token_area + mask_area:
        raise TokenFileError(
            path, f"{size} bytes, expected {HEADER.size + token_area + mask_area} for its {count} tokens"
        )
    _verify_checksum(path, data, checksum)

    tokens = data[HEADER.size : HEADER.size + count * token_bytes].view(f"<u{token_bytes}")
    pads = data[HEADER.size + count * token_bytes : HEADER.size + token_area]
    mask = None
    if flags & FLAG_LOSS_MASK:
        bits = np.unpackbits(data[HEADER.size + token_area :], bitorder="little")
        mask, pads = bits[:count].astype(bool), np.concatenate([pads, bits[count:]])
    if pads.any():
        raise TokenFileError(path, "padding that is not zero")
    for start in range(0, count, CHUNK_BYTES):
        chunk = tokens[start : start + CHUNK_BYTES]
        if chunk.max() >= vocab_size:
            at = start + int(np.argmax(chunk >= vocab_size))
            raise TokenFileError(path, f"token {at} is {tokens[at]}, expected less than {vocab_size}")
    return TokenFile(tokens, mask, vocab_size, separator)


def _verify_checksum(path: Path, data: Array, expected: int) -> None:
    hasher = xxhash.xxh3_64()
    for start in range(HEADER.size, data.size, CHUNK_BYTES):
        hasher.update(data[start : start + CHUNK_BYTES].data)
    if hasher.intdigest() != expected:
        raise TokenFileError(path, f"checksum {hasher.intdigest():016x}, expected {expected:016x}: damaged")
