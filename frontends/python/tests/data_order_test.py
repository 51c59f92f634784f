"""The order of windows: numbers that core/src/data/sources/permutation.cpp gave, and what a micro-batch holds."""

import sys
import types
import unittest
from pathlib import Path

import numpy as np

from quern.tokens.data_order import micro_batches, permuted


class DataOrderTest(unittest.TestCase):
    def test_agrees_with_quern(self):
        self.assertEqual([permuted(i, 13, 1, 0) for i in range(13)], [7, 8, 12, 3, 10, 2, 5, 4, 6, 0, 1, 9, 11])
        self.assertEqual([permuted(i, 13, 1, 1) for i in range(6)], [10, 8, 6, 0, 3, 11])
        self.assertEqual([permuted(i, 1000, 0x123456789ABCDEF, 3) for i in range(6)], [834, 236, 593, 389, 372, 223])

    def test_is_a_permutation(self):
        for count in (1, 2, 3, 16, 17, 100):
            self.assertEqual(sorted(permuted(i, count, 5, 2) for i in range(count)), list(range(count)))

    def test_micro_batches(self):
        mask = np.ones(27, dtype=bool)
        mask[7] = False
        corpus = types.SimpleNamespace(tokens=np.arange(27), loss_mask=mask)
        source = micro_batches(corpus, 2, 2, seed=1)  # 13 windows: the seventh micro-batch reaches into the next pass
        batches = [next(source) for _ in range(7)]
        tokens, targets = batches[0]
        self.assertEqual(tokens.tolist(), [[14, 15], [16, 17]])
        self.assertEqual(targets.tolist(), [[15, 16], [17, 18]])
        self.assertEqual(batches[6][0].tolist(), [[22, 23], [20, 21]])
        everything = np.concatenate([targets.ravel() for _, targets in batches])
        self.assertEqual((everything == -1).sum(), 1)
        self.assertNotIn(7, everything)


if __name__ == "__main__":
    unittest.main()
