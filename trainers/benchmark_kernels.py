"""The suite `kernels`: each operation against its naive reference first, then against its peers in time."""

import copy
from collections.abc import Callable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from . import benchmark_report as report
from .benchmark_implementations import KERNEL, TORCH, implementations
from .benchmark_machine import dense_product
from .benchmark_operations import DTYPES, OPERATIONS, Inputs, Shape, check_shapes, ragged_lengths
from .benchmark_timing import Protocol, interleave


# worst relative error of an output row, and relative error of a whole gradient, against float64
ROW_TOLERANCE = {"fp32": 1e-5, "bf16": 2.5e-2, "fp16": 5e-3}
GRADIENT_TOLERANCE = {"fp32": 1e-4, "bf16": 5e-2, "fp16": 1e-2}
PEAK = "dense product"
WIDTHS = ((32, 512, 256), (64, 1024, 512), (256, 2048, 512))  # experts, hidden, inner
TOKENS = (1, 4, 16, 64, 256, 1024, 4096, 8192, 16384)


def _in_float64(inputs: Inputs) -> Inputs:
    """Float inputs as float64 leaves that require gradients."""
    return {
        name: value.detach().double().requires_grad_() if _is_float(value) else value for name, value in inputs.items()
    }


def _is_float(value: Any) -> bool:
    return isinstance(value, Tensor) and value.is_floating_point()


def _tuple(result: Any) -> tuple[Tensor, ...]:
    return result if isinstance(result, tuple) else (result,)


def row_error(actual: Tensor, expected: Tensor) -> float:
    """Worst relative error of a row; an exactly zero row must be met within a thousandth of the usual row's norm."""
    if actual.shape != expected.shape:
        return float("inf")
    if actual.numel() == 0:
        return 0.0
    if not actual.is_floating_point():
        return 0.0 if torch.equal(actual, expected) else float("inf")
    rows, wanted = (tensor.detach().double().flatten(1) for tensor in (actual, expected))
    norms = wanted.norm(dim=1)
    floor = 1e-3 * norms.square().mean().sqrt()
    error = (rows - wanted).norm(dim=1) / (norms + floor).clamp_min(1e-300)
    return error.nan_to_num(float("inf")).max().item()


def _poisoned(run: Callable[[], Any]) -> Any:
    """Runs with NaN in all memory that torch hands out uninitialised."""
    before = torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True, warn_only=True)
    try:
        return run()
    finally:
        torch.use_deterministic_algorithms(before[0], warn_only=before[1])


def _spoil_workspaces(name: str, inputs: Inputs) -> None:
    """Runs every implementation of ours on NaN: what its workspaces keep must not show in the next result."""
    spoiled = {
        key: torch.full_like(value, float("nan")) if _is_float(value) else value for key, value in inputs.items()
    }
    found = implementations(name, spoiled)
    if KERNEL in found:
        found[KERNEL].run()


@cache
def check_operation(name: str, dtype: str, seed: int = 0) -> dict[str, Any]:
    """
    Compare all implementations of an operation with its reference.

    Args:
        name (`str`): a key of `OPERATIONS`.
        dtype (`str`): a key of `DTYPES`.
        seed (`int`, *optional*, defaults to 0): of the inputs.

    Returns:
        `dict`: by implementation the worst `row_error`, the worst `gradient_error` and the number of `shapes` it
        ran; `wrong` lists those of ours that are outside the tolerance.
    """
    operation, generator = OPERATIONS[name], torch.Generator().manual_seed(seed)
    errors: dict[str, dict[str, float]] = {}
    for shape in check_shapes(name):
        inputs = operation.inputs(shape, DTYPES[dtype], generator)
        exact = _in_float64(inputs)
        expected = _tuple(operation.reference(*exact.values()))
        grad_output = torch.randn(expected[-1].shape, generator=generator).double()
        if expected[-1].requires_grad:
            expected[-1].backward(grad_output)
        with torch.no_grad():
            _spoil_workspaces(name, inputs)
        for peer, implementation in implementations(name, inputs).items():
            with torch.no_grad():
                actual = _tuple(implementation.packed(_poisoned(implementation.run)))
            entry = errors.setdefault(peer, {"row_error": 0.0, "gradient_error": 0.0, "shapes": 0})
            worst = max(map(row_error, actual, expected)) if len(actual) == len(expected) else float("inf")
            entry["row_error"] = max(entry["row_error"], worst)
            entry["shapes"] += 1
        for peer in (KERNEL, TORCH):
            if peer in errors and inputs[operation.differentiable[0]].shape[0]:
                worst = _gradient_error(operation, peer, inputs, exact, grad_output)
                errors[peer]["gradient_error"] = max(errors[peer]["gradient_error"], worst)
    wrong = [
        peer
        for peer in (KERNEL, TORCH)
        if peer in errors
        and not (
            errors[peer]["row_error"] <= ROW_TOLERANCE[dtype]
            and errors[peer]["gradient_error"] <= GRADIENT_TOLERANCE[dtype]
        )
    ]
    return {"implementations": errors, "wrong": wrong, "tolerance": ROW_TOLERANCE[dtype]}


