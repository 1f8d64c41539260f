"""The error of every command here: a mistake that the user can correct."""


class PrepError(ValueError):
    """The source or the output folder is wrong; the message says how, and what to do."""
