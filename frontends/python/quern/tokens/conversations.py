"""Conversations to masked examples, with the tokenizer's chat template: only the assistant's turns are learned.

docs/token-files.md states the rules.
"""

import bisect
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
from tokenizers import Tokenizer, processors

from quern.base.fault import Fault, starting
from quern.tokens import chat_template
from quern.tokens.conversation_rows import Conversation, NothingToLearn, leave_out
from quern.tokens.documents import MANY_DOCUMENTS, document_from_string, held_out_of
from quern.tokens.encoding import KNOWN_SEPARATORS, separator_id, tokenizing
from quern.tokens.tally import Tally
from quern.tokens.template_files import DEFAULT, WITH_TOOLS, Templates, read_templates
from quern.tokens.token_file import NO_SEPARATOR, Array
from quern.tokens.tokenizer_config import any_of, named_special_tokens, read_tokenizer_config, special_tokens, spelled, spelled_by

Item = TypeVar("Item")
Span = tuple[int, int, str]  # begin, end, the token that ends it

BATCH_CONVERSATIONS = 512
ROWS_TO_PACK = 512  # at a time
NOTHING = (np.zeros(0, np.int64), np.zeros(0, bool))
MARK = chat_template.MARK  # in special tokens that messages spell, behind the first letter
RESERVED = re.compile(r"[\ufdd0-\ufdd2]|\\ufdd[0-2]")  # the marks, also as JSON and Python escape them


@dataclass(frozen=True)
class Rendered:
    """A conversation's examples."""

    name: str
    hash: float  # of what it says, 0 to 1
    examples: list[tuple[str, list[Span]]]


class ChatTemplate:
    """A chat template, run in a process of its own (chat_template.py). A context manager."""

    def __init__(self, name: str, templates: Templates, special: dict[str, Any], ends: Sequence[str]) -> None:
        self.name, self.templates = name, templates
        sources = {use: templates[use] for use in (DEFAULT, WITH_TOOLS) if use in templates}
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
        late = code == -signal.SIGPROF
        found = f"over {chat_template.SECONDS} seconds for 64 KiB" if late else f"its process ended with {code}"
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


def load_template(tokenizer: Tokenizer, folder: Path, given: Path | None) -> ChatTemplate:
    """The template and its special tokens: of --chat-template, or the files beside the tokenizer."""
    config = read_tokenizer_config(folder)
    name, templates = read_templates(folder, config, given)
    special = named_special_tokens(folder, config)
    ends = dict.fromkeys([*special_tokens(tokenizer), special.get("eos_token", "")])
    return ChatTemplate(name, templates, special, [end for end in ends if end])


class SpecialTokensAsText:
    """Marks the special tokens that messages spell, so that only the template's are tokens. A border of a text, where
    it could become a part of one with what the template writes beside it, is marked too."""

    def __init__(self, special: Sequence[str]) -> None:
        self._pattern = any_of(special)
        self._begins = {token[:count] for token in special for count in range(1, len(token)) if token[:count].strip()}
        self._ends = {token[count:] for token in special for count in range(1, len(token)) if token[count:].strip()}
        self._longest = max(map(len, special), default=1)
        self.found = 0

    def marked(self, value: Any, borders: bool = True) -> Any:
        if isinstance(value, str):
            if RESERVED.search(value):
                raise NothingToLearn("a text has a noncharacter, U+FDD0 to U+FDD2")
            text, count = self._pattern.subn(lambda match: inside(match.group()), value)
            self.found += count
            if borders and any(value[:count] in self._ends for count in range(1, self._longest)):
                text = MARK + text
            if borders and any(value[-count:] in self._begins for count in range(1, self._longest)):
                text += MARK
            return text
        if isinstance(value, list):
            return [self.marked(item) for item in value]
        if isinstance(value, dict):  # of "<|" + role + "|>" the template makes a token
            return {self.marked(key, False): self.marked(item, key != "role") for key, item in value.items()}
        return value


def inside(token: str) -> str:
    return token[0] + MARK + token[1:]


