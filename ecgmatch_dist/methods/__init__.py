"""One file a method, one signature (`base.Method`); their settings are in `configs`, their making in `registry`."""
