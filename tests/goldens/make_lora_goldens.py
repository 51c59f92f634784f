#!/usr/bin/env python3
"""Makes the golden runs of LoRA: peft trains an adapter of some golden models for 20 steps in float64.

For each case, tests/goldens/<case>/lora/ receives
  adapter_config.json, adapter_model.safetensors   the adapter before the first step as peft saves it, fp32; B is not 0
  run.safetensors   tokens  (20, B, T) int32
                    targets (20, B, T) int32, targets[s, b, t] labels logits[s, b, t]
                    losses  (20) fp32, mean cross-entropy of each step
                    after.<name> fp32, the adapter behind the last step
AdamW with a learning rate of 0.01, betas 0.9 and 0.95, eps 1e-8 and no decay, without clipping. Made with Python 3.11.2,
torch 2.15.0, transformers 4.51.3 and peft 0.13.2:

    python3.11 -m pip install peft==0.13.2 transformers==4.51.3 accelerate==0.33.0 safetensors numpy==1.24.2
    python3.11 tests/goldens/make_lora_goldens.py [case ...]
"""

import argparse
import json
import pathlib
import shutil

import torch
import torch.nn.functional as F
from make_goldens import float64_only
from peft import LoraConfig, get_peft_model
from peft.utils import get_peft_model_state_dict
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM

STEPS, BATCH, LENGTH = 20, 2, 12
RANK, ALPHA = 8, 12
TARGETS = {
    "llama_gqa_tied": ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"],
    "qwen2_tied_gqa": ["q_proj", "v_proj", "down_proj"],
    "phi3_partial": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
    "gpt2_tied": ["c_attn", "c_proj", "c_fc"],
}


def make(folder: pathlib.Path, targets: list[str]) -> None:
    torch.manual_seed(7)
    base = AutoModelForCausalLM.from_pretrained(folder, torch_dtype=torch.float32, attn_implementation="eager")
    config = LoraConfig(r=RANK, lora_alpha=ALPHA, target_modules=targets, task_type="CAUSAL_LM",
                        fan_in_fan_out="gpt2" in folder.name)
    model = get_peft_model(base, config)
    for name, weight in model.named_parameters():
        if "lora_" in name:
            torch.nn.init.normal_(weight, std=0.1)
    out = folder / "lora"
    shutil.rmtree(out, ignore_errors=True)
    model.save_pretrained(out)
    (out / "README.md").unlink(missing_ok=True)
    written = json.loads((out / "adapter_config.json").read_text())
    written["target_modules"].sort()
    written["base_model_name_or_path"] = None  # not a path of this machine
    (out / "adapter_config.json").write_text(json.dumps(written, indent=2, sort_keys=True) + "\n")
    vocabulary = base.config.vocab_size
    tokens = torch.randint(0, vocabulary, (STEPS, BATCH, LENGTH))
    targets_of = torch.randint(0, vocabulary, (STEPS, BATCH, LENGTH))
    model.double()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=0.01, betas=(0.9, 0.95), eps=1e-8, weight_decay=0.0, foreach=False)
    losses = []
    with float64_only():
        for step in range(STEPS):
            logits = model(input_ids=tokens[step], use_cache=False).logits
            loss = F.cross_entropy(logits.view(-1, vocabulary), targets_of[step].view(-1))
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
            losses.append(loss.item())
    after = {f"after.{name}": value.float().contiguous() for name, value in get_peft_model_state_dict(model).items()}
    save_file({"tokens": tokens.int(), "targets": targets_of.int(), "losses": torch.tensor(losses, dtype=torch.float32),
               **after}, out / "run.safetensors")
    print(f"{folder.name}: {len(load_file(out / 'adapter_model.safetensors'))} tensors, loss "
          f"{losses[0]:.6f} to {losses[-1]:.6f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("case", nargs="*", default=list(TARGETS))
    for case in parser.parse_args().case:
        make(pathlib.Path(__file__).parent / case, TARGETS[case])


if __name__ == "__main__":
    main()
