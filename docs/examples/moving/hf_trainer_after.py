"""A causal language model goes on learning from texts: the run file says everything."""

import paceline

result = paceline.train("hf_trainer_after.yaml")
print(f"loss {result.summary.loss_last:.4f}")
