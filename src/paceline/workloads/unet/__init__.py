"""Segmentation of images by a UNet: which class each pixel belongs to."""

from paceline.config.registry import Traits, WorkloadEntry

ENTRY = WorkloadEntry(
    run="paceline.workloads.unet.workload:Segmentation",
    model="paceline.workloads.unet.sections:UNetModel",
    data="paceline.workloads.unet.sections:ImageData",
    traits=Traits(few_shapes=True),
    use="predict {run} IMAGE.png",
)
