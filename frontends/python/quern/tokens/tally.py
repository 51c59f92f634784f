"""What a command left out, cut or changed: counted, so that nothing is lost without a word."""

from dataclasses import dataclass, field


@dataclass
class Entry:
    count: int
    first: str  # a place, and perhaps a reason


@dataclass
class Tally:
    entries: dict[str, Entry] = field(default_factory=dict)  # by what happened, in the plural

    def add(self, what: str, first: str = "", count: int = 1) -> None:
        if count:
            self.entries.setdefault(what, Entry(0, first)).count += count

    def figures(self) -> dict[str, int]:
        return {what: entry.count for what, entry in self.entries.items()}

    def lines(self) -> list[str]:
        return [
            f"{entry.count:,} {what}" + (f"; the first: {entry.first}" if entry.first else "")
            for what, entry in self.entries.items()
        ]
