"""A test case with a folder of its own, removed with it."""

import tempfile
import unittest
from pathlib import Path


class FolderTestCase(unittest.TestCase):
    def setUp(self):
        folder = tempfile.TemporaryDirectory()
        self.addCleanup(folder.cleanup)
        self.folder = Path(folder.name)
