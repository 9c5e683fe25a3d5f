"""The order in which cuts are measured, on made-up numbers."""

from types import SimpleNamespace
from typing import Any

import pytest

from swiftkv_jax.calibration import LayerFit
from swiftkv_jax.errors import ConfigError
from swiftkv_jax.train.analysis import cut_search
from swiftkv_jax.train.analysis.cut_search import dips, search
from swiftkv_jax.train.analysis.recommendation import Budget
from tests.train.test_recommendation import cut

LAYERS = 30


def fits(k: int, r2: dict[int, float]) -> list[LayerFit]:
    return [LayerFit(layer, r2.get(layer, 0.97), 0.9, 1, 1) for layer in range(k, LAYERS)]


class Made:
    """A sweep of a model whose losses fall by half with each layer. A tap is worth 1.4 layers, each
    prompt layer half of one, an exact head 0.3; groups and `boundary` cost two layers each. Keys
    dip below K = 17."""

    config = SimpleNamespace(num_layers=LAYERS)
    init = "closed-form"
    far_tokens = 1000

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        """(K, M, taps), and 1 with an exact head."""

    def at(self, k, g=1, generated="boundary", layers=0, taps=0, head=0):
        if layers and layers >= LAYERS - k:
            raise ConfigError(f"prompt_attention_layers={layers}")
        return SimpleNamespace(k=k, layers=layers, taps=taps, head=head, generated=generated, g=g)

    def cost(self, cut):
        return (cut.k + 0.7 * cut.layers + 0.2 * cut.taps) / LAYERS

    def improved_starts(self, k, generated):
        for layers in range(min(4, LAYERS - k)):
            gain = 0.01 * layers
            yield (
                layers,
                [SimpleNamespace(layers=self.r2(k, gain + 0.015 * taps)) for taps in (0, 1)],
            )

    def r2(self, k, gain=0.0):
        dip = {17: 0.90 + 2 * gain, 18: 0.87 + 2 * gain} if k < 17 else {}
        return fits(k, dict.fromkeys(range(LAYERS), 0.94 + gain) | dip)

    def measure(self, cut_, start):
        assert cut_.head or not (cut_.layers or cut_.taps)
        self.asked.append((cut_.k, cut_.layers, cut_.taps, cut_.head)[: 3 + cut_.head])
        lost = 0.02 * 2 ** (20.5 - cut_.k - 0.3 * cut_.head - 1.4 * cut_.taps - 0.5 * cut_.layers)
        lost *= 4 ** ((cut_.g > 1) + (cut_.generated == "boundary"))
        return cut(
            cut_.k,
            self.cost(cut_),
            lost,
            lost,
            key_value_group_size=cut_.g,
            prompt_attention_layers=cut_.layers,
            boundary_taps=cut_.taps,
            exact_head=cut_.head,
            generated_kv=cut_.generated,
            layers=start.layers,
        )


@pytest.fixture
def made(monkeypatch) -> Any:
    sweep = Made()

    def measure_all(sweep, cuts):
        return [
            sweep.measure(sweep.at(k, g, where), SimpleNamespace(layers=sweep.r2(k)))
            for k, g, where in cuts
        ]

    monkeypatch.setattr(cut_search, "measure_all", measure_all)
    return sweep


def test_from_all_cuts_to_the_edge_of_the_budget(made):
    grid = [(k, 1) for k in (11, 15, 19, 22, 26)]
    found = search(made, grid, ("own",), Budget(0.02, None), named=False)
    assert made.asked == [
        *((k, 0, 0) for k, _ in grid),
        *[(20, 0, 0), (21, 0, 0)],  # bisection: K = 21 is within the budget
        *[(20, 0, 0, 1), (20, 0, 1, 1)],  # within the budget: no prompt layers
        *[(19, 0, 0, 1), (19, 0, 1, 1)],  # those without a tap explain less than that with one
        (18, 0, 0),
        *[(18, 0, 0, 1), (18, 0, 1, 1), (18, 1, 1, 1)],  # two prompt layers cost too much
        *[(15, 0, 0, 1), (15, 0, 1, 1), (15, 1, 1, 1), (15, 2, 1, 1), (15, 3, 1, 1)],  # the dip
    ]
    assert len(found) == len(made.asked)
    assert found == sorted(found, key=lambda cut: cut.num_key_value_layers)


def test_no_other_cuts_than_those_named(made):
    search(made, [(20, 1), (22, 1)], ("own",), Budget(0.02, None), named=True)
    assert made.asked == [(20, 0, 0), (22, 0, 0), (20, 0, 0, 1), (20, 0, 1, 1)]


@pytest.mark.parametrize("above", [1, 2, 3, 4])
def test_no_more_prompt_layers_than_the_cut_allows(above, made):
    """Nothing is within the budget, so all of them are tried."""
    k = LAYERS - above
    search(made, [(k, 1)], ("own",), Budget(1e-9, None), named=True)
    tried = [(k, layers, taps, 1) for layers in range(above) for taps in (0, 1)]
    assert made.asked[0] == (k, 0, 0)
    assert {layers for _, layers, *_ in made.asked} == set(range(above))
    assert set(made.asked[1:]) <= set(tried)


def test_groups_are_measured_for_boundary_alone(made):
    """And the search goes on from the students without groups that are served as `own`."""
    search(made, [(22, 1)], ("own",), Budget(0.02, None), named=False)
    _, *alone = made.asked
    made.asked.clear()
    search(made, [(22, 1), (22, 2)], ("own", "boundary"), Budget(0.02, None), named=False)
    assert made.asked == [*[(22, 0, 0)] * 3, *alone]


def test_too_few_far_tokens_do_not_count(made):
    made.far_tokens = 10
    search(made, [(20, 1), (22, 1)], ("own",), Budget(0.02, 1e-9), named=True)
    assert (20, 0, 1, 1) in made.asked, "22 is within the budget"


@pytest.mark.parametrize(
    ("r2", "expected"),
    [
        ({17: 0.90, 18: 0.87}, [17, 18]),
        ({}, []),
        ({layer: 0.99 - 0.02 * layer for layer in range(15, 30)}, []),  # it falls with depth
        ({29: 0.5}, []),
        ({15: 0.5}, []),
        ({20: 0.945}, []),
    ],
)
def test_dips(r2, expected):
    assert [fit.layer for fit in dips(fits(15, r2))] == expected
