"""Plots of timelines: rows and colours are the file's, and any other file is refused by name."""

import contextlib
import io
import json
import unittest

from folder_test_case import FolderTestCase
from quern import command_line
from quern.plots import timeline

LANES = ("compute", "copy_in", "copy_out")


def bar(name, lane, begin, length, run="later micro-step"):
    return {"ph": "X", "pid": 0, "tid": LANES.index(lane), "name": name, "cat": run, "ts": begin, "dur": length}


class PlotTimelineTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.file, self.out = self.folder / "step.json", self.folder / "step.png"

    def write(self, *bars, made_by="quern"):
        names = [{"ph": "M", "pid": 0, "name": "process_name", "args": {"name": "quern, estimated"}}]
        for number, lane in enumerate(LANES):
            names.append({"ph": "M", "pid": 0, "tid": number, "name": "thread_name", "args": {"name": lane}})
        text = {"displayTimeUnit": "ms", "otherData": {"made_by": made_by}, "traceEvents": names + list(bars)}
        self.file.write_text(json.dumps(text))

    def plot(self):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            return command_line.main(["plot", "timeline", str(self.file), "-o", str(self.out)]), said.getvalue()

    def test_waits_have_a_row_and_the_colour_of_the_transfers(self):
        self.write(
            bar("matmul qkv, layer 0", "compute", 0, 5000), bar("wait for gradients", "compute", 5000, 2000),
            bar("fetch gradients", "copy_in", 4000, 3000), bar("clip_scale", "compute", 7000, 3000, "update"),
            bar("copy", "copy_out", 10000, 20, "result"), bar("host", "compute", 10020, 0, "result"),
        )
        title, bars = timeline.read_timeline(self.file)
        self.assertEqual((title, len(bars)), ("quern, estimated", 5))
        self.assertEqual([name for name, _ in timeline.runs_of(bars)], ["later micro-step", "update"])
        figure = timeline.draw(title, bars)
        first, second = figure.axes
        self.assertEqual([text.get_text() for text in first.get_yticklabels()], ["compute", "waits", "copy in"])
        self.assertEqual(first.get_title(loc="left"), "later micro-step: 7 ms, kernels wait 2 ms")
        self.assertEqual(second.get_title(loc="left"), "update: 3 ms")
        colors = [tuple(spans.get_facecolor()[0]) for spans in first.collections]
        self.assertEqual(colors[1], colors[2])
        self.assertNotEqual(colors[0], colors[1])
        extents = first.collections[1].get_paths()[0].get_extents()
        self.assertEqual((extents.x0, extents.x1), (5.0, 7.0))
        labels = [text.get_text() for text in figure.legends[0].get_texts()]
        self.assertEqual(labels, ["matmul", "other kernels", "gradients"])
        code, said = self.plot()
        self.assertEqual(code, 0, said)
        self.assertEqual(self.out.read_bytes()[:4], b"\x89PNG")

    def test_what_is_no_timeline_is_named(self):
        good = bar("matmul", "compute", 0, 1)
        for bars, expected in (
            ([good | {"tid": 7}], "traceEvents[4]: found matmul, expected a lane of the file, and when it runs"),
            ([good | {"dur": -1}], "traceEvents[4]: found matmul"),
            ([good | {"ts": None}], "traceEvents[4]: found matmul"),
            ([good | {"ph": "B"}], "traceEvents[4].ph: found \"B\", expected one of M, X; not a timeline of quern"),
            ([good | {"dur": 0}], "nothing in it takes time"),
            ([], "nothing in it takes time"),
        ):
            self.write(*bars)
            code, said = self.plot()
            self.assertEqual(code, 3)
            self.assertIn(expected, said)
        self.write(good, made_by="chrome")
        self.assertIn("made_by", self.plot()[1])
        self.file.write_text("[]")
        self.assertIn("not a timeline of quern", self.plot()[1])
        self.file.unlink()
        self.assertEqual(self.plot()[0], 3)


if __name__ == "__main__":
    unittest.main()
