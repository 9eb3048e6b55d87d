"""Times the GPU kernels on the machine at hand, after checking that they are right.

    python hub_kernels/tools/bench_gpu.py [--dry-run] [--output FILE] [--seconds N] [--token-rounding]

Writes one JSON file with the device's name: experts against torch's grouped product, transformers' own back-ends and
SonicMoE; how much of the FLOPs saved by fewer experts or fewer tokens turns into time; delta rule, convolution and
norms against flash-linear-attention and torch; embedding rate of a model of the true widths with random weights.
All rounds of a comparison are interleaved; figures are medians in milliseconds. What the time limit cuts off is named.
`--dry-run` runs every step with tiny shapes on the CPU: it shows that the script works, its times mean nothing.
"""

import argparse
import json
import statistics
import sys
import time
from pathlib import Path

import torch


KERNELS = Path(__file__).resolve().parents[1]
for folder in (KERNELS / "moemb-experts" / "torch-ext", KERNELS / "moemb-gated-delta" / "torch-ext", KERNELS.parent):
    sys.path.insert(0, str(folder))

from bench_gpu_experts import check_experts, conversions, time_experts, time_token_rounding  # noqa: E402
from bench_gpu_model import check_gated_delta, time_encode, time_gated_delta  # noqa: E402


class Bench:
    """What every part needs: device, sizes, clock and the report that grows."""

    def __init__(self, dry_run: bool, seconds: float):
        self.dry_run, self.end = dry_run, time.monotonic() + seconds
        self.device = torch.device("cpu" if dry_run else "cuda")
        self.dtype = torch.float32 if dry_run else torch.bfloat16
        self.report = {"device": self.device_name(), "torch": torch.__version__, "dry_run": dry_run, "cut_off": []}

    def device_name(self) -> str:
        return "cpu" if self.dry_run else torch.cuda.get_device_name(self.device)

    def out_of_time(self, what: str) -> bool:
        late = time.monotonic() > self.end
        if late:
            self.report["cut_off"].append(what)
        return late

    def clock(self, function) -> float:
        """Milliseconds of one call."""
        if self.dry_run:
            start = time.perf_counter()
            function()
            return (time.perf_counter() - start) * 1e3
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        function()
        end.record()
        end.synchronize()
        return start.elapsed_time(end)

    def compare(self, functions: dict, seconds: float = 0.5) -> dict:
        """Median milliseconds of each function, in interleaved rounds; one that fails gives its error instead."""
        times, results = {}, {}
        for name, function in functions.items():
            try:
                for _ in range(1 if self.dry_run else 3):
                    self.clock(function)
                times[name] = []
            except Exception as error:  # a peer that cannot run here must not end the benchmark
                results[name] = f"{type(error).__name__}: {error}"[:200]
        end = time.monotonic() + seconds * len(times)
        for rounds in range(30):
            if rounds >= (1 if self.dry_run else 5) and (self.dry_run or time.monotonic() > end):
                break
            for name in times:
                times[name].append(self.clock(functions[name]))
        return {**results, **{name: round(statistics.median(values), 4) for name, values in times.items()}}

    def dense_peak(self) -> float:
        """TFLOP/s of a square product in the benchmark's dtype: what the experts are measured against."""
        size = 64 if self.dry_run else 8192
        left, right = torch.randn(2, size, size, device=self.device, dtype=self.dtype)
        milliseconds = self.compare({"dense": lambda: left @ right})["dense"]
        return round(2 * size**3 / milliseconds / 1e9, 3)


def correct(errors: dict, limit: float) -> bool:
    """Whether every error is below the limit; NaN is not."""
    return all(error <= limit for values in errors.values() for error in values)


def summary(report: dict) -> str:
    """The figures that matter, a line each."""
    lines = [f"{report['device']}, torch {report['torch']}; dense {report.get('dense_tflops')} TFLOP/s"]
    for row in report.get("experts", []):
        speeds = [f"{n} {ms:.3f}" if isinstance(ms, float) else f"{n} failed" for n, ms in row["ms"].items()]
        lines.append(f"experts {row['kept']} tokens, {row['slots']} slots, ms: {', '.join(speeds)}")
    for row in report.get("conversion", []):
        lines.append(f"conversion {row['tokens']} -> {row['kept']} tokens, {row['slots']} slots: {row['conversion']}")
    for row in report.get("gated_delta", []):
        lines.append(f"{row['op']} {row.get('segment', '')} ms: {row['ms']}")
    lines.append(f"encode, items per second: {report.get('encode', {}).get('items_per_second')}")
    lines.append(f"cut off by the time limit: {report['cut_off'] or 'nothing'}")
    return "\n".join(lines)


def write(report: dict, output: Path) -> None:
    output.parent.mkdir(parents=True, exist_ok=True)
    part = output.with_suffix(".part")
    part.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    part.replace(output)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dry-run", action="store_true", help="tiny shapes on the CPU")
    parser.add_argument("--output", type=Path, help="default: results/bench_gpu_<device>.json in this checkout")
    parser.add_argument("--seconds", type=float, default=240, help="begin nothing new after this many seconds")
    parser.add_argument("--token-rounding", action="store_true", help="also time experts with rows rounded to tiles")
    arguments = parser.parse_args()
    if not arguments.dry_run and not torch.cuda.is_available():
        print("bench_gpu: torch sees no CUDA device; --dry-run runs the steps on the CPU", file=sys.stderr)
        return 2
    torch.manual_seed(0)
    bench = Bench(arguments.dry_run, arguments.seconds)
    report = bench.report
    output = arguments.output
    if output is None:
        name = "".join(letter if letter.isalnum() else "_" for letter in report["device"])
        output = KERNELS.parent / "results" / f"bench_gpu_{name}.json"
    report["errors"] = errors = {**check_experts(bench), **check_gated_delta(bench)}
    # relative errors of 16-bit arithmetic; beyond them a time would describe a wrong result
    right = correct(errors, 1e-4 if arguments.dry_run else 3e-2)
    parts = {"dense_tflops": Bench.dense_peak, "experts": time_experts, "encode": time_encode}
    if arguments.token_rounding:
        parts["token_rounding"] = time_token_rounding
    parts["gated_delta"] = time_gated_delta  # last: flash-linear-attention tunes itself for long
    for name, part in parts.items():
        if right and not bench.out_of_time(name):
            with torch.no_grad():
                report[name] = part(bench)
            report["conversion"] = conversions(report.get("experts", []))
        write(report, output)  # after every part: a killed run leaves what it had
    print(summary(report) if right else f"WRONG RESULTS, nothing was timed; relative errors: {errors}")
    print(f"written: {output}")
    return 0 if right else 1


if __name__ == "__main__":
    sys.exit(main())
