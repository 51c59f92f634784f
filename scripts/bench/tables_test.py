"""Tables of docs/performance: figures come from the raw steps, and pages that are stale are named, this tree's too."""

import contextlib
import io
import json
import sys
import unittest

import tables
from folder_test_case import FolderTestCase

RESULT = {
    "device": "Some|GPU", "quern": "0.1.0", "commit": "abc1234",
    "command": ["quern", "bench", "0.5b.toml", "--json", "x.json", "--set", "a=b c", "--commit=abc1234", "--steps", "3"],
    "micro_batch": 4, "sequence": 1000, "accumulation": 2, "step_seconds": [0.5, 0.25, 0.4], "sol": 0.4567, "mfu": 0,
    "device_bytes": 2**30, "start_seconds": 3.5, "ops": [{"op": "matmul"}],
}
PAGE = "# Page\n\n<!-- bench data/*.json -->\n<!-- end bench -->\n\n    <!-- bench shown/*.json -->\n"


class TablesTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.page = self.folder / "page.md"
        self.page.write_text(PAGE)
        (self.page.parent / "data").mkdir()

    def write(self, name, **changed):
        (self.page.parent / "data" / name).write_text(json.dumps(RESULT | changed))

    def run_script(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            return tables.main([str(argument) for argument in arguments]), said.getvalue()

    def test_a_page_is_renewed_once_and_then_stays(self):
        self.write("a.json")
        self.write("b.json", commit="def", command=["quern", "bench", "7b.toml"], step_seconds=[0.8])
        self.assertEqual(self.run_script("--check", self.page)[0], 1)
        self.assertEqual(self.page.read_text(), PAGE)
        for said in (f"{self.page}\n", ""):
            self.assertEqual(self.run_script(self.page), (0, said))
        self.assertEqual(self.run_script("--check", self.page), (0, ""))
        lines = self.page.read_text().splitlines()
        self.assertEqual(
            lines[5:7],
            ["| `0.5b.toml --set 'a=b c' --steps 3` | 4 x 2 | 20.0k (16.0k to 32.0k) | 3 | 45.7% | - | 1 GiB |",
             "| `7b.toml` | 4 x 2 | 10.0k (10.0k to 10.0k) | 1 | 45.7% | - | 1 GiB |"],
        )
        self.assertEqual(lines[8], "Some\\|GPU, quern 0.1.0 at commit `abc1234`: [a.json](data/a.json)")
        self.assertEqual(lines[10:13], ["Some\\|GPU, quern 0.1.0 at commit `def`: [b.json](data/b.json)", "<!-- end bench -->", ""])
        self.write("a.json", step_seconds=[0.1])
        code, said = self.run_script("--check", self.page)
        self.assertEqual((code, "page.md: its tables are not" in said), (1, True))

    def test_what_is_missing_in_a_raw_file_is_named(self):
        for changed, said in (
            ({"commit": ""}, "a.json: commit: found none"),
            ({"step_seconds": []}, "a.json: step_seconds: found none"),
            ({"step_seconds": [0]}, "a.json: step_seconds: found none"),
            ({"step_seconds": "x"}, 'a.json: step_seconds: found "x", expected a list'),
            ({"command": ["rm"]}, "a.json: command: found rm"),
            ({"device": 1}, "a.json: device: found 1, expected a text"),
        ):
            with self.subTest(changed=changed):
                self.write("a.json", **changed)
                code, message = self.run_script(self.page)
                self.assertEqual((code, said in message), (3, True), message)
                self.assertEqual(self.page.read_text(), PAGE)
        (self.page.parent / "data" / "a.json").unlink()
        self.assertIn("no raw file for a table", self.run_script(self.page)[1])

    def test_other_programs_are_beside_the_raw_files(self):
        peers = self.page.parent / "peers.json"
        self.page.write_text("<!-- peers peers.json -->\n<!-- end bench -->\n")
        self.write("a.json")
        self.write("b.json", step_seconds=[0.8])

        def renewed(**programs):
            peers.write_text(json.dumps({"title": "", "note": "", "models": {"7B": programs}}))
            return self.run_script(self.page)

        own = {"quern e4m3": "data/a.json", "quern bf16": "data/b.json"}
        self.assertEqual(renewed(**own, **{"LLMQ bf16": [9000, 12550]})[0], 0)
        lines = self.page.read_text().splitlines()
        self.assertEqual(lines[3], "| 7B, 4 x 2 | 20.0k |  | 10.0k |  | 9.00k to 12.6k |  |")
        self.assertIn("[a.json](data/a.json), [b.json](data/b.json)", lines[5])
        for speeds in ([], [0], 5):
            self.assertEqual(renewed(**own, **{"LLMQ bf16": speeds})[0], 3)
        self.write("b.json", micro_batch=8)
        self.assertIn("raw files of 2 settings", renewed(**own)[1])

    def test_sentences_say_what_the_raw_files_do(self):
        _, models, _ = tables.read_peers(tables.ROOT / "docs/performance/peers.json")
        small = models["0.5B, 32 x 16"]
        head, default = (
            f"{small[program][-1] / small['LLMQ e4m3'][-1]:.2f} times" for program in ("quern e4m3, head bf16", "quern e4m3")
        )
        fp8 = " ".join((tables.ROOT / "docs/performance/cuda-fp8.md").read_text().split())
        self.assertIn(f"quern is {head} as fast at 0.5B as LLMQ at its best; with the head in 8 bits, the default, {default}.", fp8)

    def test_the_pages_of_this_tree_say_what_their_files_do(self):
        self.assertEqual(self.run_script("--check"), (0, ""))


if __name__ == "__main__":
    unittest.main()
