"""Checks a run's numbers on this machine, with its model, precision and device.

    quern-tools verify run.toml                                # or python -m quern.verify
    quern-tools verify run.toml --write losses.json            # then, after a change or on another machine:
    quern-tools verify run.toml --reference losses.json

    recompute  losses with every layer recomputed have the same bits as with all activations kept
    reference  losses are equal to the losses in a file, to --tolerance
    torch      loss and gradients of a step on random tokens, beside transformers in fp32; skipped without torch

Nothing is written into the run's directory. Exit code 1: a check failed.
"""

import importlib.util
import json
import math
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from quern import command_line
from quern.base.arguments import integer, number, path_argument
from quern.base.fault import CONFIG, Fault, reading
from quern.base.files import write_file
from quern.base.json_shape import NUMBER, checked, parse
from quern.driver.config import Config
from quern.driver.error import Error, fault_of
from quern.driver.run import Run

# What rounding leaves of a step's gradients, of their norm: operands in fp32, bf16, and 8 bits of which 3 are mantissa.
TOLERANCES = {"fp32": 1e-4, "bf16": 3e-2}
OF_8_BITS = 0.3


def alone(config: Config, folder: Path, steps: int) -> Config:
    """The run, for so many steps, in a folder of its own, without what it would leave there."""
    return (config.set("log.directory", folder).set("log.sinks", []).set("train.steps", steps).set("train.epochs", 0)
            .set("train.eval_every", 0).set("sample.every", 0)
            .set("checkpoint", {"every": 0, "at_end": False, "export": False, "from": ""}))


def losses_of(config: Config) -> list[float]:
    with Run(config) as run:
        return [step.loss for step in run]


def check_recompute(config: Config, folder: Path, steps: int) -> tuple[bool, str]:
    kept, again = (losses_of(alone(config, folder / name, steps).set("memory.recompute", activations))
                   for name, activations in (("kept", []), ("again", ["block"])))
    return kept == again, f"{steps} steps, losses {shown(kept)}" + ("" if kept == again else f" and {shown(again)}")


def check_reference(config: Config, folder: Path, reference: list[float], tolerance: float) -> tuple[bool, str]:
    found = losses_of(alone(config, folder / "reference", len(reference)))
    apart = [abs(a - b) / abs(b) if b else abs(a) for a, b in zip(found, reference, strict=True)]
    largest = float(np.max(apart))  # a NaN where there is one
    return largest <= tolerance, f"{len(found)} steps, losses {shown(found)}, largest relative difference {largest:.1e}"


def shown(losses: list[float]) -> str:
    return ", ".join(f"{loss:.6g}" for loss in (losses if len(losses) < 4 else [losses[0], losses[-1]]))


# ---- torch ----


def export_gradients(run: Run, folder: Path) -> dict[str, Any]:
    """Gradients under the names and in the form of a Hugging Face file: what an export of them adds to one of zeros."""
    from safetensors.numpy import load_file

    names = [name.removeprefix("gradient/") for name in run.tensors() if name.startswith("gradient/")]
    gradients = {name: run.read("gradient/" + name) for name in names}
    stored = []
    for factor in (1, 0):
        for name, gradient in gradients.items():
            run.write("master/" + name, factor * gradient)
        run.export(folder / str(factor))
        stored.append(load_file(folder / str(factor) / "model.safetensors"))
    return {name: values - stored[1][name] for name, values in stored[0].items()}


def torch_gradients(model: Path, rows: Any) -> tuple[float, dict[str, Any]]:
    """The mean loss of the rows in transformers, and the gradients of the summed one."""
    import torch
    from transformers import AutoModelForCausalLM

    network = AutoModelForCausalLM.from_pretrained(model, torch_dtype=torch.float32, attn_implementation="eager").eval()
    total = 0.0
    for row in torch.from_numpy(rows.astype(np.int64)):
        logits = network(row[None, :-1]).logits[0].float()
        loss = torch.nn.functional.cross_entropy(logits, row[1:], reduction="sum")
        loss.backward()
        total += loss.item()
    gradients = {name: weight.grad.numpy() for name, weight in network.named_parameters() if weight.grad is not None}
    return total / rows[:, 1:].size, gradients


