#!/usr/bin/env python3
"""A run driven from Python beside the libraries that it is used with: torch reads tensors in place, wandb keeps the log.

    QUERN_PREFIX=build/release scripts/transformers_checks/check_libraries.py [--device cpu]

A small Llama trains for four steps with quern.WandbLog in wandb's offline mode. What must hold: torch.from_dlpack of Run.view
has the values of Run.read for every tensor, without a copy, and of the export that safetensors reads; and the file that `wandb sync` would send has the losses of
all steps and evaluations, the config and the summary. Needs torch, safetensors, numpy and, but for --only-tensors, wandb.
"""

import json
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.driver.run import Run
from quern.runs.export_wandb import WandbLog

STEPS = 4


def config(device, folder):
    return {
        "model": {"id": "llama", "llama": {
            "vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
            "num_key_value_heads": 2, "max_position_embeddings": 64}},
        "train": {"steps": STEPS, "micro_batch": 2, "sequence": 16, "eval_every": 2},
        "optimizer": {"master": "bf16", "gradient": "fp32"},
        "device": {"id": device},
        "checkpoint": {"export": False},
        "log": {"directory": str(folder / "run"), "sinks": ["jsonl"]},
    }


def check_tensors(run):
    """How many tensors torch reads in place, each with the values of a copy."""
    import torch

    views = {}
    for name in run.tensors():
        view, read = torch.from_dlpack(run.view(name)), torch.from_dlpack(run.read(name))
        assert torch.equal(view.float().cpu(), read), f"{name}: the view has other values than the copy"
        assert view.data_ptr() == torch.from_dlpack(run.view(name)).data_ptr(), f"{name}: the view is a copy"
        views[name] = view
    name = "master/embedding.weight"
    run.write(name, read_back := run.read(name) + 1)
    changed = torch.from_dlpack(run.view(name))
    assert views[name].data_ptr() == changed.data_ptr() and torch.equal(views[name], changed), f"{name}: was not written in place"
    assert abs(changed.float().cpu() - torch.from_dlpack(read_back)).max() < 0.01, f"{name}: was not written"
    return len(views)


def check_export(run, folder):
    """What safetensors reads of the export are the masters that torch views."""
    import torch
    from safetensors.torch import load_file

    run.export(folder)
    exported = load_file(folder / "model.safetensors")
    for name, export in (("embedding.weight", "embed_tokens.weight"), ("final_norm.weight", "norm.weight"),
                         ("down.weight/1", "layers.1.mlp.down_proj.weight")):
        view = torch.from_dlpack(run.view(f"master/{name}")).cpu()
        assert torch.equal(exported[f"model.{export}"].to(view.dtype), view), f"{export}: the export has other values than {name}"


def log_records(data):
    """The records of a LevelDB log, which an offline run's file is behind its first 7 bytes: blocks of 32 KiB of chunks with a
    checksum (4 bytes), a length (2) and a kind: whole, first, middle or last."""
    at, record = 7, b""
    while at + 7 <= len(data):
        left = 32768 - at % 32768
        length, kind = int.from_bytes(data[at + 4 : at + 6], "little"), data[at + 6]
        if left < 7 or kind == 0:  # the rest of the block is empty
            at += left
            continue
        record += data[at + 7 : at + 7 + length]
        at += 7 + length
        if kind in (1, 4):
            yield record
            record = b""


def wandb_records(folder):
    """What `wandb sync` would send: {step: metrics}, config, summary."""
    from wandb.proto import wandb_internal_pb2

    (path,) = folder.glob("wandb/offline-run-*/*.wandb")
    history, settings, summary = {}, {}, {}
    for data in log_records(path.read_bytes()):
        record = wandb_internal_pb2.Record.FromString(data)
        values = {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item}
        if values:
            history.setdefault(values["_step"], {}).update(values)
        settings |= {item.key: json.loads(item.value_json) for item in record.run.config.update}
        summary |= {item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.summary.update}
    return history, settings, summary


@script
def main(arguments=None):
    parser = parser_for(None, __doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--only-tensors", action="store_true", help="leave out wandb")
    options = parser.parse_args(arguments)
    import numpy as np

    draw = np.random.default_rng(1)
    rows = [draw.integers(0, 64, 17) for _ in range(8)]
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with Run(config(options.device, folder) | {"log": {"directory": str(folder / "other")}}, data=rows) as run:
            run.step()
            tensors = check_tensors(run)
            check_export(run, folder / "export")
        print(f"torch reads {tensors} tensors in place, with the values of the export")
        if options.only_tensors:
            return 0
        log = WandbLog(project="quern", mode="offline", dir=name)
        with Run(config(options.device, folder), data=rows, validation=rows[:2], on_event=log) as run:
            steps = list(run)
        history, settings, summary = wandb_records(folder)
    for step in steps:
        kept = history[step.step]
        assert kept["train/loss"] == step.loss, f"step {step.step}: wandb has {kept['train/loss']}, the run {step.loss}"
        if step.step % 2 == 0:
            assert kept["eval/loss"] == step.validation_loss, f"step {step.step}: wandb has {kept.get('eval/loss')}"
    assert settings["train"]["steps"] == STEPS and summary["end/val_loss"] == steps[-1].validation_loss, summary
    print(f"wandb keeps {len(steps)} steps, config and summary")
    return 0


if __name__ == "__main__":
    sys.exit(main())
