#!/usr/bin/env python3
"""Finds types of one qualified name that are defined twice in sources which may be in one program.

    scripts/definitions/check_definitions.py [ROOT]      # without ROOT: this tree

Two such types break the one-definition rule: the linker takes either one's inline functions for both, and says
nothing. Types in unnamed namespaces and in functions are apart in each file. Prints one line for each name; then the
exit code is 1.
"""

import re
import sys
from collections import defaultdict
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for, path_argument
from quern.base.end_of_main import script

SOURCES = ("core", "plugins", "frontends", "tests")
SUFFIXES = {".h", ".cpp", ".cuh", ".cu"}
# Comments, texts and directives of the preprocessor, which may have braces.
LEFT_OUT = re.compile(
    r'//[^\n]*|/\*.*?\*/|R"([^(\s]*)\(.*?\)\1"|"(?:[^"\\\n]|\\.)*"|(?<!\w)\'(?:[^\'\\\n]|\\.)+\'|^[ \t]*#(?:[^\\\n]|\\.)*',
    re.DOTALL | re.MULTILINE,
)
NAMESPACE = re.compile(r"(?:^|\s)(?:inline\s+)?namespace(?:\s+([\w:]+))?\s*$")
TYPE = re.compile(
    r"(?:^|\s)(?:class|struct|union|enum(?:\s+class|\s+struct)?)\s+(?:alignas\([^)]*\)\s*|\[\[[^]]*\]\]\s*)*"
    r"([A-Za-z_]\w*(?:::\w+)*(?:<[^{}]*?>)?)(?:\s+final)?\s*(?::(?!:).*)?$",
    re.DOTALL,
)


def definitions(text: str) -> list[tuple[str, int]]:
    """Qualified names of the types with external linkage that a source defines, each with its line."""
    text = LEFT_OUT.sub(lambda found: re.sub(r"[^\n]", " ", found[0]), text)
    scopes: list[str | None] = []  # names of namespaces; None: whatever is in there is not seen from outside
    found, head = [], 0
    for at, mark in ((match.start(), match[0]) for match in re.finditer(r"[{};]", text)):
        if mark == "{":
            declared = text[head:at].strip()
            namespace, kind = NAMESPACE.search(declared), TYPE.search(declared)
            if namespace and not kind:
                scopes.append(namespace[1])
            elif declared.startswith('extern') and not declared.strip("extrn \t"):
                scopes.append("")
            else:
                if kind and None not in scopes and "(" not in declared.split(kind[1])[0].replace("alignas(", ""):
                    name = "::".join([scope for scope in scopes if scope] + [re.sub(r"\s+", " ", kind[1])])
                    found.append((name, text.count("\n", 0, at) + 1))
                scopes.append(None)
        elif mark == "}" and scopes:
            scopes.pop()
        head = at + 1
    return found


def program_of(path: Path) -> str:
    """The part of the tree whose files are in no program with other parts, but for files in all: ""."""
    folders = path.parts
    if folders[0] == "plugins" and folders[1] != "shared":
        return "/".join(folders[:3])
    if folders[0] == "tests":
        return path.as_posix() if folders[1] in ("conformance", "bad_plugins") else "/".join(folders[:2])
    return path.as_posix() if path.stem.endswith("_test") else ""


def clashes(root: Path) -> list[str]:
    places: dict[str, list[tuple[str, str]]] = defaultdict(list)
    for folder in SOURCES:
        for path in sorted((root / folder).rglob("*")):
            if path.suffix not in SUFFIXES:
                continue
            short = path.relative_to(root)
            for name, line in definitions(path.read_text()):
                places[name].append((program_of(short), f"{short}:{line}"))
    lines = []
    for name, all_places in sorted(places.items()):
        common = [place for program, place in all_places if not program]
        by_program = defaultdict(list)
        for program, place in all_places:
            by_program[program].append(place)
        for program, own in sorted(by_program.items()):
            together = own + (common if program else [])
            if len(together) > 1:
                lines.append(f"{name}: defined at " + " and at ".join(together))
    return lines


@script
def main(arguments: list[str]) -> int:
    parser = parser_for(None, __doc__)
    parser.add_argument("root", nargs="?", type=path_argument, default=ROOT, help="the tree, if not this one")
    lines = clashes(parser.parse_args(arguments).root)
    print("".join(line + "\n" for line in lines), end="")
    return 1 if lines else 0


if __name__ == "__main__":
    sys.exit(main())
