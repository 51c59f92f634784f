#!/usr/bin/env python3
"""Optimizers beside their public implementations: torch.optim, lion-pytorch, schedulefree, torchao.

    QUERN_PREFIX=build/release scripts/transformers_checks/check_optimizers.py [row ...]

A small Llama trains for 20 steps in fp32 on the CPU, and each implementation is given the gradients of these steps and their
rates. What must hold: masters are the implementation's, which computes in double precision, within 1e-6 of a tensor's largest
element, or are as near to it as twice its own distance in fp32; moments in 8 bits leave the weights no further from torch's
AdamW, of the length of their way, than torchao's moments of 8 bits do, and the layers' matrices within 8%. Muon's matmuls are not
in bf16, also not torch's, whose bf16 is replaced while it steps. Needs torch 2.9 or later, lion-pytorch, schedulefree, torchao
and numpy; TORCHDYNAMO_DISABLE=1 saves minutes of compiling.
"""

import sys
import tempfile
from pathlib import Path
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.driver.run import Run

STEPS, ROWS, LENGTH, RATE = 20, 4, 16, 0.01
HIDDEN, INNER, HEADS, GROUPS = 256, 512, 4, 2
HEAD = HIDDEN // HEADS
BOUND = 1e-6  # of a tensor's largest element
NEAR = 0.08  # of the way of the layers' matrices; the bound of tests/optimizers too
# Rows of the tensors that a matrix packs.
PACKED = {"qkv.weight": [HIDDEN, GROUPS * HEAD, GROUPS * HEAD], "gate_up.weight": [INNER, INNER]}
# The same by heads and by heads that share a key and value head.
SPLIT = {"tensors": PACKED, "heads": PACKED | {"qkv.weight": [HEAD] * (HEADS + 2 * GROUPS)},
         "head_groups": PACKED | {"qkv.weight": [HEAD * HEADS // GROUPS] * GROUPS + [HEAD] * (2 * GROUPS)}}


def adamw(matrices, vectors):
    import torch

    return torch.optim.AdamW([{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}],
                             lr=RATE, betas=(0.9, 0.95), eps=1e-8)


def torchao(kind):
    def make(matrices, vectors):
        import torchao.optim

        return getattr(torchao.optim, kind)(
            [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}], lr=RATE,
            betas=(0.9, 0.95), eps=1e-8, block_size=256)

    return make


def sgd(matrices, vectors):
    import torch

    return torch.optim.SGD([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=RATE, momentum=0.8,
                           nesterov=True)


def lion(matrices, vectors):
    from lion_pytorch import Lion

    return Lion([{"params": matrices, "weight_decay": 0.5}, {"params": vectors}], lr=RATE, betas=(0.9, 0.99))


def schedule_free(matrices, vectors):
    from schedulefree import AdamWScheduleFree

    optimizer = AdamWScheduleFree([{"params": matrices, "weight_decay": 0.1}, {"params": vectors}], lr=RATE,
                                  betas=(0.9, 0.95), eps=1e-8)
    optimizer.train()
    return optimizer


def muon(step_size):
    def make(matrices, vectors):
        import torch

        del vectors
        return torch.optim.Muon(matrices, lr=RATE, weight_decay=0.1, momentum=0.95, adjust_lr_fn=step_size)

    return make


# Name: the settings of optimizer, and the implementation.
EXACT = {
    "AdamW": ({"id": "adamw"}, adamw),
    "SGD": ({"id": "sgd", "sgd": {"momentum": 0.8, "nesterov": True, "weight_decay": 0.1}}, sgd),
    "Lion": ({"id": "lion"}, lion),
    "schedule-free AdamW": ({"id": "schedule_free"}, schedule_free),
    "Muon": ({"id": "muon", "muon": {"matmuls": "fp32"}}, muon("match_rms_adamw")),
    "Muon, original": ({"id": "muon", "muon": {"matmuls": "fp32", "step_size": "original"}}, muon("original")),
    "Muon, heads": ({"id": "muon", "muon": {"matmuls": "fp32", "split": "heads"}}, muon("match_rms_adamw")),
    "Muon, head groups": ({"id": "muon", "muon": {"matmuls": "fp32", "split": "head_groups"}}, muon("match_rms_adamw")),
}
# Name: AdamW's moments, and torchao's optimizer of as many bits.
NARROW = {
    "AdamW, int8": ({"moments": "int8", "block": 256}, "AdamW8bit"),
    "AdamW, e4m3": ({"moments": "e4m3", "block": 256}, "AdamWFp8"),
}


class Reference:
    """An implementation's weights, of parameters that may pack several matrices."""

    def __init__(self, start, make, parts, dtype):
        import torch

        self.dtype, self.pieces = getattr(torch, dtype), {}
        for name, values in start.items():
            rows = parts.get(name.split("/")[0])
            whole = torch.from_numpy(values).to(self.dtype)
            self.pieces[name] = [torch.nn.Parameter(piece.clone()) for piece in (whole.split(rows) if rows else [whole])]
        used = [name for name in start if make not in MUONS or is_of_layers(name, start[name])]
        matrices = [piece for name in used for piece in self.pieces[name] if piece.dim() == 2]
        vectors = [piece for name in used for piece in self.pieces[name] if piece.dim() == 1]
        self.used, self.optimizer = used, make(matrices, vectors)

    def step(self, gradients, rate):
        import torch

        for name in self.used:
            gradient = torch.from_numpy(gradients[name]).to(self.dtype)
            for piece, part in zip(self.pieces[name], gradient.split([len(p) for p in self.pieces[name]]), strict=True):
                piece.grad = part.clone()
        for group in self.optimizer.param_groups:
            if isinstance(group["lr"], torch.Tensor):
                group["lr"].fill_(rate)
            else:
                group["lr"] = rate
        bf16 = self.dtype if isinstance(self.optimizer, torch.optim.Muon) else torch.bfloat16
        with mock.patch.object(torch, "bfloat16", bf16):
            self.optimizer.step()

    def weights(self):
        import torch

        return {name: torch.cat([piece.data for piece in self.pieces[name]]).numpy() for name in self.used}


MUONS = {make for settings, make in EXACT.values() if settings["id"] == "muon"}


def is_of_layers(name, values):
    """Whether Muon updates it: matrices of layers, whose names end with a layer."""
    return "/" in name and values.ndim == 2


def compare(settings, implementations, parts):
    """The masters at first and at the end, and the weights of each implementation, in a dtype."""
    import numpy as np

    draw = np.random.default_rng(7)
    rows = [draw.integers(0, 96, LENGTH + 1) for _ in range(STEPS * ROWS)]
    with tempfile.TemporaryDirectory() as folder:
        config = {
            "model": {"id": "llama", "llama": {
                "vocab_size": 96, "hidden_size": HIDDEN, "intermediate_size": INNER, "num_hidden_layers": 2,
                "num_attention_heads": HEADS, "num_key_value_heads": GROUPS, "max_position_embeddings": 64}},
            "train": {"steps": STEPS, "micro_batch": ROWS, "sequence": LENGTH, "eval_every": 0},
            "optimizer": {"learning_rate": RATE, "clip_norm": 0.0, "master": "fp32", "gradient": "fp32"} | settings,
            "schedule": {"id": "cosine", "cosine": {"warmup": 4}},
            "precision": {"id": "fp32"},
            "device": {"id": "cpu"},
            "checkpoint": {"export": False},
            "log": {"directory": str(Path(folder) / "run"), "sinks": ["jsonl"]},
        }
        with Run(config, data=rows) as run:
            run.learning_rate = None  # opens it for training
            masters = [name for name in run.tensors() if name.startswith("master/")]
            names = [name.removeprefix("master/") for name in masters]

            def read(kind):
                return {name: np.array(run.read(f"{kind}/{name}")) for name in names}

            start = read("master")
            references = [Reference(start, make, parts, dtype) for make, dtype in implementations]
            for step in run:
                gradients = {name: values / np.float32(ROWS * LENGTH) for name, values in read("gradient").items()}
                for reference in references:
                    reference.step(gradients, step.learning_rate)
                if step.step == STEPS:
                    end = read("master")
    return start, end, [reference.weights() for reference in references]


def largest_error(got, want):
    return max(float(abs(got[name] - values).max() / abs(values).max()) for name, values in want.items())


def distance(got, want, start):
    """Of the weights, of the length of their way."""
    errors = sum(float(((got[name] - want[name]) ** 2).sum()) for name in want)
    return (errors / sum(float(((start[name] - want[name]) ** 2).sum()) for name in want)) ** 0.5


@script
def main(arguments=None):
    parser = parser_for(None, __doc__)
    parser.add_argument("rows", nargs="*", metavar="row", help=f"default: all of {', '.join((*EXACT, *NARROW))}")
    options = parser.parse_args(arguments)
    if unknown := [row for row in options.rows if row not in (*EXACT, *NARROW)]:
        parser.error(f"no such row: {', '.join(unknown)}")
    exact_rows, narrow_rows = ([name for name in rows if name in options.rows or not options.rows] for rows in (EXACT, NARROW))
    bad = 0
    if exact_rows:
        print(f"{'':22}{'quern':>10}{'fp32':>10}")
    for name in exact_rows:
        settings, make = EXACT[name]
        parts = SPLIT[settings.get("muon", {}).get("split", "tensors")] if make in MUONS else {}
        _, end, (exact, rounded) = compare(settings, [(make, "float64"), (make, "float32")], parts)
        ours, theirs = largest_error({tensor: end[tensor] for tensor in exact}, exact), largest_error(rounded, exact)
        good = ours < max(BOUND, 2 * theirs)
        print(f"{name:22}{ours:10.1e}{theirs:10.1e}{'' if good else '  too far'}", flush=True)
        bad += not good
    if narrow_rows:
        print(f"{'':22}{'quern':>10}{'torchao':>10}{'layers':>10}{'torchao':>10}")
    for name in narrow_rows:
        moments, kind = NARROW[name]
        start, end, (exact, narrow) = compare({"adamw": moments}, [(adamw, "float32"), (torchao(kind), "float32")], {})
        layers = {tensor: values for tensor, values in exact.items() if is_of_layers(tensor, values)}
        ours, theirs = distance(end, exact, start), distance(narrow, exact, start)
        near = distance(end, layers, start)
        good = ours <= theirs and near < NEAR
        print(f"{name:22}{ours:10.2%}{theirs:10.2%}{near:10.2%}{distance(narrow, layers, start):10.2%}"
              f"{'' if good else '  too far'}", flush=True)
        bad += not good
    return 1 if bad else 0


if __name__ == "__main__":
    sys.exit(main())
