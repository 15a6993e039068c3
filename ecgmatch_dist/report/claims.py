"""`ecgmatch report --check paper`: each claim of the paper, and whether these runs support it, contradict it or cannot tell.

A published run is a claim. All are judged by test MAP, per protocol, from paired differences of runs on the same split. The
intervals resample the test recordings and the seeds of each database; databases are what they are.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Literal

import numpy as np

from ecgmatch_dist.report import display, figures, paper
from ecgmatch_dist.report.assess import Assessments, replicates_by_seed
from ecgmatch_dist.report.headline import ByName, reasons_to_withhold
from ecgmatch_dist.report.resample import Floats, interval
from ecgmatch_dist.report.runs import FinishedRun
from ecgmatch_dist.report.significance import joint_cell
from ecgmatch_dist.report.studies import Column, Row, Study
from ecgmatch_dist.report.tables import MISSING, Cell, Table, excludes_zero, signed, text_table

Verdict = Literal["supported", "contradicted", "cannot tell"]
MARGIN = 0.01
"""A setting hardly matters if it changes the test MAP by less."""
LEAST_POINTS = 3
"""Values of a setting from which one can say that it hardly matters."""
NOTE = (
    "Test MAP; in brackets the central 95 % over resamples of test recordings and seeds. Supported: the whole interval lies on "
    "the paper's side; contradicted: on the other side. A difference is not judged where one seed, unequal training or a run "
    f"that was still improving could explain it. “Hardly matters”: the whole interval lies within ±{MARGIN:g}."
)
Pair = tuple[Row, Row]


@dataclass(frozen=True)
class Evidence:
    """One difference: the first rows of the pairs minus the second ones, averaged over pairs, databases and seeds."""

    about: str
    mean: float | None
    bounds: tuple[float, float] | None
    runs: tuple[FinishedRun, ...]
    doubts: tuple[str, ...] = ()
    """Why it is not judged."""

    @property
    def text(self) -> str:
        if self.mean is None:
            return MISSING
        return signed(self.mean) + (f" [{signed(self.bounds[0])}, {signed(self.bounds[1])}]" if self.bounds else "")


@dataclass(frozen=True)
class Judgement:
    """A claim on one protocol; `evidence` is what decides it, of several differences the worst for the claim."""

    claim: str
    where: str
    verdict: Verdict
    evidence: Evidence
    why: str


@dataclass(frozen=True)
class Claim:
    """A claim of the paper. `differences` finds what it is about in a study: pairs of rows by name."""

    text: str
    kind: str
    """The study that tests it."""
    differences: Callable[[Study], dict[str, list[Pair]]]
    expected: Sequence[str] = field(default=())
    """Names of differences that the claim needs; without them it cannot be supported."""
    same: bool = False
    """The claim is that the differences are small."""


def judge_all(studies: Sequence[Study], assessed: Assessments, runs: ByName) -> list[Judgement]:
    """Every claim, on each protocol that has runs for it; one that has none is listed all the same."""
    out = []
    for claim in CLAIMS:
        tested = [study for study in studies if study.kind == claim.kind]
        found = [judge(claim, study, assessed, runs) for study in tested if claim.differences(study)]
        nothing = Judgement(claim.text, MISSING, "cannot tell", Evidence("", None, None, ()), "no runs that test it")
        out += found or [nothing]
    return out


def judge(claim: Claim, study: Study, assessed: Assessments, runs: ByName) -> Judgement:
    """Contradicted by one difference, supported only by all of them."""
    found = [compare(study, about, pairs, assessed, runs) for about, pairs in claim.differences(study).items()]
    judged = [(verdict_of(evidence, claim.same), evidence) for evidence in found]
    order = {"contradicted": 0, "cannot tell": 1, "supported": 2}
    (verdict, why), worst = min(judged, key=lambda item: (order[item[0][0]], doubtfulness(item[1], claim.same)))
    lacking = [name for name in claim.expected if name not in {evidence.about for evidence in found}]
    if verdict != "contradicted" and lacking:
        verdict, why = "cannot tell", "; ".join(filter(None, [f"no runs: {', '.join(lacking)}", why]))
    if verdict != "contradicted" and claim.same and len(found) + 1 < LEAST_POINTS:
        verdict, why = "cannot tell", f"only {len(found) + 1} values"
    return Judgement(claim.text, study.title, verdict, worst, why)


def doubtfulness(evidence: Evidence, same: bool) -> float:
    """Smaller is worse for the claim."""
    mean = 0.0 if evidence.mean is None else evidence.mean
    return -abs(mean) if same else mean


def verdict_of(evidence: Evidence, same: bool) -> tuple[Verdict, str]:
    if evidence.doubts:
        return "cannot tell", ", ".join(evidence.doubts)
    if evidence.bounds is None:
        return "cannot tell", "no saved predictions to resample"
    low, high = evidence.bounds
    if same:
        if low > -MARGIN and high < MARGIN:
            return "supported", ""
        outside = low > MARGIN or high < -MARGIN
        return ("contradicted", "") if outside else ("cannot tell", f"the interval reaches beyond ±{MARGIN:g}")
    if not excludes_zero(evidence.bounds):
        return "cannot tell", "the interval includes zero"
    return ("supported", "") if low > 0 else ("contradicted", "")


def compare(study: Study, about: str, pairs: Sequence[Pair], assessed: Assessments, runs: ByName) -> Evidence:
    """The difference over all databases of the study that have runs of every pair."""
    used: dict[str, FinishedRun] = {}
    doubts: dict[str, None] = {}
    means: list[float] = []
    resampled: list[Floats] = []
    for column in study.columns:
        if not all(study.runs(row, column) for pair in pairs for row in pair):
            continue
        for first, second in pairs:
            doubts |= dict.fromkeys(reasons_to_withhold(study, column, first, second, runs))
        seeds = sorted(set.intersection(*({r.seed for r in study.runs(row, column)} for pair in pairs for row in pair)))
        if not seeds:
            continue
        found = {row: {r.seed: r for r in study.runs(row, column)} for pair in pairs for row in pair}
        used |= {str(of[seed].folder): of[seed] for of in found.values() for seed in seeds}
        means.append(float(np.mean([found[a][s].test.map - found[b][s].test.map for a, b in pairs for s in seeds])))
        replicates = resampled_difference(study, column, pairs, seeds, assessed)
        resampled += [] if replicates is None else [replicates]
    if not means:
        return Evidence(about, None, None, (), ("no common database and seed",))
    complete = len(resampled) == len(means)
    bounds = interval(np.mean(resampled, axis=0)) if complete else None
    return Evidence(about, float(np.mean(means)), bounds, tuple(used.values()), tuple(doubts))


def resampled_difference(
    study: Study, column: Column, pairs: Sequence[Pair], seeds: Sequence[int], assessed: Assessments
) -> Floats | None:
    """The difference on one database under resampled recordings and seeds [R]; None where a run has no replicates."""
    rows = {row: replicates_by_seed(study.runs(row, column), "map", assessed) for pair in pairs for row in pair}
    if any(seed not in found for found in rows.values() for seed in seeds):
        return None
    by_seed = np.array([np.mean([rows[a][seed] - rows[b][seed] for a, b in pairs], axis=0) for seed in seeds])  # [S, R]
    drawn = np.random.default_rng(0).integers(len(seeds), size=by_seed.shape)
    out: Floats = np.take_along_axis(by_seed, drawn, axis=0).mean(axis=0)
    return out


def claims_table(studies: Sequence[Study], assessed: Assessments, runs: ByName) -> Table:
    lines: list[list[str | Cell]] = []
    for found in judge_all(studies, assessed, runs):
        evidence = found.evidence
        number = Cell(evidence.text, "missing")
        if evidence.mean is not None:
            number = joint_cell(evidence.text, evidence.mean, evidence.runs)
        n = len(evidence.runs)
        count = joint_cell(str(n), n, evidence.runs) if n else Cell(MISSING, "missing")
        verdict = Cell(found.verdict, bold=found.verdict != "cannot tell")
        lines.append([found.claim, found.where, verdict, evidence.about, number, count, found.why])
    header = ["Claim", "Protocol", "These runs", "Decided by", "Difference", "Runs", "Why"]
    return text_table("claims", "The paper's claims", NOTE, [("", header, lines)])


def against_rivals(study: Study) -> dict[str, list[Pair]]:
    control = study.control
    rivals = [row for row in study.rows if row.key in paper.METHODS and row != control]
    return {row.label: [(control, row)] for row in rivals} if control else {}


def against_ablation(key: str) -> Callable[[Study], dict[str, list[Pair]]]:
    def differences(study: Study) -> dict[str, list[Pair]]:
        rows = {row.key: row for row in study.rows}
        return {rows[key].label: [(rows["full"], rows[key])]} if {"full", key} <= rows.keys() else {}

    return differences


def against_cosine(study: Study) -> dict[str, list[Pair]]:
    rows = {row.key: row for row in study.rows}
    others = [row for key, row in rows.items() if key in ("pearson", "euclidean")]
    return {row.label: [(rows["cosine"], row)] for row in others} if "cosine" in rows else {}


def against_sequence(study: Study) -> dict[str, list[Pair]]:
    """Over all methods together: the paper's figure shows several."""
    rows = {row.key: row for row in study.rows}
    names, pipelines = figures.augmentation_methods(study)
    pairs = [(rows[f"{name}/ecgaugment"], rows[f"{name}/sequential"]) for name in names]
    enough = {"ecgaugment", "sequential"} <= set(pipelines) and pairs
    return {", ".join(map(display.method, names)): pairs} if enough else {}


def against_default(*default: float) -> Callable[[Study], dict[str, list[Pair]]]:
    """Every other value of a setting against the default."""

    def differences(study: Study) -> dict[str, list[Pair]]:
        rows = [row for row in study.rows if row.key.split("/")[0] == display.CONTROL and row.values]
        base = next((row for row in rows if row.values == default), None)
        return {row.label: [(row, base)] for row in rows if row != base} if base else {}

    return differences


CLAIMS = (
    Claim(
        "ECGMatch leads",
        "main",
        against_rivals,
        tuple(display.method(name) for name in paper.METHODS if name != display.CONTROL),
    ),
    Claim("pseudo-labels help", "ablation", against_ablation("lambda_u=0")),
    Claim("neighbour agreement (NAM) helps", "ablation", against_ablation("refine=False")),
    Claim("label correlation alignment helps", "ablation", against_ablation("lambda_f=0")),
    Claim("cosine similarity is the best", "similarity", against_cosine, ("pearson", "euclidean")),
    Claim("ECGAugment beats the fixed sequence", "augmentation", against_sequence),
    Claim("K hardly matters", "neighbours", against_default(5.0), same=True),
    Claim("the loss weights hardly matter", "weights", against_default(0.8, 1.2), same=True),
)
