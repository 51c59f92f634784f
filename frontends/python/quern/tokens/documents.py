"""Documents and rows of a corpus: where they come from, and which split documents go to.

Everything streams but a .json file: a document is opened when read, and read a block at a time. docs/token-files.md
states the rule of the split.
"""

import codecs
import contextlib
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias

import xxhash

from quern.base.arguments import expanded
from quern.base.fault import Fault, importing, reading
from quern.base.files import POINTER, refuse_pointer
from quern.base.json_shape import parse
from quern.tokens.tally import Tally

MANY_DOCUMENTS = 100  # from here on, the hash of each alone says whether it is held out
LONG_DOCUMENT = 1 << 16  # bytes; few documents are cut in two if all are as long
READ_BYTES = 1 << 20


@dataclass(frozen=True)
class Document:
    """The bytes [begin, end) of something that opens as UTF-8 text."""

    name: str
    open: Callable[[], BinaryIO]
    end: int
    begin: int = 0

    def blocks(self) -> Iterator[bytes]:
        with reading(self.name), self.open() as file:
            file.seek(self.begin)
            left = self.end - self.begin
            while left > 0:
                block = file.read(min(left, READ_BYTES))
                if not block:
                    found = f"{left} bytes fewer than at first"
                    raise Fault(self.name, "ended early", found, advice="do not change it meanwhile")
                left -= len(block)
                yield block

    def text(self) -> Iterator[str]:
        decoder = codecs.getincrementaldecoder("utf-8")()
        try:
            for block in self.blocks():
                yield decoder.decode(block)
            decoder.decode(b"", final=True)
        except UnicodeDecodeError as error:
            raise Fault(self.name, "not UTF-8", error.reason, advice="convert it with iconv first") from None


def document_from_string(name: str, text: str) -> Document:
    try:
        data = text.encode()
    except UnicodeEncodeError as error:
        raise Fault(name, f"character {error.start} is not text", error.reason) from None
    return Document(name, lambda: io.BytesIO(data), len(data), behind_mark(data))


def behind_mark(begin: bytes) -> int:
    """Where text begins: a byte-order mark is no part of it."""
    return len(codecs.BOM_UTF8) if begin.startswith(codecs.BOM_UTF8) else 0


def read_text_file(path: Path) -> Document:
    with reading(path), open(path, "rb") as file:
        size, begin = path.stat().st_size, file.read(len(POINTER))
    refuse_pointer(path, begin)
    return Document(str(path), lambda: open(path, "rb"), size, behind_mark(begin))


Rows: TypeAlias = Iterator[tuple[str, Any]]  # (name for messages, value)


def read_json_lines(path: Path, columns: Sequence[str] | None = None) -> Rows:
    """Each line that is not empty, whatever the line ends: LF, CRLF or CR."""
    with reading(path), open(path, encoding="utf-8", errors="surrogateescape") as file:
        for number, text in enumerate(file, 1):
            line = text.encode("utf-8", "surrogateescape")
            if line.strip():
                yield f"{path}:{number}", parse(line, f"{path}:{number}")


def read_json_file(path: Path, columns: Sequence[str] | None = None) -> Rows:
    """The items of a list, which is read as a whole, or as of .jsonl."""
    with reading(path), open(path, "rb") as file:
        begin = file.read(READ_BYTES).removeprefix(codecs.BOM_UTF8).lstrip()
        if not begin.startswith(b"["):
            return read_json_lines(path)
        file.seek(0)
        rows = parse(file.read(), path)
    return ((f"{path}:item {number}", row) for number, row in enumerate(rows, 1))


