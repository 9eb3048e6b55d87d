"""What this CPU can run."""

from ._ops import ops


ISA_NAMES = ("none", "avx512", "amx")


def isa() -> str:
    """Name of the best instruction set in use: `"none"`, `"avx512"` or `"amx"`.

    The environment variable `MOEMB_CPU_ISA` (one of these names, read when the first kernel runs) can only lower it.
    """
    return ISA_NAMES[ops.isa()]


def limit_isa(name: str) -> None:
    """Use nothing better than `name` from now on, in the whole process; `"amx"` lifts the limit. For tests.

    Raises:
        ValueError: `name` is not one of `ISA_NAMES`.
    """
    if name not in ISA_NAMES:
        raise ValueError(f"isa '{name}' is not one of {', '.join(ISA_NAMES)}")
    ops.limit_isa(ISA_NAMES.index(name))
