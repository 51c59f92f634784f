"""The extraction of text from each format, the files left out, and a corpus from two small packages."""

import base64
import gzip
import io
import json
import subprocess
import unittest
from contextlib import redirect_stdout
from unittest import mock

from folder_test_case import FolderTestCase
from quern import command_line
from quern.corpora import debian
from quern.corpora.r_objects import DataError

ANIMALS = ("fox", "cat", "hare", "goat", "crow")
SENTENCES = [f"The {animal} jumps over the lazy dog, and nobody minds." for animal in ANIMALS]


def number(value):
    digits = {place: digit for digit, place in debian.DIGITS.items()}
    return (number(value // 64) if value >= 64 else "") + digits[value % 64]


class DebianTest(FolderTestCase):
    def test_html_gives_paragraphs_without_navigation(self):
        text = """<html><head><title>no</title></head><body><div class="sphinxsidebar"><div>no</div><p>no</p></div>
            <h1>A title<a class="headerlink" href="#x">\u00b6</a></h1><p>One <em>two</em>
            th<b>r</b>ee &amp; four<br>five<p>Unclosed <script>if (a < b) no()</script>paragraph
            <pre>def <span class="k">f</span>():\n    pass\n</pre>
            <table><tr><td>a<td>b<tr><td>c</table></body></html>"""
        expected = ["A title", "One two three & four five", "Unclosed paragraph", "def f():\n    pass", "a b", "c"]
        self.assertEqual(debian.read_html(text), expected)
        self.assertEqual(debian.read_html(""), [])
        mallard = "<page><info><link/><desc>no</desc></info><title>Yes</title><p>a <gui>b</gui></p></page>"
        self.assertEqual(debian.read_html(mallard), ["Yes", "a b"])

    def test_dictionaries_give_each_entry_once(self):
        entries = ["00-database-info\n  none", "ab\n  the first", "cd\n  the sec\u00f6nd"]
        data, lines = b"", []
        for entry in entries:
            encoded = entry.encode()
            for word in {entry.split()[0], entry.split()[0].upper()}:
                lines.append(f"{word}\t{number(len(data))}\t{number(len(encoded))}\n")
            data += encoded
        (self.folder / "small.index").write_text("".join(lines), encoding="utf-8")
        with self.assertRaisesRegex(DataError, "no small.dict"):
            debian.read_paragraphs(self.folder / "small.index")
        (self.folder / "small.dict.dz").write_bytes(gzip.compress(data))
        self.assertEqual(debian.read_paragraphs(self.folder / "small.index"), entries[1:])
        self.assertEqual(debian.DIGITS["/"], base64.b64decode("////")[0] & 63)

    def test_other_formats(self):
        (self.folder / "a.rst.gz").write_bytes(gzip.compress("one\r\nline\n\n \ntw\u00f6".encode()))
        self.assertEqual(debian.read_paragraphs(self.folder / "a.rst.gz"), ["one\nline", "tw\u00f6"])
        (self.folder / "b.txt").write_bytes("tw\u00f6".encode("latin-1"))
        self.assertEqual(debian.read_paragraphs(self.folder / "b.txt"), ["tw\u00f6"])
        (self.folder / "fortunes").mkdir()
        (self.folder / "fortunes/c").write_text("one\n\ntwo\n%\nthree\n")
        self.assertEqual(debian.read_paragraphs(self.folder / "fortunes/c"), ["one\n\ntwo", "three\n"])

    def test_numbers_other_scripts_and_scraps_are_no_text(self):
        for text in ("1 2 3 4 5 6 7 8 9 10 11 12 13 14", "Съешь же ещё этих мягких французских булок", "See also"):
            self.assertFalse(debian.is_text(text), text)
        self.assertTrue(debian.is_text(SENTENCES[0]))

    def test_a_paragraph_is_kept_once_and_documents_are_bounded(self):
        corpus = debian.Corpus()
        words = [f"{a}{b} " * 20 for a in "abcdefghijklmnopqrstuvwxyz" for b in "abcdefghijklmnopqrstuvwxyz"]
        files = [words, ["Ab 1, " * 20 + "!"] * 9 + words, SENTENCES]
        documents = list(corpus.documents(files))
        self.assertEqual(len(documents), 2, "the second file has nothing new, the third is too short")
        self.assertEqual("\n\n".join(documents).split("\n\n"), words)
        self.assertLessEqual(max(map(len, documents)), debian.DOCUMENT_CHARACTERS)

    def test_a_cap_takes_whole_documents(self):
        files = [[letter * 999] for letter in "abcdefgh"]
        chosen = debian.Corpus().choose(files, 3500)
        self.assertEqual((len(chosen), {len(text) for text in chosen}), (3, {999}))
        self.assertEqual(chosen, debian.Corpus().choose(files[::-1], 3500), "whatever the order of files")

    def make_package(self, name, files):
        root = self.folder / name
        for path, text in ({"DEBIAN/control": f"Package: {name}\nVersion: 1\nArchitecture: all\n"
                            "Maintainer: a <a@example.org>\nDescription: small\n"} | files).items():
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            (root / path).write_text(text)
        (self.folder / "debs").mkdir(exist_ok=True)
        command = ["dpkg-deb", "-b", root, self.folder / f"debs/{name}_1_all.deb"]
        subprocess.run(command, check=True, capture_output=True)

    def run_main(self):
        sources = {"quern-a": ["doc/a/*.html"], "quern-b": ["doc/b/**/*.txt"]}
        words = ["corpus", "debian", str(self.folder / "out"), "--debs", str(self.folder / "debs")]
        with mock.patch.object(debian, "SOURCES", sources):
            with redirect_stdout(io.StringIO()) as out, mock.patch("sys.stderr", out):
                return command_line.main(words), out.getvalue()

    def test_packages_become_a_corpus_once(self):
        page = "".join(f"<p>{sentence * 3}</p>" for sentence in SENTENCES)
        self.make_package("quern-a", {"usr/share/doc/a/x.html": page, "usr/share/doc/a/y.pdf": "no"})
        new = "Something else entirely, with letters. " * 12
        self.make_package("quern-b", {"usr/share/doc/b/deep/z.txt": SENTENCES[0] * 3 + "\n\n" + new + "\n"})
        code, told = self.run_main()
        self.assertEqual(code, 0, told)
        texts = {
            path.name: [json.loads(line)["text"] for line in path.read_text().splitlines()]
            for path in self.folder.glob("out/*.jsonl")
        }
        expected = {"quern-a.jsonl": ["\n\n".join(s * 3 for s in SENTENCES)], "quern-b.jsonl": [new.rstrip()]}
        self.assertEqual(texts, expected)
        first = (self.folder / "out/sources.log").read_text()
        self.assertIn("there already", self.run_main()[1])
        (self.folder / "out/sources.log").unlink()
        self.run_main()
        self.assertEqual((self.folder / "out/sources.log").read_text(), first)

    def test_a_package_without_text_is_refused(self):
        self.make_package("quern-a", {"usr/share/doc/a/x.html": "<p>short"})
        self.make_package("quern-b", {})
        code, told = self.run_main()
        self.assertEqual((code, "quern-a_1_all.deb: no text" in told), (3, True), told)
        self.assertFalse((self.folder / "out/sources.log").exists())


if __name__ == "__main__":
    unittest.main()
