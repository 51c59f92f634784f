#!/usr/bin/env python3
"""Loads an exported model in Hugging Face transformers and repeats a run's validation there.

    scripts/check_export.py runs/demo/export data/austen/val.tok --sequence 128 --expect 4.87

Prints the mean loss over the file's windows, and a continuation of a prompt when the export has a tokenizer. Needs
torch and transformers, which quern itself does not.
"""
import argparse
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parent))
import token_file


def mean_loss(model, tokens, sequence, batch, torch):
    """Over windows of sequence + 1 tokens at stride sequence, as quern evaluates; whole micro-batches only."""
    windows = (len(tokens) - 1) // sequence // batch * batch
    total, count = 0.0, 0
    with torch.no_grad():
        for first in range(0, windows, batch):
            rows = [tokens[w * sequence:w * sequence + sequence + 1] for w in range(first, first + batch)]
            rows = torch.tensor([[int(t) for t in row] for row in rows])
            logits = model(rows[:, :-1]).logits
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1).float(), rows[:, 1:].flatten(), reduction="sum")
            total += loss.item()
            count += rows[:, 1:].numel()
    return total / count


def main():
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("export", type=Path)
    parser.add_argument("tokens", type=Path, help="token file, usually the validation split")
    parser.add_argument("--sequence", type=int, required=True, help="train.sequence of the run")
    parser.add_argument("--batch", type=int, default=8, help="train.micro_batch of the run")
    parser.add_argument("--expect", type=float, help="quern's loss; differ by more than 1e-4 relative and this fails")
    parser.add_argument("--prompt", default="It is a truth universally acknowledged, that")
    options = parser.parse_args()

    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(options.export, torch_dtype=torch.float32)
    loss = mean_loss(model, token_file.read_token_file(options.tokens).tokens, options.sequence, options.batch, torch)
    print(f"loss in transformers  {loss:.5f}")
    if (options.export / "tokenizer.json").exists():
        from tokenizers import Tokenizer
        tokenizer = Tokenizer.from_file(str(options.export / "tokenizer.json"))
        prompt = torch.tensor([tokenizer.encode(options.prompt).ids])
        ids = model.generate(prompt, attention_mask=torch.ones_like(prompt), max_new_tokens=40, do_sample=False, repetition_penalty=1.3, pad_token_id=0)
        print(tokenizer.decode(ids[0].tolist()))
    if options.expect is not None:
        difference = abs(loss - options.expect) / options.expect
        print(f"loss in quern         {options.expect:.5f}, relative difference {difference:.1e}")
        return 0 if difference < 1e-4 else 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
