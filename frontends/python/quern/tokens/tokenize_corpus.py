#!/usr/bin/env python3
"""Turns text into the token files that quern trains on.

    scripts/tokenize.py books/ --train-bpe 4096 -o data/books
    scripts/tokenize.py web.jsonl --tokenizer Qwen2.5-0.5B/tokenizer.json -o data/web
    scripts/tokenize.py talks.jsonl --chat --tokenizer Qwen2.5-0.5B-Instruct/tokenizer.json -o data/talks
    scripts/tokenize.py --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT --tokenizer ... -o data/edu

Writes train.tok, val.tok, tokenizer.json and meta.json; docs/token-files.md describes them.
"""

import argparse
import json
import math
import sys
from contextlib import ExitStack
from pathlib import Path

# The rest is imported where it is used: the standard library may load this file by mistake, see its end.


def parse_arguments(arguments):
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("inputs", nargs="*", help=".txt (a document each), .jsonl, .parquet, or folders of them")
    parser.add_argument("--dataset", help="a Hugging Face dataset instead of files (needs the package 'datasets')")
    parser.add_argument("--subset", help="the dataset's configuration")
    parser.add_argument("--split", default="train", help="the dataset's split (default: train)")
    parser.add_argument("--text-field", help="field or column with the text (default: text; with --chat, messages)")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--tokenizer", help="an existing tokenizer.json")
    vocabulary.add_argument("--train-bpe", type=int, metavar="N", help="train a byte-level BPE of N entries on train")
    parser.add_argument("--separator", help="the token that ends a document, or 'none' (default: as the tokenizer has)")
    parser.add_argument("--parse-special", action="store_true", help="let special tokens spelled in the text count")
    parser.add_argument("--chat", action="store_true", help="conversations: only the assistant's turns are learned")
    parser.add_argument("--chat-template", metavar="FILE", help="with --chat (default: the one beside the tokenizer)")
    parser.add_argument("--align", type=int, default=0, metavar="T", help="with --chat: no row of T tokens cuts one")
    parser.add_argument("--val-fraction", type=float, default=0.05, help="share held out (default: 0.05)")
    parser.add_argument("-o", "--out", required=True, help="output folder")
    options = parser.parse_args(arguments)
    if bool(options.inputs) == bool(options.dataset):
        parser.error("name either input files or a --dataset")
    if not 0 < options.val_fraction < 1:
        parser.error(f"--val-fraction {options.val_fraction}, expected between 0 and 1")
    if options.chat and (options.dataset or not options.tokenizer):
        parser.error("--chat takes .jsonl files and an existing --tokenizer")
    if (options.chat_template or options.align) and not options.chat:
        parser.error("--chat-template and --align go with --chat")
    if options.align < 0:
        parser.error(f"--align {options.align}, expected a number of tokens")
    options.text_field = options.text_field or ("messages" if options.chat else "text")
    if options.train_bpe is not None and not 257 <= options.train_bpe <= 1 << 20:
        parser.error(f"--train-bpe {options.train_bpe}, expected 257 (every byte and the separator) or more")
    return options


class Frequencies:
    """How often each token was seen; memory goes by the tokens that were, not by the largest id."""

    def __init__(self):
        self.total, self._counts = 0, {}

    def add(self, tokens):
        import numpy as np

        for token, count in zip(*(column.tolist() for column in np.unique(tokens, return_counts=True))):
            self._counts[token] = self._counts.get(token, 0) + count
        self.total += tokens.size

    def cross_entropy(self, model, added=0, vocabulary=0):
        """Mean of -ln p(token) in nats, with p the frequencies in `model` after `added` more of each token."""
        total = model.total + added * vocabulary
        return sum(
            -count / self.total * math.log((model._counts.get(token, 0) + added) / total)
            for token, count in sorted(self._counts.items())
        )


def write_text(path, text):
    from quern.base.fault import writing

    partial = path.with_name(f".{path.name}.partial")
    with writing(path):
        partial.write_text(text, encoding="utf-8")
        partial.replace(path)


def read_text(path):
    from quern.base.fault import reading

    with reading(path):
        return path.read_text(encoding="utf-8")


