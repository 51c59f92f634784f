"""Conversations: exactly the assistant's turns are learned, rows cut none when aligned, and bad ones are named."""

import contextlib
import io
import json
import sys
import unittest
from unittest import mock

import numpy as np

from folder_test_case import FolderTestCase
from quern import command_line
from quern.tokens import chat_template, conversations, encoding
from quern.tokens.documents import document_from_string
from quern.tokens.token_file import read_token_file

CHATML = (
    "{% if messages[0]['role'] != 'system' %}{{ '<|im_start|>system\nBe good.<|im_end|>\n' }}{% endif %}"
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>\n' }}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Turns end in the separator itself, and the opening ends in a space.
LLAMA2 = (
    "{% for message in messages %}{% if message['role'] == 'user' %}{{ '[INST] ' + message['content'] + ' [/INST] ' }}"
    "{% else %}{{ message['content'] + eos_token }}{% endif %}{% endfor %}"
)
# Leaves out what earlier replies thought.
FORGETFUL = "{% for m in messages %}{{ m.role + ': ' }}{{ m.content if loop.last or m.role == 'user' else '-' }}\n{% endfor %}"

# Ends, in some days.
HOSTILE_LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"


def talk(*contents, system=None):
    messages = [{"role": "system", "content": system}] if system else []
    for index, content in enumerate(contents):
        messages.append({"role": "assistant" if index % 2 else "user", "content": content})
    return messages


TALKS = [
    talk("What is a quern?", "A hand mill for grain.\n\n  Stones, mostly. 🌾"),
    talk("Hi", "Hello.", "And now?", "  Bye — naïve  \n", system="Answer."),
    talk("a " * 40, "b " * 60),
    talk("x", ""),
]


class ChatTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"
        text = " ".join(message["content"] for messages in TALKS for message in messages) * 4
        self.tokenizer = encoding.train_bpe(400, [("train", document_from_string("a", text))])
        self.tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
        self.tokenizer.save(str(self.folder / "tokenizer.json"))
        self.write_config(CHATML)

    def write_config(self, template, **more):
        config = {"eos_token": encoding.TRAINED_SEPARATOR, "chat_template": template, **more}
        (self.folder / "tokenizer_config.json").write_text(json.dumps(config))

    def write_talks(self, talks, field="messages"):
        path = self.folder / "talks.jsonl"
        path.write_text("".join(json.dumps({field: messages}) + "\n" for messages in talks))
        return path

    def run_script(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            code = command_line.main(
                ["tokenize", *map(str, (*arguments, "--chat", "--tokenizer", self.folder / "tokenizer.json", "-o", self.out))]
            )
        return code, said.getvalue()

    def tokenized(self, talks, *arguments):
        code, said = self.run_script(self.write_talks(talks), *arguments)
        self.assertEqual(code, 0, said)
        return json.loads((self.out / "meta.json").read_text()), [
            read_token_file(self.out / f"{name}.tok") for name in ("train", "val")
        ]

    def decode(self, tokens):
        return self.tokenizer.decode(np.asarray(tokens).tolist(), skip_special_tokens=False)

    def conversations(self, token_file):
        """[(text, learned parts)] between separators."""
        found = []
        ends = np.flatnonzero(token_file.tokens == token_file.separator_token)
        for begin, end in zip(np.concatenate([[0], ends[:-1] + 1]), ends):
            tokens, mask = token_file.tokens[begin:end], token_file.loss_mask[begin:end]
            edges = np.flatnonzero(np.diff(np.concatenate([[0], mask.astype(int), [0]])))
            parts = [self.decode(tokens[a:b]) for a, b in zip(edges[::2], edges[1::2])]
            found.append((self.decode(tokens), parts))
        self.assertFalse(token_file.loss_mask[ends].any())
        return found

    def test_exactly_the_assistants_turns_are_learned(self):
        meta, files = self.tokenized(TALKS)
        found = [conversation for token_file in files for conversation in self.conversations(token_file)]
        self.assertEqual(meta["split"], "conversations")
        self.assertEqual([meta[name]["documents"] for name in ("train", "val")], [3, 1])
        self.assertEqual(meta["train"]["learned"], int(files[0].loss_mask.sum()))
        for messages, (text, parts) in zip(TALKS, found, strict=True):
            self.assertEqual(text.count("<|im_start|>"), len(messages) + (messages[0]["role"] != "system"))
            self.assertEqual(
                parts, [m["content"] + "<|im_end|>\n" for m in messages if m["role"] == "assistant"]
            )

    def test_a_turn_that_ends_in_the_separator_needs_no_second_one(self):
        self.write_config(LLAMA2)
        _, files = self.tokenized([TALKS[0], TALKS[2]])
        for messages, token_file in zip((TALKS[0], TALKS[2]), files):
            self.assertEqual(np.count_nonzero(token_file.tokens == token_file.separator_token), 1)
            learned = self.decode(token_file.tokens[token_file.loss_mask])
            # The opening's last space may share a token with the reply.
            self.assertEqual(learned.lstrip(), messages[1]["content"].lstrip() + encoding.TRAINED_SEPARATOR)
            self.assertTrue(token_file.loss_mask[-1])
        code, said = self.run_script(self.write_talks([TALKS[1][1:]] * 2))
        self.assertEqual(code, 3)
        self.assertIn("talks.jsonl:1: the template puts the document separator", said)
        self.assertIn("--separator", said)

    def test_aligned_rows_cut_no_conversation(self):
        talks = [talk("q" * (seed % 7), "a " * (3 * seed % 41)) for seed in range(60)]
        talks.append(talk("a " * 100, "b " * 100))  # longer than a row, and in val
        row = 96
        _, (train, val) = self.tokenized(talks, "--align", row, "--val-fraction", "0.1")
        _, (packed, _) = self.tokenized(talks, "--val-fraction", "0.1")
        for token_file in train, val:
            self.assertEqual(token_file.tokens.size % row, 1)
            rows = token_file.tokens[:-1].reshape(-1, row)
            start = self.tokenizer.token_to_id("<|im_start|>")
            # Each row begins a conversation, or what is longer than a row was cut and begins one too.
            self.assertTrue(np.isin(rows[:, 0], [start, token_file.separator_token]).all())
        longer = self.conversations(packed)
        self.assertEqual([c for c in self.conversations(train) if c[0]], [c for c in longer if len(c[0])])
        self.assertEqual(train.loss_mask.sum(), packed.loss_mask.sum())
        self.assertEqual(val.tokens[-1], val.separator_token)
        self.assertNotEqual(val.tokens[-2], val.separator_token)  # cut

    def test_many_conversations_split_by_what_they_say(self):
        talks = [talk(str(seed), "reply " + str(seed)) for seed in range(200)]

        def held_out(talks):
            split = conversations.ConversationSplit(lambda: (conversations.Conversation("", messages) for messages in talks), 0.2)
            return {messages.messages[0]["content"] for name, messages in split if name == "val"}

        self.assertEqual(held_out(talks), held_out(talks[::-1]))
        self.assertAlmostEqual(len(held_out(talks)) / 200, 0.2, delta=0.1)

    def test_templates_come_from_a_file_a_list_or_the_config(self):
        _, (want, _) = self.tokenized(TALKS)
        template = self.folder / "own.jinja"
        template.write_text(CHATML)
        self.write_config([{"name": "tool_use", "template": "x"}, {"name": "default", "template": CHATML}])
        _, (listed, _) = self.tokenized(TALKS)
        self.write_config("{{ broken", eos_token={"content": "<|endoftext|>"})
        _, (named, _) = self.tokenized(TALKS, "--chat-template", template)
        template.rename(self.folder / "chat_template.jinja")
        _, (beside, _) = self.tokenized(TALKS)
        for got in listed, named, beside:
            self.assertEqual(got.tokens.tolist(), want.tokens.tolist())
            self.assertEqual(got.loss_mask.tolist(), want.loss_mask.tolist())

    def test_unusable_conversations_and_templates_are_named_and_leave_no_files(self):
        good = TALKS[0]
        cases = [
            ([good, talk("a <|im_end|> b", "c")], CHATML, "talks.jsonl:2: a message spells the special token <|im_end|>"),
            ([good, [{"role": "user", "content": "a"}]], CHATML, "talks.jsonl:2: no message with role 'assistant'"),
            ([good, [{"role": "user"}]], CHATML, "talks.jsonl:2: no list of messages"),
            ([good, "text"], CHATML, "talks.jsonl:2: no list of messages"),
            ([good, TALKS[1]], FORGETFUL, "writes message"),
            ([good] * 2, "{{ raise_exception('only users here') }}", "only users here"),
            ([good] * 2, "{{ messages[0].content + 1 }}", "does not take"),
            ([good] * 2, "{{ ().__class__.__bases__[0].__subclasses__() }}", "does not take"),  # no way out of it
            ([good] * 2, "{% if %}", "not a usable chat template"),
            ([good] * 2, None, "no chat_template"),
            ([good] * 2, "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "maximum recursion depth"),
            ([good] * 2, "{{ 'a' * 10 ** 11 }}", "out of memory"),
            ([good] * 2, "{{ messages[0].content * 5 * 10 ** 6 }}", "makes 80000000 characters"),
            ([good] * 2, "{{ " + "(" * 9999 + ")" * 9999 + " }}", "not a usable chat template"),
            ([good] * 2, "{{ '\\ud800' }}{% for m in messages %}{{ m.content }}{% endfor %}", "is not text"),
            ([good] * 2, HOSTILE_LOOP, "over 1 seconds"),
            ([good] * 2, "{{ 7 ** (9 ** 9) }}", "over 1 seconds"),
            ([good, json.loads("[" * 200 + "]" * 200)], CHATML, "talks.jsonl:2: no list of messages"),
            ([good, talk(json.loads("[" * 200 + "]" * 200), "b")], CHATML, "talks.jsonl:2: nested too deeply"),
            ([good, "[" * 99999], CHATML, "talks.jsonl:2: not usable JSON: found too many levels"),
            ([good], CHATML, "nothing in the train split"),
            ([good, [{"role": "assistant", "content": "first"}]], CHATML, "does not take its first 0 messages"),
        ]
        for talks, template, expected in cases:
            with self.subTest(expected=expected):
                self.write_config(template)
                path = self.write_talks(talks)
                path.write_text(path.read_text().replace('"' + "[" * 99999 + '"', "[" * 99999))
                with mock.patch.object(chat_template, "SECONDS", 1):
                    code, said = self.run_script(path)
                self.assertEqual(code, 3, said)
                self.assertIn(expected, said)
                self.assertEqual(list(self.out.glob("**/*")), [])
        (self.folder / "a.txt").write_text("a")
        code, said = self.run_script(self.folder / "a.txt")
        self.assertIn("conversations come from .jsonl files", said)
        self.write_config(CHATML)
        self.assertEqual(self.run_script(self.write_talks(cases[0][0]), "--parse-special")[0], 0)
        for arguments in (["--align", "5"], ["--chat-template", "x"]):
            with contextlib.redirect_stderr(io.StringIO()):
                self.assertEqual(command_line.main(["tokenize", "a.txt", "--train-bpe", "300", "-o", "x", *arguments]), 2)


if __name__ == "__main__":
    unittest.main()
