#!/usr/bin/env python3
"""Trains LoRA by peft and by quern from one folder on the same batches, and reads quern's folder by peft.

    QUERN_PREFIX=build/release scripts/transformers_checks/check_peft.py [--goldens tests/goldens] [case ...]

For each case of the goldens, peft makes an adapter of rank 8 on all linears whose B is not zero, and saves it. Both train from
that folder in fp32: 20 steps of AdamW. What must hold: equal losses; the adapter that quern wrote, loaded by peft, has the
loss that quern found after its last step, the tensors of peft's own training, and the logits of quern's merged export; and
peft's merged weights are that export's. Needs peft, torch, transformers, safetensors and numpy.
"""

import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.driver.run import Run

STEPS, ROWS, LENGTH, RANK, ALPHA, RATE = 20, 2, 12, 8, 12, 0.01
EPSILON = 1e-4  # far below the gradients, and above what rounding leaves of one that is zero, which Adam would make a whole step
# Of the largest logit and weight, and of a loss. Both train in fp32, with sums in another order.
BOUNDS = {"losses": 1e-5, "loss of the folder": 1e-5, "merged logits": 1e-5, "merged weights": 1e-6}


def base_of(case):
    import torch
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(case, attn_implementation="eager", dtype=torch.float32).eval()


def loss_of(model, rows):
    import torch

    tokens = torch.tensor(rows).long()
    logits = model(input_ids=tokens[:, :-1], use_cache=False).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten())


def begin(case, folder):
    """An adapter whose B is not zero, saved in `folder`."""
    import torch
    from peft import LoraConfig, get_peft_model

    base = base_of(case)
    model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM",
                                            fan_in_fan_out=base.config.model_type == "gpt2"))
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    model.save_pretrained(folder)
    return model


def train_by_peft(model, rows):
    import torch

    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=RATE, betas=(0.9, 0.95), eps=EPSILON, weight_decay=0.0)
    losses = []
    for step in range(STEPS):
        loss = loss_of(model, rows[step * ROWS : (step + 1) * ROWS])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def train_by_quern(case, start, folder, rows, held_out):
    """The losses, and the loss of `held_out` after the last step."""
    config = {
        "model": {"id": base_of(case).config.model_type, "config": str(case)},
        "adapter": {"id": "lora", "rank": RANK, "alpha": ALPHA, "from": str(start)},
        "train": {"from": str(case), "steps": STEPS, "micro_batch": ROWS, "sequence": LENGTH, "eval_every": STEPS},
        "optimizer": {"learning_rate": RATE, "clip_norm": 0.0,
                      "adamw": {"beta1": 0.9, "beta2": 0.95, "eps": EPSILON, "weight_decay": 0.0}},
        "schedule": {"id": "constant"},
        "precision": {"id": "fp32"},
        "device": {"id": "cpu"},
        "checkpoint": {"export_dtype": "fp32"},
        "log": {"directory": str(folder), "sinks": ["jsonl"]},
    }
    with Run(config, data=rows, validation=held_out) as run:
        steps = list(run)
    return [step.loss for step in steps], steps[-1].validation_loss


def check(case):
    """Each of BOUNDS as measured, and the distance of the two trained adapters."""
    import numpy as np
    import torch
    from peft import PeftModel
    from peft.utils import get_peft_model_state_dict
    from safetensors.torch import load_file

    torch.manual_seed(7)
    draw = np.random.default_rng(7)
    vocabulary = base_of(case).config.vocab_size
    rows, held_out = (draw.integers(0, vocabulary, (count, LENGTH + 1)) for count in (STEPS * ROWS, 4 * ROWS))
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        peft = begin(case, folder / "start")
        ours, after = train_by_quern(case, folder / "start", folder / "run", list(rows), list(held_out))
        theirs = train_by_peft(peft, rows)
        written = load_file(folder / "run" / "adapter" / "adapter_model.safetensors")
        loaded = PeftModel.from_pretrained(base_of(case), folder / "run" / "adapter")
        export = base_of(folder / "run" / "export")
    trained, read = get_peft_model_state_dict(peft), get_peft_model_state_dict(loaded)
    if not written.keys() == trained.keys() == read.keys():
        raise ValueError(f"tensors of the adapter: {sorted(written.keys() ^ trained.keys())[:4]}")
    with torch.no_grad():
        tokens = torch.from_numpy(held_out[:, :-1])
        logits, merged = (model(input_ids=tokens, use_cache=False).logits for model in (loaded, export))
        loss = loss_of(loaded, held_out).item()
    merged_by_peft, weights = loaded.merge_and_unload().state_dict(), export.state_dict()
    return {
        "losses": max(abs(a - b) / b for a, b in zip(ours, theirs, strict=True)),
        "loss of the folder": abs(after - loss) / loss,
        "merged logits": float((logits - merged).abs().max() / merged.abs().max()),
        "merged weights": max(float((merged_by_peft[key] - value).abs().max() / value.abs().max())
                              for key, value in weights.items() if value.any()),
    }, max(float((written[key] - value).norm() / value.norm()) for key, value in trained.items())


@script
def main(arguments=None):
    parser = parser_for(None, __doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help="default: all")
    parser.add_argument("--goldens", type=Path, default=ROOT / "tests" / "goldens")
    options = parser.parse_args(arguments)
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    bad = 0
    print(f"{'case':18}" + "".join(f"{name:>20}" for name in (*BOUNDS, "trained adapters")))
    for case in sorted(path for path in options.goldens.iterdir() if path.is_dir()):
        if options.cases and case.name not in options.cases:
            continue
        found, apart = check(case.resolve())
        faults = [name for name, value in found.items() if not value < BOUNDS[name]]
        figures = "".join(f"{value:>20.1e}" for value in (*found.values(), apart))
        print(f"{case.name:18}{figures}" + (f"  too far: {', '.join(faults)}" if faults else ""), flush=True)
        bad += bool(faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
