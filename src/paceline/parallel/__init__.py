"""Spreading a model over ranks. Models do not know: they are wrapped here, in one place."""
