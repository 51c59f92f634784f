"""Prompts as texts, for `quern.Run.generate`: encoded as `quern-tools generate` does it."""

from typing import Any

from quern.base.fault import CONFIG, Fault
from quern.driver.error import error_of
from quern.models.generate import encode, prompt_tokenizer
from quern.tokens.encoding import tokenizing


class PromptTokenizer:
    def __init__(self, folder: str, train: Any) -> None:
        """`folder` is checkpoint.tokenizer, and `train` the run's token files, whose documents show how a text begins."""
        try:
            if not folder:
                raise Fault("checkpoint.tokenizer", "none for prompts that are texts", "none", "a folder",
                            "set it in the config, or give tokens", CONFIG)
            self._tokenizer, self._begin = prompt_tokenizer(folder, train)
        except Fault as fault:
            raise error_of(fault) from None

    def encode(self, text: str) -> list[int]:
        try:
            tokens: list[int] = encode(self._tokenizer, self._begin, [text])[0]["tokens"]
        except Fault as fault:
            raise error_of(fault) from None
        return tokens

    def decode(self, tokens: list[int]) -> str:
        with tokenizing():
            text: str = self._tokenizer.decode(tokens)
        return text
