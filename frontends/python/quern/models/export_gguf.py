"""Writes a model as one GGUF file, for llama.cpp and programs made of it.

    quern-tools export-gguf runs/demo model.gguf --dtype bf16      # a run, or a checkpoint: its newest weights
    quern-tools export-gguf runs/demo/export model.gguf            # a Hugging Face model

`quern export CHECKPOINT FILE --to gguf` is the first of these. Needs the Python package gguf. Models of the families
llama, mistral, qwen2 and qwen3 without attention windows; the tokenizer is a byte-level BPE that llama.cpp has too.
"""

import math
import os
import subprocess
from argparse import ArgumentParser, Namespace
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from quern.base.arguments import path_argument
from quern.base.fault import CONFIG, RESOURCES, Fault, importing, printable, reading, starting, writing
from quern.base.files import open_partial, partial_folder, partial_of
from quern.base.installation import find_quern
from quern.tokens.begin_tokens import begin_tokens
from quern.tokens.encoding import load_tokenizer
from quern.tokens.tokenizer_config import read_object, read_tokenizer_config

Config = dict[str, Any]
Array = NDArray[Any]

DTYPES = {"fp32": "F32", "bf16": "BF16"}  # of matrices; vectors are always fp32, as llama.cpp needs them
FAMILIES = {"llama": "LLAMA", "mistral": "LLAMA", "qwen2": "QWEN2", "qwen3": "QWEN3"}  # model_type: llama.cpp's name
CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|"
REST = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
SPLITS = {CONTRACTIONS + r"\p{N}{1,3}" + REST: "llama-bpe", CONTRACTIONS + r"\p{N}" + REST: "qwen2"}


def llama_cpp_split(tokenizer: Config, where: Path) -> str:
    """What llama.cpp calls the rule by which the tokenizer splits a text into words."""
    rules = tokenizer.get("pre_tokenizer") or {}
    rules = rules.get("pretokenizers", [rules])
    kinds = [rule.get("type") for rule in rules]
    if kinds == ["ByteLevel"] and rules[0].get("use_regex", True) and not rules[0].get("add_prefix_space"):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and rules[0].get("individual_digits") and rules[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not rules[1].get("use_regex", True):
        if name := SPLITS.get(rules[0].get("pattern", {}).get("Regex")):
            return name
    raise Fault(where, "llama.cpp has no such way to split a text", kinds, "as GPT-2, SmolLM, Llama 3 or Qwen2",
                "export without it: --tokenizer none")


def check_family(config: Config, where: Path) -> None:
    def refuse(what: str, found: object, expected: object) -> None:
        raise Fault(where, what, found, expected, "export it with --to hf")

    if config.get("model_type") not in FAMILIES:
        refuse("models of this type are not written as GGUF", config.get("model_type"), ", ".join(FAMILIES))
    if config.get("hidden_act") != "silu":
        refuse("hidden_act", config.get("hidden_act"), "silu")
    windows = config["model_type"] == "mistral" or config.get("use_sliding_window")
    if (windows and config.get("sliding_window")) or "sliding_attention" in (config.get("layer_types") or ()):
        refuse("attention windows", config.get("sliding_window"), "none")
    if config["model_type"] == "qwen3" and config.get("attention_bias"):
        refuse("attention_bias", True, False)


def rope_of(config: Config) -> Config:
    """rope_theta and the scaling, wherever transformers 4 or 5 has them."""
    scaling = config.get("rope_parameters") or config.get("rope_scaling") or {}
    kind = scaling.get("rope_type", scaling.get("type", "default"))
    return {**scaling, "rope_type": kind, "rope_theta": scaling.get("rope_theta", config.get("rope_theta", 10000.0))}


def llama3_divisors(rope: Config, head_dim: int) -> Array:
    """By what each of head_dim / 2 frequencies is divided (transformers' modeling_rope_utils, "llama3")."""
    wavelength = 2 * math.pi * rope["rope_theta"] ** (np.arange(0, head_dim, 2) / head_dim)
    context, low, high = (float(rope[key]) for key in (
        "original_max_position_embeddings", "low_freq_factor", "high_freq_factor"))
    smooth = np.clip((context / wavelength - low) / (high - low), 0, 1)
    return np.asarray(1 / ((1 - smooth) / rope["factor"] + smooth), np.float32)


def weights(folder: Path) -> Iterator[tuple[str, Array]]:
    """The tensors of a Hugging Face model by name: fp32, and bf16 as its bits (uint16)."""
    from gguf.utility import SafetensorsLocal

    kinds = {"F32": np.float32, "BF16": np.uint16}
    paths = sorted(folder.glob("model*.safetensors"))
    if not paths:
        raise Fault(folder, "no model*.safetensors", advice="give a Hugging Face model, a run or a checkpoint")
    for path in paths:
        with reading(path):
            tensors = SafetensorsLocal(path).tensors
        for name, tensor in tensors.items():
            if tensor.dtype not in kinds:
                raise Fault(path, f"dtype of {name}", tensor.dtype, "F32 or BF16")
            yield name, tensor.mmap_bytes().view(kinds[tensor.dtype]).reshape(tensor.shape)


def for_rope_of_pairs(values: Array, heads: int) -> Array:
    """Rows of a query or key projection, whose head has its frequencies in two halves, in the order of llama.cpp's llama:
    both rows of a frequency together."""
    return values.reshape(heads, 2, -1, *values.shape[1:]).swapaxes(1, 2).reshape(values.shape)


def rounded(values: Array, dtype: str) -> Array:
    """As `dtype`: fp32, or the bits of bf16, to nearest even."""
    if dtype == "fp32":
        return values if values.dtype == np.float32 else (values.astype(np.uint32) << 16).view(np.float32)
    if values.dtype == np.uint16:
        return values
    bits = values.view(np.uint32)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) >> 16).astype(np.uint16)


