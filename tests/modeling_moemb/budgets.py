"""Compute budgets of every kind for the tiny model (8 blocks, block 4 and 8 attention, top-2 of 8 experts)."""

PRUNED = {
    "beta": {"token_pruning": {"layer": 4, "keep": 0.5}},
    "early": {"token_pruning": {"layer": 1, "keep": 0.3}},
    "late": {"token_pruning": {"layer": 7, "keep": 0.3}},
    "fixed": {"token_pruning": {"layer": 4, "budget": 3}},
    "per image": {"token_pruning": {"layer": 4, "keep": 0.3, "scope": "image"}},
    "fixed per image": {"token_pruning": {"layer": 2, "budget": 1, "scope": "image"}},
    "by modality": {"token_pruning": {"layer": 4, "keep": {"image": 0.7, "video": 0.2}}},
    "video only": {"token_pruning": {"layer": 4, "keep": 0.2, "modalities": ["video"]}},
    "attention": {"token_pruning": {"layer": 5, "keep": 0.4, "score": "attention"}},
    "random": {"token_pruning": {"layer": 4, "keep": 0.4, "score": "random"}, "seed": 3},
    "uniform": {"token_pruning": {"layer": 4, "keep": 0.4, "score": "uniform"}},
}
SCALES = [0.2, 0.1, 0.1, 0.1, 0.1, 0.1, 0.1, 0.2]
EXPERTS = {
    "top_k": {"top_k": 1},
    "per_modality": {"per_modality": {"image": 1, "video": 1}},
    "random_k": {"random_k": 1},
    "tiered": {"tiered_top_k": {"layer": 3, "min": 1}},
    "modes": {"modes": {"tau": 0.05, "layer_scales": SCALES}},
    "modes of two thresholds": {
        "modes": {
            "tau": {"text": 0.06, "image": 0.04},
            "layer_scales": {"text": SCALES, "image": SCALES[::-1], "video": SCALES},
            "min_experts": 1,
            "renormalise": True,
        }
    },
}
TOGETHER = {
    "everything": {
        "token_pruning": {"layer": 4, "keep": 0.5, "scope": "image"},
        "per_modality": {"video": 1},
        "tiered_top_k": {"layer": 5, "min": 1},
        "random_k": 2,
        "modes": {"tau": 0.04},
    },
    "tier before pruning": {
        "token_pruning": {"layer": 5, "keep": 0.5, "score": "random"},
        "tiered_top_k": {"layer": 2, "min": 1},
    },
}
BUDGETS = PRUNED | EXPERTS | TOGETHER

# all of these keep everything
KEEP_ALL = {
    "keep 1": {"token_pruning": {"layer": 4, "keep": 1.0}},
    "large budget": {"token_pruning": {"layer": 4, "budget": 10**6}},
    "large budget per image": {"token_pruning": {"layer": 2, "budget": 10**6, "scope": "image", "score": "uniform"}},
    "large random budget": {"token_pruning": {"layer": 4, "budget": 10**6, "score": "random"}},
    "large attention budget": {"token_pruning": {"layer": 4, "budget": 10**6, "score": "attention"}},
    "full top_k": {"top_k": 2},
    "full random_k": {"random_k": 2},
    "full per_modality": {"per_modality": {"text": 2, "image": 2, "video": 2}},
    "full tier": {"tiered_top_k": {"layer": 3, "min": 2}},
    "tau 0": {"modes": {"tau": 0.0}},
    "tau below every weight": {"modes": {"tau": 1e-30, "renormalise": True}},
    "every expert protected": {"modes": {"tau": 1e30, "min_experts": 2, "renormalise": True}},
}
