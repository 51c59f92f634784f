"""The table of convergence: its figures, its verdict, and what it refuses."""

import contextlib
import io
import json
import sys
import unittest

import convergence_table
from folder_test_case import FolderTestCase


def arm(name, mean, deviation, difference, difference_deviation, good_runs=3):
    loss = {"mean": mean, "deviation": deviation, "difference": difference}
    loss["difference_deviation"] = difference_deviation
    return {"name": name, "good_runs": good_runs, "validation_loss": loss}


BASE = arm("precision.id=bf16", 4.0, 0.005, 0.0, 0.0)


class ConvergenceTableTest(FolderTestCase):
    def tabulate(self, *arms, repeats=3):
        report = {"config": "base.toml", "quern": "1", "repeats": repeats, "arms": arms}
        (self.folder / "report.json").write_text(json.dumps(report))
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            code = convergence_table.main([str(self.folder)])
        return code, out.getvalue()

    def test_figures(self):
        code, text = self.tabulate(BASE, arm("e4m3", 4.008, 0.006, 0.008, 0.001), arm("x|y", 3.96, 0.01, -0.04, 0.002))
        self.assertEqual(code, 0, text)
        self.assertIn("| `precision.id=bf16` | 3 | 4.0000 ± 0.0050 | - | - | - |", text)
        self.assertIn("| `e4m3` | 3 | 4.0080 ± 0.0060 | +0.00800 ± 0.00100 | +0.200% | +1.60 |", text)
        self.assertIn("-1.000% | -8.00 |", text)
        self.assertIn("`e4m3` is within", text)
        self.assertIn((self.folder / "convergence.md").read_text(encoding="utf-8"), text)

    def test_the_verdict_needs_both_bounds_on_either_side(self):
        for difference, deviation, expected in (
            (0.0199, 0.05, 0), (0.0201, 0.05, 1), (-0.0201, 0.05, 1), (0.0101, 0.005, 1), (-0.0101, 0.005, 1),
            (0.0099, 0.005, 0), (0.0, 0.0, 0), (1e-6, 0.0, 1),
        ):
            with self.subTest(difference=difference, deviation=deviation):
                base = arm("bf16", 4.0, deviation, 0.0, 0.0)
                code, text = self.tabulate(base, arm("e4m3", 4.0 + difference, 0.005, difference, 0.001))
                self.assertEqual((code, "is NOT within" in text), (expected, bool(expected)), text)

    def judge(self, bands, *arms):
        (self.folder / "bands.toml").write_text(bands)
        report = {"config": "base.toml", "quern": "1", "repeats": 3, "arms": arms}
        (self.folder / "report.json").write_text(json.dumps(report))
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            code = convergence_table.main([str(self.folder), "--bands", str(self.folder / "bands.toml")])
        return code, out.getvalue()

    def test_an_arm_outside_its_band_fails(self):
        bands = '"*" = [-1.0, 1.0]\n"*lion*" = [-0.5, 3.0]\n'
        for name, difference, expected in (
            ("muon", 0.039, 0), ("muon", 0.041, 1), ("muon", -0.041, 1), ("lion", 0.1, 0), ("lion", -0.03, 1),
        ):
            with self.subTest(name=name, difference=difference):
                code, text = self.judge(bands, BASE, arm(name, 4 + difference, 0.005, difference, 0.001))
                self.assertEqual((code, "outside" in text), (expected, bool(expected)), text)
        code, text = self.judge('"lion" = [0, 1]\n', BASE, arm("muon", 4.0, 0.005, 0.0, 0.001))
        self.assertEqual((code, "`muon` has no band" in text), (1, True), text)

    def arm_of_runs(self, name, *curves):
        """An arm whose runs were evaluated every 10 steps."""
        runs = []
        for seed, losses in enumerate(curves):
            folder = self.folder / name / f"seed-{seed}"
            folder.mkdir(parents=True)
            lines = [json.dumps({"event": "eval", "step": 10 * i, "loss": loss}) for i, loss in enumerate(losses, 1)]
            (folder / "log.jsonl").write_text("".join(f"{line}\n" for line in lines))
            runs.append({"directory": str(folder)})
        return {**arm(name, curves[0][-1], 0.1, curves[0][-1] - 3.0, 0.1), "runs": runs}

    def test_steps_to_a_fixed_loss(self):
        first = self.arm_of_runs("first", [6.0, 4.0, 3.0], [6.2, 4.2, 3.0], [5.8, 3.8, 3.0])  # 4.0 at two thirds
        fast = self.arm_of_runs("fast", [4.0, 3.5, 3.0], [5.0, 3.0, 3.0], [5.0, 3.0, 3.0])
        half = self.arm_of_runs("half", [6.0, 5.0, 3.0], [6.0, 5.0, 4.1], [6.0, 5.0, 3.0])
        never = self.arm_of_runs("never", *[[6.0, 5.0, 4.5]] * 3)
        text = self.tabulate(first, fast, half, never)[1]
        self.assertIn("| in seed deviations | steps to 4.000 |", text)
        for name, cell in (("first", "20 ± 1"), ("fast", "13 ± 3"), ("half", "2 runs of 3"), ("never", "not reached")):
            self.assertRegex(text, f"`{name}` .*\\| {cell} \\|")
        self.assertNotIn("steps to", self.tabulate(first | {"runs": []}, fast)[1])

    def test_rates_at_an_end_of_those_tried_are_named(self):
        (self.folder / "rates").write_text("adamw 1e-3\nmuon 8e-3 highest\n")
        report = {"config": "base.toml", "quern": "1", "repeats": 3, "arms": [BASE, arm("e4m3", 4.0, 0.005, 0.0, 0.001)]}
        (self.folder / "report.json").write_text(json.dumps(report))
        with contextlib.redirect_stdout(io.StringIO()) as out:
            self.assertEqual(convergence_table.main([str(self.folder), "--rates", str(self.folder / "rates")]), 0)
        self.assertIn("- muon: 8e-3 is the highest rate that was tried\n", out.getvalue())
        self.assertNotIn("adamw", out.getvalue())

    def test_what_cannot_be_judged_is_refused(self):
        good = arm("e4m3", 4.0, 0.005, 0.0, 0.0)
        for arms, repeats, expected in (
            ((BASE, arm("e4m3", 4.0, 0.005, 0.0, 0.0, good_runs=2)), 3, "2 runs of 3"),
            ((BASE, arm("e4m3", None, None, None, None)), 3, "no validation loss"),
            ((arm("a", 4.0, None, 0.0, None, 1), arm("b", 4.0, None, 0.0, None, 1)), 1, "1 runs of each"),
            ((BASE,), 3, "found 1 arms"),
            ((BASE, {"name": good["name"]}), 3, "not a report"),
        ):
            with self.subTest(expected=expected):
                code, text = self.tabulate(*arms, repeats=repeats)
                self.assertEqual((code, expected in text), (3, True), text)
                self.assertFalse((self.folder / "convergence.md").exists())


if __name__ == "__main__":
    unittest.main()
