"""The check of exports: its mean is over exactly the targets that quern's evaluation counts."""

import sys
import unittest

import numpy as np

from folder_test_case import FolderTestCase
from quern.models import check_export
from quern.base.fault import Fault
from quern.tokens.token_file import TokenWriter, read_token_file

SEQUENCE, SEPARATOR = 7, 3


def loss_of(token, target, before):
    """In place of a model's: depends on the target and on what the model may see before it."""
    return np.sin(token) + 0.1 * target + 0.01 * before


def loss_sum(tokens, targets):
    before = np.cumsum(tokens, axis=1)
    return float(loss_of(tokens, targets, before)[targets >= 0].sum())


class CheckExportTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        self.corpora = []
        for seed, count, masked in ((1, 11 * SEQUENCE + 3, True), (2, 2 * SEQUENCE + 1, False)):
            pick = np.random.default_rng(seed)
            path = self.folder / f"{seed}.tok"
            with TokenWriter(path, 10, SEPARATOR, masked) as out:
                out.append(pick.integers(0, 10, count), pick.random(count) < 0.6 if masked else None)
            self.corpora.append(read_token_file(path))

    def expected(self, documents, most_windows):
        """Token by token, as core/src/data/sources/token_source.cpp reads windows."""
        total, count = 0.0, 0
        windows = [(corpus, w) for corpus in self.corpora for w in range((len(corpus.tokens) - 1) // SEQUENCE)]
        for corpus, w in windows[:most_windows]:
            before = 0
            for at in range(w * SEQUENCE, (w + 1) * SEQUENCE):
                token, target = int(corpus.tokens[at]), int(corpus.tokens[at + 1])
                before += token
                ends = documents == "masked" and token == SEPARATOR
                if not ends and (corpus.loss_mask is None or corpus.loss_mask[at + 1]):
                    total, count = total + loss_of(token, target, before), count + 1
                before = 0 if ends else before
        return total / count

    def test_every_window_and_every_target_that_counts_whatever_the_batch(self):
        for documents in ("joined", "masked"):
            for most in (None, 5):
                want = self.expected(documents, most)
                for batch in (1, 4, 8, 100):
                    with self.subTest(documents=documents, most=most, batch=batch):
                        rows = check_export.validation_rows(self.corpora, SEQUENCE, documents, most)
                        self.assertAlmostEqual(check_export.mean_loss(rows, loss_sum, batch), want, places=12)

    def test_nothing_that_counts_is_a_fault(self):
        with self.assertRaisesRegex(Fault, "no target counts"):
            check_export.mean_loss(check_export.validation_rows(self.corpora, 1000), loss_sum, 8)


if __name__ == "__main__":
    unittest.main()
