"""The explorer: its file, and its use in a real browser."""

import re
from contextlib import contextmanager

import numpy as np
import pytest

from paceline.errors import UserError
from paceline.io.escape import escape_hidden
from paceline.workloads.topics.result.explorer import (
    collect_explorer_data,
    render_explorer,
    write_explorer,
)
from paceline.workloads.topics.result.model import TopicFit
from topics_fits import page_data, small_fit

EVIL = [
    '</script><b id="evil">',
    "<img src=x onerror=alert(1)>",
    "{{ 7*7 }}",
    "&lt;script&gt;",
    '"><svg onload=alert(1)>',
    "\u2028",
    "",
]


def wicked():
    X, made = small_fit()
    made.terms[: len(EVIL)] = EVIL
    made.names[: len(EVIL)] = EVIL
    return X, made


@pytest.fixture(scope="module")
def explored(tmp_path_factory):
    X, made = wicked()
    title = "A <title> & more"
    return X, made, write_explorer(made, tmp_path_factory.mktemp("explorer") / "topics.html", X, title=title)


def test_the_file_is_alone_and_its_texts_are_harmless(explored):
    text = explored[2].read_text(encoding="utf-8")
    assert "default-src 'none'" in text
    outside = set(re.findall(r"https?://[^\s\"'<)]+", text)) - {"http://www.w3.org/2000/svg"}
    assert not outside
    assert not re.findall(r"""(?:src|href)=["'](?!data:)""", re.sub(r'id="data">.*?</script>', "", text, flags=re.S))
    assert text.count("<script") == 2
    assert text.count("</script>") == 2
    assert len(text) < 100_000
    assert "<b id" not in text
    assert "<img" not in text
    assert "49" not in re.findall(r"<td class=\"text\">(.*?)</td>", text)
    assert set(map(escape_hidden, EVIL)) <= set(page_data(text)["vocabulary"]) | {""}


def test_what_is_told_is_true(explored):
    X, made, path = explored
    data = page_data(path.read_text(encoding="utf-8"))
    lengths = X.sum(axis=1)
    assert data["shares"] == pytest.approx(lengths @ made.L / lengths.sum(), abs=1e-3)
    assert data["lengths"] == lengths.tolist()
    assert data["coherence"] == pytest.approx(made.coherence(X), abs=1e-3)
    everywhere = np.array(data["shares"]) @ made.F
    assert data["everywhere"] == pytest.approx(everywhere, rel=0.01, abs=1e-9)
    for topic, (terms, p) in enumerate(data["tops"]):
        assert p == pytest.approx(made.F[topic, terms], rel=0.01, abs=1e-9)
    for topic, (found, between) in enumerate(zip(data["topDocuments"], data["between"], strict=True)):
        others = np.sort(made.L[found], axis=1)[:, -2]
        assert (np.diff((made.L[found, topic] - others) * lengths[found]) <= 0).all()
        assert (np.sort(made.L[between], axis=1)[:, -2] >= 0.25).all()
        assert (np.sort(made.L[between], axis=1)[:, -2:] >= made.L[between, topic][:, None]).any(axis=1).all()
    assert sum(map(len, data["between"])) >= 2
    assert data["labels"] == made.topic_names(lengths)
    for document, mixture in enumerate(data["mixtures"]):
        assert np.array(mixture[1::2]) / 1000 == pytest.approx(made.L[document, mixture[::2]], abs=1e-3)
    for term, uses in enumerate(data["uses"]):
        inside = np.array(data["shares"])[uses[::2]] * made.F[uses[::2], term] / everywhere[term]
        assert np.array(uses[1::2]) / 100 == pytest.approx(inside, abs=0.015)


@pytest.mark.parametrize(("n", "k", "m"), [(1, 1, 1), (2, 1, 5), (3, 2, 2), (5, 4, 3)])
def test_the_smallest_fits(n, k, m):
    chance = np.random.default_rng(0)
    made = TopicFit(chance.dirichlet(np.ones(k), n).astype("f"), chance.dirichlet(np.ones(m), k).astype("f"))
    data = collect_explorer_data(made, chance.poisson(3, (n, m)) + 1)
    assert len(data["tops"]) == k
    assert len(data["names"]) == n
    data = collect_explorer_data(made)
    assert data["coherence"] is data["lengths"] is None
    assert (data["names"][0], data["vocabulary"][0]) == ("document 0", "term 0")


def test_wrong_things_are_refused(tmp_path, explored):
    X, made, _ = explored
    file = tmp_path / "page.html"
    for key, write in {
        "model": lambda: write_explorer([1], file),
        "X": lambda: write_explorer(made, file, X[1:]),
    }.items():
        with pytest.raises(UserError) as caught:
            write()
        assert caught.value.key == key
    assert list(tmp_path.iterdir()) == []


