"""Devices with source and date, and clusters made of them.

Imports errors, io.
"""
