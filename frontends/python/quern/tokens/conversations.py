"""Conversations to masked examples, with the tokenizer's chat template: only the assistant's turns are learned.

docs/token-files.md states the rules.
"""

import collections
import itertools
import json
import re
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
import xxhash
from tokenizers import AddedToken, Tokenizer, processors

from quern.base.fault import Fault, reading, starting
from quern.tokens import chat_template
from quern.tokens.begin_tokens import read_tokenizer_config, spelled
from quern.tokens.conversation_rows import Conversation
from quern.tokens.documents import MANY_DOCUMENTS, document_from_string, held_out_of
from quern.tokens.encoding import KNOWN_SEPARATORS, separator_id, tokenizing
from quern.tokens.tally import Tally
from quern.tokens.token_file import NO_SEPARATOR, Array

Item = TypeVar("Item")
Span = tuple[int, int, str]  # begin, end, the token that ends it

BATCH_CONVERSATIONS = 512
TEMPLATE_FILE = "chat_template.jinja"
# In a message's special tokens, behind the first letter, so that they stay text: a noncharacter, which no text has.
MARK = "\ufdd0"
RESERVED = re.compile("[\ufdd0-\ufdd2]")


@dataclass(frozen=True)
class Rendered:
    """A conversation's examples."""

    name: str
    hash: float  # of what it says, 0 to 1
    examples: list[tuple[str, list[Span]]]


class ChatTemplate:
    """A chat template, run in a process of its own (chat_template.py). A context manager."""

    def __init__(self, name: str, sources: dict[str, str], special: dict[str, Any], ends: Sequence[str]) -> None:
        self.name, self.sources = name, sources
        with starting(sys.executable):
            self._process = subprocess.Popen(
                [sys.executable, "-P", chat_template.__file__, str(chat_template.SECONDS)],
                stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            )
        reply = self._ask({"sources": sources, "special": special, "ends": ends}, name)
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

    def render(self, conversation: Conversation, tally: Tally) -> Rendered | None:
        """None, and counted, for a conversation that the template refuses."""
        request = {"messages": conversation.messages, "variables": conversation.variables}
        reply = self._ask(request, conversation.name)
        if "refused" in reply:
            raise Fault(conversation.name, f"{self.name} {reply['refused']}")
        for what, count in reply.get("notes", {}).items():
            tally.add(what, conversation.name, count)
        if "left_out" in reply:
            tally.add("conversations left out: the template refuses them",
                      f"{conversation.name}: {self.name} {reply['left_out']}")
            return None
        examples = [(text, spans) for text, spans in reply["examples"] if any(begin < end for begin, end, _ in spans)]
        for text, _ in examples:
            document_from_string(conversation.name, text)  # refuses half characters
        if not examples:
            tally.add("conversations left out: the template marks nothing to learn", conversation.name)
            return None
        said = conversation.text().encode("utf-8", "surrogatepass")
        return Rendered(conversation.name, xxhash.xxh3_64_intdigest(said) / 2**64, examples)


def named_special_tokens(folder: Path, config: dict[str, Any]) -> dict[str, Any]:
    """bos_token and the like, as a template sees them."""
    path = folder / "special_tokens_map.json"
    found: dict[str, Any] = {}
    if path.is_file():
        with reading(path):
            found = json.loads(path.read_text(encoding="utf-8-sig"))
    found = {**(found if isinstance(found, dict) else {}), **config}
    special: dict[str, Any] = {key: text for key, value in found.items()
                               if key.endswith("_token") and (text := spelled(value)) is not None}
    more = found.get("additional_special_tokens")
    if isinstance(more, list):
        special["additional_special_tokens"] = [text for text in map(spelled, more) if text is not None]
    return special


def special_tokens(tokenizer: Tokenizer) -> list[str]:
    added = tokenizer.get_added_tokens_decoder().values()
    return [token.content for token in added if token.special and len(token.content) > 1]


