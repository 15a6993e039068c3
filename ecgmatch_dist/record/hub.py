"""A model's name -> its folder: a path, a model that comes with this package, or a name on the Hugging Face hub
(`hub://org/name`, `org/name`, `org/name@x`)."""

import re
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.measurements import trees_file
from ecgmatch_dist.record import second_opinion

OWN, OF_A_RUN = "model.safetensors", "best.safetensors"
"""Weights in an exported folder, and in that of a run."""
FOLDERS = "the folder of a finished run or of `ecgmatch export`, or a model that comes with the package"
FILES = (OWN, "config.json", "calibration.json", "labels.toml", "README.md", trees_file.NAME, *second_opinion.FILES)
"""Of an exported folder, what is fetched. No pickle is among them, and none is ever read."""
INCLUDED = Path(__file__).parents[1] / "predict" / "models"
"""Folders of `ecgmatch export` that come with the package: weights of runs on public databases, without recordings."""
LICENCES = {"chapman_ptbxl": "CC BY 4.0"}
"""Of the weights of each of them. Models that begin with one must name it."""
MEANT = 0.7
"""A name that is so much like an included one was meant to be it."""
NAME = re.compile(r"(?P<marked>hub:/{1,2})?(?P<repo>[\w.-]+/[\w.-]+)(?:@(?P<revision>[\w./-]+))?")


def model_folder(name: str | Path, fetch: bool = True) -> tuple[Path, str]:
    """The folder, and what to call the model. A name inside a folder that is there is a path, never one on the hub. Without
    `fetch`, only what was fetched before is found, and no name leaves this machine."""
    path, match = Path(name), NAME.fullmatch(str(name))
    marked = match is not None and match["marked"] is not None
    if len(path.parts) == 1 and not path.exists() and path.name in included():
        return INCLUDED / path.name, path.name
    if (
        len(path.parts) == 1
        and not path.exists()
        and (meant := get_close_matches(path.name.lower(), included(), 1, MEANT))
    ):
        raise UserError(f"{name}: no such folder; did you mean {meant[0]}, the model that comes with the package?")
    if match is None or (not marked and (path.exists() or path.parent.exists())):
        return path, path.resolve().name if path.name in ("", "..") else path.name
    return _fetched(match["repo"], match["revision"], marked, fetch), match["repo"]


def weights_file(folder: Path) -> tuple[Path, bool]:
    """The weights in a model's folder, and whether `ecgmatch export` wrote it: with its label scheme, without known cases."""
    own = folder / OWN
    return (own, True) if own.is_file() else (folder / OF_A_RUN, False)


def why_no_weights(folder: Path) -> str:
    """Why a model's folder has no weights, and what to name instead."""
    try:
        if not folder.exists():
            others = sorted(path.name for path in folder.parent.iterdir() if path.is_dir())
            near = [str(folder.parent / name) for name in get_close_matches(folder.name, others, 3)]
            return f"no such folder; did you mean {' or '.join(near)}?" if near else f"no such folder; name {FOLDERS}"
        if not folder.is_dir():
            return f"a file, and no folder; name {FOLDERS}"
        if (folder / "split.json").is_file():  # a run writes it before its first step
            return (
                "not finished: no best.safetensors yet; give the command again that began the run, or name another one"
            )
        inside = sorted(path.parent for path in folder.glob("*/*") if path.name in (OWN, OF_A_RUN))
    except OSError as error:
        return f"{error.strerror}; name {FOLDERS}"
    return f"holds no weights; name {f'a folder in it, such as {inside[0]}' if inside else FOLDERS}"


def included() -> list[str]:
    """Names of the models that come with the package."""
    return sorted(path.parent.name for path in INCLUDED.glob("*/model.safetensors"))


def _fetched(repo: str, revision: str | None, marked: bool, fetch: bool) -> Path:
    where = f"hub://{repo}" if marked else f"{repo}: no such folder; as a name on the hub it"
    if find_spec("huggingface_hub") is None:
        raise UserError(f"{where} needs huggingface_hub; pip install 'ecgmatch-dist[hub]'")
    from huggingface_hub import snapshot_download

    try:
        folder = Path(
            snapshot_download(repo, revision=revision, allow_patterns=list(FILES), local_files_only=not fetch)
        )
    except Exception as error:  # of the hub's client, of the network library, of the disk: many kinds
        first = " ".join(str(error).split())[:200]
        raise UserError(
            f"{where} cannot be fetched ({type(error).__name__}: {first}); check name and network"
        ) from None
    if not (folder / "model.safetensors").is_file():
        raise UserError(f"{where} holds no model.safetensors; models for this program are written by `ecgmatch export`")
    return folder
