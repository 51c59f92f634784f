"""Random runs, each made in ways that must not change a bit: with state in stores, activations recomputed, streams in
random order, through another communicator; stopped and resumed from one placement to another; killed and started
again; within random budgets; on one rank, where sums are reproducible.

    tests/python_test.sh tests/sweep/random_runs.py [COUNT [FIRST]]

Run number N is the same for everybody. A difference, an exit code that is not expected or a hang is printed with the
command, and makes the exit code 1. The last lines count comparisons and refusals. QUERN is the program,
build/release/bin/quern if it is not set.
"""

import json
import os
import random
import re
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path

from quern.tokens.token_file import TokenWriter

QUERN = os.environ.get("QUERN", "build/release/bin/quern")
LIMIT = 300  # seconds of a run
REFUSED = (2, 4)  # by the config, by the device
UNITS = {"B": 1, "KiB": 1 << 10, "MiB": 1 << 20}


class Fault(Exception):
    pass


class Runs:
    """The runs of one random config, in a folder of their own."""

    def __init__(self, folder, settings, counts):
        self.folder, self.settings, self.counts = folder, settings, counts

    def start(self, name, changes, command="train"):
        settings = {**self.settings, **changes, "log.directory": str(self.folder / name)}
        line = [QUERN, command, str(self.folder / "run.toml")]
        for key, value in settings.items():
            line += ["--set", f"{key}={value if isinstance(value, str) else json.dumps(value)}"]
        environment = {**os.environ, "QUERN_VERIFY_PLANS": "1", "OMPI_ALLOW_RUN_AS_ROOT": "1",
                       "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}  # fmt: skip
        return subprocess.Popen(line, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
                                start_new_session=True)  # fmt: skip

    def end(self, process, expected=(0,)):
        try:
            output, _ = process.communicate(timeout=LIMIT)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            output, _ = process.communicate()
        if process.returncode not in expected:
            raise Fault(f"exit code {process.returncode}: {output[-800:]}\n  {shlex.join(process.args)}")
        return output

    def train(self, name, changes, expected=(0,)):
        """What it learned: losses by step and all tensors of the last checkpoint; None where it was refused."""
        process = self.start(name, changes)
        self.end(process, expected)
        return None if process.returncode else self.learned(name)

    def need_same(self, way, found, wanted):
        self.counts[way] += 1
        if found != wanted:
            losses = "" if found[0] != wanted[0] else "losses are equal, tensors are not"
            raise Fault(f"{way}: other bits. {losses or (found[0], wanted[0])}")

    def learned(self, name):
        losses = {}
        for line in (self.folder / name / "log.jsonl").read_text().splitlines():
            try:
                event = json.loads(line)
            except ValueError:
                continue  # of a run that was killed
            if event["event"] == "step":
                losses[event["step"]] = event["loss"]
        last = max((self.folder / name / "checkpoints").iterdir())
        return losses, tensors_of(last)

    def kill(self, name, changes, after, which):
        """Kills one of the processes."""
        process = self.start(name, changes)
        time.sleep(after)
        group = subprocess.run(["pgrep", "-g", str(process.pid)], capture_output=True, text=True).stdout.split()
        if group:
            try:
                os.kill(int(group[which % len(group)]), signal.SIGKILL)
            except ProcessLookupError:
                pass
        self.end(process, expected=range(-64, 256))
        self.counts["killed before its end" if process.returncode else "ended before it was killed"] += 1


def tensors_of(checkpoint):
    """All tensors by name, whole: type, row length and bytes of the rows, which follow each other as the ranks' files."""
    tensors = {}
    for path in sorted(checkpoint.glob("tensors*.safetensors")):
        data = path.read_bytes()
        length = int.from_bytes(data[:8], "little")
        for name, entry in json.loads(data[8 : 8 + length]).items():
            begin, end = (8 + length + offset for offset in entry["data_offsets"])
            kind = entry["dtype"], tuple(entry["shape"][1:])
            before = tensors.setdefault(name, (*kind, b""))
            tensors[name] = (*kind, before[2] + data[begin:end])
    return tensors


def model(draw):
    """Sizes that nothing divides well."""
    name = draw.choice(["llama", "qwen2"])
    heads, width = draw.choice([1, 2, 3, 4]), draw.choice([4, 8, 10, 16])
    sizes = {
        "vocab_size": draw.choice([257, 300, 512]),
        "hidden_size": heads * width,
        "intermediate_size": draw.choice([24, 33, 48, 72]),
        "num_hidden_layers": draw.choice([1, 2, 3, 5]),
        "num_attention_heads": heads,
        "num_key_value_heads": draw.choice([n for n in (1, 2, 3, 4) if heads % n == 0]),
        "max_position_embeddings": 64,
        "tie_word_embeddings": draw.random() < 0.5,
    }
    return {"model.id": name, **{f"model.{name}.{key}": value for key, value in sizes.items()}}


def precision(draw):
    name = draw.choice(["fp32", "bf16", "e4m3", "e4m3", "e5m2", "int8", "int8"])
    options = {}
    if name in ("e4m3", "e5m2"):
        scalings = ["delayed", "current", "row", "block", "square"]
        options = {
            "activation_scaling": draw.choice(scalings),
            "gradient_scaling": draw.choice(scalings),
            "head": draw.choice(["quantized", "bf16"]),
            "transposed_weights": draw.choice(["kept", "made"]),
        }
    if name == "int8":
        products = ["output", "input_gradient", "weight_gradient"]
        options = {
            "gradient_rounding": draw.choice(["nearest", "stochastic"]),
            "products": draw.sample(products, draw.choice([1, 2, 3])),
        }
    return {"precision.id": name, **{f"precision.{name}.{key}": value for key, value in options.items()}}


def config(draw):
    ranks = draw.choice([1, 1, 2, 2, 3, 4])
    settings = {
        **model(draw),
        **precision(draw),
        "train.sequence": draw.choice([7, 16, 25]),
        "train.micro_batch": draw.choice([1, 2, 3]),
        "train.steps": draw.choice([4, 5, 6]),
        "train.seed": draw.randrange(1000),
        "train.loss_chunk": draw.choice([0, 0, 5, 16]),
        "train.z_loss": draw.choice([0.0, 1e-3]),
        "train.eval_every": draw.choice([0, 2]),
        "train.eval_batches": 2,
        "train.accumulation": ranks * draw.choice([1, 1, 2, 3]) + draw.choice([0, 0, 1]),
        "data.documents": draw.choice(["joined", "masked"]),
        "optimizer.master": draw.choice(["fp32", "bf16"]),
        "optimizer.gradient": draw.choice(["fp32", "bf16"]),
        "optimizer.adamw.moments": draw.choice(["fp32", "bf16"]),
        "optimizer.clip_norm": draw.choice([0.0, 0.1, 1.0]),
        "schedule.id": "constant",
        "checkpoint.every": draw.choice([0, 1, 2]),
        "log.scales_every": draw.choice([0, 0, 2]),
        "parallel.check_every": draw.choice([0, 1, 2]),
        "parallel.ranks": ranks,
        "device.cpu.threads": 1,
    }
    if ranks > 1:
        settings["parallel.communicator"] = "memcpy"
        settings["parallel.shard_optimizer"] = draw.choice(["none", "ranks"])
        if settings["parallel.shard_optimizer"] == "ranks":
            settings["parallel.shard_gradients"] = draw.choice(["none", "ranks"])
    return settings


def placement(draw, settings):
    """What changes no bit."""
    changes, ranks = {}, settings["parallel.ranks"]
    if draw.random() < 0.6:
        changes = {"device.cpu.streams": "shuffled", "device.cpu.shuffle_seed": draw.randrange(1000)}
    stores = ["host", "host", "zerocopy", "device:40%,host", "device:70%,zerocopy"] if ranks == 1 else ["host"]
    if settings.get("parallel.shard_optimizer") == "ranks" and draw.random() < 0.5:
        changes["parallel.shard_weights"] = "ranks"
    kinds = ["master", "moments", "activations"]
    if ranks == 1 or settings.get("parallel.shard_gradients") == "ranks":
        kinds.append("gradients")
    if ranks == 1 or "parallel.shard_weights" in changes:
        kinds.append("weights")
    for kind in kinds:
        if draw.random() < 0.5:
            changes[f"memory.{kind}"] = draw.choice(stores[:3] if kind == "activations" else stores)
    if draw.random() < 0.5:
        changes["memory.recompute"] = draw.sample(["swiglu", "norm", "ffn", "qkv", "att"], draw.choice([1, 2]))
    if ranks > 1 and draw.random() < 0.3 and shutil.which("mpirun"):
        changes["parallel.communicator"] = "mpi"
        changes["parallel.mpi.staging"] = draw.choice(["pinned", "none"])
        changes["parallel.mpi.piece_kib"] = draw.choice([1, 64])
    elif ranks > 1:
        changes["parallel.memcpy.piece_kib"] = draw.choice([1, 8, 8192])
        changes["parallel.memcpy.through"] = draw.choice(["peer", "host"])
    return changes


def try_placements(draw, runs):
    settings = runs.settings
    wanted = runs.train("whole", {})
    other = placement(draw, settings)
    began = time.monotonic()
    runs.need_same("placed otherwise", runs.train("placed", other), wanted)
    seconds = time.monotonic() - began
    first, second = draw.sample([other, {}], 2)
    runs.train("resumed", {**first, "train.steps": draw.randrange(1, settings["train.steps"])})
    runs.need_same("resumed", runs.train("resumed", second), wanted)
    saving = {**other, "checkpoint.every": 1}
    runs.kill("killed", {**saving, "parallel.timeout": 20.0}, draw.uniform(0, seconds), draw.randrange(6))
    _, tensors = runs.train("killed", saving)
    runs.need_same("started again", (None, tensors), (None, wanted[1]))
    return wanted


def try_budgets(draw, runs, wanted):
    total = re.search(r"total +([\d.]+) (\w+)", runs.end(runs.start("plan", {}, "plan")))
    size = float(total[1]) * UNITS[total[2]]
    for number in range(2):
        budgets = {
            "memory.device_budget": f"{int(size * draw.uniform(0.35, 1.05))}B",
            "memory.host_budget": f"{int(size * draw.uniform(0.5, 4))}B",
            "memory.stores": draw.choice([["host"], ["zerocopy"], ["host", "zerocopy"]]),
        }
        found = runs.train(f"budget-{number}", budgets, expected=(0, *REFUSED))
        if found:
            runs.need_same("within a budget", found, wanted)
        else:
            runs.counts["within a budget: refused"] += 1


def try_one_rank(runs):
    sums = {"parallel.reduction": "reproducible", "optimizer.gradient": "fp32", "parallel.shard_gradients": "none"}
    several = runs.train("several", sums, expected=(0, *REFUSED))
    alone = {"parallel.ranks": 1, "parallel.communicator": "none", "parallel.shard_optimizer": "none"}
    if several:
        runs.need_same("on one rank", runs.train("one", {**sums, **alone}), several)
    else:
        runs.counts["on one rank: refused"] += 1


def try_run(number, folder, counts):
    draw = random.Random(number)
    runs = Runs(folder, config(draw), counts)
    tokens = [min(256, int(draw.expovariate(1 / 40))) for _ in range(6000)]
    with TokenWriter(folder / "text.tok", vocab_size=257, separator_token=5, with_mask=True) as out:
        out.append(tokens, [draw.random() < 0.9 for _ in tokens])
    text = json.dumps(str(folder / "text.tok"))
    (folder / "run.toml").write_text(f"[data.tokens]\ntrain = {text}\nvalidation = {text}\n")
    wanted = try_placements(draw, runs)
    if runs.settings["parallel.ranks"] == 1:
        try_budgets(draw, runs, wanted)
    else:
        try_one_rank(runs)


def main():
    count, first = [int(word) for word in sys.argv[1:]] + [6, 0][len(sys.argv) - 1 :]
    faults, counts = 0, Counter()
    for number in range(first, first + count):
        folder = Path(tempfile.mkdtemp(prefix="quern-random-"))
        try:
            try_run(number, folder, counts)
        except Fault as fault:
            faults += 1
            print(f"run {number}: {fault}", flush=True)
        shutil.rmtree(folder)
    for way, times in counts.items():
        print(f"  {times:4} {way}")
    print(f"{count} random runs from {first} on, {faults} with a fault")
    sys.exit(1 if faults else 0)


if __name__ == "__main__":
    main()
