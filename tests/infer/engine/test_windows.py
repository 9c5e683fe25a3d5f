"""Where every layer has a window, pages before it go back while a request runs."""

from swiftkv_jax.infer.engine.page_pool import RELEASED, PagePool
from tests.infer.engine.test_page_pool import taken
from tests.infer.engine.test_scheduler import answers, ask, check_empty, prompt_of
from tests.infer.mock_model_runner import continuation, mock_engine

# The pool ---------------------------------------------------------------------


def test_pages_that_no_token_sees_are_released_once():
    pool = PagePool(4, 4, window=6)
    pages = taken(pool, 4)
    other = pool.share_pages(pages[:2])
    pool.release_hidden(pages, 12)
    pool.release_hidden(pages, 12)
    assert pages == [RELEASED, *pages[1:]] and pool.used == 4  # `other` has the first page
    pool.release(other)
    assert pool.used == 3
    pool.release_hidden(pages, 15)
    pool.release(pages)
    assert pool.used == 0


# The engine -------------------------------------------------------------------


def test_a_long_answer_holds_the_pages_of_its_window():
    """Without a window 15 pages; with one of 8 positions those of the window, of the two calls in
    flight, and one that is begun."""
    engine, runner = mock_engine(window=8, page_size=4, steps=2, reserve_tokens=2)
    engine.add_request(ask(prompt_of(1, 20), 40, ignore_eos=True))
    held = []
    while engine.has_work:
        engine.step()
        held.append(engine.pages_in_use)
    assert max(held[3:]) <= 5 < 60 // 4
    check_empty(engine)


def test_more_requests_run_where_pages_go_back():
    """Four answers of 60 tokens in 40 pages of 4: 60 pages without a window. None is preempted."""

    def preemptions(window: int | None) -> int:
        engine, _ = mock_engine(
            window=window, num_pages=40, max_model_len=80, steps=2, reserve_tokens=2
        )
        prompts = [prompt_of(number, 20) for number in range(4)]
        found = answers(engine, [ask(prompt, 60, ignore_eos=True) for prompt in prompts])
        for number, prompt in enumerate(prompts):
            assert found[number, 0] == continuation(prompt, 60, ends=False)
        check_empty(engine)
        return engine.stats.preemptions

    assert preemptions(8) == 0 < preemptions(None)


def test_an_answer_is_found_again_without_its_beginning():
    """The next turn of a chat needs the last pages only; those before may hold anything."""
    engine, _ = mock_engine(window=8, num_pages=16, steps=2, reserve_tokens=2)
    prompt = prompt_of(1, 21)
    whole = prompt + answers(engine, [ask(prompt, 20, ignore_eos=True)])[0, 0]
    other = prompt_of(2, 21)  # writes over the free pages, and the cached ones of the longest ago
    answers(engine, [ask(other, 20, ignore_eos=True)])
    before = engine.prefix_stats.hits
    following = [*whole, 5, 6, 7]
    assert answers(engine, [ask(following, 9)])[0, 0] == continuation(following, 9)
    assert engine.prefix_stats.hits - before == 40  # the last token was never an input
    check_empty(engine)
