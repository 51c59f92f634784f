"""Conversations: exactly the assistant's turns are learned, rows cut none when aligned, and lost tokens are counted."""

import contextlib
import io
import json
import sys
import unittest
from unittest import mock

import numpy as np
from tokenizers import Tokenizer, models, normalizers

from folder_test_case import FolderTestCase
from quern import command_line
from quern.tokens import chat_template, encoding, template_files, tokenizer_config
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
        self.said = said
        return json.loads((self.out / "meta.json").read_text()), [
            read_token_file(path) for name in ("train", "val") if (path := self.out / f"{name}.tok").exists()
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
        code, said = self.run_script(self.write_talks([TALKS[1][1:]] * 2), "--separator", encoding.TRAINED_SEPARATOR)
        self.assertEqual(code, 3)
        self.assertIn("talks.jsonl:1: the template puts the document separator", said)
        self.assertIn("--separator", said)

    def test_the_separator_is_one_that_the_template_does_not_write_inside(self):
        self.tokenizer.add_special_tokens(["<unk>"])
        self.tokenizer.save(str(self.folder / "tokenizer.json"))
        self.write_config(LLAMA2, unk_token="<unk>")
        meta, (train, val) = self.tokenized([TALKS[1][1:]] * 2)
        self.assertEqual(meta["separator_token"], self.tokenizer.token_to_id("<unk>"))
        self.assertEqual(meta["end_tokens"], [self.tokenizer.token_to_id(encoding.TRAINED_SEPARATOR)])
        self.assertEqual(len(self.conversations(train)[0][1]), 2)
        self.assertEqual(self.tokenized([TALKS[0]] * 2)[0]["separator_token"], 0)  # one turn each

    def test_aligned_rows_cut_no_conversation(self):
        talks = [talk("q" * (seed % 7), "a " * (3 * seed % 41)) for seed in range(60)]
        talks.append(talk("a " * 100, "b " * 100))  # longer than a row, and in val
        row = 96
        _, (train, val) = self.tokenized(talks, "--align", row, "--val-fraction", "0.1")
        _, (packed, packed_val) = self.tokenized(talks, "--val-fraction", "0.1")
        for token_file in train, val:
            self.assertEqual(token_file.tokens.size % row, 1)
            rows = token_file.tokens[:-1].reshape(-1, row)
            start = self.tokenizer.token_to_id("<|im_start|>")
            # Each row begins a conversation, or is the rest of one that is longer than a row.
            self.assertTrue(np.isin(rows[:, 0], [start, token_file.separator_token]).all())
        longer = self.conversations(packed)
        self.assertEqual(sorted(c for c in self.conversations(train) if c[0]), sorted(c for c in longer if len(c[0])))
        self.assertEqual(train.loss_mask.sum(), packed.loss_mask.sum())
        self.assertEqual(val.tokens[-1], val.separator_token)
        self.assertNotEqual(val.tokens[row - 1], val.separator_token)  # the longest comes first, and is cut
        meta, _ = self.tokenized(talks, "--align", row, "--val-fraction", "0.1")
        lost = packed_val.tokens.size - (val.tokens != val.separator_token).sum() - np.count_nonzero(
            packed_val.tokens == packed_val.separator_token)
        self.assertEqual(meta["counted"][f"conversations longer than {row} tokens, cut"], 1)
        self.assertEqual(meta["counted"]["tokens cut off"], lost + 1)  # and its separator
        self.assertEqual(meta["counted"]["of these, learned"], int(packed_val.loss_mask.sum() - val.loss_mask.sum()))

    def test_rows_are_packed_by_length_and_their_padding_is_stated(self):
        talks = [talk("q", "a " * (seed * 37 % 50)) for seed in range(300)]
        row = 128
        meta, (train, val) = self.tokenized(talks, "--align", row, "--val-fraction", "0.1")
        for name, token_file in (("train", train), ("val", val)):
            rows = token_file.tokens[:-1].reshape(-1, row) == token_file.separator_token
            padding = sum(int(np.argmin(ends[::-1])) for ends in rows) - len(rows)  # but for the end of the last conversation
            self.assertEqual(meta[name]["padding"], padding)
        needed = -(-(meta["train"]["tokens"] - meta["train"]["padding"]) // row)
        self.assertLessEqual(meta["train"]["tokens"] // row, 1.03 * needed)

    def test_many_conversations_split_by_what_they_say(self):
        talks = [talk(str(seed), "reply " + str(seed)) for seed in range(200)]

        def held_out(talks):
            _, (_, val) = self.tokenized(talks, "--val-fraction", "0.2")
            return {text for text, _ in self.conversations(val)}

        some = held_out(talks)
        self.assertEqual(some, held_out(talks[::-1]))
        self.assertAlmostEqual(len(some) / 200, 0.2, delta=0.1)

    def test_without_validation_all_is_trained_on(self):
        meta, (train,) = self.tokenized(TALKS, "--val-fraction", "0")
        self.assertEqual(len(self.conversations(train)), 4)
        self.assertNotIn("val", meta)
        self.tokenized(TALKS)
        self.assertTrue((self.out / "val.tok").exists())
        self.tokenized(TALKS, "--val-fraction", "0")
        self.assertFalse((self.out / "val.tok").exists())  # of other data
        self.assertEqual(self.tokenized(TALKS[:1], "--val-fraction", "0")[0]["train"]["documents"], 1)

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

    def test_unusable_data_and_templates_are_named_and_leave_no_files(self):
        good = TALKS[0]
        cases = [
            ([good, [{"role": "user"}]], CHATML, "talks.jsonl:2: no list of messages"),
            ([good, "text"], CHATML, "talks.jsonl:2: no list of messages"),
            ([[{"role": "user", "content": "a"}]] * 2, CHATML, "no message is the assistant's"),
            ([good] * 2, "{{ raise_exception('only users here') }}", "only users here"),
            ([good] * 2, "{{ messages[0].content + 1 }}", "does not take"),
            ([good] * 2, "{{ ().__class__.__bases__[0].__subclasses__() }}", "does not take"),  # no way out of it
            ([good] * 2, "{% if %}", "not a usable chat template"),
            ([good] * 2, "{% generation %}", "not a usable chat template"),
            ([good] * 2, None, "no chat_template"),
            ([good] * 2, "{% macro a() %}{{ a() }}{% endmacro %}{{ a() }}", "maximum recursion depth"),
            ([good] * 2, "{{ 'a' * 10 ** 11 }}", "out of memory"),
            ([good] * 2, "{{ messages[0].content * 5 * 10 ** 6 }}", "makes 80000000 characters"),
            ([good] * 2, "{{ " + "(" * 9999 + ")" * 9999 + " }}", "not a usable chat template"),
            ([good] * 2, "{{ '\\ud800' }}{% for m in messages %}{{ m.content }}{% endfor %}", "is not text"),
            ([good] * 2, HOSTILE_LOOP, "over 1 seconds for 64 KiB"),
            ([good] * 2, "{{ 7 ** (9 ** 9) }}", "over 1 seconds for 64 KiB"),
            ([good, json.loads("[" * 200 + "]" * 200)], CHATML, "talks.jsonl:2: no list of messages"),
            ([good, talk(json.loads("[" * 200 + "]" * 200), "b")], CHATML, "talks.jsonl:2: nested too deeply"),
            ([good, "[" * 99999], CHATML, "talks.jsonl:2: not usable JSON: found too many levels"),
            ([good], CHATML, "nothing in the val split; give more text or another --val-fraction, which may be 0"),
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
        self.assertIn("unknown kind of file: found .txt, expected .jsonl", said)
        for arguments in (["--align", "5"], ["--chat-template", "x"]):
            with contextlib.redirect_stderr(io.StringIO()):
                self.assertEqual(command_line.main(["tokenize", "a.txt", "--train-bpe", "300", "-o", "x", *arguments]), 2)

    def test_what_is_left_out_is_counted(self):
        alternate = (
            "{% for m in messages %}{% if (m.role == 'user') != (loop.index0 % 2 == 0) %}"
            "{{ raise_exception('roles must alternate') }}{% endif %}"
            "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
            "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
        )
        self.write_config(alternate)
        picture = [{"type": "image_url", "image_url": "x"}, {"type": "text", "text": "what?"}]
        talks = [TALKS[0], TALKS[0], talk("x", "y", system="no"), talk("x"), [], None, talk(picture, "y"), TALKS[2], TALKS[3],
                 talk("a \ufdd0", "b"), talk("a \\ufdd0", "b")]
        meta, files = self.tokenized(talks)
        self.assertEqual(meta["counted"], {
            "conversations left out: the template refuses them": 1,
            "conversations left out: no message is the assistant's": 3,
            "conversations left out: a message has content that is not text": 1,
            "conversations left out: a text has a noncharacter, U+FDD0 to U+FDD2": 2,
            "replies that are empty": 1,
        })
        self.assertIn("1 conversations left out: the template refuses them; the first: ", self.said)
        self.assertIn("talks.jsonl:3: the chat template of", self.said)
        self.assertIn("roles must alternate", self.said)
        self.assertEqual(sum(len(self.conversations(token_file)) for token_file in files), 4)

    def test_special_tokens_that_messages_spell_stay_text(self):
        tool = {"name": "f", "description": "returns <|im_end|>", "parameters": {"<|im_start|>": [1, "<|im_end|>"]}}
        self.write_config(
            "{% if tools %}{{ tools | tojson }}<|im_end|>{% endif %}{% for m in messages %}<|im_start|>{{ m.role }}\n"
            "{{ m.content }}{{ m.reasoning }}<|im_end|>\n{% endfor %}"
            "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
        )
        messages = [
            {"role": "user", "content": [{"type": "text", "text": "a <|im_end|>"}, {"type": "text", "text": "<|im_"}]},
            {"role": "assistant", "content": "<|endoftext|><|im_start|>", "reasoning": "<|im_end|> and <|im_end|>"},
        ]
        path = self.folder / "talks.jsonl"
        path.write_text((json.dumps({"messages": messages, "tools": [tool]}) + "\n") * 2)
        self.assertEqual(self.run_script(path)[0], 0)
        (text, (reply,)), = self.conversations(train := read_token_file(self.out / "train.tok"))
        self.assertIn('returns <|im_end|>", "parameters": {"<|im_start|>": [1, "<|im_end|>"]}', text)
        self.assertIn("a <|im_end|><|im_<|im_end|>\n", text)
        self.assertEqual(reply, "<|endoftext|><|im_start|><|im_end|> and <|im_end|><|im_end|>\n")
        count = {name: np.count_nonzero(train.tokens == self.tokenizer.token_to_id(name))
                 for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>")}
        self.assertEqual(count, {"<|im_start|>": 2, "<|im_end|>": 3, "<|endoftext|>": 1})
        self.assertEqual(train.vocab_size, self.tokenizer.get_vocab_size())
        meta = json.loads((self.out / "meta.json").read_text())
        self.assertEqual(meta["train"]["bytes"], len(text.encode()))
        self.assertEqual(meta["counted"], {
            "special tokens that messages spell, kept as text; --parse-special reads them as tokens": 16
        })
        code, said = self.run_script(path, "--parse-special", "--separator", "none")
        self.assertIn("16 special tokens that messages spell, read as tokens", said)
        train = read_token_file(self.out / "train.tok")
        self.assertEqual(np.count_nonzero(train.tokens == self.tokenizer.token_to_id("<|im_end|>")), 3 + 6 - 1)

    def test_texts_that_spell_special_tokens_have_the_tokens_of_the_whole_text(self):
        # A tokenizer that begins each part of a text with a space; a cut inside of a word would add one.
        vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "<", "|", "<|", "▁<|"]
        tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)},
                                         [("<", "|"), ("▁", "<|")], unk_token="<unk>", byte_fallback=True))
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>", "<|endoftext|>"])
        tokenizer.save(str(self.folder / "tokenizer.json"))
        self.write_config(
            "{% for m in messages %}<|im_start|>{{ m.role }}:{{ m.content }}{{ tools | string }}<|im_end|>{% endfor %}"
        )
        row = {"messages": talk("a <|im_end|>", "<|endoftext|> b"), "tools": [{"name": "é <|im_end|>"}]}
        path = self.folder / "talks.jsonl"
        path.write_text(json.dumps(row) + "\n")
        code, said = self.run_script(path, "--val-fraction", "0")
        self.assertEqual(code, 0, said)
        corpus = read_token_file(self.out / "train.tok")
        tokenizer.encode_special_tokens = True
        tools = str(row["tools"])
        spelled = [tokenizer.encode(text, add_special_tokens=False).ids
                   for text in ("user:a <|im_end|>" + tools, "assistant:<|endoftext|> b" + tools)]
        begin, end, separator = (tokenizer.token_to_id(name) for name in ("<|im_start|>", "<|im_end|>", "<|endoftext|>"))
        self.assertEqual(corpus.tokens.tolist(), [begin, *spelled[0], end, begin, *spelled[1], end, separator])
        self.assertIn(tokenizer.token_to_id("▁<|"), spelled[0])

    def test_special_tokens_across_borders_of_messages_stay_text(self):
        self.write_config("{% for m in messages %}{{ m.content }}{% endfor %}<|im_end|>")
        meta, (train, _) = self.tokenized([talk("a <|im_", "end|> b"), talk("a", "b")])
        self.assertEqual(np.count_nonzero(train.tokens == self.tokenizer.token_to_id("<|im_end|>")), 1)
        self.assertEqual(meta["train"]["bytes"], len("a <|im_end|> b<|im_end|>"))
        # But of a role the template makes the token.
        self.tokenizer.add_special_tokens(["<|user|>", "<|assistant|>"])
        self.tokenizer.save(str(self.folder / "tokenizer.json"))
        self.write_config("{% for m in messages %}<|{{ m.role }}|>{{ m.content }}<|im_end|>{% endfor %}")
        _, (train, _) = self.tokenized([talk("a", "b"), talk("a", "b")])
        self.assertEqual(np.count_nonzero(train.tokens == self.tokenizer.token_to_id("<|user|>")), 1)

    def test_tokens_that_only_the_config_states(self):
        stated = {"content": "<|call|>", "special": False, "lstrip": False}
        state = json.loads((self.folder / "tokenizer.json").read_text())
        end = self.tokenizer.token_to_id("<|im_end|>")
        for token in state["added_tokens"][1:]:
            state["model"]["vocab"][token["content"]] = token["id"]
        del state["added_tokens"][1:]
        (self.folder / "tokenizer.json").write_text(json.dumps(state))
        self.write_config(CHATML, eos_token={"content": "<|im_end|>"}, added_tokens_decoder={"9": stated}, bos_token=None)
        (self.folder / "special_tokens_map.json").write_text('{"bos_token": "<|im_start|>"}')
        meta, (train, _) = self.tokenized([talk("a <|im_end|> <|call|>", "b"), talk("a", "b")])
        self.assertEqual(meta["end_tokens"], [end])
        self.assertEqual(np.count_nonzero(train.tokens == end), 3)
        self.assertEqual(np.count_nonzero(train.tokens == meta["vocab_size"] - 1), 1)
        self.assertEqual(tokenizer_config.named_special_tokens(
            self.folder, {"extra_special_tokens": {"image_token": "<i>"}, "bos_token": None}),
            {"bos_token": "<|im_start|>", "image_token": "<i>"})
        for config in ({"added_tokens_decoder": [1]}, {"added_tokens_decoder": {"1": 2}}, {"extra_special_tokens": [{}]},
                       {"additional_special_tokens": [None, 3]}, {"bos_token": ""}):
            self.write_config(CHATML, **config)
            self.assertEqual(self.run_script(self.folder / "talks.jsonl")[0], 0, config)

    def test_pointers_of_git_lfs_and_byte_order_marks_beside_the_tokenizer(self):
        path = self.write_talks(TALKS)
        for name in ("tokenizer_config.json", "special_tokens_map.json", "generation_config.json", "chat_template.jinja"):
            with self.subTest(name=name):
                before = (self.folder / name).read_bytes() if (self.folder / name).exists() else b"{}"
                (self.folder / name).write_text("version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n")
                code, said = self.run_script(path)
                self.assertEqual((code, list(self.out.glob("*"))), (3, []))
                self.assertIn(f"{self.folder / name}: a git-lfs pointer", said)
                (self.folder / name).write_bytes(b"\xef\xbb\xbf" + (CHATML.encode() if name.endswith("jinja") else before))
        self.assertEqual(self.run_script(path)[0], 0)

    def test_templates_by_name_and_in_files(self):
        more = self.folder / "additional_chat_templates"
        more.mkdir()
        (self.folder / "chat_template.jinja").write_text("\ufeff" + CHATML)
        (more / "tool_use.jinja").write_text("{{ tools[0].name }}" + CHATML)
        (more / "rag.jinja").write_text("{{ documents[0].t }}" + CHATML)
        self.write_config("{{ of_the_config }}")
        row = {"messages": talk("a", "b"), "tools": [{"name": "get"}], "documents": [{"t": "doc"}]}
        path = self.folder / "talks.jsonl"
        for arguments, begin, templates in (
            ([], "get<|im_start|>", {"default", "tool_use", "rag"}), (["--chat-template", "rag"], "doc<|im_start|>", {"default"}),
            (["--chat-template", "default"], "<|im_start|>", {"default"}),
        ):
            path.write_text(json.dumps(row) + "\n")
            code, said = self.run_script(path, "--val-fraction", "0", *arguments)
            self.assertEqual(code, 0, said)
            text = self.tokenizer.decode(read_token_file(self.out / "train.tok").tokens.tolist(), skip_special_tokens=False)
            self.assertTrue(text.startswith(begin), text)
            self.assertEqual(template_files.read_templates(self.out, {}, None)[1].keys(), templates)
            written = json.loads((self.out / "tokenizer_config.json").read_text())["chat_template"]
            self.assertEqual(isinstance(written, list), len(templates) > 1)
        self.assertFalse((self.out / "additional_chat_templates").exists())
        self.assertIn("no chat template 'other'", self.run_script(path, "--chat-template", "other")[1])
        (self.folder / "chat_template.jinja").unlink()
        self.assertIn("no chat template 'default'", self.run_script(path)[1])
        (more / "rag.jinja").unlink(), (more / "tool_use.jinja").unlink()
        self.write_config([{"name": "../out", "template": CHATML}])
        self.assertIn("not a usable name of a template", self.run_script(path)[1])
        self.out = self.folder
        self.assertIn("not what the tokenizer in the output folder has", self.run_script(path, "--chat-template", "x.jinja")[1])

    def test_replies_without_a_token_at_their_end_end_in_the_separator(self):
        self.write_config(
            "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
            "{% if add_generation_prompt %}### assistant\n{% endif %}"
        )
        meta, (train, val) = self.tokenized([talk("a", "b", "c", "d"), talk("a", "b", "c")])
        self.assertEqual(meta["end_tokens"], [0])
        self.assertEqual(train.tokens[-1], 0)
        self.assertTrue(train.loss_mask[-1])
        self.assertFalse(val.loss_mask[-1])  # behind what the user said
        self.assertEqual(self.conversations(train)[0][1], ["b\n\n", "d\n\n"])
        self.assertEqual(meta["counted"], {
            "replies with no token at their end, inside conversations": 2,
            "conversations whose last reply ends in the separator, which is learned": 1,
        })
        meta, _ = self.tokenized([talk("a", "b"), talk("a", "b")], "--separator", "none")
        self.assertEqual(meta["end_tokens"], [])
        self.assertEqual(meta["counted"], {
            "conversations with no token at their end: the model does not learn to stop": 2
        })
        _, (train, _) = self.tokenized([talk("a", "b" * 99), talk("a", "b")], "--align", "16")
        self.assertNotIn(0, train.tokens[:16])  # the end of the cut conversation is not learned

    def test_the_template_and_the_end_tokens_go_with_the_tokens(self):
        generation = {"temperature": 0.6, "eos_token_id": 0}
        (self.folder / "generation_config.json").write_text(json.dumps(generation))
        (self.folder / "special_tokens_map.json").write_text('{"cls_token": "[C]"}')
        self.write_config("{{ own }}")
        template = self.folder / "used.jinja"
        template.write_text("\ufeff" + CHATML + "{# é {{ cls_token }} #}")
        end = self.tokenizer.token_to_id("<|im_end|>")
        meta, _ = self.tokenized(TALKS, "--chat-template", template)
        self.assertEqual(meta["end_tokens"], [end])
        self.assertIn("replies end with <|im_end|>\n", self.said)

        def read(name):
            return json.loads((self.out / name).read_text())

        self.assertEqual((self.out / "chat_template.jinja").read_text(), CHATML + "{# é {{ cls_token }} #}")
        self.assertEqual(read("tokenizer_config.json")["chat_template"], CHATML + "{# é {{ cls_token }} #}")
        self.assertEqual(read("generation_config.json"), {"temperature": 0.6, "eos_token_id": [end, 0]})
        self.assertEqual(read("special_tokens_map.json"), {"cls_token": "[C]"})
        named = [{"name": "default", "template": CHATML}, {"name": "tool_use", "template": CHATML}]
        self.write_config(named)
        self.tokenized(TALKS)
        self.assertEqual((self.out / "chat_template.jinja").read_text(), CHATML)
        self.assertEqual((self.out / "additional_chat_templates/tool_use.jinja").read_text(), CHATML)
        self.assertEqual(read("tokenizer_config.json")["chat_template"], named)

        # In the model's own folder its files stay.
        self.write_config(CHATML)
        before = {path.name: path.read_bytes() for path in self.folder.glob("*.json")}
        self.out = self.folder
        self.assertEqual(self.run_script(self.folder / "talks.jsonl")[0], 0)
        after = {path.name: path.read_bytes() for path in self.folder.glob("*.json") if path.name != "meta.json"}
        self.assertEqual(before, after)


if __name__ == "__main__":
    unittest.main()
