"""Sweep files: which runs they describe, what is refused."""

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from ecgmatch_dist import resources
from ecgmatch_dist.config import Config
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.launch import expand
from ecgmatch_dist.launch.overrides import change
from ecgmatch_dist.launch.show import shown_steps
from ecgmatch_dist.launch.sweep_plan import read_plan, write_plan
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.methods.fixmatch import FixMatchSettings

RUNS = Path("runs")


def write(folder: Path, text: str) -> str:
    path = folder / "small.toml"
    path.write_text(text)
    return str(path)


def planned(name: str, *changes: str) -> list[expand.PlannedRun]:
    loaded = expand.load_sweep(name)
    base = expand.base_config(loaded, "", "data/shards", RUNS, changes)
    return expand.plan_runs(loaded, base, Path("splits"))


@pytest.mark.parametrize(
    ("name", "runs", "starts"),
    [
        ("within", 96, 12),
        ("cross", 96, 12),
        ("mix", 24, 3),
        ("ablation", 48, 12),
        ("similarity", 36, 12),
        ("sensitivity", 108, 12),
        ("search", 100, 4),
        ("neighbours", 108, 12),
        ("augmentation", 192, 24),
        ("label_ratio", 144, 48),
        ("cinc25", 96, 12),
    ],
)
def test_the_papers_sweeps(name: str, runs: int, starts: int) -> None:
    """Methods x settings x seeds, and each supervised start once; 96 + 96 + 24 = 216 runs compare the methods."""
    found = planned(name)
    assert (sum(bool(run.starts) for run in found), sum(not run.starts for run in found)) == (runs, starts)
    names = {run.name for run in found}
    assert len(names) == len(found)
    assert {start for run in found for start in run.starts} <= names


def test_every_file_of_launch_is_a_sweep() -> None:
    assert len(list(resources.folder("launch").glob("*.toml"))) >= 11
    for path in resources.folder("launch").glob("*.toml"):
        assert planned(str(path))


def test_a_point_that_changes_nothing_is_the_method_itself() -> None:
    names = {run.name for run in planned("neighbours")}
    assert "cross-g12ec@0.01.s20.ecgmatch" in names  # K = 5
    assert "cross-g12ec@0.01.s20.ecgmatch.neighbours=7" in names
    assert not any("neighbours=5" in name for name in names)


def test_another_start_only_where_it_is_another(tmp_path: Path) -> None:
    starts = {run.name: run.starts[0] for run in planned("augmentation") if "s20.ecgmatch" in run.name}
    changed = "pipeline=sequential"
    assert starts[f"cross-g12ec@0.01.s20.ecgmatch.{changed}"] == f"cross-g12ec@0.01.s20.supervised.{changed}"
    assert starts["cross-g12ec@0.01.s20.ecgmatch"] == "cross-g12ec@0.01.s20.supervised"
    assert {run.starts[0] for run in planned("ablation") if "g12ec@0.01.s20.ecgmatch" in run.name} == {
        "cross-g12ec@0.01.s20.supervised"
    }


