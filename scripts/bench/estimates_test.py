"""Estimates hold: `quern plan` gives measured speeds within 15%."""

import os
import unittest
from pathlib import Path

import estimates


class EstimatesTest(unittest.TestCase):
    def test_what_a_plan_takes_of_a_bench(self):
        command = ["quern", "bench", "a.toml", "--steps", "2", "--set", "a=1", "--json", "x", "--commit", "c",
                   "--set", "device.cuda.matmul_search=listed"]
        self.assertEqual(estimates.run_of(command), ["a.toml", "--set", "a=1"])

    @unittest.skipUnless(
        Path(os.environ.get("QUERN_BUILD_DIR", "build/release"), "plugins", "device", "libquern_cuda.so").exists(),
        "needs the CUDA device, and so a toolkit to build it",
    )
    def test_plans_are_near_what_was_measured(self):
        self.assertEqual(estimates.main(["--check"]), 0)


if __name__ == "__main__":
    unittest.main()
