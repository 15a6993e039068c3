"""Files: atomic writes, strict typed reading, JSON lines, locks."""
