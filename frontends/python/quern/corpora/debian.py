"""English prose, documentation and dictionaries from Debian's packages, as .jsonl files for `quern-tools tokenize`.

    quern-tools corpus debian data/debian/text

71 packages of Debian 12's section main are downloaded (not installed, 600 MB) and become one .jsonl each, a document
a line, of about 32 KiB at most: longer files are cut between paragraphs, so that a share of the documents can be
held out. A paragraph is kept once over all packages (digits, case and punctuation do not tell paragraphs apart), and
no package gives more than its cap: generated listings and large manuals do not dominate.
The same packages give the same bytes; other versions of them give a slightly different corpus. 146 million characters,
some three minutes on two cores.
"""

import gzip
import hashlib
import json
import re
import string
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ProcessPoolExecutor
from html.parser import HTMLParser
from pathlib import Path

from quern.base.arguments import path_argument
from quern.base.fault import writing
from quern.base.files import replace_file
from quern.corpora.austen import NOVELS
from quern.corpora.debian_packages import download, unpack
from quern.corpora.r_objects import DataError, read_package

DOCUMENT_CHARACTERS = 32 << 10
LEAST_DOCUMENT, LEAST_PARAGRAPH = 400, 20  # characters
LETTERS = 0.55  # of the characters that are no spaces, at least: not tables of numbers, not other scripts
PACKAGE_CHARACTERS = 7 << 19
CAPS = {"dict-gcide": 12 << 20, "dict-wn": 6 << 20, "linux-doc-6.1": 8 << 20}

RUST_BOOKS = (
    "book", "edition-guide", "embedded-book", "nomicon", "reference", "rustc", "rustdoc", "unstable-book",
)