def _gradient_error(operation, peer: str, inputs: Inputs, exact: Inputs, grad_output: Tensor) -> float:
    leaves = dict(inputs)
    for key in operation.differentiable:
        if leaves[key] is not None:
            leaves[key] = inputs[key].detach().requires_grad_()
    found = implementations(operation.name, leaves)
    if peer not in found:
        return 0.0  # it says that it cannot run what needs a gradient
    output = _tuple(found[peer].packed(_poisoned(found[peer].run)))[-1]
    _poisoned(lambda: output.backward(grad_output.to(output.dtype)))
    worst = 0.0
    for key in operation.differentiable:
        if leaves[key] is None:
            continue
        expected, actual = exact[key].grad, leaves[key].grad
        if actual is None:
            return float("inf")
        error = (actual.double() - expected).norm() / expected.norm().clamp_min(1e-300)
        # a gradient that is zero (one key of attention, a norm's direction) has no relative error
        small = expected.norm() <= 1e-9 * grad_output.norm()
        worst = max(worst, (actual.double().norm() if small else error).nan_to_num(float("inf")).item())
    return worst


def _named(operation: str, dtype: str, label: str, shape: Shape, **goals: float) -> dict[str, Any]:
    name = f"{operation}-{label}-{dtype}"
    return {"name": name, "operation": operation, "dtype": dtype, "shape": shape, "goals": goals}


def timing_cases(quick: bool = False) -> list[dict[str, Any]]:
    """Operation, dtype, shape and goals (`peak`: share of the dense product's rate; `ratio`: over the best peer)."""
    if quick:
        return _quick_cases()
    cases = []
    for dtype in ("bf16", "fp32"):
        for num_experts, hidden, inner in WIDTHS:
            for tokens in TOKENS if dtype == "bf16" else (1, 64, 1024, 8192):
                goals = {"ratio": 2.5 if tokens >= 8192 else 1.5 if tokens == 64 else 1.0}
                if dtype == "fp32":
                    goals = {"peak": 0.65} if tokens == 8192 else {}
                elif tokens >= 8192:
                    goals["peak"] = 0.75
                shape = {"tokens": tokens, "num_experts": num_experts, "hidden": hidden, "inner": inner, "slots": 8}
                label = f"{num_experts}x{hidden}x{inner}-{tokens}"
                cases.append(_named("experts", dtype, label, shape, **goals))
        for tokens in (1, 64, 2048):
            shape = {"tokens": tokens, "features": 2048, "outputs": 4096}
            cases.append(_named("linear", dtype, f"2048x4096-{tokens}", shape))
        for key_heads, heads, dim in ((4, 8, 64), (8, 16, 128), (16, 32, 128)):
            for label, lengths, ratio in (("one", [2048], 8.0), ("ragged", ragged_lengths(2048, 16, 512), 12.0)):
                shape = {"lengths": lengths, "key_heads": key_heads, "heads": heads, "dim": dim}
                label = f"{key_heads}-{heads}x{dim}-{label}"
                cases.append(_named("gated_delta_rule", dtype, label, shape, ratio=ratio))
        shape = {"lengths": [2048], "channels": 8192}
        cases.append(_named("causal_conv", dtype, "2048x8192", shape, ratio=8.0))
        cases.append(_named("rms_norm", dtype, "2048x2048", {"size": (2048, 2048)}, ratio=5.0))
        cases.append(_named("gated_rms_norm", dtype, "2048x32x128", {"size": (2048, 32, 128)}, ratio=5.0))
        for label, lengths in (("one", [2048]), ("ragged", ragged_lengths(2048, 16, 512))):
            shape = {"lengths": lengths, "heads": 16, "key_heads": 2, "dim": 256}
            cases.append(_named("varlen_attention", dtype, f"16-2x256-{label}", shape))
        cases.append(_named("swiglu", dtype, "2048x512", {"size": (2048, 512)}))
        cases.append(_named("rotary", dtype, "2048x16x256", {"size": (2048, 16, 256), "rotary": 64}))
    cases.append(_named("top_k_router", "fp32", "2048x256", {"tokens": 2048, "num_experts": 256, "slots": 8}))
    return cases


