"""The page at /, driven in Chromium or Chrome before the scripted model."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest

sync_api = pytest.importorskip("playwright.sync_api", reason="needs playwright")

BROWSERS = ["chromium", "chromium-browser", "google-chrome"]
MARKDOWN = r"""# A *title*

**bold**, _it_, `a_b`, snake_case_name, 2 * 3 * 4, \*kept\*, <script>x()</script>
next line, https://example.org/x_y. [good](https://example.org/a_(b)) [bad](javascript:x())

3. first
4. second
   - inner
* third

> quoted

| a | b |
| :-- | --: |
| 1 \| 2 | `3` |

```python
def f():
    return 1
```
---
```
no end"""
ELEMENTS = (
    "<h1>A <em>title</em></h1>"
    "<p><strong>bold</strong>, <em>it</em>, <code>a_b</code>, snake_case_name, 2 * 3 * 4, *kept*, "
    "&lt;script&gt;x()&lt;/script&gt;\n"
    'next line, <a href="https://example.org/x_y" target="_blank" rel="noopener noreferrer">'
    "https://example.org/x_y</a>. "
    '<a href="https://example.org/a_(b)" target="_blank" rel="noopener noreferrer">good</a> '
    "[bad](javascript:x())</p>"
    '<ol start="3"><li>first</li><li>second<ul><li>inner</li></ul></li></ol>'
    "<ul><li>third</li></ul>"
    "<blockquote><p>quoted</p></blockquote>"
    '<div class="table"><table><thead><tr>'
    '<th style="text-align: start;">a</th><th style="text-align: end;">b</th></tr></thead><tbody>'
    '<tr><td style="text-align: start;">1 | 2</td>'
    '<td style="text-align: end;"><code>3</code></td></tr></tbody></table></div>'
    '<div class="block"><pre><code>def f():\n    return 1</code></pre>'
    '<button type="button">Copy</button></div><hr>'
    '<div class="block"><pre><code>no end</code></pre><button type="button">Copy</button></div>'
)


@pytest.fixture(scope="module")
def browser() -> Iterator[Any]:
    found = next(filter(None, map(shutil.which, BROWSERS)), None)
    assert found, f"none of {', '.join(BROWSERS)} is there"
    with sync_api.sync_playwright() as playwright:
        started = playwright.chromium.launch(executable_path=found, args=["--no-sandbox"])
        yield started
        started.close()


@pytest.fixture
def page(browser, server) -> Iterator[Any]:
    context = browser.new_context(viewport={"width": 1280, "height": 800})
    page = context.new_page()
    errors: list[str] = []
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.on("console", lambda message: errors.append(message.text))
    page.goto(server.url.removesuffix("/v1") + "/")
    page.wait_for_selector("#examples button")
    yield page
    assert [error for error in errors if not error.startswith("Failed to load")] == []
    context.close()


def ask(page: Any, text: str) -> None:
    page.fill("#input", text)
    page.click("#send")
    wait(page)


def wait(page: Any) -> None:
    """Until the answer has ended."""
    page.wait_for_selector(".turn.assistant:last-child > .tools")


def messages(page: Any) -> list[list[str]]:
    return page.evaluate("() => chat.messages.map((one) => [one.role, one.content])")


def test_an_answer_in_markdown_without_its_html(page):
    answer = MARKDOWN.replace("\n", "\\n")
    ask(page, "Say: " + answer)
    assert messages(page)[1] == ["assistant", MARKDOWN]
    assert page.inner_html(".assistant > .text") == ELEMENTS
    assert "tokens" in page.inner_text(".assistant .figures")


def test_blocks_that_have_arrived_stay(page):
    first, second = page.evaluate("""() => {
        const box = document.createElement("div");
        showMarkdown(box, "one\\n\\ntwo");
        const [kept, changed] = box.children;
        showMarkdown(box, "one\\n\\ntwo more\\n\\nthree");
        return [box.children[0] === kept, box.children[1] === changed];
    }""")
    assert (first, second) == (True, False)


@pytest.mark.parametrize("text", [">" * 5000, "- " * 5000 + "x", "*a " * 20000, "[" * 20000])
def test_hostile_markdown_is_shown_in_time(page, text):
    shown, milliseconds = page.evaluate(
        """(text) => {
            const box = document.createElement("div"), began = performance.now();
            showMarkdown(box, text);
            return [box.textContent.length, performance.now() - began];
        }""",
        text,
    )
    assert shown > 0 and milliseconds < 2000


def test_conversations_outlive_a_reload_and_are_edited(page):
    ask(page, "Say: one")
    ask(page, "Say: two")
    page.reload()
    page.wait_for_selector(".turn")
    assert [text for _, text in messages(page)] == ["Say: one", "one", "Say: two", "two"]
    page.evaluate(
        "chat.messages.forEach((one) => { one.content += '\\n\\nmore'.repeat(40); }); show(chat)"
    )
    assert page.evaluate("$('log').scrollTop + $('log').clientHeight >= $('log').scrollHeight - 1")
    page.reload()
    page.click("text=Regenerate")
    wait(page)
    assert [text for _, text in messages(page)] == ["Say: one", "one", "Say: two", "two"]
    page.click(".user >> nth=0 >> text=Edit")
    page.fill(".editing textarea", "Say: three")
    page.click(".editing >> text=Send")
    wait(page)
    assert messages(page) == [["user", "Say: three"], ["assistant", "three"]]
    page.click("#new")
    assert messages(page) == [] and page.locator(".chat").count() == 1
    page.click(".chat button >> nth=0")
    assert page.inner_text(".assistant > .text") == "three"
    page.on("dialog", lambda dialog: dialog.accept())
    page.click(".chat .delete")
    assert messages(page) == [] and page.locator(".chat").count() == 0


def test_settings_are_sent_and_what_is_empty_is_not(page, server):
    ask(page, "Say: plain")
    page.click("#open-settings")
    page.fill("#system", "Be brief.")
    page.fill("#top_p", "0.5")
    page.click("#close-settings")
    page.reload()
    page.wait_for_selector(".turn")
    ask(page, "Say: set")
    bodies = [one["body"] for one in server.requests() if one["path"].endswith("completions")][-2:]
    assert not {"temperature", "top_p", "max_tokens"} & bodies[0].keys()
    assert bodies[0]["messages"] == [{"role": "user", "content": "Say: plain"}]
    assert bodies[1]["top_p"] == 0.5 and bodies[1]["messages"][0]["role"] == "system"


def test_an_error_is_shown_and_the_next_question_asked(page):
    page.evaluate("$('temperature').value = 9")
    ask(page, "Say: never")
    assert "temperature" in page.inner_text(".assistant .figures.error")
    page.evaluate("$('temperature').value = ''")
    ask(page, "Say: again")
    assert messages(page) == [["user", "Say: again"], ["assistant", "again"]]


def test_a_phone(browser, server):
    context = browser.new_context(viewport={"width": 390, "height": 844}, has_touch=True)
    page = context.new_page()
    page.goto(server.url.removesuffix("/v1") + "/")
    page.wait_for_selector("#examples button")
    assert page.get_attribute("#input", "placeholder") == "Message"
    ask(page, "Say: " + "x" * 400)
    assert page.evaluate("document.documentElement.scrollWidth <= innerWidth")
    assert not page.is_visible("#new")
    page.click("#menu")
    page.click("#new")
    assert not page.is_visible("#new") and messages(page) == []
    context.close()
