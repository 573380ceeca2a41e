"""Segmentation of images by a UNet: which class each pixel belongs to."""

from paceline.registry import Entry, Traits

ENTRY = Entry(
    run="paceline.workloads.unet.workload:Segmentation",
    model="paceline.workloads.unet.sections:UNetModel",
    data="paceline.workloads.unet.sections:ImageData",
    traits=Traits(few_shapes=True),
)
