#!/usr/bin/env python3
"""Loads an exported model in Hugging Face transformers and repeats a run's validation there.

    scripts/check_export.py runs/demo/export data/austen/val.tok --sequence 128 --expect 4.87

Prints the mean loss over every target that counts in the files' windows, and a continuation of a prompt when the export
has a tokenizer. With --expect, exit code 1 says that the losses differ by more than 1e-4. Needs torch and transformers,
which quern itself does not.
"""

import itertools
import sys
from pathlib import Path

import numpy as np
from quern.tokens import token_file
from quern.tokens.data_order import window
from quern.tokens.encoding import load_tokenizer, tokenizing
from quern.base.fault import Fault, argument_parser, path_argument, script

TOLERANCE = 1e-4  # relative; sums in another order


def validation_rows(corpora, sequence, documents="joined", most_windows=None):
    """(tokens, targets) of every whole window of every file, in order, as quern evaluates; a target of -1 does not count.
    With "masked" documents, each document's part of a window: it sees nothing else, and its positions start at 0."""
    windows = ((corpus, index) for corpus in corpora for index in range((len(corpus.tokens) - 1) // sequence))
    for corpus, index in itertools.islice(windows, most_windows):
        tokens, targets = window(corpus, index, sequence)
        parts = [slice(None)]
        if documents == "masked":
            ends = np.flatnonzero(tokens == corpus.separator_token)
            targets[ends] = -1  # what follows a separator is another text
            parts = [part for part in np.split(np.arange(sequence), ends + 1) if part.size]
        for part in parts:
            yield tokens[part], targets[part]


def mean_loss(rows, loss_sum, batch):
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


def load_model(folder):
    from transformers import AutoModelForCausalLM

    import torch

    try:
        return AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32).eval()
    except Exception as error:  # the library's are of many kinds
        raise Fault(folder, "transformers cannot load it", f"{type(error).__name__}: {error}") from None


def loss_sum_of(model):
    import torch

    def loss_sum(tokens, targets):
        with torch.no_grad():
            logits = model(torch.from_numpy(tokens)).logits.flatten(0, 1).float()
            flat = torch.from_numpy(targets).flatten()
            return torch.nn.functional.cross_entropy(logits, flat, ignore_index=-1, reduction="sum").item()

    return loss_sum


def continuation(model, tokenizer, prompt):
    import torch

    with tokenizing():
        tokens = torch.tensor([tokenizer.encode(prompt).ids])
    drawn = model.generate(
        tokens, attention_mask=torch.ones_like(tokens), max_new_tokens=40, do_sample=False, repetition_penalty=1.3,
        pad_token_id=0,
    )
    with tokenizing():
        return tokenizer.decode(drawn[0].tolist())


@script
def main(arguments):
    parser = argument_parser(__doc__)
    parser.add_argument("export", type=path_argument)
    parser.add_argument("tokens", type=path_argument, nargs="+", help="token files, usually the validation split's")
    parser.add_argument("--sequence", type=int, required=True, help="train.sequence of the run")
    parser.add_argument("--batch", type=int, default=8, help="train.micro_batch of the run")
    parser.add_argument("--eval-batches", type=int, default=0, help="train.eval_batches of the run; 0: all windows")
    parser.add_argument("--documents", choices=("joined", "masked"), default="joined", help="data.documents of the run")
    parser.add_argument("--expect", type=float, help="quern's loss")
    parser.add_argument("--prompt", default="It is a truth universally acknowledged, that")
    options = parser.parse_args(arguments)
    if min(options.sequence, options.batch) < 1 or options.eval_batches < 0:
        parser.error("--sequence and --batch are at least 1, --eval-batches at least 0")
    corpora = [token_file.read_token_file(path) for path in options.tokens]
    if options.documents == "masked" and any(corpus.separator_token < 0 for corpus in corpora):
        raise Fault("--documents", "documents cannot be told apart", "no separator token in a file")
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


if __name__ == "__main__":
    sys.exit(main())
