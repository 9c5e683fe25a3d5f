"""Load what `save_hf` wrote with transformers, in the environment of `record.py`, and compare its
logits with the recorded ones:

    .venv/bin/python -m tests.families.write_exports FOLDER
    ENV/bin/python tests/families/check_exports.py FOLDER
"""

import sys
from pathlib import Path

import numpy as np
import torch  # pyright: ignore[reportMissingImports]
import transformers
from safetensors.numpy import load_file

sys.path.insert(0, str(Path(__file__).parent))
from cases import CASES, FIXTURES, tokens

failed = False
for case in CASES:
    model, found = transformers.AutoModelForCausalLM.from_pretrained(
        Path(sys.argv[1]) / case / "out",
        dtype=torch.float32,
        attn_implementation="eager",
        output_loading_info=True,
    )
    problems = [name for name, keys in found.items() if keys]
    with torch.no_grad():
        logits = model.eval()(torch.from_numpy(tokens()).long(), use_cache=False).logits.numpy()
    expected = load_file(FIXTURES / f"{case}.safetensors")["logits"]
    difference = float(np.abs(logits - expected).max())
    failed |= bool(problems) or not difference <= 2e-4
    print(f"{case:16} {type(model).__name__:24} {difference:.1e} {problems or ''}")
sys.exit(failed)
