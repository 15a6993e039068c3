"""What `ecgmatch sweep` tells before anything runs: its grid in a few lines, missing splits, and each run on request."""

import re
import shutil
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from textwrap import TextWrapper

from ecgmatch_dist.data.splits import RATIO
from ecgmatch_dist.launch.expand import PlannedRun, Sweep

SPLIT = re.compile(r"(?P<protocol>within|cross|mix)(-(?P<database>.+))?@(?P<ratio>[\d.]+)\.s(?P<seed>\d+)")
DATABASE_OPTION = {"within": "--database", "cross": "--test"}


def summary(sweep: Sweep, planned: Sequence[PlannedRun], states: dict[str, str]) -> list[str]:
    """The grid axis by axis, the number of runs, their steps and their states."""
    rows = {"splits": sweep.split} | {f"  {key}": " ".join(map(str, values)) for key, values in sweep.grid.items()}
    if len(sweep.variants) > 1:
        rows["variants"] = " ".join(map(variant_name, sweep.variants))
    starts = {start for run in planned for start in run.starts}
    rows["runs"] = f"{len(planned) - len(starts)}, and {len(starts)} that they start from"
    steps = Counter(shown_steps(run) for run in planned)
    rows["steps"] = ", ".join(f"{text} ({count} runs)" for text, count in steps.most_common())
    kinds = Counter(state.partition(" ")[0] for state in states.values())
    rows["state"] = ", ".join(f"{count} {kind}" for kind, count in kinds.most_common())
    width = max(map(len, rows))
    title = f"{sweep.name}: {len(planned)} runs. {sweep.about}"
    columns = shutil.get_terminal_size().columns
    return [title, *(line for name, text in rows.items() for line in folded(f"  {name:{width}}  ", text, columns))]


def variant_name(variant: Mapping[str, object]) -> str:
    """As in the runs' names: what it trains with, if it says so, and its tag."""
    return ".".join(str(variant[key]) for key in ("method", "tag") if variant.get(key)) or "plain"


def folded(name: str, text: str, columns: int) -> list[str]:
    """Lines of at most so many columns, if no word is longer: a terminal would break names in the middle."""
    fold = TextWrapper(columns, name, " " * len(name), break_long_words=False, break_on_hyphens=False)
    return fold.wrap(text) or [name]


def run_lines(planned: Sequence[PlannedRun], states: dict[str, str]) -> list[str]:
    """One line per run: its number, name, steps, state, and the numbers of the runs that it starts from."""
    number = {run.name: n for n, run in enumerate(planned)}
    width, most = max(len(run.name) for run in planned), max(len(shown_steps(run)) for run in planned)
    lines = []
    for run in planned:
        after = f"  after {', '.join(str(number[start]) for start in run.starts)}" if run.starts else ""
        steps = shown_steps(run)
        lines.append(f"{number[run.name]:4}  {run.name:{width}}  {steps:>{most}} steps  {states[run.name]}{after}")
    return lines


def shown_steps(run: PlannedRun) -> str:
    return f"{run.steps:,}" if run.steps else f"up to {run.config.optim.steps:,}"


def missing_splits(planned: Sequence[PlannedRun]) -> list[Path]:
    """Files of splits that are not there, each once."""
    return [path for path in dict.fromkeys(Path(run.config.split) for run in planned) if not path.is_file()]


def how_to_make(missing: Sequence[Path], shards: str, splits: Path) -> list[str]:
    """The commands that make these splits, one for all seeds of a setting."""
    seeds: dict[tuple[str, str, str], list[str]] = defaultdict(list)
    others = []
    for path in missing:
        if found := SPLIT.fullmatch(path.stem):
            seeds[found["protocol"], found["database"] or "", found["ratio"]].append(found["seed"])
        else:
            others.append(f"  {path}: its name tells no command; see the comment in the sweep's file")
    commands = []
    for (protocol, database, ratio), numbers in seeds.items():
        own, *unlabelled = database.split("+")
        words = ["ecgmatch split", protocol, *([DATABASE_OPTION[protocol], own] if own else [])]
        words += ["--unlabelled-database", *unlabelled] if unlabelled else []
        words += ["--ratio", ratio] if unlabelled or float(ratio) != RATIO[protocol] else []
        words += ["--seeds", *numbers, "--shards", shards, *(["--to", str(splits)] if splits != Path("splits") else [])]
        commands.append(f"  {' '.join(words)}")
    return commands + others
