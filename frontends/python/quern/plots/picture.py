"""What plots share: matplotlib without a display, texts of others as labels, one way to write a picture."""

import io
from pathlib import Path
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from quern.base.fault import CONFIG, Fault, printable
from quern.base.files import write_file

INK, MUTED, GRID = "#222222", "#777777", "#e6e6e6"
LONGEST_LABEL = 80


def pyplot(font_size: int = 10) -> Any:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    plt.rcParams.update({"font.size": font_size, "axes.spines.top": False, "axes.spines.right": False})
    return plt


def label(text: str) -> str:
    """Shown as it is: matplotlib takes what stands between two $ as a formula, and hides what begins with _."""
    text = printable(text, LONGEST_LABEL).replace("$", r"\$")
    return f" {text}" if text.startswith("_") else text


def add_grid(axes: Axes) -> None:
    axes.margins(x=0.01)
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)


def save(figure: Figure, path: Path) -> None:
    """In the format that the path's suffix names; PNG without one."""
    kind, known = path.suffix[1:].lower() or "png", figure.canvas.get_supported_filetypes()
    if kind not in known:
        raise Fault(path, "unknown kind of picture", path.suffix, "one of " + ", ".join(sorted(known)), code=CONFIG)
    content = io.BytesIO()
    figure.savefig(content, format=kind, dpi=150)
    pyplot().close(figure)
    write_file(path, content.getvalue())
