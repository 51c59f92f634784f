"""`cmake --install` puts the tools into a prefix that works from there alone, with a python3 that has what they need.

QUERN_BUILD_DIR names a configured build folder.
"""

import json
import os
import subprocess
import sys
import unittest
from pathlib import Path

from folder_test_case import FolderTestCase

PACKAGE = Path(__file__).resolve().parents[1]
BUILD = os.environ.get("QUERN_BUILD_DIR", PACKAGE.parents[1] / "build" / "release")
if not Path(BUILD, "cmake_install.cmake").is_file():
    print(f"skipped: {BUILD} is no build folder; QUERN_BUILD_DIR names one")
    sys.exit(77)

FAKE_QUERN = """#!/bin/sh
echo '{"prompt": 0, "tokens": [0]}'
"""


class InstalledTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.prefix = self.folder / "prefix"
        command = ["cmake", "--install", BUILD, "--component", "python", "--prefix", self.prefix]
        subprocess.run(command, check=True, capture_output=True)
        self.python("")

    def python(self, options):
        """Makes python3 the one of this test."""
        (self.folder / "bin").mkdir(exist_ok=True)
        (self.folder / "bin" / "python3").write_text(f'#!/bin/sh\nexec {sys.executable} {options} "$@"\n')
        (self.folder / "bin" / "python3").chmod(0o755)

    def run_tool(self, *words, code=0):
        environment = {"PATH": f"{self.folder / 'bin'}:/usr/bin:/bin", "HOME": str(self.folder)}
        command = [self.prefix / "bin" / "quern-tools", *words]
        result = subprocess.run(command, cwd=self.folder, env=environment, capture_output=True, text=True)
        self.assertEqual(result.returncode, code, result.stderr)
        return result.stdout if code == 0 else result.stderr

    def test_the_whole_package_is_there_and_nothing_else(self):
        def files(folder):
            return {path.relative_to(folder) for path in folder.rglob("*") if path.is_file()}

        own = {path for path in files(PACKAGE / "quern") if path.suffix != ".pyc"}
        self.assertEqual(files(self.prefix / "lib/quern/python/quern"), own)
        self.assertIn(f" from {self.prefix}/lib/quern/python/quern, ", self.run_tool("--version"))

    def test_text_becomes_token_files_and_tokens_become_text(self):
        (self.folder / "text.txt").write_text("a quern grinds grain\n\n" * 100)
        self.assertIn("unigram entropy", self.run_tool("tokenize", "text.txt", "--train-bpe", "300", "-o", "data"))
        (self.folder / "run.toml").write_text('[checkpoint]\ntokenizer = "data"\n')
        (self.prefix / "bin" / "quern").write_text(FAKE_QUERN)  # beside the command, and not on the path
        (self.prefix / "bin" / "quern").chmod(0o755)
        self.assertEqual(self.run_tool("generate", "run.toml", "a quern"), "a quern\n")

    def test_conversations_are_rendered_in_a_process_of_their_own(self):
        template = "{% for m in messages %}{{ m.role + ': ' + m.content + '\\n' }}{% endfor %}" \
            "{% if add_generation_prompt %}{{ 'assistant: ' }}{% endif %}"
        (self.folder / "template.jinja").write_text(template)
        (self.folder / "text.txt").write_text("user: a quern\nassistant: grinds grain\n\n" * 100)
        self.run_tool("tokenize", "text.txt", "--train-bpe", "300", "-o", "data")
        talk = {"messages": [{"role": "user", "content": "a quern"}, {"role": "assistant", "content": "grinds grain"}]}
        (self.folder / "talks.jsonl").write_text((json.dumps(talk) + "\n") * 2)
        said = self.run_tool("tokenize", "talks.jsonl", "--chat", "--tokenizer", "data/tokenizer.json",
                             "--chat-template", "template.jinja", "-o", "talks")
        self.assertIn("of them learned", said)

    def test_runs_are_plotted_and_reported(self):
        (self.folder / "log.jsonl").write_text('{"event": "step", "step": 1, "tokens": 64, "loss": 5.0, "lr": 0.1}\n')
        for words in (("plot", "loss", "log.jsonl", "-o", "a.png"), ("report", "log.jsonl", "-o", "a.html")):
            self.assertEqual(self.run_tool(*words), f"{words[-1]}\n")

    def test_a_python_without_what_they_need_says_how_to_install_it(self):
        self.python("-S")  # without site-packages
        said = self.run_tool("tokenize", "--help", code=3)
        self.assertRegex(said, r"quern-tools: error: numpy: not installed for \S+; install it with: \S+ -m pip install ")
        self.assertTrue(said.endswith(f"{self.prefix}/lib/quern/python\n"), said)
        self.assertIn("usage: quern-tools report", self.run_tool("report", "--help"))  # which needs nothing


if __name__ == "__main__":
    unittest.main()
