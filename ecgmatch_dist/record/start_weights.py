"""The trained model that a chain of runs may begin with (`--weights`): which one it is, whether it fits, what it has seen."""

from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path

import torch
from torch import Tensor

from ecgmatch_dist.config import DIGITS, PIN, WITH_TREES, Config, Model, parted
from ecgmatch_dist.data.preprocess import Preprocess
from ecgmatch_dist.data.split_file import Split
from ecgmatch_dist.distributed.collectives import all_sum_nograd, from_rank_0
from ecgmatch_dist.errors import UserError, require
from ecgmatch_dist.files.plain import plain_line
from ecgmatch_dist.measurements import trees_file
from ecgmatch_dist.measurements.trees import PublicTrees
from ecgmatch_dist.network.model import build_model
from ecgmatch_dist.record.ancestors import Ancestor, ancestors, file_checksum, from_archive, trained_on
from ecgmatch_dist.record.hub import model_folder, weights_file, why_no_weights
from ecgmatch_dist.record.weights import REMEDY, load_weights

FREE = ("dropout", "feature")
"""Settings of a network that its weights do not depend on."""


def pinned(config: Config) -> Config:
    """The same run with the checksum of the weights and, if it asks them, of the trees beside them, behind their name:
    others of that name are another run."""
    if not config.weights:
        return config
    name, wanted = parted(config.weights)
    path = _weights(name)
    read = [path, *(trees for trees in [_trees(config)] if trees and config.method.asks_trees)]
    found = WITH_TREES.join(file_checksum(file) for file in read)
    if wanted not in ("", found):
        raise UserError(
            f"{path}: these are not the weights and trees that the run began with (checksum {found}, not {wanted}); "
            "bring them back, or give the run another --tag"
        )
    return replace(config, weights=f"{name}{PIN}{found}")


def check_same_everywhere(config: Config) -> None:
    """Refuse ranks that find other files under the name of the model. A collective."""
    checksum = torch.tensor(list(parted(config.weights)[1].ljust(2 * DIGITS + 1).encode()))
    differ = bool((checksum != from_rank_0(checksum)).any())
    if ranks := int(all_sum_nograd(torch.tensor(int(differ))).item()):
        name = parted(config.weights)[0]
        raise UserError(
            f"weights = {name!r}: {ranks} ranks find other weights or trees under this name than rank 0; "
            "bring the same folder to every node"
        )


def starting_weights(config: Config, preprocess: Preprocess, classes: Sequence[str]) -> dict[str, Tensor]:
    """The weights that the chain begins with. Without the classifier, if it knows other classes. Refuses what does not fit."""
    path = _weights(parted(config.weights)[0])
    weights, notes = load_weights(path)
    check_network(config.model, notes.model, path)
    network = build_model(len(notes.classes), config.model, seed=0).state_dict()
    for name in network.keys() | weights.keys():
        own, theirs = (None if name not in state else tuple(state[name].shape) for state in (network, weights))
        if own != theirs:
            raise UserError(f"{path}: {name} has the shape {theirs}, its settings say {own}; {REMEDY}")
    if notes.preprocess != preprocess:
        have, needs = (f"{p.rate} Hz, 12 x {p.length}" for p in (preprocess, notes.preprocess))
        raise UserError(
            f"{path}: the model reads signals of another preprocessing ({needs}) than the shards have ({have}); "
            "build shards as it needs them, or begin with another model"
        )
    same = list(notes.classes) == list(classes)
    return {name: value for name, value in weights.items() if same or not name.startswith("classifier.")}


def begins_with(config: Config, weights: Mapping[str, Tensor]) -> str:
    """What the run begins with, for its log. `weights`: those of `starting_weights`."""
    name, found = parted(config.weights)
    told = f"begins with {name}" + f" (checksum {found})" * bool(found)
    kept = any(tensor.startswith("classifier.") for tensor in weights)
    return plain_line(told if kept else f"{told}; its classes are others: the classifier begins anew")


