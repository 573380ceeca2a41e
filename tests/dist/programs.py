"""Programs of other libraries, run as they are in a rank of their own."""

import contextlib
import io
import os
import re
import runpy


def loss_of(folder, program):
    """The loss that a program prints last."""
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    if program.startswith("deepspeed"):
        import deepspeed

        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, which takes minutes
    else:
        for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
            os.environ.pop(name, None)  # as `python program.py` would start it
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(program, run_name="__main__")
    return float(re.findall(r"^loss ([\d.]+)$", said.getvalue(), re.MULTILINE)[-1])


def save_model(folder):
    """A tiny model, made where the library is imported already."""
    import hf_models

    hf_models.save("llama", folder / "models" / "llama")
