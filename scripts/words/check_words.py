#!/usr/bin/env python3
"""Finds words that have a better one (words.toml) in pages, comments and messages.

    scripts/words/check_words.py [FILE...]       # without FILE: every file of the tree

Prints one line for each: the place, the word that was found, and what to write instead; then the exit code is 1. Code is
not checked: names in backquotes, paths, identifiers, indented blocks of pages. words.toml lists the folders.
"""

import io
import re
import sys
import tokenize
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for, path_argument
from quern.base.end_of_main import script
from quern.base.fault import reading

LIST = Path(__file__).with_name("words.toml")
SUFFIXES = {".md", ".h", ".cpp", ".cuh", ".cu", ".py", ".sh", ".cmake", ".in", ".toml"}
CPP = re.compile(
    r'(?P<comment>//[^\n]*|/\*.*?\*/)|R"(?P<mark>[^(\s]*)\((?P<raw>.*?)\)(?P=mark)"|"(?P<string>(?:[^"\\\n]|\\.)*)"'
    r"|'(?:[^'\\\n]|\\.)+'",
    re.DOTALL,
)
HASH = re.compile(r"(?P<comment>(?:(?<=\s)|^)#[^\n]*)|\"(?P<string>(?:[^\"\\]|\\.)*)\"|'(?P<single>[^'\n]*)'", re.MULTILINE)
CODE = re.compile(r"`[^`]*`|https?://\S+|\]\([^)]*\)|[\w.*<>-]*(?:/|::|_)[\w./:*<>-]*|\w+(?:\.\w+)+|--\w[\w-]*")
MARK = re.compile(r"^[ \t]*(?:///?<?|#+)|\"|\\n", re.MULTILINE)


@dataclass
class Piece:
    """Text that is read as one, such as a comment of several lines, and its first line."""

    kind: str  # "prose", "comments" or "messages"
    line: int
    text: str


@dataclass
class Word:
    found: re.Pattern[str]
    write: str
    allowed: re.Pattern[str] | None


def pieces_of_pattern(pattern: re.Pattern[str], text: str) -> Iterator[Piece]:
    """Comments and strings; neighbours with only white space between are one piece."""
    last, end = None, 0
    for match in pattern.finditer(text):
        kind = "comments" if match["comment"] is not None else "messages"
        if last and last.kind == kind and not text[end : match.start()].strip():
            last.text += text[end : match.start()] + match[0]
        else:
            if last:
                yield last
            last = Piece(kind, text.count("\n", 0, match.start()) + 1, match[0])
        end = match.end()
    if last:
        yield last


def pieces_of_python(text: str) -> Iterator[Piece]:
    for token in tokenize.generate_tokens(io.StringIO(text).readline):
        if token.type in (tokenize.COMMENT, tokenize.STRING):
            yield Piece("comments" if token.type == tokenize.COMMENT else "messages", token.start[0], token.string)


def pieces_of_page(text: str) -> Iterator[Piece]:
    """Paragraphs; without indented and fenced code."""
    paragraph: list[str] = []
    begin, fenced, after_blank = 0, False, True
    for number, line in enumerate([*text.split("\n"), ""], 1):
        fence = line.startswith("```")
        code = fenced or fence or line.startswith("    ") and after_blank
        if paragraph and (code or not line.strip()):
            yield Piece("prose", begin, "\n".join(paragraph))
            paragraph = []
        if not code and line.strip():
            begin = begin if paragraph else number
            paragraph.append(line)
        fenced ^= fence
        after_blank = not line.strip() or code


def pieces(path: Path, text: str) -> Iterator[Piece]:
    if path.suffix == ".md":
        yield from pieces_of_page(text)
    elif path.suffix == ".py":
        yield from pieces_of_python(text)
    else:
        yield from pieces_of_pattern(CPP if path.suffix in {".h", ".cpp", ".cu", ".cuh"} else HASH, text)


def read_list(path: Path) -> tuple[list[Word], list[Path]]:
    """The words, and every file of the tree that is checked."""
    with reading(path):
        content = tomllib.loads(path.read_text(encoding="utf-8"))
    words = [
        Word(
            re.compile(rf"\b(?:{word['found']})\b", re.IGNORECASE),
            word["write"],
            re.compile(word["allowed"], re.IGNORECASE) if "allowed" in word else None,
        )
        for word in content["word"]
    ]
    left_out = {ROOT / name for name in content["except"]}
    files = [
        path
        for folder in (".", *content["folders"])
        for path in sorted((ROOT / folder).glob("*" if folder == "." else "**/*"))
        if (path.suffix in SUFFIXES or path.name == "CMakeLists.txt") and path.is_file()
        and path not in left_out and "build" not in path.relative_to(ROOT).parts
    ]
    return words, files


def faults_of(path: Path, words: list[Word]) -> list[str]:
    name = str(path.relative_to(ROOT)) if path.is_relative_to(ROOT) else str(path)
    with reading(path):
        text = path.read_text(encoding="utf-8")
    faults = []
    for piece in pieces(path, text):
        if piece.kind == "messages" and " " not in piece.text.strip():
            continue  # a text without a blank is a name
        # Unchecked text becomes as many other characters, so that lines can be counted.
        checked = MARK.sub(lambda mark: " " * len(mark[0]), piece.text)
        checked = CODE.sub(lambda code: re.sub(r"[^\n]", "~", code[0]), checked)
        flat = re.sub(r"\s", " ", checked)
        for word in words:
            for match in re.finditer(word.found.pattern.replace(" ", r"\s+"), flat, re.IGNORECASE):
                around = flat[max(0, match.start() - 40) : match.end() + 40]
                if word.allowed and any(
                    allowed.start() <= match.start() - max(0, match.start() - 40) < allowed.end()
                    for allowed in word.allowed.finditer(re.sub(r"\s", " ", around))
                ):
                    continue
                line = piece.line + checked.count("\n", 0, match.start())
                faults.append((line, f"{name}:{line}: found \"{' '.join(match[0].split())}\", write {word.write}"))
    return [text for _, text in sorted(faults)]


def check(files: list[Path], words: list[Word]) -> list[str]:
    return [fault for path in sorted(files) for fault in faults_of(path, words)]


@script
def main(arguments: list[str]) -> int:
    parser = parser_for(None, __doc__)
    parser.add_argument("files", nargs="*", type=path_argument, help="these files, all of their text")
    options = parser.parse_args(arguments)
    words, files = read_list(LIST)
    faults = check([path.resolve() for path in options.files] or files, words)
    print("".join(fault + "\n" for fault in faults), end="")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
