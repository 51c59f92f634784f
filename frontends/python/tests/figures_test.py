"""Figures in tools and tables have the digits that the program gives them (core/src/base/format_test.cpp)."""

import re
import unittest
from pathlib import Path

from quern.base.figures import three_digits

PROGRAM = Path(__file__).resolve().parents[3] / "core/src/base/format_test.cpp"
CASE = re.compile(r"CHECK\(format_count\((-?[0-9.e]+)\) == \"(\S+)\"\)")


class FiguresTest(unittest.TestCase):
    def test_each_case_of_the_programs_test_reads_the_same_here(self):
        cases = CASE.findall(PROGRAM.read_text())
        self.assertGreater(len(cases), 15)
        for value, text in cases:
            with self.subTest(value=value):
                self.assertEqual(three_digits(float(value)), text)


if __name__ == "__main__":
    unittest.main()
