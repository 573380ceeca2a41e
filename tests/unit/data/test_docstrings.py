"""The docstring corpus: honest texts, balanced classes, a split that does not leak, and the same every time."""

import os
import subprocess
import sys
import time
from collections import Counter
from types import SimpleNamespace

import pytest

from paceline.data.corpora import docstrings
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.workloads.classifier.sections import TextData


@pytest.fixture(scope="module")
def extraction(tmp_path_factory):
    """One extraction serves every test: the one that `prepare` makes."""
    calls, spent, extract = [], [], docstrings.extract_samples

    def watched(*arguments):
        began_s = time.process_time()
        calls.append(extract(*arguments))
        spent.append(time.process_time() - began_s)
        return calls[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(docstrings, "extract_samples", watched)
        corpus = LabelledCorpus.prepare(TextData(cache=tmp_path_factory.mktemp("cache"), vocab=4096))
    train, test = calls[0]
    return SimpleNamespace(train=train, test=test, corpus=corpus, calls=len(calls), cpu_s=spent[0])


def test_it_is_extracted_once(extraction):
    assert extraction.calls == 1
    assert len(extraction.corpus.train) == len(extraction.train)
    assert len(extraction.corpus.test) == len(extraction.test)
    assert extraction.cpu_s < 15, "about 3 s on an idle core"


def test_classes_are_balanced_and_texts_distinct(extraction):
    assert extraction.corpus.classes == ("numpy", "scipy", "torch", "standard library")
    for split in (extraction.train, extraction.test):
        assert len(set(Counter(label for _, label in split).values())) == 1
    texts = [text for text, _ in extraction.train + extraction.test]
    assert len(texts) == len(set(texts)) > 3000
    assert 0.07 < len(extraction.test) / len(texts) < 0.13
    first = Counter(label for _, label in extraction.train[:400])
    assert min(first.values()) > 60, "any first part is a fair sample"


def test_names_and_doctests_are_masked(extraction):
    for text, _ in extraction.train + extraction.test:
        words = text.lower().split()
        assert len(words) >= docstrings.MIN_WORDS
        assert not any(name in text.lower() for name in ("numpy", "scipy", "torch", "python"))
        assert ">>>" not in text


def test_no_module_is_in_both_splits():
    modules = [[f"{m} {i}" for i in range(m % 7 + 1)] for m in range(60)]
    train, test = docstrings.split_by_module(modules, 0.2)
    assert not {text.split()[0] for text in train} & {text.split()[0] for text in test}
    assert 0.15 < len(test) / (len(train) + len(test)) <= 0.2


def test_nothing_is_imported_and_the_order_is_fixed():
    """In two fresh interpreters with different hash seeds: the same files, and none of the packages loaded."""
    code = (
        "import sys, zlib; from paceline.data.corpora import docstrings as d; d.ENOUGH_PER_CLASS = 60;"
        "print(zlib.crc32(repr(d.extract_samples(0.2, d.mask_names)).encode()),"
        "[m for m in ('numpy', 'scipy', 'torch') if m in sys.modules])"
    )
    said = {
        subprocess.run(
            [sys.executable, "-c", code], env={**os.environ, "PYTHONHASHSEED": seed, "PYTHONPATH": ":".join(sys.path)},
            capture_output=True, text=True, check=True,
        ).stdout
        for seed in ("1", "2")
    }  # fmt: skip
    assert len(said) == 1
    assert said.pop().strip().endswith("[]")


def test_mask():
    text = """Return a numpy.ndarray, see `torch.Tensor` and PyTorch's np.mean.

    Examples
    --------
    >>> import numpy as np
    >>> np.arange(3)
    array([0, 1, 2])

    And for the inputs ... more words follow.
    """
    assert docstrings.mask_names(text) == (
        "Return a .ndarray, see ` .Tensor` and 's .mean. Examples -------- And for the inputs ... more words follow."
    )


def test_docstrings_of_a_source_text():
    source = (
        '"module"\nclass A:\n "class"\n def f(self):\n  "method"\nif x:\n async def g():\n  "in a branch"\n'
        'add_newdoc("pkg", "name", ("member", """of something in C"""))\ndef h():\n return "no docstring"\n'
    )
    found = list(docstrings.iter_docstrings(source))
    assert found == ["module", "class", "method", "in a branch", "name", "member", "of something in C"]
    assert list(docstrings.iter_docstrings("def broken(:")) == []
