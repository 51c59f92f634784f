"""--dataset: rows of the `datasets` library become documents, and its errors are plain messages.

The library here is a stand-in with the one function that is called, so no network is needed.
"""

import json
import os
import subprocess
import sys
import unittest

from folder_test_case import FolderTestCase

LIBRARY = '''
import json, os

class DatasetNotFoundError(FileNotFoundError):
    pass

def load_dataset(path, name=None, *, split=None, streaming=False):
    assert streaming, "a corpus may be larger than the disk"
    if path != "mill/corn":
        raise DatasetNotFoundError(f"Dataset '{path}' doesn't exist on the Hub or cannot be accessed.")
    if name not in (None, "sample"):
        raise ValueError(f"BuilderConfig '{name}' not found.")
    if split != "train":
        raise ValueError(f"Bad split: {split}.")
    return rows("small" if name else "whole")

def rows(size):
    for i in range(150 if size == "small" else 300):
        if os.environ.get("BREAK_AT") == str(i):
            raise ConnectionError("the connection broke")
        yield {"body": f"{size} corn and flour {i}, ground by the mill", "id": i}
'''


class DatasetTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        self.library = self.folder / "library"
        self.library.mkdir()
        (self.library / "datasets.py").write_text(LIBRARY)

    def tokenize(self, *arguments, environment=()):
        command = [sys.executable, "-m", "quern", "tokenize", "--train-bpe", "300", "--val-fraction", "0.2"]
        return subprocess.run(
            [*command, "-o", self.out, "--text-field", "body", *arguments],
            env=os.environ | {"PYTHONPATH": f"{self.library}:{os.environ.get('PYTHONPATH', '')}"} | dict(environment),
            capture_output=True,
            text=True,
        )

    def test_rows_become_documents(self):
        for arguments, count in ((), 300), (("--subset", "sample"), 150):
            with self.subTest(count):
                result = self.tokenize("--dataset", "mill/corn", *arguments)
                self.assertEqual(result.returncode, 0, result.stderr)
                meta = json.loads((self.out / "meta.json").read_text())
                self.assertEqual(meta["sources"], ["mill/corn"])
                self.assertEqual(meta["split"], "documents")
                self.assertEqual(meta["train"]["documents"] + meta["val"]["documents"], count)

    def test_faults_are_one_line_that_says_what_to_check(self):
        for arguments, environment, expected in (
            (("mill/rye",), {}, "dataset mill/rye: cannot be read: found DatasetNotFoundError: Dataset 'mill/rye' doesn't exist"),
            (("mill/corn", "--subset", "all"), {}, "BuilderConfig 'all' not found.; check the name, --subset (all)"),
            (("mill/corn", "--split", "test"), {}, "Bad split: test.; check the name, --subset (none), --split (test)"),
            (("mill/corn",), {"BREAK_AT": "120"}, "dataset mill/corn: cannot be read: found ConnectionError"),
            (("mill/corn", "--text-field", "text"), {}, "mill/corn:0: no text in field 'text': found ['body', 'id']"),
        ):
            with self.subTest(expected):
                result = self.tokenize("--dataset", *arguments, environment=environment)
                self.assertEqual(result.returncode, 3, result.stderr)
                self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
                self.assertIn(expected, result.stderr)
                self.assertEqual(list(self.out.glob("**/*.tok")), [])

    def test_without_the_library_it_says_how_to_get_it(self):
        (self.library / "datasets.py").write_text("raise ImportError('not here')\n")
        result = self.tokenize("--dataset", "mill/corn")
        self.assertEqual(result.returncode, 3)
        self.assertIn("-m pip install datasets", result.stderr)


if __name__ == "__main__":
    unittest.main()