@contextmanager
def opened(browser, path, width=1200, height=900, scheme="light", at=""):
    """The page, which complains about nothing."""
    context = browser.new_context(viewport={"width": width, "height": height}, color_scheme=scheme, offline=True)
    shown, said = context.new_page(), []
    shown.on("console", lambda message: said.append(message.text))
    shown.on("pageerror", lambda error: said.append(str(error)))
    shown.on("dialog", lambda dialog: (said.append("dialog"), dialog.dismiss()))
    shown.goto(path.as_uri() + at)
    assert shown.evaluate("document.documentElement.dataset.drawn") == "3"
    yield shown
    assert said == []
    context.close()


def test_a_topic_its_terms_and_the_slider(browser, explored):
    X, made, path = explored
    with opened(browser, path) as shown:
        largest = int(np.argmax(X.sum(axis=1) @ made.L))
        assert shown.evaluate("document.documentElement.dataset.shown") == f"topic-{largest}"
        assert shown.locator("h1").inner_text() == "A <title> & more"
        other = (largest + 1) % 3
        shown.locator("#list .topic").nth(shown.locator("#list .badge").all_inner_texts().index(str(other))).click()
        assert shown.evaluate("location.hash") == f"#topic-{other}"
        shown.locator("#weight").fill("0")
        expected = [re.sub(r"\s+", " ", text).strip() or "(blank)" for text in made.top_terms(12)[other]]
        terms = shown.locator(".terms .bar .label")
        assert terms.all_inner_texts()[:12] == expected
        shown.locator("#weight").fill("0.95")
        assert terms.all_inner_texts()[:12] != expected
        shown.locator(".chip").first.click()
        assert shown.evaluate("location.hash") != f"#topic-{other}"
        shown.go_back()
        assert shown.evaluate("document.documentElement.dataset.shown") == f"topic-{other}"


def test_texts_are_harmless_in_the_page(browser, explored):
    with opened(browser, explored[2]) as shown:
        for topic in range(3):
            shown.locator("#list .topic").nth(topic).click()
        shown.locator("#find").fill("<")
        assert shown.locator("#found button").count() >= 4
        shown.locator("#found button").first.click()
        assert shown.locator("#evil, img, #chosen svg").count() == 0


def test_search_and_the_views_of_a_term_and_a_document(browser, explored):
    _, made, path = explored
    with opened(browser, path) as shown:
        shown.locator("#find").fill("WORD20")
        shown.keyboard.press("Enter")
        assert shown.locator("#chosen h2").inner_text() == "word20"
        assert shown.locator("#chosen .bar .badge").first.inner_text() == str(made.F[:, 20].argmax())
        shown.locator("#find").fill("paper 33")
        shown.locator("#found button").first.click()
        assert shown.locator("#chosen h2").inner_text() == "paper 33"
        assert "80 words" in shown.locator("#chosen .told").inner_text()
        assert shown.locator("#chosen .bar .badge").first.inner_text() == str(made.L[33].argmax())
        shown.locator(".back").click()
        shown.locator("#list").focus()
        before = shown.evaluate("document.documentElement.dataset.shown")
        shown.keyboard.press("ArrowDown")
        assert shown.evaluate("document.documentElement.dataset.shown") != before


def test_dark_phone_and_print(browser, explored):
    with opened(browser, explored[2], width=390, height=800, scheme="dark", at="#document-3") as shown:
        back = "getComputedStyle(document.body).backgroundColor"
        assert shown.evaluate(back) == "rgb(11, 17, 32)"
        for at in ("#topic-1", "#term-0", "#document-3"):
            shown.evaluate(f"location.hash = '{at}'")
            assert shown.evaluate("document.documentElement.scrollWidth") <= 390
        shown.locator("#theme").click()
        assert shown.evaluate(back) == "rgb(248, 250, 252)"
        shown.locator("#theme").click()
        shown.emulate_media(media="print")
        for _ in range(100):  # the page forbids what a waiting function of the driver would do
            if shown.evaluate("document.documentElement.dataset.theme") == "light":
                break
            shown.wait_for_timeout(20)
        assert shown.evaluate(back) == "rgb(255, 255, 255)"
        assert shown.locator("#table tbody tr").count() == 3


def test_texts_are_shown_as_they_begin_and_are_harmless():
    _, made = small_fit()
    texts = [f"<b>Text</b> {at} &amp; " + "word " * 100 for at in range(len(made.L))]
    texts[0] = EVIL[0]
    told = collect_explorer_data(made, texts=iter(texts))
    assert told["texts"][1].startswith("Text 1 & word")
    assert told["texts"][1].endswith(" …")
    assert max(map(len, told["texts"])) < 250
    evil = collect_explorer_data(made, texts=[EVIL[3] + EVIL[0]] * len(made.L))
    assert "<b id" not in render_explorer(made, evil)
