"""Which run of how many."""

from dataclasses import replace

from ecgmatch_dist.config import Config
from ecgmatch_dist.methods.ecgmatch import ECGMatchSettings
from ecgmatch_dist.record.starts import Chain

CONFIG = replace(Config(), method=ECGMatchSettings(committee=2), selfsupervised="contrastive")


def test_a_run_that_several_start_from_is_counted_once() -> None:
    chain = Chain(CONFIG)
    first, second = CONFIG.start(0), CONFIG.start(1)
    order = (first.start(), first, second.start(), second, CONFIG)
    assert [chain.place(run) for run in order] == ["1 of 4", "2 of 4", "", "3 of 4", "4 of 4"]


def test_the_starts_of_a_finished_run_are_passed_with_it() -> None:
    chain = Chain(CONFIG)
    assert [chain.place(run) for run in (CONFIG.start(0), CONFIG.start(1), CONFIG)] == ["2 of 4", "3 of 4", "4 of 4"]


def test_a_run_alone_has_no_number() -> None:
    alone = replace(CONFIG, init="scratch")
    assert Chain(alone).place(alone) == ""
