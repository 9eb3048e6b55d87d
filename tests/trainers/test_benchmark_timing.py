import json
import mmap
import subprocess
import sys
import time

import pytest
import torch

from moemb.trainers import benchmark_machine, benchmark_timing
from moemb.trainers.benchmark_timing import CLOCKS, Load, Protocol, interleave, wait_quiet


class FakeClock:
    """Time that only the timed functions spend."""

    def __init__(self):
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def spender(self, name, costs, log):
        costs = iter(costs)

        def run():
            log.append(name)
            self.now += next(costs)

        return run


class FakeLoad:
    """Rounds that are clean or not, as scripted."""

    script: list[bool] = []

    def __init__(self, helpers=()):
        pass

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.clean = FakeLoad.script.pop(0) if FakeLoad.script else False
        self.others, self.stolen = (0.0, 0.0) if self.clean else (0.5, 0.1)


@pytest.fixture
def clock(monkeypatch):
    fake = FakeClock()
    monkeypatch.setitem(CLOCKS, "wall", fake)
    return fake


@pytest.fixture
def loads(monkeypatch):
    monkeypatch.setattr(benchmark_timing, "Load", FakeLoad)
    monkeypatch.setattr(benchmark_timing, "wait_quiet", lambda seconds: True)

    def script(clean):
        FakeLoad.script = list(clean)

    return script


def protocol(**settings) -> Protocol:
    return Protocol(**{"shortest": 0.0, **settings})


def test_functions_take_turns_and_the_first_place_moves_on(clock):
    log = []
    runs = {name: clock.spender(name, [1.0] * 9, log) for name in "abc"}
    interleave(runs, protocol(rounds=3))
    assert "".join(log) == "abc" + "abc" + "bca" + "cab"  # warm-up, then three rounds


def test_medians_and_spread_are_those_of_the_rounds(clock, loads):
    loads([True] * 5)
    result = interleave({"a": clock.spender("a", [99, 5, 1, 4, 2, 3], [])}, protocol(rounds=5))
    timing = result.timings["a"]
    assert (timing.median, timing.best, timing.samples) == (3, 1, [5, 1, 4, 2, 3])
    assert timing.spread == pytest.approx((4 - 2) / 3)
    assert (result.rounds, result.clean_rounds, result.only_clean, result.others) == (5, 5, True, 0.0)
    json.dumps(result.record())


def test_spoiled_rounds_do_not_count_when_enough_are_clean(clock, loads):
    loads([True, False, True, False, True])
    result = interleave({"a": clock.spender("a", [0, 1, 50, 2, 60, 3], [])}, protocol(rounds=5))
    assert result.timings["a"].median == 2 and result.only_clean and result.clean_rounds == 3
    assert result.others == pytest.approx(0.24)


def test_all_rounds_count_when_too_few_are_clean(clock, loads):
    loads([True, False, False, False, True])
    result = interleave({"a": clock.spender("a", [0, 1, 50, 70, 60, 3], [])}, protocol(rounds=5))
    assert result.timings["a"].median == 50 and not result.only_clean


def test_patience_repeats_spoiled_rounds_and_ends(clock, loads):
    loads([False, True, False, True, True])
    result = interleave({"a": clock.spender("a", [0, 9, 1, 9, 1, 1], [])}, protocol(rounds=3, wait_quiet=1e6))
    assert (result.rounds, result.clean_rounds, result.timings["a"].median) == (5, 3, 1)
    loads([])  # never clean again: what is left is a bounded number of rounds
    result = interleave({"a": clock.spender("a", [1] * 10_000, [])}, protocol(rounds=3, wait_quiet=1e-9))
    assert result.rounds == 3 and result.clean_rounds == 0


def test_a_short_function_is_repeated_inside_a_round():
    calls = []
    result = interleave({"a": lambda: (calls.append(0), time.sleep(0.001))}, Protocol(rounds=1, shortest=0.02))
    repeats = result.timings["a"].repeats
    assert 1 < repeats <= 20 and len(calls) == 1 + repeats
    assert result.timings["a"].median == pytest.approx(0.001, rel=20) and result.timings["a"].median >= 0.001


@pytest.mark.parametrize(("settings", "message"), [({"clock": "sun"}, "'sun'"), ({"rounds": 0}, "at least 1, got 0")])
def test_a_wrong_protocol_is_refused(settings, message):
    with pytest.raises(ValueError, match=message):
        interleave({"a": lambda: None}, protocol(**settings))


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says how busy others are")
def test_load_sees_other_processes_but_not_helpers():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        time.sleep(0.1)
        with Load() as seen, Load(helpers=[child.pid]) as forgiven:
            time.sleep(0.8)
    finally:
        child.kill()
        child.wait()
    assert 0 <= forgiven.others < seen.others <= 1
    assert seen.others - forgiven.others > 0.02


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux says how busy others are")
def test_waiting_ends_while_a_process_is_busy():
    child = subprocess.Popen([sys.executable, "-c", "while True: pass"])
    try:
        start = time.monotonic()
        assert not wait_quiet(0.2, window=0.2)
        assert time.monotonic() - start < 5
    finally:
        child.kill()
        child.wait()


def test_machine_facts_are_plain_data():
    facts = json.loads(json.dumps(benchmark_machine.machine()))
    assert facts["threads"] == torch.get_num_threads() and facts["versions"]["torch"] and facts["processor"]


def test_the_peak_is_a_dense_product():
    product, operations = benchmark_machine.dense_product(torch.float32, 32)
    assert product().shape == (32, 32) and operations == 2 * 32**3
    assert benchmark_machine.read_bandwidth(1 << 20, rounds=1) > 1e6


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="only Linux resets the peak")
def test_peak_memory_is_that_of_the_block():
    before = benchmark_machine.resident_bytes()
    with benchmark_machine.peak_memory() as peak:
        with mmap.mmap(-1, 64 << 20) as fresh:  # 64 MiB that no freed memory can stand in for, given back at once
            fresh.write(bytes(64 << 20))
    if peak["bytes"] is None:
        pytest.skip("the system does not let us reset the peak")
    assert 60 << 20 < peak["bytes"] - before < 200 << 20


def test_threads_are_put_back():
    count = torch.get_num_threads()
    with benchmark_machine.threads(count + 1):
        assert torch.get_num_threads() == count + 1
    assert torch.get_num_threads() == count
