"""One vocabulary: words that the glossary of docs/architecture.md has replaced do not come back."""

import ast
import io
import re
import tokenize
from pathlib import Path

import pytest

from tests.sources import FILES, ROOT, nodes

# Retired word -> the field's word. Parts of a name count too: `num_lanes` has `lanes`.
RETIRED = {
    "believe": "the subject's own verb",
    "believes": "the subject's own verb",
    "cancel": "abort_request",
    "edit": "apply_penalties",
    "floors": "roofline",
    "hears": "is notified of",
    "journal": "metrics",
    "knows": "has",
    "leaving": "pending_removals",
    "lives": "is on",
    "piece": "query tile, segment or tensor",
    "pieces": "query tiles, segments or tensors",
    "placement": "batch_sharder",
    "placements": "shardings",
    "recovery": "checkpointing",
    "sidefile": "auxiliary file",
    "sidefiles": "auxiliary files",
    "spans": "scheduled_tokens",
    "stranger": "independent",
    "told": "given",
    "took": "record",
    "wants": "needs",
    "anybody": "the subject",
    "anyone": "the subject",
    "bundle": "model",
    "everybody": "the subject",
    "everyone": "the subject",
    "nobody": "the subject",
    "obstacle": "unsupported_reason",
    "overtaken": "num_times_skipped",
    "patience": "max_skips",
    "probe": "layer_hook",
    "recut": "with_split",
    "rival": "baseline",
    "rivals": "baselines",
    "somebody": "the subject",
    "strangers": "independent",
    "survey": "scan",
    "tapped": "hidden_state_layer",
    "unseen": "in_flight",
    "whoever": "the subject",
}
RETIRED_NAMES = {
    "block_size": "page_size",
    "blockpool": "PagePool",
    "end_ids": "eos_token_ids",
    "load_hf_config": "config_from_hf",
    "log_once": "logger.info",
    "no_report": "empty_logprobs",
    "of_process_0": "from_process_0",
    "on_process_0": "from_process_0",
    "pack_spans": "pack_chunk",
    "span_of": "scheduled_tokens",
    "to_pieces": "reduce_scatter",
    "wait_for_all": "barrier",
    "_wait_for_all": "barrier",
    "allow_most_of_a_gpu": "set_gpu_memory_fraction",
    "block_table": "page_table",
    "boundary_norm": "norm_swiftkv",
    "engine_for": "Engine.from_model",
    "finish_layer": "output_and_mlp",
    "keep_compiled": "enable_compilation_cache",
    "lay_out": "constrain_activations",
    "num_lanes": "dp_size",
    "settle_devices": "setup_devices",
    "side_files": "auxiliary_files",
    "spans_of": "scheduled_tokens",
    "tell_complete": "report_complete",
    "whole_rows": "unpacked_batch",
    "whole_vocabulary": "all_gather_vocabulary",
}
# Where a word has its own meaning in the field.
ALLOWED = {
    # Early stopping: Keras' and Hugging Face's `patience`.
    "patience": "train/",
    # A TPU's vector lanes and a warp's lanes.
    "lane": "pallas_kernels/",
    "lanes": "pallas_kernels/",
    # Character ranges of the targets in a text.
    "spans": "train/data/",
    # A keyword of `concurrent.futures`, a method of `asyncio` and of `threading.Timer`.
    "cancel": ("infer/runner/compilation", "serve/", "kernel_check/child"),
    # A label of vLLM's metrics, a field of its events.
    "block_size": ("serve/service/", "serve/distributed/kv_event"),
    # SentencePiece's own name of its tokens.
    "piece": ("checkpoints/spm_file", "checkpoints/tokenizer", "checkpoints/gguf/tokenizer"),
    "pieces": ("checkpoints/spm_file", "checkpoints/gguf/tokenizer"),
    # A masked key.
    "unseen": "pallas_kernels/",
}
# Phrases that plain pages do without, and what replaces them.
UNPLAIN = {
    "anybody": "the subject",
    "besides": "beyond, beside or also",
    "nobody": "the subject",
    "of its own": "separate, or its",
    "of their own": "separate, or their",
    "somebody": "the subject",
    "stranger": "independent",
    "that are not there": "ahead of time",
    "whoever": "the subject",
}
PLAIN_PAGES = [
    *("README.md", "CONTRIBUTING.md", "SECURITY.md"),
    *(f"docs/{path.name}" for path in (ROOT / "docs").glob("*.md") if "measure" not in path.name),
]
RETIRED |= {"lane": "dp_rank", "lanes": "dp_size"}


