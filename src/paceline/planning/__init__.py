"""What a run will cost before a device is taken: does it fit, will more devices pay, which layout, how long, how much.

    plan         a run file and a cluster in, an answer out       verb, show   its command and its tables
    subject      what a plan asks of every kind of work           training, passes   the two kinds that answer
    fake         a training whose shape is measured               layouts      the layouts that a training could have
    site         where it would go                                calibrating  this machine, measured
    search       the choice on a number of devices                candidates, price, usual_tree   what it goes through
    money        speed-up, hours, cost                            advice       what to do, in numbers
    emit         launch files                                     auto         `parallel: auto`
    formulas     shape (a model by block), placement (a layout as they see it), numbers (types), physics (the few
                 numbers that are in no data sheet), compute, comm, steptime, memory

Nothing here imports torch, except to measure: a module that has no closed form, or this machine. No workload is named
here: each brings its subject.
"""