def _quick_cases() -> list[dict[str, Any]]:
    cases = []
    for name in OPERATIONS:
        shape = check_shapes(name)[-1]
        shape = {**shape, "lengths": [5, 17]} if "lengths" in shape else {**shape, "routing": "uniform"}
        cases += [_named(name, dtype, "tiny", shape) for dtype in ("fp32", "bf16") if name != "top_k_router"]
    return [*cases, _named("top_k_router", "fp32", "tiny", check_shapes("top_k_router")[-1])]


def case_names(quick: bool = False) -> list[str]:
    """Names of all cases."""
    return [case["name"] for case in timing_cases(quick)]


def run_case(name: str, protocol: Protocol, quick: bool, progress: Callable[[str], None]) -> dict[str, Any]:
    """Checks an operation, then times it. What is wrong of ours is not timed: its speed would mean nothing."""
    (case,) = (case for case in timing_cases(quick) if case["name"] == name)
    operation = OPERATIONS[case["operation"]]
    progress("against the reference")
    check = copy.deepcopy(check_operation(operation.name, case["dtype"]))
    shape, dtype = case["shape"], DTYPES[case["dtype"]]
    inputs = operation.inputs(shape, dtype, torch.Generator().manual_seed(1))
    operations, size = operation.work(shape, inputs)
    with torch.no_grad():
        found = implementations(operation.name, inputs)
        _check_at_size(found, check, ROW_TOLERANCE[case["dtype"]])
        found = {peer: entry for peer, entry in found.items() if peer not in check["wrong"]}
        product, product_operations = dense_product(dtype, 256 if quick else 2048)
        runs = {peer: entry.run for peer, entry in found.items()}
        timing = interleave({PEAK: product, **runs}, protocol, progress=progress)
    medians = {peer: entry.median for peer, entry in timing.timings.items()}
    peak = product_operations / medians.pop(PEAK)
    result = {
        **{key: case[key] for key in ("operation", "dtype", "shape")},
        "check": check,
        "operations": operations,
        "bytes": size,
        "peak_operations_per_second": peak,
        "timing": timing.record(),
        "seconds": medians,
        "share_of_peak": {peer: operations / value / peak for peer, value in medians.items()},
        "bytes_per_second": {peer: size / value for peer, value in medians.items()},
    }
    if operation.name == "experts":  # a compiled peer with packed weights that no package brings to a CPU
        result["not_run"] = {"megablocks": "not built"}
    return {**result, **_verdict(case["goals"], result)}


