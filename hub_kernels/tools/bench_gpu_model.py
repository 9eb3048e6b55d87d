"""Gated DeltaNet's and the whole model's part of bench_gpu.py; `bench` is its `Bench`."""

import os
from functools import partial
from pathlib import Path

import moemb_gated_delta
import torch
from bench_gpu_experts import error_of


KERNELS = Path(__file__).resolve().parents[1]


def check_gated_delta(bench) -> dict:
    """Delta rule, convolution and norms against the torch path in fp32, forward and backward."""
    heads, dim = (1, 16) if bench.dry_run else (2, 128)
    lengths = [0, 1, 17] if bench.dry_run else [0, 1, 63, 64, 65, 700]
    cases = delta_inputs(bench, lengths, heads, 2 * heads, dim)
    inputs, cu_seqlens = cases[:5], cases[5]
    channels = torch.randn(int(cu_seqlens[-1]), 64, device=bench.device, dtype=bench.dtype)
    taps, scale = torch.randn(64, 4, device=bench.device), torch.randn(64, device=bench.device)
    operations = {
        "gated_delta_rule": (lambda *leaves: moemb_gated_delta.gated_delta_rule(*leaves, cu_seqlens), inputs),
        "causal_conv": (lambda *leaves: moemb_gated_delta.causal_conv(*leaves, cu_seqlens), (channels, taps)),
        "rms_norm": (lambda *leaves: moemb_gated_delta.rms_norm(*leaves, 1e-6), (channels, scale)),
        "gated_rms_norm": (
            lambda *leaves: moemb_gated_delta.gated_rms_norm(*leaves, 1e-6),
            (channels, channels + 1, scale),
        ),
    }
    errors = {}
    for name, (function, arguments) in operations.items():
        results = []
        for backend, dtype in (("torch", torch.float32), ("auto", None)):
            os.environ["MOEMB_GATED_DELTA_BACKEND"] = backend
            leaves = [
                (tensor if dtype is None else tensor.to(dtype)).detach().requires_grad_() for tensor in arguments
            ]
            torch.manual_seed(1)
            output = function(*leaves)
            grad = torch.randn(output.shape, device=bench.device).to(output.dtype)
            results.append((output, *torch.autograd.grad(output, leaves, grad)))
        errors[name] = [error_of(a, b) for a, b in zip(results[1], results[0])]
    os.environ.pop("MOEMB_GATED_DELTA_BACKEND")
    return errors


def delta_inputs(bench, lengths: list[int], key_heads: int, value_heads: int, dim: int) -> tuple:
    """Random arguments of the delta rule; query, key and value are splits of one tensor."""
    tokens = sum(lengths)
    split = [key_heads * dim, key_heads * dim, value_heads * dim]
    mixed = torch.randn(tokens, sum(split), device=bench.device, dtype=bench.dtype).split(split, dim=-1)
    query, key, value = (part.unflatten(-1, (-1, dim)) for part in mixed)
    decay = -torch.rand(tokens, value_heads, device=bench.device)
    beta = torch.rand(tokens, value_heads, device=bench.device)
    cu_seqlens = torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32, device=bench.device)
    return query, key, value, decay, beta, cu_seqlens


