"""Llama and SwiftKV written down line by line in float64 NumPy, for one sequence, from the
specification alone.

Nothing here is shared with the package: a Hugging Face config dict and a dict of Hugging Face
tensor names go in, and arrays come out. Clarity is the only goal. Section numbers are those of the
SwiftKV specification. With L layers, of which K keep their own keys and values, lower layers are j
= 0..K-1 and upper layers j = K..L-1; the first of every g upper layers leads its group. Shapes: T
tokens, D model width, N query heads, n KV heads, H head dim, V vocabulary.
"""

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

Tensors = Mapping[str, np.ndarray]
HFConfig = Mapping[str, Any]


class Outputs(NamedTuple):
    """What one full forward pass returns for one sequence."""

    logits: np.ndarray  # T V
    hidden_states: list[
        np.ndarray
    ]  # 1.5: L+1 of T D: [0] embeddings, [j] input of layer j, [L] after the final norm


class Shape(NamedTuple):
    """The config numbers with their defaults filled in (1.1)."""

    layers: int
    kv_layers: int
    group: int
    heads: int
    kv_heads: int
    head_dim: int
    eps: float


def shape_of(config: HFConfig) -> Shape:
    layers, heads = config["num_hidden_layers"], config["num_attention_heads"]
    return Shape(
        layers=layers,
        kv_layers=config.get("num_key_value_layers") or layers,  # 1.1: null or 0 means every layer
        group=config.get("key_value_group_size") or 1,  # 1.1: null or 0 means 1
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=config.get("head_dim") or config["hidden_size"] // heads,
        eps=config["rms_norm_eps"],
    )


# ---- the pieces of a Llama ---------------------------------------------------


def rms_norm(x: np.ndarray, weight: np.ndarray, eps: float) -> np.ndarray:
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * np.float64(weight)


def linear(tensors: Tensors, name: str, x: np.ndarray) -> np.ndarray:
    y = x @ np.float64(tensors[f"{name}.weight"]).T  # stored [out, in]
    return y + np.float64(tensors[f"{name}.bias"]) if f"{name}.bias" in tensors else y