def add_shapes(writer: Any, config: Config, head_dim: int) -> None:
    import gguf

    rope = rope_of(config)
    heads = config["num_attention_heads"]
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(head_dim)
    writer.add_value_length(head_dim)
    writer.add_rope_dimension_count(head_dim)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    writer.add_rope_freq_base(rope["rope_theta"])
    if rope["rope_type"] == "llama3":
        writer.add_tensor("rope_freqs.weight", llama3_divisors(rope, head_dim))
    elif rope["rope_type"] in ("linear", "yarn"):
        if rope.get("beta_fast", 32) != 32 or rope.get("beta_slow", 1) != 1 or rope.get("attention_factor"):
            raise Fault("rope_scaling", "yarn with settings of its own", rope, "beta_fast 32, beta_slow 1")
        writer.add_rope_scaling_type(gguf.RopeScalingType(rope["rope_type"]))
        writer.add_rope_scaling_factor(rope["factor"])
        writer.add_rope_scaling_orig_ctx_len(
            int(rope.get("original_max_position_embeddings") or config["max_position_embeddings"]))
    elif rope["rope_type"] != "default":
        raise Fault("rope_scaling", "rope_type", rope["rope_type"], "default, linear, llama3 or yarn")


def add_tensors(writer: Any, folder: Path, config: Config, dtype: str) -> None:
    import gguf

    arch = gguf.MODEL_ARCH[FAMILIES[config["model_type"]]]
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    heads = config["num_attention_heads"]
    for name, values in weights(folder):
        if not (known := names.get_name(name, try_suffixes=(".weight", ".bias"))):
            raise Fault(folder, "a tensor that GGUF has no name for", name)
        if arch == gguf.MODEL_ARCH.LLAMA and ".self_attn.q_proj." in name:
            values = for_rope_of_pairs(values, heads)
        if arch == gguf.MODEL_ARCH.LLAMA and ".self_attn.k_proj." in name:
            values = for_rope_of_pairs(values, config.get("num_key_value_heads") or heads)
        kept = dtype if values.ndim > 1 else "fp32"
        writer.add_tensor(known, rounded(values, kept), raw_shape=values.shape,
                          raw_dtype=gguf.GGMLQuantizationType[DTYPES[kept]])


def add_tokenizer(writer: Any, folder: Path, size: int) -> None:
    import gguf

    path = folder / "tokenizer.json"
    spec = read_object(path)
    if (kind := (spec.get("model") or {}).get("type")) != "BPE" or (spec.get("decoder") or {}).get("type") != "ByteLevel":
        raise Fault(path, "not a byte-level BPE", kind, "BPE with the decoder ByteLevel", "export without it: --tokenizer none")
    tokenizer = load_tokenizer(path)
    tokens = [f"[PAD{i}]" for i in range(size)]
    types = [gguf.TokenType.UNUSED] * size
    added = tokenizer.get_added_tokens_decoder()
    for text, token in tokenizer.get_vocab(with_added_tokens=True).items():
        if token >= size:
            raise Fault(path, "more tokens than the model has", token + 1, size)
        tokens[token] = text
        types[token] = gguf.TokenType.NORMAL
        if token in added:
            types[token] = gguf.TokenType.CONTROL if added[token].special else gguf.TokenType.USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(llama_cpp_split(spec, path))
    writer.add_token_list(tokens)
    writer.add_token_types(types)
    special = gguf.SpecialVocab(folder, load_merges=True, n_vocab=size)
    special.add_special_token = {"bos": bool(begin_tokens(tokenizer, read_tokenizer_config(folder))), "eos": False}
    special.add_to_gguf(writer, quiet=True)


