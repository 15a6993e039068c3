"""model_card.md: training data, test metrics and limits of a model."""

from ecgmatch_dist.record.result import Result

SHOWN = ("map", "macro_auc", "macro_gbeta", "ranking_loss", "hamming_loss", "coverage")


def model_card(result: Result) -> str:
    """The card in Markdown."""
    test = result.test
    rows = "\n".join(
        f"| {name} | {v.ap:.3f} | {v.auc:.3f} | {v.recall:.3f} | {v.precision:.3f} | {v.threshold:.3f} |"
        for name, v in test.per_class.items()
        if name not in test.absent
    )
    values = " | ".join(f"{getattr(test, name):.3f}" for name in SHOWN)
    return f"""# {result.name}

Multi-label 12-lead ECG classifier ({", ".join(result.classes)}), trained with {result.method} on
{", ".join(result.databases)} ({result.protocol} protocol, {result.ratio:.1%} of the training part labelled, seed
{result.seed}). The weights are those of step {result.best_step}, chosen by validation MAP; thresholds maximise F2 on
the validation part. The test part chose nothing.

| test | MAP | macro AUC | macro G-beta | ranking loss | Hamming loss | coverage |
| --- | --- | --- | --- | --- | --- | --- |
| | {values} |

| class | AP | AUC | recall | precision | threshold |
| --- | --- | --- | --- | --- | --- |
{rows}

For research. Not a medical device: it has not been validated for any clinical decision. Recordings must be preprocessed as
the training shards were (sampling rate, length, filter: see `best.safetensors`).
"""
