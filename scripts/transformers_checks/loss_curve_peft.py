#!/usr/bin/env python3
"""LoRA of a Hugging Face model on text, by peft and by quern on the same batches: the losses side by side.

    QUERN_PREFIX=build/release scripts/transformers_checks/loss_curve_peft.py models/SmolLM2-135M texts/*.txt --out runs/beside

Both begin with the adapter that peft saved in OUT/start. peft trains in fp32 with the model in fp32, and again with the model
in bf16 and its adapter in fp32, as peft has it; quern once in each of --precisions. With --whole RATE all weights are trained
too, by torch in fp32 and by quern in each precision, with fp32 masters, at that learning rate. OUT/PRECISION has quern's run
with its adapter and merged export, OUT/PRECISION-whole the run of all weights, and OUT/losses.json all losses. In fp32 they must
agree. A precision may have settings, as in e4m3:head=bf16. Needs peft, torch, transformers and numpy.
"""

import json
import random
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import integer, parser_for
from quern.base.end_of_main import script
from quern.base.fault import Fault
from quern.driver.run import Run

RANK, ALPHA, BETAS, EPSILON = 16, 32, (0.9, 0.95), 1e-8
FP32_TOLERANCE = 1e-4  # relative, over all steps: with B = 0, gradients of A begin at zero, which Adam makes whole steps


def batches(options):
    """(steps, rows, length + 1) tokens of the texts, in a random order of windows."""
    import numpy as np
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(options.model)
    tokens = [token for text in options.texts for token in tokenizer.encode(Path(text).read_text())]
    width, count = options.length + 1, options.steps * options.rows
    windows = [tokens[at : at + width] for at in range(0, len(tokens) - width + 1, width)]
    if len(windows) < count:
        raise Fault(options.texts[0], "too little text", f"{len(windows)} windows", count)
    return np.array(random.Random(1).sample(windows, count)).reshape(options.steps, options.rows, width)


def torch_losses(options, data, dtype, whole=False):
    import torch
    from peft import LoraConfig, PeftModel, get_peft_model
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    base = AutoModelForCausalLM.from_pretrained(options.model, dtype=getattr(torch, dtype)).to(device)
    start = options.out / "start"
    if whole:
        model = base
    elif start.is_dir():
        model = PeftModel.from_pretrained(base, start, is_trainable=True)
    else:
        model = get_peft_model(base, LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules="all-linear", task_type="CAUSAL_LM"))
        model.save_pretrained(start)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=options.whole if whole else options.rate, betas=BETAS, eps=EPSILON, weight_decay=0.0)
    losses = []
    for rows in torch.from_numpy(data).to(device):
        logits = model(input_ids=rows[:, :-1], use_cache=False).logits.double()  # torch sums 49152 exponentials in fp32 to 1e-5
        loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), rows[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def quern_losses(options, data, precision, whole=False):
    """`precision`: its id, with settings after a colon."""
    precision_id, _, settings = precision.partition(":")
    settings = dict(setting.split("=", 1) for setting in settings.split(",") if setting)
    model_type = json.loads((options.model / "config.json").read_text())["model_type"]
    config = {
        "model": {"id": model_type, "config": str(options.model)},
        "adapter": {"id": "lora", "rank": RANK, "alpha": ALPHA, "from": str(options.out / "start")},
        "train": {"from": str(options.model), "steps": options.steps, "micro_batch": options.rows, "sequence": options.length},
        "optimizer": {"learning_rate": options.whole if whole else options.rate, "clip_norm": 0.0, "master": "fp32", "gradient": "fp32",
                      "adamw": {"beta1": BETAS[0], "beta2": BETAS[1], "eps": EPSILON, "weight_decay": 0.0}},
        "schedule": {"id": "constant"},
        "precision": {"id": precision_id, precision_id: settings},
        "device": {"id": options.device},
        "checkpoint": {"export_dtype": "fp32", "tokenizer": str(options.model), "resume": "never"},
        "log": {"directory": str(options.out / (precision + "-whole" * whole)), "sinks": ["jsonl"]},
    }
    if whole:
        del config["adapter"]
    with Run(config, data=list(data.reshape(-1, data.shape[2]))) as run:
        return [step.loss for step in run]


def print_curves(curves):
    width = max(12, 2 + max(map(len, curves)))
    print("step " + "".join(f"{name:>{width}}" for name in curves))
    for step, losses in enumerate(zip(*curves.values()), 1):
        print(f"{step:4} " + "".join(f"{loss:{width}.6f}" for loss in losses))
    print("mean " + "".join(f"{sum(losses[-20:]) / len(losses[-20:]):{width}.6f}" for losses in curves.values()) + "  of the last 20")


@script
def main(arguments=None):
    parser = parser_for(None, __doc__)
    parser.add_argument("model", type=Path)
    parser.add_argument("texts", nargs="+")
    parser.add_argument("--steps", type=integer(1), default=20)
    parser.add_argument("--rows", type=integer(1), default=4)
    parser.add_argument("--length", type=integer(1), default=256)
    parser.add_argument("--rate", type=float, default=2e-4)
    parser.add_argument("--whole", type=float, metavar="RATE", help="train all weights too, at this learning rate")
    parser.add_argument("--device", default="cpu", help="quern's (default: cpu)")
    parser.add_argument("--precisions", nargs="+", default=["fp32", "bf16"], help="quern's (default: fp32 bf16)")
    parser.add_argument("--out", type=Path, default=Path("runs/beside-peft"), help="a new folder")
    options = parser.parse_args(arguments)
    if options.out.exists():
        raise Fault(options.out, "is there already", advice="name another --out or remove it")
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()
    options.out.mkdir(parents=True)
    data = batches(options)
    curves = {f"peft {name}": torch_losses(options, data, dtype) for name, dtype in (("fp32", "float32"), ("bf16", "bfloat16"))}
    curves |= {precision: quern_losses(options, data, precision) for precision in options.precisions}
    if options.whole:
        curves["torch whole fp32"] = torch_losses(options, data, "float32", whole=True)
        curves |= {f"whole {precision}": quern_losses(options, data, precision, whole=True) for precision in options.precisions}
    (options.out / "losses.json").write_text(json.dumps(curves, indent=1) + "\n")
    print_curves(curves)
    if "fp32" not in curves:
        return 0
    apart = max(abs(a - b) / b for a, b in zip(curves["fp32"], curves["peft fp32"]))
    print(f"fp32: largest relative difference {apart:.1e}")
    return 0 if apart < FP32_TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
