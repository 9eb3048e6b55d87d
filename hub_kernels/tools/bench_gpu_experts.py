"""The experts' part of bench_gpu.py; `bench` is its `Bench`."""

from functools import partial

import moemb_experts
import torch
from moemb_experts.backends import NAMES, implementation, why_not


TILE = 128  # rows of the tile that token rounding fills


def routing(bench, tokens: int, experts: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Top-k of logits with a log-normal popularity of the experts, weights renormalised."""
    popularity = torch.randn(experts, device=bench.device) * 0.5
    scores = (torch.randn(tokens, experts, device=bench.device) + popularity).softmax(-1)
    weight, index = scores.topk(slots, dim=-1)
    return index, weight / weight.sum(-1, keepdim=True)


def round_tokens_down(index: torch.Tensor, weight: torch.Tensor, experts: int) -> torch.Tensor:
    """Skip the lightest pairs of each expert until its rows fill whole tiles: lossy, and it depends on the batch."""
    flat, heavy = index.reshape(-1), weight.reshape(-1).argsort(descending=True, stable=True)
    order = heavy[flat[heavy].argsort(stable=True)]  # by expert, heaviest first
    counts = torch.bincount(flat, minlength=experts)
    rank = torch.arange(flat.numel(), device=flat.device) - (counts.cumsum(0) - counts)[flat[order]]
    kept = rank < (counts // TILE * TILE)[flat[order]]
    rounded = torch.full_like(flat, experts)
    rounded[order[kept]] = flat[order[kept]]
    return rounded.view_as(index)


def matrices(bench, experts: int, hidden: int, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    options = {"device": bench.device, "dtype": bench.dtype}
    gate_up = torch.randn(experts, 2 * width, hidden, **options) * hidden**-0.5
    return gate_up, torch.randn(experts, hidden, width, **options) * width**-0.5


def transformers_experts(gate_up: torch.Tensor, down: torch.Tensor) -> dict:
    """transformers' back-ends on the same weights, as functions of (states, index, weight)."""
    try:
        from transformers.models.qwen3_5_moe.configuration_qwen3_5_moe import Qwen3_5MoeTextConfig
        from transformers.models.qwen3_5_moe.modeling_qwen3_5_moe import Qwen3_5MoeExperts
    except ImportError:
        return {}
    peers = {}
    for name in ("eager", "grouped_mm"):
        sizes = {"num_experts": down.shape[0], "hidden_size": down.shape[1], "moe_intermediate_size": down.shape[2]}
        config = Qwen3_5MoeTextConfig(**sizes)
        config._experts_implementation = name
        with torch.device("meta"):
            module = Qwen3_5MoeExperts(config)
        module.gate_up_proj, module.down_proj = torch.nn.Parameter(gate_up), torch.nn.Parameter(down)
        peers[f"transformers_{name}"] = module.requires_grad_(False)
    return peers


def error_of(actual: torch.Tensor, expected: torch.Tensor) -> float:
    """Norm of the error over the norm of what is expected; NaN stays NaN."""
    actual, expected = actual.detach().double(), expected.detach().double()
    return float((actual - expected).norm() / expected.norm())


def check_experts(bench) -> dict:
    """Every back-end forward and backward against the loop in fp64."""
    tokens, experts, hidden, width, slots = (12, 4, 16, 8, 2) if bench.dry_run else (700, 16, 512, 256, 4)
    gate_up, down = matrices(bench, experts, hidden, width)
    states = torch.randn(tokens, hidden, device=bench.device, dtype=bench.dtype)
    index, weight = routing(bench, tokens, experts, slots)
    index[:3] = experts
    grad = torch.randn_like(states)

    def run(function, dtype):
        leaves = [tensor.detach().to(dtype).requires_grad_() for tensor in (states, weight, gate_up, down)]
        output = function(leaves[0], index, *leaves[1:])
        return (output, *torch.autograd.grad(output, leaves, grad.to(dtype)))

    expected = run(implementation("loop"), torch.float64)
    errors = {}
    for name in NAMES:
        if why_not(name, states, gate_up) is None:
            results = run(implementation(name), bench.dtype)
            errors[name] = [error_of(a, b) for a, b in zip(results, expected)]
    return errors


def time_experts(bench) -> list[dict]:
    """Every back-end at every number of tokens and slots; conversion of fewer slots and of fewer tokens."""
    experts, hidden, width = (4, 16, 8) if bench.dry_run else (256, 2048, 512)
    all_tokens = (8, 16) if bench.dry_run else (64, 1024, 4096, 16384, 65536)
    gate_up, down = matrices(bench, experts, hidden, width)
    peers, rows = transformers_experts(gate_up, down), []
    for tokens in all_tokens:
        if bench.out_of_time(f"experts, {tokens} tokens"):
            break
        pool = torch.randn(tokens, hidden, device=bench.device, dtype=bench.dtype)
        full = min(8, experts)
        plans = [(full, 1.0), (full // 2, 1.0), (full // 4, 1.0), (full, 0.5), (full, 0.3)]
        for slots, keep in plans:
            kept = max(1, round(tokens * keep))
            index, weight = routing(bench, kept, experts, slots)
            functions = expert_functions(pool[:kept], index, weight.to(bench.dtype), gate_up, down, peers)
            times = bench.compare(functions, 0.1)
            flops = 6 * hidden * width * kept * slots
            rows.append({"tokens": tokens, "kept": kept, "slots": slots, "flops": flops, "ms": times})
    return rows


def expert_functions(states, index, weight, gate_up, down, peers: dict) -> dict:
    """One function without arguments per back-end that can run these tensors."""
    names = [name for name in NAMES if why_not(name, states, gate_up) is None]
    functions = {name: partial(implementation(name), states, index, weight, gate_up, down) for name in names}
    return functions | {name: partial(run, states, index, weight) for name, run in peers.items()}


def conversions(rows: list[dict]) -> list[dict]:
    """`(1 - time / full time) / (1 - FLOPs / full FLOPs)` of every policy and back-end."""
    found = []
    full = {}
    for row in rows:
        full.setdefault(row["tokens"], row)  # the first plan of each size is the full one
    for row in rows:
        base = full[row["tokens"]]
        if row is base:
            continue
        saved = 1 - row["flops"] / base["flops"]
        pairs = [(name, ms, base["ms"].get(name)) for name, ms in row["ms"].items()]
        ratios = {
            name: round((1 - ms / whole) / saved, 3)
            for name, ms, whole in pairs
            if isinstance(ms, float) and isinstance(whole, float)
        }
        found.append({key: row[key] for key in ("tokens", "kept", "slots")} | {"conversion": ratios})
    return found


def time_token_rounding(bench) -> dict:
    """Experts with rows rounded down to whole tiles: what is dropped, and what it gains."""
    tokens, experts, hidden, width = (600, 2, 16, 8) if bench.dry_run else (16384, 256, 2048, 512)
    gate_up, down = matrices(bench, experts, hidden, width)
    states = torch.randn(tokens, hidden, device=bench.device, dtype=bench.dtype)
    index, weight = routing(bench, tokens, experts, min(8, experts))
    rounded = round_tokens_down(index, weight, experts)
    run = moemb_experts.experts
    functions = {
        "plain": lambda: run(states, index, weight, gate_up, down),
        "rounded_down": lambda: run(states, rounded, weight, gate_up, down),
    }
    return {"dropped": float((rounded != index).float().mean()), "ms": bench.compare(functions)}
