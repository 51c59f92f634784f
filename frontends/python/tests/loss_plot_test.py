"""Plots: logs as quern leaves them (running, resumed, with gaps) give a picture; damaged ones a clear error."""

import contextlib
import io
import json
import math
import sys
import unittest
from unittest import mock

from folder_test_case import FolderTestCase
from quern import command_line
from quern.plots import loss
from quern.runs import run_log


def step(number, loss=5.0):
    return {"event": "step", "step": number, "tokens": number * 100, "loss": loss, "lr": 1e-3}


class PlotTest(FolderTestCase):
    def write_run(self, name, *records, tail=""):
        log = self.folder / name / "log.jsonl"
        log.parent.mkdir()
        log.write_text("".join(json.dumps(record) + "\n" for record in records) + tail)
        return log.parent

    def plot(self, *arguments):
        """(exit code, what it said)"""
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            code = command_line.main(["plot", "loss", *map(str, arguments)])
        return code, said.getvalue()

    def test_runs_are_drawn_together(self):
        evaluation = {"event": "eval", "step": 50, "tokens": 5000, "loss": 5.1}
        first = self.write_run("first", {"event": "run", "name": "one"}, *map(step, range(1, 100)), evaluation)
        second = self.write_run("second", *map(step, range(1, 30)))
        picture = self.folder / "loss.png"
        code, said = self.plot(first, second / "log.jsonl", "-o", picture, "--reference", "unigram entropy=6.44")
        self.assertEqual(code, 0, said)
        self.assertEqual(picture.read_bytes()[:8], b"\x89PNG\r\n\x1a\n")
        self.assertEqual(sorted(path.name for path in self.folder.iterdir()), ["first", "loss.png", "second"])

    def test_every_run_reference_and_evaluation_is_in_the_figure(self):
        evaluation = {"event": "eval", "step": 2, "tokens": 200, "loss": 4.321}
        runs = [run_log.read_run(self.write_run(name, step(1), step(2), evaluation)) for name in ("bf16", "e4m3")]
        losses, rate = loss.draw(runs, [("unigram entropy", 6.44)], "tokens").axes
        legend = [text.get_text() for text in losses.get_legend().get_texts()]
        self.assertEqual(legend, [f"{name}: validation, last 4.321" for name in ("bf16", "e4m3")])
        self.assertIn("unigram entropy 6.44", [text.get_text() for text in losses.texts])
        self.assertEqual(len(rate.lines), 2)

    def test_runs_of_one_name_are_told_apart_by_their_folders(self):
        (self.folder / "a").mkdir()
        (self.folder / "b").mkdir()
        paths = [self.write_run(name, {"event": "run", "name": "seed-1"}, step(1)) for name in ("a/seed-1", "b/seed-1")]
        self.assertEqual([run.name for run in run_log.read_runs(paths)], ["a/seed-1", "b/seed-1"])
        self.assertEqual(run_log.read_runs(paths[:1])[0].name, "seed-1")

    def test_without_matplotlib_the_error_says_so(self):
        run = self.write_run("a", step(1))
        with mock.patch.dict(sys.modules, {"matplotlib": None}):
            code, said = self.plot(run, "-o", self.folder / "loss.png")
        self.assertEqual(code, 3)
        self.assertIn("matplotlib: not installed", said)

    def test_a_line_being_written_is_left_out(self):
        run = run_log.read_run(self.write_run("a", step(1), step(2), tail='{"event":"step","st'))
        self.assertEqual(run.series("step", "step", "loss"), ([1, 2], [5.0, 5.0]))

    def test_steps_repeated_after_a_resume_replace_the_lost_ones(self):
        run = run_log.read_run(self.write_run("a", step(1, 8), step(2, 7), step(3, 6), step(2, 7.5), step(3, 6.5)))
        self.assertEqual(run.series("step", "step", "loss"), ([1, 2, 3], [8, 7.5, 6.5]))

    def test_a_loss_that_is_not_finite_is_a_gap(self):
        run = run_log.read_run(self.write_run("a", step(1), step(2, None), step(3)))
        smoothed = loss.smooth(run.series("step", "step", "loss")[1], 1)
        self.assertEqual([math.isnan(value) for value in smoothed], [False, True, False])
        self.assertAlmostEqual(smoothed[2], 5.0)
        self.assertEqual(self.plot(self.folder / "a", "-o", self.folder / "a.png")[0], 0)

    def test_smoothing_has_no_lag(self):
        ramp = list(range(200))
        self.assertAlmostEqual(loss.smooth(ramp, 5)[100], 100)
        self.assertEqual(list(loss.smooth([3.0], 0)), [3.0])

    def test_logs_that_cannot_be_plotted_are_named(self):
        damaged = self.write_run("damaged", step(1), tail="{]\n" + json.dumps(step(2)) + "\n")
        empty = self.write_run("empty", {"event": "run"})
        for path, expected in (
            (damaged, "log.jsonl:2: not JSON"),
            (empty, "no step or eval record yet"),
            (self.folder / "none.jsonl", "none.jsonl"),
        ):
            code, said = self.plot(path, "-o", self.folder / "loss.png")
            self.assertEqual(code, 3)
            self.assertIn(expected, said)
        self.assertFalse((self.folder / "loss.png").exists())


if __name__ == "__main__":
    unittest.main()
