"""--dataset: rows of the `datasets` library become documents, and its errors are plain messages.

The library here is a stand-in with the one function that is called, so no network is needed.
"""

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import unittest

from folder_test_case import FolderTestCase
from quern.base.fault import Fault
from quern.tokens.documents import document_from_string
from quern.tokens.encoding import train_bpe
from quern.tokens.named_datasets import NAMED, conversations, first_characters

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

NAMED_LIBRARY = '''
import itertools, types

def load_dataset(path, name=None, *, split=None, streaming=False):
    row = {("Trelis/tiny-shakespeare", None): lambda i: {"Text": f"act {i} of the mill"},
           ("roneneldan/TinyStories", None): lambda i: {"text": f"story {i} of the mill"},
           ("HuggingFaceFW/fineweb", "sample-10BT"): lambda i: {"text": f"page {i} of the mill"},
           ("openai/gsm8k", "main"): lambda i: {"question": f"{i} + {i}?", "answer": f"{i + i}"},
           ("GAIR/LIMO", None): lambda i: {"question": f"{i} + {i}?", "solution": f"{i + i}"},
           ("gvlassis/ClimbMix", "cluster_id=1"): lambda i: {"text": f"first {i} of the mill"},
           ("gvlassis/ClimbMix", "cluster_id=2"): lambda i: {"text": f"second {i} of the mill"}}[path, name]
    assert split == "train" and streaming
    return map(row, range(30))

def get_dataset_config_names(path):
    return ["cluster_id=1", "cluster_id=2"]

def load_dataset_builder(path, name):
    return types.SimpleNamespace(info=types.SimpleNamespace(splits={"train": types.SimpleNamespace(num_examples=30)}))

def interleave_datasets(parts, probabilities, seed, stopping_strategy):
    assert probabilities == [0.5, 0.5] and stopping_strategy == "all_exhausted"
    return itertools.chain.from_iterable(zip(*parts))
'''


def make_tokenizer(folder):
    tokenizer = train_bpe(300, [("train", document_from_string("a", "a quern grinds grain " * 20))])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"eos_token": "<|endoftext|>", "chat_template":
        "{% for m in messages %}{{ m['role'] }}: {% if m['role'] == 'assistant' %}{% generation %}{{ m['content'] }}"
        "{{ eos_token }}{% endgeneration %}{% else %}{{ m['content'] }}{% endif %}{% endfor %}"}))


class DatasetTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        self.library = self.folder / "library"
        self.library.mkdir()
        (self.library / "datasets.py").write_text(LIBRARY)

    def tokenize(self, *arguments, environment=(), field=("--text-field", "body"), vocabulary=("--train-bpe", "300")):
        command = [sys.executable, "-m", "quern", "tokenize", *vocabulary, "--val-fraction", "0.2"]
        return subprocess.run(
            [*command, "-o", self.out, *field, *arguments],
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


    def test_short_names_say_where_a_data_set_is_and_how_it_is_read(self):
        (self.library / "datasets.py").write_text(NAMED_LIBRARY)
        sources = {}
        for name in ("tiny-shakespeare", "tiny-stories", "fineweb-1b", "climb-1b"):
            shutil.rmtree(self.out, ignore_errors=True)
            result = self.tokenize("--dataset", name, field=())
            self.assertEqual(result.returncode, 0, result.stderr)
            meta = json.loads((self.out / "meta.json").read_text())
            sources[name] = meta["train"]["documents"] + meta["val"]["documents"]
        self.assertEqual(sources, {"tiny-shakespeare": 30, "tiny-stories": 30, "fineweb-1b": 30, "climb-1b": 60})
        shutil.rmtree(self.out)
        make_tokenizer(self.folder / "tokenizer")
        for name in ("gsm8k", "limo"):
            result = self.tokenize("--dataset", name, "--tokenizer", self.folder / "tokenizer/tokenizer.json", field=(),
                                   vocabulary=())
            self.assertEqual(result.returncode, 0, result.stderr)
            self.assertEqual(json.loads((self.out / "meta.json").read_text())["train"]["documents"], 24)

    def test_names_of_one_data_set_differ_in_what_is_taken_of_it(self):
        self.assertEqual(len(NAMED), 9)
        for name, like, tokens in (("fineweb-10b", "fineweb-1b", None), ("climb-10b", "climb-1b", 10e9), ("climb-20b", "climb-1b", 20e9)):
            self.assertEqual(NAMED[name], dataclasses.replace(NAMED[like], tokens=tokens))

    def test_a_part_of_a_data_set_ends_behind_its_characters(self):
        rows = ((str(i), {"text": "a" * 10}) for i in range(100))
        self.assertEqual(len(list(first_characters(rows, "text", 45))), 5)
        with self.assertRaisesRegex(Fault, "no text in field 'answer'"):
            list(conversations([("row", {"question": "?"})], ("question", "answer")))


if __name__ == "__main__":
    unittest.main()
