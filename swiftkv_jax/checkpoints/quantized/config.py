"""The `quantization_config` of a `config.json`, of any `quant_method` that is supported.

Fields are those of transformers (`utils/quantization_config.py`), of vLLM
(`model_executor/layers/quantization/`) and of the tools that write them: AutoFP8, AutoGPTQ,
GPTQModel, AutoAWQ, auto-round. One that could change the values and is not listed is an error.
"""

from __future__ import annotations

from typing import Any

from ...errors import ConfigError
from ...model.quantization import Format
from ..families.fields import agreed, shown
from .compressed_tensors import HEADS, read_compressed_tensors
from .formats import (
    Fields,
    QuantizationConfig,
    WeightFormat,
    check_fields,
    read_group_size,
    read_names,
)

WHERE = "quantization_config"
MODELOPT = "hf_quant_config.json"
"""File in which ModelOpt writes the fields that others write to `quantization_config`."""

_FP8 = {
    "activation_scheme": ("dynamic", "static", None),
    "fmt": ("e4m3", None),
    "scale_fmt": ("float", "ue8m0", None),
    "kv_cache_scheme": (None,),
    "dequantize": (False, True, None),
    # More than the Linears: embeddings.
    "modules_to_convert": (None, []),
    "expert_dtype": ("fp8", None),
}
_FP8_OTHERS = frozenset(
    "quant_method weight_block_size modules_to_not_convert ignored_layers version".split()
)
_FBGEMM_OTHERS = frozenset("quant_method modules_to_not_convert activation_scale_ub".split())
_GPTQ = {
    "bits": (4, 8),
    "desc_act": (False, True, None),
    "checkpoint_format": ("gptq", "gptq_v2", None),
    "format": ("gptq", "gptq_v2", None),
    "method": ("gptq", None),
    "lm_head": (False, None),
    "pack_dtype": ("int32", None),
    "is_marlin_format": (False, None),
}
# auto-round writes what it was asked for: what else it can quantise, which must be off.
_AUTO_ROUND = {
    "act_bits": (16, 32, None),
    "data_type": ("int", None),
    "act_data_type": ("float", "fp16", "bf16", "int", None),
    "rotation_configs": (None, []),
    "quant_lm_head": (False, None),
    **dict.fromkeys(("rotation_config", "extra_config", "regex_config"), (None, {})),
    **dict.fromkeys(
        "static_kv_dtype static_attention_dtype super_bits super_group_size".split(), (None,)
    ),
}
# How the values were found, and what programs are to do with them. transformers 5 writes most of
# these in files of AWQ too.
_HOW_FOUND = frozenset(
    """
    quant_method group_size sym static_groups true_sequential damp_percent damp_auto_increment mse
    meta act_group_aware hyb_act batch_size block_name_to_quantize cache_block_outputs dataset
    tokenizer max_input_length model_seqlen module_name_preceding_first_block pad_token_id backend
    exllama_config

    autoround_version provider enable_quanted_input enable_minmax_tuning enable_norm_bias_tuning
    static_attention_granularity static_kv_granularity to_quant_block_names quant_block_list
    supported_types act_group_size act_sym act_dynamic amp iters seqlen nsamples lr minmax_lr
    gradient_accumulate_steps low_gpu_mem_usage low_cpu_mem_usage scale_dtype
    """.split()
)
_GPTQ_OTHERS = _HOW_FOUND | frozenset(
    """
    dynamic modules_in_block_to_quantize model_name_or_path model_file_base_name use_exllama
    disable_exllama use_cuda_fp16
    """.split()
)
_AWQ = {
    "bits": (4,),
    "version": ("gemm", "GEMM", None),
    "format": ("gemm", "GEMM", None),
    "checkpoint_format": ("gemm", None),
    "method": ("awq", None),
    "pack_dtype": ("int32", None),
    "desc_act": (False, None),
    "modules_in_block_to_quantize": (None,),
    "zero_point": (True, False, None),
    "lm_head": (False, None),
}
_AWQ_OTHERS = _HOW_FOUND | frozenset(
    "modules_to_not_convert do_fuse fuse_max_seq_len modules_to_fuse".split()
)


