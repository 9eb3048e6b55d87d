"""Interleaved timing that says how busy the machine was.

Peers are run in turn, round after round, so a neighbour that wakes up slows all of them; each round records the share
of the machine that other processes used while it ran. Medians are taken over the clean rounds when there are enough
of them, else over all, and the result says which.
"""

import math
import os
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any


CLOCKS = {"wall": time.perf_counter, "cpu": time.thread_time}
CLEAN_LOAD = 0.08  # of all cores, used by others or taken by the hypervisor
MAX_REPEATS = 2000
_STAT = Path("/proc/stat")


def _machine_seconds() -> tuple[float, float] | None:
    """Busy and stolen core-seconds of the machine since it started; `None` where the system does not say."""
    try:
        words = _STAT.read_text(encoding="ascii").split("\n", 1)[0].split()[1:]
    except OSError:
        return None
    ticks = os.sysconf("SC_CLK_TCK")
    user, nice, system, _idle, _wait, irq, softirq, steal = (int(word) / ticks for word in words[:8])
    return user + nice + system + irq + softirq, steal


def _process_seconds(process: int) -> float:
    """Core-seconds of another process and of its living descendants; 0 when it is gone."""
    ticks, total, waiting = os.sysconf("SC_CLK_TCK"), 0.0, [process]
    while waiting:
        folder = Path(f"/proc/{waiting.pop()}")
        try:
            words = (folder / "stat").read_text(encoding="utf-8").rpartition(")")[2].split()
            total += (int(words[11]) + int(words[12])) / ticks
            for task in (folder / "task").iterdir():
                waiting += map(int, (task / "children").read_text(encoding="ascii").split())
        except OSError:
            continue
    return total


class Load:
    """
    How busy others kept the machine while a block ran.

    Args:
        helpers (`Iterable[int]`, *optional*): process ids that belong to the measurement and are not "others".

    After the block `others` and `stolen` hold the shares of all cores that other processes used and that the
    hypervisor took, from 0 to 1; both are `None` where the system does not say (outside Linux).
    """

    def __init__(self, helpers: Iterable[int] = ()):
        self.helpers = tuple(helpers)
        self.others: float | None = None
        self.stolen: float | None = None

    def _own_seconds(self) -> float:
        times = os.times()
        own = times.user + times.system + times.children_user + times.children_system
        return own + sum(map(_process_seconds, self.helpers))

    def __enter__(self) -> "Load":
        self._start = time.perf_counter(), _machine_seconds(), self._own_seconds()
        return self

    def __exit__(self, *_) -> None:
        start, machine, own = self._start
        now = _machine_seconds()
        if machine is None or now is None:
            return
        cores = (time.perf_counter() - start) * (os.cpu_count() or 1)
        self.others = min(1.0, max(0.0, now[0] - machine[0] - (self._own_seconds() - own)) / max(cores, 1e-9))
        self.stolen = min(1.0, max(0.0, now[1] - machine[1]) / max(cores, 1e-9))

    @property
    def clean(self) -> bool:
        """Whether the block was left alone; true where the system does not say."""
        return (self.others or 0.0) + (self.stolen or 0.0) < CLEAN_LOAD


def wait_quiet(seconds: float, window: float = 0.5) -> bool:
    """Wait until others leave the machine alone for `window` seconds, at most `seconds`; whether they did."""
    deadline = time.monotonic() + seconds
    while True:
        with Load() as load:
            time.sleep(window)
        if load.clean:
            return True
        if time.monotonic() >= deadline:
            return False


@dataclass
class Protocol:
    """
    How a case is timed.

    Args:
        rounds (`int`): rounds that count.
        warmup (`int`): calls of each function before the first round.
        clock (`str`): `"wall"`, or `"cpu"` for the time of this thread alone, which is robust beside other
            processes and only true with one thread.
        wait_quiet (`float`): seconds that one case may wait and repeat for rounds in which others left the machine
            alone; 0 takes the rounds as they come.
        shortest (`float`): seconds below which a function is repeated inside a round.
        longest (`float`): seconds after which a case starts no further round once it has three.
    """

    rounds: int = 7
    warmup: int = 1
    clock: str = "wall"
    wait_quiet: float = 0.0
    shortest: float = 0.02
    longest: float = 600.0


