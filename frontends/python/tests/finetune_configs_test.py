"""The configs of configs/finetune plan with the shapes of their models, and within the memory that they state; the commands of
docs/fine-tuning.md go from conversations to a merged model, with a small stand-in for the download."""

import json
import os
import re
import shlex
import subprocess
import sys
import tomllib
import unittest
from pathlib import Path

os.environ.setdefault("QUERN_PREFIX", os.environ["QUERN_BUILD_DIR"])

import numpy as np  # noqa: E402

import quern  # noqa: E402
from dataset_test import make_tokenizer  # noqa: E402
from folder_test_case import FolderTestCase  # noqa: E402

PROGRAM = os.environ["QUERN"]
SOURCE = Path(__file__).resolve().parents[3]
CONFIGS = SOURCE / "configs"
ON_A_CPU = ["device.id=cpu", "train.steps=30", "train.micro_batch=1", "train.accumulation=1", "train.eval_every=0",
            "schedule.cosine.warmup=2", "checkpoint.every=0", "optimizer.learning_rate=1e-2"]
PRESETS = {  # of the same shapes
    "Qwen2.5-0.5B": "qwen2.5/0.5b", "Qwen3-0.6B": "qwen3/0.6b", "Qwen3-1.7B": "qwen3/1.7b", "Qwen3-4B": "qwen3/4b",
    "Qwen3-8B": "qwen3/8b", "Llama-3.1-8B": "llama/3.1-8b", "Mistral-7B-v0.3": "mistral/7b",
}
FILES = sorted((CONFIGS / "finetune").glob("*.toml"))


class FinetuneConfigsTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        for name, preset in PRESETS.items():
            model = tomllib.loads((CONFIGS / f"{preset}.toml").read_text())["model"]
            folder = self.folder / "models" / name
            folder.mkdir(parents=True)
            (folder / "config.json").write_text(json.dumps({"model_type": model["id"], **model[model["id"]]}))

    def plan(self, *words):
        done = subprocess.run([PROGRAM, "plan", *map(str, words)], cwd=self.folder, capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stderr)
        return done.stdout

    def test_each_is_planned_without_weights(self):
        has_cuda = any(Path(os.environ["QUERN_BUILD_DIR"]).glob("plugins/device/libquern_cuda.so"))
        for path in FILES:
            with self.subTest(path.name):
                said = self.plan(path, *(() if has_cuda else ("--set", "device.id=cpu", "--set", "device.cpu.memory=131072")))
                gigabytes = int(re.search(r"on one GPU of (\d+) GB or more", path.read_text())[1])
                if has_cuda:
                    total = re.search(r"\n  total +([\d.]+) GiB", said)[1]
                    self.assertLess(float(total), 0.96 * gigabytes)  # a card's own use

    def download(self, place):
        """A small Qwen3 of random weights, as a folder that the hub could have."""
        make_tokenizer(place)
        vocabulary = 300
        small = {"vocab_size": vocabulary, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
                 "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 16, "max_position_embeddings": 1024}
        config = {"model": {"id": "qwen3", "qwen3": small}, "train": {"steps": 1, "micro_batch": 1, "sequence": 16},
                  "checkpoint": {"tokenizer": str(place)}, "log": {"directory": str(self.folder / "first"), "sinks": []}}
        with quern.Run(config, data=[np.arange(17)]) as run:
            run.step()
            run.export(place.with_name("made"))
        place.rename(self.folder / "tokenizer")
        place.with_name("made").rename(place)

    def test_the_page_goes_from_conversations_to_a_merged_model(self):
        page = (SOURCE / "docs" / "fine-tuning.md").read_text().split("## From conversations to a model")[1].split("\n## ")[0]
        commands = [shlex.split(line) for line in page.splitlines() if re.match("    (hf|quern|quern-tools) ", line)]
        self.assertEqual([words[:2] for words in commands], [
            ["hf", "download"], ["quern-tools", "tokenize"], ["quern", "data"], ["quern", "plan"], ["quern", "train"],
            ["quern-tools", "generate"]])
        talks = [[{"role": "user", "content": f"Which mill is number {i}?"}, {"role": "assistant", "content": "a quern grinds grain"}]
                 for i in range(200)]
        (self.folder / "chats.jsonl").write_text("".join(json.dumps({"messages": talk}) + "\n" for talk in talks))
        folder = self.folder / commands[0][-1]
        self.assertEqual(commands[0][3:-1], ["--local-dir"])
        (folder / "config.json").unlink()
        folder.rmdir()
        self.download(folder)
        (self.folder / "configs").symlink_to(CONFIGS)
        tools, settings = [sys.executable, "-m", "quern"], [word for key in ON_A_CPU for word in ("--set", key)]
        said = {}
        for program, verb, *words in commands[1:]:
            words = [*words, *(settings if verb != "tokenize" else ["--val-fraction", "0.2"])]
            done = subprocess.run([*([PROGRAM] if program == "quern" else tools), verb, *words], cwd=self.folder,
                                  capture_output=True, text=True)
            self.assertEqual(done.returncode, 0, (verb, done.stdout, done.stderr))
            said[verb] = done.stdout
        self.assertIn("a quern grinds", said["data"])
        losses = [float(line.split()[3]) for line in said["train"].splitlines() if line.startswith("step ")]
        self.assertLess(losses[-1], losses[0] - 0.3)
        run = self.folder / "runs/lora-qwen3-0.6b"
        self.assertTrue((run / "adapter/adapter_model.safetensors").is_file())
        self.assertEqual({path.name for path in (run / "export").iterdir()} & {"model.safetensors", "tokenizer.json", "config.json"},
                         {"model.safetensors", "tokenizer.json", "config.json"})
        self.assertIn("quern", said["generate"])

    def test_each_model_has_lora_and_whole_training(self):
        names = {path.stem for path in FILES}
        for model in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama-3.1-8b", "mistral-7b"):
            self.assertLessEqual({model, f"lora-{model}"}, names)


if __name__ == "__main__":
    unittest.main()
