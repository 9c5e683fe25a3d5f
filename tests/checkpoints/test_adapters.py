"""LoRA adapters merged into checkpoints: those that PEFT wrote (`families/record_adapters.py`), and
edited ones."""

import json
import shutil
from pathlib import Path

import jax
import numpy as np
import pytest
from safetensors.numpy import load_file, save_file

import swiftkv_jax as skv
from swiftkv_jax.cli.model_loading import open_model, read_model
from swiftkv_jax.cli.model_options import ModelOptions
from swiftkv_jax.convert import main
from swiftkv_jax.errors import CheckpointError
from swiftkv_jax.model.mesh import make_mesh
from tests.checkpoints.hf_models import TIED, assert_same, edit, tensors
from tests.checkpoints.hub_server import add, hub_with
from tests.families import models
from tests.families.running import logits

RECORDED = Path(__file__).parents[1] / "fixtures" / "adapters"
CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"


@pytest.fixture(scope="module")
def phi3(tmp_path_factory) -> Path:
    return models.write("phi3", tmp_path_factory.mktemp("adapters") / "phi3")


@pytest.mark.parametrize("case", sorted(path.name for path in RECORDED.iterdir()))
def test_logits_are_those_of_peft(case, tmp_path):
    """With patterns of ranks and alphas, rank-stabilised, on some layers, of joined matrices and of
    heads whose rows are interleaved."""
    expected = load_file(RECORDED / case / "reference.safetensors")["logits"]
    model = skv.load(models.write(case, tmp_path / case), dtype="float32", adapter=RECORDED / case)
    np.testing.assert_allclose(logits(model)[:, -4:], expected, atol=2e-4, rtol=0)


def adapter(
    path: Path, modules: dict[str, float], base=TIED, rank: int = 2, seed: int = 0, **fields
) -> Path:
    """An adapter laid out as those that PEFT wrote, on modules of `base` -> size of B."""
    numbers = np.random.default_rng(seed)
    found = load_file(base / "model.safetensors")
    arrays = {}
    for module, size in modules.items():
        outputs, inputs = found[f"{module}.weight"].shape
        name = f"base_model.model.{module}"
        arrays[f"{name}.lora_A.weight"] = numbers.standard_normal((rank, inputs), np.float32)
        arrays[f"{name}.lora_B.weight"] = size * numbers.standard_normal(
            (outputs, rank), np.float32
        )
    path.mkdir()
    save_file(arrays, path / WEIGHTS, {"format": "pt"})
    config = {"peft_type": "LORA", "r": rank, "lora_alpha": 3, "bias": "none"}
    (path / CONFIG).write_text(json.dumps(config | fields))
    return path


def add_matrices(arrays: dict[str, np.ndarray], path: Path) -> None:
    """Add the matrices of the adapter to the tensors of its base, a student."""
    halves = load_file(path / WEIGHTS)
    for name in (name for name in halves if "lora_A" in name):
        product = 1.5 * (halves[name.replace("lora_A", "lora_B")] @ halves[name])
        module = name.removeprefix("base_model.model.").removesuffix(".lora_A.weight")
        for place in (module, f"{module}_swiftkv"):
            if place == module or module == "model.layers.6.self_attn.q_proj":
                arrays[f"{place}.weight"] = arrays[f"{place}.weight"] + product


MODULES = [
    "model.layers.1.self_attn.k_proj",  # 4 of 8 layers are lower
    "model.layers.6.mlp.down_proj",
    "model.layers.7.self_attn.o_proj",
    "model.layers.4.self_attn.k_proj_swiftkv",  # groups of 2
    "model.layers.5.self_attn.q_proj_swiftkv",
    "model.layers.0.self_attn.v_proj",
    "model.layers.6.self_attn.q_proj",
]


def test_a_student(tmp_path):
    """The teacher's upper queries are the student's too; from every kind of checkpoint and on a
    mesh the sums are the same, to the bit."""
    found = adapter(tmp_path / "adapter", dict.fromkeys(MODULES, 0.1))
    edited = skv.load(edit(TIED, tmp_path / "edited", lambda arrays: add_matrices(arrays, found)))
    merged = skv.load(TIED, adapter=found)
    for ours, theirs in zip(jax.tree.leaves(merged), jax.tree.leaves(edited), strict=True):
        np.testing.assert_allclose(ours, theirs, atol=1e-6)
    hf, orbax = str(tmp_path / "hf"), str(tmp_path / "orbax")
    assert main(["hf2orbax", str(TIED), orbax, "--adapter", str(found)]) == 0
    assert main(["orbax2hf", str(TIED), hf, "--adapter", str(found)]) == 0
    assert_same(skv.load(orbax), merged)
    twice = [skv.load(orbax, adapter=found, mesh=make_mesh("2x2")), skv.load(hf, adapter=found)]
    assert_same(*twice)


