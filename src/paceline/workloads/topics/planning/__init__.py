"""A topic model as a plan sees it: its counts, where they lie, and what a pass over them costs."""

from paceline.workloads.topics.planning.subject import subject as subject
