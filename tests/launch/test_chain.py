"""A sweep plans the whole chain of runs: self-supervised, supervised, semi-supervised."""

from pathlib import Path

from ecgmatch_dist.launch import expand


def test_each_link_is_planned_once_and_before_what_starts_from_it(tmp_path: Path) -> None:
    path = tmp_path / "small.toml"
    text = 'split = "mix@0.05.s{seed}"\npreset = "few_labels"\n[settings]\nselfsupervised = "contrastive"\n'
    text += "[grid]\nseed = [1, 2]\naugment.crop = [256, 512]\n"
    path.write_text(text + '[[variants]]\nmethod = "fixmatch"\n[[variants]]\nmethod.committee = 4\n')
    sweep = expand.load_sweep(str(path))
    base = expand.base_config(sweep, "", "data/shards", Path("runs"), ())
    found = expand.plan_runs(sweep, base, Path("splits"))
    names = [run.name for run in found]
    assert len(names) == len(set(names)) == 2 * 2 * (1 + 4 + 2)  # per split and crop: 1, a committee of 4, 2 methods
    for run in found:
        assert len(run.starts) == run.config.starts
        assert all(names.index(start) < names.index(run.name) for start in run.starts)
    starts = {run.name: run.starts for run in found}
    plain, changed = "mix@0.05.s1.supervised", "mix@0.05.s1.supervised.crop=256"
    assert starts[plain] == ("mix@0.05.s1.contrastive",)
    assert starts[f"{changed},member3"] == starts[changed] == ("mix@0.05.s1.contrastive.crop=256",)
    assert starts["mix@0.05.s1.fixmatch.crop=256"] == (changed,)
    assert starts["mix@0.05.s1.ecgmatch"] == (plain, *(f"{plain}.member{k}" for k in (2, 3, 4)))
