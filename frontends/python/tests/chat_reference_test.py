"""Conversations under templates in the manner of well-known models: texts, tokens and the marks of {% generation %}
equal transformers', frozen in chat_reference/expected.json (scripts/transformers_checks/check_chat.py compares them)."""

import json
import re
import unittest
from pathlib import Path

import numpy as np
import xxhash
from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers

from folder_test_case import FolderTestCase
from quern.tokens.conversation_rows import read_conversations
from quern.tokens.conversations import MARK, ChatCorpus, load_template
from quern.tokens.encoding import load_tokenizer
from quern.tokens.tally import Tally

FOLDER = Path(__file__).with_name("chat_reference")
CONVERSATIONS = json.loads((FOLDER / "conversations.json").read_text(encoding="utf-8"))
TEMPLATES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(FOLDER.glob("*.jinja"))}
SPECIAL = ["<unk>", "<s>", "</s>", "<pad>", "[INST]", "[/INST]", *sorted(
    set(re.findall(r"<\|\w+\|>|<｜[^｜]*｜>|<(?:start|end)_of_\w+>", "".join(TEMPLATES.values()))))]
NOT_SPECIAL = ["<think>", "</think>", "<tool_call>"]
# Of named templates transformers takes tool_use where there are tools.
NAMED = {"named": {"default": "commandr", "tool_use": "commandr_tool", "rag": "commandr_rag"}}
CONFIG = {"tokenizer_class": "PreTrainedTokenizerFast", "bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>",
          "clean_up_tokenization_spaces": False}


def tokenizers() -> dict[str, Tokenizer]:
    """One of bytes, one that puts a space before each part of a text, one that puts it before the first."""
    byte_level = Tokenizer(models.BPE(
        {name: number for number, name in enumerate([*sorted(pre_tokenizers.ByteLevel.alphabet()), "<|", "|>", "Ġt"])},
        [("<", "|"), ("|", ">"), ("Ġ", "t")]))
    byte_level.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    byte_level.decoder = decoders.ByteLevel()
    found = {"bytes": byte_level}
    for name in ("legacy", "metaspace"):
        vocabulary = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", *"abcdefghijklmnopqrstuvwxyz<|>_[]/", "<|", "▁t"]
        tokenizer = Tokenizer(models.BPE({token: number for number, token in enumerate(vocabulary)},
                                         [("<", "|"), ("▁", "t")], unk_token="<unk>", fuse_unk=True, byte_fallback=True))
        if name == "legacy":
            tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
        else:
            tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
        found[name] = tokenizer
    for tokenizer in found.values():
        tokenizer.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in SPECIAL])
        tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in NOT_SPECIAL])
    return found


def write_model(folder: Path, tokenizer: Tokenizer, template: str) -> None:
    tokenizer.save(str(folder / "tokenizer.json"))
    names = NAMED.get(template)
    value = [{"name": name, "template": TEMPLATES[source]} for name, source in names.items()] if names else TEMPLATES[template]
    (folder / "tokenizer_config.json").write_text(json.dumps({**CONFIG, "chat_template": value}), encoding="utf-8")


def hash_of(tokens) -> str:
    return xxhash.xxh3_64_hexdigest(np.array(tokens, np.uint32).tobytes())


class ChatReferenceTest(FolderTestCase):
    def test_as_in_transformers(self):
        expected = json.loads((FOLDER / "expected.json").read_text(encoding="utf-8"))
        made = tokenizers()
        for template, conversations in expected.items():
            write_model(self.folder, made["bytes"], template)
            with load_template(load_tokenizer(self.folder / "tokenizer.json"), self.folder, None) as loaded:
                for kind, tokenizer in made.items():
                    self.check(template, kind, loaded, tokenizer, conversations)

    def check(self, template, kind, loaded, tokenizer, expected):
        rows = read_conversations([(name, CONVERSATIONS[name]) for name in expected], None, Tally())
        corpus = ChatCorpus(tokenizer, loaded, rows, 0, 0, False, Tally())
        examples = [(conversation.name, text) for conversation in corpus._first for text, _ in conversation.examples]
        found = {name: (text, tokens, mask)  # the last one is the whole conversation
                 for (name, text), (*_, tokens, mask) in zip(examples, [batch for batch in corpus if batch[1]], strict=True)}
        for name, want in expected.items():
            with self.subTest(template=template, conversation=name, tokenizer=kind):
                text, tokens, mask = found[name]
                self.assertEqual(text.replace(MARK, ""), want["text"])
                if kind in want["tokens"]:
                    self.assertEqual(hash_of(tokens), want["tokens"][kind])
                if "learned" in want:
                    self.assertEqual(hash_of(np.flatnonzero(mask)), want["learned"][kind])


if __name__ == "__main__":
    unittest.main()
