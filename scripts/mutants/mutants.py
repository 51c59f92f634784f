#!/usr/bin/env python3
"""Changes plugins in one small way at a time, and counts what `quern plugins check` finds.

    mutants.py BUILD [--count N] [--seed S] [--besides SEED:COUNT...] [--only PLUGIN] [--kernels] [--show] [--record FILE]

BUILD is a build folder in which quern and its plugins are built. Mutants are made of the examples and, with --kernels,
of the CPU device's kernels, which are then loaded as a device of another name beside the CPU device, the reference.
Those that do not compile are left out. An example is checked with its expected values. Prints a table of what was
found, and each survivor with its change; no_fault.json beside this file has those that a reader has proven to be no
fault, with the reason. FILE has the verdicts of an earlier run: what was found is taken from it, and only survivors and
new mutants are checked.
"""

import argparse
from collections import Counter
from dataclasses import dataclass
import json
from pathlib import Path
import random
import re
import subprocess
import sys
import tempfile

ROOT = Path(__file__).resolve().parents[2]
KERNELS = ["elementwise/elementwise_ops.cpp", "norms/rms_norm_ops.cpp", "norms/layer_norm_ops.cpp",
           "attention/rope_ops.cpp", "loss/loss_ops.cpp", "embedding/embedding_ops.cpp", "optimizer/optimizer_ops.cpp"]

# What a change is called, what it is made of, and what it becomes.
CHANGES = [
    ("bound", r" < ", " <= "), ("bound", r" <= ", " < "), ("bound", r" > ", " >= "), ("bound", r" >= ", " > "),
    ("bound", r" \+ 1\b", ""), ("bound", r" - 1\b", ""),
    ("operand", r" \+ ", " - "), ("operand", r" - ", " + "), ("operand", r" \* ", " / "), ("operand", r" / ", " * "),
    ("operand", r" % ", " / "), ("operand", r" \+= ", " -= "), ("operand", r" \+= ", " = "),
    ("logic", r" && ", " || "), ("logic", r" \|\| ", " && "), ("logic", r" == ", " != "), ("logic", r" != ", " == "),
    ("logic", r"(?<=[( ])!(?=\w)", ""), ("logic", r"\btrue\b", "false"), ("logic", r"\bfalse\b", "true"),
    ("logic", r" \? ([^:?]+) : ([^;,)]+)", r" ? \2 : \1"),
    ("constant", r"(?<![\d.])0\b(?!\.)", "1"), ("constant", r"(?<![\d.])1\b(?!\.)", "2"), ("constant", r"(?<![\d.])2\b(?!\.)", "3"),
    ("constant", r"(?<![\d.])4\b(?!\.)", "5"), ("constant", r"\b0\.5\b", "0.6"), ("constant", r"\bmin\b", "max"),
    ("constant", r"\bmax\b", "min"),
    ("order", r"(\w)\((\w+), (\w+)\b", r"\1(\3, \2"),
    ("dropped", r"^\s+(?!return|using|const|auto|if|else|for|case|break|continue|throw)[\w:.>\[\]()*-]+(\(| \+?=).*;$",
     "  ;"),
]


@dataclass(frozen=True)
class Mutant:
    plugin: Path  # of the examples, or the device
    file: Path
    line: int
    kind: str
    text: str  # of the line

    def change(self) -> str:
        original = self.file.read_text().splitlines()[self.line].strip()
        return f"{self.kind}: {original}  ->  {self.text.strip()}"

    def name(self) -> str:
        return f"{self.file.relative_to(ROOT)}:{self.line + 1}: {self.change()}"

    def key(self) -> str:
        """The same wherever the line is."""
        return f"{self.file.relative_to(ROOT)}: {self.change()}"


def is_code(line: str) -> bool:
    stripped = line.strip()
    return bool(stripped) and not stripped.startswith(("//", "#", "///", "namespace", "using", "template", "}")) and (
        '"' not in stripped)  # texts for people are no faults


def mutants_of(plugin: Path, file: Path) -> list[Mutant]:
    made = {}
    for number, line in enumerate(file.read_text().splitlines()):
        if not is_code(line):
            continue
        code, _, comment = line.partition("  //")
        for kind, pattern, replacement in CHANGES:
            for match in re.finditer(pattern, code):
                changed = code[:match.start()] + match.expand(replacement) + code[match.end():]
                if changed.strip() != code.strip():
                    made[number, changed] = Mutant(plugin, file, number, kind, changed)
    return list(made.values())


def run(command: list[str], seconds: float) -> subprocess.CompletedProcess | None:
    try:
        return subprocess.run(command, capture_output=True, text=True, timeout=seconds, cwd=tempfile.gettempdir())
    except subprocess.TimeoutExpired:
        return None


