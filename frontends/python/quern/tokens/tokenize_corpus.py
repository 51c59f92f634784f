"""Turns text into the token files that quern trains on.

    quern-tools tokenize books/ --train-bpe 4096 -o data/books
    quern-tools tokenize web.jsonl --tokenizer Qwen2.5-0.5B/tokenizer.json -o data/web
    quern-tools tokenize talks.jsonl --chat --tokenizer Qwen2.5-0.5B-Instruct/tokenizer.json -o data/talks
    quern-tools tokenize --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT --tokenizer ... -o data/edu

Writes train.tok, val.tok, tokenizer.json and meta.json; docs/token-files.md describes them. Files of these names that
an earlier tokenize left are replaced, others are not.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quern.base.arguments import integer, path_argument, share
from quern.base.fault import CONFIG, Fault, reading, writing
from quern.base.files import replace_file
from quern.tokens.conversations import ConversationSplit, encode_conversations, load_template, read_conversations
from quern.tokens.documents import Split, find_files, read_dataset, read_files
from quern.tokens.encoding import (
    TRAINED_SEPARATOR, encode, load_tokenizer, separator_id, train_bpe, vocabulary_size,
)
from quern.tokens.made_files import META, check_replaceable, checksums, forget
from quern.tokens.token_file import Array, TokenWriter, token_dtype

LEAST_VOCABULARY, MOST_VOCABULARY = 257, 1 << 20  # of --train-bpe: every byte and the separator


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="*", help=".txt (a document each), .jsonl, .parquet, or folders of them")
    parser.add_argument("--dataset", help="a Hugging Face dataset instead of files (needs the package 'datasets')")
    parser.add_argument("--subset", help="the dataset's configuration")
    parser.add_argument("--split", default="train", help="the dataset's split (default: train)")
    parser.add_argument("--text-field", help="field or column with the text (default: text; with --chat, messages)")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--tokenizer", help="an existing tokenizer.json")
    vocabulary.add_argument(
        "--train-bpe", type=integer(LEAST_VOCABULARY, MOST_VOCABULARY), metavar="N",
        help="train a byte-level BPE of N entries on train",
    )
    parser.add_argument("--separator", help="the token that ends a document, or 'none' (default: as the tokenizer has)")
    parser.add_argument("--parse-special", action="store_true", help="let special tokens spelled in the text count")
    parser.add_argument("--chat", action="store_true", help="conversations: only the assistant's turns are learned")
    parser.add_argument("--chat-template", metavar="FILE", help="with --chat (default: the one beside the tokenizer)")
    parser.add_argument(
        "--align", type=integer(0), default=0, metavar="T", help="with --chat: no row of T tokens cuts one"
    )
    parser.add_argument("--val-fraction", type=share, default=0.05, help="share held out (default: 0.05)")
    parser.add_argument("-o", "--out", type=path_argument, required=True, help="output folder")


def check_together(options: Namespace) -> None:
    """Options that need or exclude each other."""

    def refuse(where: str, what: str) -> None:
        raise Fault(where, what, advice="see quern-tools tokenize --help", code=CONFIG)

    if bool(options.inputs) == bool(options.dataset):
        refuse("--dataset", "name either input files or a dataset")
    if options.chat and (options.dataset or not options.tokenizer):
        refuse("--chat", "takes .jsonl files and an existing --tokenizer")
    for option in ("chat_template", "align"):
        if getattr(options, option) and not options.chat:
            refuse(f"--{option.replace('_', '-')}", "goes with --chat")


class Frequencies:
    """How often each token was seen; memory goes by the tokens that were, not by the largest id."""

    def __init__(self) -> None:
        self.total = 0
        self._counts: dict[int, int] = {}

    def add(self, tokens: Array) -> None:
        for token, count in zip(*(column.tolist() for column in np.unique(tokens, return_counts=True))):
            self._counts[token] = self._counts.get(token, 0) + count
        self.total += tokens.size

    def cross_entropy(self, model: "Frequencies", added: int = 0, vocabulary: int = 0) -> float:
        """Mean of -ln p(token) in nats, with p the frequencies in `model` after `added` more of each token."""
        total = model.total + added * vocabulary
        return sum(
            -count / self.total * math.log((model._counts.get(token, 0) + added) / total)
            for token, count in sorted(self._counts.items())
        )


def write_json(path: Path, value: dict[str, Any]) -> None:
    replace_file(path, (json.dumps(value, indent=2) + "\n").encode())


def tokenizer_files(options: Namespace) -> dict[str, bytes]:
    """{name: content} of what --tokenizer brings, none without."""
    if not options.tokenizer:
        return {}
    given = Path(options.tokenizer)
    sources = {"tokenizer.json": given, "tokenizer_config.json": given.with_name("tokenizer_config.json")}
    files = {}
    for name, source in sources.items():
        if source == given or source.is_file():
            with reading(source):
                files[name] = source.read_bytes()
    return files


def write_tokenizer(tokenizer: Tokenizer, given: dict[str, bytes], out: Path) -> None:
    """tokenizer.json beside the tokens, with the tokenizer_config.json that Hugging Face expects."""
    for name, content in given.items():
        replace_file(out / name, content)
    if given:
        return
    replace_file(out / "tokenizer.json", tokenizer.to_str(pretty=True).encode())
    write_json(out / "tokenizer_config.json", {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TRAINED_SEPARATOR,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    })


def open_corpus(options: Namespace) -> tuple[list[str], Split | ConversationSplit]:
    """(names of the sources, the corpus split into train and val)"""
    column, fraction = options.text_field or ("messages" if options.chat else "text"), options.val_fraction
    if options.dataset:
        return [options.dataset], Split(
            lambda: read_dataset(options.dataset, options.subset, options.split, column), fraction
        )
    files = find_files(options.inputs)
    names = [str(path) for path in files]
    if options.chat:
        return names, ConversationSplit(lambda: read_conversations(files, column), fraction)
    return names, Split(lambda: read_files(files, column), fraction)


def encode_corpus(
    options: Namespace, tokenizer: Tokenizer, split: Split | ConversationSplit, separator: int
) -> Iterator[tuple[str, int, int, Array, Array | None]]:
    """Yields (split name, documents, bytes, tokens, mask or None)."""
    if isinstance(split, ConversationSplit):
        with load_template(options.tokenizer, options.chat_template) as template:
            yield from encode_conversations(tokenizer, split, template, separator, options.align, options.parse_special)
        return
    for batch in encode(tokenizer, split, separator):
        yield (*batch, None)


def open_tokenizer(options: Namespace, split: Split | ConversationSplit) -> Tokenizer:
    """The one of --tokenizer, or one trained on the train split; it neither cuts nor fills texts."""
    if isinstance(split, ConversationSplit) or options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        tokenizer = train_bpe(options.train_bpe, split)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not options.parse_special
    return tokenizer


@dataclass
class SplitTotals:
    """What goes into one split."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    learned: int | None = None  # tokens whose mask bit is set, of conversations
    frequencies: Frequencies = field(default_factory=Frequencies)

    def add(self, documents: int, size: int, tokens: Array, mask: Array | None) -> None:
        self.documents += documents
        self.tokens += tokens.size
        self.bytes += size
        self.frequencies.add(tokens)
        if mask is not None:
            self.learned = (self.learned or 0) + int(mask.sum())

    def figures(self) -> dict[str, int]:
        learned = {} if self.learned is None else {"learned": self.learned}
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes, **learned}


