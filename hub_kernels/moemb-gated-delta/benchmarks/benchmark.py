"""Run with `kernels benchmark <repo_id>`; `hub_kernels/tools/bench_gpu.py` compares with other implementations."""

import torch
from kernels.benchmark import Benchmark


class ConvBenchmark(Benchmark):
    """Convolution of packed segments of 32 tokens at the widths of Qwen3.5-35B-A3B, bf16."""

    seed = 0
    tokens, channels, segment = 8192, 8192, 32

    def setup(self):
        options = {"device": self.device, "dtype": torch.bfloat16}
        self.states = torch.randn(self.tokens, self.channels, **options)
        self.weight = torch.randn(self.channels, 4, **options)
        self.cu_seqlens = torch.arange(0, self.tokens + 1, self.segment, device=self.device, dtype=torch.int32)

    def benchmark_causal_conv(self):
        self.out = self.kernel.causal_conv(self.states, self.weight, self.cu_seqlens)

    def verify_causal_conv(self) -> torch.Tensor:
        columns = self.states.view(-1, self.segment, self.channels).transpose(1, 2)
        columns = torch.nn.functional.pad(columns.float(), (3, 0))
        output = torch.nn.functional.conv1d(columns, self.weight[:, None].float(), groups=self.channels)
        return torch.nn.functional.silu(output).transpose(1, 2).reshape_as(self.states).to(self.states.dtype)


class DeltaRuleBenchmark(Benchmark):
    """The delta rule over packed segments of 64 tokens at the widths of Qwen3.5-35B-A3B, bf16."""

    seed = 0
    tokens, segment, key_heads, value_heads, dim = 8192, 64, 16, 32, 128

    def setup(self):
        options = {"device": self.device, "dtype": torch.bfloat16}
        self.query, self.key = torch.randn(2, self.tokens, self.key_heads, self.dim, **options).unbind(0)
        self.value = torch.randn(self.tokens, self.value_heads, self.dim, **options)
        self.decay = -torch.rand(self.tokens, self.value_heads, device=self.device)
        self.beta = torch.rand(self.tokens, self.value_heads, device=self.device)
        self.cu_seqlens = torch.arange(0, self.tokens + 1, self.segment, device=self.device, dtype=torch.int32)

    def benchmark_gated_delta_rule(self):
        self.out = self.kernel.gated_delta_rule(
            self.query, self.key, self.value, self.decay, self.beta, self.cu_seqlens
        )

    def verify_gated_delta_rule(self) -> torch.Tensor:
        shape = (-1, self.segment)
        repeat = self.value_heads // self.key_heads
        query, key = (torch.nn.functional.normalize(states.float(), dim=-1) for states in (self.query, self.key))
        query, key = (states.repeat_interleave(repeat, 1).unflatten(0, shape) for states in (query, key))
        value, decay, beta = (states.float().unflatten(0, shape) for states in (self.value, self.decay, self.beta))
        state = value.new_zeros(value.shape[0], self.value_heads, self.dim, self.dim)
        rows = []
        for token in range(self.segment):
            state = state * decay[:, token].exp()[..., None, None]
            error = value[:, token] - torch.einsum("nhkv,nhk->nhv", state, key[:, token])
            state = state + torch.einsum("nhk,nhv->nhkv", key[:, token], beta[:, token, :, None] * error)
            rows.append(torch.einsum("nhkv,nhk->nhv", state, query[:, token]) * self.dim**-0.5)
        return torch.stack(rows, 1).flatten(0, 1).to(self.value.dtype)
