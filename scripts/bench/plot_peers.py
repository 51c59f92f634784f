#!/usr/bin/env python3
"""The picture of the README: speeds beside other programs', from docs/performance/peers.json and its raw files.

    scripts/bench/plot_peers.py                  # writes docs/performance/peers.png
"""

import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT / "frontends" / "python"))
from quern.base.arguments import parser_for, path_argument
from quern.base.end_of_main import script
from quern.base.figures import three_digits
from quern.plots.picture import MUTED, pyplot, save
from tables import read_peers

OWN, OTHER = "#1f77b4", "#c8ccd0"


def draw(content, models, results):
    plt = pyplot(9)
    figure, panels = plt.subplots(
        len(models), 1, figsize=(7.6, 5), layout="constrained", height_ratios=[len(bars) for bars in models.values()]
    )
    for axes, (model, bars) in zip(panels, models.items()):
        names, speeds = list(bars), [speeds[-1] for speeds in bars.values()]
        drawn = axes.barh(names, speeds, color=[OWN if name.startswith("quern") else OTHER for name in names])
        axes.bar_label(drawn, list(map(three_digits, speeds)), padding=3)
        axes.set_title(model, loc="left", fontsize=9, fontweight="bold")
        axes.invert_yaxis()
        axes.set_xticks([])
        axes.spines["bottom"].set_visible(False)
        axes.margins(x=0.08)
    figure.suptitle(content["title"], fontsize=10)
    machines, lengths, commits = (
        " and ".join(sorted({str(result[key]) for result in results.values()}))
        for key in ("device", "sequence", "commit")
    )
    setting = f"{machines}, sequence length {lengths}, micro-batch x accumulation as given. quern {commits}"
    figure.supxlabel(f"{setting}.\n{content['note']}.", fontsize=6, color=MUTED)
    return figure


@script
def main(arguments):
    parser = parser_for(None, __doc__)
    parser.add_argument("-o", "--out", type=path_argument, default=ROOT / "docs/performance/peers.png")
    options = parser.parse_args(arguments)
    save(draw(*read_peers(ROOT / "docs/performance/peers.json")), options.out)


if __name__ == "__main__":
    sys.exit(main())
