"""Conversations to masked examples, with the tokenizer's chat template: only the assistant's turns are learned.

docs/token-files.md states the rules.
"""

import itertools
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from tokenizers import Tokenizer, processors

from quern.base.fault import Fault, reading, starting
from quern.base.json_shape import parse
from quern.tokens import chat_template
from quern.tokens.documents import MANY_DOCUMENTS, document_from_string, read_json_rows
from quern.tokens.encoding import tokenizing
from quern.tokens.token_file import Array

Item = TypeVar("Item")

BATCH_CONVERSATIONS = 512
DEEPEST = 64  # levels of lists and objects in a message


@dataclass(frozen=True)
class Conversation:
    name: str  # file:line, for messages
    messages: list[dict[str, Any]]


def read_conversations(files: Sequence[Path], field: str) -> Iterator[Conversation]:
    for path in files:
        if path.suffix != ".jsonl":
            expected = f"an object with '{field}' a line"
            raise Fault(path, "conversations come from .jsonl files", path.suffix, expected)
        for name, row in read_json_rows(path):
            yield Conversation(name, messages_of(name, row, field))


def messages_of(name: str, row: Any, field: str) -> list[dict[str, Any]]:
    messages: Any = row.get(field) if isinstance(row, dict) else None
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    )
    if not good:
        found: object = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise Fault(name, f"no list of messages with role and content in field '{field}'", found)
    if too_deep(messages):
        raise Fault(name, "nested too deeply", expected=f"at most {DEEPEST} levels of lists and objects")
    if not any(message["role"] == "assistant" for message in messages):
        raise Fault(name, "no message with role 'assistant'", advice="leave it out; there is nothing to learn")
    checked: list[dict[str, Any]] = messages
    return checked


def too_deep(value: object) -> bool:
    level = [value]
    for _ in range(DEEPEST + 1):
        level = [item for part in level if isinstance(part, dict | list)
                 for item in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return False
    return True


class ConversationSplit:
    """Assigns conversations to "train" and "val": by the hash of what they say, or, if few, the last ones to val."""

    mode = "conversations"

    def __init__(self, read: Callable[[], Iterator[Conversation]], fraction: float) -> None:
        self._read = read
        self._fraction = fraction
        count = sum(1 for _ in itertools.islice(read(), MANY_DOCUMENTS))
        self._first_val = None if count == MANY_DOCUMENTS else count - max(1, round(count * fraction))

    def __iter__(self) -> Iterator[tuple[str, Conversation]]:
        for index, conversation in enumerate(self._read()):
            if self._first_val is None:
                text = json.dumps(conversation.messages, sort_keys=True, ensure_ascii=False)
                held_out = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) / 2**64 < self._fraction
            else:
                held_out = index >= self._first_val
            yield "val" if held_out else "train", conversation


