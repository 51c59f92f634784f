"""Tools around quern: token files from text, plots and reports of runs, text from trained models. `quern-tools` runs them."""

__version__ = "0.1.0"  # quern's own
