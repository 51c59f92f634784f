"""quern.Run where a program uses it wrongly, or lets go of it: an Error that says so, and nothing crashes or is lost."""

import enum
import gc
import math
import multiprocessing
import os
import pickle
import resource
import signal
import subprocess
import sys
import textwrap
import threading
import time
import unittest
import warnings
import weakref

import numpy as np
from run_test_case import RunTestCase, chain

import quern
from quern.driver import dlpack
from quern.tokens.token_file import TokenWriter


class RunMisuseTest(RunTestCase):
    def trained(self, name="trained", steps=1):
        """The config of a run with a checkpoint."""
        config = self.named(name, train__steps=steps)
        with quern.Run(config) as run:
            list(run)
        return config

    def refused(self, text, work, *kinds):
        with self.assertRaises(quern.Error) as caught:
            work()
        self.assertIn(text, str(caught.exception))
        self.assertNotIn("json", str(caught.exception))
        for kind in kinds:
            self.assertIsInstance(caught.exception, kind)
        self.assertEqual(str(pickle.loads(pickle.dumps(caught.exception))), str(caught.exception))
        return caught.exception

    # ---- callbacks ----

    def test_a_call_inside_a_callback_is_refused(self):
        calls = {
            "close": lambda run: run.close(), "step": lambda run: run.step(), "save": lambda run: run.save(),
            "evaluate": lambda run: run.evaluate(), "read": lambda run: run.read("master/embedding.weight"),
            "position": lambda run: run.position, "export": lambda run: run.export(self.folder / "export"),
        }
        faults = {}

        def on_event(event):
            if event["event"] == "step":
                for name, call in calls.items():
                    try:
                        call(run)
                    except quern.Error as error:
                        faults[name] = str(error)

        with quern.Run(self.config, on_event=on_event) as run:
            self.assertEqual([step.step for step in run], list(range(1, 7)))
        self.assertEqual(list(faults), list(calls))
        self.assertTrue(all("inside another call of its own, as from on_event" in text for text in faults.values()), faults)

    def test_rows_that_close_their_run_are_a_fault_of_the_data(self):
        def rows():
            yield from [chain(1)] * 3
            run.close()

        run = quern.Run(self.named("rows"), data=rows())
        error = self.refused("inside another call", lambda: list(run))
        self.assertEqual(error.kind, "input")
        run.close()

    def test_another_thread_waits_for_no_call(self):
        began, end = threading.Event(), threading.Event()

        def rows():
            began.set()
            end.wait(20)
            yield from [chain(1)] * 20

        with quern.Run(self.named("thread"), data=rows()) as run:
            thread = threading.Thread(target=run.step)
            thread.start()
            began.wait(20)
            self.refused("another thread", run.step)
            self.refused("another thread", run.close)
            end.set()
            thread.join()
            self.assertEqual(run.step().step, 2)

    # ---- lifetime ----

    def test_a_run_that_nobody_refers_to_is_freed(self):
        run = quern.Run(self.config)
        run.step()
        second = quern.Run(self.config)
        self.refused("close the run that this process has there", second.step)
        del second
        first = weakref.ref(run)
        run = quern.Run(self.config)  # a notebook's cell that is run twice
        self.assertIsNone(first())
        self.assertEqual(run.step().step, 1)
        box = {"run": run}
        run = box["run"] = quern.Run(self.named("cycle"), on_event=lambda event: box and None)
        run.step()
        first = weakref.ref(run)
        del run, box
        gc.collect()
        self.assertIsNone(first())

    def test_memory_of_runs_that_are_dropped_is_freed(self):
        self.config = self.config.set("model.llama.vocab_size", 20000)  # 5 MB of weights
        config = self.trained()
        for i in range(12):
            quern.Run(config).evaluate()
            if i == 3:
                before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        self.assertLess(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before, 16 << 10)  # KiB

    def test_a_child_of_fork_leaves_the_run_to_its_parent(self):
        with quern.Run(self.config) as run:
            run.step()
            said, says = multiprocessing.Pipe()

            def child():
                try:
                    run.step()
                except quern.Error as error:
                    says.send(str(error))
                run.close()
                time.sleep(60)

            process = multiprocessing.get_context("fork").Process(target=child)
            process.start()
            self.assertTrue(said.poll(20))
            self.assertIn("process that forked this one", said.recv())
            process.terminate()
            process.join(10)
            self.assertEqual(process.exitcode, -signal.SIGTERM)
            self.assertEqual(len(list(run)), 5)

    def test_a_finished_run_has_no_steps(self):
        with quern.Run(self.named("finished", train__steps=1)) as run:
            self.assertEqual(len(list(run)), 1)
            self.assertIsNone(run.step())
            self.assertEqual((list(run), run.finished), ([], True))
        self.refused("closed", run.step, ValueError)

    def test_uses_in_another_order(self):
        config = self.trained()
        with quern.Run(config) as run:
            self.refused("call step() first", lambda: run.position)
            self.refused("call step() first", run.save)
            first = run.generate([[1]], max_tokens=2, temperature=0, stop=[])[0].tokens
            loss = run.evaluate()[0].loss
            longer = run.generate([[1]], max_tokens=30, temperature=0, stop=[])[0].tokens
            self.assertEqual((longer[:2], len(longer)), (first, 30))
            self.assertEqual(run.evaluate()[0].loss, loss)
            self.assertEqual(run.read("master/embedding.weight").shape, (64, 32))
            self.refused("does not train", run.step)
            self.refused("no such tensor", lambda: run.read("master/none"), KeyError)
        with quern.Run(self.named("texts")) as run:
            run.step()
            self.refused("set sample.every", lambda: run.generate([[1]], max_tokens=2))

    # ---- values ----

    def test_generate_checks_its_settings_as_the_program(self):
        with quern.Run(self.trained()) as run:
            for text, settings in (
                ("max_tokens: out of range: found 0, expected at least 1", {"max_tokens": 0}),
                ("longer than the model's positions", {"max_tokens": 32}),
                ("max_tokens: wrong value: found 1.5", {"max_tokens": 1.5}),
                ("max_tokens: wrong value", {"max_tokens": 2**70}),
                ("temperature: out of range: found -1", {"temperature": -1}),
                ("temperature: wrong value: found nan", {"temperature": math.nan}),
                ("top_p: out of range: found 0", {"top_p": 0}),
                ("top_p: out of range: found 2", {"top_p": 2}),
                ("seed: out of range: found -1", {"seed": -1}),
                ("seed: wrong value: found 'x'", {"seed": "x"}),
                ("stop: out of range: found 64", {"stop": [64]}),
                ("stop: out of range: found -1", {"stop": [-1]}),
                ("stop: not a list", {"stop": 3}),
            ):
                with self.subTest(text):
                    self.refused(text, lambda settings=settings: run.generate([[1]], **{"max_tokens": 2, **settings}))
            for text, prompts in (
                ("prompts: not a list: found str", "Hello"), ("prompt 1: not a token: found 4294967301", [[2**32 + 5]]),
                ("prompt 1: not a token: found 1.5", [[1.5]]), ("prompt 2: token outside of the vocabulary", [[1], [64]]),
                ("prompt 1: empty prompt", [[]]), ("prompts: not a list of tokens: found b'ab'", [b"ab"]),
                ("prompts: not a list of tokens: found None", [None]),
            ):
                with self.subTest(text):
                    self.refused(text, lambda prompts=prompts: run.generate(prompts, max_tokens=2))
            self.assertEqual(run.generate([]), [])
            text, = run.generate([np.array([1, 2])], max_tokens=np.int64(3), temperature=np.float32(0), stop=np.array([], int))
            self.assertEqual(len(text.tokens), 3)

    def test_learning_rates_are_checked(self):
        with quern.Run(self.config) as run:
            run.step()
            for rate in (math.nan, math.inf, "x", 10**400, 0, -1):
                self.refused("learning_rate", lambda rate=rate: setattr(run, "learning_rate", rate))
            run.learning_rate = np.float32(0.5)
            self.assertEqual(run.learning_rate, 0.5)

    def test_configs_take_numbers_of_numpy_and_lists_of_tables(self):
        class Steps(enum.IntEnum):
            FEW = 3

        group = {"match": ["*.o_proj.weight"], "deviation": 0.5}
        config = self.config
        for key, value, shown in (
            ("optimizer.learning_rate", np.float64(1e-3), 1e-3), ("optimizer.learning_rate", np.float32(0.5), 0.5),
            ("train.steps", np.int64(9), 9), ("train.steps", Steps.FEW, 3), ("checkpoint.export", np.bool_(False), False),
        ):
            table, name = key.split(".")
            self.assertEqual(config.set(key, value).to_dict()[table][name], shown)
        groups = config.set("train.groups", [group]).to_dict()
        self.assertEqual({**groups["train"]["groups"][0], **group}, groups["train"]["groups"][0])
        self.assertEqual(quern.Config.from_dict(groups).to_dict(), groups)
        self.refused("Config.from_text: not TOML: found int", lambda: quern.Config.from_text(3), TypeError)
        self.refused("train.steps", lambda: config.set("train.steps", None), TypeError)

    def test_errors_name_the_file_of_a_key_that_it_lacks(self):
        path = self.folder / "lacks.toml"
        path.write_text("[train]\nsteps = 1\n")
        error = self.refused("model.id: missing", lambda: quern.Config.load(path).check())
        self.assertEqual((error.file, error.line, error.key), (str(path), None, "model.id"))
        self.assertEqual(error.expected, "a text (which model plugin; its options are in [model.<id>])")
        self.assertEqual(error.next_step, "")
        error = self.refused("cannot be read", lambda: quern.Config.load(self.folder / "none.toml").check())
        self.assertEqual(error.file, str(self.folder / "none.toml"))
        error = self.refused("model.id: missing", lambda: quern.Config.from_dict({"train": {"steps": 1}}).check())
        self.assertEqual((error.file, error.key), ("", "model.id"))

    def test_only_finite_real_numbers_are_written(self):
        with quern.Run(self.config) as run:
            run.step()
            name = "master/embedding.weight"
            zeros = np.zeros((64, 32))
            self.refused("not finite", lambda: run.write(name, np.full((64, 32), np.nan)), ValueError)
            for values in (zeros.astype(complex), zeros.astype(str), np.ma.masked_equal(zeros, 0)):
                self.refused("an array of real numbers", lambda values=values: run.write(name, values), TypeError)
            run.write(name, zeros.astype(">f8"))
            self.assertFalse(run.read(name).any())

    def test_rows_have_known_parts(self):
        tokens = np.arange(17) % 64
        for row, text in (({"tokens": tokens, "maks": tokens}, "found 'maks', expected one of tokens, mask, documents; nearest name `mask`"),
                          ({"mask": tokens}, "a row: no tokens"),
                          ({"tokens": tokens, "mask": ["False"] * 17}, "mask of a row: found <U5")):
            with quern.Run(self.named("parts"), data=[row]) as run:
                self.refused(text, run.step)
        self.refused("whose data were not rows", lambda: self.continued_by_rows(tokens))

    def continued_by_rows(self, tokens):
        config = self.trained("files")
        with quern.Run(config.set("train.steps", 2), data=[tokens]) as run:
            run.step()

    def test_a_view_is_not_copied_nor_moved(self):
        with quern.Run(self.config) as run:
            run.step()
            view = run.view("master/embedding.weight")
            self.assertEqual(np.from_dlpack(view).shape, (64, 32))
            for asked in ({"copy": True}, {"dl_device": (2, 0)}):
                with self.assertRaisesRegex(BufferError, "Run.read"):
                    view.__dlpack__(**asked)
            view.__dlpack__(copy=False, dl_device=view.__dlpack_device__(), max_version=(1, 0))

    def test_a_library_that_refuses_a_view_says_so_itself(self):
        with quern.Run(self.named("bf16").set("optimizer.master", "bf16")) as run:
            run.step()
            for _ in range(2):
                with self.assertRaisesRegex((BufferError, RuntimeError), "Unsupported dtype"):  # by numpy's version
                    np.from_dlpack(run.view("master/embedding.weight"))
            self.assertEqual(dlpack.exported, {})

    def test_values_that_are_no_paths_keys_or_tables_are_refused(self):
        for text, call in (("Config.load: not a path: found int", lambda: quern.Config.load(3)),
                           ("Config.load: not a path: found bytes", lambda: quern.Config.load(b"run.toml")),
                           ("Config.from_dict: not tables: found int", lambda: quern.Config.from_dict(3)),
                           ("Config.set: not a key: found int", lambda: self.config.set(3, 4)),
                           ("weights: not a path: found int", lambda: quern.Run(self.config, weights=3)),
                           ("place: not a path: found int", lambda: quern.Run(self.config).export(3)),
                           ("place: not a path: found int", lambda: quern.Run(self.config).export(3, to="gguf")),
                           ("files: not a list: found str", lambda: quern.Run(self.config).evaluate("a.tok")),
                           ("files: not a path: found int", lambda: quern.Run(self.config).evaluate([3]))):
            self.refused(text, call, TypeError)

    def test_a_finished_run_that_is_run_again_says_what_to_do(self):
        config = self.trained("again", steps=2)
        with quern.Run(config) as run, self.assertWarnsRegex(UserWarning, "all its 2 steps already; raise train.steps"):
            self.assertEqual(list(run), [])
        with quern.Run(config.set("train.steps", 3)) as run, warnings.catch_warnings():
            warnings.simplefilter("error")
            self.assertEqual([step.step for step in run], [3])
            self.assertIsNone(run.step())

    # ---- processes ----

    def test_ctrl_c_ends_an_evaluation_and_a_generation(self):
        config = self.trained()
        (self.folder / "trained.toml").write_text(config.to_toml())
        with TokenWriter(self.folder / "long.tok", 64) as file:
            for _ in range(50):
                file.append(chain(2000))
        for call in ("run.evaluate(['long.tok'])", "run.generate([[1]] * 10**5, max_tokens=20, stop=[])"):
            process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(f"""\
                import quern, signal, sys
                signal.signal(signal.SIGINT, signal.default_int_handler)
                run = quern.Run("trained.toml")
                run.evaluate(); run.generate([[1]], max_tokens=20, stop=[])
                print("begins", flush=True)
                try:
                    {call}
                except KeyboardInterrupt:
                    print("interrupted", run.evaluate()[0].targets > 0)
                """)], cwd=self.folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            self.assertEqual(process.stdout.readline(), "begins\n")
            time.sleep(0.3)
            process.send_signal(signal.SIGINT)
            out, err = process.communicate(timeout=30)
            self.assertEqual((out, process.returncode), ("interrupted True\n", 0), err)

    def test_a_script_from_standard_input_is_not_launched(self):
        (self.folder / "ranks.toml").write_text(
            self.config.set("parallel", {"ranks": 2, "communicator": "memcpy"}).set("train.accumulation", 2).to_toml())
        for words in ([], ["-"]):
            result = subprocess.run([sys.executable, *words], cwd=self.folder, capture_output=True, text=True, env=os.environ,
                                    input="import quern\nquern.launch('ranks.toml')\nprint('trains')\n")
            self.assertEqual((result.returncode, result.stdout), (1, ""))
            self.assertIn("write a script, and run that", result.stderr)


if __name__ == "__main__":
    unittest.main()
