"""The configs of configs/finetune plan with the shapes of their models, and within the memory that they state."""

import json
import os
import re
import subprocess
import tomllib
import unittest
from pathlib import Path

from folder_test_case import FolderTestCase

PROGRAM = os.environ["QUERN"]
CONFIGS = Path(__file__).resolve().parents[3] / "configs"
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

    def test_each_model_has_lora_and_whole_training(self):
        names = {path.stem for path in FILES}
        for model in ("qwen3-0.6b", "qwen3-1.7b", "qwen3-4b", "qwen3-8b", "llama-3.1-8b", "mistral-7b"):
            self.assertLessEqual({model, f"lora-{model}"}, names)


if __name__ == "__main__":
    unittest.main()
