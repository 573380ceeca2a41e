"""Score members and their ensemble on held-out rows, with bootstrap errors, and draw the scores.

All are judged on the same drawn rows, so that the error of a difference is far smaller than that of either side.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from paceline.io.files import replace_nonfinite, write_atomic
from paceline.nn.class_metrics import class_sums, compute_class_metrics
from paceline.reports.plot_style import escape_mathtext, use_plot_style
from paceline.runlog.run_dir import RunDir
from paceline.workloads.ensemble.combination import compute_logs

DRAWS = 200
BINS = 15
LOWER = ("loss", "rmse", "mae", "calibration_error")
ENSEMBLE = "ensemble"


@dataclass(frozen=True)
class Estimate:
    value: float
    error: float  # standard error, by bootstrap

    def __str__(self) -> str:
        return f"{self.value:.4f} ± {self.error:.4f}"


@dataclass(frozen=True)
class Scores:
    rows: int
    each: Mapping[str, Mapping[str, Estimate]]  # by model, then by metric
    gains: Mapping[str, Mapping[str, Estimate]]


def score_classes(found_NC: np.ndarray, labels_N: np.ndarray, classes: tuple[str, ...]) -> dict[str, Any]:
    """As every classifier is judged, and how far its probabilities are from what happened."""
    import torch

    sums = class_sums(torch.as_tensor(compute_logs(found_NC)), torch.as_tensor(labels_N))
    told = compute_class_metrics({name: value.numpy() for name, value in sums.items()})
    plain = {name: value.tolist() if hasattr(value, "tolist") else value for name, value in told.items()}
    loss = -float(compute_logs(found_NC)[np.arange(len(labels_N)), labels_N].mean())
    off = compute_calibration_error(found_NC, labels_N)
    rows = len(labels_N)
    return {
        "n": rows,
        "of": rows,
        "loss": loss,
        **replace_nonfinite(plain),
        "calibration_error": off,
        "classes": list(classes),
    }


def score_numbers(found_N: np.ndarray, truth_N: np.ndarray) -> dict[str, Any]:
    square, spread = float(((found_N - truth_N) ** 2).mean()), float(truth_N.var())
    explained = {"r2": 1 - square / spread} if spread > 0 else {}
    apart = float(np.abs(found_N - truth_N).mean())
    return {"n": len(truth_N), "of": len(truth_N), "loss": square, "rmse": square**0.5, "mae": apart, **explained}


def compute_calibration_error(found_NC: np.ndarray, labels_N: np.ndarray) -> float:
    """How far the probability of the likeliest class is from how often it was right: a mean over groups of rows."""
    said, right = found_NC.max(1), found_NC.argmax(1) == labels_N
    groups = np.array_split(np.argsort(said, kind="stable"), BINS)
    off = [abs(said[some].mean() - right[some].mean()) * len(some) for some in groups if len(some)]
    return float(sum(off) / len(said))


def score_members(outputs: Mapping[str, np.ndarray], truth: np.ndarray, seed: int = 0) -> Scores:
    """Of each by name, the ensemble among them; `truth` holds numbers of classes, or numbers."""
    judges = {name: _Judge.of(found, truth) for name, found in outputs.items()}
    whole = np.ones(len(truth))
    values = {name: judge.metrics(whole) for name, judge in judges.items()}
    random = np.random.default_rng(seed)
    drawn: dict[str, list[dict[str, float]]] = {name: [] for name in judges}
    for _ in range(DRAWS):
        times = np.bincount(random.integers(0, len(truth), len(truth)), minlength=len(truth)).astype(np.float64)
        for name, judge in judges.items():
            drawn[name].append(judge.metrics(times))
    metrics = list(next(iter(values.values())))
    table = {name: {m: np.array([one[m] for one in draws]) for m in metrics} for name, draws in drawn.items()}
    each = {n: {m: Estimate(values[n][m], float(np.nanstd(table[n][m]))) for m in metrics} for n in judges}
    gains: dict[str, dict[str, Estimate]] = {}
    for name in judges:
        if name != ENSEMBLE:
            gains[name] = {
                m: Estimate(
                    _sign_of(m) * (values[ENSEMBLE][m] - values[name][m]),
                    float(np.nanstd(table[ENSEMBLE][m] - table[name][m])),
                )
                for m in metrics
            }
    return Scores(len(truth), each, gains)


def format_scores(found: Scores, weights: Mapping[str, float]) -> list[str]:
    """For the terminal."""
    metrics = list(next(iter(found.each.values())))
    width = max(len(name) for name in found.each)
    head = f"  {'':{width}}  weight  " + "  ".join(f"{metric:>15}" for metric in metrics)
    lines = [f"  on {found.rows:,} held-out rows, ± the standard error of the bootstrap:", head]
    for name, some in found.each.items():
        weight = f"{weights[name]:.3f}" if name in weights else ""
        lines.append(f"  {name:{width}}  {weight:>6}  " + "  ".join(f"{some[metric]!s:>15}" for metric in metrics))
    for name, gains in found.gains.items():
        gain = gains[metrics[0]]
        how = "better" if gain.value >= 0 else "worse"
        lines.append(f"  {how} than {name} in {metrics[0]} by {abs(gain.value):.4f} ± {gain.error:.4f}")
    return lines


def _sign_of(metric: str) -> int:
    return -1 if metric in LOWER else 1


class _Judge:
    """What is computed once of a model's predictions, so that a draw of rows takes little."""

    def metrics(self, times: np.ndarray) -> dict[str, float]:
        """With each row counted so many times."""
        raise NotImplementedError

    @staticmethod
    def of(found: np.ndarray, truth: np.ndarray) -> _Judge:
        return _ClassJudge(found, truth) if found.ndim == 2 else _NumberJudge(found, truth)


