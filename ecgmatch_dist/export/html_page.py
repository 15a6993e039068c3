"""model.html: one page that runs the model in a browser. Graph, runtime and program are inside it; it may send nothing."""

import base64
import gzip
import hashlib
import json
import re
import tempfile
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader
from markupsafe import Markup

from ecgmatch_dist.errors import UserError
from ecgmatch_dist.export.onnx_file import check_onnx, check_signals, write_onnx
from ecgmatch_dist.export.ort_web import PACKAGE, VERSION, OrtWeb
from ecgmatch_dist.files.atomic import write_text
from ecgmatch_dist.predict.flags import NOTES, WORDS
from ecgmatch_dist.predict.model import ALONE, Predictor
from ecgmatch_dist.predict.prepare import LONGEST

TEMPLATES = Environment(loader=PackageLoader("ecgmatch_dist.export.browser", "."), autoescape=True)
EXPORTS = re.compile(r"export\{([^{}]*)\};?\s*(?://#.*)?$")


def write_page(path: Path, model: Predictor, runtime: OrtWeb) -> float:
    """Write the page. Returns the largest difference between its graph and `predict` on made-up signals."""
    settings = model.inputs.preprocess
    with tempfile.TemporaryDirectory(prefix="ecgmatch-html-") as folder:
        # The page resamples itself, in double precision: so one graph serves every rate.
        graph = Path(folder) / "graph.onnx"
        write_onnx(graph, model, settings.rate, settings.length)
        worst = check_onnx(graph, model, settings.rate, check_signals(settings.length, settings.rate))
        content = graph.read_bytes()
    script = _script(runtime)
    write_text(
        path,
        TEMPLATES.get_template("page.html.jinja").render(
            name=model.name,
            classes=model.scheme.classes,
            calibration=model.calibration,
            how_many=model.how_many,
            version=VERSION,
            policy=_policy(script),
            style=Markup(_text("ecgmatch_dist.predict", "page.css") + _text("ecgmatch_dist.serve", "drop.css")),
            model=Markup(json.dumps(_about(model)).replace("<", "\\u003c")),
            graph=Markup(_packed(content)),
            wasm=Markup(_packed(runtime.wasm)),
            script=Markup(script),
        ),
    )
    return worst


def _about(model: Predictor) -> dict[str, Any]:
    """What the page has to know of the model."""
    marks = model.calibration.of_probabilities(model.thresholds)
    calibration = zip(model.calibration.slope, model.calibration.shift, strict=True)
    names = zip(model.classes, model.scheme.classes, model.thresholds, marks, calibration, strict=True)
    classes = [
        {"short": short, "name": name, "threshold": float(threshold), "mark": float(mark)}
        | {"slope": float(slope), "shift": float(shift), "alone": model.only and c == model.scheme.normal}
        for c, (short, name, threshold, mark, (slope, shift)) in enumerate(names)
    ]
    settings = model.inputs.preprocess
    inputs = {"rate": settings.rate, "length": settings.length, "padFirst": settings.sequence[0] == "pad"}
    return {**inputs, "longest": LONGEST, "classes": classes, "words": WORDS, "notes": NOTES, "alone": ALONE}


def _script(runtime: OrtWeb) -> str:
    """One module: the runtime, whose exports become an object, and the page's own program in a scope of its own."""
    exports = EXPORTS.search(runtime.script)
    if exports is None:
        raise UserError(f"{PACKAGE}: it does not end as expected")
    names = [pair.split(" as ") for pair in exports[1].split(",")]
    interface = ",".join(f"{pair[-1].strip()}:{pair[0].strip()}" for pair in names)
    own = [_text("ecgmatch_dist.serve", "choose.js")]
    own += [_text("ecgmatch_dist.export.browser", f"{name}.js") for name in ("signal", "files", "paper", "page")]
    body = f"const ecgmatchOrt={{{interface}}};\n(ort => {{\n{''.join(own)}}})(ecgmatchOrt);\n"
    script = runtime.script[: exports.start()] + body
    if "</script" in script.lower():
        raise UserError(f"{PACKAGE}: it cannot be put inside a page")
    return script


def _policy(script: str) -> str:
    """This script alone, WebAssembly, and no address of any kind."""
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    allowed = f"script-src 'sha256-{digest}' 'wasm-unsafe-eval'; style-src 'unsafe-inline'; img-src data:"
    return f"default-src 'none'; {allowed}; connect-src 'none'; form-action 'none'; base-uri 'none'"


def _packed(content: bytes) -> str:
    return base64.b64encode(gzip.compress(content, 9, mtime=0)).decode()


def _text(package: str, name: str) -> str:
    return (files(package) / name).read_text(encoding="utf-8")
