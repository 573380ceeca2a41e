"""The encoder: a text gets the same answer alone and in company, with and without dropout."""

from types import SimpleNamespace

import numpy as np
import pytest
import torch
import torch.nn.functional as F

from paceline.config import build_spec
from paceline.errors import UserError
from paceline.nn.attention import pack_texts
from paceline.planner.cost_model import build_cost_model
from paceline.planner.tracing import build_traced_cost_model
from paceline.workloads.classifier.sections import ClassifierModel
from paceline.workloads.classifier.workload import Classifier, Encoder, compute_class_weights
from plan_specs import classifier

LENGTHS = np.array([1, 3, 3, 7, 7, 7, 20])


def batch(keys=None):
    rng = np.random.default_rng(0)
    texts = [rng.integers(1, 50, n) for n in LENGTHS]
    keys = np.arange(len(LENGTHS)) * 7919 + 13 if keys is None else keys
    return texts, pack_texts(np.concatenate(texts), LENGTHS, rng.integers(0, 4, len(LENGTHS)), keys)


def model(**changes):
    torch.manual_seed(0)
    return Encoder(ClassifierModel(width=16, heads=2, layers=2, ffn=32, **changes), 50, 32, 4)


@pytest.mark.parametrize(
    "changes", [{}, {"dropout": 0.3}, {"word_dropout": 0.3}, {"dropout": 0.2, "word_dropout": 0.2}]
)
def test_a_text_scores_the_same_alone_and_in_company_and_dropout_belongs_to_it(changes):
    texts, packed = batch()
    net = model(**changes).train()
    together = net(packed)
    for i, text in enumerate(texts):
        alone = net(pack_texts(text, np.array([len(text)]), np.array([0]), packed.keys[i : i + 1].numpy()))
        torch.testing.assert_close(together[i : i + 1], alone, rtol=1e-5, atol=1e-6)
    _, other = batch(keys=np.arange(len(LENGTHS)) + 1)
    assert torch.allclose(together, net(other), atol=1e-3) == (not changes), "another key draws anew"
    assert torch.allclose(together, net.eval()(packed), atol=1e-3) == (not changes), "dropout does something"


CORPUS = SimpleNamespace(classes=("a", "b", "c", "d"), train=SimpleNamespace(labels=np.array([0, 0, 0, 1, 1, 2])))


def test_weights_of_classes_balance_them_or_are_as_given():
    weights = compute_class_weights("balanced", CORPUS)
    assert [w * n for w, n in zip(weights, (3, 2, 1), strict=False)] == pytest.approx([1.5] * 3)
    assert compute_class_weights({"c": 5}, CORPUS) == [1.0, 1.0, 5, 1.0]
    with pytest.raises(UserError, match="no class 'e'"):
        compute_class_weights({"e": 1.0}, CORPUS)


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
def test_sums_over_parts_give_the_weighted_mean_of_torch(smoothing):
    """(sum of weighted losses, sum of weights): what ranks find adds up, and padding counts nothing."""
    _, packed = batch()
    net = model().eval()
    workload = Classifier(build_spec({"model": {"label_smoothing": smoothing, "class_weights": {"b": 3.0}}}))
    workload.corpus = CORPUS
    total, count = workload.loss(net, packed)
    weights = torch.tensor([1.0, 3.0, 1.0, 1.0])
    mean = F.cross_entropy(net(packed), packed.labels, weights, label_smoothing=smoothing)
    torch.testing.assert_close(total / count, mean)
    labels = packed.labels.clone()
    labels[0] = -100
    less, fewer = workload.loss(lambda _: net(packed), SimpleNamespace(labels=labels))
    assert float(count - fewer) == pytest.approx(float(weights[packed.labels[0]]))
    assert float(total.detach() - less.detach()) > 0


@pytest.mark.parametrize("model", [{}, {"width": 256, "heads": 8, "layers": 4, "ffn": 1024}])
def test_a_classifier_has_the_parameters_of_its_closed_form(model):
    spec = classifier(**model)
    with torch.device("meta"):
        built = Encoder(spec.model, spec.data.vocab, spec.data.max_length, 4)
    assert build_cost_model(spec).params == sum(p.numel() for p in built.parameters())


def test_what_the_data_are_not_there_to_say_is_assumed_and_listed():
    found = build_cost_model(classifier())
    assert (found.samples, found.units_per_sample) == (120_000, 48)
    assert "as in the original AG News" in found.assumptions[0]
    told = build_cost_model(classifier(), samples=1000, tokens=20)
    assert (told.samples, told.units_per_sample, told.steps) == (1000, 20, 8)
    lengths = found.lengths
    assert lengths.fullest_batch_ratio(1) > lengths.fullest_batch_ratio(128) > 1
    assert lengths.fullest_batch_ratio(1) <= lengths.longest_ratio


def test_the_measured_shape_of_the_classifier_is_near_its_closed_form(tmp_path):
    rows = [f"{['good ', 'bad ', 'fine ', 'poor '][k % 4] * (6 + k % 9)},{k % 2}" for k in range(120)]
    (tmp_path / "texts.csv").write_text("\n".join(["text,label", *rows]) + "\n")
    data = {"source": "csv", "path": str(tmp_path / "texts.csv"), "max_length": 48, "vocab": 300}
    data["cache"] = str(tmp_path / "cache")
    spec = build_spec({"workload": "classifier", "model": {"layers": 3}, "data": data, "train": {"steps": 1}})
    fake, closed = build_traced_cost_model(spec), build_cost_model(spec)
    assert fake.params == closed.params
    assert fake.flops_per_sample == pytest.approx(closed.flops_per_sample, rel=0.1)
    kept = [b.saved_split_elements + b.saved_whole_elements for b in (fake.blocks[1], closed.blocks[1])]
    assert kept[0] == pytest.approx(kept[1], rel=0.2)
    assert fake.blocks[1].moved_elements == pytest.approx(closed.blocks[1].moved_elements, rel=0.1)