def words_of(path: Path) -> set[str]:
    """Names of the code, and the words of its comments and strings, in lower case."""
    found = set()
    for token in tokenize.generate_tokens(io.StringIO(path.read_text(encoding="utf-8")).readline):
        for name in re.findall(r"[A-Za-z_]\w*", token.string):
            parts = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
            found |= {name.lower(), *(part.lower() for part in parts)}
    return found


def test_retired_words_stay_away():
    found = []
    for path in FILES:
        where = path.relative_to(ROOT / "swiftkv_jax").as_posix()
        for word in sorted(words_of(path) & (RETIRED.keys() | RETIRED_NAMES.keys())):
            if not where.startswith(ALLOWED.get(word, "-")):
                found.append(f"{where}: {word!r}, now {(RETIRED | RETIRED_NAMES)[word]!r}")
    assert not found, "\n".join(found)


def test_the_glossary_names_what_replaced_them():
    """The words for things of the engine and its cache."""
    glossary = (ROOT / "docs/architecture.md").read_text(encoding="utf-8")
    words = ("page_table", "dp_rank", "dp_size", "norm_swiftkv", "Engine.from_model")
    for word in words:
        assert word in (RETIRED | RETIRED_NAMES).values() and word in glossary


@pytest.mark.parametrize("page", PLAIN_PAGES)
def test_pages_are_plain(page):
    """Outside of code. Lines may break within a phrase."""
    text = re.sub(r"```.*?```|`[^`]*`", "", (ROOT / page).read_text(encoding="utf-8"), flags=re.S)
    text = " ".join(text.lower().split())
    found = {one: word for one, word in UNPLAIN.items() if re.search(rf"\b{one}\b", text)}
    assert not found, found


def help_strings(path: Path) -> list[str]:
    """The arguments `help` and `description` of a module's calls."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.keyword) and node.arg in ("help", "description"):
            texts = (part.value for part in ast.walk(node.value) if isinstance(part, ast.Constant))
            found.append("".join(text for text in texts if isinstance(text, str)))
    return found


def test_help_is_plain():
    found = [
        f"{path.relative_to(ROOT)}: {text}"
        for path in FILES
        for text in help_strings(path)
        if any(re.search(rf"\b{phrase}\b", " ".join(text.split())) for phrase in UNPLAIN)
    ]
    assert not found, "\n".join(found)


def test_words_are_found_in_names_comments_and_strings(tmp_path):
    file = tmp_path / "example.py"
    file.write_text('num_lanes = 1  # nobody\nclass PagePool: ...\ntext = f"whoever {num_lanes}"\n')
    assert {"num_lanes", "lanes", "nobody", "whoever", "page", "pool"} <= words_of(file)


def test_a_statement_says_one_thing():
    """`a, b = x, y` is for what belongs together: at most three times in 1,000 lines."""
    pairs = sum(
        isinstance(node, ast.Assign)
        and isinstance(node.targets[0], ast.Tuple)
        and isinstance(node.value, ast.Tuple)
        for path in FILES
        for node in nodes(path)
    )
    lines = sum(len(path.read_text().splitlines()) for path in FILES)
    assert pairs <= 3 * lines / 1000


FRAGMENTS = set(
    "also as at before both by from if in it of on only so that these this those to what when "
    "where whether which while who whose with without".split()
)


def _documented(path: Path) -> list[tuple[int, str]]:
    """(line, docstring) of a module, its classes and functions, and of their fields."""
    found = []
    for node in nodes(path):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            texts = [node.body[0]] if ast.get_docstring(node) else []
        else:
            continue
        if not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            after = zip(node.body, node.body[1:], strict=False)
            texts += [
                text for field, text in after if isinstance(field, ast.AnnAssign | ast.Assign)
            ]
        for text in texts:
            if isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant):
                found.append((text.lineno, str(text.value.value)))
    return found


def test_docstrings_open_with_a_noun_or_a_verb():
    """Not with a pronoun, a preposition or a relative clause in the place of the thing."""
    fragments = [
        f"{path.relative_to(ROOT)}:{line}: {text.strip().partition(chr(10))[0]}"
        for path in FILES
        for line, text in _documented(path)
        if text.split()[0].strip('`".,:;').lower() in FRAGMENTS
    ]
    assert not fragments, "\n".join(fragments)
