"""A run's TOML, its model in transformers, and the run itself: what repeats a run elsewhere reads these."""

import os
import subprocess
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from quern.base.fault import CONFIG, Fault, importing, reading
from quern.base.json_shape import parse, parse_toml
from quern.runs.run_log import read_records

# As quern's option tables have them; keys that a tool needs and a config may leave out.
DEFAULTS: dict[str, dict[str, Any]] = {
    "train": {"micro_batch": 8, "sequence": 256, "accumulation": 1, "seed": 1, "steps": 1000},
    "optimizer": {"clip_norm": 1.0, "learning_rate": 3e-4},
    "optimizer.adamw": {"beta1": 0.9, "beta2": 0.95, "eps": 1e-8, "weight_decay": 0.1},
}


def toml(text: str, where: str | Path) -> dict[str, Any]:
    try:
        return parse_toml(text)
    except ValueError as error:
        raise Fault(where, "not valid TOML", str(error), code=CONFIG) from None


class RunConfig:
    """Dotted look-up in a config: run["train.sequence"]. `overrides` are words "a.b=value", value as in TOML or a word."""

    def __init__(self, path: str | Path, overrides: Iterable[str] = ()) -> None:
        self.path = Path(path)
        with reading(path):
            text = self.path.read_text(encoding="utf-8-sig")
        self.tables = toml(text, path)
        self.override(overrides)

    @classmethod
    def from_tables(cls, tables: dict[str, Any]) -> "RunConfig":
        run = cls.__new__(cls)
        run.path, run.tables = Path("the script"), tables
        return run

    def override(self, overrides: Iterable[str]) -> None:
        for word in overrides:
            key, equals, text = word.partition("=")
            if not key or not equals:
                raise Fault("--set", "not an assignment", word, "section.key=value", code=CONFIG)
            try:
                value: Any = toml(f"value = {text}", "--set")["value"]
            except Fault:
                value = text
            *tables, name = key.split(".")
            table = self.tables
            for part in tables:
                table = table.setdefault(part, {})
                if not isinstance(table, dict):
                    raise Fault("--set", key, "a value", f"a table {part} in {self.path}", code=CONFIG)
            table[name] = value

    def find(self, key: str) -> Any:
        value: Any = self.tables
        for part in key.split("."):
            if not isinstance(value, dict) or part not in value:
                table, _, name = key.rpartition(".")
                return DEFAULTS.get(table, {}).get(name)
            value = value[part]
        return os.path.expanduser(value) if isinstance(value, str) else value

    def __getitem__(self, key: str) -> Any:
        value = self.find(key)
        if value is None:
            raise Fault(self.path, key, "nothing", "a value", code=CONFIG)
        return value

    def transformers_config(self) -> Any:
        """The model as a transformers configuration: [model.<id>] laid over the file that model.config names."""
        with importing("transformers"):
            import transformers
            from transformers import AutoConfig

        model = self["model.id"]
        fields = {}
        if self.find("model.config"):
            source = Path(self["model.config"])
            source = source / "config.json" if source.is_dir() else source
            with reading(source):
                fields = parse(source.read_bytes(), source)
        fields.update(self.find(f"model.{model}") or {})
        fields.pop("model_type", None)
        # quern's defaults, where transformers has others.
        fields.setdefault("tie_word_embeddings", False)
        fields.setdefault("num_key_value_heads", fields.get("num_attention_heads"))
        fields.setdefault("use_cache", False)
        if int(transformers.__version__.split(".")[0]) >= 5 and "rope_theta" in fields:
            rope = fields.pop("rope_scaling", None) or fields.pop("rope_parameters", None) or {"rope_type": "default"}
            fields["rope_parameters"] = {**rope, "rope_theta": fields.pop("rope_theta")}
        return AutoConfig.for_model(model, **fields)


def train(
    quern: str | Path, config: str | Path, settings: Mapping[str, Any], console: Path
) -> list[dict[str, Any]]:
    """Runs `quern train` with {key: value} laid over the config, its output in the file `console`. Returns the step
    events of its log."""
    command = [str(quern), "train", str(config)]
    for key, value in settings.items():
        command += ["--set", f"{key}={value}"]
    with open(console, "w", encoding="utf-8") as out:
        status = subprocess.run(command, stdout=out, stderr=subprocess.STDOUT, check=False).returncode
    if status != 0:
        raise Fault(f"quern train {config}", "failed", f"exit code {status}", advice=f"see {console}", code=status)
    log = Path(settings["log.directory"]) / "log.jsonl"
    return [record for _, record in read_records(log) if record["event"] == "step"]
