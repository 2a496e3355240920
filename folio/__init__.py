"""What Folio's scripts share. No module in this package imports a script."""


class UserError(Exception):
    """A mistake that the user can fix. The message says what is wrong, where, and how to fix it."""

    exit_code = 2