# Package: glob patterns below /usr/share. Where the sources of a manual are there (reStructuredText, pod), they
# are taken instead of its HTML: they lack parts generated from code.
SOURCES: dict[str, list[str]] = {
    # prose
    "r-cran-janeaustenr": [],
    "anarchism": ["doc/anarchism/html/*.html"],
    "debian-history": ["doc/debian-history/docs/*.en.html"],
    "fortunes": ["games/fortunes/*"],
    "fortune-anarchism": ["games/fortunes/*"],
    "crawl-common": ["crawl/dat/descript/*.txt", "crawl/dat/database/*.txt", "crawl/docs/**/*.txt"],
    # dictionaries
    "dict-gcide": ["dictd/*.index"],
    "dict-wn": ["dictd/*.index"],
    "dict-foldoc": ["dictd/*.index"],
    "dict-jargon": ["dictd/*.index"],
    "dict-devil": ["dictd/*.index"],
    "dict-vera": ["dictd/*.index"],
    # documentation
    "ada-reference-manual-2012": ["doc/ada-reference-manual-2012/aarm2012.html/*.html"],
    "apache2-doc": ["doc/apache2-doc/manual/en/**/*.html"],
    "aptitude-doc-en": ["doc/aptitude/**/*.html"],
    "bash-doc": ["doc/bash/*.html"],
    "bind9-doc": ["doc/bind9-doc/**/*.html"],
    "buildbot-doc": ["doc/buildbot/**/_sources/**/*.txt"],
    "c++-annotations-html": ["doc/**/*.html"],
    "cinder-doc": ["doc/cinder-doc/**/_sources/**/*.txt"],
    "debian-faq": ["doc/debian/FAQ/*.html"],
    "debian-handbook": ["doc/debian-handbook/html/en-US/*.html"],
    "debian-policy": ["doc/debian-policy/policy.html/*.html"],
    "debian-reference-en": ["debian-reference/*.html"],
    "debmake-doc": ["doc/debmake-doc/html/*.en.html"],
    "developers-reference": ["developers-reference/*.html"],
    "erlang-doc": ["doc/erlang-doc/doc/**/*.html", "doc/erlang-doc/lib/[!w]*/doc/html/*.html"],
    "exim4-doc-html": ["doc/exim4-doc-html/**/*.html"],
    "gimp-help-en": ["gimp/2.0/help/en/*.html"],
    "git-doc": ["doc/git-doc/**/*.txt"],
    "gnome-devel-docs": ["help/C/**/*.page", "help/C/**/*.docbook"],
    "gnome-user-docs": ["help/C/**/*.page"],
    "grass-doc": ["doc/grass-doc/html/*.html"],
    "harden-doc": ["doc/harden-doc/html/en-US/*.html"],
    "icinga2-doc": ["doc/icinga2/**/*.md.gz"],
    "installation-guide-amd64": ["doc/installation-guide-amd64/en/*.html"],
    "ironic-doc": ["doc/ironic-doc/**/_sources/**/*.txt"],
    "kicad-doc-en": ["doc/kicad/**/*.html"],
    "libreoffice-help-en-us": ["libreoffice/help/en-US/text/**/*.html"],
    "libstdc++-12-doc": ["doc/gcc-12-base/libstdc++/manual/**/*.html"],
    "libvirt-doc": ["doc/libvirt-doc/**/*.html"],
    "linux-doc-6.1": ["doc/linux-doc-6.1/Documentation/**/*.gz"],
    "llvm-14-doc": ["doc/llvm-14-doc/html/_sources/**/*.txt"],
    "maint-guide": ["doc/maint-guide/html/*.en.html"],
    "maxima-doc": ["maxima/*/doc/html/*.html"],
    "neutron-doc": ["doc/neutron-doc/**/_sources/**/*.txt"],
    "nova-doc": ["doc/nova-doc/**/_sources/**/*.txt"],
    "ntpsec-doc": ["doc/ntpsec-doc/**/*.html"],
    "octave-doc": ["doc/octave/**/*.html"],
    "perl-doc": ["perl/*/pod/*.pod"],
    "png-definitive-guide": ["doc/png-definitive-guide/**/*.html"],
    "postfix-doc": ["doc/postfix/html/*.html"],
    "postgis-doc": ["doc/postgis-doc/**/*.html"],
    "postgresql-doc-15": ["doc/postgresql-doc-15/html/*.html"],
    "povray-doc": ["doc/povray/html/*.html"],
    "python3.11-doc": ["doc/python3.11/html/_sources/**/*.txt"],
    "python-astropy-doc": ["doc/python-astropy-doc/html/_sources/**/*.txt"],
    "python-django-doc": ["doc/python-django-doc/html/**/*.html"],
    "python-sqlalchemy-doc": ["doc/python-sqlalchemy-doc/**/*.rst"],
    "python-sympy-doc": ["doc/python-sympy-doc/html/**/*.html"],
    "racket-doc": ["doc/racket/guide/*.html", "doc/racket/reference/*.html"],
    "renpy-doc": ["doc/renpy/**/*.html"],
    "rust-doc": [f"doc/rust-doc/html/{book}/**/*.html" for book in RUST_BOOKS],
    "shorewall-doc": ["doc/shorewall-doc/**/*.htm*"],
    "sphinx-doc": ["doc/sphinx-doc/html/_sources/**/*.txt"],
    "sqlite3-doc": ["doc/sqlite3/**/*.html"],
    "swi-prolog-doc": ["**/*.html"],
    "vim-runtime": ["vim/vim90/doc/*.txt"],
    "wireshark-doc": ["doc/wireshark/*chunked/*.html"],
    "xen-doc": ["doc/xen/**/*.html"],
    "zsh-doc": ["doc/zsh-doc/**/*.html"],
}

SKIPPED_TAGS = {"head", "script", "style", "nav", "template", "svg", "math", "info", "button", "select"}
SKIPPED_CLASSES = re.compile(r"sidebar|navigation|navheader|navfooter|related|toctree|headerlink|footer|breadcrumb")
# Never skipped for their class: the page itself (`<html class="sidebar-visible">`), and elements that never end.
UNSKIPPED_TAGS = {"html", "body", "main", "article"} | {
    "area", "base", "br", "col", "embed", "hr", "img", "input", "link", "meta", "source", "track", "wbr"
}
BLOCK_TAGS = set(
    "address article aside blockquote body caption center dd details div dl dt fieldset figcaption figure form h1 h2 "
    "h3 h4 h5 h6 header hr html li main ol p pre section summary table tbody tfoot thead title tr ul "
    "desc item list listing note page screen steps subtitle terms example "  # Mallard
    "para sect1 sect2 chapter listitem programlisting varlistentry".split()  # DocBook
)
# Removed before parsing, which is most of the time: the spans of coloured code above all.
INLINE_TAGS = re.compile(
    r"</?(?:span|a|abbr|b|cite|code|dfn|em|font|i|kbd|small|strong|sub|sup|tt|var)(?:\s[^<>]*)?>|<head\b.*?</head>",
    re.IGNORECASE | re.DOTALL,
)
PREFORMATTED_TAGS = {"pre", "screen", "programlisting"}