def public_trees(config: Config, classes: Sequence[str]) -> PublicTrees | None:
    """The trees beside the weights that the chain begins with, if there are any that read today's measurements."""
    path = _trees(config)
    if path is None or check_public_trees(config):
        return None
    forests, theirs = trees_file.load_trees(path)
    return PublicTrees(forests, same_classes=theirs == tuple(classes))


def check_public_trees(config: Config) -> str:
    """Refuse broken trees beside the weights. Returns a warning where they cannot be asked; else an empty text."""
    path = _trees(config)
    try:
        if path:
            trees_file.load_trees(path)
    except trees_file.OtherMeasurements as error:
        return str(error)
    return ""


def check_network(own: Model, theirs: Model, path: Path) -> None:
    """Refuse weights of another network, with the option that would make it the same."""
    for key, value in asdict(theirs).items():
        option = f"--model.{key.replace('_', '-')} {value}"
        remedy = f"the weights in {path} have {value!r}; give {option}, or begin with another model"
        require(key in FREE or getattr(own, key) == value, f"model.{key}", getattr(own, key), remedy)


def check_not_seen(config: Config, split: Split) -> str:
    """Refuse a model that has seen test recordings of the split, itself or by a model that it began with: its scores would be
    too good. Returns a warning where that cannot be told; else an empty text."""
    name = parted(config.weights)[0]
    folder = model_folder(name)[0]
    told = []
    for model in (Ancestor(name, trained_on(folder), folder, from_archive(folder)), *ancestors(folder)):
        who = name if model.name == name else f"{name} began with {model.name}, which"
        if not model.name:
            told.append(f"whether {name} began with another model cannot be told")
            continue
        unlisted = "has also learnt from an archive (`data.archive`), and nobody knows of which databases"
        clauses = [_may_have_seen(model, split, who), unlisted if model.archive else ""]
        told += [f"{who} {clause}" for clause in clauses if clause]
    if not told:
        return ""
    return plain_line(f"{'; '.join(told)}: if it has seen test recordings of this split, their scores are too good")


def _may_have_seen(model: Ancestor, split: Split, who: str) -> str:
    """How this model may have seen test recordings of the split; empty: it has not. Refuses one that has."""
    if not model.databases:
        gone = "is not at hand, so what it was trained on cannot be told"
        return "does not say what it was trained on" if model.folder else gone
    if model.folder and (model.folder / "split.json").is_file():
        seen = seen_test_recordings(Split.load(model.folder / "split.json"), split)
        if seen:
            raise UserError(
                f"weights: {who} was trained or chosen with {len(seen)} of the {split.size('test')} test recordings of "
                f"{split.name} (such as {seen[0]}), so its scores would be too good; begin with a model that has not seen them"
            )
        return "" if seen is not None else "has a split that cannot be compared with this one"
    shared = sorted({*model.databases} & {split.test_database or "", *split.databases})
    return f"was trained on {', '.join(shared)}" if shared else ""


def seen_test_recordings(old: Split, new: Split) -> list[str] | None:
    """Test recordings of the split `new` that are labelled, unlabelled or validation recordings of `old`. None: that cannot be
    told, because only one of them lists names, or the shards were built anew."""
    if old.parts and new.parts:
        seen = {name for part in ("labelled", "unlabelled", "validation") for name in old.parts[part]}
        return sorted(seen & {*new.parts["test"]})
    common = {*old.databases} & {*new.databases}
    if not common:
        return []
    if old.parts or new.parts or any(old.manifests[name] != new.manifests[name] for name in common):
        return None
    return [
        f"{name}, row {row}"
        for name in sorted(common)
        for row, (before, now) in enumerate(zip(old.letters[name], new.letters[name], strict=True))
        if now == "t" and before in "luv"
    ]


def _trees(config: Config) -> Path | None:
    """The trees beside the weights, if there are any."""
    path = _weights(parted(config.weights)[0]).with_name(trees_file.NAME) if config.weights else None
    return path if path and path.is_file() else None


def _weights(name: str) -> Path:
    path = weights_file(model_folder(name)[0])[0]
    if not path.is_file():
        raise UserError(f"weights = {name!r}: {why_no_weights(path.parent)}")
    return path
