"""`--cuts`: percentages, numbers of layers, and what may be either."""

import pytest

from swiftkv_jax.errors import UsageError
from swiftkv_jax.train.analysis.cut_list import parse_cuts


@pytest.mark.parametrize(
    ("text", "num_layers", "cuts"),
    [
        ("25%,37.5%, 50%", 32, [8, 12, 16]),
        ("25, 37.5,50", 32, [8, 12, 16]),  # 37.5 layers there are not
        ("25,50", 32, [8, 16]),  # nor 50
        ("50", 8, [4]),
        ("1,99", 8, [1, 7]),
        ("3%", 8, [1]),
        ("K=3,50%,k=7", 8, [3, 4, 7]),
        ("K=3,50", 8, [3, 4]),
        ("all", 4, [1, 2, 3]),
    ],
)
def test_cuts(text, num_layers, cuts):
    assert [cut.k for cut in parse_cuts(text, num_layers)] == cuts


def test_each_cut_in_words():
    assert list(map(str, parse_cuts("25, 37.5%,k=3", 8))) == ["25% is K=2", "37.5% is K=3", "K=3"]


@pytest.mark.parametrize(
    ("text", "num_layers", "message"),
    [
        ("3", 8, "3 layers, or 3 % of the 8[?] Write K=3 or 3%"),
        ("50", 80, "50 layers, or 50 % of the 80[?] Write K=50 or 50%"),
        ("50%,5", 8, "5 layers, or 5 % of the 8[?] Write K=5 or 5%"),
        ("half", 8, "expected percentages of the layers .50%., numbers of layers .K=3., or all"),
        ("50%,", 8, "expected percentages"),
        ("x%", 8, "expected percentages"),
        ("0,50", 8, "every percentage must be between 0 and 100"),
        ("100%", 8, "every percentage must be between 0 and 100"),
        ("nan", 8, "every percentage must be between 0 and 100"),
        ("K=8", 8, "K must be from 1 to 7"),
        ("K=0", 8, "K must be from 1 to 7"),
        ("K=x", 8, "K must be from 1 to 7"),
    ],
)
def test_what_is_refused(text, num_layers, message):
    with pytest.raises(UsageError, match=f"`cuts`='.*': {message}"):
        parse_cuts(text, num_layers)
