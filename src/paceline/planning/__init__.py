"""What a run will cost before a device is taken: does it fit, will more devices pay, which layout, how long, how much.

    plan       the verb: a run file and a cluster in, an answer out       verb, show   its command and its tables
    subject    what a run file asks to be priced                         decoder, fake   shapes of models
    site       where it would go                                         hardware, calibration   facts, measurements
    search     the layouts that could be, and the choice                 candidates, price   what there is; one priced
    money      speed-up, hours, cost                                     advice   what to do, in numbers
    emit       launch files                                              auto     `parallel: auto`
    calibrate  the verb: this machine, measured                          probes   with what

The formulas: shape (a model by block), spread (a layout as they see it), physics (the few numbers that are in no data
sheet), compute, comm, offload, steptime, memory; for a topic model topics (its counts) and passtime (one pass).

Nothing here imports torch, except to measure: a module that has no closed form, or this machine.
"""
