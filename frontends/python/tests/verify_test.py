"""python -m quern.verify: checks that hold, fail and are skipped."""

import contextlib
import io
import json
import os
import subprocess
import sys
import unittest
from unittest import mock

os.environ.setdefault("QUERN_PREFIX", os.environ["QUERN_BUILD_DIR"])

import numpy as np
from folder_test_case import TINY_LLAMA, FolderTestCase
from quern import Config, Run, command_line, verify
from quern.tokens.token_file import TokenWriter

CONFIG = TINY_LLAMA + """\
[train]
steps = 6
micro_batch = 2
sequence = 16
[device.cpu]
threads = 1
[data.tokens]
train = "{folder}/train.tok"
[log]
directory = "{folder}/run"
"""


class VerifyTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        with TokenWriter(self.folder / "train.tok", 64) as file:
            file.append(np.random.default_rng(1).integers(0, 64, 400).astype(np.int32))
        self.config = self.folder / "run.toml"
        self.config.write_text(CONFIG.format(folder=self.folder))

    def verify(self, *words):
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            return command_line.main(["verify", str(self.config), *map(str, words)]), out.getvalue()

    def test_a_run_holds_by_itself_and_leaves_nothing(self):
        done = subprocess.run([sys.executable, "-m", "quern.verify", self.config, "--set", "precision.id=e4m3"],
                              capture_output=True, text=True)
        self.assertEqual(done.returncode, 0, done.stdout + done.stderr)
        self.assertIn("recompute  holds: 4 steps, losses 4.", done.stdout)
        self.assertIn("torch      skipped: torch and transformers not installed for ", done.stdout)
        self.assertFalse((self.folder / "run").exists())
        code, said = self.verify("--only", "torch")
        self.assertEqual((code, "not installed" in said), (3, True), said)

    def test_losses_are_compared_with_those_of_a_file(self):
        losses = self.folder / "losses.json"
        self.assertEqual(self.verify("--write", losses, "--steps", 3), (0, ""))
        self.assertEqual(len(json.loads(losses.read_text())["losses"]), 3)
        words = ("--only", "reference", "--reference", losses)
        code, said = self.verify(*words)
        self.assertEqual((code, said.startswith("reference  holds: 3 steps")), (0, True), said)
        code, said = self.verify(*words, "--set", "train.seed=2")
        self.assertEqual((code, said.startswith("reference  FAILS: 3 steps")), (1, True), said)
        self.assertEqual(self.verify(*words, "--set", "train.seed=2", "--tolerance", "0.2")[0], 0)
        losses.write_text("[]")
        self.assertEqual(self.verify(*words)[0], 3)
        code, said = self.verify("--set", "train.stepz=1")
        self.assertEqual((code, "nearest name `steps`" in said), (2, True), said)

    def test_other_losses_after_recomputation_fail(self):
        with mock.patch.object(verify, "losses_of", side_effect=[[1.0, 2.0], [1.0, 2.0000002]]):
            code, said = self.verify("--only", "recompute")
        self.assertEqual((code, said.startswith("recompute  FAILS")), (1, True), said)

    def test_gradients_have_the_names_and_form_of_a_hugging_face_file(self):
        config = verify.alone(Config.load(self.config), self.folder / "alone", 1).set("checkpoint.export_dtype", "fp32")
        with Run(config) as run:
            run.step()
            packed, embedding = run.read("gradient/qkv.weight/1"), run.read("gradient/embedding.weight")
            found = verify.export_gradients(run, self.folder / "gradients")
        np.testing.assert_array_equal(found["model.layers.1.self_attn.k_proj.weight"], packed[32:48])
        np.testing.assert_array_equal(found["model.embed_tokens.weight"], embedding)
        self.assertGreater(np.abs(packed).max(), 0)

    def test_torch_gets_the_rows_and_the_weights_of_the_step(self):
        with mock.patch.object(verify, "torch_gradients", return_value=(1.0, {})) as torch:
            holds, said = verify.check_torch(Config.load(self.config), self.folder)
        self.assertEqual((holds, said.startswith("gradients of one side alone: lm_head.weight")), (False, True), said)
        model, rows = torch.call_args.args
        self.assertEqual((rows.shape, (model / "model.safetensors").exists()), ((2, 17), True))


if __name__ == "__main__":
    unittest.main()
