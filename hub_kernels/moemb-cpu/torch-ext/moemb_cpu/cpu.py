"""What this CPU can run."""

from ._ops import ops


ISA_NAMES = ("none", "avx512", "amx")
# kept in Python: asking the library would cost each `supports` a call, and could not be traced by torch.compile
_level = ops.isa()


def isa() -> str:
    """Name of the best instruction set in use: `"none"`, `"avx512"` or `"amx"`.

    The environment variable `MOEMB_CPU_ISA` (one of these names, read when the library is loaded) can only lower it.
    """
    return ISA_NAMES[_level]


def isa_level() -> int:
    """Index of `isa()` in `ISA_NAMES`."""
    return _level


def limit_isa(name: str) -> None:
    """Use nothing better than `name` from now on, in the whole process; `"amx"` lifts the limit. For tests.

    Raises:
        ValueError: `name` is not one of `ISA_NAMES`.
    """
    if name not in ISA_NAMES:
        raise ValueError(f"isa '{name}' is not one of {', '.join(ISA_NAMES)}")
    global _level
    ops.limit_isa(ISA_NAMES.index(name))
    _level = ops.isa()
