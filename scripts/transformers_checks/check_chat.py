#!/usr/bin/env python3
"""Compares what chat templates make of conversations with transformers' apply_chat_template.

    scripts/transformers_checks/check_chat.py [--write]

Renders the conversations of frontends/python/tests/chat_reference under each template there, and compares texts, tokens
and what {% generation %} marks with its expected.json, to which chat_reference_test.py holds quern; --write renews that
file. Left out are conversations that transformers refuses, and those that quern takes differently on purpose: a text of
parts which a template would write as Python does. Needs transformers.
"""

import json
import sys
import tempfile
from pathlib import Path

PYTHON = Path(__file__).resolve().parents[2] / "frontends" / "python"
sys.path[:0] = [str(PYTHON), str(PYTHON / "tests")]
from chat_reference_test import CONVERSATIONS, FOLDER, NAMED, TEMPLATES, hash_of, tokenizers, write_model
from quern.base.arguments import parser_for
from quern.base.end_of_main import script
from quern.base.fault import Fault


SPELLED = "spelled"  # the conversation whose messages spell special tokens


def rendered(tokenizer, name):
    """(text, tokens, places learned); None for what transformers refuses."""
    row = CONVERSATIONS[name]
    variables = {**row.get("chat_template_kwargs", {}), **{key: row[key] for key in ("tools", "documents") if key in row}}
    how = {"sanitize_control_tokens": True} if name == SPELLED else {"return_assistant_tokens_mask": True}
    try:
        text = tokenizer.apply_chat_template(row["messages"], tokenize=False, **variables)
        tokens = tokenizer.apply_chat_template(row["messages"], return_dict=True, **how, **variables)
    except Exception:  # of many kinds: jinja2's, TypeError, ValueError
        return None
    return text, tokens["input_ids"], [place for place, learned in enumerate(tokens.get("assistant_masks", [])) if learned]


def of_transformers():
    from transformers import PreTrainedTokenizerFast

    made, found = tokenizers(), {}
    for template in (*TEMPLATES, *NAMED):
        results = {}
        for kind, tokenizer in made.items():
            with tempfile.TemporaryDirectory() as folder:
                write_model(Path(folder), tokenizer, template)
                loaded = PreTrainedTokenizerFast.from_pretrained(folder)
            results[kind] = {name: rendered(loaded, name) for name in CONVERSATIONS}
        for name, row in CONVERSATIONS.items():
            outcomes = {kind: results[kind][name] for kind in made}
            if any(outcome is None for outcome in outcomes.values()):
                continue
            text = outcomes["bytes"][0]
            parts = [part["text"] for m in row["messages"] if isinstance(m["content"], list) for part in m["content"]]
            if parts and ("'type': 'text'" in text or not all(part.strip() in text for part in parts)):
                continue
            if name == SPELLED:  # transformers has no space where a text begins with a spelled token
                del outcomes["legacy"]
            entry = {"text": text, "tokens": {kind: hash_of(tokens) for kind, (_, tokens, _) in outcomes.items()}}
            if name != SPELLED and "{% generation %}" in TEMPLATES.get(template, ""):
                entry["learned"] = {kind: hash_of(learned) for kind, (*_, learned) in outcomes.items()}
            found.setdefault(template, {})[name] = entry
    return found


@script
def main(arguments=None):
    parser = parser_for(None, __doc__)
    parser.add_argument("--write", action="store_true", help="renew expected.json")
    options = parser.parse_args(arguments)
    path, found = FOLDER / "expected.json", of_transformers()
    if options.write:
        path.write_text(json.dumps(found, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    wanted = json.loads(path.read_text(encoding="utf-8"))
    differing = [f"{template}: {name}" for template in wanted.keys() | found.keys()
                 for name in wanted.get(template, {}).keys() | found.get(template, {}).keys()
                 if wanted.get(template, {}).get(name) != found.get(template, {}).get(name)]
    if differing:
        raise Fault(path, "not what transformers makes", ", ".join(sorted(differing)), advice="renew it with --write")
    print(f"{sum(map(len, wanted.values()))} conversations under {len(wanted)} templates as in transformers")


if __name__ == "__main__":
    sys.exit(main())
