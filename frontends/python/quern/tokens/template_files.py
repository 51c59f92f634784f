"""The chat templates of a tokenizer: where they are read, and the files that carry those which were used.

As in transformers, files come before the key of tokenizer_config.json, and a tokenizer may have several by name:
"tool_use" is taken for conversations with tools, "default" for others.
"""

import re
from pathlib import Path
from typing import Any

from quern.base.fault import Fault, reading
from quern.base.files import refuse_pointer
from quern.base.json_shape import parse

TEMPLATE_FILE, TEMPLATES_FOLDER, CONFIG = "chat_template.jinja", "additional_chat_templates", "tokenizer_config.json"
SUFFIX = ".jinja"
DEFAULT, WITH_TOOLS = "default", "tool_use"

Templates = dict[str, str]  # by name


def template_paths(folder: Path) -> dict[str, Path]:
    paths = {path.name.removesuffix(SUFFIX): path for path in sorted((folder / TEMPLATES_FOLDER).glob("*" + SUFFIX))}
    default = folder / TEMPLATE_FILE
    return {DEFAULT: default, **paths} if default.is_file() else paths


def read_template(path: Path) -> str:
    with reading(path):
        text = path.read_text(encoding="utf-8-sig")
    refuse_pointer(path, text[:64].encode())
    return text


def read_templates(folder: Path, config: dict[str, Any], given: Path | None) -> tuple[str, Templates]:
    """(name for messages, templates): of the file `given`, of the tokenizer's templates the one of that name, or all."""
    key = config.get("chat_template")
    name = f"the chat template of {folder / CONFIG}"
    paths = template_paths(folder)
    if given and (given.exists() or given.suffix == SUFFIX):
        return str(given), {DEFAULT: read_template(given)}
    if paths:
        name = str(next(iter(paths.values())))
        templates = {name: read_template(path) for name, path in paths.items()}
    elif isinstance(key, list):
        templates = {entry["name"]: entry["template"] for entry in key if isinstance(entry, dict)
                     and isinstance(entry.get("name"), str) and isinstance(entry.get("template"), str)}
    else:
        templates = {DEFAULT: key} if isinstance(key, str) else {}
    for template in templates:
        if not re.fullmatch(r"[\w-][\w.-]*", template):
            raise Fault(name, "not a usable name of a template", repr(template), "letters, digits and _")
    wanted = str(given) if given else DEFAULT
    if wanted not in templates:
        what = f"no chat template '{wanted}'" if given or templates else "no chat_template"
        raise Fault(given or folder / CONFIG, what, ", ".join(templates), "", "name a file with one with --chat-template")
    return (f"{name} '{wanted}'", {DEFAULT: templates[wanted]}) if given else (name, templates)


def with_templates(files: dict[str, bytes], templates: Templates, folder: Path, config_bytes: Any) -> dict[str, bytes]:
    """A tokenizer's files with these templates in place of its own."""
    files = {name: content for name, content in files.items() if not name.startswith(TEMPLATES_FOLDER)}
    for name, text in templates.items():
        files[TEMPLATE_FILE if name == DEFAULT else f"{TEMPLATES_FOLDER}/{name}{SUFFIX}"] = text.encode()
    config = parse(files.get(CONFIG, b"{}"), folder / CONFIG)
    if "chat_template" in config:  # which libraries before the files read
        named = [{"name": name, "template": text} for name, text in templates.items()]
        files[CONFIG] = config_bytes({**config, "chat_template": named if len(named) > 1 else templates[DEFAULT]})
    return files
