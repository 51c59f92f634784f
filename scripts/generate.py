#!/usr/bin/env python3
"""Continues text with a run's weights: encodes prompts, runs `quern generate` and decodes what it draws.

    scripts/generate.py configs/mine.toml "It is a truth" --max-tokens 40
    scripts/generate.py configs/mine.toml --from some/hf-model --temperature 0.8 < lines.txt
    scripts/generate.py configs/mine.toml "It is a truth" --write prompts.jsonl     # for sample.prompts

Prompts are words of the command line, each one text, else the lines of standard input. One text is shown as it grows.
The tokenizer is that of --tokenizer, else the config's checkpoint.tokenizer.
"""

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

sys.path.append(str(Path(__file__).resolve().parent))
from corpus import InputError
from encoding import load_tokenizer
from run_config import RunConfig


# Options that go to `quern generate` as they are.
PASSED_ON = ("checkpoint", "from", "max-tokens", "temperature", "top-p", "seed", "stop", "batch")


class GenerateError(Exception):
    """`quern generate` failed; the code is what it left with."""

    def __init__(self, code):
        super().__init__(f"quern generate left with {code}")
        self.code = code


def find_quern(given):
    if given:
        return given
    built = Path(__file__).resolve().parent.parent / "build" / "release" / "bin" / "quern"
    return str(built) if built.exists() else shutil.which("quern") or "quern"


def tokenizer_for(options):
    folder = options.tokenizer or RunConfig(options.config, options.set).find("checkpoint.tokenizer")
    if not folder:
        raise InputError("no tokenizer: give --tokenizer, or set checkpoint.tokenizer in the config")
    path = Path(folder)
    return load_tokenizer(str(path / "tokenizer.json" if path.is_dir() else path))


def lines_of(stream):
    stream.reconfigure(encoding="utf-8", errors="surrogateescape")  # encode() says which line is not UTF-8
    return [line.rstrip("\n") for line in stream]


def encode(tokenizer, texts):
    """[{"text", "tokens"}]; special tokens of the tokenizer's own template are added, as in its training texts."""
    for text in texts:
        try:
            text.encode("utf-8")
        except UnicodeError:
            raise InputError(f"the prompt {text!r} is not UTF-8") from None
    prompts = [{"text": text, "tokens": tokenizer.encode(text).ids} for text in texts]
    for prompt in prompts:
        if not prompt["tokens"]:
            raise InputError(f"the prompt {prompt['text']!r} has no tokens")
    return prompts


def write_prompts(prompts, path):
    Path(path).write_text("".join(json.dumps(p, ensure_ascii=False) + "\n" for p in prompts), encoding="utf-8")


def continuations(quern, config, prompts_file, more, stream):
    """Yields the objects that `quern generate` prints."""
    command = [quern, "generate", str(config), "--prompts", str(prompts_file), *more, *(["--stream"] if stream else [])]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        for line in process.stdout:
            yield json.loads(line)
    if process.returncode != 0:
        raise GenerateError(process.returncode)


class Growing:
    """Writes a text from its first new token on; a character of several tokens waits for its last one."""

    def __init__(self, tokenizer, tokens, out):
        self._tokenizer, self._tokens, self._out = tokenizer, list(tokens), out
        self._shown = 0

    def _write(self, last=False):
        text = self._tokenizer.decode(self._tokens)
        if last or not text.endswith("\N{REPLACEMENT CHARACTER}"):
            self._out.write(text[self._shown :])
            self._out.flush()
            self._shown = len(text)

    def add(self, token):
        self._tokens.append(token)
        self._write()

    def end(self):
        self._write(last=True)
        self._out.write("\n")


def show(tokenizer, prompts, results, out):
    growing = Growing(tokenizer, prompts[0]["tokens"], out) if len(prompts) == 1 else None
    for result in results:
        if growing and "token" in result:
            growing.add(result["token"])
        elif growing:
            growing.end()
        else:
            text = tokenizer.decode(prompts[result["prompt"]]["tokens"] + result["tokens"])
            out.write(f"--- {result['prompt'] + 1}\n{text}\n")


def main(arguments=None):
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("config", type=Path, help="the run's TOML file")
    parser.add_argument("texts", nargs="*", metavar="TEXT", help="a prompt; none: lines of standard input")
    parser.add_argument("--tokenizer", help="tokenizer.json or its folder")
    parser.add_argument("--quern", help="the program (default: this checkout's, else the one on the path)")
    parser.add_argument("--write", metavar="FILE", help="write the encoded prompts there, and generate nothing")
    for name in PASSED_ON:
        parser.add_argument(f"--{name}", dest=name, help="as of `quern generate`")
    parser.add_argument("--greedy", action="store_true", help="always the most likely token")
    parser.add_argument("--set", action="append", default=[], metavar="a.b=v", help="override a key of the config")
    options = parser.parse_intermixed_args(arguments)
    given = vars(options)
    more = [word for name in PASSED_ON if given[name] is not None for word in (f"--{name}", given[name])]
    more += [word for assignment in options.set for word in ("--set", assignment)] + ["--greedy"] * options.greedy
    try:
        tokenizer = tokenizer_for(options)
        prompts = encode(tokenizer, options.texts or lines_of(sys.stdin))
        if not prompts:
            raise InputError("no prompt")
        if options.write:
            write_prompts(prompts, options.write)
            return 0
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "prompts.jsonl"
            write_prompts(prompts, path)
            results = continuations(find_quern(options.quern), options.config, path, more, len(prompts) == 1)
            show(tokenizer, prompts, results, sys.stdout)
    except GenerateError as error:
        return error.code
    except KeyboardInterrupt:
        return 130
    except (InputError, OSError) as error:
        print(f"generate.py: {error}", file=sys.stderr)
        return 3
    return 0


if __name__ == "__main__":
    sys.exit(main())
