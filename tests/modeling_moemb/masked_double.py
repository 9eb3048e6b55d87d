"""The gates simulated by masks, in fp64 and token by token: nothing is removed, what is dropped is made invisible.

Written from the definitions, with loops, and without the model's own layers: only its weights, its embeddings and its
rotary table are used.
"""

import math

import torch

from modeling_moemb.packing_moemb import TEXT


def sigmoid(x):
    return 1 / (1 + torch.exp(-x))


def silu(x):
    return x * sigmoid(x)


def rms(x, weight=None, eps=1e-6):
    x = x / (x.square().mean(-1, keepdim=True) + eps).sqrt()
    return x if weight is None else x * (1 + weight)


def weights_of(model):
    return {name: tensor.double() for name, tensor in model.state_dict().items()}


class Double:
    """One item through a model whose gates are at work.

    Args:
        model: the model, with gates.
        states (`(tokens, hidden)`), positions (`(3, tokens)`), modality (`(tokens,)`): the item at the first block.
        budget (`dict`): which gates decide, as `adaptive_compute`.
    """

    def __init__(self, model, states, positions, modality, budget):
        self.config, self.weights, self.budget = model.config.text_config, weights_of(model), budget
        self.gates, self.states, self.modality = model.config.gates, states.double(), modality
        cos, sin = model.language_model.rotary_emb(states, positions[:, None])
        self.cos, self.sin = cos[0].double(), sin[0].double()
        self.alive = torch.ones(len(modality), dtype=torch.bool)
        self.halted = torch.zeros(len(modality), dtype=torch.float64)
        self.pairs = []

    def __getitem__(self, name):
        return self.weights[name]

    def run(self):
        for block in range(self.config.num_hidden_layers):
            self.drop(block)
            layer = f"language_model.layers.{block}."
            normed = rms(self.states, self[layer + "input_layernorm.weight"])
            kind = self.config.layer_types[block]
            mix = self.delta_net if kind == "linear_attention" else self.attention
            self.states = self.states + mix(layer, normed)
            normed = rms(self.states, self[layer + "post_attention_layernorm.weight"])
            self.states = self.states + self.moe(block, layer + "mlp.", normed)
        return rms(self.states, self["language_model.norm.weight"])[-1]

    # Gates

    def drop(self, block):
        visual = [t for t in range(len(self.modality)) if self.modality[t] != TEXT and self.alive[t]]
        pruning = self.budget.get("token_pruning")
        if pruning is not None and block == self.gates["keep"]["layer"] and visual:
            drop = self.keep_gate(visual)
            for kind in (1, 2):
                tokens = [t for t in visual if self.modality[t] == kind]
                if "threshold" in pruning:
                    best = min(visual, key=lambda t: (drop[t], t))
                    gone = [t for t in tokens if sigmoid(-drop[t]) <= pruning["threshold"] and t != best]
                else:
                    count = math.ceil(round(pruning["keep"] * len(tokens), 9))
                    gone = sorted(tokens, key=lambda t: (drop[t], t))[count:]
                self.alive[gone] = False
        gradual = self.budget.get("gradual_pruning")
        if gradual is not None and block in self.gates["gradual"]["blocks"]:
            place = self.gates["gradual"]["blocks"].index(block)
            for t in visual:
                if not self.alive[t]:
                    continue
                x = rms(self.states[t])
                logit = 6 * torch.tanh(
                    (self["gates.gradual.weight"][place] @ x + self["gates.gradual.bias"][place]) / 6
                )
                self.halted[t] += sigmoid(logit)
                if "halting" in gradual:
                    self.alive[t] = bool(self.halted[t] <= 1 - gradual["halting"])
                else:
                    self.alive[t] = bool(sigmoid(logit) <= gradual.get("threshold", 0.5))

    def keep_gate(self, tokens):
        """Log-odds of dropping, by token."""
        normal = torch.nn.functional.layer_norm
        states = self.states[tokens]
        mean = normal(states, states.shape[-1:]).mean(0)

        def features(rows):
            rows = normal(rows, rows.shape[-1:]) * self["gates.keep.norm.weight"] + self["gates.keep.norm.bias"]
            inner = rows @ self["gates.keep.inner.weight"].T + self["gates.keep.inner.bias"]
            return inner / 2 * (1 + torch.erf(inner / math.sqrt(2)))

        both = torch.cat([features(states), features(mean[None]).expand(len(tokens), -1)], -1)
        logits = both @ self["gates.keep.head.weight"].T + self["gates.keep.head.bias"]
        return dict(zip(tokens, logits[:, 1] - logits[:, 0]))

    def slots(self, block, token, normed, logits):
        """Expert and weight of the slots that run."""
        top_k, scale = self.config.num_experts_per_tok, 1.0
        chosen = logits.topk(top_k).indices.tolist()
        if block == self.config.num_hidden_layers - 1 and token == len(self.modality) - 1:
            return list(zip(chosen, logits[chosen].softmax(0)))
        if "expert_skip" in self.budget and block in self.gates["skip"]["blocks"]:
            place = self.gates["skip"]["blocks"].index(block)
            logit = self["gates.skip.weight"][place] @ normed + self["gates.skip.bias"][place]
            if "gates.skip.top1" in self.weights:
                logit = logit + self["gates.skip.top1"][place] * logits[chosen].softmax(0).max()
            if sigmoid(logit) > self.budget["expert_skip"].get("threshold", 0.5):
                return []
            if self.budget["expert_skip"].get("scale_kept"):
                scale = sigmoid(-logit / self.budget["expert_skip"].get("temperature", 1.0))
        if "null_experts" in self.budget and block in self.gates["null"]["blocks"]:
            place = self.gates["null"]["blocks"].index(block)
            null = self["gates.null.weight"][place] @ normed + self["gates.null.bias"][place]
            best = torch.cat([logits, null]).softmax(0).topk(top_k).indices.tolist()  # as AdaMoE defines it
            chosen = [expert for expert in best if expert < len(logits)]
        return [(expert, scale * weight) for expert, weight in zip(chosen, logits[chosen].softmax(0))]

    # Layers

    def window(self, token, taps):
        """The token and the survivors before it, newest first."""
        before = [t for t in range(token) if self.alive[t]]
        return [token, *reversed(before)][:taps]

    def delta_net(self, layer, normed):
        layer, config = layer + "linear_attn.", self.config
        heads, key_heads = config.linear_num_value_heads, config.linear_num_key_heads
        key_dim, value_dim = config.linear_key_head_dim, config.linear_value_head_dim
        projected = normed @ self[layer + "in_proj_qkv.weight"].T
        taps = self[layer + "conv1d.weight"][:, 0]
        beta = sigmoid(normed @ self[layer + "in_proj_b.weight"].T)
        decay = torch.nn.functional.softplus(normed @ self[layer + "in_proj_a.weight"].T + self[layer + "dt_bias"])
        decay = -self[layer + "A_log"].exp() * decay
        gate = (normed @ self[layer + "in_proj_z.weight"].T).view(-1, heads, value_dim)
        memory, rows = torch.zeros(heads, value_dim, key_dim, dtype=torch.float64), []
        for token in range(len(normed)):
            width = taps.shape[1]
            convolved = sum(
                projected[t] * taps[:, width - 1 - back] for back, t in enumerate(self.window(token, width))
            )
            q, k, v = silu(convolved).split([key_heads * key_dim, key_heads * key_dim, heads * value_dim])
            q, k = (x.view(key_heads, key_dim).repeat_interleave(heads // key_heads, 0) for x in (q, k))
            q, k = (x / (x.square().sum(-1, keepdim=True) + 1e-6).sqrt() for x in (q, k))
            v, m = v.view(heads, value_dim), float(self.alive[token])
            memory = memory * (m * decay[token]).exp()[:, None, None]
            read = (memory * k[:, None]).sum(-1)
            memory = memory + (m * beta[token])[:, None, None] * (v - read)[:, :, None] * k[:, None]
            out = (memory * q[:, None]).sum(-1) / math.sqrt(key_dim)
            norm = self[layer + "norm.weight"] * rms(out, eps=config.rms_norm_eps)
            rows.append((norm * silu(gate[token])).flatten())
        return torch.stack(rows) @ self[layer + "out_proj.weight"].T

    def rotate(self, x):
        """`(tokens, heads, dim)`: the first rotary dimensions, halves against halves."""
        size = self.cos.shape[-1]
        turned, rest = x[..., :size], x[..., size:]
        half = torch.cat([-turned[..., size // 2 :], turned[..., : size // 2]], -1)
        return torch.cat([turned * self.cos[:, None] + half * self.sin[:, None], rest], -1)

    def attention(self, layer, normed):
        layer, dim = layer + "self_attn.", self.config.head_dim
        query, gate = (normed @ self[layer + "q_proj.weight"].T).view(len(normed), -1, 2 * dim).chunk(2, -1)
        key = (normed @ self[layer + "k_proj.weight"].T).view(len(normed), -1, dim)
        value = (normed @ self[layer + "v_proj.weight"].T).view(len(normed), -1, dim)
        query, key = (
            self.rotate(rms(query, self[layer + "q_norm.weight"])),
            self.rotate(rms(key, self[layer + "k_norm.weight"])),
        )
        groups, rows = query.shape[1] // key.shape[1], []
        for token in range(len(normed)):
            heads = []
            for head in range(query.shape[1]):
                scores = key[: token + 1, head // groups] @ query[token, head] / math.sqrt(dim)
                seen = self.alive[: token + 1].clone()
                seen[token] = True
                heads.append(scores.masked_fill(~seen, float("-inf")).softmax(0) @ value[: token + 1, head // groups])
            rows.append((torch.stack(heads) * sigmoid(gate[token])).flatten())
        return torch.stack(rows) @ self[layer + "o_proj.weight"].T

    def moe(self, block, layer, normed):
        logits = normed @ self[layer + "gate.weight"].T
        rows, count = [], 0
        for token, row in enumerate(normed):
            gate, up = (self[layer + f"shared_expert.{name}_proj.weight"] @ row for name in ("gate", "up"))
            shared = self[layer + "shared_expert.down_proj.weight"] @ (silu(gate) * up)
            total = sigmoid(self[layer + "shared_expert_gate.weight"][0] @ row) * shared
            chosen = self.slots(block, token, row, logits[token])
            for expert, weight in chosen:
                gate, up = (self[layer + "experts.gate_up_proj"][expert] @ row).chunk(2)
                total = total + weight * (self[layer + "experts.down_proj"][expert] @ (silu(gate) * up))
            count += len(chosen) * bool(self.alive[token])
            rows.append(total)
        self.pairs.append(count)
        return torch.stack(rows)
