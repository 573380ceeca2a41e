"""A causal language model goes on learning from texts: the Trainer of transformers, configured by a JSON."""

from pathlib import Path

from transformers import AutoModelForCausalLM, HfArgumentParser, PreTrainedTokenizerFast, Trainer, TrainingArguments

LENGTH = 32


def samples(folder, texts):
    """The texts end to end, in pieces of one length."""
    tokenizer = PreTrainedTokenizerFast(tokenizer_file=f"{folder}/tokenizer.json")
    tokens = [token for text in Path(texts).read_text().splitlines() for token in tokenizer(text)["input_ids"]]
    pieces = [tokens[i : i + LENGTH] for i in range(0, len(tokens) - LENGTH + 1, LENGTH)]
    return [{"input_ids": piece, "labels": piece} for piece in pieces]


def main():
    (arguments,) = HfArgumentParser(TrainingArguments).parse_json_file("hf_trainer_before.json")
    model = AutoModelForCausalLM.from_pretrained("models/llama")
    trainer = Trainer(model, arguments, train_dataset=samples("models/llama", "texts.txt"))
    print(f"loss {trainer.train().training_loss:.4f}")


if __name__ == "__main__":
    main()
