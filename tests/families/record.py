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
from safetensors.numpy import save_file

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, NEW, PROMPT, tensor_for, tokens

TARGET = Path(__file__).parents[1] / "fixtures" / "families"


@torch.no_grad()
def record(name: str) -> None:
    hf = CASES[name]
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(hf))
        config = transformers.AutoConfig.from_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_config(
        config, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    for tensor, parameter in model.named_parameters():
        parameter.copy_(torch.from_numpy(tensor_for(hf, tensor, tuple(parameter.shape))))
    shapes = {tensor: list(parameter.shape) for tensor, parameter in model.named_parameters()}
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
    TARGET.mkdir(parents=True, exist_ok=True)
    save_file(arrays, TARGET / f"{name}.safetensors", metadata)


for case in sys.argv[1:] or CASES:
    record(case)
