"""Event files of `quern train` with the tensorboard sink, read by a reader that shares nothing with the writer:
frames, checksums and messages are taken apart as TensorFlow's sources describe them.

QUERN names the program."""

import json
import os
import random
import struct
import subprocess
import sys
import unittest

from folder_test_case import FolderTestCase
from quern.tokens.token_file import TokenWriter

CONFIG = """
[model]
id = "llama"
[model.llama]
vocab_size = 64
hidden_size = 32
intermediate_size = 48
num_hidden_layers = 1
num_attention_heads = 2
max_position_embeddings = 32
[data.tokens]
train = "{folder}/train.tok"
validation = "{folder}/train.tok"
[train]
steps = 6
micro_batch = 2
sequence = 16
eval_every = 3
[device.cpu]
threads = 1
[log]
directory = "{folder}/run"
sinks = ["jsonl", "tensorboard"]
"""


def crc32c(data):
    """Bit by bit, from the polynomial."""
    crc = 0xFFFFFFFF
    for byte in data:
        crc ^= byte
        for _ in range(8):
            crc = (crc >> 1) ^ (0x82F63B78 if crc & 1 else 0)
    return crc ^ 0xFFFFFFFF


def masked(data):
    crc = crc32c(data)
    return (((crc >> 15) | (crc << 17)) + 0xA282EAD8) & 0xFFFFFFFF


def records(data):
    while data:
        length, length_crc = struct.unpack_from("<QI", data)
        assert length_crc == masked(data[:8]), "checksum of a length"
        message, (message_crc,) = data[12 : 12 + length], struct.unpack_from("<I", data, 12 + length)
        assert len(message) == length, "a record is cut"
        assert message_crc == masked(message), "checksum of a message"
        yield message
        data = data[16 + length :]


def fields(message):
    """[(number, value)] of a protobuf message."""
    at, result = 0, []

    def varint():
        nonlocal at
        value = shift = 0
        while True:
            byte = message[at]
            at += 1
            value |= (byte & 0x7F) << shift
            shift += 7
            if byte < 0x80:
                return value

    while at < len(message):
        key = varint()
        kind = key & 7
        if kind == 0:
            value = varint()
        elif kind == 2:
            size = varint()
            value, at = message[at : at + size], at + size
        else:
            code, size = {1: ("<d", 8), 5: ("<f", 4)}[kind]
            (value,), at = struct.unpack_from(code, message, at), at + size
        result.append((key >> 3, value))
    return result


def read_events(path):
    """({tag: {step: value}}, steps of the starts)"""
    scalars, starts = {}, []
    for number, message in enumerate(records(path.read_bytes())):
        event = dict(fields(message))
        assert event[1] > 1.5e9, "wall time"
        if number == 0:
            assert event[3] == b"brain.Event:2"
        if 7 in event:
            assert dict(fields(event[7])) == {1: 1}
            starts.append(event[2])
        for _, value in fields(event.get(5, b"")):
            value = dict(fields(value))
            scalars.setdefault(value[1].decode(), {})[event[2]] = value[2]
    return scalars, starts


class TensorboardTest(FolderTestCase):
    def setUp(self):
        super().setUp()
        with TokenWriter(self.folder / "train.tok", 64) as writer:
            writer.append([random.Random(1).randrange(64) for _ in range(200)])
        (self.folder / "run.toml").write_text(CONFIG.format(folder=self.folder))

    def train(self, *overrides):
        sets = [word for override in overrides for word in ("--set", override)]
        done = subprocess.run(
            [os.environ["QUERN"], "train", self.folder / "run.toml", *sets], capture_output=True, text=True
        )
        self.assertEqual(done.returncode, 0, done.stderr)
        return sorted((self.folder / "run").glob("events.out.tfevents.*"))

    def logged(self, event, key):
        lines = map(json.loads, (self.folder / "run/log.jsonl").read_text().splitlines())
        return {line["step"]: line[key] for line in lines if line["event"] == event}

    def test_scalars_are_those_of_the_log(self):
        (path,) = self.train()
        scalars, starts = read_events(path)
        self.assertEqual(starts, [1])
        for tag, event, key in (
            ("train/loss", "step", "loss"),
            ("train/lr", "step", "lr"),
            ("train/grad_norm", "step", "grad_norm"),
            ("train/tokens_per_second", "step", "tokens_per_second"),
            ("eval/loss", "eval", "loss"),
        ):
            logged = self.logged(event, key)
            single = struct.Struct("<f")  # an event file has fp32
            self.assertEqual(scalars[tag], {s: single.unpack(single.pack(v))[0] for s, v in logged.items()}, tag)
        self.assertEqual(len(scalars["train/loss"]), 6)
        self.assertEqual(set(scalars["eval/loss"]), {3, 6})

    def test_a_resumed_run_has_a_file_that_replaces_what_comes_after_its_start(self):
        (first,) = self.train("train.steps=3")
        files = self.train()
        self.assertEqual(len(files), 2)
        scalars, starts = read_events(next(path for path in files if path != first))
        self.assertEqual(starts, [4])
        self.assertEqual(sorted(scalars["train/loss"]), [4, 5, 6])


if __name__ == "__main__":
    unittest.main()
