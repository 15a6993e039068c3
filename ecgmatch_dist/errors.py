"""One kind of error for what a user can mend: it is shown as one line, without a traceback."""


class UserError(Exception):
    """What is wrong, where, and the remedy, in one line."""