@dataclass
class Timing:
    """
    Seconds per call of one function.

    Args:
        median, best (`float`): over the rounds that count.
        spread (`float`): distance of the quartiles over the median.
        samples (`list[float]`): every round, clean or not, in order.
        repeats (`int`): calls inside one round.
    """

    median: float
    best: float
    spread: float
    samples: list[float] = field(default_factory=list)
    repeats: int = 1


@dataclass
class Interleaved:
    """
    What [`interleave`] measured.

    Args:
        timings (`dict[str, Timing]`): by function.
        rounds, clean_rounds (`int`): rounds run, and rounds in which others left the machine alone.
        only_clean (`bool`): whether the medians are over the clean rounds alone.
        counted (`list[int]`): the rounds that the medians are over.
        others (`float`, *optional*): mean share of all cores that others used or the hypervisor took.
    """

    timings: dict[str, Timing]
    rounds: int
    clean_rounds: int
    only_clean: bool
    counted: list[int]
    others: float | None

    def record(self) -> dict[str, Any]:
        """Everything as plain data."""
        return asdict(self)


def _seconds(function: Callable[[], Any], repeats: int, clock: Callable[[], float]) -> float:
    start = clock()
    for _ in range(repeats):
        function()
    return (clock() - start) / repeats


def interleave(
    functions: Mapping[str, Callable[[], Any]],
    protocol: Protocol,
    helpers: Iterable[int] = (),
    progress: Callable[[str], None] = lambda text: None,
) -> Interleaved:
    """
    Time functions in turn.

    Args:
        functions (`Mapping[str, Callable]`): what to run, by name; the order moves on by one each round.
        protocol (`Protocol`): rounds, clock and patience.
        helpers (`Iterable[int]`, *optional*): processes that work for the functions and are not "others".
        progress (`Callable[[str], None]`, *optional*): is told what runs.

    Raises:
        ValueError: for an unknown clock, or fewer than one round.
    """
    if protocol.clock not in CLOCKS:
        raise ValueError(f"the clock must be one of {sorted(CLOCKS)}, got {protocol.clock!r}")
    if protocol.rounds < 1:
        raise ValueError(f"the number of rounds must be at least 1, got {protocol.rounds}")
    clock, helpers = CLOCKS[protocol.clock], tuple(helpers)
    repeats = {}
    for name, function in functions.items():
        progress(f"{name}, warm-up")
        for _ in range(max(1, protocol.warmup)):
            once = _seconds(function, 1, time.perf_counter)
        repeats[name] = min(MAX_REPEATS, max(1, math.ceil(protocol.shortest / max(once, 1e-9))))
    names, rows, loads = list(functions), [], []
    begun, patience = time.monotonic(), protocol.wait_quiet
    while True:
        clean = sum(load.clean for load in loads)
        if (clean if patience > 0 else len(rows)) >= protocol.rounds:
            break
        if len(rows) >= min(3, protocol.rounds) and time.monotonic() - begun > protocol.longest:
            break
        waited = time.monotonic()
        if patience > 0:
            wait_quiet(patience)
        shift = len(rows) % len(names)
        with Load(helpers) as load:
            row = {}
            for name in names[shift:] + names[:shift]:
                progress(f"{name}, round {len(rows) + 1}")
                row[name] = _seconds(functions[name], repeats[name], clock)
        rows.append(row)
        loads.append(load)
        if not load.clean:  # a spoiled round costs patience too, or a machine that never rests would hold us forever
            patience -= time.monotonic() - waited
    return _summary(names, rows, loads, repeats, min(3, protocol.rounds))


def quartiles(values: Sequence[float]) -> tuple[float, float]:
    """The lower and the upper quartile of sorted values, each one of them."""
    return values[round((len(values) - 1) * 0.25)], values[round((len(values) - 1) * 0.75)]


def _summary(names: list[str], rows: list[dict], loads: list[Load], repeats: dict[str, int], enough: int):
    clean = [number for number, load in enumerate(loads) if load.clean]
    only_clean = len(clean) >= enough
    counted = clean if only_clean else list(range(len(rows)))
    timings = {}
    for name in names:
        values = sorted(rows[number][name] for number in counted)
        median = statistics.median(values)
        low, high = quartiles(values)
        timings[name] = Timing(median, values[0], (high - low) / median, [row[name] for row in rows], repeats[name])
    known = [load.others + (load.stolen or 0.0) for load in loads if load.others is not None]
    others = statistics.mean(known) if known else None
    return Interleaved(timings, len(rows), len(clean), only_clean, counted, others)