def read_parquet(path: Path, columns: Sequence[str] | None = None) -> Rows:
    """columns: those that are read; one that is missing is a fault."""
    with importing("pyarrow"):
        import pyarrow.parquet
    with reading(path), open(path, "rb") as file:
        refuse_pointer(path, file.read(len(POINTER)))
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            for column in columns or ():
                if column not in names:
                    raise Fault(path, f"no column '{column}'", names, advice="name it with --text-field")
            rows = (row for batch in file.iter_batches(batch_size=1024, columns=columns) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield f"{path}:row {number}", row if columns else without_nulls(row)
    except (pyarrow.ArrowException, OSError) as error:
        raise Fault(path, "cannot be read as parquet", error) from None


def without_nulls(value: Any) -> Any:
    """Tables have null for each key that other rows have."""
    if isinstance(value, dict):
        return {key: without_nulls(item) for key, item in value.items() if item is not None}
    return [without_nulls(item) for item in value] if isinstance(value, list) else value


READERS = {".jsonl": read_json_lines, ".json": read_json_file, ".parquet": read_parquet}
TEXT = ".txt"
NOT_IN_FOLDERS = ".json"  # where it rather is a program's than a text


def document_from_row(name: str, row: Any, field: str) -> Document:
    if isinstance(row, dict) and isinstance(row.get(field), str):
        return document_from_string(name, row[field])
    if not isinstance(row, dict):
        found: object = type(row).__name__
    elif field in row:
        found = "null" if row[field] is None else type(row[field]).__name__
    else:
        found = sorted(row)
    raise Fault(name, f"no text in field '{field}'", found, advice="name the field with --text-field")


def find_files(paths: Iterable[str], kinds: Sequence[str], tally: Tally) -> list[Path]:
    """The files behind `paths`, whose suffixes are among `kinds`; folders are searched and sorted, and files passed
    over in them is counted."""
    files: list[Path] = []
    for path in map(expanded, paths):
        found = files_below(path, [kind for kind in kinds if kind != NOT_IN_FOLDERS], tally) if path.is_dir() else [path]
        if not found:
            raise Fault(path, "nothing to read in this folder", expected=f"{', '.join(kinds)} files")
        files += found
    for path in files:
        if path.suffix.lower() not in kinds:
            raise Fault(path, "unknown kind of file", path.suffix or "no suffix", ", ".join(kinds))
        if not path.is_file():
            raise Fault(path, "no such file")
    return files


def is_hidden(name: str) -> bool:
    return name.startswith(".")


def files_below(folder: Path, kinds: Sequence[str], tally: Tally) -> list[Path]:
    """Links to folders are followed, to each folder once; hidden names, which begin with a dot, are passed over."""

    def refuse(error: OSError) -> None:
        raise error

    found, seen = [], {os.path.realpath(folder)}
    with reading(folder):
        for place, folders, names in os.walk(folder, onerror=refuse, followlinks=True):
            for name in sorted(name for name in folders + names if is_hidden(name)):
                tally.add("hidden files and folders passed over, whose names begin with a dot", str(Path(place, name)))
            folders[:] = [name for name in folders
                          if not is_hidden(name) and os.path.realpath(Path(place, name)) not in seen]
            seen.update(os.path.realpath(Path(place, name)) for name in folders)
            found += [Path(place, name) for name in names if not is_hidden(name)]
    once: dict[str, Path] = {}
    for path in sorted(found, key=lambda path: (path.is_symlink(), path)):
        if (other := once.setdefault(os.path.realpath(path), path)) != path:
            tally.add("links passed over, whose files are read under other names", f"{path}, {other}")
    found = list(once.values())
    for path in sorted(found):
        if path.suffix.lower() not in kinds:
            kind = path.suffix.lower() or "no suffix"
            tally.add(f"files passed over, which are of another kind ({kind}) than {', '.join(kinds)}", str(path))
    return sorted(path for path in found if path.suffix.lower() in kinds)


def read_documents(files: Sequence[Path], field: str) -> Iterator[Document]:
    for path in files:
        if path.suffix.lower() == TEXT:
            yield read_text_file(path)
            continue
        for name, row in READERS[path.suffix.lower()](path, [field]):
            yield document_from_row(name, row, field)


def read_rows(files: Sequence[Path]) -> Rows:
    return itertools.chain.from_iterable(READERS[path.suffix.lower()](path) for path in files)


def read_dataset(name: str, subset: str | None, split: str) -> Rows:
    with importing("datasets"):
        import datasets
    with dataset_faults(name, subset, split):
        for number, row in enumerate(datasets.load_dataset(name, subset, split=split, streaming=True)):
            yield f"{name}:{number}", row


@contextlib.contextmanager
def dataset_faults(name: str, subset: str | None, split: str) -> Iterator[None]:
    """The library's own errors are of many kinds, from a name that it does not know to a connection that broke."""
    try:
        yield
    except Fault:
        raise
    except Exception as error:
        advice = f"check the name, --subset ({subset or 'none'}), --split ({split}) and the network"
        raise Fault(f"dataset {name}", "cannot be read", f"{type(error).__name__}: {error}", "", advice) from error


def held_out_of(count: int, fraction: float) -> int:
    """How many of few documents go to validation: at least one, unless none are wanted or there is no other."""
    return min(max(1, round(count * fraction)), count - 1) if fraction else 0


class Split:
    """Assigns a corpus to "train" and "val"; iterate it as often as needed for (split, Document). The last iteration
    counts, in `tally`, what it left out or cut."""

    def __init__(self, read_documents: Callable[[], Iterator[Document]], val_fraction: float) -> None:
        self._read_documents = read_documents
        self._fraction = val_fraction
        first = list(itertools.islice(self._not_empty(), MANY_DOCUMENTS))
        self._few: set[int] | None = None  # which are held out, if there are few
        long = all(document.end - document.begin >= LONG_DOCUMENT for document in first)
        self.mode = "documents"
        if len(first) < MANY_DOCUMENTS and val_fraction and (long or len(first) == 1):
            self.mode = "blocks"
        elif len(first) < MANY_DOCUMENTS:
            by_hash = sorted(range(len(first)), key=lambda index: (_hash_fraction(first[index]), index))
            self._few = set(by_hash[: held_out_of(len(first), val_fraction)])

    def _not_empty(self) -> Iterator[Document]:
        self.tally = Tally()
        for document in self._read_documents():
            if document.begin:
                self.tally.add("byte-order marks left out, at the beginning of documents", document.name)
            if document.begin < document.end:
                yield document
            else:
                self.tally.add("empty documents left out", document.name)

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        for index, document in enumerate(self._not_empty()):
            if self.mode == "blocks":
                cut = _block_cut(document, self._fraction)
                self.tally.add("documents cut in two, whose ends are held out", document.name)
                yield "train", replace(document, end=cut)
                yield "val", replace(document, begin=cut)
            elif self._few is not None:
                yield ("val" if index in self._few else "train"), document
            else:
                yield ("val" if _hash_fraction(document) < self._fraction else "train"), document


def _hash_fraction(document: Document) -> float:
    hasher = xxhash.xxh3_64()
    for block in document.blocks():
        hasher.update(block)
    return float(hasher.intdigest() / 2**64)


def _block_cut(document: Document, fraction: float) -> int:
    """Where the last `fraction` of a document starts: at a paragraph, else a line, a word, a character."""
    target = document.begin + int((document.end - document.begin) * (1 - fraction))
    with document.open() as file:
        file.seek(target)
        window = file.read(READ_BYTES)
    for boundary in (rb"\n\s*\n", rb"\n", rb"\s(?=\S)", rb"(?=[^\x80-\xbf])"):
        found = re.search(boundary, window)
        if found and target + found.end() < document.end:
            return target + found.end()
    return document.end
