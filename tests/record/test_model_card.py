"""The model card says what is true: sizes of the parts, where the weights began, what could not be measured."""

from dataclasses import replace
from pathlib import Path

from ecgmatch_dist.data.split_file import PARTS, Split
from ecgmatch_dist.export import command as export
from ecgmatch_dist.files.strict import convert
from ecgmatch_dist.metrics import ClassMetrics
from ecgmatch_dist.record.ancestors import Ancestor, attribution, trained_on
from ecgmatch_dist.record.hub import LICENCES, included
from ecgmatch_dist.record.model_card import model_card
from ecgmatch_dist.record.result import Result
from tests.support.prediction import write_model
from tests.support.run_factory import example_result

SIZES = {"labelled": 72, "unlabelled": 1230, "validation": 9, "test": 10}
SPLIT = Split(
    "s",
    "within",
    ("my_hospital",),
    None,
    1.0,
    1,
    "ecgmatch5",
    True,
    {part: [f"my_hospital/{part}{i}" for i in range(size)] for part, size in SIZES.items()},
    {},
    {},
)


def test_the_sizes_of_the_four_parts() -> None:
    card = model_card(result(), SPLIT)
    assert {*PARTS} == {*SIZES}
    assert "72 labelled recordings; 1,230 unlabelled ones; 9 for validation; 10 for the test" in card
    assert "% of the training part" not in card


def test_a_database_that_is_for_the_test_alone(tmp_path: Path) -> None:
    """Nothing was learnt from it: neither the card nor a run that begins with the model may say so."""
    cross = replace(SPLIT, databases=("chapman", "ptbxl"), test_database="ptbxl", protocol="cross").sealed()
    cross.save(tmp_path / "split.json")
    assert "trained with ecgmatch on\nchapman, tested on ptbxl (" in model_card(result(), cross)
    assert "trained with ecgmatch on\nmy_hospital (" in model_card(result(), SPLIT)
    assert trained_on(tmp_path) == ("chapman",)


def test_a_class_that_the_test_part_does_not_have_is_listed() -> None:
    assert "Not measured" not in model_card(result(), SPLIT)
    nothing = ClassMetrics(None, None, None, None, None, None, prevalence=0.0, threshold=0.25)
    whole = result()
    per_class = whole.test.per_class | {"STT": nothing}
    card = model_card(replace(whole, test=replace(whole.test, per_class=per_class, absent=("STT",))), SPLIT)
    assert "| STT | – | – | – | – | 0.250 |" in card
    assert "Not measured: STT. The test part has no recording with it, or none without it." in card


def test_where_the_weights_began() -> None:
    assert attribution([]) == ""
    assert [*LICENCES] == included()
    line = [Ancestor("ward", ("my_hospital",)), Ancestor("chapman_ptbxl", ("chapman", "ptbxl"))]
    begun = attribution(line)
    assert (
        "began with ward (trained on my_hospital), which began with chapman_ptbxl (trained on chapman, ptbxl)." in begun
    )
    assert "Sources and licences of what it learnt from apply to these weights, too." in begun
    assert "chapman_ptbxl comes with ecgmatch_dist under CC BY 4.0; its README.md names its sources." in begun
    assert attribution([Ancestor("")]) == "Whether there was another model before cannot be told."
    assert f"\n\n{begun}\n\n| test |" in model_card(result(), SPLIT, begun)


def test_an_exported_card_says_it_too_and_names_its_own_file(tmp_path: Path) -> None:
    run = write_model(tmp_path / "run")
    (run / "model_card.md").write_text(model_card(result(), SPLIT))  # as an older version wrote it
    (run / "config.json").write_text('{"weights": "chapman_ptbxl"}')
    for source, to in ((run, "one"), (tmp_path / "one", "two")):
        export.main(source, to=tmp_path / to, onnx=False)
        card = (tmp_path / to / "README.md").read_text()
        assert "72 labelled recordings" in card
        assert card.count("began with chapman_ptbxl (trained on chapman, ptbxl)") == 1
        assert "see `model.safetensors`" in card
        assert "best.safetensors" not in card
    gone = attribution([Ancestor("start", ("chapman",))])  # as the card was written when the start was still there
    (run / "model_card.md").write_text(model_card(result(), SPLIT, gone))
    (run / "config.json").write_text('{"weights": "start"}')
    export.main(run, to=tmp_path / "three", onnx=False)
    assert (tmp_path / "three" / "README.md").read_text().count("The weights began with start") == 1


def result() -> Result:
    return convert(example_result(), Result, "result")