class MarkedTexts:
    """Encodes texts with marks as whole texts in which a marked special token is text. The marks move to the special
    tokens that remain, and into their names in the tokenizer."""

    def __init__(self, tokenizer: Tokenizer, special: Sequence[str]) -> None:
        self._pattern = re.compile(f"{MARK}|{any_of(special).pattern}")
        names = {token: inside(token) for token in special}
        state = json.loads(tokenizer.to_str())
        model = state["model"]
        for token in state["added_tokens"]:
            token["content"] = names.get(token["content"], token["content"])
        vocabulary = model.get("vocab", {})
        if isinstance(vocabulary, dict):
            model["vocab"] = {names.get(name, name): number for name, number in vocabulary.items()}
        else:
            model["vocab"] = [[names.get(name, name), score] for name, score in vocabulary]
        if model.get("unk_token") in names:
            model["unk_token"] = names[model["unk_token"]]
        if "merges" in model:
            pairs = ((merge, merge.split(" ", 1) if isinstance(merge, str) else merge) for merge in model["merges"])
            model["merges"] = [merge for merge, pair in pairs if names.keys().isdisjoint((*pair, "".join(pair)))]
        with tokenizing():
            self._tokenizer = Tokenizer.from_str(json.dumps(state))

    def encode(self, text: str, spans: list[Span]) -> tuple[Any, list[Span]]:
        found = list(self._pattern.finditer(text))
        places = [match.start() + 1 for match in found]
        moves = np.cumsum([0, *(-1 if match.group() == MARK else 1 for match in found)])

        def moved(place: int) -> int:
            return place + int(moves[bisect.bisect_right(places, place)])

        text = self._pattern.sub(lambda match: "" if match.group() == MARK else inside(match.group()), text)
        with tokenizing():
            encoding = self._tokenizer.encode(text, add_special_tokens=False)
        return encoding, [(moved(begin), moved(end), token) for begin, end, token in spans]


def end_ids(tokenizer: Tokenizer, examples: Iterable[tuple[str, list[Span]]]) -> collections.Counter[int]:
    found = (tokenizer.token_to_id(end) for _, spans in examples for *_, end in spans if end)
    return collections.Counter(token for token in found if token is not None)


