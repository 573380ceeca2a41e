"""The cost model of the text classifier, for texts as they are in the cache, or as they usually are."""

from dataclasses import replace
from typing import Any

from paceline.config import RunSpec
from paceline.data.corpora.labelled import LabelledCorpus
from paceline.data.corpora.tokenizer import estimate_vocabulary_size
from paceline.planner.candidates import SplitOptions
from paceline.planner.formulas.placement import DtypeSizes
from paceline.planner.formulas.shape import LAUNCHES_PER_OPERATION, BlockShape, ModelShape
from paceline.planner.model_inputs import TextStatistics, apply_frozen_groups, assume_mean_length
from paceline.planner.training_cost import TrainingCostModel, dtype_sizes_of
from paceline.workloads.classifier import ENTRY

DROPOUT_PASSES = 33  # over the elements, to draw the mask from the key of each text
DROPOUT_OPERATIONS = 35
RESIDUAL_BYTES = 4.0  # of an element of the residual stream, which stays in fp32
AG_NEWS = (120_000, 48.0, 18.0)  # training texts, mean length in tokens and its standard deviation
AG_NEWS_TEST = 7_600
ASSUMED_CLASSES = 4


def build_classifier_cost_model(spec: RunSpec, samples: int | None, tokens: float | None) -> TrainingCostModel:
    model: Any = spec.model
    data: Any = spec.data
    found = None if samples and tokens else LabelledCorpus.cached(data)
    vocab = estimate_vocabulary_size(data) if found is None else found.vocab
    texts = (
        TextStatistics.of(found, samples, tokens) if found is not None else _assume_statistics(data, samples, tokens)
    )
    blocks = _build_blocks(model, data.max_length, vocab, texts, dtype_sizes_of(spec.train))

    def build() -> Any:
        from paceline.workloads.classifier.workload import Encoder

        return Encoder(model, vocab, data.max_length, texts.classes)

    return TrainingCostModel.of(
        spec,
        texts.count,
        blocks=apply_frozen_groups(blocks, spec.train.groups, build),
        traits=ENTRY.traits,
        splits=SplitOptions(splits=(model.heads,), layers=model.layers, inferred=True),
        unit="tokens",
        units_per_sample=texts.mean,
        sample_bytes=2 * texts.mean,
        lengths=replace(texts.lengths, distinct=_distinct_lengths(texts)),
        held_out=texts.held_out,
        assumptions=texts.assumptions,
    )


def _assume_statistics(data: Any, samples: int | None, tokens: float | None) -> TextStatistics:
    longest, deviation, held_out = data.max_length, 0.0, None
    count, mean, assumed = samples, tokens, ""
    if data.source == "ag_news":
        all_texts, usual, deviation = AG_NEWS
        held_out = AG_NEWS_TEST
        count, mean = count or min(all_texts, data.limit or all_texts), mean or min(usual, longest)
        assumed = f"{count:,} texts of {mean:.0f} tokens on average, as in the original AG News"
    elif mean is None:
        mean = assume_mean_length(longest)
        assumed = f"texts of {mean:.0f} tokens on average, half of data.max_length; the data were not read"
    mean = min(mean, longest)
    deviation = 0.0 if mean == longest else deviation
    return TextStatistics(count, mean, longest, deviation, ASSUMED_CLASSES, held_out, (assumed,) if assumed else ())


def _distinct_lengths(texts: TextStatistics) -> float:
    if texts.mean == texts.longest:
        return 1.0
    return max(1.0, min(texts.longest, 3.5 * texts.deviation)) if texts.deviation else texts.longest / 2


def _build_blocks(
    model: Any, positions: int, vocab: int, texts: TextStatistics, numbers: DtypeSizes
) -> tuple[BlockShape, ...]:
    length, width, ffn, classes = max(1, round(texts.mean)), model.width, model.ffn, texts.classes
    shape = ModelShape(model.layers, width, model.heads, length, vocab, ffn, causal=False, classes=classes)
    embedding, layer, head = shape.blocks
    wide = max(0.0, RESIDUAL_BYTES / numbers.element_bytes - 1)
    masks = length * width if wide else 0.0  # where layers are compiled, they are made again
    drops = DROPOUT_PASSES * length * width if model.dropout else 0.0
    launches = LAUNCHES_PER_OPERATION * DROPOUT_OPERATIONS / 3 if model.dropout else 0.0  # in the forward pass alone
    return (
        replace(
            embedding,
            params=(vocab + positions) * width,
            eager_elements=drops,
            kernels=embedding.kernels + launches,
        ),
        replace(
            layer,
            params=4 * width * width + 2 * width * ffn + ffn + width + 4 * width,
            attention=layer.attention and replace(layer.attention, packed=True),
            # two norms read the stream and two sums read and write it; the norms keep what they read
            moved_elements=layer.moved_elements + 6 * wide * length * width,
            saved_whole_elements=layer.saved_whole_elements + 2 * wide * length * width - masks,
            eager_saved_elements=masks,
            eager_elements=2 * drops,
            kernels=layer.kernels + 2 * launches,
        ),
        replace(head, params=width * classes + classes + 2 * width),
    )
