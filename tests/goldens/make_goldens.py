#!/usr/bin/env python3
"""Makes the golden cases: tiny Hugging Face models with their exact logits, loss and gradients.

For each case, tests/goldens/<case>/ receives
  config.json          as transformers writes it
  model.safetensors    fp32 weights as transformers writes them (a tied head is absent)
  golden.safetensors   tokens  (B, T) int32
                       targets (B, T) int32, targets[b, t] labels logits[b, t]; -1 is ignored
                       logits  (B, T, V) fp32
                       loss    (1) fp32, mean cross-entropy over the targets that are not -1
                       grad.<HF parameter name> fp32, d loss / d parameter (a tied head's share is
                       in the embedding's)
Norm weights and biases are random too, so that a missing one shows.

Precision: the weights are fp32 numbers; everything computed from them is float64, rounded once to
fp32 when stored, so a relative tolerance of 1e-5 tests the reader and not this file. double() alone
does not give that: transformers casts to fp32 inside RMSNorm, softmax and rope (inv_freq, angles,
cos, sin). `float64_only` turns those casts into float64 and then refuses every operator that still
produces fp32. Each case is also run through the unpatched model; the differences, printed, are what
transformers' own fp32 islands (norm, softmax, rope) cost: up to 9e-7 of a tensor's largest element,
and 2e-6 for a run wholly in fp32.

Cases of llama and qwen2 were made with Python 3.11.2, torch 1.13.1, transformers 4.46.3, safetensors 0.8.0 and numpy
1.24.2. On Debian 12:

    apt-get install --no-install-recommends python3-torch libopenblas0-openmp
    python3.11 -m pip install --target site transformers==4.46.3 safetensors==0.8.0 numpy==1.24.2
    PYTHONPATH=site /usr/bin/python3 tests/goldens/make_goldens.py [case ...]

Other families need a newer transformers (4.51.3 made the cases that are here, and 5.24.0 cases whose config.json says so);
cases of models that it lacks are named and left out. With --missing only cases whose folder is absent are made. The files are the same, byte for byte, from run to run with the same versions on
one machine.
"""

import argparse
import contextlib
import pathlib
import shutil
import sys

import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM

VOCAB = 97
BATCH = 2
IGNORED = -1


def family(model_type, **fields):
    return AutoConfig.for_model(model_type, vocab_size=VOCAB, **fields)


def longrope(rms_norm_eps=1e-5, **fields):
    """Phi-3 whose short factors hold for 12 tokens."""
    return family(
        "phi3", hidden_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1, intermediate_size=40,
        max_position_embeddings=64, original_max_position_embeddings=12, sliding_window=None, partial_rotary_factor=0.75,
        rope_scaling={"type": "longrope", "short_factor": [1.0, 1.05, 1.1, 1.2, 1.3, 1.5],
                      "long_factor": [1.0, 1.5, 2.5, 4.0, 6.5, 9.0]} | fields, rms_norm_eps=rms_norm_eps,
        tie_word_embeddings=True, **IDS)


def qwen2(**fields):
    return family("qwen2", use_sliding_window=False, **fields)


def llama(**fields):
    return family("llama", bos_token_id=1, eos_token_id=2, **fields)


# Ids of special tokens whose defaults are beyond the vocabulary.
IDS = {"bos_token_id": 1, "eos_token_id": 2, "pad_token_id": None}


