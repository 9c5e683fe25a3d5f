"""A student whose tokens are each `boundary` or `own`, in float64 NumPy, from the definition alone.

Shares no code with the package or with `oracle`. One token after the other runs through all layers;
`memory[j]` lists the (key, value) that each earlier token left for layer j. In an upper layer a
boundary token leaves the delta's projections of the normed hidden state that enters the first upper
layer, an own token the teacher's projections of its normed hidden state that enters that layer.
Rotary embeddings are the default ones.

With groups the first layer of each has the delta's projections, and a boundary token leaves the
same in all of them. Of it head h of a layer reads head `shared_kv_heads[layer][h]`, and makes
values of its own with `mix_swiftkv`. Queries for what own tokens leave are then the teacher's.
"""

import numpy as np


def logits(hf, tensors, tokens, own, *, stored=None) -> np.ndarray:
    """Logits [T, V] of one sequence; `own[t]` says what token t is. `stored` (`EightBits`) makes of
    a token's keys or values what attention reads, its own attention too."""
    weights = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
    model = _Model(hf, weights, stored or (lambda heads: heads))
    memory = [[] for _ in range(hf["num_hidden_layers"])]
    return np.array(
        [
            model.token(int(token), position, bool(kind), memory)
            for position, (token, kind) in enumerate(zip(tokens, own, strict=True))
        ]
    )


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
            attn = f"model.layers.{layer}.self_attn."
            upper = layer >= hf["num_key_value_layers"]
            if upper and boundary is None:
                boundary = self.norm("model.norm_swiftkv", hidden)
            if upper and not own:
                first = layer - (layer - hf["num_key_value_layers"]) % hf["key_value_group_size"]
                left = f"model.layers.{first}.self_attn.", "_swiftkv", boundary
            else:
                left = attn, "", before
            keys, values = (
                self.project(f"{left[0]}{name}_proj{left[1]}", left[2]) for name in "kv"
            )
            keys, values = self.stored(self.turn(keys, position)), self.stored(values)
            if upper and not own:
                keys, values = self.of_layer(layer, keys, values)
            memory[layer].append((keys, values, own))
            queries = self.turn(self.project(f"{attn}q_proj{'_swiftkv' * upper}", before), position)
            own_queries = queries
            if upper and hf["key_value_group_size"] > 1:
                own_queries = self.turn(self.project(f"{attn}q_proj", before), position)
            mixed = self.attention(queries, own_queries, memory[layer])
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

    def of_layer(self, layer: int, keys, values):
        """A layer's heads, of those that its group shares."""
        if self.hf.get("shared_kv_heads") is None:
            return keys, values
        order = self.hf["shared_kv_heads"][layer - self.hf["num_key_value_layers"]]
        mix = self.weights[f"model.layers.{layer}.self_attn.mix_swiftkv.weight"]
        return keys[order], np.array([m @ values[head] for m, head in zip(mix, order, strict=True)])

    def attention(self, queries, own_queries, memory):
        per_key, out = len(queries) // len(memory[0][0]), []
        own = np.array([kind for _, _, kind in memory])
        for number, pair in enumerate(zip(queries, own_queries, strict=True)):
            keys = np.array([key[number // per_key] for key, _, _ in memory])
            values = np.array([value[number // per_key] for _, value, _ in memory])
            of_shared, of_own = (keys @ query / np.sqrt(len(query)) for query in pair)
            scores = np.where(own, of_own, of_shared)
            weights = np.exp(scores - scores.max())
            out.append(weights @ values / weights.sum())
        return np.concatenate(out)
