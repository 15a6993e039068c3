"""Golden losses: a change that is not meant to change results must not change these numbers."""

from pathlib import Path

import pytest

from tests.support.method_trainer import METHODS, Trainer

GOLDEN = Path(__file__).parents[1] / "golden" / "losses.txt"


def test_golden_losses() -> None:
    """Five steps of every method in fp64. After an intended change, `python -m tests.methods.test_golden` writes new ones."""
    found, expected = by_method(golden()), by_method(GOLDEN.read_text())
    assert found.keys() == expected.keys()
    for method, values in found.items():
        numbers = [float(number) for number in expected[method].split()]
        assert [float(value) for value in values.split()] == pytest.approx(numbers, rel=1e-7), method


def by_method(text: str) -> dict[str, str]:
    return dict(line.split(maxsplit=1) for line in text.splitlines()[1:])


def golden() -> str:
    lines = ["method, then the loss of steps 1 to 5"]
    for settings in METHODS:
        trainer = Trainer(0, 1, settings)
        lines.append(" ".join([settings.name, *(f"{trainer.one()['loss'].item():.12g}" for _ in range(5))]))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    GOLDEN.write_text(golden())
