"""Tokenizing: nothing of the text is lost, pieces change no token, splits are stable, errors are clear."""

import contextlib
import fcntl
import io
import json
import math
import os
import random
import resource
import shutil
import signal
import subprocess
import sys
import time
import unittest

import numpy as np
from folder_test_case import FolderTestCase
from quern import command_line
from quern.tokens import encoding
from quern.tokens.documents import MANY_DOCUMENTS, Split, document_from_string
from quern.tokens.token_file import read_token_file
from tokenizers import Tokenizer, pre_tokenizers, processors

SEPARATOR = "<|endoftext|>"


def prose(paragraphs, seed=0):
    """Text with hard-wrapped paragraphs, odd spacing, digits, quotes and letters beyond ASCII."""
    pick = random.Random(seed)
    words = "the naïve quern ground 1805 corn; “fine” she's 麦粉 -- _and_ said.\n don't \t  flour, 🌾 mill".split(" ")
    return "".join(
        " ".join(pick.choices(words, k=pick.randint(1, 60))) + pick.choice(["\n\n", "\n\n\n", "\r\n\r\n", "\n \n  "])
        for _ in range(paragraphs)
    )


class TokenizeTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.out = self.folder / "out"

    def tokenize(self, *arguments):
        """(exit code, what it said)"""
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            code = command_line.main(["tokenize", *map(str, arguments), "-o", str(self.out)])
        return code, said.getvalue()

    def tokenized(self, *arguments):
        code, said = self.tokenize(*arguments)
        self.assertEqual(code, 0, said)
        self.said = said
        meta = json.loads((self.out / "meta.json").read_text())
        return meta, {path.stem: read_token_file(path) for path in self.out.glob("*.tok")}

    def documents(self, token_file):
        """The texts between separators."""
        tokenizer = Tokenizer.from_file(str(self.out / "tokenizer.json"))
        ends = np.flatnonzero(token_file.tokens == token_file.separator_token)
        self.assertEqual(ends[-1], token_file.tokens.size - 1)
        parts = np.split(token_file.tokens, ends + 1)[:-1]
        return [tokenizer.decode(part[:-1].tolist(), skip_special_tokens=False) for part in parts]

    def write_json_lines(self, texts, field="text"):
        path = self.folder / "corpus.jsonl"
        path.write_text("".join(json.dumps({field: text}) + "\n" for text in texts))
        return path

    def test_text_files_come_back_whole_and_split_at_a_paragraph(self):
        texts = [prose(400, seed) for seed in range(3)]
        (self.folder / "books").mkdir()
        for index, text in enumerate(texts):
            (self.folder / "books" / f"{index}.txt").write_text(text, newline="")
        meta, files = self.tokenized(self.folder / "books", "--train-bpe", "500")
        trains, vals = self.documents(files["train"]), self.documents(files["val"])
        for text, train, val in zip(texts, trains, vals, strict=True):
            self.assertEqual(train + val, text)
            self.assertRegex(train, r"\n\s*\n$")
            self.assertAlmostEqual(len(val.encode()) / len(text.encode()), 0.05, delta=0.01)
        self.assertEqual(meta["split"], "blocks")
        self.assertEqual(meta["train"]["tokens"], files["train"].tokens.size)
        self.assertEqual(meta["train"]["bytes"] + meta["val"]["bytes"], sum(len(t.encode()) for t in texts))

    def test_pieces_encode_into_the_tokens_of_the_whole(self):
        text = prose(3000)
        self.assertGreater(len(text), 4 * encoding.PIECE_CHARACTERS)
        split = [("train", document_from_string("a", text))]
        qwen = encoding.train_bpe(400, split)
        gpt2 = Tokenizer.from_str(qwen.to_str())
        gpt2.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
        for name, tokenizer in ("qwen", qwen), ("gpt2", gpt2):
            with self.subTest(words=name):
                pieces = list(encoding.split_into_pieces([text], tokenizer.pre_tokenizer))
                self.assertGreater(len(pieces), 4)
                self.assertLess(max(map(len, pieces)), encoding.PIECE_CHARACTERS + encoding.LOOK_AHEAD)
                tokens = np.concatenate([tokens for *_, tokens in encoding.encode(tokenizer, split, -1)])
                self.assertEqual(tokens.tolist(), tokenizer.encode(text).ids)
                self.assertEqual(tokenizer.decode(tokens.tolist()), text)

    def test_text_without_any_break_is_still_cut_and_comes_back(self):
        text = "麦" * (2 * encoding.PIECE_CHARACTERS)
        tokenizer = encoding.train_bpe(260, [("train", document_from_string("a", "麦 corn"))])
        for pre_tokenizer in (tokenizer.pre_tokenizer, None):
            pieces = list(encoding.split_into_pieces([text], pre_tokenizer))
            self.assertEqual("".join(pieces), text)
            self.assertEqual(len(pieces), 2)

    def test_many_documents_split_whole_by_content_whatever_their_order(self):
        texts = [prose(1, seed) for seed in range(2 * MANY_DOCUMENTS)]

        def held_out(texts):
            split = Split(lambda: (document_from_string("", text) for text in texts), 0.2)
            self.assertEqual(split.mode, "documents")
            return {"".join(document.text()) for name, document in split if name == "val"}

        self.assertEqual(held_out(texts), held_out(texts[::-1]))
        meta, files = self.tokenized(
            self.write_json_lines(texts, "body"), "--text-field", "body", "--train-bpe", "300", "--val-fraction", "0.2"
        )
        self.assertEqual(set(self.documents(files["val"])), held_out(texts))
        self.assertEqual(sorted(self.documents(files["train"]) + self.documents(files["val"])), sorted(texts))
        self.assertAlmostEqual(meta["val"]["documents"] / len(texts), 0.2, delta=0.1)

    def test_few_short_documents_are_held_out_whole(self):
        for count, held_out in ((2, 1), (5, 1), (50, 2), (99, 5)):
            texts = [f"Question {seed}: where is the flour? In the mill." for seed in range(count)]
            meta, files = self.tokenized(self.write_json_lines(texts), "--train-bpe", "300")
            with self.subTest(count=count):
                self.assertEqual(len(self.documents(files["val"])), held_out)
                self.assertEqual(sorted(self.documents(files["train"]) + self.documents(files["val"])), sorted(texts))
                self.assertEqual((meta["split"], meta["counted"]), ("documents", {}))
        _, again = self.tokenized(self.write_json_lines(texts[::-1]), "--train-bpe", "300")
        self.assertEqual(set(self.documents(again["val"])), set(self.documents(files["val"])))
        meta, files = self.tokenized(self.write_json_lines(texts), "--train-bpe", "300", "--val-fraction", "0")
        self.assertEqual(list(files), ["train"])
        self.assertEqual(self.documents(files["train"]), texts)
        self.assertNotIn("val", meta)
        self.assertFalse((self.out / "val.tok").exists())

    def test_a_single_document_is_cut_between_words(self):
        meta, files = self.tokenized(self.write_json_lines(["flour and corn " * 20]), "--train-bpe", "300")
        self.assertRegex(self.documents(files["val"])[0], "^(flour|and|corn) ")
        self.assertEqual(meta["counted"], {"documents cut in two, whose ends are held out": 1})
        _, files = self.tokenized(self.write_json_lines(["only"]), "--train-bpe", "300", "--val-fraction", "0")
        self.assertEqual(self.documents(files["train"]), ["only"])

    def test_byte_order_marks_and_empty_documents_are_left_out_and_counted(self):
        (self.folder / "texts").mkdir()
        for name, text in ("a", "\ufeffcorn and \ufeff flour"), ("b", "\ufeff"), ("c", ""), ("d", "rye\r\n"):
            (self.folder / "texts" / f"{name}.txt").write_text(text, encoding="utf-8", newline="")
        (self.folder / "texts" / "e.jsonl").write_text('\ufeff{"text": "\ufeffoats"}\n{"text": ""}\n', encoding="utf-8")
        meta, files = self.tokenized(self.folder / "texts", "--train-bpe", "300", "--val-fraction", "0")
        self.assertEqual(self.documents(files["train"]), ["corn and \ufeff flour", "rye\r\n", "oats"])
        self.assertEqual(meta["counted"], {
            "byte-order marks left out, at the beginning of documents": 3, "empty documents left out": 3})
        self.assertIn("3 empty documents left out; the first: ", self.said)

    def test_lines_end_as_on_any_system(self):
        rows = ['{"text": "corn"}', '{"text": "rye\\r\\n"}', '', '{"text": "oats"}']
        for ends in "\n", "\r\n", "\r":
            with self.subTest(ends=ends):
                path = self.folder / "rows.jsonl"
                path.write_text(ends.join(rows), newline="")
                _, files = self.tokenized(path, "--train-bpe", "300", "--val-fraction", "0")
                self.assertEqual(self.documents(files["train"]), ["corn", "rye\r\n", "oats"])
                path.write_text(ends.join([*rows, "no row"]), newline="")
                self.assertIn("rows.jsonl:5: not JSON", self.tokenize(path, "--train-bpe", "300")[1])

    def test_what_is_passed_over_in_folders_is_counted(self):
        place, elsewhere = self.folder / "texts", self.folder / "elsewhere"
        for folder in place, elsewhere, place / "inner":
            folder.mkdir()
        (place / "a.txt").write_text("corn")
        (place / "inner" / "B.TXT").write_text("rye")
        (elsewhere / "c.txt").write_text("oats")
        (place / "linked").symlink_to(elsewhere)
        (elsewhere / "back").symlink_to(place)
        for name in ("d.md", "inner/e.md", "f.json", "g.jsonl.gz", "README"):
            (place / name).write_text("{}")
        for name in (".git/x.txt", ".hidden.txt", "inner/.y.jsonl", ".git/deeper/z.txt"):
            (place / name).parent.mkdir(exist_ok=True)
            (place / name).write_text("never read")
        meta, files = self.tokenized(place, "--train-bpe", "300", "--val-fraction", "0")
        self.assertEqual(self.documents(files["train"]), ["corn", "rye", "oats"])
        kinds = ".txt, .jsonl, .json, .parquet"
        self.assertEqual(meta["counted"], {
            f"files passed over, which are of another kind ({kind}) than {kinds.replace('.json, ', '')}": count
            for kind, count in ((".md", 2), (".json", 1), (".gz", 1), ("no suffix", 1))
        } | {"hidden files and folders passed over, whose names begin with a dot": 3})
        meta, files = self.tokenized(place / ".hidden.txt", "--train-bpe", "300", "--val-fraction", "0")
        self.assertEqual(self.documents(files["train"]), ["never read"])
        code, said = self.tokenize(elsewhere, place / "d.md", "--train-bpe", "300")
        self.assertIn("unknown kind of file: found .md", said)

    def test_documents_begin_as_the_tokenizer_begins_texts(self):
        tokenizer = encoding.train_bpe(300, [("train", document_from_string("a", prose(9)))])
        tokenizer.add_special_tokens(["<s>", "</s>"])
        begin, end = (tokenizer.token_to_id(token) for token in ("<s>", "</s>"))
        path, config = self.folder / "tokenizer.json", self.folder / "tokenizer_config.json"
        texts = [prose(1, seed) for seed in range(40)] + [prose(400)]
        for template, settings, expected in (
            ("<s> $A", {}, [begin]),
            ("<s> $A </s>", {}, [begin]),  # what ends a document is the separator's business
            ("$A </s>", {}, []),
            (None, {}, []),
            (None, {"bos_token": {"content": "<s>"}, "add_bos_token": True}, [begin]),
            ("<s> $A", {"bos_token": "<s>", "add_bos_token": False}, []),
        ):
            if template:
                tokenizer.post_processor = processors.TemplateProcessing(
                    single=template, pair=f"{template} $B", special_tokens=[("<s>", begin), ("</s>", end)])
            else:
                tokenizer.post_processor = processors.ByteLevel()
            tokenizer.save(str(path))
            config.write_text(json.dumps(settings))
            meta, files = self.tokenized(self.write_json_lines(texts), "--tokenizer", path, "--separator", SEPARATOR)
            with self.subTest(template=template, settings=settings):
                self.assertEqual(meta["begin_tokens"], expected)
                for token_file in files.values():
                    ends = np.flatnonzero(token_file.tokens == 0)
                    first = token_file.tokens[np.concatenate([[0], ends[:-1] + 1])]
                    self.assertEqual(bool((first == begin).all()), bool(expected))
                    self.assertEqual(np.count_nonzero(token_file.tokens == begin), len(ends) * len(expected))
                self.assertEqual(sorted(text.removeprefix("<s>") for name in files for text in self.documents(files[name])),
                                 sorted(texts))

    def test_a_tokenizer_is_named_by_its_file_or_its_folder(self):
        path = self.write_json_lines([prose(50)])
        self.tokenized(path, "--train-bpe", "300")
        folder = self.out.rename(self.folder / "tokenizer")
        made = []
        for tokenizer in folder, folder / "tokenizer.json":
            self.tokenized(path, "--tokenizer", tokenizer)
            made.append({file.name: file.read_bytes() for file in self.out.iterdir()})
            shutil.rmtree(self.out)
        self.assertEqual(made[0], made[1])
        code, said = self.tokenize(path, "--tokenizer", self.folder)
        self.assertEqual(code, 3)
        self.assertIn(f"{self.folder / 'tokenizer.json'}: cannot be read: found No such file", said)

    def test_pointers_of_git_lfs_are_called_that(self):
        pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 12\n"
        for name in ("a.txt", "a.jsonl", "tokenizer.json"):
            (self.folder / name).write_text(pointer)
        (self.folder / "b.txt").write_text("corn")
        for arguments in ("a.txt", "--train-bpe", "300"), ("a.jsonl", "--train-bpe", "300"), ("b.txt", "--tokenizer", self.folder / "tokenizer.json"):
            code, said = self.tokenize(self.folder / arguments[0], *arguments[1:])
            self.assertEqual(code, 3)
            self.assertIn("a git-lfs pointer, not the file itself; fetch the file with `git lfs pull`", said)

    def test_what_a_killed_run_left_is_removed_and_what_a_living_one_writes_is_not(self):
        self.out.mkdir()
        for name in (".train.tok.partial-7", ".val.tok.partial-8", ".meta.json.partial-9", ".mine.partial-7"):
            (self.out / name).write_text("x")
        path = self.write_json_lines([prose(50)])
        with open(self.out / ".train.tok.partial-5", "wb") as living:
            fcntl.flock(living, fcntl.LOCK_EX)
            self.tokenized(path, "--train-bpe", "300", "--val-fraction", "0")
            self.assertEqual({path.name for path in self.out.glob(".*")}, {".mine.partial-7", ".train.tok.partial-5"})
        self.tokenized(path, "--train-bpe", "300")
        self.assertEqual({path.name for path in self.out.glob(".*")}, {".mine.partial-7"})

    def test_two_at_the_same_time_do_not_mix_their_files(self):
        path = self.write_json_lines([prose(50)])
        self.tokenized(path, "--train-bpe", "300")
        before = {file.name: file.read_bytes() for file in self.out.iterdir()}
        other = os.open(self.out, os.O_RDONLY)
        self.addCleanup(os.close, other)
        fcntl.flock(other, fcntl.LOCK_EX)
        code, said = self.tokenize(path, "--train-bpe", "290")
        self.assertEqual(code, 4)
        self.assertIn("out: another tokenize writes there", said)
        self.assertEqual({file.name: file.read_bytes() for file in self.out.iterdir()}, before)
        fcntl.flock(other, fcntl.LOCK_UN)
        self.tokenized(path, "--train-bpe", "290")

    def test_a_run_that_is_told_to_end_leaves_nothing(self):
        self.tokenized(self.write_json_lines([prose(50)]), "--train-bpe", "300")
        tokenizer = (self.out / "tokenizer.json").rename(self.folder / "tokenizer.json")
        shutil.rmtree(self.out)
        path = self.folder / "large.jsonl"
        path.write_text('{"text": "corn and flour, flour and corn, by the mill"}\n' * 600000)  # some ten seconds
        command = [sys.executable, "-m", "quern", "tokenize", path, "--tokenizer", tokenizer, "-o", self.out]
        for number, code in (signal.SIGTERM, 143), (signal.SIGINT, 130), (signal.SIGHUP, 129):
            with subprocess.Popen(command, stderr=subprocess.DEVNULL) as process:
                while process.poll() is None and not list(self.out.glob(".train.tok.partial-*")):
                    time.sleep(0.02)
                process.send_signal(number)
                self.assertEqual(process.wait(60), code)
            self.assertEqual(list(self.out.iterdir()), [])

    def test_an_existing_tokenizer_gives_the_same_files(self):
        path = self.write_json_lines([prose(50)])
        meta, _ = self.tokenized(path, "--train-bpe", "300")
        first = (self.out / "train.tok").read_bytes()
        tokenizer = (self.out / "tokenizer.json").rename(self.folder / "tokenizer.json")
        again, _ = self.tokenized(path, "--tokenizer", tokenizer)
        meta["files"].pop("tokenizer_config.json")  # none is beside this tokenizer
        self.assertEqual(again, meta)
        self.assertFalse((self.out / "tokenizer_config.json").exists())
        self.assertEqual((self.out / "train.tok").read_bytes(), first)
        self.assertEqual((self.out / "tokenizer.json").read_text(), tokenizer.read_text())

    def test_a_separator_spelled_in_the_text_is_text(self):
        text = f"corn {SEPARATOR} flour\n\n" * 40
        path = self.write_json_lines([text])
        meta, files = self.tokenized(path, "--train-bpe", "300")
        self.assertEqual("".join(self.documents(files["train"]) + self.documents(files["val"])), text)
        what = "special tokens that documents spell, "
        self.assertEqual(meta["counted"][f"{what}kept as text; --parse-special reads them as tokens"], 40)
        meta, files = self.tokenized(path, "--train-bpe", "300", "--parse-special")
        self.assertEqual(meta["counted"][f"{what}read as tokens"], 40)
        self.assertGreater(np.count_nonzero(files["train"].tokens == 0), 30)

    def test_entropies_are_those_of_the_token_frequencies(self):
        meta, files = self.tokenized(self.write_json_lines([prose(300)]), "--train-bpe", "300")
        train, val = (np.bincount(files[name].tokens, minlength=300) for name in ("train", "val"))
        p, q = val / val.sum(), (train + 1) / (train + 1).sum()
        entropy = -sum(a * math.log(a) for a in p if a)
        cross_entropy = -sum(a * math.log(b) for a, b in zip(p, q))
        self.assertAlmostEqual(meta["val_unigram_entropy"], entropy, places=9)
        self.assertAlmostEqual(meta["val_unigram_cross_entropy"], cross_entropy, places=9)

    def test_unusable_inputs_are_named_and_leave_no_files(self):
        (self.folder / "latin1.txt").write_bytes(b"caf\xe9 " * 100)
        (self.folder / "bad.jsonl").write_text('{"text": "a"}\n{"text": \n')
        (self.folder / "field.jsonl").write_text('{"body": "a"}\n')
        (self.folder / "empty.txt").write_text("")
        (self.folder / "a.txt").write_text(prose(10))
        (self.folder / "tokenizer.json").write_text("{}")
        bpe = ("--train-bpe", "300")
        for arguments, expected in (
            ((self.folder / "latin1.txt", *bpe), "latin1.txt: not UTF-8"),
            ((self.folder / "bad.jsonl", *bpe), "bad.jsonl:2: not JSON"),
            ((self.folder / "field.jsonl", *bpe), "no text in field 'text': found ['body']"),
            ((self.folder / "empty.txt", *bpe), "nothing in the train split"),
            ((self.folder / "none.txt", *bpe), "none.txt: no such file"),
            ((self.folder / "a.csv", *bpe), "unknown kind of file"),
            ((self.folder / "a.txt", "--tokenizer", self.folder / "tokenizer.json"), "not a usable tokenizer.json"),
            ((self.folder / "a.txt", *bpe, "--separator", "<eod>"), "no <eod>"),
        ):
            with self.subTest(expected=expected):
                code, said = self.tokenize(*arguments)
                self.assertEqual(code, 3, said)
                self.assertIn(expected, said)
                self.assertEqual(list(self.out.glob("**/*")), [])

    def test_only_what_an_earlier_tokenize_made_is_replaced(self):
        arguments = self.write_json_lines([prose(50)]), "--train-bpe", "300"
        names = "train.tok", "val.tok", "tokenizer.json", "tokenizer_config.json", "meta.json"
        for name in names:
            with self.subTest(foreign=name):
                self.out.mkdir()
                (self.out / name).write_text('{"model": "mine"}')
                code, said = self.tokenize(*arguments)
                self.assertEqual(code, 4, said)
                self.assertIn(f"{name}: is there already", said)
                self.assertEqual([path.read_text() for path in self.out.iterdir()], ['{"model": "mine"}'])
                (self.out / name).unlink()
                self.out.rmdir()
        self.tokenized(*arguments)
        self.tokenized(*arguments)
        for name in names:
            with self.subTest(changed=name):
                made = (self.out / name).read_bytes()
                (self.out / name).write_bytes(b"changed" + made[7:])
                self.assertIn("is there already", self.tokenize(*arguments)[1])
                self.assertTrue((self.out / name).read_bytes().startswith(b"changed"))
                (self.out / name).write_bytes(made)
        (self.out / "meta.json").unlink()
        (self.out / "meta.json").symlink_to("nowhere")
        self.assertIn("is there already", self.tokenize(*arguments)[1])

    def test_a_tokenizer_may_get_its_tokens_beside_it(self):
        path = self.write_json_lines([prose(50)])
        self.tokenized(path, "--train-bpe", "300")
        for name in ("meta.json", "train.tok", "val.tok"):
            (self.out / name).unlink()
        for _ in range(2):
            meta, _ = self.tokenized(path, "--tokenizer", self.out / "tokenizer.json")
            self.assertEqual(len(meta["files"]), 4)

    def test_a_fault_leaves_what_an_earlier_tokenize_made(self):
        self.tokenized(self.write_json_lines([prose(50)]), "--train-bpe", "300")
        before = {path: path.read_bytes() for path in self.out.iterdir()}
        (self.folder / "bad.jsonl").write_text(json.dumps({"text": prose(9)}) + "\n{\n")
        self.assertEqual(self.tokenize(self.folder / "bad.jsonl", "--tokenizer", self.out / "tokenizer.json")[0], 3)
        self.assertEqual({path: path.read_bytes() for path in self.out.iterdir()}, before)

    def test_hostile_tokenizers_and_lines_are_refused(self):
        self.tokenized(self.write_json_lines([prose(50)]), "--train-bpe", "300")
        good = json.loads((self.out / "tokenizer.json").read_text())
        nested = self.folder / "nested.jsonl"
        nested.write_text('{"text": ' + "[" * 100000 + "\n")
        said = self.tokenize(nested, "--train-bpe", "300")[1]
        self.assertIn("nested.jsonl:1: not usable JSON: found too many levels", said)
        path, last = self.folder / "tokenizer.json", max(good["model"]["vocab"], key=good["model"]["vocab"].get)
        for vocabulary, expected in (
            ({**good["model"]["vocab"], last: 2**31}, "unusable vocabulary: found ids up to 2147483648"),
            ({**good["model"]["vocab"], last: -1}, "not a usable tokenizer.json"),
            ({}, "unusable vocabulary: found no tokens"),
        ):
            model = good["model"] | {"vocab": vocabulary, "merges": []}
            path.write_text(json.dumps(good | {"model": model, "added_tokens": []}))
            with self.subTest(expected=expected):
                code, said = self.tokenize(self.folder / "corpus.jsonl", "--tokenizer", path)
                self.assertEqual(code, 3, said)
                self.assertIn(f"{path}: {expected}", said)
        path.write_text("[" * 100000)
        said = self.tokenize(self.folder / "corpus.jsonl", "--tokenizer", path)[1]
        self.assertIn("not a usable tokenizer.json", said)

    def test_memory_goes_by_the_tokens_seen_and_not_by_the_largest_id(self):
        path = self.write_json_lines([prose(50)])
        self.tokenized(path, "--train-bpe", "300")
        tokenizer = json.loads((self.out / "tokenizer.json").read_text())
        last = max(tokenizer["model"]["vocab"], key=tokenizer["model"]["vocab"].get)
        tokenizer["model"]["vocab"][last] = 2**31 - 2
        (self.folder / "tokenizer.json").write_text(json.dumps(tokenizer))
        command = [sys.executable, "-m", "quern", "tokenize", path, "--tokenizer", self.folder / "tokenizer.json"]

        def limit_memory():
            resource.setrlimit(resource.RLIMIT_DATA, (2 << 30, 2 << 30))

        result = subprocess.run([*command, "-o", self.out], capture_output=True, text=True, preexec_fn=limit_memory)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("vocabulary 2,147,483,647", result.stdout)

    def test_the_command_runs_as_a_script(self):
        command = [sys.executable, "-m", "quern", "tokenize", self.write_json_lines([prose(50)]), "--train-bpe", "300"]
        result = subprocess.run([*command, "-o", self.out], capture_output=True, text=True)
        self.assertEqual(result.returncode, 0, result.stderr)
        self.assertIn("unigram entropy of val", result.stdout)


if __name__ == "__main__":
    unittest.main()
