#!/usr/bin/env python3
"""The picture of the README: speeds beside those of other programs, from docs/performance/peers.json.

    scripts/bench/plot_peers.py                  # writes docs/performance/peers.png
"""

import json
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for, path_argument
from quern.base.end_of_main import script
from quern.plots.picture import MUTED, pyplot, save

OWN, OTHER = "#1f77b4", "#c8ccd0"


def draw(data):
    plt = pyplot(9)
    models = data["models"]
    figure, panels = plt.subplots(
        len(models), 1, figsize=(7.6, 4.2), layout="constrained", height_ratios=[len(bars) for bars in models.values()]
    )
    for axes, (model, bars) in zip(panels, models.items()):
        names, speeds = list(bars), list(bars.values())
        drawn = axes.barh(names, speeds, color=[OWN if name.startswith("quern") else OTHER for name in names])
        axes.bar_label(drawn, [f"{speed:g}k" for speed in speeds], padding=3)
        axes.set_title(model, loc="left", fontsize=9, fontweight="bold")
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.margins(x=0.08)
    figure.suptitle(data["title"], fontsize=10)
    figure.supxlabel(f"{data['machine']}. quern {data['quern']}.", fontsize=6, color=MUTED)
    return figure


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("-o", "--out", type=path_argument, default=ROOT / "docs/performance/peers.png")
    options = parser.parse_args(arguments)
    data = json.loads((ROOT / "docs/performance/peers.json").read_text(encoding="utf-8"))
    save(draw(data), options.out)


if __name__ == "__main__":
    sys.exit(main())
