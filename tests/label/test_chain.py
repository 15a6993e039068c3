"""The chain beside the page: its splits, and a real training that is stopped, continued and read back."""

import time
from pathlib import Path

import pytest

from ecgmatch_dist.data.labels import load_scheme
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.data.store import ShardStore
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.label.chain import Chain, Workshop
from ecgmatch_dist.label.session import Session, Wishes
from tests.support.shard_factory import make_shards

COUNT, ANSWERS = 60, 36
SCHEME = load_scheme("ecgmatch5")
SMALL = """--init scratch --data.rate 0 --data.length 0 --model.width 16 --model.heads 2 --optim.steps 30
--optim.labelled-batch 8
--optim.unlabelled-batch 8 --evaluate.every 10 --runtime.log-every 1 --runtime.threads 1 --runtime.device cpu"""


@pytest.fixture
def chain(tmp_path: Path) -> Chain:
    patients = [f"p{i // 2}" for i in range(COUNT)]
    make_shards(tmp_path / "shards", "own", COUNT, length=200, patients=patients)
    store = ShardStore(tmp_path / "shards", ["own"])
    options = tuple(SMALL.split())
    place = Workshop(str(tmp_path / "shards"), "ecgmatch5", options, tmp_path / "splits", tmp_path / "runs", nice=0)
    return Chain(place, store, SCHEME, "my labels", tmp_path / "training.log")


def table(count: int) -> str:
    """The first recordings, answered."""
    return "recording,dx\n" + "".join(f"own/own{i:05d},{SCHEME.short[i % 4]}\n" for i in range(count))


def test_each_answer_is_tested_once_by_a_run_that_has_not_seen_its_patient(chain: Chain) -> None:
    names = chain._splits(table(ANSWERS), ANSWERS)
    assert [name.partition("-36-")[0] for name in names] == ["my_labels"] * 4
    assert [name[-6:] for name in names[1:]] == ["-fold1", "-fold2", "-fold3"]
    model, *folds = (Split.load(chain.place.splits / f"{name}.json") for name in names)
    assert sum(len(model.parts[part]) for part in ("labelled", "validation", "test")) == ANSWERS
    assert sorted(name for split in folds for name in split.parts["test"]) == [
        f"own/own{i:05d}" for i in range(ANSWERS)
    ]
    for split in folds:
        patients = {part: {int(name[-5:]) // 2 for name in split.parts[part]} for part in ("labelled", "test")}
        assert not patients["labelled"] & patients["test"]
        assert len(split.parts["unlabelled"]) == COUNT - ANSWERS
    assert (chain.place.splits / f"{names[0]}.csv").read_text() == table(ANSWERS)
    assert chain._splits(table(ANSWERS), ANSWERS) == names  # the same answers: the same runs, which go on


def test_too_few_answers_are_a_sentence(chain: Chain) -> None:
    with pytest.raises(UserError, match="19 answers: training begins with 20"):
        chain.start(table(19))
    assert not chain.state.running


def wait(chain: Chain, until: str = "") -> None:
    """Until the training is over, or has printed something."""
    end = time.monotonic() + 800
    while chain.state.running and not (until and until in chain.last_line()):
        assert time.monotonic() < end
        time.sleep(0.02)


@pytest.mark.slow
@pytest.mark.timeout(900)  # four runs, one after the other
def test_a_training_is_stopped_continued_and_read_back(chain: Chain) -> None:
    chain.start(table(ANSWERS))
    with pytest.raises(UserError, match="a training is under way"):
        chain.start(table(ANSWERS))
    wait(chain, "step 2")
    assert chain.state.step == "36 answers, run 1 of 4 (the model)"
    chain.end()
    assert (chain.state.running, chain.state.error, chain.reached()) == (False, "", [])
    chain.start(table(ANSWERS))
    wait(chain)
    assert chain.state.error == "", chain.log.read_text()
    assert "continu" in chain.log.read_text() or "resum" in chain.log.read_text()
    (found,) = Chain(chain.place, chain.store, SCHEME, "my labels", chain.log).reached()
    assert found.answers == ANSWERS
    assert Path(found.run, "best.safetensors").is_file()
    assert found.map
    assert 0 < found.map.low <= found.map.value <= found.map.high <= 1


@pytest.mark.slow
def test_a_training_begins_by_itself_and_says_why_it_failed(chain: Chain, tmp_path: Path) -> None:
    place = Workshop(chain.place.shards, "ecgmatch5", ("--preset", "nothing"), tmp_path / "splits", nice=0)
    wishes = Wishes("anna", train_every=20)
    session = Session(chain.place.shards, chain.store, SCHEME, tmp_path / "labels.csv", wishes, place)
    assert session.chain
    for i in range(20):
        assert not session.chain.state.running
        session.answer(f"own/own{i:05d}", [SCHEME.short[i % 4]], [], 1.0, "random")
    assert session.chain.state.running
    wait(session.chain)
    assert "--preset nothing" in session.chain.state.error
    assert str(session.chain.log) in session.chain.state.error
