#!/usr/bin/env python3
"""Makes the golden cases of image models: tiny vision transformers of timm with their exact logits, loss and gradients.

For each case, tests/image_goldens/<case>/ receives
  config.json          the fields of [model.vit]
  model.safetensors    fp32 weights by timm's names
  golden.safetensors   images  (B, C, H, W) fp32
                       targets (B) int32
                       logits  (B, K) fp32
                       loss    (1) fp32, mean cross-entropy with label smoothing
                       grad.<name> fp32, d loss / d parameter
All parameters are random, norms and biases too, so that a missing one shows. The weights are fp32 numbers; everything
computed from them is float64, rounded once to fp32 when stored.

Made with Python 3.11.2, torch 2.15.0 and timm 1.0.31:

    python make_image_goldens.py [case ...]
"""

import json
import pathlib
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import save_file
from timm.models.vision_transformer import VisionTransformer

BATCH = 3

# name -> (seed, label smoothing, fields of timm's VisionTransformer). Odd sizes are deliberate.
CASES = {
    "vit_token": (301, 0.1, dict(img_size=12, patch_size=4, embed_dim=24, depth=2, num_heads=3, num_classes=7)),
    "vit_mean": (302, 0.0, dict(img_size=10, patch_size=5, in_chans=1, embed_dim=22, depth=3, num_heads=2,
                                num_classes=5, mlp_ratio=48 / 11, qkv_bias=False, global_pool="avg")),
    "vit_without_class_token": (303, 0.2, dict(img_size=8, patch_size=2, embed_dim=16, depth=1, num_heads=1,
                                               num_classes=9, class_token=False, global_pool="avg")),
}


def make(name):
    seed, smoothing, fields = CASES[name]
    folder = pathlib.Path(__file__).parent / name
    folder.mkdir(exist_ok=True)
    generator = torch.Generator().manual_seed(seed)

    def normal(*shape):
        return torch.randn(*shape, generator=generator)

    model = VisionTransformer(**fields)
    assert isinstance(model.blocks[0].norm1, torch.nn.LayerNorm) and model.blocks[0].norm1.eps == 1e-6
    with torch.no_grad():
        for parameter_name, parameter in model.named_parameters():
            norm = "norm" in parameter_name and parameter_name.endswith("weight")
            parameter.copy_(normal(*parameter.shape) * 0.2 + (1 if norm else 0))
    weights = {key: value.detach().clone().contiguous() for key, value in model.state_dict().items()}
    save_file(weights, folder / "model.safetensors")

    model = model.double().eval()
    images = normal(BATCH, fields.get("in_chans", 3), fields["img_size"], fields["img_size"])
    targets = torch.randint(0, fields["num_classes"], (BATCH,), generator=generator)
    logits = model(images.double())
    loss = F.cross_entropy(logits, targets, label_smoothing=smoothing)
    loss.backward()
    golden = {"images": images, "targets": targets.int(), "logits": logits.detach().float(),
              "loss": loss.detach().float().reshape(1)}
    golden |= {"grad." + key: value.grad.float().contiguous() for key, value in model.named_parameters()}
    save_file(golden, folder / "golden.safetensors")
    config = {"architectures": ["VisionTransformer"], "model_type": "vit", **fields, "label_smoothing": smoothing}
    (folder / "config.json").write_text(json.dumps(config, indent=2) + "\n")


for case in sys.argv[1:] or CASES:
    make(case)
