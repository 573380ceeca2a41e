"""Programs of other libraries, run as they are in a rank of their own."""

import contextlib
import io
import os
import re
import runpy

PLACE = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


def losses_before(folder):
    """The losses that the programs before moving print last. One process, as each library takes seconds to import."""
    os.chdir(folder)
    os.environ["HF_HUB_OFFLINE"] = "1"
    place = {name: os.environ.pop(name) for name in PLACE}
    trainer = _last_loss("hf_trainer_before.py")  # as `python program.py` would start it
    os.environ.update(place)
    import deepspeed

    deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # it would be compiled now, which takes minutes
    return trainer, _last_loss("deepspeed_before.py")


def _last_loss(program):
    said = io.StringIO()
    with contextlib.redirect_stdout(said):
        runpy.run_path(program, run_name="__main__")
    return float(re.findall(r"^loss ([\d.]+)$", said.getvalue(), re.MULTILINE)[-1])


def loss_after(folder):
    os.chdir(folder)
    for name in PLACE:
        os.environ.pop(name)
    return _last_loss("hf_trainer_after.py")


def save_model(folder):
    import hf_models

    hf_models.save("llama", folder / "models" / "llama")
