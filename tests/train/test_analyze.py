"""The analysis of cuts: equal to building each student and running it, in three programs; and its
command."""

import json
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from swiftkv_jax import Config, Model, add_swiftkv
from swiftkv_jax.attention import Attention
from swiftkv_jax.initialization import init_llama
from swiftkv_jax.mesh import make_mesh
from swiftkv_jax.sharding import batch_sharding, llama_shardings
from swiftkv_jax.train import analyze, sweep
from swiftkv_jax.train.distill import Objective, distill_sums
from swiftkv_jax.train.sweep import Analysis, CutResult, analyze_cuts, possible_cuts
from swiftkv_jax.transformer import Batch, run_lower_layers, teacher

CONFIG = Config(
    vocab_size=61,
    embed_dim=32,
    mlp_dim=48,
    num_layers=6,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    attention_bias=True,
)
LLAMA = init_llama(CONFIG, jax.random.key(0), scale=0.3)
CUTS = possible_cuts(6, range(1, 6), (1, 2, 4))
FLAGS = ["--rows", "2", "--max-length", "64", "--cuts", "50,75", "--groups", "1,2"]


def packed_batch(seed: int) -> Batch:
    """Rows with two documents and some padding."""
    tokens = jax.random.randint(jax.random.key(seed), (4, 16), 0, CONFIG.vocab_size)
    at = jnp.broadcast_to(jnp.arange(16), (4, 16))
    segments = jnp.where(at < 7, 1, jnp.where(at < 13, 2, 0))
    mask = ((at != 6) & (at < 12)).astype(jnp.float32)
    return Batch(tokens, jnp.where(at < 7, at, at - 7) * (segments > 0), segments, mask)


BATCHES = [packed_batch(1), packed_batch(2)]


PROGRAMS: tuple[Any, ...] = (sweep.teacher_states, sweep.cosine_sums, sweep.cut_sums)
direct_sums: Any = jax.jit(distill_sums, static_argnums=0, static_argnames="objective")


@pytest.fixture(scope="module")
def analysis() -> Analysis:
    for program in PROGRAMS:
        program.clear_cache()
    return analyze_cuts(CONFIG, LLAMA, BATCHES, CUTS, prompt_length=100, attention=Attention())


def test_possible_cuts():
    assert CUTS == [(1, 1), (2, 1), (2, 2), (2, 4), (3, 1), (4, 1), (4, 2), (5, 1)]


def test_all_cuts_take_three_programs(analysis):
    assert [program._cache_size() for program in PROGRAMS] == [1, 1, 1]


