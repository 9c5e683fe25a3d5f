"""Record what transformers computes from a GGUF file that `make real` fetches. It decodes the file
by a reader of its own; all of it runs in float32, in an environment of its own:

    python3.11 -m venv ENV
    ENV/bin/pip install torch==2.13.0 transformers==5.24.0 gguf==0.19.0 accelerate
    ENV/bin/python tests/real/record.py NAME FILE.gguf
"""

import json
import sys
from pathlib import Path

import torch  # pyright: ignore[reportMissingImports]
import transformers

TEXTS = (
    "The first bridge over the river was built of oak in 1472. It stood for more than two "
    "centuries, until the flood of 1688 carried away its middle; the arches that replaced it are",
    'def mean(values: list[float]) -> float:\n    """The arithmetic mean."""\n    if not values:\n'
    '        raise ValueError("empty")\n    return sum(values) / len(values)\n\n\ndef variance(',
)
NEW, TOP, EVERY = 16, 6, 8
TARGET = Path(__file__).parent / "references.json"


@torch.no_grad()
def record(file: Path) -> list[dict]:
    folder, name = str(file.parent), file.name
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder, gguf_file=name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, gguf_file=name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    found = []
    for text in TEXTS:
        ids = tokenizer(text)["input_ids"]
        out = model(torch.tensor([ids]))
        logits, greedy = out.logits[0], []
        positions = [*range(0, len(ids), EVERY)]
        best = logits[positions].topk(TOP)
        while len(greedy) < NEW:
            greedy.append(int(out.logits[0, -1].argmax()))
            out = model(torch.tensor([greedy[-1:]]), past_key_values=out.past_key_values)
        found.append(
            {
                "text": text,
                "ids": ids,
                "positions": positions,
                "logsumexp": [round(x, 4) for x in logits.logsumexp(-1).tolist()],
                "top_ids": best.indices.tolist(),
                "top_logits": [[round(x, 4) for x in line] for line in best.values.tolist()],
                "greedy": greedy,
            }
        )
    return found


if __name__ == "__main__":
    known = json.loads(TARGET.read_text()) if TARGET.exists() else {}
    known[sys.argv[1]] = record(Path(sys.argv[2]))
    lines = (f"{json.dumps(name)}: {json.dumps(known[name])}" for name in sorted(known))
    TARGET.write_text("{\n" + ",\n".join(lines) + "\n}\n")
