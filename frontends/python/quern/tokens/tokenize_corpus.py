"""Turns text into the token files that quern trains on.

    quern-tools tokenize books/ --train-bpe 4096 -o data/books
    quern-tools tokenize web.jsonl --tokenizer Qwen2.5-0.5B/tokenizer.json -o data/web
    quern-tools tokenize talks.jsonl --chat --tokenizer Qwen2.5-0.5B-Instruct/tokenizer.json -o data/talks
    quern-tools tokenize --dataset HuggingFaceFW/fineweb-edu --subset sample-10BT --tokenizer ... -o data/edu
    quern-tools tokenize --dataset tiny-stories --tokenizer ... -o data/stories

Writes train.tok, val.tok, tokenizer.json and meta.json; docs/token-files.md describes them. Files of these names that
an earlier tokenize left are replaced, others are not.
"""

import json
import math
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator
from contextlib import ExitStack
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quern.base.arguments import integer, path_argument, share
from quern.base.fault import CONFIG, Fault, printable, reading, writing
from quern.base.files import partial_of, remove_abandoned, replace_file
from quern.base.json_shape import parse
from quern.tokens.begin_tokens import begin_tokens
from quern.tokens.conversation_rows import read_conversations
from quern.tokens.conversations import ChatCorpus, ChatTemplate, load_template
from quern.tokens.documents import (
    READERS, TEXT, Document, Rows, Split, document_from_row, find_files, read_documents, read_rows,
)
from quern.tokens.encoding import (
    TRAINED_SEPARATOR, encode, load_tokenizer, separator_id, tokenizer_file, train_bpe, vocabulary_size,
)
from quern.tokens.made_files import BESIDE_TOKENIZER, META, NAMES, alone_in, check_replaceable, checksums, forget
from quern.tokens.tally import Tally
from quern.tokens.named_datasets import NAMED, dataset_rows, take_named
from quern.tokens.template_files import template_paths, with_templates
from quern.tokens.token_file import Array, TokenWriter, token_dtype
from quern.tokens.tokenizer_config import any_of, read_tokenizer_config, special_tokens, spelled_by

LEAST_VOCABULARY, MOST_VOCABULARY = 257, 1 << 20  # of --train-bpe: every byte and the separator


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("inputs", nargs="*", help=".txt (a document each), .jsonl, .json, .parquet, or folders")
    parser.add_argument("--dataset", help="a Hugging Face dataset instead of files (needs the package 'datasets'), or one of "
                        + ", ".join(NAMED))
    parser.add_argument("--subset", help="the dataset's configuration")
    parser.add_argument("--split", default="train", help="the dataset's split (default: train)")
    parser.add_argument("--text-field", help="field or column (default: text; with --chat, messages or conversations)")
    vocabulary = parser.add_mutually_exclusive_group(required=True)
    vocabulary.add_argument("--tokenizer", type=path_argument, help="an existing tokenizer.json, or its folder")
    vocabulary.add_argument(
        "--train-bpe", type=integer(LEAST_VOCABULARY, MOST_VOCABULARY), metavar="N",
        help="train a byte-level BPE of N entries on train",
    )
    parser.add_argument("--separator", help="the token that ends a document, or 'none' (default: as the tokenizer has)")
    parser.add_argument("--parse-special", action="store_true", help="let special tokens spelled in the text count")
    parser.add_argument("--chat", action="store_true", help="conversations: only the assistant's turns are learned")
    parser.add_argument("--chat-template", type=path_argument, metavar="FILE",
                        help="with --chat: a file, or the name of one of the tokenizer's (default: the tokenizer's)")
    parser.add_argument(
        "--align", type=integer(0), default=0, metavar="T", help="with --chat: no row of T tokens cuts one"
    )
    parser.add_argument("--val-fraction", type=share, default=0.05, help="share held out; 0: none (default: 0.05)")
    parser.add_argument("-o", "--out", type=path_argument, required=True, help="output folder")


