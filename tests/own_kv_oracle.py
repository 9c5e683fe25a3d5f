"""A student whose tokens are each `boundary` or `own`, in float64 NumPy, from the definition alone.

Shares no code with the package or with `oracle`. One token after the other runs through all layers;
`memory[j]` lists the (key, value) that each earlier token left for layer j. In an upper layer a
boundary token leaves the delta's projections of the normed hidden state that enters the first upper
layer, an own token the teacher's projections of its normed hidden state that enters that layer.
Rotary embeddings are the default ones, and every layer of the upper half has its own projections.
"""

import numpy as np


def logits(hf, tensors, tokens, own, *, stored=None) -> np.ndarray:
    """Logits [T, V] of one sequence; `own[t]` says what token t is. `stored` (`EightBits`) makes of
    a token's keys or values what attention reads, its own attention too."""
    assert hf["key_value_group_size"] == 1
    weights = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    model = _Model(hf, weights, stored or (lambda heads: heads))
    memory = [[] for _ in range(hf["num_hidden_layers"])]
    return np.array(
        [
            model.token(int(token), position, bool(kind), memory)
            for position, (token, kind) in enumerate(zip(tokens, own, strict=True))
        ]
    )


def greedy(hf, tensors, prompt, *, exact_tail: int, max_tokens: int) -> tuple[list[int], list]:
    """The likeliest continuation whose tokens are own, and the log-probability of each."""
    tokens, chosen, likelihoods = list(prompt), [], []
    while len(chosen) < max_tokens:
        own = np.arange(len(tokens)) >= len(prompt) - exact_tail
        last = logits(hf, tensors, tokens, own)[-1]
        chosen.append(int(last.argmax()))
        likelihoods.append(float(last.max() - np.log(np.exp(last - last.max()).sum()) - last.max()))
        tokens.append(chosen[-1])
    return chosen, likelihoods


class EightBits:
    """Entries of a cache in `fp8` (float8_e4m3fn) or `int8`: the largest magnitude of each head of
    each token becomes the largest number of the format, and ties are rounded to even.

    An implementation in float32 may round what is very near a tie to the other side.
    """

    def __init__(self, format: str):
        self.largest = {"fp8": 448.0, "int8": 127.0}[format]
        self.format = format
        self.nearest_tie = np.inf
        """Smallest distance of an entry so far from a tie, as a share of its head's largest."""

    def __call__(self, heads):
        scale = np.abs(heads).max(axis=1, keepdims=True) / self.largest
        steps, step = self.steps(heads / scale)
        distance = np.abs(steps - np.floor(steps) - 0.5) * step / self.largest
        self.nearest_tie = min(self.nearest_tie, distance.min())
        return np.rint(steps) * step * scale

    def steps(self, x):
        """(x in steps between neighbouring numbers of the format, the step)."""
        if self.format == "int8":
            return x, 1.0
        exponent = np.maximum(np.frexp(x)[1] - 1, -6)  # below 2^-6 numbers are subnormal
        step = 2.0 ** (exponent - 3)
        return x / step, step


class _Model:
    def __init__(self, hf, weights, stored):
        self.hf, self.weights, self.stored = hf, weights, stored

    def token(self, token: int, position: int, own: bool, memory) -> np.ndarray:
        """Logits after one token, which leaves its keys and values in `memory`."""
        hf, boundary = self.hf, None
        hidden = self.weights["model.embed_tokens.weight"][token]
        for layer in range(hf["num_hidden_layers"]):
            before = self.norm(f"model.layers.{layer}.input_layernorm", hidden)
            suffix = ""
            source = before
            if layer >= hf["num_key_value_layers"]:
                if boundary is None:
                    boundary = self.norm("model.norm_swiftkv", hidden)
                suffix = "_swiftkv"
                source = before if own else boundary
            kv_suffix = "" if own else suffix
            heads = {
                name: self.project(f"model.layers.{layer}.self_attn.{name}_proj{which}", x)
                for name, which, x in (
                    ("q", suffix, before),
                    ("k", kv_suffix, source),
                    ("v", kv_suffix, source),
                )
            }
            keys = self.turn(heads["k"], position)
            memory[layer].append((self.stored(keys), self.stored(heads["v"])))
            mixed = self.attention(self.turn(heads["q"], position), memory[layer])
            hidden = hidden + self.multiply(f"model.layers.{layer}.self_attn.o_proj", mixed)
            after = self.norm(f"model.layers.{layer}.post_attention_layernorm", hidden)
            gate = self.multiply(f"model.layers.{layer}.mlp.gate_proj", after)
            up = self.multiply(f"model.layers.{layer}.mlp.up_proj", after)
            swish = gate / (1.0 + np.exp(-gate))
            hidden = hidden + self.multiply(f"model.layers.{layer}.mlp.down_proj", swish * up)
        tied = hf["tie_word_embeddings"]
        head = self.weights["model.embed_tokens.weight" if tied else "lm_head.weight"]
        return head @ self.norm("model.norm", hidden)

    def norm(self, name: str, x):
        return self.weights[f"{name}.weight"] * x / np.sqrt((x**2).mean() + self.hf["rms_norm_eps"])

    def multiply(self, name: str, x):
        return self.weights[f"{name}.weight"] @ x + self.weights.get(f"{name}.bias", 0.0)

    def project(self, name: str, x):
        """A projection as a list of heads."""
        return self.multiply(name, x).reshape(-1, self.hf["head_dim"])

    def turn(self, heads, position: int):
        """Channel c and channel c + H/2 of each head as one complex number, turned."""
        half = self.hf["head_dim"] // 2
        angle = position * self.hf["rope_theta"] ** (-np.arange(half) / half)
        turned = (heads[:, :half] + 1j * heads[:, half:]) * np.exp(1j * angle)
        return np.concatenate([turned.real, turned.imag], axis=1)

    def attention(self, queries, memory):
        per_key, out = len(queries) // len(memory[0][0]), []
        for number, query in enumerate(queries):
            keys = np.array([key[number // per_key] for key, _ in memory])
            values = np.array([value[number // per_key] for _, value in memory])
            scores = keys @ query / np.sqrt(len(query))
            weights = np.exp(scores - scores.max())
            out.append(weights @ values / weights.sum())
        return np.concatenate(out)
