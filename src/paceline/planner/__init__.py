"""What a run will cost before a device is taken: does it fit, will more devices pay, which layout, how long, how much.

    plan         a run file and a cluster in, an answer out       verb, options   its command
    rows         one per number of devices, wishes, the choice    show, amounts   its tables
    subject      what a plan asks of every kind of work           training        the kind that most are
    fake         a training whose shape is measured               layouts         the layouts that a training could have
    what_if      ways to train that are priced only               page            a page with sliders
    site         where it would go                                calibrating     this machine, measured
    search       the choice on a number of devices                candidates      what it goes through, and prices
    emit         launch files                                     advice          what to do, in numbers
    eager        kernels of operations as they are written        texts           sentences
    formulas     shape (a model by block), placement (a layout and its types as they see them), physics (the few
                 numbers that are in no data sheet), compute, comm, steptime, memory

Nothing here imports torch, except to measure: a module that has no closed form, or this machine. No workload is named
here: each brings its subject.
"""
