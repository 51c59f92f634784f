"""quern.Run: a run driven from Python has the bits of `quern train`, however it ends it can be resumed, and data, logs,
tensors and errors cross the boundary."""

import json
import math
import os
import signal
import subprocess
import sys
import textwrap
import time
import unittest
from unittest import mock

import matplotlib.image
import numpy as np
from gguf import GGUFReader

from run_test_case import SEQUENCE, RunTestCase, chain

import quern
from quern.driver import dlpack

PROGRAM = os.environ["QUERN"]


class RunTest(RunTestCase):
    def losses(self, name):
        events = [json.loads(line) for line in (self.folder / name / "log.jsonl").read_text().splitlines()]
        return {event["step"]: event["loss"] for event in events if event["event"] == "step"}

    def whole(self):
        """Losses of `quern train`."""
        subprocess.run([PROGRAM, "train", str(self.folder / "run.toml")], check=True, capture_output=True)
        return self.losses("run")

    def newest_tensors(self, name):
        return max((self.folder / name / "checkpoints").glob("step-*")).joinpath("tensors.safetensors").read_bytes()

    def test_a_run_from_python_has_the_bits_of_the_program(self):
        whole = self.whole()
        self.assertEqual(len(whole), 6)
        with quern.Run(self.named("python")) as run:
            steps = list(run)
            self.assertTrue(run.finished)
        self.assertEqual({step.step: step.loss for step in steps}, whole)
        self.assertEqual(self.newest_tensors("python"), self.newest_tensors("run"))
        self.assertTrue((self.folder / "python/export/model.safetensors").is_file())
        self.assertLess(steps[-1].loss, steps[0].loss)
        self.assertTrue(math.isnan(steps[1].validation_loss))
        self.assertGreater(steps[3].validation_loss, 0)
        self.assertEqual([step.tokens for step in steps], [32 * (step + 1) for step in range(6)])
        self.assertIn("parameters", run_plan := quern.Run(self.config).plan())
        self.assertIn("steps = 6", self.config.to_toml(), run_plan)

    def test_a_run_that_is_left_or_killed_continues_with_the_same_bits(self):
        whole = self.whole()
        with quern.Run(self.named("left")) as run:
            next(iter(run))
        with self.assertRaises(ZeroDivisionError), quern.Run(self.named("left")) as run:
            for step in run:
                if step.step == 3:
                    step.step / 0
        with quern.Run(self.named("left")) as run:
            self.assertEqual([step.step for step in run], [4, 5, 6])
        self.assertEqual(self.losses("left"), whole)
        killed = self.python(self.loop("killed", "run.save() if step.step == 2 else step.step == 3 and os.abort()"))
        killed.communicate(timeout=60)
        self.assertEqual(killed.returncode, -signal.SIGABRT)
        with quern.Run(self.named("killed")) as run:
            self.assertEqual([step.step for step in run], [3, 4, 5, 6])  # from the checkpoint of step 2
        self.assertEqual(self.losses("killed"), whole)

    def loop(self, name, body, steps=6):
        return textwrap.dedent(f"""\
            import os, quern, signal
            signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell may have it ignored
            config = quern.Config.load("run.toml").set("log.directory", {name!r}).set("train.steps", {steps})
            with quern.Run(config) as run:
                for step in run:
                    print(step.step, flush=True)
                    {body}
            """)

    def python(self, program):
        return subprocess.Popen([sys.executable, "-c", program], cwd=self.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def test_signals_stop_a_run_which_then_is_saved(self):
        for number, expected in ((signal.SIGINT, "KeyboardInterrupt"), (signal.SIGTERM, "")):
            name = f"stopped{int(number)}"
            process = self.python(self.loop(name, "pass", 100000))
            for _ in range(3):
                process.stdout.readline()
            process.send_signal(number)
            out, err = process.communicate(timeout=60)
            self.assertEqual(process.returncode, -number, err)
            self.assertEqual(err.strip().splitlines()[-1:], [expected] if expected else [])
            done = int(out.split()[-1]) if out else 3
            saved = max(int(path.name.split("-")[1]) for path in (self.folder / name / "checkpoints").glob("step-*"))
            self.assertGreaterEqual(saved, done)  # every step that the loop saw

    def test_a_second_ctrl_c_ends_a_step_that_does_not_stop(self):
        process = self.python(textwrap.dedent("""\
            import quern, signal, time
            signal.signal(signal.SIGINT, signal.default_int_handler)
            def wait(event):
                if event["event"] == "step":
                    print("waits", flush=True)
                    time.sleep(100)
            quern.Run("run.toml", on_event=wait).step()
            """))
        self.assertEqual(process.stdout.readline(), "waits\n")
        process.send_signal(signal.SIGINT)
        time.sleep(1.5)
        self.assertIsNone(process.poll())  # it would stop behind the step
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=30)
        self.assertEqual(process.returncode, 128 + signal.SIGINT)

    def test_errors_have_parts(self):
        with self.assertRaises(quern.Error) as caught:
            self.config.set("train.stepz", 3).set("device.id", "cpuu").check()
        self.assertEqual(caught.exception.kind, "config")
        self.assertEqual([finding.key for finding in caught.exception.findings], ["device.id", "train.stepz"])
        self.assertEqual(caught.exception.findings[1].next_step, "nearest name `steps`")
        path = self.folder / "run.toml"
        path.write_text(path.read_text().replace("micro_batch = 2", "micro_batch = 0"))
        with self.assertRaises(quern.Error) as caught:
            self.config.check()
        error = caught.exception
        line = path.read_text().splitlines().index("micro_batch = 0") + 1
        self.assertEqual((error.file, error.line, error.column, error.key), (str(path), line, 1, "train.micro_batch"))
        self.assertEqual(error.found, "0")
        self.assertIn("an integer from 1", error.expected)
        self.assertIn("train.micro_batch", str(error))
        with self.assertRaises(quern.Error) as caught:
            quern.Config.load(self.folder / "none.toml").check()
        self.assertEqual((caught.exception.kind, caught.exception.next_step), ("input", "check the path and its permissions"))

    def test_a_dict_is_a_config(self):
        made = quern.Config.from_dict(self.config.to_dict())
        self.assertEqual(made.to_dict(), self.config.to_dict())
        self.assertEqual(made.set("train", {"steps": 9, "sequence": 8}).to_dict()["train"]["steps"], 9)
        with self.assertRaises(TypeError):
            self.config.set("train.steps", None)

    def test_weights_are_read_written_evaluated_exported_and_generate(self):
        with quern.Run(self.config) as run:
            first = run.step()
            self.assertEqual(run.position, first)
            run.learning_rate = 1e-30
            name = "master/embedding.weight"
            before = run.read(name)
            self.assertEqual(before.shape, run.tensors()[name].shape)
            self.assertTrue(any(tensor.startswith("moment1/") for tensor in run.tensors()))
            squares = sum(np.sum(run.read(tensor) ** 2) for tensor in run.tensors() if tensor.startswith("gradient/"))
            self.assertAlmostEqual(np.sqrt(squares) / (2 * SEQUENCE), first.gradient_norm, 5)
            run.step()
            np.testing.assert_array_equal(run.read(name), before)
            run.learning_rate = None
            run.step()
            self.assertGreater(run.learning_rate, 0)
            loss = run.evaluate()[0]
            self.assertEqual(loss.loss, run.position.validation_loss)
            self.assertTrue(math.isnan(loss.accuracy))
            run.write(name, before * 0)
            self.assertNotEqual(run.evaluate()[0].loss, loss.loss)
            run.write(name, np.from_dlpack(before))
            with self.assertRaisesRegex(ValueError, "expected"):
                run.write(name, before[:3])
            with self.assertRaises(KeyError):
                run.read("master/none")
            for tensor in (name, "gradient/qkv.weight/1", "moment1/final_norm.weight"):
                view = np.from_dlpack(run.view(tensor))
                np.testing.assert_array_equal(view, run.read(tensor))
                self.assertEqual((view.dtype, view.flags.owndata), (np.float32, False))
            view = np.from_dlpack(run.view(name))
            self.assertEqual(len(dlpack.exported), 1)
            run.view(name).__dlpack__()  # that nobody takes
            run.step()
            np.testing.assert_array_equal(view, run.read(name))  # the same memory
            run.export(self.folder / "model")
            run.export(self.folder / "model.gguf", to="gguf")
            found, = (one for one in GGUFReader(self.folder / "model.gguf").tensors if one.name == "token_embd.weight")
            np.testing.assert_array_equal(found.data, run.read(name))
            with self.assertRaisesRegex(quern.Error, "not a GGUF file"):
                run.export(self.folder / "train.tok", to="gguf")
        np.testing.assert_array_equal(view, view)  # which it keeps
        del view
        self.assertEqual(dlpack.exported, {})
        with quern.Run(self.config, weights=self.folder / "model") as run:
            self.assertLess(run.evaluate([self.folder / "train.tok"])[0].loss, 5)
            self.assertTrue(all(tensor.startswith("master/") for tensor in run.tensors()))
        with quern.Run(self.config) as run:
            texts = run.generate([[1, 8], [3]], max_tokens=4, temperature=0, stop=[])
        self.assertEqual([len(text.tokens) for text in texts], [4, 4])
        with self.assertRaisesRegex(ValueError, "closed"):
            run.step()

    def test_models_with_classes_have_an_accuracy(self):
        for name, level in (("dark", 0.1), ("light", 0.9)):
            (self.folder / "images" / name).mkdir(parents=True)
            for i in range(4):
                matplotlib.image.imsave(self.folder / "images" / name / f"{i}.png", np.full((8, 8, 3), level + 0.02 * i))
        images = str(self.folder / "images")
        config = quern.Config.from_dict({
            "model": {"id": "vit", "vit": {"img_size": 8, "patch_size": 4, "num_classes": 2, "embed_dim": 16, "depth": 1,
                                           "num_heads": 2}},
            "data": {"id": "images", "images": {"train": images, "validation": images, "size": 8, "patch": 4}},
            "train": {"steps": 20, "micro_batch": 4, "sequence": 5},
            "optimizer": {"learning_rate": 0.03},
            "checkpoint": {"export": False},
            "log": {"directory": str(self.folder / "classes"), "sinks": []},
        })
        with quern.Run(config) as run:
            run.step()
            self.assertIn(run.evaluate()[0].accuracy, [i / 8 for i in range(9)])
            list(run)
        with quern.Run(config) as run:
            self.assertEqual(run.evaluate()[0].accuracy, 1)

    def test_texts_are_prompts_where_there_is_a_tokenizer(self):
        (self.folder / "text.txt").write_text("a quern grinds grain between two stones\n" * 400)
        subprocess.run([sys.executable, "-m", "quern", "tokenize", self.folder / "text.txt", "--train-bpe", "300", "-o",
                        self.folder / "data"], check=True, capture_output=True)
        config = self.config.set("model.llama.vocab_size", 300).set("checkpoint.tokenizer", self.folder / "data")
        config = config.set("data.tokens.train", self.folder / "data/train.tok")
        config = config.set("data.tokens.validation", self.folder / "data/val.tok").set("train.eval_every", 0)
        with quern.Run(config) as run:
            list(run)
        words = ["a quern", "grinds grain"]
        with quern.Run(config) as run:
            texts = run.generate([*words, [1, 2]], max_tokens=5, temperature=0, stop=[])
        self.assertTrue(all(text.text.startswith(word) and len(text.tokens) == 5 for word, text in zip(words, texts)))
        self.assertIsNone(texts[2].text)
        (self.folder / "resolved.toml").write_text(config.to_toml())
        shown = subprocess.run([sys.executable, "-m", "quern", "generate", self.folder / "resolved.toml", *words, "--greedy",
                                "--max-tokens", "5", "--stop", "none", "--quern", PROGRAM], capture_output=True, text=True)
        self.assertEqual(shown.stdout, "".join(f"--- {i + 1}\n{text.text}\n" for i, text in enumerate(texts[:2])), shown.stderr)
        with self.assertRaisesRegex(quern.Error, "checkpoint.tokenizer"):
            quern.Run(self.config).generate(["a quern"])

    def rank_of_torchrun(self, rank, *words):
        return subprocess.Popen([sys.executable, *words], cwd=self.folder, stdout=subprocess.PIPE, text=True,
                                env={**os.environ, "RANK": str(rank), "LOCAL_RANK": str(rank), "WORLD_SIZE": "2",
                                     "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "localhost", "MASTER_PORT": "29500",
                                     "TORCHELASTIC_RUN_ID": self.folder.name})

    def test_ranks_that_torchrun_starts_are_a_run(self):
        (self.folder / "ranks.toml").write_text((self.folder / "run.toml").read_text().replace(
            "micro_batch = 2", "micro_batch = 2\naccumulation = 2") + "[parallel]\ncommunicator = 'memcpy'\n")
        subprocess.run([PROGRAM, "train", self.folder / "ranks.toml", "--set", f"log.directory={self.folder}/program",
                        "--set", "parallel.ranks=2"], check=True, capture_output=True)
        program = "import quern\nquern.launch('ranks.toml')\nwith quern.Run('ranks.toml') as run: print([step.loss for step in run])"
        ranks = [self.rank_of_torchrun(rank, "-c", program) for rank in range(2)]
        losses = [json.loads(rank.communicate(timeout=100)[0]) for rank in ranks]
        self.assertEqual(losses[0], list(self.losses("program").values()))
        self.assertEqual(losses[1], losses[0])
        with self.assertRaisesRegex(quern.Error, "rank"), quern.Run(quern.Config.load(self.folder / "ranks.toml").set(
                "parallel.ranks", 2)) as run:
            run.step()

    def test_a_signal_that_reaches_one_rank_ends_all_of_them_at_one_step(self):
        (self.folder / "ranks.toml").write_text(self.named("ranks", train={"accumulation": 2}, parallel={
            "ranks": 2, "communicator": "memcpy"}).to_toml())
        (self.folder / "script.py").write_text(textwrap.dedent("""\
            import os, signal, sys, quern
            rank = int(os.environ["RANK"])
            def log(event):  # of rank 0: within a step
                if sys.argv[1] == "within" and (event["event"], event.get("step")) == ("step", 2):
                    os.kill(os.getpid(), signal.SIGTERM)
            with quern.Run("ranks.toml", on_event=log) as run:
                for step in run:
                    if sys.argv[1] == "between" and step.step == 2 and rank == 1:
                        os.kill(os.getpid(), signal.SIGTERM)
                    print(step.step, float(run.read("master/embedding.weight").sum()), flush=True)
            print("goes on")
            """))
        for when in ("between", "within"):
            with self.subTest(when=when):
                ranks = [self.rank_of_torchrun(rank, "script.py", when) for rank in range(2)]
                said = [rank.communicate(timeout=100)[0].splitlines() for rank in ranks]
                self.assertEqual([rank.returncode for rank in ranks if rank.returncode not in (-15, 143)], [], said)
                self.assertEqual((len(said[0]), said[0]), (2, said[1]))
                newest = max((self.folder / "ranks/checkpoints").glob("step-*")).name
                self.assertEqual(int(newest.split("-")[1]), 2)
                subprocess.run(["rm", "-r", self.folder / "ranks"], check=True)

    def launched(self, body, *words, **parallel):
        """A process of a script that is two ranks, with the run in `run`."""
        config = self.named("ranks", parallel={"ranks": 2, "communicator": "memcpy", **parallel},
                            train={"accumulation": 2}, precision={"id": "fp32"})
        (self.folder / "ranks.toml").write_text(config.to_toml())
        (self.folder / "script.py").write_text(textwrap.dedent("""\
            import os, sys, numpy as np, quern
            config = quern.Config.load("ranks.toml")
            quern.launch(config)
            rank = int(os.environ["QUERN_RANK"])
            with quern.Run(config) as run:
            """) + textwrap.indent(textwrap.dedent(body), "    "))
        return subprocess.Popen([sys.executable, "script.py", *words], cwd=self.folder, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True)

    def test_launched_ranks_gather_weights_and_gradients_and_export_once(self):
        with quern.Run(self.named("one", train__accumulation=2, precision__id="fp32")) as run:
            run.step()
            names = [name for name in run.tensors() if name.startswith(("master", "gradient"))]
            want = {name: run.read(name) for name in names}
            loss = run.evaluate()[0].loss
        self.assertTrue(any(name.startswith("gradient/qkv.weight") for name in names))
        for zero in (0, 1, 3):
            with self.subTest(zero=zero):
                process = self.launched("""\
                    run.step()
                    values = {name.replace("/", "|"): run.read(name) for name in run.tensors()}
                    losses = [run.evaluate()[0].loss]
                    embedding = values["master|embedding.weight"]
                    run.write("master/embedding.weight", embedding * 0)
                    losses.append(run.evaluate()[0].loss)
                    run.write("master/embedding.weight", embedding)
                    losses.append(run.evaluate()[0].loss)
                    run.export(sys.argv[1])
                    np.savez(f"values{rank}.npz", losses=losses, **values)
                    print("rank", rank)
                    """, f"model{zero}", zero=zero, reduction="fast")
                out, err = process.communicate(timeout=100)
                self.assertEqual((process.returncode, out), (0, "rank 0\n"), err)
                found = [np.load(self.folder / f"values{rank}.npz") for rank in range(2)]
                for name in names:
                    other = found[0][name.replace("/", "|")]
                    np.testing.assert_array_equal(found[1][name.replace("/", "|")], other)
                    np.testing.assert_allclose(other, want[name], rtol=1e-4, atol=1e-6, err_msg=name)
                written = found[0]["losses"]
                self.assertAlmostEqual(written[0], loss, 5)
                self.assertEqual((written[2], written[1] > 4), (written[0], True))
                with quern.Run(self.config, weights=self.folder / f"model{zero}") as run:
                    self.assertAlmostEqual(run.evaluate()[0].loss, loss, 2)  # rounded to bf16
                subprocess.run(["rm", "-r", self.folder / "ranks"], check=True)

    def test_launched_ranks_end_together(self):
        with mock.patch.object(sys, "ps1", ">>> ", create=True), self.assertRaisesRegex(quern.Error, "run that"):
            quern.launch(self.config.set("parallel", {"ranks": 2, "communicator": "memcpy"}))
        process = self.launched("""\
            for step in run:
                print(step.step, flush=True)
                if step.step == 2 and rank == 1: raise ValueError("a script's own fault")
            """)
        out, err = process.communicate(timeout=100)
        self.assertEqual(process.returncode, 1, err)
        self.assertIn("quern: error: rank 1: ValueError: a script's own fault", err)
        self.config = self.config.set("train.steps", 60000)
        process = self.launched("for step in run: print(step.step, flush=True)")
        for _ in range(3):
            process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=60)
        self.assertEqual(process.returncode, 128 + signal.SIGTERM, err)
        done = int(out.split()[-1]) if out else 3
        saved = max(int(path.name.split("-")[1]) for path in (self.folder / "ranks/checkpoints").glob("step-*"))
        self.assertGreaterEqual(saved, done)

    def test_rows_of_python_train_as_a_token_file_in_order(self):
        tokens = chain(40)
        rows = [tokens[i * SEQUENCE : (i + 1) * SEQUENCE + 1] for i in range(40)]
        events = []
        with quern.Run(self.named("rows"), data=rows, validation=rows[:4], on_event=events.append) as run:
            losses = [step.loss for step in run]
        self.assertEqual([event["loss"] for event in events if event["event"] == "step"], losses)
        self.assertEqual([event["step"] for event in events if event["event"] == "eval"], [3, 6])
        with quern.Run(self.named("epochs", train__epochs=0.1), data=rows) as run:
            self.assertEqual(len(list(run)), 2)  # 4 of 40 rows, 2 a step
        with self.assertRaisesRegex(ValueError, "with a length"):
            quern.Run(self.named("endless", train__epochs=1), data=iter(rows))
        # Resumed by skipping, and by the iterable's own state.
        for name, make in (("skipped", lambda: rows), ("stated", lambda: Stated(rows))):
            resumed = []
            for stop in (2, 3, 6):
                with quern.Run(self.named(name), data=make()) as run:
                    for step in run:
                        resumed.append(step.loss)
                        if step.step == stop:
                            break
            self.assertEqual(resumed, losses)

    def test_masks_and_documents_reach_the_loss(self):
        row = chain(1)
        config = self.named("masked", train__micro_batch=1, train__steps=1, data__documents="masked")
        def targets(item):
            with quern.Run(config, data=[row], validation=[item]) as run:
                return run.evaluate()[0].targets
        with quern.Run(config, data=[row]) as run:  # weights to evaluate
            list(run)
        self.assertEqual(targets(row), SEQUENCE)
        self.assertEqual(targets({"tokens": row, "mask": np.arange(SEQUENCE + 1) > 10}), SEQUENCE - 10)
        self.assertEqual(targets({"tokens": row, "documents": [0, 5, 9]}), SEQUENCE - 2)

    def test_faults_of_the_programs_data_are_named_and_kept_as_cause(self):
        for data, found in (([chain(2)], "expected integers (17,)"), ([], "no rows"), (iter([chain(1)] * 3), "ended after"),
                            ([chain(1) + 64], "expected 0 to 63")):
            with self.assertRaises(quern.Error) as caught, quern.Run(self.named("faulty"), data=data) as run:
                list(run)
            self.assertIn(found, str(caught.exception))
            self.assertIsInstance(caught.exception.__cause__, ValueError)
            self.assertIsNone(caught.exception.__context__ and caught.exception.__context__.__context__)  # one error

    def test_a_failing_callback_of_the_log_does_not_stop_the_run(self):
        with quern.Run(self.config, on_event=lambda event: event["none"]) as run:
            self.assertEqual(len(list(run)), 6)


class Stated:
    """Rows that know where they are."""

    def __init__(self, rows):
        self.rows, self.at = rows, 0

    def __iter__(self):
        while self.at < len(self.rows):
            self.at += 1
            yield self.rows[self.at - 1]

    def state_dict(self):
        return {"at": self.at}

    def load_state_dict(self, state):
        self.at = state["at"]


if __name__ == "__main__":
    unittest.main()
