"""Runs driven from Python: what `import quern` offers beside the tools. docs/python.md describes it."""
