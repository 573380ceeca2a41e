"""Instruction data: what is rendered, what has a label, how rows are packed, and that none sees its neighbour."""

import json
from itertools import groupby
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

import hf_models
import paceline
from paceline.errors import UserError
from paceline.nn.chunked_loss import NOT_COUNTED
from paceline.nn.nf4 import pack
from paceline.workload import build_workload
from paceline.workloads.transformers.chat import PACKABLE, pack_lengths
from results import expect_error


@pytest.fixture
def make_spec(hf, run_file):
    def make(model="chat", data="chat.jsonl", source="jsonl", **overrides):
        texts = {"data.source": source, "data.path": str(hf / data), "data.sequence": 64}
        return run_file(model, **{**texts, "train.global_batch": 4, "train.lr": 3e-3, **overrides})

    return make


def spell(hf, ids):
    return Tokenizer.from_file(str(hf / "chat" / "tokenizer.json")).decode(ids.tolist(), skip_special_tokens=False)


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))


PAIRS = [{"prompt": f"good number {n}", "response": f"{n} is red"} for n in range(20)]


def test_loss_is_on_the_answers(hf, make_spec):
    samples = build_workload(make_spec()).data("train")
    batch, number = samples.batch(np.array([len(samples) - 1]), np.array([0])), samples.rows[-1]
    counted = batch.labels[0] != NOT_COUNTED
    said = spell(hf, batch.labels[0][counted])
    answers = [part for part in said.split("[SEP]") if part.strip()]
    assert len(number) > 1
    assert len(answers) >= len(number)
    assert all(answer.strip().split()[0] in ("good", "bad") for answer in answers)
    following = batch.inputs["input_ids"][0][1:][counted[:-1]]
    assert following.equal(batch.labels[0][counted]), "each label is the token that follows"


def test_packed_conversations_are_apart(make_spec):
    packed, apart = (build_workload(make_spec(**{"data.pack": pack})) for pack in (True, False))
    model = packed.model().eval()
    row, places = packed.data("train"), apart.data("train")
    assert paceline.plan(make_spec(), cluster="1x4090").cost_model.samples == len(row)
    assert len(row) < len(places) == sum(map(len, row.rows))
    with torch.no_grad():
        together = packed.loss(model, row.batch(np.arange(3), np.arange(3)))
        members = np.concatenate(row.rows[:3])
        alone = packed.loss(model, places.batch(members, members))
    assert int(together[1]) == int(alone[1])
    assert float(together[0]) == pytest.approx(float(alone[0]), rel=1e-5)


@pytest.mark.parametrize("kind", PACKABLE)
def test_architecture_packs(kind):
    import transformers

    known = transformers.CONFIG_MAPPING[kind]()
    sizes = {**hf_models.LLAMA, **hf_models.GPT2, "head_dim": 8, "num_experts": 4, "num_local_experts": 4}
    sizes |= {"moe_intermediate_size": 16, "num_experts_per_tok": 2, "vocab_size": 64}
    config = type(known)(**{name: value for name, value in sizes.items() if hasattr(known, name)})
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config).eval()
    for weight in model.parameters():
        torch.nn.init.normal_(weight, 0, 0.3) if weight.ndim > 1 else None
    before, tokens = torch.randint(3, 60, (1, 5)), torch.randint(3, 60, (1, 7))
    places = torch.cat([torch.arange(5), torch.arange(7)])[None]
    with torch.no_grad():
        packed = model(input_ids=torch.cat([before, tokens], 1), position_ids=places, use_cache=False).logits[:, 5:]
        torch.testing.assert_close(packed, model(input_ids=tokens, use_cache=False).logits, rtol=1e-4, atol=1e-4)


