"""The verb `doctor`: does this machine, or this job of several, do what a run will take for granted?"""
