"""`quantization_config` as programs write it: what is read of it, and what is refused."""

import copy
import functools

import pytest

from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.checkpoints.quantized.config import read_quantization_config
from swiftkv_jax.checkpoints.quantized.formats import WeightFormat
from tests import tiny
from tests.checkpoints.fp8_files import PUBLISHED, QUANTIZATION_CONFIG, published
from tests.checkpoints.quantized_files import FORMATS, gptq_config

GPTQ = WeightFormat("gptq", 4, (1, 128), stored_zero=1)
INT8 = WeightFormat("scaled", 8, (1, 0))
# File of `fixtures/quantization` -> the format of its matrices. Those of transformers are what 5.23
# writes of its defaults; `more` are with all fields that auto-round 0.15 and 0.16 add.
WRITTEN = {
    "transformers-fp8": WeightFormat("scaled", 8, (128, 128), "float"),
    "transformers-gptq": GPTQ,
    "transformers-awq": WeightFormat("awq", 4, (1, 128), symmetric=False),
    "gptqmodel": WeightFormat("gptq", 4, (1, 16), stored_zero=1),
    "auto-round-0.15-gptq": WeightFormat("gptq", 4, (1, 32), stored_zero=1),
    "auto-round-0.15-awq": WeightFormat("awq", 4, (1, 32)),
    "auto-round-0.15-int8": INT8,
    "auto-round-0.15-fp8": WeightFormat("scaled", 8, (1, 0), "float", activation_scales=True),
    "auto-round-more-gptq": WeightFormat("gptq", 4, (1, 16), stored_zero=1),
    "auto-round-more-awq": WeightFormat("awq", 4, (1, 16), symmetric=False),
    "swiftkv-fp8": WeightFormat("scaled", 8, (1, 0), "float"),
}


def test_every_file_is_read():
    assert WRITTEN.keys() == {path.stem for path in PUBLISHED.iterdir()}


@pytest.mark.parametrize("name", WRITTEN)
def test_files_of_programs(name):
    read = read_quantization_config(published(name))
    assert read.groups == ((("Linear",), WRITTEN[name]),)
    assert read.kept == {"auto-round-0.15-int8": "int8", "swiftkv-fp8": "fp8"}.get(name)


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"bits": 8, "group_size": -1}, WeightFormat("gptq", 8, (1, 0), stored_zero=1)),
        (
            {"checkpoint_format": None, "format": "gptq_v2"},
            WeightFormat("gptq", 4, (1, 16), stored_zero=0),
        ),
    ],
)
def test_fields_of_gptq(fields, expected):
    ((_, found),) = read_quantization_config(gptq_config() | fields).groups
    assert found == expected


