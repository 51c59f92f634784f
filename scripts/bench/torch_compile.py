#!/usr/bin/env python3
"""Training speed of transformers under torch.compile in bf16, on the shapes of a quern config; needs a GPU.

    python3 scripts/bench/torch_compile.py configs/qwen2.5/0.5b.toml [--steps 5] [--json]

Weights, gradients and moments are bf16, as in quern's configs for this comparison; AdamW is the fused one, attention is
torch's scaled_dot_product_attention, and nothing is recomputed. A step has as many sequences as the config's: where a
micro-batch does not fit it is halved, and accumulation doubled. Tokens are random. Needs torch and transformers.
"""

import gc
import json
import os
import statistics
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.fault import RESOURCES, Fault
from quern.base.figures import three_digits
from quern.runs.run_config import RunConfig

os.environ.setdefault("PYTORCH_ALLOC_CONF", "expandable_segments:True")
os.environ.setdefault("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True")  # its name before torch 2.9


def make_model(run, torch):
    from transformers import AutoModelForCausalLM

    torch.manual_seed(1)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(run.transformers_config(), attn_implementation="sdpa")
    return model.to(torch.bfloat16).train()


def train(run, micro_batch, accumulation, options, torch):
    """Seconds of each timed step, and the last loss."""
    model = make_model(run, torch)
    vocabulary, sequence = model.config.vocab_size, run["train.sequence"]
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.1, fused=True)
    compiled = torch.compile(model, mode=options.mode, dynamic=False)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (4, micro_batch, sequence)
    tokens = torch.randint(vocabulary, shape, device="cuda", generator=generator)
    seconds = []
    for step in range(options.warmup + options.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(accumulation):
            rows = tokens[number % len(tokens)]
            loss = compiled(input_ids=rows, labels=rows, use_cache=False).loss / accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= options.warmup:
            seconds.append(time.perf_counter() - begin)
    return seconds, loss.item() * accumulation


def largest_that_fits(run, options, torch):
    micro_batch, accumulation = options.micro_batch or run["train.micro_batch"], run["train.accumulation"]
    sequences = run["train.micro_batch"] * accumulation
    while True:
        accumulation = max(1, sequences // micro_batch)
        try:
            return micro_batch, accumulation, *train(run, micro_batch, accumulation, options, torch)
        except torch.OutOfMemoryError:
            pass  # outside of this block nothing holds the failed attempt's tensors
        if micro_batch == 1:
            raise Fault(options.config, "one sequence does not fit into this GPU's memory", code=RESOURCES)
        print(f"micro-batch {micro_batch} does not fit", file=sys.stderr)
        micro_batch //= 2
        gc.collect()
        torch._dynamo.reset()
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats()


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("config", help="a quern config: [model] and [train] are read")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of it")
    parser.add_argument("--micro-batch", type=int, help="first size to try (default: the config's)")
    parser.add_argument("--warmup", type=int, default=2, help="steps before timing (default 2)")
    parser.add_argument("--steps", type=int, default=5, help="timed steps (default 5)")
    parser.add_argument("--mode", default="default", help="of torch.compile (default: default)")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    import torch
    import transformers

    if not torch.cuda.is_available():
        raise Fault("torch", "no GPU", code=RESOURCES)
    run = RunConfig(options.config, options.set)
    micro_batch, accumulation, seconds, loss = largest_that_fits(run, options, torch)
    tokens = micro_batch * accumulation * run["train.sequence"]
    result = {
        "tokens_per_second": tokens / statistics.median(seconds),
        "slowest": tokens / max(seconds),
        "fastest": tokens / min(seconds),
        "micro_batch": micro_batch,
        "accumulation": accumulation,
        "sequence": run["train.sequence"],
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "loss": loss,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{three_digits(result['tokens_per_second'])} tok/s (from {three_digits(result['slowest'])} to "
              f"{three_digits(result['fastest'])}), {micro_batch} x {accumulation} x {run['train.sequence']}, peak "
              f"{result['peak_bytes'] / 2**30:.1f} GiB, torch {torch.__version__}, transformers "
              f"{transformers.__version__}, {result['device']}")


if __name__ == "__main__":
    sys.exit(main())
