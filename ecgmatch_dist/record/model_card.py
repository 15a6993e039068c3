"""model_card.md: training data, test metrics and limits of a model."""

from ecgmatch_dist.data.split_file import PARTS, Split
from ecgmatch_dist.record.result import Result

SHOWN = ("map", "macro_auc", "macro_gbeta", "ranking_loss", "hamming_loss", "coverage")
WORDS = {
    "labelled": "labelled recordings",
    "unlabelled": "unlabelled ones",
    "validation": "for validation",
    "test": "for the test below",
}


def model_card(result: Result, split: Split, begun: str = "") -> str:
    """The card in Markdown. `begun`: where the weights began, in words."""
    test = result.test
    rows = "\n".join(
        f"| {name} | {_number(v.ap)} | {_number(v.auc)} | {_number(v.recall)} | {_number(v.precision)} | {v.threshold:.3f} |"
        for name, v in test.per_class.items()
    )
    if test.absent:
        rows += (
            f"\n\nNot measured: {', '.join(test.absent)}. The test part has no recording with it, or none without it."
        )
    values = " | ".join(f"{getattr(test, name):.3f}" for name in SHOWN)
    # Not the ratio: it is of the recordings whose labels are known, and the unlabelled part may hold many others.
    sizes = "; ".join(f"{split.size(part):,} {WORDS[part]}" for part in PARTS)
    apart = f", tested on {split.test_database}" if split.test_database else ""
    paragraph = f"\n{begun}\n" if begun else ""
    return f"""# {result.name}

Multi-label 12-lead ECG classifier ({", ".join(result.classes)}), trained with {result.method} on
{", ".join(split.learnt_from)}{apart} ({result.protocol} protocol, seed {result.seed}). Parts of the split: {sizes}.
The weights are those of step {result.best_step}, chosen by validation MAP; thresholds maximise F2 on
the validation part. The test part chose nothing.
{paragraph}
| test | MAP | macro AUC | macro G-beta | ranking loss | Hamming loss | coverage |
| --- | --- | --- | --- | --- | --- | --- |
| | {values} |

| class | AP | AUC | recall | precision | threshold |
| --- | --- | --- | --- | --- | --- |
{rows}

For research. Not a medical device: it has not been validated for any clinical decision. Recordings must be preprocessed as
the training shards were (sampling rate, length, filter: see `best.safetensors`).
"""


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.3f}"