FP8_DYNAMIC, MXFP4 = QUANTIZATION_CONFIG, FORMATS["MXFP4"][0]
GPTQ_FIELDS, AWQ_FIELDS, FP8_FIELDS, W4A16 = (
    FORMATS[name][0] for name in ("gptq", "awq", "fp8 blocks", "W4A16")
)
WEIGHTS = "config_groups.group_0.weights"
REFUSED = [  # config, path of a field, another value, what the error says of it
    (GPTQ_FIELDS, "quant_method", "modelopt", "='modelopt' is not supported; supported: compr"),
    (GPTQ_FIELDS, "quant_method", "auto-round", "export .* format auto_gptq, auto_awq or "),
    (GPTQ_FIELDS, "quant_method", ["gptq"], r"quant_method=\['gptq'\] is not supported"),
    (GPTQ_FIELDS, "bits", 3, "bits=3 is not supported; supported: 4, 8"),
    (GPTQ_FIELDS, "group_size", 0, "group_size=0 must be a number of inputs, or -1"),
    (GPTQ_FIELDS, "checkpoint_format", "marlin", "checkpoint_format='marlin' is not supported"),
    (GPTQ_FIELDS, "lm_head", True, "lm_head=True is not supported"),
    (GPTQ_FIELDS, "dynamic", {"+:.*mlp": {"bits": 8}}, "dynamic=.* only rules that begin with -:"),
    (GPTQ_FIELDS, "rotation", "hadamard", "unknown field 'rotation'.* changes nothing, remove it"),
    (GPTQ_FIELDS, "act_bits", 8, "act_bits=8 is not supported"),
    (GPTQ_FIELDS, "data_type", "mx_fp", "data_type='mx_fp' is not supported"),
    (GPTQ_FIELDS, "static_kv_dtype", "fp8", "static_kv_dtype='fp8' is not supported"),
    (GPTQ_FIELDS, "rotation_configs", [{}], "rotation_configs=.* is not supported"),
    (GPTQ_FIELDS, "format", "gptq_v2", "checkpoint_format='gptq' and .*format='gptq_v2' say the"),
    (GPTQ_FIELDS, "method", "qqq", "method='qqq' is not supported"),
    (AWQ_FIELDS, "extra_config", {"layers.0": {}}, "extra_config=.* is not supported"),
    (AWQ_FIELDS, "version", "gemv", "version='gemv' is not supported; supported: 'gemm'"),
    (AWQ_FIELDS, "bits", 8, "bits=8 is not supported; supported: 4"),
    (AWQ_FIELDS, "modules_to_not_convert", "o_proj", "modules_to_not_convert='o_proj' must be a l"),
    (AWQ_FIELDS, "desc_act", True, "desc_act=True is not supported"),
    (AWQ_FIELDS, "format", "gemv_fast", "format='gemv_fast' is not supported; supported: 'gemm'"),
    (AWQ_FIELDS, "modules_in_block_to_quantize", [["q_proj"]], "modules_in_block_to_quantize="),
    (FP8_FIELDS, "modules_to_convert", ["embed_tokens"], "modules_to_convert=.* is not supp"),
    (FP8_FIELDS, "expert_dtype", "fp4", "expert_dtype='fp4' is not supported"),
    (FP8_FIELDS, "weight_block_size", [128], r"weight_block_size=\[128\] must be two numbers"),
    (FP8_FIELDS, "fmt", "e5m2", "fmt='e5m2' is not supported; supported: 'e4m3'"),
    (FP8_FIELDS, "kv_cache_scheme", "static", "kv_cache_scheme='static' is not supported"),
    (W4A16, "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme="),
    (W4A16, "format", "mxfp8-quantized", "format='mxfp8-quantized' is not supported"),
    (FP8_DYNAMIC, "quant_method", "bitsandbytes", "='bitsandbytes' is not supported; supported: c"),
    (FP8_DYNAMIC, "format", "nvfp4-pack-quantized", "format='nvfp4-pack-quantized' is not supp"),
    (FP8_DYNAMIC, "format", "pack-quantized", "8, symmetric=True is not supported in format='pack"),
    (FP8_DYNAMIC, "format", "mixed-precision", r"group_0\.format='mixed-precision'"),
    (FP8_DYNAMIC, "quantization_status", "frozen", "quantization_status='frozen'"),
    (FP8_DYNAMIC, "kv_cache_scheme", {"num_bits": 8}, "kv_cache_scheme="),
    (FP8_DYNAMIC, "config_groups", {}, r"config_groups=\{\} must be an object with groups"),
    (FP8_DYNAMIC, "config_groups", "all", "config_groups='all'"),
    (FP8_DYNAMIC, "config_groups.group_0.output_activations", {}, r"_0\.output_activations=\{"),
    (FP8_DYNAMIC, f"{WEIGHTS}.num_bits", 4, "num_bits=4, symmetric=True is not supported in form"),
    (FP8_DYNAMIC, f"{WEIGHTS}.actorder", "group", r"weights\.actorder='group'"),
    (FP8_DYNAMIC, "config_groups.group_0.targets", [], r"group_0\.targets=\[\] must name modules"),
    (FP8_DYNAMIC, "ignore", ["re:("], r"ignore: 're:\(' is not a regular expression"),
    (FP8_DYNAMIC, f"{WEIGHTS}.strategy", "block", "block_structure=None must be"),
    (FP8_DYNAMIC, f"{WEIGHTS}.type", "int", r"weights: type='int', num_bits=8"),
    (FP8_DYNAMIC, f"{WEIGHTS}.group_size", 128, r"weights\.group_size=128"),
    (FP8_DYNAMIC, f"{WEIGHTS}.symmetric", False, "symmetric=False is not supported in"),
    (FP8_DYNAMIC, WEIGHTS, None, r"weights=None must be an object"),
    (FP8_DYNAMIC, f"{WEIGHTS}.rotation", "hadamard", "weights: unknown field 'rotation'"),
    # Bytes are scales of MXFP4 alone, and four bits of activations too.
    (FP8_DYNAMIC, f"{WEIGHTS}.scale_dtype", "torch.uint8", "weights.scale_dtype='torch.uint8' is"),
    (FP8_DYNAMIC, "config_groups.group_0.input_activations.num_bits", 4, "ions.num_bits=4 is not"),
    (FP8_DYNAMIC, "smoothing", 0.5, ": unknown field 'smoothing'"),
    (FP8_DYNAMIC, "moe_sparsity_config", {"pruned": 1}, "moe_sparsity_config="),
    (FP8_DYNAMIC, "sparsity_config", {"format": "sparse-24-bitmask"}, "sparsity_config="),
    (MXFP4, f"{WEIGHTS}.group_size", 16, "weights.group_size=16 is not supported in format='mxfp4"),
    (MXFP4, f"{WEIGHTS}.strategy", "channel", "weights.strategy='channel' is not supported"),
    (MXFP4, f"{WEIGHTS}.symmetric", False, "symmetric=False is not supported in format='mxfp4-pa"),
    (MXFP4, f"{WEIGHTS}.num_bits", 8, "num_bits=8, .* is not supported in format='mxfp4-pack-q"),
    (MXFP4, f"{WEIGHTS}.type", "int", "type='int', .* is not supported in format='mxfp4-pack-q"),
    (MXFP4, f"{WEIGHTS}.scale_dtype", "torch.float8_e4m3fn", "dtype='torch.float8_e4m3fn' is not"),
    (MXFP4, "format", "nvfp4-pack-quantized", "format='nvfp4-pack-quantized' is not supported"),
    (MXFP4, "quant_method", "mxfp4", "quant_method='mxfp4' is not supported; supported: "),
]


@pytest.mark.parametrize(("config", "path", "value", "message"), REFUSED)
def test_configs_that_are_refused(config, path, value, message):
    config = copy.deepcopy(config)
    *parents, last = path.split(".")
    functools.reduce(lambda node, key: node[key], parents, config)[last] = value
    with pytest.raises(ConfigError, match=f"quantization_config.*{message}") as error:
        config_from_hf(tiny.hf_config() | {"quantization_config": config})
    assert "\n" not in str(error.value)
