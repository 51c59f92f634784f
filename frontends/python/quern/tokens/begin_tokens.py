"""The tokens that a tokenizer puts before each text, such as <s>: documents and prompts get the same.

Which ones is in its post-processor; add_bos_token of tokenizer_config.json overrides that, as in transformers.
"""

from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from quern.base.fault import Fault, reading
from quern.base.json_shape import parse
from quern.tokens.encoding import tokenizing

PROBE = "a"


def read_tokenizer_config(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json of a folder; empty when there is none."""
    path = folder / "tokenizer_config.json"
    if not path.is_file():
        return {}
    with reading(path):
        config = parse(path.read_bytes(), path)
    if not isinstance(config, dict):
        raise Fault(path, "not a usable tokenizer_config.json", type(config).__name__, "an object")
    return config


def spelled(token: Any) -> str | None:
    """A token of tokenizer_config.json: a text, or an object with its content."""
    token = token.get("content") if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def begin_tokens(tokenizer: Tokenizer, config: dict[str, Any]) -> list[int]:
    with tokenizing():
        bare, whole = tokenizer.encode(PROBE, add_special_tokens=False).ids, tokenizer.encode(PROBE).ids
    found = whole[: len(whole) - len(bare)]
    for count in range(len(found) + 1):  # what it puts behind a text is the separator's business
        if whole[count : count + len(bare)] == bare:
            found = whole[:count]
            break
    bos = tokenizer.token_to_id(spelled(config.get("bos_token")) or "")
    if bos is None or not isinstance(config.get("add_bos_token"), bool):
        return found
    if config["add_bos_token"]:
        return found if bos in found else [bos, *found]
    return [token for token in found if token != bos]
