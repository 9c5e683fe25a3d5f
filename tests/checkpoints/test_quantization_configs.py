"""`quantization_config` as programs write it: what is read of it, and what is refused."""

from typing import Any

import pytest

from swiftkv_jax import ConfigError
from swiftkv_jax.checkpoints.hf_config import config_from_hf
from swiftkv_jax.checkpoints.quantized.config import read_quantization_config
from swiftkv_jax.checkpoints.quantized.formats import WeightFormat
from tests import tiny
from tests.checkpoints.quantized_files import AWQ, FORMATS, fp8, gptq_config

# What transformers 5.23 writes of its defaults: `to_dict` of FineGrainedFP8Config, GPTQConfig and
# AwqConfig.
_GPTQ_5 = {
    "act_group_aware": True,
    "backend": "auto",
    "batch_size": 1,
    "bits": 4,
    "block_name_to_quantize": None,
    "cache_block_outputs": True,
    "damp_percent": 0.1,
    "dataset": None,
    "desc_act": False,
    "group_size": 128,
    "max_input_length": None,
    "meta": None,
    "model_seqlen": None,
    "module_name_preceding_first_block": None,
    "modules_in_block_to_quantize": None,
    "pad_token_id": None,
    "sym": True,
    "tokenizer": None,
    "true_sequential": True,
}
TRANSFORMERS_5: dict[str, dict[str, Any]] = {
    "fp8": {
        "activation_scheme": "dynamic",
        "dequantize": False,
        "expert_dtype": "fp8",
        "modules_to_convert": None,
        "modules_to_not_convert": None,
        "quant_method": "fp8",
        "scale_fmt": "float",
        "weight_block_size": [128, 128],
    },
    "gptq": _GPTQ_5 | {"checkpoint_format": "gptq", "format": "gptq", "quant_method": "gptq"},
    "awq": _GPTQ_5
    | {
        "format": "gemm",
        "modules_to_not_convert": None,
        "quant_method": "awq",
        "version": "gemm",
        "zero_point": True,
    },
}
# GPTQModel's fields besides those of `gptq_config`.
GPTQMODEL = {
    "format": "gptq",
    "hyb_act": False,
    "meta": {"quantizer": ["gptqmodel:4.0.0"], "mse": 0.0, "static_groups": False},
    "method": "gptq",
    "pack_dtype": "int32",
}


@pytest.mark.parametrize("name", TRANSFORMERS_5)
def test_as_transformers_5_writes_them(name):
    """The same format as the shorter files of other programs say."""
    shorter = {
        "fp8": fp8([128, 128], "dynamic"),
        "gptq": gptq_config(group=128),
        "awq": AWQ | {"group_size": 128},
    }
    ((_, expected),) = read_quantization_config(shorter[name]).groups
    ((_, found),) = read_quantization_config(TRANSFORMERS_5[name]).groups
    assert found == expected


def test_as_gptqmodel_writes_them():
    read = read_quantization_config(gptq_config() | GPTQMODEL)
    assert read == read_quantization_config(gptq_config())
    fields = {name: value for name, value in gptq_config().items() if name != "checkpoint_format"}
    ((_, format),) = read_quantization_config(fields | {"format": "gptq_v2"}).groups
    assert format.stored_zero == 0


# What auto-round 0.15 and 0.16 write besides, of a model of 4 bits.
AUTO_ROUND: dict[str, Any] = {
    "act_bits": 16,
    "act_data_type": "float",
    "act_dynamic": True,
    "act_group_size": 16,
    "act_sym": True,
    "amp": True,
    "autoround_version": "0.15.1",
    "batch_size": 8,
    "data_type": "int",
    "enable_minmax_tuning": True,
    "enable_norm_bias_tuning": False,
    "enable_quanted_input": True,
    "gradient_accumulate_steps": 1,
    "iters": 200,
    "low_gpu_mem_usage": False,
    "lr": 0.005,
    "minmax_lr": 0.005,
    "nsamples": 128,
    "provider": "auto-round",
    "quant_block_list": None,
    "regex_config": {},
    "rotation_configs": [],
    "scale_dtype": "torch.float16",
    "seqlen": 2048,
    "static_attention_dtype": None,
    "static_attention_granularity": "tensor",
    "static_kv_dtype": None,
    "static_kv_granularity": "tensor",
    "super_bits": None,
    "super_group_size": None,
    "supported_types": ["Linear"],
    "to_quant_block_names": "model.layers",
}


@pytest.mark.parametrize("fields", [gptq_config(), gptq_config(bits=8, group=-1), AWQ])
def test_as_auto_round_writes_them(fields):
    assert read_quantization_config(fields | AUTO_ROUND) == read_quantization_config(fields)


