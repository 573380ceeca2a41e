"""Topic models, as their users import them: the public names of `paceline.workloads.topics`.

import paceline.topics as pt
model = pt.fit("counts.npz", k=20)
model.L, model.F, model.top_terms()
"""

from paceline.workloads.topics import __all__ as __all__
from paceline.workloads.topics import __dir__ as __dir__
from paceline.workloads.topics import __getattr__ as __getattr__
