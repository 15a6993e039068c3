"""`ecgmatch report`: from runs to one page of tables, statistics and figures, beside the paper's numbers.

The modules, each using only earlier ones: runs and run_files read run folders; studies and arrange sort the runs into tables;
resample, calibration and assess use the saved predictions; statistics and paper; tables and significance make the tables;
headline, header, figures, figures_run, claims and sections make the content; formats, page and build write it.
display has the names that all of them show, drawing the style of the figures.
"""

from pathlib import Path
from typing import Literal

from ecgmatch_dist.report.build import build_report

__all__ = ["build_report", "main"]


def main(
    runs: Path,
    /,
    out: Path = Path("report"),
    bench: Path | None = None,
    replicates: int = 0,
    rank: tuple[str, ...] = (),
    check: Literal["", "paper"] = "",
) -> None:
    """Turn a folder of runs into tables, statistics, figures and one page, beside the paper's numbers.

    Args:
        runs: The folder of run folders, or one run folder.
        out: Where to write index.html, tables/ and figures/.
        bench: JSON file of `ecgmatch bench scale`, for the figure of bytes per rank and step.
        replicates: Resamples of the test recordings per interval; 0: a thousand, fewer for very many runs.
        rank: Methods that take part in the Friedman test beside the paper's eight, as in --rank supervised.
        check: paper: list, claim by claim of the paper, whether these runs support it, contradict it or cannot tell.
    """
    page = build_report(runs, out, bench, replicates, also_rank=rank, check_claims=check == "paper")
    if check:
        print((page.parent / "tables" / "claims.md").read_text(encoding="utf-8"))
    print(f"report: {page}")
