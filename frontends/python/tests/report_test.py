"""The HTML report: whole, self-contained, safe against what a config or a name holds, right in its figures."""

import base64
import contextlib
import hashlib
import io
import json
import math
import re
import sys
import unittest
from html.parser import HTMLParser

from folder_test_case import FolderTestCase
from quern import command_line
from quern.runs import report

VOID = {"meta", "br"}


class Page(HTMLParser):
    """Checks that tags are closed in order, and keeps texts and attributes."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.texts, self.attributes = [], [], [], []
        self.feed(text)
        self.close()
        assert not self.open, f"not closed: {self.open}"

    def handle_starttag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attributes):
        self.tags.append(tag)
        self.attributes += attributes

    def handle_endtag(self, tag):
        assert self.open.pop() == tag, f"</{tag}> closes another tag"

    def handle_data(self, data):
        self.texts.append((self.open[-1] if self.open else "", data))


def records(name, rate, steps=30):
    config = f'[train]\nsteps = {steps}\n[optimizer]\nlearning_rate = {rate}\n[precision]\nid = "bf16"\n'
    yield {"event": "run", "name": name, "model": "llama", "steps": steps, "config": config, "device_bytes": 2**30}
    for s in range(1, steps + 1):
        yield {
            "event": "step", "step": s, "tokens": s * 32, "loss": 5.0 - s * 0.1, "lr": rate, "grad_norm": 1.0,
            "tokens_per_second": 1 if s == 1 else 100.0, "time": s * 0.5,
        }
        if s % 10 == 0:
            yield {"event": "eval", "step": s, "loss": 4.0 + abs(s - 20) * 0.01}
    yield {"event": "end", "step": steps}


class ReportTest(FolderTestCase):
    def write_run(self, folder, lines):
        log = self.folder / folder / "log.jsonl"
        log.parent.mkdir()
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return log.parent

    def report(self, *runs):
        """(exit code, what was said, page)"""
        out = self.folder / "report.html"
        with contextlib.redirect_stdout(io.StringIO()) as said, contextlib.redirect_stderr(said):
            code = command_line.main(["report", *map(str, runs), "-o", str(out)])
        return code, said.getvalue(), out.read_text() if out.exists() else ""

    def test_a_page_has_figures_differences_and_curves_of_all_runs(self):
        one = self.write_run("one", records("one", 0.001))
        two = self.write_run("two", records("two", 0.002))
        code, said, text = self.report(one, two)
        self.assertEqual(code, 0, said)
        page = Page(text)
        self.assertEqual(page.tags.count("svg"), 5)
        cells = [text for tag, text in page.texts if tag == "td"]
        for row in (
            ["training loss, last tenth of steps", "2.1000", "2.1000"],
            ["validation loss, last", "4.1000", "4.1000"],
            ["validation loss, lowest", "4.0000", "4.0000"],
            ["tokens per second, median", "100", "100"],
            ["steps", "30 of 30, ended", "30 of 30, ended"],
            ["device memory", "1 GiB", "1 GiB"],
            ["optimizer.learning_rate", "0.001", "0.002"],
        ):
            at = cells.index(row[0])
            self.assertEqual(cells[at : at + 3], row)
        self.assertNotIn("precision.id", cells)  # the same in both
        charts = [json.loads(value) for key, value in page.attributes if key == "data-curves"]
        self.assertEqual([run["name"] for run in charts[0]["runs"]], ["one", "two"])
        self.assertEqual(charts[0]["runs"][0]["x"], list(range(1, 31)))

    def test_nothing_is_fetched_and_no_text_becomes_markup(self):
        evil = "</script><img src=x onerror=alert(1)>&amp;"
        _, _, text = self.report(self.write_run("a", records(evil, 0.001)), self.write_run("b", records("b", 0.001)))
        page = Page(text)
        self.assertNotIn("img", page.tags)
        self.assertFalse([pair for pair in page.attributes if pair[0] in ("src", "href", "onerror")])
        self.assertNotRegex(text, r"https?://|@import|url\(")
        self.assertIn(evil, "".join(text for tag, text in page.texts if tag == "h1"))

    def test_a_step_that_is_markup_is_refused(self):
        lines = [*records("a", 0.001), {"event": "sample", "step": "<script>alert(1)</script>", "prompt": 0}]
        code, said, text = self.report(self.write_run("a", lines))
        self.assertEqual((code, text), (3, ""))
        self.assertIn("log.jsonl:36: sample.step: found", said)

    def test_no_text_of_any_element_becomes_markup(self):
        evil = "</b></script><script>alert(1)</script>&lt;\0"
        shown = evil.replace("\0", "\ufffd")
        made = report.element("td", evil, report.element("b", evil), evil, title=evil)
        page = Page(report.ElementTree.tostring(made, encoding="unicode", method="html"))
        self.assertEqual(page.tags, ["td", "b"])
        self.assertEqual("".join(text for _, text in page.texts), 3 * shown)
        self.assertEqual(page.attributes, [("title", evil)])

    def test_the_policy_allows_the_pages_own_style_and_script_only(self):
        _, _, text = self.report(self.write_run("a", records("a", 0.001)))
        page = Page(text)
        (policy,) = [value for key, value in page.attributes if key == "content" and "default-src" in value]
        self.assertTrue(policy.startswith("default-src 'none';"))
        for tag in ("style", "script"):
            (content,) = [text for name, text in page.texts if name == tag]
            digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
            self.assertIn(f"{tag}-src 'sha256-{digest}'", policy)
        self.assertFalse([pair for pair in page.attributes if pair[0] == "style" or pair[0].startswith("on")])

    def test_samples_are_text_with_the_runs_tokenizer_and_tokens_without(self):
        from quern.tokens import encoding
        from quern.tokens.documents import document_from_string

        tokenizer = encoding.train_bpe(300, [("train", document_from_string("a", "grain " * 20))])
        tokenizer.save(str(self.folder / "tokenizer.json"))

        def tokens(text):
            return ",".join(map(str, tokenizer.encode(text).ids))

        for place, cells in ((self.folder, ["grain", " <ground> finé"]), (self.folder / "none", None)):
            lines = list(records("a", 0.001))
            lines[0]["config"] += f"[checkpoint]\ntokenizer = {json.dumps(str(place))}\n"
            drawn = tokens(" <ground> finé")
            lines.insert(-1, {"event": "sample", "step": 20, "prompt": 0, "prompt_tokens": tokens("grain"),
                              "tokens": drawn, "finish": "length"})
            _, _, text = self.report(self.write_run(place.name + "run", lines))
            page = Page(text)
            texts = [text for tag, text in page.texts if tag in ("b", "td")]
            for cell in cells or [tokens("grain"), "," + drawn]:
                self.assertIn(cell, texts)

    def test_a_run_going_on_with_gaps_and_no_evaluation(self):
        lines = [
            {"event": "step", "step": 1, "loss": 5.0},
            {"event": "step", "step": 2, "loss": None, "loss_text": "nan"},
            {"event": "step", "step": 3, "loss": 5.0},
        ]
        code, said, text = self.report(self.write_run("a", lines))
        self.assertEqual(code, 0, said)
        page = Page(text)
        self.assertEqual(page.tags.count("svg"), 1)
        (curve,) = [value for key, value in page.attributes if key == "d"]
        self.assertEqual(re.sub(r"[^ML]", "", curve), "MM")  # the gap is not bridged
        self.assertNotIn("nan", curve)
        self.assertIn("3 of 0, not ended", text)

    def test_long_curves_are_thinned_by_means_and_keep_their_end(self):
        xs, ys = report.thinned(list(range(1, 2002)), [float(x) for x in range(1, 2002)])
        self.assertLessEqual(len(xs), report.POINTS)
        self.assertEqual((xs[0], ys[0], xs[-1]), (3, 2.0, 2001))
        self.assertTrue(math.isnan(report.thinned(list(range(1600)), [math.nan] * 1600)[1][0]))

    def test_ticks_are_round_and_within(self):
        for low, high in ((0.3, 5.1), (-2e-7, 3e-4), (1e3, 254e3), (5, 5.001), (0, 1e12)):
            values = report.ticks(low, high)
            self.assertTrue(3 <= len(values) <= 11, values)
            self.assertTrue(all(low - 1e-9 * abs(high) <= value <= high * (1 + 1e-9) for value in values), values)

    def test_sizes_have_a_unit_that_fits(self):
        for count, text in ((0, "0 B"), (541000, "528 KiB"), (1023 * 1024, "1023 KiB"), (84.9e9, "79.1 GiB")):
            self.assertEqual(report.size(count), text)

    def test_a_log_that_is_not_there_is_named_and_no_page_is_left(self):
        code, said, text = self.report(self.folder / "none.jsonl")
        self.assertEqual(code, 3)
        self.assertIn("none.jsonl", said)
        self.assertEqual(text, "")


if __name__ == "__main__":
    unittest.main()
