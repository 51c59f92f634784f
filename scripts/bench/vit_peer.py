#!/usr/bin/env python3
"""Training speed of timm's vision transformers under torch.compile in bf16, on the shapes of a quern config; needs a GPU.

    python3 scripts/bench/vit_peer.py configs/vit/base.toml [--steps 10] [--set a.b=v] [--json]

Weights, gradients and moments are bf16 (--autocast: fp32, under autocast to bf16), AdamW is the fused one, attention is
torch's scaled_dot_product_attention, nothing is recomputed or dropped. Images are random and on the GPU already. Beside it:

    quern bench configs/vit/base.toml --set optimizer.master=bf16 --set optimizer.gradient=bf16 --set optimizer.adamw.moments=bf16

whose tokens per second divided by train.sequence are images per second. Needs torch and timm.
"""

import json
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

FIELDS = {"img_size": 224, "patch_size": 16, "in_chans": 3, "num_classes": 1000, "embed_dim": None, "depth": None,
          "num_heads": None, "mlp_ratio": 4.0, "qkv_bias": True, "class_token": True, "global_pool": "token"}


def value(run, key, default):
    found = run.find(key)
    return default if found is None else found


def make_model(run, torch, dtype):
    from timm.models.vision_transformer import VisionTransformer

    torch.manual_seed(1)
    with torch.device("cuda"):
        model = VisionTransformer(**{name: value(run, f"model.vit.{name}", default) for name, default in FIELDS.items()})
    return model.to(dtype).train()


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("config", help="a quern config: [model.vit] and [train] are read")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of it")
    parser.add_argument("--warmup", type=int, default=3, help="steps before timing (default 3)")
    parser.add_argument("--steps", type=int, default=10, help="timed steps (default 10)")
    parser.add_argument("--mode", default="default", help="of torch.compile (default: default)")
    parser.add_argument("--autocast", action="store_true", help="fp32 weights under autocast, as timm's train.py --amp")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args(arguments)

    import timm
    import torch
    import torch.nn.functional as F

    if not torch.cuda.is_available():
        raise Fault("torch", "no GPU", code=RESOURCES)
    run = RunConfig(options.config, options.set)
    dtype = torch.float32 if options.autocast else torch.bfloat16
    model = make_model(run, torch, dtype)
    compiled = torch.compile(model, mode=options.mode, dynamic=False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, betas=(0.9, 0.95), weight_decay=0.05, fused=True)
    batch, accumulation = run["train.micro_batch"], value(run, "train.accumulation", 1)
    size, channels = value(run, "model.vit.img_size", 224), value(run, "model.vit.in_chans", 3)
    smoothing = value(run, "model.vit.label_smoothing", 0.0)
    images = torch.randn(2, batch, channels, size, size, device="cuda", dtype=dtype)
    labels = torch.randint(value(run, "model.vit.num_classes", 1000), (2, batch), device="cuda")
    seconds = []
    for step in range(options.warmup + options.steps):
        torch.cuda.synchronize()
        begin = time.perf_counter()
        for number in range(accumulation):
            with torch.autocast("cuda", torch.bfloat16, enabled=options.autocast):
                logits = compiled(images[number % 2])
                loss = F.cross_entropy(logits.float(), labels[number % 2], label_smoothing=smoothing) / accumulation
            loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        torch.cuda.synchronize()
        if step >= options.warmup:
            seconds.append(time.perf_counter() - begin)
    count = batch * accumulation
    result = {
        "images_per_second": count / statistics.median(seconds),
        "slowest": count / max(seconds),
        "fastest": count / min(seconds),
        "micro_batch": batch,
        "accumulation": accumulation,
        "parameters": sum(parameter.numel() for parameter in model.parameters()),
        "peak_bytes": torch.cuda.max_memory_allocated(),
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "timm": timm.__version__,
    }
    if options.json:
        print(json.dumps(result))
    else:
        print(f"{three_digits(result['images_per_second'])} images/s (from {three_digits(result['slowest'])} to "
              f"{three_digits(result['fastest'])}), {batch} x {accumulation}, {result['parameters'] / 1e6:.1f}M parameters, "
              f"peak {result['peak_bytes'] / 2**30:.1f} GiB, torch {torch.__version__}, timm {timm.__version__}, "
              f"{result['device']}")


if __name__ == "__main__":
    sys.exit(main())
