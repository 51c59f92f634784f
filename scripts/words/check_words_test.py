"""The check of words: what it finds, what it leaves, and that the tree holds to it."""

import contextlib
import io
import unittest
from pathlib import Path

import check_words
from folder_test_case import FolderTestCase

WORDS, FILES = check_words.read_list(check_words.LIST)


class WordsTest(FolderTestCase):
    def found(self, name, text):
        path = self.folder / name
        path.write_text(text)
        with contextlib.redirect_stdout(io.StringIO()) as said:
            code = check_words.main([str(path)])
        lines = [line.removeprefix(f"{path.resolve()}:") for line in said.getvalue().splitlines()]
        self.assertEqual(code, 1 if lines else 0)
        return lines

    def test_comments_messages_and_pages_are_read_and_code_is_not(self):
        source = '// Holds\n// working\n// weights.\nint products = f("products");  /* fine */\nauto t = "the working "\n    "weights";\n'
        lines = self.found("a.cpp", source)
        self.assertEqual([line.split(",")[0] for line in lines], ['2: found "working weights"', '5: found "working weights"'])
        page = "# Page\n\nUse `products` and docs/products/x.\n\n    quern products\n\nIts working\nweights.\n"
        self.assertEqual([line.split(",")[0] for line in self.found("a.md", page)], ['7: found "working weights"'])
        self.assertEqual(len(self.found("a.py", '"""The update is put off."""\nput_off = "codes"\n')), 1)
        self.assertEqual(len(self.found("a.toml", 'products = ["output"]  # in working weights\n')), 1)

    def test_an_ordinary_meaning_is_allowed(self):
        self.assertEqual(self.found("a.md", "Zipf's law, exit codes and what is wrong.\n"), [])
        self.assertEqual(len(self.found("a.md", "The law, the codes, and what is left.\n")), 3)

    def test_every_folder_of_the_tree_is_checked(self):
        for name in ("README.md", "CMakeLists.txt", "core/include/quern/run.h", "docs/decisions/0001-blas.md",
                     "plugins/device/cuda/products/own/gemm_wgmma.cuh", "frontends/cli/main.cpp", "tests/ranks_test.cpp",
                     "scripts/demo.sh", "configs/demo.toml", "cmake/QuernPlugin.cmake", "examples/README.md"):
            with self.subTest(name=name):
                self.assertIn(check_words.ROOT / name, FILES)

    def test_the_files_of_the_tree_have_none(self):
        self.assertEqual(check_words.check(FILES, WORDS), [])


if __name__ == "__main__":
    unittest.main()