@pytest.mark.parametrize(("k", "g"), [(1, 1), (2, 4), (4, 2), (5, 1)])
def test_a_cut_equals_its_student(k, g, analysis):
    cut = analysis.cuts[CUTS.index((k, g))]
    assert (cut.num_key_value_layers, cut.key_value_group_size) == (k, g)
    student = add_swiftkv(Model(llama=LLAMA, swiftkv=None, config=CONFIG), k, g)
    sums = [
        direct_sums(
            student.config, student.swiftkv, student.llama, b, objective=Objective(temperature=1.0)
        )
        for b in BATCHES
    ]
    expected = jax.tree.map(lambda *parts: float(sum(parts)), *sums)
    np.testing.assert_allclose(cut.kl, expected.kl / expected.targets, rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(cut.agreement, expected.agreement / expected.targets, rtol=1e-6)
    np.testing.assert_allclose(
        np.log(cut.student_perplexity), expected.student_nll / expected.targets, rtol=1e-4
    )
    np.testing.assert_allclose(
        np.log(analysis.teacher_perplexity), expected.teacher_nll / expected.targets, rtol=1e-4
    )
    assert analysis.tokens == expected.targets


def test_costs(analysis):
    """K = 2 of 6 layers in pairs: 2 layers and 2 projections against 5 layers and 1; 4 cache layers
    against 6."""
    cut = analysis.cuts[CUTS.index((2, 2))]
    assert cut.kv_bytes_per_token == 4 * 2 * 2 * 8 * 4
    assert cut.kv_bytes_share == pytest.approx(4 / 6)
    assert 2 / 5 < cut.prefill_flops_share < 3 / 6


def test_similarity_is_the_mean_cosine_of_real_tokens(analysis):
    """The embedding, the input of layer 3 and the last layer's output, in float64."""
    model = add_swiftkv(Model(llama=LLAMA, swiftkv=None, config=CONFIG), 3)
    cosines, real = np.zeros((3, 3)), 0
    for batch in BATCHES:
        states = [
            LLAMA.embed[batch.tokens],
            run_lower_layers(model.config, model.llama, batch)[0],
            teacher(CONFIG, LLAMA, batch),
        ]
        units = np.stack(
            [x / np.linalg.norm(x, axis=-1, keepdims=True) for x in np.asarray(states, np.float64)]
        )
        keep = np.asarray(batch.segment_ids) > 0
        cosines, real = (
            cosines + np.einsum("iBTD,jBTD,BT->ij", units, units, keep),
            real + keep.sum(),
        )
    np.testing.assert_allclose(
        np.array(analysis.similarity)[np.ix_([0, 3, 6], [0, 3, 6])], cosines / real, atol=1e-5
    )


def test_a_mesh_gives_the_same(analysis):
    mesh = make_mesh((2, 2))
    llama = jax.device_put(LLAMA, llama_shardings(CONFIG, mesh))
    batches = [jax.device_put(batch, batch_sharding(mesh)) for batch in BATCHES]
    ours = analyze_cuts(CONFIG, llama, batches, CUTS, prompt_length=100, attention=Attention(mesh))
    np.testing.assert_allclose(
        [cut.kl for cut in ours.cuts], [cut.kl for cut in analysis.cuts], rtol=1e-4, atol=1e-6
    )
    np.testing.assert_allclose(ours.similarity, analysis.similarity, atol=1e-5)


# The command ------------------------------------------------------------------


def test_the_command_on_the_demo_model(tmp_path, capsys):
    text = tmp_path / "code.txt"
    text.write_text("def f(x):\n    return x + 1\n\n\n" * 20)
    assert analyze.main(["--data", str(text), "--output-dir", str(tmp_path / "out"), *FLAGS]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "teacher's perplexity" in lines[0]
    assert [line.split()[:3] for line in lines[3:]] == [
        ["4", "50.0%", "1"],
        ["4", "50.0%", "2"],
        ["6", "75.0%", "1"],
        ["6", "75.0%", "2"],
    ]
    assert len({len(line) for line in lines[1:]}) == 1, "columns line up"
    result = json.loads((tmp_path / "out" / "analysis.json").read_text())
    assert (
        result["prompt_length"] == 1024
        and result["data"] == [str(text)]
        and np.shape(result["similarity"]) == (9, 9)
    )
    assert [CutResult(**cut).num_key_value_layers for cut in result["cuts"]] == [4, 4, 6, 6]
    assert (tmp_path / "out" / "analysis.png").read_bytes().startswith(b"\x89PNG")


def test_without_matplotlib_there_is_no_picture(tmp_path, monkeypatch, log, analysis):
    monkeypatch.setattr(analyze, "matplotlib_missing", lambda: "pip install it")
    analyze.write(tmp_path, analysis, {})
    assert [file.name for file in tmp_path.iterdir()] == ["analysis.json"]
    assert "no analysis.png: pip install it" in log.messages


def test_cuts_in_percent():
    assert analyze.parse_cuts("25, 37.5,50", 32) == [8, 12, 16]
    assert analyze.parse_cuts("1,99", 8) == [1, 7]
    assert analyze.parse_cuts("all", 4) == [1, 2, 3]


BAD_FLAGS = {
    "cuts": ("--cuts half", "--cuts 'half': expected percentages"),
    "cuts out of range": ("--cuts 0,50", "every percentage must be between 0 and 100"),
    "groups": ("--groups 1,0", "--groups '1,0': expected whole numbers from 1"),
    "no group fits": ("--cuts 50 --groups 3", "--groups 3: none divides"),
    "rows": ("--rows 0", "--rows 0: must be at least 1"),
    "rows too long": ("--max-length 1025", "--max-length 1025: this model has 1024 positions"),
    "prompt too long": (
        "--prompt-length 2000",
        "--prompt-length 2000: this model has 1024 positions",
    ),
    "model alone": ("--model somewhere", "--model also needs --data"),
}


@pytest.mark.parametrize("case", BAD_FLAGS)
def test_bad_flags_are_one_line(case, tmp_path, capsys):
    flags, message = BAD_FLAGS[case]
    assert analyze.main([*flags.split(), "--output-dir", str(tmp_path)]) == 2
    error = capsys.readouterr().err.splitlines()
    assert len(error) == 1 and error[0].startswith("error: ") and message in error[0]
