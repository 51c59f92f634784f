"""A test case with a folder of its own, removed with it."""

import tempfile
import unittest
from pathlib import Path


TINY_LLAMA = """\
[model]
id = "llama"
[model.llama]
vocab_size = 64
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
max_position_embeddings = 32
"""


class FolderTestCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