def read_quantization_config(fields: Any) -> QuantizationConfig:
    """Read a `quantization_config`. Raises `ConfigError` naming the first field that is not
    supported."""
    if not isinstance(fields, dict):
        raise ConfigError(f"{WHERE}={shown(fields)} must be an object")
    readers = {
        "compressed-tensors": read_compressed_tensors,
        "fp8": _fp8,
        "fbgemm_fp8": _fbgemm_fp8,
        "gptq": _gptq,
        "awq": _awq,
    }
    method = fields.get("quant_method")
    if method == "auto-round":
        raise ConfigError(
            f"{WHERE}.quant_method='auto-round' is not supported; export the model from auto-round "
            f"with format auto_gptq, auto_awq or llm_compressor"
        )
    if not isinstance(method, str) or method not in readers:
        raise ConfigError(
            f"{WHERE}.quant_method={shown(method)} is not supported; supported: "
            f"{', '.join(readers)}"
        )
    return readers[method](fields)


def _fp8(fields: Fields) -> QuantizationConfig:
    check_fields(WHERE, fields, _FP8, _FP8_OTHERS)
    block = fields.get("weight_block_size")
    if block is not None and not (
        isinstance(block, list) and len(block) == 2 and all(type(n) is int and n > 0 for n in block)
    ):
        raise ConfigError(f"{WHERE}.weight_block_size={shown(block)} must be two numbers, or null")
    static = fields.get("activation_scheme") == "static"
    block = (0, 0) if block is None else tuple(block)
    format = WeightFormat("scaled", 8, block, "float", activation_scales=static)
    wide = _names(fields, "modules_to_not_convert") + _names(fields, "ignored_layers")
    return QuantizationConfig("fp8", ((("Linear",), format),), wide, _kept_fp8(format, wide))


def _fbgemm_fp8(fields: Fields) -> QuantizationConfig:
    check_fields(WHERE, fields, {}, _FBGEMM_OTHERS)
    format = WeightFormat("scaled", 8, (1, 0), "float")
    wide = _names(fields, "modules_to_not_convert")
    return QuantizationConfig("fbgemm_fp8", ((("Linear",), format),), wide, _kept_fp8(format, wide))


def _kept_fp8(format: WeightFormat, wide: tuple[str, ...]) -> Format | None:
    """`QuantizationConfig.kept`, where no matrix but the head is wide."""
    others = {name for name in wide if name not in HEADS and not name.endswith("norm")}
    return None if others or format.block not in ((0, 0), (1, 0)) else "fp8"


def _gptq(fields: Fields) -> QuantizationConfig:
    check_fields(WHERE, fields, _GPTQ | _AUTO_ROUND, _GPTQ_OTHERS)
    names = ("checkpoint_format", "format")
    stored = agreed({f"{WHERE}.{name}": fields.get(name) for name in names})
    format = WeightFormat(
        "gptq",
        int(fields["bits"]),
        (1, _group_size(fields)),
        act_order=bool(fields.get("desc_act")),
        stored_zero=0 if stored == "gptq_v2" else 1,
    )
    dynamic = fields.get("dynamic") or {}
    # GPTQModel's rules for modules: `-:` and a regular expression leaves them wide.
    if not isinstance(dynamic, dict) or not all(name.startswith("-:") for name in dynamic):
        raise ConfigError(
            f"{WHERE}.dynamic={shown(dynamic)}: only rules that begin with -: are supported"
        )
    wide = read_names(f"{WHERE}.dynamic", [f"re:{name.removeprefix('-:')}" for name in dynamic])
    names = _names(fields, "modules_in_block_to_quantize") or ("Linear",)
    return QuantizationConfig("gptq", ((names, format),), wide)


def _awq(fields: Fields) -> QuantizationConfig:
    check_fields(WHERE, fields, _AWQ | _AUTO_ROUND, _AWQ_OTHERS)
    symmetric = fields.get("zero_point") is False
    format = WeightFormat("awq", 4, (1, _group_size(fields)), symmetric=symmetric)
    wide = _names(fields, "modules_to_not_convert")
    return QuantizationConfig("awq", ((("Linear",), format),), wide)


def _names(fields: Fields, name: str) -> tuple[str, ...]:
    return read_names(f"{WHERE}.{name}", fields.get(name))


def _group_size(fields: Fields) -> int:
    return read_group_size(f"{WHERE}.group_size", fields.get("group_size"))
