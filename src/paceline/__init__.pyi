from paceline.adopting.adopt import Adopted as Adopted
from paceline.adopting.adopt import adopt as adopt
from paceline.classification import class_sums as class_sums
from paceline.errors import RunFailed as RunFailed
from paceline.errors import UserError as UserError
from paceline.measuring.outside.sweep import measure_command as measure_command
from paceline.measuring.result import Measurement as Measurement
from paceline.measuring.sweep import measure as measure
from paceline.parity import check as check
from paceline.planning.plan import Plan as Plan
from paceline.planning.plan import plan as plan
from paceline.record.run_dir import trust as trust
from paceline.reporting.report import report as report
from paceline.script.run import run as run
from paceline.spec import RunSpec as RunSpec
from paceline.spec import load as load
from paceline.submitting.submit import submit as submit
from paceline.sweeping.result import Sweep as Sweep
from paceline.sweeping.sweep import sweep as sweep
from paceline.training.run import RunResult as RunResult
from paceline.using.export import export as export
from paceline.using.trained import open as open
from paceline.verbs import resume as resume
from paceline.verbs import train as train
from paceline.workload import Workload as Workload
from paceline.workloads.lm.sample import sample as sample

__version__: str
