"""tune.py goes on where the best rate is at an end of those tried, says what diverged, and hides no failure."""

import contextlib
import io
import sys
import unittest

import tune
from folder_test_case import FolderTestCase

# In the place of `quern ab`: the loss of a rate is its distance from BEST in powers of two.
FAKE = """
import json, math, sys
from pathlib import Path
words = sys.argv[1:]
out, rates = Path(words[words.index("--out") + 1]), [w.split("=")[-1] for i, w in enumerate(words) if words[i - 1] == "--arm"]
arms = []
for rate in rates:
    value, code, message = float(rate), 0, ""
    if value > MOST:
        code, message = CODE, "step 3: it fell"
    arms.append({"name": f"optimizer.learning_rate={rate}", "good_runs": int(code == 0),
                 "validation_loss": {"mean": None if code else abs(math.log2(value / BEST))},
                 "runs": [{"exit_code": code, "message": message}]})
out.mkdir(parents=True)
(out / "report.json").write_text(json.dumps({"config": "c", "repeats": 1, "arms": arms}))
sys.exit(max(arm["runs"][0]["exit_code"] for arm in arms))
"""


class TuneTest(FolderTestCase):
    def tune(self, best, most=1e9, code=5, words=()):
        fake = self.folder / "fake.py"
        fake.write_text(FAKE.replace("BEST", str(best)).replace("MOST", str(most)).replace("CODE", str(code)))
        number = len(list(self.folder.glob("out*")))
        arguments = ["--optimizer", "lion optimizer.id=lion, 1e-3 2e-3 4e-3", "--best", str(self.folder / "rates")]
        arguments += ["--out", str(self.folder / f"out{number}"), *words, "--", sys.executable, str(fake)]
        with contextlib.redirect_stdout(io.StringIO()) as out, contextlib.redirect_stderr(out):
            result = tune.main(arguments)
        return result, out.getvalue()

    def rates(self):
        return (self.folder / "rates").read_text(encoding="utf-8")

    def test_a_best_rate_between_others_stays(self):
        code, text = self.tune(2e-3)
        self.assertEqual((code, self.rates()), (0, "lion 2e-3\n"), text)
        self.assertIn("lion: 1e-3 1.0000, 2e-3 0.0000, 4e-3 1.0000\n", text)

    def test_beyond_an_end_more_are_tried(self):
        for best, expected in ((8e-3, "lion 0.008\n"), (2.5e-4, "lion 0.00025\n"), (3.2e-2, "lion 0.032\n")):
            with self.subTest(best=best):
                code, text = self.tune(best)
                self.assertEqual((code, self.rates()), (0, expected), text)

    def test_at_the_limit_the_end_is_named(self):
        for best, expected in ((1.0, "lion 0.064 highest\n"), (1e-6, "lion 6.25e-05 lowest\n")):
            with self.subTest(best=best):
                code, text = self.tune(best)
                self.assertEqual((code, self.rates()), (0, expected), text)
        self.tune(1.0, words=("--further", "0"))
        self.assertEqual(self.rates(), "lion 4e-3 highest\n")

    def test_what_diverges_is_passed_over_and_named(self):
        code, text = self.tune(1.0, most=5e-3)
        self.assertEqual((code, self.rates()), (0, "lion 4e-3\n"), text)
        self.assertIn("4e-3 7.9658, 0.008 diverged, 0.016 diverged\n", text)
        code, text = self.tune(1e-4, most=6e-4)  # all of the first
        self.assertEqual((code, self.rates()), (0, "lion 0.000125\n"), text)
        code, text = self.tune(1e-4, most=1e-9)
        self.assertEqual((code, "lion: no run ended well" in text), (5, True), text)

    def test_no_other_failure_is_hidden(self):
        for failure in (3, 4, 137):
            with self.subTest(failure=failure):
                code, text = self.tune(1.0, most=3e-3, code=failure)
                self.assertEqual((code, "optimizer.learning_rate=4e-3" in text or "ended with" in text), (failure, True), text)
                self.assertFalse((self.folder / "rates").exists())


if __name__ == "__main__":
    unittest.main()