def is_broken(command: list[str]) -> bool:
    """Whether a contract is broken; what follows it is not waited for."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True,
                          cwd=tempfile.gettempdir()) as checking:
        for line in checking.stdout:
            if " BROKEN " in line or line.startswith("BROKEN "):
                checking.terminate()
                return True
    return checking.returncode not in (0, 4)


class Kit:
    def __init__(self, build: Path, scratch: Path):
        self.build, self.scratch = build, scratch
        self.flags = ["-std=c++20", "-O1", "-fPIC", "-fopenmp", "-fvisibility=hidden", "-ffp-contract=off", "-w",
                      f"-I{ROOT}/core/include", f"-I{ROOT}/plugins", f"-I{ROOT}/plugins/device/cpu"]
        header = scratch / "quern_all.h"  # compiled once
        header.write_text("".join(f"#include <{name}>\n" for name in (
            "quern/plugin.h", "quern/error.h", "quern/hf_config.h", "quern/numeric.h", "quern/random.h", "algorithm",
            "cmath", "fstream", "mutex")))
        run(["g++", *self.flags, "-x", "c++-header", str(header), "-o", f"{header}.gch"], 300)
        self.flags += ["-include", str(header)]
        self.link = ["-shared", f"-L{build}/lib", "-lquern", f"-Wl,-rpath,{build}/lib",
                     f"-Wl,--version-script={ROOT}/cmake/plugin_symbols.map"]  # as in CMake: its heap is guarded
        self.objects: dict[Path, Path] = {}
        self.sound: set[Path] = set()  # plugins that pass unchanged

    def compiled(self, source: Path, to: Path, text: str | None = None) -> bool:
        """Of the file's text, or of another in its place."""
        path = source
        if text is not None:
            path = to.with_suffix(".cpp")
            path.write_text(text)
        done = run(["g++", *self.flags, f"-I{source.parent}", "-c", str(path), "-o", str(to)], 120)
        return done is not None and done.returncode == 0

    def object_of(self, source: Path) -> Path:
        if source not in self.objects:
            to = self.scratch / f"{len(self.objects)}.o"
            if not self.compiled(source, to):
                sys.exit(f"{source} does not compile")
            self.objects[source] = to
        return self.objects[source]

    def example_parts(self, mutant: Mutant) -> tuple[list[str], str]:
        sources = [file for file in sorted(mutant.plugin.glob("*.cpp")) if not file.name.endswith("_test.cpp")]
        return [str(self.object_of(file)) for file in sources if file != mutant.file], mutant.plugin.name

    def kernel_parts(self, mutant: Mutant) -> tuple[list[str], str]:
        objects = self.build / "plugins/device/cpu/CMakeFiles/quern_device_cpu_objects.dir"
        def has_source(file: Path) -> bool:  # a build folder keeps objects of files that are gone
            return (mutant.plugin / str(file.relative_to(objects)).replace("__", "..").removesuffix(".o")).exists()

        kept = [file for file in objects.rglob("*.o")
                if has_source(file) and file.name not in ("plugin.cpp.o", "cpu_device.cpp.o", mutant.file.name + ".o")]
        for name in ("plugin.cpp", "runtime/cpu_device.cpp"):
            source, to = mutant.plugin / name, self.scratch / (Path(name).stem + "_named.o")
            if not to.exists() and not self.compiled(source, to, source.read_text().replace('"cpu"', '"mutant"')):
                sys.exit(f"{source} does not compile under another name")
            kept.append(to)
        return [str(file) for file in kept], "mutant"

    def check(self, mutant: Mutant) -> str:
        """What became of it: "found", "survived" or "no mutant"."""
        if mutant.plugin not in self.sound:
            self.sound.add(mutant.plugin)
            lines = mutant.file.read_text().splitlines()
            if self.check(Mutant(mutant.plugin, mutant.file, mutant.line, "none", lines[mutant.line])) != "survived":
                sys.exit(f"{mutant.plugin} does not pass as it is")
        lines = mutant.file.read_text().splitlines()
        lines[mutant.line] = mutant.text
        changed = self.scratch / "changed.o"
        if not self.compiled(mutant.file, changed, "\n".join(lines) + "\n"):
            return "no mutant"
        kernels = mutant.plugin == ROOT / "plugins/device/cpu"
        parts, name = self.kernel_parts(mutant) if kernels else self.example_parts(mutant)
        plugin = self.scratch / f"libquern_{name}.so"
        more = ["-lnuma", "-ldl", "-lrt"] if kernels else []
        done = run(["g++", "-fopenmp", *parts, str(changed), *self.link, *more, "-o", str(plugin)], 120)
        if done is None or done.returncode != 0:
            return "no mutant"
        command = [str(self.build / "bin/quern"), "plugins", "check", str(plugin), "--limit", "60"]
        if kernels:
            command += ["--set", "threads=1"]  # ops are small
        expected = self.scratch / "expected.json"  # under the name that it has here
        if (mutant.plugin / "expected.json").exists():
            expected.write_text((mutant.plugin / "expected.json").read_text().replace('"device/cpu"', '"device/mutant"'))
            command += ["--expect", str(expected)]
        return "found" if is_broken(command) else "survived"


