"""Oracles in fp64 and loaders for the tests of the noarch kernels."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F


ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "hub_kernels"


def load_sources(repo: str):
    """The kernel module of a noarch repository from its sources, without staging."""
    path = str(KERNELS / repo / "torch-ext")
    if path not in sys.path:
        sys.path.insert(0, path)
    return importlib.import_module(repo.replace("-", "_"))


def run_interpreted(cases: str, at_least: int, marker: str) -> None:
    """Run the cases of a file with that marker under Triton's interpreter, which is chosen when triton is imported."""
    pytest.importorskip("triton", reason="this torch brings no Triton")
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        "-m",
        marker,
        str(Path(__file__).parent / cases),
    ]
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    result = subprocess.run(command, env=environment, cwd=ROOT, capture_output=True, text=True, timeout=500)
    assert result.returncode == 0, result.stdout[-6000:] + result.stderr[-2000:]
    passed = re.search(r"(\d+) passed", result.stdout)
    assert passed and int(passed.group(1)) >= at_least, result.stdout[-2000:]


def poison_memory(monkeypatch) -> None:
    """Fresh memory holds NaN: what a kernel forgets to write, or should not read, shows up."""
    empty, empty_like = torch.empty, torch.empty_like

    def poisoned(tensor):
        return tensor.fill_(float("nan") if tensor.dtype.is_floating_point else 1_000_000_007)

    monkeypatch.setattr(torch, "empty", lambda *args, **kwargs: poisoned(empty(*args, **kwargs)))
    monkeypatch.setattr(torch, "empty_like", lambda *args, **kwargs: poisoned(empty_like(*args, **kwargs)))


def experts_oracle(states, index, weight, gate_up, down):
    """Token by token, slot by slot, in fp64."""
    states, weight, gate_up, down = (tensor.double() for tensor in (states, weight, gate_up, down))
    width, rows = down.shape[2], []
    nothing = sum(tensor[:0].sum() for tensor in (states, weight, gate_up, down))  # a graph even if nobody is routed
    for token in range(states.shape[0]):
        total = torch.zeros_like(states[token]) + nothing
        for slot, expert in enumerate(index[token].tolist()):
            if 0 <= expert < down.shape[0]:
                both = gate_up[expert] @ states[token]
                hidden = F.silu(both[:width]) * both[width:]
                total = total + weight[token, slot] * (down[expert] @ hidden)
        rows.append(total)
    return torch.stack(rows) if rows else states


def delta_rule_oracle(query, key, value, decay, beta, cu_seqlens):
    """The recurrence, token by token, in fp64."""
    query, key, value, decay, beta = (tensor.double() for tensor in (query, key, value, decay, beta))
    repeat, dim = value.shape[1] // key.shape[1], key.shape[2]
    query, key = (tensor.repeat_interleave(repeat, 1) for tensor in (query, key))
    query = query * torch.rsqrt(query.square().sum(-1, keepdim=True) + 1e-6) * dim**-0.5
    key = key * torch.rsqrt(key.square().sum(-1, keepdim=True) + 1e-6)
    rows = []
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        state = torch.zeros(value.shape[1], dim, value.shape[2], dtype=torch.double)
        for token in range(start, end):
            state = state * decay[token].exp()[:, None, None]
            error = value[token] - torch.einsum("hkv,hk->hv", state, key[token])
            state = state + key[token][:, :, None] * (beta[token][:, None] * error)[:, None, :]
            rows.append(torch.einsum("hkv,hk->hv", state, query[token]))
    return torch.stack(rows) if rows else value


def conv_oracle(states, weight, cu_seqlens, activation):
    """Segment by segment with zeros in front, in fp64."""
    states, weight, rows = states.double(), weight.double(), []
    taps = weight.shape[1]
    for start, end in zip(cu_seqlens[:-1].tolist(), cu_seqlens[1:].tolist()):
        padded = torch.cat([states.new_zeros(taps - 1, states.shape[1]), states[start:end]])
        for token in range(end - start):
            rows.append((padded[token : token + taps] * weight.t()).sum(0))
    output = torch.stack(rows) if rows else states
    return F.silu(output) if activation == "silu" else output


def offsets(lengths: list[int]) -> torch.Tensor:
    """Cumulative lengths, int32."""
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


def packed_qkv(lengths: list[int], key_heads: int, value_heads: int, key_dim: int, value_dim: int, dtype):
    """Arguments of the delta rule; query, key and value are splits of one row-major tensor, as in the model."""
    cu_seqlens = offsets(lengths)
    tokens, split = int(cu_seqlens[-1]), [key_heads * key_dim, key_heads * key_dim, value_heads * value_dim]
    mixed = torch.randn(tokens, sum(split)).to(dtype).requires_grad_()
    query, key, value = mixed.split(split, dim=-1)
    query, key = query.unflatten(-1, (key_heads, key_dim)), key.unflatten(-1, (key_heads, key_dim))
    value = value.unflatten(-1, (value_heads, value_dim))
    decay = (-2 * torch.rand(tokens, value_heads)).requires_grad_()
    beta = torch.rand(tokens, value_heads).requires_grad_()
    return mixed, (query, key, value, decay, beta), cu_seqlens


def assert_close(actual, expected, tolerance, what=""):
    """Largest error relative to the largest expected value; NaN fails."""
    assert actual.shape == expected.shape, what
    if actual.numel() == 0:
        return
    error = (actual.double() - expected.double()).abs().max() / expected.double().abs().max().clamp_min(1e-3)
    assert error <= tolerance, f"{what}: relative error {error.item():.2e} > {tolerance:.0e}"
