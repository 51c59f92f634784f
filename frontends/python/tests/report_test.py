"""The HTML report: whole, self-contained, safe against what a config or a name holds, right in its figures."""

import base64
import contextlib
import hashlib
import io
import json
import math
import re
import statistics
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


def records(name, rate, steps=30, seed=1, loss=lambda step: 0.0):
    config = f'[train]\nsteps = {steps}\nseed = {seed}\n[log]\ndirectory = "{seed}"\n[optimizer]\nlearning_rate = {rate}\n[precision]\nid = "bf16"\n'
    yield {"event": "run", "name": name, "model": "llama", "steps": steps, "config": config, "device_bytes": 2**30}
    for s in range(1, steps + 1):
        yield {
            "event": "step", "step": s, "tokens": s * 32, "loss": 5.0 - s * 0.1 + loss(s), "lr": rate, "grad_norm": 1.0,
            "tokens_per_second": 1 if s == 1 else 100.0, "time": s * 0.5,
        }
        if s % 10 == 0:
            yield {"event": "eval", "step": s, "loss": 4.0 + abs(s - 20) * 0.01}
    yield {"event": "end", "step": steps}


class ReportTest(FolderTestCase):
    def write_run(self, folder, lines):
        log = self.folder / folder / "log.jsonl"
        log.parent.mkdir(exist_ok=True)
        log.write_text("".join(json.dumps(line) + "\n" for line in lines))
        return log.parent

    def report(self, *runs):
        """(exit code, message, page)"""
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
        self.assertEqual(page.tags.count("svg"), 6)
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

    def differences(self, *runs):
        """(the note above the chart of differences, {name: (steps, values)} of its curves)"""
        _, said, text = self.report(*(self.write_run(str(index), run) for index, run in enumerate(runs)))
        page = Page(text)
        charts = [json.loads(value) for key, value in page.attributes if key == "data-curves"]
        titles = [text for tag, text in page.texts if tag == "h2" and text != "Differences of config"]
        notes = [text for tag, text in page.texts if tag == "p" and text != "None."]
        if "Difference of training loss from the first run" not in titles:
            return None
        chart = charts[titles.index("Difference of training loss from the first run")]
        return notes[0], {run["name"]: (run["x"], run["y"]) for run in chart["runs"] if run["x"]}

    def test_losses_that_coincide_are_told_apart_by_their_difference_and_the_band_of_seeds(self):
        noise = {seed: [math.sin(seed * 99 * s) / 9 for s in range(61)] for seed in (1, 2, 3)}
        runs = [
            records(f"{rate} {seed}", rate, 60, seed, lambda s, n=noise[seed], r=rate: n[s] + (1e-4 * s if r == 2 else 0))
            for rate in (1, 2) for seed in (1, 2, 3)
        ]
        note, curves = self.differences(*runs)
        self.assertIn("over the 3 seeds of 1 1.", note)
        self.assertEqual(list(curves), ["2 1", "2 2", "2 3", "± over 3 seeds"])
        for name in ("2 1", "2 2", "2 3"):
            steps, values = curves[name]
            self.assertEqual(steps, list(range(6, 61)))  # a tenth of 60 steps is the first whole mean
            self.assertAlmostEqual(values[-1], 1e-4 * statistics.fmean(range(55, 61)))
        steps, values = curves["± over 3 seeds"]
        self.assertAlmostEqual(values[-1], statistics.stdev(statistics.fmean(noise[seed][55:]) for seed in (1, 2, 3)))

    def test_seeds_alone_are_drawn_and_make_the_band(self):
        runs = [records(str(seed), 1, 20, seed, lambda s, seed=seed: seed / 8) for seed in (1, 2)]
        _, curves = self.differences(*runs)
        self.assertEqual(curves["2"], (list(range(2, 21)), [0.125] * 19))
        for value in curves["± over 2 seeds"][1]:
            self.assertAlmostEqual(value, 0.125 * math.sqrt(0.5))

    def test_one_config_run_twice_is_no_other_seed(self):
        note, curves = self.differences(records("a", 1), records("b", 1))
        self.assertIn("no band of seeds", note)
        self.assertEqual(curves, {"b": (list(range(3, 31)), [0.0] * 28)})

    def test_differences_are_of_the_steps_that_both_have_and_gaps_stay(self):
        missing = {5, 6}
        short = records("b", 1, 9, loss=lambda s: math.nan if s in missing else 0.25)
        lines = [{**r, "loss": None, "loss_text": "nan"} if r.get("step") in missing else r for r in short]
        _, curves = self.differences(records("a", 1), lines)
        self.assertEqual(curves, {"b": (list(range(1, 10)), [0.25] * 4 + [None] * 2 + [0.25] * 3)})

    def test_runs_without_a_step_in_common_have_no_difference(self):
        later = [{**r, "step": r["step"] + 100} if "step" in r else r for r in records("b", 1)]
        self.assertIsNone(self.differences(records("a", 1), later))
        self.assertIsNone(self.differences(records("a", 1)))

    def test_a_mean_of_huge_and_small_values_forgets_the_huge(self):
        _, ys = report.thinned(list(range(100)), [1e90] + [1.0] * 99, 10)
        self.assertEqual(ys[-1], 1.0)

    def test_wide_tables_wrap_and_a_cell_has_the_color_of_its_run(self):
        runs = [self.write_run(str(i), records("n" * 50 + str(i), i)) for i in range(12)]
        _, _, text = self.report(*runs)
        self.assertNotIn("nowrap", text)
        figures = text.partition('<table class="runs">')[2].partition("</table>")[0]
        for row in figures.split("<tr>")[1:]:
            self.assertEqual(re.findall(r'class="color(\d)"', row), [str(i % 10) for i in range(12)])

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
