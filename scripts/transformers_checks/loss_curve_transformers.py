#!/usr/bin/env python3
"""One training run three times, in bf16: quern on the GPU, quern on the CPU, and transformers; and how far apart they get.

    scripts/transformers_checks/loss_curve_transformers.py configs/demo.toml --steps 200 --out runs/loss-curve

All three start from one set of random weights, made by transformers and read by quern (train.from), see the same
micro-batches in the same order (data_order.py), and use the learning rates that quern logged. The numerics of the
transformers run are quern's with master = gradient = "fp32", as near as torch comes:

- the model is in bf16: weights, activations, logits, and the residual stream too. torch.autocast would keep the stream
  and the norms' results in fp32, which is more precise than quern.
- AdamW, clipping and accumulation are in fp32 on fp32 masters, which are rounded to bf16 for the next step.
- Differences that remain: torch rounds a weight gradient to bf16 where quern adds the new value in fp32, rotates in
  bf16 with bf16 sines, and rounds the logits once more; sums are taken in another order everywhere.

The losses of the first step, before anything was trained, must agree: if they do not, weights or data differ, and the
script fails. Writes losses.json and prints, for each two curves, the largest and the mean gap. Needs torch, transformers
and numpy; without a GPU, --devices cpu compares with the CPU alone.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.fault import Fault
from quern.runs.run_config import RunConfig, train
from quern.tokens.data_order import micro_batches

FIRST_LOSS_TOLERANCE = 2e-3  # relative; roundings of bf16 in untrained networks leave some 1e-4


def make_initial(run, folder, torch):
    """Random weights as quern reads them. Written in fp32, so that quern's masters are exactly these."""
    from transformers import AutoModelForCausalLM

    torch.manual_seed(run["train.seed"])
    model = AutoModelForCausalLM.from_config(run.transformers_config()).float()
    model.save_pretrained(folder)


def quern_losses(options, run, device, initial):
    """[(loss, learning rate) of each step] of `quern train`."""
    out = options.out / device
    settings = {
        "model.config": initial,
        "train.from": initial,
        "train.steps": options.steps,
        "train.eval_every": 0,
        "train.eval_batches": 1,
        "precision.id": "bf16",
        "optimizer.master": "fp32",
        "optimizer.gradient": "fp32",
        "device.id": device,
        "checkpoint.export": "false",
        "checkpoint.every": 0,
        "checkpoint.resume": "never",
        "log.directory": out,
    }
    settings.update(word.split("=", 1) for word in options.set)
    steps = train(options.quern, run.path, settings, options.out / f"{device}.txt")
    return [(event["loss"], event["lr"]) for event in steps]


class MasterAdamW:
    """AdamW and clipping by global norm on fp32 masters of a bf16 model, as quern has them: matrices decay."""

    def __init__(self, model, run, torch):
        self.torch, self.model_parameters = torch, list(model.parameters())
        self.masters = [p.detach().float().clone() for p in self.model_parameters]
        self.sums = [torch.zeros_like(m) for m in self.masters]
        self.moments = [(torch.zeros_like(m), torch.zeros_like(m)) for m in self.masters]
        self.clip = run["optimizer.clip_norm"]
        self.options = [run[f"optimizer.adamw.{name}"] for name in ("beta1", "beta2", "eps", "weight_decay")]
        self.steps = 0

    def accumulate(self):
        """Adds the gradients of a micro-batch in fp32."""
        for total, parameter in zip(self.sums, self.model_parameters):
            total += parameter.grad.float()
            parameter.grad = None

    def step(self, rate, valid_tokens):
        beta1, beta2, eps, decay = self.options
        self.steps += 1
        norm = sum(float((g.double() ** 2).sum()) for g in self.sums) ** 0.5 / valid_tokens
        scale = (min(1.0, self.clip / norm) if self.clip > 0 and norm > 0 else 1.0) / valid_tokens
        for parameter, master, total, (m, v) in zip(self.model_parameters, self.masters, self.sums, self.moments):
            gradient = total * scale
            m.mul_(beta1).add_(gradient, alpha=1 - beta1)
            v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
            root = (v / (1 - beta2**self.steps)).sqrt_().add_(eps)
            if master.dim() == 2:
                master.mul_(1 - rate * decay)
            master.sub_(m / root, alpha=rate / (1 - beta1**self.steps))
            parameter.data.copy_(master)
            total.zero_()


