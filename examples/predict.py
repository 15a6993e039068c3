"""Predict recordings with a trained model, in Python.

python examples/predict.py runs/within-chapman@0.1.s20.fixmatch new/JS00001.hea
"""

import sys
from pathlib import Path

import ecgmatch_dist as em
from ecgmatch_dist.predict import read_record


def main(run: Path, *records: Path) -> None:
    """Print the classes of each record, and the known case that is most like it."""
    model = em.load(run)
    for record in records:
        prediction = model(read_record(record), nearest=1)
        case = prediction.nearest[0]
        print(f"{record.name}: {', '.join(prediction.predicted) or 'no class'}")
        print("  " + "  ".join(f"{name} {p:.2f}" for name, p in prediction.probabilities.items()))
        print(f"  most like {case.id} ({', '.join(case.classes) or 'no class'})")


if __name__ == "__main__":
    main(*map(Path, sys.argv[1:]))
