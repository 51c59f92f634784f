#!/usr/bin/env python3
"""Training speed of timm's vision transformers under torch.compile in bf16, on the shapes of a quern config; needs a GPU.

    python3 scripts/bench/vit_peer.py configs/vit/base.toml [--steps 10] [--set a.b=v] [--json]

Weights, gradients and moments are bf16 (--autocast: fp32, under autocast to bf16), AdamW is the fused one, attention is
torch's scaled_dot_product_attention, nothing is recomputed or dropped. Images are random and on the GPU already. Beside it:

    quern bench configs/vit/base.toml --set optimizer.master=bf16 --set optimizer.gradient=bf16 --set optimizer.adamw.moments=bf16

whose tokens per second divided by train.sequence are images per second. Needs torch and timm.
"""

import json
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
import torch_steps
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
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
    torch_steps.add_arguments(parser, "[model.vit]", warmup=3, steps=10)
    parser.add_argument("--autocast", action="store_true", help="fp32 weights under autocast, as timm's train.py --amp")
    options = parser.parse_args(arguments)

    import timm
    import torch
    import torch.nn.functional as F

    torch_steps.need_gpu(torch)
    run = RunConfig(options.config, options.set)
    dtype = torch.float32 if options.autocast else torch.bfloat16
    model = make_model(run, torch, dtype)
    compiled = torch.compile(model, mode=options.mode, dynamic=False)
    batch, accumulation = run["train.micro_batch"], value(run, "train.accumulation", 1)
    size, channels = value(run, "model.vit.img_size", 224), value(run, "model.vit.in_chans", 3)
    smoothing = value(run, "model.vit.label_smoothing", 0.0)
    images = torch.randn(2, batch, channels, size, size, device="cuda", dtype=dtype)
    labels = torch.randint(value(run, "model.vit.num_classes", 1000), (2, batch), device="cuda")

    def micro_loss(number):
        with torch.autocast("cuda", torch.bfloat16, enabled=options.autocast):
            logits = compiled(images[number % 2])
            return F.cross_entropy(logits.float(), labels[number % 2], label_smoothing=smoothing) / accumulation

    seconds, _ = torch_steps.timed_steps(torch, model, micro_loss, accumulation, 0.05, options)
    result = torch_steps.result(
        torch, "images", batch * accumulation, seconds, micro_batch=batch, accumulation=accumulation,
        parameters=sum(parameter.numel() for parameter in model.parameters()), timm=timm.__version__)
    if options.json:
        print(json.dumps(result))
    else:
        print(torch_steps.line(result, "images", "images", f"{batch} x {accumulation}, {result['parameters'] / 1e6:.1f}M parameters, "
                               f"timm {timm.__version__}"))


if __name__ == "__main__":
    sys.exit(main())
