"""Whatever log.jsonl, report.json and bench figures hold, their readers show it, or refuse it in one clear line.

    frontends/python/tests/log_fuzz_test.py [SECONDS]     10 by default; FUZZ_SEED draws other inputs than a test does
"""

import contextlib
import copy
import io
import json
import os
import random
import sys
import time
import types
import unittest
from pathlib import Path

from folder_test_case import FolderTestCase
from quern import command_line
from quern.runs import report
from report_test import Page, records

sys.path.append(str(Path(__file__).resolve().parents[3] / "scripts" / "convergence"))
import convergence_table

EVIL = (
    None, True, -1, 0, 2**31, 2**63 - 1, 2**63, 10**30, 1e308, -1e308, 5e-324, 1e100, -0.0, 0.1,
    "", "nan", "1,2,3", "1,,2", "9" * 5000, "<script>alert(1)</script>", '"><img src=x onerror=alert(1)>', "$\\frac{$",
    "a$b", "_hidden", "\0\x1b[31m", "\ud800", "\u202eevil", "é" * 3000, "a = {", "[a]\nb = 1", "x\n" * 2000,
    [], {}, [[[]]], {"a": {"b": 1}}, [1, 2], "e4m3", "step", "run", "scale", "sample", "seed-1",
)
LITERALS = (b"NaN", b"1e999", b"-1e999", b"1" * 5000, b"[" * 100000, b'{"a":' * 5000, b'"\\ud83d"', b"\xff\xfe", b"")
SLOW_EVERY = 40  # inputs: pictures take a hundred times as long as the rest
ALLOWED_TAGS = set(
    "html head meta title style body h1 h2 table tr th td span div svg line text path circle p details summary pre b "
    "script".split()
)


def scale_record(step, layer):
    return {"event": "scale", "step": step, "tensor": "qkv.e4m3", "layer": layer, "format": "e4m3", "amax": 2.5,
            "scale": 0.0078125, "clipped": 0.0, "underflowed": 0.01}


def log_records():
    more = [scale_record(step, layer) for step in (10, 20) for layer in range(2)]
    sample = {"event": "sample", "step": 10, "prompt": 0, "prompt_tokens": "1,2", "tokens": "3,4", "finish": "length"}
    telemetry = {"event": "telemetry", "step": 10, "sm_clock_MHz": 1755.0, "slowed_by": ""}
    return [*records("a", 0.001, steps=20), *more, sample, telemetry]


def figure():
    return {"mean": 4.0, "deviation": 0.1, "difference": 0.0, "difference_deviation": 0.0}


def comparison():
    def arm(name):
        return {
            "name": name, "overrides": [f"precision.id={name}"], "good_runs": 2, "tokens_per_second": 100.0,
            "tokens_per_second_interval": [90.0, 110.0], "training_loss": figure(), "validation_loss": figure(),
            "runs": [{"seed": seed, "directory": f"x/{name}/seed-{seed}", "exit_code": 0} for seed in (1, 2)],
        }

    return {"config": "base.toml", "quern": "1", "repeats": 2, "arms": [arm("a"), arm("b")]}


def places(value):
    """Every (container, key) below a value."""
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in list(items):
        yield value, key
        yield from places(item)


def spoil(value, pick):
    """Changes some values below `value`."""
    for _ in range(pick.choice((1, 1, 1, 2, 20))):
        container, key = pick.choice(list(places(value)))
        action = pick.random()
        like = [evil for evil in EVIL if isinstance(evil, type(container[key]))]
        if action < 0.75:
            container[key] = copy.deepcopy(pick.choice(like if like and action < 0.5 else EVIL))
        elif action < 0.9 or not isinstance(container, dict):
            del container[key]
        else:
            container[str(pick.choice(EVIL))[:50]] = container.pop(key)
        if not value:
            return


def spoil_bytes(data, pick):
    at = pick.randrange(len(data) + 1)
    return data[:at] + pick.choice((*LITERALS, pick.randbytes(3))) + data[at + pick.choice((0, 0, 1, 8)) :]


class FakeWandb(types.SimpleNamespace):
    def init(self, **words):
        json.dumps(words["config"], default=str)
        return types.SimpleNamespace(log=lambda values, step: None, finish=lambda: None, summary={})


sys.modules["wandb"] = FakeWandb()


class LogFuzzTest(FolderTestCase):
    seconds = 10.0

    def run_tool(self, command, *arguments):
        main = convergence_table.main if command == "convergence_table" else command_line.main
        words = [] if command == "convergence_table" else command.split()
        with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()) as said:
            code = main([*words, *map(str, arguments)])
        message = said.getvalue()
        self.assertIn(code, (0, 3) if command != "convergence_table" else (0, 1, 3), message)
        if code == 3:
            self.assertRegex(message, r"\A(quern-tools|convergence_table\.py): error: [^\n]{10,1999}\n\Z")
            self.assertTrue(message[:-1].isprintable(), message)
        return code

    def check_page(self, path):
        text = path.read_text(encoding="utf-8")
        page = Page(text)
        self.assertLessEqual(set(page.tags), ALLOWED_TAGS)
        self.assertEqual([text for tag, text in page.texts if tag == "script"], [report.SCRIPT])
        names = {name for name, _ in page.attributes}
        self.assertFalse([name for name in names if name.startswith("on") or name in ("src", "href", "style")])

    def read_log(self, number):
        code = self.run_tool("report", self.folder, "-o", self.folder / "a.html")
        if code == 0:
            self.check_page(self.folder / "a.html")
        self.run_tool("export-wandb", self.folder, "--dir", self.folder)
        if number % SLOW_EVERY == 0:
            self.run_tool("plot loss", self.folder, "-o", self.folder / "a.png")
        if number % SLOW_EVERY == SLOW_EVERY // 2:
            self.run_tool("plot scales", self.folder, "-o", self.folder / "b.png")

    def read_comparison(self, number):
        self.run_tool("convergence_table", self.folder)
        if number % SLOW_EVERY == 0:
            self.run_tool("plot ab", self.folder, "-o", self.folder / "c.png")

    def test_readers(self):
        seed = int(os.environ.get("FUZZ_SEED", 0)) or 1
        good_log, good_report = log_records(), comparison()
        for arm in ("a", "b"):
            for name in ("seed-1", "seed-2"):
                (self.folder / arm / name).mkdir(parents=True)
                (self.folder / arm / name / "log.jsonl").write_text(
                    "".join(json.dumps(record) + "\n" for record in good_log)
                )
        end, number = time.monotonic() + self.seconds, 0
        while time.monotonic() < end:
            pick = random.Random(f"{seed} {number}")
            is_log = pick.random() < 0.8
            value = copy.deepcopy(good_log if is_log else good_report)
            if number > 1:
                spoil(value, pick)
            lines = value if is_log else [value]
            data = b"".join(json.dumps(line).encode() + b"\n" for line in lines)
            if pick.random() < 0.3:
                data = spoil_bytes(data, pick)
            (self.folder / ("log.jsonl" if is_log else "report.json")).write_bytes(data)
            with self.subTest(seed=seed, input=number):
                (self.read_log if is_log else self.read_comparison)(number)
            number += 1
        # As libFuzzer says it, for scripts/fuzz.sh.
        print(f"stat::number_of_executed_units: {number}\nstat::new_units_added: 0")
        self.assertGreater(number, 20)


if __name__ == "__main__":
    if len(sys.argv) > 1 and sys.argv[1].isdecimal():
        LogFuzzTest.seconds = float(sys.argv.pop(1))
    unittest.main()
