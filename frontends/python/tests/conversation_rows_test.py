"""Conversations in the forms that people write: all become messages, and unused fields are counted."""

import json
import unittest

from folder_test_case import FolderTestCase
from quern.base.fault import Fault
from quern.tokens.conversation_rows import read_conversations
from quern.tokens.documents import find_files, read_rows, without_nulls
from quern.tokens.tally import Tally

USER, ASSISTANT = {"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}


class ConversationRowsTest(FolderTestCase):
    def read(self, *rows, field=None):
        self.tally = Tally()
        return list(read_conversations(((f"f:{n}", row) for n, row in enumerate(rows, 1)), field, self.tally))

    def messages(self, row, field=None):
        (conversation,) = self.read(row, field=field)
        return conversation.messages

    def test_forms_of_messages(self):
        call = {"name": "f", "arguments": {"n": 1}}
        for row, expected in (
            ({"messages": [USER, ASSISTANT]}, [USER, ASSISTANT]),
            ({"conversations": [{"from": "human", "value": "a"}, {"from": "gpt", "value": "b"}]}, [USER, ASSISTANT]),
            ({"conversation": [{"role": "user", "value": "a"}, {"from": "GPT", "content": "b", "value": None}]}, [USER, ASSISTANT]),
            ({"conversations": [{"from": "system", "value": "s"}, {"from": "human", "value": "a"}, {"from": "gpt", "value": "b"},
                                {"from": "observation", "value": "o"}]},
             [{"role": "system", "content": "s"}, USER, ASSISTANT, {"role": "tool", "content": "o"}]),
            ({"system": "s", "conversations": [USER, ASSISTANT]}, [{"role": "system", "content": "s"}, USER, ASSISTANT]),
            ({"system": "s", "messages": [{"role": "system", "content": "t"}, ASSISTANT]}, [{"role": "system", "content": "t"}, ASSISTANT]),
            ({"messages": [{**USER, "name": None}, ASSISTANT]}, [USER, ASSISTANT]),
            ({"messages": [USER, {"role": "assistant", "content": [{"type": "text", "text": "b"}, "c", {"text": "\n"}]}]},
             [USER, {"role": "assistant", "content": [{"type": "text", "text": text} for text in ("b", "c", "\n")]}]),
            ({"messages": [USER, {"role": "assistant", "tool_calls": [call]}]},
             [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]),
            ({"conversations": [{"from": "human", "value": "a"}, {"from": "function_call", "value": json.dumps(call)}]},
             [USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}]}]),
            ({"conversations": [USER, {"from": "function_call", "value": json.dumps([call, call])}]},
             [USER, {"role": "assistant", "content": None, "tool_calls": [{"type": "function", "function": call}] * 2}]),
            ({"messages": json.dumps([USER, ASSISTANT])}, [USER, ASSISTANT]),
            ({"messages": None, "conversations": [USER, ASSISTANT]}, [USER, ASSISTANT]),
            ({"messages": [{"role": "User", "content": "a"}, {"role": "Assistant", "content": "b"}]}, [USER, ASSISTANT]),
        ):
            with self.subTest(row=row):
                self.assertEqual(self.messages(row), expected)
                self.assertEqual(self.tally.entries, {})
        self.assertEqual(self.messages({"talk": [USER, ASSISTANT]}, field="talk"), [USER, ASSISTANT])

    def test_variables_of_the_template(self):
        tools = [{"type": "function", "function": {"name": "f"}}]
        row = {"messages": [ASSISTANT], "tools": json.dumps(tools), "documents": [{"t": 1}], "chat_template_kwargs": {"think": False}}
        (conversation,) = self.read(row)
        self.assertEqual(conversation.variables, {"tools": tools, "documents": [{"t": 1}], "think": False})
        row["chat_template_kwargs"] = json.dumps(row["chat_template_kwargs"])
        self.assertEqual(self.read(row)[0].variables, conversation.variables)
        for empty in (None, "", "[]", " ", []):
            (conversation,) = self.read({"messages": [ASSISTANT], "tools": empty})
            self.assertEqual(conversation.variables, {})
        other = {"messages": [ASSISTANT], "tools": tools}
        self.assertNotEqual(self.read(other)[0].text(), conversation.text())

    def test_what_is_of_no_use_is_counted_and_what_is_wrong_is_named(self):
        picture = {"role": "user", "content": [{"type": "image"}]}
        found = self.read({"messages": []}, {"messages": None}, {"messages": [USER]}, {"messages": [picture, ASSISTANT]},
                          {"messages": [ASSISTANT], "id": 7, "score": None}, {"messages": [{"role": "user", "content": 5}, ASSISTANT]})
        self.assertEqual(len(found), 1)
        self.assertEqual(self.tally.figures(), {
            "conversations left out: no message is the assistant's": 3,
            "conversations left out: a message has content that is not text": 2,
            "rows whose 'id' is not used": 1,
        })
        for row, expected in (
            ({"prompt": "a", "completion": "b"}, "f:1: no list of messages with role and content in field 'messages': found ['completion', 'prompt']"),
            ("text", "no list of messages"),
            ({"messages": "text"}, "no list of messages"),
            ({"messages": "[{"}, "f:1: messages: not JSON"),
            ({"messages": "[" * 99 + "]" * 99}, "nested too deeply"),
            ({"messages": [ASSISTANT], "tools": "[" * 99 + "]" * 99}, "nested too deeply"),
            ({"messages": [ASSISTANT], "chat_template_kwargs": "[]"}, "chat_template_kwargs: found list, expected an object"),
            ({"messages": ["a"]}, "no list of messages"),
            ({"messages": [{"content": "a"}]}, "no list of messages"),
            ({"messages": [{"role": "user"}]}, "no list of messages"),
            ({"messages": [ASSISTANT], "tools": "{"}, "f:1: tools: not JSON"),
            ({"messages": [ASSISTANT], "tools": {"name": "f"}}, "f:1: tools: found dict, expected a list"),
            ({"messages": [ASSISTANT], "chat_template_kwargs": {"messages": []}}, "is the tokenizer's to set"),
            ({"conversations": [{"from": "function_call", "value": "f()"}]}, "not JSON"),
        ):
            with self.subTest(row=row), self.assertRaises(Fault) as fault:
                self.read(row)
            self.assertIn(expected, str(fault.exception))

    def test_a_key_that_an_object_has_twice_is_a_fault(self):
        path = self.folder / "a.jsonl"
        path.write_text(json.dumps({"messages": [USER, ASSISTANT]})[:-1] + ', "messages": []}\n')
        with self.assertRaises(Fault) as fault:
            list(read_rows([path]))
        self.assertIn('a.jsonl:1: not JSON: found the key "messages" twice in one object', str(fault.exception))

    def test_files_of_rows(self):
        rows = [{"messages": [USER, ASSISTANT]}, {"messages": [ASSISTANT]}]
        for name, text in (
            ("a.jsonl", "\n".join(map(json.dumps, rows))), ("b.JSONL", "\ufeff" + "\r\n".join(map(json.dumps, rows))),
            ("c.json", json.dumps(rows, indent=1)), ("d.json", "\ufeff\n " + json.dumps(rows)),
            ("e.json", "\n".join(map(json.dumps, rows))),
        ):
            path = self.folder / name
            path.write_text(text, encoding="utf-8", newline="")
            files = find_files([str(path)], [".jsonl", ".json"], Tally())
            with self.subTest(name=name):
                self.assertEqual([row for _, row in read_rows(files)], rows)
        (self.folder / "f.jsonl").symlink_to("a.jsonl")
        (self.folder / "g").symlink_to(".")
        tally = Tally()
        found = find_files([str(self.folder)], [".jsonl", ".json"], tally)
        self.assertEqual([path.name for path in found], ["a.jsonl", "b.JSONL"])
        self.assertEqual(tally.figures()["links passed over, whose files are read under other names"], 1)
        self.assertEqual(without_nulls({"a": [{"b": None, "c": [None, 0]}], "d": None}), {"a": [{"c": [None, 0]}]})


if __name__ == "__main__":
    unittest.main()