def load_template(tokenizer: Tokenizer, tokenizer_path: str, template_path: str | None) -> ChatTemplate:
    """The template and its special tokens: of --chat-template, or the files beside the tokenizer."""
    folder = Path(tokenizer_path).parent
    config_path, beside = folder / "tokenizer_config.json", folder / TEMPLATE_FILE
    config = read_tokenizer_config(folder)
    if template_path or beside.is_file():
        path = Path(template_path or beside)
        with reading(path):
            name, source = str(path), path.read_text(encoding="utf-8-sig")  # type: str, Any
    else:
        name, source = f"the chat template of {config_path}", config.get("chat_template")
    sources = {"default": source}
    if isinstance(source, list):  # several by name
        sources = {entry["name"]: entry.get("template") for entry in source
                   if isinstance(entry, dict) and entry.get("name") in ("default", "tool_use")}
    if not sources or not all(isinstance(text, str) for text in sources.values()) or "default" not in sources:
        raise Fault(config_path, "no chat_template", advice="name a file with one with --chat-template")
    special = named_special_tokens(folder, config)
    ends = dict.fromkeys([*special_tokens(tokenizer), special.get("eos_token", "")])
    return ChatTemplate(name, sources, special, [end for end in ends if end])


class SpecialTokensAsText:
    """Marks the special tokens that messages spell, so that only the template's are tokens."""

    def __init__(self, special: Sequence[str]) -> None:
        self._pattern = re.compile("|".join(map(re.escape, sorted(special, key=len, reverse=True))) or "(?!)")
        self.found = 0

    def marked(self, value: Any, where: str) -> Any:
        if isinstance(value, str):
            if RESERVED.search(value):
                raise Fault(where, "not text", "a noncharacter, U+FDD0 to U+FDD2")
            text, count = self._pattern.subn(lambda match: match.group()[0] + MARK + match.group()[1:], value)
            self.found += count
            return text
        if isinstance(value, list):
            return [self.marked(item, where) for item in value]
        if isinstance(value, dict):
            return {self.marked(key, where): self.marked(item, where) for key, item in value.items()}
        return value


def end_ids(tokenizer: Tokenizer, examples: Iterable[tuple[str, list[Span]]]) -> collections.Counter[int]:
    found = (tokenizer.token_to_id(end) for _, spans in examples for *_, end in spans if end)
    return collections.Counter(token for token in found if token is not None)


