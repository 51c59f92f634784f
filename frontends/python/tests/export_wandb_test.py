"""Weights & Biases export: the calls of wandb, with a stand-in for it, and the error without it."""

import contextlib
import fcntl
import io
import json
import math
import sys
import threading
import time
import types
import unittest
from unittest import mock

from folder_test_case import FolderTestCase
from quern import command_line
from quern.runs import run_log

LOG = (
    {"event": "run", "name": "one", "config": '[train]\nsteps = 2\nfrom = "x"\n'},
    {"event": "step", "step": 1, "steps": 2, "loss": 5.0, "lr": 1e-3},
    {"event": "step", "step": 2, "steps": 2, "loss": None, "loss_text": "inf", "lr": 1e-3},
    {"event": "eval", "step": 2, "tokens": 64, "loss": 4.5},
    {"event": "end", "step": 2, "val_loss": 4.5, "export": "runs/one/export"},
)


class FakeRun:
    def __init__(self, arguments):
        self.arguments, self.logged, self.summary, self.finished = arguments, [], {}, False

    def log(self, values, step):
        self.logged.append((step, values))

    def finish(self):
        self.finished = True


class ExportTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        (self.folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in LOG))

    def export(self, wandb, *arguments):
        with mock.patch.dict(sys.modules, {"wandb": wandb}), contextlib.redirect_stdout(io.StringIO()) as said:
            with contextlib.redirect_stderr(said):
                return command_line.main(["export-wandb", *map(str, arguments)]), said.getvalue()

    def test_a_run_is_handed_over_offline_with_config_history_and_summary(self):
        made = []
        wandb = types.SimpleNamespace(init=lambda **words: made.append(FakeRun(words)) or made[-1])
        code, said = self.export(wandb, self.folder, "--project", "p", "--dir", self.folder / "new")
        self.assertEqual(code, 0, said)
        (run,) = made
        self.assertEqual(run.arguments["mode"], "offline")
        self.assertEqual((run.arguments["project"], run.arguments["name"]), ("p", "one"))
        self.assertEqual(run.arguments["config"]["train"], {"steps": 2, "from": "x"})
        self.assertEqual(run.logged[0], (1, {"train/loss": 5.0, "train/lr": 1e-3}))
        self.assertEqual(run.logged[1:], [(2, {"train/loss": math.inf, "train/lr": 1e-3}),
                                          (2, {"eval/tokens": 64, "eval/loss": 4.5})])
        self.assertEqual(run.summary, {"end/val_loss": 4.5})
        self.assertTrue(run.finished)

    def test_a_run_that_trains_is_followed_until_it_ends(self):
        made, log = [], self.folder / "log.jsonl"
        lines = log.read_text().splitlines(keepends=True)
        log.write_text(lines[0] + lines[1][:9])
        wandb = types.SimpleNamespace(init=lambda **words: made.append(FakeRun(words)) or made[-1])

        def grow():
            for seen, rest in ((0, lines[1][9:]), (1, "".join(lines[2:]))):
                while len(made) == 0 or len(made[0].logged) < seen:
                    time.sleep(0.01)
                with open(log, "a") as file:
                    file.write(rest)

        writer = threading.Thread(target=grow)
        writer.start()
        code, said = self.export(wandb, self.folder, "--follow", "--mode", "online")
        writer.join()
        self.assertEqual((code, said), (0, f"{self.folder}: 2 steps, 1 evaluations\n"))
        self.assertEqual((made[0].arguments["mode"], made[0].arguments["name"]), ("online", "one"))
        self.assertEqual([step for step, _ in made[0].logged], [1, 2, 2])
        self.assertEqual((made[0].summary, made[0].finished), ({"end/val_loss": 4.5}, True))
        code, said = self.export(wandb, self.folder, self.folder, "--follow")
        self.assertEqual((code, "follows one run" in said), (2, True), said)

    def test_a_run_that_was_killed_is_followed_until_nobody_holds_it(self):
        made, log = [], self.folder / "log.jsonl"
        text = log.read_text()
        last = text.splitlines(keepends=True)[-1]
        wandb = types.SimpleNamespace(init=lambda **words: made.append(FakeRun(words)) or made[-1])
        log.write_text(text.removesuffix(last))
        with mock.patch.object(run_log, "QUIET", 0.3):
            code, said = self.export(wandb, self.folder, "--follow")
            self.assertEqual((code, "ended without its last event" in said), (3, True), said)
            self.assertEqual(([step for step, _ in made[0].logged], made[0].finished), ([1, 2, 2], True))
            with open(self.folder / ".lock", "w") as held:  # as a run that is silent for a while has it
                fcntl.flock(held, fcntl.LOCK_EX)

                def end():
                    with open(log, "a") as file:
                        file.write(last)

                threading.Timer(1.5, end).start()
                code, said = self.export(wandb, self.folder, "--follow")
            self.assertEqual((code, said), (0, f"{self.folder}: 2 steps, 1 evaluations\n"))

    def test_without_wandb_the_error_says_so(self):
        code, said = self.export(None, self.folder)
        self.assertEqual(code, 3)
        self.assertIn("pip install wandb", said)

    def test_a_log_that_is_not_there_is_named(self):
        code, said = self.export(types.SimpleNamespace(), self.folder / "none.jsonl")
        self.assertEqual(code, 3)
        self.assertIn("none.jsonl", said)


if __name__ == "__main__":
    unittest.main()
