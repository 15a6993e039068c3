"""`ecgmatch report`: runs -> tables, statistics, figures and one page, beside the paper's numbers."""

from pathlib import Path

from ecgmatch_dist.report.build import build_report

__all__ = ["build_report", "main"]


def main(runs: Path, /, out: Path = Path("report"), bench: Path | None = None, replicates: int = 0) -> None:
    """Turn a folder of runs into tables, statistics, figures and one page, beside the paper's numbers.

    Args:
        runs: The folder of run folders, or one run folder.
        out: Where to write index.html, tables/ and figures/.
        bench: JSON of `ecgmatch bench scale`: what a step moves against the number of ranks.
        replicates: Resamples of the test recordings behind each interval; 0: a thousand, fewer for very many runs.
    """
    page = build_report(runs, out, bench, replicates)
    print(f"report: {page}")