def check_together(options: Namespace) -> None:
    """Options that need or exclude each other."""
    take_named(options)

    def refuse(where: str, what: str) -> None:
        raise Fault(where, what, advice="see quern-tools tokenize --help", code=CONFIG)

    if bool(options.inputs) == bool(options.dataset):
        refuse("--dataset", "name either input files or a dataset")
    if options.chat and not options.tokenizer:
        refuse("--chat", "takes an existing --tokenizer")
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


def json_bytes(value: dict[str, Any]) -> bytes:
    return (json.dumps(value, indent=2, ensure_ascii=False) + "\n").encode("utf-8", "backslashreplace")


def tokenizer_files(options: Namespace) -> dict[str, bytes]:
    """{name: content} of what --tokenizer brings, none without."""
    if not options.tokenizer:
        return {}
    given = options.tokenizer
    sources = {"tokenizer.json": given, **{name: given.with_name(name) for name in BESIDE_TOKENIZER}}
    sources.update({str(path.relative_to(given.parent)): path for path in template_paths(given.parent).values()})
    files = {}
    for name, source in sources.items():
        if source == given or source.is_file():
            with reading(source):
                files[name] = source.read_bytes()
            if source != given and source.suffix == ".json":
                parse(files[name], source)  # found before the work
    return files


def trained_tokenizer_files(tokenizer: Tokenizer) -> dict[str, bytes]:
    """The same of one that was trained here, with the tokenizer_config.json that Hugging Face expects."""
    return {"tokenizer.json": tokenizer.to_str(pretty=True).encode(), "tokenizer_config.json": json_bytes({
        "tokenizer_class": "PreTrainedTokenizerFast",
        "eos_token": TRAINED_SEPARATOR,
        "add_prefix_space": False,
        "clean_up_tokenization_spaces": False,
    })}


def with_chat(files: dict[str, bytes], folder: Path, template: ChatTemplate, end_tokens: list[int]) -> dict[str, bytes]:
    """The files as they were used: with this template, and generation that ends where replies do."""
    files = with_templates(files, template.templates, folder, json_bytes)
    name = "generation_config.json"
    config = parse(files.get(name, b"{}"), folder / name)
    if name in files and isinstance(config, dict):
        known = config.get("eos_token_id", [])
        known = known if isinstance(known, list) else [known]
        more = [token for token in end_tokens if token not in known]
        if more:
            files[name] = json_bytes({**config, "eos_token_id": more + known})
    return files


def open_tokenizer(options: Namespace, split: Split | None) -> Tokenizer:
    """The one of --tokenizer, or one trained on the train split; it neither cuts nor fills texts."""
    if options.tokenizer:
        tokenizer = load_tokenizer(options.tokenizer)
    else:
        assert split, "conversations come with a tokenizer"
        tokenizer = train_bpe(options.train_bpe, split)
    tokenizer.no_truncation()
    tokenizer.no_padding()
    tokenizer.encode_special_tokens = not options.parse_special
    vocabulary_size(tokenizer, options.tokenizer or "--train-bpe")  # refuses one that is unusable
    return tokenizer


@dataclass
class SplitTotals:
    """What goes into one split."""

    documents: int = 0
    tokens: int = 0
    bytes: int = 0
    learned: int | None = None  # tokens whose mask bit is set, of conversations
    padding: int | None = None  # tokens that fill rows, of conversations that are aligned
    frequencies: Frequencies = field(default_factory=Frequencies)

    def add(self, documents: int, size: int, tokens: Array, mask: Array | None) -> None:
        self.documents += documents
        self.tokens += tokens.size
        self.bytes += size
        self.frequencies.add(tokens)
        if mask is not None:
            self.learned = (self.learned or 0) + int(mask.sum())

    def figures(self) -> dict[str, int]:
        more = {"learned": self.learned, "padding": self.padding}
        return {"documents": self.documents, "tokens": self.tokens, "bytes": self.bytes,
                **{name: count for name, count in more.items() if count is not None}}


