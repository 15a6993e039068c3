"""The error for problems that a user can fix. It is shown as one line, without a traceback."""


class UserError(Exception):
    """The problem, where it is, and the remedy, in one line."""


def error_line(error: UserError, rank: int = 0) -> str:
    """The line that a user sees."""
    return f"ecgmatch: {error}" if rank == 0 else f"ecgmatch (rank {rank}): {error}"


def require(condition: bool, field: str, value: object, remedy: str) -> None:
    """Raise a UserError with the name of the field and what to write instead, unless the condition holds."""
    if not condition:
        raise UserError(f"{field} = {value!r}: {remedy}")
