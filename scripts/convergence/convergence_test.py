"""convergence.sh trains and judges every arm of optimizers and low-bit weights, on a tiny model and the CPU, and tunes."""

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


# In the place of quern: notes its words, and reports losses that are lower at higher rates.
FAKE = """\
#!{python}
import json, sys
from pathlib import Path
words = sys.argv[1:]
with open("{notes}", "a") as notes:
    notes.write(" ".join(words) + "\\n")
out, names = Path(words[words.index("--out") + 1]), [word for i, word in enumerate(words) if words[i - 1] == "--arm"]
loss = lambda name: {{"mean": 1 / float(name.split("=")[-1])}}
arms = [{{"name": name, "validation_loss": loss(name), "runs": [{{"exit_code": {code}, "message": "no"}}]}} for name in names]
out.mkdir(parents=True)
(out / "report.json").write_text(json.dumps({{"config": "c", "repeats": 1, "arms": arms}}))
sys.exit({code})
"""


class ConvergenceTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        data = self.folder / "data"
        (self.folder / "text").mkdir()
        (self.folder / "text" / "a.txt").write_text("It is a truth universally acknowledged, that a plan holds.\n" * 200)
        tokenize = [sys.executable, "-m", "quern", "tokenize", self.folder / "text", "--train-bpe", "300", "--val-fraction", "0.2", "-o", data]
        subprocess.run(tokenize, check=True, capture_output=True)
        self.config = self.folder / "tiny.toml"
        self.config.write_text(CONFIG.format(data=data))

    def run_script(self, *words, **environment):
        command = [ROOT / "scripts/convergence/convergence.sh", *words, "--config", self.config]
        return subprocess.run(
            command, capture_output=True, text=True, env={**os.environ, "PYTHON": sys.executable, **environment}
        )

    def fake(self, code):
        fake = self.folder / "quern"
        fake.write_text(FAKE.format(python=sys.executable, notes=self.folder / "notes", code=code))
        fake.chmod(0o755)
        return str(fake)

    def test_every_arm_is_trained_and_judged(self):
        bands = self.folder / "bands.toml"
        bands.write_text('"*" = [-20, 20]\n')
        for experiment, arms in (("--optimizers", 9), ("--low-bit", 9)):
            with self.subTest(experiment=experiment):
                out = self.folder / experiment
                words = ["--bands", bands, "--out", out, "--repeat", "2", "--jobs", "2", "--set", "train.eval_every=1"]
                done = self.run_script(experiment, *words)
                self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
                table = (out / "convergence.md").read_text(encoding="utf-8")
                self.assertEqual(table.count("| `"), arms, table)
                self.assertIn("Each arm is within its band.", table)
                self.assertIn("| steps to ", table)

    def test_tune_tries_five_rates_of_each_and_more_beyond_the_best(self):
        rates, out = self.folder / "rates", self.folder / "out"
        done = self.run_script("--tune", "--rates", rates, "--out", out, QUERN=self.fake(0))
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        found = [line.split() for line in rates.read_text(encoding="utf-8").splitlines()]
        self.assertEqual([(words[0], words[2]) for words in found], [(id, "highest") for id in ("adamw", "lion", "muon", "schedule_free")])
        notes = (self.folder / "notes").read_text(encoding="utf-8").splitlines()
        self.assertEqual([line.count("--arm") for line in notes], [5, 2, 2] * 4)
        self.assertEqual(sum("optimizer.id=muon" in line for line in notes), 3)

    def test_all_ends_where_a_rate_fails(self):
        rates = self.folder / "rates"
        done = self.run_script("--all", "--rates", rates, "--out", self.folder / "out", QUERN=self.fake(4))
        self.assertEqual((done.returncode, rates.exists()), (4, False), done.stdout + done.stderr)
        self.assertIn("adamw: ", done.stderr)
        self.assertNotIn("optimizer.adamw.moments", (self.folder / "notes").read_text(encoding="utf-8"))


if __name__ == "__main__":
    unittest.main()
