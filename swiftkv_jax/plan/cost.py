"""Floating-point operations of prefill, decoding and training, counted from the shapes.

A multiply-add is two operations. Only matrix products and attention are counted; attention counts
the pairs of positions that the causal mask and the windows leave.
"""

from __future__ import annotations

from ..model.config import Config
from ..model.transformer import Remat


def prefill_flops(config: Config, length: int, *, swiftkv: bool) -> int:
    """Operations to fill the cache with a prompt of `length` tokens: no logits are needed for that.

    The student runs the lower layers, what makes the upper keys and values (`boundary_flops`), and
    the last `config.exact_tail` tokens, and an exact head, through the upper layers too. The
    teacher, and these, run every layer but the last, of which they need the keys and values only.
    """
    if not swiftkv:
        layers = range(config.num_layers - 1)
        return _layers_flops(config, layers, length) + 2 * length * kv_weights(config)
    tail = min(config.exact_tail, length)
    return (
        _layers_flops(config, range(config.num_lower_layers), length)
        + boundary_flops(config, length)
        + tail_flops(config, length, tail)
        + config.exact_head * tail_flops(config, 1, 1)
    )


def boundary_flops(config: Config, length: int) -> int:
    """Operations for the upper keys and values of `length` tokens: the attention and what
    stands in for the MLP of each of `config.prompt_attention_layers`, and the projections."""
    alone = config.prompt_attention_layers
    layers = range(config.num_lower_layers, config.first_projected_layer)
    weights = alone * (prompt_layer_weights(config) - kv_weights(config))
    weights += boundary_kv_weights(config)
    return 2 * length * weights + _attention_flops(config, layers, length)


def boundary_kv_weights(config: Config) -> int:
    """Entries of the projections of a token that make its upper keys and values."""
    return config.num_kv_groups * kv_weights(config) + tap_weights(config)


def tap_weights(config: Config) -> int:
    """Entries of the taps of all groups, which are of keys only."""
    return config.boundary_taps * config.num_projected_groups * kv_weights(config) // 2


def tail_flops(config: Config, length: int, tail: int) -> int:
    """Operations of the upper layers for the last `tail` of `length` tokens, to fill the cache."""
    upper = range(config.num_lower_layers, config.num_layers - 1)
    attention = _attention_flops(config, upper, length)
    attention -= _attention_flops(config, upper, length - tail)
    each = 2 * layer_weights(config) + second_query_flops(config)
    return len(upper) * tail * each + attention + 2 * tail * kv_weights(config)


def second_query_flops(config: Config) -> int:
    """Operations of an upper layer for one token beyond those of a plain one, where it attends to
    two caches: the student's queries, and the mix of shared values."""
    if not config.has_two_caches:
        return 0
    mix = 0 if config.shared_kv_heads is None else config.head_dim
    return 2 * config.num_heads * config.head_dim * (config.embed_dim + mix)


def decode_kv_weights(config: Config, *, swiftkv: bool) -> int:
    """Entries of the key/value projections in a decode step.

    Where generated tokens keep their own, those from the boundary are computed too if there is no
    `exact_tail`: the last token of a prompt, the input of the first step, does not keep its own
    then.
    """
    if not swiftkv:
        return config.num_layers * kv_weights(config)
    own = config.num_upper_layers * (config.generated_kv == "own")
    boundary = boundary_kv_weights(config) * _decodes_boundary(config)
    return (config.num_lower_layers + own) * kv_weights(config) + boundary


def _decodes_boundary(config: Config) -> bool:
    """True if a decode step makes upper keys and values from the boundary."""
    return not (config.generated_kv == "own" and config.exact_tail)


def _attention_twice(config: Config, *, swiftkv: bool) -> int:
    """Number of upper layers whose queries, attention and output a decode step computes twice: for
    the upper keys and values, and for the next token. The first of
    `config.prompt_attention_layers` has the same input in both, and XLA computes it once."""
    if not swiftkv or not _decodes_boundary(config):
        return 0
    return max(config.prompt_attention_layers - 1, 0)


def decode_flops(config: Config, context: float, *, swiftkv: bool) -> float:
    """Operations for one token of one row: every layer, attention to `context` positions, its own
    among them, and the logits."""
    attention = 2 * 2 * config.num_heads * config.head_dim * visible_positions(config, context)
    attention *= attentions_of_a_step(config, swiftkv=swiftkv)
    return attention + 2 * decode_weights(config, swiftkv=swiftkv)


def attentions_of_a_step(config: Config, *, swiftkv: bool) -> int:
    """How often a token of a decode step attends to the cache: once in each layer, in some upper
    layers twice (`config.prompt_attention_layers`)."""
    return config.num_layers + _attention_twice(config, swiftkv=swiftkv)


