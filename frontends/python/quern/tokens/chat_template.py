"""The process that renders a chat template, which may be hostile: sandboxed, with limits on time and memory.

conversations.py starts it. A line of JSON comes in and one goes out: first the template, then conversations. A template
has here what transformers gives it.
"""

import datetime
import itertools
import json
import resource
import signal
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox

MEMORY = 2 << 30  # bytes of address space
# Of the CPU for one line, and again for each piece of it, for the texts of long conversations are many; then SIGPROF ends
# the process, whatever it does.
SECONDS, PIECE = 10, 64 << 10
LONGEST_TEXT = 64 << 20  # characters
# Around what {% generation %} encloses: noncharacters, which no text has.
GENERATION_BEGIN, GENERATION_END = "\ufdd1", "\ufdd2"
MARK = "\ufdd0"  # in special tokens that messages spell

# Names for what the assistant thought, the one that templates read first.
THOUGHTS = ("reasoning_content", "thinking", "reasoning")
NOTHING: tuple[Any, ...] = (None, "", [], {})  # values of a key that say nothing
PROBE = """{"a": "b'c"}"""  # arguments of a call that neither JSON nor Python writes again as they are

Message = dict[str, Any]


class Unusable(Exception):
    """Whatever the conversation, this template is of no use."""


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: Any = None, sort_keys: bool = False
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


class GenerationTag(jinja2.ext.Extension):
    """{% generation %}...{% endgeneration %}: what the model is to learn of a conversation."""

    tags = {"generation"}

    environment: "Environment"

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        self.environment.tagged = True
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return GENERATION_BEGIN + caller() + GENERATION_END if self.environment.marking else caller()


