"""Data sets of the hub that `quern-tools tokenize --dataset NAME` knows by a short name: where they are, and what their rows
are."""

from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from quern.base.fault import Fault, importing
from quern.tokens.documents import Rows, dataset_faults, read_dataset

CHARACTERS = 4.5  # a token of English web text has about as many


@dataclass(frozen=True)
class NamedDataset:
    path: str
    subset: str | None = None
    field: str = "text"
    turns: tuple[str, str] | None = None  # fields that the user and the assistant say
    tokens: float | None = None  # about so many, from its beginning; None: all
    mixed: bool = False  # its subsets together, each as often as it has rows


NAMED = {
    "tiny-shakespeare": NamedDataset("Trelis/tiny-shakespeare", field="Text"),
    "tiny-stories": NamedDataset("roneneldan/TinyStories"),
    "gsm8k": NamedDataset("openai/gsm8k", "main", turns=("question", "answer")),
    "limo": NamedDataset("GAIR/LIMO", turns=("question", "solution")),
    "fineweb-1b": NamedDataset("HuggingFaceFW/fineweb", "sample-10BT", tokens=1e9),
    "fineweb-10b": NamedDataset("HuggingFaceFW/fineweb", "sample-10BT"),
    "climb-1b": NamedDataset("gvlassis/ClimbMix", tokens=1e9, mixed=True),
    "climb-10b": NamedDataset("gvlassis/ClimbMix", tokens=10e9, mixed=True),
    "climb-20b": NamedDataset("gvlassis/ClimbMix", tokens=20e9, mixed=True),
}


def take_named(options: Namespace) -> None:
    """Sets options that were not given, by the name."""
    if named := NAMED.get(options.dataset or ""):
        options.chat = options.chat or named.turns is not None
        if not options.chat:
            options.text_field = options.text_field or named.field


def dataset_rows(name: str, subset: str | None, split: str) -> Rows:
    """Of a data set by its short name or its name on the hub."""
    named = NAMED.get(name)
    if named is None:
        return read_dataset(name, subset, split)
    rows = mixed_rows(named.path, split) if named.mixed else read_dataset(named.path, subset or named.subset, split)
    if named.turns:
        rows = conversations(rows, named.turns)
    return rows if named.tokens is None else first_characters(rows, named.field, named.tokens * CHARACTERS)


def conversations(rows: Rows, turns: tuple[str, str]) -> Iterator[tuple[str, Any]]:
    for name, row in rows:
        missing = [key for key in turns if not isinstance(row.get(key), str)]
        if missing:
            raise Fault(name, f"no text in field '{missing[0]}'", sorted(row))
        yield name, {"messages": [{"role": role, "content": row[key]} for role, key in zip(("user", "assistant"), turns)]}


def first_characters(rows: Rows, field: str, most: float) -> Iterator[tuple[str, Any]]:
    for name, row in rows:
        yield name, row
        most -= len(row.get(field) or "") if isinstance(row, dict) else 0
        if most <= 0:
            return


def mixed_rows(path: str, split: str) -> Iterator[tuple[str, Any]]:
    """Rows of all subsets, drawn by their sizes with one seed."""
    with importing("datasets"):
        import datasets
    with dataset_faults(path, None, split):
        subsets = datasets.get_dataset_config_names(path)
        sizes = [datasets.load_dataset_builder(path, subset).info.splits[split].num_examples for subset in subsets]
        parts = [datasets.load_dataset(path, subset, split=split, streaming=True) for subset in subsets]
        mixture = datasets.interleave_datasets(
            parts, probabilities=[size / sum(sizes) for size in sizes], seed=1, stopping_strategy="all_exhausted")
        for number, row in enumerate(mixture):
            yield f"{path}:{number}", row
