"""Predict recordings with a trained model, in Python.

python examples/predict.py runs/within-chapman@0.1.s20.fixmatch new/JS00001.hea
"""

import sys

import ecgmatch_dist as em


def main(run: str, *records: str) -> None:
    """Print the classes of each record, and the known case that is most like it."""
    model = em.load(run, nearest=1)
    for answer in model.predict_files(records):
        if answer.error:
            print(f"{answer.path}: {answer.error}")
            continue
        case = answer.nearest[0]
        print(f"{answer.path}: {', '.join(answer.predicted) or 'no class'}")
        print("  " + "  ".join(f"{name} {p:.2f}" for name, p in answer.calibrated.items()))
        print(f"  most like {case.id} ({', '.join(case.classes) or 'no class'})")


if __name__ == "__main__":
    main(*sys.argv[1:])
