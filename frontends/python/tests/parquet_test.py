"""Parquet input: every row is a document, and what cannot be read is named."""

import contextlib
import importlib.util
import io
import json
import sys
import unittest

if importlib.util.find_spec("pyarrow") is None:
    print("skipped: pyarrow is not installed; run scripts/setup.sh parquet")
    sys.exit(77)

import pyarrow
import pyarrow.parquet

from folder_test_case import FolderTestCase
from quern import command_line
from quern.base.fault import Fault
from quern.tokens.documents import READERS, TEXT, find_files, read_documents, read_rows
from quern.tokens.tally import Tally


class ParquetTest(FolderTestCase):
    def write(self, name, columns, **options):
        path = self.folder / name
        pyarrow.parquet.write_table(pyarrow.table(columns), path, **options)
        return path

    def texts(self, path, field="text"):
        return ["".join(document.text()) for document in read_documents([path], field)]

    def test_rows_come_back_in_order_whatever_the_encoding(self):
        texts = ["", "corn", "麦粉 “fine”\r\n", "corn", "🌾 " * 5000] + [f"row {i}" for i in range(3000)]
        for name, column, options in (
            ("plain", pyarrow.array(texts), {"use_dictionary": False, "compression": "none"}),
            ("zstd", pyarrow.array(texts), {"compression": "zstd", "row_group_size": 700}),
            ("large", pyarrow.array(texts, pyarrow.large_string()), {}),
            ("dictionary", pyarrow.array(texts).dictionary_encode(), {}),
        ):
            with self.subTest(name):
                path = self.write(f"{name}.parquet", {"id": list(range(len(texts))), "text": column}, **options)
                self.assertEqual(self.texts(path), texts)

    def test_files_of_a_folder_are_read_with_others(self):
        self.write("b.parquet", {"body": ["b"]})
        (self.folder / "a.jsonl").write_text('{"body": "a"}\n')
        documents = read_documents(find_files([str(self.folder)], [TEXT, *READERS], Tally()), "body")
        self.assertEqual(["".join(document.text()) for document in documents], ["a", "b"])

    def test_what_cannot_be_read_is_named(self):
        whole = self.write("whole.parquet", {"text": [f"some text {i}" for i in range(1000)]}, use_dictionary=False)
        data = whole.read_bytes()
        cut, bad, text = (self.folder / name for name in ("cut.parquet", "bad.parquet", "text.parquet"))
        cut.write_bytes(data[: len(data) // 2])
        bad.write_bytes(data[:4] + bytes(200) + data[204:])
        text.write_text("corn")
        for path, expected in (
            (cut, "cut.parquet: cannot be read as parquet: "),
            (bad, "bad.parquet: cannot be read as parquet: "),
            (text, "text.parquet: cannot be read as parquet: "),
            (self.write("field.parquet", {"body": ["a"]}), "no column 'text': found ['body']; name it with --text-field"),
            (self.write("null.parquet", {"text": ["a", None]}), "null.parquet:row 2: no text in field 'text': found null"),
            (self.write("number.parquet", {"text": [1]}), "number.parquet:row 1: no text in field 'text': found int"),
        ):
            with self.subTest(expected), self.assertRaises(Fault) as raised:
                self.texts(path)
            self.assertIn(expected, str(raised.exception))

    def test_tokenize_takes_it(self):
        texts = [f"corn and flour {i}, ground by the mill" for i in range(200)]
        path, out = self.write("corpus.parquet", {"text": texts}), self.folder / "out"
        arguments = ["--train-bpe", "300", "--val-fraction", "0.2", "-o", str(out)]
        with contextlib.redirect_stdout(io.StringIO()):
            self.assertEqual(command_line.main(["tokenize", str(path), *arguments]), 0)
        meta = json.loads((out / "meta.json").read_text())
        self.assertEqual(meta["train"]["documents"] + meta["val"]["documents"], len(texts))
        self.assertEqual(meta["train"]["bytes"] + meta["val"]["bytes"], sum(map(len, texts)))
        (self.folder / "text.parquet").write_text("corn")
        with contextlib.redirect_stderr(io.StringIO()) as said:
            self.assertEqual(command_line.main(["tokenize", str(self.folder / "text.parquet"), *arguments]), 3)
        self.assertIn("text.parquet: cannot be read as parquet", said.getvalue())


if __name__ == "__main__":
    unittest.main()