class _ClassJudge(_Judge):
    def __init__(self, found: np.ndarray, labels: np.ndarray) -> None:
        self.classes = found.shape[1]
        self.losses = -compute_logs(found)[np.arange(len(labels)), labels]
        self.cells = labels * self.classes + found.argmax(1)
        shown = range(1, 2) if self.classes == 2 else range(self.classes)
        self.orders = [_Order(found[:, number], labels == number) for number in shown]

    def metrics(self, times: np.ndarray) -> dict[str, float]:
        table = np.bincount(self.cells, times, self.classes**2).reshape(self.classes, self.classes)
        support, said, right = table.sum(1), table.sum(0), table.diagonal()
        occurs = support + said > 0
        areas = np.array([order.area(times) for order in self.orders])
        return {
            "loss": float(times @ self.losses / times.sum()),
            "accuracy": float(right.sum() / table.sum()),
            "macro_f1": float((2 * right[occurs] / (support + said)[occurs]).mean()),
            "auc": float(np.nanmean(areas)) if np.isfinite(areas).any() else np.nan,
        }


class _Order:
    """Rows from the lowest score of a class to the highest, equal ones together: its ROC area takes two sums."""

    def __init__(self, scores: np.ndarray, own: np.ndarray) -> None:
        self.order = np.argsort(scores, kind="stable")
        ranked = scores[self.order]
        self.group = np.concatenate([[0], np.cumsum(np.diff(ranked) > 0)])
        self.own = own[self.order]

    def area(self, times: np.ndarray) -> float:
        counts = times[self.order]
        own = np.bincount(self.group, counts * self.own)
        others = np.bincount(self.group, counts * ~self.own)
        pairs = own.sum() * others.sum()
        return float((own * (np.cumsum(others) - others / 2)).sum() / pairs) if pairs else np.nan


class _NumberJudge(_Judge):
    def __init__(self, found: np.ndarray, truth: np.ndarray) -> None:
        self.squares, self.apart = (found - truth) ** 2, np.abs(found - truth)

    def metrics(self, times: np.ndarray) -> dict[str, float]:
        count = times.sum()
        return {"rmse": float(times @ self.squares / count) ** 0.5, "mae": float(times @ self.apart / count)}


OURS, OTHERS = "#d97706", "#2563eb"
SHADES = ("#2563eb", "#059669", "#9333ea", "#0891b2", "#be185d", "#65a30d")


@use_plot_style({})
def draw_members(scores: Scores, folder: Path, step: int) -> None:
    """Each metric with its bootstrap error, one row for each model."""
    from matplotlib.figure import Figure

    names = list(scores.each)[::-1]
    metrics = list(scores.each[ENSEMBLE])
    figure = Figure(figsize=(2.6 * len(metrics) + 1, 0.9 + 0.42 * len(names)), layout="constrained")
    panels = figure.subplots(1, len(metrics), sharey=True, squeeze=False)[0]
    for axes, metric in zip(panels, metrics, strict=True):
        for place, name in enumerate(names):
            found = scores.each[name][metric]
            colour = OURS if name == ENSEMBLE else OTHERS
            axes.errorbar(found.value, place, xerr=found.error, fmt="o", color=colour, capsize=3)
            axes.annotate(str(found), (found.value, place), (0, 6), textcoords="offset points", ha="center", fontsize=7)
        axes.set_title(f"{metric.replace('_', ' ')} ({'lower' if metric in LOWER else 'higher'} is better)", fontsize=8)
        axes.set_yticks(range(len(names)), escape_mathtext(names))
        axes.set_ylim(-0.5, len(names) - 0.3)
        axes.margins(x=0.25)
        axes.tick_params(labelsize=8)
        axes.locator_params(axis="x", nbins=4)
        axes.spines[["top", "right"]].set_visible(False)
    _save_picture(figure, folder, f"members-{step:06d}.png")


@use_plot_style({})
def draw_reliability(outputs: Mapping[str, np.ndarray], truth: np.ndarray, folder: Path, step: int) -> None:
    """How often the likeliest class was right, by the probability that it was given."""
    from matplotlib.figure import Figure

    figure = Figure(figsize=(4.4, 3.8), layout="constrained")
    axes = figure.subplots()
    least = 1.0
    for number, (name, found) in enumerate(outputs.items()):
        said, right = found.max(1), found.argmax(1) == truth
        groups = [some for some in np.array_split(np.argsort(said, kind="stable"), BINS) if len(some)]
        at, held = ([float(values[some].mean()) for some in groups] for values in (said, right))
        least = min(least, *at, *held)
        colour, width = (OURS, 2) if name == ENSEMBLE else (SHADES[number % len(SHADES)], 1)
        axes.plot(at, held, marker="o", markersize=3, linewidth=width, color=colour, label=escape_mathtext(name))
    axes.plot([least, 1], [least, 1], color="#9ca3af", linewidth=0.8, linestyle="--")
    axes.set_xlabel("probability of the likeliest class")
    axes.set_ylabel("how often it was right")
    axes.legend(fontsize=8, frameon=False)
    axes.spines[["top", "right"]].set_visible(False)
    _save_picture(figure, folder, f"reliability-{step:06d}.png")


def _save_picture(figure: Any, folder: Path, name: str) -> None:
    content = io.BytesIO()
    figure.savefig(content, format="png", dpi=110)
    pictures = RunDir(folder).pictures
    pictures.mkdir(exist_ok=True)
    write_atomic(pictures / name, content.getvalue())
