"""Eight emulated CPU devices, and array shapes checked at run time in the modules that hold only
functions."""

import gc
import os
import signal

os.environ.setdefault("JAX_PLATFORMS", "cpu")
os.environ.setdefault("HF_HUB_OFFLINE", "1")  # mistyped paths are not looked for on the Hub
# Threads of XLA's CPU runtime: collectives between 8 devices need at least as many.
os.environ.setdefault("PJRT_NPROC", "32")

import jax
import pytest
from jaxtyping import install_import_hook
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

# Processes that tests start inherit whether SIGINT is ignored, as it is where pytest runs in the
# background.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)
jax.config.update("jax_num_cpu_devices", 8)
# The Makefile's cache of compiled programs is for the test processes themselves. JAX has read it;
# processes that tests start do without: some are killed, or find a full disk, while they write.
# Those that only end when all is compiled are given it.
if "PYTEST_XDIST_WORKER" in os.environ and "JAX_COMPILATION_CACHE_DIR" in os.environ:
    os.environ["TEST_PROGRAMS"] = os.environ.pop("JAX_COMPILATION_CACHE_DIR")

# Not the modules that define pytree dataclasses: the hook would also check what a transformation
# puts into their fields.
FUNCTION_MODULES = [
    "swiftkv_jax.model.layers",
    "swiftkv_jax.model.attention",
    "swiftkv_jax.pallas_kernels",
    "swiftkv_jax.infer.runner.decode_programs",
    "swiftkv_jax.infer.runner.prefill_programs",
    "swiftkv_jax.model.packed_attention",
    "swiftkv_jax.infer.sampling.logprobs",
    "swiftkv_jax.infer.sampling.penalties",
    "swiftkv_jax.infer.sampling.sampler",
    "swiftkv_jax.train.loss.divergence",
]
install_import_hook(FUNCTION_MODULES, "beartype.beartype")

# No test cuts the power, and a flush of hundreds of small files takes a second on some disks.
os.fsync = lambda descriptor: None

# Tracing makes many small objects that live; looking through all of them every time is a tenth of
# the tests' time.
gc.freeze()
gc.set_threshold(100_000, 20, 20)


TEXT = """def main(argv):
    for word in argv: print(word, "naïve café, 東京 and 🙂🙃")
"""


@pytest.fixture(scope="session")
def tokenizer() -> PreTrainedTokenizerFast:
    """320 tokens: <s> is put before every text, </s> ends one."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300,
        special_tokens=["<s>", "</s>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator([TEXT] * 3, trainer)
    bpe.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 0)])
    return PreTrainedTokenizerFast(tokenizer_object=bpe, bos_token="<s>", eos_token="</s>")


MAX_MAPPINGS = 20_000


@pytest.fixture(scope="module", autouse=True)
def compiled_programs_are_freed():
    """A program compiled for the CPU takes some memory mappings, of which Linux allows a process
    65,530; XLA crashes at the next one."""
    yield
    try:
        with open("/proc/self/maps") as file:
            mappings = sum(1 for _ in file)
    except OSError:  # not Linux
        return
    if mappings > MAX_MAPPINGS:
        jax.clear_caches()
        gc.collect()


LONGEST = [
    "tests/pallas_kernels/test_attention.py",
    "tests/infer/engine/test_engine.py",
    "tests/train/test_processes.py",
    "tests/train/test_run.py",
    "tests/infer/runner/test_programs.py",
    "tests/infer/test_generate.py",
    "tests/train/test_step.py",
    "tests/infer/test_processes.py",
    "tests/test_docs.py",
]
"""Files that take minutes. One process runs a file (`--dist loadfile`), so that its tests share
what they make; begun last, a long one would leave the others idle."""


def pytest_xdist_auto_num_workers() -> int:
    """Three processes for two processors: a third of the tests' time is waiting, for servers,
    disks and signals."""
    return (os.cpu_count() or 1) * 3 // 2


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """The longest files first."""
    mark_long_cases(config, items)

    def rank(item: pytest.Item) -> int:
        file = item.nodeid.partition("::")[0]
        return LONGEST.index(file) if file in LONGEST else len(LONGEST)

    items.sort(key=rank)


def mark_long_cases(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark the cases that `short` does not name as long. Raises `UsageError` for a name of no case,
    where whole files are collected."""
    kept = dict[tuple[str, ...], bool]()
    for item in items:
        if (marker := item.get_closest_marker("short")) is None:
            continue
        assert isinstance(item, pytest.Function)
        for case in marker.args:
            kept.setdefault((item.location[0], item.originalname, case), False)
        case = item.callspec.id
        kept[item.location[0], item.originalname, case] = True
        if case not in marker.args:
            item.add_marker(pytest.mark.long)
    if unknown := [name for name, found in kept.items() if not found]:
        if not any("::" in argument for argument in config.args):
            raise pytest.UsageError(f"`short` names cases that do not exist: {unknown}")