def _check_at_size(found: Mapping[str, Any], check: dict[str, Any], tolerance: float) -> None:
    """The kernel against our torch path at the size that is timed, and the same bits for one and all threads."""
    if not {KERNEL, TORCH} <= set(found):
        return
    kernel = found[KERNEL].run
    actual = _tuple(_poisoned(kernel))
    count = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        alone = _tuple(kernel())
    finally:
        torch.set_num_threads(count)
    check["same_bits_for_one_thread"] = all(map(torch.equal, actual, alone))
    # near ties of a router may fall either way here: only its weights are compared
    check["error_at_size"] = row_error(actual[-1], _tuple(found[TORCH].packed(found[TORCH].run()))[-1])
    # both sides carry a rounding error of their own
    if not (check["error_at_size"] <= 2 * tolerance and check["same_bits_for_one_thread"]):
        check["wrong"].append(KERNEL)


def _verdict(goals: Mapping[str, float], result: Mapping[str, Any]) -> dict[str, Any]:
    seconds = result["seconds"]
    ours = KERNEL if KERNEL in seconds else TORCH
    peers = {peer: value for peer, value in seconds.items() if peer.startswith("transformers")}
    if ours not in seconds:
        return {"ours": None, "best_peer": None, "ratio": None, "goals": []}
    best = min(peers, key=peers.get) if peers else None
    ratio = peers[best] / seconds[ours] if best else None
    measured = {"ratio": ratio, "peak": result["share_of_peak"][ours]}
    judged = [report.judge(what, measured[what], wanted) for what, wanted in goals.items()]
    return {"ours": ours, "best_peer": best, "ratio": ratio, "goals": judged}


def rows(records: list[report.Record]) -> list[dict[str, str]]:
    """Table rows of the results."""
    lines = []
    for record in records:
        ours, best, seconds = record["ours"], record["best_peer"], record["seconds"]
        check = record["check"]
        error = max((entry["row_error"] for key, entry in check["implementations"].items() if key == ours), default=0)
        lines.append({
            "case": record["case"],
            "ours": "" if ours is None else ours.removeprefix("moemb "),
            "time": "" if ours is None else report.seconds_text(seconds[ours]),
            "best peer": "" if best is None else f"{best} {report.seconds_text(seconds[best])}",
            "ratio": "" if record["ratio"] is None else f"{record['ratio']:.2f}x",
            "of peak": "" if ours is None else f"{100 * record['share_of_peak'][ours]:.1f}%",
            "GB/s": "" if ours is None else f"{record['bytes_per_second'][ours] / 1e9:.1f}",
            "error": f"{error:.1e}" if not check["wrong"] else f"WRONG: {', '.join(check['wrong'])}",
            "others": report.load_text(record),
            "goal": report.goal_text(record["goals"]),
        })  # fmt: skip
    return lines


def plot(records: list[report.Record], path: Path) -> Path:
    """Experts: share of the peak over tokens, by width; all other operations: bars of the ratio to the best peer."""
    widths: dict[tuple, list[report.Record]] = {}
    others = []
    for record in records:
        if record["operation"] == "experts":
            shape = record["shape"]
            key = (shape["num_experts"], shape["hidden"], shape["inner"], record["dtype"])
            widths.setdefault(key, []).append(record)
        elif record["ratio"] is not None:
            others.append(record)
    drawing, axes = report.figure(len(widths) + 1)
    for (key, group), axis in zip(widths.items(), axes):
        group.sort(key=lambda record: record["shape"]["tokens"])
        for peer in dict.fromkeys(name for record in group for name in record["seconds"]):
            points = [(r["shape"]["tokens"], 100 * r["share_of_peak"][peer]) for r in group if peer in r["seconds"]]
            axis.plot(*zip(*points), marker="o", markersize=3, label=peer)
        axis.set(xscale="log", xlabel="tokens", ylabel="% of dense product")
        axis.set_title("experts {}x{}x{} {}".format(*key), fontsize=10)
        axis.legend(fontsize=6)
    report.bars(
        axes[len(widths)], [record["case"] for record in others], [record["ratio"] for record in others],
        "times faster than transformers",
        [next((goal["wanted"] for goal in r["goals"] if goal["what"] == "ratio"), None) for r in others],
    )  # fmt: skip
    return report.save_figure(drawing, path)
