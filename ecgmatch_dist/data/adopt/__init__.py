"""`ecgmatch adopt FOLDER`: look at an archive, and write the recipe and the label scheme that fit it.

`survey.py` looks at the recordings, `labels.py` at the tables beside them, `doubts.py` says what a person should check,
`write.py` writes the two TOML files, `preview.py` draws five recordings."""
