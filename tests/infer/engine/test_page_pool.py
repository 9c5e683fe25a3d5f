"""The page pool: sharing, eviction, and no page is lost."""

import random

import pytest

from swiftkv_jax.infer.engine.page_pool import PagePool

TOKENS = list(range(100, 120))


def taken(pool: PagePool, count: int, shared=()) -> list[int]:
    pages = pool.reserve(shared, count)
    assert pages is not None
    return pages


def test_a_cached_prefix_is_found_page_by_page():
    pool = PagePool(8, 4)
    keys, pages = pool.keys(TOKENS[:10]), taken(pool, 3)
    assert len(keys) == 2  # the third page is not full
    pool.cache(keys, pages)
    assert pool.match(pool.keys(TOKENS)) == pages[:2]
    assert pool.match(pool.keys(TOKENS[:7])) == pages[:1]
    assert pool.match(pool.keys([1, *TOKENS])) == []
    assert pool.match(pool.keys(TOKENS[4:])) == []  # the same tokens elsewhere are other keys


def test_equal_tokens_with_different_salts_have_different_keys():
    pool = PagePool(8, 2)
    pool.cache(pool.keys(TOKENS[:4], "a"), taken(pool, 2))
    assert pool.match(pool.keys(TOKENS[:4], "b")) == []
    assert len(pool.match(pool.keys(TOKENS[:4], "a"))) == 2
    assert pool.match(pool.keys(TOKENS[:4])) == []


def test_the_longest_unused_page_is_evicted_first_and_the_end_before_the_beginning():
    pool = PagePool(4, 2)
    first, second = pool.keys(TOKENS[:4]), pool.keys(TOKENS[10:14])
    for keys in (first, second):
        pages = taken(pool, 2)
        pool.cache(keys, pages)
        pool.release(pages)
    assert pool.available == 4 and pool.used == 0
    taken(pool, 1)
    assert (
        len(pool.match(first)) == 1 and len(pool.match(second)) == 2 and pool.stats.evictions == 1
    )
    taken(pool, 1)
    assert len(pool.match(first)) == 0 and len(pool.match(second)) == 2


def test_pages_in_use_are_never_taken():
    pool = PagePool(4, 2)
    keys, pages = pool.keys(TOKENS[:4]), taken(pool, 2)
    pool.cache(keys, pages)
    assert pool.reserve([], 3) is None and pool.used == 2
    again = taken(pool, 2, pool.match(keys))
    assert again[:2] == pages and pool.available == 0
    pool.release(pages)
    assert pool.match(keys) == pages and pool.available == 0  # the other row still reads them
    pool.release(again)
    assert pool.available == 4


def test_a_reservation_does_not_count_what_it_shares_as_free():
    pool = PagePool(3, 2)
    pages = taken(pool, 2)
    pool.cache(pool.keys(TOKENS[:4]), pages)
    pool.release(pages)
    assert pool.reserve(pages, 2) is None  # one page besides the two it shares
    assert pool.available == 3
    assert pool.reserve(pages, 1) is not None


@pytest.mark.parametrize("seed", range(5))
def test_at_random(seed):
    """Rows of few different tokens come and go; pages are never lost, and a match always holds its
    tokens."""
    rng, pool = random.Random(seed), PagePool(24, 2)
    held: list[tuple[list[int], list[int]]] = []
    content: dict[int, tuple[int, ...]] = {}
    for _ in range(2000):
        if held and rng.random() < 0.5:
            pool.release(held.pop(rng.randrange(len(held)))[1])
            continue
        tokens = [rng.randrange(2) for _ in range(rng.randrange(2, 14))]
        keys = pool.keys(tokens)
        shared = pool.match(keys)
        for number, page in enumerate(shared):
            assert content[page] == tuple(tokens[: 2 * number + 2])
        pages = pool.reserve(shared, -(-len(tokens) // 2) - len(shared))
        if pages is not None:
            for number in range(len(shared), len(keys)):
                content[pages[number]] = tuple(tokens[: 2 * number + 2])
            pool.cache(keys, pages)
            held.append((tokens, pages))
        users = sum(len(set(pages)) for _, pages in held)
        assert len({page for _, pages in held for page in pages}) == pool.used <= users
    for _, pages in held:
        pool.release(pages)
    assert pool.available == 24 and pool.stats.evictions > 0
