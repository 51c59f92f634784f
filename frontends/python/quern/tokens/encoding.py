"""Text to tokens with a Hugging Face tokenizer: train or load one, cut long text, encode a corpus.

docs/token-files.md states the rule of the cuts.
"""

import contextlib
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from quern.base.fault import Fault, is_panic, reading
from quern.base.files import refuse_pointer
from quern.tokens.documents import Document
from quern.tokens.token_file import MAX_VOCABULARY, Array
from quern.tokens.tokenizer_config import add_tokens

TRAINED_SEPARATOR = "<|endoftext|>"
KNOWN_SEPARATORS = (TRAINED_SEPARATOR, "<|end_of_text|>", "</s>", "<eos>")
WORDS = (  # as Qwen2 splits text before BPE; Llama 3 differs in digits only
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BATCH_PIECES, BATCH_CHARACTERS = 4096, 1 << 21
PIECE_CHARACTERS = 1 << 16
LOOK_BACK, LOOK_AHEAD = 4096, 256  # characters around a cut that the pre-tokenizer sees
CUTS_TRIED = 16


def train_bpe(size: int, split: Iterable[tuple[str, Document]]) -> Tokenizer:
    """A byte-level BPE over Qwen2's words; it gives back every text exactly."""

    def words() -> Any:
        return pre_tokenizers.Sequence(
            [
                pre_tokenizers.Split(Regex(WORDS), "isolated"),
                pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
            ]
        )

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = words()
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size,
        special_tokens=[TRAINED_SEPARATOR],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    cut_words = words()  # not tokenizer.pre_tokenizer: training locks the tokenizer while it waits for pieces
    texts = (document.text() for name, document in split if name == "train")
    with tokenizing("--train-bpe"):
        pieces = (piece for text in texts for piece in split_into_pieces(text, cut_words))
        tokenizer.train_from_iterator(pieces, trainer)
    return tokenizer


@contextlib.contextmanager
def tokenizing(where: object = "the tokenizer", what: str = "failed") -> Iterator[None]:
    """A fault of the tokenizers library inside, which raises bare Exception, or panics."""
    try:
        yield
    except BaseException as error:
        if isinstance(error, Fault) or not isinstance(error, Exception) and not is_panic(error):
            raise
        raise Fault(where, what, error, advice="check tokenizer.json, or use another") from None


def tokenizer_file(path: Path) -> Path:
    """Of a tokenizer.json, or of the folder that has it."""
    return path / "tokenizer.json" if path.is_dir() else path


def load_tokenizer(path: str | Path) -> Tokenizer:
    with reading(path):
        if Path(path).exists() and not Path(path).is_file():
            raise Fault(path, "not a file", expected="a tokenizer.json")
        text = Path(path).read_text(encoding="utf-8-sig")
        refuse_pointer(Path(path), text[:64].encode())
    with tokenizing(path, "not a usable tokenizer.json"):
        tokenizer = Tokenizer.from_str(text)
        add_tokens(tokenizer, Path(path).parent)
    return tokenizer


def vocabulary_size(tokenizer: Tokenizer, where: object) -> int:
    """One more than the largest token id, of which some may be unused."""
    size = max(tokenizer.get_vocab().values(), default=-1) + 1
    if not 1 <= size <= MAX_VOCABULARY:
        found = f"ids up to {size - 1}" if size else "no tokens"
        raise Fault(where, "unusable vocabulary", found, f"ids from 0 to at most {MAX_VOCABULARY - 1}")
    return size


def separator_id(tokenizer: Tokenizer, spelling: str | None) -> int:
    if spelling == "none":
        return -1
    for candidate in [spelling] if spelling else KNOWN_SEPARATORS:
        token = tokenizer.token_to_id(candidate)
        if token is not None:
            return token
    what = f"the tokenizer has no {spelling or ' or '.join(KNOWN_SEPARATORS)}"
    raise Fault("--separator", what, advice="name its end-of-document token, or 'none'")


def split_into_pieces(text: Iterable[str], pre_tokenizer: Any) -> Iterator[str]:
    """Pieces of a streamed text that encode, one by one, into the tokens of the whole."""
    buffer = ""
    for more in text:
        buffer += more
        while len(buffer) >= PIECE_CHARACTERS + LOOK_AHEAD:
            cut = _piece_cut(buffer, pre_tokenizer)
            yield buffer[:cut]
            buffer = buffer[cut:]
    if buffer:
        yield buffer


def _piece_cut(text: str, pre_tokenizer: Any) -> int:
    """A place a little before PIECE_CHARACTERS, if possible after a paragraph, where cutting changes no word."""
    start = PIECE_CHARACTERS - LOOK_BACK
    window = text[start : PIECE_CHARACTERS + LOOK_AHEAD]

    def split_words(text: str) -> list[tuple[str, tuple[int, int]]]:
        if pre_tokenizer is None:
            return [(match.group(), match.span()) for match in re.finditer(r"\S+\s*|\s+", text)]
        found: list[tuple[str, tuple[int, int]]] = pre_tokenizer.pre_tokenize_str(text)
        return found

    def words(text: str) -> list[str]:
        return [word for word, _ in split_words(text)]

    cuts = [begin for _, (begin, _) in split_words(window) if 0 < begin <= LOOK_BACK]
    cuts.sort(key=lambda cut: ("\n\n" in window[max(cut - 2, 0) : cut + 1], cut), reverse=True)
    for cut in cuts[:CUTS_TRIED]:
        # A word may look ahead: " a\n\nb" has the words "\n" and "\n" in GPT-2's view, and "\n\n" if cut before b.
        if words(window[:cut]) + words(window[cut:]) == words(window):
            return start + cut
    return start + (cuts or [LOOK_BACK])[0]


@dataclass(frozen=True)
class Piece:
    split: str
    text: str
    begins: bool  # a document
    ends: bool


def encode(
    tokenizer: Tokenizer, split: Iterable[tuple[str, Document]], separator: int, begin: Sequence[int] = (),
    look_at: Callable[[Document, str], None] = lambda document, text: None,
) -> Iterator[tuple[str, int, int, Array]]:
    """Yields (split name, documents, bytes, tokens), bounded batches of the corpus in its order. Each document gets the
    tokens `begin` before it and the separator behind it. `look_at` is called with each piece of a text."""
    behind = [separator] if separator >= 0 else []

    def encode_batch(batch: list[Piece]) -> Iterator[tuple[str, int, int, Array]]:
        with tokenizing():
            encodings = tokenizer.encode_batch_fast([piece.text for piece in batch], add_special_tokens=False)
        for name in sorted({piece.split for piece in batch}):
            rows, documents, size = [], 0, 0
            for piece, encoding in zip(batch, encodings, strict=True):
                if piece.split != name:
                    continue
                rows += [np.array(ids, np.uint32)
                         for ids in (begin if piece.begins else (), encoding.ids, behind if piece.ends else ())]
                size += len(piece.text.encode())
                documents += piece.ends
            yield name, documents, size, np.concatenate(rows)

    batch: list[Piece] = []
    characters = 0
    for name, document in split:
        begins = True
        for text in split_into_pieces(document.text(), tokenizer.pre_tokenizer):
            if len(batch) >= BATCH_PIECES or characters >= BATCH_CHARACTERS:
                yield from encode_batch(batch)
                batch, characters = [], 0
            batch.append(Piece(name, text, begins, False))
            characters += len(text)
            begins = False
            look_at(document, text)
        if document.begin < document.end:
            batch[-1] = replace(batch[-1], ends=True)
    if batch:
        yield from encode_batch(batch)
