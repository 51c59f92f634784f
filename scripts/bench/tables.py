#!/usr/bin/env python3
"""Makes the tables of the README and of docs/performance from the raw files of `quern bench --json`.

    scripts/bench/tables.py              # renews the tables of all pages
    scripts/bench/tables.py --check      # exit code 1 when a page is not what its files say

A page has its tables between two comments. The first is for a table of raw files, named by a pattern from the page's
folder; the second for one beside other programs, whose speeds, and the names of quern's raw files, are in peers.json:

    <!-- bench data/h100-*.json -->
    <!-- peers peers.json -->
    <!-- end bench -->
"""

import re
import shlex
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for, path_argument
from quern.base.end_of_main import script
from quern.base.fault import Fault, printable, reading
from quern.base.figures import three_digits
from quern.base.files import write_file
from quern.base.json_shape import COUNT, NUMBER, TEXT, Kind, checked, is_number, parse
from quern.runs.report import size

BLOCK = re.compile(r"^(<!-- (bench|peers) (\S+) -->\n)(?:.*?\n)??(<!-- end bench -->)$", re.MULTILINE | re.DOTALL)
SHAPE = {
    "device": TEXT, "quern": TEXT, "commit": TEXT, "command": [TEXT], "micro_batch": COUNT, "sequence": COUNT,
    "accumulation": COUNT, "step_seconds": [NUMBER], "sol": NUMBER, "mfu": NUMBER, "device_bytes": COUNT,
    "start_seconds": NUMBER,
}
SPEEDS = Kind(
    "a raw file's name, or tokens per second, slowest first",
    lambda value: isinstance(value, str)
    or isinstance(value, list) and bool(value) and all(is_number(speed) and speed for speed in value),
)
PEERS = {"title": TEXT, "note": TEXT, "models": {"*": {"*": SPEEDS}}}
COLUMNS = ("`quern bench`", "micro-batch x accumulation", "tok/s (slowest to fastest)", "steps", "SOL", "MFU", "memory")
COMPARED = ("quern e4m3", "quern e4m3, head bf16", "quern bf16", "LLMQ e4m3", "LLMQ bf16", "torch.compile bf16")
OF_THE_FILE = {"--json": 2, "--commit": 2}  # words of the command that change no figure


def read_result(path):
    with reading(path):
        data = path.read_bytes()
    result = checked(parse(data, path), SHAPE, path)
    if not result["commit"]:
        raise Fault(path, "commit", "none", "the commit of the build", "measure again with --commit")
    if not result["step_seconds"] or not all(seconds and seconds > 0 for seconds in result["step_seconds"]):
        raise Fault(path, "step_seconds", "none, or not all positive", "seconds of each step")
    if result["command"][:2] != ["quern", "bench"]:
        raise Fault(path, "command", shlex.join(result["command"]), "quern bench ...")
    return result


def speeds(result):
    """Tokens per second of the steps, slowest first."""
    tokens = result["micro_batch"] * result["sequence"] * result["accumulation"]
    return sorted(tokens / seconds for seconds in result["step_seconds"])


def settings(command):
    """The words after `quern bench`, without those that name the file."""
    words, kept = iter(command[2:]), []
    for word in words:
        name, equals, _ = word.partition("=")
        if name not in OF_THE_FILE:
            kept.append(word)
        elif not equals:
            next(words, None)
    return cell(shlex.join(kept))


def cell(text):
    """What would end a cell or its code is escaped or replaced."""
    return printable(text).replace("|", "\\|").replace("`", "'")


def percent(share):
    return f"{100 * share:.1f}%" if share else "-"


def median(result):
    """As `quern bench` has it: of an even number of steps, the faster of the two in the middle."""
    measured = speeds(result)
    return measured[len(measured) // 2]


def row(result):
    measured = speeds(result)
    return (
        f"`{settings(result['command'])}`",
        f"{result['micro_batch']} x {result['accumulation']}",
        f"{three_digits(median(result))} ({three_digits(measured[0])} to {three_digits(measured[-1])})",
        str(len(measured)),
        percent(result["sol"]),
        percent(result["mfu"]),
        size(result["device_bytes"]),
    )


def table(columns, rows):
    return "".join("| " + " | ".join(line) + " |\n" for line in (columns, ("---",) * len(columns), *rows))


def places(results, page):
    """For each machine and commit its measurements."""
    text, measured = "", {}
    for path, result in results.items():
        measured.setdefault((result["device"], result["quern"], result["commit"]), []).append(path)
    for (device, quern, commit), files in measured.items():
        links = ", ".join(f"[{path.name}]({path.relative_to(page.parent).as_posix()})" for path in files)
        text += f"\n{cell(device)}, quern {cell(quern)} at commit `{cell(commit)}`: {links}\n"
    return text


def read_peers(path):
    """The file's content; model -> program -> its speeds, slowest first; and quern's raw files."""
    with reading(path):
        content = checked(parse(path.read_bytes(), path), PEERS, path)
    models, results = {}, {}
    for model, programs in content["models"].items():
        files = {name: path.parent / file for name, file in programs.items() if isinstance(file, str)}
        own = {name: read_result(file) for name, file in files.items()}
        settings = {(r["device"], r["sequence"], r["micro_batch"], r["accumulation"]) for r in own.values()}
        if len(settings) != 1:
            raise Fault(path, model, f"raw files of {len(settings)} settings", "one device, length and batch in a row")
        _, _, micro_batch, accumulation = settings.pop()
        models[f"{model}, {micro_batch} x {accumulation}"] = {
            name: [median(own[name])] if name in own else given for name, given in programs.items()
        }
        results |= {files[name]: own[name] for name in own}
    return content, models, results


def bench_table(page, pattern):
    paths = sorted(page.parent.glob(pattern)) if not pattern.startswith("/") else []
    if not paths:
        raise Fault(page, "no raw file for a table", pattern, "a pattern such as data/h100-*.json")
    results = {path: read_result(path) for path in paths}
    return table(COLUMNS, map(row, results.values())) + places(results, page)


def peers_table(page, name):
    _, models, results = read_peers(page.parent / name)
    rows = (
        (model, *(" to ".join(dict.fromkeys(map(three_digits, programs.get(column, [])))) for column in COMPARED))
        for model, programs in models.items()
    )
    return table(("Qwen2.5", *COMPARED), rows) + places(results, page)


def renewed(page):
    def fill(block):
        begin, kind, source, end = block.groups()
        return f"{begin}{(bench_table if kind == 'bench' else peers_table)(page, source)}{end}"

    with reading(page):
        text = page.read_text(encoding="utf-8")
    return text, BLOCK.sub(fill, text)


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("pages", nargs="*", type=path_argument, help="Markdown files (default: README.md and docs/performance)")
    parser.add_argument("--check", action="store_true", help="write nothing; say which pages are stale")
    options = parser.parse_args(arguments)
    stale = False
    for page in options.pages or [ROOT / "README.md", *sorted((ROOT / "docs" / "performance").glob("*.md"))]:
        text, new = renewed(page)
        if text == new:
            continue
        stale = True
        if options.check:
            print(f"{page}: its tables are not what its raw files say; run scripts/bench/tables.py")
        else:
            write_file(page, new.encode())
            print(page)
    return 1 if stale and options.check else 0


if __name__ == "__main__":
    sys.exit(main())