class ParagraphReader(HTMLParser):
    """The paragraphs of HTML, Mallard or DocBook, without navigation."""

    def __init__(self) -> None:
        super().__init__()
        self.paragraphs: list[str] = []
        self._parts: list[str] = []
        self._preformatted = 0
        self._skipped: str | None = None
        self._depth = 0

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if self._skipped:
            self._depth += tag == self._skipped
        elif tag in SKIPPED_TAGS or (
            tag not in UNSKIPPED_TAGS
            and any(name in ("class", "role") and value and SKIPPED_CLASSES.search(value) for name, value in attributes)
        ):
            self._skipped, self._depth = tag, 1
        else:
            self._boundary(tag, 1)

    def handle_endtag(self, tag: str) -> None:
        if not self._skipped:
            self._boundary(tag, -1)
        elif tag == self._skipped:
            self._depth -= 1
            if self._depth == 0:
                self._skipped = None

    def handle_startendtag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        if not self._skipped:
            self._boundary(tag, 0)

    def handle_data(self, data: str) -> None:
        if not self._skipped:
            self._parts.append(data)

    def close(self) -> None:
        super().close()
        self._flush()

    def _boundary(self, tag: str, step: int) -> None:
        if tag in BLOCK_TAGS:
            self._flush()
            if tag in PREFORMATTED_TAGS:
                self._preformatted = max(0, self._preformatted + step)
        elif tag in ("td", "th", "br"):
            self._parts.append("\n" if self._preformatted else " ")

    def _flush(self) -> None:
        text = "".join(self._parts)
        self._parts.clear()
        text = text.strip("\n") if self._preformatted else " ".join(text.split())
        if text.strip():
            self.paragraphs.append(text.replace("\u00b6", ""))


def read_html(text: str) -> list[str]:
    reader = ParagraphReader()
    reader.feed(INLINE_TAGS.sub("", text))
    reader.close()
    return reader.paragraphs


def read_plain(text: str) -> list[str]:
    return re.split(r"\n\s*\n", text.replace("\r", ""))


DIGITS = {c: i for i, c in enumerate(string.ascii_uppercase + string.ascii_lowercase + string.digits + "+/")}


def read_dictionary(index: Path) -> list[str]:
    """The entries of a dictd dictionary, whose index has lines `headword, place, length` in base 64 numbers."""

    def number(text: str) -> int:
        value = 0
        for c in text:
            value = 64 * value + DIGITS[c]
        return value

    path = index.with_suffix(".dict.dz")
    if not path.is_file():
        raise DataError(f"{index}: no {path.name} beside it")
    data = gzip.decompress(path.read_bytes())
    lines = (line.split("\t") for line in index.read_text(encoding="utf-8").splitlines())
    places = sorted({(number(at), number(size)) for word, at, size in lines if not word.startswith("00")})
    return [data[at : at + size].decode("utf-8", errors="replace").strip() for at, size in places]


def read_paragraphs(path: Path) -> list[str]:
    if path.suffix == ".index":
        return read_dictionary(path)
    data = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
    try:
        text = data.decode("utf-8")
    except UnicodeDecodeError:
        text = data.decode("latin-1")
    if path.parent.name == "fortunes":
        return text.split("\n%\n")
    html = re.search(r"\.(html?|page|docbook)$", path.name.removesuffix(".gz"))
    return read_html(text) if html else read_plain(text)


def is_text(paragraph: str) -> bool:
    visible = sum(len(word) for word in paragraph.split())
    letters = len(re.findall(r"[A-Za-z]", paragraph))
    return len(paragraph) >= LEAST_PARAGRAPH and letters >= LETTERS * visible


def read_files(root: Path, patterns: Iterable[str]) -> Iterator[list[str]]:
    """Lists of paragraphs, one list a file."""
    paths = {path for pattern in patterns for path in root.glob(f"usr/share/{pattern}")}
    for path in sorted(paths):
        if path.is_file() and not path.is_symlink() and path.suffix not in (".dat", ".u8"):
            yield [paragraph.rstrip() for paragraph in read_paragraphs(path) if is_text(paragraph)]


