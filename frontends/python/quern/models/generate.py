"""Continues text with a run's weights: encodes prompts, runs `quern generate` and decodes what it draws.

    quern-tools generate configs/mine.toml "It is a truth" --max-tokens 40
    quern-tools generate configs/mine.toml --from some/hf-model --temperature 0.8 < lines.txt
    quern-tools generate configs/mine.toml "It is a truth" --write prompts.jsonl     # for sample.prompts

Prompts are words of the command line, each one text, else the lines of standard input. One text is shown as it grows.
The tokenizer is --tokenizer, or else the config's checkpoint.tokenizer.
"""

import contextlib
import glob
import json
import os
import subprocess
import sys
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import IO, Any, TextIO

from tokenizers import Tokenizer

from quern.tokens.begin_tokens import begin_tokens
from quern.tokens.encoding import load_tokenizer, tokenizer_file, tokenizing
from quern.tokens.token_file import first_tokens
from quern.tokens.tokenizer_config import read_tokenizer_config
from quern.base.arguments import expanded, path_argument
from quern.base.fault import INTERNAL, Fault, reading, starting, writing
from quern.base.files import write_file
from quern.base.installation import find_quern
from quern.base.json_shape import COUNT, TOKEN, Shape, checked, parse
from quern.runs.run_config import RunConfig

Prompt = dict[str, Any]  # {"text": ..., "tokens": [...]}

MOST_INPUT = 16 << 20  # characters of standard input
# Options that go to `quern generate` as they are.
PASSED_ON = ("checkpoint", "from", "max-tokens", "temperature", "top-p", "seed", "stop", "batch")


def tokenizer_for(options: Namespace) -> tuple[Tokenizer, list[int]]:
    run = RunConfig(options.config, options.set)
    folder = options.tokenizer or run.find("checkpoint.tokenizer")
    if not folder or not isinstance(folder, str):
        advice = "give --tokenizer, or set checkpoint.tokenizer in the config"
        raise Fault(options.config, "checkpoint.tokenizer", "none", "a folder", advice)
    return prompt_tokenizer(folder, None if getattr(options, "from") else run.find("data.tokens.train"))


def prompt_tokenizer(folder: str, train: Any) -> tuple[Tokenizer, list[int]]:
    """The tokenizer, and the tokens that begin each prompt: as in `train`, the run's token files, else as the tokenizer puts
    them before a text."""
    path = tokenizer_file(expanded(folder))
    tokenizer = load_tokenizer(path)
    begin = begin_tokens(tokenizer, read_tokenizer_config(path.parent))
    first = first_training_tokens(train, len(begin))
    return tokenizer, begin if first in (None, begin) else []


def first_training_tokens(train: Any, count: int) -> list[int] | None:
    """Of the first of the run's token files; None where none can be read."""
    entries = train if isinstance(train, list) else [train]
    paths = [path for entry in entries if isinstance(entry, str) for path in sorted(glob.glob(os.path.expanduser(entry)))]
    for path in paths:
        with contextlib.suppress(Fault):
            return first_tokens(path, count)
    return None


def lines_of(stream: TextIO) -> list[str]:
    if hasattr(stream, "reconfigure"):
        stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # encode() says which line is not UTF-8
    with reading("standard input"):
        text = stream.read(MOST_INPUT + 1)
    if len(text) > MOST_INPUT:
        raise Fault("standard input", "too much for prompts", f"over {MOST_INPUT} characters", "a prompt a line")
    text = text.removeprefix("\ufeff").replace("\r\n", "\n")
    return text.removesuffix("\n").split("\n") if text else []


def encode(tokenizer: Tokenizer, begin: list[int], texts: Sequence[str]) -> list[Prompt]:
    """[{"text", "tokens"}]. The tokens `begin` come first, unless the text spells them."""
    prompts: list[Prompt] = []
    for number, text in enumerate(texts, 1):
        try:
            text.encode("utf-8")
        except UnicodeError:
            raise Fault(f"prompt {number}", "not UTF-8", repr(text)) from None
        with tokenizing():
            tokens = tokenizer.encode(text, add_special_tokens=False).ids
        spelled = tokens[: len(begin)] == begin
        prompts.append({"text": text, "tokens": tokens if spelled or not tokens else begin + tokens})
        if not prompts[-1]["tokens"]:
            raise Fault(f"prompt {number}", "no tokens", repr(text))
    return prompts


