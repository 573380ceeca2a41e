"""Continue the training of a causal language model on texts, as the run file describes it."""

import paceline

result = paceline.train("hf_trainer_after.yaml")
print(f"loss {result.summary.loss_last:.4f}")
