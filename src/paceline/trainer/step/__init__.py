"""One step of training: operation by operation, through a pipeline, or as one CUDA graph."""
