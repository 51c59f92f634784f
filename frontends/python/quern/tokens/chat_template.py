"""The process that renders a chat template, which may be hostile: sandboxed, with limits on time and memory.

conversations.py starts it. A line of JSON comes in and one goes out: first the template, then conversations. A template
has here what transformers gives it.
"""

import datetime
import json
import os.path
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
SECONDS = 10  # for one line, the default; then SIGALRM ends the process, whatever it does
LONGEST_TEXT = 64 << 20  # characters
# Around what {% generation %} encloses: noncharacters, which no text has.
GENERATION_BEGIN, GENERATION_END = "\ufdd1", "\ufdd2"

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

    def parse(self, parser: jinja2.parser.Parser) -> jinja2.nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return jinja2.nodes.CallBlock(self.call_method("_mark"), [], [], body).set_lineno(line)

    def _mark(self, caller: Callable[[], str]) -> str:
        return GENERATION_BEGIN + caller() + GENERATION_END


def compiled(source: str) -> jinja2.Template:
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )
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
    return len(os.path.commonprefix(texts))


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
        self._ends: list[str] = state["ends"]
        self._variables = {"documents": None, "tools": None, **state["special"], **request["variables"]}
        self._texts: dict[str, str] = {}
        self.notes: dict[str, int] = {}
        self.messages = self._usable(request["messages"])

    def _marked(self, messages: list[Message], opened: bool = False, **variables: Any) -> str:
        try:
            text: str = self._template.render(
                **{**self._variables, **variables, "messages": messages, "add_generation_prompt": opened}
            )
        except MemoryError as error:
            raise Unusable(said(error)) from None
        except Exception as error:
            raise ValueError(f"does not take its first {len(messages)} messages: {said(error)}") from None
        if len(text) > LONGEST_TEXT:
            raise Unusable(f"makes {len(text)} characters of its first {len(messages)} messages")
        return text

    def render(self, messages: list[Message], opened: bool = False, **variables: Any) -> str:
        key = json.dumps([messages, opened, sorted(variables)])
        if key not in self._texts:
            text = self._marked(messages, opened, **variables)
            self._texts[key] = text.replace(GENERATION_BEGIN, "").replace(GENERATION_END, "")
        return self._texts[key]

    def _rendered(self, messages: list[Message], opened: bool = False, **variables: Any) -> str | None:
        try:
            return self.render(messages, opened, **variables)
        except ValueError:
            return None

    def _usable(self, messages: list[Message]) -> list[Message]:
        """The messages in a form that the template takes: arguments of calls as objects, else as texts of JSON; content
        that is null as it is, unless the template writes "None" for it."""
        fault = None
        for form in ([with_objects(m) for m in messages], messages):
            with_texts = [{**m, "content": ""} if m["content"] is None else m for m in form]
            for some in (form, with_texts):
                try:
                    text = self.render(some)
                except ValueError as error:
                    fault = fault or error
                    continue
                other = self._rendered(with_texts) if some is form else text
                if other is None or text.count("None") <= other.count("None"):
                    return some
        raise fault or ValueError("writes None")

    def examples(self) -> list[Example]:
        text = self._marked(self.messages)
        found = self._tagged(text) if GENERATION_BEGIN in text else self._by_turns()
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
            if inside:
                behind = self._end_at_begin(rest) if not self._end_of(inside) else ""
                end = begin + len(inside) + len(behind)
                example.spans.append((begin, end, self._end_of(inside) or behind))
        return [example]

    def _by_turns(self) -> list[Example]:
        """One example, and another for each turn that the template writes differently once others follow."""
        whole = self.render(self.messages)
        examples: list[Example] = []
        for index in reversed([i for i, m in enumerate(self.messages) if m["role"] == "assistant"]):
            turn = self._turn(index)
            begin = self._begin(index, turn)
            for example in examples:
                if example.text.startswith(turn):
                    break
            else:
                example = Example(whole if whole.startswith(turn) else turn)
                examples.append(example)
            if self.messages[index].get("weight", 1) == 0:
                self._note("replies of weight 0, not learned")
            else:
                example.spans.insert(0, (begin, len(turn), self._end_of(turn)))
        self._note("more examples, for the template writes earlier replies differently", len(examples) - 1)
        return [example for example in reversed(examples) if example.spans]

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
        return min(written, common(before, turn))

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
        named = [{**m, "content": f"x{i}q{m['role']}q"} if m["content"] else m for i, m in enumerate(messages)]
        whole = self._rendered(named)
        for name in named if whole is not None else ():
            if whole is not None and name["content"] and name["content"] not in whole:
                self._note(f"messages of role {name['role']} that the template does not write")
        for key in sorted({key for m in messages for key in m} - {"role", "content", "weight"}):
            having = [index for index, m in enumerate(messages) if key in m]
            some = messages[: having[-1] + 1]
            without = [{name: value for name, value in m.items() if name != key} for m in some]
            if (text := self._rendered(some)) is not None and text == self._rendered(without):
                self._note(f"messages whose '{key}' the template does not write", len(having))
        for key in ("tools", "documents"):
            none: dict[str, Any] = {key: None}
            if self._variables[key] and self.render(messages) == self._rendered(messages, **none):
                self._note(f"conversations whose '{key}' the template does not write")
        for message in messages:
            if message["role"] == "assistant" and not any(v for k, v in message.items() if k not in ("role", "weight")):
                self._note("replies that are empty")


def with_objects(message: Message) -> Message:
    """The arguments of its calls as objects, which OpenAI's format has as texts of JSON."""
    calls = message.get("tool_calls")
    if not isinstance(calls, list):
        return message
    return {**message, "tool_calls": [with_object(call) for call in calls]}


def with_object(call: Any) -> Any:
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:
        arguments = json.loads(function["arguments"])
    except (ValueError, RecursionError):
        return call
    return {**call, "function": {**function, "arguments": arguments}} if isinstance(arguments, dict) else call


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
        signal.alarm(seconds)
        try:
            reply = json.dumps(answer(state, json.loads(line)))
        except Exception as error:
            reply = json.dumps({"refused": said(error)})
        signal.alarm(0)
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
