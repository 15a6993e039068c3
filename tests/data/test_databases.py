import dataclasses

import pytest

from ecgmatch_dist import resources
from ecgmatch_dist.data.databases import Expected, LabelSource, Recipe, Signals, load_recipe
from ecgmatch_dist.errors import UserError


@pytest.mark.parametrize("path", sorted(resources.folder("shards").glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_loads(path) -> None:  # type: ignore[no-untyped-def]
    recipe = load_recipe(str(path))
    assert recipe.database == path.stem or path.stem == "example_own"
    assert recipe.title


def test_the_example_shows_every_key() -> None:
    text = (resources.folder("shards") / "example_own.toml").read_text()
    keys = [line.split("=")[0].strip() for line in text.splitlines() if "=" in line and not line.startswith("#")]
    fields = [f.name for kind in (Recipe, Signals, LabelSource, Expected) for f in dataclasses.fields(kind)]
    assert sorted({*fields} - {"labels", "signals", "expected", "statements"}) == sorted(keys)


def test_expected_counts_of_the_paper_add_up() -> None:
    kept = [load_recipe(name).expected.kept for name in ("g12ec", "ptbxl", "ningbo", "chapman")]
    assert sum(n for n in kept if n) == 73581
    assert load_recipe("ningbo").expected.classes == {
        "CD": 3843, "Rhythm": 28217, "STT": 10407, "Other": 5339, "Normal": 4542,
    }  # fmt: skip


def test_names_of_ptbxl() -> None:
    recipe = load_recipe("ptbxl")
    assert recipe.key("00431_hr") == "HR00431"
    assert recipe.key("HR00431") == "HR00431"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "`database` is missing"),
        ("database = 'a'\nfolder = 'x'", "unknown key `folder`; known are database, title"),
        ("database = 'a'\n[labels]\ncolumn = 'x'", "unknown key `labels.column`; known are source, file"),
        ("database = 'a'\n[expected]\ncount = 3", "unknown key `expected.count`; known are recordings"),
        ("database = 'a'\n[expected]\nclasses = {Xyz = 3}", "`Xyz` is no class of ecgmatch5"),
        ("database = 'a b'", "letters, digits and _ only"),
        ("database = 'a'\nfolders = 'x'", "folders = 'x': it takes a list of a text"),
        ("database = 'a'\nfiles = [1]", "files[0] = 1: it takes a text"),
        ("database = 'a'\nrename = [['(', '']]", "must be a regular expression and its replacement"),
        ("database = 'a'\nrename = [['a', '\\1']]", "must be a regular expression and its replacement"),
        ("database = 'a'\nrename = ['a']", "rename[0] = 'a': it takes [a text, a text]"),
        ("database = 'a'\nscheme = 'nothing'", "no recipe `nothing`"),
        ("database = 'a'\nunlabelled = 'no'", "unlabelled = 'no': it takes 'drop' or 'keep'"),
        ("database = 'a'\n[labels]\nsource = 'csv'", "needs labels.file"),
        ("database = 'a'\n[labels]\nsource = 'xml'", "labels.source = 'xml': it takes 'header' or 'csv'"),
        ("database = ", "not a TOML file"),
    ],
)
def test_a_bad_recipe_is_refused(tmp_path, text, message) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "own.toml").write_text(text)
    with pytest.raises(UserError) as error:
        load_recipe(str(tmp_path / "own.toml"))
    assert message in str(error.value)
    assert "\n" not in str(error.value)


def test_an_own_scheme_lies_beside_the_recipe(tmp_path) -> None:  # type: ignore[no-untyped-def]
    (tmp_path / "two.toml").write_text("name = 'two'\nclass = [{name = 'A', short = 'A', codes = ['1']}]")
    (tmp_path / "own.toml").write_text("database = 'own'\nscheme = 'two.toml'\n[expected]\nclasses = {A = 3}")
    assert load_recipe(str(tmp_path / "own.toml")).load_scheme().classes == ("A",)


def test_unknown_name_lists_the_known() -> None:
    with pytest.raises(UserError, match="chapman, cpsc2018"):
        load_recipe("chapmann")
