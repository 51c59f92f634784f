#!/usr/bin/env python3
"""Compares every model plugin with transformers: loss and gradients of a step, an export's logits, and greedy texts.

    QUERN_PREFIX=build/release scripts/transformers_checks/check_families.py [--goldens tests/goldens] [case ...]

For each case of the goldens, `quern train` takes one step of no length from its weights and exports in fp32, and transformers
loads the export. What must hold: the same tensors as the case's model, to the last bits that a norm's offset costs; logits
equal to the golden's; a text of greedy tokens equal to quern's; and the loss and gradients of a step on random tokens, as
`python -m quern.verify` compares them. Needs torch, transformers, safetensors and numpy.
"""

import json
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.fault import Fault
from quern.base.installation import find_quern
from quern.driver.config import Config
from quern.verify import check_torch

LOGITS = 1e-5  # of the largest; what sums in fp32 leave
WEIGHTS = 1e-7  # an offset of 1 and back, in fp32
PROMPT, MORE = 6, 8


def run(quern, command, config, *words):
    done = subprocess.run([str(quern), command, str(config), *words], capture_output=True, text=True)
    if done.returncode != 0:
        raise Fault(f"quern {command} {config}", "failed", done.stderr.strip()[-500:])
    return done.stdout


def write_config(folder, case, model_type):
    import numpy as np

    tokens = folder / "tokens.bin"
    np.random.default_rng(1).integers(0, 97, 400).astype(np.uint16).tofile(tokens)
    config = folder / "run.toml"
    config.write_text(f"""
[model]
id = "{model_type}"
config = "{case}"
[data.tokens]
train = "{tokens}"
validation = "{tokens}"
format = "uint16"
[train]
from = "{case}"
steps = 1
micro_batch = 1
sequence = {PROMPT + MORE + 1}
[schedule.cosine]
warmup = 0
[optimizer]
learning_rate = 1e-30
[precision]
id = "fp32"
[device]
id = "cpu"
[checkpoint]
export_dtype = "fp32"
[log]
directory = "{folder / 'run'}"
""")
    return config


def check(case, quern):
    """What is wrong, in words."""
    import numpy as np
    import torch
    from safetensors.numpy import load_file
    from transformers import AutoModelForCausalLM

    faults = []
    model_type = json.loads((case / "config.json").read_text())["model_type"]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        config = write_config(folder, case.resolve(), model_type)
        run(quern, "train", config)
        export = folder / "run" / "export"
        want, got = load_file(case / "model.safetensors"), load_file(export / "model.safetensors")
        if want.keys() != got.keys():
            faults.append(f"other tensors: {sorted(want.keys() ^ got.keys())[:4]}")
        for key in want.keys() & got.keys():
            if want[key].shape != got[key].shape or np.abs(want[key] - got[key]).max() > WEIGHTS:
                faults.append(f"{key} differs")
        model = AutoModelForCausalLM.from_pretrained(export, attn_implementation="eager").float().eval()
        golden = load_file(case / "golden.safetensors")
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(golden["tokens"]).long(), use_cache=False).logits.numpy()
        off = np.abs(logits - golden["logits"]).max() / np.abs(golden["logits"]).max()
        if not off < LOGITS:
            faults.append(f"logits off by {off:.1e} of the largest")
        text = golden["tokens"][0, :PROMPT].tolist()
        prompt = ",".join(map(str, text))
        printed = run(quern, "generate", config, "--from", str(export), "--prompt-tokens", prompt, "--max-tokens", str(MORE),
                      "--greedy")
        with torch.no_grad():
            for _ in range(MORE):
                text.append(int(model(input_ids=torch.tensor([text]), use_cache=False).logits[0, -1].argmax()))
        said = json.loads(printed.strip().splitlines()[-1])["tokens"]
        if said != text[PROMPT:]:
            faults.append(f"greedy text {said}, transformers {text[PROMPT:]}")
        good, step = check_torch(Config.load(config).set("train.micro_batch", 4), folder / "step")
        if not good:
            faults.append("loss or gradients of a step")
    return faults, f"logits off by {off:.1e}; {step}"


@script
def main(arguments=None):
    parser = parser_for(None, __doc__)
    parser.add_argument("cases", nargs="*", metavar="case", help="default: all")
    parser.add_argument("--goldens", type=Path, default=ROOT / "tests" / "goldens")
    parser.add_argument("--quern", help="default: the program of $QUERN_PREFIX, or of this checkout")
    options = parser.parse_args(arguments)
    cases = sorted(path for path in options.goldens.iterdir() if path.is_dir())
    bad = 0
    for case in cases:
        if options.cases and case.name not in options.cases:
            continue
        try:
            faults, figures = check(case, find_quern(options.quern))
        except (KeyError, ValueError) as error:  # transformers has no such model
            print(f"{case.name:20} left out: {str(error).splitlines()[0][:90]}")
            continue
        print(f"{case.name:20} {'; '.join(faults) or 'ok'}  ({figures})", flush=True)
        bad += bool(faults)
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