# Whole files of auto-round 0.15.1: 4 bits in groups of 32 (0.16.1 leaves out the last two fields);
# int8 and FP8 with static activations, of which compressed-tensors 0.20 writes the most.
_WRITTEN = {
    "autoround_version": "0.15.1",
    "bits": 4,
    "data_type": "int",
    "enable_quanted_input": False,
    "group_size": 32,
    "provider": "auto-round",
    "sym": True,
    "static_attention_granularity": "tensor",
    "static_kv_granularity": "tensor",
}
WRITTEN_GPTQ = _WRITTEN | {
    "damp_percent": 0.01,
    "desc_act": False,
    "lm_head": False,
    "quant_method": "gptq",
    "true_sequential": False,
}
WRITTEN_AWQ = _WRITTEN | {
    "modules_to_not_convert": ["lm_head"],
    "quant_method": "awq",
    "to_quant_block_names": "model.layers",
    "version": "gemm",
    "zero_point": False,
}
_8_BITS = {"group_size": None, "num_bits": 8, "symmetric": True, "type": "int"}
WRITTEN_INT8 = {
    "config_groups": {
        "group_0": {
            "format": "int-quantized",
            "input_activations": {"dynamic": True, "strategy": "token"} | _8_BITS,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {"dynamic": False, "strategy": "channel"} | _8_BITS,
        }
    },
    "format": "int-quantized",
    "global_compression_ratio": None,
    "ignore": ["lm_head"],
    "kv_cache_scheme": None,
    "moe_sparsity_config": None,
    "quant_method": "compressed-tensors",
    "quantization_status": "compressed",
}
_FLOAT = {"group_size": None, "num_bits": 8, "symmetric": True, "type": "float"}
WRITTEN_FP8 = WRITTEN_INT8 | {
    "config_groups": {
        "group_0": {
            "format": None,
            "input_activations": {"dynamic": False, "strategy": "tensor"} | _FLOAT,
            "output_activations": None,
            "targets": ["Linear"],
            "weights": {"dynamic": False, "strategy": "channel"} | _FLOAT,
        }
    },
    "format": "float-quantized",
    "ignore": [],
    "provider": "auto-round",
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        (WRITTEN_GPTQ, WeightFormat("gptq", 4, (1, 32), stored_zero=1)),
        (
            WRITTEN_GPTQ | {"bits": 8, "group_size": -1},
            WeightFormat("gptq", 8, (1, 0), stored_zero=1),
        ),
        (WRITTEN_AWQ, WeightFormat("awq", 4, (1, 32))),
        (
            WRITTEN_AWQ | {"sym": False, "zero_point": True},
            WeightFormat("awq", 4, (1, 32), symmetric=False),
        ),
        (WRITTEN_INT8, WeightFormat("scaled", 8, (1, 0))),
        (WRITTEN_FP8, WeightFormat("scaled", 8, (1, 0), "float", activation_scales=True)),
    ],
)
def test_files_of_auto_round(fields, expected):
    read = read_quantization_config(fields)
    assert read.groups == ((("Linear",), expected),)
    assert read.kept == ("int8" if fields is WRITTEN_INT8 else None)


REFUSED = [  # format, other fields, what the error says
    ("gptq", {"quant_method": "modelopt"}, "quant_method='modelopt' is not supported; supported: "),
    ("gptq", {"quant_method": "auto-round"}, "export the model .* format auto_gptq, auto_awq or "),
    ("gptq", {"quant_method": ["gptq"]}, r"quant_method=\['gptq'\] is not supported"),
    ("gptq", {"bits": 3}, "bits=3 is not supported; supported: 4, 8"),
    ("gptq", {"group_size": 0}, "group_size=0 must be a number of inputs, or -1"),
    ("gptq", {"checkpoint_format": "marlin"}, "checkpoint_format='marlin' is not supported"),
    ("gptq", {"lm_head": True}, "lm_head=True is not supported"),
    ("gptq", {"dynamic": {"+:.*mlp": {"bits": 8}}}, "dynamic=.* only rules that begin with -:"),
    ("gptq", {"rotation": "hadamard"}, "unknown field 'rotation'.* changes nothing, remove it"),
    ("gptq", {"act_bits": 8}, "act_bits=8 is not supported"),
    ("gptq", {"data_type": "mx_fp"}, "data_type='mx_fp' is not supported"),
    ("gptq", {"static_kv_dtype": "fp8"}, "static_kv_dtype='fp8' is not supported"),
    ("gptq", {"rotation_configs": [{}]}, "rotation_configs=.* is not supported"),
    ("awq", {"extra_config": {"model.layers.0": {"bits": 8}}}, "extra_config=.* is not supported"),
    ("awq", {"version": "gemv"}, "version='gemv' is not supported; supported: 'gemm'"),
    ("awq", {"bits": 8}, "bits=8 is not supported; supported: 4"),
    ("awq", {"modules_to_not_convert": "o_proj"}, "modules_to_not_convert='o_proj' must be a list"),
    ("awq", {"desc_act": True}, "desc_act=True is not supported"),
    ("awq", {"format": "gemv_fast"}, "format='gemv_fast' is not supported; supported: 'gemm'"),
    ("awq", {"modules_in_block_to_quantize": [["q_proj"]]}, "modules_in_block_to_quantize="),
    ("gptq", {"format": "gptq_v2"}, "checkpoint_format='gptq' and .*format='gptq_v2' say the same"),
    ("gptq", {"method": "qqq"}, "method='qqq' is not supported"),
    ("fp8 blocks", {"modules_to_convert": ["embed_tokens"]}, "modules_to_convert=.* is not supp"),
    ("fp8 blocks", {"expert_dtype": "fp4"}, "expert_dtype='fp4' is not supported"),
    ("fp8 blocks", {"weight_block_size": [128]}, r"weight_block_size=\[128\] must be two numbers"),
    ("fp8 blocks", {"fmt": "e5m2"}, "fmt='e5m2' is not supported; supported: 'e4m3'"),
    ("fp8 blocks", {"kv_cache_scheme": "static"}, "kv_cache_scheme='static' is not supported"),
    ("W4A16", {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme="),
    ("W4A16", {"format": "mxfp8-quantized"}, "format='mxfp8-quantized' is not supported"),
]


@pytest.mark.parametrize(("name", "fields", "message"), REFUSED)
def test_configs_that_are_refused(name, fields, message):
    config = FORMATS[name][0] | fields
    with pytest.raises(ConfigError, match=f"quantization_config.*{message}") as error:
        config_from_hf(tiny.hf_config() | {"quantization_config": config})
    assert "\n" not in str(error.value)
