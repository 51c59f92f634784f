"""`quern-tools`: every command has help, and words that it does not take are one line with quern's code for a config."""

import contextlib
import io
import re
import sys
import tomllib
import unittest
from pathlib import Path

import quern
from quern import command_line
from quern.base import fault
from quern.command_line import COMMANDS, Group

PACKAGE = Path(__file__).resolve().parents[1]


def names():
    for name, command in COMMANDS.items():
        yield from (f"{name} {kind}" for kind in command.commands) if isinstance(command, Group) else (name,)


class CommandLineTest(unittest.TestCase):
    def run_tool(self, *words):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(io.StringIO()) as said:
            code = command_line.main(words)
        return code, out.getvalue(), said.getvalue()

    def test_help_lists_every_command_and_each_has_its_own(self):
        for words in ((), ("--help",), ("-h",)):
            code, out, said = self.run_tool(*words)
            self.assertEqual((code, said), (0, ""))
            self.assertEqual(re.findall(r"^  ([a-z-]+) ", out, re.MULTILINE), list(COMMANDS))
        for name in names():
            with self.subTest(name=name):
                code, out, said = self.run_tool(*name.split(), "--help")
                self.assertEqual((code, said), (0, ""))
                self.assertTrue(out.startswith(f"usage: quern-tools {name} "), out)
                self.assertIn(f"\n    quern-tools {name} ", out, "an example")
        self.assertIn("usage: quern-tools plot COMMAND", self.run_tool("plot")[1])

    def test_version_says_where_it_runs_from(self):
        code, out, _ = self.run_tool("--version")
        self.assertEqual(code, 0)
        self.assertTrue(out.startswith(f"quern-tools {quern.__version__} from {Path(quern.__file__).parent}"), out)

    def test_the_version_is_that_of_quern(self):
        text = (PACKAGE.parents[1] / "CMakeLists.txt").read_text()
        self.assertEqual(re.search(r"project\(quern VERSION (\S+) ", text)[1], quern.__version__)

    def test_words_that_are_not_taken_are_one_line(self):
        for words, expected in (
            (("reprot",), 'quern-tools: unknown command: found "reprot", expected one of corpus, '),
            (("reprot",), "nearest name `report`"),
            (("plot", "x"), 'quern-tools plot: unknown command: found "x", expected one of loss, ab, scales, timeline; '),
            (("report",), "quern-tools report: the following arguments are required: RUN; see --help"),
            (("report", "a", "--ou", "b"), "quern-tools report: unrecognized arguments: --ou b"),
            (("report", ""), "found an empty path, expected a name"),
            (("plot", "scales", "a", "--layer", "x"), "--layer: found 'x', expected an integer of at least 0"),
            (("plot", "loss", "a", "--reference", "x=nan"), "found 'x=nan', expected LABEL=NUMBER"),
            (("check-export", "a", "b", "--sequence", "0"), "--sequence: found '0', expected an integer of at least 1"),
            (("check-export", "a", "b", "--sequence", "1", "--expect", "inf"), "found 'inf', expected a finite number"),
            (("tokenize", "-o", "x", "a"), "one of the arguments --tokenizer --train-bpe is required"),
            (("tokenize", "-o", "x", "a", "--train-bpe", "256"), "expected an integer from 257 to 1048576"),
            (("tokenize", "-o", "x", "a", "--train-bpe", "300", "--val-fraction", "1"), "a number from 0 to below 1"),
            (("tokenize", "-o", "x", "--train-bpe", "300"), "--dataset: name either input files or a dataset"),
            (("tokenize", "-o", "x", "a", "--train-bpe", "300", "--chat"), "--chat: takes an existing --tokenizer"),
            (("tokenize", "-o", "x", "a", "--train-bpe", "300", "--align", "8"), "--align: goes with --chat"),
        ):
            with self.subTest(words=words):
                code, out, said = self.run_tool(*words)
                self.assertEqual((code, out, said.count("\n")), (fault.CONFIG, "", 1), said)
                self.assertTrue(said.startswith("quern-tools: error: "), said)
                self.assertIn(expected, said)

    def test_options_and_texts_come_in_any_order(self):
        code, _, said = self.run_tool("plot", "loss", "-o", "x.png", "nowhere-a", "--x", "step", "nowhere-b")
        self.assertEqual(code, fault.INPUT)
        self.assertIn("nowhere-a", said)

    def test_no_module_is_named_like_one_of_pythons(self):
        own = {path.stem for path in PACKAGE.rglob("*.py")} - {"__init__", "__main__"}
        self.assertEqual(own & set(sys.stdlib_module_names), set())

    def test_packages_of_all_extras_are_named_where_they_are_missed(self):
        extras = tomllib.loads((PACKAGE / "pyproject.toml").read_text())["project"]["optional-dependencies"]
        imported = set(re.findall(r'importing\("(\w+)"\)', "".join(p.read_text() for p in PACKAGE.rglob("quern/**/*.py"))))
        wanted = {re.match(r"\w+", word)[0] for name, words in extras.items()
                  if name not in ("test", "cuda13") for word in words}  # which Python imports
        self.assertEqual(imported, wanted)


if __name__ == "__main__":
    unittest.main()