def first_bytes(file: Path) -> bytes:
    with open(file, "rb") as opened:
        return opened.read(4)


def check_replaceable(file: Path) -> None:
    """Before the work that an export is."""
    with importing("gguf"):
        import gguf  # noqa: F401
    with writing(file):
        begin = first_bytes(file) if file.is_file() else b"none" if file.exists() else b""
        if begin not in (b"GGUF", b""):
            raise Fault(file, "is there already and is not a GGUF file", advice="choose another name", code=RESOURCES)


def write_gguf(folder: Path, file: Path, dtype: str | None = None, with_tokenizer: bool = True) -> None:
    """The Hugging Face model in `folder`, whole or not at all. dtype: of its matrices; None: as they are."""
    check_replaceable(file)
    import gguf

    config = read_object(folder / "config.json")
    check_family(config, folder / "config.json")
    kept = {"float32": "fp32", "bfloat16": "bf16"}.get(config.get("dtype") or config.get("torch_dtype") or "", "fp32")
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    partial = partial_of(file)
    try:
        with writing(file), open_partial(file):
            writer = gguf.GGUFWriter(partial, gguf.MODEL_ARCH_NAMES[gguf.MODEL_ARCH[FAMILIES[config["model_type"]]]])
            writer.add_type("model")
            writer.add_file_type(gguf.LlamaFileType.ALL_F32 if (dtype or kept) == "fp32" else gguf.LlamaFileType.MOSTLY_BF16)
            add_shapes(writer, config, head_dim)
            if with_tokenizer and (folder / "tokenizer.json").is_file():
                add_tokenizer(writer, folder, config["vocab_size"])
            else:
                writer.add_tokenizer_model("none")
            add_tensors(writer, folder, config, dtype or kept)
            writer.write_header_to_file()
            writer.write_kv_data_to_file()
            writer.write_tensors_to_file()
            writer.close()
            os.replace(partial, file)
    finally:
        partial.unlink(missing_ok=True)


def export_as_gguf(export: Callable[[Path], bool], file: Path, dtype: str | None = None, with_tokenizer: bool = True) -> None:
    """The model that `export` writes into a new folder, beside the file for the time; nothing where it says that another
    rank writes."""
    check_replaceable(file)
    with writing(file), partial_folder(file) as folder:
        if export(folder / "model"):
            write_gguf(folder / "model", file, dtype, with_tokenizer)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("model", type=path_argument, help="a run, a checkpoint, or a Hugging Face model's folder")
    parser.add_argument("file", type=path_argument, help="the GGUF file to write")
    parser.add_argument("--dtype", choices=DTYPES, help="of matrices; default: as the export or the model has them")
    parser.add_argument("--tokenizer", choices=("model", "none"), default="model",
                        help="none: write none, for programs that have their own (default: the model's)")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="as of `quern export`")
    parser.add_argument("--quern", help="the program that reads checkpoints (default: the one installed with this command)")


def main(options: Namespace) -> None:
    def export(folder: Path) -> bool:
        command = [find_quern(options.quern), "export", str(options.model), str(folder), "--to", "hf"]
        command += [word for assignment in options.set for word in ("--set", assignment)]
        command += ["--dtype", options.dtype] if options.dtype else []
        with starting(command[0]):
            code = subprocess.run(command, stdout=subprocess.DEVNULL).returncode
        if code:
            raise SystemExit(code if code > 0 else 128 - code)
        return True

    with_tokenizer = options.tokenizer == "model"
    if (options.model / "config.json").is_file():
        if options.set:
            raise Fault("--set", f"{options.model} is a Hugging Face model, which has no config of a run",
                        advice="leave it out", code=CONFIG)
        write_gguf(options.model, options.file, options.dtype, with_tokenizer)
    else:
        export_as_gguf(export, options.file, options.dtype, with_tokenizer)
    print(printable(options.file))
