#!/usr/bin/env python3
"""Scores an export in lm-eval by transformers and by quern on one task without a network, and compares.

    scripts/transformers_checks/check_lm_eval.py configs/demo.toml runs/demo/export texts/*.txt

The task: which of four passages goes on a text, one from the text and three from elsewhere. Both read the export in fp32.
Accuracies must be equal, and log-likelihoods of all choices to what sums in another order leave. Needs lm_eval, torch and
transformers.
"""

import json
import os
import random
import sys
import tempfile
from pathlib import Path

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / "frontends" / "python"))
from quern.base.arguments import integer, parser_for
from quern.base.end_of_main import script
from quern.base.fault import Fault
from quern.driver.config import Config
from quern.driver.run import Run

TOLERANCE = 1e-4  # relative; fp32 logits whose sums are in another order
TASK = """\
task: quern_continuation
dataset_path: json
dataset_kwargs:
  data_files:
    test: {questions}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{begin}}}}"
doc_to_choice: choices
doc_to_target: answer
target_delimiter: " "
metric_list:
  - metric: acc
  - metric: acc_norm
"""


def write_questions(texts, path, count, words):
    """`count` times `words` words of a text, with the next words and words from three other places as choices."""
    draw = random.Random(1)
    passages = []
    for text in texts:
        split = Path(text).read_text().split()
        passages += [split[at : at + 2 * words] for at in range(0, len(split) - 2 * words, 2 * words)]
    if len(passages) < count + 3:
        raise Fault(texts[0], "too little text", f"{len(passages)} passages", f"{count + 3}")
    with path.open("w") as file:
        for passage in draw.sample(passages, count):
            others = draw.sample([other for other in passages if other is not passage], 3)
            choices = [" ".join(other[words:]) for other in (passage, *others)]
            order = draw.sample(range(4), 4)
            question = {"begin": " ".join(passage[:words]), "choices": [choices[i] for i in order], "answer": order.index(0)}
            file.write(json.dumps(question) + "\n")


class OneRow:
    """The validation split of one row, which changes between evaluations."""

    def __len__(self):
        return 1

    def __iter__(self):
        return iter([self.row])


def quern_model(config, export):
    """The export as a model of lm-eval, whose losses quern computes."""
    import numpy as np
    from lm_eval.api.model import TemplateLM
    from transformers import AutoTokenizer

    class QuernModel(TemplateLM):
        def __init__(self):
            super().__init__()
            self.tokenizer = AutoTokenizer.from_pretrained(export)
            values = Config.load(config).to_dict()
            self.sequence, self.data = values["train"]["sequence"], OneRow()
            settings = Config.load(config).set("precision.id", "fp32").set("train.micro_batch", 1).set("train.accumulation", 1)
            self.run = Run(settings.set("model.config", os.path.abspath(export)), weights=export, data=[], validation=self.data)

        eot_token_id = property(lambda self: self.tokenizer.eos_token_id)

        def tok_encode(self, string, add_special_tokens=False, **kwargs):
            return self.tokenizer.encode(string, add_special_tokens=add_special_tokens)

        def _loglikelihood_tokens(self, requests, **kwargs):
            return [(self.log_likelihood(before, wanted), False) for _, before, wanted in requests]

        def log_likelihood(self, before, wanted):
            tokens = np.array([*before, *wanted], np.int32)
            padding = self.sequence + 1 - tokens.size
            if padding < 0:
                raise Fault(config, "train.sequence", self.sequence, f"at least {tokens.size - 1} for this task")
            mask = np.zeros(self.sequence + 1, bool)
            mask[len(before) : tokens.size] = True
            self.data.row = {"tokens": np.pad(tokens, (0, padding)), "mask": mask}
            (loss,) = self.run.evaluate()
            return -loss.loss * loss.targets

        def loglikelihood_rolling(self, requests, **kwargs):
            raise Fault("lm-eval", "rolling log-likelihoods are not of this task")

        generate_until = loglikelihood_rolling

    return QuernModel()


def scores(model, folder):
    from lm_eval import simple_evaluate
    from lm_eval.tasks import TaskManager

    results = simple_evaluate(model, tasks=["quern_continuation"], task_manager=TaskManager(include_path=str(folder)),
                              bootstrap_iters=0)
    named = results["results"]["quern_continuation"]
    samples = sorted(results["samples"]["quern_continuation"], key=lambda sample: sample["doc_id"])
    likelihoods = [float(answer[0]) for sample in samples for answer in sample["filtered_resps"]]
    return {name: named[f"{name},none"] for name in ("acc", "acc_norm")}, likelihoods


@script
def main(arguments=None):
    parser = parser_for(None, __doc__)
    parser.add_argument("config", help="the run's TOML file; its train.sequence takes the task's longest row")
    parser.add_argument("export", help="its export, with a tokenizer")
    parser.add_argument("texts", nargs="+", help="text files to ask about")
    parser.add_argument("--questions", type=integer(1), default=40)
    parser.add_argument("--words", type=integer(1), default=12, help="of a begin, and of a choice")
    options = parser.parse_args(arguments)
    os.environ.update({"HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"})
    from lm_eval.models.huggingface import HFLM

    with tempfile.TemporaryDirectory() as folder:
        os.environ["HF_DATASETS_CACHE"] = f"{folder}/cache"
        write_questions(options.texts, Path(folder) / "questions.jsonl", options.questions, options.words)
        (Path(folder) / "task.yaml").write_text(TASK.format(questions=f"{folder}/questions.jsonl"))
        torch, theirs = scores(HFLM(pretrained=options.export, dtype="float32", device="cpu", batch_size=1), folder)
        quern, ours = scores(quern_model(options.config, options.export), folder)
    apart = max(abs(a - b) / abs(b) for a, b in zip(ours, theirs, strict=True))
    print(f"transformers  acc {torch['acc']:.4f}, acc_norm {torch['acc_norm']:.4f}")
    print(f"quern         acc {quern['acc']:.4f}, acc_norm {quern['acc_norm']:.4f}")
    print(f"log-likelihoods of {len(ours)} choices: largest relative difference {apart:.1e}")
    return 0 if torch == quern and apart < TOLERANCE else 1


if __name__ == "__main__":
    sys.exit(main())