def test_rows_are_packed_tightly_and_each_once():
    lengths = np.random.default_rng(0).integers(1, 60, 500)
    rows = pack_lengths(lengths, 64)
    assert sorted(n for row in rows for n in row) == list(range(500))
    assert max(lengths[row].sum() for row in rows) <= 64
    assert len(rows) <= 1.1 * -(-lengths.sum() // 64)


def test_prompts_and_responses_without_a_template(hf, make_spec):
    write_rows(hf / "pairs.jsonl", PAIRS)
    work = build_workload(make_spec("gpt2", "pairs.jsonl"))
    labels = work.data("train").batch(np.array([0]), np.array([0])).labels
    ends = work.corpus.special
    assert int((labels == ends).sum()) == len(work.data("train").rows[0])


def test_the_loss_is_that_of_trl(hf, make_spec, tmp_path):
    trl = pytest.importorskip("trl")
    import transformers
    from datasets import Dataset

    write_rows(hf / "pairs.jsonl", PAIRS)
    work = build_workload(make_spec(data="pairs.jsonl", **{"data.test_path": str(hf / "pairs.jsonl")}))
    model = transformers.AutoModelForCausalLM.from_pretrained(hf / "chat")
    named = [("user", "prompt"), ("assistant", "response")]
    rows = [[{"role": role, "content": row[key]} for role, key in named] for row in PAIRS]
    data = Dataset.from_list([{"prompt": row[:1], "completion": row[1:]} for row in rows])
    arguments = trl.SFTConfig(tmp_path, use_cpu=True, per_device_train_batch_size=len(rows), report_to=[], bf16=False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(hf / "chat", pad_token="[PAD]")
    trainer = trl.SFTTrainer(model, arguments, train_dataset=data, processing_class=tokenizer)
    batch = next(iter(trainer.get_train_dataloader()))
    theirs = trainer.compute_loss(trainer.model.eval(), batch)
    samples = work.data("train")
    total, count = work.loss(model, samples.batch(np.arange(len(samples)), np.arange(len(samples))))
    assert int(count) == int((batch["labels"] != NOT_COUNTED).sum())
    assert float(total.detach() / count) == pytest.approx(float(theirs), rel=1e-5)


def test_it_learns_to_answer_in_the_template(make_spec, tmp_path):
    spec = make_spec(**{"train.steps": 60, "train.global_batch": 16, "data.limit": 60})
    result = paceline.train(spec, tmp_path, show=False)
    assert result.summary.loss_last < 0.5 * result.summary.loss_first
    found = paceline.sample(result.path, "3 number 4", tokens=8, temperature=1e-3)
    assert found.split()[0] == "good"
    assert found == paceline.sample(result.path, "3 number 4", tokens=8, temperature=1e-3, seed=1)
    paceline.export(result.path, tmp_path / "out")
    assert "chat_template" in (tmp_path / "out" / "tokenizer_config.json").read_text()


def test_adapters_beside_weights_in_4_bits(hf, make_spec, tmp_path):
    from safetensors.torch import load_file

    tuned = {"model.lora_rank": 2, "model.quantize": "nf4"}
    spec = make_spec(**tuned)
    result = paceline.train(spec, tmp_path, show=False)
    trained = paceline.open(result.path)
    packed = {n: p for n, p in trained.model.named_parameters() if p.dtype == torch.uint8}
    before = load_file(hf / "chat" / "model.safetensors")
    assert len(packed) == 12, "down_proj has 48 inputs, and stays"
    assert all(p.equal(pack(before[name])) for name, p in packed.items())
    assert result.summary.parameters == paceline.plan(spec, cluster="1x4090").cost_model.params
    found = paceline.plan(make_spec(**{"model.lora_rank": 2}), cluster="1x4090").cost_model
    quantised = paceline.plan(spec, cluster="1x4090").cost_model
    saved = 4 * (found.stored_params - quantised.stored_params)
    assert saved == sum(4 * before[name].numel() - p.nbytes for name, p in packed.items())
    paceline.export(result.path, tmp_path / "out")
    import transformers

    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out").eval()
    ids = torch.arange(5, 25)[None]
    with torch.no_grad():
        torch.testing.assert_close(theirs(ids).logits, trained.model(ids).logits, rtol=1e-4, atol=1e-4)
    without_weights = {"model.init_from": None, "model.config": str(hf / "chat")}
    for change in ({"model.quantize": "nf4"}, {**tuned, **without_weights}):
        with expect_error("conflict"):
            build_workload(make_spec(**change)).prepare(print)


def test_a_column_of_texts_and_lines_of_a_file(hf, make_spec):
    write_rows(hf / "texts.jsonl", [{"text": text} for text in hf_models.TEXTS])
    (hf / "lines.txt").write_text("\n".join(hf_models.TEXTS))
    column = build_workload(make_spec("gpt2", "texts.jsonl")).corpus
    lines = build_workload(make_spec("gpt2", "lines.txt", "text", **{"data.documents": "lines"})).corpus
    for corpus in (column, lines):
        ends = sum(int((split == corpus.special).sum()) for split in (corpus.train, corpus.test))
        assert ends == len(hf_models.TEXTS) + 2, "one after each document, and one before the first"


LONG = [*PAIRS, {"prompt": "good " * 90, "response": "no"}]
ALL_LONG = [{**row, "prompt": f"{number} {'good ' * 90}"} for number, row in enumerate(PAIRS)]
BAD = {
    "raises": ({"data.template": "raise.jinja"}, PAIRS, "data.template", "line 1"),
    "broken": ({"data.template": "broken.jinja"}, PAIRS, "data.template", "TemplateSyntaxError"),
    "escapes": ({"data.template": "escape.jinja"}, PAIRS, "data.template", "SecurityError"),
    "too long": ({}, LONG, "data.sequence", "line 21"),
    "all too long": ({}, ALL_LONG, "data.sequence", "line 1"),
    "no column": ({}, [{"question": "a", "answer": "b"}], "data.text", "question"),
    "no answer": ({}, [{"messages": [{"role": "user", "content": "a"}]}], "", "line 1"),
    "no messages": ({}, [{"messages": "a"}], "", "line 1"),
    "nobody": ({"data.template": "no.jinja"}, PAIRS, "data.template", "no.jinja"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_ends_with_one_line(name, hf, make_spec):
    overrides, rows, key, said = BAD[name]
    (hf / "raise.jinja").write_text("{{ raise_exception('only system prompts') }}")
    (hf / "broken.jinja").write_text("{% if")
    (hf / "escape.jinja").write_text("{{ messages.__class__.__mro__ }}")
    write_rows(hf / "bad.jsonl", rows)
    given = {key: str(hf / value) for key, value in overrides.items()}
    with pytest.raises(UserError) as error:
        build_workload(make_spec(data="bad.jsonl", **given)).prepare(print)
    assert error.value.key == key
    assert said in str(error.value)
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("rule", ["cut", "skip"])
def test_too_long_conversations(rule, hf, make_spec):
    write_rows(hf / "long.jsonl", LONG)
    corpus = build_workload(make_spec(data="long.jsonl", **{"data.too_long": rule})).corpus
    assert len(corpus.train) + len(corpus.test) == 20, "cut, it has no answer left"


def test_a_template_may_mark_the_answers_itself(hf, make_spec):
    marked = "{% for m in messages %}{{ m.role }} {% generation %}{{ m.content }}[SEP]{% endgeneration %}{% endfor %}"
    (hf / "marked.jinja").write_text(marked)
    work = build_workload(make_spec(**{"data.template": str(hf / "marked.jinja")}))
    labels = work.data("train").batch(np.array([0]), np.array([0])).labels[0]
    said = spell(hf, labels[labels != NOT_COUNTED])
    assert "good" in said
    assert "user" not in said


def test_page_samples(hf, make_spec):
    page = (Path(__file__).parents[4] / "docs" / "transformers.md").read_text(encoding="utf-8")
    shown = page.split("<!-- three conversations -->")[1].split("```")[1::2]
    (hf / "three.jsonl").write_text(shown[0].removeprefix("json\n"))
    (hf / "page.jinja").write_text(shown[1].removeprefix("jinja\n").strip())
    given = {"data.template": str(hf / "page.jinja"), "data.test_path": str(hf / "three.jsonl")}
    corpus, found = build_workload(make_spec(data="three.jsonl", **given)).corpus, []
    for number in range(3):
        pairs = zip(corpus.train.text_ids(number), corpus.train.target_ids(number) != NOT_COUNTED, strict=True)
        parts = [(own, np.array([token for token, _ in part])) for own, part in groupby(pairs, lambda pair: pair[1])]
        texts = [(own, spell(hf, part).replace("\n", "⏎")) for own, part in parts]
        found.append("".join(f"«{text}»" if own else text for own, text in texts))
    assert found == shown[2].removeprefix("text\n").splitlines()
