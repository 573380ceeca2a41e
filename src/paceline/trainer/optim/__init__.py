"""How weights are updated: optimisers, the learning rate, and an average of the weights."""