@dataclass
class Corpus:
    """The batches to write of (split name, documents, bytes, tokens, mask or None)."""

    tokenizer: Tokenizer
    mode: str
    separator: int
    begin: list[int]  # tokens before each document
    batches: Iterator[tuple[str, int, int, Array, Array | None]]


class Sources:
    """The files or the dataset that the command names; a folder is searched once."""

    def __init__(self, options: Namespace, tally: Tally) -> None:
        self._options = options
        kinds = [*READERS] if options.chat else [TEXT, *READERS]
        self.files = [] if options.dataset else find_files(options.inputs, kinds, tally)
        self.names = [options.dataset] if options.dataset else [str(path) for path in self.files]

    def rows(self) -> Rows:
        options = self._options
        if options.dataset:
            return dataset_rows(options.dataset, options.subset, options.split)
        return read_rows(self.files)

    def documents(self) -> Iterator[Any]:
        column = self._options.text_field or "text"
        if self._options.dataset:
            return (document_from_row(name, row, column) for name, row in self.rows())
        return read_documents(self.files, column)


def open_documents(options: Namespace, sources: Sources) -> tuple[Corpus, Split]:
    split = Split(sources.documents, options.val_fraction)
    tokenizer = open_tokenizer(options, split)
    separator = separator_id(tokenizer, options.separator)
    config = read_tokenizer_config(options.tokenizer.parent) if options.tokenizer else {}
    begin = begin_tokens(tokenizer, config)
    pattern, what = any_of(special_tokens(tokenizer)), spelled_by("documents", options.parse_special)

    def count_spelled(document: Document, text: str) -> None:
        split.tally.add(what, document.name, sum(1 for _ in pattern.finditer(text)))

    batches = ((*batch, None) for batch in encode(tokenizer, split, separator, begin, count_spelled))
    return Corpus(tokenizer, split.mode, separator, begin, batches), split


def open_chat(options: Namespace, sources: Sources, tokenizer: Tokenizer, template: ChatTemplate, tally: Tally) -> tuple[
    Corpus, ChatCorpus
]:
    conversations = read_conversations(sources.rows(), options.text_field, tally)
    chat = ChatCorpus(
        tokenizer, template, conversations, options.val_fraction, options.align, options.parse_special, tally
    )
    separator = chat.choose_separator(options.separator, read_tokenizer_config(options.tokenizer.parent))
    if options.align and separator < 0:
        raise Fault("--align", "fills rows with the document separator", "--separator none", "one")
    return Corpus(tokenizer, chat.mode, separator, [], iter(chat)), chat


def write_token_files(options: Namespace, corpus: Corpus, vocab_size: int) -> dict[str, SplitTotals]:
    """train.tok and val.tok: both, or none. Without --val-fraction there is no val.tok."""
    totals = {name: SplitTotals() for name in (("train", "val") if options.val_fraction else ("train",))}
    with ExitStack() as stack:
        writer = partial(TokenWriter, vocab_size=vocab_size, separator_token=corpus.separator, with_mask=options.chat)
        for name in totals:  # also where a signal comes before a writer is entered
            stack.callback(partial_of(options.out / f"{name}.tok").unlink, missing_ok=True)
        writers = {name: stack.enter_context(writer(options.out / f"{name}.tok")) for name in totals}
        for name, documents, size, tokens, mask in corpus.batches:
            if name in writers or tokens.size:
                writers[name].append(tokens, mask)
                totals[name].add(documents, size, tokens, mask)
        for name, total in totals.items():
            if total.tokens == 0:
                advice = "give more text or another --val-fraction, which may be 0"
                raise Fault(options.out, f"nothing in the {name} split", advice=advice)
    return totals


