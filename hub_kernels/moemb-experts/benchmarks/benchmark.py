"""Run with `kernels benchmark <repo_id>`; `hub_kernels/tools/bench_gpu.py` compares with other implementations."""

import torch
from kernels.benchmark import Benchmark


class ExpertsBenchmark(Benchmark):
    """Routed experts at the widths of Qwen3.5-35B-A3B, bf16."""

    seed = 0
    tokens, experts, hidden, width, slots = 4096, 256, 2048, 512, 8

    def setup(self):
        options = {"device": self.device, "dtype": torch.bfloat16}
        self.states = torch.randn(self.tokens, self.hidden, **options)
        self.weight, self.index = torch.randn(self.tokens, self.experts, device=self.device).topk(self.slots)
        self.weight = self.weight.softmax(-1)
        self.gate_up = torch.randn(self.experts, 2 * self.width, self.hidden, **options) * self.hidden**-0.5
        self.down = torch.randn(self.experts, self.hidden, self.width, **options) * self.width**-0.5

    def benchmark_experts(self):
        self.out = self.kernel.experts(self.states, self.index, self.weight, self.gate_up, self.down)

    def verify_experts(self) -> torch.Tensor:
        expected = torch.zeros_like(self.states)
        for expert in range(self.experts):
            token, slot = (self.index == expert).nonzero(as_tuple=True)
            gate, up = (self.states[token] @ self.gate_up[expert].t()).chunk(2, dim=-1)
            output = (torch.nn.functional.silu(gate) * up) @ self.down[expert].t()
            expected.index_add_(0, token, output * self.weight[token, slot, None].to(output.dtype))
        return expected