class ChatCorpus:
    """The examples of conversations, in their order, as (split name, documents, bytes, tokens, mask).

    align: no conversation crosses a multiple of that many tokens of its split, so that no row of a run with that
    sequence length cuts one; 0: one after another.
    """

    mode = "conversations"

    def __init__(
        self, tokenizer: Tokenizer, template: ChatTemplate, conversations: Iterable[Conversation], fraction: float,
        align: int, parse_special: bool, tally: Tally,
    ) -> None:
        self._special = special_tokens(tokenizer)
        self._tokenizer = Tokenizer.from_str(tokenizer.to_str())
        self._tokenizer.encode_special_tokens = False  # the template's own are tokens
        self._tokenizer.post_processor = processors.ByteLevel(trim_offsets=False)  # offsets of white space as they are
        self._tokenizer.add_special_tokens([AddedToken(MARK, special=True, normalized=False)])
        self._mark = self._tokenizer.token_to_id(MARK)
        self._fraction, self._align, self._parse_special, self._tally = fraction, align, parse_special, tally
        self._left = self._rendered(template, conversations)
        self._first = list(itertools.islice(self._left, MANY_DOCUMENTS))  # which tell how to split, and the separator
        if not self._first:
            reason = next((f"{what.partition(': ')[2]}: {entry.first}" for what, entry in tally.entries.items()
                           if what.startswith("conversations left out")), "none is there")
            raise Fault(template.name, "no conversation can be used", reason, "", "give others, or --chat-template")
        self._separator = NO_SEPARATOR
        self.end_tokens: collections.Counter[int] = collections.Counter()

    def _rendered(self, template: ChatTemplate, conversations: Iterable[Conversation]) -> Iterator[Rendered]:
        as_text = SpecialTokensAsText(self._special)
        for conversation in conversations:
            before = as_text.found
            messages = as_text.marked(conversation.messages, conversation.name)
            variables = as_text.marked(conversation.variables, conversation.name)
            kept = "read as tokens" if self._parse_special else "kept as text; --parse-special reads them as tokens"
            self._tally.add(f"special tokens that messages spell, {kept}", conversation.name, as_text.found - before)
            if not self._parse_special:
                conversation = Conversation(conversation.name, messages, variables)
            if rendered := template.render(conversation, self._tally):
                yield rendered

    def choose_separator(self, spelling: str | None, config: dict[str, Any]) -> int:
        """The tokenizer's token between documents. Without `spelling` it is one that the template does not have in a
        conversation, such as one for padding; the template may end with it."""
        if not spelling:
            known = (*KNOWN_SEPARATORS, spelled(config.get("pad_token")), spelled(config.get("unk_token")))
            texts = [text for conversation in self._first for text, _ in conversation.examples]
            candidates = [token for token in known if token and self._tokenizer.token_to_id(token) is not None]
            free = [token for token in candidates if not any(token in text.removesuffix(token) for text in texts)]
            spelling = next(iter(free or candidates), None)
        self._separator = separator_id(self._tokenizer, spelling)
        return self._separator

    def _split(self) -> Iterator[tuple[str, Rendered]]:
        few = len(self._first) < MANY_DOCUMENTS
        first_val = len(self._first) - held_out_of(len(self._first), self._fraction)
        for index, conversation in enumerate(itertools.chain(self._first, self._left)):
            held_out = index >= first_val if few else conversation.hash < self._fraction
            yield "val" if held_out else "train", conversation

    def __iter__(self) -> Iterator[tuple[str, int, int, Array, Array]]:
        layouts = {name: Layout(self._separator, self._align, self._tally) for name in ("train", "val")}
        for batch in batched(self._split(), BATCH_CONVERSATIONS):
            examples = [(name, conversation.name, text, spans)
                        for name, conversation in batch for text, spans in conversation.examples]
            with tokenizing():
                encodings = self._tokenizer.encode_batch([text for *_, text, _ in examples], add_special_tokens=False)
            for (name, place, text, spans), encoding in zip(examples, encodings, strict=True):
                tokens, mask = self._masked(encoding, spans)
                learn_end = self._note_ends(place, text, spans)
                tokens, mask = layouts[name].add(place, tokens, mask, learn_end)
                yield name, 1, len(text.replace(MARK, "").encode()), tokens, mask
        for name, layout in layouts.items():
            yield (name, 0, 0, *layout.finish())

    def _masked(self, encoding: Any, spans: list[Span]) -> tuple[Array, Array]:
        tokens = np.array(encoding.ids, np.int64)
        begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
        mask = np.zeros(tokens.size, bool)
        for begin, end, _ in spans:  # a token that holds the opening's last space too is the turn's
            mask |= (begins < end) & (ends > begin)
        text = tokens != self._mark
        return tokens[text], mask[text]

    def _note_ends(self, place: str, text: str, spans: list[Span]) -> bool:
        """Counts what ends replies; true if the separator behind the text is what ends the last one."""
        self.end_tokens += end_ids(self._tokenizer, [(text, spans)])
        without = [end == len(text) for _, end, token in spans if not token]
        inside = without.count(False)
        self._tally.add("replies with no token at their end, inside conversations", place, inside)
        if not any(without):
            return False
        if self._separator == NO_SEPARATOR:
            self._tally.add("conversations with no token at their end: the model does not learn to stop", place)
            return False
        self._tally.add("conversations whose last reply ends in the separator, which is learned", place)
        self.end_tokens[self._separator] += 1
        return True


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


class Layout:
    """Where conversations of one split go in its file."""

    def __init__(self, separator: int, align: int, tally: Tally) -> None:
        self._separator, self._align, self._tally = separator, align, tally
        self._count = 0

    def add(self, name: str, tokens: Array, mask: Array, learn_end: bool) -> tuple[Array, Array]:
        """A conversation with what stands before and after it."""
        if np.any(tokens[:-1] == self._separator):
            what = f"the template puts the document separator, token {self._separator}, inside a conversation"
            raise Fault(name, what, advice="choose another with --separator")
        if self._separator >= 0 and (tokens.size == 0 or tokens[-1] != self._separator):
            tokens, mask = np.append(tokens, self._separator), np.append(mask, learn_end)
        if self._align:
            if tokens.size > self._align:
                self._tally.add(f"conversations longer than {self._align} tokens, cut", name)
                self._tally.add("tokens cut off", name, tokens.size - self._align)
                self._tally.add("of these, learned", name, int(mask[self._align :].sum()))
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
