"""The process that renders a chat template, which may be hostile: sandboxed, with limits on time and memory.

conversations.py starts it. A line of JSON comes in and one goes out: first the template, then conversations.
"""

import json
import resource
import signal
import sys
from typing import Any, NoReturn

import jinja2
import jinja2.ext
import jinja2.sandbox

MEMORY = 2 << 30  # bytes of address space
SECONDS = 10  # for one line, the default; then SIGALRM ends the process, whatever it does
LONGEST_TEXT = 64 << 20  # characters


def raise_exception(message: str) -> NoReturn:
    raise jinja2.TemplateError(message)


def compiled(source: str) -> jinja2.Template:
    """As transformers does it."""
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = lambda value, indent=None: json.dumps(value, ensure_ascii=False, indent=indent)
    environment.globals["raise_exception"] = raise_exception
    return environment.from_string(source)


def turns(template: jinja2.Template, special: dict[str, str], messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The text, and [begin, end) of each of the assistant's turns in it, from behind its opening to the next turn."""

    def render(count: int, opened: bool = False) -> str:
        try:
            text = template.render(messages=messages[:count], add_generation_prompt=opened, **special)
        except Exception as error:
            raise ValueError(f"does not take its first {count} messages: {said(error)}") from None
        if len(text) > LONGEST_TEXT:
            raise ValueError(f"makes {len(text)} characters of its first {count} messages")
        return text

    text, spans = render(len(messages)), []
    for index, message in enumerate(messages):
        if message["role"] != "assistant":
            continue
        before, after = render(index, opened=True), render(index + 1)
        if not after.startswith(before) or not text.startswith(after):
            raise ValueError(
                f"writes message {index + 1} differently when more messages follow, or without its opening; "
                "give one that does not with --chat-template"
            )
        spans.append((len(before), len(after)))
    return {"text": text, "spans": spans}


def said(error: Exception) -> str:
    if isinstance(error, MemoryError):
        return "out of memory"
    return (str(error) or type(error).__name__)[:1000]


def answer(state: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    if "source" in request:
        state["special"] = request["special"]
        state["template"] = compiled(request["source"])
        return {}
    return turns(state["template"], state["special"], request["messages"])


def main(seconds: int) -> None:
    resource.setrlimit(resource.RLIMIT_AS, (MEMORY, MEMORY))
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    state: dict[str, Any] = {}
    for line in sys.stdin.buffer:
        signal.alarm(seconds)
        try:
            reply = json.dumps(answer(state, json.loads(line)))
        except Exception as error:
            reply = json.dumps({"refused": said(error)})
        signal.alarm(0)
        sys.stdout.write(reply + "\n")
        sys.stdout.flush()


if __name__ == "__main__":
    main(int(sys.argv[1]))