class ChatCorpus:
    """The examples of conversations, in their order, as (split name, documents, bytes, tokens, mask).

    align: no conversation crosses a multiple of that many tokens of its split, so that no row of a run with that
    sequence length cuts one, with a new order within about ROWS_TO_PACK rows; 0: one after another.
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
        self._marked: MarkedTexts | None = None
        self._fraction, self._align, self._parse_special, self._tally = fraction, align, parse_special, tally
        self._left = self._rendered(template, conversations)
        self._first = list(itertools.islice(self._left, MANY_DOCUMENTS))  # which tell how to split, and the separator
        if not self._first:
            reason = next((f"{what.partition(': ')[2]}: {entry.first}" for what, entry in tally.entries.items()
                           if what.startswith("conversations left out")), "none is there")
            raise Fault(template.name, "no conversation can be used", reason, "", "give others, or --chat-template")
        self._separator = NO_SEPARATOR
        self.padding: dict[str, int] = {}  # tokens that fill rows, by split; known at the end
        self.end_tokens: collections.Counter[int] = collections.Counter()

    def _rendered(self, template: ChatTemplate, conversations: Iterable[Conversation]) -> Iterator[Rendered]:
        as_text = SpecialTokensAsText(self._special)
        for conversation in conversations:
            before = as_text.found
            try:
                messages, variables = as_text.marked(conversation.messages), as_text.marked(conversation.variables)
            except NothingToLearn as reason:
                leave_out(reason, conversation.name, self._tally)
                continue
            self._tally.add(spelled_by("messages", self._parse_special), conversation.name, as_text.found - before)
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
                tokens, mask = masked(*self._marked_texts.encode(text, spans) if MARK in text else (encoding, spans))
                learn_end = self._note_ends(place, text, spans)
                tokens, mask = layouts[name].add(place, tokens, mask, learn_end)
                yield name, 1, len(text.replace(MARK, "").encode()), tokens, mask
        for name, layout in layouts.items():
            yield (name, 0, 0, *layout.finish())
            self.padding[name] = layout.padding

    @property
    def _marked_texts(self) -> MarkedTexts:
        self._marked = self._marked or MarkedTexts(self._tokenizer, self._special)
        return self._marked

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


def masked(encoding: Any, spans: list[Span]) -> tuple[Array, Array]:
    tokens = np.array(encoding.ids, np.int64)
    begins, ends = np.array(encoding.offsets, np.int64).reshape(-1, 2).T
    mask = np.zeros(tokens.size, bool)
    for begin, end, _ in spans:  # a token that holds the opening's last space too is the turn's
        mask |= (begins < end) & (ends > begin)
    return tokens, mask


def batched(items: Iterable[Item], size: int) -> Iterator[list[Item]]:
    iterator = iter(items)
    while batch := list(itertools.islice(iterator, size)):
        yield batch


def packed(sizes: list[int], row: int) -> list[list[int]]:
    """Which of them go into each row: the largest first, each into the fullest row that it fits in (best fit decreasing)."""
    rows: list[list[int]] = []
    open_rows: list[tuple[int, int]] = []  # (free tokens, index of the row), ascending
    for item in sorted(range(len(sizes)), key=lambda item: -sizes[item]):
        at = bisect.bisect_left(open_rows, (sizes[item], 0))
        left, index = open_rows.pop(at) if at < len(open_rows) else (row, len(rows))
        if index == len(rows):
            rows.append([])
        rows[index].append(item)
        bisect.insort(open_rows, (left - sizes[item], index))
    return rows


class Layout:
    """Where conversations of one split go in its file: one behind the other, or, aligned, packed into rows."""

    def __init__(self, separator: int, align: int, tally: Tally) -> None:
        self._separator, self._align, self._tally = separator, align, tally
        self._waiting: list[tuple[Array, Array]] = []
        self._size = self._rows = 0  # tokens that wait; rows that were written
        self.padding = 0  # tokens

    def add(self, name: str, tokens: Array, mask: Array, learn_end: bool) -> tuple[Array, Array]:
        """Takes a conversation; what comes next in the file."""
        if np.any(tokens[:-1] == self._separator):
            what = f"the template puts the document separator, token {self._separator}, inside a conversation"
            raise Fault(name, what, advice="choose another with --separator")
        if self._separator >= 0 and (tokens.size == 0 or tokens[-1] != self._separator):
            tokens, mask = np.append(tokens, self._separator), np.append(mask, learn_end)
        if not self._align:
            return tokens, mask
        if tokens.size > self._align:
            self._tally.add(f"conversations longer than {self._align} tokens, cut", name)
            self._tally.add("tokens cut off", name, tokens.size - self._align)
            self._tally.add("of these, learned", name, int(mask[self._align :].sum()))
        self._waiting.append((tokens[: self._align], mask[: self._align]))
        self._size += self._waiting[-1][0].size
        return self._pack() if self._size >= ROWS_TO_PACK * self._align else NOTHING

    def finish(self) -> tuple[Array, Array]:
        """The rows of all that waits, and the one token behind them that a row's last target is."""
        tokens, mask = self._pack() if self._waiting else NOTHING
        return (np.append(tokens, self._separator), np.append(mask, False)) if self._rows else NOTHING

    def _pack(self) -> tuple[Array, Array]:
        rows = packed([tokens.size for tokens, _ in self._waiting], self._align)
        tokens, mask = np.full((len(rows), self._align), self._separator, np.int64), np.zeros((len(rows), self._align), bool)
        for row, items in enumerate(rows):
            at = 0
            for item in items:
                size = self._waiting[item][0].size
                tokens[row, at : at + size], mask[row, at : at + size] = self._waiting[item]
                at += size
        self.padding += tokens.size - self._size
        self._rows += len(rows)
        self._waiting, self._size = [], 0
        return tokens.ravel(), mask.ravel()