def test_settings_reach_the_runs(tmp_path: Path) -> None:
    name = write(tmp_path, 'split = "mix@0.01.s20"\n[grid]\nmethod = ["fixmatch"]\n[settings]\noptim.lr = 1\n')
    run = planned(name, "optim.steps=7", "runtime.device=cpu")[-1]
    assert (run.config.optim.lr, run.config.optim.steps, run.config.runtime.device) == (1.0, 7, "cpu")
    assert isinstance(run.config.method, FixMatchSettings)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ('split = "a"\n[grid]\nmethod = ["x"]', r"method = 'x': one of supervised"),
        ('split = "a"\n[grid]\nmethod.threshold = [1]', r"method\.threshold: the method ecgmatch has no `threshold`"),
        ('split = "a"\n[grid]\noptim.l = [1]', r"optim\.l: the configuration has no `l`"),
        ('split = "a"\n[grid]\noptim.lr = ["1"]', r"optim\.lr = '1': it takes a number"),
        ('split = "a"\n[grid]\noptim.steps = [1.5]', r"optim\.steps = 1\.5: it takes a whole number"),
        ('split = "a"\n[grid]\nmethod.refine = [0]', r"method\.refine = 0: it takes true or false"),
        ('split = "a"\n[grid]\naugment.pipeline = ["x"]', r"augment\.pipeline = 'x': it takes 'ecgaugment' or"),
        ('split = "a"\n[grid]\noptim.steps = [0]', r"optim\.steps = 0: at least 1"),
        ('split = "a"\n[grid]\nmodel = [1]', r"setting model: name one of its parts"),
        ('split = "a"\n[grid]\nseed.x = [1]', r"seed\.x: `seed` has no parts"),
        ('split = "a"\n[grid]\nseed = 1', r"grid\.seed = 1: a list of different values"),
        ('split = "a"\n[grid]\nseed = [1, 1]', r"grid\.seed = \[1, 1\]: a list of different values"),
        ('split = "a{b}"\n[grid]\nseed = [1]', r"needs grid\.b"),
        ('split = "a{b.s{seed}"\n[grid]\nseed = [1]', r"unexpected '{' in field name; write \{axis\}"),
        ('split = "a{seed:999999999}"\n[grid]\nseed = [1]', r"nothing else in braces"),
        ('split = "a{}"\n[grid]\nseed = [1]', r"nothing else in braces"),
        ('split = "a"\n[grd]\n', r"unknown key `grd`"),
        ("[grid]\nseed = [1]", r"`split` is missing"),
        ("split = 1\n[grid]\nseed = [1]", r"small\.toml: split = 1: it takes a text"),
        ('split = "a"\ngrid = 1', r"small\.toml: grid = 1: it takes a table"),
        ("split = ", r"small\.toml: not a TOML file \(Invalid value"),
        (
            'split = "a"\n[grid]\nseed = [1]\n[[variants]]\noptim.lr = 0.1\n[[variants]]\noptim.lr = 0.2',
            "give the variants",
        ),
    ],
)
def test_mistakes_fail_before_anything_is_submitted(tmp_path: Path, text: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(write(tmp_path, text))


def test_values_have_the_fields_types() -> None:
    assert change(Config(), "method.lambda_u", 1) == replace(Config(), method=ECGMatchSettings(lambda_u=1.0))
    assert change(Config(), "bank.shard_group", "node").bank.shard_group == "node"
    assert change(Config(), "bank.shard_group", 4).bank.shard_group == 4
    assert change(Config(), "split", "a.json").split == Path("a.json")
    with pytest.raises(UserError, match=r"takes a whole number, 'auto' or 'world' or 'node'"):
        change(Config(), "bank.shard_group", "all")


def test_values_on_the_command_line() -> None:
    values = [expand.parse_value(text) for text in ("1", "0.5", "true", "cpu", '"a b"', "[1, 2]")]
    assert values == [1, 0.5, True, "cpu", "a b", [1, 2]]
    with pytest.raises(UserError, match="texts that are not one word need quotes"):
        expand.parse_value("a b")


def test_the_members_of_a_committee_are_starts_too(tmp_path: Path) -> None:
    text = """
        preset = "few_labels"
        split = "within-chapman@0.05.s{seed}"
        [grid]
        seed = [20]
        [[variants]]
        method = "fixmatch"
        [[variants]]
        method.committee = 4
    """
    found = planned(write(tmp_path, text))
    start = "within-chapman@0.05.s20.supervised"
    committee = (start, *(f"{start}.member{number}" for number in (2, 3, 4)))
    assert {run.name.rpartition(".")[2]: run.starts for run in found if run.starts} == {
        "fixmatch": (start,),
        "ecgmatch": committee,
    }
    assert [run.name for run in found if not run.starts] == list(committee)
    assert len({run.config.fingerprint() for run in found}) == len(found)


def test_steps_are_those_on_the_split(data: Path, tmp_path: Path) -> None:
    """A preset that asks for passes names the most steps; a plan that knows the split says how many it will be."""
    (tmp_path / "splits").mkdir()
    shutil.copy(data / "split.json", tmp_path / "splits" / "here@0.2.s20.json")
    text = (
        'preset = "few_labels"\nsplit = "{name}@0.2.s20"\n[grid]\nname = ["here", "missing"]\nmethod = ["ecgmatch"]\n'
    )
    sweep = expand.load_sweep(write(tmp_path, text))
    base = expand.base_config(sweep, "", "shards", tmp_path / "runs", ())
    runs = expand.plan_runs(sweep, base, tmp_path / "splits")
    steps = {run.config.split.stem: shown_steps(run) for run in runs if run.config.method.name == "ecgmatch"}
    assert steps == {"here@0.2.s20": "600", "missing@0.2.s20": "up to 6,000"}
    write_plan("own", tmp_path / "runs", runs)
    plan = {entry.run: entry.most_steps for entry in read_plan("own", tmp_path / "runs")}
    assert [plan[run.name] for run in runs] == [run.steps or run.config.optim.steps for run in runs]
    assert {600, 6000} <= set(plan.values())
