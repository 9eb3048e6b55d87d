"""Run with `kernels benchmark <repo_id>`; `moemb bench` compares with other implementations."""

import torch
from kernels.benchmark import Benchmark
from torch.nn.functional import silu


class ExpertsBenchmark(Benchmark):
    """Routed experts at the width of Qwen3.5-35B-A3B, a quarter of its experts, bf16."""

    seed = 0
    tokens, experts, hidden, width, slots = 2048, 64, 2048, 512, 8

    def setup(self):
        self.states = torch.randn(self.tokens, self.hidden, dtype=torch.bfloat16)
        self.weight, self.index = torch.randn(self.tokens, self.experts).topk(self.slots)
        self.weight = self.weight.softmax(-1).bfloat16()
        self.gate_up = (torch.randn(self.experts, 2 * self.width, self.hidden) * self.hidden**-0.5).bfloat16()
        self.down = (torch.randn(self.experts, self.hidden, self.width) * self.width**-0.5).bfloat16()

    def benchmark_experts(self):
        self.out = self.kernel.experts(self.states, self.index, self.weight, self.gate_up, self.down)

    def verify_experts(self) -> torch.Tensor:
        expected = torch.zeros_like(self.states)
        for expert in range(self.experts):
            token, slot = (self.index == expert).nonzero(as_tuple=True)
            gate, up = (self.states[token] @ self.gate_up[expert].t()).chunk(2, dim=-1)
            output = (silu(gate) * up) @ self.down[expert].t()
            expected.index_add_(0, token, output * self.weight[token, slot, None])
        return expected


class GatedDeltaRuleBenchmark(Benchmark):
    """One sequence of 2,048 tokens, 16 key heads and 32 value heads of 128 features, bf16."""

    seed = 0
    tokens, key_heads, value_heads, dim = 2048, 16, 32, 128

    def setup(self):
        self.query, self.key = (
            torch.randn(self.tokens, self.key_heads, self.dim, dtype=torch.bfloat16) for _ in range(2)
        )
        self.value = torch.randn(self.tokens, self.value_heads, self.dim, dtype=torch.bfloat16)
        self.decay = -torch.rand(self.tokens, self.value_heads)
        self.beta = torch.rand(self.tokens, self.value_heads)
        self.lengths = torch.tensor([0, self.tokens], dtype=torch.int32)

    def benchmark_rule(self):
        self.out = self.kernel.gated_delta_rule(self.query, self.key, self.value, self.decay, self.beta, self.lengths)

    def verify_rule(self) -> torch.Tensor:
        repeat = self.value_heads // self.key_heads
        query, key = (
            (x.float() * (x.float().pow(2).sum(-1, keepdim=True) + 1e-6).rsqrt()).repeat_interleave(repeat, dim=1)
            for x in (self.query, self.key)
        )
        query = query * self.dim**-0.5
        state = torch.zeros(self.value_heads, self.dim, self.dim)
        expected = torch.empty(self.tokens, self.value_heads, self.dim)
        for token in range(self.tokens):
            state = state * self.decay[token].exp()[:, None, None]
            read = torch.einsum("hk,hkv->hv", key[token], state)
            written = (self.value[token].float() - read) * self.beta[token, :, None]
            state = state + key[token][:, :, None] * written[:, None, :]
            expected[token] = torch.einsum("hk,hkv->hv", query[token], state)
        return expected.bfloat16()
