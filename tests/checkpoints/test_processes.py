"""Two processes on this machine, one device each: what they write together is what one writes
alone."""

from pathlib import Path

import pytest

from swiftkv_jax import save_hf
from tests.checkpoints.hf_models import biased_model
from tests.two_processes import run_together

WORK = """
    import importlib.util, os
    from pathlib import Path
    import jax.experimental.multihost_utils
    index, here, out = int(sys.argv[2]), sys.argv[3], Path(sys.argv[4])
    from swiftkv_jax import save_hf
    from swiftkv_jax.model.mesh import make_mesh
    from swiftkv_jax.model.sharding import llama_shardings, swiftkv_shardings
    from swiftkv_jax.train.run.checkpointing import RunCheckpoints
    from swiftkv_jax.train.run.step import TrainState
    spec = importlib.util.spec_from_file_location("test_processes", here)
    tests = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tests)

    mesh, model = make_mesh((1, 2)), tests.biased_model()
    def put_leaf(x, sharding):
        return jax.make_array_from_callback(x.shape, sharding, lambda i: x[i])
    put = lambda tree, shardings: jax.tree.map(put_leaf, tree, shardings)
    llama = put(model.llama, llama_shardings(model.config, mesh))
    delta = put(model.swiftkv, swiftkv_shardings(model.config, mesh))
    assert not llama.embed.is_fully_addressable
    together = model.replace(llama=llama, swiftkv=delta)
    for format in ("full", "delta"):
        save_hf(together, out / format, format=format)

    everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    step = lambda number: put(jax.numpy.int32(number), everywhere)
    state = TrainState(step(0), delta, ())
    shapes = jax.eval_shape(lambda: state)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, state)
    for resume, found in ("never", None), ("auto", 3), (2, 2), ("auto", 1):
        checkpoints = RunCheckpoints(out / "run", {}, keep=3, resume=resume)
        state = checkpoints.restore(shapes, shardings)
        assert found is None if state is None else int(state.step) == found
        for number in (1, 2, 3) if state is None else ():
            checkpoints.save(TrainState(step(number), delta, ()))
        checkpoints.close()
        if found == 2 and index == 0:  # what only process 1 reads
            files = (out / "run/checkpoints/2").rglob("ocdbt.process_1/d/*")
            os.truncate(max(files, key=lambda file: file.stat().st_size), 40)
        jax.experimental.multihost_utils.sync_global_devices("damaged")
"""


@pytest.fixture(scope="module")
def together(tmp_path_factory) -> Path:
    """Where both processes have written."""
    out = tmp_path_factory.mktemp("together")
    run_together(WORK, __file__, str(out), folder=out, seconds=60)
    return out


@pytest.mark.long
@pytest.mark.parametrize("format", ["full", "delta"])
def test_an_export_is_that_of_one_process(together, tmp_path, format):
    save_hf(biased_model(), tmp_path / format, format=format)
    files = sorted(path.name for path in (tmp_path / format).iterdir())
    assert files == sorted(path.name for path in (together / format).iterdir())
    for name in files:
        assert (together / format / name).read_bytes() == (tmp_path / format / name).read_bytes()


@pytest.mark.long
def test_they_continue_together_also_past_damage_that_one_of_them_sees(together):
    for kind, step in (
        ("checkpoints", "1"),
        ("checkpoints-replaced", "3"),
        ("checkpoints-damaged", "2"),
    ):
        assert [path.name for path in (together / "run" / kind).iterdir()] == [step]
