"""`quern-tools COMMAND ...`: which command, and its options.

A command is a module whose docstring is its help, with add_arguments(parser) and main(options), which returns an
exit code or None. It is imported only when it is asked for, so that a command needs no library of another.
"""

import difflib
import importlib
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import quern
from quern.base.arguments import parser_for
from quern.base.end_of_main import run_to_the_end
from quern.base.fault import CONFIG, Fault, signals_waiting

PROGRAM = "quern-tools"


@dataclass(frozen=True)
class Command:
    module: str
    help: str


@dataclass(frozen=True)
class Group:
    commands: dict[str, Command]
    help: str


COMMANDS: dict[str, Command | Group] = {
    "corpus": Group(
        {
            "austen": Command("quern.corpora.austen", "Jane Austen's six novels, for configs/demo.toml"),
            "debian": Command("quern.corpora.debian", "37M tokens of English, for configs/convergence.toml"),
        },
        "texts to train on, from Debian's packages",
    ),
    "tokenize": Command("quern.tokens.tokenize_corpus", "text or conversations to token files"),
    "plot": Group(
        {
            "loss": Command("quern.plots.loss", "losses and learning rates of runs"),
            "ab": Command("quern.plots.ab", "a comparison made by `quern ab`"),
            "scales": Command("quern.plots.scales", "the quantized tensors of a run"),
            "timeline": Command("quern.plots.timeline", "the lanes of a step, planned or measured"),
        },
        "pictures of runs",
    ),
    "report": Command("quern.runs.report", "one HTML page on runs: figures, curves, samples"),
    "export-wandb": Command("quern.runs.export_wandb", "runs as offline Weights & Biases runs"),
    "export-gguf": Command("quern.models.export_gguf", "a run or a model as one GGUF file, for llama.cpp"),
    "generate": Command("quern.models.generate", "continue text with a run's weights"),
    "verify": Command("quern.verify", "check a run's losses and gradients on this machine"),
    "check-export": Command("quern.models.check_export", "repeat a run's validation in transformers"),
}


def main(arguments: Sequence[str] | None = None) -> int:
    words = list(sys.argv[1:] if arguments is None else arguments)
    return run_to_the_end(PROGRAM, lambda: dispatch(PROGRAM, COMMANDS, words))


def dispatch(owner: str, commands: dict[str, Command | Group], words: list[str]) -> int:
    if not words or words[0] in ("-h", "--help"):
        print_commands(owner, commands)
        return 0
    if words[0] == "--version" and owner == PROGRAM:
        print(f"{PROGRAM} {quern.__version__} from {Path(quern.__file__).parent}, Python at {sys.executable}")
        return 0
    name, *rest = words
    chosen = commands.get(name)
    if chosen is None:
        near = difflib.get_close_matches(name, commands, 1)
        advice = f"nearest name `{near[0]}`" if near else f"`{owner} --help` describes them"
        raise Fault(owner, "unknown command", f'"{name}"', "one of " + ", ".join(commands), advice, CONFIG)
    if isinstance(chosen, Group):
        return dispatch(f"{owner} {name}", dict(chosen.commands), rest)
    with signals_waiting():
        module = importlib.import_module(chosen.module)
    parser = parser_for(f"{owner} {name}", module.__doc__)
    module.add_arguments(parser)
    code: int | None = module.main(parser.parse_intermixed_args(rest))
    return code or 0


def print_commands(owner: str, commands: dict[str, Command | Group]) -> None:
    print(f"usage: {owner} COMMAND ...\n\ncommands:")
    for name, command in commands.items():
        kinds = f" ({', '.join(command.commands)})" if isinstance(command, Group) else ""
        print(f"  {name:<14}{command.help}{kinds}")
    print(f"\n`{owner} COMMAND --help` describes one.")
