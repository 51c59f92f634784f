"""docs/python.ipynb runs from its first cell to its last, and the loss falls. It is kept without outputs."""

import contextlib
import io
import json
import os
import unittest
from pathlib import Path

os.environ.setdefault("QUERN_PREFIX", os.environ["QUERN_BUILD_DIR"])
os.environ["MPLBACKEND"] = "agg"

from folder_test_case import FolderTestCase  # noqa: E402

NOTEBOOK = Path(__file__).resolve().parents[3] / "docs" / "python.ipynb"


class NotebookTest(FolderTestCase):
    def test_every_cell_runs(self):
        cells = [cell for cell in json.loads(NOTEBOOK.read_text())["cells"] if cell["cell_type"] == "code"]
        names, printed = {}, []
        with contextlib.chdir(self.folder):
            for number, cell in enumerate(cells, 1):
                self.assertEqual((cell["outputs"], cell["execution_count"]), ([], None), f"cell {number}")
                with contextlib.redirect_stdout(io.StringIO()) as out:
                    exec(compile("".join(cell["source"]), f"cell {number}", "exec"), names)
                printed.append(out.getvalue())
        self.assertGreater(names["losses"][0], 4)
        self.assertLess(names["losses"][-1], 2)
        self.assertIn("train.sequence | wrong type | \"long\" | ", printed[-1])


if __name__ == "__main__":
    unittest.main()