def test_sums_are_rounded_once(tmp_path):
    """To the dtype that is asked for, or the one stored."""
    found = adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": 0.1})
    skv.save_hf(skv.load(TIED, dtype="bfloat16"), tmp_path / "narrow")
    command = ["orbax2hf", str(tmp_path / "narrow"), str(tmp_path / "hf"), "--adapter", str(found)]
    assert main(command) == 0
    written = skv.load(tmp_path / "hf", dtype="bfloat16")
    for path, rounded in (
        (TIED, skv.load(TIED, adapter=found, dtype="bfloat16")),
        (tmp_path / "narrow", written),
    ):
        exact = skv.load(path, adapter=found, dtype="float32")
        assert_same(jax.tree.map(lambda leaf: leaf.astype("bfloat16"), exact), rounded)
    assert {kind for kind, *_ in tensors(tmp_path / "hf").values()} == {"bfloat16"}


def test_names_of_a_model_that_takes_images(phi3, tmp_path):
    """Before transformers 4.52 and since. The text model has no place for the vision side's."""
    merged = skv.load(phi3, adapter=RECORDED / "phi3")
    for text in ("model.language_model.", "language_model.model."):
        path = Path(shutil.copytree(RECORDED / "phi3", tmp_path / text))
        arrays = load_file(path / WEIGHTS)
        renamed = {name.replace(".model.layers", f".{text}layers"): a for name, a in arrays.items()}
        renamed["base_model.model.model.vision_tower.q_proj.lora_A.weight"] = np.zeros(
            (3, 4), np.float32
        )
        save_file(renamed, path / WEIGHTS)
        assert_same(skv.load(phi3, adapter=path), merged)


def message(path: Path, found: Path) -> str:
    with pytest.raises(CheckpointError) as error:
        skv.load(path, adapter=found)
    assert str(found) in str(error.value) or str(path) in str(error.value)
    return str(error.value)


@pytest.mark.parametrize(
    "fields, text",
    [
        ({"peft_type": "LOHA"}, "peft_type='LOHA' is not supported: LORA is; merge the adapter"),
        ({"use_dora": True}, "use_dora=True is not supported: merge the adapter into its base by"),
        ({"modules_to_save": ["lm_head"]}, "modules_to_save=['lm_head'] is not supported"),
        ({"trainable_token_indices": [3]}, "trainable_token_indices=[3] is not supported"),
        ({"bias": "all"}, "bias='all' is not supported"),
        ({"lora_bias": True}, "lora_bias=True is not supported"),
        ({"fan_in_fan_out": True}, "fan_in_fan_out=True is not supported"),
        ({"target_parameters": ["mlp.experts"]}, "target_parameters=['mlp.experts'] is not"),
        ({"layer_replication": [[0, 4]]}, "layer_replication=[[0, 4]] is not supported: its base"),
        ({"alora_invocation_tokens": [1]}, "alora_invocation_tokens=[1] is not supported: an adap"),
        ({"use_qalora": True}, "use_qalora=True is not supported"),
        ({"init_lora_weights": "pissa"}, "init_lora_weights='pissa' is not supported"),
        ({"a_new_field": 1}, "a_new_field=1 is not supported"),
        ({"r": 4}, "not of rank 4, which adapter_config.json states: model.layers.0.mlp.up_proj"),
        ({"rank_pattern": {"up_proj": 4}}, "not of rank 4"),
        ({"rank_pattern": {"(": 2}}, "rank_pattern: '(' is no pattern"),
        ({"alpha_pattern": {"up_proj": "x"}}, "alpha_pattern['up_proj']='x' must be a positive"),
        ({"lora_alpha": None}, "lora_alpha=None must be a positive number"),
        (
            {"layers_to_transform": [1, 2]},
            "outside of layers_to_transform=[1, 2]: model.layers.0.m",
        ),
    ],
)
def test_a_field_that_is_not_supported_is_named(fields, text, tmp_path):
    assert text in message(
        TIED, adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": 1}, **fields)
    )


UP = "base_model.model.model.layers.0.mlp.up_proj"


