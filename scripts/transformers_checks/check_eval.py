#!/usr/bin/env python3
"""Compares `quern eval` with the loss that transformers computes of the same model on the same windows.

    scripts/transformers_checks/check_eval.py configs/demo.toml runs/demo/export --data data/austen/val.tok

Both read the Hugging Face model, quern with --set precision.id=fp32 and transformers in fp32, and take every whole window
of the token file once. Prints both and fails when they differ by more than what sums in another order leave. Needs torch,
transformers and numpy.
"""

import json
import math
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.fault import Fault
from quern.runs.run_config import RunConfig
from quern.tokens.data_order import window
from quern.tokens.token_file import read_token_file

TOLERANCE = 1e-5  # relative; fp32 logits whose sums are in another order


def quern_total(options):
    """The totals of `quern eval`: loss, targets, ..."""
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "eval.json"
        words = ["eval", options.config, "--from", options.model, "--data", options.data, "--json", out]
        for word in ["precision.id=fp32", *options.set]:
            words += ["--set", word]
        if subprocess.run([options.quern, *words]).returncode != 0:
            raise Fault(options.quern, "quern eval failed", advice="its message is above")
        return json.loads(out.read_text())["total"]


def transformers_total(options, sequence):
    """(sum of losses in nats, targets that count)."""
    import torch
    from transformers import AutoModelForCausalLM

    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.backends.cuda.matmul.allow_tf32 = False
    model = AutoModelForCausalLM.from_pretrained(options.model).float().to(device).eval()
    corpus = read_token_file(options.data)
    total, targets = 0.0, 0
    with torch.no_grad():
        for index in range((len(corpus.tokens) - 1) // sequence):
            tokens, wanted = (torch.from_numpy(row).to(device) for row in window(corpus, index, sequence))
            logits = model(input_ids=tokens[None], use_cache=False).logits[0].double()
            total += torch.nn.functional.cross_entropy(logits, wanted, ignore_index=-1, reduction="sum").item()
            targets += int((wanted >= 0).sum())
    return total, targets


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("config", help="of the run that made the model")
    parser.add_argument("model", type=Path, help="its export")
    parser.add_argument("--data", type=Path, required=True, help="a token file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of the config")
    parser.add_argument("--quern", type=Path, default=Path("build/release/bin/quern"))
    options = parser.parse_args(arguments)

    run = RunConfig(options.config, options.set)
    if run.find("data.documents") == "masked":
        raise Fault(options.config, "data.documents", "masked", "windows whose tokens all see each other")
    ours = quern_total(options)
    total, targets = transformers_total(options, run["train.sequence"])
    theirs = total / targets
    print(f"quern: {ours['loss']:.7f} over {ours['targets']} targets; transformers: {theirs:.7f} over {targets}")
    faults = []
    if ours["targets"] != targets:
        faults.append("other targets")
    if not math.isclose(ours["loss"], theirs, rel_tol=TOLERANCE):
        faults.append(f"the losses differ by {abs(ours['loss'] - theirs):.2g}")
    print("; ".join(faults) if faults else "ok")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
