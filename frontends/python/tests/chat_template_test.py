"""A chat template renders as in transformers, whatever it does to a conversation, and exactly the replies are learned."""

import datetime
import json
import time
import unittest

from quern.tokens import chat_template

CHATML = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Ends a message only when another follows, or a reply is wanted.
LATE_END = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' + m.content }}"
    "{% if (loop.last and add_generation_prompt) or not loop.last %}{{ '<|im_end|>\n' }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt and messages[-1].role != 'assistant' %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Keeps the last reply's thoughts, or writes empty ones, and drops earlier replies'.
THINKING = (
    "{% for m in messages %}{{ '<|im_start|>' + m.role + '\n' }}{% if m.role == 'assistant' and loop.last %}"
    "{{ '<think>' + (m.reasoning or '') + '</think>' }}{% endif %}{{ m.content + '<|im_end|>\n' }}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
# Opens a reply with what it does not write of a reply that is there.
THINK_FIRST = CHATML.replace("assistant\n' }}{% endif", "assistant\n<think>' }}{% endif")
DEFAULT_SYSTEM = "{% if messages[0].role != 'system' %}<|im_start|>system\nHelp.<|im_end|>\n{% endif %}" + CHATML
ALPACA = (
    "{% for m in messages %}### {{ m.role }}\n{{ m.content }}\n\n{% endfor %}"
    "{% if add_generation_prompt %}### assistant\n{% endif %}"
)


def talk(*contents, first="user", **more):
    roles = [first, "user" if first == "assistant" else "assistant"]
    return [{"role": roles[index % 2], "content": content, **more} for index, content in enumerate(contents)]


class ChatTemplateTest(unittest.TestCase):
    def ask(self, template, messages, **variables):
        state = {}
        sources = template if isinstance(template, dict) else {"default": template}
        chat_template.answer(state, {"sources": sources, "special": {"bos_token": "<s>"}, "ends": ["<|im_end|>", "</s>"]})
        return chat_template.answer(state, {"messages": messages, "variables": variables})

    def text(self, template, messages, **variables):
        reply = self.ask(template, messages, **variables)
        self.assertNotIn("left_out", reply)
        return reply["examples"][-1][0]

    def learned(self, template, messages, **variables):
        """[[(reply, the token that ends it)] of each example], notes"""
        reply = self.ask(template, messages, **variables)
        self.assertNotIn("left_out", reply)
        return [[(text[begin:end], token) for begin, end, token in spans] for text, spans in reply["examples"]], reply["notes"]

    def test_a_template_has_what_transformers_gives_it(self):
        user = talk("hi")
        for source, expected in (
            ("{{ {'b': 'é<', 'a': [1]} | tojson }}", '{"b": "é<", "a": [1]}'),
            ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
            ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
            ("{{ 'é' | tojson(ensure_ascii=true) }}", '"\\u00e9"'),
            ("{{ tools is none }} {{ documents is none }} {{ tools is defined }}", "True True True"),
            ("{{ bos_token }}{{ eos_token is defined }}", "<s>False"),
            ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% elif i > 2 %}{% break %}{% endif %}{{ i }}{% endfor %}", "02"),
            ("{{ strftime_now('%Y') }}", str(datetime.datetime.now().year)),
            ("  {% if true %}\n  a\n  {% endif %}\n", "  a\n"),
            ("{{ enable_thinking }}", "False"),
        ):
            with self.subTest(source=source):
                text = self.ask(source + "{% generation %}x{% endgeneration %}", user, enable_thinking=False)
                self.assertEqual(text["examples"][0][0].removesuffix("x"), expected)
        self.assertEqual(self.text("{{ documents[0].t }}{{ messages[1].content }}", talk("a", "b"), documents=[{"t": "d"}]), "db")
        named = {"default": CHATML, "tool_use": "{{ tools[0].name }}" + CHATML}
        self.assertTrue(self.text(named, talk("a", "b"), tools=[{"name": "get"}]).startswith("get<|im_start|>"))
        self.assertTrue(self.text(named, talk("a", "b")).startswith("<|im_start|>"))

    def test_the_generation_tag_says_what_is_learned(self):
        tagged = CHATML.replace(
            "{{ '<|im_start|>' + m.role + '\n' + m.content + '<|im_end|>\n' }}",
            "<|im_start|>{{ m.role }}\n{% if m.role == 'assistant' %}{% generation %}{{ m.content }}<|im_end|>"
            "{% endgeneration %}{% else %}{{ m.content }}<|im_end|>{% endif %}{{ '\n' }}",
        )
        messages = talk("a", "b 🌾", "c", "d", "e")
        replies = [("b 🌾<|im_end|>", "<|im_end|>"), ("d<|im_end|>", "<|im_end|>")]
        self.assertEqual(self.learned(tagged, messages)[0], [replies])
        self.assertEqual(self.text(tagged, messages), "".join(
            f"<|im_start|>{m['role']}\n{m['content']}<|im_end|>\n" for m in messages))
        # The token that ends a turn is learned though it stands behind the tag; other tokens are not.
        outside = tagged.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}<|im_end|>")
        self.assertEqual(self.learned(outside, messages)[0], [replies])
        none = tagged.replace("<|im_end|>{% endgeneration %}", "{% endgeneration %}\n")
        self.assertEqual(self.learned(none, messages)[0], [[("b 🌾", ""), ("d", "")]])
        # In a macro, captured and trimmed, and where a macro is defined inside a loop.
        macro = (
            "{% macro reply(m) %}{% generation %}{{ m.content }}</s>{% endgeneration %}{% endmacro %}"
            "{% for m in messages %}{% if m.role == 'assistant' %}{% set text %}{{ reply(m) }}{% endset %}{{ text | trim }}"
            "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
        )
        self.assertEqual(self.learned(macro, messages)[0], [[("b 🌾</s>", "</s>"), ("d</s>", "</s>")]])
        self.assertEqual(self.text(macro, messages), "[a]b 🌾</s>[c]d</s>[e]")

    def test_replies_are_learned_from_behind_their_opening_to_the_token_that_ends_them(self):
        end, reply = "<|im_end|>", [("b<|im_end|>\n", "<|im_end|>")]
        for name, template, messages, expected in (
            ("plain", CHATML, talk("a", "b", "c", "d"), [reply + [("d<|im_end|>\n", end)]]),
            ("assistant first", CHATML, talk("b", "c", "d", first="assistant"), [reply + [("d<|im_end|>\n", end)]]),
            ("assistant first, which the template answers with a system message", DEFAULT_SYSTEM,
             talk("b", "c", first="assistant"), [reply]),
            ("system, assistant", DEFAULT_SYSTEM, [{"role": "system", "content": "s"}, *talk("b", first="assistant")], [reply]),
            ("assistant twice", CHATML, [*talk("a", "b"), *talk("e", first="assistant")], [reply + [("e<|im_end|>\n", end)]]),
            ("an end that is written late", LATE_END, talk("a", "b", "c", "d"), [reply + [("d<|im_end|>\n", end)]]),
            ("no token at the end", ALPACA, talk("a", "b", "c", "d"), [[("b\n\n", ""), ("d\n\n", "")]]),
            ("no opening", "{% for m in messages %}[{{ m.content }}]</s>{% endfor %}", talk("a", "b"), [[("[b]</s>", "</s>")]]),
            ("an opening that replies do not have", THINK_FIRST, talk("a", "b"), [reply]),
            ("weights", CHATML, [*talk("a"), {**talk("x", first="assistant")[0], "weight": 0}, *talk("c", "b")], [reply]),
        ):
            with self.subTest(name):
                self.assertEqual(self.learned(template, messages)[0], expected)
        self.assertEqual(self.learned(THINK_FIRST, talk("a", "b"))[1], {
            "replies that begin otherwise than generation opens them": 1})
        self.assertEqual(self.learned(CHATML, talk("a", "b", "c", "d", weight=0))[0], [])

    def test_a_reply_begins_behind_its_question_though_generation_is_asked_otherwise(self):
        # As Mistral's: the system text goes to the last message, and only if that is a question.
        late_system = (
            "{% for m in messages if m.role != 'system' %}{% if m.role == 'user' %}[INST]{% if loop.last %}{{ messages[0].content }}"
            "{% endif %}{{ m.content }}[/INST]{% else %} {{ m.content }}</s>{% endif %}{% endfor %}"
        )
        opens = late_system + "{% if add_generation_prompt %}<think>{% endif %}"
        messages = [{"role": "system", "content": "sir"}, *talk("ask", "b", "at second", "d")]
        for template in (late_system, opens):
            replies, notes = self.learned(template, messages)
            self.assertEqual(replies, [[(" b</s>", "</s>"), (" d</s>", "</s>")]])
            self.assertEqual(notes["replies that begin otherwise than generation opens them"], 2)

    def test_a_long_conversation_is_rendered_in_time(self):
        begin = time.process_time()
        reply = self.ask(THINKING, talk(*(f"message {number}" for number in range(400))))
        self.assertEqual(len(reply["examples"]), 200)
        self.assertLess(time.process_time() - begin, chat_template.SECONDS / 4)
        self.assertEqual([chat_template.common(*texts) for texts in (("ab", "abc", "abd"), ("", "a"), ("b", "a"), ("a",))],
                         [2, 0, 0, 1])

    def test_a_token_that_ends_the_whole_text_makes_no_example_of_its_own(self):
        closed = CHATML.replace("{% endif %}", "{% else %}</s>{% endif %}")
        replies = [("b<|im_end|>\n", "<|im_end|>"), ("d<|im_end|>\n</s>", "</s>")]
        self.assertEqual(self.learned(closed, talk("a", "b", "c", "d")), ([replies], {}))
        self.assertEqual(self.learned(closed, talk("a", "b", "c")), ([replies[:1]], {}))
        self.assertEqual(self.text(closed, talk("a", "b", "c"))[-5:], "\n</s>")
        reply = self.ask(THINKING, talk("a", "b", "c"))  # where the reply changes, what follows it is left out
        self.assertEqual(reply["notes"], {"messages behind the last reply, left out": 1})

    def test_weights_hold_with_the_generation_tag(self):
        tagged = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% generation %}{{ m.content }}</s>{% endgeneration %}"
            "{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
        )
        messages = talk("a", "b", "c", "d", "e", "f")
        messages[3]["weight"], messages[5]["weight"] = 0, 0.5
        self.assertEqual(self.learned(tagged, messages), ([[("b</s>", "</s>"), ("f</s>", "</s>")]], {
            "replies of weight 0, not learned": 1, "replies of weight 0.5, learned as of weight 1": 1}))
        first = [{**talk("x", first="assistant")[0], "weight": 0}, *talk("a", "b")]
        self.assertEqual(self.learned(tagged, first)[0], [[("b</s>", "</s>")]])
        never = "{% if false %}{% generation %}{% endgeneration %}{% endif %}" + CHATML
        self.assertEqual(self.learned(never, talk("a", "b"))[0], [[]])
        inside = (
            "{% for m in messages %}{% if m.role == 'assistant' %}{% set text %}{% generation %} {{ m.content }}</s> "
            "{% endgeneration %}{% endset %}{{ text | trim }}{% else %}[{{ m.content }}]{% endif %}{% endfor %}"
        )
        self.assertEqual(self.text(inside, talk("a", "b")), "[a]b</s>")
        self.assertEqual(self.learned(inside, talk("a", "b"))[1], {
            "conversations whose {% generation %} the template changes once more, replies found without it": 1})

    def test_a_reply_that_is_written_differently_later_is_learned_as_it_is_generated(self):
        messages = talk("a", "b", "c", "d")
        for message, thought in zip(messages[1::2], ("1", "2")):
            message["reasoning"] = thought
        reply = self.ask(THINKING, messages)
        first = "<|im_start|>user\na<|im_end|>\n<|im_start|>assistant\n<think>1</think>b<|im_end|>\n"
        second = first.replace("<think>1</think>", "") + (
            "<|im_start|>user\nc<|im_end|>\n<|im_start|>assistant\n<think>2</think>d<|im_end|>\n")
        self.assertEqual([text for text, _ in reply["examples"]], [first, second])
        self.assertEqual(self.learned(THINKING, messages)[0], [
            [("<think>1</think>b<|im_end|>\n", "<|im_end|>")], [("<think>2</think>d<|im_end|>\n", "<|im_end|>")]])
        self.assertEqual(reply["notes"], {"more examples, for the template writes earlier replies differently": 1})

    def test_calls_of_tools_and_missing_content_are_written_as_the_template_wants_them(self):
        call = {"type": "function", "function": {"name": "get", "arguments": '{"n": 1}'}}
        messages = [*talk("a"), {"role": "assistant", "content": None, "tool_calls": [call]}]
        as_json = CHATML.replace("m.content + '<|im", "(m.content or '') + (m.tool_calls[0].function | tojson if m.tool_calls else '') + '<|im")
        as_text = as_json.replace("(m.tool_calls[0].function | tojson", "('call ' + m.tool_calls[0].function.arguments")
        printed = "{% for m in messages %}[{{ m.content }}{{ m.tool_calls }}]</s>{% endfor %}"
        null = CHATML.replace("m.content +", "(m.tool_calls[0].function.name if m.content is none else m.content) +")
        for template, expected in (
            (as_json, '{"name": "get", "arguments": {"n": 1}}<|im_end|>\n'), (as_text, 'call {"n": 1}<|im_end|>\n'),
            (null, "get<|im_end|>\n"), (printed, "[[{'type': 'function', 'function': {'name': 'get', 'arguments': {'n': 1}}}]]</s>"),
        ):
            with self.subTest(template=template):
                self.assertEqual(self.learned(template, messages)[0][0][0][0], expected)
                self.assertEqual(self.learned(template, messages)[1], {})

    def test_forms_of_a_message_that_a_template_wants(self):
        compact = {"function": {"name": "f", "arguments": '{"n":1}'}}
        either = CHATML.replace("m.content +", "(m.tool_calls[0].function.arguments if m.tool_calls and "
                                "m.tool_calls[0].function.arguments is string else m.content) +")
        asked = [*talk("a"), {"role": "assistant", "content": "", "tool_calls": [compact]}]
        self.assertEqual(self.learned(either, asked)[0], [[('{"n":1}<|im_end|>\n', "<|im_end|>")]])

        parts = [{"type": "text", "text": " a "}, {"type": "text", "text": "b"}]
        listed = [{"role": "user", "content": parts}, {"role": "assistant", "content": parts}]
        loop = "{% for m in messages %}{% for p in m.content %}({{ p.text | trim }}){% endfor %}</s>{% endfor %}"
        only_text = CHATML.replace("m.content +", "(m.content if m.content is string else '') +")
        printed = "{% for m in messages %}[{{ m.content | trim }}]</s>{% endfor %}"
        for template, expected in ((loop, "(a)(b)</s>" * 2), (printed, "[a b]</s>" * 2),
                                   (only_text, "<|im_start|>user\n a b<|im_end|>\n<|im_start|>assistant\n a b<|im_end|>\n")):
            with self.subTest(template=template):
                self.assertEqual(self.text(template, listed), expected)

        thinks = CHATML.replace("m.content +", "(m.reasoning_content or '') + (m.thinking or '') + m.content +")
        for name in ("reasoning_content", "reasoning", "thinking"):
            thought = [*talk("a"), {"role": "assistant", "content": "b", name: "t"}]
            self.assertEqual(self.learned(thinks, thought), ([[("ttb<|im_end|>\n", "<|im_end|>")]], {}))
            self.assertEqual(self.learned(CHATML, thought)[1], {f"messages whose '{name}' the template does not write": 1})
        upper = CHATML.replace("m.content", "m.content | upper")
        self.assertEqual(self.learned(upper, talk("a", "b"))[1], {})

    def test_what_a_template_does_not_write_is_counted(self):
        only_talk = "{% for m in messages if m.role in ('user', 'assistant') %}[{{ m.content }}]</s>{% endfor %}"
        messages = [
            {"role": "system", "content": "s"}, *talk("a", "b"), {"role": "user", "content": "c", "name": "Anna"},
            {"role": "assistant", "content": "", "tool_calls": [{"function": {"name": "f", "arguments": {}}}]},
            {"role": "tool", "content": "1"}, {"role": "assistant", "content": ""},
        ]
        _, notes = self.learned(only_talk, messages, tools=[{"name": "f"}], documents=[{"t": 1}])
        self.assertEqual(notes, {
            "messages of role system that the template does not write": 1,
            "messages of role tool that the template does not write": 1,
            "messages whose 'name' the template does not write": 1,
            "messages whose 'tool_calls' the template does not write": 1,
            "conversations whose 'tools' the template does not write": 1,
            "conversations whose 'documents' the template does not write": 1,
            "replies that are empty": 1,
        })
        self.assertEqual(self.learned(CHATML, talk("a", "b", "a", "b"))[1], {})  # texts that are alike
        empty = talk("a", "b", name="", tool_calls=[], audio={}, thinking=None)
        self.assertEqual(self.learned(CHATML, empty)[1], {})

    def test_what_a_template_refuses_is_left_out_with_the_reason(self):
        refusing = "{% if messages[0].role == 'system' %}{{ raise_exception('no system role') }}{% endif %}" + CHATML
        reply = self.ask(refusing, [{"role": "system", "content": "s"}, *talk("a", "b")])
        self.assertIn("no system role", reply["left_out"])
        self.assertEqual(json.loads(json.dumps(self.ask(refusing, talk("a", "b"))))["examples"][0][1], [[51, 63, "<|im_end|>"]])


if __name__ == "__main__":
    unittest.main()
