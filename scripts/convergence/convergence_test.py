"""convergence.sh trains and judges every arm of optimizers and low-bit weights, on a tiny model and the CPU."""

import os
import subprocess
import sys
import unittest
from pathlib import Path

from folder_test_case import TINY_LLAMA, FolderTestCase

ROOT = Path(__file__).resolve().parents[2]
MODEL = TINY_LLAMA.replace("vocab_size = 64", "vocab_size = 300").replace("intermediate_size = 48", "intermediate_size = 64")
CONFIG = MODEL + """
[data.tokens]
train = "{data}/train.tok"
validation = "{data}/val.tok"
[train]
steps = 3
micro_batch = 2
sequence = 32
[schedule]
id = "cosine"
[precision]
id = "bf16"
[device]
id = "cpu"
[log]
directory = "{data}/run"
[checkpoint]
every = 0
export = false
"""


class ConvergenceTest(FolderTestCase):
    def test_every_arm_is_trained_and_judged(self):
        data = self.folder / "data"
        (self.folder / "text").mkdir()
        (self.folder / "text" / "a.txt").write_text("It is a truth universally acknowledged, that a plan holds.\n" * 200)
        tokenize = [sys.executable, "-m", "quern", "tokenize", self.folder / "text", "--train-bpe", "300", "--val-fraction", "0.2", "-o", data]
        subprocess.run(tokenize, check=True, capture_output=True)
        config = self.folder / "tiny.toml"
        config.write_text(CONFIG.format(data=data))
        bands = self.folder / "bands.toml"
        bands.write_text('"*" = [-20, 20]\n')
        for experiment, arms in (("--optimizers", 9), ("--low-bit", 6)):
            with self.subTest(experiment=experiment):
                out = self.folder / experiment
                words = [ROOT / "scripts/convergence/convergence.sh", experiment, "--config", config, "--bands", bands]
                done = subprocess.run(
                    [*words, "--out", out, "--repeat", "2"], capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable}
                )
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                table = (out / "convergence.md").read_text(encoding="utf-8")
                self.assertEqual(table.count("| `"), arms, table)
                self.assertIn("Each arm is within its band.", table)


if __name__ == "__main__":
    unittest.main()
