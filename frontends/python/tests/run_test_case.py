"""A test case with the config of a small run, in a folder of its own."""

import os
import textwrap

import numpy as np

from folder_test_case import TINY_LLAMA, FolderTestCase

os.environ.setdefault("QUERN_PREFIX", os.environ["QUERN_BUILD_DIR"])

import quern  # noqa: E402
from quern.tokens.token_file import TokenWriter  # noqa: E402

SEQUENCE = 16


def chain(rows, start=1):
    """Tokens that a small model learns in a few steps."""
    tokens = [start]
    while len(tokens) < rows * SEQUENCE + 1:
        tokens.append((tokens[-1] * 5 + 3) % 64)
    return np.array(tokens, np.int32)


class RunTestCase(FolderTestCase):
    def setUp(self):
        super().setUp()
        for name, rows in (("train", 13), ("validation", 4)):
            with TokenWriter(self.folder / f"{name}.tok", 64) as file:
                file.append(chain(rows))
        (self.folder / "run.toml").write_text(TINY_LLAMA + textwrap.dedent(f"""\
            [train]
            steps = 6
            micro_batch = 2
            sequence = {SEQUENCE}
            eval_every = 3
            [optimizer]
            learning_rate = 1e-2
            [schedule.cosine]
            warmup = 2
            [device.cpu]
            threads = 1
            [checkpoint]
            every = 2
            [data.tokens]
            train = "{self.folder}/train.tok"
            validation = "{self.folder}/validation.tok"
            [log]
            directory = "{self.folder}/run"
            sinks = ["jsonl"]
            """))
        self.config = quern.Config.load(self.folder / "run.toml")

    def named(self, name, **values):
        config = self.config.set("log.directory", self.folder / name)
        for key, value in values.items():
            config = config.set(key.replace("__", "."), value)
        return config
