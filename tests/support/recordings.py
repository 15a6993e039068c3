"""Small WFDB recordings for the tests of the data path."""

from pathlib import Path

import numpy as np

from ecgmatch_dist.data.preprocess import LEADS


def make_signal(seed: int = 0, n: int = 1000, leads: int = 12) -> np.ndarray:
    """[leads, n] in mV: a wandering baseline, a beat-like spike train and noise."""
    rng = np.random.default_rng(seed)
    t = np.arange(n)
    beats = 1.2 * np.exp(-0.5 * (((t + rng.integers(80)) % 80 - 40) / 2.5) ** 2)
    wander = 0.3 * np.sin(2 * np.pi * t / 400 + rng.uniform(0, 6, (leads, 1)))
    return beats * rng.uniform(0.3, 1, (leads, 1)) + wander + 0.02 * rng.normal(size=(leads, n))


def write_record(
    folder: Path,
    name: str,
    signal: np.ndarray,
    rate: float = 100,
    codes: str = "426783006",
    leads: tuple[str, ...] = LEADS,
    old: bool = False,
    gain: float = 1000.0,
    baseline: int = 0,
    units: str = "mV",
) -> Path:
    """Header and signal file; `old`: .mat and `#Dx:`, otherwise .dat and `# Dx:`. NaN becomes the missing-value code."""
    folder.mkdir(parents=True, exist_ok=True)
    physical = signal.T * gain + baseline
    digital = np.where(np.isnan(physical), -(2**15), np.round(np.nan_to_num(physical))).astype("<i2")
    suffix, kind, space = ("mat", "16+24", "") if old else ("dat", "16", " ")
    scale = f"{gain:g}/{units}" if old else f"{gain:.1f}({baseline})/{units}"
    lines = [f"{name} {len(leads)} {rate:g} {signal.shape[1]}"]
    lines += [
        f"{name}.{suffix} {kind} {scale} 16 {baseline} {digital[0, v]} 7 0 {lead}" for v, lead in enumerate(leads)
    ]
    lines += [f"#{space}Age: 61", f"#{space}Sex: Female", f"#{space}Dx: {codes}"]
    (folder / f"{name}.hea").write_text("\n".join(lines) + "\n")
    matlab = np.array([30, len(leads), signal.shape[1], 0, 4], "<i4").tobytes() + b"val\0"
    (folder / f"{name}.{suffix}").write_bytes((matlab if old else b"") + digital.tobytes())
    return folder / name
