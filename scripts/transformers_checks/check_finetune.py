#!/usr/bin/env python3
"""Fine-tunes random weights of Qwen2.5-0.5B's shape for some steps, from one file and from shards, and checks the result.

    scripts/transformers_checks/check_finetune.py configs/finetune/qwen2.5-0.5b.toml --steps 20 --out runs/check-finetune

Stands in for the real weights where there is no network. transformers writes the checkpoint twice, whole and sharded; the
text is this repository's own pages, a token a byte (or --tokens FILE). What must hold:

- both checkpoints train alike, bit for bit;
- the first step's loss is the one that transformers computes in bf16 from the same weights and micro-batches;
- the export, loaded into transformers, has a lower loss on the first step's micro-batches than the weights had.

Needs torch, transformers and numpy, and xxhash without --tokens.
"""

import itertools
import math
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.fault import Fault
from quern.runs.run_config import RunConfig, train
from quern.tokens import token_file
from quern.tokens.data_order import micro_batches

QWEN25_05B = {
    "vocab_size": 151936, "hidden_size": 896, "intermediate_size": 4864, "num_hidden_layers": 24,
    "num_attention_heads": 14, "num_key_value_heads": 2, "tie_word_embeddings": True, "rope_theta": 1e6,
    "rms_norm_eps": 1e-6, "max_position_embeddings": 32768,
}
TINY = {"vocab_size": 512, "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
LOSS_TOLERANCE = 2e-3  # relative; what roundings of bf16 leave


def write_tokens(path):
    """The repository's pages as bytes: enough text for some steps, and no tokenizer."""
    import numpy as np

    root = Path(__file__).resolve().parents[2]
    with token_file.TokenWriter(path, vocab_size=256) as out:
        for page in sorted([*root.glob("*.md"), *root.glob("docs/**/*.md"), *root.glob("core/**/*.[ch]*")]):
            out.append(np.frombuffer(page.read_bytes(), dtype=np.uint8))


def write_checkpoints(shape, folder, torch):
    """[whole, sharded] folders of one random model."""
    from transformers import AutoModelForCausalLM

    fields = RunConfig.from_tables({"model": {"id": "qwen2", "qwen2": {**QWEN25_05B, **shape}}})
    torch.manual_seed(1)
    model = AutoModelForCausalLM.from_config(fields.transformers_config()).to(torch.bfloat16)
    size = sum(p.numel() * p.element_size() for p in model.parameters())
    folders = [folder / "whole", folder / "sharded"]
    model.save_pretrained(folders[0], max_shard_size="100GB")
    model.save_pretrained(folders[1], max_shard_size=size // 3)
    if not (folders[1] / "model.safetensors.index.json").is_file():
        raise Fault(folders[1], "transformers wrote no shards")
    return folders


def mean_loss(folder, batches, torch):
    """Of a model in bf16, over micro-batches."""
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    model = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.bfloat16).to(device).eval()
    total, valid = 0.0, 0
    with torch.no_grad():
        for batch in batches:
            tokens, targets = (torch.from_numpy(rows).to(device) for rows in batch)
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            total += torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                                                       reduction="sum").item()
            valid += int((targets >= 0).sum())
    return total / valid


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=Path, help="a token file (default: this repository's pages)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of the config")
    parser.add_argument("--tiny", action="store_true", help="a model small enough for a CPU")
    parser.add_argument("--quern", type=Path, default=Path("build/release/bin/quern"))
    parser.add_argument("--out", type=Path, default=Path("runs/check-finetune"), help="a new folder")
    options = parser.parse_args(arguments)

    import torch

    if options.out.exists():
        raise Fault(options.out, "is there already", advice="name another --out or remove it")
    options.out.mkdir(parents=True)
    tokens = options.tokens or options.out / "pages.tok"
    if not options.tokens:
        write_tokens(tokens)
    folders = write_checkpoints(TINY if options.tiny else {}, options.out, torch)
    runs = []
    for folder in folders:
        directory = options.out / f"run-{folder.name}"
        settings = {
            "model.config": folder, "train.from": folder, "data.tokens.train": tokens, "data.tokens.validation": tokens,
            "train.steps": options.steps, "train.eval_every": 0, "train.eval_batches": 1, "schedule.cosine.warmup": 2,
            "optimizer.learning_rate": 2e-4, "checkpoint.every": 0, "checkpoint.tokenizer": '""', "log.every": 1,
            "log.directory": directory,
        }
        settings.update(word.split("=", 1) for word in options.set)
        steps = train(options.quern, options.config, settings, options.out / f"{folder.name}.txt")
        runs.append([event["loss"] for event in steps])

    run = RunConfig(options.config, options.set)
    corpus = token_file.read_token_file(tokens)
    source = micro_batches(corpus, run["train.micro_batch"], run["train.sequence"], run["train.seed"])
    batches = list(itertools.islice(source, run["train.accumulation"]))
    before = mean_loss(folders[0], batches, torch)
    after = mean_loss(options.out / "run-whole" / "export", batches, torch)
    first, last = runs[0][0], runs[0][-1]
    print(f"quern: loss {first:.4f} at step 1, {last:.4f} at step {options.steps}; from shards {runs[1][0]:.4f}, {runs[1][-1]:.4f}")
    print(f"transformers, step 1's micro-batches: {before:.4f} before, {after:.4f} of the export")
    faults = []
    if runs[0] != runs[1]:
        faults.append("whole and sharded checkpoints trained differently")
    if not math.isclose(first, before, rel_tol=LOSS_TOLERANCE):
        faults.append("the first loss differs from transformers'")
    if not after < before:  # on the same text; from step to step the text differs
        faults.append("the loss did not fall")
    print("; ".join(faults) if faults else "ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
