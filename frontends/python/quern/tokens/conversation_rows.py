"""Conversations out of rows as people write them: OpenAI's messages, ShareGPT's from and value, parts of a message.

docs/token-files.md states the formats read.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from quern.base.fault import Fault
from quern.base.json_shape import parse
from quern.tokens.tally import Tally

FIELDS = ("messages", "conversations", "conversation")  # the first that a row has, better not as null
DEEPEST = 64  # levels of lists and objects in a row
ROLES = {
    "human": "user", "gpt": "assistant", "chatgpt": "assistant", "bot": "assistant", "model": "assistant",
    "observation": "tool", "function_response": "tool", **{role: role for role in ("user", "assistant", "system", "tool")},
}
# Besides the messages; a template's other variables are in chat_template_kwargs, as of TRL.
VARIABLES = ("tools", "documents")
KWARGS = "chat_template_kwargs"
RESERVED = ("messages", "add_generation_prompt")


@dataclass(frozen=True)
class Conversation:
    name: str  # file:line, for messages
    messages: list[dict[str, Any]]
    variables: dict[str, Any] = field(default_factory=dict)  # of the template

    def text(self) -> str:
        """What it says, for telling it from others."""
        return json.dumps([self.messages, self.variables] if self.variables else self.messages, sort_keys=True,
                          ensure_ascii=False)


class NothingToLearn(Exception):
    """A row that is well formed and of no use; says what it is, in the plural."""


def read_conversations(rows: Iterable[tuple[str, Any]], field: str | None, tally: Tally) -> Iterator[Conversation]:
    for name, row in rows:
        try:
            yield conversation_of(name, row, field, tally)
        except NothingToLearn as reason:
            leave_out(reason, name, tally)


def leave_out(reason: NothingToLearn, name: str, tally: Tally) -> None:
    tally.add(f"conversations left out: {reason}", name)


def conversation_of(name: str, row: Any, field: str | None, tally: Tally) -> Conversation:
    there = [key for key in FIELDS if isinstance(row, dict) and key in row]
    wanted = field or next((key for key in there if row[key] is not None), there[0] if there else FIELDS[0])
    entries: Any = row.get(wanted) if isinstance(row, dict) else None
    if isinstance(entries, str) and entries.lstrip().startswith("["):
        entries = value_of(row, wanted, name)
    if entries is None and isinstance(row, dict) and wanted in row:
        entries = []
    if not isinstance(entries, list) or not all(isinstance(entry, dict) for entry in entries):
        found: object = sorted(row) if isinstance(row, dict) else type(row).__name__
        raise Fault(name, f"no list of messages with role and content in field '{wanted}'", found,
                    advice="name the field with --text-field")
    refuse_depth(row, name)
    messages = [message_of(name, entry, wanted) for entry in entries]
    unused = set(row) - {wanted, *VARIABLES, KWARGS}
    if isinstance(row.get("system"), str):
        unused.discard("system")
        if row["system"] and not any(message["role"] == "system" for message in messages):
            messages.insert(0, {"role": "system", "content": row["system"]})
    for key in sorted(unused):
        if row[key] not in (None, "", [], {}):
            tally.add(f"rows whose '{key}' is not used", name)
    if not any(message["role"] == "assistant" for message in messages):
        raise NothingToLearn("no message is the assistant's")
    return Conversation(name, messages, variables_of(name, row))


def message_of(name: str, entry: dict[str, Any], field: str) -> dict[str, Any]:
    """{"role", "content", ...}; content is a text or null."""
    message = {key: value for key, value in entry.items() if value is not None}
    for name_there, name_here in (("from", "role"), ("value", "content")):  # ShareGPT's
        if name_there in message and name_here not in message:
            message[name_here] = message.pop(name_there)
    role = message.get("role")
    if not isinstance(role, str) or not ("content" in entry or "value" in entry or len(message) > 1):
        raise Fault(name, f"no list of messages with role and content in field '{field}'", sorted(entry),
                    advice="name the field with --text-field")
    message["role"] = ROLES.get(role.lower(), role)
    message["content"] = content_of(message.get("content"))
    if role == "function_call":
        calls = parse(str(message["content"]).encode("utf-8", "surrogatepass"), f"{name}: function_call")
        message = {**message, "role": "assistant", "content": None, "tool_calls": [
            {"type": "function", "function": call} for call in (calls if isinstance(calls, list) else [calls])]}
    return message


def content_of(content: Any) -> str | None | list[dict[str, Any]]:
    """A text, null, or a list of parts, all of them texts."""
    if content is None or isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else [None]
    texts = [part.get("text") if isinstance(part, dict) and part.get("type", "text") == "text" else part for part in parts]
    if not all(isinstance(text, str) for text in texts):
        raise NothingToLearn("a message has content that is not text")
    return [{"type": "text", "text": text} for text in texts]


def variables_of(name: str, row: dict[str, Any]) -> dict[str, Any]:
    more = value_of(row, KWARGS, name)
    more = {} if more is None else more
    if not isinstance(more, dict):
        raise Fault(name, KWARGS, type(more).__name__, "an object")
    found = {**more, **{key: value for key in VARIABLES if (value := value_of(row, key, name))}}
    for key in RESERVED:
        if key in found:
            raise Fault(name, f"{KWARGS} has '{key}', which is the tokenizer's to set")
    if not isinstance(found.get("tools", []), list):
        raise Fault(name, "tools", type(found["tools"]).__name__, "a list")
    return found


def value_of(row: dict[str, Any], key: str, name: str) -> Any:
    """A list or object, which tables may have as JSON; null for a text of nothing."""
    value = row.get(key)
    if not isinstance(value, str):
        return value
    if not value.strip():
        return None
    value = parse(value.encode("utf-8", "surrogatepass"), f"{name}: {key}")
    refuse_depth(value, name)
    return value


def refuse_depth(value: object, name: str) -> None:
    level = [value]
    for _ in range(DEEPEST + 2):
        level = [item for part in level if isinstance(part, dict | list)
                 for item in (part.values() if isinstance(part, dict) else part)]
        if not level:
            return
    raise Fault(name, "nested too deeply", expected=f"at most {DEEPEST} levels of lists and objects")