class Environment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Of one template."""

    tagged = False  # the template has {% generation %}
    marking = False  # its borders are written


def compiled(source: str) -> jinja2.Template:
    environment = Environment(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
    now = datetime.datetime.now()  # one for all texts, which are compared with each other
    environment.filters["tojson"] = to_json
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = now.strftime
    return environment.from_string(source)


def said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    return (str(error) or type(error).__name__)[:1000]


def common(*texts: str) -> int:
    """How many characters the texts begin with in common: those that the least and the greatest have."""
    least, greatest = min(texts), max(texts)
    alike, more = 0, min(len(least), len(greatest))
    while alike < more:
        some = (alike + more + 1) // 2
        if least[alike:some] == greatest[alike:some]:
            alike = some
        else:
            more = some - 1
    return alike


@dataclass
class Example:
    """A text, and [begin, end) of the parts learned, each with the token that ends it, or ""."""

    text: str
    spans: list[tuple[int, int, str]] = field(default_factory=list)


class Conversation:
    """The texts of one conversation under a template."""

    def __init__(self, state: dict[str, Any], request: dict[str, Any]) -> None:
        tools = request["variables"].get("tools")
        self._template = state["templates"]["tool_use" if tools and "tool_use" in state["templates"] else "default"]
        self._environment: Environment = self._template.environment
        self._ends: list[str] = state["ends"]
        self._variables = {"documents": None, "tools": None, **state["special"], **request["variables"]}
        self._texts: dict[str, str] = {}
        self.notes: dict[str, int] = {}
        self.messages = self._usable(request["messages"])

    def render(self, messages: list[Message], opened: bool = False, marking: bool = False, **variables: Any) -> str:
        key = json.dumps([messages, opened, marking, sorted(variables)])
        if key in self._texts:
            return self._texts[key]
        self._environment.marking = marking
        try:
            text: str = self._template.render(**{
                **self._variables, **variables,
                "messages": [with_thoughts(message) for message in messages], "add_generation_prompt": opened,
            })
        except MemoryError as error:
            raise Unusable(said(error)) from None
        except Exception as error:
            raise ValueError(f"does not take its first {len(messages)} messages: {said(error)}") from None
        if len(text) > LONGEST_TEXT:
            raise Unusable(f"makes {len(text)} characters of its first {len(messages)} messages")
        self._texts[key] = unescaped(text)
        return self._texts[key]

    def _rendered(self, messages: list[Message], opened: bool = False, **variables: Any) -> str | None:
        try:
            return self.render(messages, opened, **variables)
        except ValueError:
            return None

    def _usable(self, messages: list[Message]) -> list[Message]:
        """The messages in the first form that the template writes: arguments of calls as objects, unless it writes their
        JSON as it is; parts of content as a list, else joined; content that is null left out, else null, else empty."""
        objects = [with_objects(message) for message in messages]
        arguments = [objects, messages]
        if objects != messages:
            probe = self._rendered([with_objects(message, text=PROBE) for message in messages])
            if probe is not None and PROBE in probe:
                arguments.reverse()
        fault = None
        for form, parts, null in itertools.product(arguments, (as_list, joined), (without_content, as_null, as_empty)):
            some = [null(parts(message)) for message in form]
            try:
                text = self.render(some)
            except ValueError as error:
                fault = fault or error
                continue
            empty = self._rendered([as_empty(joined(message)) for message in form]) or text
            if text.count("None") <= empty.count("None") and all(writes(text, message["content"]) for message in some
                                                                  if isinstance(message.get("content"), list)):
                return some
        raise fault or ValueError("writes None")

    def examples(self) -> list[Example]:
        tagged = self._environment.tagged
        marked = self.render(self.messages, marking=True) if tagged else ""
        if tagged and without_marks(marked) != self.render(self.messages):
            self._note("conversations whose {% generation %} the template changes once more, replies found without it")
            tagged = False
        found = self._tagged(marked) if tagged else self._by_turns()
        self._note_what_is_missing()
        return found

    # ---- learned text ----

    def _tagged(self, marked: str) -> list[Example]:
        example = Example("")
        for index, part in enumerate(marked.split(GENERATION_BEGIN)):
            inside, _, rest = part.rpartition(GENERATION_END) if index else ("", "", part)
            inside = inside.replace(GENERATION_END, "")
            begin = len(example.text)
            example.text += inside + rest
            if index:
                behind = self._end_at_begin(rest) if inside and not self._end_of(inside) else ""
                end = begin + len(inside) + len(behind)
                example.spans.append((begin, end, self._end_of(inside) or behind))
                self._note("tokens that end replies behind {% endgeneration %}, learned", bool(behind))
        for index in reversed([i for i, m in enumerate(self.messages) if self._weightless(m)]):
            first, last = (self.render(self.messages[:count], marking=True).count(GENERATION_BEGIN) if count else 0
                           for count in (index, index + 1))
            del example.spans[first:last]
        return [example]

    def _weightless(self, message: Message) -> bool:
        weight = message.get("weight", 1)
        if message["role"] != "assistant" or weight == 1:
            return False
        what = "not learned" if weight == 0 else "learned as of weight 1"
        self._note(f"replies of weight {weight}, {what}")
        return bool(weight == 0)

    def _by_turns(self) -> list[Example]:
        """One example, and another for each turn that the template writes differently once others follow."""
        whole = self.render(self.messages)
        examples: list[Example] = []
        for index in reversed([i for i, m in enumerate(self.messages) if m["role"] == "assistant"]):
            turn = self._turn(index)
            begin = self._begin(index, turn)
            for example in examples or [Example(whole)]:
                if end := self._end_in(example.text, turn, begin):
                    break
            else:
                example, end = Example(turn), len(turn)
            if example not in examples:
                examples.append(example)
            if not self._weightless(self.messages[index]):
                example.spans.insert(0, (begin, end, self._end_of(example.text[:end])))
        self._note("more examples, for the template writes earlier replies differently", len(examples) - 1)
        if all(example.text != whole for example in examples):
            behind = [m["role"] == "assistant" for m in reversed(self.messages)].index(True)
            self._note("messages behind the last reply, left out", behind)
        return [example for example in reversed(examples) if example.spans]

    def _end_in(self, text: str, turn: str, begin: int) -> int:
        """Where a reply that begins there ends in a text that goes on; 0 if the text has another reply. What follows the
        token that ends the reply, as a token that ends the whole text, need not be there."""
        if text.startswith(turn):
            return len(turn)
        shared = common(text, turn)
        ends = [(place + len(end)) for end in self._ends if (place := turn.find(end, begin, shared)) >= 0]
        if not ends:
            return 0
        end = min(ends)
        rest = turn[end:]
        for token in self._ends:
            rest = rest.replace(token, "")
        if rest.strip():
            return 0
        return end + len(turn[end:shared]) - len(turn[end:shared].lstrip())

    def _turn(self, index: int) -> str:
        """The text to the end of a reply. A template may end it only before something else follows."""
        text = self.render(self.messages[: index + 1])
        if self._end_of(text):
            return text
        opened = self._rendered(self.messages[: index + 1], True)
        if opened is None or not opened.startswith(text):
            return text
        return opened.removesuffix(self._opening(index)) if opened != text else text

    def _opening(self, index: int) -> str:
        """What generation starts a reply with."""
        for before in (self.messages[:index], [{"role": "user", "content": "x"}]):
            closed, opened = self._rendered(before), self._rendered(before, True)
            if before and closed is not None and opened is not None and opened.startswith(closed):
                return opened[len(closed) :]
        return ""

    def _begin(self, index: int, turn: str) -> int:
        """Where a reply begins: behind its opening."""
        before = self._rendered(self.messages[:index], True)
        if before is not None and turn.startswith(before) and (before or not self._opening(index)):
            return len(before)
        varied = [
            self._rendered([*self.messages[:index], {**self.messages[index], "content": content}])
            for content in ("first", "second")
        ]
        written = common(turn, *[text for text in varied if text is not None])
        opening = self._opening(index)
        if opening and opening in turn[:written]:
            return turn.rfind(opening, 0, written) + len(opening)
        if not before:
            return written
        self._note("replies that begin otherwise than generation opens them")
        return min(written, self._shared(index, before, turn))

    def _shared(self, index: int, before: str, turn: str) -> int:
        """How far the turn is what generation starts from, behind the message before the reply: a template may have
        written that message, or what stands before it, otherwise, as one that gives the last question the system text."""
        earlier = self.messages[max(index - 1, 0) : index]
        varied = [[*self.messages[: index - 1], {**message, "content": content}]
                  for message in earlier for content in ("first", "second")]
        ends = [
            len(text) - min((common(text[::-1], other[::-1]) for other in others if other is not None), default=len(text))
            for text, others in (
                (before, [self._rendered(messages, True) for messages in varied]),
                (turn, [self._rendered([*messages, self.messages[index]]) for messages in varied]),
            )
        ]
        return ends[1] + common(before[ends[0] :], turn[ends[1] :])

    def _end_of(self, text: str) -> str:
        text = text.rstrip()
        return next((end for end in self._ends if text.endswith(end)), "")

    def _end_at_begin(self, text: str) -> str:
        return next((end for end in self._ends if text.startswith(end)), "")

    # ---- unlearned text ----

    def _note(self, what: str, count: int = 1) -> None:
        if count:
            self.notes[what] = self.notes.get(what, 0) + count

    def _note_what_is_missing(self) -> None:
        messages = self.messages
        named = [{**m, "content": f"x{i}q{m['role']}q"} if m.get("content") else m for i, m in enumerate(messages)]
        whole = self._rendered(named)
        for index, name in enumerate(named if whole is not None else ()):
            if whole is None or not name.get("content") or name["content"] in whole:
                continue
            if self._rendered([*named[:index], {**name, "content": "x"}, *named[index + 1 :]]) == whole:
                self._note(f"messages of role {name['role']} that the template does not write")
        for key in sorted({key for m in messages for key in m if m[key] not in NOTHING} - {"role", "content", "weight"}):
            having = [index for index, m in enumerate(messages) if m.get(key) not in NOTHING]
            some = messages[: having[-1] + 1]
            gone = THOUGHTS if key in THOUGHTS else (key,)
            without = [{name: value for name, value in m.items() if name not in gone} for m in some]
            if (text := self._rendered(some)) is not None and text == self._rendered(without):
                self._note(f"messages whose '{key}' the template does not write", len(having))
        for key in ("tools", "documents"):
            none: dict[str, Any] = {key: None}
            if self._variables[key] and self.render(messages) == self._rendered(messages, **none):
                self._note(f"conversations whose '{key}' the template does not write")
        for message in messages:
            if not any(value for key, value in message.items() if key not in ("role", "weight")):
                self._note("replies that are empty" if message["role"] == "assistant" else "other messages that are empty")


def with_thoughts(message: Message) -> Message:
    """What the assistant thought under the names that templates read, as in transformers."""
    thought = next((message[key] for key in THOUGHTS if message.get(key) is not None), None)
    return message if thought is None else {"thinking": thought, **message, "reasoning_content": thought}


def as_list(message: Message) -> Message:
    return message


def joined(message: Message) -> Message:
    """Parts of content one after the other."""
    content = message["content"]
    return {**message, "content": "".join(part["text"] for part in content)} if isinstance(content, list) else message


def without_content(message: Message) -> Message:
    return {key: value for key, value in message.items() if key != "content" or value is not None}


def as_null(message: Message) -> Message:
    return message


def as_empty(message: Message) -> Message:
    return {**message, "content": ""} if message["content"] is None else message


def writes(text: str, parts: list[dict[str, Any]]) -> bool:
    """Whether the text has each of the parts, and not as Python writes a list."""
    return unescaped(repr(parts)) not in text and all(part["text"].strip() in text for part in parts)


def unescaped(text: str) -> str:
    """With marks that JSON or Python escaped as they are."""
    return text.replace("\\ufdd0", MARK)


def without_marks(text: str) -> str:
    return text.replace(GENERATION_BEGIN, "").replace(GENERATION_END, "")


def with_objects(message: Message, text: str | None = None) -> Message:
    """The arguments of its calls as objects, which OpenAI's format has as texts of JSON; or `text` in place of these."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [with_object(call, text) for call in calls]}


def with_object(call: Any, text: str | None) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    arguments = text if text is not None else arguments
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict | str) else call


def answer(state: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    if "sources" in request:
        state["special"], state["ends"] = request["special"], request["ends"]
        state["templates"] = {name: compiled(source) for name, source in request["sources"].items()}
        return {}
    try:
        conversation = Conversation(state, request)
        examples = conversation.examples()
    except ValueError as error:
        return {"left_out": said(error)}
    return {"examples": [[e.text, e.spans] for e in examples], "notes": conversation.notes}


def replies(seconds: int) -> Iterator[str]:
    state: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        signal.setitimer(signal.ITIMER_PROF, seconds * (1 + len(line) // PIECE))
        try:
            reply = json.dumps(answer(state, json.loads(line)))
        except Exception as error:
            reply = json.dumps({"refused": said(error)})
        signal.setitimer(signal.ITIMER_PROF, 0)
        yield reply


def main(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent's; the end of its pipe ends this process
    for reply in replies(seconds):
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
