"""Record what transformers computes for `cases`, in an environment of its own:

    python3.11 -m venv ENV && ENV/bin/pip install torch==2.13.0 transformers==5.23.0
    ENV/bin/python tests/families/record.py [CASE ...]

A fixture has the shapes of the tensors, logits of `tokens()`, and a greedy continuation computed
without a cache.
"""

import json
import sys
import tempfile
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors import safe_open
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, FIXTURES, NEW, PROMPT, tensor_for, tokens


@torch.no_grad()
def record(name: str) -> None:
    hf = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf))
        config = transformers.AutoConfig.from_pretrained(folder)
        # Parameters of a file, which are not always those in memory: experts are joined there.
        transformers.AutoModelForCausalLM.from_config(config).save_pretrained(folder)
        with safe_open(Path(folder, "model.safetensors"), "numpy") as file:
            shapes = {tensor: file.get_slice(tensor).get_shape() for tensor in file.keys()}
        save_file(
            {tensor: tensor_for(hf, tensor, tuple(shape)) for tensor, shape in shapes.items()},
            Path(folder, "model.safetensors"),
            {"format": "pt"},
        )
        model = transformers.AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, attn_implementation="eager"
        ).eval()
    rows = torch.from_numpy(tokens()).long()
    logits = model(rows, use_cache=False).logits
    text, margins = rows[:, :PROMPT], []
    for _ in range(NEW):
        last = model(text, use_cache=False).logits[:, -1]
        best = last.topk(2).values
        margins.append(float((best[:, 0] - best[:, 1]).min()))
        text = torch.cat([text, last.argmax(-1, keepdim=True)], 1)
    greedy = text[:, PROMPT:].numpy().astype(np.int32)
    print(
        f"{name:16} logits std {logits.std():.2f}, least margin {min(margins):.3f}, "
        f"distinct tokens {[len(set(row)) for row in greedy.tolist()]}"
    )
    arrays = {"logits": logits.numpy(), "greedy": greedy}
    metadata = {"shapes": json.dumps(shapes), "transformers": transformers.__version__}
    save_file(arrays, FIXTURES / f"{name}.safetensors", metadata)


for case in sys.argv[1:] or CASES:
    record(case)