def check_torch(config: Config, folder: Path) -> tuple[bool, str]:
    values = config.to_dict()
    if values["adapter"]["id"] != "none" or values["train"].get("groups"):
        raise Fault("torch", "not with an adapter or train.groups", advice="leave the check out with --only", code=CONFIG)
    one = (alone(config, folder / "torch", 1).set("optimizer.master", "fp32").set("checkpoint.export_dtype", "fp32")
           .set("train.z_loss", 0).set("data.documents", "joined"))
    with Run(one) as run:
        run.learning_rate = None  # opens it for training
        run.export(folder / "start")
    with reading(folder / "start/config.json"):
        vocabulary = json.loads((folder / "start/config.json").read_bytes())["vocab_size"]
    train = values["train"]
    shape = train["micro_batch"] * train["accumulation"], train["sequence"] + 1
    rows = np.random.default_rng(1).integers(0, vocabulary, shape, np.int32)
    with Run(one.set("train.from", folder / "start"), data=list(rows)) as run:
        step = run.step()
        found = export_gradients(run, folder / "gradients")
    loss, wanted = torch_gradients(folder / "start", rows)
    if missing := found.keys() ^ wanted.keys():
        return False, "gradients of one side alone: " + ", ".join(sorted(missing)[:5])
    apart = {name: np.linalg.norm(found[name] - wanted[name]) for name in found}
    norm = np.sqrt(sum(np.linalg.norm(gradient) ** 2 for gradient in wanted.values()))
    worst = max(found, key=lambda name: apart[name] / (np.linalg.norm(wanted[name]) + 1e-6 * norm))
    difference = float(np.sqrt(sum(value**2 for value in apart.values())) / norm)
    assert step
    of_loss = abs(step.loss - loss) / loss
    tolerance = TOLERANCES.get(values["precision"]["id"], OF_8_BITS)
    return max(difference, of_loss) <= tolerance, (
        f"loss {step.loss:.6g} and {loss:.6g}, relative difference {of_loss:.1e}; gradients {difference:.1e} of their norm "
        f"(at most {tolerance:.0e}), the furthest {worst} {apart[worst] / np.linalg.norm(wanted[worst]):.1e} of its own")


# ---- the command ----


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("config", type=path_argument, help="the run's TOML file")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of the config")
    parser.add_argument("--only", action="append", choices=("recompute", "reference", "torch"), help="leave out the others")
    parser.add_argument("--steps", type=integer(1, 10000), default=4, help="of recompute and of --write (default: 4)")
    parser.add_argument("--reference", type=path_argument, metavar="FILE", help="losses that --write wrote")
    parser.add_argument("--tolerance", type=number, default=0, help="relative, to the reference (default: 0, equal bits)")
    parser.add_argument("--write", type=path_argument, metavar="FILE", help="write the losses there, and check nothing")


def checks_of(options: Namespace, config: Config, folder: Path) -> Iterator[tuple[str, Callable[[], tuple[bool, str]]]]:
    chosen = options.only or ["recompute", "reference", "torch"]
    if options.only and "reference" in chosen and not options.reference:
        raise Fault("--only reference", "there is no reference", advice="give --reference FILE, which --write wrote", code=CONFIG)
    if "recompute" in chosen:
        yield "recompute", lambda: check_recompute(config, folder, options.steps)
    if options.reference and "reference" in chosen:
        with reading(options.reference):
            losses = checked(parse(options.reference.read_bytes(), options.reference), {"losses": [NUMBER]}, options.reference)
        if not losses["losses"] or not all(loss is not None and math.isfinite(loss) for loss in losses["losses"]):
            raise Fault(options.reference, "not the losses of a run: empty, or not all finite",
                        advice="write them again with --write", code=CONFIG)
        yield "reference", lambda: check_reference(config, folder, losses["losses"], options.tolerance)
    if "torch" in chosen:
        missing = [name for name in ("torch", "transformers") if importlib.util.find_spec(name) is None]
        if missing and options.only:
            raise Fault("torch", f"{' and '.join(missing)} not installed for {sys.executable}")
        if missing:
            print(f"{'torch':<11}skipped: {' and '.join(missing)} not installed for {sys.executable}")
        else:
            yield "torch", lambda: check_torch(config, folder)


def main(options: Namespace) -> int:
    config = Config(str(options.config), None, tuple(options.set))
    failed = False
    try:
        with tempfile.TemporaryDirectory(prefix="quern-verify-") as temporary:
            if options.write:
                losses = losses_of(alone(config, Path(temporary), options.steps))
                write_file(options.write, (json.dumps({"losses": losses}) + "\n").encode())
                return 0
            for name, check in checks_of(options, config, Path(temporary)):
                holds, text = check()
                failed = failed or not holds
                print(f"{name:<11}{'holds' if holds else 'FAILS'}: {text}", flush=True)
    except Error as error:
        raise fault_of(error) from None
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(command_line.main(["verify", *sys.argv[1:]]))
