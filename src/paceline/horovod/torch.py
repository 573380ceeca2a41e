"""The same names, for those who replace `horovod` by `paceline.horovod` in `import horovod.torch as hvd`."""

from paceline.horovod import *  # noqa: F403
