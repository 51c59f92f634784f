"""Plots of scales: scale records give a picture, resumed ones too; a missing tensor is named."""

import contextlib
import io
import json
import sys
import unittest

from folder_test_case import FolderTestCase
from quern import command_line
from quern.plots import scales


def record(step, tensor="ffn_norm.e4m3", layer=0, amax=3.5, scale=0.0078125, **more):
    result = {"event": "scale", "step": step, "tensor": tensor, "format": "e4m3", "amax": amax, "scale": scale}
    return result | ({} if layer is None else {"layer": layer}) | {"redone": 0} | more


class PlotScalesTest(FolderTestCase):
    def write(self, *records, tail=""):
        (self.folder / "log.jsonl").write_text("".join(json.dumps(record) + "\n" for record in records) + tail)

    def plot(self, *arguments):
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            return command_line.main(["plot", "scales", *map(str, arguments)]), said.getvalue()

    def test_a_row_a_tensor_and_a_line_a_layer(self):
        run = {"event": "run", "name": "a"}
        self.write(
            run, record(1), record(1, layer=1), record(1, "head.e4m3", None, clipped=0.125, underflowed=0.25),
            record(2, amax=7.0), record(2, amax=1.75), tail='{"event": "sc',  # step 2 again after a resume
        )
        tensors = scales.read_scales(self.folder)
        self.assertEqual({name: list(layers) for name, layers in tensors.items()},
                         {"ffn_norm.e4m3": [0, 1], "head.e4m3": [None]})
        figure = scales.draw(tensors, "a")
        self.assertEqual(len(figure.axes), 6)
        amax, share, lost, _, _, head_lost = figure.axes
        self.assertEqual([list(line.get_ydata()) for line in amax.lines], [[3.5, 1.75], [3.5]])
        self.assertEqual(list(share.lines[0].get_ydata()), [1.0, 0.5])
        self.assertEqual([list(line.get_ydata()) for line in lost.lines], [[], [], [], []])
        self.assertEqual([list(line.get_ydata()) for line in head_lost.lines], [[0.25], [0.125]])
        out = self.folder / "scales.png"
        code, said = self.plot(self.folder, "-o", out)
        self.assertEqual(code, 0, said)
        self.assertEqual(out.read_bytes()[:4], b"\x89PNG")

    def test_tensors_and_layers_are_chosen(self):
        self.write(*(record(1, name, layer) for name in ("d.qkv.e5m2", "x.e4m3") for layer in range(3)))
        tensors = scales.read_scales(self.folder, ["d.*"], [0, 2])
        self.assertEqual({name: list(layers) for name, layers in tensors.items()}, {"d.qkv.e5m2": [0, 2]})

    def test_a_tensor_that_is_all_zero_has_no_scale_and_leaves_a_gap(self):
        zero = record(1, amax=0.0)
        del zero["scale"]
        self.write(zero, record(2))
        self.assertEqual(scales.series(scales.read_scales(self.folder)["ffn_norm.e4m3"][0], "share"), [[2], [1.0]])
        self.assertEqual(self.plot(self.folder, "-o", self.folder / "a.png")[0], 0)

    def test_what_is_missing_is_named(self):
        self.write({"event": "step", "step": 1})
        code, said = self.plot(self.folder)
        self.assertEqual(code, 3)
        self.assertIn("log.scales_every", said)
        self.write(record(1))
        code, said = self.plot(self.folder, "--tensor", "nothing")
        self.assertEqual(code, 3)
        self.assertIn("ffn_norm.e4m3", said)
        for broken in ({"event": "scale"}, record(1) | {"format": "e9"}, record(1) | {"amax": "a"}):
            self.write(broken)
            code, said = self.plot(self.folder)
            self.assertEqual(code, 3)
            self.assertRegex(said, r"log\.jsonl:1: scale\.(step|format|amax): found ")
        self.assertEqual(self.plot(self.folder / "none")[0], 3)


if __name__ == "__main__":
    unittest.main()
