from paceline.workloads.topics import *  # noqa: F403
