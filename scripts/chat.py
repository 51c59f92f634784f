"""Conversations to masked examples, with the tokenizer's chat template: only the assistant's turns are learned.

docs/token-files.md states the rules; tokenize.py --chat is the command line.
"""

import itertools
import json
from dataclasses import dataclass
from pathlib import Path

import jinja2
import jinja2.ext
import jinja2.sandbox
import numpy as np
import xxhash
from corpus import MANY_DOCUMENTS, InputError, read_json_rows
from tokenizers import processors

BATCH_CONVERSATIONS = 512


@dataclass(frozen=True)
class Conversation:
    name: str  # file:line, for messages
    messages: list[dict]


def read_conversations(files, field):
    for path in files:
        if path.suffix != ".jsonl":
            raise InputError(f"{path}: conversations come from .jsonl files, an object with '{field}' a line")
        for name, row in read_json_rows(path):
            yield Conversation(name, messages_of(name, row, field))


def messages_of(name, row, field):
    messages = row.get(field) if isinstance(row, dict) else None
    good = isinstance(messages, list) and all(
        isinstance(message, dict) and isinstance(message.get("role"), str) and "content" in message
        for message in messages
    )
    if not good:
        found = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise InputError(f"{name}: no list of messages with role and content in field '{field}', found {found}")
    if not any(message["role"] == "assistant" for message in messages):
        raise InputError(f"{name}: no message with role 'assistant', so nothing to learn")
    return messages


class ConversationSplit:
    """Assigns conversations to "train" and "val": by the hash of what they say, or, if few, the last ones to val."""

    mode = "conversations"

    def __init__(self, read, fraction):
        self._read = read
        self._fraction = fraction
        count = sum(1 for _ in itertools.islice(read(), MANY_DOCUMENTS))
        self._first_val = None if count == MANY_DOCUMENTS else count - max(1, round(count * fraction))

    def __iter__(self):
        for index, conversation in enumerate(self._read()):
            if self._first_val is None:
                text = json.dumps(conversation.messages, sort_keys=True, ensure_ascii=False)
                held_out = xxhash.xxh3_64_intdigest(text.encode("utf-8", "surrogatepass")) / 2**64 < self._fraction
            else:
                held_out = index >= self._first_val
            yield "val" if held_out else "train", conversation


class ChatTemplate:
    """A chat template, run as transformers runs it."""

    def __init__(self, name, source, special_tokens):
        self.name = name
        self._special_tokens = special_tokens
        environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
        )
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals["raise_exception"] = self._raise
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise InputError(f"{name}: not a usable chat template: {error}") from None

    @staticmethod
    def _raise(message):
        raise jinja2.TemplateError(message)

    def render(self, conversation, count, opened=False):
        """The first `count` messages as text; opened: followed by what opens the assistant's turn."""
        try:
            return self._template.render(
                messages=conversation.messages[:count], add_generation_prompt=opened, **self._special_tokens
            )
        except (jinja2.TemplateError, TypeError, ValueError) as error:
            raise InputError(
                f"{conversation.name}: {self.name} does not take its first {count} messages: {error}"
            ) from None

    def turns(self, conversation):
        """(text, [begin, end) of each of the assistant's turns in it, from behind its opening to the next turn)."""
        text = self.render(conversation, len(conversation.messages))
        spans = []
        for index, message in enumerate(conversation.messages):
            if message["role"] != "assistant":
                continue
            before = self.render(conversation, index, opened=True)
            after = self.render(conversation, index + 1)
            if not after.startswith(before) or not text.startswith(after):
                raise InputError(
                    f"{conversation.name}: {self.name} writes message {index + 1} differently when more messages "
                    "follow, or without its opening; give one that does not with --chat-template"
                )
            spans.append((len(before), len(after)))
        return text, spans


def load_template(tokenizer_path, template_path):
    """The template and its special tokens: of --chat-template, or what lies beside the tokenizer."""
    folder = Path(tokenizer_path).parent
    config_path = folder / "tokenizer_config.json"
    try:
        config = json.loads(config_path.read_text(encoding="utf-8")) if config_path.is_file() else {}
        beside = folder / "chat_template.jinja"
        if template_path or beside.is_file():
            path = Path(template_path or beside)
            name, source = str(path), path.read_text(encoding="utf-8")
        else:
            name, source = f"the chat template of {config_path}", config.get("chat_template")
    except ValueError as error:
        raise InputError(f"{config_path}: not a usable tokenizer_config.json: {error}") from None
    if isinstance(source, list):  # several by name
        named = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}
        source = named.get("default")
    if not isinstance(source, str):
        raise InputError(f"{config_path}: no chat_template; name a file with one with --chat-template")
    special = {}
    for key in "bos_token", "eos_token", "pad_token", "unk_token":
        value = config.get(key)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            special[key] = value
    return ChatTemplate(name, source, special)


def encode_conversations(tokenizer, split, template, separator, align, parse_special):
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


def batched(items, size):
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def refuse_special(conversation, special):
    for message in conversation.messages:
        for token in special:
            if isinstance(message["content"], str) and token in message["content"]:
                raise InputError(
                    f"{conversation.name}: a message spells the special token {token}, which would be taken for the "
                    "template's; leave it out, or let it count with --parse-special"
                )


class Layout:
    """Where conversations of one split go in its file."""

    def __init__(self, separator, align):
        self._separator = separator
        self._align = align
        self._count = 0

    def add(self, name, tokens, mask):
        """A conversation with what stands before and after it."""
        if np.any(tokens[:-1] == self._separator):
            raise InputError(
                f"{name}: the template puts the document separator, token {self._separator}, inside a conversation; "
                "choose another with --separator"
            )
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

    def finish(self):
        """What fills the last row, and the one token behind it that a row's last target is."""
        left = -self._count % self._align + 1 if self._align and self._count else 0
        return np.full(left, self._separator, np.int64), np.zeros(left, bool)
