"""Loads an exported model in Hugging Face transformers and repeats a run's validation there.

    quern-tools check-export runs/demo/export data/austen/val.tok --sequence 128 --expect 4.87

Prints the mean loss over every target that counts in the files' windows, and a continuation of a prompt when the export
has a tokenizer. With --expect, exit code 1 says that the losses differ by more than 1e-4. Needs torch and transformers,
which quern itself does not.
"""

import itertools
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Tokenizer

from quern.base.arguments import integer, number, path_argument
from quern.base.fault import Fault, importing
from quern.tokens.data_order import window
from quern.tokens.encoding import load_tokenizer, tokenizing
from quern.tokens.token_file import Array, TokenFile, read_token_file

Row = tuple[Array, Array]  # (tokens, targets), both (length,) int64

TOLERANCE = 1e-4  # relative; sums in another order


def validation_rows(
    corpora: Sequence[TokenFile], sequence: int, documents: str = "joined", most_windows: int | None = None
) -> Iterator[Row]:
    """(tokens, targets) of every whole window of every file, in order, as quern evaluates; a target of -1 does not count.
    With "masked" documents, each document's part of a window: it sees nothing else, and its positions start at 0."""
    windows = ((corpus, index) for corpus in corpora for index in range((len(corpus.tokens) - 1) // sequence))
    for corpus, index in itertools.islice(windows, most_windows):
        tokens, targets = window(corpus, index, sequence)
        parts: list[Any] = [slice(None)]
        if documents == "masked":
            ends = np.flatnonzero(tokens == corpus.separator_token)
            targets[ends] = -1  # what follows a separator is another text
            parts = [part for part in np.split(np.arange(sequence), ends + 1) if part.size]
        for part in parts:
            yield tokens[part], targets[part]


def mean_loss(rows: Iterable[Row], loss_sum: Callable[[Array, Array], float], batch: int) -> float:
    """`loss_sum` of (rows, length) tokens and targets is the sum of losses of the targets that count."""
    total, count = 0.0, 0
    for _, alike in itertools.groupby(rows, key=lambda row: row[0].size):
        while some := list(itertools.islice(alike, batch)):
            tokens, targets = (np.stack(column) for column in zip(*some))
            total += loss_sum(tokens, targets)
            count += int((targets >= 0).sum())
    if count == 0:
        raise Fault("", "no target counts in any whole window", advice="check --sequence and the loss mask")
    return total / count


def load_model(folder: Path) -> Any:
    with importing("transformers"):
        from transformers import AutoModelForCausalLM
    with importing("torch"):
        import torch

    try:
        return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    except Exception as error:  # the library's are of many kinds
        raise Fault(folder, "transformers cannot load it", f"{type(error).__name__}: {error}") from None


def loss_sum_of(model: Any) -> Callable[[Array, Array], float]:
    import torch

    def loss_sum(tokens: Array, targets: Array) -> float:
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.flatten(0, 1).float()
            flat = torch.from_numpy(targets).flatten()
            total: float = torch.nn.functional.cross_entropy(logits, flat, ignore_index=-1, reduction="sum").item()
            return total

    return loss_sum


def continuation(model: Any, tokenizer: Tokenizer, prompt: str) -> str:
    import torch

    with tokenizing():
        tokens = torch.tensor([tokenizer.encode(prompt).ids])
    drawn = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=40, do_sample=False, repetition_penalty=1.3,
        pad_token_id=0,
    )
    with tokenizing():
        return tokenizer.decode(drawn[0].tolist())


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("export", type=path_argument, help="the exported model's folder")
    parser.add_argument("tokens", type=path_argument, nargs="+", help="token files, usually the validation split's")
    parser.add_argument("--sequence", type=integer(1), required=True, help="train.sequence of the run")
    parser.add_argument("--batch", type=integer(1), default=8, help="train.micro_batch of the run")
    parser.add_argument("--eval-batches", type=integer(0), default=0, help="train.eval_batches of the run; 0: all windows")
    parser.add_argument("--documents", choices=("joined", "masked"), default="joined", help="data.documents of the run")
    parser.add_argument("--expect", type=number, help="quern's loss")
    parser.add_argument(
        "--prompt", default="It is a truth universally acknowledged, that", help="text to continue (default: %(default)s)"
    )


def main(options: Namespace) -> int:
    corpora = [read_token_file(path) for path in options.tokens]
    if options.documents == "masked" and any(corpus.separator_token < 0 for corpus in corpora):
        raise Fault("--documents", "documents cannot be separated", "no separator token in a file")
    model = load_model(options.export)
    most = options.eval_batches * options.batch or None
    rows = validation_rows(corpora, options.sequence, options.documents, most)
    loss = mean_loss(rows, loss_sum_of(model), options.batch)
    print(f"loss in transformers  {loss:.5f}")
    if (options.export / "tokenizer.json").exists():
        print(continuation(model, load_tokenizer(options.export / "tokenizer.json"), options.prompt))
    if options.expect is None:
        return 0
    difference = abs(loss - options.expect) / max(abs(options.expect), 1e-30)
    print(f"loss in quern         {options.expect:.5f}, relative difference {difference:.1e}")
    return 0 if difference < TOLERANCE else 1
