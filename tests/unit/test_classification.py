"""Metrics of classes from sums, against their definitions, sample by sample."""

import numpy as np
import pytest
import torch

from paceline.nn.class_metrics import class_sums, compute_class_metrics, sum_two_classes
from paceline.runlog.summary import describe_baseline, read_class_results, select_class_results


def answers(classes, n=400, seed=0):
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(classes, (n,), generator=generator)
    logits = torch.randn(n, classes, generator=generator) + 1.5 * torch.eye(classes)[labels]
    return logits, labels


def added(*parts):
    return {name: sum(np.asarray(part[name]) for part in parts) for name in parts[0]}


@pytest.mark.parametrize("classes", [2, 5])
def test_metrics_are_those_of_their_definitions(classes):
    logits, labels = answers(classes)
    found = compute_class_metrics(added(class_sums(logits[:150], labels[:150]), class_sums(logits[150:], labels[150:])))
    said = logits.argmax(1)
    assert found["accuracy"] == (said == labels).double().mean()
    assert found["majority"] == labels.bincount().max() / len(labels)
    aucs = []
    for number in range(classes):
        right = ((said == number) & (labels == number)).sum()
        assert found["precision"][number] == pytest.approx(float(right / (said == number).sum()))
        assert found["recall"][number] == pytest.approx(float(right / (labels == number).sum()))
        score, own = logits.softmax(1)[:, number], labels == number
        pairs = score[own][:, None] - score[~own][None, :]
        aucs.append(float((pairs > 0).double().mean() + (pairs == 0).double().mean() / 2))
    f1 = 2 * found["precision"] * found["recall"] / (found["precision"] + found["recall"])
    assert found["macro_f1"] == pytest.approx(f1.mean())
    assert found["auc"] == pytest.approx(np.mean(aucs), abs=2e-3)
    assert found["confusion"].sum() == found["support"].sum() == len(labels)


def test_many_classes_have_counts_and_no_matrix():
    logits, labels = answers(150)
    found = compute_class_metrics(class_sums(logits, labels))
    assert found["accuracy"] == (logits.argmax(1) == labels).double().mean()
    assert not {"confusion", "auc"} & found.keys()


def test_padding_does_not_count_and_what_never_occurs_divides_nothing():
    logits = torch.tensor([[2.0, 1, 0], [3, 0, 0], [0, 0, 9]])
    found = compute_class_metrics(class_sums(logits, torch.tensor([0, 1, -100])))
    assert found["accuracy"] == 0.5
    assert found["support"].tolist() == [1, 1, 0]
    assert found["macro_f1"] == pytest.approx((2 / 3 + 0) / 2), "of the two classes that occur"
    assert np.isnan(found["recall"][2])
    assert compute_class_metrics({"loss": 1.0, "count": 3}) == {}


def test_a_model_that_always_says_the_same_is_named():
    event = {"accuracy": 0.646, "majority": 0.646, "classes": ["bad", "good"], "support": [646, 354]}
    event |= {"precision": [0.646, None], "recall": [1.0, 0.0], "f1": [0.785, 0.0]}
    assert describe_baseline(event) == "accuracy no better than always predicting bad (0.646)"
    assert describe_baseline({**event, "accuracy": 0.7}) == ""
    assert read_class_results(event)[1].cells() == ("good", "–", "0.000", "0.000", "354")
    assert [r.name for r in read_class_results({**event, "classes": ["bad"]})] == ["0", "1"], "none is lost"
    many = {name: [0.5] * 29 + [0.1] for name in ("precision", "recall", "f1")}
    worst, left = select_class_results({**many, "support": [1] * 30})
    assert (worst[0].name, left) == ("29", 18)


def test_the_sums_of_two_classes_follow_from_the_odds_of_one():
    logits, labels = answers(2)
    logits[:, 0] = 0
    whole = class_sums(logits, labels)
    found = sum_two_classes(logits[:, 1].double().numpy(), labels.numpy())
    assert found.keys() == whole.keys()
    assert all(np.array_equal(found[name], whole[name].numpy()) for name in found)
