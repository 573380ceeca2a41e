"""Price a run before a device is taken: does it fit, do more devices pay, which layout, how long, how much.

`plan` asks the `cost_model` of a workload (`training_cost`, or traced by `tracing`) and searches (`search`,
`layout_space`) the best layout on each number of devices of a `target`. `formulas/` are the prices, `calibration/`
measures this machine, `show`, `page/`, `advice` and `emit` say what came out.

No workload is named here, and torch is imported only to measure: a model that has no formulas, or this machine.
"""
