"""README.md of an exported model: the run's model card, and how to call the model."""

import re
from typing import Any

from ecgmatch_dist.predict.model import Predictor
from ecgmatch_dist.record.ancestors import BEGAN, ancestors, attribution

HEAD = """---
library_name: ecgmatch-dist
tags: [ecg, 12-lead, multi-label, not-a-medical-device]
---

"""
FRONT = re.compile(r"\A---\n.*?\n---\n+", re.DOTALL)
TITLE = "\n## Use\n"
USE = f"""{TITLE}
```python
import ecgmatch_dist as em

answer = em.load("this/folder").predict(signal, rate=500, leads=[...])
answer.calibrated, answer.predicted, answer.flags
```
"""
ONNX = """
Without this package, by any ONNX runtime:

```python
session = onnxruntime.InferenceSession("model.onnx")
probability, calibrated, predicted, features = session.run(None, {{"signal": signal}})
```

`signal`: float32 [recordings, 12, {samples}], in mV, at {rate:g} Hz, no missing values, leads {leads}.
Resampling, filter, z-score, crops, calibration and thresholds are inside the graph. Classes: {classes}.
"""
MEANING = """
`probability` is the network's output; `calibrated` {calibrated}; `predicted` is the output at the thresholds
that maximise F2 on the validation part.

**For research. Not a medical device.** This model has not been validated for any clinical decision.
"""


def card(model: Predictor, graph: dict[str, Any] | None) -> str:
    """The card in Markdown. `graph`: what `onnx_file.about` says; None: there is no graph."""
    lists = {name: ", ".join(graph[name]) for name in ("leads", "classes")} if graph else {}
    recordings = model.calibration.recordings
    few = f"was fitted on {recordings} recordings, too few to read it as a frequency"
    calibrated = few if model.calibration.few else "can be read as a frequency"
    return (
        HEAD
        + about(model)
        + USE
        + (ONNX.format(**(graph | lists)) if graph else "")
        + MEANING.format(calibrated=calibrated)
    )


def about(model: Predictor) -> str:
    """Where the model comes from: the run's card, or the first part of an exported folder's, with its sources and licences."""
    text = f"# {model.name}\n"
    for name in ("README.md", "model_card.md"):
        path = model.folder / name
        if path.is_file():
            text = FRONT.sub("", path.read_text(encoding="utf-8")).split(TITLE)[0].rstrip() + "\n"
    begun = attribution(ancestors(model.folder))
    if (
        begun and begun not in text and BEGAN not in text
    ):  # a card of an older version; a newer one may know more by now
        text += f"\n{begun}\n"
    return text.replace("`best.safetensors`", "`model.safetensors`")
