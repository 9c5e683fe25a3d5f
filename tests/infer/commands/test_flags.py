"""Flags: which there are, and the options and sampling parameters that they make."""

import json
import logging
import shutil
from argparse import Namespace
from pathlib import Path

import swiftkv_jax as skv
from swiftkv_jax.cli.fields import given
from swiftkv_jax.infer import EngineOptions, SamplingParams
from swiftkv_jax.infer.__main__ import parser
from swiftkv_jax.infer.commands.sampling_options import sampling_params


def parsed(*argv: str) -> Namespace:
    return parser("generate").parse_args(argv)


def engine_options(*argv: str, **defaults) -> EngineOptions:
    return EngineOptions(**defaults | given(EngineOptions, parsed(*argv)))


def test_flags_become_options():
    flags = (
        "--kv-cache-memory 2m --gpu-memory-utilization 0.5 --max-num-batched-tokens 1k "
        "--no-prefix-caching --block-size 16 --compiler-option a=X,Y --compiler-option b=true"
    )
    expected = EngineOptions(
        kv_cache_memory=2 << 20,
        memory_utilization=0.5,
        max_num_batched_tokens=1024,
        enable_prefix_caching=False,
        page_size=16,
        compiler_options={"a": "X,Y", "b": True},
    )
    assert engine_options(*flags.split()) == expected
    assert engine_options("--max-num-seqs", "5", max_num_seqs=3).max_num_seqs == 5
    assert engine_options(max_num_seqs=3) == EngineOptions(max_num_seqs=3)


def test_flags_become_sampling():
    flags = (
        "--temp .5 --repeat-penalty 1.5 --max-new-tokens 9 --n 2 --min-p .1 --top-p .9 --top-k 4 "
        "--presence-penalty 1 --frequency-penalty -1 --seed 3 --logit-bias 5=-100 "
        "--logit-bias 6=2.5 --stop-token-ids 7,8 --min-tokens 2 --logprobs 3 --stop a --stop b "
        "--ignore-eos"
    )
    assert SamplingParams(**given(SamplingParams, parsed(*flags.split()))) == SamplingParams(
        temperature=0.5,
        repetition_penalty=1.5,
        max_tokens=9,
        n=2,
        min_p=0.1,
        top_p=0.9,
        top_k=4,
        presence_penalty=1,
        frequency_penalty=-1,
        seed=3,
        logit_bias={5: -100, 6: 2.5},
        stop_token_ids=(7, 8),
        min_tokens=2,
        logprobs=3,
        stop=("a", "b"),
        ignore_eos=True,
    )


def with_generation_config(checkpoint: Path, folder: Path, **fields) -> Path:
    path = folder / "model"
    shutil.copytree(checkpoint, path)
    (path / "generation_config.json").write_text(json.dumps(fields))
    return path


def test_sampling_defaults_are_those_of_the_checkpoint(checkpoint, tmp_path, caplog):
    caplog.set_level(logging.INFO, "swiftkv_jax")
    said = {
        "do_sample": True,
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 40,
        "repetition_penalty": 1.1,
    }
    model = skv.load(with_generation_config(checkpoint, tmp_path, **said))
    params = sampling_params({"top_k": 3}, model)
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (
        0.6,
        0.9,
        3,
        1.1,
    )
    assert "temperature 0.6, top_p 0.9, top_k 40, repetition_penalty 1.1" in caplog.text


def test_a_checkpoint_that_does_not_sample_is_greedy(checkpoint, tmp_path):
    model = skv.load(with_generation_config(checkpoint, tmp_path, do_sample=False, temperature=0.6))
    assert sampling_params({}, model) == SamplingParams()


def test_sampling_defaults_that_cannot_be(checkpoint, tmp_path, run, capsys):
    assert (
        run("-m", with_generation_config(checkpoint, tmp_path, do_sample=True, top_p=7), "-p", "x")
        == 4
    )
    assert (
        capsys.readouterr()
        .err.splitlines()[-1]
        .startswith("error: generation_config.json: top_p=7 must be")
    )
