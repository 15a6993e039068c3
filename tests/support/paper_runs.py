"""Run folders whose test metrics are the paper's printed means, as if they were ours."""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path

import tests.support.run_factory as factory
from ecgmatch_dist.report import display, paper

RATIO = {"within": 0.05, "cross": 0.01}


def write_paper_runs(root: Path, protocol: str, methods: Iterable[str], leave_out: tuple[str, ...] = ()) -> None:
    """One run per method and database, of the paper's size, without predictions. Methods that the paper lacks get FixMatch's
    numbers: a supervised start and an upper bound must change nothing."""
    for database in display.DATABASES:
        if database in leave_out:
            continue
        template = factory.write_run(
            root / "template", protocol=protocol, database=database, ratio=RATIO[protocol], sizes=factory.PAPER_SIZES
        )
        for method in methods:
            row = method if method in paper.METHODS else "fixmatch"
            folder = root / "runs" / f"{template.name.removesuffix('.ecgmatch')}.{method}"
            folder.mkdir(parents=True)
            for name in ("environment.json", "split.json", "metrics.jsonl"):
                shutil.copy(template / name, folder / name)
            config = json.loads((template / "config.json").read_text())
            config |= {"method": {"name": method}, "fingerprint": method} if method != "ecgmatch" else {}
            result = json.loads((template / "result.json").read_text()) | {"method": method, "fingerprint": method}
            for metric in display.METRICS:
                result["test"][metric.key] = paper.table("main")[protocol, database, row, metric.key].mean
            (folder / "config.json").write_text(json.dumps(config))
            (folder / "result.json").write_text(json.dumps(result))
    shutil.rmtree(root / "template")