def entropies(totals: dict[str, SplitTotals], vocab_size: int) -> dict[str, float]:
    if "val" not in totals:
        return {}
    train, val = (totals[name].frequencies for name in ("train", "val"))
    return {"val_unigram_entropy": val.cross_entropy(val),
            "val_unigram_cross_entropy": val.cross_entropy(train, 1, vocab_size)}


def spellings(tokenizer: Tokenizer, tokens: Iterable[int]) -> str:
    return ", ".join(str(tokenizer.id_to_token(token)) for token in tokens)


def main(options: Namespace) -> None:
    check_together(options)
    options.tokenizer = options.tokenizer and tokenizer_file(options.tokenizer)
    out, tally = options.out, Tally()
    given = tokenizer_files(options)
    own = options.tokenizer is not None and out.exists() and out.samefile(options.tokenizer.parent)
    if own and options.chat_template:
        raise Fault("--chat-template", "not what the tokenizer in the output folder has", options.chat_template,
                    advice="choose another --out", code=CONFIG)
    check_replaceable(out, given)
    for name in (*NAMES, META):
        remove_abandoned(out / name)
    sources = Sources(options, tally)
    with ExitStack() as stack:
        if options.chat:
            tokenizer = open_tokenizer(options, None)
            template = stack.enter_context(load_template(tokenizer, options.tokenizer.parent, options.chat_template))
            corpus, chat = open_chat(options, sources, tokenizer, template, tally)
        else:
            corpus, split = open_documents(options, sources)
        vocab_size = vocabulary_size(corpus.tokenizer, options.tokenizer or "--train-bpe")
        with writing(out):
            out.mkdir(parents=True, exist_ok=True)
        stack.enter_context(alone_in(out))
        totals = write_token_files(options, corpus, vocab_size)
        files = given or trained_tokenizer_files(corpus.tokenizer)
        end_tokens: list[int] = []
        if options.chat:
            if options.align:
                for name, total in totals.items():
                    total.padding = chat.padding[name]
            end_tokens = [token for token, _ in chat.end_tokens.most_common()]
            files = with_chat(files, options.tokenizer.parent, template, end_tokens)
        else:
            tally.entries.update(split.tally.entries)
        forget(out, [*(f"{name}.tok" for name in totals), *files])
        for name, content in files.items():
            if not (own and (out / name).exists()):  # a model's own files stay as they are
                with writing(out / name):
                    (out / name).parent.mkdir(exist_ok=True)
                replace_file(out / name, content)
        write_meta(out, sources, corpus, vocab_size, totals, end_tokens, tally)
    for name, total in totals.items():
        learned = "" if total.learned is None else f", {total.learned:,} of them learned"
        padding = "" if total.padding is None else f", {total.padding / total.tokens:.1%} of them padding"
        print(f"{out / name}.tok: {total.tokens:,} tokens{learned}{padding}, {total.documents:,} documents")
    for what, tokens in (("each document begins with", corpus.begin), ("replies end with", end_tokens)):
        if tokens:
            print(f"{what} {spellings(corpus.tokenizer, tokens)}")
    for line in tally.lines():
        print(printable(line, 500))
    print(f"vocabulary {vocab_size:,}" + "".join(
        f"; unigram entropy of val {value:.2f} nats"
        for key, value in entropies(totals, vocab_size).items() if key == "val_unigram_entropy"
    ))


def write_meta(
    out: Path, sources: Sources, corpus: Corpus, vocab_size: int, totals: dict[str, SplitTotals], end_tokens: list[int],
    tally: Tally,
) -> None:
    replace_file(out / META, json_bytes({
        "sources": sources.names,
        "split": corpus.mode,
        "vocab_size": vocab_size,
        "token_bytes": token_dtype(vocab_size).itemsize,
        "separator_token": corpus.separator,
        "begin_tokens": corpus.begin,
        **({"end_tokens": end_tokens} if corpus.mode == ChatCorpus.mode else {}),
        "files": checksums(out),
        **{name: total.figures() for name, total in totals.items()},
        **entropies(totals, vocab_size),
        "counted": tally.figures(),
    }))
