"""Errors that a user can mend: the command line prints their text alone, without a traceback."""


class MoEMBError(Exception):
    """Base of every error of `moemb.trainers` that names an item, its value and the remedy.

    Subclasses also derive from the built-in type that a library user would catch, for example
    `class RecipeError(MoEMBError, ValueError)`.
    """


def nearest(word: str, choices) -> str:
    """Return `"; did you mean 'x'?"` for the choice that looks most like `word`, or an empty string."""
    import difflib

    matches = difflib.get_close_matches(word, [str(choice) for choice in choices], n=1, cutoff=0.5)
    return f"; did you mean '{matches[0]}'?" if matches else ""
