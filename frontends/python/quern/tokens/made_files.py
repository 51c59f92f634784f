"""The files of one `quern-tools tokenize`. meta.json lists them with their checksums; a later one replaces only these."""

import contextlib
import fcntl
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import xxhash

from quern.base.fault import RESOURCES, Fault, reading, writing
from quern.base.json_shape import TEXT, checked, parse
from quern.tokens.template_files import TEMPLATES_FOLDER
from quern.tokens.token_file import HEADER

META = "meta.json"
BESIDE_TOKENIZER = (  # what a model has beside tokenizer.json for its texts, as far as it has it
    "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json", "tokenizer.model", "chat_template.jinja",
    "generation_config.json",
)
NAMES = ("train.tok", "val.tok", "tokenizer.json", *BESIDE_TOKENIZER)


def checksum(path: Path) -> str:
    """Of a token file only its header, which has the checksum of the rest."""
    with reading(path), open(path, "rb") as file:
        return xxhash.xxh3_64_hexdigest(file.read(HEADER.size if path.suffix == ".tok" else -1))


def names_in(folder: Path) -> list[str]:
    """Of the files that tokenize writes, those that are there, but for meta.json."""
    templates = sorted((folder / TEMPLATES_FOLDER).glob("*"))
    return [name for name in (*NAMES, *(str(path.relative_to(folder)) for path in templates))
            if os.path.lexists(folder / name)]


def checksums(folder: Path) -> dict[str, str]:
    return {name: checksum(folder / name) for name in names_in(folder)}


def listed(folder: Path) -> dict[str, str]:
    """The files that meta.json lists, and itself; none where there is none of ours."""
    path = folder / META
    try:
        with reading(path):
            made = checked(parse(path.read_bytes(), path), {"files": {"*": TEXT}}, path)
    except Fault:
        return {}
    return {**made["files"], META: checksum(path)}


def check_replaceable(folder: Path, copied: Mapping[str, bytes]) -> None:
    """A fault where a file has a name that tokenize writes, but was not made by it, or was changed since. `copied`:
    contents of files that may be there already, as where a model's own folder gets the tokens."""
    with writing(folder):
        there = [folder / name for name in (*names_in(folder), META) if os.path.lexists(folder / name)]
    own = listed(folder) if folder / META in there and (folder / META).is_file() else {}
    for path in there:
        name = str(path.relative_to(folder))
        if path.is_file() and (own.get(name) == checksum(path) or copied.get(name) == path.read_bytes()):
            continue
        raise Fault(
            path, "is there already", "a file that tokenize did not make, or one changed since",
            "a folder without it, or with what an earlier tokenize left", "choose another folder, or remove it", RESOURCES,
        )


@contextlib.contextmanager
def alone_in(folder: Path) -> Iterator[None]:
    """A fault while another tokenize writes into the folder, for the files of two would mix."""
    with writing(folder):
        place = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(place, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(place)
        raise Fault(folder, "another tokenize writes there", advice="wait for it, or choose another folder",
                    code=RESOURCES) from None
    except OSError:  # a file system without locks
        pass
    try:
        yield
    finally:
        os.close(place)


def forget(folder: Path, written: Iterable[str]) -> None:
    """Removes what the new files do not replace. meta.json is written last, so while it is there the rest belongs
    together."""
    keep = set(written)
    for name in (META, *(name for name in names_in(folder) if name not in keep)):
        with writing(folder / name):
            (folder / name).unlink(missing_ok=True)
    with contextlib.suppress(OSError):  # not there, or not empty
        (folder / TEMPLATES_FOLDER).rmdir()
