"""The tokens that a tokenizer puts before each text, such as <s>: documents and prompts get the same.

Which ones is in its post-processor; add_bos_token of tokenizer_config.json overrides that, as in transformers.
"""

from typing import Any

from tokenizers import Tokenizer

from quern.tokens.encoding import tokenizing
from quern.tokens.tokenizer_config import spelled

PROBE = "a"


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
