"""Run folders made readable: a terminal table, one self-contained HTML page for a run, one that
compares several.

This package reads the plain files of a run folder and nothing else, so a report can be written on a
machine that never trained anything, and for a run that is still going.
"""
