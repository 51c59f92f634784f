"""GGUF files: llama.cpp continues texts as quern does, tensors are the export's, and what GGUF cannot say is refused."""

import contextlib
import fcntl
import io
import json
import os
import subprocess
import sys
import textwrap
import unittest
from pathlib import Path
from unittest import mock

import gguf
import numpy as np
import xllamacpp
from folder_test_case import FolderTestCase
from quern import command_line
from quern.base.files import is_locked
from quern.models import export_gguf
from quern.models.export_gguf import CONTRACTIONS, REST, llama3_divisors, rounded
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, processors, trainers

PROGRAM = os.environ["QUERN"]
TEXT = "a quern grinds grain between two stones, number {i} of 12345; I'll say: don't  stop\n\nits flour\n"
PROMPTS = ("a quern grinds", "number 4077 of", "two\n\nstones  don't")
SPLITS = {
    "gpt-2": [pre_tokenizers.ByteLevel(add_prefix_space=False)],
    "smollm": [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)],
    **{name: [pre_tokenizers.Split(Regex(CONTRACTIONS + digits + REST), "isolated"),
              pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
       for name, digits in (("qwen2", r"\p{N}"), ("llama-bpe", r"\p{N}{1,3}"))},
}
# model.id, keys beside the common shape, and the way that its tokenizer splits text
CASES = {
    "llama": ("llama", "tie_word_embeddings = true", "gpt-2"),
    "llama3": ("llama", 'rope_scaling = { rope_type = "llama3", factor = 8.0, low_freq_factor = 1.0, '
               'high_freq_factor = 4.0, original_max_position_embeddings = 32 }', "llama-bpe"),
    "linear": ("llama", 'attention_bias = true\nrope_scaling = { rope_type = "linear", factor = 2.0 }', "smollm"),
    "yarn": ("llama", 'rope_scaling = { rope_type = "yarn", factor = 4.0, original_max_position_embeddings = 32 }', "gpt-2"),
    "mistral": ("mistral", "head_dim = 8", "gpt-2"),
    "qwen2": ("qwen2", "rope_theta = 5e3", "qwen2"),
    "qwen3": ("qwen3", "head_dim = 32", "qwen2"),
}


