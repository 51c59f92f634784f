"""Every tool ends with a code and at most one line, whatever its output is: closed, full, read-only or gone."""

import contextlib
import io
import json
import os
import pickle
import resource
import subprocess
import sys
import unittest
from pathlib import Path
from unittest import mock

from folder_test_case import FolderTestCase
from quern.base import end_of_main, fault, files
from log_fuzz_test import comparison, log_records

FAKE_WANDB = """
class Run:
    def __init__(self): self.summary = {}
    def log(self, values, step): pass
    def finish(self): pass
def init(**words): return Run()
"""
FAKE_QUERN = """#!{python}
import json, signal
signal.signal(signal.SIGPIPE, signal.SIG_DFL)
print(json.dumps({{"prompt": 0, "token": 0}}), flush=True)
print(json.dumps({{"prompt": 0, "tokens": [0]}}), flush=True)
"""
TOKENIZER = {
    "version": "1.0", "added_tokens": [],
    "model": {"type": "WordLevel", "vocab": {"a": 0, "<eos>": 1}, "unk_token": "a"},
}
CONVERGENCE_TABLE = Path(__file__).resolve().parents[3] / "scripts" / "convergence" / "convergence_table.py"


def words_of(command):
    if command == "convergence_table":
        return [sys.executable, CONVERGENCE_TABLE]
    return [sys.executable, "-m", "quern", *command.split()]


class ScriptsTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        lines = "".join(json.dumps(record) + "\n" for record in log_records())
        (self.folder / "log.jsonl").write_text(lines)
        (self.folder / "report.json").write_text(json.dumps(comparison()))
        for arm in ("a", "b"):
            for seed in (1, 2):
                (self.folder / arm / f"seed-{seed}").mkdir(parents=True)
                (self.folder / arm / f"seed-{seed}" / "log.jsonl").write_text(lines)
        (self.folder / "wandb.py").write_text(FAKE_WANDB)
        (self.folder / "quern").write_text(FAKE_QUERN.format(python=sys.executable))
        (self.folder / "quern").chmod(0o755)
        (self.folder / "tokenizer.json").write_text(json.dumps(TOKENIZER))
        (self.folder / "run.toml").write_text(f'[checkpoint]\ntokenizer = "{self.folder}"\n')
        (self.folder / "text.txt").write_text("a\n\n" * 400)
        self.commands = {  # script: (arguments, option of the output, its default here)
            "report": ([self.folder], "-o", "a.html"),
            "plot loss": ([self.folder], "-o", "a.png"),
            "plot scales": ([self.folder], "-o", "b.png"),
            "plot ab": ([self.folder], "-o", "c.png"),
            "convergence_table": ([self.folder], None, None),
            "export-wandb": ([self.folder], "--dir", "wandb"),
            "tokenize": ([self.folder / "text.txt", "--tokenizer", self.folder / "tokenizer.json"], "-o", "out"),
            "generate": ([self.folder / "run.toml", "a", "--quern", self.folder / "quern"], None, None),
        }

    def run_script(self, script, *arguments, out=None, **streams):
        given, option, default = self.commands[script]
        place = [] if option is None else [option, out or self.folder / default]
        environment = os.environ | {"PYTHONPATH": f"{self.folder}:{os.environ.get('PYTHONPATH', '')}"}
        result = subprocess.run(
            [*words_of(script), *given, *place, *arguments], env=environment, cwd=self.folder,
            stderr=subprocess.PIPE, text=True, **{"stdout": subprocess.PIPE, "stdin": subprocess.DEVNULL} | streams,
        )
        self.assertNotIn("Traceback", result.stderr)
        return result

    def assert_one_line(self, result, code, *words):
        self.assertEqual(result.returncode, code, result.stderr)
        self.assertEqual(result.stderr.count("\n"), 1, result.stderr)
        for word in words:
            self.assertIn(str(word), result.stderr)

    def left_over(self):
        return [path for path in self.folder.rglob("*") if "partial" in path.name]

    def test_a_reader_that_left_ends_a_script_quietly(self):
        for script in self.commands:
            for arguments in ([], ["--help"]) if script == "report" else ([],):
                with self.subTest(script=script, arguments=arguments):
                    reader, writer = os.pipe()
                    os.close(reader)
                    result = self.run_script(script, *arguments, stdout=writer)
                    os.close(writer)
                    self.assertEqual((result.returncode, result.stderr), (fault.CLOSED_OUTPUT, ""))

    def test_a_full_standard_output_is_named(self):
        for script in self.commands:
            with self.subTest(script=script), open("/dev/full", "wb") as full:
                result = self.run_script(script, stdout=full)
                self.assert_one_line(result, fault.RESOURCES, "standard output", "No space")

    def test_a_signal_during_an_import_ends_the_command(self):
        (self.folder / "swallows.py").write_text(
            "import os, signal, time\ntry:\n    os.kill(os.getpid(), signal.SIGTERM)\n    time.sleep(0.01)\n"
            "except BaseException:\n    raise ImportError\n")
        program = (
            "import sys\nfrom quern.base import end_of_main, fault\n"
            "def action():\n    with fault.importing('x'):\n        import swallows\n    print('went on')\n"
            "sys.exit(end_of_main.run_to_the_end('x', action))"
        )
        package = str(Path(fault.__file__).resolve().parents[2])
        result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True,
                                env={**os.environ, "PYTHONPATH": f"{package}:{self.folder}"})
        self.assertEqual((result.returncode, result.stdout, result.stderr), (143, "", ""))

    def test_closed_streams_are_no_fault_and_no_file_takes_their_number(self):
        for script in ("report", "generate"):
            for closed in (0, 1, 2):
                with self.subTest(script=script, closed=closed):
                    command = f'exec "$@" {closed}{"<" if closed == 0 else ">"}&-'
                    given, option, default = self.commands[script]
                    place = [option, self.folder / default] if option else []
                    words = ["sh", "-c", command, "sh", *words_of(script), *given, *place]
                    result = subprocess.run(words, capture_output=True, text=True)
                    self.assertEqual((result.returncode, result.stderr), (0, ""))
                    if script == "report":
                        self.assertEqual((self.folder / "a.html").read_text()[:15], "<!doctype html>")

    def test_files_that_cannot_be_written_are_named(self):
        def small_files():
            resource.setrlimit(resource.RLIMIT_FSIZE, (16, 16))

        for script, (_, option, default) in self.commands.items():
            if script == "generate":
                continue
            place = self.folder / (default or "convergence.md")
            if script not in ("export-wandb",):  # whose files are wandb's
                with self.subTest(script=script, target="full"):
                    result = self.run_script(script, preexec_fn=small_files)
                    self.assert_one_line(result, fault.RESOURCES, place, "cannot be written: found File too large")
            if option is None:
                continue
            places = (self.folder / "text.txt" / "x", "/proc/x")  # in a file as a folder, in one that takes no files
            for out in places if script in ("report", "tokenize") else places[:1]:
                with self.subTest(script=script, target=out):
                    self.assert_one_line(self.run_script(script, out=out), fault.RESOURCES, out, "cannot be written")
        self.assertEqual(self.left_over(), [])

    def test_unreadable_inputs_are_named(self):
        (self.folder / "log.jsonl").unlink()
        (self.folder / "report.json").unlink()
        for script in ("report", "plot loss", "plot scales", "plot ab", "export-wandb", "convergence_table"):
            with self.subTest(script=script):
                self.assert_one_line(self.run_script(script), fault.INPUT, "cannot be read: found No such file")


class WriteFileTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.path = self.folder / "a"

    def test_a_file_is_replaced_whole_and_a_link_stays_one(self):
        link = self.folder / "link"
        link.symlink_to("a")
        for data in (b"abcd", b"abcde"):
            files.write_file(link, data)
            self.assertEqual(self.path.read_bytes(), data)
        self.assertTrue(link.is_symlink())
        self.assertEqual(len(list(self.folder.iterdir())), 2)

    def test_a_file_of_another_kind_stays(self):
        self.path.write_bytes(b"QUERNTOK")
        with self.assertRaisesRegex(fault.Fault, "a file of another kind is there: found b'QUER'"):
            files.write_file(self.path, b"<!doctype html>")
        self.assertEqual(self.path.read_bytes(), b"QUERNTOK")
        self.path.write_bytes(b"")
        files.write_file(self.path, b"x")

    def test_a_device_stays_one(self):
        files.write_file(Path("/dev/null"), b"x")
        self.assertTrue(Path("/dev/null").is_char_device())
        with self.assertRaisesRegex(fault.Fault, "/dev/full: cannot be written: found No space left"):
            files.write_file(Path("/dev/full"), b"x")

    def test_a_folder_that_goes_meanwhile_is_named(self):
        gone = self.folder / "gone"
        gone.mkdir()
        replace = Path.replace

        def vanish(partial, target):
            partial.unlink()
            gone.rmdir()
            return replace(partial, target)

        with mock.patch.object(Path, "replace", vanish):
            with self.assertRaisesRegex(fault.Fault, "gone/a: cannot be written: found No such file"):
                files.write_file(gone / "a", b"x")
        self.assertFalse(gone.exists())


class MessageTest(unittest.TestCase):
    def test_messages_are_one_printable_line_of_bounded_length(self):
        text = str(fault.Fault("a\n\x1b[31m" * 1000, "\u202e" * 999, "é\ud800" * 999, "x" * 9999, "y\0"))
        self.assertTrue(text.isprintable())
        self.assertLess(len(text), 2000)
        self.assertEqual(str(fault.Fault("a", "b", "c", "d", "e")), "a: b: found c, expected d; e")
        self.assertEqual(str(fault.Fault("a", "b", expected="d")), "a: b: expected d")

    def test_a_message_comes_whole_from_another_process(self):
        fault_there = fault.Fault("a" * 299, "b" * 299, "c", code=fault.RESOURCES)
        here = pickle.loads(pickle.dumps(fault_there))
        self.assertEqual((str(here), here.code), (str(fault_there), fault.RESOURCES))

    def test_an_unforeseen_fault_is_one_line_too(self):
        for error, code in (
            (KeyError("x"), fault.INTERNAL), (RecursionError(), fault.INTERNAL), (MemoryError(), fault.RESOURCES),
            (KeyboardInterrupt(), fault.INTERRUPTED), (ModuleNotFoundError("x", name="numpy"), fault.INPUT),
            (FileNotFoundError(2, "No such file", "a"), fault.INPUT), (OSError(28, "No space"), fault.RESOURCES),
        ):
            def main(arguments, error=error):
                raise error

            with self.subTest(error=error), contextlib.redirect_stderr(io.StringIO()) as said:
                with contextlib.redirect_stdout(io.StringIO()):
                    self.assertEqual(end_of_main.script(main)([]), code)
                self.assertNotIn("Traceback", said.getvalue())
                self.assertEqual(said.getvalue().count("\n"), 0 if code == fault.INTERRUPTED else 1)


if __name__ == "__main__":
    unittest.main()
