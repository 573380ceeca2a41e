"""Pieces of models that several workloads share: attention over packed texts, a loss that never holds all logits."""