def rope_frequencies(config: HFConfig) -> np.ndarray:
    """Radians per position of each pair of channels, H/2 of them: Hugging Face's default, linear
    and llama3 rules."""
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    theta = float(rope["rope_theta"] if "rope_theta" in rope else config["rope_theta"])
    head_dim = shape_of(config).head_dim
    frequencies = []
    for pair in range(head_dim // 2):
        frequency = theta ** (-2 * pair / head_dim)
        kind = rope.get("rope_type", rope.get("type", "default"))
        if kind == "linear":
            frequency /= rope["factor"]
        elif kind == "llama3":
            wavelength, old = 2 * np.pi / frequency, rope["original_max_position_embeddings"]
            low, high = rope["low_freq_factor"], rope["high_freq_factor"]
            if wavelength > old / low:  # long waves: stretched in full
                frequency /= rope["factor"]
            elif (
                wavelength >= old / high
            ):  # in between: a blend, linear in the number of turns over the old context
                kept = (old / wavelength - low) / (high - low)
                frequency = (1 - kept) * frequency / rope["factor"] + kept * frequency
        elif kind != "default":
            raise NotImplementedError(kind)
        frequencies.append(frequency)
    return np.array(frequencies)


def rotate(config: HFConfig, x: np.ndarray, positions: Sequence[int]) -> np.ndarray:
    """Turn channel c against channel c + H/2 of every head of x[T, heads, H] by its token's
    position."""
    angle = np.outer(positions, rope_frequencies(config))[:, None, :]
    first, second = np.split(x, 2, axis=-1)
    return np.concatenate(
        [
            first * np.cos(angle) - second * np.sin(angle),
            second * np.cos(angle) + first * np.sin(angle),
        ],
        -1,
    )


def heads_of(config: HFConfig, x: np.ndarray) -> np.ndarray:
    return x.reshape(len(x), -1, shape_of(config).head_dim)


def softmax(x: np.ndarray) -> np.ndarray:
    e = np.exp(x - x.max(axis=-1, keepdims=True))
    return e / e.sum(axis=-1, keepdims=True)


def attend(q: np.ndarray, k: np.ndarray, v: np.ndarray) -> np.ndarray:
    """1.3: one token's rotated queries q[N, H] over everything up to and including itself, k and
    v[S, n, H]; N*H numbers."""
    out, queries_per_kv_head = [], q.shape[0] // k.shape[1]
    for head in range(q.shape[0]):
        keys, values = k[:, head // queries_per_kv_head], v[:, head // queries_per_kv_head]
        out.append(softmax(keys @ q[head] * q.shape[-1] ** -0.5) @ values)
    return np.concatenate(out)


def output_and_mlp(
    config: HFConfig, tensors: Tensors, j: int, h: np.ndarray, attended: np.ndarray
) -> np.ndarray:
    """1.3 step 4, after attention: the teacher's o_proj, residual, norm, MLP, residual."""
    layer = f"model.layers.{j}"
    h = h + linear(tensors, f"{layer}.self_attn.o_proj", attended)
    x = rms_norm(h, tensors[f"{layer}.post_attention_layernorm.weight"], config["rms_norm_eps"])
    gate, up = (
        linear(tensors, f"{layer}.mlp.gate_proj", x),
        linear(tensors, f"{layer}.mlp.up_proj", x),
    )
    return h + linear(tensors, f"{layer}.mlp.down_proj", gate / (1 + np.exp(-gate)) * up)


def head(config: HFConfig, tensors: Tensors, h: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """1.3 step 5: the final norm and the logits. Tied checkpoints store no lm_head (1.8)."""
    normed = rms_norm(h, tensors["model.norm.weight"], config["rms_norm_eps"])
    lm_head = tensors[
        "model.embed_tokens.weight" if config.get("tie_word_embeddings") else "lm_head.weight"
    ]
    return normed, normed @ np.float64(lm_head).T


# ---- the whole model, every token through every layer (1.4, training) --------


def forward(
    config: HFConfig,
    tensors: Tensors,
    tokens: Sequence[int],
    *,
    swiftkv: bool,
    positions: Sequence[int] | None = None,
) -> Outputs:
    """The full forward pass of one sequence; swiftkv=False is the plain Llama (1.1), whatever
    *_swiftkv tensors there are."""
    shape = shape_of(config)
    positions = range(len(tokens)) if positions is None else positions
    kv_layers = shape.kv_layers if swiftkv else shape.layers

    h = tensors["model.embed_tokens.weight"].astype(np.float64)[np.asarray(tokens)]  # step 1
    hidden_states, s, k, v = [], h, h, h  # s, k and v are set below before they are read
    for j in range(shape.layers):
        hidden_states.append(h)
        attn = f"model.layers.{j}.self_attn"
        x = rms_norm(h, tensors[f"model.layers.{j}.input_layernorm.weight"], shape.eps)
        if j < kv_layers:  # 1.2: own projections of the own normed input
            q, k, v = (
                linear(tensors, f"{attn}.{name}", x) for name in ("q_proj", "k_proj", "v_proj")
            )
        else:
            if (
                j == kv_layers
            ):  # step 2: the boundary, the raw residual stream entering layer K, under its own norm
                s = rms_norm(h, tensors["model.norm_swiftkv.weight"], shape.eps)
            if (
                j - kv_layers
            ) % shape.group == 0:  # step 3: a group leader; followers keep its k and v
                k, v = (
                    linear(tensors, f"{attn}.k_proj_swiftkv", s),
                    linear(tensors, f"{attn}.v_proj_swiftkv", s),
                )
            q = linear(
                tensors, f"{attn}.q_proj_swiftkv", x
            )  # step 4: queries from the running hidden state
        q_heads, k_heads = (
            rotate(config, heads_of(config, q), positions),
            rotate(config, heads_of(config, k), positions),
        )
        v_heads = heads_of(config, v)
        attended = np.stack(
            [attend(q_heads[t], k_heads[: t + 1], v_heads[: t + 1]) for t in range(len(tokens))]
        )
        h = output_and_mlp(config, tensors, j, h, attended)
    normed, logits = head(config, tensors, h)
    return Outputs(logits, [*hidden_states, normed])


def forward_batch(
    config: HFConfig, tensors: Tensors, tokens: np.ndarray, *, swiftkv: bool
) -> Outputs:
    """`forward` of every row of tokens[B, T]; arrays gain a leading B."""
    rows = [forward(config, tensors, row, swiftkv=swiftkv) for row in tokens]
    return Outputs(
        np.stack([r.logits for r in rows]),
        [np.stack(states) for states in zip(*[r.hidden_states for r in rows], strict=True)],
    )


# ---- the same student with a cache and prefill-skip, one token at a time (1.4, inference)


def skip_then_decode(
    config: HFConfig, tensors: Tensors, tokens: Sequence[int], num_skipped: int
) -> tuple[np.ndarray, int]:
    """Logits [T - num_skipped, V] of all but the first tokens, which stop after step 3, and the
    number of caches that took.

    Each token sees only the cache: one entry per lower layer and one per group of upper layers
    (1.2).
    """
    shape = shape_of(config)
    cache: dict[int, tuple[list[np.ndarray], list[np.ndarray]]] = {}
    logits = []
    for t, token in enumerate(tokens):
        h = tensors["model.embed_tokens.weight"].astype(np.float64)[[token]]

        def remember(j: int, source: np.ndarray, suffix: str, t: int = t) -> None:
            k, v = (
                linear(tensors, f"model.layers.{j}.self_attn.{name}_proj{suffix}", source)
                for name in "kv"
            )
            keys, values = cache.setdefault(j, ([], []))
            keys.append(
                rotate(config, heads_of(config, k), [t])[0]
            )  # 1.3: rotating before caching is equivalent
            values.append(heads_of(config, v)[0])

        def layer(
            j: int, owner: int, q_name: str, h: np.ndarray, x: np.ndarray, t: int = t
        ) -> np.ndarray:
            q = rotate(
                config,
                heads_of(config, linear(tensors, f"model.layers.{j}.self_attn.{q_name}", x)),
                [t],
            )[0]
            return output_and_mlp(
                config,
                tensors,
                j,
                h,
                attend(q, np.stack(cache[owner][0]), np.stack(cache[owner][1]))[None],
            )

        for j in range(shape.kv_layers):
            x = rms_norm(h, tensors[f"model.layers.{j}.input_layernorm.weight"], shape.eps)
            remember(j, x, "")
            h = layer(j, j, "q_proj", h, x)
        if shape.kv_layers < shape.layers:
            s = rms_norm(h, tensors["model.norm_swiftkv.weight"], shape.eps)
            for leader in range(shape.kv_layers, shape.layers, shape.group):
                remember(leader, s, "_swiftkv")
        if t < num_skipped:
            continue
        for j in range(shape.kv_layers, shape.layers):
            x = rms_norm(h, tensors[f"model.layers.{j}.input_layernorm.weight"], shape.eps)
            h = layer(j, j - (j - shape.kv_layers) % shape.group, "q_proj_swiftkv", h, x)
        logits.append(head(config, tensors, h)[1][0])
    return np.stack(logits), len(cache)


# ---- making a student of a teacher (2.3) -------------------------------------


def initial_delta(config: HFConfig, tensors: Tensors) -> dict[str, np.ndarray]:
    """The *_swiftkv tensors a teacher starts with: its own queries, and each group's mean keys and
    values at the leader."""
    shape, delta = shape_of(config), {}
    if shape.kv_layers < shape.layers:
        delta["model.norm_swiftkv.weight"] = np.float64(
            tensors[f"model.layers.{shape.kv_layers}.input_layernorm.weight"]
        )
    for j in range(shape.kv_layers, shape.layers):
        for end in ("weight", "bias") if config.get("attention_bias") else ("weight",):
            attn = "model.layers.{}.self_attn.{}_proj"
            delta[f"{attn.format(j, 'q')}_swiftkv.{end}"] = np.float64(
                tensors[f"{attn.format(j, 'q')}.{end}"]
            )
            if (j - shape.kv_layers) % shape.group == 0:
                for name in "kv":
                    group = [
                        np.float64(tensors[f"{attn.format(i, name)}.{end}"])
                        for i in range(j, j + shape.group)
                    ]
                    delta[f"{attn.format(j, name)}_swiftkv.{end}"] = np.mean(group, axis=0)
    return delta


# ---- the distillation loss (3.2) ---------------------------------------------


def log_softmax(x: np.ndarray) -> np.ndarray:
    return (
        x
        - x.max(-1, keepdims=True)
        - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))
    )


def distill_loss(
    teacher: Outputs,
    student: Outputs,
    mask: np.ndarray,
    *,
    temperature: float = 2.0,
    hidden_weight: float = 1.0,
    hidden_layer: int = -2,
) -> tuple[float, float, float]:
    """(loss, logits_loss, hidden_loss) for batched outputs and mask[B, T]; both means are over all
    positions, masked or not."""
    log_p, log_q = (
        log_softmax(teacher.logits / temperature),
        log_softmax(student.logits / temperature),
    )
    kl = (np.exp(log_p) * (log_p - log_q)).sum(-1)
    logits_loss = np.mean(kl * mask * temperature**2)
    hidden_loss = np.mean(
        (student.hidden_states[hidden_layer] - teacher.hidden_states[hidden_layer]) ** 2
    )
    return float(logits_loss + hidden_weight * hidden_loss), float(logits_loss), float(hidden_loss)
