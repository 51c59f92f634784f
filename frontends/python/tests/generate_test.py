"""Text in and out of `quern generate`: its input, its output, and messages of failures."""

import contextlib
import io
import json
import sys
import unittest

from folder_test_case import FolderTestCase
from quern import command_line
from quern.tokens import encoding
from quern.models import generate
from quern.tokens.documents import document_from_string
from quern.tokens.token_file import TokenWriter
from tokenizers import processors

# Takes the place of quern: draws the tokens of the prompts' texts once more.
FAKE = """#!{python}
import json, sys
words = sys.argv[1:]
assert words[0] == "generate", words
prompts = [json.loads(line) for line in open(words[words.index("--prompts") + 1], encoding="utf-8")]
open({seen!r}, "w").write(json.dumps(words))
if "--stream" in words:
    for i, prompt in enumerate(prompts):
        for token in prompt["tokens"]:
            print(json.dumps({{"prompt": i, "token": token}}), flush=True)
for i, prompt in enumerate(prompts):
    print(json.dumps({{"prompt": i, "tokens": prompt["tokens"], "finish": "length"}}))
sys.exit({code})
"""


class GenerateTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        tokenizer = encoding.train_bpe(300, [("train", document_from_string("a", "a quern grinds grain " * 20))])
        tokenizer.save(str(self.folder / "tokenizer.json"))
        self.config = self.folder / "run.toml"
        self.config.write_text(f"[checkpoint]\ntokenizer = {json.dumps(str(self.folder))}\n")
        self.fake(0)

    def fake(self, code):
        self.program = self.folder / "quern"
        self.program.write_text(FAKE.format(python=sys.executable, seen=str(self.folder / "seen"), code=code))
        self.program.chmod(0o755)

    def run_script(self, *arguments, text=""):
        out, err = io.StringIO(), io.StringIO()
        stdin, sys.stdin = sys.stdin, io.TextIOWrapper(io.BytesIO(text.encode("utf-8", "surrogateescape")))
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                code = command_line.main(["generate", str(self.config), "--quern", str(self.program), *arguments])
        finally:
            sys.stdin = stdin
        return code, out.getvalue(), err.getvalue()

    def seen(self):
        return json.loads((self.folder / "seen").read_text())

    def test_one_text_grows_whole_characters_at_a_time(self):
        self.assertEqual(self.run_script("a naïve 🌾")[:2], (0, "a naïve 🌾a naïve 🌾\n"))
        self.assertIn("--stream", self.seen())
        parts = []
        tokenizer = encoding.load_tokenizer(str(self.folder / "tokenizer.json"))
        out = io.StringIO()
        out.write = parts.append
        growing = generate.Growing(tokenizer, tokenizer.encode("x").ids, out)
        for token in tokenizer.encode("🌾").ids:
            growing.add(token)
        growing.end()
        self.assertEqual([part for part in parts if part], ["x🌾", "\n"])

    def test_several_texts_from_words_or_lines(self):
        self.assertIn("--- 1\nabab\n--- 2\ngrain graingrain grain\n", self.run_script("ab", "grain grain")[1])
        self.assertIn("--- 2\ngrain graingrain grain\n", self.run_script(text="ab\ngrain grain\n")[1])
        self.assertNotIn("--stream", self.seen())

    def test_options_reach_the_program(self):
        self.run_script("a", "--max-tokens", "4", "--greedy", "--set", "device.id=cuda", "--top-p", "0.5", "b")
        seen = self.seen()
        for words in (["--max-tokens", "4"], ["--top-p", "0.5"], ["--set", "device.id=cuda"]):
            at = seen.index(words[0])
            self.assertEqual(seen[at : at + 2], words)
        self.assertIn("--greedy", seen)

    def test_prompts_can_be_written_for_training(self):
        path = self.folder / "prompts.jsonl"
        self.assertEqual(self.run_script("a quern", "grain", "--write", str(path))[0], 0)
        lines = [json.loads(line) for line in path.read_text().splitlines()]
        self.assertEqual([line["text"] for line in lines], ["a quern", "grain"])
        self.assertTrue(all(line["tokens"] for line in lines))
        self.assertFalse((self.folder / "seen").exists())

    def test_lines_may_end_as_on_windows_and_begin_with_a_mark(self):
        path = self.folder / "prompts.jsonl"
        for text in ("ab\r\ngrain \r\n", "\ufeffab\ngrain ", "ab\ngrain \r\n"):
            self.assertEqual(self.run_script("--write", str(path), text=text)[0], 0)
            self.assertEqual([json.loads(line)["text"] for line in path.read_text().splitlines()], ["ab", "grain "])
            path.unlink()

    def test_prompts_begin_as_the_training_data(self):
        tokenizer = encoding.load_tokenizer(self.folder / "tokenizer.json")
        tokenizer.add_special_tokens(["<s>"])
        begin = tokenizer.token_to_id("<s>")
        tokenizer.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", begin)])
        tokenizer.save(str(self.folder / "tokenizer.json"))
        bare = tokenizer.encode("a quern", add_special_tokens=False).ids

        def tokens(*more, text="a quern"):
            path = self.folder / "prompts.jsonl"
            self.assertEqual(self.run_script(text, "--write", str(path), *more)[0], 0)
            return json.loads(path.read_text())["tokens"]

        self.assertEqual(tokens(), [begin, *bare])
        self.assertEqual(tokens(text="<s>a quern"), [begin, *bare])  # once
        for first in ([begin, 5], [5, begin]):
            with TokenWriter(self.folder / "train.tok", 400) as out:
                out.append(first)
            for train in ("train.tok", "tr*.tok"):
                more = ["--set", f"data.tokens.train={json.dumps([str(self.folder / train)])}"]
                self.assertEqual(tokens(*more), [begin, *bare] if first[0] == begin else bare)
                self.assertEqual(tokens(*more, "--from", "elsewhere"), [begin, *bare])
        (self.folder / "train.tok").write_text("of another program")
        self.assertEqual(tokens(*more), [begin, *bare])

    def test_a_program_that_is_not_quern_or_ends_halfway_is_named(self):
        for text, code, expected in (
            ("#!/bin/sh\necho '{\"prompt\": 7, \"tokens\": []}'\n", 1, "unexpected result"),
            ("#!/bin/sh\necho words\n", 3, "quern: not JSON"),
            ("#!/bin/sh\necho '{\"prompt\": \"a\"}'\n", 3, 'quern: prompt: found "a", expected an integer'),
            ("#!/bin/sh\nprintf '{\"prompt\"'; exit 4\n", 4, ""),
            ("#!/bin/sh\nkill -9 $$\n", 137, ""),
            ("#!/none\n", 3, "quern: cannot be started"),
            ("", 3, "quern: cannot be started"),
        ):
            self.program.write_text(text)
            with self.subTest(text=text):
                got, _, said = self.run_script("a", "b")
                self.assertEqual((got, expected in said), (code, True), said)

    def test_failures_keep_their_code(self):
        self.fake(5)
        self.assertEqual(self.run_script("a")[0], 5)
        self.assertEqual(self.run_script(text="")[0], 3)
        self.assertEqual(self.run_script("")[0], 3)
        for code, _, said in (self.run_script(text="bad \udcff"), self.run_script("bad \udcff")):
            self.assertEqual(code, 3)
            self.assertIn("not UTF-8", said)
        code, _, said = self.run_script("a", "--tokenizer", str(self.folder / "none"))
        self.assertEqual(code, 3)
        self.assertIn("none", said)
        self.config.write_text("")
        self.assertIn("checkpoint.tokenizer", self.run_script("a")[2])


if __name__ == "__main__":
    unittest.main()