def make_tokenizer(folder: Path, split: str) -> None:
    """With <s> before each text where the split is Llama 3's."""
    tokenizer = Tokenizer(models.BPE(ignore_merges=split == "llama-bpe"))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(SPLITS[split]) if len(SPLITS[split]) > 1 else SPLITS[split][0]
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator((TEXT.format(i=i) for i in range(100)), trainers.BpeTrainer(
        vocab_size=318, special_tokens=["<s>", "</s>"], initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    if split == "llama-bpe":
        tokenizer.post_processor = processors.TemplateProcessing("<s> $A", special_tokens=[("<s>", 0)])
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text('{"bos_token": "<s>", "eos_token": "</s>"}')


class GgufTest(FolderTestCase):
    def tools(self, *words):
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            return command_line.main([*map(str, words)]), said.getvalue()

    def quern(self, *words):
        tools = {"QUERN_TOOLS": str(Path(sys.executable).with_name("quern-tools"))}  # of this environment
        done = subprocess.run([PROGRAM, *map(str, words)], cwd=self.folder, capture_output=True, text=True,
                              env={**os.environ, **tools})
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def train(self, name, model, more, split):
        """A run that has learned the text a little, so that no two tokens are about as likely."""
        make_tokenizer(self.folder / "tokenizer", split)
        (self.folder / "text.txt").write_text("".join(TEXT.format(i=i) for i in range(400)))
        code, said = self.tools("tokenize", self.folder / "text.txt", "--tokenizer",
                                self.folder / "tokenizer/tokenizer.json", "-o", self.folder / "data")
        self.assertEqual(code, 0, said)
        (self.folder / "run.toml").write_text(textwrap.dedent(f"""\
            [model]
            id = "{model}"
            [model.{model}]
            vocab_size = 320
            hidden_size = 64
            intermediate_size = 96
            num_hidden_layers = 2
            num_attention_heads = 4
            num_key_value_heads = 2
            max_position_embeddings = 128
            """) + more + textwrap.dedent(f"""
            [train]
            steps = 40
            micro_batch = 4
            sequence = 32
            [precision]
            id = "fp32"
            [optimizer]
            learning_rate = 1e-2
            [device.cpu]
            threads = 1
            [checkpoint]
            tokenizer = "{self.folder}/tokenizer"
            [data.tokens]
            train = "data/train.tok"
            [log]
            directory = "run"
            """))
        self.quern("train", "run.toml")

    def continuations(self, file):
        """Of the prompts by llama.cpp: (tokens of the prompt, text)."""
        settings = xllamacpp.CommonParams()
        settings.model.path = str(file)
        settings.n_ctx, settings.n_parallel, settings.warmup, settings.verbosity = 128, 1, False, -1
        settings.cpuparams.n_threads = 1
        settings.cache_type_k = settings.cache_type_v = xllamacpp.ggml_type.GGML_TYPE_F32
        server = xllamacpp.Server(settings)
        done = [server.handle_completions({"prompt": text, "temperature": 0, "max_tokens": 12}) for text in PROMPTS]
        return [(one["usage"]["prompt_tokens"], one["choices"][0]["text"]) for one in done]

    def test_llama_cpp_continues_texts_as_quern_does(self):
        for name, (model, more, split) in CASES.items():
            with self.subTest(name), contextlib.ExitStack() as stack:
                self.setUp()
                stack.callback(self.doCleanups)
                self.train(name, model, more, split)
                self.quern("export", "run", "model.gguf", "--to", "gguf")
                tokenizer = Tokenizer.from_file(str(self.folder / "tokenizer/tokenizer.json"))
                prompts = [tokenizer.encode(text).ids for text in PROMPTS]
                (self.folder / "prompts.jsonl").write_text("".join(f"{tokens}\n" for tokens in prompts))
                drawn = self.quern("generate", "run.toml", "--prompts", "prompts.jsonl", "--greedy", "--max-tokens", 12)
                texts = [tokenizer.decode(json.loads(line)["tokens"]) for line in drawn.splitlines()]
                self.assertEqual(self.continuations(self.folder / "model.gguf"),
                                 list(zip(map(len, prompts), texts)))
                self.assertGreater(len(set(texts)), 1)

    def test_the_tensors_are_the_exports_in_either_format(self):
        self.train("qwen2", *CASES["qwen2"])
        self.quern("export", "run", "half", "--dtype", "bf16")
        for place, words in (("run", ["--dtype", "bf16"]), ("half", []), ("run/export", ["--dtype", "bf16"])):
            locked, replace = [], os.replace
            with mock.patch.object(os, "replace", lambda partial, to: (locked.append(is_locked(partial)), replace(partial, to))):
                code, said = self.tools("export-gguf", self.folder / place, self.folder / "half.gguf", "--quern", PROGRAM, *words)
            self.assertEqual((code, locked), (0, [True]), said)
            reader = gguf.GGUFReader(self.folder / "half.gguf")
            found = {tensor.name: tensor for tensor in reader.tensors}
            self.assertEqual(found["output.weight"].tensor_type, gguf.GGMLQuantizationType.BF16)
            self.assertEqual(found["blk.1.attn_q.bias"].tensor_type, gguf.GGMLQuantizationType.F32)
            stored = gguf.utility.SafetensorsLocal(self.folder / "half/model.safetensors").tensors
            self.assertEqual(len(stored), len(found))
            np.testing.assert_array_equal(np.ravel(found["blk.0.ffn_down.weight"].data.view(np.uint16)),
                                          stored["model.layers.0.mlp.down_proj.weight"].mmap_bytes().view(np.uint16))
            fields = {name: reader.fields[name].contents() for name in reader.fields if not name.startswith("GGUF.")}
            self.assertEqual([fields["qwen2.rope.freq_base"], fields["qwen2.attention.head_count_kv"]], [5e3, 2])
            self.assertEqual(fields["tokenizer.ggml.eos_token_id"], 1)

    def test_numbers_are_rounded_to_nearest_even(self):
        values = np.array([1, -2, 1 + 2**-8, 1 + 3 * 2**-8, 3.1415927, 1e-40], np.float32)
        self.assertEqual([hex(bits) for bits in rounded(values, "bf16")],
                         ["0x3f80", "0xc000", "0x3f80", "0x3f82", "0x4049", "0x1"])
        np.testing.assert_array_equal(rounded(rounded(values, "bf16"), "fp32")[:2], values[:2])

    def test_llama3_divides_long_wavelengths_alone(self):
        rope = {"rope_theta": 500000.0, "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                "original_max_position_embeddings": 8192}
        divisors = llama3_divisors(rope, 128)
        self.assertEqual((divisors[0], divisors[-1], divisors.size), (1, 8, 64))
        self.assertTrue((np.diff(divisors) >= 0).all())

    def refused(self, change, *parts, words=()):
        folder = self.folder / "model"
        folder.mkdir(exist_ok=True)
        config = {"model_type": "llama", "hidden_act": "silu", "hidden_size": 8, "num_attention_heads": 2, "vocab_size": 9,
                  "max_position_embeddings": 8, "num_hidden_layers": 1, "intermediate_size": 8, "rms_norm_eps": 1e-5}
        (folder / "config.json").write_text(json.dumps(config | change))
        code, said = self.tools("export-gguf", folder, self.folder / "x.gguf", *words)
        self.assertEqual(code, 3, said)
        for part in parts:
            self.assertIn(part, said)
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["model"])

    def test_what_it_cannot_say_is_refused(self):
        self.refused({"model_type": "gemma2"}, "gemma2", "llama, mistral, qwen2, qwen3", "--to hf")
        self.refused({"model_type": "mistral", "sliding_window": 4}, "attention windows: found 4")
        self.refused({"hidden_act": "gelu"}, "hidden_act: found gelu, expected silu")
        self.refused({"rope_scaling": {"rope_type": "longrope"}}, "rope_type: found longrope")
        self.refused({"rope_scaling": {"rope_type": "yarn", "factor": 2, "beta_fast": 16}}, "settings of its own")
        self.refused({}, "no model*.safetensors")
        tokenizer = self.folder / "model/tokenizer.json"
        tokenizer.write_text('{"model": {"type": "WordPiece"}}')
        self.refused({}, "not a byte-level BPE: found WordPiece", "--tokenizer none")
        tokenizer.unlink()
        make_tokenizer(self.folder / "model/t", "gpt-2")
        made = json.loads((self.folder / "model/t/tokenizer.json").read_text())
        tokenizer.write_text(json.dumps(made))
        self.refused({}, "more tokens than the model has: found")
        tokenizer.write_text(json.dumps(made | {"pre_tokenizer": {"type": "Sequence", "pretokenizers": [
            {"type": "Split", "pattern": {"Regex": "x"}, "behavior": "Isolated", "invert": False},
            {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True, "use_regex": False}]}}))
        self.refused({"vocab_size": 400}, "no such way to split a text", "--tokenizer none")
        self.refused({"vocab_size": 400}, "no model*.safetensors", words=("--tokenizer", "none"))
        (self.folder / "mine").write_text("my text")
        code, said = self.tools("export-gguf", self.folder / "model", self.folder / "mine")
        self.assertEqual((code, "is not a GGUF file" in said), (4, True), said)

    def test_leftovers_of_a_killed_export_go_and_those_of_a_living_one_stay(self):
        file = self.folder / "x.gguf"
        (self.folder / ".x.gguf.partial-7-folder/model").mkdir(parents=True)
        (self.folder / ".x.gguf.partial-7").write_text("GGUF")
        (self.folder / ".x.gguf.partial-5").write_text("GGUF")
        living = []

        def export(folder):
            living.extend(path.name for path in self.folder.glob(".x.*"))
            self.assertTrue(is_locked(folder.parent))
            return False

        with open(self.folder / ".x.gguf.partial-5", "rb") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            export_gguf.export_as_gguf(export, file)
        self.assertEqual(set(living), {".x.gguf.partial-5", f".x.gguf.partial-{os.getpid()}-folder"})
        self.assertEqual([path.name for path in self.folder.glob(".x.*")], [".x.gguf.partial-5"])

    def test_without_the_program_or_its_tool_the_error_says_so(self):
        code, said = self.tools("export-gguf", self.folder, self.folder / "x.gguf", "--quern", "/none/quern")
        self.assertIn("/none/quern: cannot be started", said)
        failed = subprocess.run([PROGRAM, "export", self.folder, self.folder / "x.gguf", "--to", "gguf"],
                                capture_output=True, text=True, env={**os.environ, "QUERN_TOOLS": "/none/quern-tools"})
        self.assertEqual(failed.returncode, 4)
        self.assertIn("/none/quern-tools: GGUF is written by this program, which cannot be started", failed.stderr)


if __name__ == "__main__":
    unittest.main()
