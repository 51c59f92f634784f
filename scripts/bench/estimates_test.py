"""Estimates hold: `quern plan` gives measured speeds within 15%, and none below a published one."""

import os
import unittest
from pathlib import Path

import estimates


class EstimatesTest(unittest.TestCase):
    def test_what_a_plan_takes_of_a_bench(self):
        command = ["quern", "bench", "a.toml", "--steps", "2", "--set", "a=1", "--json", "x", "--commit", "c",
                   "--set", "device.cuda.matmul_search=listed"]
        self.assertEqual(estimates.run_of(command), ["a.toml", "--set", "a=1"])

    def test_published_steps_are_plans_of_whole_steps_of_half_a_million_tokens(self):
        for step in estimates.steps(estimates.PAGE.parent / "published.json", estimates.STEP):
            settings = dict(word.split("=", 1) for word in step["run"] if "=" in word)
            sequences = int(settings["train.micro_batch"]) * int(settings["train.accumulation"])
            self.assertTrue(500 <= sequences <= 512, step)

    @unittest.skipUnless(
        Path(os.environ.get("QUERN_BUILD_DIR", "build/release"), "plugins", "device", "libquern_cuda.so").exists(),
        "needs the CUDA device, and so a toolkit to build it",
    )
    def test_plans_are_near_what_was_measured(self):
        self.assertEqual(estimates.main(["--check"]), 0)


if __name__ == "__main__":
    unittest.main()