def transformers_losses(options, run, rates, initial, torch):
    from quern.tokens import token_file
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    config = run.transformers_config()
    model = AutoModelForCausalLM.from_pretrained(initial, config=config, torch_dtype=torch.float32).to(device)
    optimizer = MasterAdamW(model, run, torch)  # the masters are of the fp32 weights, before they are rounded
    model = model.to(torch.bfloat16).train()
    optimizer.model_parameters = list(model.parameters())
    corpus = token_file.read_token_file(run["data.tokens.train"])
    source = micro_batches(corpus, run["train.micro_batch"], run["train.sequence"], run["train.seed"])
    losses = []
    for rate in rates:
        total, valid = 0.0, 0
        for _ in range(run["train.accumulation"]):
            tokens, targets = (torch.from_numpy(rows).to(device) for rows in next(source))
            logits = model(input_ids=tokens, use_cache=False).logits.float()
            loss = torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten(), ignore_index=-1,
                                                     reduction="sum")
            loss.backward()
            optimizer.accumulate()
            total, valid = total + loss.item(), valid + int((targets >= 0).sum())
        optimizer.step(rate, valid)
        losses.append(total / valid)
    return losses


def report(curves):
    """True when all curves begin at one loss."""
    print(f"{'curves':<28}{'first step':>12}{'largest gap':>13}{'at step':>9}{'mean gap':>10}{'last 20':>10}")
    good = True
    names = list(curves)
    for i, first in enumerate(names):
        for second in names[i + 1:]:
            gaps = [abs(a - b) for a, b in zip(curves[first], curves[second])]
            largest = max(gaps)
            # The noise of single steps aside: where the two curves stand at the end.
            tail = [abs(sum(curves[name][-20:]) / len(curves[name][-20:])) for name in (first, second)]
            print(f"{first + ', ' + second:<28}{gaps[0]:>12.2e}{largest:>13.4f}{gaps.index(largest) + 1:>9}"
                  f"{sum(gaps) / len(gaps):>10.4f}{abs(tail[0] - tail[1]):>10.4f}")
            good = good and gaps[0] <= FIRST_LOSS_TOLERANCE * curves[first][0]
    return good


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("config")
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--devices", nargs="+", default=["cuda", "cpu"], help="quern's devices (default: cuda cpu)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of the config")
    parser.add_argument("--quern", type=Path, default=Path("build/release/bin/quern"))
    parser.add_argument("--out", type=Path, default=Path("runs/loss-curve"), help="a new folder for runs and losses")
    options = parser.parse_args(arguments)

    import torch

    if options.out.exists():
        raise Fault(options.out, "is there already", advice="name another --out or remove it")
    options.out.mkdir(parents=True)
    run = RunConfig(options.config, options.set)
    initial = options.out / "initial"
    make_initial(run, initial, torch)
    curves, rates = {}, []
    for device in options.devices:
        steps = quern_losses(options, run, device, initial)
        curves[f"quern {device}"] = [loss for loss, _ in steps]
        rates = [rate for _, rate in steps]
    curves["transformers"] = transformers_losses(options, run, rates, initial, torch)
    (options.out / "losses.json").write_text(json.dumps(curves, indent=1) + "\n", encoding="utf-8")
    if report(curves):
        return 0
    print("the first losses differ: not the same weights or data")
    return 5


if __name__ == "__main__":
    sys.exit(main())