def read_source(package: str, deb: Path) -> list[list[str]]:
    with tempfile.TemporaryDirectory() as folder:
        unpack(deb, Path(folder), f"name a whole {package} in --debs")
        if package == "r-cran-janeaustenr":
            novels = read_package(Path(folder))
            return [[p for p in read_plain("\n".join(novels[name])) if is_text(p)] for name in NOVELS]
        return list(read_files(Path(folder), SOURCES[package]))


class Corpus:
    """Cuts files into documents, without the paragraphs that it has seen."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def documents(self, files: Iterable[list[str]]) -> Iterator[str]:
        for paragraphs in files:
            document: list[str] = []
            size = 0
            for paragraph in paragraphs:
                words = " ".join(re.findall("[a-z]+", paragraph.lower()))
                key = hashlib.blake2b(words.encode(), digest_size=12).digest()
                if key in self._seen:
                    continue
                self._seen.add(key)
                if document and size + len(paragraph) > DOCUMENT_CHARACTERS:
                    yield "\n\n".join(document)
                    document, size = [], 0
                document.append(paragraph)
                size += len(paragraph) + 2
            if size >= LEAST_DOCUMENT:
                yield "\n\n".join(document)

    def choose(self, files: Iterable[list[str]], cap: int) -> list[str]:
        """Documents in an order without meaning, up to `cap` characters."""
        total, chosen = 0, []
        for document in sorted(self.documents(files), key=lambda text: hashlib.blake2b(text.encode()).digest()):
            if total + len(document) <= cap:
                total += len(document)
                chosen.append(document)
        return chosen


def write_lines(path: Path, lines: Iterable[str]) -> None:
    replace_file(path, "".join(line + "\n" for line in lines).encode())


def fetch(packages: Iterable[str], folder: Path) -> dict[str, Path]:
    """The package files in `folder`, those that are not there downloaded."""
    with writing(folder):
        folder.mkdir(parents=True, exist_ok=True)
    missing = [package for package in packages if not any(folder.glob(f"{package}_*.deb"))]
    if missing:
        download(missing, folder)
    debs = {}
    for package in packages:
        found = sorted(folder.glob(f"{package}_*.deb"))
        if len(found) != 1:
            raise DataError(f"{folder}: {len(found)} files {package}_*.deb, expected one; remove the others")
        debs[package] = found[0]
    return debs


def extract(debs: Mapping[str, Path], out: Path) -> list[str]:
    """Writes the corpus; returns a line for each package."""
    with writing(out):
        out.mkdir(parents=True, exist_ok=True)
        for old in out.glob("*.jsonl"):
            old.unlink()
    corpus, total, digest = Corpus(), 0, hashlib.sha256()
    lines: list[str] = []
    with ProcessPoolExecutor() as pool:
        for package, files in zip(debs, pool.map(read_source, debs.keys(), debs.values())):
            documents = corpus.choose(files, CAPS.get(package, PACKAGE_CHARACTERS))
            if not documents:
                raise DataError(f"{debs[package].name}: no text at {SOURCES[package]}; has the package changed?")
            rows = [json.dumps({"text": text}, ensure_ascii=False) for text in documents]
            write_lines(out / f"{package}.jsonl", rows)
            size = sum(map(len, documents))
            total += size
            for row in rows:
                digest.update(row.encode())
            lines.append(f"{debs[package].stem}: {len(files):,} files, {len(rows):,} documents, {size:,} characters")
            print(lines[-1], flush=True)
    lines.append(f"total: {total:,} characters, SHA-256 {digest.hexdigest()}")
    print(lines[-1])
    return lines


def add_arguments(parser: ArgumentParser) -> None:
    parser.add_argument("out", type=path_argument, help="folder for one .jsonl a package, and sources.log, written last")
    parser.add_argument(
        "--debs", type=path_argument, help="folder that has, or gets, the package files (default: none kept)"
    )


def main(options: Namespace) -> None:
    finished = options.out / "sources.log"
    if finished.is_file():
        print(f"{finished}: the corpus is there already; remove it to make it again")
        return
    try:
        with tempfile.TemporaryDirectory() as folder:
            write_lines(finished, extract(fetch(SOURCES, options.debs or Path(folder)), options.out))
    except ValueError as error:
        raise DataError(error) from None