def decode_weights(config: Config, *, swiftkv: bool) -> int:
    """Entries of the weights that a token is multiplied by in a decode step, the output matrix
    among them."""
    layers = config.num_layers * (layer_weights(config) - kv_weights(config))
    layers += decode_kv_weights(config, swiftkv=swiftkv)
    if swiftkv:
        layers += config.num_upper_layers * second_query_flops(config) // 2
        if _decodes_boundary(config):
            layers += config.prompt_attention_layers * prompt_mlp_weights(config)
        twice = _attention_twice(config, swiftkv=swiftkv)
        layers += twice * (attention_weights(config) - kv_weights(config))
    return layers + config.vocab_size * config.embed_dim


def train_flops_per_token(config: Config, length: int, *, remat: Remat = "none") -> float:
    """Operations per token of one distillation step on rows of `length` tokens."""
    return sum(train_flops_by_part(config, length, remat=remat).values())


def train_flops_by_part(config: Config, length: int, *, remat: Remat = "none") -> dict[str, float]:
    """`train_flops_per_token`, divided into what is computed.

    Forward through the lower layers once and through the upper layers twice (teacher, student);
    backward through the student's upper layers for activations and for the delta's weights; three
    products with the output matrix. Where generated tokens keep their own keys and values, the
    teacher's projections make those of every token of the student's states too, and with groups
    queries, which stand beside the student's in heads of twice the size.
    """
    every = range(config.num_layers)
    lower_attention, upper_attention = (
        _attention_flops(config, layers, length) / length
        for layers in (every[: config.num_lower_layers], every[config.num_lower_layers :])
    )
    upper_matmul = 2 * (layer_weights(config) - kv_weights(config))
    alone = config.prompt_attention_layers
    shared_kv = 2 * (config.num_projected_groups * kv_weights(config) + tap_weights(config))
    query_gradients = (
        2 * config.num_upper_layers * config.embed_dim * config.num_heads * config.head_dim
    )
    # A layer is recomputed up to its last product, of which the backward pass needs only the input;
    # but a router's gradient is that of the experts' outputs.
    query = 2 * config.embed_dim * config.num_heads * config.head_dim
    upper = config.num_upper_layers
    last = 0 if config.num_experts else 2 * config.mlp_dim * config.embed_dim
    layers = upper * (upper_matmul - last)
    own_kv = 2 * upper * kv_weights(config) * config.keeps_own
    student_attention = upper_attention
    if config.has_two_caches:
        own_kv += upper * query
        student_attention *= 2
    again = {
        "none": 0,
        "mlp": layers - upper * query + own_kv,
        "layer": layers + student_attention + own_kv,
    }
    prompt = {}
    if alone:
        # Backward: activations as forward, attention twice; gradients of all but the output's.
        trained = prompt_layer_weights(config) - config.num_heads * config.head_dim * (
            config.embed_dim
        )
        forward = prompt_layers_flops(config, alone, length) / length
        matrices = alone * 2 * prompt_layer_weights(config)
        prompt["prompt attention layers, with backward"] = (
            forward + 2 * forward - matrices + alone * 2 * trained
        )
    return {
        "lower layers, once for both": config.num_lower_layers * 2 * layer_weights(config)
        + lower_attention,
        "teacher's upper layers": upper * 2 * layer_weights(config) + upper_attention,
        "student's upper layers": upper * upper_matmul + student_attention + shared_kv + own_kv,
        # Activations: one product per weight, attention twice. Keys and values give their weights a
        # gradient, and their input one for the norm before them.
        "backward": upper * upper_matmul
        + 2 * student_attention
        + query_gradients
        + 2 * shared_kv
        + own_kv,
        "recomputed in backward": again[remat],
        "output matrix: both logits, one gradient": 3 * 2 * config.vocab_size * config.embed_dim,
    } | prompt


def speculator_flops_by_part(
    config: Config, length: int, *, drafts: int, weights: int
) -> dict[str, float]:
    """Operations per token of a step that trains a speculator, of whose weights a token is
    multiplied by so many for each of its drafts. The student runs forward, with about as many
    operations as the teacher; logits of drafts are recomputed in the backward pass."""
    return {
        "student, counted as the teacher": _layers_flops(config, range(config.num_layers), length)
        / length,
        "its output matrix": 2 * config.vocab_size * config.embed_dim,
        "speculator, twice forward, and backward": drafts * 4 * 2 * weights,
    }


def calibration_flops_by_part(config: Config, length: int) -> dict[str, float]:
    """Operations per token of the passes of `calibration` over rows of `length` tokens: the
    teacher, and of each upper layer that is fitted the sums that `calibration.moments` takes. Those
    count once, as in float32: bfloat16 takes two products. The attention probabilities are those of
    whole rows, what the mask hides included. With prompt attention layers also those, and before
    that a pass for each map, and one for the neurons beside it."""
    size = config.embed_dim * (1 + config.boundary_taps) + config.qkv_bias
    fitted = config.num_layers - config.first_projected_layer
    alone = config.prompt_attention_layers
    parts = {
        "teacher": _layers_flops(config, range(config.num_layers), length) / length,
        "second moments": fitted * 2 * size * (size + kv_width(config)),
        "attention that each token receives": (
            fitted * 2 * config.num_heads * config.head_dim * length
        ),
    }
    if alone:
        parts["prompt attention layers"] = prompt_layers_flops(config, alone, length) / length
        parts["passes for maps"] = sum(
            _map_flops(config, count, length) for count in range(1, alone + 1)
        )
    return parts


