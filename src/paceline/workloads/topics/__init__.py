"""Topic models: counts of terms in documents as mixtures of a few topics.

import paceline.topics as pt
model = pt.fit("counts.npz", k=20)
model.L, model.F, model.top_terms()
"""

from paceline.config.registry import Verb, WorkloadEntry
from paceline.lazy import attach

__getattr__, __dir__, __all__ = attach(__name__, __file__)
ENTRY = WorkloadEntry(
    run="paceline.workloads.topics.workload:Topics",
    model="paceline.workloads.topics.sections:TopicsModel",
    data="paceline.workloads.topics.sections:TopicsData",
    subject="paceline.workloads.topics.planning:build_topics_cost_model",
    batched=False,
    use="",
    new_inputs='paceline.topics.TopicFit.load("{run}/model.safetensors").transform("counts.npz")',
    verbs={
        "topics": Verb(
            "topics of word counts or texts, with pictures and a page",
            "paceline.workloads.topics.command:add_topics_arguments",
            "paceline.workloads.topics.command:run_topics",
            "paceline topics counts.npz -k 20 --out runs/fit",
        )
    },
)
