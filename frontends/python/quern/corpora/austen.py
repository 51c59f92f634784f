#!/usr/bin/env python3
"""Jane Austen's six novels as plain text, from Debian's package r-cran-janeaustenr, without R.

    scripts/data/austen.py data/austen/text

The package is downloaded (not installed) and holds an R lazy-load database: data/Rdata.rdx maps names
to places in data/Rdata.rdb, each of which is one R object, serialised. A novel is a character
vector of its lines, which become one .txt file. A folder that has all six is left alone.
"""

import bz2
import gzip
import lzma
import struct
import subprocess
import sys
import tempfile
import zlib
from pathlib import Path

from quern.base.fault import Fault, argument_parser, path_argument, script, writing

PACKAGE = "r-cran-janeaustenr"
NOVELS = ("emma", "mansfieldpark", "northangerabbey", "persuasion", "prideprejudice", "sensesensibility")


class DataError(Fault):
    """Something that stops the extraction; the message says what and what to do."""

    def __init__(self, problem):
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

    def __init__(self, data):
        self._data, self._at, self._symbols = data, 0, []
        if self._take(2) != b"X\n":
            raise DataError(f"an R object starts with {data[:2]!r}, expected b'X\\n' (XDR)")
        version, _, _ = self._int(), self._int(), self._int()
        if version not in (2, 3):
            raise DataError(f"an R object of serialisation version {version}, expected 2 or 3")
        if version == 3:
            self._take(self._int())  # the native encoding; strings carry their own

    def read(self):
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
            values = list(struct.unpack(f">{count}{code}", self._take(count * size)))
        elif kind in (self.STRINGS, self.LIST):
            values = [self.read() for _ in range(self._int())]
        else:
            raise DataError(f"an R object of type {kind}, expected vectors and lists only")
        attributes = (self.read() if flags & self.HAS_ATTRIBUTES else None) or {}
        return dict(zip(attributes["names"], values, strict=True)) if "names" in attributes else values

    def _pairlist(self, flags):
        items = {}
        while flags & 0xFF == self.PAIRLIST:
            if flags & self.HAS_ATTRIBUTES:
                self.read()
            tag = self.read() if flags & self.HAS_TAG else len(items)
            items[tag] = self.read()
            flags = self._int()
        return items

    def _int(self):
        return struct.unpack(">i", self._take(4))[0]

    def _take(self, size):
        if size < 0 or self._at + size > len(self._data):
            raise DataError(f"an R object ends at byte {len(self._data)}, needs {self._at + size}")
        self._at += size
        return self._data[self._at - size : self._at]


def read_lazy_load(index_path):
    """The objects of a .rdx/.rdb pair."""
    index = RObjectReader(decompress(index_path)).read()
    if index["compressed"] != [1]:
        raise DataError(f"{index_path}: compression {index['compressed']}, expected [1] (zlib)")
    database = index_path.with_suffix(".rdb").read_bytes()
    objects = {}
    for name, (offset, length) in index["variables"].items():
        stored = database[offset : offset + length]
        if len(stored) != length:
            raise DataError(f"{index_path}: {name} lies beyond the end of the .rdb file")
        size = int.from_bytes(stored[:4], "big")
        data = zlib.decompress(stored[4:])
        if len(data) != size:
            raise DataError(f"{index_path}: {name} has {len(data)} bytes, expected {size}")
        objects[name] = RObjectReader(data).read()
    return objects


def read_rda(path):
    """The objects of an .rda file."""
    data = decompress(path)
    if data[:5] not in (b"RDX2\n", b"RDX3\n"):
        raise DataError(f"{path}: starts with {data[:5]!r}, expected RDX2 or RDX3")
    return RObjectReader(data[5:]).read()


def decompress(path):
    data = path.read_bytes()
    for magic, method in (b"\x1f\x8b", gzip), (b"BZh", bz2), (b"\xfd7zXZ", lzma):
        if data.startswith(magic):
            return method.decompress(data)
    return zlib.decompress(data) if data.startswith(b"\x78") else data


def read_package(folder):
    """Every R data object below an unpacked package."""
    objects = {}
    for path in sorted(folder.rglob("data/*")):
        if path.suffix == ".rdx":
            objects |= read_lazy_load(path)
        elif path.suffix == ".rda":
            objects |= read_rda(path)
    return objects


def run(command, folder, next_step):
    result = subprocess.run(command, cwd=folder, capture_output=True, text=True)
    if result.returncode != 0:
        raise Fault(" ".join(command), "failed", " ".join(result.stderr.split()), advice=next_step)


def extract_novels(package, out):
    with tempfile.TemporaryDirectory() as folder:
        folder = Path(folder)
        if package is None:
            run(["apt-get", "download", PACKAGE], folder, "as root, run apt-get update, and try again")
            package = next(folder.glob("*.deb"))
        run(["dpkg-deb", "-x", str(package.resolve()), "unpacked"], folder, f"name another {PACKAGE} with --deb")
        novels = read_package(folder / "unpacked")
    if missing := sorted(set(NOVELS) - novels.keys()):
        raise DataError(f"{package.name}: no {', '.join(missing)} among {sorted(novels)}")
    out.mkdir(parents=True, exist_ok=True)
    for name, lines in sorted(novels.items()):
        if not (isinstance(lines, list) and all(isinstance(line, str) for line in lines)):
            raise DataError(f"{package.name}: {name} is not a character vector")
        path = out / f"{name}.txt"
        partial = out / f".{name}.partial"
        with writing(path):
            partial.write_text("".join(line + "\n" for line in lines), encoding="utf-8", newline="\n")
            partial.replace(path)
        print(f"{path}: {len(lines):,} lines, {path.stat().st_size:,} bytes")


@script
def main(arguments):
    parser = argument_parser(__doc__)
    parser.add_argument("out", type=path_argument, help="folder for one .txt a novel")
    parser.add_argument("--deb", type=path_argument, help=f"a {PACKAGE} package file, instead of downloading it")
    options = parser.parse_args(arguments)
    if all((options.out / f"{name}.txt").is_file() for name in NOVELS):
        print(f"{options.out}: has all {len(NOVELS)} novels")
        return 0
    try:
        extract_novels(options.deb, options.out)
    except (ValueError, zlib.error) as error:
        raise DataError(error) from None
    return 0


if __name__ == "__main__":
    sys.exit(main())
