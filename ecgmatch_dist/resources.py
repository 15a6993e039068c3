"""Finds the TOML files that users edit: in `shards/`, `launch/`, `slurm/` of the repository, or in their copy in a wheel."""

from pathlib import Path

from ecgmatch_dist.errors import UserError


def folder(name: str) -> Path:
    """The folder of recipes `name` ("shards", "launch" or "slurm")."""
    package = Path(__file__).parent
    for candidate in (package.parent / name, package / "_recipes" / name):
        if candidate.is_dir() and any(candidate.glob("**/*.toml")):
            return candidate
    raise UserError(f"no folder of recipes `{name}`: the installation is incomplete, install ecgmatch-dist again")


def find(kind: str, name: str) -> Path:
    """The TOML file `name`: a path that ends in .toml, or the name of a file in the folder `kind`."""
    if name.endswith(".toml") and _is_file(Path(name)):
        return Path(name)
    shipped = folder(kind) / f"{Path(name.removesuffix('.toml')).name}.toml"
    if _is_file(shipped) and shipped.stem == name:
        return shipped
    if _is_file(shipped):  # as in `launch/within.toml` outside the repository
        raise UserError(f"{name}: no such file here; `{shipped.stem}` names the one that comes with ecgmatch_dist")
    if name.endswith(".toml"):
        raise UserError(f"{name}: no such file")
    known = ", ".join(sorted(p.stem for p in folder(kind).glob("*.toml")))
    raise UserError(f"no recipe `{name}` in {kind}/: known are {known}; or give the path of a .toml file")


def _is_file(path: Path) -> bool:
    try:
        return path.is_file()
    except OSError:  # a name that is too long for a file
        return False