def write_tokenizer(tokenizer, options, out):
    """tokenizer.json beside the tokens, with the tokenizer_config.json that Hugging Face expects."""
    from quern.tokens.encoding import TRAINED_SEPARATOR

    if options.tokenizer:
        config = Path(options.tokenizer).with_name("tokenizer_config.json")
        write_text(out / "tokenizer.json", read_text(Path(options.tokenizer)))
        if config.is_file():
            write_text(out / "tokenizer_config.json", read_text(config))
        return
    write_text(out / "tokenizer.json", tokenizer.to_str(pretty=True))
    config = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TRAINED_SEPARATOR,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    }
    write_text(out / "tokenizer_config.json", json.dumps(config, indent=2) + "\n")


def open_corpus(options):
    """(names of the sources, the corpus split into train and val)"""
    from quern.tokens.documents import Split, find_files, read_dataset, read_files

    field, fraction = options.text_field, options.val_fraction
    if options.dataset:
        return [options.dataset], Split(
            lambda: read_dataset(options.dataset, options.subset, options.split, field), fraction
        )
    files = find_files(options.inputs)
    if options.chat:
        from quern.tokens.conversations import ConversationSplit, read_conversations

        split = ConversationSplit(lambda: read_conversations(files, field), fraction)
    else:
        split = Split(lambda: read_files(files, field), fraction)
    return [str(path) for path in files], split


def encode_corpus(options, tokenizer, split, separator):
    """Yields (split name, documents, bytes, tokens, mask or None)."""
    if options.chat:
        from quern.tokens.conversations import encode_conversations, load_template

        with load_template(options.tokenizer, options.chat_template) as template:
            yield from encode_conversations(tokenizer, split, template, separator, options.align, options.parse_special)
        return
    from quern.tokens.encoding import encode

    for batch in encode(tokenizer, split, separator):
        yield (*batch, None)


def run(options):
    from quern.tokens.encoding import load_tokenizer, separator_id, train_bpe, vocabulary_size
    from quern.base.fault import Fault, writing
    from quern.tokens.token_file import TokenWriter, token_dtype

    sources, split = open_corpus(options)
    tokenizer = load_tokenizer(options.tokenizer) if options.tokenizer else train_bpe(options.train_bpe, split)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not options.parse_special
    vocab_size = vocabulary_size(tokenizer, options.tokenizer or "--train-bpe")
    separator = separator_id(tokenizer, options.separator)
    if options.align and separator < 0:
        raise Fault("--align", "fills rows with the document separator", "--separator none", "one")

    out = Path(options.out)
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        (out / "meta.json").unlink(missing_ok=True)  # written last, so while it is there the rest belongs together
    totals = {name: {"documents": 0, "tokens": 0, "bytes": 0} for name in ("train", "val")}
    if options.chat:
        for total in totals.values():
            total["learned"] = 0
    frequencies = {name: Frequencies() for name in totals}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(TokenWriter(out / f"{name}.tok", vocab_size, separator, options.chat))
            for name in totals
        }
        for name, documents, size, tokens, mask in encode_corpus(options, tokenizer, split, separator):
            writers[name].append(tokens, mask)
            frequencies[name].add(tokens)
            for key, more in ("documents", documents), ("tokens", tokens.size), ("bytes", size):
                totals[name][key] += int(more)
            if mask is not None:
                totals[name]["learned"] += int(mask.sum())
        for name, total in totals.items():
            if total["tokens"] == 0:
                advice = "give more text or another --val-fraction"
                raise Fault(options.out, f"nothing in the {name} split", advice=advice)
    write_tokenizer(tokenizer, options, out)
    meta = {
        "sources": sources,
        "split": split.mode,
        "vocab_size": vocab_size,
        "token_bytes": token_dtype(vocab_size).itemsize,
        "separator_token": separator,
        **totals,
        "val_unigram_entropy": frequencies["val"].cross_entropy(frequencies["val"]),
        "val_unigram_cross_entropy": frequencies["val"].cross_entropy(frequencies["train"], 1, vocab_size),
    }
    write_text(out / "meta.json", json.dumps(meta, indent=2) + "\n")
    for name, total in totals.items():
        learned = f", {total['learned']:,} of them learned" if options.chat else ""
        print(f"{out / name}.tok: {total['tokens']:,} tokens{learned}, {total['documents']:,} documents")
    print(f"vocabulary {vocab_size:,}; unigram entropy of val {meta['val_unigram_entropy']:.2f} nats")


def main(arguments=None):
    from quern.base.fault import script

    def tokenize(arguments):
        run(parse_arguments(arguments))

    return script(tokenize)(arguments)


if __name__ == "__main__":
    sys.exit(main())