class ChatTemplate:
    """A chat template, run in a process of its own (chat_template.py). A context manager."""

    def __init__(self, name: str, source: str, special_tokens: dict[str, str]) -> None:
        self.name = name
        with starting(sys.executable):
            self._process = subprocess.Popen(
                [sys.executable, "-P", chat_template.__file__, str(chat_template.SECONDS)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
        reply = self._ask({"source": source, "special": special_tokens}, name)
        if "refused" in reply:
            self.close()
            raise Fault(name, "not a usable chat template", reply["refused"])

    def __enter__(self) -> "ChatTemplate":
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self._process.kill()
        self._process.communicate()

    def _ask(self, request: dict[str, Any], where: str) -> dict[str, Any]:
        questions, answers = self._process.stdin, self._process.stdout
        assert questions and answers, "both are pipes"
        try:
            questions.write(json.dumps(request).encode() + b"\n")
            questions.flush()
            reply = answers.readline()
        except BrokenPipeError:
            reply = b""
        if reply:
            answer: dict[str, Any] = json.loads(reply)
            return answer
        code = self._process.wait()
        late = code == -signal.SIGALRM
        found = f"over {chat_template.SECONDS} seconds" if late else f"its process ended with {code}"
        what = "cannot be used" if where == self.name else f"{self.name} cannot be used"
        raise Fault(where, what, found, "an answer", "give another with --chat-template")

    def turns(self, conversation: Conversation) -> tuple[str, list[list[int]]]:
        """(text, [begin, end) of each of the assistant's turns in it, from behind its opening to the next turn)."""
        reply = self._ask({"messages": conversation.messages}, conversation.name)
        if "refused" in reply:
            raise Fault(conversation.name, f"{self.name} {reply['refused']}")
        document_from_string(conversation.name, reply["text"])  # refuses half characters
        return reply["text"], reply["spans"]


def load_template(tokenizer_path: str, template_path: str | None) -> ChatTemplate:
    """The template and its special tokens: from --chat-template, or from the tokenizer's folder."""
    folder = Path(tokenizer_path).parent
    config_path, beside = folder / "tokenizer_config.json", folder / "chat_template.jinja"
    config: Any = {}
    if config_path.is_file():
        with reading(config_path):
            config = parse(config_path.read_bytes(), config_path)
    if not isinstance(config, dict):
        raise Fault(config_path, "not a usable tokenizer_config.json", type(config).__name__, "an object")
    if template_path or beside.is_file():
        path = Path(template_path or beside)
        with reading(path):
            name, source = str(path), path.read_text(encoding="utf-8")  # type: str, Any
    else:
        name, source = f"the chat template of {config_path}", config.get("chat_template")
    if isinstance(source, list):  # several by name
        entries = [entry for entry in source if isinstance(entry, dict) and entry.get("name") == "default"]
        source = entries[0].get("template") if entries else None
    if not isinstance(source, str):
        raise Fault(config_path, "no chat_template", advice="name a file with one with --chat-template")
    special = {}
    for key in "bos_token", "eos_token", "pad_token", "unk_token":
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[key] = value
    return ChatTemplate(name, source, special)


def encode_conversations(
    tokenizer: Tokenizer, split: Iterable[tuple[str, Conversation]], template: ChatTemplate, separator: int, align: int,
    parse_special: bool,
) -> Iterator[tuple[str, int, int, Array, Array]]:
    """Yields (split name, conversations, bytes, tokens, mask) in the order of the conversations.

    align: no conversation crosses a multiple of that many tokens of its split, so that no row of a run with that
    sequence length cuts one; 0: one after another.
    """
    tokenizer.encode_special_tokens = False  # the template's own are tokens; those in a message are refused below
    tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets of white space as they are
    special = [token.content for token in tokenizer.get_added_tokens_decoder().values() if token.special]
    layouts = {name: Layout(separator, align) for name in ("train", "val")}
    for batch in batched(split, BATCH_CONVERSATIONS):
        rendered = []
        for _, conversation in batch:
            if not parse_special:
                refuse_special(conversation, special)
            rendered.append(template.turns(conversation))
        with tokenizing():
            encodings = tokenizer.encode_batch([text for text, _ in rendered], add_special_tokens=False)
        for (name, conversation), (text, spans), encoding in zip(batch, rendered, encodings, strict=True):
            tokens = np.array(encoding.ids, np.int64)
            begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
            mask = np.zeros(tokens.size, bool)
            for begin, end in spans:  # a token that holds the opening's last space too is the turn's
                mask |= (begins < end) & (ends > begin)
            tokens, mask = layouts[name].add(conversation.name, tokens, mask)
            yield name, 1, len(text.encode()), tokens, mask
    for name, layout in layouts.items():
        yield (name, 0, 0, *layout.finish())


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def refuse_special(conversation: Conversation, special: Sequence[str]) -> None:
    for message in conversation.messages:
        for token in special:
            if isinstance(message["content"], str) and token in message["content"]:
                what = f"a message spells the special token {token}, which would be taken for the template's"
                raise Fault(conversation.name, what, advice="leave it out, or let it count with --parse-special")


class Layout:
    """Where conversations of one split go in its file."""

    def __init__(self, separator: int, align: int) -> None:
        self._separator = separator
        self._align = align
        self._count = 0

    def add(self, name: str, tokens: Array, mask: Array) -> tuple[Array, Array]:
        """A conversation with what stands before and after it."""
        if np.any(tokens[:-1] == self._separator):
            what = f"the template puts the document separator, token {self._separator}, inside a conversation"
            raise Fault(name, what, advice="choose another with --separator")
        if self._separator >= 0 and (tokens.size == 0 or tokens[-1] != self._separator):
            tokens, mask = np.append(tokens, self._separator), np.append(mask, False)
        if self._align:
            tokens, mask = tokens[: self._align], mask[: self._align]
            left = -self._count % self._align
            if tokens.size > left:
                tokens = np.concatenate([np.full(left, self._separator), tokens])
                mask = np.concatenate([np.zeros(left, bool), mask])
        self._count += tokens.size
        return tokens, mask

    def finish(self) -> tuple[Array, Array]:
        """What fills the last row, and the one token behind it that a row's last target is."""
        left = -self._count % self._align + 1 if self._align and self._count else 0
        return np.full(left, self._separator, np.int64), np.zeros(left, bool)
