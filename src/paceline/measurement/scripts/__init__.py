"""Measuring a command as it is: hooks in its processes note the steps, and the rest is as for our own runs"""
