"""Where the windows of a long recording begin."""


def places(length: int, window: int) -> list[int]:
    """Evenly spaced from the first sample to the last, each overlapping the next by half or more. `window` 0, or a
    recording that is not longer: one, the whole."""
    if not window or length <= window:
        return [0]
    gaps = -(-2 * (length - window) // window)
    return [round(number * (length - window) / gaps) for number in range(gaps + 1)]
