"""The log's reader: what quern writes is read, and a field of another type is refused where it stands."""

import json
import sys
import unittest

from folder_test_case import FolderTestCase
from quern.runs import run_log
from quern.base.fault import Fault

STEP = '{"event": "step", "step": 1, "loss": 5.0}\n'


class RunLogTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.log = self.folder / "log.jsonl"

    def read(self, *lines):
        self.log.write_bytes(b"".join(line if isinstance(line, bytes) else line.encode() for line in lines))
        return run_log.read_run(self.log)

    def test_a_field_of_another_type_is_named_with_its_line(self):
        for record, said in (
            ('{"event": "step", "step": "<script>"}', r'step\.step: found "<script>", expected an integer'),
            ('{"event": "step", "step": []}', r"step\.step: found a list, expected an integer"),
            ('{"event": "step", "step": -1}', r"step\.step: found -1"),
            ('{"event": "step", "step": true}', r"step\.step: found true"),
            ('{"event": "step", "step": 1.5}', r"step\.step: found 1.5"),
            ('{"event": "step", "step": 9223372036854775808}', r"step\.step: found a long number"),
            ('{"event": "step"}', r"step\.step: found nothing"),
            ('{"event": "step", "step": 1, "loss": "x"}', r'step\.loss: found "x", expected a finite number'),
            ('{"event": "step", "step": 1, "loss": 1e999}', r"step\.loss: found Infinity"),
            ('{"event": "step", "step": 1, "loss": null, "loss_text": "none"}', r"step\.loss_text: found \"none\""),
            ('{"event": "run", "config": {}}', r"run\.config: found an object, expected a text"),
            ('{"event": "sample", "step": 1, "prompt": 0, "tokens": "1,x"}', r"sample\.tokens: found \"1,x\""),
            ('{"event": "scale", "step": 1, "tensor": "a", "format": "e9", "amax": 1}', r"scale\.format: found \"e9\""),
            ('{"event": "other", "field": {"a": 1}}', r"other\.field: found an object"),
            ('{"step": 1}', r"event: found nothing, expected a text"),
            ("[1]", r"value: found a list, expected an object"),
            ("[" * 100000, "not usable JSON: found too many levels"),
            ("9" * 5000, "not JSON"),
            (b'{"event": "\xff"}', "not UTF-8"),
        ):
            record = record.encode() if isinstance(record, str) else record
            with self.subTest(record=record[:80]), self.assertRaisesRegex(Fault, rf"log\.jsonl:2: {said}"):
                self.read(STEP, record + b"\n", STEP)

    def test_fields_and_events_of_later_versions_pass(self):
        run = self.read('{"event": "new", "x": null}\n', STEP[:-2] + ', "more": 1, "words": "a"}\n')
        self.assertEqual(run.steps[1]["more"], 1)

    def test_half_characters_become_whole_ones(self):
        run = self.read('{"event": "run", "name": "\\ud800", "\\udfff": "\\ud83c\\udf3e"}\n', STEP)
        self.assertEqual((run.name, run.head["?"]), ("?", "🌾"))

    def test_a_line_without_end_is_refused(self):
        with self.assertRaisesRegex(Fault, "log.jsonl:2: too long for a log"):
            self.read(STEP, b" " * (run_log.LONGEST_LINE + 1))

    def test_a_config_that_is_not_toml_is_refused_when_it_is_asked_for(self):
        for config in ("a = {", "a = " + "[" * 100000, "a = " + "9" * 5000):
            run = self.read(json.dumps({"event": "run", "config": config}) + "\n", STEP)
            with self.assertRaisesRegex(Fault, "log.jsonl: config of the run record: found .*expected TOML"):
                run.config()

    def test_numbers_that_cannot_be_drawn_are_gaps(self):
        lines = [f'{{"event": "step", "step": {step}, "loss": {loss}}}\n' for step, loss in ((2, "1e300"), (3, "null"))]
        run = self.read(STEP, *lines)
        self.assertEqual([str(value) for value in run.series("step", "step", "loss")[1]], ["5.0", "nan", "nan"])


if __name__ == "__main__":
    unittest.main()
