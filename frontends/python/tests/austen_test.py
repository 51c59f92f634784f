"""The R decoder on small streams made by hand, and the extraction from a package made of them."""

import gzip
import struct
import subprocess
import sys
import unittest
import zlib

from folder_test_case import FolderTestCase
from quern.corpora.austen import NOVELS
from quern.corpora.r_objects import DataError, RObjectReader, read_lazy_load, read_rda

HEADER = b"X\n" + struct.pack(">iii", 3, 0x040201, 0x030500) + struct.pack(">i", 5) + b"UTF-8"
NIL = struct.pack(">i", 254)


def string(text, encoding="utf-8", flag=1 << 15):
    data = text.encode(encoding)
    return struct.pack(">ii", flag | 9, len(data)) + data


def strings(lines):
    return struct.pack(">ii", 16, len(lines)) + b"".join(map(string, lines))


def integers(*values, kind=13):
    return struct.pack(f">ii{len(values)}i", kind, len(values), *values)


def symbol(name):
    return struct.pack(">i", 1) + string(name)


def pairlist(**items):
    cells = (struct.pack(">i", 2 | 0x400) + symbol(tag) + value for tag, value in items.items())
    return b"".join(cells) + NIL


def named_list(items, names=None):
    data = struct.pack(">ii", 19 | 0x200, len(items)) + b"".join(items.values())
    return data + (names or pairlist(names=strings(list(items))))


def write_lazy_load(index_path, objects):
    """A .rdx/.rdb pair of {name: serialised object}."""
    database, places = b"", {}
    for name, data in objects.items():
        stored = struct.pack(">I", len(data)) + zlib.compress(data)
        places[name] = integers(len(database), len(stored))
        database += stored
    # Like R, the second use of the symbol "names" refers to the first: symbol 1.
    again = struct.pack(">i", 2 | 0x400) + struct.pack(">i", 1 << 8 | 255)
    outer = {"variables": named_list(places), "compressed": integers(1, kind=10)}
    index = HEADER + named_list(outer, again + strings(list(outer)) + NIL)
    index_path.parent.mkdir(parents=True, exist_ok=True)
    index_path.write_bytes(zlib.compress(index))
    index_path.with_suffix(".rdb").write_bytes(database)


class AustenTest(FolderTestCase):
    def decode(self, data):
        return RObjectReader(HEADER + data).read()

    def test_vectors_lists_and_encodings(self):
        self.assertEqual(self.decode(strings(["EMMA", "", "naïve"])), ["EMMA", "", "naïve"])
        self.assertEqual(self.decode(struct.pack(">ii", 16, 1) + string("é", "latin-1", 1 << 14)), ["é"])
        self.assertEqual(self.decode(integers(1, -2)), [1, -2])
        self.assertEqual(self.decode(struct.pack(">iid", 14, 1, 0.5)), [0.5])
        self.assertEqual(self.decode(named_list({"a": integers(1), "b": NIL})), {"a": [1], "b": None})
        version_2 = b"X\n" + struct.pack(">iii", 2, 0, 0) + strings(["x"])
        self.assertEqual(RObjectReader(version_2).read(), ["x"])

    def test_streams_it_cannot_decode_are_refused(self):
        good = strings(["a line"])
        for data, expected in (
            (good[:-1], "ends at byte"),
            (struct.pack(">ii", 16, 1) + struct.pack(">ii", 9, -1), "missing value"),
            (struct.pack(">i", 3), "type 3"),
            (struct.pack(">i", 1 << 8 | 255), "symbol 1 of 0"),
            (struct.pack(">ii", 16 | 0, 2**31 - 1), "ends at byte"),
            (struct.pack(">ii", 13, -5), "ends at byte"),
        ):
            with self.subTest(expected=expected), self.assertRaisesRegex(DataError, expected):
                self.decode(data)
        with self.assertRaisesRegex(DataError, "expected b'X"):
            RObjectReader(b"A\n")

    def test_lazy_load_databases(self):
        path = self.folder / "Rdata.rdx"
        write_lazy_load(path, {"emma": HEADER + strings(["EMMA"]), "persuasion": HEADER + strings(["P", "q"])})
        self.assertEqual(read_lazy_load(path), {"emma": ["EMMA"], "persuasion": ["P", "q"]})
        database = path.with_suffix(".rdb")
        database.write_bytes(database.read_bytes()[:-1])
        with self.assertRaisesRegex(DataError, "persuasion is beyond"):
            read_lazy_load(path)

    def test_rda_files(self):
        path = self.folder / "emma.rda"
        path.write_bytes(gzip.compress(b"RDX3\n" + HEADER + pairlist(emma=strings(["EMMA", ""]))))
        self.assertEqual(read_rda(path), {"emma": ["EMMA", ""]})

    def extract(self, package):
        command = [sys.executable, "-m", "quern", "corpus", "austen", self.folder / "out", "--deb", package]
        return subprocess.run(command, capture_output=True, text=True)

    def make_package(self, novels):
        root = self.folder / f"package{len(novels)}"
        write_lazy_load(root / "usr/lib/R/site-library/janeaustenr/data/Rdata.rdx", novels)
        (root / "DEBIAN").mkdir()
        (root / "DEBIAN/control").write_text(
            "Package: small\nVersion: 1\nArchitecture: all\nMaintainer: a <a@example.org>\nDescription: small\n"
        )
        subprocess.run(["dpkg-deb", "-b", root, f"{root}.deb"], check=True, capture_output=True)
        return f"{root}.deb"

    def test_a_package_becomes_one_text_a_novel_and_is_not_read_again(self):
        novels = {name: HEADER + strings([name.upper(), "", "“naïve”"]) for name in NOVELS}
        result = self.extract(self.make_package(novels))
        self.assertEqual(result.returncode, 0, result.stderr)
        texts = {path.name: path.read_text(encoding="utf-8") for path in (self.folder / "out").iterdir()}
        self.assertEqual(texts, {f"{name}.txt": f"{name.upper()}\n\n“naïve”\n" for name in NOVELS})
        again = self.extract("/nowhere.deb")
        self.assertEqual((again.returncode, "has all 6" in again.stdout), (0, True), again.stderr)

    def test_a_package_without_a_novel_leaves_nothing(self):
        result = self.extract(self.make_package({"emma": HEADER + strings(["EMMA"])}))
        self.assertEqual(result.returncode, 3)
        self.assertIn("no mansfieldpark", result.stderr)
        self.assertFalse((self.folder / "out").exists())


if __name__ == "__main__":
    unittest.main()