def write_token_files(
    options: Namespace, tokenizer: Tokenizer, split: Split | ConversationSplit, vocab_size: int, separator: int
) -> dict[str, SplitTotals]:
    """train.tok and val.tok: both, or none."""
    totals = {name: SplitTotals() for name in ("train", "val")}
    with ExitStack() as stack:
        writers = {
            name: stack.enter_context(TokenWriter(options.out / f"{name}.tok", vocab_size, separator, options.chat))
            for name in totals
        }
        for name, documents, size, tokens, mask in encode_corpus(options, tokenizer, split, separator):
            writers[name].append(tokens, mask)
            totals[name].add(documents, size, tokens, mask)
        for name, total in totals.items():
            if total.tokens == 0:
                advice = "give more text or another --val-fraction"
                raise Fault(options.out, f"nothing in the {name} split", advice=advice)
        forget(options.out)
    return totals


def main(options: Namespace) -> None:
    check_together(options)
    out = options.out
    given = tokenizer_files(options)
    check_replaceable(out, given)
    sources, split = open_corpus(options)
    tokenizer = open_tokenizer(options, split)
    vocab_size = vocabulary_size(tokenizer, options.tokenizer or "--train-bpe")
    separator = separator_id(tokenizer, options.separator)
    if options.align and separator < 0:
        raise Fault("--align", "fills rows with the document separator", "--separator none", "one")
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
    totals = write_token_files(options, tokenizer, split, vocab_size, separator)
    write_tokenizer(tokenizer, given, out)
    train, val = (totals[name].frequencies for name in ("train", "val"))
    entropy = val.cross_entropy(val)
    write_json(out / META, {
        "sources": sources,
        "split": split.mode,
        "vocab_size": vocab_size,
        "token_bytes": token_dtype(vocab_size).itemsize,
        "separator_token": separator,
        "files": checksums(out),
        **{name: total.figures() for name, total in totals.items()},
        "val_unigram_entropy": entropy,
        "val_unigram_cross_entropy": val.cross_entropy(train, 1, vocab_size),
    })
    for name, total in totals.items():
        learned = "" if total.learned is None else f", {total.learned:,} of them learned"
        print(f"{out / name}.tok: {total.tokens:,} tokens{learned}, {total.documents:,} documents")
    print(f"vocabulary {vocab_size:,}; unigram entropy of val {entropy:.2f} nats")