# name -> (seed, sequence length, config). Odd sequence lengths and widths that are no multiple of
# a vector are deliberate.
CASES = {
    "qwen2_tied_gqa": (101, 19, lambda: qwen2(
        hidden_size=32, num_hidden_layers=3, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=64, rope_theta=1000000.0,
        tie_word_embeddings=True)),
    "qwen2_untied": (102, 16, lambda: qwen2(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=56, max_position_embeddings=64, rope_theta=10000.0,
        tie_word_embeddings=False)),
    "llama_mha_untied": (103, 13, lambda: llama(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2,
        intermediate_size=56, max_position_embeddings=64, tie_word_embeddings=False)),
    "llama_gqa_tied": (104, 17, lambda: llama(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=64, rms_norm_eps=1e-5,
        rope_theta=500000.0, tie_word_embeddings=True)),
    # Wavelengths 6.3 11.2 19.9 | 35.3 62.8 | 112 199 353; the bands part at 96/4 and 96/1.
    # Heads x head_dim = 64 is not the hidden size.
    "llama3_rope": (105, 48, lambda: llama(
        hidden_size=48, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        head_dim=16, intermediate_size=40, max_position_embeddings=768, rms_norm_eps=1e-5,
        rope_theta=100.0, tie_word_embeddings=True,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0,
                      "high_freq_factor": 4.0, "original_max_position_embeddings": 96})),
    "llama_linear_rope": (106, 23, lambda: llama(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4,
        intermediate_size=48, max_position_embeddings=64, tie_word_embeddings=True,
        rope_scaling={"rope_type": "linear", "factor": 2.0})),
    # Of 8 frequencies the ramp keeps 0-1, mixes 2-3 and divides 4-7 by the factor; cos and sin are
    # scaled by 0.1 ln 4 + 1. Without original_max_position_embeddings every transformers version
    # takes max_position_embeddings as the original length.
    "llama_yarn_rope": (107, 24, lambda: llama(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=1,
        intermediate_size=48, max_position_embeddings=256, tie_word_embeddings=True,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_fast": 8.0})),
    # A large epsilon, so that its place in the formula shows.
    "llama_one_layer": (108, 13, lambda: llama(
        hidden_size=32, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=1,
        intermediate_size=24, max_position_embeddings=32, rms_norm_eps=1e-3,
        tie_word_embeddings=False)),
    "llama_biases": (109, 11, lambda: llama(
        hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=20, max_position_embeddings=64, attention_bias=True, mlp_bias=True,
        tie_word_embeddings=True,
        rope_scaling={"rope_type": "yarn", "factor": 4.0, "beta_slow": 0.5, "attention_factor": 1.3,
                      "original_max_position_embeddings": 16})),
    # As llama3_rope, in other bands.
    "llama3_bands": (111, 31, lambda: llama(
        hidden_size=24, num_hidden_layers=1, num_attention_heads=3, num_key_value_heads=3,
        head_dim=16, intermediate_size=20, max_position_embeddings=128, rope_theta=100.0, tie_word_embeddings=True,
        rope_scaling={"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 2.0,
                      "high_freq_factor": 8.0, "original_max_position_embeddings": 96})),
    "qwen2_odd": (110, 11, lambda: qwen2(
        hidden_size=40, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=5,
        intermediate_size=20, max_position_embeddings=64, tie_word_embeddings=True)),
    # Heads x head_dim is not the hidden size, below it and above it; odd numbers of heads.
    "qwen3_tied": (201, 19, lambda: family(
        "qwen3", hidden_size=32, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        head_dim=10, intermediate_size=40, max_position_embeddings=64, rope_theta=1000000.0,
        use_sliding_window=False, tie_word_embeddings=True)),
    "qwen3_bias": (202, 13, lambda: family(
        "qwen3", hidden_size=40, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
        head_dim=8, intermediate_size=24, max_position_embeddings=64, rope_theta=10000.0,
        rms_norm_eps=1e-4, attention_bias=True, use_sliding_window=False,
        tie_word_embeddings=False)),
    "mistral_window": (211, 19, lambda: family(
        "mistral", hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=64, sliding_window=5, rms_norm_eps=1e-5,
        tie_word_embeddings=False, **IDS)),
    "mistral_full": (212, 13, lambda: family(
        "mistral", hidden_size=32, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
        head_dim=12, intermediate_size=24, max_position_embeddings=64, sliding_window=None,
        rope_theta=1000000.0, tie_word_embeddings=True, **IDS)),
    # Layers 1 and 3 have no rope.
    "smollm3_nope": (221, 17, lambda: family(
        "smollm3", hidden_size=32, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=64, rope_theta=5000000.0,
        no_rope_layers=[1, 0, 1, 0], use_sliding_window=False, tie_word_embeddings=True, **IDS)),
    # Layer 1 has no rope, by the interval.
    "smollm3_interval": (222, 11, lambda: family(
        "smollm3", hidden_size=24, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=20, max_position_embeddings=64, no_rope_layer_interval=2,
        use_sliding_window=False, tie_word_embeddings=False, **IDS)),
    # All layers rotate: the gradient of a bias on keys without rope is zero but for rounding.
    "smollm3_biases": (223, 11, lambda: family(
        "smollm3", hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=3,
        intermediate_size=20, max_position_embeddings=64, no_rope_layers=[1, 1],
        attention_bias=True, mlp_bias=True, use_sliding_window=False, **IDS)),
    "olmo2_gqa": (231, 17, lambda: family(
        "olmo2", hidden_size=48, num_hidden_layers=2, num_attention_heads=6, num_key_value_heads=2,
        intermediate_size=40, max_position_embeddings=64, rope_theta=500000.0, rms_norm_eps=1e-5,
        tie_word_embeddings=False, **IDS)),
    "olmo2_mha": (232, 13, lambda: family(
        "olmo2", hidden_size=40, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=5,
        intermediate_size=24, max_position_embeddings=64, tie_word_embeddings=True, **IDS)),
    "olmo2_bias": (233, 11, lambda: family(
        "olmo2", hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=20, max_position_embeddings=64, attention_bias=True, rms_norm_eps=1e-3,
        tie_word_embeddings=False, **IDS)),
    "phi3_window": (241, 19, lambda: family(
        "phi3", hidden_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=40, max_position_embeddings=64, original_max_position_embeddings=64,
        sliding_window=7, rms_norm_eps=1e-5, resid_pdrop=0.0, tie_word_embeddings=False, **IDS)),
    "phi3_partial": (242, 17, lambda: family(
        "phi3", hidden_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        intermediate_size=40, max_position_embeddings=64, original_max_position_embeddings=64,
        sliding_window=None, partial_rotary_factor=0.75, resid_pdrop=0.0, tie_word_embeddings=True,
        **IDS)),
    "phi3_longrope_short": (243, 11, longrope),
    "phi3_longrope_long": (244, 19, lambda: longrope(rms_norm_eps=1e-3, attention_factor=1.25)),
    "glm4_bias": (251, 17, lambda: family(
        "glm4", hidden_size=48, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        head_dim=16, intermediate_size=40, max_position_embeddings=64, partial_rotary_factor=0.5,
        attention_bias=True, rms_norm_eps=1e-5, tie_word_embeddings=False, **IDS)),
    "glm4_plain": (252, 13, lambda: family(
        "glm4", hidden_size=32, num_hidden_layers=2, num_attention_heads=5, num_key_value_heads=1,
        head_dim=8, intermediate_size=24, max_position_embeddings=64, partial_rotary_factor=0.5,
        attention_bias=False, tie_word_embeddings=True, **IDS)),
    "glm4_quarter": (253, 11, lambda: family(
        "glm4", hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        head_dim=16, intermediate_size=20, max_position_embeddings=64, partial_rotary_factor=0.25,
        tie_word_embeddings=True, **IDS)),
    # Caps low enough to bend most scores and logits; layers 0 and 2 look at a window.
    "gemma2_caps": (261, 19, lambda: family(
        "gemma2", hidden_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=10, intermediate_size=40, max_position_embeddings=64, sliding_window=5,
        query_pre_attn_scalar=13, attn_logit_softcapping=1.5, final_logit_softcapping=2.0, **IDS)),
    "gemma2_plain": (262, 13, lambda: family(
        "gemma2", hidden_size=36, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        head_dim=8, intermediate_size=24, max_position_embeddings=64, sliding_window=64,
        attention_bias=True, query_pre_attn_scalar=8, attn_logit_softcapping=None,
        final_logit_softcapping=None, **IDS)),
    # Layer 1 looks at a window, by the list.
    "gemma2_listed": (263, 11, lambda: family(
        "gemma2", hidden_size=24, num_hidden_layers=2, num_attention_heads=3, num_key_value_heads=1,
        head_dim=16, intermediate_size=20, max_position_embeddings=64, sliding_window=4,
        layer_types=["full_attention", "sliding_attention"], query_pre_attn_scalar=5,
        tie_word_embeddings=False, **IDS)),
    # Layers 0 and 2 look at a window, with a base of their own.
    "gemma3_pattern": (271, 19, lambda: family(
        "gemma3_text", hidden_size=24, num_hidden_layers=3, num_attention_heads=6, num_key_value_heads=2,
        head_dim=10, intermediate_size=40, max_position_embeddings=64, sliding_window=5,
        layer_types=["sliding_attention", "full_attention", "sliding_attention"],
        sliding_window_pattern=2, query_pre_attn_scalar=13, rope_theta=1000000.0,
        rope_local_base_freq=10000.0, **IDS)),
    # Gemma 3's larger models scale the rope of layers that look at all tokens. transformers applies no
    # attn_logit_softcapping here.
    "gemma3_scaled": (272, 11, lambda: family(
        "gemma3_text", hidden_size=24, num_hidden_layers=3, num_attention_heads=3, num_key_value_heads=1,
        head_dim=8, intermediate_size=20, max_position_embeddings=64, sliding_window=4, attention_bias=True,
        layer_types=["full_attention", "sliding_attention", "full_attention"], query_pre_attn_scalar=7,
        final_logit_softcapping=2.0, tie_word_embeddings=False,
        rope_parameters={"full_attention": {"rope_type": "linear", "factor": 4.0, "rope_theta": 20000.0},
                         "sliding_attention": {"rope_type": "default", "rope_theta": 500.0}}, **IDS)),
    "gpt2_tied": (281, 17, lambda: family(
        "gpt2", n_embd=40, n_layer=2, n_head=5, n_positions=64, n_inner=None, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, layer_norm_epsilon=1e-4, bos_token_id=1, eos_token_id=2)),
    "gpt2_untied": (282, 13, lambda: family(
        "gpt2", n_embd=32, n_layer=2, n_head=2, n_positions=32, n_inner=56, resid_pdrop=0.0,
        embd_pdrop=0.0, attn_pdrop=0.0, activation_function="gelu", tie_word_embeddings=False,
        bos_token_id=1, eos_token_id=2)),
}


class RefuseFloat32(TorchDispatchMode):
    """Raises on any operator that produces an fp32 tensor."""

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        for value in out if isinstance(out, (tuple, list)) else (out,):
            # The real fp32 dtype: `torch.float32` means float64 while this mode is on.
            if isinstance(value, torch.Tensor) and str(value.dtype) == "torch.float32":
                raise RuntimeError(f"{func} produced fp32 inside float64_only")
        return out


@contextlib.contextmanager
def float64_only():
    """Within it, the names torch.float32, torch.float and Tensor.float() mean float64."""
    saved = torch.float32, torch.float, torch.Tensor.float
    torch.float32 = torch.float = torch.float64
    torch.Tensor.float = torch.Tensor.double
    torch.set_default_dtype(torch.float64)
    try:
        with RefuseFloat32():
            yield
    finally:
        torch.float32, torch.float, torch.Tensor.float = saved
        torch.set_default_dtype(torch.float32)


def build(config):
    return AutoModelForCausalLM.from_config(config, attn_implementation="eager")


def randomise(model, generator):
    """Random values for every parameter, at scales that make each one matter to the logits."""
    ones = 0 if model.config.model_type.startswith("gemma") else 1  # its norms multiply by 1 + weight
    with torch.no_grad():
        for name, p in model.named_parameters():
            noise = torch.randn(p.shape, generator=generator)
            if name.endswith("bias"):
                p.copy_(0.3 * noise)
            elif p.dim() == 1:
                p.copy_(ones + 0.2 * noise)
            elif any(part in name for part in ("embed_tokens", "lm_head", "wte", "wpe")):
                p.copy_(0.3 * noise)
            else:
                inputs = p.shape[0] if model.config.model_type == "gpt2" else p.shape[1]
                p.copy_(noise / inputs ** 0.5)


def make_batch(length, generator):
    tokens = torch.randint(VOCAB, (BATCH, length), generator=generator)
    tokens[:, length // 2] = tokens[0, 0]  # an embedding row that gathers several gradients
    targets = torch.full_like(tokens, IGNORED)
    targets[:, :-1] = tokens[:, 1:]
    for b in range(BATCH):
        targets[b, torch.randperm(length - 1, generator=generator)[:2 + b]] = IGNORED
    return tokens, targets


def loss_and_gradients(model, tokens, targets):
    model.zero_grad()
    logits = model(input_ids=tokens, use_cache=False).logits
    loss = F.cross_entropy(logits.reshape(-1, VOCAB), targets.reshape(-1), ignore_index=IGNORED)
    loss.backward()
    result = {"logits": logits.detach(), "loss": loss.detach().reshape(1)}
    result.update({"grad." + name: p.grad for name, p in model.named_parameters()})
    return result


def run_float64(config, weights, tokens, targets):
    """Builds the model inside float64_only too: rope computes its frequencies when it is built."""
    with float64_only():
        model = build(config).eval()
        model.load_state_dict({name: w.double() for name, w in weights.items()})
        return loss_and_gradients(model, tokens, targets)


def largest_relative(a, b):
    """The largest difference over all tensors, each relative to that tensor's largest element."""
    return max(((a[k].double() - b[k]).abs().max() / b[k].abs().max()).item() for k in b)


def make_case(name, folder):
    seed, length, make_config = CASES[name]
    try:
        config = make_config()
    except ValueError as error:  # transformers has no such model
        print(f"{name:18} left out: {str(error).splitlines()[0][:90]}")
        return 0
    generator = torch.Generator().manual_seed(seed)

    model = build(config).float().eval()
    randomise(model, generator)
    tokens, targets = make_batch(length, generator)

    exact = run_float64(config, dict(model.state_dict()), tokens, targets)
    golden = {"tokens": tokens.int(), "targets": targets.int()}
    golden.update({k: v.to(torch.float32).contiguous() for k, v in exact.items()})
    for key, value in golden.items():
        if value.is_floating_point() and not (value.isfinite().all() and value.any()):
            raise RuntimeError(f"{name}: {key} is not finite or all zero")

    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    (folder / "generation_config.json").unlink(missing_ok=True)
    save_file(golden, str(folder / "golden.safetensors"))

    stored = load_file(str(folder / "model.safetensors"))
    for key, value in stored.items():
        if not torch.equal(value, model.state_dict()[key]):
            raise RuntimeError(f"{name}: {key} was not stored as it was used")

    plain = largest_relative(loss_and_gradients(model, tokens, targets), exact)
    double = largest_relative(loss_and_gradients(model.double(), tokens, targets), exact)
    size = sum(f.stat().st_size for f in folder.iterdir())
    params = sum(p.numel() for p in model.parameters())
    print(f"{name:18} {params:8} {length:4} {exact['loss'].item():10.6f} {plain:12.1e} "
          f"{double:12.1e} {size:9}")
    return size


def main():
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("cases", nargs="*", metavar="case", help="default: all")
    parser.add_argument("--missing", action="store_true", help="only cases whose folder is absent")
    parser.add_argument("--out", type=pathlib.Path, default=pathlib.Path(__file__).parent)
    args = parser.parse_args()
    unknown = sorted(set(args.cases) - set(CASES))
    if unknown:
        sys.exit(f"unknown case {', '.join(unknown)}; the cases are {', '.join(CASES)}")

    torch.set_num_threads(1)
    print(f"{'case':18} {'params':>8} {'T':>4} {'loss':>10} {'fp32 off by':>12} "
          f"{'double() off':>12} {'bytes':>9}")
    names = [name for name in args.cases or CASES if not (args.missing and (args.out / name).exists())]
    total = sum(make_case(name, args.out / name) for name in names)
    print(f"{'total':18} {total:66}")


if __name__ == "__main__":
    main()
