"""Documents of a corpus: where they come from and which split they go to.

Everything streams: a document is opened when read, and read a block at a time. docs/token-files.md
states the rule of the split.
"""

import codecs
import io
import itertools
import os
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import xxhash

from quern.base.fault import Fault, importing, reading
from quern.base.json_shape import parse

MANY_DOCUMENTS = 100  # from here on, whole documents are held out
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
    return Document(name, lambda: io.BytesIO(data), len(data))


def read_text_file(path: Path, field: str) -> Iterator[Document]:
    with reading(path):
        size = path.stat().st_size
    yield Document(str(path), lambda: open(path, "rb"), size)


def read_json_rows(path: Path) -> Iterator[tuple[str, Any]]:
    """(name, value) of each line that is not empty."""
    with reading(path), open(path, "rb") as file:
        for number, line in enumerate(file, 1):
            if line.strip():
                yield f"{path}:{number}", parse(line, f"{path}:{number}")


def read_json_lines(path: Path, field: str) -> Iterator[Document]:
    for name, row in read_json_rows(path):
        yield document_from_row(name, row, field)


def read_parquet(path: Path, field: str) -> Iterator[Document]:
    with importing("pyarrow"):
        import pyarrow.parquet
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            names = file.schema_arrow.names
            if field not in names:
                raise Fault(path, f"no column '{field}'", names, advice="name it with --text-field")
            rows = (row for batch in file.iter_batches(batch_size=1024, columns=[field]) for row in batch.to_pylist())
            for number, row in enumerate(rows, 1):
                yield document_from_row(f"{path}:row {number}", row, field)
    except (pyarrow.ArrowException, OSError) as error:
        raise Fault(path, "cannot be read as parquet", error) from None


READERS = {".txt": read_text_file, ".jsonl": read_json_lines, ".parquet": read_parquet}


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


def find_files(paths: Iterable[str]) -> list[Path]:
    """The files behind `paths`, folders searched and sorted."""
    files: list[Path] = []
    for path in map(Path, paths):
        found = files_below(path) if path.is_dir() else [path]
        if not found:
            raise Fault(path, "nothing to read in this folder", expected=f"{', '.join(READERS)} files")
        files += found
    for path in files:
        if path.suffix not in READERS:
            raise Fault(path, "unknown kind of file", path.suffix, ", ".join(READERS))
        if not path.is_file():
            raise Fault(path, "no such file")
    return files


def files_below(folder: Path) -> list[Path]:
    def refuse(error: OSError) -> None:
        raise error

    with reading(folder):
        found = [Path(place, name) for place, _, names in os.walk(folder, onerror=refuse) for name in names]
    return sorted(path for path in found if path.suffix in READERS)


def read_files(files: Sequence[Path], field: str) -> Iterator[Document]:
    return itertools.chain.from_iterable(READERS[path.suffix](path, field) for path in files)


def read_dataset(name: str, subset: str | None, split: str, field: str) -> Iterator[Document]:
    with importing("datasets"):
        import datasets
    # The library's own errors are of many kinds, from a name that it does not know to a connection that broke.
    try:
        for number, row in enumerate(datasets.load_dataset(name, subset, split=split, streaming=True)):
            yield document_from_row(f"{name}:{number}", row, field)
    except Fault:
        raise
    except Exception as error:
        advice = f"check the name, --subset ({subset or 'none'}), --split ({split}) and the network"
        raise Fault(f"dataset {name}", "cannot be read", f"{type(error).__name__}: {error}", "", advice) from error


class Split:
    """Assigns a corpus to "train" and "val"; iterate it as often as needed for (split, Document)."""

    def __init__(self, read_documents: Callable[[], Iterator[Document]], val_fraction: float) -> None:
        self._read_documents = read_documents
        self._fraction = val_fraction
        count = sum(1 for _ in itertools.islice(read_documents(), MANY_DOCUMENTS))
        self.mode = "documents" if count == MANY_DOCUMENTS else "blocks"

    def __iter__(self) -> Iterator[tuple[str, Document]]:
        for document in self._read_documents():
            if self.mode == "documents":
                yield ("val" if _hash_fraction(document) < self._fraction else "train"), document
            else:
                cut = _block_cut(document, self._fraction)
                yield "train", replace(document, end=cut)
                yield "val", replace(document, begin=cut)


def _hash_fraction(document: Document) -> float:
    hasher = xxhash.xxh3_64()
    for block in document.blocks():
        hasher.update(block)
    return float(hasher.intdigest() / 2**64)


def _block_cut(document: Document, fraction: float) -> int:
    """Where the last `fraction` of a document starts: at a paragraph, else a line, else a character."""
    target = int(document.end * (1 - fraction))
    with document.open() as file:
        file.seek(target)
        window = file.read(READ_BYTES)
    for boundary in (rb"\n\s*\n", rb"\n", rb"(?=[^\x80-\xbf])"):
        found = re.search(boundary, window)
        if found and target + found.end() < document.end:
            return target + found.end()
    return document.end
