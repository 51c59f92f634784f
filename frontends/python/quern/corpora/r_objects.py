"""Data of R packages, decoded without R: lazy-load databases (.rdx and .rdb) and .rda files."""

import bz2
import gzip
import lzma
import struct
import zlib
from pathlib import Path
from typing import Any

from quern.base.fault import Fault


class DataError(Fault):
    """Something that stops the extraction; the message says what and what to do."""

    def __init__(self, problem: object) -> None:
        super().__init__("", problem)


class RObjectReader:
    """Decodes R's XDR serialisation (R Internals, 1.8), as far as data made of vectors needs it.

    Vectors become lists, lists with names become dicts, and so do pairlists.
    """

    SYMBOL, PAIRLIST, STRING, LOGICAL, INTEGER, REAL, STRINGS, LIST = 1, 2, 9, 10, 13, 14, 16, 19
    NULL, REFERENCE = (0, 254), 255
    HAS_ATTRIBUTES, HAS_TAG = 0x200, 0x400
    LATIN1 = 1 << 14
    NUMBERS = {LOGICAL: ("i", 4), INTEGER: ("i", 4), REAL: ("d", 8)}

    def __init__(self, data: bytes) -> None:
        self._data, self._at = data, 0
        self._symbols: list[str] = []
        if self._take(2) != b"X\n":
            raise DataError(f"an R object starts with {data[:2]!r}, expected b'X\\n' (XDR)")
        version, _, _ = self._int(), self._int(), self._int()
        if version not in (2, 3):
            raise DataError(f"an R object of serialisation version {version}, expected 2 or 3")
        if version == 3:
            self._take(self._int())  # the native encoding; strings carry their own

    def read(self) -> Any:
        flags = self._int()
        kind = flags & 0xFF
        if kind in self.NULL:
            return None
        if kind == self.SYMBOL:
            self._symbols.append(self.read())
            return self._symbols[-1]
        if kind == self.REFERENCE:
            index = flags >> 8 or self._int()
            if not 1 <= index <= len(self._symbols):
                raise DataError(f"a reference to symbol {index} of {len(self._symbols)}")
            return self._symbols[index - 1]
        if kind == self.STRING:
            length = self._int()
            if length == -1:
                raise DataError("a missing value (NA) among strings, expected text")
            return self._take(length).decode("latin-1" if flags & self.LATIN1 else "utf-8")
        if kind == self.PAIRLIST:
            return self._pairlist(flags)
        if kind in self.NUMBERS:
            code, size = self.NUMBERS[kind]
            count = self._int()
            values: list[Any] = list(struct.unpack(f">{count}{code}", self._take(count * size)))
        elif kind in (self.STRINGS, self.LIST):
            values = [self.read() for _ in range(self._int())]
        else:
            raise DataError(f"an R object of type {kind}, expected vectors and lists only")
        attributes = (self.read() if flags & self.HAS_ATTRIBUTES else None) or {}
        return dict(zip(attributes["names"], values, strict=True)) if "names" in attributes else values

    def _pairlist(self, flags: int) -> dict[Any, Any]:
        items: dict[Any, Any] = {}
        while flags & 0xFF == self.PAIRLIST:
            if flags & self.HAS_ATTRIBUTES:
                self.read()
            tag = self.read() if flags & self.HAS_TAG else len(items)
            items[tag] = self.read()
            flags = self._int()
        return items

    def _int(self) -> int:
        return int.from_bytes(self._take(4), "big", signed=True)

    def _take(self, size: int) -> bytes:
        if size < 0 or self._at + size > len(self._data):
            raise DataError(f"an R object ends at byte {len(self._data)}, needs {self._at + size}")
        self._at += size
        return self._data[self._at - size : self._at]


def read_lazy_load(index_path: Path) -> dict[str, Any]:
    """The objects of a .rdx/.rdb pair."""
    index = RObjectReader(decompress(index_path)).read()
    if index["compressed"] != [1]:
        raise DataError(f"{index_path}: compression {index['compressed']}, expected [1] (zlib)")
    database = index_path.with_suffix(".rdb").read_bytes()
    objects: dict[str, Any] = {}
    for name, (offset, length) in index["variables"].items():
        stored = database[offset : offset + length]
        if len(stored) != length:
            raise DataError(f"{index_path}: {name} is beyond the end of the .rdb file")
        size = int.from_bytes(stored[:4], "big")
        data = zlib.decompress(stored[4:])
        if len(data) != size:
            raise DataError(f"{index_path}: {name} has {len(data)} bytes, expected {size}")
        objects[name] = RObjectReader(data).read()
    return objects


def read_rda(path: Path) -> dict[str, Any]:
    """The objects of an .rda file."""
    data = decompress(path)
    if data[:5] not in (b"RDX2\n", b"RDX3\n"):
        raise DataError(f"{path}: starts with {data[:5]!r}, expected RDX2 or RDX3")
    objects: dict[str, Any] = RObjectReader(data[5:]).read()
    return objects


def decompress(path: Path) -> bytes:
    data = path.read_bytes()
    methods = (b"\x1f\x8b", gzip.decompress), (b"BZh", bz2.decompress), (b"\xfd7zXZ", lzma.decompress)
    for magic, decompressed in methods:
        if data.startswith(magic):
            return decompressed(data)
    return zlib.decompress(data) if data.startswith(b"\x78") else data


def read_package(folder: Path) -> dict[str, Any]:
    """Every R data object below an unpacked package."""
    objects: dict[str, Any] = {}
    for path in sorted(folder.rglob("data/*")):
        if path.suffix == ".rdx":
            objects |= read_lazy_load(path)
        elif path.suffix == ".rda":
            objects |= read_rda(path)
    return objects
