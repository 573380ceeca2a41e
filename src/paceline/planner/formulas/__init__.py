"""The formulas: a model by block, a layout as they see it, and what each costs in time and memory."""
