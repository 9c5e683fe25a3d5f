"""Record adapters that PEFT saves for models of `cases`, and the logits that transformers computes
after `merge_and_unload`, in the environment of `record.py` with PEFT:

    ENV/bin/pip install peft==0.21.2
    ENV/bin/python tests/families/record_adapters.py [CASE ...]
"""

import json
import sys
import tempfile
from pathlib import Path
from typing import Any

import peft  # pyright: ignore[reportMissingImports]
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, FIXTURES, tensor_for, tokens

ADAPTERS: dict[str, dict[str, Any]] = {
    "qwen2": {
        "r": 2,
        "target_modules": "q_proj k_proj v_proj o_proj gate_proj up_proj down_proj".split(),
        "layers_to_transform": [0, 1],
        "rank_pattern": {"q_proj": 3, r"layers\.1\.mlp\.down_proj": 1},
        "alpha_pattern": {"^model.layers.0.self_attn.o_proj": 9, "k_proj": 1},
    },
    "phi3": {
        "r": 3,
        "use_rslora": True,
        "target_modules": ["qkv_proj", "o_proj", "gate_up_proj", "down_proj"],
        "layers_to_transform": [1, 4],
    },
    "glm4": {
        "r": 2,
        "target_modules": "q_proj k_proj v_proj o_proj gate_up_proj down_proj".split(),
        "layers_to_transform": 2,
    },
}
FOLDER = FIXTURES.with_name("adapters")


@torch.no_grad()
def record(case: str) -> None:
    hf = CASES[case]
    with safe_open(FIXTURES / f"{case}.safetensors", "numpy") as file:
        shapes = json.loads(file.metadata()["shapes"])
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf))
        tensors = {name: tensor_for(hf, name, tuple(shape)) for name, shape in shapes.items()}
        save_file(tensors, Path(folder, "model.safetensors"), {"format": "pt"})
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    rows = torch.from_numpy(tokens()).long()
    base = model(rows, use_cache=False).logits[:, -4:]
    torch.manual_seed(0)
    options = {"task_type": "CAUSAL_LM", "init_lora_weights": False, "lora_alpha": 4}
    model = peft.get_peft_model(model, peft.LoraConfig(**options | ADAPTERS[case]))
    model.peft_config["default"].base_model_name_or_path = case
    model.save_pretrained(FOLDER / case)
    (FOLDER / case / "README.md").unlink()
    logits = model.merge_and_unload()(rows, use_cache=False).logits[:, -4:]
    print(f"{case:16} logits move by {(logits - base).abs().mean():.2f}")
    metadata = {"peft": peft.__version__, "transformers": transformers.__version__}
    save_file(
        {"logits": logits.contiguous().numpy()}, FOLDER / case / "reference.safetensors", metadata
    )


for case in sys.argv[1:] or ADAPTERS:
    record(case)
