"""Plots of comparisons: what `quern ab` leaves gives a picture, failed arms and moved folders included."""

import contextlib
import io
import json
import sys
import unittest

from folder_test_case import FolderTestCase
from quern import command_line
from quern.plots import ab


class PlotAbTest(FolderTestCase):
    def arm(self, name, offset, seeds, exit_code=0):
        runs = []
        for seed in seeds:
            path = self.folder / name / f"seed-{seed}"
            runs.append({"seed": seed, "directory": f"elsewhere/{name}/seed-{seed}", "exit_code": exit_code})
            if exit_code == 0:
                path.mkdir(parents=True)
                records = ({"event": "step", "step": s, "loss": 5 - s / 9 + seed + offset} for s in range(1, 9))
                (path / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records))
        good = exit_code == 0
        return {
            "name": name, "runs": runs, "tokens_per_second": 100.0 if good else None,
            "tokens_per_second_interval": [90.0, 110.0] if good else [None, None],
            "training_loss": {"deviation": 1.0 if len(seeds) > 1 and good else None},
        }

    def write(self, *arms):
        report = {"config": "base.toml", "repeats": 2, "arms": arms}
        (self.folder / "report.json").write_text(json.dumps(report))
        return report

    def plot(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            return command_line.main(["plot", "ab", *map(str, arguments)]), said.getvalue()

    def test_arms_are_drawn_with_their_differences_from_the_first(self):
        self.write(self.arm("a", 0, (1, 2)), self.arm("b", 0.5, (1, 2)), self.arm("c", 0, (1, 2), exit_code=5))
        loss, difference, speed = ab.draw(*ab.read_comparison(self.folder)).axes
        self.assertEqual([text.get_text() for text in loss.get_legend().get_texts()], ["a", "b"])
        (line,) = [line for line in difference.lines if line.get_label() == "b"]
        for value in line.get_ydata():
            self.assertAlmostEqual(value, 0.5)
        self.assertEqual([text.get_text() for text in speed.get_yticklabels()], ["a", "b", "c"])
        code, said = self.plot(self.folder)
        self.assertEqual(code, 0, said)
        self.assertEqual((self.folder / "comparison.png").read_bytes()[:4], b"\x89PNG")

    def test_long_keys_are_cut_in_labels(self):
        words = ["precision.id=e4m3", "precision.e4m3.activation_scaling=row", "x=1." + 40 * "0"]
        expected = "precision.id=e4m3\nactivation_scaling=row\n" + words[2]
        self.assertEqual(ab.label_of({"name": ", ".join(words), "overrides": words}), expected)
        self.assertEqual(ab.label_of({"name": "a"}), "a")

    def test_a_first_arm_that_failed_leaves_the_others(self):
        self.write(self.arm("a", 0, (1,), exit_code=5), self.arm("b", 0, (1,)))
        self.assertEqual(self.plot(self.folder)[0], 0)

    def test_what_is_no_comparison_is_named(self):
        code, said = self.plot(self.folder)
        self.assertEqual(code, 3)
        self.assertIn("report.json", said)
        for text in ("{}", "[", '{"arms": [{"runs": 1}]}'):
            (self.folder / "report.json").write_text(text)
            code, said = self.plot(self.folder)
            self.assertEqual(code, 3)
            self.assertIn("not a report of quern ab", said)


if __name__ == "__main__":
    unittest.main()
