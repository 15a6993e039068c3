"""`ecgmatch adopt FOLDER`: an archive -> recipe, label scheme and preview, and what is doubtful about it."""

import re
import shlex
import sys
from collections import Counter
from pathlib import Path

import tyro
from rich.progress import track

from ecgmatch_dist.data.adopt.doubts import counts, doubts, label_counts
from ecgmatch_dist.data.adopt.labels import classes_of, find_labels, fitting_scheme
from ecgmatch_dist.data.adopt.preview import choose, draw, page
from ecgmatch_dist.data.adopt.survey import Found, list_files, look_at, some
from ecgmatch_dist.data.adopt.write import EDIT, guess_rate, guess_unit, recipe_text, scheme_text
from ecgmatch_dist.data.databases import load_recipe
from ecgmatch_dist.errors import UserError
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.files.plain import plain_line


def adopt(folder: Path, to: Path, name: str, look: int) -> Path:
    """Look at the archive, write the three files into `to`, and tell what was found. Returns the recipe."""
    name = re.sub(r"\W+", "_", name or folder.resolve().name.lower(), flags=re.ASCII).strip("_") or "archive"
    recipe, scheme, preview = to / f"{name}.toml", to / f"{name}_classes.toml", to / f"{name}_preview.html"
    for path in (recipe, scheme):
        if path.exists():
            raise UserError(f"{path}: exists already; remove it, or give another --to or --name")
    archive = list_files(folder)
    chosen = some(archive.refs, look)
    found = [look_at(ref) for ref in track(chosen, "reading", transient=True, disable=not sys.stderr.isatty())]
    odd: list[str] = []
    labels = find_labels(archive, odd)
    words = labels.words or Counter(code for one in found for code in one.codes)
    known = fitting_scheme(words)
    classes, rare = ([], Counter[str]()) if known else classes_of(words)
    lines = [*counts(archive, found), *label_counts(labels, found, len(archive.names))]
    own = ", ".join(f"{c.name} {c.count:,}" for c in classes)
    lines.append(f"classes     {f'scheme {known}, which has most of these labels' if known else own}")
    odd += doubts(archive, found, labels, classes, rare)

    to.mkdir(parents=True, exist_ok=True)
    written = [recipe, preview]
    try:
        write_text(preview, _preview(name, lines, odd, rare, found))
        if not known and classes:
            write_text(scheme, scheme_text(f"{name}_classes", classes, sorted(rare)))
            written.insert(1, scheme)
        scheme_name = known or (scheme.name if classes else "ecgmatch5")
        write_text(recipe, recipe_text(name, archive, found, labels, scheme_name))
    except BaseException:  # a full disk, Ctrl-C: nothing that the same command would refuse to write over
        scheme.unlink(missing_ok=True)
        raise
    load_recipe(str(recipe))  # it must be one
    for line in (*lines, *(f"doubt       {doubt}" for doubt in odd)):
        print(plain_line(line))
    print(plain_line(f"written     {', '.join(map(str, written))}"))
    _tell_next([path for path in written if path != preview], folder, "" if words else scheme_name)
    return recipe


def _preview(name: str, lines: list[str], odd: list[str], rare: Counter[str], found: list[Found]) -> str:
    without = [one for one in found if "units" in one.unsaid and not one.problem]
    unit = guess_unit(without) if without else "mV"
    rate = guess_rate(found) if any("rate" in one.unsaid and not one.problem for one in found) else 500
    ignored = [f"{label} {count:,}" for label, count in rare.most_common()]
    return page(name, lines, odd, ignored, [draw(one, rate, unit) for one in choose(found)])


def _tell_next(written: list[Path], folder: Path, to_label: str) -> None:
    """`written`: the recipe, and the scheme if there is one. `to_label`: where nothing has a label, the scheme to label by."""
    edits = {path: path.read_text(encoding="utf-8").count(f"   # {EDIT}") for path in written}
    marked = " and ".join(str(path) for path, n in edits.items() if n)
    lines_marked = f"the {sum(edits.values())} lines marked {EDIT} in {marked} and at " if marked else ""
    look = f"look at {lines_marked}the preview, then"
    build = shlex.join(["ecgmatch", "shards", "build", str(written[0]), "--raw", str(folder)])
    lines = [f"next        {look}", f"            {build} --out data/shards --preset cpu"]
    if to_label:  # a split needs some labels
        lines += [
            "            then label some, by a scheme of your own if you like (docs/own-data.md)",
            f"            {shlex.join(['ecgmatch', 'label', '--shards', 'data/shards', '--scheme', to_label])} --to labels.csv",
        ]
    print(*map(plain_line, lines), sep="\n")


def main(
    folder: tyro.conf.Positional[Path],
    /,
    to: Path = Path(),
    name: str = "",
    look: int = 300,
) -> None:
    """Look at a folder of recordings, and write the recipe and the label scheme for `ecgmatch shards build`.

    Args:
        folder: The archive: recordings of any format, and a table of labels (.csv or .xlsx) if there is one.
        to: Folder for NAME.toml, NAME_classes.toml and NAME_preview.html.
        name: Of the database; by default the folder's.
        look: Number of recordings to read; all are counted.
    """
    if look < 1:
        raise UserError(f"--look {look}: at least one recording")
    adopt(folder, to, name, look)