def _map_flops(config: Config, count: int, length: int) -> float:
    """Operations per token of the passes for map `count`."""
    lower = config.num_lower_layers
    width = config.embed_dim
    prompt = prompt_layers_flops(config, count, length)
    size = width + config.prompt_mlp_neurons
    flops = (_layers_flops(config, range(lower + count), length) + prompt) / length
    flops += 2 * size * (size + width)
    if config.prompt_mlp_neurons:
        flops += (_layers_flops(config, range(lower), length) + prompt) / length
        flops += 2 * 2 * config.mlp_dim * width
    return flops


def prompt_layers_flops(config: Config, count: int, length: int) -> int:
    """Operations of the first `count` prompt attention layers over a row: queries, keys, values,
    attention, its output and what stands in for the MLP."""
    layers = range(config.num_lower_layers, config.num_lower_layers + count)
    matrices = count * 2 * length * prompt_layer_weights(config)
    return matrices + _attention_flops(config, layers, length)


def prompt_layer_weights(config: Config) -> int:
    """Entries of the matrices of a prompt attention layer that a token is multiplied by."""
    return attention_weights(config) + prompt_mlp_weights(config)


def prompt_mlp_weights(config: Config) -> int:
    """Entries of what stands in for its MLP: a map, and gate, up and down of neurons."""
    return config.embed_dim * (config.embed_dim + 3 * config.prompt_mlp_neurons)


def query_scale_flops_by_part(config: Config, length: int) -> dict[str, float]:
    """Operations per token of the pass of `calibration.attenuation`, counted as those of
    `calibration_flops_by_part`."""
    upper = config.num_upper_layers
    queries = config.num_heads * config.head_dim
    return {
        "teacher": _layers_flops(config, range(config.num_layers), length) / length,
        "student's queries, keys and values": (
            upper * 2 * config.embed_dim * queries + 2 * boundary_kv_weights(config)
        ),
        "scores of both": upper * 2 * 2 * queries * length,
    }


def visible_positions(config: Config, context: float) -> float:
    """Positions among `context` that a token sees, its own among them, on the average over the
    layers."""
    windows = [config.kind(layer).window for layer in range(config.num_layers)]
    hidden = sum(max(context - window, 0) for window in windows if window is not None)
    return context - hidden / len(windows)


def _layers_flops(config: Config, layers: range, length: int) -> int:
    matrices = len(layers) * 2 * length * layer_weights(config)
    return matrices + _attention_flops(config, layers, length)


def _attention_flops(config: Config, layers: range, length: int) -> int:
    """Scores and weighted values of some layers over a causal row."""
    pairs = sum(_pairs(length, config.kind(layer).window) for layer in layers)
    return 2 * 2 * config.num_heads * config.head_dim * pairs


def _pairs(length: int, window: int | None) -> int:
    """Number of pairs of a query and a key that it sees."""
    seen = length if window is None else min(length, window)
    return seen * (seen + 1) // 2 + (length - seen) * seen


def kv_weights(config: Config) -> int:
    """Entries of one projection of keys and values."""
    return kv_width(config) * config.embed_dim


def kv_width(config: Config) -> int:
    """Entries of one layer's keys and values of a token."""
    return 2 * config.num_kv_heads * config.head_dim


def layer_weights(config: Config) -> int:
    """Entries of one layer's matrices that a token is multiplied by."""
    return _layer_weights(config, mlp_width(config))


def stored_layer_weights(config: Config) -> int:
    """Entries of one layer's matrices, those of all experts among them."""
    return _layer_weights(config, max(config.num_experts, 1) * config.mlp_dim)


def mlp_width(config: Config) -> int:
    """Numbers between the products of a layer's MLP for one token, of all its experts."""
    return max(config.num_experts_per_token, 1) * config.mlp_dim


def experts_read(config: Config, tokens: int) -> float:
    """Share of a layer's experts that `tokens` choose together, if each chooses at random."""
    return 1 - (1 - config.num_experts_per_token / config.num_experts) ** tokens


def attention_weights(config: Config) -> int:
    """Entries of one layer's matrices without those of its MLP."""
    return 2 * config.num_heads * config.head_dim * config.embed_dim + kv_weights(config)


def _layer_weights(config: Config, mlp_width: int) -> int:
    return attention_weights(config) + (3 * mlp_width + config.num_experts) * config.embed_dim
