"""What Folio's scripts share. Nothing in here imports a script."""


class UserError(Exception):
    """A mistake that the user can mend. Its message says what is wrong, where, and how to fix it."""

    exit_code = 2
