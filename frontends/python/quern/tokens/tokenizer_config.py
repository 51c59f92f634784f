"""tokenizer_config.json beside a tokenizer.json, as transformers takes it: which tokens have a role, and more of them."""

import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer

from quern.base.fault import Fault, reading
from quern.base.json_shape import parse

FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


def read_object(path: Path) -> dict[str, Any]:
    """Empty when there is no such file."""
    if not path.is_file():
        return {}
    with reading(path):
        value = parse(path.read_bytes(), path)
    if not isinstance(value, dict):
        raise Fault(path, f"not a usable {path.name}", type(value).__name__, "an object")
    return value


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    return read_object(folder / "tokenizer_config.json")


def spelled(token: Any) -> str | None:
    """A token of tokenizer_config.json: a text, or an object with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def named_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """bos_token and the like, as a template sees them."""
    found = {**read_object(folder / "special_tokens_map.json"),
             **{key: value for key, value in config.items() if value is not None}}
    more = found.get("extra_special_tokens")
    found.update(more if isinstance(more, dict) else {})
    special: dict[str, Any] = {key: text for key, value in found.items()
                               if key.endswith("_token") and (text := spelled(value)) is not None}
    more = found.get("additional_special_tokens")
    if isinstance(more, list):
        special["additional_special_tokens"] = [text for text in map(spelled, more) if text is not None]
    return special


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special and len(token.content.strip()) > 1]


def any_of(tokens: Iterable[str]) -> re.Pattern[str]:
    """Of tokens that begin alike, the longest; grouped by that beginning, which few places of a text have."""
    groups: dict[str, list[str]] = {}
    for token in sorted(tokens, key=len, reverse=True):
        groups.setdefault(token[:2], []).append(re.escape(token[2:]))
    return re.compile("|".join(f"{re.escape(begin)}(?:{'|'.join(rest)})" for begin, rest in groups.items()) or "(?!)")


def spelled_by(texts: str, parsed: bool) -> str:
    """What a tally calls special tokens that texts spell."""
    kept = "read as tokens" if parsed else "kept as text; --parse-special reads them as tokens"
    return f"special tokens that {texts} spell, {kept}"


def add_tokens(tokenizer: Tokenizer, folder: Path) -> None:
    """Adds what the config states and tokenizer.json does not: tokens, and which are special."""
    config = read_tokenizer_config(folder)
    named = named_special_tokens(folder, config)
    stated = config.get("added_tokens_decoder")
    entries = sorted(stated.items(), key=lambda item: (len(item[0]), item[0])) if isinstance(stated, dict) else []
    tokens = [AddedToken(entry["content"], **{flag: entry.get(flag) is True for flag in FLAGS})
              for _, entry in entries if isinstance(entry, dict) and spelled(entry)]
    more = config.get("extra_special_tokens")
    spellings = [*(text for text in named.values() if isinstance(text, str)), *named.get("additional_special_tokens", ()),
                 *(map(spelled, more) if isinstance(more, list) else ())]
    tokens += [AddedToken(text, special=True, normalized=False) for text in spellings if text]
    known = {token.content: token for token in tokenizer.get_added_tokens_decoder().values()}
    for token in tokens:
        before = known.get(token.content)
        if before and (before.special or not token.special):
            continue
        if before:
            token = AddedToken(token.content, **{flag: getattr(before, flag) for flag in FLAGS} | {"special": True})
        known[token.content] = token
        if token.special:
            tokenizer.add_special_tokens([token])
        else:
            tokenizer.add_tokens([token])
