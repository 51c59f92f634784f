"""The table of slow tests in docs/testing.md names tests that there are, and only these lack the label `fast`."""

import json
import os
import re
import subprocess
import unittest
from pathlib import Path

PAGE = Path(__file__).parents[1] / "docs" / "testing.md"


class SlowTestsTest(unittest.TestCase):
    def test_rows_are_tests(self):
        shown = subprocess.run(["ctest", "--show-only=json-v1"], cwd=os.environ["QUERN_BUILD_DIR"], check=True,
                               capture_output=True, text=True).stdout  # fmt: skip
        labels = {}
        for test in json.loads(shown)["tests"]:
            properties = {one["name"]: one["value"] for one in test.get("properties", [])}
            labels[test["name"]] = properties.get("LABELS", [])
        built = {re.match(r"\w+", name)[0] for name in labels if "NOT_BUILT" not in name}
        rows = re.findall(r"^\| `([^`]*)`", PAGE.read_text(), re.M)
        self.assertGreater(len(rows), 10)
        for row in rows:
            named = [name for name in labels if name.startswith(row)]
            if re.match(r"\w+", row)[0] in built:  # the others need CUDA's toolkit or Open MPI
                self.assertTrue(named, f"{PAGE}: no test's name begins with `{row}`")
        for name, of in labels.items():
            fast = "gpu" not in of and not any(name.startswith(row) for row in rows)
            self.assertEqual("fast" in of or "NOT_BUILT" in name, fast or "NOT_BUILT" in name, name)


if __name__ == "__main__":
    unittest.main()