def lines_for_quern(prompts: Sequence[Prompt]) -> bytes:
    return "".join(json.dumps(prompt, ensure_ascii=False) + "\n" for prompt in prompts).encode()


@contextlib.contextmanager
def continuations(command: Sequence[str]) -> Iterator[Iterator[dict[str, Any]]]:
    """The objects that `quern generate` prints. At the end it is stopped, or this script fails as it did."""

    def results(lines: IO[bytes]) -> Iterator[dict[str, Any]]:
        for line in lines:
            if not line.endswith(b"\n"):  # ended while writing it, and its exit code says why
                return
            shape: Shape = {"prompt": COUNT, "token?": TOKEN, "tokens?": [TOKEN]}
            yield checked(parse(line, command[0]), shape, command[0])

    with starting(command[0]):
        process = subprocess.Popen(command, stdout=subprocess.PIPE)
    assert process.stdout, "a pipe"
    try:
        yield results(process.stdout)
    except BaseException:
        process.terminate()
        raise
    finally:
        process.stdout.close()
        process.wait()
    if process.returncode != 0:
        raise SystemExit(process.returncode if process.returncode > 0 else 128 - process.returncode)


class Growing:
    """Writes a text from its first new token on; a character of several tokens waits for its last one."""

    def __init__(self, tokenizer: Tokenizer, tokens: Iterable[int], out: TextIO) -> None:
        self._tokenizer, self._tokens, self._out = tokenizer, list(tokens), out
        self._shown = 0

    def _write(self, last: bool = False) -> None:
        with tokenizing():
            text = self._tokenizer.decode(self._tokens)
        if last or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._out.write(text[self._shown :])
            self._out.flush()
            self._shown = len(text)

    def add(self, token: int) -> None:
        self._tokens.append(token)
        self._write()

    def end(self) -> None:
        self._write(last=True)
        self._out.write("\n")


def show(tokenizer: Tokenizer, prompts: Sequence[Prompt], results: Iterable[dict[str, Any]], out: TextIO) -> None:
    growing = Growing(tokenizer, prompts[0]["tokens"], out) if len(prompts) == 1 else None
    for result in results:
        if growing and "token" in result:
            growing.add(result["token"])
        elif growing:
            growing.end()
        elif "tokens" in result and result["prompt"] < len(prompts):
            with tokenizing():
                text = tokenizer.decode(prompts[result["prompt"]]["tokens"] + result["tokens"])
            out.write(f"--- {result['prompt'] + 1}\n{text}\n")
        else:
            raise Fault("quern generate", "unexpected result", json.dumps(result), code=INTERNAL)


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("config", type=path_argument, help="the run's TOML file")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a prompt; none: lines of standard input")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder")
    parser.add_argument("--quern", help="the program (default: the one installed with this command, else the one on the path)")
    parser.add_argument(
        "--write", type=path_argument, metavar="FILE", help="write the encoded prompts there, and generate nothing"
    )
    for name in PASSED_ON:
        parser.add_argument(f"--{name}", dest=name, help="as of `quern generate`")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of the config")


def main(options: Namespace) -> None:
    given = vars(options)
    more = [word for name in PASSED_ON if given[name] is not None for word in (f"--{name}", given[name])]
    more += [word for assignment in options.set for word in ("--set", assignment)] + ["--greedy"] * options.greedy
    tokenizer, begin = tokenizer_for(options)
    prompts = encode(tokenizer, begin, options.texts or lines_of(sys.stdin))
    if not prompts:
        raise Fault("standard input", "no prompt", expected="a text a line")
    if options.write:
        write_file(options.write, lines_for_quern(prompts))
        return
    stream = ["--stream"] * (len(prompts) == 1)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "prompts.jsonl"
        with writing(path):
            path.write_bytes(lines_for_quern(prompts))
        command = [find_quern(options.quern), "generate", str(options.config), "--prompts", str(path), *more, *stream]
        with continuations(command) as results:
            show(tokenizer, prompts, results, sys.stdout)
