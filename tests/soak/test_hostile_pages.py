"""Text that would run or hide, in every place that a page shows: a browser executes none of it, asks no network, and
shows all of it."""

import pytest

from hostile_pages import PAGES
from paceline.io.escape import HIDDEN

EVERYTHING = """() => [
    document.title,
    ...Array.from(document.querySelectorAll("body, body *"), one => [
        ...Array.from(one.attributes, at => at.value),
        ...Array.from(one.childNodes, node => node.nodeType == 3 && one.tagName != "SCRIPT" ? node.data : ""),
    ]),
    ...Array.from(document.querySelectorAll("#data"), one => {
        const texts = []
        JSON.parse(one.textContent, (key, value) => { texts.push(key, typeof value == "string" ? value : "") })
        return texts
    }),
].flat(9)"""
"""Texts and attributes of a page, and the texts that its script draws."""


@pytest.fixture(scope="module", params=PAGES)
def page_file(request, tmp_path_factory):
    return request.param, PAGES[request.param](tmp_path_factory.mktemp("hostile"))


def test_nothing_that_was_read_runs_in_a_page(browser, page_file):
    _, path = page_file
    context = browser.new_context()
    page, asked = context.new_page(), []
    page.on("request", lambda request: asked.append(request.url))
    page.on("dialog", lambda dialog: dialog.dismiss())
    page.goto(path.as_uri())
    page.wait_for_selector("html[data-drawn]", state="attached", timeout=100_000)
    for link in page.locator("a[href]").all():
        assert not str(link.get_attribute("href")).strip().lower().startswith("javascript:")
    assert "window.hit=1" in page.inner_text("body"), "what was read is shown as text"
    assert "\\u202e" in page.inner_text("body"), "spelt out"
    assert not [text for text in page.evaluate(EVERYTHING) if HIDDEN.search(text)]
    assert page.evaluate("window.hit") is None
    assert page.locator("iframe, base, object, embed, form, img[src='x'], meta[http-equiv=refresh]").count() == 0
    assert [url for url in asked if not url.startswith(("data:", "blob:"))] == [path.as_uri()]
    context.close()


def test_pages_have_a_policy_that_names_their_scripts(page_file):
    _, path = page_file
    head = path.read_text(encoding="utf-8").split('http-equiv="Content-Security-Policy" content="')[1]
    policy = head.split('"')[0].replace("&#39;", "'")
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    assert "unsafe-inline" not in policy.split("script-src")[1].split(";")[0]
    assert policy.endswith("form-action 'none'")
