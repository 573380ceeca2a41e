"""What a run will cost before a device is taken: memory, time and speed-up of a model under a layout on a cluster.

    hardware   devices and clusters: facts with source and date
    shape      a model's parameters, products, traffic and activations, by block
    spread     how the work is divided, and in which types
    physics    the few numbers that are in no data sheet
    compute    time of the arithmetic          comm      time of the collectives
    steptime   one optimiser step, by term     memory    the fullest device, by term

Nothing here imports torch, except for measuring the shape of a module that has no closed form.
"""