def in_order(files: list[tuple[Path, Path]], seed: int) -> list[Mutant]:
    """In turn from each file, so that long files have no more of them than short ones, as far as these go."""
    by_file = [mutants_of(plugin, file) for plugin, file in files]
    rng = random.Random(seed)
    for mutants in by_file:
        rng.shuffle(mutants)
    return [mutant for turn in range(max(map(len, by_file))) for mutants in by_file for mutant in mutants[turn:turn + 1]]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("build", type=Path)
    parser.add_argument("--count", type=int, default=200)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--besides", nargs="*", default=[], metavar="SEED:COUNT",
                        help="without the first COUNT of these seeds over all plugins, which the kit was repaired after")
    parser.add_argument("--only", default="", metavar="PLUGIN")
    parser.add_argument("--kernels", action="store_true")
    parser.add_argument("--show", action="store_true", help="print each mutant, and not only survivors")
    parser.add_argument("--record", type=Path, metavar="FILE", help="verdicts of an earlier run, and then of this one")
    options = parser.parse_args()
    plugins = [folder.parent for folder in sorted((ROOT / "examples").glob("*/CMakeLists.txt"))]
    files = [(plugin, file) for plugin in plugins for file in sorted(plugin.glob("*.cpp"))
             if not file.name.endswith("_test.cpp")]
    if options.kernels:
        device = ROOT / "plugins/device/cpu"
        files = [(device, device / name) for name in KERNELS]
    seen = set()
    for text in options.besides:  # of all plugins, whatever is chosen now
        seed, count = map(int, text.split(":"))
        seen |= {mutant.key() for mutant in in_order(files, seed)[:count]}
    chosen = [(plugin, file) for plugin, file in files if options.only in plugin.name]
    if not chosen:
        sys.exit(f"--only {options.only}: no such plugin; there are " +
                 ", ".join(sorted({plugin.name for plugin, _ in files})))
    order = [mutant for mutant in in_order(chosen, options.seed) if mutant.key() not in seen]
    known = json.loads(options.record.read_text()) if options.record and options.record.exists() else {}
    reasons = json.loads((Path(__file__).parent / "no_fault.json").read_text())
    found, made, no_fault = Counter(), Counter(), Counter()
    with tempfile.TemporaryDirectory() as scratch:
        kit = Kit(options.build.resolve(), Path(scratch))
        for mutant in order:
            if sum(made.values()) == options.count:
                break
            verdict = known.get(mutant.name(), "survived")
            if verdict == "survived":
                verdict = known[mutant.name()] = kit.check(mutant)
            if options.record:
                options.record.write_text(json.dumps(known, indent=1) + "\n")
            if verdict == "no mutant":
                continue
            key = mutant.plugin.name if not options.kernels else mutant.file.stem, mutant.kind
            made[key] += 1
            found[key] += verdict == "found"
            reason = reasons.get(mutant.key()) if verdict == "survived" else None
            no_fault[key] += reason is not None
            if options.show or verdict == "survived":
                print(f"{verdict}: {mutant.name()}" + (f"\n    no fault: {reason}" if reason else ""), flush=True)
    if not made:
        sys.exit("no mutant is left")
    kinds = sorted({kind for _, kind in made})
    print("\n| plugin | " + " | ".join(kinds) + " | all |\n| --- |" + " --- |" * (len(kinds) + 1))
    for plugin in [*sorted({name for name, _ in made}), "all"]:
        def share(kind: str | None) -> str:
            keys = [key for key in made if plugin in ("all", key[0]) and kind in (None, key[1])]
            total = sum(made[key] for key in keys)
            return f"{sum(found[key] for key in keys)} of {total}" if total else ""
        print(f"| {plugin} | " + " | ".join(map(share, [*kinds, None])) + " |")
    total, all_found, none = sum(made.values()), sum(found.values()), sum(no_fault.values())
    print(f"\nfound {all_found} of {total}, {all_found / total:.1%}; without {none} that are no fault "
          f"{all_found} of {total - none}, {all_found / (total - none):.1%}")


if __name__ == "__main__":
    main()