def time_gated_delta(bench) -> list[dict]:
    """Delta rule over the same tokens packed in ever shorter segments, and convolution and norms."""
    heads, dim, tokens = (1, 16, 32) if bench.dry_run else (16, 128, 8192)
    rows = []
    for length in (16, 32) if bench.dry_run else (8, 32, 128, 512, 2048, 8192):
        if bench.out_of_time(f"delta rule, segments of {length}"):
            break
        inputs = delta_inputs(bench, [length] * (tokens // length), heads, 2 * heads, dim)
        functions = {}
        for name in ("triton", "fla", "torch"):
            functions[name] = with_backend(name, partial(moemb_gated_delta.gated_delta_rule, *inputs))
        rows.append({"op": "gated_delta_rule", "tokens": tokens, "segment": length, "ms": bench.compare(functions)})
    states = torch.randn(tokens, 4 * heads * dim, device=bench.device, dtype=bench.dtype)
    weight = torch.randn(states.shape[1], 4, device=bench.device, dtype=bench.dtype)
    cu_seqlens = torch.arange(0, tokens + 1, 32, device=bench.device, dtype=torch.int32)
    headed, scale = states.view(tokens, -1, dim), weight[:dim, 0].contiguous()
    others = {
        "causal_conv": lambda: moemb_gated_delta.causal_conv(states, weight, cu_seqlens),
        "rms_norm": lambda: moemb_gated_delta.rms_norm(states, weight[:, 0].contiguous(), 1e-6),
        "gated_rms_norm": lambda: moemb_gated_delta.gated_rms_norm(headed, headed, scale, 1e-6),
    }
    for name, function in others.items():
        functions = {backend: with_backend(backend, function) for backend in ("triton", "torch")}
        rows.append({"op": name, "tokens": tokens, "ms": bench.compare(functions)})
    return rows


def with_backend(name: str, function):
    """The function with `MOEMB_GATED_DELTA_BACKEND` set around it."""

    def run():
        os.environ["MOEMB_GATED_DELTA_BACKEND"] = name
        try:
            with torch.no_grad():
                return function()
        finally:
            os.environ.pop("MOEMB_GATED_DELTA_BACKEND")

    return run


def random_model(bench):
    """A text model of Qwen3.5-35B-A3B's widths in four layers, random weights (3.4 billion parameters)."""
    from modeling_moemb import MoEMBConfig, MoEMBModel

    rope = {"rope_type": "default", "rope_theta": 1e7, "partial_rotary_factor": 0.25, "mrope_interleaved": True}
    text = {"num_hidden_layers": 4, "vocab_size": 32000, "rope_parameters": {**rope, "mrope_section": [11, 11, 10]}}
    if bench.dry_run:
        text |= {"hidden_size": 64, "num_attention_heads": 2, "num_key_value_heads": 1, "head_dim": 256}
        text |= {"linear_num_key_heads": 1, "linear_num_value_heads": 2, "linear_key_head_dim": 16}
        text |= {"linear_value_head_dim": 16, "num_experts": 8, "moe_intermediate_size": 16, "vocab_size": 300}
        text |= {"shared_expert_intermediate_size": 16}
    vision = {"depth": 1, "hidden_size": 64, "num_heads": 4, "intermediate_size": 64}
    vision["out_hidden_size"] = text.get("hidden_size", 2048)
    config = MoEMBConfig(text_config=text, vision_config=vision, emb_token_id=299, dtype=bench.dtype)
    with torch.device(bench.device):
        return MoEMBModel(config).to(bench.dtype).eval(), config.text_config.vocab_size


def time_encode(bench) -> dict:
    """Items per second over a ragged batch, with our kernels and without, at eight, four and two experts."""
    import stage

    from modeling_moemb import use_kernels

    model, vocabulary = random_model(bench)
    repositories = [KERNELS / name for name in ("moemb-experts", "moemb-gated-delta")]
    for repository in repositories:
        stage.stage(repository)
    generator = torch.Generator().manual_seed(0)
    items, longest = (3, 12) if bench.dry_run else (128, 1024)
    lengths = torch.randint(longest // 8, longest + 1, (items,), generator=generator)
    ids = torch.randint(0, min(290, vocabulary), (items, longest), generator=generator)
    mask = torch.arange(longest) < lengths[:, None]
    ids[torch.arange(items), lengths - 1] = 299
    ids, mask = ids.to(bench.device), mask.long().to(bench.device)
    before = use_kernels(repositories)
    settings = {"kernels": use_kernels("off"), "torch": use_kernels(before)}  # each call returns what held until then
    full = model.config.text_config.num_experts_per_tok
    functions = {
        f"{name}_top{slots}": encode_function(model, ids, mask, source, None if slots == full else slots, use_kernels)
        for name, source in settings.items()
        for slots in (full, full // 2, full // 4)
    }
    times = bench.compare(functions, 1.0)
    rates = {name: round(items / ms * 1e3, 1) for name, ms in times.items() if isinstance(ms, float)}
    return {"items": items, "tokens": int(lengths.sum()), "ms": times, "items_per_second": rates}


def encode_function(model, ids, mask, kernels, slots: int | None, use_kernels):
    """One forward of the model with these kernels and so many experts."""

    def run():
        previous = use_kernels(kernels)
        try:
            with torch.inference_mode():
                dial = None if slots is None else {"top_k": slots}
                return model(input_ids=ids, attention_mask=mask, pooled_only=True, adaptive_compute=dial)
        finally:
            use_kernels(previous)

    return run
