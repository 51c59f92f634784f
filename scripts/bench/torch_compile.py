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
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
import torch_steps
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.fault import RESOURCES, Fault
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
    compiled = torch.compile(model, mode=options.mode, dynamic=False)
    generator = torch.Generator("cuda").manual_seed(1)
    shape = (4, micro_batch, sequence)
    tokens = torch.randint(vocabulary, shape, device="cuda", generator=generator)

    def micro_loss(number):
        rows = tokens[number % len(tokens)]
        return compiled(input_ids=rows, labels=rows, use_cache=False).loss / accumulation

    return torch_steps.timed_steps(torch, model, micro_loss, accumulation, 0.1, options)


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
    torch_steps.add_arguments(parser, "[model]", warmup=2, steps=5)
    parser.add_argument("--micro-batch", type=int, help="first size to try (default: the config's)")
    options = parser.parse_args(arguments)

    import torch
    import transformers

    torch_steps.need_gpu(torch)
    run = RunConfig(options.config, options.set)
    micro_batch, accumulation, seconds, loss = largest_that_fits(run, options, torch)
    sequence = run["train.sequence"]
    result = torch_steps.result(
        torch, "tokens", micro_batch * accumulation * sequence, seconds, micro_batch=micro_batch, accumulation=accumulation,
        sequence=sequence, loss=loss, transformers=transformers.__version__)
    if options.json:
        print(json.dumps(result))
    else:
        print(torch_steps.line(result, "tokens", "tok", f"{micro_batch} x {accumulation} x {sequence}, transformers "
                               f"{transformers.__version__}"))


if __name__ == "__main__":
    sys.exit(main())