@pytest.mark.parametrize(
    "change, text",
    [
        (lambda a: a.pop(f"{UP}.lora_A.weight"), "without lora_A: model.layers.0.mlp.up_proj"),
        (lambda a: a.pop(f"{UP}.lora_B.weight"), "without lora_B: model.layers.0.mlp.up_proj"),
        (lambda a: a[f"{UP}.lora_B.weight"].fill(np.nan), "not finite: model.layers.0.mlp.up_proj"),
        (
            lambda a: a.update({f"{UP}.lora_A.weight": np.zeros((2, 3), np.float32)}),
            "wrong shape: model.layers.0.mlp.up_proj [160, 3], expected [160, 64]",
        ),
        (
            lambda a: a.update({f"{UP}.lora_magnitude_vector": np.zeros(3, np.float32)}),
            f"not supported: {UP}.lora_magnitude_vector F32[3]",
        ),
        (lambda a: a.clear(), "has no matrices for a text model"),
    ],
)
def test_a_tensor_that_does_not_fit_is_named(change, text, tmp_path):
    found = adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": 1})
    arrays = load_file(found / WEIGHTS)
    change(arrays)
    save_file(arrays, found / WEIGHTS)
    assert text in message(TIED, found)


@pytest.mark.parametrize(
    "module, text",
    [
        (
            "model.layers.5.self_attn.k_proj",
            "without a place under SwiftKV, where upper layers sha",
        ),
        (
            "model.layers.5.self_attn.v_proj",
            "calibrate that, and serve the result): model.layers.5",
        ),
        ("model.embed_tokens", "not supported (matrices of attention and of dense MLPs are)"),
    ],
)
def test_a_module_without_a_place_is_named(module, text, tmp_path):
    assert text in message(TIED, adapter(tmp_path / "adapter", {module: 1}))


def test_other_models(phi3, tmp_path):
    assert "not in the model: model.layers.0.mlp.up_proj" in message(
        phi3, adapter(tmp_path / "llama", {"model.layers.0.mlp.up_proj": 1})
    )
    mixture = models.write("qwen3-moe", tmp_path / "moe")
    for module in ("mlp.experts.0.up_proj", "mlp.gate"):
        found = adapter(tmp_path / module, {f"model.layers.0.{module}": 1}, mixture)
        assert "not supported (matrices of attention and of dense MLPs are)" in message(
            mixture, found
        )


def test_files_that_are_not_there(tmp_path):
    assert message(TIED, tmp_path).endswith("adapter_config.json: no such file")
    found = adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": 1})
    (found / WEIGHTS).rename(found / "adapter_model.bin")
    assert "adapter_model.bin: pickle files can run code" in message(TIED, found)


def test_eight_bits(fp8, tmp_path):
    """Nothing is added to codes; a wide model is quantised after the sum."""
    found = adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": 0.1}, rank=1)
    assert "fp8, and a sum would be rounded to that again" in message(fp8, found)
    assert main(["orbax2hf", str(TIED), str(tmp_path / "hf"), "--adapter", str(found)]) == 0
    expected = skv.load(tmp_path / "hf", quantization="int8")
    assert_same(skv.load(TIED, quantization="int8", adapter=found), expected)


def test_a_delta_alone_is_not_written(tmp_path, capsys):
    command = ["orbax2hf", str(TIED), str(tmp_path / "out"), "--adapter", str(tmp_path)]
    assert main([*command, "--format", "delta"]) == 2
    assert "--adapter with --format delta" in capsys.readouterr().err


def test_commands_merge_it_and_find_mistakes_before_they_load(tmp_path):
    found = adapter(tmp_path / "adapter", {"model.layers.0.mlp.up_proj": 0.1})
    options = ModelOptions(model=str(TIED), adapter=str(found))
    assert_same(read_model(options, None), skv.load(TIED, adapter=found))
    with pytest.raises(CheckpointError, match="adapter_config.json: no such file"):
        open_model(ModelOptions(model=str(TIED), adapter=str(tmp_path)))


def test_names_on_the_hub(phi3, tmp_path, monkeypatch):
    """Nothing but the adapter is downloaded."""
    with hub_with(tmp_path, monkeypatch) as server:
        add(server, "org/lora", RECORDED / "phi3", ["model.gguf", "optimizer.pt"])
        merged = skv.load(phi3, adapter="org/lora")
        assert {CONFIG, WEIGHTS} <= set(server.downloaded()) <= {CONFIG, WEIGHTS, ".gitattributes"}
    assert_same(merged, skv.load(phi3, adapter=RECORDED / "phi3"))
